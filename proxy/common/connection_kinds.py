"""Kinds of a client's connection, as operators see them (`connections`, `disconnect`, `top`)."""

SPLICED = "spliced"
COPIED = "copied"
KERNEL_TLS = "kernel_tls"
WEBSOCKET = "websocket"
"""A relay that an HTTP worker has passed on, whichever way its bytes are moved."""
LOOKUP = "lookup"
HANDSHAKE = "handshake"
"""Before authentication, or until the broker is reached."""

KINDS = (SPLICED, COPIED, KERNEL_TLS, WEBSOCKET, LOOKUP, HANDSHAKE)
