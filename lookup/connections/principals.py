"""Principals on whose behalf brokers are asked: each has its own connections."""

from dataclasses import dataclass
from weakref import WeakValueDictionary, finalize

from lookup.errors import LookupWorkerError
from proto.connect_rules import PROXIES_MAX, OriginalCredentials
from proxy.runtime.fairness.byte_budget import ByteBudget

CREDENTIALS_BYTES_MAX = 64 * 1024 * 1024
"""Bound of the forwarded credentials of all principals in use. A sound forwarder sends what fits a client's frame, a
captured one what fits an RPC frame.
"""


class CredentialsRefused(LookupWorkerError):
    """Forwarded credentials beyond the bound."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class LookupPrincipal:
    """Principal of a connection to a broker, as its handshake names it, with forwarded credentials if there are any.

    ``method``: by which it was authenticated; empty: unknown. ``expires_at_unix_ms``: when these credentials end, by
    the last word on it; 0: never, or there are none. ``proxies``: how many are before this one.

    LookupPrincipals keeps one object for each, so that dictionaries compare identities instead of contents.
    """

    name: str
    credentials: OriginalCredentials | None = None
    method: str = ""
    proxies: int = 0
    expires_at_unix_ms: int = 0


_Key = tuple[str, OriginalCredentials | None, str, int]


class LookupPrincipals:
    """Registry of all principals in use: one object for each name and credentials.

    Their credentials have at most CREDENTIALS_BYTES_MAX bytes, shared fairly between names.
    """

    def __init__(self) -> None:
        self._budget = ByteBudget(CREDENTIALS_BYTES_MAX)
        self._principals: WeakValueDictionary[_Key, LookupPrincipal] = WeakValueDictionary()

    def get_principal(
        self,
        name: str,
        credentials: OriginalCredentials | None = None,
        expires_at_unix_ms: int = 0,
        method: str = "",
        proxies: int = 0,
    ) -> LookupPrincipal:
        """Return the one object for these facts. Raises CredentialsRefused."""
        key = name, credentials, method, min(proxies, PROXIES_MAX)
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
