"""Principals on whose behalf brokers are asked: each has its own connections."""

from dataclasses import dataclass
from weakref import WeakValueDictionary, finalize

from proto.connect_rules import OriginalCredentials
from proxy.runtime.fairness.byte_budget import ByteBudget

CREDENTIALS_BYTES_MAX = 64 * 1024 * 1024
"""Bound of the forwarded credentials of all principals in use. A sound forwarder sends what fits a client's frame, a
captured one what fits an RPC frame.
"""


class CredentialsRefused(Exception):
    """Forwarded credentials beyond the bound."""


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
    """Registry of all principals in use: one object for each name and credentials.

    Their credentials have at most CREDENTIALS_BYTES_MAX bytes, shared fairly between names.
    """

    def __init__(self) -> None:
        self._budget = ByteBudget(CREDENTIALS_BYTES_MAX)
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
        """Return the one object for this name, these credentials and this method. Raises CredentialsRefused."""
        key = name, credentials, method
        principal = self._principals.get(key)
        if principal is None:
            size_bytes = len(credentials.method) + len(credentials.data) if credentials else 0
            if not self._budget.reserve_bytes(name, size_bytes):
                raise CredentialsRefused
            principal = self._principals[key] = LookupPrincipal(*key)
            if size_bytes:
                finalize(principal, self._budget.release_bytes, name, size_bytes).atexit = False
        principal.expires_at_unix_ms = expires_at_unix_ms
        return principal
