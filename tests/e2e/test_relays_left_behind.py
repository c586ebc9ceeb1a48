"""Relays with TLS cannot move to another process: they stay in the one that an upgrade or a reload replaces. What they
use is billed exactly, operators see them, and a drain ends them in order.
"""

from __future__ import annotations

import os
import signal
import ssl
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from local.standalone import Standalone

from proto.pulsar_pb2 import BaseCommand, ServerError
from tests.analytics.counter_model import Sample, windows

from .conftest import authentication, running
from .lab.certificates import Authority
from .lab.cluster import Tables, merged
from .lab.listeners import ManyListenersCluster
from .lab.metrics import Scrape
from .lab.security import NAMESPACE
from .lab.sessions import Session
from .lab.waiting import eventually

MESSAGES = "pulsar_proxy_principal_messages"
BYTES = "pulsar_proxy_principal_bytes"
SESSIONS = "pulsar_proxy_principal_sessions"
CONNECTIONS = "pulsar_proxy_active_connections"
ENDED = "a relay has ended"
WHO = {"principal": "alice"}
TO_BROKER = {**WHO, "direction": "to_broker"}
TO_CLIENT = {**WHO, "direction": "to_client"}
LONG_DRAIN_MS = 600_000
"""Longer than this test takes on any machine: nothing here ends because the time of a replaced process is over."""

TABLES: Tables = {
    "cluster": {"forwarders": 1},
    "limits": {"drain_timeout_ms": LONG_DRAIN_MS},
    "metrics": {"count_messages": True},
}


class Producer(Session):
    """Counts for itself what passes through its relay: whole frames in the clear, as the proxy bills them."""

    sent_bytes = 0
    received_bytes = 0
    sent_messages = 0

    def send_bytes(self, data: bytes) -> None:
        super().send_bytes(data)
        self.sent_bytes += len(data)

    def _read(self, deadline: float) -> bytes:
        data = super()._read(deadline)
        self.received_bytes += len(data)
        return data

    def _authenticate(self, **fields: Any) -> Any:
        answer = super()._authenticate(**fields)
        self.sent_bytes = 0  # the CONNECT is the proxy's to answer, and the one that the broker gets is the proxy's own
        return answer

    def produce(self, messages: int) -> None:
        """Send so many, and wait for all their receipts."""
        for _ in range(messages):
            self.use(b"p" * 100)
        self.assert_all_answered()
        self.sent_messages += messages


@dataclass
class Stage:
    """One cluster whose clients come in by TLS, and all that was ever scraped from it."""

    cluster: ManyListenersCluster
    broker: Standalone
    context: ssl.SSLContext
    scrapes: list[Scrape] = field(default_factory=list)
    producers: list[Producer] = field(default_factory=list)
    topic: str = field(default_factory=lambda: f"persistent://{NAMESPACE}/{uuid.uuid4().hex[:12]}")

    def producer(self) -> Producer:
        producer = Producer(
            self.cluster,
            self.broker.token("alice"),
            self.topic,
            broker=self.broker,
            tls=self.context,
            port=self.cluster.ports[0],
        )
        self.producers.append(producer)
        return producer.begin()

    def command(self, name: str) -> None:
        answer = self.cluster.command(name, timeout_s=300)
        assert answer.returncode == 0, answer.stderr

    def replace_by_reload(self, level: str) -> None:
        """A change that running processes cannot take over: others follow them."""
        self.cluster.write_config(merged(self.cluster.tables, {"log": {"level": level}}))
        self.command("reload")

    def forwarders(self) -> list[tuple[str, int]]:
        """State and connections of each, in the order of `status`; -1: it is just ending, and says nothing any more."""
        status = self.cluster.status()
        workers = [*status["workers"], *status["leaving_workers"]]
        return [(one["state"], one.get("connections", -1)) for one in workers if one["role"] == "forwarder"]

    def leaving_pids(self) -> list[int]:
        """Of the forwarders that were replaced, the oldest first."""
        return [one["pid"] for one in self.cluster.status()["leaving_workers"] if one["role"] == "forwarder"]

    def assert_exact(self) -> None:
        """Every series together tell what the producers have sent and received, no more and no less."""
        scrape = self.cluster.metrics()
        self.scrapes.append(scrape)
        assert scrape.total(f"{MESSAGES}_total", **TO_BROKER) == sum(one.sent_messages for one in self.producers)
        assert scrape.total(f"{BYTES}_total", **TO_BROKER) == sum(one.sent_bytes for one in self.producers)
        assert scrape.total(f"{BYTES}_total", **TO_CLIENT) == sum(one.received_bytes for one in self.producers)
        assert scrape.total(f"{SESSIONS}_total", **WHO) == len(self.producers)

    def billed(self, name: str, **labels: str) -> float:
        """What the analytics make of the scrapes, series by series."""
        series: dict[tuple[tuple[str, str], ...], list[Sample]] = {}
        for number, scrape in enumerate(self.scrapes):
            started = {key(one.labels): one.value for one in scrape.samples if one.name == f"{name}_created"}
            for one in scrape.samples:
                if one.name == f"{name}_total" and labels.items() <= one.labels.items():
                    start_ms = int(started[key(one.labels)] * 1000)
                    # A minute apart, as far as the clock goes; the first one after the counter began.
                    sample = Sample(start_ms + (number + 1) * 60_000, one.value, start_ms)
                    series.setdefault(key(one.labels), []).append(sample)
        rolled = [window for samples in series.values() for window in windows(samples, 60_000, 30)]
        return float(sum(window.increase for window in rolled))


def key(labels: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(labels.items()))


@pytest.fixture
def stage(secured_broker: Standalone, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    authority = Authority(tmp_path_factory.mktemp("authority"), "authority")
    server = authority.server("proxy")
    secure = {"tls": {"certificate": server.certificate, "key": server.key}}
    with running(cluster := ManyListenersCluster(merged(authentication(secured_broker), TABLES), secure)):
        stage = Stage(cluster, secured_broker, ssl.create_default_context(cafile=authority.file))
        with Session(cluster, secured_broker.token("alice"), stage.topic) as client:
            client.begin().assert_serves()  # the broker has the topic from now on
        yield stage
        for producer in stage.producers:
            producer.close()


def test_usage_is_exact_through_upgrades(stage: Stage) -> None:
    """4,000 messages: through two upgrades and a reload that replaces processes, one of which is killed."""
    first = stage.producer()
    first.produce(700)
    stage.assert_exact()
    stage.command("upgrade")
    assert stage.forwarders() == [("running", 0), ("leaving", 1)]
    stage.assert_exact()
    first.produce(700)
    stage.assert_exact()
    second = stage.producer()
    second.produce(600)
    stage.replace_by_reload("debug")
    assert stage.forwarders() == [("running", 0), ("leaving", 1), ("leaving", 1)]
    for producer in (first, second):
        producer.produce(400)
        stage.assert_exact()
    assert stage.scrapes[-1].total(CONNECTIONS) == 2, "each is counted where it is, and once"
    kill(stage, stage.leaving_pids()[1], second)
    stage.assert_exact()
    first.produce(200)
    first.close()
    line = stage.cluster.wait_for_log(ENDED, first.address)
    told = {"messages_to_broker=2000", f"bytes_to_broker={first.sent_bytes}", f"bytes_to_client={first.received_bytes}"}
    assert told <= set(line.split()), line
    eventually(lambda: stage.forwarders() == [("running", 0)], what="the last one who stayed behind has ended")
    stage.assert_exact()
    third = stage.producer()
    third.produce(500)
    stage.command("upgrade")
    third.produce(500)
    third.close()
    eventually(lambda: stage.forwarders() == [("running", 0)], what="it has ended, too")
    stage.assert_exact()
    assert sum(producer.sent_messages for producer in stage.producers) == 4000
    assert stage.billed(MESSAGES, **TO_BROKER) == 4000
    assert stage.billed(BYTES, **TO_BROKER) == sum(producer.sent_bytes for producer in stage.producers)
    assert stage.billed(SESSIONS, **WHO) == 3
    assert "Traceback" not in stage.cluster.log_text()


def kill(stage: Stage, pid: int, producer: Producer) -> None:
    """What has stayed in this process is gone with it, and no other relay is disturbed."""
    os.kill(pid, signal.SIGKILL)
    producer.wait_for_end()
    eventually(lambda: pid not in stage.leaving_pids(), what="it is shown no more")


def test_a_drain_ends_them_in_order(stage: Stage) -> None:
    """Within the time of the drain, not of the upgrade; the client is told why."""
    producer = stage.producer()
    producer.produce(10)
    stage.command("upgrade")
    assert stage.forwarders() == [("running", 0), ("leaving", 1)]
    stage.cluster.write_config(merged(stage.cluster.tables, {"limits": {"drain_timeout_ms": 5000}}))
    stage.command("reload")
    stage.cluster.signal(signal.SIGTERM)
    (farewell,) = producer.wait_for_end()
    assert (farewell.type, farewell.error.error) == (BaseCommand.ERROR, ServerError.ServiceNotReady)
    assert stage.cluster.wait() == 0
    line = stage.cluster.wait_for_log(ENDED, producer.address)
    assert {"messages_to_broker=10", f"bytes_to_broker={producer.sent_bytes}"} <= set(line.split()), line
