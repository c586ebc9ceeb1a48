"""The running cluster: command line, configuration, supervisor, the runtime that workers share, and the forwarder."""

__version__ = "0.1.0"

SERVER_VERSION = f"pulsar-trio-proxy-{__version__}"
"""What clients and brokers are told."""
