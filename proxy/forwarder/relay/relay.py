"""Relays: what one needs to start, how it ends, and a spliced one with its two directions, as the engine knows it."""

import ctypes
import os
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import trio

from proto.framed_stream import FramedStream
from proto.rpc_pb2 import StoredRelay
from proxy.common.errors import ProxyError
from proxy.config.types import Relay as RelayConfig
from proxy.forwarder.lifetime.closing import CloseReason
from proxy.forwarder.lifetime.session import ExpiringSession, FrameCursor
from proxy.forwarder.lifetime.terms import SessionTerms
from proxy.forwarder.relay.pipes import Pipe, PipeShare
from proxy.runtime.fairness.token_buckets import TokenBucket
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.process.descriptors import adopt_socket
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
    ``session``: None for a relay that does not look at frames. ``on_broker_end``: see Relay.note_end.
    """

    client: trio.abc.HalfCloseableStream
    broker: trio.abc.HalfCloseableStream
    stored: StoredRelay
    config: RelayConfig
    first_to_broker: bytes = b""
    first_to_client: bytes = b""
    session: SessionTerms | None = None
    on_broker_end: Callable[[str], None] | None = None


class Turns:
    """The turns of one owner's directions of one way; see proxy.forwarder.relay.turns.

    ``directions``: those that are queued. ``bucket``: None where the owner's bytes a second are not limited.
    ``is_paused``: none of them may be pumped now. ``was_paused``: it was once, which is in the log.
    ``dry_pause_until``: a pause that is only counted lasts until then.
    """

    __slots__ = (
        "__weakref__",
        "bucket",
        "directions",
        "dry_pause_until",
        "is_paused",
        "owner",
        "was_paused",
        "way",
    )

    def __init__(self, owner: str, way: int) -> None:
        self.owner = owner
        self.way = way
        self.directions: deque[Direction] = deque()
        self.bucket: TokenBucket | None = None
        self.is_paused = self.was_paused = False
        self.dry_pause_until = 0.0


class Direction:
    """One direction of a relay: from a source socket to a sink socket.

    ``held_bytes`` have left the source and not reached the sink; ``pipe`` is bound only while some are in it.
    ``eof_seen``: the kernel has announced the source's end, which may be queued behind bytes; ``done``: it was reached,
    and passed on to the sink. ``queued``: it is in the run queue, or waits for a pipe. ``row``: where its cells begin
    in the relay table. ``share``: its owner's share of the pipes, set before it gets the first. ``turns``: its owner's
    turns, set before it is queued. ``stream``: the rules of what passes, where its frames are followed. ``cursor``:
    where these begin, if the kernel has them; else None.
    """

    __slots__ = (
        "cursor",
        "done",
        "eof_seen",
        "held_bytes",
        "opposite",
        "pipe",
        "pump",
        "queued",
        "relay",
        "row",
        "share",
        "sink",
        "source",
        "stream",
        "turns",
    )

    opposite: "Direction"
    relay: "Relay"
    share: PipeShare
    turns: Turns
    stream: FramedStream
    pump: Callable[["Direction"], None]
    """Moves a portion of the direction that it is called with: this one. Set before the relay starts."""

    def __init__(self, source: int, sink: int, table_row: int) -> None:
        self.source = source
        self.sink = sink
        self.row = table_row
        self.pipe: Pipe | None = None
        self.cursor: FrameCursor | None = None
        self.held_bytes = 0
        self.eof_seen = self.done = self.queued = False

    def shut_down_sink(self) -> None:
        """End the sink's writing side."""
        shut_down(self.sink, socket.SHUT_WR)

    def detach_source(self) -> None:
        """Detach the cursor's socket from the descriptor, which is about to be closed or to be another process's."""
        if self.cursor is not None:
            self.cursor.sock.detach()


class RelayHost(Protocol):
    """What moves a relay's bytes: proxy.forwarder.relay.engine.RelayEngine."""

    def close_when_quiet(self, relay: "Relay") -> None:
        """Read nothing more from the client of a blind relay, and close it when the broker has answered."""

    def abort_relay(self, relay: "Relay") -> None:
        """End a relay at once, and drop what is on its way."""


class Relay(ABC):
    """A relay of the engine: two sockets and the two directions between them.

    ``record`` is what the log, the owner and the fd store know of it. ``close_reason``: why the proxy closes it;
    NOT_CLOSING: it does not, or its session does. ``session``: what its frames are followed for; None: it is blind.
    ``broken``: one side failed, or the relay was cut short. ``handed_over``: it is a successor's; its sockets, pipes
    and rows of the table must not be touched here any more. ``engine``: set when it starts. ``is_spliced``: the fd
    store holds it, so a successor takes it over; any other ends with this process.
    """

    __slots__ = (
        "broken",
        "close_reason",
        "engine",
        "half_close_timeout_s",
        "handed_over",
        "on_broker_end",
        "record",
        "session",
        "to_broker",
        "to_client",
    )

    is_spliced: ClassVar[bool]
    engine: RelayHost

    def __init__(
        self,
        record: StoredRelay,
        to_broker: Direction,
        to_client: Direction,
        half_close_timeout_s: float,
        session: ExpiringSession | None = None,
    ) -> None:
        self.record = record
        self.session = session
        self.half_close_timeout_s = half_close_timeout_s
        self.broken = self.handed_over = False
        self.on_broker_end: Callable[[str], None] | None = None
        self.close_reason = CloseReason.NOT_CLOSING
        self.connect(to_broker, to_client)

    def connect(self, to_broker: Direction, to_client: Direction) -> None:
        """Make these the relay's directions."""
        self.to_broker, self.to_client = to_broker, to_client
        to_broker.opposite, to_client.opposite = to_client, to_broker
        to_broker.relay = to_client.relay = self

    @property
    def is_over(self) -> bool:
        """Whether both directions have ended."""
        return self.to_broker.done and self.to_client.done

    def note_end(self, *, of_broker: bool) -> None:
        """Note which side has ended, or failed; call ``on_broker_end``, once, with how, if the broker's was the first
        and the proxy does not close the relay.
        """
        on_broker_end, self.on_broker_end = self.on_broker_end, None
        is_closing = self.close_reason or (self.session is not None and self.session.close_reason)
        if on_broker_end is not None and of_broker and not is_closing:
            on_broker_end("the broker broke off the relay" if self.broken else "the broker closed the relay")

    def close(self, why: CloseReason) -> None:
        """Begin to close gently; a blind relay as soon as the broker has answered what it was sent."""
        if self.session is None:
            self.engine.close_when_quiet(self)
        else:
            self.session.control.start_closing(why)

    def abort(self) -> None:
        """End at once, and drop what is on its way."""
        self.engine.abort_relay(self)

    def deny(self) -> None:
        """End at once: the deny list names the client's credentials."""
        self.close_reason = CloseReason.DENIED
        self.abort()

    def evict(self) -> None:
        """End at once, for another owner's connection."""
        self.close_reason = CloseReason.OVER_SHARE
        self.abort()

    @property
    def sockets(self) -> tuple[int, int]:
        """The client's descriptor and the broker's."""
        return self.to_broker.source, self.to_client.source

    @property
    def must_linger(self) -> bool:
        """Whether a close at the end could become a reset, and keep a peer from what it was sent."""
        return self.broken

    @abstractmethod
    def take_streams(self) -> list[TcpStream]:
        """Return the two TCP connections, which are the caller's to close."""

    @abstractmethod
    def close_sockets(self) -> None:
        """Close the two sockets."""


class SplicedRelay(Relay):
    """A relay between two plain sockets, through pipes of the kernel."""

    __slots__ = ()

    is_spliced = True

    def __init__(
        self,
        record: StoredRelay,
        client: int,
        broker: int,
        half_close_timeout_s: float,
        session: ExpiringSession | None = None,
    ) -> None:
        to_broker = Direction(client, broker, row(record.id, TO_BROKER))
        to_client = Direction(broker, client, row(record.id, TO_CLIENT))
        super().__init__(record, to_broker, to_client, half_close_timeout_s, session)

    def take_streams(self) -> list[TcpStream]:
        """Return the two TCP connections, which are the caller's to close."""
        return [TcpStream(adopt_socket(descriptor)) for descriptor in self.sockets]

    def close_sockets(self) -> None:
        """Close the two sockets."""
        for descriptor in self.sockets:
            os.close(descriptor)


def shut_down(descriptor: int, how: int) -> None:
    """End one direction of a socket, or both, also for processes that hold a copy of its descriptor."""
    # Not by a socket object: to make one for a descriptor costs a system call and several times what this does.
    _libc.shutdown(descriptor, how)  # it fails where the connection has gone already
