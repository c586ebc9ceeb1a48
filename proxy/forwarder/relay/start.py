"""What a relay needs to start, as one value: both streams, what was read ahead of it, and what is known of it."""

from dataclasses import dataclass

import trio

from proto.rpc_pb2 import StoredRelay
from proxy.common.errors import ProxyError
from proxy.config.types import Relay as RelayConfig
from proxy.forwarder.lifetime.terms import SessionTerms


class RelayStartFailed(ProxyError):
    """A relay could not start; both streams are still the caller's."""


class RelayMustWait(RelayStartFailed):
    """A relay could not start now, since no pipe can be had or stored: too many descriptors are on their way."""


@dataclass(frozen=True, slots=True)
class RelayStart:
    """The start of one relay. Both streams are the relay's from the moment it has started, and the caller's before.

    ``stored``: the record that the fd store keeps of it; the relay's id is written into it.
    ``first_to_broker``: what was read from the client beyond its handshake, from the beginning of a frame on.
    ``first_to_client``: what was read from the broker, CONNECTED included, which no other byte may precede.
    ``session``: None for a relay that does not look at frames.
    """

    client: trio.abc.HalfCloseableStream
    broker: trio.abc.HalfCloseableStream
    stored: StoredRelay
    config: RelayConfig
    first_to_broker: bytes = b""
    first_to_client: bytes = b""
    session: SessionTerms | None = None
