"""Errors that the proxy and the analytics both raise."""


class ConfigError(Exception):
    """A configuration that cannot be used; its text names the key and says what is wrong with it."""
