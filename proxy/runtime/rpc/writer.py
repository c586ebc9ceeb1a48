"""Batched writes: what is said in one go, or while an earlier write is under way, leaves in one system call."""

import os

import trio

from proxy.runtime.loop.tick import current_tick


class WriterFull(Exception):
    """The peer reads too slowly: more would have to be kept than the bound allows."""


class BatchedWriter:
    """The sending half of an RPC connection. Nothing but ``write_when_there_is_room`` ever waits.

    What is written leaves at the end of the turn (proxy.runtime.loop.tick), since to wake another task costs several
    times
    the system call; what the kernel does not take then is left to ``run``, the one task that waits for it.
    """

    def __init__(self, stream: trio.abc.SendStream, *, max_buffered_bytes: int) -> None:
        self._stream = stream
        self._max_buffered_bytes = max_buffered_bytes
        self._buffer = bytearray()
        self._wake = trio.Event()
        self._sent = trio.Event()
        self._sending = False
        self._under_way_bytes = 0
        self._sent_bytes = 0
        self._over = False
        self._turn = current_tick()

    @property
    def is_empty(self) -> bool:
        """Whether everything that was queued has left."""
        return not self._buffer and not self._sending

    def write(self, data: bytes) -> None:
        """Queue bytes until the turn's end; raises WriterFull at the bound (one message always fits an empty queue)."""
        if self._buffer and len(self._buffer) + len(data) > self._max_buffered_bytes:
            raise WriterFull
        self._buffer += data
        self._turn.schedule_flush(self)

    def flush(self) -> None:
        """Send what is queued, as far as that goes at once."""
        if not self._buffer or self._sending:
            return
        if isinstance(self._stream, trio.SocketStream):
            try:
                sent = os.write(self._stream.socket.fileno(), self._buffer)
            except OSError:  # no room, or an end, which ``run`` will meet, too
                sent = 0
            if sent:
                del self._buffer[:sent]
                self._sent_bytes += sent
                self._tell_of_room()
        if self._buffer:
            self._wake.set()

    async def write_when_room(self, data: bytes) -> None:
        """Queue bytes as soon as the bound allows, and send."""
        while self._buffer and len(self._buffer) + len(data) > self._max_buffered_bytes:
            await self._sent.wait()
        self.write(data)

    async def wait_until_sent(self) -> None:
        """Wait until all that is queued now has left, or ``end`` says that it will not."""
        end = self._sent_bytes + self._under_way_bytes + len(self._buffer)
        while self._sent_bytes < end and not self._over:
            await self._sent.wait()

    def mark_closed(self) -> None:
        """Nothing leaves any more."""
        self._over = True
        self._tell_of_room()

    async def run(self) -> None:
        """Send what ``push`` could not, until cancelled or the stream breaks (trio.BrokenResourceError)."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            self._sending = True
            while self._buffer:
                batch, self._buffer = self._buffer, bytearray()
                self._under_way_bytes = len(batch)
                self._tell_of_room()
                await self._stream.send_all(batch)
                self._under_way_bytes = 0
                self._sent_bytes += len(batch)
                self._tell_of_room()
            self._sending = False

    def _tell_of_room(self) -> None:
        self._sent.set()
        self._sent = trio.Event()
