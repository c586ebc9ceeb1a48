"""How a client's connection is closed: with a final frame that its client gets the time to read, or at once."""

import trio

from proxy.forwarder.client.transport import ClientTransport
from proxy.runtime.loop.tasks import close_forcefully, close_gracefully, close_socket_now


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
        return self._frame is None and close_socket_now(self._transport.stream)

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
