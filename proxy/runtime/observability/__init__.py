"""Logs and metrics of a process of the cluster."""
