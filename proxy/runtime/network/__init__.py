"""Connections to brokers: TCP, TLS, the Pulsar handshake."""
