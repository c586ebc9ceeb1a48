"""From a client's messages to the bill: the real cluster, Prometheus, the receiver, and the Spark jobs as commands.

The bill is exact from a principal's first byte. Debian's Prometheus sends remote write 1.0, where the proxy's series
`…_created` tell since when its counters count; the last test sends the cluster's own numbers by remote write 2.0, with
start timestamps.
"""

from __future__ import annotations

import http.client
import os
import re
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest
from local.process import OwnedProcess
from local.standalone import Standalone
from local.tokens import make_token

from analytics.remote_write import remote_pb2 as pb
from analytics.remote_write.snappy import compress

from .conftest import authentication, running
from .lab.cluster import ProxyCluster, merged
from .lab.metrics import Scrape, per_principal
from .lab.pipeline import JOB_TIMEOUT_S, TOKEN, Receiver, Tables, run_jobs, start_jobs, wait_for_write
from .lab.programs import CLIENTS, Program
from .lab.prometheus import Prometheus, Samples
from .lab.waiting import BUSY_S, eventually

NAMESPACE = "secured/accounted"
PRINCIPALS = ("alice", "bob", "carol")
FORWARDERS = 2


@dataclass
class Scene:
    """What runs, and since when Prometheus scrapes it."""

    broker: Standalone
    cluster: ProxyCluster
    receiver: Receiver
    prometheus: Prometheus
    tables: Tables
    client: Program
    python_client: Program
    start_ms: int

    def token(self, principal: str) -> str:
        """Of one of the principals."""
        return make_token(self.broker.secret_key.read_bytes(), principal)

    def spend(self, principal: str, topic: str, count: int, *, batching: bool) -> dict[str, int]:
        """A client's load; what it counted."""
        batches = "yes" if batching else "no"
        options = {"token": self.token(principal), "count": count, "size": 300, "batching": batches}
        result = self.client.succeed("spend", self.cluster.service_url, f"persistent://{NAMESPACE}/{topic}", **options)
        assert (result["received"], result["duplicates"]) == (count, 0), result
        return result

    def settle(self) -> int:
        """Wait until nothing moves, and all of it has arrived at the receiver; that moment (ms since 1970)."""
        eventually(self.is_idle, what="no relay is open")
        moment_s = time.time()
        # A scrape that began just then is stamped with its begin, so the next one is as good as this moment.
        self.prometheus.wait_until_sent(moment_s + 2)
        return int(moment_s * 1000) + 1000

    def is_idle(self) -> bool:
        """Whether every client has gone."""
        return self.cluster.metrics().total("pulsar_proxy_active_connections") == 0


# ---- the scene


@pytest.fixture(scope="module")
def scene(
    secured_broker: Standalone, python_client: Program, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    """All of it, running; no client has connected yet."""
    directory = tmp_path_factory.mktemp("analytics")
    admin = secured_broker.admin()
    admin.create_namespace(NAMESPACE)
    for principal in PRINCIPALS:
        admin.grant_namespace(NAMESPACE, principal)
    more = {"cluster": {"forwarders": FORWARDERS}, "metrics": {"count_messages": True}}
    receiver = Receiver(directory)
    with ExitStack() as stack:
        cluster = stack.enter_context(running(ProxyCluster(merged(authentication(secured_broker), more))))
        target = f"127.0.0.1:{cluster.admin_port}"
        arguments = {"target": target, "write_url": receiver.write_url, "token_file": receiver.token_file}
        prometheus = Prometheus(directory, **arguments)
        accounting = (python_client.command[0], str(CLIENTS / "python" / "accounting.py"))
        client = Program("accounting", accounting, directory)
        start_ms = int(time.time() * 1000)
        tables = Tables(directory / "tables")
        made = Scene(secured_broker, cluster, receiver, prometheus, tables, client, python_client, start_ms)
        stack.callback(receiver.kill)
        receiver.start()
        stack.callback(prometheus.kill)
        prometheus.start()
        made.settle()
        yield made


def assert_billed(scene: Scene, tables: Tables) -> dict[str, dict[str, int]]:
    """usage_hourly has exactly what the proxy counted; returns it."""
    counted = per_principal(scene.cluster.metrics())
    assert set(counted) == set(PRINCIPALS)
    billed = tables.usage()
    assert billed == counted
    assert tables.usage("usage_daily") == billed
    return billed


# ---- everything works


def test_the_bill_is_what_the_clients_sent_and_the_proxy_counted(scene: Scene, tmp_path: Path) -> None:
    """Batches count as one towards clients, since brokers do not say what is in them."""
    spent = {
        "alice": [scene.spend("alice", "single", 2000, batching=False)],
        "bob": [scene.spend("bob", "batched", 3000, batching=True)],
        "carol": [
            scene.spend("carol", "both", 500, batching=False),
            scene.spend("carol", "both-2", 700, batching=True),
        ],
    }
    scene.settle()
    tables, page = ["--tables", scene.tables.url], tmp_path / "report.html"
    run_jobs(
        ["ingest", "--spool", scene.receiver.spool, *tables],
        ["rollup", *tables],
        ["usage", *tables],
        ["report", *tables, "--output", page, "--last", "2h"],
    )
    billed = assert_billed(scene, scene.tables)
    for principal, loads in spent.items():
        assert billed[principal]["messages_in"] == sum(load["sent"] for load in loads)
        assert billed[principal]["messages_out"] == sum(load["entries"] for load in loads)
        payload_bytes = sum(load["payload_bytes"] for load in loads)
        assert billed[principal]["bytes_in"] > payload_bytes
        assert billed[principal]["bytes_out"] > payload_bytes
    assert spent["bob"][0]["entries"] < spent["bob"][0]["sent"]
    text = page.read_text()
    assert [name for name in PRINCIPALS if f">{name}<" not in text] == []
    for figures in billed.values():
        assert f">{figures['bytes_in']:,}<" in text


# ---- everything is killed


def test_no_kill_loses_or_doubles_a_sample(scene: Scene, tmp_path: Path) -> None:
    """Forwarder, receiver, Spark and Prometheus get SIGKILL in the middle. (Of the jobs, ingest; test_analytics_kills
    kills the others.)

    A Prometheus that was killed does not send what it had not sent yet, although it has it: that is what `backfill` is
    for. Everything else heals by itself. And of nothing but the query API come the same samples, into fresh tables.
    """
    follow = ["ingest", "--spool", scene.receiver.spool, "--tables", scene.tables.url]
    unsent_ms, sent = kill_under_load(scene, start_jobs(tmp_path / "follow.log", [*follow, "--follow", "0.2"]))
    end_ms = scene.settle()
    fresh = Tables(tmp_path / "fresh")
    gap = backfill(scene, scene.tables, *unsent_ms)
    all_of_it = backfill(scene, fresh, scene.start_ms, end_ms)
    tables = ["--tables", scene.tables.url]
    run_jobs(follow, gap, ["rollup", *tables], ["usage", *tables], all_of_it)

    stored = scene.prometheus.samples(scene.start_ms, end_ms)
    assert_same(scene.tables.samples(scene.start_ms, end_ms), stored)
    received = scene.tables.samples(scene.start_ms, end_ms, backfilled=False)
    assert_same(received, {key: value for key, value in stored.items() if key in received})
    assert [key for key in stored if key not in received and not unsent_ms[0] <= key[1] <= unsent_ms[1]] == []
    assert_same(fresh.samples(scene.start_ms, end_ms), stored)
    billed = assert_billed(scene, scene.tables)
    assert all(billed[name]["messages_in"] >= sent[name] for name in PRINCIPALS)


def kill_under_load(scene: Scene, ingest: OwnedProcess) -> tuple[tuple[int, int], dict[str, int]]:
    """Returns when Prometheus had samples that it never sent (ms), and what each client has sent."""
    url, name = scene.cluster.service_url, f"persistent://{NAMESPACE}/kills"
    with ExitStack() as stack:
        stack.callback(ingest.kill)
        streams = {
            who: stack.enter_context(scene.python_client.start("stream", url, f"{name}-{who}", token=scene.token(who)))
            for who in PRINCIPALS
        }

        def go_on() -> None:
            for stream in streams.values():
                stream.wait_for_progress(300)

        go_on()
        kill_a_forwarder(scene.cluster)
        kill_a_receiver(scene)
        kill_in_a_batch(ingest, scene.tables)
        go_on()
        unsent_ms = kill_prometheus_with_unsent_samples(scene)
        go_on()
        results = {who: stream.stop().result for who, stream in streams.items()}
    assert {who: result["missing"] for who, result in results.items()} == dict.fromkeys(PRINCIPALS, 0)
    return unsent_ms, {who: result["sent"] for who, result in results.items()}


def assert_same(found: Samples, expected: Samples) -> None:
    """The same series, instants and values; says which differ, not how all look."""
    missing = [key for key in expected if key not in found]
    added = [key for key in found if key not in expected]
    changed = [key for key in expected if key in found and found[key] != expected[key]]
    assert (missing[:3], added[:3], changed[:3]) == ([], [], []), (
        len(missing),
        len(added),
        len(changed),
        len(expected),
    )
    assert found


def kill_a_forwarder(cluster: ProxyCluster) -> None:
    """And wait for the next."""
    pid = cluster.worker_pids()["forwarder-0"]
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: cluster.worker_pids().get("forwarder-0") not in {None, pid}, what="forwarder-0 is back")


def kill_a_receiver(scene: Scene) -> None:
    """In a stream of requests; it is away for some scrapes, and everything arrives."""
    scene.receiver.kill()
    time.sleep(1.5)
    scene.receiver.start()
    scene.prometheus.wait_until_sent(time.time())


def kill_in_a_batch(ingest: OwnedProcess, tables: Tables) -> None:
    """After batches that it finished, while it writes another."""

    def has_committed() -> bool:
        assert ingest.exit_code() is None, ingest.log_tail()
        return re.search(r"^up to \d+:\d+: [\d,]+ samples", ingest.log.read_text(), re.MULTILINE) is not None

    eventually(has_committed, what="ingest finished a batch", within_s=JOB_TIMEOUT_S)
    wait_for_write(tables.root, "samples", ingest)
    ingest.kill()


def kill_prometheus_with_unsent_samples(scene: Scene) -> tuple[int, int]:
    """The worst moment: while its samples are not received. The time (ms since 1970) whose samples it never sends."""
    begin_ms = int(scene.prometheus.sent_until_s() * 1000) - 1000
    scene.receiver.kill()
    time.sleep(1.5)
    scene.prometheus.kill()
    end_ms = int(time.time() * 1000)
    scene.receiver.start()
    scene.prometheus.start()
    scene.prometheus.wait_until_sent(time.time())
    return begin_ms, end_ms


def backfill(scene: Scene, tables: Tables, start_ms: int, end_ms: int) -> list[object]:
    """The job's arguments for this time, by whole seconds around it."""
    moments = (start_ms // 1000, end_ms // 1000 + 1)
    start, end = (datetime.fromtimestamp(one, UTC).strftime("%Y-%m-%dT%H:%M:%S") for one in moments)
    where = ["--tables", tables.url, "--url", scene.prometheus.url]
    return ["backfill", *where, "--match", '{job="proxy"}', "--start", start, "--end", end]


# ---- remote write 2.0


def test_with_start_timestamps_the_bill_is_exact_from_the_first_byte(scene: Scene, tmp_path: Path) -> None:
    """No Prometheus 3 here: the cluster's own scrapes, sent by our own encoder, through the real receiver and jobs."""
    receiver, tables = Receiver(tmp_path), Tables(tmp_path / "tables")
    receiver.start()
    try:
        for _ in range(2):
            send_v2(receiver, scene.cluster.metrics(), scene.start_ms)
            scene.spend("alice", "second", 300, batching=False)
        eventually(scene.is_idle, what="no relay is open")
        last = scene.cluster.metrics()
        send_v2(receiver, last, scene.start_ms)
    finally:
        receiver.kill()
    where = ["--tables", tables.url]
    run_jobs(["ingest", "--spool", receiver.spool, *where], ["rollup", *where], ["usage", *where])
    assert tables.usage() == per_principal(last)
    assert {row["first_start_ts"] for row in tables.rows("rollup_1h", "first_start_ts")} != {None}


def send_v2(receiver: Receiver, scrape: Scrape, started_ms: int) -> None:
    """One scrape as one request; counters have begun when the cluster did."""
    request, numbers = pb.RequestV2(symbols=[""]), {"": 0}
    now_ms = int(time.time() * 1000)
    for sample in scrape.samples:
        series = request.timeseries.add()
        series.labels_refs.extend(
            references(request, numbers, [("__name__", sample.name), ("job", "proxy"), *sample.labels.items()])
        )
        start = started_ms if sample.name.endswith("_total") else 0
        series.samples.add(value=sample.value, timestamp=now_ms, start_timestamp=start)
    headers = {
        "Content-Type": "application/x-protobuf;proto=io.prometheus.write.v2.Request",
        "Content-Encoding": "snappy",
        "Authorization": f"Bearer {TOKEN}",
    }
    connection = http.client.HTTPConnection(receiver.address, timeout=BUSY_S)
    connection.request("POST", "/api/v1/write", compress(request.SerializeToString()), headers)
    assert connection.getresponse().status == 204
    connection.close()


def references(request: pb.RequestV2, numbers: dict[str, int], labels: Iterable[tuple[str, str]]) -> Iterator[int]:
    """Numbers of the texts among the request's symbols, new ones added."""
    for text in (text for pair in sorted(labels) for text in pair):
        if text not in numbers:
            numbers[text] = len(request.symbols)
            request.symbols.append(text)
        yield numbers[text]
