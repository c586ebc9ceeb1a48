"""Relay targets: how their names are resolved, and which of them are allowed."""
