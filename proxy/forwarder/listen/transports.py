"""The transports of listeners: plain TCP, or TLS."""

import trio

from proxy.config.types import Config, Listener
from proxy.runtime.loop.tasks import close_gracefully
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.network.tls import ListenerContexts, TlsFailed, TlsStream


class ListenerTransport:
    """The transport of one listener. Raises ConfigError where its certificate cannot be used."""

    def __init__(self, key: str, config: Listener) -> None:
        self.congestion_control = config.congestion_control
        self.uses_tls = config.tls is not None
        self.routes_sni = config.routing == "sni"
        self._tls = None if config.tls is None else ListenerContexts(f"{key}.tls", config.tls)

    async def accept_client(
        self, transport: TcpStream, *, timeout_s: float
    ) -> tuple[trio.abc.HalfCloseableStream, bytes]:
        """Shake hands with a client. Return its stream, and its certificate (DER; empty: none).

        Raises TlsFailed; the connection is closed then.
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
    """Return the transports of all listeners, in the order of the configuration. Raises ConfigError."""
    return tuple(ListenerTransport(f"listener[{index}]", listener) for index, listener in enumerate(config.listener))
