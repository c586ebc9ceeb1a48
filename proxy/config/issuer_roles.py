"""The roles that each OpenID Connect issuer may sign (``authentication.oidc.allowed_roles``); no role is of two.

An entry is a role, or the beginning of roles with ``*`` behind it: so two entries show whether a role fits both, which
two regular expressions would not.
"""

from collections.abc import Iterable
from itertools import combinations, product

from proxy.common.errors import ConfigError
from proxy.common.suggestions import did_you_mean, quote_name
from proxy.config.types import OidcAuthentication

ANY_ROLE = "*"
SERVICE_ACCOUNT = "system:serviceaccount:"
"""What the subject of each token of Kubernetes begins with."""

_KEY = "authentication.oidc.allowed_roles"
KUBERNETES = "authentication.oidc.kubernetes"


def fits_entry(role: str, entries: Iterable[str]) -> bool:
    """Return True if a role fits at least one of the entries."""
    return any(role.startswith(entry[:-1]) if entry.endswith(ANY_ROLE) else role == entry for entry in entries)


def check_allowed_roles(oidc: OidcAuthentication) -> None:
    """Refuse several issuers without a list for each, and a role that two of them may sign. Raises ConfigError."""
    issuers = dict.fromkeys(oidc.allowed_issuers)
    for issuer, entries in oidc.allowed_roles.items():
        if issuer not in issuers:
            meant = did_you_mean(issuer, issuers)
            raise ConfigError(f"{_KEY}: {quote_name(issuer)} is none of allowed_issuers{meant}")
        check_entries(_KEY, entries)
    lists = dict(oidc.allowed_roles)
    if oidc.kubernetes is not None:
        lists[KUBERNETES] = oidc.kubernetes.allowed_roles
        check_entries(f"{KUBERNETES}.allowed_roles", lists[KUBERNETES], SERVICE_ACCOUNT)
    missing = next((issuer for issuer in issuers if issuer not in oidc.allowed_roles), None)
    if missing is not None and (len(issuers) > 1 or oidc.kubernetes is not None):
        raise ConfigError(
            f"{_KEY}: {quote_name(missing)} has no entry: of several issuers, each needs the list of the roles "
            f'that its tokens may name, e.g. ["admin", "app-{ANY_ROLE}"]; without it, it could sign any role, '
            "those of the others too"
        )
    for (one, ones), (other, others) in combinations(lists.items(), 2):
        shared = next((pair for pair in product(ones, others) if _overlap(*pair)), None)
        if shared is not None:
            raise ConfigError(
                f"{_KEY}: {quote_name(one)} and {quote_name(other)} could sign the same role, by "
                f"{quote_name(shared[0])} and {quote_name(shared[1])}; a role belongs to one issuer"
            )


def check_entries(key: str, entries: Iterable[str], beginning: str = "") -> None:
    """Refuse an entry with a ``*`` before its end, or without the beginning. Raises ConfigError with the key."""
    for entry in entries:
        if ANY_ROLE in entry[:-1]:
            raise ConfigError(f'{key}: {quote_name(entry)} has a "{ANY_ROLE}" that is not its last character')
        if not entry.startswith(beginning):
            raise ConfigError(f'{key}: {quote_name(entry)} does not begin with "{beginning}"')


def _overlap(one: str, other: str) -> bool:
    """Return True if a role fits both entries."""
    return fits_entry(one.removesuffix(ANY_ROLE), (other,)) or fits_entry(other.removesuffix(ANY_ROLE), (one,))
