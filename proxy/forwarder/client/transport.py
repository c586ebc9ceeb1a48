"""A client's connection before the relay, as a transport: frames in by callback, frames out, with the limits of both.

A connection is read by the reactor and written to at the end of a tick, with TLS, too: no task is woken for either.
What a client does not take at once is sent by a task of its own. While much of that waits, frames must wait or there is
no room for requests, no more is read from this client.

It is closed at once, or behind a final frame that its client gets the time to read.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Protocol

import trio

from proto.frames import Frame, FrameDecoder
from proxy.common.errors import ProxyError
from proxy.runtime.fairness.byte_budget import ByteReservation
from proxy.runtime.loop.reactor import OnEnd, Reading, current_reactor
from proxy.runtime.loop.scoped_tasks import TaskSpawner
from proxy.runtime.loop.tasks import close_forcefully, close_gracefully, close_socket_now, ignore, seconds
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.loop.tick import current_tick
from proxy.runtime.network.tls import PENDING_RECORDS_BYTES_MAX, TlsStream

RECEIVE_BYTES = 16_384

PONGS_BYTES_MAX = 4_096
"""PONGs that may wait for a client to read them before no more is read from it."""

PARTIAL_FRAME_BYTES_MIN = 16 * 1024
"""The part of a frame that is here is counted above this size; a client that connects and asks sends less."""


class ClientSlow(ProxyError):
    """The client does not take what is sent to it."""


class ClientTransport:
    """The transport of one client. ``start_reading`` first; ``next_frame`` whenever there may be frames to take.

    ``tasks``: spawns the tasks that read or write, where there must be some. ``received_at``: when the client was heard
    last, in Trio's time. ``on_unsent_changed`` is called when the amount has changed that waits for a client which does
    not take everything at once.
    """

    def __init__(
        self, stream: trio.abc.HalfCloseableStream, tasks: TaskSpawner, *, max_frame_bytes: int, write_timeout_ms: int
    ) -> None:
        self.stream = stream
        self._tls = stream if isinstance(stream, TlsStream) else None
        below = stream if self._tls is None else self._tls.transport
        self._plain = below if isinstance(below, TcpStream) else None
        self.tasks = tasks
        self.received_at = trio.current_time()
        self._decoder = FrameDecoder(max_frame_bytes=max_frame_bytes)
        self._write_timeout_s = seconds(write_timeout_ms)
        self._tick = current_tick()
        self._unsent = bytearray()
        self._sending = 0
        self._pongs = 0
        self._sent_bytes = 0
        self._records = b""
        self._has_sender = False
        self._has_left = False
        self._all_sent = trio.Event()
        self._moved = trio.Event()
        self._broken = False
        self.on_unsent_changed: Callable[[], None] = ignore
        self._reading: Reading | None = None
        self._reader = trio.CancelScope()
        self._reader_ended: trio.Event | None = None
        self._wanted = trio.Event()
        self._paused = False
        self._on_frames: Callable[[], None]
        self._on_end: OnEnd

    # ---- in

    def start_reading(self, on_frames: Callable[[], None], on_end: OnEnd) -> None:
        """Start to read. ``on_frames`` is called whenever there may be frames to take.

        ``on_end`` is called with None at the end of what the client sends, and with the error that ends the connection:
        ClientSlow, trio.BrokenResourceError, or what ``on_frames`` raised.
        """
        self._on_frames, self._on_end = on_frames, on_end
        reactor = current_reactor()
        if reactor is not None and self._plain is not None:
            on_data = self._receive_data if self._tls is None else partial(self._receive_records, self._tls)
            self._reading = reactor.start_reading(self._plain.socket.fileno(), on_data, on_end)
            if self._tls is not None and self._tls.session.unread:  # which came with the handshake
                with self._tick:
                    self._receive_records(self._tls, b"")
        else:
            self._reader_ended = trio.Event()
            self.tasks.start_soon(self._read, self._reader_ended)

    def _receive_data(self, data: bytes | bytearray) -> None:
        self.received_at = self._tick.now
        self._decoder.receive_data(data)
        self._on_frames()

    def _receive_records(self, tls: TlsStream, records: bytes | bytearray) -> None:
        session = tls.session
        data = tls.take_read_ahead(records)
        if session.waiting_record_bytes:  # an answer to new keys, which costs the client nothing
            if self._has_sender and session.waiting_record_bytes > PENDING_RECORDS_BYTES_MAX:
                self.abort_sending()
                return
            self._tick.schedule_flush(self)
        if data:
            self._receive_data(data)
        if session.has_ended:
            self._end_records(tls)

    def _end_records(self, tls: TlsStream) -> None:
        """Report the end of what the client sends by TLS, unless that must wait, as TCP's end does in the kernel."""
        if self._reading is not None and not self._paused:
            self._reading.end(tls.end_error)

    async def _read(self, ended: trio.Event) -> None:
        try:
            with self._reader:
                await self._read_all()
        finally:
            ended.set()

    async def _read_all(self) -> None:
        try:
            while data := await self.stream.receive_some(RECEIVE_BYTES):
                with self._tick:
                    self._receive_data(data)
                while self._paused:
                    await self._wanted.wait()
        except trio.ClosedResourceError:  # our own end was closed
            return
        except Exception as error:  # noqa: BLE001 -- the owner's to handle
            self._on_end(error)
        else:
            self._on_end(None)

    def drop_callbacks(self) -> None:
        """Call back no more, and leave no circle of references behind: the connection is over, or a relay's."""
        self.on_unsent_changed = self._on_frames = self._on_end = ignore
        if self._reading is not None:
            self._reading.pause()
            self._reading = None

    def next_frame(self) -> Frame | None:
        """Return the next frame that is here already, or None. Raises RemoteProtocolError's kinds."""
        return self._decoder.next_frame()

    @property
    def partial_frame_bytes(self) -> int:
        """Return how much is here of a frame whose rest is not."""
        return self._decoder.unread_bytes

    def pause_reading(self) -> None:
        """Leave what comes in the kernel. One more chunk may come."""
        self._paused = True
        if self._reading is not None:
            self._reading.pause()

    def resume_reading(self) -> None:
        """Read what comes, after ``pause_reading``."""
        self._paused = False
        self._wanted.set()
        self._wanted = trio.Event()
        if self._reading is not None:
            self._reading.resume()
            if self._tls is not None and self._tls.session.has_ended:
                self._tick.schedule_flush(self)

    async def stop_reading(self) -> bytes:
        """Read no more, for good. Return what was received and not taken as a frame: a relay's first bytes."""
        self.pause_reading()
        self._reader.cancel()
        if self._reader_ended is not None:
            await self._reader_ended.wait()
        return self._decoder.take_unread_data()

    def stop_reading_now(self) -> bytes | None:
        """Do the same if that needs no waiting, and nothing waits to be sent; otherwise return None."""
        if self._reading is None or self._has_sender or self._unsent or self._broken:
            return None
        if self._tls is not None and self._tls.session.waiting_record_bytes:
            return None
        self.pause_reading()
        self._has_left = True
        return self._decoder.take_unread_data()

    def handle_waiting_frames(self) -> None:
        """Have the frames handled that waited for room; an end that TLS tells of waits until they are."""
        with self._tick:
            self._on_frames()

    # ---- out

    @property
    def unsent_bytes(self) -> int:
        """Return how much waits until the client takes it."""
        return len(self._unsent) + self._sending

    @property
    def has_many_unsent_pongs(self) -> bool:
        """Return whether so many PONGs wait for the client that no more PINGs should be taken from it."""
        return self._pongs >= PONGS_BYTES_MAX

    def send_pong(self, frame: bytes) -> None:
        """Send a PONG. A PING costs a client nothing, so few of the answers may wait."""
        self._pongs += len(frame)
        self.send(frame)

    def send(self, frames: bytes) -> None:
        """Send whole frames at the end of the tick, or as soon as the client takes them. The caller does not wait."""
        if not self._broken:
            self._unsent += frames
            self._tick.schedule_flush(self)

    def flush(self) -> None:
        """Send what the client takes at once; a task sends the rest."""
        if self._has_left:
            return
        if self._tls is not None:
            self._flush_records(self._tls)
        if self._has_sender or self._broken or not self._unsent:
            if self._has_sender:
                self.on_unsent_changed()
            return
        if self._plain is not None and self._tls is None:
            sent = self._write(self._plain, self._unsent)
            del self._unsent[:sent]
            self._sent_bytes += sent
        self._end_flush()

    def _flush_records(self, tls: TlsStream) -> None:
        if tls.session.has_ended:
            self._end_records(tls)
        if self._plain is None or self._has_sender or self._broken:
            return
        size = len(self._unsent)
        try:
            records = tls.encrypt(memoryview(bytes(self._unsent)))
        except trio.BrokenResourceError as error:
            self._broken = True
            self._on_end(error)
            return
        if not records:
            return
        self._unsent.clear()
        self._records = records[self._write(self._plain, records) :]
        if self._records:
            self._sending = size
        else:
            self._sent_bytes += size
        self._end_flush()

    @staticmethod
    def _write(stream: TcpStream, data: bytes | bytearray) -> int:
        try:
            return os.write(stream.socket.fileno(), data)
        except OSError:  # no room, or an end, which the task will meet as well
            return 0

    def _end_flush(self) -> None:
        if self._unsent or self._records:
            self._has_sender = True
            self.tasks.start_soon(self._send_rest)
            self.on_unsent_changed()
        else:
            self._pongs = 0
            if self._paused:
                self._on_frames()  # some may have waited for room

    async def _send_rest(self) -> None:
        try:
            while (self._records or self._unsent) and not self._broken:
                if self._records:  # of which a part has gone
                    assert self._plain is not None
                    records, self._records = self._records, b""
                    await self._send_in_time(self._plain, records)
                    del records
                else:
                    data, self._unsent = self._unsent, bytearray()
                    self._sending = len(data)
                    await self._send_in_time(self.stream, data)
                    del data
                self._sent_bytes += self._sending
                self._sending = 0
                if not self._unsent:
                    self._pongs = 0
                self.on_unsent_changed()
                self._wake_waiters()
                self.handle_waiting_frames()
        except trio.BrokenResourceError as error:  # no reader notices it while reading is paused
            self._broken = True
            self._on_end(error)
        except trio.ClosedResourceError:
            self._broken = True
        finally:
            self._sending = 0
            self._has_sender = False
            self._all_sent.set()
            self._all_sent = trio.Event()
            self._wake_waiters()

    def _wake_waiters(self) -> None:
        self._moved.set()
        self._moved = trio.Event()

    async def _send_in_time(self, stream: trio.abc.SendStream, data: bytes | bytearray) -> None:
        """Send within the write timeout, else give the client up.

        Shielded: cancelled halfway, it would leave half a frame on the connection, with a relay's bytes behind it.
        """
        with trio.move_on_after(self._write_timeout_s, shield=True) as scope:
            await stream.send_all(data)
        if scope.cancelled_caught:
            self.abort_sending()

    def close_now(self) -> bool:
        """Close the connection if that needs no waiting; return whether it did."""
        if self._plain is None:
            return close_socket_now(self.stream)
        self._plain.close_now()
        return True

    def abort_sending(self) -> None:
        """Send nothing more to a client that does not take it, and report ClientSlow.

        Anything behind half a frame would be read as its other half.
        """
        if not self._broken:
            self._broken = True
            self._on_end(ClientSlow())

    @property
    def queued_bytes(self) -> int:
        """Return how much was given to ``send`` so far: a position for ``wait_until_taken``."""
        return self._sent_bytes + len(self._unsent) + self._sending

    async def wait_until_taken(self, position: int) -> None:
        """Wait until everything up to a position has left, or no more will leave."""
        while self._sent_bytes < position and not self._broken:
            await self._moved.wait()

    async def wait_until_sent(self) -> bool:
        """Wait until everything has left. Return False where the client does not take it."""
        self.flush()
        while self._has_sender:
            await self._all_sent.wait()
        return not self._broken


class RequestRoom(Protocol):
    """The room for a client's requests."""

    @property
    def has_room(self) -> bool:
        """Return whether more requests may be taken in."""


class InboundFlow:
    """The flow of frames from one client. While it is stopped, the client's bytes stay in the kernel.

    ``is_held``: frames wait for a verdict, a broker's profile or the relay, or the connection is over. ``is_full``: as
    much is kept for the client as may be. ``is_at_end``: the client has ended its direction.
    """

    __slots__ = ("_partial_frame", "_requests", "_transport", "is_at_end", "is_full", "is_held")

    def __init__(self, transport: ClientTransport, requests: RequestRoom, partial_frame: ByteReservation) -> None:
        self._transport = transport
        self._requests = requests
        self._partial_frame = partial_frame
        self.is_held = self.is_full = self.is_at_end = False

    def is_unread(self) -> bool:
        """Return True while nothing is read from the client, so that an answer to a PING may be here unseen."""
        return self.is_full or self.is_at_end or self.is_held

    def hold_frames(self) -> None:
        """Take no more frames until ``release_frames``."""
        self.is_held = True
        self._transport.pause_reading()

    def release_frames(self) -> None:
        """Let frames be taken again."""
        self.is_held = False
        self._transport.resume_reading()

    def check_room(self) -> bool:
        """Return whether more may be taken from the client, and pause or resume reading where that has changed.

        Where there is no room, the connection asks again after each answer that has left.
        """
        has_room = self._requests.has_room and not self._transport.has_many_unsent_pongs
        if has_room is self.is_full:
            self.is_full = not has_room
            if has_room:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()
        return has_room

    def count_partial_frame(self) -> bool:
        """Count the part of a large frame that is here; return False if there is no memory for it.

        A client that is not read does not end for what others use: what is here may be whole frames, and no more comes.
        """
        size_bytes = self._transport.partial_frame_bytes
        if size_bytes < PARTIAL_FRAME_BYTES_MIN:
            size_bytes = 0
        if size_bytes == self._partial_frame.size_bytes or self._partial_frame.resize(size_bytes):
            return True
        return self.is_full or self.is_held

    def set_owner(self, owner: str) -> None:
        """Count partial frames for this owner from now on: see proxy.runtime.fairness.owners.owner_of."""
        self._partial_frame.transfer_to(owner)

    def release_memory(self) -> None:
        """Count nothing any more: the connection is over."""
        self._partial_frame.resize(0)


class ConnectionCloser:
    """The close of one client's connection: behind a final frame that says why, if one is set, else at once."""

    def __init__(self, transport: ClientTransport) -> None:
        self._transport = transport
        self._frame: bytes | None = None
        self._delay_s = 0.0
        self._scope: trio.CancelScope | None = None

    def set_final_frame(self, frame: bytes, *, delay_s: float = 0.0) -> None:
        """Have ``frame`` sent before the close, ``delay_s`` after ``send_final_frame`` is called."""
        self._frame, self._delay_s = frame, delay_s

    def close_if_silent(self) -> bool:
        """Close at once if there is no final frame and the stream needs no waiting; return whether it did."""
        return self._frame is None and self._transport.close_now()

    async def send_final_frame(self) -> None:
        """Send the final frame, if there is one, and wait until the client has taken it or has been given up."""
        if self._frame is None:
            return
        with trio.CancelScope() as self._scope:
            await trio.sleep(self._delay_s)
            self._transport.send(self._frame)
            if not await self._transport.wait_until_sent():
                self._frame = None  # the client does not read

    def drop_final_frame(self) -> None:
        """Close at once, whatever was to be sent or waited for: the connection is evicted for a newcomer."""
        self._frame = None
        if self._scope is not None:
            self._scope.cancel()

    async def close_connection(self) -> None:
        """Close; a client that was sent a final frame gets the time to read it."""
        if self._frame is None:
            await close_forcefully(self._transport.stream)
            return
        with trio.CancelScope(shield=True) as self._scope:
            await self._transport.stop_reading()
            await close_gracefully(self._transport.stream)
        if self._scope.cancelled_caught:
            await close_forcefully(self._transport.stream)
