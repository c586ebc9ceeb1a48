"""Brokers that are down, refuse, keep silent or talk nonsense: clients get an error they understand, in time."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from local.ports import free_port
from local.standalone import Standalone

from proto.pulsar_pb2 import BaseCommand, ServerError

from .conftest import running
from .lab.cluster import ProxyCluster, Tables, merged
from .lab.fakes import (
    Behaviour,
    FakeBroker,
    LookupBroker,
    Recorder,
    connected,
    connected_with_4_mib,
    hangs_up,
    receive_command,
    refuses,
    silent,
    talks_nonsense,
)
from .lab.programs import Program
from .lab.schema import LOOKUP_CONNECT, LOOKUP_FAILED, LOOKUP_REDIRECT, Command
from .lab.waiting import eventually
from .lab.wire import Ended, WireClient, frame
from .lab.witness import others_unharmed

TOPIC = "persistent://public/default/failing"
ENDED = "pulsar_proxy_ended_connections_total"
BROKER_FAILURES = "pulsar_proxy_broker_connection_failures_total"
ANSWERS = "pulsar_proxy_lookup_answers_total"


@contextmanager
def cluster_before(port: int, *more_ports: int) -> Iterator[ProxyCluster]:
    """A small cluster whose only broker is at this port; it need not be well."""
    brokers = {
        "service_url": f"pulsar://127.0.0.1:{port}",
        "allowed_ports": [port, *more_ports],
        "connect_timeout_ms": 1000,
        "handshake_timeout_ms": 1500,
        "probe_interval_ms": 300,
    }
    tables: Tables = {"cluster": {"forwarders": 1}, "brokers": brokers, "limits": {"lookup_timeout_ms": 2500}}
    cluster = ProxyCluster(tables)
    with running(cluster, ready=False) as started:
        yield started


# ---- a relay's target


RELAY_FAILURES: dict[str, tuple[Behaviour | None, str, int]] = {
    "down": (None, "unreachable", ServerError.ServiceNotReady),
    "silent": (silent, "timeout", ServerError.ServiceNotReady),
    "hanging up": (hangs_up, "handshake", ServerError.ServiceNotReady),
    "talking nonsense": (talks_nonsense, "handshake", ServerError.ServiceNotReady),
    "accepting with 4 MiB": (connected_with_4_mib, "handshake", ServerError.ServiceNotReady),
    "refusing": (refuses, "refused", ServerError.NotAllowedError),
}


@pytest.mark.parametrize("what", RELAY_FAILURES)
def test_a_relay_to_a_failing_broker_ends_with_an_error(edge_proxy: ProxyCluster, fake_port: int, what: str) -> None:
    """The Java proxy just closes, and loses a broker's own error."""
    behaviour, reason, expected_code = RELAY_FAILURES[what]
    with others_unharmed(edge_proxy) as witness, WireClient(edge_proxy.port) as client:
        if behaviour is None:
            error = failed_relay(client, fake_port)
        else:
            with FakeBroker(behaviour, fake_port):
                error = failed_relay(client, fake_port)
        assert error.error == expected_code
        if what == "refusing":
            assert error.message == "fake broker says no"
        witness.logged(client.address, f"localhost:{fake_port}", "broker_failed")
        client.close()  # the proxy lingers until we do
        witness.counted(BROKER_FAILURES, reason=reason)
        witness.counted(ENDED, cause="broker_failed")


def failed_relay(client: WireClient, port: int) -> Any:
    """Ask for a relay; an error must come, and be the last word."""
    answer = client.connect(proxy_to_broker_url=f"localhost:{port}")
    assert answer.type == BaseCommand.ERROR, answer
    assert client.wait_for_end() == []
    return answer.error


def test_a_client_that_takes_any_broker_gets_one_that_is_up(broker: Standalone) -> None:
    """An empty proxy_to_broker_url (apache/pulsar#25879); a missing one is lookup mode, without producers."""
    urls = f"pulsar://127.0.0.2:{free_port()},localhost:{broker.broker_port}"
    with running(ProxyCluster({"cluster": {"forwarders": 1}, "brokers": {"service_url": urls}})) as cluster:
        for _ in range(4):  # each of the two has its turn
            with WireClient(cluster.port) as client:
                assert client.connect(proxy_to_broker_url="").type == BaseCommand.CONNECTED
                assert client.producer(TOPIC).type == BaseCommand.PRODUCER_SUCCESS
        with WireClient(cluster.port) as client:
            assert client.connect().type == BaseCommand.CONNECTED
            assert client.producer(TOPIC).type == BaseCommand.ERROR


EJECTIONS = "pulsar_proxy_broker_ejections_total"


def resets_relays(connection: socket.socket) -> None:
    """Answers probes and CONNECT like a broker that is well, then breaks off at the first word of a relay's client."""
    if receive_command(connection).type == BaseCommand.PING:
        connection.sendall(frame(BaseCommand.PONG, pong={}))
        return
    connection.sendall(connected())
    connection.recv(1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def gets_a_producer(cluster: ProxyCluster, source: str) -> bool:
    """Whether a client that takes any broker can produce, at its first try."""
    with WireClient(cluster.port, source=source) as client:
        assert client.connect(proxy_to_broker_url="").type == BaseCommand.CONNECTED
        try:
            return bool(client.producer(TOPIC).type == BaseCommand.PRODUCER_SUCCESS)
        except (Ended, ConnectionError):
            return False


def test_clients_move_from_a_broker_that_resets_their_relays_to_the_other(broker: Standalone) -> None:
    """Probes find nothing wrong with it. Two clients, however often they come, eject nobody; three do."""
    sources = [f"127.0.0.{number}" for number in (11, 12, 13)]
    with FakeBroker(resets_relays, host="127.0.0.2") as resetting:
        urls = f"pulsar://127.0.0.2:{resetting.port},localhost:{broker.broker_port}"
        brokers = {"service_url": urls, "ejection_by_relays": True, "ejection_time_ms": 60_000}
        with running(ProxyCluster({"cluster": {"forwarders": 1}, "brokers": brokers})) as cluster:

            def is_ejected_by(clients: list[str]) -> bool:
                found = [gets_a_producer(cluster, source) for _ in range(2) for source in clients]
                return cluster.metrics().total(EJECTIONS, reason="relays") > 0 and all(found)

            until = time.monotonic() + 12  # longer than a window
            while time.monotonic() < until:
                assert not is_ejected_by(sources[:2])
            eventually(lambda: is_ejected_by(sources), what="the broker is ejected, and nobody is sent to it")
            visitors = resetting.visitors
            assert all(gets_a_producer(cluster, source) for _ in range(4) for source in sources)
            assert resetting.visitors - visitors <= 12, "probes alone"
            [status] = [one for one in broker_status(cluster) if one["broker"].startswith("127.0.0.2")]
            assert status["reachable"]
            assert "relays of 3 of 3 owners fail: the broker broke off the relay" in status["detail"]


def broker_status(cluster: ProxyCluster) -> list[dict[str, Any]]:
    """What /status says of all brokers."""
    [found] = [worker["brokers"] for worker in cluster.status()["workers"] if worker["role"] == "lookup"][:1]
    return list(found)


DENIED = {
    "a port that is not allowed": ("localhost:22", "port"),
    "an unknown host": ("no-such-host.invalid:{port}", "unknown_host"),
    "no port": ("localhost", "no_port"),
    "a URL": ("pulsar://localhost:{port}", "malformed"),
}


@pytest.mark.conforms("pip-1.8")
@pytest.mark.parametrize("what", DENIED)
def test_a_target_that_is_not_allowed_is_denied(edge_proxy: ProxyCluster, broker: Standalone, what: str) -> None:
    """The client learns nothing of why; the log does. The Java proxy answers one of these AuthenticationError."""
    target, reason = DENIED[what]
    target = target.format(port=broker.broker_port)
    with others_unharmed(edge_proxy) as witness, WireClient(edge_proxy.port) as client:
        answer = client.connect(proxy_to_broker_url=target)
        assert answer.type == BaseCommand.ERROR
        expected = (ServerError.ServiceNotReady, "Target broker cannot be validated.")
        assert (answer.error.error, answer.error.message) == expected
        assert client.wait_for_end() == []
        witness.logged(client.address, target, "target_denied")
        client.close()  # the proxy lingers until we do
        witness.counted("pulsar_proxy_denied_targets_total", reason=reason)


RULES: list[tuple[dict[str, object], str]] = [
    ({}, "host"),
    ({"allowed_hosts": ["broker-*.example"]}, "host"),
    ({"allowed_addresses": ["10.0.0.0/8", "fd00::/8"]}, "address"),
]


def test_hosts_and_addresses_that_are_not_allowed_are_denied(broker: Standalone) -> None:
    """Loopback addresses, where the broker is, but not the broker's; by one rule after the other."""
    name = "pulsar_proxy_denied_targets_total"
    with running(
        ProxyCluster({"cluster": {"forwarders": 1}, "brokers": {"service_url": broker.service_url}})
    ) as cluster:
        for rules, reason in RULES:
            cluster.write_config(merged(cluster.tables, {"brokers": rules}))
            assert cluster.command("reload").returncode == 0
            before = cluster.metrics().total(name, reason=reason)
            with WireClient(cluster.port) as client:
                answer = client.connect(proxy_to_broker_url=f"127.0.0.2:{broker.broker_port}")
                assert answer.error.error == ServerError.ServiceNotReady
                cluster.wait_for_log(client.address, "target_denied")
            cluster.wait_for_total(name, before + 1, reason=reason)


# ---- the broker of lookups


@pytest.mark.parametrize("what", ["down", "silent", "hanging up"])
def test_lookups_without_a_good_broker_say_service_not_ready(what: str) -> None:
    """Each in the form of its own answer, and the connection stays usable."""
    behaviour = {"down": None, "silent": silent, "hanging up": hangs_up}[what]
    port = free_port()
    with listening(behaviour, port), cluster_before(port) as cluster, WireClient(cluster.port) as client:
        assert cluster.get("/readyz").status == 503
        assert client.connect().type == BaseCommand.CONNECTED
        lookup = client.lookup(TOPIC).lookup_topic_response
        assert (lookup.response, lookup.error) == (LOOKUP_FAILED, ServerError.ServiceNotReady)
        metadata = client.partitions(TOPIC)
        assert metadata.type == BaseCommand.PARTITIONED_METADATA_RESPONSE
        assert metadata.partition_metadata_response.error == ServerError.ServiceNotReady
        assert client.ping().type == BaseCommand.PONG
        cluster.wait_for_log(client.address, "a lookup failed")
        assert cluster.metrics().total(ANSWERS, request="lookup", error="ServiceNotReady") >= 1


def test_a_real_client_gives_up_in_time_without_a_broker(client: Program) -> None:
    """It retries for its operation timeout, 3 s here, and ends with an error of its own; it does not hang."""
    with cluster_before(free_port()) as cluster:
        outcome = client.run("attempt", cluster.service_url, TOPIC, timeout_s=3)
        assert outcome.result["ok"] is False
        assert cluster.metrics().total(ANSWERS, error="ServiceNotReady") >= 1


@contextmanager
def listening(behaviour: Behaviour | None, port: int) -> Iterator[None]:
    """A FakeBroker, or none."""
    if behaviour is None:
        yield
    else:
        with FakeBroker(behaviour, port):
            yield


def test_a_broker_that_comes_back_is_used_at_once(broker: Standalone) -> None:
    """Readiness follows the broker; nothing has to be restarted."""
    port = free_port()
    answer = {"response": LOOKUP_CONNECT, "broker_service_url": f"pulsar://localhost:{port}"}
    with cluster_before(port) as cluster, WireClient(cluster.port) as client:
        client.connect()
        assert client.lookup(TOPIC).lookup_topic_response.error == ServerError.ServiceNotReady
        with FakeBroker(LookupBroker(answer), port):
            cluster.wait_for_readiness(ready=True)
            assert client.lookup(TOPIC).lookup_topic_response.response == LOOKUP_CONNECT
        cluster.wait_for_readiness(ready=False)


@pytest.mark.conforms("pip-1.5", "pip-1.19", "pip-1.20")
def test_redirects_are_followed_inside_and_only_the_last_answer_goes_out(broker: Standalone) -> None:
    port = free_port()
    redirect = {
        "response": LOOKUP_REDIRECT,
        "broker_service_url": broker.service_url,
        "authoritative": True,
    }
    with FakeBroker(LookupBroker(redirect), port), cluster_before(port, broker.broker_port) as cluster:
        with WireClient(cluster.port) as client:
            client.connect()
            answer = client.lookup(TOPIC).lookup_topic_response
        assert answer.response == LOOKUP_CONNECT
        assert answer.broker_service_url == broker.service_url
        assert answer.proxy_through_service_url


def test_everything_a_client_asks_goes_on_to_the_broker() -> None:
    """Listener name and properties too, which the Java proxy drops; what the client says of others does not."""
    port = free_port()
    recorder = LookupBroker({"response": LOOKUP_FAILED, "error": ServerError.TopicNotFound, "message": "fake: none"})
    with FakeBroker(recorder, port), cluster_before(port) as cluster, WireClient(cluster.port) as client:
        client.connect()
        properties = {"key": "zone", "value": "north"}
        answer = client.lookup(TOPIC, advertised_listener_name="outside", properties=properties).lookup_topic_response
        assert (answer.error, answer.message) == (ServerError.TopicNotFound, "fake: none")
    asked = recorder.lookups[0].lookup_topic
    assert (asked.topic, asked.advertised_listener_name) == (TOPIC, "outside")
    assert (asked.properties.key, asked.properties.value) == ("zone", "north")


def test_redirects_in_a_circle_end(broker: Standalone) -> None:
    port = free_port()
    url = f"pulsar://127.0.0.1:{port}"
    circle = LookupBroker({"response": LOOKUP_REDIRECT, "broker_service_url": url})
    with FakeBroker(circle, port), cluster_before(port) as cluster, WireClient(cluster.port) as client:
        client.connect()
        answer = client.lookup(TOPIC).lookup_topic_response
        assert (answer.response, answer.error) == (LOOKUP_FAILED, ServerError.ServiceNotReady)
        assert "redirect" in answer.message
        assert 10 <= len(circle.lookups) <= 12
        cluster.wait_for_log(client.address, "redirect")


def test_a_redirect_to_where_relays_may_not_go_is_not_followed() -> None:
    """Not even a broker can make the proxy connect to an arbitrary port: no connection comes there."""
    port, visitors = free_port(), Recorder()
    with FakeBroker(visitors) as forbidden:
        url = f"pulsar://127.0.0.1:{forbidden.port}"
        elsewhere = LookupBroker({"response": LOOKUP_REDIRECT, "broker_service_url": url})
        with FakeBroker(elsewhere, port), cluster_before(port) as cluster, WireClient(cluster.port) as client:
            client.connect()
            answer = client.lookup(TOPIC).lookup_topic_response
            assert (answer.response, answer.error) == (LOOKUP_FAILED, ServerError.ServiceNotReady)
            cluster.wait_for_log(client.address, str(forbidden.port))
    assert visitors.commands == []


# ---- answers pass as they are


QUESTIONS = {
    "a namespace that does not exist": "persistent://public/no-such-namespace/topic",
    "a tenant that does not exist": "persistent://no-such-tenant/namespace/topic",
    "a name that is no topic": "persistent://a/b",
    "a topic that does not exist": "persistent://public/default/never-created",
}


@pytest.mark.parametrize("what", QUESTIONS)
def test_the_brokers_answers_pass_with_code_and_text(edge_proxy: ProxyCluster, broker: Standalone, what: str) -> None:
    """The same question, asked through the proxy and of the broker itself, gets the same answer."""
    topic = QUESTIONS[what]
    with WireClient(edge_proxy.port) as through, WireClient(broker.broker_port) as direct:
        for client in (through, direct):
            client.connect()
        assert comparable(through.partitions(topic)) == comparable(direct.partitions(topic))
        assert comparable(through.lookup(topic)) == comparable(direct.lookup(topic))


def comparable(answer: Any) -> Any:
    """An answer without what must differ: request ids, and what says that it came through a proxy."""
    result = Command()
    result.CopyFrom(answer)
    for _, body in result.ListFields():
        if hasattr(body, "request_id"):
            body.request_id = 0
    if result.HasField("lookup_topic_response"):
        for name in ("broker_service_url", "broker_service_url_tls", "proxy_through_service_url"):
            result.lookup_topic_response.ClearField(name)
    return result


@pytest.mark.conforms("pip-1.13")
def test_connected_is_the_brokers_own(edge_proxy: ProxyCluster, broker: Standalone) -> None:
    """In a relay byte for byte; in lookup mode with its limits, and of its flags those that lookups serve."""
    with WireClient(edge_proxy.port) as lookup, WireClient(edge_proxy.port) as relay:
        with WireClient(broker.broker_port) as direct:
            own = direct.connect().connected
        relayed = relay.connect(proxy_to_broker_url=f"localhost:{broker.broker_port}").connected
        lookup.connect()
        lookup.lookup(TOPIC)  # for which the lookup worker connects to the broker, whose CONNECTED it keeps
        assert relayed == own
    with WireClient(edge_proxy.port) as lookup:
        answer = lookup.connect().connected
    assert answer.max_message_size == own.max_message_size
    served = {"supports_get_partitioned_metadata_without_auto_creation": True}
    assert {descriptor.name: value for descriptor, value in answer.feature_flags.ListFields()} == served
