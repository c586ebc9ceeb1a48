"""A spliced relay of which the frames are followed: its session, and where frames begin in each direction."""

from proto.rpc_pb2 import StoredRelay
from proxy.forwarder.lifetime.session import ExpiringSession, FrameCursor
from proxy.forwarder.relay.relay import Direction, Relay


class FramedDirection(Direction):
    """A direction of a framed relay. ``cursor``: where its frames begin; None until the relay starts."""

    __slots__ = ("cursor",)

    opposite: "FramedDirection"
    relay: "FramedRelay"

    def __init__(self, source: int, sink: int, table_row: int) -> None:
        super().__init__(source, sink, table_row)
        self.cursor: FrameCursor | None = None

    def detach_source(self) -> None:
        """Detach the cursor's socket from the descriptor, which is about to be closed or to be another process's."""
        if self.cursor is not None:
            self.cursor.sock.detach()


class FramedRelay(Relay):
    """A relay with a session that can expire, or of which messages are counted."""

    __slots__ = ("session",)

    direction_class = FramedDirection
    to_broker: FramedDirection
    to_client: FramedDirection

    def __init__(
        self, record: StoredRelay, client: int, broker: int, half_close_timeout_s: float, session: ExpiringSession
    ) -> None:
        super().__init__(record, client, broker, half_close_timeout_s)
        self.session = session
