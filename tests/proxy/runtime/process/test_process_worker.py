"""proxy.runtime.process.worker: a worker's life, from nothing but descriptors to the end of the liveness pipe."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import trio
import trio.testing
from prometheus_client import Counter

from proto.roles import Role
from proto.rpc_pb2 import (
    ConfigureRequest,
    DrainRequest,
    Empty,
    LogLevelRequest,
    Method,
    Peer,
    SetPeersRequest,
    StartRequest,
    Status,
    Text,
)
from proxy.common.errors import ConfigError
from proxy.common.reloading_file import ReloadingFile
from proxy.config.types import Config, Limits
from proxy.config.worker_config import encode_config
from proxy.runtime.observability.process_metrics import ProcessMetrics
from proxy.runtime.process import worker
from proxy.runtime.process.descriptors import Descriptors
from proxy.runtime.process.worker import Confinement, WorkerContext, run_worker, service_socket_path
from proxy.runtime.rpc import peers
from proxy.runtime.rpc.client import RpcClient
from proxy.runtime.rpc.errors import RpcCallRefused
from proxy.runtime.rpc.peers import Caller

FRAME_BYTES_MAX = worker.CONTROL_FRAME_BYTES_MAX

ENDS = "pulsar_proxy_certificate_expiry_timestamp_seconds"

PATIENCE_S = 60
"""For what takes no time but the machine's: START collects garbage, all that earlier tests have left included."""


class FakeService:
    """What a role makes of a worker."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self.story: list[Any] = []
        self.refuse_start = ""
        self.hangs_in_drain = False
        self.counter = Counter("things", "Things.", registry=context.registry)

    def handlers(self) -> dict[int, Any]:
        return {Method.ENVELOPE: self._envelope}

    async def _envelope(self, data: bytes, caller: Caller) -> bytes:
        await trio.lowlevel.checkpoint()
        self.story.append(("envelope", caller))
        return data

    async def start(self) -> None:
        await trio.lowlevel.checkpoint()
        if self.context.config.brokers.service_url == "pulsar://unusable":
            raise ConfigError("brokers.service_url: unusable")
        self.story.append("start")

    async def configure(self, config: Config) -> None:
        await trio.lowlevel.checkpoint()
        if config.limits.max_connections == 13:
            raise ConfigError("limits.max_connections: unlucky")
        self.story.append(("configure", config.limits.max_connections))

    async def drain(self, timeout_s: float, *, hand_over: bool) -> None:
        await trio.lowlevel.checkpoint()
        self.story.append(("drain", timeout_s, hand_over))
        if self.hangs_in_drain:
            await trio.sleep_forever()

    def status(self) -> dict[str, object]:
        return {"story": len(self.story)}


class FakeListener(trio.abc.Listener[Any]):
    def __init__(self) -> None:
        self._send, self._receive = trio.open_memory_channel[Any](10)

    async def accept(self) -> Any:
        return await self._receive.receive()

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()

    def come(self, pid: int) -> trio.abc.HalfCloseableStream:
        ours, theirs = trio.testing.memory_stream_pair()
        theirs.socket = FakeSocket(pid)  # type: ignore[attr-defined]
        self._send.send_nowait(theirs)
        return ours


class FakeSocket:
    def __init__(self, pid: int) -> None:
        self._pid = pid

    def getsockopt(self, *_: int) -> bytes:
        return peers._UCRED.pack(self._pid, os.geteuid(), 0)

    def getsockname(self) -> str:
        return "fake"


CONFINED = Confinement(landlock=True, seccomp=True)


class RunningWorker:
    """A worker process's inside, and the supervisor's ends."""

    def __init__(
        self, role: Role, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch, confinement: Confinement = CONFINED
    ) -> None:
        self.channel, theirs = trio.testing.memory_stream_pair()
        self.listener = FakeListener()
        self.services: list[FakeService] = []
        reading, self.liveness = os.pipe()
        monkeypatch.setattr(worker, "adopt_stream", lambda _descriptor: theirs)
        monkeypatch.setattr(worker, "adopt_listener", lambda _descriptor: self.listener)
        service = -1 if role is Role.FORWARDER else 5
        descriptors = Descriptors(channel=3, liveness=reading, service=service)
        self._worker = worker._Worker(role, descriptors, self._make, confinement, ProcessMetrics())
        self.ended = trio.Event()

        async def connect() -> trio.abc.HalfCloseableStream:
            await trio.lowlevel.checkpoint()
            return self.channel

        async def run() -> None:
            try:
                await self._worker.run()
            finally:
                os.close(reading)
                self.ended.set()

        self.supervisor = RpcClient(connect, max_frame_bytes=FRAME_BYTES_MAX)
        nursery.start_soon(run)
        nursery.start_soon(self.supervisor.run)

    def _make(self, context: WorkerContext) -> FakeService:
        self.services.append(FakeService(context))
        return self.services[-1]

    @property
    def service(self) -> FakeService:
        return self.services[-1]

    async def call(self, method: int, request: Any, response_type: Any = Empty) -> Any:
        return await self.supervisor.call(method, request, response_type, timeout_s=PATIENCE_S)

    async def start(self, *known: Peer, config: Config | None = None, index: int = 1) -> None:
        request = StartRequest(config=encode_config(config or Config()), seal_key=b"key", peers=known, index=index)
        await self.call(Method.START, request)

    def supervisor_goes(self) -> None:
        os.close(self.liveness)
        self.liveness = -1


Begin = Callable[..., RunningWorker]


@pytest.fixture
def life(nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    lives: list[RunningWorker] = []

    def begin(role: Role = Role.LOOKUP, **options: Any) -> RunningWorker:
        lives.append(RunningWorker(role, nursery, monkeypatch, **options))
        return lives[-1]

    yield begin
    for one in lives:
        if one.liveness >= 0:
            os.close(one.liveness)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


async def test_relays_that_outlive_the_supervisor_are_not_shut_down_by_the_end_of_their_process(
    life: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends as by SIGKILL: an orderly end would shut the sockets down that the next supervisor has."""
    ends: list[int] = []
    monkeypatch.setattr(os, "_exit", ends.append)
    it = life(Role.FORWARDER)
    request = StartRequest(config=encode_config(Config()), index=1, relays_outlive_supervisor=True)
    await it.call(Method.START, request)
    it.supervisor_goes()
    await it.ended.wait()
    assert ends[0] == 0


async def finish(it: RunningWorker) -> None:
    it.supervisor_goes()
    await it.ended.wait()


async def test_start(life: Begin) -> None:
    it = life()
    await it.start(config=Config(limits=Limits(max_connections=77)))
    context = it.service.context
    assert (context.role, context.index, context.seal_key) == (Role.LOOKUP, 1, b"key")
    assert context.config.limits.max_connections == 77
    assert it.service.story == ["start"]
    await finish(it)


@pytest.mark.parametrize("index", [0, 1])
async def test_ends_of_certificates_are_shown_by_one_worker_until_it_is_replaced(
    life: Begin, tmp_path: Path, index: int
) -> None:
    it, file = life(), tmp_path / "file"
    file.write_text("content")
    key = f"test of worker {index}"
    kept = ReloadingFile(key, [str(file)], file.read_text, lambda: {key: 12.0})

    async def ends() -> list[str]:
        text = (await it.call(Method.COLLECT_METRICS, Empty(), Text)).text
        assert f'pulsar_proxy_file_last_reload_successful{{key="{key}"}} 1.0' in text, "all workers show that"
        return [line for line in text.splitlines() if line.startswith(f'{ENDS}{{key="{kept.key}')]

    async def ends_in_status() -> dict[str, float]:
        return dict(json.loads((await it.call(Method.GET_STATUS, Empty(), Text)).text).get("certificate_ends", {}))

    await it.start(index=index)
    assert await ends() == ([f'{ENDS}{{key="{key}"}} 12.0'] if index == 0 else [])
    assert (await ends_in_status()).get(key) == (12.0 if index == 0 else None)
    await it.call(Method.DRAIN, DrainRequest(timeout_ms=100, hand_over=True))
    assert await ends() == []
    assert await ends_in_status() == {}
    await finish(it)


async def test_the_level_of_the_log_changes_at_run_time(life: Begin, capfd: pytest.CaptureFixture[str]) -> None:
    before = structlog.get_config()
    it = life()
    await it.start()
    for level in ("debug", "error"):
        await it.call(Method.SET_LOG_LEVEL, LogLevelRequest(level=level))
        structlog.get_logger().debug(f"at {level}")
    with pytest.raises(RpcCallRefused, match="no such level"):
        await it.call(Method.SET_LOG_LEVEL, LogLevelRequest(level="loud"))
    await finish(it)
    structlog.configure(**before)
    written = capfd.readouterr().err
    assert "at debug" in written
    assert "at error" not in written


async def test_a_configuration_that_cannot_be_used(life: Begin) -> None:
    it = life()
    config = Config(brokers=Config().brokers.__class__(service_url="pulsar://unusable"))
    with pytest.raises(RpcCallRefused, match=r"brokers\.service_url: unusable") as caught:
        await it.start(config=config)
    assert caught.value.status == Status.INVALID_REQUEST
    with pytest.raises(RpcCallRefused, match="not been started"):
        await it.call(Method.GET_STATUS, Empty(), Text)
    await finish(it)


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        (Method.CONFIGURE, ConfigureRequest(config=encode_config(Config()))),
        (Method.DRAIN, DrainRequest(timeout_ms=1)),
        (Method.GET_STATUS, Empty()),
    ],
)
async def test_before_start(life: Begin, method: int, request_: Any) -> None:
    it = life()
    with pytest.raises(RpcCallRefused, match="not been started") as caught:
        await it.call(method, request_, Text)
    assert caught.value.status == Status.INVALID_REQUEST
    await finish(it)


async def test_configure_and_drain(life: Begin) -> None:
    it = life()
    await it.start()
    await it.call(Method.CONFIGURE, ConfigureRequest(config=encode_config(Config(limits=Limits(max_connections=5)))))
    await it.call(Method.DRAIN, DrainRequest(timeout_ms=2500))
    await it.call(Method.DRAIN, DrainRequest(timeout_ms=100, hand_over=True))
    assert it.service.story == ["start", ("configure", 5), ("drain", 2.5, False), ("drain", 0.1, True)]
    with pytest.raises(RpcCallRefused, match=r"limits\.max_connections: unlucky") as caught:
        await it.call(
            Method.CONFIGURE, ConfigureRequest(config=encode_config(Config(limits=Limits(max_connections=13))))
        )
    assert caught.value.status == Status.INVALID_REQUEST
    await finish(it)


def caller_of(it: RunningWorker, pid: int) -> RpcClient:
    stream = it.listener.come(pid)

    async def connect() -> trio.abc.HalfCloseableStream:
        await trio.lowlevel.checkpoint()
        return stream

    return RpcClient(connect, max_frame_bytes=1000)


async def test_a_drain_accepts_no_more_callers_and_waits_for_those_that_are_here(
    life: Begin, nursery: trio.Nursery
) -> None:
    """New ones are a successor's, who waits at the same listener."""
    it = life()
    await it.start(Peer(pid=10, role="forwarder"))
    client, leave, drained = caller_of(it, 10), trio.CancelScope(), trio.Event()

    async def stay() -> None:
        with leave:
            await client.run()

    async def drain() -> None:
        await it.call(Method.DRAIN, DrainRequest(timeout_ms=4000))
        drained.set()

    nursery.start_soon(stay)
    assert (await client.call(Method.ENVELOPE, Text(text="x"), Text, timeout_s=60)).text == "x"
    nursery.start_soon(drain)
    await trio.testing.wait_all_tasks_blocked()
    it.listener.come(pid=10)
    await trio.testing.wait_all_tasks_blocked()
    assert it.listener._receive.statistics().current_buffer_used == 1, "it is a successor's"
    assert not drained.is_set()
    assert (await client.call(Method.ENVELOPE, Text(text="still"), Text, timeout_s=60)).text == "still"
    assert "drain" not in {entry[0] for entry in it.service.story if isinstance(entry, tuple)}
    leave.cancel()
    with trio.fail_after(60):
        await drained.wait()
    assert it.service.story[-1] == ("drain", 4.0, False)
    await finish(it)


async def test_a_drain_has_its_bounds(
    life: Begin, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """Callers that do not leave, and a service that hangs."""
    it = life()
    await it.start(Peer(pid=10, role="forwarder"))
    client = caller_of(it, 10)
    nursery.start_soon(client.run)
    await client.call(Method.ENVELOPE, Text(text="x"), Text, timeout_s=60)
    it.service.hangs_in_drain = True
    started = trio.current_time()
    await it.call(Method.DRAIN, DrainRequest(timeout_ms=1000))
    assert trio.current_time() - started == pytest.approx(1 + worker.DRAIN_GRACE_S)
    assert it.service.story[-1] == ("drain", 1.0, False)
    await finish(it)


async def test_metrics_and_status(life: Begin) -> None:
    it = life()
    await it.start()
    it.service.counter.inc(3)
    assert "things_total 3.0" in (await it.call(Method.COLLECT_METRICS, Empty(), Text)).text
    assert json.loads((await it.call(Method.GET_STATUS, Empty(), Text)).text) == {"story": 1}
    await finish(it)


@pytest.mark.conforms("kip-590.16", "kip-590.21")
async def test_other_workers_are_served_once_it_has_started_and_others_never(life: Begin) -> None:
    """Security: who may call is the supervisor's word."""
    it = life()
    early = it.listener.come(pid=10)
    await it.start(Peer(pid=10, role="forwarder"))

    def client_of(stream: trio.abc.HalfCloseableStream) -> Callable[[], Awaitable[trio.abc.HalfCloseableStream]]:
        async def connect() -> trio.abc.HalfCloseableStream:
            await trio.lowlevel.checkpoint()
            return stream

        return connect

    async def ask(stream: trio.abc.HalfCloseableStream) -> bool:
        client = RpcClient(client_of(stream), max_frame_bytes=1000)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.run)
            with contextlib.suppress(Exception):
                answer = await client.call(Method.ENVELOPE, Text(text="x"), Text, timeout_s=60)
                nursery.cancel_scope.cancel()
                return bool(answer.text == "x")
            nursery.cancel_scope.cancel()
        return False

    assert await ask(early), "it waited in the socket's queue"
    assert it.service.story[-1] == ("envelope", Caller(Role.FORWARDER, 10))
    stranger = it.listener.come(pid=11)
    assert await stranger.receive_some(10) == b""
    await it.call(Method.SET_PEERS, SetPeersRequest(peers=[Peer(pid=11, role="forwarder")]))
    assert await ask(it.listener.come(pid=11))
    former = it.listener.come(pid=10)
    assert await former.receive_some(10) == b""
    await finish(it)


async def test_a_forwarder_listens_to_no_other_worker(life: Begin) -> None:
    it = life(Role.FORWARDER)
    await it.start(Peer(pid=10, role="auth"))
    it.listener.come(pid=10)
    await trio.testing.wait_all_tasks_blocked()
    assert it.listener._receive.statistics().current_buffer_used == 1
    await finish(it)


async def test_a_worker_ends_when_the_supervisor_is_gone(life: Begin) -> None:
    it = life()
    await it.start()
    await trio.testing.wait_all_tasks_blocked()
    assert not it.ended.is_set()
    await finish(it)


async def test_a_worker_ends_when_the_supervisor_is_gone_before_start(life: Begin) -> None:
    it = life()
    await trio.testing.wait_all_tasks_blocked()
    await finish(it)


async def test_a_worker_ends_when_its_channel_is_broken(life: Begin, autojump_clock: trio.testing.MockClock) -> None:
    """The supervisor could no longer drain or reload it, nor send it new peers; its successor can be reached."""
    it = life()
    await it.start()
    await it.channel.send_all(b"\xff\xff\xff\xff")
    with trio.move_on_after(60):
        await it.ended.wait()
    assert it.ended.is_set()


async def test_role_and_number_are_in_the_logs_of_later_calls(life: Begin, capsys: pytest.CaptureFixture[str]) -> None:
    it = life()
    await it.start(index=7)
    assert it.service.context.index == 7
    capsys.readouterr()

    def fail() -> dict[str, object]:
        raise ZeroDivisionError

    it.service.status = fail  # type: ignore[method-assign]
    with pytest.raises(RpcCallRefused):
        await it.call(Method.GET_STATUS, Empty(), Text)
    [line, *_] = capsys.readouterr().err.splitlines()
    assert "role=lookup worker=7" in line
    await finish(it)


@pytest.mark.parametrize(("landlock", "seccomp"), [(True, True), (True, False), (False, False)])
async def test_a_kernel_that_confines_less_is_logged_and_counted(
    life: Begin, capsys: pytest.CaptureFixture[str], landlock: bool, seccomp: bool
) -> None:
    it = life(confinement=Confinement(landlock=landlock, seccomp=seccomp))
    await it.start()
    without = ",".join(name for name, is_on in (("landlock", landlock), ("seccomp", seccomp)) if not is_on)
    assert (f'the kernel confines this worker less than it could" without={without}' in capsys.readouterr().err) == (
        without != ""
    )
    metrics = (await it.call(Method.COLLECT_METRICS, Empty(), Text)).text
    assert f'pulsar_proxy_confined{{by="landlock"}} {float(landlock)}' in metrics
    assert f'pulsar_proxy_confined{{by="seccomp"}} {float(seccomp)}' in metrics
    await finish(it)


def context_of(config: Config) -> WorkerContext:
    descriptors = Descriptors(channel=0, liveness=0)
    return WorkerContext(Role.LOOKUP, 0, config, b"", descriptors, None, None, None)  # type: ignore[arg-type]


def test_paths() -> None:
    assert service_socket_path(Config(), Role.AUTH, 2) == "/run/pulsar-trio-proxy/auth-2.sock"
    assert context_of(Config()).socket_path(Role.LOOKUP, 1) == "/run/pulsar-trio-proxy/lookup-1.sock"


@pytest.mark.parametrize("limits", [Limits(), Limits(max_broker_frame_bytes=1024, max_command_bytes=16 * 1024 * 1024)])
def test_the_rpc_has_room_for_the_largest_command_and_answer(limits: Limits) -> None:
    """Or one client's large command breaks the connection that all lookups of its forwarder share."""
    largest = max(limits.max_broker_frame_bytes, limits.max_command_bytes)
    assert context_of(Config(limits=limits)).rpc_frame_bytes_max() > largest


def test_a_worker_runs_with_its_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Any] = []
    monkeypatch.setattr(trio, "run", lambda run, **_: runs.append(run))
    openers: list[Any] = []
    monkeypatch.setattr(worker, "set_opener", openers.append)
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    descriptors = Descriptors(channel=3, liveness=4, files=theirs.detach(), service=5)
    run_worker(Role.AUTH, FakeService, descriptors, CONFINED, ProcessMetrics())
    ours.close()
    with pytest.raises(OSError, match="Broken pipe"):  # it asks the supervisor
        openers[0]("/etc/passwd")
    openers[0].__self__.close()
    assert sys.unraisablehook is not sys.__unraisablehook__, "see ignore_names_that_are_no_text"
    [run] = runs
    it = run.__self__
    assert (it._role, it._descriptors) == (Role.AUTH, descriptors)
