"""The entries of ``authentication.proxy_roles``: a role by any method, or by one alone (``tls:proxy-a``).

A role with a colon of its own (``system:serviceaccount:ns:proxy``) is written behind a method or ``*``, so that an
entry can be read in one way only, and a misspelt method is a mistake instead of a role that no client has.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from proxy.common.errors import ConfigError
from proxy.common.suggestions import closest_name
from proxy.config.issuer_roles import ANY_ROLE, KUBERNETES, fits_entry
from proxy.config.types import Authentication

ANY_METHOD = "*"

ALL_METHODS = ("token", "tls", "basic", "SCRAM-SHA-256", "SCRAM-SHA-512", "sasl", "none")
"""The methods that the proxy's own providers judge, and that of clients that bring nothing."""


@dataclass(frozen=True, slots=True)
class ProxyRole:
    """A role that is a proxy's when it was authenticated by ``method``, which may be ANY_METHOD."""

    method: str
    role: str

    @classmethod
    def parse(cls, entry: str) -> "ProxyRole":
        """Read one entry: what stands before its first colon is the method."""
        method, colon, role = entry.partition(":")
        return cls(method, role) if colon else cls(ANY_METHOD, entry)


class ProxyRoles:
    """All entries of ``authentication.proxy_roles``."""

    def __init__(self, entries: Iterable[str]) -> None:
        self._entries = frozenset(map(ProxyRole.parse, entries))
        self._names = frozenset(entry.role for entry in self._entries)

    def includes(self, role: str, method: str) -> bool:
        """Return True if a client with this role, authenticated by this method, is a proxy."""
        return ProxyRole(ANY_METHOD, role) in self._entries or ProxyRole(method, role) in self._entries

    def contains_role(self, role: str) -> bool:
        """Return True if a role is a proxy's by at least one method."""
        return role in self._names


def check_proxy_roles(authentication: Authentication, methods: Collection[str]) -> None:
    """Refuse entries that no client could have by the methods that have a provider. Raises ConfigError."""
    for entry in authentication.proxy_roles:
        parsed = ProxyRole.parse(entry)
        if not parsed.role.strip():
            raise ConfigError(f'authentication.proxy_roles: "{entry}" names no role')
        if parsed.method != ANY_METHOD and parsed.method not in methods:
            meant = closest_name(parsed.method, methods)
            hint = "" if meant is None else f'did you mean "{meant}:{parsed.role}"? '
            raise ConfigError(
                f'authentication.proxy_roles: "{entry}" begins with "{parsed.method}", a method that has no provider '
                f"here (there are: {', '.join(sorted(methods))}); {hint}a role that has a colon itself, whatever the "
                f'method, is "{ANY_METHOD}:{entry}"'
            )
        if parsed.method in {ANY_METHOD, "token"}:
            _check_issuer(entry, parsed.role, authentication)


def _check_issuer(entry: str, role: str, authentication: Authentication) -> None:
    """Refuse a proxy role by tokens that an issuer could sign though no list names it: by a ``*``, or, without a list,
    beside the keys of ``authentication.token``. Raises ConfigError.
    """
    oidc = authentication.oidc
    if oidc is None:
        return
    beside_keys = {} if authentication.token is None else dict.fromkeys(oidc.allowed_issuers, (ANY_ROLE,))
    lists = dict(oidc.allowed_roles or beside_keys)
    if oidc.kubernetes is not None:
        lists[KUBERNETES] = oidc.kubernetes.allowed_roles
    for issuer, roles in lists.items():
        key = f"{KUBERNETES}.allowed_roles" if issuer == KUBERNETES else "authentication.oidc.allowed_roles"
        fitting = [one for one in roles if fits_entry(role, (one,))]
        if fitting and all(one.endswith(ANY_ROLE) for one in fitting):
            raise ConfigError(
                f'authentication.proxy_roles: "{entry}" could be signed by {issuer}, for which '
                f'{key} does not name "{role}" (but "{fitting[0]}"); name it there for the '
                f"issuer of the proxies' tokens, give other issuers lists that it does not fit, or bind it to another "
                f'method ("tls:{role}")'
            )


def configured_methods(authentication: Authentication) -> frozenset[str]:
    """Return the methods of the configured built-in providers; those of plugins are known once these are loaded."""
    methods = {
        "token": authentication.token or authentication.oidc,
        "tls": authentication.tls,
        "basic": authentication.basic,
        "SCRAM-SHA-256": authentication.scram,
        "SCRAM-SHA-512": authentication.scram,
        "sasl": authentication.sasl,
    }
    return frozenset(method for method, provider in methods.items() if provider is not None)
