"""The pump of blind relays of which the kernel encrypts one side or both (proxy.runtime.network.kernel_tls).

They are spliced relays, and what is on its way outlives this process as theirs does. But the kernel hands records out
one at a time, none of which may be raised as an edge of its own; what is no data ends a splice with an error, and stays
in the socket; and a direction ends with close_notify, which needs room as all else does.
"""

import errno
import os

from proto.rpc_pb2 import StoredRelay
from proxy.common.logs import get_logger
from proxy.forwarder.lifetime.session import ExpiringSession
from proxy.forwarder.relay.pipes import Pipe
from proxy.forwarder.relay.pump import PEER_GONE, Pump, PumpHost
from proxy.forwarder.relay.relay import Direction, SplicedRelay
from proxy.forwarder.relay.splice_pump import SPLICE_FLAGS, SplicePump
from proxy.runtime.loop.tcp_stream import TcpStream, borrowed_socket
from proxy.runtime.network.kernel_tls import (
    Following,
    KernelTlsBroken,
    discard_input,
    examine,
    has_keys,
    push_records,
    send_close_notify,
)
from proxy.runtime.network.tls_session import RECORDS_WITHOUT_DATA_MAX
from proxy.runtime.shared.relay_table import PIPE, RelayTable

LARGE_RECORD_BYTES = 8_192
"""Behind a record of this size more are likely: they go into the same portion."""

PORTION_BYTES = 1 << 18

_NO_DATA = frozenset({errno.EINVAL, errno.EIO})
"""A record that is not data is next, or no record at all."""


class KernelTlsDirection(Direction):
    """One direction of such a relay.

    ``is_ending``: its source has ended, and the sink has no room for close_notify; ``held_bytes`` is 1 then.
    ``is_cut``: its source's connection is broken. The kernel may have said so once, and then as if nothing had come: so
    EAGAIN is the end then.
    """

    __slots__ = ("_has_sent_end", "is_cut", "is_ending", "sink_uses_tls", "source_uses_tls")

    def __init__(self, direction: Direction, *, source_uses_tls: bool, sink_uses_tls: bool) -> None:
        super().__init__(direction.source, direction.sink, direction.row)
        self.source_uses_tls = source_uses_tls
        self.sink_uses_tls = sink_uses_tls
        self.is_cut = self.is_ending = self._has_sent_end = False

    def send_end(self) -> bool:
        """Send close_notify, where the sink uses TLS; return False while there is no room for it."""
        if self.sink_uses_tls and not self._has_sent_end:
            with borrowed_socket(self.sink) as sink:
                try:
                    self._has_sent_end = send_close_notify(sink)
                except OSError:  # the peer has gone
                    self._has_sent_end = True
            return self._has_sent_end
        return True

    def shut_down_sink(self) -> None:
        """End the sink's writing side, behind close_notify if there is room for it and nothing is missing before."""
        if self.pipe is None:
            self.send_end()
        super().shut_down_sink()


class KernelTlsRelay(SplicedRelay):
    """A spliced relay of which the kernel encrypts one side or both, as its record says."""

    __slots__ = ()

    def __init__(self, record: StoredRelay, client: int, broker: int, half_close_timeout_s: float) -> None:
        super().__init__(record, client, broker, half_close_timeout_s)
        sides = record.client_kernel_tls, record.broker_kernel_tls
        to_broker = KernelTlsDirection(self.to_broker, source_uses_tls=sides[0], sink_uses_tls=sides[1])
        to_client = KernelTlsDirection(self.to_client, source_uses_tls=sides[1], sink_uses_tls=sides[0])
        self.connect(to_broker, to_client)

    @property
    def must_linger(self) -> bool:
        """Whether a peer may still send something, which would turn a close into a reset for it.

        TLS's end comes before TCP's, which may not have been seen.
        """
        return self.broken or not (self.to_broker.eof_seen and self.to_client.eof_seen)

    def take_streams(self) -> list[TcpStream]:
        """Return the two TCP connections, which are the caller's to close."""
        self._discard_input()
        return super().take_streams()

    def close_sockets(self) -> None:
        """Close the two sockets."""
        self._discard_input()
        super().close_sockets()

    def _discard_input(self) -> None:
        """Take close_notify out of the sockets: to close one that was not read resets the connection."""
        for descriptor in self.sockets:
            with borrowed_socket(descriptor) as sock:
                discard_input(sock)

    def check_keys(self) -> None:
        """Raise KernelTlsBroken if the kernel has no keys for a side: bytes would go in the clear."""
        for descriptor, uses_tls in zip(
            self.sockets, (self.record.client_kernel_tls, self.record.broker_kernel_tls), strict=True
        ):
            with borrowed_socket(descriptor) as sock:
                if uses_tls and not has_keys(sock):
                    raise KernelTlsBroken("its forwarder ended before the kernel had the keys")


def new_spliced_relay(
    record: StoredRelay,
    client: int,
    broker: int,
    half_close_timeout_s: float,
    session: ExpiringSession | None = None,
) -> SplicedRelay:
    """Return the relay that a record describes."""
    if record.client_kernel_tls or record.broker_kernel_tls:
        return KernelTlsRelay(record, client, broker, half_close_timeout_s)
    return SplicedRelay(record, client, broker, half_close_timeout_s, session)


class KernelTlsPump(Pump):
    """The pump of KernelTlsDirections, made of the parts of SplicePump."""

    def __init__(self, table: RelayTable, pump: SplicePump, host: PumpHost) -> None:
        super().__init__(table, host)
        self._pump = pump

    def pump(self, direction: Direction) -> None:
        """Move at most one portion; see Pump.pump."""
        if direction.queued or direction.done:
            return
        assert isinstance(direction, KernelTlsDirection)
        try:
            if direction.is_ending:
                self._pass_end_on(direction)
            elif not direction.held_bytes or self._pump.drain_pipe(direction):
                self._move_portion(direction)
            if direction.held_bytes and direction.sink_uses_tls:
                with borrowed_socket(direction.sink) as sink:
                    push_records(sink)
            if direction.done and direction.relay.broken and not direction.is_cut:
                self._cut_opposite(direction)
        except Exception as error:  # noqa: BLE001 -- all relays of this process depend on the loop
            self._pump.on_internal_error(direction, error)

    def drain_only(self, direction: Direction) -> None:
        """Deliver what is in the pipe, and read nothing more; see Pump.drain_only."""
        assert isinstance(direction, KernelTlsDirection)
        if not direction.is_ending:
            self._pump.drain_only(direction)

    def discard_in_flight(self, direction: Direction) -> None:
        """Drop what is on its way to a direction's sink."""
        self._pump.discard_in_flight(direction)

    def _move_portion(self, direction: KernelTlsDirection) -> None:
        pipe = self._pump.get_empty_pipe(direction)
        if pipe is None:
            return
        self._cells[direction.row + PIPE] = pipe.id
        following = self._fill_pipe(direction, pipe)
        if direction.held_bytes:
            self._pump.deliver_from_pipe(direction, pipe, is_all=False)  # and pumped again: it may not have been all
            return
        self._cells[direction.row + PIPE] = 0
        if following is Following.CLOSE_NOTIFY or following is Following.FIN:
            self._pass_end_on(direction)

    def _fill_pipe(self, direction: KernelTlsDirection, pipe: Pipe) -> Following:
        """Splice records into a pipe; return what follows behind them."""
        bytes_max = self.run_queue.portion_bytes_max
        most = min(PORTION_BYTES, pipe.size_bytes // 2, bytes_max)
        for _ in range(RECORDS_WITHOUT_DATA_MAX):
            try:
                room = bytes_max - direction.held_bytes
                moved = os.splice(direction.source, pipe.write_end, room, None, None, SPLICE_FLAGS)
            except BlockingIOError:
                return Following.FIN if direction.is_cut else Following.NOTHING_YET
            except OSError as error:
                if not direction.source_uses_tls or error.errno not in _NO_DATA:
                    self._on_source_error(direction, error)
                    return Following.FIN
                moved, was_refused = 0, True
            else:
                was_refused = False
            if not moved:
                if not direction.source_uses_tls:
                    return Following.FIN
                following = self._examine(direction, was_refused=was_refused)
                if following is not Following.DATA:
                    return following
                continue
            direction.held_bytes += moved  # at most PORTION_BYTES in records of this size
            if moved < LARGE_RECORD_BYTES or direction.held_bytes >= most:
                return Following.DATA
        self.enqueue(direction)
        return Following.NOTHING_YET

    def _examine(self, direction: KernelTlsDirection, *, was_refused: bool) -> Following:
        with borrowed_socket(direction.source) as source:
            try:
                following = examine(source, was_refused=was_refused)
            except KernelTlsBroken as error:
                self._cut(direction, str(error))
                following = Following.FIN
        is_over = following is Following.NOTHING_YET and direction.is_cut
        return Following.FIN if is_over else following

    def _on_source_error(self, direction: KernelTlsDirection, error: OSError) -> None:
        """Note a source that failed, as a record that was damaged. Raises what nobody can have caused."""
        if error.errno in PEER_GONE:
            direction.is_cut = direction.relay.broken = True
        elif direction.source_uses_tls and error.errno != errno.EBADF:
            self._cut(direction, f"kernel TLS: {errno.errorcode.get(error.errno or 0, error)}")
        else:
            raise error

    @staticmethod
    def _cut(direction: KernelTlsDirection, reason: str) -> None:
        relay = direction.relay
        if not direction.is_cut:
            side = "client" if direction is relay.to_broker else "broker"
            client = relay.record.client_address
            get_logger().info("a relay's TLS is broken", client=client, side=side, reason=reason)
        direction.is_cut = relay.broken = True

    @staticmethod
    def _cut_opposite(direction: KernelTlsDirection) -> None:
        """Note that the sink is broken, which is the opposite direction's source: the error may come here alone."""
        assert isinstance(direction.opposite, KernelTlsDirection)
        direction.opposite.is_cut = True

    def _pass_end_on(self, direction: KernelTlsDirection) -> None:
        """End a direction of which all was delivered, once its sink has room for that."""
        self.start_idle_timeout(direction.relay)  # TCP's own end may not have come
        direction.is_ending = not direction.send_end()
        direction.held_bytes = int(direction.is_ending)
        if not direction.is_ending:
            self._pump.end_direction(direction)
