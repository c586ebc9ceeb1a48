"""The running cluster: command line, configuration, supervisor, the runtime that workers share, and the forwarder."""

__version__ = "0.1.0"
