"""proxy.supervisor.operators.control and proxy.cli: what an operator may ask, and what the commands make of the
answers."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Awaitable, Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import structlog
import structlog.testing
import trio
import trio.testing
from click.testing import CliRunner, Result
from google.protobuf.message import Message

from proto.roles import MAY_CALL, Role
from proto.rpc_pb2 import Empty, LogLevelRequest, Method, ReloadRequest, Status, Text, UnreadyRequest
from proxy import cli
from proxy.common.errors import ConfigError
from proxy.config.trial import TRIAL_TIMEOUT_S
from proxy.config.types import Config
from proxy.runtime.rpc.client import RpcClient, unix_connector
from proxy.runtime.rpc.errors import RpcCallRefused, RpcConnectionLost
from proxy.runtime.rpc.peers import Caller
from proxy.runtime.rpc.server import RpcServer
from proxy.supervisor.broker_changes import IN_FORCE_WAIT_S
from proxy.supervisor.cluster.log_levels import LOGGING_ROLES, LogLevels
from proxy.supervisor.handover.exec_handover import CHECK_TIMEOUT_S
from proxy.supervisor.operators.ancestry import NotSupervisor
from proxy.supervisor.operators.connections import ClusterConnections
from proxy.supervisor.operators.control import ControlServer, UpgradeRefused, control_path
from proxy.supervisor.operators.log_levels import FOR_MS_MAX, LogLevelControl
from proxy.supervisor.processes.broker_trial import START_GRACE_S
from proxy.supervisor.processes.configure import ReloadRefused
from proxy.supervisor.startup.sockets import CONTROL_SOCKET, RuntimeDirectory

STATUS: dict[str, Any] = {
    "cluster": "prod",
    "version": "1",
    "ready": True,
    "not_ready_because": [],
    "generation": 1,
    "replacing_workers": False,
    "listeners": ["pulsar://0.0.0.0:6650"],
    "service_url": "pulsar://b0",
    "authentication": True,
    "workers": [],
}

NOTHING = Empty()


class FakeReport:
    async def status_json(self) -> bytes:
        await trio.lowlevel.checkpoint()
        return json.dumps(STATUS).encode()


class Operated:
    def __init__(self) -> None:
        self.drained = 0
        self.cluster: Any = SimpleNamespace(slots_of=lambda _role: [])
        self.reloaded: list[str] = []
        self.reload_error: Exception | None = None
        self.upgraded = 0
        self.upgrade_error: Exception | None = None
        self.cluster.log_levels, self.cluster.config = LogLevels({}), Config()
        self.cluster.send_log_levels = self._send_log_levels
        self.log_levels_sent: list[dict[str, str]] = []
        self.log_levels_failed: list[str] = []
        self.log_levels = LogLevelControl(self.cluster, trio.current_time)
        self.unready: list[str | None] = []
        self.control = ControlServer(
            FakeReport(),  # type: ignore[arg-type]
            ClusterConnections(self.cluster),
            drain=self._drain,
            reload=self._reload,
            upgrade=self._upgrade,
            log_levels=self.log_levels,
            set_unready=self.unready.append,
        )

    async def _send_log_levels(self, roles: Collection[Role]) -> list[str]:
        await trio.lowlevel.checkpoint()
        levels = self.cluster.log_levels
        self.log_levels_sent.append({role.value: levels.level_of(role, self.cluster.config) for role in roles})
        return self.log_levels_failed

    def _drain(self) -> None:
        self.drained += 1

    async def _reload(self, force: bool) -> None:
        await trio.lowlevel.checkpoint()
        if self.reload_error is not None:
            raise self.reload_error
        self.reloaded.append("by force" if force else "if a broker accepts it")

    async def _upgrade(self) -> int:
        await trio.lowlevel.checkpoint()
        if self.upgrade_error is not None:
            raise self.upgrade_error
        self.upgraded += 1
        return 41

    def client(self, nursery: trio.Nursery, role: Role = Role.OPERATOR) -> RpcClient:
        server = RpcServer(self.control._handlers(), max_frame_bytes=1 << 20)

        async def connect() -> trio.abc.HalfCloseableStream:
            await trio.lowlevel.checkpoint()
            ours, theirs = trio.testing.memory_stream_pair()
            nursery.start_soon(server.serve_connection, theirs, Caller(role, 1))
            return ours

        client = RpcClient(connect, max_frame_bytes=1 << 20)
        nursery.start_soon(client.run)
        return client


@pytest.fixture
def operated() -> Operated:
    return Operated()


async def test_status(operated: Operated, nursery: trio.Nursery) -> None:
    answer = await operated.client(nursery).call(Method.CLUSTER_STATUS, Empty(), Text, timeout_s=60)
    assert json.loads(answer.text) == STATUS


async def test_drain(operated: Operated, nursery: trio.Nursery) -> None:
    await operated.client(nursery).call(Method.CLUSTER_DRAIN, Empty(), Text, timeout_s=60)
    assert operated.drained == 1


async def test_reload(operated: Operated, nursery: trio.Nursery) -> None:
    client = operated.client(nursery)
    for request in (Empty(), ReloadRequest(), ReloadRequest(force=True)):
        await client.call(Method.CLUSTER_RELOAD, request, Text, timeout_s=60)
    assert operated.reloaded == ["if a broker accepts it"] * 2 + ["by force"]
    for error in (ConfigError("limits: bad"), ReloadRefused("a restart is needed")):
        operated.reload_error = error
        with pytest.raises(RpcCallRefused, match=str(error)) as caught:
            await client.call(Method.CLUSTER_RELOAD, Empty(), Text, timeout_s=60)
        assert caught.value.status == Status.INVALID_REQUEST


@pytest.fixture
def _own_logs() -> Iterator[None]:
    """Leave the level of this process's logs as it was."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.mark.usefixtures("_own_logs")
async def test_a_log_level_for_a_while(
    operated: Operated, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    client = operated.client(nursery)
    nursery.start_soon(operated.log_levels.run)

    async def ask(**request: Any) -> Any:
        answer = await client.call(Method.CLUSTER_LOG_LEVEL, LogLevelRequest(**request), Text, timeout_s=6000)
        return json.loads(answer.text)

    assert await ask() == {"configured": "info", "changed": [], "failed": []}
    assert operated.log_levels_sent == []
    with structlog.testing.capture_logs() as logs:
        told = await ask(level="debug", role="forwarder", for_ms=600_000)
    [entry] = logs
    assert (entry["log_level"], entry["to"], entry["of"]) == ("warning", "debug", "forwarder")
    assert told["changed"] == [{"role": "forwarder", "level": "debug", "seconds_left": 600}]
    operated.log_levels_failed = ["lookup-0"]
    assert (await ask(level="warning", role="supervisor"))["failed"] == ["lookup-0"]
    with structlog.testing.capture_logs() as logs:
        structlog.get_logger().info("not shown")
        structlog.get_logger().warning("shown")
    assert [entry["event"] for entry in logs] == ["shown"]
    await trio.sleep(601)
    assert (await ask())["changed"] == [{"role": "supervisor", "level": "warning", "seconds_left": None}]
    assert operated.log_levels_sent == [{"forwarder": "debug"}, {"supervisor": "warning"}, {"forwarder": "info"}]
    assert (await ask(level="configured"))["changed"] == []
    assert operated.log_levels_sent[-1] == dict.fromkeys(LOGGING_ROLES, "info")


@pytest.mark.usefixtures("_own_logs")
async def test_a_log_level_for_a_while_ends_also_if_the_operator_leaves(
    operated: Operated, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """Before all workers have answered: the command was interrupted."""
    nursery.start_soon(operated.log_levels.run)
    await trio.testing.wait_all_tasks_blocked()
    with trio.CancelScope() as scope:
        scope.cancel()
        await operated.log_levels.change(LogLevelRequest(level="debug", for_ms=60_000))
    assert operated.cluster.log_levels.changed
    await trio.sleep(61)
    assert operated.cluster.log_levels.changed == {}
    assert operated.log_levels_sent == [dict.fromkeys(LOGGING_ROLES, "info")]


@pytest.mark.usefixtures("_own_logs")
async def test_a_reload_ends_a_changed_log_level_only_where_the_configured_one_is_new(operated: Operated) -> None:
    levels = operated.cluster.log_levels
    await operated.log_levels.change(LogLevelRequest(level="debug"))
    await operated.log_levels.on_reloaded(is_level_new=False)
    assert levels.changed.keys() == set(LOGGING_ROLES)
    operated.cluster.config = msgspec.convert({"log": {"level": "error"}}, Config)
    await operated.log_levels.on_reloaded(is_level_new=True)
    assert levels.changed == {}
    assert operated.log_levels_sent[-1] == dict.fromkeys(LOGGING_ROLES, "error")


@pytest.mark.parametrize("request_", [{"level": "loud"}, {"role": "operator"}, {"for_ms": FOR_MS_MAX + 1}])
async def test_a_log_level_that_cannot_be(operated: Operated, nursery: trio.Nursery, request_: dict[str, Any]) -> None:
    request = LogLevelRequest(**{"level": "debug", **request_})
    with pytest.raises(RpcCallRefused) as caught:
        await operated.client(nursery).call(Method.CLUSTER_LOG_LEVEL, request, Text, timeout_s=60)
    assert caught.value.status == Status.INVALID_REQUEST
    assert operated.cluster.log_levels.changed == {}


async def test_unready_and_ready(operated: Operated, nursery: trio.Nursery) -> None:
    client = operated.client(nursery)
    for request in (UnreadyRequest(unready=True, reason="a new kernel"), UnreadyRequest(unready=True), Empty()):
        await client.call(Method.CLUSTER_UNREADY, request, Text, timeout_s=60)
    assert operated.unready == ["a new kernel", "", None]
    for reason in ("x" * 201, "a\nline"):
        request = UnreadyRequest(unready=True, reason=reason)
        with pytest.raises(RpcCallRefused, match="reason"):
            await client.call(Method.CLUSTER_UNREADY, request, Text, timeout_s=60)
    assert len(operated.unready) == 3


async def test_upgrade(operated: Operated, nursery: trio.Nursery) -> None:
    client = operated.client(nursery)
    answer = await client.call(Method.CLUSTER_UPGRADE, Empty(), Text, timeout_s=60)
    assert (answer.text, operated.upgraded) == ("41", 1), "the generation that is to be followed by another"
    operated.upgrade_error = UpgradeRefused("the program that is installed now fails: x")
    with pytest.raises(RpcCallRefused, match="the program that is installed now fails: x") as caught:
        await client.call(Method.CLUSTER_UPGRADE, Empty(), Text, timeout_s=60)
    assert caught.value.status == Status.INVALID_REQUEST


def test_only_an_operator_may(operated: Operated) -> None:
    """Security."""
    for method in operated.control._handlers():
        assert MAY_CALL[method] == {Role.OPERATOR}


@pytest.mark.parametrize("role", [Role.FORWARDER, Role.LOOKUP, Role.AUTH])
async def test_a_worker_may_not(operated: Operated, nursery: trio.Nursery, role: Role) -> None:
    """Security: a forwarder that was taken over could otherwise end the cluster."""
    with pytest.raises(RpcCallRefused) as caught:
        await operated.client(nursery, role).call(Method.CLUSTER_DRAIN, Empty(), Text, timeout_s=60)
    assert caught.value.status == Status.CLUSTER_AUTHORIZATION_FAILED
    assert operated.drained == 0


async def test_over_a_real_socket(
    operated: Operated, nursery: trio.Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Security: who may come is the kernel's word (SO_PEERCRED, so no socket in memory will do)."""
    directory = RuntimeDirectory(str(tmp_path))
    monkeypatch.setattr("proxy.supervisor.operators.ancestry._has_filter", lambda _pid: False)
    nursery.start_soon(operated.control.serve, directory.bind_socket(CONTROL_SOCKET))
    assert json.loads(await cli._call(control_path(str(tmp_path)), Method.CLUSTER_STATUS)) == STATUS
    uid = os.geteuid()
    with monkeypatch.context() as patch:
        patch.setattr("proxy.supervisor.operators.ancestry.peer_credentials", lambda _sock: (1, uid + 1))
        stranger = await unix_connector(control_path(str(tmp_path)))()
        assert await stranger.receive_some(10) == b""
        await stranger.aclose()
    directory.remove_sockets()
    nursery.cancel_scope.cancel()


# ---- the command line


Run = Callable[..., Result]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "proxy.toml"
    path.write_text(f"[cluster]\nruntime_dir = '{tmp_path}'\n[limits]\ndrain_timeout_ms = 1234\n")
    return path


@pytest.fixture
def run(config: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    for name in list(os.environ):
        if name.startswith("PULSAR_TRIO_PROXY__"):
            monkeypatch.delenv(name)

    def invoke(*arguments: str) -> Result:
        return CliRunner().invoke(cli.main, [*arguments, "--config", str(config)])

    return invoke


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[int, Any]:
    """A cluster seems to run; what it answers to each method."""
    (tmp_path / CONTROL_SOCKET).touch()
    answers: dict[int, Any] = {}

    async def call(path: str, method: int, request: Message = NOTHING) -> str:
        await trio.lowlevel.checkpoint()
        assert path == str(tmp_path / CONTROL_SOCKET)
        answer = answers.get(method, "")
        if callable(answer):
            return str(answer(request))
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    async def somebody_listens(path: str) -> bool:
        await trio.lowlevel.checkpoint()
        return path == str(tmp_path / CONTROL_SOCKET)

    monkeypatch.setattr(cli, "_call", call)
    monkeypatch.setattr(cli, "_is_listening", somebody_listens)
    return answers


def test_check(run: Run, config: Path) -> None:
    result = run("check")
    assert result.exit_code == 0
    assert result.output.startswith(f"{config}: in order\ncontainer: ")


def test_check_names_the_key(run: Run, config: Path) -> None:
    config.write_text("[limits]\nmax_conections = 5")
    result = run("check")
    assert result.exit_code == 1
    meant = 'limits.max_conections: there is no such key; did you mean "max_connections"?'
    assert result.stderr == f"pulsar-trio-proxy: {meant}\n"
    assert "Traceback" not in result.output


def test_check_reads_the_environment(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PULSAR_TRIO_PROXY__LIMITS__NONSENSE", "1")
    result = run("check")
    assert result.exit_code == 1
    assert "PULSAR_TRIO_PROXY__LIMITS__NONSENSE" in result.stderr


def test_a_file_that_is_not_there(run: Run, config: Path) -> None:
    config.unlink()
    result = run("serve")
    assert result.exit_code == 1
    assert "cannot be read" in result.stderr


def test_status_where_a_file_is_broken(run: Run, config: Path, running: dict[int, Any]) -> None:
    """It is the cluster that knows what it has in force instead."""
    running[Method.CLUSTER_STATUS] = json.dumps(STATUS)
    config.write_text(f"{config.read_text()}\n[admin]\ntoken_file = '/nowhere'")
    assert run("check").exit_code == 1
    assert run("status").output.startswith("cluster prod, version 1, ")
    config.write_text("[cluster]\nruntime_directory = '/elsewhere'")
    assert run("status").exit_code == 1, "a key that there is not may be the one that tells where the cluster runs"


def test_status_for_people_and_for_programs(run: Run, running: dict[int, Any]) -> None:
    running[Method.CLUSTER_STATUS] = json.dumps(STATUS)
    assert run("status").output.startswith("cluster prod, version 1, generation 1: ready\n")
    assert json.loads(run("status", "--json").output) == STATUS


def test_reload_command_by_force(run: Run, running: dict[int, Any]) -> None:
    asked: list[Message] = []
    running[Method.CLUSTER_RELOAD] = asked.append
    for arguments in (("reload",), ("reload", "--force")):
        assert run(*arguments).output == "reloaded\n"
    assert asked == [ReloadRequest(force=False), ReloadRequest(force=True)]


def test_log_level_command(run: Run, running: dict[int, Any]) -> None:
    asked: list[Message] = []
    told: dict[str, Any] = {"configured": "info", "changed": [], "failed": []}

    def answer(request: Message) -> str:
        asked.append(request)
        return json.dumps(told)

    running[Method.CLUSTER_LOG_LEVEL] = answer
    assert run("log-level").output == "info, as configured\n"
    told["changed"] = [{"role": "forwarder", "level": "debug", "seconds_left": 600}]
    result = run("log-level", "debug", "--for", "10m", "--role", "forwarder")
    assert result.output == "forwarder: CHANGED to debug for 600 s more (configured: info)\n"
    told["failed"] = ["lookup-0"]
    result = run("log-level", "configured")
    assert result.exit_code == 1
    assert "these did not take it over: lookup-0" in result.stderr
    asked_for = [(one.level, one.for_ms, one.role) for one in asked if isinstance(one, LogLevelRequest)]
    assert asked_for == [("", 0, ""), ("debug", 600_000, "forwarder"), ("configured", 0, "")]
    for wrong in (("--for", "10m"), ("configured", "--for", "10m"), ("debug", "--for", "0s"), ("debug", "--for", "x")):
        assert run("log-level", *wrong).exit_code != 0, wrong
    assert len(asked) == 3


def test_unready_and_ready_commands(run: Run, running: dict[int, Any]) -> None:
    asked: list[Message] = []
    running[Method.CLUSTER_UNREADY] = asked.append
    for arguments in (("unready", "--reason", "a new kernel"), ("unready",), ("ready",)):
        assert run(*arguments).exit_code == 0
    asked_for = [(one.unready, one.reason) for one in asked if isinstance(one, UnreadyRequest)]
    assert asked_for == [(True, "a new kernel"), (True, ""), (False, "")]


def test_reload_command(run: Run, running: dict[int, Any]) -> None:
    assert run("reload").output == "reloaded\n"
    running[Method.CLUSTER_RELOAD] = RpcCallRefused(Status.INVALID_REQUEST, "a restart is needed to change: admin")
    result = run("reload")
    assert result.exit_code == 1
    assert result.stderr == "pulsar-trio-proxy: a restart is needed to change: admin\n", "and no name of a status"


def test_drain_command_returns_when_the_cluster_has_ended(
    run: Run, running: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[str] = []

    async def wait(path: str) -> None:
        await trio.lowlevel.checkpoint()
        waited.append(path)

    monkeypatch.setattr(cli, "_wait_for_end", wait)
    result = run("drain")
    assert result.output == "draining, for at most 1234 ms\nended\n"
    assert len(waited) == 1


Statuses = list[tuple[float, Any]]


@pytest.fixture
def upgrading(run: Run, running: dict[int, Any], monkeypatch: pytest.MonkeyPatch) -> Statuses:
    """What the cluster says, and from when on; the clock jumps."""
    statuses: Statuses = []
    running[Method.CLUSTER_UPGRADE] = "3"
    real_run, real_call = trio.run, cli._call

    async def call(path: str, method: int, request: Message = NOTHING) -> str:
        if method == Method.CLUSTER_STATUS:
            [*_, running[method]] = [status for since, status in statuses if since <= trio.current_time()]
        return await real_call(path, method, request)

    monkeypatch.setattr(cli, "_call", call)
    clock = trio.testing.MockClock(autojump_threshold=0)
    monkeypatch.setattr(trio, "run", lambda function, *arguments: real_run(function, *arguments, clock=clock))
    return statuses


def status_of(generation: int, *, replacing: bool) -> str:
    return json.dumps(STATUS | {"generation": generation, "replacing_workers": replacing})


def test_upgrade_command_returns_when_all_is_new(
    run: Run, upgrading: Statuses, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended_at: list[float] = []
    wait = cli._wait_for_generation

    async def waited(path: str, generation: int) -> None:
        await wait(path, generation)
        ended_at.append(trio.current_time())

    monkeypatch.setattr(cli, "_wait_for_generation", waited)
    upgrading += [
        (0, status_of(3, replacing=False)),  # it has not begun
        (1, RpcConnectionLost("the worker went away")),
        (2, ConnectionResetError(104, "Connection reset by peer")),
        (3, status_of(4, replacing=True)),
        (7, status_of(4, replacing=False)),
    ]
    result = run("upgrade")
    assert (result.exit_code, result.output) == (0, "upgrading\nupgraded\n")
    assert ended_at == [pytest.approx(7, abs=cli.UPGRADE_POLL_S + 0.01)]


def one_worker(state: str, *, restarts: int = 0) -> str:
    workers = [{"role": "forwarder", "worker": 1, "state": state, "restarts": restarts}]
    return json.dumps(json.loads(status_of(4, replacing=False)) | {"workers": workers})


def test_an_upgrade_waits_for_a_worker_that_was_killed_in_it(run: Run, upgrading: Statuses) -> None:
    """One that does not come to rest before the exec is killed, and its successor is new; it takes its time."""
    upgrading += [(0, one_worker("starting")), (40, one_worker("restarting", restarts=1)), (50, one_worker("running"))]
    result = run("upgrade")
    assert (result.exit_code, result.output) == (0, "upgrading\nupgraded\n")


@pytest.mark.parametrize("seconds_to_next_start", [1, 200])
def test_an_upgrade_names_a_worker_that_does_not_run(run: Run, upgrading: Statuses, seconds_to_next_start: int) -> None:
    """After three failed starts, or when the time is up."""
    upgrading += [(n * seconds_to_next_start, one_worker("restarting", restarts=7 + n)) for n in range(5)]
    result = run("upgrade")
    assert (result.exit_code, result.stdout) == (1, "upgrading\n")
    assert "upgraded, but these do not run: forwarder-1; see the cluster's log" in result.stderr


def test_another_upgrade_may_have_followed(run: Run, upgrading: Statuses) -> None:
    upgrading += [(0, status_of(6, replacing=False))]
    assert run("upgrade").exit_code == 0


@pytest.mark.parametrize("status", [status_of(3, replacing=False), status_of(4, replacing=True), OSError(2, "gone")])
def test_an_upgrade_that_is_not_done_in_time(run: Run, upgrading: Statuses, status: Any) -> None:
    upgrading += [(0, status)]
    result = run("upgrade")
    assert (result.exit_code, result.stdout) == (1, "upgrading\n")
    assert "not done within 300 s; see the cluster's log, and `status`" in result.stderr


def test_an_upgrade_that_is_refused(run: Run, running: dict[int, Any]) -> None:
    running[Method.CLUSTER_UPGRADE] = RpcCallRefused(Status.INVALID_REQUEST, "the program that is installed now fails")
    result = run("upgrade")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "the program that is installed now fails" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize("command", ["status", "drain", "reload", "upgrade"])
def test_a_command_says_that_no_supervisor_listens(
    run: Run, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Security: and asks nothing."""

    async def worker() -> Any:
        await trio.lowlevel.checkpoint()
        raise NotSupervisor(errno.EPERM, "process 7 is not the supervisor")

    monkeypatch.setattr(cli, "supervisor_connector", lambda _path: worker)
    result = run(command)
    assert result.exit_code == 1
    assert result.stderr == f"pulsar-trio-proxy: {tmp_path / CONTROL_SOCKET}: process 7 is not the supervisor\n"


@pytest.mark.parametrize("command", ["status", "drain", "reload", "upgrade"])
def test_no_cluster_is_running(run: Run, command: str, tmp_path: Path) -> None:
    result = run(command)
    assert result.exit_code == 1
    assert f"no cluster is running in {tmp_path}" in result.stderr


def test_a_control_socket_left_of_a_dead_cluster_is_told(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill of the supervisor control.sock is still there; half a minute of silence is no answer."""
    (tmp_path / CONTROL_SOCKET).touch()
    clock = trio.testing.MockClock(autojump_threshold=0)
    real_run = trio.run
    ended_at: list[float] = []

    def fake_run(function: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        async def main() -> Any:
            try:
                return await function(*arguments)
            finally:
                ended_at.append(trio.current_time())

        return real_run(main, clock=clock)

    monkeypatch.setattr(trio, "run", fake_run)

    def refusing_connector(_path: str) -> Any:
        async def connect() -> Any:
            await trio.lowlevel.checkpoint()
            raise ConnectionRefusedError(111, "Connection refused")

        return connect

    monkeypatch.setattr(cli, "supervisor_connector", refusing_connector)
    result = run("status")
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    assert not ended_at or ended_at[0] <= 5


def test_a_folder_that_is_not_ours_to_look_into(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder has mode 0700: another user gets EACCES."""
    real_stat = os.stat

    def denied(path: Any, *arguments: Any, **keywords: Any) -> Any:
        if str(path).endswith(CONTROL_SOCKET):
            raise PermissionError(13, "Permission denied", str(path))
        return real_stat(path, *arguments, **keywords)

    monkeypatch.setattr(os, "stat", denied)

    def refusing_connector(_path: str) -> Any:
        async def connect() -> Any:
            await trio.lowlevel.checkpoint()
            raise PermissionError(13, "Permission denied")

        return connect

    monkeypatch.setattr(cli, "supervisor_connector", refusing_connector)
    monkeypatch.setattr(cli, "CALL_TIMEOUT_S", 0.01)
    result = run("status")
    assert result.exit_code == 1
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)


@pytest.mark.parametrize("method", [Method.CLUSTER_RELOAD, Method.CLUSTER_UPGRADE])
async def test_a_command_waits_as_long_as_its_trials_may_take(
    monkeypatch: pytest.MonkeyPatch, method: int, autojump_clock: trio.testing.MockClock
) -> None:
    """At brokers that do not answer: of changed files, whose trial is under way, and then of the command's own."""
    of_one_trial_s = TRIAL_TIMEOUT_S + START_GRACE_S + IN_FORCE_WAIT_S
    longest_s = 2 * of_one_trial_s + CHECK_TIMEOUT_S

    class Client:
        def __init__(self, *_arguments: object, **_keywords: object) -> None:
            self.run = trio.sleep_forever

        async def call(self, _method: int, *_arguments: object, timeout_s: float) -> Text:
            await trio.sleep(min(longest_s, timeout_s))
            return Text(text="done" if longest_s < timeout_s else "too slow")

    monkeypatch.setattr(cli, "RpcClient", Client)
    assert await cli._call("x", method) == "done"
    assert await cli._call("x", Method.CLUSTER_STATUS) == "too slow"


async def test_wait_for_end(monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock) -> None:
    closed: list[float] = []

    class Stream:
        async def aclose(self) -> None:
            await trio.lowlevel.checkpoint()
            closed.append(trio.current_time())

    async def open_socket(_path: str) -> Stream:
        await trio.lowlevel.checkpoint()
        if trio.current_time() > 2:
            raise FileNotFoundError
        if trio.current_time() > 1:
            raise NotSupervisor(errno.EPERM, "it is ending, and has no child left")
        return Stream()

    monkeypatch.setattr(cli, "supervisor_connector", lambda path: partial(open_socket, path))
    await cli._wait_for_end("x")
    assert 2 < trio.current_time() < 2.5
    assert closed


async def test_a_call_that_is_refused(
    operated: Operated, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    operated.reload_error = ReloadRefused("because")
    connect = operated.client(nursery)._connect
    monkeypatch.setattr(cli, "supervisor_connector", lambda _path: connect)
    with pytest.raises(RpcCallRefused, match="because"):
        await cli._call("x", Method.CLUSTER_RELOAD)


def test_serve(run: Run, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Any] = []
    monkeypatch.setattr(cli, "run_supervisor", lambda *arguments: served.extend(arguments))
    assert run("serve").exit_code == 0
    loaded, path, handover, fail = served
    assert (loaded.config.limits.drain_timeout_ms, path, handover) == (1234, config, None)
    with pytest.raises(SystemExit) as caught:
        fail("why")
    assert caught.value.code == 1


def test_serve_what_an_earlier_program_left(run: Run, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Any] = []
    monkeypatch.setattr(cli, "run_supervisor", lambda *arguments: served.extend(arguments))
    assert run("serve", "--legacy", "17").exit_code == 0
    assert served[2] == 17
    assert "--legacy" not in CliRunner().invoke(cli.main, ["serve", "--help"]).output, "it is not for people"


def test_version(run: Run) -> None:
    assert "pulsar-trio-proxy" in CliRunner().invoke(cli.main, ["--version"]).output
