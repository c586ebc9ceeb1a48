"""Checks for listeners: two of one configuration at overlapping addresses, and connections to one of the own.

To bind both succeeds (SO_REUSEADDR); the second one's ``listen`` fails, which is when the cluster has already started.
"""

import ipaddress
from collections.abc import Iterable, Iterator
from itertools import combinations
from pathlib import Path

from proto.addresses import HostPort, parse_host_port
from proxy.common.errors import ConfigError
from proxy.common.networks import is_loopback
from proxy.config.types import Config

_BINDV6ONLY = Path("/proc/sys/net/ipv6/bindv6only")
_LOOPBACK = frozenset({"127.0.0.1", "::1"})

Bind = tuple[str, str]
"""A key of the configuration, and its ``address:port``."""


def check_binds(config: Config) -> None:
    """Refuse two addresses that overlap. Raises ConfigError."""
    for (first_key, first), (key, bind) in combinations(all_binds(config), 2):
        if overlap(first, bind):
            raise ConfigError(f"{key}: {bind} is taken by {first_key} ({first}); give it a port of its own")


def listener_binds(config: Config) -> tuple[str, ...]:
    """Return the addresses at which clients come in."""
    return tuple(listener.bind for listener in config.listener)


def is_own_listener(binds: Iterable[str], peer: HostPort, own_host: str) -> bool:
    """Return whether the peer of a connection is one of these listeners; ``own_host``: the connection's own address.

    A connection to an address of this machine comes from that address, or from another one of the loopback.
    """
    local = peer.host == own_host or is_loopback(peer.host)
    return local and any(overlap(bind, str(peer)) for bind in binds)


def keys_of_overlapping_binds(before: Config, after: Config) -> list[str]:
    """Find the keys whose new address overlaps one that a running cluster listens at."""
    old = [bind for _key, bind in all_binds(before)]
    new = [(key, bind) for key, bind in all_binds(after) if bind not in old]
    return [key for key, bind in new if any(overlap(bind, one) for one in old)]


def overlap(first: str, second: str) -> bool:
    """Return True if two addresses conflict: equal ports, and equal hosts or a wildcard that covers the other."""
    one, other = parse_host_port(first), parse_host_port(second)
    if one.port != other.port:
        return False
    ones, others = _hosts(one.host), _hosts(other.host)
    return bool(ones & others) or _covers(ones, others) or _covers(others, ones)


def all_binds(config: Config) -> Iterator[Bind]:
    """Yield all addresses that a configuration binds."""
    for index, listener in enumerate(config.listener):
        yield f"listener[{index}].bind", listener.bind
    for index, http_listener in enumerate(config.http_listener):
        yield f"http_listener[{index}].bind", http_listener.bind
    yield "admin.bind", config.admin.bind


def _hosts(host: str) -> frozenset[str]:
    """Return a host's addresses as text; a name other than ``localhost`` stays as it is, since it is not resolved."""
    if host.lower() == "localhost":
        return _LOOPBACK
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return frozenset({host.lower()})
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return frozenset({str(address)})


def _covers(wildcard: frozenset[str], hosts: frozenset[str]) -> bool:
    """Return True if one side is a wildcard of a family that the other has an address of. A name may have any."""
    versions = {_version(host) for host in hosts}
    if "0.0.0.0" in wildcard:  # noqa: S104 -- compared, not bound
        return bool(versions & {4, None})
    return "::" in wildcard and (bool(versions & {6, None}) or _is_dual_stack())


def _version(host: str) -> int | None:
    try:
        return ipaddress.ip_address(host).version
    except ValueError:
        return None


def _is_dual_stack() -> bool:
    """Return True if ``[::]`` accepts IPv4 connections, too (net.ipv6.bindv6only is 0, the default)."""
    try:
        return _BINDV6ONLY.read_text(encoding="ascii").strip() != "1"
    except OSError:  # no IPv6 here
        return True
