"""TLS on the wire: what OpenSSL's own programs may ask for in a relay, and what an eavesdropper can read."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio
from local.ports import free_port

from proto import commands
from proto.pulsar_pb2 import BaseCommand, CommandConnect, CommandConnected
from proxy.forwarder.relay.closing import SPREAD_SHARE
from proxy.runtime.network.tls_session import RECORDS_WITHOUT_DATA_MAX

from .conftest import running
from .lab.certificates import Authority, Pair
from .lab.fakes import ANSWER_LATEST_S, FAREWELL, FakeBroker, LookupBroker, connected, read_to_end, receive_command
from .lab.listeners import ManyListenersCluster
from .lab.openssl import OpenSsl, Tap
from .lab.processes import children
from .lab.schema import LOOKUP_CONNECT
from .lab.streams import FollowingStreams
from .lab.waiting import eventually
from .lab.wire import WireClient, frame
from .test_tls import TlsClient, trusting

BULK = b"".join(b"%08d" % number for number in range(40_000))
"""More than TLS puts into one record, and than a relay moves at once."""


def echo(connection: Any) -> None:
    """A broker's behaviour: says CONNECTED, then whatever it hears."""
    receive_command(connection)
    connection.sendall(connected())
    while data := connection.recv(1 << 16):
        connection.sendall(data)


@dataclass
class Scene:
    """A cluster with TLS on both sides, a broker that says what it hears, and ports where
    a broker of a test may be, and a tap before it.
    """

    cluster: ManyListenersCluster
    authority: Authority
    server: Pair
    context: ssl.SSLContext
    echo_port: int
    own_port: int
    tap_port: int

    @property
    def port(self) -> int:
        """Of the listener with TLS."""
        [port] = self.cluster.ports
        return port

    def client(self, port: int = 0) -> TlsClient:
        """A client in no mode yet, also by way of another port."""
        return TlsClient(port or self.port, trusting(self.authority))

    def relay(self, port: int = 0) -> TlsClient:
        """A client in a relay with the broker that says what it hears."""
        client = self.client(port)
        answer = client.connect(proxy_to_broker_url=f"localhost:{self.echo_port}")
        assert answer.type == BaseCommand.CONNECTED
        return client

    def s_client(self, *arguments: str, port: int = 0) -> OpenSsl:
        """OpenSSL's client, which checks the proxy's certificate."""
        trust = ("-CAfile", self.authority.file, "-verify_return_error", "-verify_hostname", "localhost")
        return OpenSsl("s_client", "-connect", f"127.0.0.1:{port or self.port}", "-brief", *trust, *arguments)

    def s_server(self) -> OpenSsl:
        """OpenSSL's server, at the test's port."""
        key = ("-cert", self.server.certificate, "-key", self.server.key)
        return OpenSsl("s_server", "-accept", f"127.0.0.1:{self.own_port}", "-tls1_3", *key)


def connect_frame(target: int) -> bytes:
    """A client's CONNECT."""
    connect = CommandConnect(client_version="openssl", protocol_version=19)
    connect.proxy_to_broker_url = f"localhost:{target}"
    return frame(BaseCommand.CONNECT, connect={name.name: value for name, value in connect.ListFields()})


@contextmanager
def scene(certificates: Path, **limits: int) -> Iterator[Scene]:
    """A cluster of which all workers run."""
    authority = Authority(certificates, "ours")
    server = authority.server("server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server.certificate, server.key)
    lookups = LookupBroker({"response": LOOKUP_CONNECT, "broker_service_url_tls": "pulsar+ssl://localhost:1"})
    with ExitStack() as stack:
        lookup_broker = stack.enter_context(FakeBroker(lookups, tls=context))
        echo_broker = stack.enter_context(FakeBroker(echo, tls=context))
        own_port, tap_port = free_port(), free_port()
        tables: dict[str, dict[str, Any]] = {
            "cluster": {"forwarders": 1},
            "brokers": {
                "service_url": f"pulsar+ssl://localhost:{lookup_broker.port}",
                "allowed_ports": [echo_broker.port, own_port, tap_port],
                "tls": {"trust": authority.file},
            },
        }
        if limits:
            tables["limits"] = limits
        tls = {"certificate": server.certificate, "key": server.key}
        cluster = stack.enter_context(running(ManyListenersCluster(tables, {"tls": tls})))
        assert isinstance(cluster, ManyListenersCluster)
        yield Scene(cluster, authority, server, context, echo_broker.port, own_port, tap_port)


@pytest.fixture(scope="module")
def on(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene(tmp_path_factory.mktemp("certificates")) as made:
        yield made


@contextmanager
def others_unharmed(on: Scene) -> Iterator[None]:
    """A relay that is there all the while goes on, with the same forwarder."""
    forwarder = on.cluster.worker_pids()["forwarder-0"]
    with on.relay() as bystander:
        yield
        assert bystander.ping().type == BaseCommand.PING, "its broker says what it hears"
    assert on.cluster.worker_pids()["forwarder-0"] == forwarder
    assert "Traceback" not in on.cluster.log_text()


# ---- what OpenSSL's programs may ask for


def test_new_keys_from_both_sides(on: Scene) -> None:
    """A KeyUpdate, with and without the wish for one of the other side: the relay goes on, and its bytes are whole."""
    with ExitStack() as stack:
        stack.enter_context(others_unharmed(on))
        near, far = stack.enter_context(Tap(on.port)), stack.enter_context(Tap(on.own_port, on.tap_port))
        broker = stack.enter_context(on.s_server())
        broker.wait_for_output(b"ACCEPT")
        client = stack.enter_context(on.s_client("-tls1_3", port=near.port))
        client.send(connect_frame(far.port))
        broker.wait_for_output(b"openssl")
        broker.send(connected())
        client.wait_for_output(b"fake broker")
        for number, (there, back) in enumerate(("Kk", "kK", "KK")):
            for end, order, sent, other in (
                (client, there, near.from_client, broker),
                (broker, back, far.from_server, client),
            ):
                end.order(order, sent)
                mark = b"%08d" % (99_000_000 + number)
                end.send(mark + BULK)
                other.wait_for_output(mark + BULK)


def in_relay(on: Scene, client: OpenSsl) -> None:
    """Have OpenSSL's client be in a relay with the broker that says what it hears."""
    client.send(connect_frame(on.echo_port))
    client.wait_for_output(b"fake broker")
    client.send(b"0123456789")
    client.wait_for_output(b"0123456789")


def in_lookup_mode(_on: Scene, client: OpenSsl) -> None:
    """Have OpenSSL's client be in lookup mode."""
    client.send(frame(BaseCommand.CONNECT, connect={"client_version": "openssl", "protocol_version": 19}))
    client.wait_for_output(b"pulsar-trio-proxy")


ENDS = {
    in_relay: ("a relay ends, since TLS has failed", "side=client"),
    in_lookup_mode: ("a client's connection ends, since TLS has failed",),
}
MODES = pytest.mark.parametrize("mode", ENDS)


@MODES
def test_a_renegotiation_is_refused(on: Scene, mode: Callable[[Scene, OpenSsl], None]) -> None:
    """Of TLS 1.2. OpenSSL's client ends then."""
    since = len(on.cluster.log_text())
    with others_unharmed(on), Tap(on.port) as tap, on.s_client("-tls1_2", port=tap.port) as client:
        mode(on, client)
        client.order("R", tap.from_client)
        client.wait_for_end()
        assert b"no renegotiation" in client.report
    on.cluster.wait_for_log(*ENDS[mode], "reason=", since=since)


@MODES
def test_many_new_keys_at_once_end_their_connection(on: Scene, mode: Callable[[Scene, OpenSsl], None]) -> None:
    """Security: each costs the proxy much more than its few bytes."""
    since = len(on.cluster.log_text())
    with others_unharmed(on), Tap(on.port) as tap, on.s_client("-tls1_3", port=tap.port) as client:
        mode(on, client)
        tap.hold()
        for _ in range(RECORDS_WITHOUT_DATA_MAX + 1):
            client.order("k", tap.held)
        tap.release()
        client.wait_for_end()
    on.cluster.wait_for_log(*ENDS[mode], "too many records without data", since=since)


def test_who_has_said_all_by_close_notify_still_hears_the_broker(on: Scene) -> None:
    """Not by TCP's end, too: the broker learns that nothing more comes, answers with a megabyte, and that arrives."""
    heard: list[bytes] = []
    may_answer = threading.Event()

    def answers_then(connection: Any) -> None:
        receive_command(connection)
        connection.sendall(connected())
        heard.append(read_to_end(connection))
        may_answer.wait(ANSWER_LATEST_S)
        connection.sendall(FAREWELL)

    with others_unharmed(on), FakeBroker(answers_then, on.own_port, tls=on.context), on.client() as client:
        assert client.connect(proxy_to_broker_url=f"localhost:{on.own_port}").type == BaseCommand.CONNECTED
        client.send_bytes(b"all there is")
        client.say_close_notify()
        eventually(lambda: heard, what="the broker has heard the end")
        may_answer.set()
        assert client.read_to_end() == FAREWELL
    assert heard == [b"all there is"]


# ---- what an eavesdropper can read

WORDS = [b"the-first-words-of-the-client", b"the-first-words-of-the-broker", b"words-in-the-relay", b"a-clients-secret"]


def speaks_at_once(connection: Any) -> None:
    """A broker's behaviour: says something right behind CONNECTED, and then whatever it hears."""
    receive_command(connection)
    connection.sendall(connected() + said(WORDS[1]))
    while data := connection.recv(1 << 16):
        connection.sendall(data)


def said(words: bytes) -> bytes:
    """A frame with these words."""
    return frame(BaseCommand.ERROR, error={"request_id": 1, "error": 0, "message": words.decode()})


@pytest.mark.parametrize("to_client", [True, False], ids=["TLS client", "plain client"])
def test_what_is_relayed_is_readable_on_no_way_with_tls(on: Scene, *, to_client: bool) -> None:
    """Neither what was sent behind CONNECT, nor what came with CONNECTED. Without TLS, a tap does read all of it."""
    port = on.port if to_client else on.cluster.port
    with (
        FakeBroker(speaks_at_once, on.own_port, tls=on.context),
        Tap(on.own_port, on.tap_port) as far,
        Tap(port) as near,
        on.client(near.port) if to_client else WireClient(near.port) as client,
    ):
        fields = {"auth_method_name": "token", "auth_data": WORDS[3], "proxy_to_broker_url": f"localhost:{on.tap_port}"}
        connect = {"client_version": "wire", "protocol_version": 19, **fields}
        client.send_bytes(frame(BaseCommand.CONNECT, connect=connect) + said(WORDS[0]))
        assert client.receive().type == BaseCommand.CONNECTED
        assert {client.receive().error.message.encode() for _ in range(2)} == set(WORDS[:2])
        client.send_bytes(said(WORDS[2]))
        assert client.receive().error.message.encode() == WORDS[2]
    readable = [words for words in (*WORDS, b"fake broker") if words in near.from_client + near.from_server]
    assert readable == ([] if to_client else [*WORDS, b"fake broker"])
    assert not [words for words in (*WORDS, b"fake broker") if words in far.from_client + far.from_server]
    assert min(map(len, (far.from_client, far.from_server))) > len(b"".join(WORDS[:3]))


@pytest.mark.parametrize("to_client", [True, False], ids=["TLS client", "plain client"])
def test_a_refusal_is_readable_on_no_way_with_tls(on: Scene, *, to_client: bool) -> None:
    """Nor what was refused."""
    target = f"{WORDS[3].decode()}.example:6650"
    port = on.port if to_client else on.cluster.port
    with Tap(port) as near, on.client(near.port) if to_client else WireClient(near.port) as client:
        refusal = client.connect(proxy_to_broker_url=target).error.message
    assert refusal
    heard = near.from_client + near.from_server
    assert {words in heard for words in (target.encode(), refusal.encode())} == {not to_client}


# ---- through an upgrade

RELAYS = 100
DRAIN_S = 20.0
BYTES = "pulsar_proxy_principal_bytes_total"


def test_a_hundred_relays_end_in_the_second_half_of_an_upgrade(tmp_path: Path) -> None:
    """Their keys are in the forwarder that they have. None of them is cut before its time is over, they end one after
    the other, and each byte of them has been counted once.
    """
    with scene(tmp_path, drain_timeout_ms=int(DRAIN_S * 1000)) as on:
        streams = FollowingStreams(
            on.port,
            RELAYS,
            pause_s_max=1.0,
            broker_port=on.own_port,
            client_tls=trusting(on.authority),
            broker_tls=on.context,
        )
        began_at_s = 0.0

        async def upgrade() -> None:
            nonlocal began_at_s
            began_at_s = trio.current_time()
            answer = await trio.to_thread.run_sync(on.cluster.command, "upgrade")
            assert answer.returncode == 0, answer.stderr
            for way in streams.ways:
                await way.over.wait()

        trio.run(streams.run, upgrade)
        eventually(lambda: len(children(on.cluster.pid, "forwarder")) == 1, what="the old forwarder has ended")
        to_broker, to_client = streams.ways[::2], streams.ways[1::2]
        assert (streams.errors, len(to_client)) == ([], RELAYS)
        assert [way for way in streams.ways if not way.is_beginning] == []
        for number, ended_after_s in enumerate(sorted(way.over_at_s - began_at_s for way in to_client)):
            assert ended_after_s >= DRAIN_S / 2 * (1 + SPREAD_SHARE * (number + 0.5) / RELAYS), number
        connected_bytes = len(commands.connected(CommandConnected(server_version="streams", protocol_version=21)))
        for direction, ways, others in (("to_broker", to_broker, 4), ("to_client", to_client, connected_bytes)):
            moved = sum(way.got_bytes for way in ways) + RELAYS * others
            on.cluster.wait_for_total(BYTES, moved, direction=direction)
        print(f"{streams.moved_bytes} bytes; the last one after {max(way.over_at_s for way in to_client) - began_at_s}")
