"""Batched writes: messages of one tick, or queued during an earlier write, are sent in one system call."""

import os

import trio

from proxy.common.errors import ProxyError
from proxy.runtime.loop.tcp_stream import plain_socket
from proxy.runtime.loop.tick import current_tick


class WriterFull(ProxyError):
    """The peer reads too slowly: the write buffer is at its bound."""


class BatchedWriter:
    """The sending half of an RPC connection. Only ``write_when_room`` and ``wait_until_sent`` wait.

    The buffer is flushed at the end of the tick (proxy.runtime.loop.tick), since to wake another task costs several
    times the system call. What the kernel does not accept then is left to ``run``, the one task that waits for it.
    """

    def __init__(self, stream: trio.abc.SendStream, *, max_buffered_bytes: int) -> None:
        self._stream = stream
        self._socket = plain_socket(stream)
        self._max_buffered_bytes = max_buffered_bytes
        self._buffer = bytearray()
        self._wake = trio.Event()
        self._sent = trio.Event()
        self._sending = False
        self._under_way_bytes = 0
        self._sent_bytes = 0
        self._over = False
        self._tick = current_tick()

    @property
    def is_empty(self) -> bool:
        """True if all that was written has been sent."""
        return not self._buffer and not self._sending

    @property
    def unsent_bytes(self) -> int:
        """Number of bytes that were written and not yet sent."""
        return self._under_way_bytes + len(self._buffer)

    def write(self, data: bytes) -> None:
        """Queue bytes until the tick's end. Raises WriterFull at the bound; one message always fits an empty queue."""
        if self._buffer and len(self._buffer) + len(data) > self._max_buffered_bytes:
            raise WriterFull
        self._buffer += data
        self._tick.schedule_flush(self)

    def flush(self) -> None:
        """Send what is queued, as far as the kernel accepts it without waiting."""
        if not self._buffer or self._sending:
            return
        if self._socket is not None:
            try:
                sent = os.write(self._socket.fileno(), self._buffer)
            except OSError:  # no room, or a closed connection, which ``run`` will find, too
                sent = 0
            if sent:
                del self._buffer[:sent]
                self._sent_bytes += sent
                self._notify_progress()
        if self._buffer:
            self._wake.set()

    async def write_when_room(self, data: bytes) -> None:
        """Wait until the buffer has room, then queue bytes."""
        while self._buffer and len(self._buffer) + len(data) > self._max_buffered_bytes:
            await self._sent.wait()
        self.write(data)

    async def wait_until_sent(self) -> None:
        """Wait until all that is queued now has been sent, or ``mark_closed`` was called."""
        end = self._sent_bytes + self.unsent_bytes
        while self._sent_bytes < end and not self._over:
            await self._sent.wait()

    def mark_closed(self) -> None:
        """Release all tasks that wait: nothing is sent any more."""
        self._over = True
        self._notify_progress()

    async def run(self) -> None:
        """Send what ``flush`` could not, until cancelled or the stream breaks (trio.BrokenResourceError)."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            self._sending = True
            while self._buffer:
                batch, self._buffer = self._buffer, bytearray()
                self._under_way_bytes = len(batch)
                self._notify_progress()
                await self._stream.send_all(batch)
                self._under_way_bytes = 0
                self._sent_bytes += len(batch)
                self._notify_progress()
            self._sending = False

    def _notify_progress(self) -> None:
        self._sent.set()
        self._sent = trio.Event()
