"""Who is asked inside a relay, and by whom, where that is configured: `session.relay_reauthentication`, and forwarded
credentials, where brokers ask, too.
"""

from __future__ import annotations

import os
import signal
import ssl
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from local.standalone import Standalone
from local.tokens import make_token

from proto.frames import Frame
from proto.pulsar_pb2 import BaseCommand

from .conftest import NO_PINGS, authentication, running
from .lab.certificates import Authority
from .lab.cluster import ProxyCluster, Tables, merged
from .lab.listeners import ManyListenersCluster
from .lab.programs import Outcome, Program, Run
from .lab.renewing import start
from .lab.schema import Command
from .lab.security import NAMESPACE, grant
from .lab.sessions import (
    DENIED,
    EXPIRED,
    FAILURE,
    KILLED,
    SUCCESS,
    Session,
    at_the_same_time,
    counting,
)
from .lab.waiting import BUSY_S, eventually
from .lab.wire import Ended

CPP = {"client_version": "Pulsar-CPP-v4.2.0"}
CANNOT_BE_ASKED = {"feature_flags": {"supports_auth_refresh": False}}


def fresh_topic() -> str:
    """One that no other test uses."""
    return f"persistent://{NAMESPACE}/{uuid.uuid4().hex[:12]}"


def warm_up(cluster: ProxyCluster, broker: Standalone, topic: str) -> None:
    """The broker has the topic from now on; a topic's first producer may take it longer than sessions live here."""
    for target in (None, broker):
        with Session(cluster, broker.token("alice"), topic, broker=target) as client:
            client.begin(**CANNOT_BE_ASKED)
            if target is None:
                client.assert_serves()


# ---- session.relay_reauthentication

LIFETIME_S = 5.0
"""Long enough for forty messages of 50 kB, also on a busy machine."""


@dataclass
class Relays:
    """A cluster with one policy, whose sessions end soon; with TLS, too."""

    cluster: ManyListenersCluster
    broker: Standalone
    context: ssl.SSLContext
    topic: str = field(default_factory=fresh_topic)

    def __post_init__(self) -> None:
        warm_up(self.cluster, self.broker, self.topic)

    def relay(self, *, tls: bool = False) -> Session:
        """Not begun."""
        secure = {"tls": self.context, "port": self.cluster.ports[0]} if tls else {}
        return Session(self.cluster, self.broker.token("alice"), self.topic, broker=self.broker, **secure)

    def lookup(self) -> Session:
        """Not begun."""
        return Session(self.cluster, self.broker.token("alice"), self.topic)


def with_policy(broker: Standalone, policy: str, directory: Path) -> Iterator[Relays]:
    """One forwarder is enough."""
    session = {"connections_max_reauth_ms": int(LIFETIME_S * 1000), "relay_reauthentication": policy}
    tables: Tables = {"cluster": {"forwarders": 1}, "session": session}
    authority = Authority(directory, "authority")
    server = authority.server("proxy")
    secure = {"tls": {"certificate": server.certificate, "key": server.key}}
    with running(cluster := ManyListenersCluster(merged(authentication(broker), tables), secure)):
        yield Relays(cluster, broker, ssl.create_default_context(cafile=authority.file))


@pytest.fixture(scope="module")
def never(secured_broker: Standalone, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relays]:
    """No client is asked in a relay."""
    yield from with_policy(secured_broker, "never", tmp_path_factory.mktemp("never"))


@pytest.fixture(scope="module")
def always(secured_broker: Standalone, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relays]:
    """Every client that supports it is asked."""
    yield from with_policy(secured_broker, "always", tmp_path_factory.mktemp("always"))


@pytest.mark.conforms("kip-368.27")
def test_the_policy_never_asks_no_client_in_a_relay(never: Relays) -> None:
    """Whoever could be asked is not, and is counted; its relay ends when it is used past its end. In lookup mode it is
    asked.
    """
    with ExitStack() as stack, counting(never.cluster, success=1, killed=6, no_reauth=6):
        kinds: list[dict[str, Any]] = [{}, CPP, {"producer": False}]
        relays = [
            stack.enter_context(never.relay(tls=tls)).begin(**fields) for fields in kinds for tls in (False, True)
        ]
        lookup = stack.enter_context(never.lookup()).begin()
        lookup.wait_for_challenge()
        lookup.answer(never.broker.token("alice"))
        for client in relays:
            client.wait_until(1.1 * LIFETIME_S)
            assert client.ping().type == BaseCommand.PONG  # and nothing came before it
            client.use()
            client.assert_ends_with(EXPIRED)
        lookup.wait_until(1.1 * LIFETIME_S)
        lookup.assert_serves()


MESSAGES = 40
MESSAGE_BYTES = 50_000
LARGE_BYTES = 1_000_000


def test_never_ends_relays_between_two_frames(never: Relays) -> None:
    """In the kernel and with TLS. What had begun by then is taken whole, and its receipt delivered, as is all that the
    broker had sent before; what comes behind it is not taken. The client was silent, and its receive buffer full.
    """
    at_the_same_time(*(partial(assert_ends_between_two_frames, never, tls=tls) for tls in (False, True)))


def assert_ends_between_two_frames(never: Relays, *, tls: bool) -> None:
    """A relay of its own, on a topic of its own."""
    on = Relays(never.cluster, never.broker, never.context)  # with another topic
    with on.relay(tls=tls) as client:
        client.begin().subscribe()
        sent = [f"message {number}".encode().ljust(MESSAGE_BYTES, b".") for number in range(MESSAGES)]
        for payload in sent:
            client.use(payload)
        client.assert_all_answered()
        client.let_come(MESSAGES)
        begun = client.next_use(b"begun".ljust(LARGE_BYTES, b"!"))
        client.send_bytes(begun[: LARGE_BYTES // 2])
        client.wait_until(1.1 * LIFETIME_S)
        client.send_bytes(begun[LARGE_BYTES // 2 :])
        with on.relay() as reader:
            reader.begin(producer=False).subscribe(permits=2 * MESSAGES)
            stored = [reader.receive_frame().payload for _ in range(MESSAGES + 1)]  # so the broker has sent the receipt
            client.use(b"too late")
            got = frames_to_the_end(client)
            assert [payload[:5] for payload in map(body_of, stored)] == [b"messa"] * MESSAGES + [b"begun"]
            assert reader.ping().type == BaseCommand.PONG  # and there is no further message
    assert [frame.payload[-MESSAGE_BYTES:] for frame in got if kind(frame) == BaseCommand.MESSAGE] == sent
    receipts = [Command.FromString(frame.command) for frame in got if kind(frame) == BaseCommand.SEND_RECEIPT]
    assert [command.send_receipt.sequence_id for command in receipts] == [MESSAGES]
    assert len(got) == MESSAGES + 2
    assert Command.FromString(got[-1].command).error.message == EXPIRED


def frames_to_the_end(client: Session) -> list[Frame]:
    """All that still come; the end is between two of them."""
    frames = []
    while True:
        try:
            frames.append(client.receive_frame())
        except Ended:
            assert client.read_to_end() == b""
            return frames


def kind(frame: Frame) -> int:
    """Its command's type."""
    return int(Command.FromString(frame.command).type)


def body_of(payload: bytes) -> bytes:
    """Without the metadata, and the size of that before it."""
    return payload[4 + int.from_bytes(payload[:4], "big") :]


def test_the_policy_always_asks_every_capable_client(always: Relays) -> None:
    """With a producer or without, built on C++ or not. A client that is asked in the middle of a frame of its own
    finishes that first.
    """
    asked: list[dict[str, Any]] = [{}, CPP, {"producer": False}, {**CPP, "producer": False}]
    with ExitStack() as stack, counting(always.cluster, success=2 * len(asked), killed=1, no_reauth=1):
        clients = [
            stack.enter_context(always.relay(tls=tls)).begin(**fields) for fields in asked for tls in (False, True)
        ]
        other = stack.enter_context(always.relay()).begin(**CANNOT_BE_ASKED)
        at_the_same_time(*(partial(asked_amid_a_frame, always, client) for client in clients))
        assert other.ping().type == BaseCommand.PONG  # and nothing came before it
        other.use()
        other.assert_ends_with(EXPIRED)


def asked_amid_a_frame(always: Relays, client: Session) -> None:
    """Its session goes on past the end that it had."""
    large = client.next_use(b"x" * LARGE_BYTES)
    client.send_bytes(large[: len(large) // 2])
    client.wait_for_challenge()
    client.send_bytes(large[len(large) // 2 :])
    client.answer(always.broker.token("alice"))
    client.wait_until(1.1 * LIFETIME_S)
    client.use()
    client.assert_all_answered()


# ---- forwarded credentials: the broker asks, too

TOKEN_LIFETIME_S = 15
"""Clients' tokens end after fourteen seconds, or nearly fifteen."""

MAXIMUM_S = 10.0
"""The clusters' own maximum, which is shorter."""

CHECK_INTERVAL_S = 4
"""How often the broker looks for tokens that have ended. Who has not answered by its next look is closed."""

ANSWERED_S = TOKEN_LIFETIME_S + 2 * CHECK_INTERVAL_S
"""By then the broker has asked, and would have closed who did not answer."""

MAXIMUM: Tables = {"session": {"connections_max_reauth_ms": int(MAXIMUM_S * 1000)}}


@dataclass
class Forwarded:
    """A cluster that passes clients' credentials on, and its broker."""

    cluster: ProxyCluster
    broker: Standalone
    topic: str = field(default_factory=fresh_topic)

    def __post_init__(self) -> None:
        warm_up(self.cluster, self.broker, self.topic)

    def token(self, role: str = "alice") -> str:
        """One that ends soon."""
        return make_token(self.broker.secret_key.read_bytes(), role, TOKEN_LIFETIME_S)

    def relay(self) -> Session:
        """Not begun."""
        return Session(self.cluster, self.token(), self.topic, broker=self.broker)

    def lookup(self) -> Session:
        """Not begun."""
        return Session(self.cluster, self.token(), self.topic)


@pytest.fixture(scope="module", autouse=True)
def asking_broker(pulsar_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Future[Standalone]]:
    """One that looks for tokens that have ended. It starts while the tests before it run."""
    conf = {
        **NO_PINGS,
        "authenticateOriginalAuthData": "true",
        "authenticationRefreshCheckSeconds": str(CHECK_INTERVAL_S),
    }
    broker = Standalone(pulsar_home, tmp_path_factory.mktemp("asking"), secured=True, conf=conf)
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(broker.__enter__)
    broker.stop()


@pytest.fixture(scope="module")
def checking_broker(asking_broker: Future[Standalone]) -> Standalone:
    """The same, once it runs."""
    broker = asking_broker.result()
    grant(broker)
    return broker


def forwarding(broker: Standalone, tables: Tables | None = None) -> Iterator[Forwarded]:
    """One forwarder is enough."""
    forwards: Tables = {"cluster": {"forwarders": 1}, "brokers": {"forward_authorization_credentials": True}}
    with running(ProxyCluster(merged(merged(authentication(broker), forwards), tables or {}))) as cluster:
        yield Forwarded(cluster, broker)


@pytest.fixture(scope="module")
def forwarded(checking_broker: Standalone) -> Iterator[Forwarded]:
    """The broker checks credentials, and there is no maximum."""
    yield from forwarding(checking_broker)


@pytest.fixture(scope="module")
def bounded(checking_broker: Standalone) -> Iterator[Forwarded]:
    """The broker checks credentials, and the cluster has a maximum, too."""
    yield from forwarding(checking_broker, MAXIMUM)


@pytest.fixture(scope="module")
def dying(checking_broker: Standalone) -> Iterator[Forwarded]:
    """The same, for forwarders that are killed."""
    yield from forwarding(checking_broker, MAXIMUM)


@pytest.fixture(scope="module")
def ignored(secured_broker: Standalone) -> Iterator[Forwarded]:
    """The broker ignores clients' credentials, and the cluster has a maximum."""
    yield from forwarding(secured_broker, MAXIMUM)


def wait_until_asked(client: Session) -> None:
    """By the broker, or by a proxy that does not know whether the broker checks credentials."""
    command = client.receive()
    assert command.type == BaseCommand.AUTH_CHALLENGE, command


def good_answers(on: Forwarded, wait: Callable[[Session], None] = wait_until_asked) -> None:
    """The connection goes on past the end of its token, and past the broker's looks after that."""
    with on.relay() as client:
        client.begin()
        while time.monotonic() < client.connected_at + ANSWERED_S:
            wait(client)
            client.answer(on.token())
            client.assert_serves()


def no_answer(on: Forwarded) -> None:
    """The broker ends an idle relay, without a word."""
    with on.relay() as client:
        client.begin()
        wait_until_asked(client)
        assert client.wait_for_end() == []


@pytest.fixture(scope="module")
def held(forwarded: Forwarded, bounded: Forwarded, ignored: Forwarded) -> Iterator[dict[str, Future[None]]]:
    """What the next three tests wait for, before one cluster each, all at the same time."""
    works = {"forwarded": partial(ask_without_a_maximum, forwarded)}
    works |= {"bounded": partial(hold_the_maximum, bounded), "ignored": partial(hold_the_maximum, ignored)}
    with ThreadPoolExecutor(len(works)) as pool:
        yield {name: pool.submit(work) for name, work in works.items()}


def test_without_a_maximum_the_broker_ends_who_does_not_answer(held: dict[str, Future[None]]) -> None:
    """Who answers goes on; in lookup mode the proxy asks."""
    held["forwarded"].result()


@pytest.mark.conforms("kip-368.24")
def test_a_maximum_holds_where_the_broker_asks_too(held: dict[str, Future[None]]) -> None:
    """The client is asked by the proxy alone. The broker, which asks at the end of each token, has the answers."""
    held["bounded"].result()


@pytest.mark.conforms("kip-368.24")
def test_a_maximum_holds_where_the_broker_ignores_credentials(held: dict[str, Future[None]]) -> None:
    """Of an answer it gets nothing: it would close the relay."""
    held["ignored"].result()


def ask_without_a_maximum(on: Forwarded) -> None:
    """A client that answers, one that does not, and one in lookup mode are asked at the same time."""
    at_the_same_time(*(partial(work, on) for work in (good_answers, no_answer, asked_in_lookup_mode)))


def hold_the_maximum(on: Forwarded) -> None:
    """Of those who answer, of one who answers as another, and of one who does not."""
    before = on.cluster.metrics()
    works = (asked_by_proxy, another_users_answer, ended_at_the_maximum)
    at_the_same_time(*(partial(work, on) for work in works))
    moved = on.cluster.metrics().moved_since(before)
    assert (moved[FAILURE], moved[KILLED]) == (1, 1)
    assert moved[SUCCESS] >= ANSWERED_S / MAXIMUM_S - 1


def asked_by_proxy(on: Forwarded) -> None:
    """And by no other worker."""
    good_answers(on, Session.wait_for_challenge)


def another_users_answer(on: Forwarded) -> None:
    """It is the proxy that ends it."""
    with on.relay() as client:
        client.begin().wait_for_challenge()
        client.answer(on.token("bob"))
        client.assert_ends_with(DENIED)


def ended_at_the_maximum(on: Forwarded) -> None:
    """Before its token ends."""
    with on.relay() as client:
        client.begin().wait_for_challenge()
        client.wait_until(1.05 * MAXIMUM_S)
        client.use()
        client.assert_ends_with(EXPIRED)


def asked_in_lookup_mode(on: Forwarded) -> None:
    """By the proxy; and what is asked from then on, is asked with the fresh token."""
    with on.lookup() as client:
        client.begin().wait_for_challenge()
        client.answer(on.token())
        client.wait_until(TOKEN_LIFETIME_S + 0.5)
        client.assert_serves()


# ---- real clients

PLAY_S = 14.0
SHORT_TOKEN_S = 4
RATE = 50

FORWARDED_PLAY_S = ANSWERED_S + CHECK_INTERVAL_S
KILL_INTERVAL_S = 4.0
TAKEN_OVER_MIN = 3
"""Times that a forwarder takes over relays which its predecessor had open when it was killed."""


def taken_over(on: Forwarded) -> int:
    """Such times so far."""
    return on.cluster.log_text().count("took over the relays of a predecessor")


@dataclass
class Played:
    """What became of one client that produced and consumed, and of its cluster's counters."""

    outcome: Outcome
    moved: dict[str, float]

    def whole(self) -> dict[str, Any]:
        """The result, in which nothing is missing or changed."""
        result = self.outcome.result
        assert result["ok"], f"{result}\n{self.outcome.log[-4000:]}"
        expected = {"missing": 0, "corrupt": 0, "send_failures": 0}
        assert {key: result[key] for key in expected} == expected, result
        assert result["received"] > PLAY_S * RATE / 4
        return dict(result)

    def without_a_reconnect(self) -> None:
        """And nothing came twice."""
        result = self.whole()
        assert (result["duplicates"], result["in_order"]) == (0, True), result
        assert self.outcome.reconnect_lines == []
        assert (self.moved.get(KILLED, 0), self.moved.get(FAILURE, 0)) == (0, 0)


def play(
    programs: list[Program], places: dict[str, Relays | Forwarded], token_s: int, meanwhile: Callable[[], None]
) -> dict[str, Played]:
    """One client of each before each cluster, all at the same time; by the names of both."""
    before = {place: on.cluster.metrics() for place, on in places.items()}
    runs: dict[tuple[str, str], Run] = {}
    with ExitStack() as stack:
        for place, on in places.items():
            for program in programs:
                options = {"size": 10_000, "rate": RATE, "lifetime_s": token_s}
                begun = start(program, on.cluster.service_url, fresh_topic(), on.broker.secret_key, **options)
                runs[program.name, place] = stack.enter_context(begun)
        for run in runs.values():
            run.wait_for_progress(1)
        meanwhile()
        with ThreadPoolExecutor(len(runs)) as pool:
            outcomes = dict(zip(runs, pool.map(Run.stop, runs.values()), strict=True))
        moved = {place: on.cluster.metrics().moved_since(before[place]) for place, on in places.items()}
    return {f"{name} {place}": Played(outcome, moved[place]) for (name, place), outcome in outcomes.items()}


@pytest.fixture(scope="module")
def played(java_client: Program, never: Relays, always: Relays) -> dict[str, Played]:
    """By the clusters without forwarded credentials."""
    places: dict[str, Relays | Forwarded] = {"never": never, "always": always}
    return play([java_client], places, SHORT_TOKEN_S, lambda: time.sleep(PLAY_S))


@pytest.fixture(scope="module")
def played_forwarded(
    every_client: list[Program], forwarded: Forwarded, bounded: Forwarded, dying: Forwarded
) -> dict[str, Played]:
    """By the others. Python's producers are never asked."""

    def kill_forwarders() -> None:
        """On a busy machine some kills find no relay that is open, so they go on until enough of them did."""
        end, give_up = time.monotonic() + FORWARDED_PLAY_S, time.monotonic() + 2 * BUSY_S
        while time.monotonic() < end or (taken_over(dying) < TAKEN_OVER_MIN and time.monotonic() < give_up):
            time.sleep(KILL_INTERVAL_S)
            pid = eventually(lambda: dying.cluster.worker_pids().get("forwarder-0", 0), what="a forwarder to kill")
            os.kill(pid, signal.SIGKILL)
        time.sleep(KILL_INTERVAL_S)

    programs = [program for program in every_client if program.name != "python"]
    if not programs:
        pytest.skip("no client here can be asked while it produces")
    places: dict[str, Relays | Forwarded] = {"forwarded": forwarded, "bounded": bounded, "dying": dying}
    return play(programs, places, TOKEN_LIFETIME_S, kill_forwarders)


def at(place: str, played: dict[str, Played]) -> list[Played]:
    """What was played before one cluster."""
    return [one for name, one in played.items() if name.endswith(f" {place}")]


def test_java_reconnects_where_it_is_never_asked(played: dict[str, Played]) -> None:
    """Its relay ends each time, gently: nothing is lost."""
    (never,) = at("never", played)
    never.whole()
    assert never.outcome.reconnect_lines
    assert never.moved[KILLED] >= PLAY_S / LIFETIME_S / 2
    assert never.moved[SUCCESS] > 0  # in lookup mode


def test_java_stays_where_it_is_always_asked(played: dict[str, Played]) -> None:
    (always,) = at("always", played)
    always.without_a_reconnect()
    assert always.moved[SUCCESS] >= 2 * (PLAY_S / LIFETIME_S - 1)  # a relay, and a connection in lookup mode


def test_clients_stay_where_the_broker_asks_them(played_forwarded: dict[str, Played]) -> None:
    for one in at("forwarded", played_forwarded):
        one.without_a_reconnect()


@pytest.mark.conforms("kip-368.24")
def test_clients_stay_where_both_ask_them(played_forwarded: dict[str, Played]) -> None:
    """The broker would have closed a relay that does not answer it."""
    for one in at("bounded", played_forwarded):
        one.without_a_reconnect()
        assert one.moved[SUCCESS] >= 2 * (FORWARDED_PLAY_S / MAXIMUM_S - 1)


def test_clients_lose_nothing_where_both_ask_them_and_forwarders_are_killed(
    played_forwarded: dict[str, Played], dying: Forwarded
) -> None:
    """Nothing comes twice, unless no worker was there to ask in time: then the client is told so, and comes back."""
    log = dying.cluster.log_text()
    ended = log.count("a client's session is being closed")
    for one in at("dying", played_forwarded):
        assert one.whole()["duplicates"] == 0 or ended
    assert taken_over(dying) >= TAKEN_OVER_MIN
    assert "failed to authenticate itself again" not in log
