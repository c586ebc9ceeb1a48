"""What is known of a name: its addresses, or the services under it."""

from dataclasses import dataclass

from proto.addresses import HostPort


class ResolutionFailed(Exception):
    """A name without an address, or without services; says why."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """A host's IP addresses, and until when (Trio's clock) they count."""

    addresses: tuple[str, ...]
    expires_at: float


@dataclass(frozen=True, slots=True)
class Service:
    """One SRV record (RFC 2782)."""

    target: HostPort
    priority: int
    weight: int


@dataclass(frozen=True, slots=True)
class Services:
    """A name's SRV records, and until when (Trio's clock) they count."""

    services: tuple[Service, ...]
    expires_at: float


Answer = Addresses | Services
