"""Something breaks while clients produce and consume: they reconnect through the proxy, and nothing is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from local.standalone import Standalone

from proto.pulsar_pb2 import BaseCommand, ServerError

from .lab.cluster import ProxyCluster
from .lab.programs import Outcome, Program, Run
from .lab.waiting import eventually
from .lab.wire import WireClient


def assert_nothing_lost(outcome: Outcome) -> None:
    """Every message that was sent came, first seen in order. Redeliveries are allowed."""
    result = outcome.result
    assert result["ok"], f"{result}\n{outcome.log[-4000:]}"
    assert (result["missing"], result["send_failures"], result["in_order"]) == (0, 0, True), result


@dataclass
class Streams:
    """One stream for each client library, all at the same time."""

    runs: dict[str, Run]

    def all_receive(self, more: int) -> None:
        """Wait until each has received `more` messages; Go's client waits up to a minute between its attempts."""
        for run in self.runs.values():
            run.wait_for_progress(more, within_s=180.0)

    def assert_nothing_lost(self) -> dict[str, Outcome]:
        """Stop them all; each must have everything."""
        outcomes = {name: run.stop() for name, run in self.runs.items()}
        for outcome in outcomes.values():
            assert_nothing_lost(outcome)
        return outcomes


@pytest.fixture
def streams(every_client: list[Program], url: str, topic: str) -> Iterator[Streams]:
    """Streams of every client library, each warmed up."""
    with ExitStack() as stack:
        runs = {
            program.name: stack.enter_context(program.start("stream", url, f"{topic}-{program.name}"))
            for program in every_client
        }
        started = Streams(runs)
        started.all_receive(300)
        yield started


def test_topic_unload(client: Program, broker: Standalone, url: str, topic: str) -> None:
    """The broker closes producers and consumers of the topic; clients look it up again and go on."""
    with client.start("stream", url, topic) as run:
        run.wait_for_progress(300)
        for _ in range(2):
            broker.admin().unload_topic(topic)
            run.wait_for_progress(500)
        outcome = run.stop()
    assert_nothing_lost(outcome)
    assert outcome.reconnect_lines


def test_broker_restart(streams: Streams, broker: Standalone, proxy: ProxyCluster) -> None:
    """The cluster stays up, says that it is not ready meanwhile, and recovers by itself."""
    workers = proxy.worker_pids()
    broker.stop()
    proxy.wait_for_readiness(ready=False)
    broker.start()
    proxy.wait_for_readiness(ready=True)
    streams.all_receive(1000)
    for outcome in streams.assert_nothing_lost().values():
        assert outcome.reconnect_lines
    assert proxy.worker_pids() == workers


def test_kill_of_every_forwarder(streams: Streams, proxy: ProxyCluster) -> None:
    """Their connections break; both come back, and clients with them."""
    kill_and_wait(proxy, "forwarder")
    streams.all_receive(1000)
    streams.assert_nothing_lost()


@pytest.mark.parametrize("role", ["lookup", "auth"])
def test_kill_of_a_worker_that_relays_do_not_need(streams: Streams, proxy: ProxyCluster, role: str) -> None:
    """Streams go on without a reconnect."""
    before = {name: run.reconnects() for name, run in streams.runs.items()}
    kill_and_wait(proxy, role)
    streams.all_receive(500)
    assert {name: run.reconnects() for name, run in streams.runs.items()} == before
    streams.assert_nothing_lost()


def test_lookups_wait_while_a_lookup_worker_restarts(proxy: ProxyCluster, topic: str) -> None:
    """On a connection that is there, and on new ones: its socket stays, so callers queue."""
    with WireClient(proxy.port) as client:
        client.connect()
        kill_and_wait(proxy, "lookup", wait=False)
        assert client.lookup(topic).lookup_topic_response.proxy_through_service_url
        with WireClient(proxy.port) as newcomer:
            newcomer.connect()
            assert newcomer.lookup(topic).lookup_topic_response.proxy_through_service_url
    assert_settled(proxy)


def test_clients_come_in_again_while_an_auth_worker_restarts(
    secured_broker: Standalone, secured_proxy: ProxyCluster
) -> None:
    """No client is told that *it* failed to authenticate, on which Java clients give up for good."""
    kill_and_wait(secured_proxy, "auth", wait=False)

    def comes_in() -> bool:
        with WireClient(secured_proxy.port) as client:
            answer = client.connect(token=secured_broker.token("alice"))
            if answer.type == BaseCommand.ERROR:
                assert answer.error.error == ServerError.ServiceNotReady
                return False
            lookup = client.lookup("persistent://secured/shared/after-a-kill").lookup_topic_response
            return bool(lookup.proxy_through_service_url)

    eventually(comes_in, what="a client comes in")
    assert_settled(secured_proxy)


def kill_and_wait(cluster: ProxyCluster, role: str, *, wait: bool = True) -> None:
    """SIGKILL every worker of a role; the supervisor must notice, log, count and replace them."""
    old = {name: pid for name, pid in cluster.worker_pids().items() if name.startswith(role)}
    assert old
    restarts = cluster.metrics().total("pulsar_proxy_worker_restarts_total", of=role)
    for pid in old.values():
        os.kill(pid, signal.SIGKILL)
    if not wait:
        return

    def replaced() -> bool:
        now = cluster.worker_pids()
        return all(now.get(name, pid) != pid for name, pid in old.items())

    eventually(replaced, what=f"new {role} workers")
    assert_settled(cluster)
    for name, pid in old.items():
        cluster.wait_for_log("a worker ended", name, str(pid))
    cluster.wait_for_total("pulsar_proxy_worker_restarts_total", restarts + len(old), of=role)


def assert_settled(cluster: ProxyCluster) -> None:
    """Every worker runs and the cluster is ready."""

    def settled() -> bool:
        return {worker["state"] for worker in cluster.status()["workers"]} == {"running"}

    eventually(settled, what="every worker runs")
    cluster.wait_for_readiness(ready=True)
