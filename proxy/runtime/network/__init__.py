"""Connections to brokers: TCP, TLS, the handshake of a link."""
