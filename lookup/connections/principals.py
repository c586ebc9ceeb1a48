"""Principals on whose behalf brokers are asked: each has its own connections."""

from dataclasses import dataclass
from weakref import WeakValueDictionary

from proto.connect_rules import OriginalCredentials


@dataclass(slots=True, eq=False, weakref_slot=True)
class LookupPrincipal:
    """Principal of a connection to a broker, as its handshake names it, with forwarded credentials if there are any.

    ``method``: by which it was authenticated; empty: unknown. ``expires_at_unix_ms``: when these credentials end, by
    the last word on it; 0: never, or there are none.

    LookupPrincipals keeps one object for each, so that dictionaries compare identities instead of contents.
    """

    name: str
    credentials: OriginalCredentials | None = None
    method: str = ""
    expires_at_unix_ms: int = 0


class LookupPrincipals:
    """Registry of all principals in use: one object for each name and credentials."""

    def __init__(self) -> None:
        self._principals: WeakValueDictionary[tuple[str, OriginalCredentials | None, str], LookupPrincipal] = (
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
        key = name, credentials, method
        principal = self._principals.get(key)
        if principal is None:
            principal = self._principals[key] = LookupPrincipal(*key)
        principal.expires_at_unix_ms = expires_at_unix_ms
        return principal
