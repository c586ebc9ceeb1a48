"""The receiver process: listeners, connection limits, signals, and a shutdown that loses no committed request."""

import contextlib
import functools
import signal
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import trio

from analytics.receiver.admin_endpoint import AdminEndpoint
from analytics.receiver.config import Config, Tls, parse_address
from analytics.receiver.group_commit import GroupCommit
from analytics.receiver.http_server import HttpServer, Peer
from analytics.receiver.metrics import Metrics
from analytics.receiver.tokens import reloading_token_digests
from analytics.receiver.write_endpoint import WriteEndpoint
from analytics.spool.repair import RepairReport
from analytics.spool.writer import Disk, SpoolLimits, SpoolWriter
from proxy.common import http_server
from proxy.common.errors import ConfigError
from proxy.common.logs import get_logger
from proxy.common.networks import network_of, peer_address
from proxy.common.reloading_file import ReloadingFile

ADMIN_CONNECTIONS_MAX = 32
TLS_KEY = "listen.tls"
_TLS_VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}


@dataclass(frozen=True)
class Addresses:
    """Addresses of a running receiver: `host:port` of each listener."""

    write: list[str]
    admin: list[str]


def open_spool(config: Config, disk: Disk | None = None) -> SpoolWriter:
    """Open the spool for writing, after a repair. Raises SpoolError and OSError."""
    spool = config.spool
    limits = SpoolLimits(spool.segment_bytes_max, spool.total_bytes_max, spool.free_bytes_min)
    return SpoolWriter(Path(spool.directory), limits, disk)


async def serve(
    config: Config,
    writer: SpoolWriter,
    task_status: trio.TaskStatus[Addresses] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run until SIGTERM or SIGINT; leave the writer open. Raises ConfigError, and OSError if an address is taken."""
    metrics = Metrics()
    _log_repair(writer.repair_report, metrics)
    commit = GroupCommit(writer, config.spool, metrics)
    endpoint = WriteEndpoint(commit, reloading_token_digests(config.authentication.token_files), config.limits, metrics)
    probes = AdminEndpoint(writer, metrics)
    tls = reloading_tls_context(config.listen.tls)
    server = HttpServer(endpoint, config.limits)
    metrics.held_bytes.set_function(lambda: server.body_budget.held_bytes)
    senders = ConnectionLimiter(server, tls, config.limits.max_connections, metrics)
    operators = http_server.HttpServer(probes.respond, ADMIN_CONNECTIONS_MAX)
    write_listeners = await _listen("listen.bind", config.listen.bind)
    admin_listeners = await _listen("admin.bind", config.admin.bind)
    addresses = Addresses(_addresses_of(write_listeners), _addresses_of(admin_listeners))
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals, contextlib.ExitStack() as closing:
        for listener in admin_listeners:
            closing.callback(listener.socket.close)
        async with trio.open_nursery() as background, trio.open_nursery() as committing:
            for listener in admin_listeners:
                background.start_soon(operators.serve, listener)
            committing.start_soon(commit.commit_groups)
            _log_ready(config, addresses)
            task_status.started(addresses)
            await _serve_senders(senders, write_listeners, signals, probes, config.limits.drain_timeout_ms / 1000)
            commit.stop_accepting()
            await commit.finished.wait()
            background.cancel_scope.cancel()
    get_logger().info("the receiver has ended; all acknowledged requests are on the disk")


def reloading_tls_context(config: Tls | None) -> ReloadingFile[ssl.SSLContext] | None:
    """Return the TLS context for new connections, reloaded when its files change; None for plain HTTP.

    Raises ConfigError.
    """
    if config is None:
        return None
    files = [file for file in (config.certificate, config.key, config.client_ca) if file]
    return ReloadingFile(TLS_KEY, files, lambda: _tls_context(config))


def _tls_context(config: Tls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _TLS_VERSIONS[config.minimum_version]
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(config.certificate, config.key, password=_no_passphrase)
        if config.client_ca:
            context.load_verify_locations(config.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except ssl.SSLError as error:
        raise ConfigError(f"{TLS_KEY}: {error.reason or error}: do certificate, key and client_ca fit?") from None
    return context


def _no_passphrase() -> str:
    raise ConfigError(f"{TLS_KEY}.key: needs a passphrase, which cannot be entered here")


class ConnectionLimiter:
    """Limit on a server's connections, with the TLS handshake if configured.

    Where the most are open, a new one displaces another that waits for its peer: one without authentication before
    others, then the oldest of the network that has most of them. While all are being answered, which ends by itself, a
    new one is closed at once.
    """

    def __init__(
        self,
        server: HttpServer,
        tls: ReloadingFile[ssl.SSLContext] | None,
        connections_max: int,
        metrics: Metrics,
    ) -> None:
        self.server = server
        self._tls = tls
        self._connections_max = connections_max
        self._metrics = metrics
        self._connections: dict[Peer, trio.CancelScope] = {}  # in the order in which they came
        metrics.connections.set_function(lambda: len(self._connections))

    async def handle_connection(self, stream: trio.SocketStream) -> None:
        """Serve one connection and close it. Raises no error of the connection."""
        peer, scope = Peer(peer_address(stream)), trio.CancelScope()
        if len(self._connections) >= self._connections_max and not self._displace_connection():
            self._metrics.connections_refused.inc()
            get_logger().warning("closed a connection at once: there are too many", sender=peer.address)
            await trio.aclose_forcefully(stream)
            return
        self._connections[peer] = scope
        try:
            with scope:
                await self._serve(stream, peer)
        except Exception:  # noqa: BLE001 -- the barrier around one connection
            get_logger().exception("a connection failed; this is a bug")
        finally:
            self._connections.pop(peer, None)
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(stream)

    def _displace_connection(self) -> bool:
        """End a connection that waits for its peer; return False if there is none."""
        waiting = [peer for peer in self._connections if not peer.answering]
        if not waiting:
            return False
        shares = {peer: (peer.authenticated, network_of(peer.address)) for peer in waiting}
        counts = Counter(shares.values())
        displaced = min(waiting, key=lambda peer: (peer.authenticated, -counts[shares[peer]]))
        self._connections.pop(displaced).cancel()
        self._metrics.connections_displaced.inc()
        get_logger().warning(
            "closed a connection in favour of a newer one: there are too many",
            sender=displaced.address,
            connections_of_its_network=counts[shares[displaced]],
        )
        return True

    async def _serve(self, stream: trio.SocketStream, peer: Peer) -> None:
        if self._tls is None:
            await self.server.serve_connection(stream, peer)
            return
        context = await self._tls.current_value()
        secured = trio.SSLStream(stream, context, server_side=True, https_compatible=True)
        try:
            with trio.fail_after(self.server.limits.header_timeout_ms / 1000):
                await secured.do_handshake()
        except (trio.BrokenResourceError, trio.TooSlowError) as error:
            self._metrics.tls_failures.inc()
            get_logger().warning(
                "a TLS handshake failed", sender=peer.address, reason=str(error.__cause__ or "it took too long")
            )
            return
        peer.authenticated = context.verify_mode is ssl.CERT_REQUIRED
        await self.server.serve_connection(secured, peer)


async def _serve_senders(
    senders: ConnectionLimiter,
    listeners: list[trio.SocketListener],
    signals: AsyncIterator[int],
    probes: AdminEndpoint,
    drain_s: float,
) -> None:
    """Accept connections until a signal; then give the requests in progress `drain_s` seconds to finish."""
    async with trio.open_nursery() as connections:
        async with trio.open_nursery() as accepting:
            serve_listeners = functools.partial(trio.serve_listeners, handler_nursery=connections)
            accepting.start_soon(serve_listeners, senders.handle_connection, listeners)
            number = await anext(signals)
            get_logger().info("shutting down; finishing the requests in progress", signal=signal.Signals(number).name)
            accepting.cancel_scope.cancel()
        probes.draining = True
        senders.server.start_drain()
        connections.cancel_scope.deadline = trio.current_time() + drain_s


async def _listen(key: str, bind: str) -> list[trio.SocketListener]:
    host, port = parse_address(key, bind)
    try:
        return await trio.open_tcp_listeners(port, host=host)
    except OSError as error:
        raise ConfigError(f"{key}: {bind}: {error.strerror or error}") from None


def _addresses_of(listeners: list[trio.SocketListener]) -> list[str]:
    names = [listener.socket.getsockname() for listener in listeners]
    return [f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}" for name in names]


def _log_ready(config: Config, addresses: Addresses) -> None:
    get_logger().info(
        "the receiver takes writes",
        write=addresses.write,
        admin=addresses.admin,
        spool=config.spool.directory,
        tls=config.listen.tls is not None,
        tokens=bool(config.authentication.token_files),
    )


def _log_repair(found: RepairReport | None, metrics: Metrics) -> None:
    """Log what the repair of the newest segment found: an interrupted write is usual, anything else is an error."""
    if found is None:
        return
    log = get_logger().bind(segment=str(found.segment), whole_records=found.records)
    metrics.spool_damages.set(len(found.damaged) + found.lost_committed)
    for damage in found.damaged:
        log.error(
            "a place in the spool is damaged; its requests are lost, the rest can be read. Is the disk healthy?",
            begin=damage.offset,
            end=damage.next_offset,
            reason=damage.reason,
        )
    if found.torn is not None:
        write_log = log.error if found.lost_committed else log.info
        what = (
            "what was committed is damaged"
            if found.lost_committed
            else "an interrupted write was cut off; it had not been acknowledged"
        )
        write_log(what, begin=found.torn.offset, end=found.torn.next_offset, kept_at=str(found.torn_copy))
