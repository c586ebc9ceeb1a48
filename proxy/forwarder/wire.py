"""The client's end of a connection before the relay: frames in, frames out, with the limits that both need."""

import os

import trio

from proto.frames import Frame, FrameDecoder
from proxy.runtime.tasks import seconds

RECEIVE_BYTES = 16384


class ClientSlow(Exception):
    """The client does not take what is sent to it."""


class ClientWire:
    """Reads frames for one task; sends for any number of them."""

    def __init__(self, stream: trio.abc.HalfCloseableStream, *, max_frame_bytes: int, write_timeout_ms: int) -> None:
        self.stream = stream
        self._decoder = FrameDecoder(max_frame_bytes=max_frame_bytes)
        self._write_timeout_s = seconds(write_timeout_ms)
        self._sending = trio.Lock()
        self._half_sent = False
        self._unsent = b""
        self._waiting = trio.CancelScope()
        self._deadline = float("inf")

    @property
    def deadline(self) -> float:
        """When ``receive`` gives up; to set it counts for the one under way, too."""
        return self._deadline

    @deadline.setter
    def deadline(self, deadline: float) -> None:
        self._deadline = self._waiting.deadline = deadline

    def next_frame(self) -> Frame | None:
        """The next frame, if it is here already. Raises RemoteProtocolError's kinds."""
        return self._decoder.next_frame()

    async def receive(self) -> Frame | None:
        """The next frame; None at the end of the stream.

        Raises trio.TooSlowError at the deadline, trio.BrokenResourceError, and RemoteProtocolError's kinds.
        """
        while (frame := self._decoder.next_frame()) is None:
            with trio.CancelScope(deadline=self._deadline) as self._waiting:
                data = await self.stream.receive_some(RECEIVE_BYTES)
            if self._waiting.cancelled_caught:
                raise trio.TooSlowError
            if not data:
                return None
            self._decoder.receive_data(data)
        return frame

    def send_now(self, frames: bytes) -> bool:
        """Send whole frames without waiting; whether all of it has left. The rest leaves with the next ``send``."""
        if self._half_sent:
            return False
        if self._unsent or self._sending.locked() or not isinstance(self.stream, trio.SocketStream):
            self._unsent += frames
            return False
        try:
            sent = os.write(self.stream.socket.fileno(), frames)
        except OSError:  # no room, or an end, which the next ``send`` will meet, too
            sent = 0
        self._unsent += frames[sent:]
        return not self._unsent

    async def send(self, frame: bytes) -> None:
        """Send a whole frame, behind what ``send_now`` has left. Raises ClientSlow, trio.BrokenResourceError.

        Shielded: to be cancelled halfway would leave half a frame on the wire, with a relay's bytes behind it.
        """
        async with self._sending:
            if self._half_sent:
                raise ClientSlow
            with trio.move_on_after(self._write_timeout_s, shield=True) as scope:
                data, self._unsent = self._unsent + frame, b""
                await self.stream.send_all(data)
            if scope.cancelled_caught:
                self._half_sent = True  # whatever came behind half a frame would be read as its other half
                raise ClientSlow

    def take_rest(self) -> bytes:
        """What was received but is no frame yet: the relay's, from now on."""
        return self._decoder.take_rest()
