"""The client's end of a connection before the relay: frames in by callback, frames out, with the limits of both.

A plain connection is read by the reactor and written to at the end of a turn: no task is woken for either. TLS has a
task that reads. What a client does not take at once is sent by a task of its own, and while much of that waits, nothing
more is read from this client.
"""

import os
from collections.abc import Callable

import trio

from proto.frames import Frame, FrameDecoder
from proxy.runtime.loop.reactor import OnEnd, Reading, current_reactor
from proxy.runtime.loop.scoped_tasks import TaskSpawner
from proxy.runtime.loop.tasks import seconds
from proxy.runtime.loop.tick import current_tick

RECEIVE_BYTES = 16_384

PONGS_BYTES_MAX = 4_096
"""PONGs that a client may owe us to read before nothing more is read from it."""


def _nothing() -> None:
    """Nobody wants to know."""


class ClientSlow(Exception):
    """The client does not take what is sent to it."""


class ClientTransport:
    """See the module. ``begin`` first; ``on_frames`` is called whenever there may be frames to take.

    ``tasks``: for those that read or write, where there must be some.
    ``on_end`` is called with None at the end of what the client sends, and with what ends the connection: ClientSlow,
    trio.BrokenResourceError, or what ``on_frames`` raised.
    """

    def __init__(
        self, stream: trio.abc.HalfCloseableStream, tasks: TaskSpawner, *, max_frame_bytes: int, write_timeout_ms: int
    ) -> None:
        self.stream = stream
        self._tasks = tasks
        self.received_at = trio.current_time()
        self._decoder = FrameDecoder(max_frame_bytes=max_frame_bytes)
        self._write_timeout_s = seconds(write_timeout_ms)
        self._tick = current_tick()
        self._unsent = bytearray()
        self._sending = 0
        self._pongs = 0
        self._sent_bytes = 0
        self._has_sender = False
        self._all_sent = trio.Event()
        self._moved = trio.Event()
        self._broken = False
        self.on_unsent_changed: Callable[[], None] = _nothing
        """Called when it has changed how much waits for a client that does not take everything at once."""
        self._reading: Reading | None = None
        self._reader = trio.CancelScope()
        self._reader_ended: trio.Event | None = None
        self._wanted = trio.Event()
        self._paused = False
        self._on_frames: Callable[[], None]
        self._on_end: OnEnd

    # ---- in

    def start_reading(self, on_frames: Callable[[], None], on_end: OnEnd) -> None:
        """Begin to read."""
        self._on_frames, self._on_end = on_frames, on_end
        reactor = current_reactor()
        if reactor is not None and isinstance(self.stream, trio.SocketStream):
            self._reading = reactor.start_reading(self.stream.socket.fileno(), self._receive_data, on_end)
        else:
            self._reader_ended = trio.Event()
            self._tasks.start_soon(self._read, self._reader_ended)

    def _receive_data(self, data: bytes | bytearray) -> None:
        self.received_at = self._tick.now
        self._decoder.receive_data(data)
        self._on_frames()

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
        except trio.ClosedResourceError:  # it is our own end that was closed
            return
        except Exception as error:  # noqa: BLE001 -- the owner's to handle
            self._on_end(error)
        else:
            self._on_end(None)

    def next_frame(self) -> Frame | None:
        """The next frame, if it is here already. Raises RemoteProtocolError's kinds."""
        return self._decoder.next_frame()

    @property
    def partial_frame_bytes(self) -> int:
        """How much of a frame is here whose rest is not."""
        return self._decoder.unread_bytes

    def pause_reading(self) -> None:
        """Leave what comes in the kernel; a portion more may come."""
        self._paused = True
        if self._reading is not None:
            self._reading.pause()

    def resume_reading(self) -> None:
        """Read what comes."""
        self._paused = False
        self._wanted.set()
        self._wanted = trio.Event()
        if self._reading is not None:
            self._reading.resume()

    async def stop_reading(self) -> bytes:
        """Read no more, for good; what was received but is no frame yet: a relay's."""
        self.pause_reading()
        self._reader.cancel()
        if self._reader_ended is not None:
            await self._reader_ended.wait()
        return self._decoder.take_unread_data()

    # ---- out

    @property
    def unsent_bytes(self) -> int:
        """What waits until the client takes it."""
        return len(self._unsent) + self._sending

    @property
    def has_many_unsent_pongs(self) -> bool:
        """Whether many PONGs wait for the client to read, so that it should be asked for no more PINGs."""
        return self._pongs >= PONGS_BYTES_MAX

    def send_pong(self, frame: bytes) -> None:
        """Answer a PING, which costs a client nothing: of these few may wait."""
        self._pongs += len(frame)
        self.send(frame)

    def send(self, frames: bytes) -> None:
        """Send whole frames, at the end of the turn or as soon as the client takes them; nobody waits for it."""
        if not self._broken:
            self._unsent += frames
            self._tick.schedule_flush(self)

    def flush(self) -> None:
        """Send what is there, as far as that goes at once; a task sends the rest."""
        if self._has_sender or self._broken or not self._unsent:
            if self._has_sender:
                self.on_unsent_changed()
            return
        if isinstance(self.stream, trio.SocketStream):
            try:
                sent = os.write(self.stream.socket.fileno(), self._unsent)
            except OSError:  # no room, or an end, which the task will meet, too
                sent = 0
            del self._unsent[:sent]
            self._sent_bytes += sent
        if self._unsent:
            self._has_sender = True
            self._tasks.start_soon(self._send_rest)
            self.on_unsent_changed()
        else:
            self._pongs = 0
            if self._paused:
                self._on_frames()  # which may have waited for room

    async def _send_rest(self) -> None:
        try:
            while self._unsent and not self._broken:
                data, self._unsent = self._unsent, bytearray()
                self._sending = len(data)
                await self._send_in_time(data)
                self._sending = 0
                self._sent_bytes += len(data)
                del data
                if not self._unsent:
                    self._pongs = 0
                self.on_unsent_changed()
                self._wake_waiters()
                self._on_frames()
        except trio.BrokenResourceError as error:  # which nobody else would notice while reading is paused
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

    async def _send_in_time(self, data: bytearray) -> None:
        """Shielded: to be cancelled halfway would leave half a frame on the wire, with a relay's bytes behind it."""
        with trio.move_on_after(self._write_timeout_s, shield=True) as scope:
            await self.stream.send_all(data)
        if scope.cancelled_caught:
            self.abort_sending()

    def abort_sending(self) -> None:
        """Send nothing more to a client that does not take it: what came behind half a frame would be read as its
        other half.
        """
        if not self._broken:
            self._broken = True
            self._on_end(ClientSlow())

    @property
    def queued_bytes(self) -> int:
        """How much was sent so far, be it under way or gone: a position for ``until_taken``."""
        return self._sent_bytes + len(self._unsent) + self._sending

    async def wait_until_taken(self, position: int) -> None:
        """Wait until everything up to a position has left, or will not leave any more."""
        while self._sent_bytes < position and not self._broken:
            await self._moved.wait()

    async def wait_until_sent(self) -> bool:
        """Wait until everything has left; whether it has, rather than that the client would not take it."""
        self.flush()
        while self._has_sender:
            await self._all_sent.wait()
        return not self._broken
