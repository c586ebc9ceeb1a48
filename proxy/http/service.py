"""The HTTP worker's service: accepts clients at the listeners of `[[http_listener]]` and serves each in a task."""

import itertools
import socket
from dataclasses import replace
from functools import partial

import trio

from proto.addresses import HostPort
from proto.http_rules import Headers
from proto.proxy_protocol import ProxyHeaderInvalid
from proto.roles import Role
from proxy.common.errors import ConfigError
from proxy.common.logs import get_logger
from proxy.config.binds import all_binds
from proxy.config.http import replay_bytes_total, web_uses_tls
from proxy.config.types import Config
from proxy.http.authentication import HttpAuthenticator
from proxy.http.client import HttpClient
from proxy.http.connections import Connection, Connections, WorkerRequests
from proxy.http.exchange import HttpServices
from proxy.http.listeners import HttpTransport, http_transports
from proxy.http.locator import HttpLocator
from proxy.http.messages import HttpStream
from proxy.http.metrics import HttpMetrics
from proxy.http.routes import http_replacements, http_routes
from proxy.http.server import HttpConnection
from proxy.http.taskless import waiting_without_task
from proxy.http.upstream import Dial, UpstreamPool, dial_brokers
from proxy.runtime.fairness.byte_budget import ByteBudget
from proxy.runtime.loop.reactor import current_reactor
from proxy.runtime.loop.tasks import close_forcefully, close_gracefully, seconds
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.network.accepting import accept_waiting
from proxy.runtime.network.proxy_header import read_header
from proxy.runtime.network.tls import TlsFailed, TlsStream
from proxy.runtime.observability.audit import AuditLog
from proxy.runtime.process.descriptors import adopt_socket
from proxy.runtime.process.listener_channel import request_listeners
from proxy.runtime.process.worker import WorkerContext
from proxy.runtime.rpc.server import Handler
from proxy.runtime.shared.relay_request_channel import RelayRequestChannel

HEADERS_AWAITED_MAX = 256
"""Connections of load balancers of which the PROXY header, and so the client, is not there yet, in one worker. For one
more, the oldest is closed. They are beside `http.max_connections`, which is shared between clients' addresses.
"""


class HttpService:
    """proxy.runtime.process.worker.Service of one HTTP worker."""

    def __init__(self, context: WorkerContext) -> None:
        config = context.config
        self._context = context
        self._head_timeout_s = seconds(config.http.head_timeout_ms)
        self._metrics = HttpMetrics(context.registry)
        self._connections = Connections(config, self._metrics)
        self._audit = AuditLog(context.registry, context.role, context.index, context.descriptors.audit)
        self._audit.configure(config)
        self._requests = WorkerRequests(config, self._connections, self._metrics, self._audit)
        self._auth = context.new_rpc_pool(Role.AUTH)
        self._lookup = context.new_rpc_pool(Role.LOOKUP)
        self._transports = http_transports(config)
        self._services = HttpServices(
            settings=config.http,
            routes=http_routes(config),
            authenticator=self._authenticator(config),
            locator=self._locator(config),
            requests=self._requests,
            pool=UpstreamPool(_dial(config)),
            replay=ByteBudget(replay_bytes_total(config)),
            response_headers=_response_headers(config),
            replacements=http_replacements(config),
            passer=_passer(context),
            relay=config.relay,
        )
        self._numbers = itertools.count(1)
        self._header_scopes: dict[TcpStream, trio.CancelScope] = {}
        self._accepting = trio.CancelScope()
        self._clients: trio.Nursery

    def _authenticator(self, config: Config) -> HttpAuthenticator:
        return HttpAuthenticator(config, self._auth, self._context.nursery)

    def _locator(self, config: Config) -> HttpLocator:
        return HttpLocator(config, self._lookup, self._context.nursery)

    def handlers(self) -> dict[int, Handler]:
        """Return no handlers: an HTTP worker serves no other worker."""
        return {}

    async def start(self) -> None:
        """Receive the listeners from the supervisor, then start to accept. Raises ConfigError."""
        nursery = self._context.nursery
        channel = adopt_socket(self._context.descriptors.questions)
        try:
            listeners = await request_listeners(channel)
        except OSError as error:
            raise ConfigError(f"http_listener: {error}") from None
        finally:
            channel.close()
        nursery.start_soon(self._auth.run)
        nursery.start_soon(self._lookup.run)
        nursery.start_soon(self._services.pool.run)
        nursery.start_soon(self._serve, listeners)

    async def configure(self, config: Config) -> None:
        """Use new settings for requests that come from now on. Raises ConfigError."""
        await trio.lowlevel.checkpoint()
        transports, dial = http_transports(config), _dial(config)  # may raise
        authenticator = self._authenticator(config)  # may raise; nothing has changed yet
        self._audit.configure(config)  # may raise
        services = self._services
        services.settings, services.relay, services.routes = config.http, config.relay, http_routes(config)
        services.replacements = http_replacements(config)
        services.authenticator, services.locator = authenticator, self._locator(config)
        services.response_headers = _response_headers(config)
        services.pool.set_dial(dial)
        services.replay.resize(replay_bytes_total(config))
        self._transports = transports
        self._head_timeout_s = seconds(config.http.head_timeout_ms)
        self._connections.configure(config)
        self._requests.configure(config)
        self._connections.judge_again(lambda client: transports[client.listener].networks.allows(client.ip))

    async def drain(self, timeout_s: float, *, hand_over: bool) -> None:  # noqa: ARG002 -- nothing can be handed over
        """Accept no more, close idle connections, and let requests under way end for up to ``timeout_s``."""
        self._accepting.cancel()
        self._connections.drain()
        for scope in self._header_scopes.values():
            scope.cancel()
        if not await self._connections.wait_until_empty(timeout_s):
            get_logger().warning("the drain's time is over; closing what is left", connections=len(self._connections))
            self._connections.close_all()

    def status(self) -> dict[str, object]:
        """Return the numbers of connections and of requests under way, and of connections closed for others."""
        return {
            "connections": len(self._connections),
            "requests_under_way": self._requests.under_way,
            "displaced_connections": self._connections.displaced,
        }

    # ---- clients

    async def _serve(self, listeners: dict[int, socket.socket]) -> None:
        if (reactor := current_reactor()) is not None:
            # It lingers only as long as no request is in a task.
            reactor.may_linger = lambda: self._requests.under_way <= waiting_without_task()
        async with trio.open_nursery() as self._clients:
            with self._accepting:
                async with trio.open_nursery() as nursery:
                    for index, listener in listeners.items():
                        nursery.start_soon(self._accept, index, listener)

    async def _accept(self, index: int, listener: socket.socket) -> None:
        """Accept until cancelled."""
        with listener:
            while True:
                await trio.lowlevel.wait_readable(listener)
                await accept_waiting(listener, partial(self._take_in, index), "HTTP clients")

    def _take_in(self, index: int, stream: TcpStream, peer: tuple[str, int]) -> None:
        """Serve a client that a listener has accepted, or close it. A load balancer may announce its address first."""
        proxy = self._transports[index].proxy
        deadline = trio.current_time() + self._head_timeout_s
        ip, port = peer
        if proxy.refuses(ip):
            self._refuse(stream, "proxy_protocol")
        elif not proxy.expects_header(ip):
            self._admit(index, stream, HostPort(ip, port), deadline)
        else:
            if len(self._header_scopes) >= HEADERS_AWAITED_MAX:
                self._header_scopes.pop(next(iter(self._header_scopes))).cancel()
            self._header_scopes[stream] = scope = trio.CancelScope(deadline=deadline)
            self._clients.start_soon(self._read_header, index, stream, HostPort(ip, port), scope)

    async def _read_header(self, index: int, stream: TcpStream, sender: HostPort, scope: trio.CancelScope) -> None:
        """Admit a client once its address is known. Until then only the bound of such connections has it."""
        found, failure = None, "no whole PROXY header in time, or before others came"
        try:
            with scope:
                found = await read_header(stream, required=self._transports[index].proxy.required)
                failure = ""
        except (ProxyHeaderInvalid, OSError, trio.ClosedResourceError) as error:
            failure = str(error)
        finally:
            self._header_scopes.pop(stream, None)
            if failure:
                get_logger().warning("no HTTP client behind a load balancer", sender=str(sender), reason=failure)
                self._refuse(stream, "proxy_protocol")
        if found is not None:
            header, received = found
            client = header.client if header is not None and header.client is not None else sender
            self._admit(index, stream, client, scope.deadline, received)
        else:  # a health check, mostly
            stream.close_now()

    def _admit(self, index: int, stream: TcpStream, address: HostPort, deadline: float, received: bytes = b"") -> None:
        """Serve a client of which the address is known, or close it. ``deadline``: of its TLS handshake."""
        transport, ip = self._transports[index], address.host
        self._metrics.new_connections.inc()
        if not transport.networks.allows(ip):
            self._refuse(stream, "network")
            return
        client = HttpClient(str(address), ip, transport.scheme, listener=index, connection=next(self._numbers))
        connection = self._connections.admit(client)
        if connection is None:
            self._refuse(stream, "max_connections")
            return
        stream.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._clients.start_soon(self._serve_client, stream, transport, connection, deadline, received)

    def _refuse(self, stream: TcpStream, reason: str) -> None:
        stream.close_now()
        self._metrics.closed_connections.labels(reason=reason).inc()

    async def _serve_client(
        self, transport: TcpStream, listener: HttpTransport, connection: Connection, deadline: float, received: bytes
    ) -> None:
        try:
            with connection.scope:
                stream = await self._open_stream(transport, listener, connection, deadline)
                if stream is not None:
                    connection.http = HttpConnection(stream, connection.client, self._services, received)
                    if self._accepting.cancel_called:  # a drain does not know of it
                        connection.http.drain()
                    await connection.http.serve()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the client has gone
        except Exception as error:  # noqa: BLE001 -- a barrier around each connection
            get_logger().error("an HTTP connection met a defect", client=connection.client.address, exc_info=error)
        finally:
            self._connections.remove(connection)
            await close_forcefully(transport)

    async def _open_stream(
        self, transport: TcpStream, listener: HttpTransport, connection: Connection, deadline: float
    ) -> HttpStream | None:
        """Return a client's stream, behind its TLS handshake; None where that fails, or takes too long."""
        labels, index = self._metrics.tls_handshakes.labels, str(connection.client.listener)
        try:
            with trio.fail_at(deadline):
                stream = await listener.open_stream(transport)
        except (TlsFailed, trio.TooSlowError) as error:
            reason = error.kind if isinstance(error, TlsFailed) else "timeout"
            labels(listener=index, result="failure", reason=reason).inc()
            get_logger().warning("no TLS with an HTTP client", client=connection.client.address, reason=str(error))
            await close_gracefully(transport)  # the client reads the alert
            return None
        if isinstance(stream, TlsStream):
            labels(listener=index, result="success", reason="").inc()
            certificate = stream.peer_certificate()
            if certificate and listener is not self._transports[connection.client.listener]:
                return None  # a reload came in between: its authority may be trusted no longer
            connection.client = replace(connection.client, certificate=certificate)
        return stream


def _passer(context: WorkerContext) -> RelayRequestChannel | None:
    descriptor = context.descriptors.relay_requests
    return RelayRequestChannel(adopt_socket(descriptor)) if descriptor >= 0 else None


def _dial(config: Config) -> Dial:
    """Return a function that connects to upstreams, but to no listener of this cluster, the operators' port included.

    Raises ConfigError.
    """
    binds = [bind for _key, bind in all_binds(config)]
    return dial_brokers(config.brokers, binds, uses_tls=web_uses_tls(config))


def _response_headers(config: Config) -> Headers:
    return [(name.lower().encode(), value.encode()) for name, value in config.http.response_headers.items()]
