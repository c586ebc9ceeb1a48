"""Answers of name resolution: addresses of a host, or SRV records of a service."""

from dataclasses import dataclass

from proto.addresses import HostPort
from proxy.common.errors import ProxyError


class ResolutionFailed(ProxyError):
    """A name has no address or no SRV records; the text gives the reason."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """A host's IP addresses, valid until ``expires_at`` (Trio's clock).

    ``name``: the full name that they were found under, in lower case and without a final dot: with a search domain it
    is longer than the name in the query. Empty where it is not known to come from DNS: for an IP address and from
    /etc/hosts.
    """

    addresses: tuple[str, ...]
    expires_at: float
    name: str = ""


@dataclass(frozen=True, slots=True)
class Service:
    """One SRV record (RFC 2782)."""

    target: HostPort
    priority: int
    weight: int


@dataclass(frozen=True, slots=True)
class Services:
    """A name's SRV records, valid until ``expires_at`` (Trio's clock)."""

    services: tuple[Service, ...]
    expires_at: float


Answer = Addresses | Services
