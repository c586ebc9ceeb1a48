"""The supervisor's life: bind, start, watch, drain, end."""

import os
import secrets
import signal
from collections.abc import Callable
from pathlib import Path

import trio

from proto.roles import Role
from proto.sealed_principal import SEAL_KEY_BYTES
from proxy import __version__
from proxy.config.load import ConfigError, load_config
from proxy.config.types import Config
from proxy.runtime.logs import configure_logs, get_logger
from proxy.supervisor.admin import serve_admin
from proxy.supervisor.cluster import Cluster, ReloadRefused
from proxy.supervisor.control import Control
from proxy.supervisor.open_files import allow_open_files
from proxy.supervisor.report import Report
from proxy.supervisor.sockets import BACKLOG, CONTROL_SOCKET, RuntimeDirectory, StartFailed, bind_tcp


class Supervisor:
    """One running cluster."""

    def __init__(self, config: Config, config_file: Path) -> None:
        self._config_file = config_file
        self._directory = RuntimeDirectory(config.cluster.runtime_dir)
        self._admin = bind_tcp("admin.bind", config.admin.bind)
        self._cluster = Cluster(config, self._directory, secrets.token_bytes(SEAL_KEY_BYTES))
        self._drain_wanted = trio.Event()
        self._reloading = trio.Lock()

    async def run(self) -> None:
        """Run until drained. Raises StartFailed."""
        report = Report(self._cluster)
        control = Control(report, self._drain_wanted.set, self._reload)
        ready = trio.Event()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch_signals, nursery)
                nursery.start_soon(control.serve, self._directory.bind(CONTROL_SOCKET))
                self._admin.listen(BACKLOG)
                nursery.start_soon(serve_admin, self._admin, report)
                nursery.start_soon(self._cluster.run, ready)
                nursery.start_soon(self._announce, ready)
                await self._drain_wanted.wait()
                get_logger().info("draining", timeout_ms=self._cluster.config.limits.drain_timeout_ms)
                await self._cluster.drain()
                nursery.cancel_scope.cancel()
        finally:
            self._cluster.stop_at_once()
            self._cluster.close()
            self._admin.close()
            self._directory.clear()
        get_logger().info("ended")

    async def _announce(self, ready: trio.Event) -> None:
        await ready.wait()
        config = self._cluster.config
        get_logger().info(
            "ready for clients",
            version=__version__,
            listeners=",".join(listener.bind for listener in config.listener),
            admin=config.admin.bind,
            brokers=config.brokers.service_url,
            authentication=config.authentication.enabled,
            workers=len(self._cluster.slots),
        )

    async def _watch_signals(self, nursery: trio.Nursery) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as received:
            async for number in received:
                if number == signal.SIGHUP:
                    nursery.start_soon(self._reload_and_log)
                elif self._drain_wanted.is_set():
                    get_logger().warning("a second signal: ending at once")
                    raise StopAtOnce
                else:
                    self._drain_wanted.set()

    async def _reload_and_log(self) -> None:
        try:
            await self._reload()
        except (ConfigError, ReloadRefused) as error:
            get_logger().error("the configuration was not reloaded; the old one stays", reason=str(error))

    async def _reload(self) -> None:
        """Read the configuration again and give it to all workers. Raises ConfigError, ReloadRefused.

        Shielded: an operator who leaves in the middle must not leave half of the workers with another configuration.
        """
        with trio.CancelScope(shield=True):
            async with self._reloading:
                config = load_config(self._config_file, os.environ)
                await self._cluster.reload(config)
                get_logger().info("the configuration was reloaded")


class StopAtOnce(Exception):
    """An operator's second signal."""


def serve(config: Config, config_file: Path, fail: Callable[[str], None]) -> None:
    """Run a cluster in the foreground; ``fail`` is called with the reason where it cannot start or must stop."""
    configure_logs(config.log, Role.SUPERVISOR, 0)
    allow_open_files(config)
    try:
        supervisor = Supervisor(config, config_file)
    except StartFailed as error:
        fail(str(error))
        return
    try:
        trio.run(supervisor.run, strict_exception_groups=True)
    except* StartFailed as group:
        fail("; ".join(sorted({str(error) for error in _leaves(group)})))
    except* StopAtOnce:
        fail("ended at once, as asked")


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    """The exceptions inside nested groups."""
    found: list[BaseException] = []
    for error in group.exceptions:
        found.extend(_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    return found
