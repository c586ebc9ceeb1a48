"""Addresses as Pulsar writes them: ``host:port`` targets and ``pulsar://host:port,host:port`` or
``pulsar+ssl://…`` service URLs; and as our configuration does, which knows ``pulsar+srv://name``, too.
"""

import ipaddress
import re
from dataclasses import dataclass

_PORT_MAX = 65535
_CLIENT_PREFIX_BITS = 64
_HOST_MAX = 253  # DNS: RFC 1035, section 2.3.4
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?\Z")
_PORT = re.compile(r"[0-9]{1,5}\Z")
_TLS_SCHEME = "pulsar+ssl"
_SCHEMES = {"pulsar": 6650, _TLS_SCHEME: 6651}
_SRV_SCHEMES = {"pulsar+srv": "_pulsar._tcp", "pulsar+ssl+srv": "_pulsar-ssl._tcp"}
_TLS_URLS = (f"{_TLS_SCHEME}://", f"{_TLS_SCHEME}+srv://")


class AddressInvalid(ValueError):
    """A text is no address; says which and why, fit for an operator and for a client."""


class PortMissing(AddressInvalid):
    """An address would be one, had it a port."""


@dataclass(frozen=True, slots=True)
class HostPort:
    """Where something listens: a name or an IP address (IPv6 without brackets), and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_host_port(text: str, *, default_port: int | None = None) -> HostPort:
    """Parse ``host:port`` or ``[ipv6]:port``; raises AddressInvalid, and of that PortMissing where only it is."""
    host, port_text = _split(text)
    if port_text is None:
        if default_port is None:
            raise PortMissing(f"{_shown(text)} has no port")
        return HostPort(host, default_port)
    if not _PORT.match(port_text) or not 0 < int(port_text) <= _PORT_MAX:
        raise AddressInvalid(f"{_shown(text)} has no valid port")
    return HostPort(host, int(port_text))


def _split(text: str) -> tuple[str, str | None]:
    if text.startswith("["):
        host, bracket, tail = text[1:].partition("]")
        if not bracket or not _is_ipv6(host) or (tail and not tail.startswith(":")):
            raise AddressInvalid(f"{_shown(text)} is not an IPv6 address in brackets")
        return host, tail[1:] if tail else None
    host, colon, port = text.partition(":")
    if len(host) > _HOST_MAX or not _HOST.match(host):
        raise AddressInvalid(f"{_shown(text)} has no valid host name")
    return host, port if colon else None


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.IPv6Address(host).scope_id is None
    except ValueError:
        return False


def _is_ipv4(host: str) -> bool:
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True


def parse_service_url(url: str) -> tuple[HostPort, ...]:
    """Parse ``pulsar://host1:6650,host2:6650`` into its addresses, in order; raises AddressInvalid."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in _SCHEMES:
        raise AddressInvalid(f"{_shown(url)} does not begin with pulsar:// or pulsar+ssl://")
    hosts = rest.rstrip("/").split(",")
    return tuple(parse_host_port(host.strip(), default_port=_SCHEMES[scheme]) for host in hosts)


@dataclass(frozen=True, slots=True)
class BrokerUrl:
    """Where brokers are to be found: the hosts that are listed, or else the names of SRV records (RFC 2782), the first
    of which that has any counts.
    """

    hosts: tuple[HostPort, ...] = ()
    srv_names: tuple[str, ...] = ()


def parse_broker_url(url: str) -> BrokerUrl:
    """Parse what names the brokers: a service URL, or ``pulsar+srv://name`` (or ``pulsar+ssl+srv://name``), where
    ``_pulsar._tcp.name`` (or ``_pulsar-ssl._tcp.name``) counts before the name itself. Raises AddressInvalid.
    """
    scheme, _, name = url.partition("://")
    service = _SRV_SCHEMES.get(scheme)
    if service is None:
        return BrokerUrl(hosts=parse_service_url(url))
    name = name.rstrip("/")
    if "," in name:
        raise AddressInvalid(f"{_shown(url)} has several names: SRV records are looked for under one")
    host, port_text = _split(name)
    if port_text is not None or ":" in host or _is_ipv4(host):
        raise AddressInvalid(f"{_shown(url)} has more than a name: SRV records say the hosts and ports")
    return BrokerUrl(srv_names=(host,) if host.startswith("_") else (f"{service}.{host}", host))


def speaks_tls(url: str) -> bool:
    """Whether a service URL, or what names the brokers, asks for TLS."""
    return url.startswith(_TLS_URLS)


def client_network(client_address: str) -> str:
    """What a client's ``address:port`` counts for where clients have equal shares: its IPv4 address, or the /64 of its
    IPv6 address, all of which one client may have (RFC 6177). What is no address counts for itself.
    """
    host = client_address.rpartition(":")[0].strip("[]").partition("%")[0]  # a scope names an interface
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return client_address
    if isinstance(address, ipaddress.IPv4Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, _CLIENT_PREFIX_BITS), strict=False))


def _shown(text: str) -> str:
    return repr(text if len(text) <= _HOST_MAX else text[:_HOST_MAX] + "…")
