"""The copy pump: moves bytes through this process's memory, for relays with TLS on a side, or without splice.

A portion is received, decrypted, encrypted and sent within one turn, in one pair of buffers for all relays. What the
sink does not take of it is held as it is to be sent, and nothing more is received until that has gone. So such a relay
holds at most one portion a direction. Portions are small until a sink has taken one, and where many sinks do not.

Such relays end with their process.
"""

import contextlib
import ssl
from collections.abc import Callable

from proto.relay_frames import FrameCutter
from proto.rpc_pb2 import StoredRelay
from proxy.common.logs import get_logger
from proxy.forwarder.lifetime.session import ExpiringSession
from proxy.forwarder.relay.pump import PEER_GONE, Pump, PumpHost
from proxy.forwarder.relay.relay import Direction, Relay
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.network.tls import TlsStream, reason_of
from proxy.runtime.network.tls_session import RECORD_BYTES_MAX, TlsSession
from proxy.runtime.shared.relay_table import BYTES, OPERATIONS, TO_BROKER, TO_CLIENT, RelayTable, row

SMALL_PORTION_BYTES = 1 << 15
PORTION_BYTES = 1 << 18

LARGE_HOLDERS_MAX = 64
"""While more directions than this hold bytes that their sinks do not take, all portions are small."""

RECORDS_HELD_BYTES_MAX = 4 * PORTION_BYTES
"""What TLS itself may have to say to a peer that reads nothing while it asks for new keys, over and over."""

# Between two turns nothing that matters is in them. A whole portion fits behind the beginning of a record.
_BUFFER_BYTES = PORTION_BYTES + RECORD_BYTES_MAX
_ciphertext, _plaintext = memoryview(bytearray(_BUFFER_BYTES)), memoryview(bytearray(_BUFFER_BYTES))

Stream = TcpStream | TlsStream


class CopyDirection(Direction):
    """One direction of a copied relay.

    ``decrypts``, ``encrypts``: the TLS sessions of the source and of the sink; None for a plain one. ``unsent``: what
    the sink did not take, as it is to be sent, and ``unsent_counted_bytes`` how many of the relay's bytes that are.
    ``source_has_ended``: nothing more comes, and the end is passed on once all before it was sent. ``has_sent_end``:
    TLS must send nothing more to the sink: it has sent close_notify, or a record was cut off. ``cutter``: cuts the
    source's frames out, where they are followed.
    """

    __slots__ = (
        "cutter",
        "decrypts",
        "encrypts",
        "has_sent_end",
        "portion_bytes",
        "recv_into",
        "send",
        "source_has_ended",
        "unsent",
        "unsent_counted_bytes",
    )

    cutter: FrameCutter

    def __init__(  # noqa: PLR0917 -- called for both directions alike
        self, source: Stream, sink: Stream, relay_id: int, way: int, first: bytes, session: ExpiringSession | None
    ) -> None:
        source_socket, sink_socket = transport_of(source).socket, transport_of(sink).socket
        super().__init__(source_socket.fileno(), sink_socket.fileno(), row(relay_id, way))
        self.recv_into: Callable[[memoryview, int], int] = source_socket.recv_into
        self.send: Callable[[memoryview | bytes], int] = sink_socket.send
        self.decrypts = _session_of(source)
        self.encrypts = _session_of(sink)
        if isinstance(source, TlsStream):
            first += source.take_read_ahead()
        if session is not None:
            self.stream, self.cutter = session.new_stream(way), FrameCutter(session.new_scanner(way))
            self.cutter.receive_data(first)
            first = b""
        self.unsent = self.encrypts.encrypt(memoryview(first)) if self.encrypts is not None and first else first
        self.held_bytes, self.unsent_counted_bytes = len(self.unsent), len(first)
        self.portion_bytes = SMALL_PORTION_BYTES
        self.source_has_ended = self.decrypts is not None and self.decrypts.has_ended
        self.has_sent_end = False

    def shut_down_sink(self) -> None:
        """End the sink's writing side, behind TLS's close_notify if that has not gone yet and there is room for it."""
        if self.encrypts is not None and not self.has_sent_end and not self.unsent:
            with contextlib.suppress(OSError):
                self.send(self.encrypts.close())
        super().shut_down_sink()


class CopiedRelay(Relay):
    """A relay through this process's memory, between two streams that are its own from its start on."""

    __slots__ = ("_streams",)

    is_spliced = False

    def __init__(
        self,
        record: StoredRelay,
        client: Stream,
        broker: Stream,
        half_close_timeout_s: float,
        *,
        first_to_broker: bytes = b"",
        first_to_client: bytes = b"",
        session: ExpiringSession | None = None,
    ) -> None:
        """Prepare a relay. What was read ahead goes first, and what is in the streams next. Raises ssl.SSLError."""
        self._streams = client, broker
        to_broker = CopyDirection(client, broker, record.id, TO_BROKER, first_to_broker, session)
        to_client = CopyDirection(broker, client, record.id, TO_CLIENT, first_to_client, session)
        super().__init__(record, to_broker, to_client, half_close_timeout_s, session)

    @property
    def must_linger(self) -> bool:
        """Whether a peer may still send something, which would turn a close into a reset for it.

        TLS's end comes before TCP's, which may not have been seen.
        """
        return self.broken or not (self.to_broker.eof_seen and self.to_client.eof_seen)

    def take_streams(self) -> list[TcpStream]:
        """Return the two TCP connections, which are the caller's to close."""
        return [transport_of(stream) for stream in self._streams]

    def close_sockets(self) -> None:
        """Close the two sockets."""
        for stream in self.take_streams():
            stream.close_now()


def transport_of(stream: Stream) -> TcpStream:
    """Return the TCP connection below a stream."""
    return stream.transport if isinstance(stream, TlsStream) else stream


def _session_of(stream: Stream) -> TlsSession | None:
    return stream.session if isinstance(stream, TlsStream) else None


class CopyPump(Pump):
    """The pump of copied relays. All directions that it is called with are CopyDirections."""

    def __init__(self, table: RelayTable, host: PumpHost) -> None:
        super().__init__(table, host)
        self._holding = host.holding

    def pass_early_ends_on(self, relay: Relay) -> None:
        """Pass on what came to its end before the relay's start, with the handshake: no edge tells of it."""
        for direction in (relay.to_broker, relay.to_client):
            assert isinstance(direction, CopyDirection)
            if direction.source_has_ended:
                self.start_idle_timeout(relay)
                self.wake_direction(direction)

    # ---- pumping

    def pump(self, direction: Direction) -> None:
        """Move at most one portion; see Pump.pump."""
        self._give_turn(direction, self._take_turn)

    def drain_only(self, direction: Direction) -> None:
        """Deliver what is held, and receive nothing more; see Pump.drain_only."""
        self._give_turn(direction, self._send_held)

    def _give_turn(self, direction: Direction, turn: Callable[[CopyDirection], object]) -> None:
        if direction.queued or direction.done:
            return
        assert isinstance(direction, CopyDirection)
        try:
            turn(direction)
        except Exception as error:  # noqa: BLE001 -- all relays of this process depend on the loop
            self.on_internal_error(direction, error)

    def _take_turn(self, direction: CopyDirection) -> None:
        if not self._send_held(direction):
            return
        if not direction.source_has_ended:
            self._move_portion(direction)
        if direction.source_has_ended and not direction.held_bytes and not direction.done:
            self._pass_end_on(direction)

    def _move_portion(self, direction: CopyDirection) -> None:
        session, kept = direction.decrypts, 0
        wanted = SMALL_PORTION_BYTES if len(self._holding) > LARGE_HOLDERS_MAX else direction.portion_bytes
        wanted = min(wanted, self.run_queue.portion_bytes_max)
        try:
            if session is None:
                came = direction.recv_into(_plaintext, wanted)
            else:
                if kept := len(session.unread):
                    _ciphertext[:kept] = session.unread
                came = direction.recv_into(_ciphertext[kept:], wanted)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno not in PEER_GONE:
                raise
            direction.relay.broken = True
            came = 0
        if not came:
            direction.source_has_ended = True
            return
        size = came if session is None else self._decrypt(direction, session, kept + came)
        if direction.done or (size and not self._deliver(direction, _plaintext[:size])):
            return
        if came == wanted:
            # Records of next to nothing cost as much as full ones: many of them would keep the other relays waiting.
            direction.portion_bytes = PORTION_BYTES if 2 * size > came else SMALL_PORTION_BYTES
            self.enqueue(direction)
        elif direction.eof_seen:
            self.enqueue(direction)
        else:
            # Less than wanted was all that there was, and more will raise an edge. (Not behind urgent data: see the
            # engine's _recheck_directions.)
            self.to_recheck.add(direction)

    def _decrypt(self, direction: CopyDirection, session: TlsSession, size: int) -> int:
        """Decrypt what has been received; return how many bytes that are."""
        size = session.decrypt(_ciphertext[:size], _plaintext)
        if session.has_ended:
            direction.source_has_ended = True
            self.start_idle_timeout(direction.relay)  # TCP's own end may not have come
        if session.waiting_record_bytes:
            self._send_records(direction.opposite, session)
        return size

    def _deliver(self, direction: CopyDirection, plaintext: memoryview) -> bool:
        """Send what was received; return False if the sink does not take all of it, or is broken."""
        try:
            data = plaintext if direction.encrypts is None else direction.encrypts.encrypt(plaintext)
        except OSError:  # an ssl.SSLError
            self.on_sink_broken(direction)
            return False
        return self._send(direction, data, len(plaintext))

    def _send(self, direction: CopyDirection, data: memoryview | bytes, counted_bytes: int) -> bool:
        """Send, and hold what the sink does not take; ``counted_bytes``: how many of the relay's bytes that are."""
        try:
            sent = direction.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.on_sink_broken(direction)
            return False
        if sent == len(data):
            self._count(direction, counted_bytes)
            return True
        counted = counted_bytes * sent // len(data)  # of a part of a record nobody knows better
        self._count(direction, counted)
        direction.unsent = bytes(data[sent:])
        direction.held_bytes = len(direction.unsent)
        direction.unsent_counted_bytes = counted_bytes - counted
        direction.portion_bytes = SMALL_PORTION_BYTES
        self._holding.add(direction)
        return False

    def _send_held(self, direction: CopyDirection) -> bool:
        """Send what is held, if anything is; return False if some of it is left, or the sink is broken."""
        if not direction.held_bytes:
            return True
        if not self._send(direction, direction.unsent, direction.unsent_counted_bytes):
            return False
        direction.unsent, direction.held_bytes = b"", 0
        self._holding.discard(direction)
        return True

    def _count(self, direction: CopyDirection, counted_bytes: int) -> None:
        if counted_bytes:
            self._cells[direction.row + BYTES] += counted_bytes
            self._cells[direction.row + OPERATIONS] += 1

    def _send_records(self, direction: Direction, session: TlsSession) -> None:
        """Send what TLS itself has to say to a direction's sink, behind what that did not take."""
        assert isinstance(direction, CopyDirection)
        records = session.take_outgoing()
        if direction.done or direction.has_sent_end:
            return
        if not direction.unsent:
            self._send(direction, records, 0)
        elif direction.held_bytes + len(records) <= RECORDS_HELD_BYTES_MAX:
            direction.unsent += records
            direction.held_bytes = len(direction.unsent)
        else:
            direction.relay.broken = True
            self._finish(direction.relay)

    # ---- ends

    def discard_in_flight(self, direction: Direction) -> None:
        """Drop what the sink did not take."""
        assert isinstance(direction, CopyDirection)
        if direction.unsent:
            direction.unsent, direction.held_bytes = b"", 0
            direction.has_sent_end = True  # a record may be cut off: what followed it would be read as its rest
            self._holding.discard(direction)

    def _pass_end_on(self, direction: CopyDirection) -> None:
        """End a direction of which all was sent."""
        error = None if direction.decrypts is None else direction.decrypts.error
        if error is not None:
            direction.relay.broken = True
            if not direction.has_sent_end:  # otherwise it is in the log
                self._log_violation(direction, error)
        if direction.encrypts is not None and not direction.has_sent_end:
            direction.has_sent_end = True
            if (records := direction.encrypts.close()) and not self._send(direction, records, 0):
                return
        self.end_direction(direction)

    @staticmethod
    def _log_violation(direction: CopyDirection, error: ssl.SSLError) -> None:
        about = direction.relay.record
        get_logger().warning(
            "a relay ends, since TLS has failed",
            client=about.client_address,
            principal=about.principal,
            broker=about.target,
            side="client" if direction is direction.relay.to_broker else "broker",
            reason=reason_of(error),
        )
