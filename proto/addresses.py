"""Parsers of addresses: ``host:port`` targets and service URLs.

Pulsar's own service URLs are ``pulsar://host:port,host:port`` and ``pulsar+ssl://…``; the proxy's configuration also
has ``pulsar+srv://name``.
"""

import ipaddress
import re
from dataclasses import dataclass

from proto.errors import ProtoError

_PORT_MAX = 65535
_CLIENT_PREFIX_BITS = 64
_WIDE_PREFIX_BITS = {4: 24, 6: 48}
_HOST_MAX = 253  # DNS: RFC 1035, section 2.3.4
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?\Z")
_PORT = re.compile(r"[0-9]{1,5}\Z")
_TLS_SCHEME = "pulsar+ssl"
_SCHEMES = {"pulsar": 6650, _TLS_SCHEME: 6651}
_WEB_SCHEMES = {"http": 80, "https": 443}
_SRV_SCHEMES = {"pulsar+srv": "_pulsar._tcp", "pulsar+ssl+srv": "_pulsar-ssl._tcp"}
_TLS_URLS = (f"{_TLS_SCHEME}://", f"{_TLS_SCHEME}+srv://")


class AddressInvalid(ProtoError, ValueError):
    """A text that is no address. The message states the text and the reason, fit for operators and clients."""


class PortMissing(AddressInvalid):
    """An address that lacks only its port."""


@dataclass(frozen=True, slots=True)
class HostPort:
    """Address of a listener: a name or an IP address (IPv6 without brackets), and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_host_port(text: str, *, default_port: int | None = None) -> HostPort:
    """Parse ``host:port`` or ``[ipv6]:port``. Raises AddressInvalid; PortMissing if only the port is missing."""
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
    """Parse ``pulsar://host1:6650,host2:6650`` into its addresses, in order. Raises AddressInvalid."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in _SCHEMES:
        raise AddressInvalid(f"{_shown(url)} does not begin with pulsar:// or pulsar+ssl://")
    hosts = rest.rstrip("/").split(",")
    return tuple(parse_host_port(host.strip(), default_port=_SCHEMES[scheme]) for host in hosts)


@dataclass(frozen=True, slots=True)
class BrokerUrl:
    """Source of the brokers' addresses: listed hosts, or names of SRV records (RFC 2782).

    Of the names, the first one that has records counts.
    """

    hosts: tuple[HostPort, ...] = ()
    srv_names: tuple[str, ...] = ()


def parse_broker_url(url: str) -> BrokerUrl:
    """Parse ``brokers.service_url``: a service URL, ``pulsar+srv://name`` or ``pulsar+ssl+srv://name``.

    SRV records at ``_pulsar._tcp.name`` (or ``_pulsar-ssl._tcp.name``) take precedence over those at the name itself.
    Raises AddressInvalid.
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
    """Return whether a service URL, SRV forms included, asks for TLS."""
    return url.startswith(_TLS_URLS)


@dataclass(frozen=True, slots=True)
class WebUrl:
    """Hosts of a web service, each with its port, and whether they want TLS."""

    hosts: tuple[HostPort, ...]
    tls: bool


def parse_web_url(url: str) -> WebUrl:
    """Parse ``http://host1:8080,host2:8080`` or ``https://…``, without a path. Raises AddressInvalid."""
    scheme, _, rest = url.partition("://")
    if scheme not in _WEB_SCHEMES:
        raise AddressInvalid(f"{_shown(url)} does not begin with http:// or https://")
    hosts = rest.removesuffix("/").split(",")
    parsed = tuple(parse_host_port(host.strip(), default_port=_WEB_SCHEMES[scheme]) for host in hosts)
    return WebUrl(parsed, scheme == "https")


def client_network(client_address: str) -> str:
    """Return the network that shares a limit with a client, given its ``address:port``.

    An IPv4 address is its own network; of an IPv6 address it is the /64, all of which one client may have (RFC 6177). A
    text that is no address is its own network, too.
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


def wide_network(client_network: str) -> str:
    """Return the network of one site that a client's network is part of: an IPv4 /24, an IPv6 /48 (RFC 6177).

    A text that is no network is its own.
    """
    try:
        network = ipaddress.ip_network(client_network)
    except ValueError:
        return client_network
    return str(network.supernet(new_prefix=_WIDE_PREFIX_BITS[network.version]))


def _shown(text: str) -> str:
    return repr(text if len(text) <= _HOST_MAX else text[:_HOST_MAX] + "…")
