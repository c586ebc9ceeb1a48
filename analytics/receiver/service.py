"""The receiver as a whole: listeners, connections, signals, and an end that loses nothing."""

import functools
import signal
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import trio

from analytics.receiver.commit import GroupCommit
from analytics.receiver.config import Config, address
from analytics.receiver.http import Door
from analytics.receiver.metrics import Metrics
from analytics.receiver.probes import Probes
from analytics.receiver.tls import watch_tls
from analytics.receiver.tokens import watch_tokens
from analytics.receiver.write import WriteEndpoint
from analytics.spool.repair import Repair
from analytics.spool.writer import Disk, SpoolLimits, SpoolWriter
from proxy.common.errors import ConfigError
from proxy.common.logs import get_logger
from proxy.common.reloading_file import ReloadingFile

ADMIN_CONNECTIONS_MAX = 32


@dataclass(frozen=True)
class Addresses:
    """Where a running receiver is reached: `host:port` of each listener."""

    write: list[str]
    admin: list[str]


def open_spool(config: Config, disk: Disk | None = None) -> SpoolWriter:
    """The spool, mended; raises SpoolError and OSError."""
    spool = config.spool
    limits = SpoolLimits(spool.segment_bytes_max, spool.total_bytes_max, spool.free_bytes_min)
    return SpoolWriter(Path(spool.directory), limits, disk)


async def serve(
    config: Config,
    writer: SpoolWriter,
    task_status: trio.TaskStatus[Addresses] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run until SIGTERM or SIGINT; the writer stays open. Raises ConfigError, and OSError if an address is taken."""
    metrics = Metrics()
    _tell_repair(writer.repaired, metrics)
    commit = GroupCommit(writer, config.spool, metrics)
    endpoint = WriteEndpoint(commit, watch_tokens(config.authentication.token_files), config.limits, metrics)
    probes = Probes(writer, metrics)
    tls = watch_tls(config.listen.tls)
    door = Door(endpoint, config.limits)
    metrics.held_bytes.set_function(lambda: door.bodies.held_bytes)
    senders = Entrance(door, tls, config.limits.max_connections, metrics)
    operators = Entrance(Door(probes, config.limits), None, ADMIN_CONNECTIONS_MAX, None)
    write_listeners = await _listen("listen.bind", config.listen.bind)
    admin_listeners = await _listen("admin.bind", config.admin.bind)
    addresses = Addresses(_names(write_listeners), _names(admin_listeners))
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as background, trio.open_nursery() as committing:
            background.start_soon(trio.serve_listeners, operators.enter, admin_listeners)
            committing.start_soon(commit.run)
            _tell_ready(config, addresses)
            task_status.started(addresses)
            await _serve_senders(senders, write_listeners, signals, probes, config.limits.drain_timeout_ms / 1000)
            commit.close()
            await commit.finished.wait()
            background.cancel_scope.cancel()
    get_logger().info("the receiver has ended; all that was answered with success is on the disk")


class Entrance:
    """How connections come to a door: counted, after a TLS handshake if need be. `metrics`: None for operators'."""

    def __init__(
        self, door: Door, tls: ReloadingFile[ssl.SSLContext] | None, connections_max: int, metrics: Metrics | None
    ) -> None:
        self.door = door
        self._tls = tls
        self._connections_max = connections_max
        self._metrics = metrics
        self._connections = 0

    async def enter(self, stream: trio.SocketStream) -> None:
        """Serve one connection; no error of one leaves here."""
        if self._connections >= self._connections_max:
            if self._metrics is not None:
                self._metrics.connections_refused.inc()
            get_logger().warning("closed a connection at once: there are too many", connections=self._connections)
            await trio.aclose_forcefully(stream)
            return
        self._count(1)
        try:
            await self._serve(stream)
        except Exception:  # noqa: BLE001 -- the barrier around one connection
            get_logger().exception("a connection failed; this is a bug")
        finally:
            self._count(-1)
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(stream)

    def _count(self, change: int) -> None:
        self._connections += change
        if self._metrics is not None:
            self._metrics.connections.set(self._connections)

    async def _serve(self, stream: trio.SocketStream) -> None:
        address = _peer(stream)
        if self._tls is None:
            await self.door.serve(stream, address)
            return
        context = await self._tls.current_value()
        secured = trio.SSLStream(stream, context, server_side=True, https_compatible=True)
        try:
            with trio.fail_after(self.door.limits.header_timeout_ms / 1000):
                await secured.do_handshake()
        except (trio.BrokenResourceError, trio.TooSlowError) as error:
            if self._metrics is not None:
                self._metrics.tls_failures.inc()
            get_logger().warning(
                "a TLS handshake failed", sender=address, reason=str(error.__cause__ or "it took too long")
            )
            return
        await self.door.serve(secured, address)


def _peer(stream: trio.SocketStream) -> str:
    """The peer's address; empty if it is gone already."""
    try:
        return str(stream.socket.getpeername()[0])
    except OSError:
        return ""


async def _serve_senders(
    senders: Entrance,
    listeners: list[trio.SocketListener],
    signals: AsyncIterator[int],
    probes: Probes,
    drain_s: float,
) -> None:
    """Accept until a signal comes; then let those who are there finish what they have begun."""
    async with trio.open_nursery() as connections:
        async with trio.open_nursery() as accepting:
            serve_listeners = functools.partial(trio.serve_listeners, handler_nursery=connections)
            accepting.start_soon(serve_listeners, senders.enter, listeners)
            number = await anext(signals)
            get_logger().info("told to end; finishing the requests that are there", signal=signal.Signals(number).name)
            accepting.cancel_scope.cancel()
        probes.draining = True
        senders.door.drain()
        connections.cancel_scope.deadline = trio.current_time() + drain_s


async def _listen(key: str, bind: str) -> list[trio.SocketListener]:
    host, port = address(key, bind)
    try:
        return await trio.open_tcp_listeners(port, host=host)
    except OSError as error:
        raise ConfigError(f"{key}: {bind}: {error.strerror or error}") from None


def _names(listeners: list[trio.SocketListener]) -> list[str]:
    names = [listener.socket.getsockname() for listener in listeners]
    return [f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}" for name in names]


def _tell_ready(config: Config, addresses: Addresses) -> None:
    get_logger().info(
        "the receiver takes writes",
        write=addresses.write,
        admin=addresses.admin,
        spool=config.spool.directory,
        tls=config.listen.tls is not None,
        tokens=bool(config.authentication.token_files),
    )


def _tell_repair(found: Repair | None, metrics: Metrics) -> None:
    """Say what the last run's end left behind: an interrupted write is nothing unusual, anything else is."""
    if found is None:
        return
    log = get_logger().bind(segment=str(found.segment), whole_records=found.records)
    metrics.spool_damages.set(len(found.damaged) + found.lost)
    for damage in found.damaged:
        log.error(
            "a place in the spool is damaged; its requests are lost, the rest can be read. Is the disk healthy?",
            begin=damage.offset,
            end=damage.next_offset,
            reason=damage.reason,
        )
    if found.torn is not None:
        tell = log.error if found.lost else log.info
        what = "what was committed is damaged" if found.lost else "an interrupted write was cut off; nobody was told it"
        tell(what, begin=found.torn.offset, end=found.torn.next_offset, kept_at=str(found.aside))
