"""The brokers of ``brokers.service_url`` as relay targets: allowed without a further rule of the operator.

A target is one of them by its name (it is a host of the URL, or below one), or by its address (a host of the URL is
there). Whole names are compared, as DNS has found them: where ``broker`` of the URL is found as
``broker.ns.svc.cluster.local`` by a search domain, ``evil.broker``, which DNS may find in a top-level domain of that
name, is not below it.
"""

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from proto.addresses import HostPort

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

LABELS_MIN = 3
"""Of a host below which names are its brokers', too. Fewer make a top-level domain, a public suffix (``co.uk``) or a
domain as it is registered, below which others than the brokers have names as well.
"""


@dataclass(frozen=True, slots=True)
class ConfiguredBrokers:
    """Snapshot of the configured brokers; ``configured_brokers`` makes one.

    ``hosts``: as the URL has them, in lower case; ``names``: the whole names that were found for them.
    """

    hosts: frozenset[str]
    names: frozenset[str]
    ports: frozenset[int]
    by_address: Mapping[Address, HostPort]
    by_address_and_port: Mapping[tuple[Address, int], HostPort]

    def has_host(self, host: str) -> bool:
        """Return True if the URL has this very host, which leads wherever the operator's own configuration leads."""
        return host.lower() in self.hosts

    def has_name(self, name: str) -> bool:
        """Return True if a whole name (empty: unknown) is one of theirs, or below one."""
        if name in self.names:
            return True
        labels = name.split(".")
        parents = (".".join(labels[start:]) for start in range(1, len(labels) - LABELS_MIN + 1))
        return any(parent in self.names for parent in parents)

    def broker_at(self, address: str, port: int) -> HostPort | None:
        """Return the broker at an address, under the operator's name for it; of several the one with this port."""
        exact = exact_address(address)
        return self.by_address_and_port.get((exact, port)) or self.by_address.get(exact)

    @property
    def any_at_loopback(self) -> bool:
        """Return True if one of them is at a loopback address."""
        return any(address.is_loopback for address in self.by_address)


def configured_brokers(
    hosts: Iterable[HostPort], names: Iterable[str], endpoints: Iterable[tuple[HostPort, tuple[str, ...]]]
) -> ConfiguredBrokers:
    """Build a snapshot from the hosts of a URL, their whole names, and the brokers found with
    their addresses.
    """
    by_address: dict[Address, HostPort] = {}
    by_address_and_port: dict[tuple[Address, int], HostPort] = {}
    ports = set()
    listed = tuple(hosts)
    for endpoint, addresses in endpoints:
        ports.add(endpoint.port)
        for address in map(exact_address, addresses):
            by_address.setdefault(address, endpoint)
            by_address_and_port.setdefault((address, endpoint.port), endpoint)
    return ConfiguredBrokers(
        hosts=frozenset(host.host.lower() for host in listed),
        names=frozenset(name for name in names if name),
        ports=frozenset(ports | {host.port for host in listed}),
        by_address=by_address,
        by_address_and_port=by_address_and_port,
    )


def exact_address(text: str) -> Address:
    """Return an address without its scope, and as IPv4 where the kernel dials IPv4 (``::ffff:10.0.0.1``).

    The IPv4 address within a tunnel's (6to4, Teredo) is not taken: there, routers between decide which machine answers.
    """
    address = ipaddress.ip_address(text.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
