"""Interfaces of operators and of the admin worker: control.sock, reports, status."""
