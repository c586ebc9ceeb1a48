"""Rules for brokers' addresses and ports that hold whatever the broker's name is.

A lookup worker applies them to each target that a client or a broker names (lookup.targets.rules), and a forwarder once
more to the addresses that a lookup worker answered (proxy.runtime.network.dial_check): a lookup worker that was taken
over must not make forwarders dial what no broker can be.

Whatever the operator allows, no broker is at a link-local, reserved or unspecified address, or where clouds tell
machines their secrets. At the machine's own addresses (loopback) other services listen, which trust any local client:
they are allowed only where brokers are there, or the operator names them.
"""

import ipaddress
from collections.abc import Collection

from proto.addresses import HostPort
from proxy.common.errors import ProxyError
from proxy.config.types import Brokers

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
PULSAR_PORTS = frozenset({6650, 6651})
"""Of further targets, where the operator names no ports."""
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class TargetDenied(ProxyError):
    """A denial. ``reason``: a short stable name for metrics. The text is for the log, never for the client."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class DialRules:
    """The rules for ports and addresses, compiled from the configuration.

    ``own_ports``, ``any_at_loopback``: of the brokers of ``brokers.service_url``, as DNS has found them.
    """

    def __init__(self, config: Brokers) -> None:
        self._ports = frozenset(config.allowed_ports)
        self._through_proxy = config.through_proxy
        self.further_ports = self._ports or PULSAR_PORTS
        self.networks: list[Network] = [
            ipaddress.ip_network(network) for network in config.allowed_addresses if network != "*"
        ]
        self.has_further_targets = bool(config.allowed_hosts or config.allowed_addresses)

    def allows_port(self, port: int, own_ports: Collection[int]) -> bool:
        """Return True if any broker may be dialled at a port. The ports of another proxy are not brokers'."""
        may_be_own = not self._through_proxy and self.is_broker_port(port, own_ports)
        return may_be_own or ((self.has_further_targets or self._through_proxy) and port in self.further_ports)

    def is_broker_port(self, port: int, own_ports: Collection[int]) -> bool:
        """Return True if brokers of the URL are at a port; at any other port of their machines anything may listen."""
        return port in own_ports or port in self._ports

    def check_port(self, broker: HostPort, own_ports: Collection[int]) -> None:
        """Raise TargetDenied where no broker may be dialled at a port."""
        if not self.allows_port(broker.port, own_ports):
            raise TargetDenied("port", port_denied(broker))

    @staticmethod
    def check_not_forbidden(broker: HostPort, text: str) -> None:
        """Raise TargetDenied where no broker can be at an address, whatever the operator allows."""
        reason = forbidden_reason(effective_address(text))
        if reason is not None:
            raise TargetDenied(reason, f"{broker} is at {text}, which is never allowed")

    def is_other_loopback(self, text: str) -> bool:
        """Return True for a loopback address that no network of only such addresses has, of the operator's."""
        address = effective_address(text)
        named = any(address in network and network.is_loopback for network in self.networks)
        return address.is_loopback and not named

    def check_loopback(self, broker: HostPort, text: str, *, any_at_loopback: bool) -> None:
        """Raise TargetDenied for a loopback address, unless the operator names it or brokers are at such addresses."""
        if self.is_other_loopback(text) and not any_at_loopback:
            detail = "on the proxy's own machine, where no broker of brokers.service_url is"
            where = f"{broker} is at {text}, {detail}"
            raise TargetDenied("loopback", f"{where}, and brokers.allowed_addresses does not name it")


def port_denied(broker: HostPort) -> str:
    """Say why a broker's port is denied, for the log."""
    return (
        f"{broker}: its port is neither in brokers.allowed_ports, nor that of a broker of brokers.service_url, "
        "nor paired with such a port in brokers.port_pairs (brokers' ports without and with TLS)"
    )


def effective_address(text: str) -> Address:
    """Return the address that is reached by dialling one: IPv4 may be embedded in IPv6.

    Forms: mapped (RFC 4291, 2.5.5.2), NAT64 (RFC 6052, 2.1), 6to4 (RFC 3056), Teredo (RFC 4380). What holds for the one
    must hold for the other.
    """
    address = ipaddress.ip_address(text.partition("%")[0])  # a scope names an interface
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    teredo = address.teredo
    return address.ipv4_mapped or address.sixtofour or (address if teredo is None else teredo[1])


def forbidden_reason(address: Address) -> str | None:
    """Return why no broker can be at an address, as a short stable name; None where one can."""
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
