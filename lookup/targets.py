"""Where a client may be relayed to: the rules for ``proxy_to_broker_url`` (PIP-1, step 1).

A client names the broker it wants, so this is the guard against using the proxy to reach anything else. Checked in the
Java proxy's order: port, host, then every address that the host resolves to; each time anew (PIP-307). The caller dials
exactly an address that was checked, so no second answer of a name server can lead elsewhere. What a name resolves to is
kept for its TTL, and may be used for as long again (10 s at most) while it is asked for in the background.

Whatever the operator allows, no broker is at an address that is only of this link, or where clouds tell machines their
secrets, or that is nobody's. The machine's own addresses (loopback) are where other things listen, which trust whoever
reaches them: they are allowed only where brokers are there, or the operator names them.
"""

import fnmatch
import ipaddress
import re
from dataclasses import dataclass

from lookup.brokers import Brokers
from lookup.target_names import ResolvesTargets
from proto.addresses import AddressInvalid, HostPort, PortMissing, parse_host_port
from proxy.config import types
from proxy.runtime.dns import ResolutionFailed

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_METADATA_SERVICES = frozenset(
    ipaddress.ip_address(address)
    for address in (
        "169.254.169.254",  # AWS, Azure, Google, Oracle, OpenStack and others
        "fd00:ec2::254",  # AWS
        "fd20:ce::254",  # Google
        "100.100.100.200",  # Alibaba
        "168.63.129.16",  # Azure's WireServer
        "192.0.0.192",  # Oracle
    )
)
_THIS_NETWORK = ipaddress.IPv4Network("0.0.0.0/8")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


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

    def __init__(self, config: types.Brokers, resolver: ResolvesTargets, brokers: Brokers) -> None:
        self._ports = frozenset(config.allowed_ports)
        self._hosts = [re.compile(fnmatch.translate(pattern.lower())) for pattern in config.allowed_hosts]
        self._any_address = "*" in config.allowed_addresses
        self._networks: list[Network] = [
            ipaddress.ip_network(network) for network in config.allowed_addresses if network != "*"
        ]
        self._resolver = resolver
        self._brokers = brokers
        self._through_proxy = config.through_proxy

    async def check(self, text: str, owner: str = "") -> Target:
        """Where to dial for the target that a client or a redirecting broker names; raises TargetDenied.

        ``owner``: for whom, where it is a client; names are resolved for owners in turn.

        With ``brokers.through_proxy`` that is a proxy of the operator's, which checks the target's addresses itself.
        """
        try:
            broker = parse_host_port(text)
        except PortMissing as error:
            raise TargetDenied("no_port", f"{error}: a target is host:port") from None
        except AddressInvalid as error:
            raise TargetDenied("malformed", str(error)) from None
        self.check_broker(broker)
        if self._through_proxy:
            return await self._proxy()
        try:
            addresses = (await self._resolver.addresses(broker.host, owner=owner)).addresses
        except ResolutionFailed as error:
            raise TargetDenied("unknown_host", str(error)) from None
        denied: TargetDenied | None = None
        allowed = []
        for address in addresses:
            try:
                await self._check_address(broker, address)
            except TargetDenied as error:
                denied = denied or error
            else:
                allowed.append(address)
        if not allowed:
            raise denied or TargetDenied("unknown_host", f"{broker} has no address")
        return Target(broker, tuple(allowed))

    async def _proxy(self) -> Target:
        await self._brokers.any_found()
        proxy = self._brokers.first()
        if proxy is None:
            raise TargetDenied("unknown_host", self._brokers.why_none)
        return Target(HostPort(proxy.host, proxy.port), proxy.addresses)

    def check_broker(self, broker: HostPort) -> None:
        """The rules that need no name server; raises TargetDenied."""
        if broker.port not in self._ports:
            raise TargetDenied("port", f"{broker}: its port is not in brokers.allowed_ports")
        if not any(pattern.match(broker.host.lower()) for pattern in self._hosts):
            raise TargetDenied("host", f"{broker}: its host is not in brokers.allowed_hosts")

    async def _check_address(self, broker: HostPort, text: str) -> None:
        address = reached_by(text)
        where = f"{broker} is at {text}"
        reason = never_allowed(address)
        if reason is not None:
            raise TargetDenied(reason, f"{where}, which is never allowed")
        if not self._any_address and not any(address in network for network in self._networks):
            raise TargetDenied("address", f"{where}, outside brokers.allowed_addresses")
        if address.is_loopback and not await self._loopback_allowed(address):
            detail = "on the proxy's own machine, where no broker of brokers.service_url is"
            raise TargetDenied("loopback", f"{where}, {detail}, and brokers.allowed_addresses does not name it")

    async def _loopback_allowed(self, address: Address) -> bool:
        """Whether the operator names it, by a network of nothing else; or a configured broker is on this machine."""
        if any(address in network and network.is_loopback for network in self._networks):
            return True
        return any(reached_by(known).is_loopback for known in await self._brokers.addresses())


def reached_by(text: str) -> Address:
    """The address that is reached by dialling one: IPv4 may stand within IPv6 (mapped: RFC 4291, 2.5.5.2; NAT64: RFC
    6052, 2.1; 6to4: RFC 3056; Teredo: RFC 4380), and what holds for the one must hold for the other.
    """
    address = ipaddress.ip_address(text.partition("%")[0])  # a scope names an interface
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    teredo = address.teredo
    return address.ipv4_mapped or address.sixtofour or (address if teredo is None else teredo[1])


def never_allowed(address: Address) -> str | None:
    """Why no broker is at an address, a short stable name; None where one may be."""
    if address in _METADATA_SERVICES:
        return "metadata"
    if address.is_loopback:
        return None
    if address.is_link_local:
        return "link_local"
    if address.is_multicast:
        return "multicast"
    if address.is_unspecified or address in _THIS_NETWORK:
        return "unspecified"
    return "reserved" if address.is_reserved else None  # of IPv4 with broadcast
