"""proxy.supervisor.operators.report: what operators, Prometheus and Kubernetes are told."""

from __future__ import annotations

import json
import platform
import ssl
from types import SimpleNamespace
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from msgspec.structs import replace
from prometheus_client import Gauge
from supervisor_fakes import FakeWorker, make_config

from lookup.brokers.discovery import ENDPOINTS_MAX
from lookup.brokers.login import DETAIL_CHARACTERS_MAX
from proto.roles import Role
from proto.rpc_pb2 import Method
from proxy.admin.scrape import CONCURRENT_CALLS_MAX
from proxy.common.libraries import OPENSSL_VERSION
from proxy.config.types import Listener, ListenerTls
from proxy.runtime.observability.metrics import new_registry
from proxy.runtime.observability.near_expiry import SHOWN_MAX
from proxy.runtime.process.process_identity import ProcessIdentity
from proxy.runtime.process.worker import CONTROL_FRAME_BYTES_MAX
from proxy.runtime.rpc.errors import RpcError
from proxy.runtime.rpc.server import WAITING_BYTES_MAX
from proxy.status_text import status_text
from proxy.supervisor.cluster.log_levels import LogLevels
from proxy.supervisor.cluster.slot import SlotHooks, SlotState, WorkerSlot
from proxy.supervisor.cluster.worker_run import WorkerRun
from proxy.supervisor.operators import report as supervisor_report
from proxy.supervisor.operators.report import (
    CREDENTIALS_REFUSED,
    LOOKUP_STATUS_BYTES_MAX,
    METRICS_BYTES_MAX,
    NO_HTTP_WORKER,
    STATUS_BYTES_MAX,
    STATUS_TOTAL_BYTES_MAX,
    UNREADY_REASON,
    ClusterReport,
    MetricsTooLarge,
)


class Setup:
    """A cluster whose workers answer what a test says."""

    def __init__(self, *roles: Role) -> None:
        self.cluster = SimpleNamespace(
            config=make_config(cluster={"name": "prod"}),
            registry=new_registry(),
            slots=[],
            leaving=False,
            draining=False,
            started=True,
            generation=1,
            replacing=False,
            unready_because=None,
            log_levels=LogLevels({}),
        )
        self.cluster.slots_of = lambda role: [slot for slot in self.cluster.slots if slot.role is role]
        for role in roles or (Role.AUTH, Role.LOOKUP, Role.FORWARDER, Role.FORWARDER):
            self._add(role)
        self.report = ClusterReport(self.cluster)  # type: ignore[arg-type]

    def _add(self, role: Role) -> None:
        index = len(self.cluster.slots_of(role))
        slot = WorkerSlot(role, index, SlotHooks(None, None, lambda _slot: None))  # type: ignore[arg-type]
        slot.state = SlotState.RUNNING
        worker = FakeWorker(role, index)
        status: dict[str, Any] = {"ready": True, "brokers": []} if role is Role.LOOKUP else {}
        worker.answers[Method.GET_STATUS] = lambda _request: json.dumps(status)
        worker.answers[Method.COLLECT_METRICS] = lambda _request: f"# HELP g G.\n# TYPE g gauge\ng {index}\n"
        slot.worker = worker  # type: ignore[assignment]
        self.cluster.slots.append(slot)

    def worker(self, role: Role, index: int = 0) -> FakeWorker:
        return self.cluster.slots_of(role)[index].worker  # type: ignore[no-any-return]


# ---- readiness


async def test_ready() -> None:
    setup = Setup()
    assert (await setup.report.readiness()).reasons == []


async def test_not_ready_without_a_reachable_broker() -> None:
    setup = Setup()
    setup.worker(Role.LOOKUP).answers[Method.GET_STATUS] = lambda _request: '{"ready": false, "brokers": []}'
    assert (await setup.report.readiness()).reasons == ["no broker is reachable"]


async def test_not_ready_where_all_brokers_refuse_the_proxys_credentials() -> None:
    setup = Setup(Role.AUTH, Role.LOOKUP, Role.LOOKUP, Role.FORWARDER)
    refused = json.dumps({"ready": False, "credentials_refused": True, "brokers": []})
    setup.worker(Role.LOOKUP).answers[Method.GET_STATUS] = lambda _request: refused
    assert (await setup.report.readiness()).reasons == [], "one worker that can serve is enough"
    for answer in (refused, '{"ready": false, "brokers": []}'):
        setup.worker(Role.LOOKUP, 1).answers[Method.GET_STATUS] = lambda _request, answer=answer: answer
        assert (await setup.report.readiness()).reasons == [CREDENTIALS_REFUSED]
        assert (await setup.report.status())["not_ready_because"] == [CREDENTIALS_REFUSED]


TLS = "clients by tls: the broker wants the client's own credentials (authenticateOriginalAuthData), and a certificate"
ALL = "clients by token: the broker wants the client's own credentials (authenticateOriginalAuthData): set "


@pytest.mark.parametrize(
    ("methods", "forwards", "checking", "reasons", "notes"),
    [
        ({"token": {}}, True, "all", [], []),
        ({"token": {}, "tls": {}}, True, "all", [], [TLS]),
        ({"token": {}, "tls": {}}, True, "some", [], [TLS]),
        ({"token": {}, "tls": {}}, True, "none", [], []),
        ({"tls": {}}, True, "all", [TLS], []),
        ({"tls": {}}, True, "some", [], [TLS]),
        ({"tls": {}, "proxy_roles": ["proxy-a"]}, True, "all", [], [TLS]),  # whose clients have credentials
        ({"tls": {}, "plugins": {"own": {}}}, True, "all", [], [TLS]),
        ({"token": {}}, False, "all", [ALL], []),
        ({"token": {}, "tls": {}}, False, "all", [TLS, ALL], []),
        ({"token": {}, "tls": {}}, False, "some", [], [TLS, ALL]),
        ({"token": {}, "tls": {}}, False, "none", [], []),
        ({"enabled": False, "tls": {}}, True, "all", [], []),
    ],
)
async def test_which_clients_brokers_refuse(
    methods: dict[str, Any], forwards: bool, checking: str, reasons: list[str], notes: list[str]
) -> None:
    """Not ready only where no client of any method would be served; and never for the proxy's own credentials."""
    setup = Setup()
    brokers = {"forward_authorization_credentials": forwards}
    setup.cluster.config = make_config(authentication={"enabled": True, **methods}, brokers=brokers)
    answer = json.dumps({"ready": True, "brokers": [], "original_data_checked": checking})
    setup.worker(Role.LOOKUP).answers[Method.GET_STATUS] = lambda _request: answer
    with structlog.testing.capture_logs() as logs:
        readiness = await setup.report.readiness()
        status = await setup.report.status()
    for told, expected in ((readiness.reasons, reasons), (readiness.notes, notes)):
        assert [text[: len(start)] for text, start in zip(told, expected, strict=True)] == expected
    assert (status["not_ready_because"], status["notes"]) == (readiness.reasons, readiness.notes)
    warned = [entry["reason"] for entry in logs if entry["event"] == "brokers refuse clients"]
    assert warned == [*readiness.reasons, *readiness.notes], "once, though it was asked for twice"
    assert all(f"  note            {note}" in status_text(status) for note in readiness.notes)


async def test_the_cluster_is_ready_if_a_single_lookup_worker_has_brokers_that_accept_clients() -> None:
    setup = Setup(Role.AUTH, Role.LOOKUP, Role.LOOKUP, Role.FORWARDER)
    setup.cluster.config = make_config(authentication={"enabled": True, "tls": {}})
    for index, checking in enumerate(("all", "none")):
        answer = json.dumps({"ready": True, "brokers": [], "original_data_checked": checking})
        setup.worker(Role.LOOKUP, index).answers[Method.GET_STATUS] = lambda _request, answer=answer: answer
    readiness = await setup.report.readiness()
    assert (readiness.reasons, len(readiness.notes)) == ([], 1)


@pytest.mark.parametrize(
    ("answer", "reasons"),
    [
        ('{"ready": true, "credentials_refused": 0}', ["no lookup worker answers"]),
        ('{"ready": false, "credentials_refused": 0}', ["no lookup worker answers"]),
        ('{"ready": false, "credentials_refused": 1}', ["no lookup worker answers"]),
        ('{"ready": false, "credentials_refused": true}', [CREDENTIALS_REFUSED]),
        ('{"ready": "yes"}', ["no lookup worker answers"]),
        ('{"ready": 1}', ["no lookup worker answers"]),
        ("{}", ["no broker is reachable"]),
        ('{"ready": true, "deep": [[[[[1]]]]]}', []),
        ('{"ready": true, "ready": false}', ["no broker is reachable"]),
        ("[]", ["no lookup worker answers"]),
        ("{", ["no lookup worker answers"]),
    ],
)
async def test_readyz_and_status_read_the_same_in_what_a_lookup_worker_says(answer: str, reasons: list[str]) -> None:
    """Whatever a worker that was taken over says."""
    setup = Setup()
    setup.worker(Role.LOOKUP).answers[Method.GET_STATUS] = lambda _request: answer
    assert (await setup.report.readiness()).reasons == reasons
    status = await setup.report.status()
    assert (status["ready"], status["not_ready_because"]) == (not reasons, reasons)


async def test_the_cluster_is_ready_if_a_single_lookup_worker_reaches_a_broker() -> None:
    setup = Setup(Role.AUTH, Role.LOOKUP, Role.LOOKUP, Role.FORWARDER)
    setup.worker(Role.LOOKUP, 1).answers[Method.GET_STATUS] = lambda _request: '{"ready": false, "brokers": []}'
    assert (await setup.report.readiness()).reasons == []


@pytest.mark.parametrize("role", [Role.AUTH, Role.LOOKUP, Role.FORWARDER])
async def test_not_ready_without_a_worker_of_each_role(role: Role) -> None:
    setup = Setup()
    for slot in setup.cluster.slots_of(role):
        slot.worker.answers[Method.GET_STATUS] = lambda _request: RpcError("no answer")
    assert (await setup.report.readiness()).reasons == [f"no {role} worker answers"]


async def test_the_cluster_is_ready_if_a_single_forwarder_runs() -> None:
    setup = Setup()
    setup.cluster.slots_of(Role.FORWARDER)[0].state = SlotState.RESTARTING
    setup.cluster.slots_of(Role.FORWARDER)[0].worker = None
    assert (await setup.report.readiness()).reasons == []


async def test_not_ready_while_clients_are_still_accepted() -> None:
    setup = Setup()
    setup.cluster.leaving = True
    assert (await setup.report.readiness()).reasons == ["leaving"]
    status = await setup.report.status()
    assert (status["leaving"], status["draining"], status["ready"]) == (True, False, False)


async def test_not_ready_while_an_operator_has_made_it_unready() -> None:
    setup = Setup()
    for because, reason in (("", UNREADY_REASON), ("a new kernel", f"{UNREADY_REASON}: a new kernel")):
        setup.cluster.unready_because = because
        assert (await setup.report.readiness()).reasons == [reason]
    status = await setup.report.status()
    assert (status["unready"], status["ready"]) == (True, False)
    assert f"not ready: {reason}" in status_text(status)


async def test_changed_log_levels_are_shown() -> None:
    setup = Setup()
    assert "CHANGED" not in status_text(await setup.report.status())
    setup.cluster.log_levels.change([Role.LOOKUP], "debug", None)
    text = status_text(await setup.report.status())
    assert "  log level       lookup: CHANGED to debug until it is changed (configured: info)\n" in text


async def test_not_ready_while_draining() -> None:
    setup = Setup()
    setup.cluster.leaving = setup.cluster.draining = True
    assert (await setup.report.readiness()).reasons == ["draining"]


async def test_not_ready_while_starting() -> None:
    setup = Setup()
    setup.cluster.started = False
    assert (await setup.report.readiness()).reasons == ["starting"]


async def test_a_place_without_a_worker_is_not_asked() -> None:
    """Between the death of one and the next."""
    setup = Setup()
    setup.cluster.slots_of(Role.FORWARDER)[0].worker = None
    assert (await setup.report.readiness()).reasons == []


# ---- status and metrics


async def test_status(autojump_clock: trio.testing.MockClock) -> None:
    setup = Setup()
    setup.worker(Role.FORWARDER).answers[Method.GET_STATUS] = lambda _request: '{"connections": 7}'
    setup.worker(Role.FORWARDER, 1).answers[Method.GET_STATUS] = lambda _request: RpcError("no answer")
    dead = setup.cluster.slots_of(Role.AUTH)[0]
    dead.state, dead.worker, dead.restarts = SlotState.RESTARTING, None, 3
    setup.worker(Role.LOOKUP).started_at_s -= 12.3
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


async def test_workers_are_asked_at_the_same_time(autojump_clock: trio.testing.MockClock) -> None:
    setup = Setup()
    for slot in setup.cluster.slots:
        slot.worker.answers[Method.GET_STATUS] = lambda _request: slow()
    await setup.report.status()
    assert trio.current_time() == pytest.approx(1)


async def slow() -> str:
    await trio.sleep(1)
    return "{}"


async def test_a_worker_that_is_starting_is_not_asked() -> None:
    setup = Setup()
    setup.cluster.slots_of(Role.LOOKUP)[0].state = SlotState.STARTING
    assert await setup.report.metrics(ProcessIdentity("lookup", 0)) == ""
    await setup.report.status()
    assert setup.worker(Role.LOOKUP).calls == []


async def test_without_an_http_worker_other_clients_are_sent_here_all_the_same() -> None:
    setup = Setup(Role.AUTH, Role.LOOKUP, Role.HTTP, Role.FORWARDER)
    assert list((await setup.report.readiness()).notes) == []
    setup.worker(Role.HTTP).answers[Method.GET_STATUS] = lambda _request: RpcError("no answer")
    told = await setup.report.readiness()
    assert (list(told.reasons), list(told.notes)) == ([], [NO_HTTP_WORKER])


async def test_listeners_for_http_are_shown_behind_the_others() -> None:
    setup = Setup()
    tls = {"certificate": "c", "key": "k"}
    setup.cluster.config = make_config(http_listener=[{"bind": "h:1"}, {"bind": "h:2", "tls": tls}])  # type: ignore[arg-type]
    assert (await setup.report.status())["listeners"] == ["pulsar://0.0.0.0:6650", "http://h:1", "https://h:2"]


# ---- metrics


async def test_metrics_of_each_process() -> None:
    setup = Setup(Role.ADMIN, Role.AUTH, Role.LOOKUP, Role.FORWARDER, Role.FORWARDER)
    Gauge("own", "Own.", registry=setup.cluster.registry).set(5)
    setup.cluster.slots_of(Role.AUTH)[0].state = SlotState.RESTARTING
    setup.worker(Role.LOOKUP).answers[Method.COLLECT_METRICS] = lambda _request: RpcError("no answer")
    places = setup.report.places()
    assert places == [
        ProcessIdentity(role, index)
        for role, index in (("supervisor", 0), ("lookup", 0), ("forwarder", 0), ("forwarder", 1))
    ]
    texts = [(await setup.report.metrics(place)).splitlines()[2:] for place in places]
    assert texts == [["own 5.0"], [], ["g 0"], ["g 1"]]
    assert await setup.report.metrics(ProcessIdentity("forwarder", 2)) == ""
    assert await setup.report.metrics(ProcessIdentity("nobody", 0)) == ""


@pytest.mark.parametrize("text", ["x" * (METRICS_BYTES_MAX + 1), "\u20ac" * (METRICS_BYTES_MAX // 3 + 1)], ids=len)
async def test_a_worker_that_writes_too_much(text: str) -> None:
    """Security: bytes count, not characters; what a captured worker writes goes through the supervisor."""
    setup = Setup()
    setup.worker(Role.FORWARDER).answers[Method.COLLECT_METRICS] = lambda _request: text
    with pytest.raises(MetricsTooLarge, match="forwarder-0 writes more than 4194304 bytes of metrics"):
        await setup.report.metrics(ProcessIdentity("forwarder", 0))


# ---- workers that were replaced


def leave(setup: Setup, role: Role, index: int = 0) -> FakeWorker:
    """Another worker has this one's place, which finishes what it has."""
    slot = setup.cluster.slots_of(role)[index]
    old = FakeWorker(role, index)
    old.answers[Method.GET_STATUS] = lambda _request: '{"connections": 5, "ready": false}'
    old.answers[Method.COLLECT_METRICS] = lambda _request: "# HELP g G.\n# TYPE g gauge\ng 77\n"
    life = WorkerRun(old)  # type: ignore[arg-type]
    life.retired = True
    slot.runs.append(life)
    return old


async def test_replaced_workers_are_shown_until_they_end() -> None:
    setup = Setup()
    setup.worker(Role.FORWARDER).answers[Method.GET_STATUS] = lambda _request: '{"connections": 7}'
    first, second = leave(setup, Role.FORWARDER), leave(setup, Role.FORWARDER)
    second.answers[Method.GET_STATUS] = lambda _request: RpcError("it is just ending")
    status = await setup.report.status()
    workers: Any = status["workers"]
    leaving: Any = status["leaving_workers"]
    assert [worker["state"] for worker in workers] == ["running"] * 4
    assert workers[2]["connections"] == 7
    assert [(one["role"], one["worker"], one["state"], one["pid"]) for one in leaving] == [
        ("forwarder", 0, "leaving", first.pid),
        ("forwarder", 0, "leaving", second.pid),
    ]
    assert [one.get("connections") for one in leaving] == [5, None]
    [line] = [line for line in status_text(status).splitlines() if f"leaving, pid {first.pid}" in line]
    assert "5 connections" in line
    setup.cluster.slots_of(Role.FORWARDER)[0].runs.clear()
    assert (await setup.report.status())["leaving_workers"] == []


async def test_a_worker_that_hands_over_keeps_its_place_until_its_successor_runs() -> None:
    setup = Setup()
    slot = setup.cluster.slots_of(Role.FORWARDER)[0]
    life = WorkerRun(slot.worker)
    life.retired = True
    slot.runs.append(life)
    assert (await setup.report.status())["leaving_workers"] == []
    assert len(setup.report.places()) == 1 + 4


async def test_replaced_workers_have_series_of_their_own() -> None:
    setup = Setup()
    old = leave(setup, Role.FORWARDER, 1)
    place = ProcessIdentity("forwarder", 1, leaving_pid=old.pid)
    assert setup.report.places()[-1] == place
    assert place.worker_label == f"1-leaving-{old.pid}"
    assert "g 77" in await setup.report.metrics(place)
    assert "g 1" in await setup.report.metrics(ProcessIdentity("forwarder", 1))
    assert await setup.report.metrics(ProcessIdentity("forwarder", 0, leaving_pid=old.pid)) == ""


async def test_replaced_workers_do_not_decide_on_readiness() -> None:
    """A lookup worker that reaches no broker any more; an auth worker whose place is empty."""
    setup = Setup()
    old = leave(setup, Role.LOOKUP)
    assert (await setup.report.readiness()).reasons == []
    assert (await setup.report.status())["ready"] is True
    assert [method for method, _request in old.calls] == [Method.GET_STATUS], "for the status alone"
    leave(setup, Role.AUTH)
    setup.cluster.slots_of(Role.AUTH)[0].state = SlotState.RESTARTING
    assert (await setup.report.readiness()).reasons == ["no auth worker answers"]


async def test_a_replaced_worker_cannot_say_what_the_supervisor_knows() -> None:
    """Security."""
    setup = Setup()
    old = leave(setup, Role.FORWARDER)
    claim = {"role": "auth", "worker": 5, "state": "running", "pid": 1, "connections": 7}
    old.answers[Method.GET_STATUS] = lambda _request: json.dumps(claim)
    leaving: Any = (await setup.report.status())["leaving_workers"]
    [told] = leaving
    assert (told["role"], told["worker"], told["state"], told["pid"]) == ("forwarder", 0, "leaving", old.pid)


# ---- workers that were taken over


NO_STATUS = [
    "",
    "[]",
    "7",
    "{",
    "[" * 100_000,
    '{"a":' * 100_000,
    '{"a": "\\udc00"}',
    '{"a": 1e999}',
    '{"a": ' + "9" * 5000 + "}",
    '{"connections": 7}' + " " * LOOKUP_STATUS_BYTES_MAX,
    '{"connections": "' + "\u20ac" * (LOOKUP_STATUS_BYTES_MAX // 3) + '"}',
]


@pytest.mark.parametrize("text", NO_STATUS, ids=range(len(NO_STATUS)))
async def test_a_status_that_makes_no_sense_is_none(text: str) -> None:
    """Security: a captured worker must not be able to hide the others."""
    setup = Setup()
    for role in (Role.FORWARDER, Role.LOOKUP):
        setup.worker(role).answers[Method.GET_STATUS] = lambda _request: text
    status = await setup.report.status()
    workers: Any = status["workers"]
    assert [worker["state"] for worker in workers] == ["running", "not answering", "not answering", "running"]
    reasons = (await setup.report.readiness()).reasons
    assert reasons in (["no lookup worker answers"], ["no broker is reachable"]), (
        "a reader of one word skips some of these"
    )
    assert status["not_ready_because"] == reasons
    assert json.loads(await setup.report.status_json())


async def test_a_status_that_is_too_deep_is_none() -> None:
    """Security: indented for people, it would be a thousand times as long."""
    setup = Setup()
    report(setup, Role.FORWARDER, '{"a": {"b": {"c": {"d": [1]}}}}')
    workers: Any = (await setup.report.status())["workers"]
    assert [worker["state"] for worker in workers] == ["running", "running", "not answering", "running"]


def report(setup: Setup, role: Role, text: str) -> None:
    setup.worker(role).answers[Method.GET_STATUS] = lambda _request: text


@pytest.mark.parametrize("role", [Role.AUTH, Role.FORWARDER])
async def test_only_lookup_workers_have_much_to_say(role: Role) -> None:
    """Security."""
    setup = Setup()
    for text, answers in (("x" * (STATUS_BYTES_MAX - 20), True), ("x" * STATUS_BYTES_MAX, False)):
        report(setup, role, f'{{"said": "{text}"}}')
        workers: Any = (await setup.report.status())["workers"]
        [worker] = [worker for worker in workers if (worker["role"], worker["worker"]) == (role, 0)]
        assert worker["state"] == ("running" if answers else "not answering")


async def test_an_honest_status_fits() -> None:
    """However many brokers there are, however long their names, and of any clients' sessions that end soon."""
    setup = Setup()
    addresses = ["255.255.255.255", "2001:db8:ffff:ffff:ffff:ffff:ffff:ffff"]
    host = "h" * 253
    detail = "; ".join(f"{address}: {host!r} is no name for a certificate: {'why ' * 25}" for address in addresses)
    broker = {"broker": f"{host}:65535 at 2001:db8:ffff:ffff:ffff:ffff:ffff:ffff", "addresses": addresses}
    detail += f"; it REFUSES the proxy's own credentials: {'x' * DETAIL_CHARACTERS_MAX}"
    broker |= {
        "reachable": False,
        "probed_s_ago": 12345.6,
        "set_aside_s": 12345.6,
        "failures": 123456,
        "detail": detail,
    }
    broker["credentials"] = "refused"
    report(setup, Role.LOOKUP, json.dumps({"ready": True, "brokers": [broker] * ENDPOINTS_MAX}))
    session = {"client": "[2001:db8:ffff:ffff:ffff:ffff:ffff:ffff]:65535", "principal": "\U0001f600" * 1024}
    soonest = [{**session, "seconds_left": 12.5}] * SHOWN_MAX
    near = {"expired_and_idle": 100_000, "ending_within_60_s": 100_000, "soonest": soonest}
    report(setup, Role.FORWARDER, json.dumps({"connections": 100_000, "sessions_near_expiry": near}))
    status = json.loads(await setup.report.status_json())
    assert [worker["state"] for worker in status["workers"]] == ["running"] * 4
    assert len(status["workers"][1]["brokers"]) == ENDPOINTS_MAX
    assert status["sessions_near_expiry"] == near
    assert (await setup.report.readiness()).reasons == []


async def test_all_together_fit_the_line() -> None:
    """Security: what is left out is the largest; and a worker whose part is left out is not hidden."""
    assert STATUS_TOTAL_BYTES_MAX + CONCURRENT_CALLS_MAX * METRICS_BYTES_MAX < WAITING_BYTES_MAX
    assert STATUS_TOTAL_BYTES_MAX <= CONTROL_FRAME_BYTES_MAX // 2
    setup = Setup(Role.AUTH, *[Role.LOOKUP] * 12, Role.FORWARDER)
    for slot in setup.cluster.slots_of(Role.LOOKUP):
        claim = json.dumps({"ready": True, "said": "x" * (STATUS_TOTAL_BYTES_MAX // 10)})
        slot.worker.answers[Method.GET_STATUS] = lambda _request, claim=claim: claim
    report(setup, Role.FORWARDER, '{"connections": 7}')
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            text = await setup.report.status_json()
    assert len(text) < STATUS_TOTAL_BYTES_MAX + 64 * 1024
    workers = json.loads(text)["workers"]
    assert sum("said" in worker for worker in workers) == 9
    assert {worker["state"] for worker in workers} == {"running"}
    assert workers[-1]["connections"] == 7
    assert json.loads(text)["ready"] is True
    assert len(logs) == 3, "once each"


async def test_the_size_limit_of_the_status_applies_to_the_encoded_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Security: 1e15 grows to 18 characters when it is encoded."""
    monkeypatch.setattr(supervisor_report, "STATUS_TOTAL_BYTES_MAX", 1000)
    setup = Setup(Role.FORWARDER)
    report(setup, Role.FORWARDER, json.dumps({"said": [0] * 90}).replace("0", "1e15"))
    with structlog.testing.capture_logs():
        assert len(await setup.report.status_json()) < 1000


@pytest.mark.parametrize(
    "claim",
    [
        {"brokers": [{}]},
        {"brokers": 7},
        {"certificate_ends": {"key": "soon"}},
        {"kernel_tls_relays": -1},
        {"kernel_tls": 7},
        {"methods": [7]},
        {"deny_list": 7},
        {"deny_list": {"entries": "x", "read_at_unix_s": 0.0, "error": ""}},
        {"deny_list": {"entries": 1, "read_at_unix_s": 1e15, "error": ""}},
    ],
)
async def test_status_text_of_a_captured_worker(claim: dict[str, Any]) -> None:
    """Security: an operator's `status` shows the others."""
    setup = Setup()
    report(setup, Role.LOOKUP, json.dumps({"ready": True, "lookups_under_way": 5, **claim}))
    with structlog.testing.capture_logs() as logs:
        assert "5 lookups under way" in status_text(await setup.report.status())
    assert [entry["who"] for entry in logs] == ["lookup-0"]


async def test_a_worker_cannot_say_what_the_supervisor_knows() -> None:
    """Security."""
    setup = Setup()
    claim = {"role": "auth", "worker": 5, "state": "stopped", "pid": 1, "restarts": -1, "connections": 7}
    setup.worker(Role.FORWARDER).answers[Method.GET_STATUS] = lambda _request: json.dumps(claim)
    workers: Any = (await setup.report.status())["workers"]
    told = workers[2]
    assert (told["role"], told["worker"], told["state"], told["restarts"]) == ("forwarder", 0, "running", 0)
    assert (told["pid"], told["connections"]) == (setup.worker(Role.FORWARDER).pid, 7)


async def test_a_lookup_worker_that_does_not_say_whether_it_is_ready() -> None:
    """Security."""
    setup = Setup()
    setup.worker(Role.LOOKUP).answers[Method.GET_STATUS] = lambda _request: "{}"
    assert (await setup.report.readiness()).reasons == ["no broker is reachable"]
    setup.worker(Role.LOOKUP).answers[Method.GET_STATUS] = lambda _request: '{"ready": "yes"}'
    assert (await setup.report.readiness()).reasons == ["no lookup worker answers"]
    assert (await setup.report.status())["ready"] is False


async def test_readiness_needs_no_more_than_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Security: asked often, without a token; what else a worker says is not made into objects for it."""
    setup = Setup()

    def nothing(_text: str) -> dict[str, Any]:
        raise AssertionError

    monkeypatch.setattr(supervisor_report, "_decode_status", nothing)
    report(setup, Role.LOOKUP, json.dumps({"brokers": [{"a": {}}] * 1000, "ready": True}))
    assert (await setup.report.readiness()).reasons == []


# ---- for people


async def test_status_text(autojump_clock: trio.testing.MockClock) -> None:
    setup = Setup()
    broker = {"broker": "b0:6650", "reachable": False, "detail": "Connection refused"}
    other = {"broker": "b1:6650", "reachable": True, "detail": "answers at 10.0.0.2", "probed_s_ago": 2.5}
    lookup = {
        "ready": True,
        "brokers_changed_s_ago": 77.5,
        "brokers": [broker, other],
        "broker_connections": 2,
        "lookups_under_way": 5,
    }
    setup.worker(Role.LOOKUP).answers[Method.GET_STATUS] = lambda _request: json.dumps(lookup)
    setup.worker(Role.FORWARDER).answers[Method.GET_STATUS] = lambda _request: '{"connections": 7}'
    setup.cluster.slots_of(Role.FORWARDER)[1].worker = None
    setup.cluster.slots_of(Role.FORWARDER)[1].state = SlotState.RESTARTING
    setup.cluster.slots_of(Role.FORWARDER)[1].restarts = 2
    text = status_text(await setup.report.status())
    lines = text.splitlines()
    assert lines[0].startswith("cluster prod, version ")
    assert lines[0].endswith(": ready")
    assert "  authentication  off" in lines
    assert f"  runs on         Python {platform.python_version()}, {OPENSSL_VERSION}" in lines
    assert ssl.OPENSSL_VERSION.startswith(f"{OPENSSL_VERSION} "), "without its date"
    assert "      broker b0:6650: NOT reachable, Connection refused" in lines
    assert "      broker b1:6650: reachable, answers at 10.0.0.2, probed 2.5 s ago" in lines
    assert any("lookup-0" in line and "list of brokers changed 77.5 s ago" in line for line in lines)
    assert any("7 connections" in line for line in lines)
    assert any("5 lookups under way, 2 broker connections" in line for line in lines)
    assert any("forwarder-1" in line and "restarting, restarted 2 times" in line for line in lines)


async def test_the_status_tells_of_the_deny_list() -> None:
    setup = Setup()
    good = {"entries": 12, "read_at_unix_s": 1798761600.4, "error": ""}
    report(setup, Role.FORWARDER, json.dumps({"connections": 7, "deny_list": good}))
    lines = status_text(await setup.report.status()).splitlines()
    assert [line.strip() for line in lines if "deny" in line] == ["deny list: 12 entries, read at 2027-01-01T00:00:00Z"]
    leaving = leave(setup, Role.FORWARDER)
    broken = {**good, "error": "denied, line 3: \x1b[2J\nforged"}
    leaving.answers[Method.GET_STATUS] = lambda _request: json.dumps({"deny_list": broken})
    lines = status_text(await setup.report.status()).splitlines()
    assert "      deny list: the changed file is NOT in force: denied, line 3: ?[2J?forged" in lines, (
        "security: a captured worker neither controls an operator's terminal nor forges lines"
    )


async def test_the_status_tells_when_certificates_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all roles together, the first one first; a captured worker neither hides an end nor forges lines."""
    setup, day_s, now = Setup(), 86_400, 1798761600.0
    monkeypatch.setattr(supervisor_report.time, "time", lambda: now)
    assert (await setup.report.status())["certificate_ends"] == []
    of_forwarder = {"listener[0].tls.certificate": now + 31 * day_s, "brokers.tls.trust": now + 30 * day_s}
    report(setup, Role.FORWARDER, json.dumps({"certificate_ends": of_forwarder}))
    of_lookup = {"brokers.tls.trust": now + 400 * day_s, "old\nforged": now - 1}
    report(setup, Role.LOOKUP, json.dumps({"ready": True, "certificate_ends": of_lookup}))
    status: Any = json.loads(await setup.report.status_json())
    assert [(one["key"], one["within_30_days"], one["days_left"]) for one in status["certificate_ends"]] == [
        ("old\nforged", True, 0.0),
        ("brokers.tls.trust", True, 30.0),
        ("listener[0].tls.certificate", False, 31.0),
    ]
    assert all("certificate_ends" not in worker for worker in status["workers"])
    lines = status_text(status).splitlines()
    start = lines.index("  certificates    2 of 3 files (certificates, CRLs) end within 30 days")
    assert lines[start + 1 : start + 4] == [
        "      old?forged: HAS ENDED at 2026-12-31T23:59:59Z",
        "      brokers.tls.trust: ENDS WITHIN 30 DAYS, at 2027-01-31T00:00:00Z",
        "      listener[0].tls.certificate: ends at 2027-02-01T00:00:00Z",
    ]


@pytest.mark.parametrize(
    ("setting", "forwarders", "says"),
    [
        ("off", [{}, {}], ""),
        ("auto", [{"kernel_tls": True, "kernel_tls_relays": 2}, {"kernel_tls": True, "kernel_tls_relays": 5}], "7"),
        ("auto", [{"kernel_tls": False, "kernel_tls_relays": 0}] * 2, "0, NOT available (modprobe tls, then upgrade)"),
        (
            "required",
            [{"kernel_tls": True, "kernel_tls_relays": 3}, {"kernel_tls": False, "kernel_tls_relays": 0}],
            "3, NOT available in 1 of the forwarders (modprobe tls, then upgrade)",
        ),
        ("off", [{"kernel_tls": False, "kernel_tls_relays": 4}, {}], "4"),  # from before a reload
    ],
)
async def test_the_status_tells_of_kernel_tls(setting: str, forwarders: list[dict[str, Any]], says: str) -> None:
    setup = Setup()
    setup.cluster.config = make_config(relay={"kernel_tls": setting})
    for index, told in enumerate(forwarders):
        answer = json.dumps(told)
        setup.worker(Role.FORWARDER, index).answers[Method.GET_STATUS] = lambda _request, answer=answer: answer
    report(setup, Role.LOOKUP, '{"ready": true, "kernel_tls": true, "kernel_tls_relays": 100}')  # a captured one
    status: Any = await setup.report.status()
    lines = status_text(status).splitlines()
    shown = [
        line.removeprefix(f"  kernel TLS      {setting}, relays now: ") for line in lines if "kernel TLS  " in line
    ]
    assert shown == ([says] if says else [])
    if says:
        can = [told["kernel_tls"] for told in forwarders if told]
        assert status["kernel_tls"] == {
            "setting": setting,
            "forwarders_with": sum(can),
            "forwarders_without": len(can) - sum(can),
            "relays": sum(told.get("kernel_tls_relays", 0) for told in forwarders),
        }
        by_forwarder = [line for line in lines if "relays with kernel TLS" in line and "forwarder" in line]
        assert len(by_forwarder) == len(can)
    else:
        assert "kernel_tls" not in status


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
