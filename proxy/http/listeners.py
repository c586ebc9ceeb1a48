"""The HTTP worker's listeners: the networks from which clients may come, and TLS."""

from proxy.common.networks import NetworkRules
from proxy.config.types import Config, HttpListener
from proxy.http.messages import HttpStream
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.network.proxy_header import ProxyRules
from proxy.runtime.network.tls import ListenerContexts, TlsStream


class HttpTransport:
    """The transport of one listener. Raises ConfigError where its certificate cannot be used."""

    def __init__(self, index: int, config: HttpListener) -> None:
        self.networks = NetworkRules(config.allowed_networks, config.denied_networks)
        self.proxy = ProxyRules(config.proxy_protocol, config.proxy_protocol_sources)
        self.scheme = "https" if config.tls is not None else "http"
        self._tls = ListenerContexts(f"http_listener[{index}].tls", config.tls) if config.tls is not None else None

    async def open_stream(self, transport: TcpStream) -> HttpStream:
        """Return a client's stream, behind its TLS handshake where the listener has TLS. Raises TlsFailed."""
        contexts = self._tls
        if contexts is None:
            return transport
        if contexts.must_check_files:
            await contexts.check_files()
        stream = TlsStream(transport, contexts.front_context, server_side=True)
        await stream.handshake()
        contexts.on_handshake_done(stream.session.context, stream.version)
        return stream


def http_transports(config: Config) -> tuple[HttpTransport, ...]:
    """Return the transports of all listeners for HTTP, in the order of the configuration. Raises ConfigError."""
    return tuple(HttpTransport(index, listener) for index, listener in enumerate(config.http_listener))
