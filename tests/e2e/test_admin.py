"""The admin port: a process of its own, bounded, and closed to clients without the token where one is asked for."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from local.ports import free_port
from local.tokens import make_token

from .conftest import running
from .lab.cluster import HOST, ProxyCluster, Tables, merged
from .lab.processes import holds
from .lab.waiting import BUSY_S, eventually

SECRET = make_token(b"k" * 32, "a-credential-that-only-auth-workers-may-know")
PATHS = {"/metrics": 200, "/status": 200, "/healthz": 200, "/readyz": 503, "/": 200, "/page.js": 200}
"""Without a broker."""


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("admin") / "token"
    path.write_text("first-token\n")
    return path


@pytest.fixture(scope="module")
def cluster(token_file: Path) -> Iterator[ProxyCluster]:
    """A cluster that needs no broker, whose admin port asks for a token."""
    tables: Tables = {
        "brokers": {
            "service_url": f"pulsar://{HOST}:{free_port()}",
            "credentials": {"method": "token", "token": SECRET},
        },
        "cluster": {"forwarders": 1},
        "admin": {"token_file": str(token_file)},
    }
    with running(ProxyCluster(tables, ready_timeout_s=75), ready=False) as started:
        eventually(
            lambda: started.get("/readyz").text == "no broker is reachable\n", what="all workers answer", within_s=60
        )
        yield started


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("path", PATHS)
def test_paths_that_ask_for_the_token(cluster: ProxyCluster, path: str, method: str) -> None:
    """Security: names of principals and brokers' addresses are not public; Kubernetes' probes have no token."""
    closed = path in {"/metrics", "/status"}
    for headers in ({}, bearer("wrong-token"), {"Authorization": "Basic first-token"}):
        answer = cluster.get(path, method=method, headers=headers)
        assert answer.status == (401 if closed else PATHS[path])
        if closed:
            assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert cluster.get(path, method=method, headers=bearer("first-token")).status == PATHS[path]
    if closed:
        cluster.wait_for_log("refused at the admin port", path)
    for word in ("first-token", "wrong-token"):
        assert word not in cluster.log_text()


@pytest.mark.parametrize(
    "target",
    ["/status?leaving=ready", "/metrics?x", "/status/", "//status", "/%73tatus", "/STATUS", f"http://{HOST}/status"],
)
def test_no_spelling_of_a_path_goes_past_the_token(cluster: ProxyCluster, target: str) -> None:
    """Security."""
    connection = http.client.HTTPConnection(HOST, cluster.admin_port, timeout=BUSY_S)
    try:
        connection.request("GET", target)
        assert connection.getresponse().status in {401, 404}
    finally:
        connection.close()


def test_the_pages_data_asks_for_the_token_and_for_its_own_name(cluster: ProxyCluster) -> None:
    """Security: the page without data does not."""
    for headers in ({}, bearer("wrong-token")):
        assert cluster.get("/events", headers=headers).status == 401
    assert cluster.get("/events", headers={"Host": "attacker.example", **bearer("first-token")}).status == 421
    elsewhere = {"Sec-Fetch-Site": "cross-site", **bearer("first-token")}
    assert cluster.get("/events", headers=elsewhere).status == 403
    connection = http.client.HTTPConnection(HOST, cluster.admin_port, timeout=BUSY_S)
    try:
        connection.request("GET", "/events", headers=bearer("first-token"))
        answer = connection.getresponse()
        assert (answer.status, answer.readline()) == (200, b"event: snapshot\n")
        assert json.loads(answer.readline().removeprefix(b"data: "))["not_ready_because"] == ["no broker is reachable"]
    finally:
        connection.close()


@pytest.mark.parametrize("path", [*PATHS, "/status.html"])
def test_a_page_of_a_strangers_name_reads_nothing(cluster: ProxyCluster, path: str) -> None:
    """Security: DNS rebinding. A browser sends the name of the page, whatever address that name has by now."""
    for host in ("attacker.example", f"attacker.example:{cluster.admin_port}", "127.0.0.1.attacker.example"):
        answer = cluster.get(path, headers={"Host": host, **bearer("first-token")})
        assert answer.status == 421
        assert "admin.allowed_hosts" in answer.text
        assert len(answer.text.splitlines()) == 1
    cluster.wait_for_log("refused at the admin port", "attacker.example")
    for host in (f"localhost:{cluster.admin_port}", "10.1.2.3", "[::1]:80"):
        assert cluster.get(path, headers={"Host": host, **bearer("first-token")}).status != 421


def test_a_reload_allows_a_host(cluster: ProxyCluster) -> None:
    asked = {"Host": "Proxy-1.example.com:8080"}
    assert cluster.get("/healthz", headers=asked).status == 421
    cluster.write_config(merged(cluster.tables, {"admin": {"allowed_hosts": ["*.example.com"]}}))
    try:
        assert cluster.command("reload").returncode == 0
        eventually(lambda: cluster.get("/healthz", headers=asked).status == 200, what="the name is allowed")
        assert cluster.get("/healthz", headers={"Host": "attacker.example"}).status == 421
    finally:
        cluster.write_config(cluster.tables)
        assert cluster.command("reload").returncode == 0


def test_the_token_may_change(cluster: ProxyCluster, token_file: Path) -> None:
    try:
        token_file.write_text("second-token\n")
        eventually(
            lambda: cluster.get("/status", headers=bearer("second-token")).status == 200, what="the new one counts"
        )
        assert cluster.get("/status", headers=bearer("first-token")).status == 401
    finally:
        token_file.write_text("first-token\n")
    eventually(lambda: cluster.get("/status", headers=bearer("first-token")).status == 200, what="it is back")


def test_check_reads_the_token(cluster: ProxyCluster, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for file in (tmp_path / "empty", tmp_path / "none"):
        other = ProxyCluster(merged(cluster.tables, {"admin": {"token_file": str(file)}}))
        answer = other.command("check")
        assert answer.returncode != 0
        assert "admin.token_file" in answer.stderr
        assert len(answer.stderr.strip().splitlines()) == 1


def admin_pid(cluster: ProxyCluster) -> int:
    [pid] = [pid for name, pid in worker_pids(cluster).items() if name == "admin-0"]
    return pid


def worker_pids(cluster: ProxyCluster) -> dict[str, int]:
    status = json.loads(cluster.get("/status", headers=bearer("first-token")).text)
    return {f"{one['role']}-{one['worker']}": one["pid"] for one in status["workers"] if one.get("pid")}


def test_the_supervisor_reads_no_http(cluster: ProxyCluster) -> None:
    """Security: it stands still, and a stranger's request is answered."""
    assert admin_pid(cluster) != cluster.pid
    cluster.signal(signal.SIGSTOP)
    try:
        assert cluster.get("/nowhere").status == 404
        assert cluster.get("/metrics").status == 401
        assert cluster.get("/healthz").status == 200, "it has answered lately"
    finally:
        cluster.signal(signal.SIGCONT)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may look into another process")
def test_the_process_that_reads_strangers_http_knows_no_secret(cluster: ProxyCluster) -> None:
    """Security: its configuration comes without any. An auth worker, which knows it, shows that the search finds it."""
    pids = worker_pids(cluster)
    assert not holds(pids["admin-0"], SECRET.encode())
    assert holds(pids["auth-0"], SECRET.encode())


def test_a_killed_admin_worker_is_replaced_alone(cluster: ProxyCluster) -> None:
    before = worker_pids(cluster)
    os.kill(before["admin-0"], signal.SIGKILL)
    eventually(lambda: cluster.get("/healthz").status == 200, what="it answers again")
    after = worker_pids(cluster)
    assert after.pop("admin-0") != before.pop("admin-0")
    assert after == before


def test_slow_clients_keep_no_other_client_from_being_answered(cluster: ProxyCluster) -> None:
    """Security: more connections than there may be, each with half a request, which is never finished."""
    pid = admin_pid(cluster)
    loris: list[socket.socket] = []
    try:
        for number in range(400):
            one = socket.create_connection((HOST, cluster.admin_port), timeout=BUSY_S)
            loris.append(one)
            one.sendall(b"GET /healthz HTTP/1.1\r\n")
            if number % 100 == 99:
                assert cluster.get("/healthz").status == 200
        opened = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        assert opened < 300, "connections are bounded"
        assert cluster.get("/status", headers=bearer("first-token")).status == 200
    finally:
        for one in loris:
            one.close()


def test_many_scrapes_are_a_few_collections(cluster: ProxyCluster) -> None:
    """Security: each asks every process, so a flood of them would keep the whole cluster busy."""
    collected: list[str] = []

    def scrape() -> None:
        for _ in range(50):
            answer = cluster.get("/metrics", timeout_s=30, headers=bearer("first-token"))
            assert answer.status == 200
            collected.append(answer.headers["X-Collected-At"])

    threads = [threading.Thread(target=scrape) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(collected) == 200
    times = sorted({float(at) for at in collected})
    assert all(later - earlier >= 0.99 for earlier, later in itertools.pairwise(times))
