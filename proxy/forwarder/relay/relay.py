"""What the relay engine keeps of a relay: two sockets, and the two directions between them."""

import socket
from collections.abc import Callable

from proto.rpc_pb2 import StoredRelay
from proxy.forwarder.relay.expiring.session import CloseReason, ExpiringSession, FrameCursor
from proxy.forwarder.relay.pipes import Pipe
from proxy.runtime.shared.relay_table import TO_BROKER, TO_CLIENT, row


class Direction:
    """One way of a relay: from a source socket to a sink socket.

    ``pipe`` is lent only while bytes are left in it; ``ends``: the source's end was seen from afar, behind its bytes;
    ``done``: it was reached, and the sink knows it. ``row`` is where the relay table tells of it. ``framing``: where
    its frames begin; None: nobody looks. ``pump`` gives it its turn; set before it begins.
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
        "sink",
        "source",
    )

    opposite: "Direction"
    relay: "Relay"
    pump: "Callable[[Direction], None]"

    def __init__(self, source: int, sink: int, table_row: int) -> None:
        self.source = source
        self.sink = sink
        self.row = table_row
        self.pipe: Pipe | None = None
        self.in_pipe = 0
        self.eof_seen = self.done = self.queued = False
        self.cursor: FrameCursor | None = None

    def detach_source(self) -> None:
        """Forget the source, which is about to be closed, or to be another process's."""
        if self.cursor is not None:
            self.cursor.sock.detach()


class Relay:
    """Two sockets and the two directions between them.

    ``broken``: one side failed, or the relay was cut short. ``followed``: the session whose frames are followed; None:
    the relay is blind. ``leaving``: why the proxy ends it by itself. ``moved``: it is a successor's; sockets, pipes and
    rows of the table are not to be touched here any more.
    """

    __slots__ = (
        "broken",
        "close_reason",
        "half_close_timeout_s",
        "handed_over",
        "record",
        "session",
        "to_broker",
        "to_client",
    )

    def __init__(self, about: StoredRelay, client: int, broker: int, half_close_timeout_s: float) -> None:
        self.record = about
        self.half_close_timeout_s = half_close_timeout_s
        self.broken = self.handed_over = False
        self.session: ExpiringSession | None = None
        self.close_reason = CloseReason.NOT_CLOSING
        there = self.to_broker = Direction(client, broker, row(about.id, TO_BROKER))
        back = self.to_client = Direction(broker, client, row(about.id, TO_CLIENT))
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
    """End one direction of a socket, or both, whoever else holds a copy of its descriptor."""
    # The family is not asked for: shutdown does not need it, and to find it out costs three system calls.
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor)
    try:
        sock.shutdown(how)
    except OSError:
        pass  # it has gone already
    finally:
        sock.detach()
