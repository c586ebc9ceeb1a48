"""What is known of a name: its addresses, or the services under it."""

from dataclasses import dataclass

from proto.addresses import HostPort


class ResolutionFailed(Exception):
    """A name without an address, or without services; says why."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """A host's IP addresses, and until when (Trio's clock) they count.

    ``name``: the whole name that they were found under, in lower case and without a final dot: by a search domain it is
    longer than what was asked for. Empty where it is not known to be DNS's: of an address, from /etc/hosts and
    from the system's resolver.
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
    """A name's SRV records, and until when (Trio's clock) they count."""

    services: tuple[Service, ...]
    expires_at: float


Answer = Addresses | Services
