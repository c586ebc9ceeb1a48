"""Clients that try to get round the end of their session: commands that begin as other ones, and saying nothing while
being served. Relays in the kernel and with TLS, and lookup mode, before a real broker.
"""

from __future__ import annotations

import os
import signal
import ssl
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
from local.standalone import Standalone

from proto.frames import Frame, encode_frame
from proto.pulsar_pb2 import BaseCommand

from .conftest import authentication, running
from .lab.certificates import Authority
from .lab.cluster import ProxyCluster, Tables, merged
from .lab.listeners import ManyListenersCluster
from .lab.schema import Command
from .lab.security import NAMESPACE
from .lab.sessions import EXPIRED, Session, counting, lookup_frame
from .lab.waiting import eventually

LIFETIME_S = 3.0
GRACE_S = 8.0
"""Long enough for what must happen before them, also on a busy machine."""

PERMITS = 1000
MESSAGES = "pulsar_proxy_principal_messages_total"
CORRUPT = "The proxy closes this connection: what was sent is no frame of a Pulsar client's or broker's"
FOLLOWED = "a relay's frames cannot be followed"


@dataclass
class Stage:
    """A cluster whose sessions end soon; no client is asked in a relay. Messages are counted."""

    cluster: ManyListenersCluster
    broker: Standalone
    context: ssl.SSLContext
    topic: str = field(default_factory=lambda: f"persistent://{NAMESPACE}/{uuid.uuid4().hex[:12]}")

    def session(self, *, relay: bool = True, tls: bool = False, who: str = "alice") -> Session:
        """One that has not begun."""
        secure = {"tls": self.context, "port": self.cluster.ports[0]} if tls else {}
        return Session(
            self.cluster, self.broker.token(who), self.topic, broker=self.broker if relay else None, **secure
        )

    def __post_init__(self) -> None:
        """The broker has the topic from now on; its first producer may take longer than sessions live here."""
        with self.endless() as client:
            client.begin().assert_serves()
        self.produce(b"first")

    def endless(self, **target: Standalone) -> Session:
        """One whose session has no end, which has not begun."""
        port = self.cluster.ports[1]
        return Session(self.cluster, self.broker.token("alice"), self.topic, port=port, **target)

    def produce(self, payload: bytes) -> None:
        """By a client of its own."""
        with self.endless(broker=self.broker) as producer:
            producer.begin().use(payload)
            producer.assert_all_answered()


@pytest.fixture(scope="module")
def stage(secured_broker: Standalone, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    session = {
        "connections_max_reauth_ms": int(LIFETIME_S * 1000),
        "relay_reauthentication": "never",
        "grace_ms": int(GRACE_S * 1000),
    }
    if os.environ.get("BEFORE_GRACE"):  # to measure a version that does not know it
        del session["grace_ms"]
    tables: Tables = {"cluster": {"forwarders": 1}, "session": session, "metrics": {"count_messages": True}}
    authority = Authority(tmp_path_factory.mktemp("authority"), "authority")
    server = authority.server("proxy")
    secure = {"tls": {"certificate": server.certificate, "key": server.key}}
    endless = {"connections_max_reauth_ms": 0}
    with running(cluster := ManyListenersCluster(merged(authentication(secured_broker), tables), secure, endless)):
        yield Stage(cluster, secured_broker, ssl.create_default_context(cafile=authority.file))


# ---- a command that begins as another one

PING = b"\x08\x12"


def _in_front(command: bytes) -> bytes:
    return PING + command


def _whole_in_front(command: bytes) -> bytes:
    return PING + b"\x92\x01\x00" + command


def _reaching_out(command: bytes) -> bytes:
    """Pulsar's parser reads a field to its end, though the message that it is in ends before, and then goes on. To
    protobuf the whole is a PING with an unknown field, behind which there is nothing.
    """
    return PING + b"\x92\x01\x02" + b"\x7a\x04" + b"four" + command


DISGUISES: list[Callable[[bytes], bytes]] = [_in_front, _whole_in_front, _reaching_out]


def disguised(frame: bytes, disguise: Callable[[bytes], bytes]) -> bytes:
    """The same command to the broker; to a reader of its beginning a PING."""
    size = int.from_bytes(frame[4:8], "big")
    return encode_frame(disguise(frame[8 : 8 + size]), frame[8 + size :])


def assert_is_corrupt(client: Session, since: int) -> None:
    """It is told so, and the operator sees who it was."""
    (error,) = client.wait_for_end()
    assert (error.type, error.error.message) == (BaseCommand.ERROR, CORRUPT), error
    client.cluster.wait_for_log(FOLLOWED, "alice", client.address, since=since)


def test_a_send_that_begins_as_a_ping_does_not_pass_the_end(stage: Stage) -> None:
    since = len(stage.cluster.log_text())
    with ExitStack() as stack:
        clients = [
            (stack.enter_context(stage.session(tls=tls)).begin(), disguise)
            for disguise in DISGUISES
            for tls in (False, True)
        ]
        for client, _ in clients:
            client.assert_serves()
        for client, disguise in clients:
            client.wait_until(1.1 * LIFETIME_S)
            client.send_bytes(disguised(client.next_use(), disguise))
            assert_is_corrupt(client, since)


def test_nor_is_it_left_uncounted(stage: Stage) -> None:
    """Within the session: it does not reach the broker, so every message that does is counted."""
    since = len(stage.cluster.log_text())

    def counted() -> float:
        return stage.cluster.metrics().total(MESSAGES, direction="to_broker")

    before = counted()  # a scrape may take a second, which the session has not
    for disguise in DISGUISES:
        for tls in (False, True):
            with stage.session(tls=tls) as client:
                client.begin()
                client.assert_serves()
                client.send_bytes(disguised(client.next_use(), disguise))
                assert_is_corrupt(client, since)
    came = 2 * len(DISGUISES)
    eventually(lambda: counted() == before + came, what=f"the {came} messages that came are counted")


def test_a_lookup_that_begins_as_a_ping_is_not_answered(stage: Stage) -> None:
    """Nor one that is several commands: before the end and past it."""
    question = lookup_frame(stage.topic, 7)
    whole = question[8:]
    attacks = [
        *(disguised(question, disguise) for disguise in DISGUISES),
        encode_frame(whole + PING),
        encode_frame(whole[2:] + whole[:2]),
    ]
    for age_s in (0.0, 1.1 * LIFETIME_S):
        with ExitStack() as stack:
            clients = [stack.enter_context(stage.session(relay=False)) for _ in attacks]
            for client in clients:
                client.begin(feature_flags={"supports_auth_refresh": False})
            for client, attack in zip(clients, attacks, strict=True):
                client.wait_until(age_s)
                client.send_bytes(attack)
                (error,) = client.wait_for_end()
                assert error.type == BaseCommand.ERROR, error
                assert error.error.message == EXPIRED or error.error.message.startswith("Not Pulsar")


def test_past_the_end_a_ping_is_a_ping_byte_for_byte(stage: Stage) -> None:
    """One that carries something along is use."""
    with ExitStack() as stack, counting(stage.cluster, killed=3, no_reauth=3):
        sessions = (stage.session(), stage.session(tls=True), stage.session(relay=False))
        clients = [stack.enter_context(session) for session in sessions]
        for client in clients:
            client.begin(feature_flags={"supports_auth_refresh": False})
        for client in clients:
            client.wait_until(1.1 * LIFETIME_S)
            assert client.ping().type == BaseCommand.PONG
            client.send_bytes(Frame(PING + b"\x92\x01\x00", b"a passenger").encode())
            client.assert_ends_with(EXPIRED)


# ---- a command that has begun in time

BULK = b"x" * 100_000


def begin_slowly(client: Session) -> bytes:
    """The first half of a message passes; return the rest."""
    whole = client.next_use(BULK)
    client.send_bytes(whole[: len(whole) // 2])
    return whole[len(whole) // 2 :]


def test_a_send_begun_in_time_is_cut_off_past_the_grace(stage: Stage) -> None:
    """Its bulk does not reach the broker; one that ends within the grace is received."""
    with ExitStack() as stack, counting(stage.cluster, killed=2, no_reauth=4):
        slow, in_time = (
            [stack.enter_context(stage.session(tls=tls)).begin() for tls in (False, True)] for _ in range(2)
        )
        rests = {client: begin_slowly(client) for client in (*slow, *in_time)}
        for client in in_time:
            client.wait_until(1.1 * LIFETIME_S)
            client.send_bytes(rests[client])
            client.assert_all_answered()
        for client in slow:
            client.wait_until(LIFETIME_S + GRACE_S + 0.5)
            client.send_bytes(rests[client])
            (error,) = client.wait_for_end()
            assert (error.type, error.error.message) == (BaseCommand.ERROR, EXPIRED), error


# ---- a client that says nothing, and is served


def consumer(stage: Stage, *, tls: bool = False) -> Session:
    """With more permits than it will ever need."""
    client = stage.session(tls=tls).begin(producer=False)
    return client.subscribe(PERMITS)


def messages(client: Session, count: int) -> None:
    """So many are delivered; PINGs of the broker's are answered."""
    while count:
        command = client.receive()
        if command.type == BaseCommand.PING:
            client.send(BaseCommand.PONG, pong={})
        else:
            assert command.type == BaseCommand.MESSAGE, command
            count -= 1


def assert_is_let_go(client: Session) -> None:
    """It is told why, behind what was on its way to it."""
    *delivered, error = client.wait_for_end()
    assert {command.type for command in delivered} <= {BaseCommand.MESSAGE, BaseCommand.PING}
    assert (error.type, error.error.message) == (BaseCommand.ERROR, EXPIRED)


@pytest.mark.conforms("kip-368.23")
def test_a_consumer_that_only_answers_pings_is_served_no_longer_than_its_grace(stage: Stage) -> None:
    """With permits from before its end; one to whom nothing is sent is left alone."""
    with ExitStack() as stack, counting(stage.cluster, killed=2, no_reauth=3):
        idle = stack.enter_context(stage.session()).begin(producer=False)
        consumers = [stack.enter_context(consumer(stage, tls=tls)) for tls in (False, True)]
        backlog = drained(consumers)
        for client in consumers:
            client.wait_until(1.1 * LIFETIME_S)
        stage.produce(b"within its grace")
        for client in consumers:
            messages(client, 1)
            client.wait_until(LIFETIME_S + GRACE_S + 0.5)
            assert client.ping().type == BaseCommand.PONG
        assert backlog >= 0
        stage.produce(b"past it")
        for client in consumers:
            assert_is_let_go(client)
        assert idle.ping().type == BaseCommand.PONG
    stage.cluster.wait_for_log("a client's session is being closed", "still_served", "alice")


def drained(consumers: list[Session]) -> int:
    """How many messages of earlier tests each had to take first: a PONG comes when there are no more."""
    counts = []
    for client in consumers:
        time.sleep(0.2)
        client.send(BaseCommand.PING, ping={})
        kinds = []
        while not kinds or kinds[-1] != BaseCommand.PONG:
            kinds.append(client.receive().type)
        assert set(kinds[:-1]) <= {BaseCommand.MESSAGE}
        counts.append(len(kinds) - 1)
    return sum(counts)


def test_a_successor_knows_the_grace(stage: Stage) -> None:
    """The forwarder is killed past the session's end: the relay goes on, and ends as it would have."""
    on = Stage(stage.cluster, stage.broker, stage.context)  # with another topic
    with consumer(on) as client:
        drained([client])
        client.wait_until(1.1 * LIFETIME_S)
        pid = forwarder(on.cluster)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: forwarder(on.cluster) not in {0, pid}, what="there is a successor")
        assert client.ping().type == BaseCommand.PONG
        client.wait_until(LIFETIME_S + GRACE_S + 0.5)
        assert client.ping().type == BaseCommand.PONG
        on.produce(b"past it")
        assert_is_let_go(client)
        on.cluster.wait_for_log("a client's session is being closed", "still_served", client.address)


def forwarder(cluster: ProxyCluster) -> int:
    """Its process id; 0: there is none now."""
    return next((pid for name, pid in cluster.worker_pids().items() if name.startswith("forwarder-")), 0)


def test_the_schema_of_the_lab_is_the_clients() -> None:
    """What is disguised here is what the lab's clients write: the type first."""
    assert Command(type=BaseCommand.PING, ping={}).SerializeToString() == PING + b"\x92\x01\x00"
