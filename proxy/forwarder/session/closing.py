"""A client's last word from the proxy, and the close behind it."""

import trio

from proxy.forwarder.session.transport import ClientTransport
from proxy.runtime.loop.tasks import close_forcefully, close_gracefully, close_socket_now


class ConnectionCloser:
    """How a connection is closed: with a frame that says why, once there is one to say; else at once."""

    def __init__(self, wire: ClientTransport) -> None:
        self._transport = wire
        self._frame: bytes | None = None
        self._delay_s = 0.0
        self._scope: trio.CancelScope | None = None

    def set_final_frame(self, frame: bytes, *, delay_s: float = 0.0) -> None:
        """``frame`` is to be said, ``delay_s`` after the end."""
        self._frame, self._delay_s = frame, delay_s

    def close_if_silent(self) -> bool:
        """Close, if there is nothing to say and nothing to wait for; whether it was so."""
        return self._frame is None and close_socket_now(self._transport.stream)

    async def send_final_frame(self) -> None:
        """Say it."""
        if self._frame is None:
            return
        with trio.CancelScope() as self._scope:
            await trio.sleep(self._delay_s)
            self._transport.send(self._frame)
            if not await self._transport.wait_until_sent():
                self._frame = None  # nobody listens

    def drop_final_frame(self) -> None:
        """Close at once: the connection's place is needed."""
        self._frame = None
        if self._scope is not None:
            self._scope.cancel()

    async def close_connection(self) -> None:
        """Close; whoever was told something gets the time to read it."""
        if self._frame is None:
            await close_forcefully(self._transport.stream)
            return
        with trio.CancelScope(shield=True) as self._scope:
            await self._transport.stop_reading()
            await close_gracefully(self._transport.stream)
        if self._scope.cancelled_caught:
            await close_forcefully(self._transport.stream)
