"""Relays: bytes between a client and its broker, through the kernel or through user space."""
