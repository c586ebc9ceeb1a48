"""proxy.supervisor.report and admin: what operators, Prometheus and Kubernetes are told."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from msgspec.structs import replace
from prometheus_client import Gauge
from supervisor_fakes import FakeWorker, make_config

from proto.roles import Role
from proto.rpc_pb2 import Method
from proxy.config.types import Listener, ListenerTls
from proxy.runtime.metrics import new_registry
from proxy.runtime.rpc_client import RpcError
from proxy.status_text import status_text
from proxy.supervisor import admin
from proxy.supervisor.admin import AdminApplication, serve_admin
from proxy.supervisor.report import Report
from proxy.supervisor.slot import Slot, SlotState


class Setup:
    """A cluster whose workers answer what a test says."""

    def __init__(self, *roles: Role) -> None:
        self.cluster = SimpleNamespace(
            config=make_config(cluster={"name": "prod"}),
            registry=new_registry(),
            slots=[],
            draining=False,
            started=True,
            generation=1,
            replacing=False,
        )
        self.cluster.of = lambda role: [slot for slot in self.cluster.slots if slot.role is role]
        for role in roles or (Role.AUTH, Role.LOOKUP, Role.FORWARDER, Role.FORWARDER):
            self._add(role)
        self.report = Report(self.cluster)  # type: ignore[arg-type]

    def _add(self, role: Role) -> None:
        index = len(self.cluster.of(role))
        slot = Slot(role, index, None, None, lambda _slot: None)  # type: ignore[arg-type]
        slot.state = SlotState.RUNNING
        worker = FakeWorker(role, index)
        status: dict[str, Any] = {"ready": True, "brokers": []} if role is Role.LOOKUP else {}
        worker.answers[Method.GET_STATUS] = lambda _request: json.dumps(status)
        worker.answers[Method.COLLECT_METRICS] = lambda _request: f"# HELP g G.\n# TYPE g gauge\ng {index}\n"
        slot.worker = worker  # type: ignore[assignment]
        self.cluster.slots.append(slot)

    def worker(self, role: Role, index: int = 0) -> FakeWorker:
        return self.cluster.of(role)[index].worker  # type: ignore[no-any-return]

    async def get(self, path: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
        """What the ASGI application answers."""
        sent: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            await trio.lowlevel.checkpoint()
            sent.append(message)

        await AdminApplication(self.report)({"type": "http", "method": method, "path": path}, None, send)
        start, body = sent
        headers = {name.decode(): value.decode() for name, value in start["headers"]}
        return start["status"], headers, body["body"]


# ---- readiness


async def test_ready() -> None:
    setup = Setup()
    assert await setup.report.not_ready_reasons() == []
    assert await setup.get("/readyz") == (200, {"content-type": admin.TEXT, "content-length": "3"}, b"ok\n")


async def test_not_ready_without_a_reachable_broker() -> None:
    setup = Setup()
    setup.worker(Role.LOOKUP).answers[Method.GET_STATUS] = lambda _request: '{"ready": false, "brokers": []}'
    status, _, body = await setup.get("/readyz")
    assert (status, body) == (503, b"no broker is reachable\n")


async def test_one_lookup_worker_that_reaches_a_broker_is_enough() -> None:
    setup = Setup(Role.AUTH, Role.LOOKUP, Role.LOOKUP, Role.FORWARDER)
    setup.worker(Role.LOOKUP, 1).answers[Method.GET_STATUS] = lambda _request: '{"ready": false, "brokers": []}'
    assert await setup.report.not_ready_reasons() == []


@pytest.mark.parametrize("role", [Role.AUTH, Role.LOOKUP, Role.FORWARDER])
async def test_not_ready_without_a_worker_of_each_role(role: Role) -> None:
    setup = Setup()
    for slot in setup.cluster.of(role):
        slot.worker.answers[Method.GET_STATUS] = lambda _request: RpcError("no answer")
    assert await setup.report.not_ready_reasons() == [f"no {role} worker answers"]


async def test_one_forwarder_is_enough() -> None:
    setup = Setup()
    setup.cluster.of(Role.FORWARDER)[0].state = SlotState.RESTARTING
    setup.cluster.of(Role.FORWARDER)[0].worker = None
    assert await setup.report.not_ready_reasons() == []


async def test_not_ready_while_draining() -> None:
    setup = Setup()
    setup.cluster.draining = True
    assert (await setup.get("/readyz"))[0] == 503
    assert await setup.report.not_ready_reasons() == ["draining"]


async def test_not_ready_while_starting() -> None:
    setup = Setup()
    setup.cluster.started = False
    assert await setup.report.not_ready_reasons() == ["starting"]


async def test_a_place_without_a_worker_is_not_asked() -> None:
    """Between the death of one and the next."""
    setup = Setup()
    setup.cluster.of(Role.FORWARDER)[0].worker = None
    assert await setup.report.not_ready_reasons() == []


async def test_alive_while_not_ready() -> None:
    setup = Setup()
    setup.cluster.draining = True
    assert (await setup.get("/healthz"))[0] == 200


# ---- status and metrics


async def test_status(autojump_clock: trio.testing.MockClock) -> None:
    setup = Setup()
    setup.worker(Role.FORWARDER).answers[Method.GET_STATUS] = lambda _request: '{"connections": 7}'
    setup.worker(Role.FORWARDER, 1).answers[Method.GET_STATUS] = lambda _request: RpcError("no answer")
    dead = setup.cluster.of(Role.AUTH)[0]
    dead.state, dead.worker, dead.restarts = SlotState.RESTARTING, None, 3
    setup.worker(Role.LOOKUP).started -= 12.3
    status = await setup.report.status()
    assert (status["cluster"], status["draining"], status["ready"]) == ("prod", False, False)
    assert status["not_ready_because"] == ["no auth worker answers"]
    assert status["listeners"] == ["pulsar://0.0.0.0:6650"]
    workers: Any = status["workers"]
    auth, lookup, first, second = workers
    assert auth == {"role": "auth", "worker": 0, "state": "restarting", "restarts": 3}
    assert (lookup["state"], lookup["pid"], lookup["uptime_seconds"]) == (
        "running",
        setup.worker(Role.LOOKUP).pid,
        12.3,
    )
    assert first["connections"] == 7
    assert second["state"] == "not answering"


async def test_status_during_an_upgrade() -> None:
    setup = Setup()
    status = await setup.report.status()
    assert (status["generation"], status["replacing_workers"]) == (1, False)
    setup.cluster.generation, setup.cluster.replacing = 2, True
    status = await setup.report.status()
    assert (status["generation"], status["replacing_workers"]) == (2, True)
    assert status["ready"] is True, "clients need not notice"


async def test_status_over_http() -> None:
    setup = Setup()
    status, headers, body = await setup.get("/status")
    assert (status, headers["content-type"]) == (200, "application/json")
    assert json.loads(body)["cluster"] == "prod"


async def test_metrics_of_all_processes() -> None:
    setup = Setup()
    Gauge("own", "Own.", registry=setup.cluster.registry).set(5)
    setup.worker(Role.AUTH).answers[Method.COLLECT_METRICS] = lambda _request: RpcError("no answer")
    status, headers, body = await setup.get("/metrics")
    lines = body.decode().splitlines()
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=")
    assert 'own{cluster="prod",role="supervisor",worker="0"} 5.0' in lines
    assert 'g{cluster="prod",role="forwarder",worker="1"} 1.0' in lines
    assert not [line for line in lines if 'role="auth"' in line]


async def test_workers_are_asked_at_the_same_time(autojump_clock: trio.testing.MockClock) -> None:
    setup = Setup()
    for slot in setup.cluster.slots:
        slot.worker.answers[Method.COLLECT_METRICS] = lambda _request: slow()
    await setup.report.metrics()
    assert trio.current_time() == pytest.approx(1)


async def slow() -> str:
    await trio.sleep(1)
    return ""


async def test_a_worker_that_is_starting_is_not_asked() -> None:
    setup = Setup()
    setup.cluster.of(Role.LOOKUP)[0].state = SlotState.STARTING
    await setup.report.metrics()
    assert setup.worker(Role.LOOKUP).calls == []


# ---- the application


async def test_head_has_no_body() -> None:
    status, headers, body = await Setup().get("/healthz", "HEAD")
    assert (status, headers["content-length"], body) == (200, "3", b"")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
async def test_other_methods(method: str) -> None:
    assert (await Setup().get("/status", method))[0] == 405


async def test_other_paths() -> None:
    status, _, body = await Setup().get("/nowhere")
    assert status == 404
    for path in (b"/metrics", b"/healthz", b"/readyz", b"/status"):
        assert path in body


async def test_lifespan() -> None:
    sent: list[str] = []
    messages = iter(["lifespan.startup", "lifespan.shutdown"])

    async def receive() -> dict[str, str]:
        await trio.lowlevel.checkpoint()
        return {"type": next(messages)}

    async def send(message: dict[str, str]) -> None:
        await trio.lowlevel.checkpoint()
        sent.append(message["type"])

    await AdminApplication(Setup().report)({"type": "lifespan"}, receive, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


async def test_web_sockets_are_not_served() -> None:
    async def nobody(*_: Any) -> None:
        await trio.lowlevel.checkpoint()
        pytest.fail("nothing to say")

    await AdminApplication(Setup().report)({"type": "websocket"}, nobody, nobody)


async def test_it_is_served_on_the_socket_that_was_bound(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    served: list[Any] = []

    async def serve(application: Any, config: Any) -> None:
        await trio.lowlevel.checkpoint()
        served.extend((application, config))

    monkeypatch.setattr("hypercorn.trio.serve", serve)
    with (tmp_path / "x").open("w") as file:
        await serve_admin(file, Setup().report)
    application, config = served
    assert isinstance(application, AdminApplication)
    assert config.bind[0].startswith("fd://")
    assert (config.accesslog, config.errorlog, config.include_server_header) == (None, None, False)


# ---- for people


async def test_status_text(autojump_clock: trio.testing.MockClock) -> None:
    setup = Setup()
    broker = {"broker": "b0:6650", "reachable": False, "detail": "Connection refused"}
    other = {"broker": "b1:6650", "reachable": True, "detail": "answers at 10.0.0.2"}
    lookup = {"ready": True, "brokers": [broker, other], "broker_connections": 2, "lookups_under_way": 5}
    setup.worker(Role.LOOKUP).answers[Method.GET_STATUS] = lambda _request: json.dumps(lookup)
    setup.worker(Role.FORWARDER).answers[Method.GET_STATUS] = lambda _request: '{"connections": 7}'
    setup.cluster.of(Role.FORWARDER)[1].worker = None
    setup.cluster.of(Role.FORWARDER)[1].state = SlotState.RESTARTING
    setup.cluster.of(Role.FORWARDER)[1].restarts = 2
    text = status_text(await setup.report.status())
    lines = text.splitlines()
    assert lines[0].startswith("cluster prod, version ")
    assert lines[0].endswith(": ready")
    assert "  authentication  off" in lines
    assert "      broker b0:6650: NOT reachable, Connection refused" in lines
    assert "      broker b1:6650: reachable, answers at 10.0.0.2" in lines
    assert any("7 connections" in line for line in lines)
    assert any("5 lookups under way, 2 broker connections" in line for line in lines)
    assert any("forwarder-1" in line and "restarting, restarted 2 times" in line for line in lines)


async def test_status_says_which_listeners_speak_tls() -> None:
    setup = Setup()
    tls = ListenerTls(certificate="c", key="k")
    setup.cluster.config = replace(setup.cluster.config, listener=(Listener(), Listener(bind="0.0.0.0:6651", tls=tls)))
    status = await setup.report.status()
    assert status["listeners"] == ["pulsar://0.0.0.0:6650", "pulsar+ssl://0.0.0.0:6651"]


async def test_status_text_while_workers_are_replaced() -> None:
    status = {**await Setup().report.status(), "replacing_workers": True, "generation": 3}
    assert status_text(status).splitlines()[0].endswith("generation 3: ready, workers are being replaced")


async def test_status_text_not_ready() -> None:
    setup = Setup()
    setup.cluster.draining = True
    assert "not ready: draining" in status_text(await setup.report.status())
