"""Principals on whose behalf brokers are asked: each has its own connections."""

from dataclasses import dataclass
from weakref import WeakValueDictionary

from proto.connect_rules import OriginalCredentials


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LookupPrincipal:
    """Principal of a connection to a broker, as its handshake names it, with forwarded credentials if there are any.

    ``expires_at_unix_ms``: when these credentials end; 0: never, or there are none. ``method``: by which it was
    authenticated; empty: unknown.

    LookupPrincipals keeps one object for each, so that dictionaries compare identities instead of contents.
    """

    name: str
    credentials: OriginalCredentials | None = None
    expires_at_unix_ms: int = 0
    method: str = ""


class LookupPrincipals:
    """Registry of all principals in use: one object for each name and credentials."""

    def __init__(self) -> None:
        self._principals: WeakValueDictionary[tuple[str, OriginalCredentials | None, int, str], LookupPrincipal] = (
            WeakValueDictionary()
        )

    def get_principal(
        self,
        name: str,
        credentials: OriginalCredentials | None = None,
        expires_at_unix_ms: int = 0,
        method: str = "",
    ) -> LookupPrincipal:
        """Return the one object for this name, these credentials and this method."""
        key = name, credentials, expires_at_unix_ms, method
        principal = self._principals.get(key)
        if principal is None:
            principal = self._principals[key] = LookupPrincipal(*key)
        return principal
