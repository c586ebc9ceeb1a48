"""Checks of `[[quota]]`: combinations of keys that would have no effect, or not the one that they seem to have."""

from collections.abc import Sequence

from proxy.common.errors import ConfigError
from proxy.config.issuer_roles import check_entries
from proxy.config.types import Quota

_CONNECTION_LIMITS = ("max_connections", "new_connections_per_second")
_LIMITS = (*_CONNECTION_LIMITS, "lookups_per_second")


def check_quotas(quotas: Sequence[Quota]) -> None:
    """Check all quotas. Raises ConfigError, which names the key."""
    for index, quota in enumerate(quotas):
        _check_quota(f"quota[{index}]", quota)


def _check_quota(key: str, quota: Quota) -> None:
    limits = [limit for limit in _LIMITS if getattr(quota, limit)]
    if not limits:
        raise ConfigError(f"{key}: it limits nothing; set one of {', '.join(_LIMITS)}")
    check_entries(f"{key}.principals", quota.principals)
    if (quota.by == "tenant") is not bool(quota.tenant):
        raise ConfigError(f'{key}.tenant: it belongs to by = "tenant", which needs it')
    if quota.by == "address":
        if quota.principals:
            raise ConfigError(f'{key}.principals: by = "address" is for all clients, before any has authenticated')
        if limits != ["new_connections_per_second"]:
            raise ConfigError(f'{key}: by = "address" limits new_connections_per_second alone')
    if quota.by == "tenant":
        _check_tenant(key, quota, limits)


def _check_tenant(key: str, quota: Quota, limits: Sequence[str]) -> None:
    of_connections = [limit for limit in limits if limit in _CONNECTION_LIMITS]
    if "*" in quota.tenant and quota.tenant != "*":
        raise ConfigError(f"{key}.tenant: a name, or `*` alone")
    if "/" in quota.tenant:
        raise ConfigError(f"{key}.tenant: a tenant's name has no slash")
    if of_connections and quota.tenant == "*":
        raise ConfigError(
            f"{key}.{of_connections[0]}: which tenant a connection is of, only a table with its name says"
        )
    if of_connections and not quota.principals:
        raise ConfigError(f"{key}.{of_connections[0]}: for a tenant it needs principals, which count together")
    if quota.principals and not of_connections:
        raise ConfigError(f"{key}.principals: a tenant's lookups count for all clients; leave this key out")
