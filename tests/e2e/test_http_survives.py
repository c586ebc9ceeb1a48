"""HTTP under kills, reloads and upgrades, and with large bodies, before a plain server of our own."""

from __future__ import annotations

import hashlib
import http.client
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from local.ports import free_port

from proto.pulsar_pb2 import BaseCommand

from .conftest import running
from .lab.cluster import HOST, ProxyCluster, merged
from .lab.fakes import FakeBroker, LookupBroker
from .lab.http_upstream import MIB, PORTION_BYTES, HttpUpstream
from .lab.processes import memory_kib
from .lab.schema import LOOKUP_CONNECT
from .lab.waiting import BUSY_S, eventually
from .lab.wire import WireClient

LARGE_MIB = int(os.environ.get("HTTP_LARGE_MIB", "64"))
"""By hand: 1024."""

GROWTH_KIB_MAX = 16 * 1024
HELD = 8
LOOPS = 4
LOOPS_GO_ON = 50
PAUSE_S = 0.005
"""Between two requests of a loop, so that the two cores have time for the upgrade."""
UPGRADES = int(os.environ.get("HTTP_UPGRADES", "1"))
"""By hand: 10."""


@dataclass
class Scene:
    """A cluster, our server behind its route /tools, and a fake broker for binary relays."""

    cluster: ProxyCluster
    http_port: int
    upstream: HttpUpstream
    broker: FakeBroker

    def open(self) -> http.client.HTTPConnection:
        """A client's connection; it is opened by its first request."""
        return http.client.HTTPConnection(HOST, self.http_port, timeout=BUSY_S * 4)

    def get(self, path: str) -> tuple[int, bytes]:
        """Status and body, on a connection of its own."""
        with closing(self.open()) as client:
            client.request("GET", path)
            response = client.getresponse()
            return response.status, response.read()

    def routes(self, **paths: HttpUpstream) -> list[dict[str, str]]:
        """The `[[http.routes]]` that lead there."""
        return [{"path": f"/{path}", "url": f"http://{HOST}:{one.port}"} for path, one in paths.items()]

    def relay(self) -> WireClient:
        """A binary relay."""
        client = WireClient(self.cluster.port)
        answer = client.connect(proxy_to_broker_url=f"{HOST}:{self.broker.port}")
        assert answer.type == BaseCommand.CONNECTED
        return client

    @contextmanager
    def held_requests(self) -> Iterator[list[Future[tuple[int, bytes]]]]:
        """Requests that our server holds until it is told, or until they fail."""
        self.upstream.may_answer.clear()
        before = self.upstream.held
        with ThreadPoolExecutor(HELD) as pool:
            try:
                requests = [pool.submit(self.get, "/tools/held") for _ in range(HELD)]
                eventually(lambda: self.upstream.held == before + HELD, what="they are under way")
                yield requests
            finally:
                self.upstream.may_answer.set()


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    """All of it."""
    lookups = LookupBroker({"response": LOOKUP_CONNECT, "broker_service_url": "pulsar://127.0.0.1:1"})
    with HttpUpstream() as upstream, FakeBroker(lookups) as broker:
        port, url = free_port(), f"http://{HOST}:{upstream.port}"
        tables: dict[str, dict[str, Any]] = {
            "brokers": {
                "service_url": f"pulsar://{HOST}:{broker.port}",
                "allowed_ports": [broker.port],
                "web_service_url": url,
            },
            "http_listener": {"bind": f"{HOST}:{port}"},
            "http": {"routes": [{"path": "/tools", "url": url}]},
            "limits": {"drain_timeout_ms": 60_000},
        }
        with running(ProxyCluster(tables)) as cluster:
            yield Scene(cluster, port, upstream, broker)


def test_large_bodies_take_no_memory(scene: Scene) -> None:
    """Either way; by then one of each has been, which may have left what is kept for the next."""
    pid = scene.cluster.worker_pids()["http-0"]
    download(scene, 4)
    upload(scene, 4)
    before = highest = memory_kib(pid)
    done = threading.Event()

    def measure() -> None:
        nonlocal highest
        while not done.wait(0.05):
            highest = max(highest, memory_kib(pid))

    measuring = threading.Thread(target=measure)
    measuring.start()
    try:
        download(scene, LARGE_MIB)
        upload(scene, LARGE_MIB)
    finally:
        done.set()
        measuring.join()
    print(f"{LARGE_MIB} MiB each way: {before} KiB before, at most {highest} KiB")
    assert highest - before < GROWTH_KIB_MAX


def download(scene: Scene, mib: int) -> None:
    """Get so much."""
    with closing(scene.open()) as client:
        client.request("GET", f"/tools/large/{mib}")
        response = client.getresponse()
        got = 0
        while data := response.read(PORTION_BYTES):
            got += len(data)
        assert (response.status, got) == (200, mib * MIB)


def upload(scene: Scene, mib: int) -> None:
    """Put so much."""
    portion, digest = os.urandom(PORTION_BYTES), hashlib.sha256()
    with closing(scene.open()) as client:
        client.putrequest("PUT", "/tools/put")
        client.putheader("Content-Length", str(mib * MIB))
        client.endheaders()
        for _ in range(mib * MIB // PORTION_BYTES):
            client.send(portion)
            digest.update(portion)
        response = client.getresponse()
        assert (response.status, response.read()) == (200, digest.digest())


def test_a_reload_is_for_the_requests_that_follow(scene: Scene) -> None:
    """Those under way end as they began; routes come and go."""
    cluster = scene.cluster
    with HttpUpstream() as other, scene.held_requests() as requests:
        changed = {"http": {"routes": scene.routes(others=other), "response_headers": {"X-Reloaded": "yes"}}}
        cluster.write_config(merged(cluster.tables, changed))
        assert not cluster.command("reload").returncode
        assert scene.get("/tools/gone")[0] == 404
        assert scene.get("/others/come") == (200, b"/others/come")
        assert not any(request.done() for request in requests)
        scene.upstream.may_answer.set()
        assert {request.result() for request in requests} == {(200, b"/tools/held")}
    cluster.write_config(cluster.tables)
    assert not cluster.command("reload").returncode
    assert scene.get("/tools/back") == (200, b"/tools/back")


def test_a_killed_worker_fails_its_requests_alone(scene: Scene) -> None:
    """The next ones succeed, and no relay notices."""
    before = scene.cluster.worker_pids()
    with scene.relay() as relay, scene.held_requests() as requests:
        os.kill(before["http-0"], signal.SIGKILL)
        for request in requests:
            with pytest.raises((ConnectionError, http.client.HTTPException)):
                request.result()
        assert scene.get("/tools/next") == (200, b"/tools/next")
        assert relay.ping().type == BaseCommand.PONG
    after = scene.cluster.worker_pids()
    assert after.pop("http-0") != before.pop("http-0")
    assert after == before


@dataclass
class Loop:
    """GETs one after the other, as a client does that asks once more where a connection that it kept alive has been
    closed before any byte of the answer. ``keeps_alive``: else each has a connection of its own, of which none fails.
    """

    scene: Scene
    stop: threading.Event
    keeps_alive: bool
    answered: int = 0
    again: int = 0
    longest_s: float = 0.0
    failures: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Ask until told to stop."""
        client = self.scene.open()
        since = time.monotonic()
        while not self.stop.wait(PAUSE_S):
            path = f"/tools/{self.answered}"
            reused = client.sock is not None
            try:
                client.request("GET", path)
                response = client.getresponse()
            except (ConnectionError, http.client.RemoteDisconnected) as error:
                client.close()
                if not reused:
                    self.failures.append(f"a new connection failed: {error!r}")
                    return
                self.again += 1
                continue
            try:
                got = response.status, response.read()
            except (OSError, http.client.HTTPException) as error:
                self.failures.append(f"an answer was cut: {error!r}")
                return
            if got != (200, path.encode()):
                self.failures.append(f"{path}: {got}")
                return
            if not self.keeps_alive:
                client.close()
            self.answered += 1
            self.longest_s, since = max(self.longest_s, time.monotonic() - since), time.monotonic()
        client.close()


def test_an_upgrade_fails_no_request(scene: Scene) -> None:
    """Those under way are finished by the old worker; those that follow find the new one."""
    stop = threading.Event()
    loops = [Loop(scene, stop, keeps_alive=bool(number % 2)) for number in range(LOOPS)]
    with ThreadPoolExecutor(LOOPS) as pool:
        running_loops = [pool.submit(loop.run) for loop in loops]
        try:
            for _ in range(UPGRADES):
                go_on(loops)
                pid = scene.cluster.worker_pids()["http-0"]
                with scene.held_requests() as requests:
                    assert not scene.cluster.command("upgrade").returncode
                    eventually(
                        lambda pid=pid: scene.cluster.worker_pids().get("http-0") not in {None, pid},  # type: ignore[misc]
                        what="a new HTTP worker",
                    )
                    go_on(loops)
                    scene.upstream.may_answer.set()
                    assert {request.result() for request in requests} == {(200, b"/tools/held")}
        finally:
            stop.set()
        for each in running_loops:
            each.result()
    assert [loop.failures for loop in loops] == [[]] * LOOPS
    answered, again = ([getattr(loop, name) for loop in loops] for name in ("answered", "again"))
    print(f"answered {answered}, asked again {again}, longest {max(loop.longest_s for loop in loops):.2f} s")
    # each worker that goes closes each connection once: before its answer, where the request came with the close
    assert all(number <= UPGRADES for number in again)


def go_on(loops: list[Loop]) -> None:
    """Wait until each has had further answers; at once where one has failed."""
    before = [loop.answered for loop in loops]
    eventually(
        lambda: (
            any(loop.failures for loop in loops)
            or all(loop.answered >= had + LOOPS_GO_ON for loop, had in zip(loops, before, strict=True))
        ),
        what="all loops go on",
    )
