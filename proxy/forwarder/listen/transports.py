"""The transports of listeners: plain TCP, or TLS."""

import ssl

from proxy.common.networks import NetworkRules
from proxy.config.types import Config, Listener
from proxy.runtime.network.proxy_header import ProxyRules
from proxy.runtime.network.session_tickets import ticket_front
from proxy.runtime.network.tls import ListenerContexts, TlsStream


class ListenerTransport:
    """The transport of one listener. Raises ConfigError where its certificate cannot be used."""

    def __init__(self, index: int, config: Listener) -> None:
        self.congestion_control = config.congestion_control
        self.networks = NetworkRules(config.allowed_networks, config.denied_networks)
        self.proxy = ProxyRules(config.proxy_protocol, config.proxy_protocol_sources)
        self.uses_tls = config.tls is not None
        self.routes_sni = config.routing == "sni"
        self._tls: ListenerContexts | None = None
        if config.tls is not None:
            self._tls = ListenerContexts(f"listener[{index}].tls", config.tls, ticket_front(index))

    @property
    def must_check_files(self) -> bool:
        """Whether ``check_files`` must be called before the next TLS handshake."""
        return self._contexts.must_check_files

    async def check_files(self) -> None:
        """Load certificate, key and authorities again if they have changed."""
        await self._contexts.check_files()

    @property
    def front_context(self) -> ssl.SSLContext:
        """The context of the next TLS handshake."""
        return self._contexts.front_context

    def on_handshake_done(self, stream: TlsStream) -> None:
        """Keep the session that a handshake has negotiated from being resumed."""
        self._contexts.on_handshake_done(stream.session.context, stream.version)

    @property
    def _contexts(self) -> ListenerContexts:
        assert self._tls is not None  # it uses TLS
        return self._tls


def listener_transports(config: Config) -> tuple[ListenerTransport, ...]:
    """Return the transports of all listeners, in the order of the configuration. Raises ConfigError."""
    return tuple(ListenerTransport(index, listener) for index, listener in enumerate(config.listener))
