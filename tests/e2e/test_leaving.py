"""Pods that leave well: unready first, relays ended one after the other, connections of a maximum age, and a
configuration file that changes as a ConfigMap does.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from local.ports import free_port
from local.process import OwnedProcess
from local.standalone import Standalone

from proto.pulsar_pb2 import BaseCommand

from .conftest import before, running
from .lab.cluster import ROOT, ProxyCluster, Tables, merged, to_toml
from .lab.crowd import Crowd
from .lab.fakes import FakeBroker, LookupBroker
from .lab.programs import Outcome, Program
from .lab.schema import LOOKUP_CONNECT
from .lab.waiting import eventually
from .lab.wire import Ended, WireClient

pytestmark = pytest.mark.timeout(240)

BUSY_S = 60.0
"""Patience with a busy machine; nothing is slower for it when all is well."""


@dataclass
class Scene:
    """A cluster before a broker of our own."""

    cluster: ProxyCluster
    broker_port: int


@contextmanager
def scene(tables: Tables | None = None) -> Iterator[Scene]:
    broker_port = free_port()
    lookups = LookupBroker({"response": LOOKUP_CONNECT, "broker_service_url": "pulsar://127.0.0.1:1"})
    with FakeBroker(lookups) as lookup_broker:
        own: Tables = {
            "brokers": {"service_url": f"pulsar://127.0.0.1:{lookup_broker.port}", "allowed_ports": [broker_port]}
        }
        with running(ProxyCluster(merged(own, tables or {}), ready_timeout_s=120)) as cluster:
            yield Scene(cluster, broker_port)


def is_accepted(cluster: ProxyCluster) -> bool:
    """Whether a newcomer is let in."""
    try:
        with WireClient(cluster.port) as client:
            return bool(client.connect().type == BaseCommand.CONNECTED)
    except (OSError, Ended):
        return False


def is_open(client: socket.socket) -> bool:
    """Whether a client that has read everything has not been told of an end."""
    client.setblocking(False)
    try:
        return bool(client.recv(1 << 16))
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


# ---- the delay


@pytest.mark.parametrize("how", ["SIGTERM", "drain"])
def test_unready_and_still_there_for_clients(how: str) -> None:
    """For the delay; a second signal ends it."""
    with scene({"shutdown": {"delay_ms": 3_000_000}}) as it, WireClient(it.cluster.port) as early:
        early.connect()
        command = None
        if how == "SIGTERM":
            it.cluster.signal(signal.SIGTERM)
        else:
            arguments = [sys.executable, "-m", "proxy", "drain", "--config", str(it.cluster.config_path)]
            command = OwnedProcess(arguments, log=it.cluster.directory / "drain.log", cwd=ROOT)
        it.cluster.wait_for_readiness(ready=False)
        assert "leaving" in it.cluster.get("/readyz").text
        assert it.cluster.get("/readyz?leaving=ready").status == 200
        assert it.cluster.get("/healthz").status == 200
        assert is_accepted(it.cluster)
        with Crowd(it.cluster.port, it.broker_port) as crowd:
            crowd.open(3)
            crowd.exchange()
            assert early.ping().type == BaseCommand.PONG
            it.cluster.signal(signal.SIGTERM)
            assert it.cluster.wait(timeout_s=BUSY_S) == 1
        if command is not None:
            command.stop(BUSY_S)


def test_the_drain_follows_the_delay() -> None:
    with scene({"shutdown": {"delay_ms": 2_000}}) as it:
        began_at = time.monotonic()
        it.cluster.signal(signal.SIGTERM)
        assert it.cluster.wait(timeout_s=BUSY_S) == 0
        assert time.monotonic() - began_at >= 2
        assert not is_accepted(it.cluster)


# ---- the drain


def test_relays_are_ended_one_after_the_other() -> None:
    """80 relays in a drain of 15 s: it takes about 12 s, and in no second more than a part of them."""
    with (
        scene({"limits": {"drain_timeout_ms": 15_000}}) as it,
        Crowd(it.cluster.port, it.broker_port) as crowd,
    ):
        crowd.open(80)
        it.cluster.signal(signal.SIGTERM)
        eventually(lambda: not is_accepted(it.cluster), what="no client is accepted any more", within_s=BUSY_S)
        ended_at: dict[int, float] = {}
        deadline = time.monotonic() + 2 * BUSY_S
        while len(ended_at) < 80 and time.monotonic() < deadline:
            now = time.monotonic()
            ended_at |= {
                n: now for n, ends in enumerate(crowd.relays) if n not in ended_at and not is_open(ends.client)
            }
            for number in ended_at.keys() & set(range(80)):
                crowd.relays[number].broker.close()
            time.sleep(0.05)
        times = sorted(ended_at.values())
        assert len(times) == 80
        assert times[-1] - times[0] > 6, "spread"
        most = max(sum(start <= at < start + 1 for at in times) for start in times)
        assert most <= 60, "a quiet machine has 7; a busy one that looks rarely sees those of seconds together"
        assert it.cluster.wait(timeout_s=BUSY_S) == 0


def test_a_forwarder_killed_in_the_drain_has_a_successor_that_accepts_no_client() -> None:
    with (
        scene({"cluster": {"forwarders": 1}, "limits": {"drain_timeout_ms": 600_000}}) as it,
        Crowd(it.cluster.port, it.broker_port) as crowd,
    ):
        crowd.open(10)
        forwarder = it.cluster.worker_pids()["forwarder-0"]
        it.cluster.signal(signal.SIGTERM)
        eventually(lambda: not is_accepted(it.cluster), what="no client is accepted any more", within_s=BUSY_S)
        os.kill(forwarder, signal.SIGKILL)
        it.cluster.wait_for_log("took over the relays of a predecessor", within_s=BUSY_S)
        crowd.exchange()
        assert not is_accepted(it.cluster)
        eventually(lambda: "draining" in it.cluster.get("/readyz").text, what="load balancers are told")
        crowd.close_all()
        assert it.cluster.wait(timeout_s=BUSY_S) == 0


def test_a_forwarder_killed_in_the_drain_leaves_the_schedule_to_its_successor() -> None:
    """All relays are ended by it, without the peers' help."""
    with (
        scene({"cluster": {"forwarders": 1}, "limits": {"drain_timeout_ms": 24_000}}) as it,
        Crowd(it.cluster.port, it.broker_port) as crowd,
    ):
        crowd.open(20)
        forwarder = it.cluster.worker_pids()["forwarder-0"]
        it.cluster.signal(signal.SIGTERM)
        eventually(lambda: crowd_ended(crowd) >= 2, what="some relays have ended", within_s=BUSY_S)
        os.kill(forwarder, signal.SIGKILL)
        eventually(lambda: crowd_ended(crowd) == 20, what="all relays have ended", within_s=2 * BUSY_S)
        assert it.cluster.wait(timeout_s=BUSY_S) == 0
        assert "the drain's time is over" not in it.cluster.log_text(), "each was ended gently"


def crowd_ended(crowd: Crowd) -> int:
    """How many clients have been told of the end."""
    return sum(not is_open(ends.client) for ends in crowd.relays)


@pytest.mark.conforms("pip-1.1")
def test_producers_move_to_another_proxy_without_a_loss(broker: Standalone, python_client: Program, topic: str) -> None:
    """Two proxies; the one that a Python client is connected to leaves while it produces and consumes."""
    tables: Tables = {
        "brokers": before(broker),
        "shutdown": {"delay_ms": 1_000},
        "limits": {"drain_timeout_ms": 4_000},
    }
    with (
        running(ProxyCluster(tables, ready_timeout_s=120)) as first,
        running(ProxyCluster(tables, ready_timeout_s=120)) as second,
    ):
        url = f"pulsar://localhost:{first.port},localhost:{second.port}"
        with python_client.start("stream", url, topic) as run:
            run.wait_for_progress(100)
            leaving, staying = (first, second) if relays_of(first) else (second, first)
            leaving.signal(signal.SIGTERM)
            assert leaving.wait(timeout_s=BUSY_S) == 0
            eventually(lambda: relays_of(staying) > 0, what="it came to the other one", within_s=BUSY_S)
            run.wait_for_progress(100)
            expect_whole(run.stop())


def expect_whole(outcome: Outcome) -> None:
    """Every message came, in order."""
    result = outcome.result
    assert result["ok"], result
    assert (result["missing"], result["in_order"], result["send_failures"]) == (0, True, 0), result


def relays_of(cluster: ProxyCluster) -> float:
    return cluster.metrics().total("pulsar_proxy_connections_by_state", state="relaying")


# ---- the maximum age


def ended_by_age(cluster: ProxyCluster) -> float:
    return cluster.metrics().total("pulsar_proxy_ended_connections_total", cause="max_age")


@pytest.fixture(scope="module")
def aging(broker: Standalone) -> Iterator[ProxyCluster]:
    """A cluster of one forwarder, whose connections end soon."""
    tables: Tables = {
        "cluster": {"forwarders": 1},
        "brokers": before(broker),
        "limits": {"max_connection_age_ms": 10_000},
    }
    with running(ProxyCluster(tables, ready_timeout_s=120)) as cluster:
        yield cluster


def test_a_maximum_age_ends_lookup_connections_and_relays(broker: Standalone, aging: ProxyCluster) -> None:
    with WireClient(aging.port) as lookup, WireClient(aging.port) as relay:
        lookup.connect()
        relay.connect(proxy_to_broker_url=f"localhost:{broker.broker_port}")
        assert lookup.wait_for_end(within_s=BUSY_S) == []
        [*_, last] = relay.wait_for_end(within_s=BUSY_S)
        assert "maximum age" in last.error.message
        eventually(lambda: ended_by_age(aging) == 2, what="their cause is counted", within_s=BUSY_S)
        assert is_accepted(aging), "and a client that comes again is let in"


def test_the_age_goes_on_in_a_successor(broker: Standalone, aging: ProxyCluster) -> None:
    """A forwarder dies between the begin of a relay and its maximum age."""
    with WireClient(aging.port) as client:
        client.connect(proxy_to_broker_url=f"localhost:{broker.broker_port}")
        os.kill(aging.worker_pids()["forwarder-0"], signal.SIGKILL)
        aging.wait_for_log("took over the relays of a predecessor", within_s=BUSY_S)
        [*_, last] = client.wait_for_end(within_s=BUSY_S)
        assert "maximum age" in last.error.message


def test_a_client_that_produces_is_moved_without_a_loss(broker: Standalone, python_client: Program, topic: str) -> None:
    tables: Tables = {"brokers": before(broker), "limits": {"max_connection_age_ms": 3_000}}
    with (
        running(ProxyCluster(tables, ready_timeout_s=120)) as cluster,
        python_client.start("stream", cluster.service_url, topic) as run,
    ):
        run.wait_for_progress(100)
        eventually(lambda: ended_by_age(cluster) >= 3, what="connections have reached their age", within_s=BUSY_S)
        run.wait_for_progress(100)
        expect_whole(run.stop())


# ---- a configuration file that changes


def as_config_map(cluster: ProxyCluster, version: str, tables: Tables) -> None:
    """What the kubelet does: a new folder, and a link to it that is renamed over the old one."""
    folder: Path = cluster.directory / f"..{version}"
    folder.mkdir()
    (folder / "config.toml").write_text(to_toml(tables))
    link = cluster.directory / "..data_tmp"
    link.symlink_to(folder.name)
    link.rename(cluster.directory / "..data")


def test_a_config_map_that_is_swapped_takes_effect_by_itself() -> None:
    """A good change counts, a bad one changes nothing and shows, the next good one counts."""
    own: Tables = {
        "cluster": {"forwarders": 1},
        "brokers": {"service_url": f"pulsar://127.0.0.1:{free_port()}"},
        "reload": {"watch_interval_ms": 200},
    }
    cluster = ProxyCluster(own, ready_timeout_s=120)
    cluster.config_path.unlink()
    cluster.config_path.symlink_to("..data/config.toml")
    as_config_map(cluster, "1", cluster.tables)
    with running(cluster, ready=False):
        workers = eventually(lambda: all_workers(cluster), what="all workers run", within_s=BUSY_S)
        as_config_map(cluster, "2", merged(cluster.tables, {"limits": {"max_connections": 7}}))
        cluster.wait_for_log("the configuration was reloaded", within_s=BUSY_S)
        as_config_map(cluster, "3", merged(cluster.tables, {"limits": {"max_conections": 7}}))
        assert "max_conections" in cluster.wait_for_log("the configuration was not reloaded", within_s=BUSY_S)
        assert successful(cluster) == 0
        as_config_map(cluster, "4", merged(cluster.tables, {"limits": {"max_connections": 8}}))
        eventually(lambda: successful(cluster) == 1, what="the next change counts", within_s=BUSY_S)
        assert cluster.log_text().count("the configuration was not reloaded") == 1
        assert cluster.worker_pids() == workers


def all_workers(cluster: ProxyCluster) -> dict[str, int]:
    """The workers' process ids once all of them run, else nothing."""
    pids = cluster.worker_pids()
    return pids if len(pids) == 4 else {}


def successful(cluster: ProxyCluster) -> float:
    return cluster.metrics().total("pulsar_proxy_config_last_reload_successful")
