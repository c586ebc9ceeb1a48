"""The supervisor process: start, signals, reload, upgrade, shutdown."""

import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import msgspec
import trio

from proto.roles import Role
from proxy import __version__
from proxy.common.errors import ConfigError, ProxyError
from proxy.common.libraries import OPENSSL_VERSION, PYTHON_VERSION
from proxy.common.logs import get_logger
from proxy.config.changes import changes_that_need_new_processes, new_binds, reload_refusal
from proxy.config.http import http_warnings
from proxy.config.load import load_config, load_plan
from proxy.config.memory import MemoryPlan
from proxy.config.methods import forwarding_warnings
from proxy.config.types import Config
from proxy.runtime.loop.tasks import seconds
from proxy.runtime.observability.logs import configure_logs
from proxy.runtime.process.hardening import become_subreaper, harden_process
from proxy.supervisor.broker_changes import FILES_NOTE, BrokerChanges
from proxy.supervisor.cluster.cluster import ENDED_BEFORE_EXEC, Cluster
from proxy.supervisor.config_watch import ConfigFileWatcher, ReloadMetrics
from proxy.supervisor.handover.exec_handover import (
    HandoverState,
    SerializedHandover,
    exec_next_program,
    installed_program_fault,
)
from proxy.supervisor.handover.unit_store import UnitStore, restore
from proxy.supervisor.operators.admin_channel import ADMIN_BACKLOG, AdminChannel
from proxy.supervisor.operators.audit import AuditWriter, close_destination, open_destination
from proxy.supervisor.operators.connections import ClusterConnections
from proxy.supervisor.operators.control import ControlServer, UpgradeRefused
from proxy.supervisor.operators.events import RecentEvents
from proxy.supervisor.operators.log_levels import LogLevelControl
from proxy.supervisor.operators.overview import ClusterOverview
from proxy.supervisor.operators.report import ClusterReport
from proxy.supervisor.processes.children import child_reaper, end_descendants
from proxy.supervisor.processes.configure import ReloadRefused
from proxy.supervisor.processes.fork_server import ForkServer
from proxy.supervisor.processes.library_files import watch_library_files
from proxy.supervisor.processes.signals import SIGNALS, in_thread_without_signals
from proxy.supervisor.processes.worker_process import WorkerProcess
from proxy.supervisor.startup.open_files import raise_open_file_limit
from proxy.supervisor.startup.service_manager import ServiceManager
from proxy.supervisor.startup.sockets import CONTROL_SOCKET, RuntimeDirectory, StartFailed, bind_tcp

SIGNALS_GRACE_S = 0.01
DRAIN_END_S_MAX = 10.0
"""How much longer than its time limit a drain may take, even where a worker hangs."""
REPLY_GRACE_S = 0.1
"""Time for the operator's connection to receive its reply before an upgrade ends it."""

NOT_RELOADED = "the configuration was not reloaded; the old one stays"
CONFIG_NOTE = "the changed configuration is not in force; the log says why"


class Supervisor:
    """One running cluster, its operators' interfaces and its configuration file."""

    def __init__(
        self,
        config: Config,
        config_file: Path,
        handover: HandoverState,
        events: RecentEvents,
        unit_store: UnitStore | None = None,
    ) -> None:
        self._events = events
        self._config_file = config_file
        unit_store = unit_store or UnitStore(ServiceManager())
        self._manager = unit_store.manager
        self._signalled_reload = trio.Lock()
        self._runtime_dir = RuntimeDirectory(config.cluster.runtime_dir, handover.runtime_lock_fd)
        self._admin_listener = _bind_admin(config, handover)
        self._control_socket = handover.control_socket
        self._cluster = Cluster(
            config, self._runtime_dir, handover, ForkServer(), self._serve_admin, unit_store=unit_store
        )
        self._report = ClusterReport(self._cluster)
        self._audit = AuditWriter(self._cluster.audit_pipe[0], self._cluster.registry)
        self._audit.set_destination(_open_audit(config, handover))
        overview = ClusterOverview(self._cluster, self._report, events)
        self._admin_channel = AdminChannel(self._report, overview, self._admin_listener.fileno)
        self._reload_metrics = ReloadMetrics(self._cluster.registry, time.time)
        self._config_watcher = ConfigFileWatcher(
            config_file, lambda: self._cluster.config.reload.watch_interval_ms, self._reload_changed_file
        )
        self._drain_wanted = trio.Event()
        self._upgrade_wanted = trio.Event()
        self._reload_lock = trio.Lock()
        self._broker_changes = BrokerChanges(self._cluster, self._report.brokers_accept_proxy, self._reload_lock)
        self._broker_changes.on_files_taken_over = self._config_watcher.note_chance
        self._report.supervisor_notes = self._notes
        self._reload_shields: set[trio.CancelScope] = set()
        self._is_ending = False
        self._change_refused_because = ""
        self._exec_lock = trio.Lock()
        self._log_levels = LogLevelControl(self._cluster)
        if handover.drain_requested:
            self._drain_wanted.set()

    async def run(self) -> None:
        """Run until drained. Raises StartFailed."""
        control = ControlServer(
            self._report,
            ClusterConnections(self._cluster),
            drain=self._drain_wanted.set,
            reload=self._reload,
            upgrade=self._prepare_upgrade,
            log_levels=self._log_levels,
            set_unready=self._set_unready,
        )
        ready = trio.Event()
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self._watch_signals, nursery)
                if self._control_socket is None:
                    self._control_socket = self._runtime_dir.bind_socket(CONTROL_SOCKET)
                nursery.start_soon(self._manager.feed_watchdog)
                nursery.start_soon(child_reaper.reap_adopted)
                nursery.start_soon(self._audit.run)
                nursery.start_soon(self._cluster.fork_server.run)
                nursery.start_soon(control.serve, self._control_socket)
                self._admin_listener.listen(ADMIN_BACKLOG)
                nursery.start_soon(self._cluster.run, ready)
                nursery.start_soon(self._announce_ready, ready)
                nursery.start_soon(self._upgrade)
                nursery.start_soon(self._log_levels.run)
                for watch in (self._config_watcher.run, self._broker_changes.watch_files, self._watch_library_files):
                    nursery.start_soon(_run_when_ready, ready, watch)
                await self._drain_wanted.wait()
                await self._announce_shutdown()
                async with self._exec_lock:  # during an exec, the next program drains
                    await self._drain()
                self._unshield_reloads()
                nursery.cancel_scope.cancel()
        finally:
            self._cluster.kill_workers()
            self._cluster.close_sockets()
            self._admin_listener.close()
            self._runtime_dir.remove_sockets()
        get_logger().info("ended")

    async def _announce_shutdown(self) -> None:
        """Report not ready, and serve on for shutdown.delay_ms, until load balancers have noticed."""
        cluster = self._cluster
        cluster.leaving = True
        await self._manager.notify("STOPPING=1", "STATUS=draining")
        has_clients = cluster.started or cluster.generation > 1  # else no load balancer sends clients yet
        delay_ms = cluster.config.shutdown.delay_ms if has_clients else 0
        over_at = trio.current_time() + seconds(delay_ms)
        if delay_ms:
            get_logger().info("leaving; clients are accepted for a while yet", delay_ms=delay_ms)
        if cluster.generation > 1:  # workers from before the exec need their channels served
            await cluster.all_started.wait()
        await trio.sleep_until(over_at)

    async def _drain(self) -> None:
        timeout_ms = self._cluster.config.limits.drain_timeout_ms
        get_logger().info("draining", timeout_ms=timeout_ms)
        with trio.move_on_after(seconds(timeout_ms) + DRAIN_END_S_MAX) as limit:
            await self._cluster.drain()
        if limit.cancelled_caught:
            get_logger().error("the drain is not over in time; ending all workers")

    async def _serve_admin(self, worker: WorkerProcess) -> None:
        await self._admin_channel.serve(worker)

    async def _watch_library_files(self) -> None:
        await watch_library_files(lambda: self._cluster.config, partial(self._cluster.replace_all, [Role.AUTH]))

    async def _announce_ready(self, ready: trio.Event) -> None:
        await ready.wait()
        config = self._cluster.config
        get_logger().info(
            "ready for clients",
            version=__version__,
            python=PYTHON_VERSION,
            openssl=OPENSSL_VERSION,
            listeners=",".join(listener.bind for listener in config.listener),
            http_listeners=",".join(listener.bind for listener in config.http_listener),
            admin=config.admin.bind,
            brokers=config.brokers.service_url,
            authentication=config.authentication.enabled,
            workers=len(self._cluster.slots),
        )
        await self._manager.notify("READY=1", "STATUS=ready for clients")

    async def _watch_signals(
        self, nursery: trio.Nursery, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        with trio.open_signal_receiver(*SIGNALS) as received:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # an upgrade holds them back
            task_status.started()
            async for number in received:
                if number == signal.SIGHUP:
                    nursery.start_soon(self._reload_and_log)
                elif self._drain_wanted.is_set():
                    get_logger().warning("a second signal: ending at once")
                    self._unshield_reloads()
                    raise StoppedBySecondSignal
                else:
                    self._drain_wanted.set()

    async def _reload_and_log(self) -> None:
        """Reload at a signal, and tell the service manager: one reload after the other, or an earlier one's end would
        be taken for that of the last.
        """
        async with self._signalled_reload:
            status = "STATUS=ready for clients"
            await self._manager.notify_reloading()
            try:
                await self._reload()
            except (ConfigError, ReloadRefused) as error:
                get_logger().error(NOT_RELOADED, reason=str(error))
                status = f"STATUS=ready for clients; {NOT_RELOADED}; the log says why"
            finally:
                with trio.CancelScope(shield=True):
                    await self._manager.notify("READY=1", status)

    def _notes(self) -> list[str]:
        """Return what operators should know: what has changed and is not in force."""
        notes = [] if self._reload_metrics.successful else [CONFIG_NOTE]
        return [*notes, FILES_NOTE] if self._broker_changes.are_files_held else notes

    async def _reload_changed_file(self) -> bool:
        """Reload a changed file, unless the change makes no difference; return False if it should be tried again.

        The same failure is logged once.
        """
        if self._drain_wanted.is_set():
            return True
        before, self._change_refused_because = self._change_refused_because, ""
        try:
            await self._reload_if(is_due=self._differs)
        except Exception as error:  # noqa: BLE001 -- no operator waits for it, the cluster goes on
            self._change_refused_because = because = repr(error)
            if because == before:
                return False
            if isinstance(error, ConfigError | ReloadRefused):
                get_logger().error(NOT_RELOADED, reason=str(error))
            else:
                get_logger().error("a changed configuration met a defect; the old one stays", exc_info=error)
            return False
        return True

    def _differs(self, config: Config) -> bool:
        return config != self._cluster.config

    async def _reload(self, force: bool = False) -> None:  # noqa: FBT001, FBT002 -- a callback for operators
        """Read the configuration file and apply it to all workers. Raises ConfigError, ReloadRefused."""
        self._config_watcher.note_reload()
        await self._reload_if(is_due=lambda _config: True, force=force)

    async def _reload_if(self, *, is_due: Callable[[Config], bool], force: bool = False) -> None:
        """Read the configuration file and apply it to all workers if ``is_due``. Raises ConfigError, ReloadRefused.

        ``force``: even if no broker accepts the proxy with it.

        Shielded: an operator who leaves in the middle must not leave half of the workers with another configuration.
        """
        with trio.CancelScope(shield=not self._is_ending) as shield:
            self._reload_shields.add(shield)
            try:
                async with self._reload_lock:
                    try:
                        await self._apply_config(is_due, force=force)
                    except Exception:
                        self._reload_metrics.record_failure()
                        raise
                    self._reload_metrics.record_success()
            finally:
                self._reload_shields.discard(shield)

    def _unshield_reloads(self) -> None:
        """Make reloads cancellable, since none may delay the end of the cluster."""
        self._is_ending = True
        for shield in self._reload_shields:
            shield.shield = False

    async def _apply_config(self, is_due: Callable[[Config], bool], *, force: bool) -> None:
        forwarders, level_before = self._cluster.config.cluster.forwarders, self._cluster.config.log.level
        plan = load_plan(self._config_file, os.environ, running_forwarders=forwarders)
        config = plan.require().config
        if not is_due(config):
            return
        changes = self._broker_changes
        untried = force or reload_refusal(self._cluster.config, config)  # for which the cluster refuses it
        stamps = await (changes.read_stamps(config) if untried else changes.require_acceptance(config))
        needs_processes = changes_that_need_new_processes(self._cluster.config, config)
        # Running processes would refuse what they cannot use; new ones would only fail to start.
        if needs_processes and (fault := await installed_program_fault(self._config_file)):
            raise ReloadRefused(fault)
        # May raise; nothing to open needs no thread.
        audit = await in_thread_without_signals(open_destination, config.audit) if config.audit.events else -1
        try:
            await self._cluster.reload(config)
        except BaseException:
            close_destination(audit)
            raise
        self._audit.set_destination(audit)
        changes.on_applied(stamps)
        configure_logs(config.log, Role.SUPERVISOR, 0, self._events)
        await self._log_levels.on_reloaded(is_level_new=config.log.level != level_before)
        get_logger().info("the configuration was reloaded")
        _log_plan(plan)

    # ---- upgrade

    def _set_unready(self, because: str | None) -> None:
        """Report the cluster as not ready, or no longer; nothing else changes."""
        self._cluster.unready_because = because
        if because is None:
            get_logger().info("an operator ends what was unready: readiness is what it is")
        else:
            get_logger().warning("an operator has made the cluster unready", reason=because)

    async def _prepare_upgrade(self) -> int:
        """Check the installed program, then schedule the upgrade; return the generation that still runs.

        Raises UpgradeRefused.
        """
        cluster = self._cluster
        if not cluster.started or cluster.replacing or self._drain_wanted.is_set() or self._upgrade_wanted.is_set():
            raise UpgradeRefused("the cluster is starting, draining, or replacing its workers already")
        await self._preflight()
        self._upgrade_wanted.set()
        return self._cluster.generation

    async def _preflight(self) -> None:
        """Check that the installed program can take this cluster over. Raises UpgradeRefused."""
        if fault := await installed_program_fault(self._config_file):
            raise UpgradeRefused(fault)
        try:
            config = load_config(self._config_file, os.environ)
        except ConfigError:
            return  # it has keys that only the new program knows, and that one has read it
        if config.cluster.runtime_dir != self._cluster.config.cluster.runtime_dir:
            raise UpgradeRefused("a restart is needed to change: cluster.runtime_dir")
        if config.relay.crash_safe != self._cluster.config.relay.crash_safe:
            raise UpgradeRefused("a restart is needed to change: relay.crash_safe")
        try:
            await self._broker_changes.require_acceptance(config)
        except ReloadRefused as refused:
            raise UpgradeRefused(str(refused)) from None
        try:
            for key, bind in new_binds(self._cluster.config, config):
                bind_tcp(key, bind).close()
        except StartFailed as error:
            raise UpgradeRefused(f"{error}; where the address is the cluster's own, a restart is needed") from None

    async def _upgrade(self) -> None:
        """Execute the installed program once an upgrade is wanted and an earlier one is complete."""
        while True:
            await self._upgrade_wanted.wait()
            await trio.sleep(REPLY_GRACE_S)
            async with self._reload_lock:
                await self._cluster.wait_for_leaving()
                async with self._exec_lock:
                    try:
                        await self._preflight()  # once more: what is installed may have changed while others finished
                    except UpgradeRefused as refused:
                        get_logger().error("the cluster goes on with the program it has", reason=str(refused))
                    else:
                        if not self._drain_wanted.is_set():
                            await self._exec_next_program()
            self._upgrade_wanted = trio.Event()

    def _roles_ended_before_exec(self) -> frozenset[Role]:
        """Return the roles of which no worker is left to the next program.

        HTTP workers stay only where that program is known to have them: one from before them would not start.
        """
        try:
            has_http = bool(load_config(self._config_file, os.environ).http_listener)
        except ConfigError:
            has_http = True  # it has keys that only the next program knows, which is a newer one
        return ENDED_BEFORE_EXEC if has_http else ENDED_BEFORE_EXEC | {Role.HTTP}

    async def _exec_next_program(self) -> None:
        ended = self._roles_ended_before_exec()
        async with self._cluster.quiesced(ended) as workers:
            if self._control_socket is None:
                raise RuntimeError("an upgrade was asked for without a way to ask")
            # From here on signals wait for the next program; those that came before are handled first.
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            await trio.sleep(SIGNALS_GRACE_S)
            state = SerializedHandover(
                **self._cluster.handover_fields(workers, ended),
                runtime_lock=self._runtime_dir.lock_fd,
                control=self._control_socket.fileno(),
                admin={self._cluster.config.admin.bind: self._admin_listener.fileno()},
                drain=self._drain_wanted.is_set(),
            )
            get_logger().info("becoming the program that is installed now", relays=state.relay_count)
            os.environ.update(self._manager.environment)
            try:
                exec_next_program(state, self._config_file)
            except OSError as error:
                for name in self._manager.environment:
                    del os.environ[name]
                signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
                get_logger().error("the cluster goes on with the program it has; restart it soon", reason=str(error))


async def _run_when_ready(ready: trio.Event, watch: Callable[[], Awaitable[None]]) -> None:
    await ready.wait()
    await watch()


def _log_plan(plan: MemoryPlan) -> None:
    """Log the container's limits, the numbers that follow from them, and what clients may meet."""
    get_logger().info("what the container allows", **plan.summary())
    if plan.shortage:
        get_logger().error("the container may be too small", reason=plan.shortage)
    for warning in forwarding_warnings(plan.config):
        get_logger().warning("some clients may be refused by brokers", reason=warning)
    for warning in http_warnings(plan.config):
        get_logger().warning("a listener for HTTP lets no client in", reason=warning)


class StoppedBySecondSignal(ProxyError):
    """An operator has sent a second signal: the cluster ends without a drain."""


def run_supervisor(plan: MemoryPlan, config_file: Path, handover_fd: int | None, fail: Callable[[str], None]) -> None:
    """Run a cluster in the foreground; ``fail`` is called with the reason where it cannot start or must stop.

    ``handover_fd``: the memfd with the state of the program before an exec; None on a first start.
    """
    config = plan.config
    harden_process()
    become_subreaper()
    events = RecentEvents()
    configure_logs(config.log, Role.SUPERVISOR, 0, events)
    _log_plan(plan)
    if plan.shortage and handover_fd is None:  # what the program before the exec has left must not end by this
        fail(plan.shortage)
        return
    raise_open_file_limit(config)
    try:
        manager = ServiceManager.from_environment(os.environ)
        unit_store = UnitStore(manager)
        handover = None if handover_fd is None else HandoverState.from_memfd(handover_fd)
        if handover is None:
            read = partial(restore, unit_store, is_crash_safe=config.relay.crash_safe)
            handover = trio.run(read) or HandoverState()
        unit_store.names.update(handover.unit_store_names)
        _take_passed_listeners(config, handover, manager)
        supervisor = Supervisor(_with_runtime_dir(config, handover), config_file, handover, events, unit_store)
    except StartFailed as error:
        fail(str(error))
        return
    try:
        trio.run(supervisor.run, strict_exception_groups=True)
    except* StartFailed as group:
        fail("; ".join(sorted({str(error) for error in _leaves(group)})))
    except* StoppedBySecondSignal:
        fail("ended at once, as asked")
    finally:
        end_descendants()


def _take_passed_listeners(config: Config, handover: HandoverState, manager: ServiceManager) -> None:
    """Take the listeners that the service manager has bound (socket activation). Raises StartFailed."""
    handover.listeners.update(manager.take_listeners("listener", [one.bind for one in config.listener]))
    http_binds = [one.bind for one in config.http_listener]
    handover.http_listeners.update(manager.take_listeners("http_listener", http_binds))
    handover.admin_listeners.update(manager.take_listeners("admin", [config.admin.bind]))
    manager.refuse_others()


def _bind_admin(config: Config, handover: HandoverState) -> socket.socket:
    """Bind the operators' port; after an exec, keep the old one if the new one cannot be. Raises StartFailed."""
    inherited = handover.admin_listeners.pop(config.admin.bind, None)
    if inherited is not None:
        return inherited
    try:
        return bind_tcp("admin.bind", config.admin.bind)
    except StartFailed as error:
        if not handover.admin_listeners:
            raise
        get_logger().error("the old admin port stays", reason=str(error))
        return handover.admin_listeners.popitem()[1]


def _open_audit(config: Config, handover: HandoverState) -> int:
    """Open the destination of audit events; after an exec, go on without where that fails. Raises StartFailed."""
    try:
        return open_destination(config.audit)
    except ConfigError as error:
        if handover.generation == 1:
            raise StartFailed(str(error)) from None
        get_logger().error("audit events are not written", reason=str(error))
        return -1


def _with_runtime_dir(config: Config, handover: HandoverState) -> Config:
    """Keep the runtime directory of the program before the exec, since the sockets in it are in use."""
    if handover.runtime_dir in {"", config.cluster.runtime_dir}:
        return config
    get_logger().error("a restart is needed to change cluster.runtime_dir; the old one stays")
    cluster = msgspec.structs.replace(config.cluster, runtime_dir=handover.runtime_dir)
    return msgspec.structs.replace(config, cluster=cluster)


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    """Flatten nested exception groups."""
    parts = (_leaves(error) if isinstance(error, BaseExceptionGroup) else [error] for error in group.exceptions)
    return [error for part in parts for error in part]
