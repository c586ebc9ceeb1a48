"""Relays: what one needs to start, how it ends, and a spliced one with its two directions, as the engine knows it."""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import trio

from proto.rpc_pb2 import StoredRelay
from proxy.common.errors import ProxyError
from proxy.config.types import Relay as RelayConfig
from proxy.forwarder.lifetime.closing import CloseReason
from proxy.forwarder.lifetime.session import ExpiringSession, FrameCursor
from proxy.forwarder.lifetime.terms import SessionTerms
from proxy.forwarder.relay.pipes import Pipe, PipeShare
from proxy.runtime.shared.relay_table import TO_BROKER, TO_CLIENT, row

_libc = ctypes.CDLL(None)


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


class BaseRelay(ABC):
    """A live relay of any kind, which closes itself.

    ``record`` is what the log, the owner and the fd store know of it. ``close_reason``: why the proxy closes it;
    NOT_CLOSING: it does not, or its session does. ``session``: what its frames are followed for; None: it is blind.
    """

    __slots__ = ("close_reason", "record", "session")

    record: StoredRelay
    close_reason: CloseReason
    session: ExpiringSession | None

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Whether it has ended."""

    def close(self, why: CloseReason) -> None:
        """Begin to close gently."""
        if self.session is not None:
            self.session.control.start_closing(why)
        else:
            self.close_when_quiet()

    @abstractmethod
    def close_when_quiet(self) -> None:
        """Read nothing more from the client of a blind relay, and close it when the broker has answered."""

    @abstractmethod
    def abort(self) -> None:
        """End at once."""

    def evict(self) -> None:
        """End at once, for another owner's connection."""
        self.close_reason = CloseReason.OVER_SHARE
        self.abort()


class Direction:
    """One direction of a relay: from a source socket to a sink socket.

    ``pipe`` is bound only while bytes are left in it, ``in_pipe`` is how many. ``eof_seen``: the kernel has announced
    the source's end, which may be queued behind bytes; ``done``: it was reached, and passed on to the sink. ``queued``:
    it is in the run queue, or waits for a pipe. ``row``: where its cells begin in the relay table. ``share``: its
    owner's share of the pipes, set before it gets the first. ``cursor``: where its frames begin, if they are followed;
    None until then.
    """

    __slots__ = (
        "cursor",
        "done",
        "eof_seen",
        "in_pipe",
        "opposite",
        "pipe",
        "pump",
        "queued",
        "relay",
        "row",
        "share",
        "sink",
        "source",
    )

    opposite: "Direction"
    relay: "Relay"
    share: PipeShare
    pump: Callable[["Direction"], None]
    """Moves a portion of the direction that it is called with: this one. Set before the relay starts."""

    def __init__(self, source: int, sink: int, table_row: int) -> None:
        self.source = source
        self.sink = sink
        self.row = table_row
        self.pipe: Pipe | None = None
        self.cursor: FrameCursor | None = None
        self.in_pipe = 0
        self.eof_seen = self.done = self.queued = False

    def detach_source(self) -> None:
        """Detach the cursor's socket from the descriptor, which is about to be closed or to be another process's."""
        if self.cursor is not None:
            self.cursor.sock.detach()


class RelayHost(Protocol):
    """What a relay is spliced by: proxy.forwarder.relay.engine.RelayEngine."""

    def close_when_quiet(self, relay: "Relay") -> None:
        """Read nothing more from the client of a blind relay, and close it when the broker has answered."""

    def abort_relay(self, relay: "Relay") -> None:
        """End a relay at once, and drop what is on its way."""


class Relay(BaseRelay):
    """A spliced relay: two sockets and the two directions between them.

    ``broken``: one side failed, or the relay was cut short. ``handed_over``: it is a successor's; its sockets, pipes
    and rows of the table must not be touched here any more. ``engine``: set when it starts.
    """

    __slots__ = ("broken", "engine", "half_close_timeout_s", "handed_over", "to_broker", "to_client")

    engine: RelayHost

    def __init__(
        self,
        record: StoredRelay,
        client: int,
        broker: int,
        half_close_timeout_s: float,
        session: ExpiringSession | None = None,
    ) -> None:
        self.record = record
        self.session = session
        self.half_close_timeout_s = half_close_timeout_s
        self.broken = self.handed_over = False
        self.close_reason = CloseReason.NOT_CLOSING
        there = self.to_broker = Direction(client, broker, row(record.id, TO_BROKER))
        back = self.to_client = Direction(broker, client, row(record.id, TO_CLIENT))
        there.opposite, back.opposite = back, there
        there.relay = back.relay = self

    @property
    def is_over(self) -> bool:
        """Whether both directions have ended."""
        return self.to_broker.done and self.to_client.done

    def close_when_quiet(self) -> None:
        """Read nothing more from the client, and close when the broker has answered."""
        self.engine.close_when_quiet(self)

    def abort(self) -> None:
        """End at once, and drop what is on its way."""
        self.engine.abort_relay(self)

    @property
    def sockets(self) -> tuple[int, int]:
        """The client's descriptor and the broker's."""
        return self.to_broker.source, self.to_client.source


def shut_down(descriptor: int, how: int) -> None:
    """End one direction of a socket, or both, also for processes that hold a copy of its descriptor."""
    # Not by a socket object: to make one for a descriptor costs a system call and several times what this does.
    _libc.shutdown(descriptor, how)  # it fails where the connection has gone already
