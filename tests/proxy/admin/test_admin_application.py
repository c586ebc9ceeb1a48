"""proxy.admin.application and scrape: what is answered, to whom."""

from __future__ import annotations

import json
from typing import Any

import pytest
import structlog.testing
import trio
from prometheus_client import CollectorRegistry

from proto.rpc_pb2 import Reasons, Status
from proxy.admin.application import AdminApplication
from proxy.admin.exposition import PROCESS_BYTES_MAX
from proxy.admin.scrape import CONCURRENT_CALLS_MAX, CollectedMetrics, MetricsScrape
from proxy.common.http_server import HttpRequest, HttpResponse
from proxy.runtime.observability.metrics import new_registry
from proxy.runtime.process.process_identity import ProcessIdentity
from proxy.runtime.rpc.errors import RpcCallRefused, RpcConnectionLost, RpcError
from proxy.runtime.rpc.server import WAITING_BYTES_MAX

PATHS = (
    *("/metrics", "/metrics/", "/healthz", "/readyz", "/status.html", "/status"),
    *("/", "/page.css", "/page.js", "/events"),
)


class Setup:
    """What the supervisor would say."""

    def __init__(self) -> None:
        self.well = True
        self.reasons: list[str] = []
        self.notes: list[str] = []
        self.shared: Reasons | None = None
        self.allowed = True
        self.own_host = True
        self.error: RpcError | None = None
        self.authorizations: list[list[bytes]] = []
        self.registry: CollectorRegistry = new_registry()
        self.application = AdminApplication(self, self._is_allowed, lambda _host: self.own_host, self.registry)

    async def _is_allowed(self, authorization: list[bytes]) -> bool:
        await trio.lowlevel.checkpoint()
        self.authorizations.append(authorization)
        return self.allowed

    async def _said(self, value: Any) -> Any:
        await trio.lowlevel.checkpoint()
        if self.error is not None:
            raise self.error
        return value

    async def metrics(self) -> CollectedMetrics:
        return await self._said(CollectedMetrics(b"g 1.0\n", 1700000000.25))  # type: ignore[no-any-return]

    def is_responsive(self) -> bool:
        return self.well

    async def readiness(self) -> Reasons:
        said = self.shared or Reasons(reasons=self.reasons, notes=self.notes)
        return await self._said(said)  # type: ignore[no-any-return]

    async def status(self) -> str:
        return await self._said('{"cluster":"prod"}')  # type: ignore[no-any-return]

    async def overview(self) -> str:
        return await self.status()

    async def get(
        self, path: str, method: str = "GET", authorization: tuple[bytes, ...] = (), query: str = ""
    ) -> HttpResponse:
        request = HttpRequest(method, path, [*authorization], "10.0.0.1", query)
        return await self.application.handle_request(request)


@pytest.fixture
def setup() -> Setup:
    return Setup()


async def test_the_paths(setup: Setup) -> None:
    metrics = await setup.get("/metrics")
    assert metrics.content_type.startswith("text/plain; version=")
    assert metrics.headers == (("X-Collected-At", "1700000000.250000"),)
    assert await setup.get("/healthz") == HttpResponse(200, b"ok\n")
    assert await setup.get("/readyz") == HttpResponse(200, b"ok\n")
    status = await setup.get("/status")
    assert (status.content_type, json.loads(status.body)) == ("application/json", {"cluster": "prod"})
    assert b"\n" in status.body.strip(), "for people, too"


async def test_paths_of_pulsars_own_proxy(setup: Setup) -> None:
    assert await setup.get("/metrics/") == await setup.get("/metrics")
    assert await setup.get("/status.html") == HttpResponse(200, b"OK\n")
    setup.reasons = ["starting"]
    assert await setup.get("/status.html") == HttpResponse(503, b"NOT READY\n")


async def test_not_ready(setup: Setup) -> None:
    setup.reasons = ["starting", "no broker is reachable"]
    assert await setup.get("/readyz") == HttpResponse(503, b"starting\nno broker is reachable\n")
    assert (await setup.get("/healthz")).status == 200


@pytest.mark.parametrize(
    ("reasons", "status", "body"),
    [
        ([], 200, b"ok\n"),
        (["leaving"], 200, b"ok\nleaving\n"),
        (["leaving", "no broker is reachable"], 503, b"no broker is reachable\nleaving\n"),
        (["draining"], 503, b"draining\n"),
    ],
)
async def test_a_pod_that_leaves_still_serves(setup: Setup, reasons: list[str], status: int, body: bytes) -> None:
    setup.shared = Reasons(reasons=reasons)
    assert await setup.get("/readyz", query="leaving=ready") == HttpResponse(status, body)
    plain = 503 if reasons else 200
    assert (await setup.get("/readyz")).status == (await setup.get("/readyz", query="x=1")).status == plain


async def test_ready_for_some_clients(setup: Setup) -> None:
    setup.notes = ["clients by tls: the broker wants the client's own credentials"]
    assert await setup.get("/readyz") == HttpResponse(200, f"ok\n{setup.notes[0]}\n".encode())
    assert await setup.get("/status.html") == HttpResponse(200, b"OK\n")


async def test_a_supervisor_that_hangs_is_not_well(setup: Setup) -> None:
    setup.well = False
    assert (await setup.get("/healthz")).status == 503


@pytest.mark.parametrize("path", ["/metrics", "/readyz", "/status"])
async def test_a_supervisor_that_does_not_answer(setup: Setup, path: str) -> None:
    setup.error = RpcConnectionLost("the worker went away")
    assert (await setup.get(path)).status == 503


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
async def test_other_methods(setup: Setup, method: str) -> None:
    assert (await setup.get("/status", method)).status == 405


async def test_other_paths(setup: Setup) -> None:
    answer = await setup.get("/nowhere")
    assert answer.status == 404
    assert all(path.encode() in answer.body for path in PATHS)


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize(("path", "status"), [("/metrics", 401), ("/status", 401), ("/healthz", 200), ("/readyz", 200)])
async def test_without_the_token(setup: Setup, path: str, status: int, method: str) -> None:
    """Security: what names principals and brokers is for who brings the token; Kubernetes' probes have none."""
    setup.allowed = False
    with structlog.testing.capture_logs() as logs:
        answer = await setup.get(path, method, (b"Bearer guess",))
    assert answer.status == status
    if status == 401:
        assert answer.headers == (("WWW-Authenticate", "Bearer"),)
        assert setup.authorizations == [[b"Bearer guess"]]
        assert (logs[0]["client"], logs[0]["path"]) == ("10.0.0.1", path)
    assert "guess" not in str(logs) + str(answer)


@pytest.mark.parametrize("path", [*PATHS, "/nowhere"])
async def test_a_request_under_another_name_is_refused_before_anything_is_asked(setup: Setup, path: str) -> None:
    """Security: DNS rebinding."""
    setup.own_host = False
    with structlog.testing.capture_logs() as logs:
        answer = await setup.get(path, authorization=(b"Bearer token",))
    assert (answer.status, setup.authorizations) == (421, [])
    assert b"admin.allowed_hosts" in answer.body
    assert (logs[0]["client"], logs[0]["path"]) == ("10.0.0.1", path)


async def test_requests_are_counted_by_paths_of_ours_alone(setup: Setup) -> None:
    """Security: no label takes a value that a stranger chooses."""
    for path in ("/healthz", "/a", "/b"):
        await setup.get(path)
    name = "pulsar_proxy_admin_requests_total"
    assert setup.registry.get_sample_value(name, {"path": "/healthz", "code": "200"}) == 1
    assert setup.registry.get_sample_value(name, {"path": "other", "code": "404"}) == 2


# ---- a scrape


class Source:
    def __init__(self, **texts: Any) -> None:
        self._texts = texts
        self.asked = 0
        self.asked_at_a_time = 0

    async def places(self) -> list[ProcessIdentity]:
        await trio.lowlevel.checkpoint()
        return [ProcessIdentity(name, 0) for name in self._texts]

    async def metrics(self, place: ProcessIdentity) -> str:
        self.asked += 1
        self.asked_at_a_time = max(self.asked_at_a_time, self.asked)
        await trio.testing.wait_all_tasks_blocked()
        self.asked -= 1
        text = self._texts[place.role]
        if isinstance(text, RpcError):
            raise text
        return str(text)


class Quick(Source):
    """Answers at once: nothing else needs to be blocked."""

    async def metrics(self, place: ProcessIdentity) -> str:
        await trio.lowlevel.checkpoint()
        return str(self._texts[place.role])


def gauge(value: int) -> str:
    return f"# HELP g G.\n# TYPE g gauge\ng {value}\n"


async def collected(scrape: MetricsScrape) -> list[str]:
    lines = (await scrape.collect_metrics()).text.decode().splitlines()
    return [line for line in lines if not line.startswith("#")]


async def test_metrics_of_all_processes() -> None:
    """In the supervisor's order; one that does not answer is left out."""
    source = Source(supervisor=gauge(1), auth=RpcError("no answer"), lookup="", forwarder=gauge(2))
    assert await collected(MetricsScrape("prod", source, new_registry())) == [
        'g{cluster="prod",role="supervisor",worker="0"} 1',
        'g{cluster="prod",role="forwarder",worker="0"} 2',
    ]
    assert source.asked_at_a_time == 4


async def test_a_replaced_worker_has_series_of_its_own() -> None:
    """Its counters must not read as a reset of its successor's."""

    class Both(Source):
        async def places(self) -> list[ProcessIdentity]:
            await trio.lowlevel.checkpoint()
            return [ProcessIdentity("forwarder", 0), ProcessIdentity("forwarder", 0, leaving_pid=4711)]

    assert await collected(MetricsScrape("prod", Both(forwarder=gauge(1)), new_registry())) == [
        'g{cluster="prod",role="forwarder",worker="0"} 1',
        'g{cluster="prod",role="forwarder",worker="0-leaving-4711"} 1',
    ]


async def test_not_too_many_are_asked_at_a_time() -> None:
    source = Source(**{f"r{number}": gauge(number) for number in range(40)})
    assert len(await collected(MetricsScrape("prod", source, new_registry()))) == 40
    assert source.asked_at_a_time == CONCURRENT_CALLS_MAX
    assert CONCURRENT_CALLS_MAX * PROCESS_BYTES_MAX < WAITING_BYTES_MAX, "or a captured worker could end the line"


async def test_others_are_answered_while_junk_is_read() -> None:
    """Security: /healthz is one of them, and kubelet gives it a second."""
    source = Quick(auth="x\n" * (PROCESS_BYTES_MAX // 2))
    ran, over = 0, trio.Event()

    async def another() -> None:
        nonlocal ran
        while not over.is_set():
            await trio.lowlevel.checkpoint()
            ran += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(another)
        with structlog.testing.capture_logs():
            await MetricsScrape("prod", source, new_registry()).collect_metrics()
        over.set()
    assert ran > 50


async def test_invalid_metrics_of_a_captured_worker_are_dropped_counted_and_logged_once() -> None:
    """Security."""
    source = Source(
        auth=gauge(1) + "nonsense\n" * 3,
        forwarder=RpcCallRefused(Status.INVALID_REQUEST, "forwarder-0 writes more than 4 bytes of metrics"),
        lookup=gauge(2),
    )
    scrape = MetricsScrape("prod", source, new_registry())
    with structlog.testing.capture_logs() as logs:
        await scrape.collect_metrics()
        lines = await collected(scrape)
    assert sorted(line.partition("{")[0] for line in lines) == ["g", "g", *["pulsar_proxy_dropped_metrics_total"] * 2]
    role = 'role="admin",worker="0"'
    assert f'pulsar_proxy_dropped_metrics_total{{cluster="prod",{role},of="auth",reason="malformed"}} 6.0' in lines
    assert f'pulsar_proxy_dropped_metrics_total{{cluster="prod",{role},of="forwarder",reason="too_large"}} 2.0' in lines
    assert sorted(entry["who"] for entry in logs) == ["auth-0", "forwarder-0"]


@pytest.mark.parametrize("path", ["/", "/page.css", "/page.js", "/events"])
async def test_the_page_is_open_and_its_data_asks_for_the_token(setup: Setup, path: str) -> None:
    """Security."""
    setup.allowed = False
    assert (await setup.get(path)).status == (401 if path == "/events" else 200)
