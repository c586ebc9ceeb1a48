"""How clients come in at each listener: as they are, or through TLS."""

import trio

from proxy.config.types import Config, Listener
from proxy.runtime.loop.tasks import close_gracefully
from proxy.runtime.network.tls import ListenerContexts, TlsFailed, TlsStream


class ListenerTransport:
    """One listener's. Raises ConfigError where its certificate cannot be used."""

    def __init__(self, key: str, config: Listener) -> None:
        self.congestion_control = config.congestion_control
        self.uses_tls = config.tls is not None
        self._tls = None if config.tls is None else ListenerContexts(f"{key}.tls", config.tls)

    async def accept_client(
        self, transport: trio.SocketStream, *, timeout_s: float
    ) -> tuple[trio.abc.HalfCloseableStream, bytes]:
        """A client's stream, and the certificate that it showed (DER; empty: none).

        Raises TlsFailed, and then the connection is closed.
        """
        if self._tls is None:
            return transport, b""
        entered = False
        try:
            with trio.fail_after(timeout_s):
                context = await self._tls.current_context()
                stream = TlsStream(transport, context, server_side=True)
                await stream.handshake()
                self._tls.on_handshake_done(context, stream.version)
            entered = True
        except trio.TooSlowError:
            raise TlsFailed(f"the TLS handshake was not finished within {timeout_s} s") from None
        except TlsFailed:
            await close_gracefully(transport)  # so that the client gets the alert
            raise
        finally:
            if not entered:
                await trio.aclose_forcefully(transport)
        return stream, stream.peer_certificate()


def listener_transports(config: Config) -> tuple[ListenerTransport, ...]:
    """The doors of all listeners, in their order."""
    return tuple(ListenerTransport(f"listener[{index}]", listener) for index, listener in enumerate(config.listener))
