"""Clients that are refused before anything is read of them: counted, logged, told where that is possible, closed."""

from functools import partial

import trio

from proto import commands
from proto.commands import NO_REQUEST_ID
from proto.pulsar_pb2 import ServerError
from proxy.common.logs import get_logger
from proxy.forwarder.audit import ForwarderAudit
from proxy.forwarder.client.failures import limit_text
from proxy.forwarder.listen.admission import Refusal
from proxy.forwarder.metrics import ForwarderMetrics
from proxy.runtime.loop.tasks import close_gracefully
from proxy.runtime.loop.tcp_stream import TcpStream

TOLD_AT_ONCE_MAX = 100
"""Clients that are sent an error at a time because there is no room; the others are closed without one."""


class TurnedAwayClients:
    """The clients that a forwarder refuses. ``being_told``: how many are sent an error at the moment."""

    def __init__(self, metrics: ForwarderMetrics, audit: ForwarderAudit) -> None:
        self.being_told = 0
        self._metrics = metrics
        self._audit = audit

    def turn_away(
        self, nursery: trio.Nursery, stream: TcpStream, client: str, reason: Refusal, key: str, *, mute: bool
    ) -> None:
        """Close a client's connection because of what is set under ``key``; ``mute``: without telling the client."""
        self._metrics.rejected_connections.labels(reason=reason.value).inc()
        self._audit.write("connection_refused", client=client, reason=reason.value)
        get_logger().warning("a client was turned away", client=client, reason=reason.value, key=key)
        if mute or self.being_told >= TOLD_AT_ONCE_MAX:
            nursery.start_soon(trio.aclose_forcefully, stream)
            return
        self.being_told += 1
        nursery.start_soon(partial(self._tell, stream, reason))

    async def _tell(self, stream: TcpStream, reason: Refusal) -> None:
        try:
            # Clients that come again soon will find room among the handshakes.
            again = reason in {Refusal.UNAUTHENTICATED, Refusal.RATE_OF_ADDRESS}
            code = ServerError.ServiceNotReady if again else ServerError.NotAllowedError
            with trio.move_on_after(1):
                await stream.send_all(commands.error(NO_REQUEST_ID, code, limit_text(reason)))
            await close_gracefully(stream)
        except trio.BrokenResourceError:
            await trio.aclose_forcefully(stream)
        finally:
            self.being_told -= 1
