"""A spliced relay as the engine knows it: two sockets, and the two directions between them."""

import ctypes
from collections.abc import Callable
from typing import Any

from proto.rpc_pb2 import StoredRelay
from proxy.forwarder.lifetime.closing import CloseReason
from proxy.forwarder.relay.pipes import Pipe, PipeShare
from proxy.runtime.shared.relay_table import TO_BROKER, TO_CLIENT, row

_libc = ctypes.CDLL(None)


class Direction:
    """One direction of a relay: from a source socket to a sink socket.

    ``pipe`` is bound only while bytes are left in it, ``in_pipe`` is how many. ``eof_seen``: the kernel has announced
    the source's end, which may be queued behind bytes; ``done``: it was reached, and passed on to the sink. ``queued``:
    it is in the run queue, or waits for a pipe. ``row``: where its cells begin in the relay table. ``share``: its
    owner's share of the pipes, set before it gets the first.
    """

    __slots__ = (
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
    pump: Callable[[Any], None]
    """Moves a portion of the direction that it is called with: this one. Set before the relay starts. (Any, since each
    kind of direction is only ever given a pump of its own kind.)
    """

    def __init__(self, source: int, sink: int, table_row: int) -> None:
        self.source = source
        self.sink = sink
        self.row = table_row
        self.pipe: Pipe | None = None
        self.in_pipe = 0
        self.eof_seen = self.done = self.queued = False

    def detach_source(self) -> None:
        """Detach what holds the source's descriptor, which is about to be closed or to be another process's."""


class Relay:
    """Two sockets and the two directions between them.

    ``record`` is what the fd store knows of it. ``broken``: one side failed, or the relay was cut short.
    ``close_reason``: why the proxy ends it by itself. ``handed_over``: it is a successor's; its sockets, pipes and rows
    of the table must not be touched here any more.
    """

    __slots__ = (
        "broken",
        "close_reason",
        "half_close_timeout_s",
        "handed_over",
        "record",
        "to_broker",
        "to_client",
    )

    direction_class: type[Direction] = Direction

    def __init__(self, record: StoredRelay, client: int, broker: int, half_close_timeout_s: float) -> None:
        self.record = record
        self.half_close_timeout_s = half_close_timeout_s
        self.broken = self.handed_over = False
        self.close_reason = CloseReason.NOT_CLOSING
        there = self.to_broker = self.direction_class(client, broker, row(record.id, TO_BROKER))
        back = self.to_client = self.direction_class(broker, client, row(record.id, TO_CLIENT))
        there.opposite, back.opposite = back, there
        there.relay = back.relay = self

    @property
    def is_over(self) -> bool:
        """Whether both directions have ended."""
        return self.to_broker.done and self.to_client.done

    @property
    def sockets(self) -> tuple[int, int]:
        """The client's descriptor and the broker's."""
        return self.to_broker.source, self.to_client.source


def shut_down(descriptor: int, how: int) -> None:
    """End one direction of a socket, or both, also for processes that hold a copy of its descriptor."""
    # Not by a socket object: to make one for a descriptor costs a system call and several times what this does.
    _libc.shutdown(descriptor, how)  # it fails where the connection has gone already
