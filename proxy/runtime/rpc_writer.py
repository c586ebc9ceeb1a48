"""Batched writes: whatever is said while an earlier write is under way leaves with the next one, in one system call."""

import trio


class WriterFull(Exception):
    """The peer reads too slowly: more would have to be kept than the bound allows."""


class BatchedWriter:
    """The sending half of an RPC connection. ``write`` never waits; ``run`` is the one task that sends."""

    def __init__(self, stream: trio.abc.SendStream, *, max_buffered_bytes: int) -> None:
        self._stream = stream
        self._max_buffered_bytes = max_buffered_bytes
        self._buffer = bytearray()
        self._wake = trio.Event()
        self._sent = trio.Event()
        self._sending = False

    @property
    def is_empty(self) -> bool:
        """Whether everything that was queued has left."""
        return not self._buffer and not self._sending

    def write(self, data: bytes) -> None:
        """Queue bytes; raises WriterFull where the bound is reached (a single message always fits an empty queue)."""
        if self._buffer and len(self._buffer) + len(data) > self._max_buffered_bytes:
            raise WriterFull
        self._buffer += data
        self._wake.set()

    async def write_when_there_is_room(self, data: bytes) -> None:
        """Queue bytes as soon as the bound allows."""
        while self._buffer and len(self._buffer) + len(data) > self._max_buffered_bytes:
            await self._sent.wait()
        self.write(data)

    async def run(self) -> None:
        """Send until cancelled or the stream breaks (trio.BrokenResourceError)."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            batch, self._buffer = self._buffer, bytearray()
            self._sent.set()
            self._sent = trio.Event()
            self._sending = True
            await self._stream.send_all(batch)
            self._sending = False
