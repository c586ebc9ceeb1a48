"""proxy.supervisor.main: bind, start, watch, drain, end."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import structlog.testing
import trio
import trio.testing
from supervisor_fakes import FakeDirectory, FakeSocket, make_config

from proxy.config.types import Config
from proxy.supervisor import main, open_files
from proxy.supervisor.cluster import ReloadRefused
from proxy.supervisor.main import StopAtOnce, Supervisor, serve
from proxy.supervisor.open_files import allow_open_files
from proxy.supervisor.sockets import StartFailed


class FakeCluster:
    def __init__(self, config: Config, log: list[Any]) -> None:
        self.config = config
        self.slots = [1, 2, 3]
        self.log = log
        self.drain_gate = trio.Event()
        self.drain_gate.set()
        self.failure: Exception | None = None
        self.reloaded: list[Config] = []
        self.reload_error: Exception | None = None
        self.registry = None

    async def run(self, ready: trio.Event) -> None:
        await trio.lowlevel.checkpoint()
        if self.failure is not None:
            raise self.failure
        ready.set()
        await trio.sleep_forever()

    async def drain(self) -> None:
        self.log.append("drain")
        await self.drain_gate.wait()

    async def reload(self, config: Config) -> None:
        await trio.lowlevel.checkpoint()
        if self.reload_error is not None:
            raise self.reload_error
        self.reloaded.append(config)

    def stop_at_once(self) -> None:
        self.log.append("stop at once")

    def close(self) -> None:
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
        self._send, self._receive = trio.open_memory_channel[int](10)
        monkeypatch.setattr(main, "RuntimeDirectory", lambda _path: self.directory)
        monkeypatch.setattr(main, "bind_tcp", lambda key, _bind: FakeSocket(key, self.log))
        monkeypatch.setattr(main, "Cluster", self._cluster)
        monkeypatch.setattr(main, "serve_admin", self._serve_admin)
        monkeypatch.setattr(main.Control, "serve", self._serve_control)
        monkeypatch.setattr(main, "allow_open_files", lambda _config: None)
        monkeypatch.setattr(trio, "open_signal_receiver", self._signals)

    def _cluster(self, _config: Config, _directory: Any, key: bytes) -> FakeCluster:
        self.keys.append(key)
        return self.cluster

    @staticmethod
    async def _serve_admin(*_: Any) -> None:
        await trio.sleep_forever()

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
        supervisor = Supervisor(self.config, self.config_file)
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
    assert setup.log[-4:] == ["drain", "stop at once", "close", ("admin.bind", "close")]
    assert setup.directory.cleared
    assert "control.sock" in setup.directory.sockets


async def test_a_second_signal_ends_at_once(setup: Setup) -> None:
    setup.cluster.drain_gate = trio.Event()
    with pytest.RaisesGroup(StopAtOnce, flatten_subgroups=True):
        async with trio.open_nursery() as nursery:
            await setup.run(nursery)
            setup.signal(signal.SIGTERM)
            await trio.testing.wait_all_tasks_blocked()
            setup.signal(signal.SIGTERM)
    assert "stop at once" in setup.log
    assert setup.directory.cleared


async def test_sighup_reloads(setup: Setup, nursery: trio.Nursery) -> None:
    ended = await setup.run(nursery)
    setup.config_file.write_text("[limits]\nmax_connections = 5\n")
    setup.signal(signal.SIGHUP)
    await trio.testing.wait_all_tasks_blocked()
    assert [config.limits.max_connections for config in setup.cluster.reloaded] == [5]
    assert not ended.is_set()
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
        Supervisor(setup.config, setup.config_file)
    assert len(set(setup.keys)) == 2
    assert {len(key) for key in setup.keys} == {32}


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
    serve(setup.config, setup.config_file, failures.append)
    assert failures == []


@pytest.mark.usefixtures("quiet")
def test_what_cannot_be_bound_is_said_in_one_sentence(
    setup: Setup, failures: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: Any) -> None:
        raise StartFailed("admin.bind: cannot bind")

    monkeypatch.setattr(main, "bind_tcp", cannot)
    serve(setup.config, setup.config_file, failures.append)
    assert failures == ["admin.bind: cannot bind"]


@pytest.mark.usefixtures("quiet")
def test_a_worker_that_cannot_start_is_said_in_one_sentence(setup: Setup, failures: list[str]) -> None:
    group = ExceptionGroup("", [ExceptionGroup("", [StartFailed("b")]), StartFailed("a"), StartFailed("b")])
    setup.cluster.failure = group
    serve(setup.config, setup.config_file, failures.append)
    assert failures == ["a; b"]
    assert setup.directory.cleared


@pytest.mark.usefixtures("quiet")
def test_an_end_at_once_is_a_failure(setup: Setup, failures: list[str]) -> None:
    setup.cluster.drain_gate = trio.Event()
    setup.signal(signal.SIGTERM)
    setup.signal(signal.SIGTERM)
    serve(setup.config, setup.config_file, failures.append)
    assert failures == ["ended at once, as asked"]


@pytest.mark.usefixtures("quiet")
def test_fail_may_exit(setup: Setup) -> None:
    """As the command does; no traceback around it."""
    setup.cluster.failure = StartFailed("why")

    def exit_(_reason: str) -> None:
        raise SystemExit(1)

    with pytest.raises(SystemExit):
        serve(setup.config, setup.config_file, exit_)


# ---- open files


@pytest.mark.parametrize(
    ("hard", "connections", "warned"),
    [(1024, 10_000, True), (65_536, 10_000, False), (resource.RLIM_INFINITY, 10_000_000, False)],
)
def test_the_limit_on_open_files_is_raised(
    monkeypatch: pytest.MonkeyPatch, hard: int, connections: int, warned: bool
) -> None:
    limits: list[Any] = []
    monkeypatch.setattr(open_files.resource, "getrlimit", lambda _kind: (256, hard))
    monkeypatch.setattr(open_files.resource, "setrlimit", lambda _kind, limit: limits.append(limit))
    config = make_config(limits={"max_connections": connections}, cluster={"forwarders": 4})
    with structlog.testing.capture_logs() as logs:
        allow_open_files(config)
    assert limits == [(hard, hard)]
    assert bool(logs) is warned
