"""Where a client may be relayed to: the rules for ``proxy_to_broker_url`` (PIP-1, step 1).

A client names the broker it wants, so this is the guard against using the proxy to reach anything else. Checked in the
Java proxy's order: port, host, then every address that the host resolves to. The caller dials exactly an address that
was checked, so no second answer of a name server can lead elsewhere.
"""

import fnmatch
import ipaddress
import itertools
import re
from dataclasses import dataclass

from proto.addresses import AddressInvalid, HostPort, parse_host_port, parse_service_url
from proxy.config.types import Brokers
from proxy.runtime.resolve import ResolutionFailed, new_resolver_threads, resolve
from proxy.runtime.tasks import seconds

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class TargetDenied(Exception):
    """No. ``reason`` is a short stable name for metrics; the text is for the log, never for the client."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Target:
    """A broker that may be dialled, at these addresses and no others."""

    broker: HostPort
    addresses: tuple[str, ...]


class TargetRules:
    """The operator's rules, ready for use."""

    def __init__(self, config: Brokers) -> None:
        self._ports = frozenset(config.allowed_ports)
        self._hosts = [re.compile(fnmatch.translate(pattern.lower())) for pattern in config.allowed_hosts]
        self._any_address = "*" in config.allowed_addresses
        self._networks: list[Network] = [
            ipaddress.ip_network(network) for network in config.allowed_addresses if network != "*"
        ]
        self._threads = new_resolver_threads()
        self._resolve_timeout_s = seconds(config.connect_timeout_ms)
        self._proxies = itertools.cycle(parse_service_url(config.service_url)) if config.through_proxy else None

    async def check(self, text: str) -> Target:
        """Where to dial for the target that a client or a redirecting broker names; raises TargetDenied.

        With ``brokers.through_proxy`` that is a proxy of the operator's, which checks the target's addresses itself.
        """
        try:
            broker = parse_host_port(text)
        except AddressInvalid as error:
            raise TargetDenied("malformed", str(error)) from None
        self.check_broker(broker)
        if self._proxies is not None:
            broker = next(self._proxies)
        try:
            addresses = await resolve(broker.host, timeout_s=self._resolve_timeout_s, threads=self._threads)
        except ResolutionFailed as error:
            raise TargetDenied("unknown_host", str(error)) from None
        if self._proxies is not None:
            return Target(broker, addresses)
        allowed = tuple(address for address in addresses if self._address_allowed(address))
        if not allowed:
            detail = f"{broker} is at {', '.join(addresses)}, outside brokers.allowed_addresses"
            raise TargetDenied("address", detail)
        return Target(broker, allowed)

    def check_broker(self, broker: HostPort) -> None:
        """The rules that need no name server; raises TargetDenied."""
        if broker.port not in self._ports:
            raise TargetDenied("port", f"{broker}: its port is not in brokers.allowed_ports")
        if not any(pattern.match(broker.host.lower()) for pattern in self._hosts):
            raise TargetDenied("host", f"{broker}: its host is not in brokers.allowed_hosts")

    def _address_allowed(self, text: str) -> bool:
        if self._any_address:
            return True
        address: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.ip_address(text.partition("%")[0])
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            # ::ffff:10.0.0.1 reaches 10.0.0.1: the rules for the one must hold for the other.
            address = address.ipv4_mapped
        return any(address in network for network in self._networks)
