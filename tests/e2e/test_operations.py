"""What an operator relies on: health, status, metrics, configuration, reload, drain, and an end that leaves nothing."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from local.ports import free_port
from local.standalone import Standalone

from auth.providers.scram import credential_line
from proto.pulsar_pb2 import BaseCommand

from .conftest import before, running
from .lab.cluster import ProxyCluster, Tables, merged
from .lab.waiting import eventually
from .lab.wire import Ended, WireClient

DRAIN_TIMEOUT_MS = 120_000
"""Far longer than anything is waited for here: what ends before has not ended by it."""


@pytest.fixture
def own_proxy(broker: Standalone) -> Iterator[ProxyCluster]:
    """A cluster for one test, which may do to it what it likes."""
    limits = {"drain_timeout_ms": DRAIN_TIMEOUT_MS}
    tables: Tables = {"cluster": {"forwarders": 2}, "brokers": before(broker), "limits": limits}
    with running(ProxyCluster(tables)) as started:
        yield started


@pytest.fixture(scope="module")
def watched(broker: Standalone) -> Iterator[ProxyCluster]:
    """A cluster that tests only look at: they leave no client behind."""
    with running(ProxyCluster({"cluster": {"forwarders": 2}, "brokers": before(broker)})) as started:
        yield started


def relay_client(cluster: ProxyCluster, broker: Standalone) -> WireClient:
    """A client with a relay to the broker."""
    client = WireClient(cluster.port)
    assert client.connect(proxy_to_broker_url=f"localhost:{broker.broker_port}").type == BaseCommand.CONNECTED
    return client


# ---- looking at it


def test_health_and_readiness(watched: ProxyCluster) -> None:
    assert watched.get("/healthz").status == 200
    assert watched.get("/readyz").status == 200
    assert watched.get("/no-such-page").status == 404


def test_not_ready_without_a_reachable_broker_but_healthy() -> None:
    port = free_port()
    tables: Tables = {"cluster": {"forwarders": 1}, "brokers": {"service_url": f"pulsar://127.0.0.1:{port}"}}
    with running(ProxyCluster(tables), ready=False) as cluster:
        answer = cluster.get("/readyz")
        assert (answer.status, "broker" in answer.text) == (503, True)
        assert cluster.get("/healthz").status == 200
        cluster.wait_for_log("not reachable", str(port))


def test_status_as_json_and_for_people(watched: ProxyCluster, broker: Standalone) -> None:
    """The same facts by HTTP, by `status --json` and by `status`."""
    with relay_client(watched, broker):
        status = watched.status()
        assert (status["cluster"], status["ready"], status["draining"]) == ("e2e", True, False)
        roles = sorted(worker["role"] for worker in status["workers"])
        assert roles == ["admin", "auth", "forwarder", "forwarder", "lookup"]
        assert {worker["state"] for worker in status["workers"]} == {"running"}
        assert all(Path(f"/proc/{worker['pid']}").exists() for worker in status["workers"])
        assert sum(worker.get("connections", 0) for worker in status["workers"]) == 1
        as_json = json.loads(watched.command("status", "--json").stdout)
        assert as_json.keys() == status.keys()
        shown = watched.command("status")
    assert shown.returncode == 0, shown.stderr
    for name, pid in watched.worker_pids().items():
        line = next(line for line in shown.stdout.splitlines() if name in line)
        assert f"pid {pid}" in line
    assert f"localhost:{broker.broker_port}" in shown.stdout


def test_status_of_a_cluster_that_does_not_run_says_so(broker: Standalone) -> None:
    cluster = ProxyCluster({"brokers": before(broker)})
    answer = cluster.command("status")
    assert answer.returncode != 0
    assert "no cluster is running" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_metrics_of_all_workers_please_promtool(watched: ProxyCluster, broker: Standalone) -> None:
    """Without a complaint, and after traffic of each kind, so that every family has samples."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool: the Debian package `prometheus` is not installed")
    with relay_client(watched, broker), WireClient(watched.port) as client:
        client.connect()
        client.lookup("persistent://public/default/metrics")
        client.partitions("persistent://public/default/metrics")
        client.producer("persistent://public/default/metrics")
        text = watched.get("/metrics").text
    result = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout + result.stderr) == (0, "")


JAVA_PROXY_NAMES = [
    "pulsar_proxy_active_connections",
    "pulsar_proxy_new_connections_total",
    "pulsar_proxy_binary_ops_total",
    "pulsar_proxy_binary_bytes_total",
    "pulsar_proxy_lookup_requests_total",
    "pulsar_proxy_partitions_metadata_requests_total",
    "pulsar_proxy_get_topics_of_namespace_requests_total",
    "pulsar_proxy_get_schema_requests_total",
    "pulsar_proxy_rejected_lookup_requests_total",
]


def test_metrics_keep_the_java_proxys_names_and_name_their_process(watched: ProxyCluster, broker: Standalone) -> None:
    earlier = watched.metrics().total("pulsar_proxy_binary_bytes_total", direction="to_client")
    with relay_client(watched, broker) as client:
        client.producer("persistent://public/default/metrics")

        def counted() -> bool:
            return watched.metrics().total("pulsar_proxy_binary_bytes_total", direction="to_client") > earlier

        eventually(counted, what="relayed bytes are counted")
        watched.wait_for_total("pulsar_proxy_active_connections", 1)
        scrape = watched.metrics()
    assert [name for name in JAVA_PROXY_NAMES if name not in scrape.names()] == []
    assert all({"cluster", "role", "worker"} <= sample.labels.keys() for sample in scrape.samples)
    assert scrape.label_values("cluster") == {"e2e"}
    assert {"supervisor", "forwarder", "lookup", "auth", "admin"} == scrape.label_values("role")
    assert scrape.total("pulsar_proxy_binary_bytes_total", direction="to_broker") > 0


def test_closed_connections_leave_no_trace_in_gauges(watched: ProxyCluster, broker: Standalone) -> None:
    earlier = watched.metrics().total("pulsar_proxy_new_connections_total")
    for _ in range(20):
        relay_client(watched, broker).close()

    def none_left() -> bool:
        return watched.metrics().total("pulsar_proxy_active_connections") == 0

    eventually(none_left, what="no connection is counted any more")
    scrape = watched.metrics()
    assert scrape.total("pulsar_proxy_connections_by_state") == 0
    assert scrape.total("pulsar_proxy_new_connections_total") == earlier + 20


# ---- configuration


MISTAKES: dict[str, tuple[dict[str, dict[str, object]], str]] = {
    "an unknown key": ({"limits": {"max_conections": 5}}, "max_conections"),
    "an unknown table": ({"limit": {"max_connections": 5}}, "limit"),
    "a wrong type": ({"limits": {"max_connections": "many"}}, "limits.max_connections"),
    "a number out of range": ({"brokers": {"allowed_ports": [70000]}}, "brokers.allowed_ports"),
    "an address that is none": ({"admin": {"bind": "everywhere"}}, "admin.bind"),
    "a URL of another kind": ({"brokers": {"service_url": "http://localhost:8080"}}, "brokers.service_url"),
    "a network that is none": ({"brokers": {"allowed_addresses": ["10.0.0.0/99"]}}, "brokers.allowed_addresses"),
    "an unreadable credential": (
        {"brokers": {"credentials": {"method": "token", "file": "/nonexistent/token"}}},
        "brokers.credentials.file",
    ),
    "an unreadable key": (
        {"authentication": {"enabled": True}, "authentication.token": {"secret_key": "/nonexistent/key"}},
        "authentication.token.secret_key",
    ),
    "a certificate for HTTP that is none": (  # which workers alone would find otherwise
        {
            "brokers": {"web_service_url": "http://localhost"},
            "http_listener": {"tls": {"certificate": __file__, "key": __file__}},
        },
        "http_listener[0].tls",
    ),
    "authentication without a provider": ({"authentication": {"enabled": True}}, "authentication"),
}


SERVED = ("an unknown key", "an unreadable credential", "an unreadable key", "authentication without a provider")
"""One of each kind that is found in a way of its own: both commands read the file with the same code."""


@pytest.mark.parametrize(
    ("command", "what"), [*(("check", what) for what in MISTAKES), *(("serve", what) for what in SERVED)]
)
def test_a_mistake_in_the_configuration_names_its_key(what: str, command: str) -> None:
    """In one line, before anything is bound or made."""
    tables, key = MISTAKES[what]
    cluster = ProxyCluster(tables)
    answer = cluster.command(command)
    assert answer.returncode != 0
    assert key in answer.stderr
    assert "Traceback" not in answer.stderr
    assert len(answer.stderr.strip().splitlines()) == 1
    assert not cluster.runtime_dir.exists()


PREPARED = {
    "lock": "supervisor.lock: is a link",
    "folder": "can be written by other users (mode 0777)",
    "link": "is not a folder",
    "parent": "could be replaced by any user",
}


@pytest.mark.parametrize(
    ("trap", "command"),
    [("lock", "serve"), *((trap, command) for trap in ("folder", "link", "parent") for command in ("check", "serve"))],
)
def test_a_runtime_dir_that_others_could_prepare_is_refused_and_changes_nothing(trap: str, command: str) -> None:
    """Security: a file that only this user may write is the target of a link that another user has put there."""
    cluster = ProxyCluster({})
    folder, victim = cluster.runtime_dir, cluster.directory / "supervisor.lock"
    victim.write_text("precious")
    if trap == "link":
        folder.symlink_to(cluster.directory)
    else:
        folder.mkdir(mode=0o700)
        (folder / "supervisor.lock").symlink_to(victim)
    shared = {"folder": folder, "parent": cluster.directory}.get(trap)
    if shared is not None:
        shared.chmod(0o777)
    answer = cluster.command(command)
    assert answer.returncode != 0
    reason = answer.stderr.strip().splitlines()[-1]
    assert "cluster.runtime_dir: " in reason
    assert PREPARED[trap] in reason
    assert "Traceback" not in answer.stderr
    assert victim.read_text() == "precious"
    assert sorted(path.name for path in cluster.directory.iterdir()) == ["config.toml", "run", "supervisor.lock"]


def test_check_accepts_what_serve_would(broker: Standalone) -> None:
    answer = ProxyCluster({"brokers": before(broker)}).command("check")
    assert answer.returncode == 0, answer.stderr


def test_check_warns_of_a_listener_for_http_that_lets_no_client_in(tmp_path: Path) -> None:
    (tmp_path / "users").write_text(credential_line("bob", "not to be guessed", "SCRAM-SHA-256") + "\n")
    tables: Tables = {
        "brokers": {"web_service_url": "http://localhost"},
        "http_listener": {},
        "authentication": {"enabled": True},
        "authentication.scram": {"file": str(tmp_path / "users")},
    }
    answer = ProxyCluster(tables).command("check")
    assert answer.returncode == 0, answer.stderr
    assert "warning: http_listener[0]: no client can authenticate there by SCRAM" in answer.stderr


def test_the_environment_overrides_the_file(broker: Standalone, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = ProxyCluster({"brokers": {"service_url": "pulsar://127.0.0.1:1"}})
    monkeypatch.setenv("PULSAR_TRIO_PROXY__BROKERS__SERVICE_URL", broker.service_url)
    monkeypatch.setenv("PULSAR_TRIO_PROXY__CLUSTER__FORWARDERS", "1")
    with running(cluster) as started:
        assert started.status()["service_url"] == broker.service_url
        assert "forwarder-1" not in started.worker_pids()


def test_a_port_that_is_taken_is_named(watched: ProxyCluster) -> None:
    tables = merged(watched.tables, {"admin": {"bind": f"127.0.0.1:{free_port()}"}})
    tables["cluster"]["runtime_dir"] = str(watched.directory / "other")
    second = ProxyCluster(tables)
    answer = second.command("serve")
    assert answer.returncode != 0
    assert "listener[0].bind" in answer.stderr
    assert "Traceback" not in answer.stderr


# ---- reload


@pytest.fixture(scope="module")
def reloaded(broker: Standalone) -> Iterator[ProxyCluster]:
    """A cluster that tests only reload, each from its first configuration."""
    with running(ProxyCluster({"cluster": {"forwarders": 2}, "brokers": before(broker)})) as started:
        yield started


@pytest.mark.parametrize("how", ["SIGHUP", "reload"])
def test_a_reload_takes_effect_and_keeps_everything_going(reloaded: ProxyCluster, broker: Standalone, how: str) -> None:
    """A target that was denied is allowed afterwards; no worker is replaced, no relay broken."""
    since = len(reloaded.log_text())
    other = free_port()
    workers = reloaded.worker_pids()
    with relay_client(reloaded, broker) as relay:
        assert denial(reloaded, other) == "Target broker cannot be validated."
        brokers = reloaded.tables["brokers"] | {"allowed_ports": [broker.broker_port, other]}
        reloaded.write_config(reloaded.tables | {"brokers": brokers})
        if how == "SIGHUP":
            reloaded.signal(signal.SIGHUP)
        else:
            assert reloaded.command("reload").returncode == 0
        reloaded.wait_for_log("the configuration was reloaded", since=since)
        assert denial(reloaded, other) == "The proxy cannot connect to the broker"
        assert relay.ping().type == BaseCommand.PONG
    assert reloaded.worker_pids() == workers


def denial(cluster: ProxyCluster, port: int) -> str:
    """What a client reads that asks for a relay to a port where nothing listens."""
    with WireClient(cluster.port) as client:
        return str(client.connect(proxy_to_broker_url=f"localhost:{port}").error.message)


@pytest.mark.parametrize(("tables", "key"), [
    ({"limits": {"max_conections": 1}}, "max_conections"),
    ({"listener": {"bind": "127.0.0.1:1"}}, "listener"),
])  # fmt: skip
def test_a_reload_that_cannot_be_is_refused_and_changes_nothing(
    reloaded: ProxyCluster, broker: Standalone, tables: dict[str, dict[str, object]], key: str
) -> None:
    since = len(reloaded.log_text())
    reloaded.write_config(merged(reloaded.tables, tables))
    reloaded.signal(signal.SIGHUP)
    assert key in reloaded.wait_for_log("not reloaded", since=since)
    answer = reloaded.command("reload")
    assert answer.returncode != 0
    assert key in answer.stderr
    with relay_client(reloaded, broker) as relay:
        assert relay.ping().type == BaseCommand.PONG


# ---- the end


def test_sigterm_drains_in_order_and_exits_with_0(own_proxy: ProxyCluster, broker: Standalone) -> None:
    """New clients are refused; lookup connections end, a relay goes on for its share of time; then the workers go."""
    with relay_client(own_proxy, broker) as relay, WireClient(own_proxy.port) as lookup:
        lookup.connect()
        own_proxy.signal(signal.SIGTERM)
        assert lookup.wait_for_end() == []
        own_proxy.wait_for_readiness(ready=False)
        answer = own_proxy.get("/readyz")
        assert (answer.status, "draining" in answer.text) == (503, True)
        assert relay.ping().type == BaseCommand.PONG
        assert refuses_connections(own_proxy)
        relay.close()
    assert own_proxy.wait() == 0
    log = own_proxy.log_text()
    positions = [log.index(f"who={role}", log.index("draining")) for role in ("forwarder", "lookup", "auth")]
    assert positions == sorted(positions)
    assert list(own_proxy.runtime_dir.glob("*.sock")) == []
    assert "Traceback" not in log


def refuses_connections(cluster: ProxyCluster) -> bool:
    """Whether a newcomer is turned away."""
    try:
        with WireClient(cluster.port) as client:
            client.connect()
    except (OSError, Ended):
        return True
    return False


def test_a_drain_ends_at_its_time_limit(broker: Standalone) -> None:
    """drain_timeout_ms, 2 s here: a relay whose client stays is ended in it, not at once, and the exit code is 0."""
    tables: Tables = {"brokers": before(broker), "limits": {"drain_timeout_ms": 2000}}
    with running(ProxyCluster(tables)) as cluster, relay_client(cluster, broker) as relay:
        began_at = time.monotonic()
        cluster.signal(signal.SIGTERM)
        relay.wait_for_end()
        assert time.monotonic() - began_at > 0.7
        assert cluster.wait() == 0


def test_drain_by_command_returns_when_it_is_over(own_proxy: ProxyCluster) -> None:
    answer = own_proxy.command("drain")
    assert answer.returncode == 0, answer.stderr
    assert own_proxy.wait() == 0


def test_a_second_sigterm_ends_at_once(own_proxy: ProxyCluster, broker: Standalone) -> None:
    """Long before the drain would."""
    with relay_client(own_proxy, broker):
        own_proxy.signal(signal.SIGTERM)
        own_proxy.wait_for_log("draining")
        pids = own_proxy.worker_pids()
        own_proxy.signal(signal.SIGTERM)
        assert own_proxy.wait() is not None
    assert_all_gone(pids)


def test_a_cluster_starts_again_at_once_on_the_same_ports(own_proxy: ProxyCluster, broker: Standalone) -> None:
    """Connections in TIME_WAIT and old sockets are no obstacle, nor is what a killed cluster left behind."""
    with relay_client(own_proxy, broker):
        own_proxy.signal(signal.SIGKILL)
        assert own_proxy.wait() == -signal.SIGKILL
        assert list(own_proxy.runtime_dir.glob("*.sock"))
    own_proxy.stop()
    own_proxy.start()
    with relay_client(own_proxy, broker) as relay:
        assert relay.ping().type == BaseCommand.PONG


def test_no_worker_outlives_its_supervisor(own_proxy: ProxyCluster, broker: Standalone) -> None:
    """kill -9 of the supervisor: all go by themselves, also with clients connected, long before a drain would end."""
    with relay_client(own_proxy, broker):
        pids = own_proxy.worker_pids()
        assert len(pids) == 5
        own_proxy.signal(signal.SIGKILL)
        own_proxy.wait()
        assert_all_gone(pids)


def assert_all_gone(pids: dict[str, int]) -> None:
    """No process of these is left."""

    def gone() -> bool:
        return not [name for name, pid in pids.items() if alive(pid)]

    eventually(gone, what=f"{pids} have ended")


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
