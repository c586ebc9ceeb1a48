"""A Java proxy's settings, with its defaults, as the rest of the import asks for them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

PROVIDER_PREFIX = "AuthenticationProvider"


class Lost(NamedTuple):
    """A value that is not carried over, and why."""

    reason: str


class Needless(NamedTuple):
    """A value that needs nothing here, and why."""

    reason: str


@dataclass(frozen=True)
class Java:
    """What a proxy.conf sets, and the defaults of its release (``4`` or ``5``) for all else."""

    values: Mapping[str, str]
    defaults: Mapping[str, str]

    def get(self, name: str) -> str:
        """Return a key's value; where it is unset or blank, Java's default."""
        return self.given(name) or self.defaults[name]

    def given(self, name: str) -> str:
        """Return a key's value; empty where it is unset or blank."""
        return self.values.get(name, "").strip()

    def flag(self, name: str) -> bool:
        """Return whether a key is true."""
        return self.get(name).lower() == "true"

    def items(self, name: str) -> list[str]:
        """Return the entries of a list, which Java separates by commas."""
        return split_list(self.get(name))

    def is_default(self, name: str) -> bool:
        """Return whether a key has the value that it would have without its line."""
        value, default = self.given(name), self.defaults[name]
        return not value or value == default or (value.lower() == default.lower() and default in {"true", "false"})

    def port(self, name: str) -> str:
        """Return a port; empty where Java has none there: a blank line removes a port that has a default."""
        return self.given(name) if name in self.values else self.defaults[name]

    def bind(self, port: str | int) -> str:
        """Return ``address:port`` with ``bindAddress``."""
        host = self.get("bindAddress")
        return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"

    def providers(self) -> list[str]:
        """Return the classes of ``authenticationProviders``; none without authentication."""
        return self.items("authenticationProviders") if self.flag("authenticationEnabled") else []

    def missing(self, condition: str) -> str:
        """Return why keys that need a flag, a port or a provider have no effect in Java; empty: they have."""
        if condition in _PROVIDER_NAMES:
            if any(simple_name(one) == PROVIDER_PREFIX + condition for one in self.providers()):
                return ""
            if not self.flag("authenticationEnabled"):
                return "authenticationEnabled is false"
            return f"{PROVIDER_PREFIX}{condition} is not among authenticationProviders"
        if ports := _PORTS.get(condition):
            return "" if any(map(self.port, ports)) else " and ".join(f"{port} is not set" for port in ports)
        return "" if not condition or self.flag(condition) else f"{condition} is false"


TLS_PORT = "a port for TLS"
HTTP_PORT = "a port for HTTP"
_PORTS = {
    "servicePortTls": ("servicePortTls",),
    "webServicePortTls": ("webServicePortTls",),
    TLS_PORT: ("servicePortTls", "webServicePortTls"),
    HTTP_PORT: ("webServicePort", "webServicePortTls"),
}
"""Conditions that any of these ports meets."""
_PROVIDER_NAMES = frozenset({"Token", "Tls", "Basic", "Sasl", "OpenID"})


def simple_name(java_class: str) -> str:
    """Return a Java class's name without its package."""
    return java_class.rpartition(".")[2]


def split_list(text: str) -> list[str]:
    """Split a list that Java separates by commas."""
    return [entry.strip() for entry in text.split(",") if entry.strip()]
