"""proxy.supervisor.main: bind, start, watch, drain, end."""

from __future__ import annotations

import contextlib
import resource
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
import structlog.testing
import trio
import trio.testing
from supervisor_fakes import FakeDirectory, FakeSocket, make_config

from proto.roles import Role
from proxy.common.libraries import OPENSSL_VERSION, PYTHON_VERSION
from proxy.config import load
from proxy.config.cgroups import ContainerLimits
from proxy.config.memory import MemoryPlan, fit_to_container
from proxy.config.trial import BrokerTrial
from proxy.config.types import Config
from proxy.runtime.shared.relay_table import RELAYS_MAX
from proxy.supervisor import main
from proxy.supervisor.broker_changes import BrokerChanges
from proxy.supervisor.cluster.log_levels import LogLevels
from proxy.supervisor.handover.exec_handover import CHECK_TIMEOUT_S, SIGNALS, HandoverState, SerializedHandover
from proxy.supervisor.main import (
    DRAIN_END_S_MAX,
    REPLY_GRACE_S,
    StoppedBySecondSignal,
    Supervisor,
    run_supervisor,
)
from proxy.supervisor.operators.control import ControlServer, UpgradeRefused
from proxy.supervisor.operators.events import RecentEvents
from proxy.supervisor.processes.audit_pipe import create_audit_pipe
from proxy.supervisor.processes.children import child_reaper
from proxy.supervisor.processes.configure import ReloadRefused
from proxy.supervisor.processes.worker_process import SerializedWorker
from proxy.supervisor.startup.open_files import (
    DESCRIPTORS_PER_RELAY,
    SPARE_DESCRIPTORS,
    open_files_needed,
    raise_open_file_limit,
    stored_descriptors_max,
)
from proxy.supervisor.startup.sockets import StartFailed


class FakeForkServer:
    """A fork server that runs until it is cancelled."""

    def __init__(self, log: list[Any]) -> None:
        self._log = log

    async def run(self) -> None:
        try:
            await trio.sleep_forever()
        finally:
            self._log.append("fork server ended")


class FakeCluster:
    def __init__(self, config: Config, log: list[Any]) -> None:
        self.config = config
        self.slots = [1, 2, 3]
        self.log = log
        self.fork_server = FakeForkServer(log)
        self.drain_gate = trio.Event()
        self.drain_gate.set()
        self.failure: Exception | None = None
        self.reloaded: list[Config] = []
        self.reload_error: Exception | None = None
        self.registry = None
        self.log_levels = LogLevels({})
        self.unready_because: str | None = None
        self.audit_pipe = create_audit_pipe()
        self.started = True
        self.leaving = False
        self.draining = False
        self.replacing = False
        self.generation = 3
        self.all_started = trio.Event()
        self.begin_gate = trio.Event()
        self.begin_gate.set()
        self.retired_gate = trio.Event()
        self.retired_gate.set()
        self.still_gate = trio.Event()
        self.still_gate.set()
        self.reload_gate = trio.Event()
        self.reload_gate.set()

    async def replace_all(self, roles: list[Role]) -> None:
        await trio.lowlevel.checkpoint()
        self.log.append(("replace", roles))

    async def run(self, ready: trio.Event) -> None:
        await trio.lowlevel.checkpoint()
        if self.failure is not None:
            raise self.failure
        await self.begin_gate.wait()
        self.all_started.set()
        ready.set()
        await trio.sleep_forever()

    async def drain(self) -> None:
        self.log.append("drain")
        await self.drain_gate.wait()

    async def reload(self, config: Config) -> None:
        await self.reload_gate.wait()
        if self.reload_error is not None:
            raise self.reload_error
        self.reloaded.append(config)

    async def wait_for_leaving(self) -> None:
        await self.retired_gate.wait()

    @contextlib.asynccontextmanager
    async def quiesced(self, ended: Collection[Role]) -> AsyncIterator[list[SerializedWorker]]:
        self.log.append("stand still")
        self.ended_before_exec = ended
        await self.still_gate.wait()
        yield [SerializedWorker("lookup", 0, 4711, 1.0, 601, 602)]
        self.log.append("go on")

    def handover_fields(self, workers: list[SerializedWorker], ended: Collection[Role]) -> dict[str, Any]:
        assert ended == self.ended_before_exec
        return {
            "generation": self.generation + 1,
            "runtime_dir": self.config.cluster.runtime_dir,
            "seal_key": b"k" * 32,
            "listeners": {"0.0.0.0:6650": 603},
            "services": {},
            "connections": 604,
            "fd_store_slots": [],
            "workers": workers,
        }

    def kill_workers(self) -> None:
        self.log.append("stop at once")

    def close_sockets(self) -> None:
        self.log.append("close")


class Setup:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.log: list[Any] = []
        self.directory = FakeDirectory(self.log)
        self.config_file = tmp_path / "proxy.toml"
        self.config_file.touch()
        self.config = make_config()
        self.cluster = FakeCluster(self.config, self.log)
        self.keys: list[bytes] = []
        self.handover = HandoverState()
        self.masks: list[tuple[int, Any]] = []
        self.hardened: list[str] = []
        self._send, self._receive = trio.open_memory_channel[int](10)
        monkeypatch.setattr(main, "RuntimeDirectory", self._runtime_dir)
        monkeypatch.setattr(main, "bind_tcp", lambda key, _bind: FakeSocket(key, self.log))
        monkeypatch.setattr(main, "Cluster", self._cluster)
        self.tried: list[str] = []
        self.trial = BrokerTrial(accepted=True)
        monkeypatch.setattr(main, "BrokerChanges", partial(BrokerChanges, trial=self._try))
        monkeypatch.setattr(ControlServer, "serve", self._serve_control)
        monkeypatch.setattr(signal, "pthread_sigmask", lambda how, which: self.masks.append((how, which)))
        monkeypatch.setattr(main, "raise_open_file_limit", lambda _config: None)
        for name in ("harden_process", "become_subreaper", "end_descendants"):
            monkeypatch.setattr(main, name, partial(self.hardened.append, name))
        monkeypatch.setattr(child_reaper, "reap_adopted", trio.sleep_forever)
        monkeypatch.setattr(trio, "open_signal_receiver", self._signals)

    def plan(self, memory_mib: int | None = None) -> MemoryPlan:
        """The configuration, fitted to a container with so much memory."""
        return fit_to_container(self.config, (), ContainerLimits(None, memory_mib and memory_mib << 20))

    async def _try(self, config: Config) -> BrokerTrial:
        await trio.lowlevel.checkpoint()
        self.tried.append(config.brokers.service_url)
        return self.trial

    def _runtime_dir(self, path: str, lock: int) -> FakeDirectory:
        self.log.append((path, lock))
        return self.directory

    def _cluster(
        self, config: Config, _runtime_dir: Any, handover: HandoverState, _fork_server: Any, _serve_admin: Any, **_: Any
    ) -> FakeCluster:
        self.keys.append(handover.seal_key)
        self.cluster.config = config
        return self.cluster

    @staticmethod
    async def _serve_control(*_: Any) -> None:
        await trio.sleep_forever()

    @contextlib.contextmanager
    def _signals(self, *numbers: int) -> Iterator[AsyncIterator[int]]:
        assert set(numbers) == {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
        yield self._receive

    def signal(self, number: int) -> None:
        self._send.send_nowait(number)

    async def run(self, nursery: trio.Nursery) -> trio.Event:
        """Run a supervisor; the event of its end."""
        supervisor = self.supervisor = Supervisor(self.config, self.config_file, self.handover, RecentEvents())
        ended = trio.Event()

        async def one() -> None:
            await supervisor.run()
            ended.set()

        nursery.start_soon(one)
        await trio.testing.wait_all_tasks_blocked()
        return ended


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Setup]:
    yield Setup(monkeypatch, tmp_path)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains(setup: Setup, nursery: trio.Nursery, number: int) -> None:
    with structlog.testing.capture_logs() as logs:
        ended = await setup.run(nursery)
        setup.signal(number)
        await ended.wait()
    assert [entry["event"] for entry in logs] == ["ready for clients", "draining", "ended"]
    assert (logs[0]["python"], logs[0]["openssl"]) == (PYTHON_VERSION, OPENSSL_VERSION)
    assert setup.log[-5:] == ["drain", "fork server ended", "stop at once", "close", ("admin.bind", "close")]
    assert setup.directory.cleared
    assert "control.sock" in setup.directory.sockets


async def test_a_second_signal_ends_at_once(setup: Setup) -> None:
    setup.cluster.drain_gate = trio.Event()
    with pytest.RaisesGroup(StoppedBySecondSignal, flatten_subgroups=True):
        async with trio.open_nursery() as nursery:
            await setup.run(nursery)
            setup.signal(signal.SIGTERM)
            await trio.testing.wait_all_tasks_blocked()
            setup.signal(signal.SIGTERM)
    assert "stop at once" in setup.log
    assert setup.directory.cleared


async def test_sigterm_makes_the_cluster_unready_and_drains_it_after_the_delay(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    setup.config = make_config(shutdown={"delay_ms": 10_000})
    ended = await setup.run(nursery)
    setup.signal(signal.SIGTERM)
    await trio.sleep(9)
    assert setup.cluster.leaving
    assert "drain" not in setup.log
    await ended.wait()
    assert trio.current_time() == pytest.approx(10)
    assert setup.log.count("drain") == 1


async def test_the_drain_command_waits_as_a_signal_does(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    setup.config = make_config(shutdown={"delay_ms": 10_000})
    ended = await setup.run(nursery)
    setup.supervisor._drain_wanted.set()
    await ended.wait()
    assert trio.current_time() == pytest.approx(10)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_does_not_wait_for_the_delay(
    setup: Setup, number: int, autojump_clock: trio.testing.MockClock
) -> None:
    setup.config = make_config(shutdown={"delay_ms": 10_000})
    with pytest.RaisesGroup(StoppedBySecondSignal, flatten_subgroups=True):
        async with trio.open_nursery() as nursery:
            await setup.run(nursery)
            setup.signal(signal.SIGTERM)
            await trio.sleep(1)
            setup.signal(number)
    assert trio.current_time() == pytest.approx(1)
    assert "drain" not in setup.log
    assert "stop at once" in setup.log


async def test_a_cluster_that_is_starting_does_not_wait(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """No load balancer sends clients to it yet."""
    setup.config = make_config(shutdown={"delay_ms": 10_000})
    setup.cluster.generation = 1
    setup.cluster.started = False
    ended = await setup.run(nursery)
    setup.signal(signal.SIGTERM)
    await ended.wait()
    assert trio.current_time() < 1


async def test_the_delay_begins_before_another_program_has_begun(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """A signal that came in an upgrade: its two waits are one. Clients come all the time."""
    setup.config = make_config(shutdown={"delay_ms": 10_000})
    setup.cluster.started = False
    setup.cluster.generation = 2
    setup.cluster.begin_gate = trio.Event()
    setup.signal(signal.SIGTERM)
    ended = await setup.run(nursery)
    await trio.sleep(6)
    setup.cluster.begin_gate.set()
    await ended.wait()
    assert trio.current_time() == pytest.approx(10)


async def test_whatever_hangs_the_end_comes(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """terminationGracePeriodSeconds can be computed: delay, drain, and DRAIN_END_S_MAX."""
    setup.config = make_config(shutdown={"delay_ms": 2_000}, limits={"drain_timeout_ms": 3_000})
    setup.cluster.drain_gate = trio.Event()
    with structlog.testing.capture_logs() as logs:
        ended = await setup.run(nursery)
        setup.signal(signal.SIGTERM)
        await ended.wait()
    assert trio.current_time() == pytest.approx(5 + DRAIN_END_S_MAX)
    assert "the drain is not over in time; ending all workers" in [entry["event"] for entry in logs]
    assert "stop at once" in setup.log


@pytest.mark.parametrize("generation", [1, 2])
async def test_a_signal_that_waited_for_this_program(setup: Setup, nursery: trio.Nursery, generation: int) -> None:
    """The exec held it back: it comes before any request to the workers that are there from before. A first program
    has none of these, and need not wait.
    """
    setup.cluster.generation = generation
    setup.cluster.begin_gate = trio.Event()
    setup.signal(signal.SIGTERM)
    ended = await setup.run(nursery)
    assert ("drain" in setup.log) is (generation == 1)
    setup.cluster.begin_gate.set()
    await ended.wait()
    assert setup.log.count("drain") == 1


async def test_a_second_signal_does_not_wait_for_workers_from_before(setup: Setup) -> None:
    setup.cluster.begin_gate = trio.Event()
    setup.signal(signal.SIGTERM)
    setup.signal(signal.SIGTERM)
    with pytest.RaisesGroup(StoppedBySecondSignal, flatten_subgroups=True):
        async with trio.open_nursery() as nursery:
            await setup.run(nursery)
    assert "drain" not in setup.log
    assert "stop at once" in setup.log


@pytest.mark.parametrize("end", ["a second signal", "the end of the drain"])
async def test_a_reload_that_hangs_holds_no_end_up(
    setup: Setup, end: str, autojump_clock: trio.testing.MockClock
) -> None:
    """It is shielded from its caller, but not from the end."""
    setup.cluster.reload_gate = trio.Event()

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            ended = await setup.run(nursery)
            setup.signal(signal.SIGHUP)
            await trio.testing.wait_all_tasks_blocked()
            assert setup.supervisor._reload_lock.locked()
            setup.signal(signal.SIGTERM)
            if end == "a second signal":
                setup.signal(signal.SIGTERM)
            await ended.wait()

    with trio.fail_after(20):
        if end == "a second signal":
            with pytest.RaisesGroup(StoppedBySecondSignal, flatten_subgroups=True):
                await run()
        else:
            await run()
    assert "stop at once" in setup.log
    assert setup.cluster.reloaded == []


async def test_sighup_reloads(setup: Setup, nursery: trio.Nursery) -> None:
    ended = await setup.run(nursery)
    setup.config_file.write_text("[limits]\nmax_connections = 5\n")
    setup.signal(signal.SIGHUP)
    await trio.testing.wait_all_tasks_blocked()
    assert [config.limits.max_connections for config in setup.cluster.reloaded] == [5]
    assert not ended.is_set()
    nursery.cancel_scope.cancel()


WRONG = '[brokers]\nservice_url = "pulsar://wrong:6650"\n'


async def test_a_configuration_that_no_broker_accepts_is_applied_by_force_alone(
    setup: Setup, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    await setup.run(nursery)
    setup.trial = BrokerTrial(accepted=False, reason="wrong:6650: not resolved")

    async def works() -> bool:
        await trio.lowlevel.checkpoint()
        return True

    monkeypatch.setattr(setup.supervisor._broker_changes, "_works", works)
    setup.cluster.config = setup.plan().config  # what a file without any other key says
    setup.config_file.write_text(WRONG)
    with pytest.raises(ReloadRefused, match="wrong:6650: not resolved"):
        await setup.supervisor._reload()
    assert (setup.cluster.reloaded, setup.supervisor._notes()) == ([], [main.CONFIG_NOTE])
    assert setup.tried == ["pulsar://wrong:6650"]
    await setup.supervisor._reload(force=True)
    assert [config.brokers.service_url for config in setup.cluster.reloaded] == ["pulsar://wrong:6650"]
    assert (len(setup.tried), setup.supervisor._notes()) == (1, [])
    setup.supervisor._broker_changes.are_files_held = True
    assert setup.supervisor._notes() == [main.FILES_NOTE]
    nursery.cancel_scope.cancel()


async def test_a_reload_that_needs_an_upgrade_is_refused_without_a_broker_trial(
    setup: Setup, nursery: trio.Nursery
) -> None:
    await setup.run(nursery)
    setup.cluster.reload_error = ReloadRefused("an upgrade is needed")
    setup.config_file.write_text(f"{WRONG}[cluster]\nforwarders = 5\n")
    with pytest.raises(ReloadRefused, match="an upgrade is needed"):
        await setup.supervisor._reload()
    assert setup.tried == []
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("text", ["[limits]\nmax_conections = 5\n", "["])
async def test_a_bad_configuration_is_not_taken_over(setup: Setup, nursery: trio.Nursery, text: str) -> None:
    ended = await setup.run(nursery)
    setup.config_file.write_text(text)
    with structlog.testing.capture_logs() as logs:
        setup.signal(signal.SIGHUP)
        await trio.testing.wait_all_tasks_blocked()
    assert [entry["log_level"] for entry in logs] == ["error"]
    assert setup.cluster.reloaded == []
    assert not ended.is_set()
    nursery.cancel_scope.cancel()


async def test_a_configuration_for_which_the_memory_is_too_small_is_not_taken_over(
    setup: Setup, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "container_limits", lambda: ContainerLimits(memory_bytes=512 << 20))
    await setup.run(nursery)
    setup.config_file.write_text("[cluster]\nforwarders = 1\n[limits]\nmax_connections = 100000\n")
    with structlog.testing.capture_logs() as logs:
        setup.signal(signal.SIGHUP)
        await trio.testing.wait_all_tasks_blocked()
    assert [entry["reason"].partition(":")[0] for entry in logs] == ["limits.max_connections"]
    assert setup.cluster.reloaded == []
    setup.config_file.write_text("[cluster]\nforwarders = 1\n[limits]\nmax_connections = 500\n")
    setup.signal(signal.SIGHUP)
    await trio.testing.wait_all_tasks_blocked()
    assert [config.limits.max_connections for config in setup.cluster.reloaded] == [500]
    assert setup.cluster.reloaded[0].limits.max_topic_lists_bytes < Config().limits.max_topic_lists_bytes
    nursery.cancel_scope.cancel()


async def test_a_reload_leaves_the_number_of_forwarders_that_run(
    setup: Setup, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod whose CPU limit was changed while it runs: the number would need a restart, all else does not."""
    setup.cluster.config = setup.config = make_config(cluster={"forwarders": 5})
    monkeypatch.setattr(load, "container_limits", lambda: ContainerLimits(cpus=Fraction(1)))
    await setup.run(nursery)
    setup.config_file.write_text("[limits]\nmax_connections = 500\n")
    setup.signal(signal.SIGHUP)
    await trio.testing.wait_all_tasks_blocked()
    assert [config.cluster.forwarders for config in setup.cluster.reloaded] == [5]
    nursery.cancel_scope.cancel()


async def test_a_reload_that_is_refused_is_logged(setup: Setup, nursery: trio.Nursery) -> None:
    await setup.run(nursery)
    setup.cluster.reload_error = ReloadRefused("a restart is needed")
    with structlog.testing.capture_logs() as logs:
        setup.signal(signal.SIGHUP)
        await trio.testing.wait_all_tasks_blocked()
    assert [entry["reason"] for entry in logs] == ["a restart is needed"]
    nursery.cancel_scope.cancel()


async def test_the_seal_key_is_new_with_every_start(setup: Setup) -> None:
    """Security."""
    for _ in range(2):
        Supervisor(setup.config, setup.config_file, HandoverState(), RecentEvents())
    assert len(set(setup.keys)) == 2
    assert {len(key) for key in setup.keys} == {32}


async def test_signals_are_let_in_once_somebody_takes_them(
    setup: Setup, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upgrade holds them back."""
    order: list[str] = []
    real = setup._signals

    @contextlib.contextmanager
    def signals(*numbers: int) -> Iterator[AsyncIterator[int]]:
        order.append(f"receive, {len(setup.masks)} unblocked")
        with real(*numbers) as received:
            yield received

    monkeypatch.setattr(trio, "open_signal_receiver", signals)
    await setup.run(nursery)
    assert order == ["receive, 0 unblocked"]
    assert setup.masks == [(signal.SIG_UNBLOCK, SIGNALS)]
    nursery.cancel_scope.cancel()


# ---- upgrade


class Became(BaseException):
    """Another program is here now."""


class Upgrades:
    """A supervisor that may become another program, and what that was told."""

    def __init__(self, setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
        self.setup = setup
        self.states: list[SerializedHandover] = []
        self.error: OSError | None = None
        self.check: Callable[[], Any] = lambda: subprocess.CompletedProcess([], 0, b"", b"")
        self.commands: list[list[str]] = []
        monkeypatch.setattr(main, "exec_next_program", self._become)
        monkeypatch.setattr(trio, "run_process", self._run_process)

    def _become(self, state: SerializedHandover, config_file: Path) -> None:
        assert config_file == self.setup.config_file
        self.states.append(state)
        self.setup.log.append("become")
        if self.error is not None:
            raise self.error
        raise Became

    async def _run_process(self, command: list[str], **_: Any) -> Any:
        await trio.lowlevel.checkpoint()
        self.commands.append(command)
        done = self.check()
        return await done if hasattr(done, "__await__") else done

    async def ask(self) -> int:
        return await self.setup.supervisor._prepare_upgrade()


@pytest.fixture
def upgrades(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> Upgrades:
    return Upgrades(setup, monkeypatch)


async def test_upgrade(setup: Setup, upgrades: Upgrades, autojump_clock: trio.testing.MockClock) -> None:
    answered_at: list[float] = []
    with pytest.RaisesGroup(Became, flatten_subgroups=True):
        async with trio.open_nursery() as nursery:
            await setup.run(nursery)
            admin = setup.supervisor._admin_listener.fileno()
            control = setup.directory.sockets["control.sock"].fileno()
            assert await upgrades.ask() == 3
            answered_at.append(trio.current_time())
            await trio.sleep(REPLY_GRACE_S / 2)
            assert upgrades.states == [], "the operator's answer comes first"
            await trio.sleep_forever()
    assert len(upgrades.commands) == 2, "once for the operator, and once more in the last moment"
    assert all(command[-3:] == ["check", "--config", str(setup.config_file)] for command in upgrades.commands)
    [state] = upgrades.states
    assert (state.generation, state.runtime_lock, state.control) == (4, setup.directory.lock_fd, control)
    assert state.admin == {"127.0.0.1:8080": admin}
    assert [worker.pid for worker in state.workers] == [4711]
    assert state.drain is False
    assert setup.log.index("stand still") < setup.log.index("become")


async def test_upgrade_waits_for_those_who_finish(
    setup: Setup, upgrades: Upgrades, autojump_clock: trio.testing.MockClock
) -> None:
    setup.cluster.retired_gate = trio.Event()
    with pytest.RaisesGroup(Became, flatten_subgroups=True):
        async with trio.open_nursery() as nursery:
            await setup.run(nursery)
            await upgrades.ask()
            await trio.sleep(100)
            assert "stand still" not in setup.log
            setup.cluster.retired_gate.set()
            await trio.sleep_forever()


async def test_no_reload_in_the_middle_of_an_upgrade(
    setup: Setup, upgrades: Upgrades, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    setup.cluster.retired_gate = trio.Event()
    await setup.run(nursery)
    await upgrades.ask()
    await trio.sleep(1)
    setup.signal(signal.SIGHUP)
    await trio.sleep(1)
    assert setup.cluster.reloaded == []
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("why", ["starting", "replacing", "draining", "under way"])
async def test_an_upgrade_at_the_wrong_time(
    setup: Setup, upgrades: Upgrades, nursery: trio.Nursery, why: str, autojump_clock: trio.testing.MockClock
) -> None:
    setup.cluster.drain_gate = setup.cluster.retired_gate = trio.Event()
    await setup.run(nursery)
    setup.cluster.started = why != "starting"
    setup.cluster.replacing = why == "replacing"
    if why == "draining":
        setup.signal(signal.SIGTERM)
        await trio.testing.wait_all_tasks_blocked()
    elif why == "under way":
        await upgrades.ask()
    with pytest.raises(UpgradeRefused, match="starting, draining, or "):
        await upgrades.ask()
    assert len(upgrades.commands) == (1 if why == "under way" else 0)
    nursery.cancel_scope.cancel()


async def test_a_program_that_fails_its_check(
    setup: Setup, upgrades: Upgrades, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    await setup.run(nursery)
    long = b"x" * 1000 + b"\npulsar-trio-proxy: limits: there is no such key\n"
    upgrades.check = lambda: subprocess.CompletedProcess([], 1, b"", long)
    with pytest.raises(UpgradeRefused, match=r"(?s)that is installed now fails: .*there is no such key$") as caught:
        await upgrades.ask()
    assert len(str(caught.value)) < 600
    await trio.sleep(10)
    assert upgrades.states == []
    upgrades.check = trio.sleep_forever
    asked_at = trio.current_time()
    with pytest.raises(UpgradeRefused, match="does not answer"):
        await upgrades.ask()
    assert trio.current_time() - asked_at == pytest.approx(CHECK_TIMEOUT_S)
    nursery.cancel_scope.cancel()


async def test_no_upgrade_to_a_configuration_that_no_broker_accepts(
    setup: Setup,
    upgrades: Upgrades,
    nursery: trio.Nursery,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def works() -> bool:
        await trio.lowlevel.checkpoint()
        return True

    await setup.run(nursery)
    monkeypatch.setattr(setup.supervisor._broker_changes, "_works", works)
    setup.trial = BrokerTrial(accepted=False, reason="wrong:6650: not resolved")
    setup.config_file.write_text(WRONG)
    with pytest.raises(UpgradeRefused, match="wrong:6650: not resolved"):
        await upgrades.ask()
    await trio.sleep(10)
    assert upgrades.states == []
    nursery.cancel_scope.cancel()


async def test_a_program_that_is_not_there(
    setup: Setup, upgrades: Upgrades, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    def gone() -> None:
        raise FileNotFoundError(2, "No such file or directory")

    upgrades.check = gone
    await setup.run(nursery)
    with pytest.raises(UpgradeRefused, match=r"cannot be run: .*No such file"):
        await upgrades.ask()
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[cluster]\nruntime_dir = '/elsewhere'", r"a restart is needed to change: cluster\.runtime_dir"),
        ("[relay]\ncrash_safe = false", r"a restart is needed to change: relay\.crash_safe"),
        ("[cluster]\nforwarders = 7\n[limits]\nmax_command_bytes = 70000", None),
        ("[of_a_newer_version]\nx = 1", None),  # that one has read it, and found it in order
    ],
)
async def test_an_upgrade_is_refused_for_changes_that_need_a_restart(  # noqa: PLR0917 -- fixtures
    setup: Setup,
    upgrades: Upgrades,
    nursery: trio.Nursery,
    text: str,
    reason: str | None,
    autojump_clock: trio.testing.MockClock,
) -> None:
    await setup.run(nursery)
    setup.config_file.write_text(text)
    if reason is None:
        assert await upgrades.ask() == 3
    else:
        with pytest.raises(UpgradeRefused, match=reason):
            await upgrades.ask()
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("when", ["preflight", "grace", "wait"])
async def test_the_end_that_was_asked_for_comes_before_an_upgrade(
    setup: Setup, upgrades: Upgrades, nursery: trio.Nursery, when: str, autojump_clock: trio.testing.MockClock
) -> None:
    gate = trio.Event()
    setup.cluster.drain_gate = trio.Event()
    if when == "wait":
        setup.cluster.retired_gate = gate

    async def check() -> Any:
        await gate.wait()
        return subprocess.CompletedProcess([], 0, b"", b"")

    if when == "preflight":
        upgrades.check = check
    ended = await setup.run(nursery)
    nursery.start_soon(upgrades.ask)
    await trio.sleep(1 if when != "grace" else REPLY_GRACE_S / 2)
    setup.signal(signal.SIGTERM)
    await trio.testing.wait_all_tasks_blocked()
    gate.set()
    await trio.sleep(10)
    assert upgrades.states == []
    assert "drain" in setup.log
    setup.cluster.drain_gate.set()
    await ended.wait()
    nursery.cancel_scope.cancel()


async def test_the_next_program_drains_what_this_one_could_not(
    setup: Setup, upgrades: Upgrades, autojump_clock: trio.testing.MockClock
) -> None:
    setup.cluster.still_gate = trio.Event()
    with pytest.RaisesGroup(Became, flatten_subgroups=True):
        async with trio.open_nursery() as nursery:
            await setup.run(nursery)
            await upgrades.ask()
            await trio.sleep(1)
            setup.signal(signal.SIGTERM)
            await trio.sleep(1)
            assert "drain" not in setup.log, "no worker would answer"
            setup.cluster.still_gate.set()
            await trio.sleep_forever()
    assert [state.drain for state in upgrades.states] == [True]


async def test_a_drain_that_is_inherited(setup: Setup, upgrades: Upgrades, nursery: trio.Nursery) -> None:
    setup.handover.drain_requested = True
    setup.cluster.begin_gate = trio.Event()
    ended = await setup.run(nursery)
    assert "drain" not in setup.log, "no process talks to the workers yet"
    with pytest.raises(UpgradeRefused, match="starting, draining, or "):
        await upgrades.ask()
    setup.cluster.begin_gate.set()
    await ended.wait()
    assert "drain" in setup.log


async def test_an_exec_that_fails(
    setup: Setup, upgrades: Upgrades, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    ended = await setup.run(nursery)
    upgrades.error = OSError(8, "Exec format error")
    await upgrades.ask()
    with structlog.testing.capture_logs() as logs:
        await trio.sleep(1)
    assert [entry["log_level"] for entry in logs] == ["info", "error"]
    assert setup.log[-1] == "go on"
    assert not ended.is_set()
    assert await upgrades.ask() == 3, "it may be tried again"
    await trio.sleep(1)
    assert len(upgrades.states) == 2
    setup.signal(signal.SIGTERM)
    await ended.wait()


async def test_an_upgrade_without_a_way_to_ask_raises(setup: Setup, upgrades: Upgrades) -> None:
    supervisor = Supervisor(setup.config, setup.config_file, HandoverState(), RecentEvents())
    with pytest.raises(RuntimeError, match="without a way to ask"):
        await supervisor._exec_next_program()


async def test_sockets_left_by_the_previous_program_are_used(setup: Setup, nursery: trio.Nursery) -> None:
    control, admin = FakeSocket("left control", setup.log), FakeSocket("left admin", setup.log)
    setup.handover = HandoverState(
        runtime_lock_fd=77, control_socket=control, admin_listeners={"127.0.0.1:8080": admin}
    )  # type: ignore[arg-type, dict-item]
    await setup.run(nursery)
    assert setup.log[0] == (setup.config.cluster.runtime_dir, 77)
    assert ("left admin", "listen") in setup.log
    assert setup.directory.sockets == {}, "operators' connections wait in the one that is there"
    assert setup.supervisor._control_socket is control  # type: ignore[comparison-overlap]
    nursery.cancel_scope.cancel()


# ---- the command's frame


Fail = Callable[[str], None]


@pytest.fixture
def failures() -> list[str]:
    return []


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "configure_logs", lambda *_: None)


@pytest.mark.usefixtures("quiet")
def test_serve_ends_without_a_failure(setup: Setup, failures: list[str]) -> None:
    setup.signal(signal.SIGTERM)
    run_supervisor(setup.plan(), setup.config_file, None, failures.append)
    assert failures == []
    assert setup.hardened == ["harden_process", "become_subreaper", "end_descendants"]


@pytest.mark.usefixtures("quiet")
def test_a_container_that_is_too_small_is_said_before_anything_is_bound(setup: Setup, failures: list[str]) -> None:
    run_supervisor(setup.plan(64), setup.config_file, None, failures.append)
    assert ["limit of 64 MiB is too small" in text for text in failures] == [True]
    assert setup.log == []


@pytest.mark.usefixtures("quiet")
def test_an_inherited_cluster_goes_on_in_a_container_that_is_too_small(
    setup: Setup, failures: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HandoverState, "from_memfd", lambda _descriptor: HandoverState())
    setup.signal(signal.SIGTERM)
    with structlog.testing.capture_logs() as logs:
        run_supervisor(setup.plan(64), setup.config_file, 17, failures.append)
    assert failures == []
    assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == ["the container may be too small"]


@pytest.mark.usefixtures("quiet")
def test_the_container_limits_are_logged_at_the_start(setup: Setup, failures: list[str]) -> None:
    setup.signal(signal.SIGTERM)
    with structlog.testing.capture_logs() as logs:
        run_supervisor(setup.plan(1024), setup.config_file, None, failures.append)
    (entry,) = [entry for entry in logs if entry["event"] == "what the container allows"]
    assert entry["memory_limit_mib"] == 1024
    assert entry["max_connections"] == setup.cluster.config.limits.max_connections


@pytest.mark.usefixtures("quiet")
def test_whom_brokers_of_pulsar_5_and_listeners_for_http_would_refuse_is_logged_at_the_start(
    setup: Setup, failures: list[str]
) -> None:
    setup.signal(signal.SIGTERM)
    plan = setup.plan()
    tables = {"authentication": {"enabled": True, "scram": {"file": "unused"}}, "http_listener": [{}]}
    asked = msgspec.convert(tables, Config)
    config = msgspec.structs.replace(
        plan.config, authentication=asked.authentication, http_listener=asked.http_listener
    )
    plan = plan._replace(config=config)
    with structlog.testing.capture_logs() as logs:
        run_supervisor(plan, setup.config_file, None, failures.append)
    [warned] = [entry["reason"] for entry in logs if entry["event"] == "some clients may be refused by brokers"]
    assert warned.startswith("credentials of clients by SCRAM-SHA-256, SCRAM-SHA-512 cannot be forwarded")
    [warned] = [entry["reason"] for entry in logs if entry["event"] == "a listener for HTTP lets no client in"]
    assert warned.startswith("http_listener[0]: no client can authenticate there by SCRAM-SHA-256, SCRAM-SHA-512")


@pytest.mark.usefixtures("quiet")
def test_a_bind_failure_is_reported_in_one_sentence(
    setup: Setup, failures: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: Any) -> None:
        raise StartFailed("admin.bind: cannot bind")

    monkeypatch.setattr(main, "bind_tcp", cannot)
    run_supervisor(setup.plan(), setup.config_file, None, failures.append)
    assert failures == ["admin.bind: cannot bind"]


@pytest.mark.usefixtures("quiet")
def test_a_worker_that_cannot_start_is_said_in_one_sentence(setup: Setup, failures: list[str]) -> None:
    group = ExceptionGroup("", [ExceptionGroup("", [StartFailed("b")]), StartFailed("a"), StartFailed("b")])
    setup.cluster.failure = group
    run_supervisor(setup.plan(), setup.config_file, None, failures.append)
    assert failures == ["a; b"]
    assert setup.directory.cleared


@pytest.mark.usefixtures("quiet")
def test_an_end_at_once_is_a_failure(setup: Setup, failures: list[str]) -> None:
    setup.cluster.drain_gate = trio.Event()
    setup.signal(signal.SIGTERM)
    setup.signal(signal.SIGTERM)
    run_supervisor(setup.plan(), setup.config_file, None, failures.append)
    assert failures == ["ended at once, as asked"]


@pytest.mark.usefixtures("quiet")
def test_fail_may_exit(setup: Setup) -> None:
    """As the command does; no traceback around it."""
    setup.cluster.failure = StartFailed("why")

    def exit_(_reason: str) -> None:
        raise SystemExit(1)

    with pytest.raises(SystemExit):
        run_supervisor(setup.plan(), setup.config_file, None, exit_)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("runtime_dir", ["/run/pulsar-trio-proxy", "/run/of-the-program-before"])
def test_serve_what_an_earlier_program_left(
    setup: Setup, failures: list[str], runtime_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder stays, whatever the file says by now: the sockets in it are in use."""
    read: list[int] = []

    def left(descriptor: int) -> HandoverState:
        read.append(descriptor)
        return HandoverState(runtime_dir=runtime_dir, seal_key=b"s" * 32, runtime_lock_fd=5)

    monkeypatch.setattr(HandoverState, "from_memfd", left)
    setup.signal(signal.SIGTERM)
    with structlog.testing.capture_logs() as logs:
        run_supervisor(setup.plan(), setup.config_file, 17, failures.append)
    assert (read, failures, setup.keys) == ([17], [], [b"s" * 32])
    assert setup.log[0] == (runtime_dir, 5)
    assert setup.cluster.config.cluster.runtime_dir == runtime_dir
    changed = runtime_dir != setup.config.cluster.runtime_dir
    assert ("error" in {entry["log_level"] for entry in logs}) is changed


# ---- open files


class Limits:
    """RLIMIT_NOFILE of a process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, hard: int, *, may_raise: bool) -> None:
        self.now = (256, hard)
        self._may_raise = may_raise
        monkeypatch.setattr(resource, "getrlimit", lambda _kind: self.now)
        monkeypatch.setattr(resource, "setrlimit", self._set)

    def _set(self, _kind: int, limit: tuple[int, int]) -> None:
        _soft, hard = self.now
        if limit[1] > hard != resource.RLIM_INFINITY and not self._may_raise:
            raise ValueError("not allowed to raise maximum limit")
        self.now = limit


@pytest.mark.parametrize(
    ("hard", "connections", "may_raise", "limit", "warned"),
    [
        (65_536, 10_000, False, 65_536, False),
        (1024, 10_000, False, 1024, True),
        (1024, 10_000, True, None, False),
        (resource.RLIM_INFINITY, 10_000_000, False, resource.RLIM_INFINITY, False),
    ],
)
@pytest.mark.parametrize("crash_safe", [True, False])
def test_the_limit_on_open_files_is_raised(  # noqa: PLR0917 -- parameters
    monkeypatch: pytest.MonkeyPatch,
    hard: int,
    connections: int,
    may_raise: bool,
    limit: int | None,
    warned: bool,
    crash_safe: bool,
) -> None:
    limits = Limits(monkeypatch, hard, may_raise=may_raise)
    config = make_config(
        limits={"max_connections": connections}, cluster={"forwarders": 4}, relay={"crash_safe": crash_safe}
    )
    with structlog.testing.capture_logs() as logs:
        raise_open_file_limit(config)
    wanted = open_files_needed(config) if limit is None else limit
    assert limits.now == (wanted, wanted)
    assert bool(logs) is warned


@pytest.mark.parametrize(("forwarders", "crash_safe"), [(1, True), (1, False), (8, True), (8, False)])
def test_open_files_needed_is_that_of_the_process_with_most_descriptors(forwarders: int, crash_safe: bool) -> None:
    """The supervisor, which keeps copies of all descriptors; or a forwarder with its share."""
    config = make_config(
        limits={"max_connections": 80_000}, cluster={"forwarders": forwarders}, relay={"crash_safe": crash_safe}
    )
    needed = open_files_needed(config) - SPARE_DESCRIPTORS
    per_forwarder = 80_000 * DESCRIPTORS_PER_RELAY // forwarders
    assert needed == (80_000 * DESCRIPTORS_PER_RELAY if crash_safe else per_forwarder)


@pytest.mark.parametrize("workers", [1, 4, 256])
def test_beside_the_reserve_every_forwarder_may_store_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    config = make_config(
        limits={"max_connections": 50_000},
        cluster={"forwarders": workers, "auth_workers": workers, "lookup_workers": workers},
    )
    Limits(monkeypatch, 1024, may_raise=True)
    raise_open_file_limit(config)
    relays = -(-50_000 // workers)
    assert stored_descriptors_max(config, workers) >= relays * DESCRIPTORS_PER_RELAY + 40


def test_without_a_limit_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Limits(monkeypatch, resource.RLIM_INFINITY, may_raise=False)
    raise_open_file_limit(config := make_config())
    assert stored_descriptors_max(config, 4) > RELAYS_MAX * DESCRIPTORS_PER_RELAY


def test_below_the_reserve_nothing_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (256, 256))
    assert stored_descriptors_max(make_config(), 1) == 0
