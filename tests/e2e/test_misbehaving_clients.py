"""Clients that say what no client should: each gets a fitting answer, leaves a trace, and harms no other client."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from local.standalone import Standalone
from local.tokens import make_token

from proto.frames import encode_frame
from proto.pulsar_pb2 import BaseCommand, ServerError

from .conftest import running
from .lab.cluster import ProxyCluster, Tables
from .lab.counting_broker import CountingBroker
from .lab.fakes import (
    FAREWELL,
    FakeBroker,
    Flood,
    Recorder,
    SlowToConnect,
    answers_after_half_close,
    connected_with_first_bytes,
)
from .lab.schema import NO_REQUEST_ID
from .lab.waiting import BUSY_S, eventually
from .lab.wire import Ended, WireClient, frame
from .lab.witness import others_unharmed

ENDED = "pulsar_proxy_ended_connections_total"
TOPIC = "persistent://public/default/misbehaving"


def last_error(commands: list[Any]) -> tuple[int, str]:
    """Code and text of the error that ended a connection."""
    assert [command.type for command in commands] == [BaseCommand.ERROR]
    error = commands[0].error
    assert error.request_id == NO_REQUEST_ID
    return error.error, error.message


GARBAGE = {
    "a frame of 2^31-1 bytes": ((2**31 - 1).to_bytes(4, "big"), "frame_too_large"),
    "a frame of 2^32-1 bytes": (b"\xff" * 8, "frame_too_large"),
    "a frame without room for its command": ((0).to_bytes(4, "big"), "protocol_error"),
    "a command larger than its frame": (
        (100).to_bytes(4, "big") + (200).to_bytes(4, "big") + b"x" * 96,
        "protocol_error",
    ),
    "a frame that holds no command": (encode_frame(b"\xff" * 40), "protocol_error"),
    "an HTTP request": (b"GET / HTTP/1.1\r\nHost: pulsar\r\n\r\n", "frame_too_large"),
}


@pytest.mark.parametrize("what", GARBAGE)
def test_bytes_that_are_no_frame_end_the_connection_at_once(edge_proxy: ProxyCluster, what: str) -> None:
    data, cause = GARBAGE[what]
    with others_unharmed(edge_proxy) as witness, WireClient(edge_proxy.port) as client:
        client.send_bytes(data)
        code, _ = last_error(client.wait_for_end())
        assert code == ServerError.NotAllowedError
        witness.logged(client.address, cause)
        client.close()  # the proxy lingers until we do
        witness.counted(ENDED, cause=cause)


@pytest.mark.conforms("kip-368.54")
@pytest.mark.parametrize("when", ["before CONNECT", "in lookup mode"])
def test_an_oversized_frame_is_refused_by_its_header_alone(edge_proxy: ProxyCluster, when: str) -> None:
    """Nothing of the announced 2^31-1 bytes is waited for, also after a good beginning."""
    with others_unharmed(edge_proxy) as witness, WireClient(edge_proxy.port) as client:
        if when == "in lookup mode":
            assert client.connect().type == BaseCommand.CONNECTED
        client.send_bytes((2**31 - 1).to_bytes(4, "big"))
        _, text = last_error(client.wait_for_end())
        assert str(2**31 - 1) in text
        witness.logged(client.address, str(2**31 - 1))
        client.close()  # the proxy lingers until we do
        witness.counted(ENDED, cause="frame_too_large")


@pytest.mark.conforms("kip-368.53")
@pytest.mark.parametrize("when", ["at once", "in lookup mode"])
def test_1024_random_bytes_harm_no_other_client(edge_proxy: ProxyCluster, when: str) -> None:
    """Twenty times, from a fixed seed; every connection ends within the handshake's time limit."""
    noise = random.Random(20261121)
    with others_unharmed(edge_proxy) as witness:
        for _ in range(20):
            with WireClient(edge_proxy.port) as client:
                if when == "in lookup mode":
                    assert client.connect().type == BaseCommand.CONNECTED
                client.send_bytes(noise.randbytes(1024))
                client.wait_for_end()
                witness.logged(client.address)
        witness.counted(ENDED)


def test_a_client_that_never_says_connect_is_closed(edge_proxy: ProxyCluster) -> None:
    """After handshake_timeout_ms, 2.5 s here, and not much before; without a word, since it may speak no Pulsar."""
    with others_unharmed(edge_proxy) as witness, WireClient(edge_proxy.port) as client:
        began_at = time.monotonic()
        assert client.wait_for_end() == []
        assert time.monotonic() - began_at > 2.0
        witness.logged(client.address, "handshake")
        client.close()  # the proxy lingers until we do
        witness.counted(ENDED, cause="handshake_timeout")


def test_a_client_that_stops_within_connect_is_closed(edge_proxy: ProxyCluster) -> None:
    """Half a CONNECT is no CONNECT, and PINGs do not prolong the time."""
    with others_unharmed(edge_proxy) as witness, WireClient(edge_proxy.port) as client:
        assert client.ping().type == BaseCommand.PONG
        client.send_bytes(frame(BaseCommand.CONNECT, connect={"client_version": "half", "protocol_version": 19})[:-3])
        client.wait_for_end()
        witness.logged(client.address, "handshake")
        client.close()  # the proxy lingers until we do
        witness.counted(ENDED, cause="handshake_timeout")


def test_a_producer_in_lookup_mode_is_refused_and_the_connection_goes_on(edge_proxy: ProxyCluster) -> None:
    """The Java proxy closes without a word; here the request gets its answer, with its own id."""
    with others_unharmed(edge_proxy) as witness, WireClient(edge_proxy.port) as client:
        client.connect()
        answer = client.producer(TOPIC)
        assert answer.type == BaseCommand.ERROR
        assert answer.error.error == ServerError.NotAllowedError
        assert 0 < answer.error.request_id < NO_REQUEST_ID
        assert client.lookup(TOPIC).lookup_topic_response.proxy_through_service_url
        witness.logged(client.address, "PRODUCER")
        witness.counted("pulsar_proxy_refused_commands_total")


def test_ping_is_answered_before_and_after_connect(edge_proxy: ProxyCluster) -> None:
    with WireClient(edge_proxy.port) as client:
        assert client.ping().type == BaseCommand.PONG
        client.connect()
        assert client.ping().type == BaseCommand.PONG


def test_a_second_connect_ends_the_connection(edge_proxy: ProxyCluster) -> None:
    """In lookup mode it is out of turn. (In a relay the broker handles it.)"""
    with others_unharmed(edge_proxy) as witness, WireClient(edge_proxy.port) as client:
        client.connect()
        client.send_connect()
        code, text = last_error(client.wait_for_end())
        assert (code, "CONNECT" in text) == (ServerError.NotAllowedError, True)
        witness.logged(client.address, "CONNECT")
        client.close()  # the proxy lingers until we do
        witness.counted(ENDED, cause="not_allowed")


def test_a_client_must_not_claim_to_be_a_proxy(edge_proxy: ProxyCluster) -> None:
    with others_unharmed(edge_proxy) as witness, WireClient(edge_proxy.port) as client:
        client.send_connect(proxy_version="a proxy before a proxy")
        expected = (ServerError.NotAllowedError, "Must not provide proxyVersion")
        assert last_error(client.wait_for_end()) == expected
        witness.logged(client.address, "Must not provide proxyVersion")
        client.close()  # the proxy lingers until we do
        witness.counted(ENDED, cause="not_allowed")


def test_the_brokers_connect_is_the_clients_without_its_claims(edge_proxy: ProxyCluster, fake_port: int) -> None:
    """Version and feature flags pass; credentials, target and original principal do not."""
    recorder = Recorder()
    flags = {"supports_auth_refresh": True, "supports_partial_producer": True, "newer_than_the_proxy": True}
    with FakeBroker(recorder, fake_port), WireClient(edge_proxy.port) as client:
        client.connect(
            proxy_to_broker_url=f"localhost:{fake_port}",
            token="the client's own",
            original_principal="admin",
            original_auth_data="the admin's",
            original_auth_method="token",
            feature_flags=flags,
            client_version="Some-Client-v1",
        )
    connect = recorder.commands[0].connect
    assert (connect.client_version, connect.protocol_version) == ("Some-Client-v1", 19)
    told_flags = {descriptor.name: value for descriptor, value in connect.feature_flags.ListFields()}
    assert told_flags == flags
    for dropped in ("auth_data", "proxy_to_broker_url", "original_principal", "original_auth_data"):
        assert not connect.HasField(dropped), dropped
    assert connect.proxy_version


@pytest.mark.conforms("pip-1.17")
def test_half_close_still_delivers_what_the_broker_says(edge_proxy: ProxyCluster, fake_port: int) -> None:
    """The client ends its direction; the end reaches the broker, and 1 MiB that the broker then sends arrives."""
    with FakeBroker(answers_after_half_close, fake_port), WireClient(edge_proxy.port) as client:
        assert client.connect(proxy_to_broker_url=f"127.0.0.1:{fake_port}").type == BaseCommand.CONNECTED
        client.send_bytes(b"x" * 1000)
        client.end_sending()
        assert client.read_to_end() == (1000).to_bytes(8, "big") + FAREWELL


def test_bytes_in_flight_arrive_after_the_client_has_gone(edge_proxy: ProxyCluster, fake_port: int) -> None:
    """The client sends 1 MiB and closes for good; the broker gets all of it, then the end."""
    recorder = Recorder()
    with FakeBroker(recorder, fake_port):
        with WireClient(edge_proxy.port) as client:
            client.connect(proxy_to_broker_url=f"127.0.0.1:{fake_port}")
            client.send_bytes(FAREWELL)
        eventually(lambda: recorder.ended, what="the broker sees the end")
    assert recorder.heard == FAREWELL


def test_a_client_that_does_not_read_makes_the_broker_wait(edge_proxy: ProxyCluster, fake_port: int) -> None:
    """200 MB wait for a reader in the kernels' buffers and at the broker, not in the forwarder's memory."""
    pid = edge_proxy.worker_pids()["forwarder-0"]
    flood = Flood()
    with FakeBroker(flood, fake_port), WireClient(edge_proxy.port) as client, WireClient(edge_proxy.port) as other:
        before_kib = resident_kib(pid)
        client.connect(proxy_to_broker_url=f"127.0.0.1:{fake_port}")
        eventually(flood.stalls, what="the broker cannot go on", every_s=0.3)
        assert other.connect().type == BaseCommand.CONNECTED
        assert flood.sent < 100_000_000
        assert resident_kib(pid) - before_kib < 20_000


def resident_kib(pid: int) -> int:
    """A process's resident memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])


def test_limits_on_connections(broker: Standalone) -> None:
    """Above max_connections the next is turned away with an error; when one has left, the next comes in."""
    brokers = {"service_url": broker.service_url, "allowed_ports": [broker.broker_port]}
    tables: Tables = {"cluster": {"forwarders": 2}, "brokers": brokers, "limits": {"max_connections": 3}}
    with running(ProxyCluster(tables)) as cluster:
        inside: list[WireClient] = []
        for _ in range(3):  # one by one: those that say nothing give way to newcomers
            inside.append(WireClient(cluster.port))
            assert inside[-1].connect().type == BaseCommand.CONNECTED
        with WireClient(cluster.port) as fourth:
            code, text = last_error(fourth.wait_for_end())
            assert code == ServerError.NotAllowedError
            assert "connections" in text
            cluster.wait_for_log(fourth.address, "max_connections")
        name = "pulsar_proxy_rejected_connections_total"
        cluster.wait_for_total(name, 1, reason="max_connections")
        inside.pop().close()
        eventually(lambda: comes_in(cluster), what="a place is free again")
        for client in inside:
            assert client.ping().type == BaseCommand.PONG
            client.close()


def comes_in(cluster: ProxyCluster) -> bool:
    """Whether a newcomer gets CONNECTED."""
    with WireClient(cluster.port) as client:
        try:
            return bool(client.connect().type == BaseCommand.CONNECTED)
        except (Ended, OSError):
            return False


OWNERS = {
    "principals at one address": (("127.0.0.1", "alice"), ("127.0.0.1", "bob")),
    "addresses of the anonymous role": (("127.0.0.2", ""), ("127.0.0.3", "")),
    "a principal and an address": (("127.0.0.1", "alice"), ("127.0.0.1", "")),
    "principals, after a kill": (("127.0.0.1", "alice"), ("127.0.0.1", "bob")),
}
"""The address and the principal of the client that holds all connections, and of another one."""


@pytest.mark.parametrize("pair", OWNERS)
def test_the_owner_of_all_connections_gives_way_to_another_until_both_have_half(pair: str, tmp_path: Path) -> None:
    (key := tmp_path / "secret.key").write_bytes(b"k" * 32)
    with FakeBroker(CountingBroker()) as fake:
        broker = f"127.0.0.1:{fake.port}"
        tables: Tables = {
            "cluster": {"forwarders": 1},
            "brokers": {"service_url": f"pulsar://{broker}", "allowed_ports": [fake.port]},
            "authentication": {"enabled": True, "anonymous_role": "guest", "token": {"secret_key": str(key)}},
            "limits": {"max_connections": 16},
        }
        with running(ProxyCluster(tables)) as cluster, contextlib.ExitStack() as stack:

            def come(address: str, principal: str, **fields: str) -> tuple[WireClient, Any]:
                client = stack.enter_context(WireClient(cluster.port, source=address))
                token = {"token": make_token(key.read_bytes(), principal)} if principal else {}
                return client, client.connect(**token, **fields)

            one, other = OWNERS[pair]
            lookup: dict[str, str] = {}
            relay = {"proxy_to_broker_url": broker}
            kinds = [relay, relay if "kill" in pair else lookup] * 8
            first = [come(*one, **kind) for kind in kinds]
            if "kill" in pair:
                os.kill(cluster.worker_pids()["forwarder-0"], signal.SIGKILL)
                cluster.wait_for_total("pulsar_proxy_adopted_relays_total", 16)
            second = [come(*other, **kind) for kind in kinds[:8]]
            assert {answer.type for _, answer in (*first, *second)} == {BaseCommand.CONNECTED}
            for owner in (one, other):
                _, refused = come(*owner)
                assert (refused.error.error, refused.type) == (ServerError.NotAllowedError, BaseCommand.ERROR)
            for client, _ in first[8:]:
                client.wait_for_end()
            for client, _ in (*first[:8], *second):
                assert client.ping().type == BaseCommand.PONG
            assert cluster.metrics().total(ENDED, cause="over_share") == 8
            cluster.wait_for_total("pulsar_proxy_rejected_connections_total", 2, reason="max_connections")
            cluster.wait_for_log(first[15][0].address, "closed for another client's")


def test_bytes_behind_connected_are_the_relays_first(edge_proxy: ProxyCluster, fake_port: int) -> None:
    with FakeBroker(connected_with_first_bytes, fake_port), WireClient(edge_proxy.port) as client:
        assert client.connect(proxy_to_broker_url=f"127.0.0.1:{fake_port}").type == BaseCommand.CONNECTED
        assert [client.receive().type for _ in range(3)] == [BaseCommand.PING] * 3


def test_a_client_in_a_hurry_loses_nothing(edge_proxy: ProxyCluster, fake_port: int) -> None:
    """What it sends before the broker said Connected waits for that, then goes on. The Java proxy drops it."""
    slow = SlowToConnect()
    producers = b"".join(frame(BaseCommand.PRODUCER, producer={"topic": TOPIC, "request_id": i}) for i in range(1, 4))
    with FakeBroker(slow, fake_port), WireClient(edge_proxy.port) as client:
        client.send_connect(proxy_to_broker_url=f"localhost:{fake_port}")
        assert slow.asked.wait(BUSY_S)
        client.send_bytes(producers)
        client.end_sending()
        slow.may_answer.set()
        assert client.receive().type == BaseCommand.CONNECTED
        client.wait_for_end()
    assert slow.heard == producers


def test_an_old_client_is_told_that_it_is_too_old(edge_proxy: ProxyCluster) -> None:
    with others_unharmed(edge_proxy) as witness, WireClient(edge_proxy.port) as client:
        client.send_connect(protocol_version=9)
        code, _ = last_error(client.wait_for_end())
        assert code == ServerError.UnsupportedVersionError
        witness.logged(client.address, "version")
        client.close()  # the proxy lingers until we do
        witness.counted(ENDED, cause="not_allowed")
