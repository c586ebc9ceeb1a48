"""Sessions that end and are renewed (KIP-368), with a real broker and real clients whose tokens end soon."""

from __future__ import annotations

import ssl
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from local.standalone import Standalone
from local.tokens import make_token

from proto.pulsar_pb2 import BaseCommand

from .conftest import authentication, running
from .lab.certificates import Authority
from .lab.cluster import ProxyCluster, Tables, merged
from .lab.metrics import Scrape
from .lab.programs import Outcome, Program, Run
from .lab.renewing import TOKEN_LIFETIME_S, start
from .lab.security import NAMESPACE, bad_tokens
from .lab.sessions import (
    DENIED,
    EXPIRED,
    FAILURE,
    KILLED,
    NO_REAUTH,
    SUCCESS,
    Session,
    auth_response,
    challenged_after_s,
    counting,
    lookup_frame,
)

NEW = "pulsar_proxy_new_connections_total"

# ---- on the wire

LIFETIME_S = 8.0
"""The clusters of these tests let no session live longer, whatever its token says. A client that is asked at 95 % of it
has 0.4 s left; with half of that, an answer behind a hundred lookups once came too late on a busy machine.
"""

INTERVAL_S = 1.05
"""No client may answer unasked more often than once a second."""

TOPIC = f"persistent://{NAMESPACE}/sessions"


@dataclass
class Stage:
    """Two clusters whose sessions end soon, the second one with TLS, and their broker.

    All tests are about connections in lookup mode, relays in the kernel, and relays with TLS, all three at a time.
    """

    plain: ProxyCluster
    secure: ProxyCluster
    context: ssl.SSLContext
    broker: Standalone

    def lookup(self) -> Session:
        """In lookup mode; it has not begun."""
        return Session(self.plain, self.broker.token("alice"), TOPIC)

    def relay(self) -> Session:
        """A relay."""
        return Session(self.plain, self.broker.token("alice"), TOPIC, broker=self.broker)

    def secure_relay(self) -> Session:
        """One with TLS."""
        return Session(self.secure, self.broker.token("alice"), TOPIC, broker=self.broker, tls=self.context)

    def all_kinds(self, stack: ExitStack) -> list[Session]:
        """One of each, not begun."""
        return [stack.enter_context(kind()) for kind in (self.lookup, self.relay, self.secure_relay)]

    def counting(self, **expected: int) -> AbstractContextManager[None]:
        """What each of KIP-368's counters rises by in the block."""
        return counting(self.plain, self.secure, **expected)

    @property
    def logs(self) -> str:
        """Of both."""
        return self.plain.log_text() + self.secure.log_text()


@pytest.fixture(scope="module")
def stage(secured_broker: Standalone, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """The listener's maximum counts before the one of all."""
    authority = Authority(tmp_path_factory.mktemp("sessions"), "authority")
    server = authority.server("proxy")
    maximum = {"connections_max_reauth_ms": int(LIFETIME_S * 1000)}
    plain: Tables = {
        "session": {"connections_max_reauth_ms": 3_600_000},
        "listener": maximum,
        "authentication": {"failure_delay_ms": 100},
    }
    secure: Tables = {"listener": {"tls": {"certificate": server.certificate, "key": server.key}}}
    tables = merged(authentication(secured_broker), plain)
    context = ssl.create_default_context(cafile=authority.file)
    with running(ProxyCluster(tables)) as one, running(ProxyCluster(merged(tables, secure))) as other:
        on = Stage(one, other, context, secured_broker)
        for kind in (on.lookup, on.relay):
            with kind() as client:
                client.begin().assert_serves()  # whereupon the broker has the topic
        yield on


@pytest.mark.conforms("kip-368.12", "kip-368.13")
def test_every_client_is_challenged_and_none_before_85_percent(stage: Stage) -> None:
    """The tokens never end; the listener's maximum does. (How challenges spread is for tests without a real clock.)"""
    with ExitStack() as stack, stage.counting():
        clients = [client for _ in range(10) for client in stage.all_kinds(stack)]
        after_s = challenged_after_s([client.begin(producer=False) for client in clients])
    assert min(after_s) >= 0.85 * LIFETIME_S


@pytest.mark.conforms("kip-368.18", "kip-368.25")
def test_two_renewals_in_one_connection(stage: Stage) -> None:
    with ExitStack() as stack, stage.counting(success=6):
        clients = [client.begin() for client in stage.all_kinds(stack)]
        for _ in range(2):
            for client in clients:
                client.wait_for_challenge()
                client.answer(stage.broker.token("alice"))
            for client in clients:
                client.assert_serves()
        assert all(time.monotonic() - client.connected_at > LIFETIME_S for client in clients)


@pytest.mark.conforms("kip-368.50")
def test_lookups_in_flight_are_all_answered(stage: Stage) -> None:
    """Some before the answer, some behind it; all are sent at once. Each is answered once."""
    with stage.lookup() as client, stage.counting(success=1):
        client.begin().assert_serves()
        client.wait_for_challenge()
        questions = [lookup_frame(TOPIC, number) for number in range(200)]
        answer = auth_response(stage.broker.token("alice").encode())
        client.send_bytes(b"".join([*questions[:100], answer, *questions[100:]]))
        answers = [client.receive().lookup_topic_response for _ in questions]
        assert sorted((answer.request_id, answer.error) for answer in answers) == [(number, 0) for number in range(200)]


@pytest.mark.conforms("kip-368.20", "kip-368.21", "kip-368.27", "kip-368.51")
def test_an_idle_session_is_left_alone_and_ends_when_it_is_used(stage: Stage) -> None:
    """Its client does not answer its challenge, or cannot be asked, which is counted. Long after its end it has its
    PONGs; the first use is its last, and harms no other session.
    """
    with ExitStack() as stack, stage.counting(no_reauth=3, killed=6):
        asked = [client.begin() for client in stage.all_kinds(stack)]
        unasked = [client.begin(feature_flags={"supports_auth_refresh": False}) for client in stage.all_kinds(stack)]
        for client in unasked:
            client.assert_serves()
        for client in asked:
            client.wait_for_challenge()
        clients = [*asked, *unasked]
        for client in clients:
            client.wait_until(1.1 * LIFETIME_S)
            assert client.ping().type == BaseCommand.PONG  # and nothing came before it
        others = [client.begin() for client in stage.all_kinds(stack)]
        for client in clients:
            client.use()
        for other in others:
            other.assert_serves()
        for client in clients:
            client.assert_ends_with(EXPIRED)


def test_a_static_token_ends_its_session(stage: Stage) -> None:
    """A token that ends before the second session would: the client says the same one each time that it is asked."""
    token = make_token(stage.broker.secret_key.read_bytes(), "alice", 6)
    with ExitStack() as stack:
        clients = stage.all_kinds(stack)
        for client in clients:
            client.begin(token=token)
        with ThreadPoolExecutor(len(clients)) as pool:
            ends = list(pool.map(lambda client: client.goes_on_until_it_ends(token), clients))
    assert set(ends) <= {EXPIRED, DENIED}, ends  # as the last challenge came before or after the token's end
    assert token.split(".")[2] not in stage.logs


WRONG_ANSWERS = {
    "another principal": "another_principal",
    "another method": "another_method",
    "signed with another key": "",
    "expired": "",
    "not a token": "",
    "empty": "",
}
"""What is wrong, and where the forwarder itself knows it, the word for it."""


def wrong_answer(broker: Standalone, what: str) -> tuple[str, str]:
    """Credentials and method."""
    others = {"another principal": (broker.token("bob"), "token"), "another method": (broker.token("alice"), "basic")}
    return others[what] if what in others else (bad_tokens(broker)[what], "token")


@pytest.mark.conforms("kip-368.15", "kip-368.47", "kip-368.48")
@pytest.mark.parametrize("asked", [True, False], ids=["asked", "unasked"])
def test_a_wrong_answer_ends_the_session(stage: Stage, *, asked: bool) -> None:
    """At once and for good. The log says why, the client does not read it, and the credentials are nowhere."""
    answers = {what: wrong_answer(stage.broker, what) for what in WRONG_ANSWERS}
    many = 3 * len(WRONG_ANSWERS)
    with ExitStack() as stack, stage.counting(failure=many, no_reauth=0 if asked else many):
        clients = [
            (what, client.begin(feature_flags={"supports_auth_refresh": asked}))
            for what in WRONG_ANSWERS
            for client in stage.all_kinds(stack)
        ]
        for what, client in clients:
            if asked:
                client.wait_for_challenge()
            else:
                client.wait_until(INTERVAL_S)
            client.answer(*answers[what])
        for what, client in clients:
            client.assert_ends_with(DENIED)
            client.cluster.wait_for_log("failed to authenticate itself again", client.address, WRONG_ANSWERS[what])
    said = [credentials for credentials, _ in answers.values() if credentials.count(".") == 2]
    assert [token for token in said if token.split(".")[2] in stage.logs] == []


@pytest.mark.conforms("kip-368.9", "kip-368.49")
def test_a_client_may_come_unasked_once_a_second(stage: Stage) -> None:
    alice = stage.broker.token("alice")
    unasked = {"supports_auth_refresh": False}
    with ExitStack() as stack, stage.counting(success=6, failure=3, no_reauth=6):
        patient = [client.begin(feature_flags=unasked) for client in stage.all_kinds(stack)]
        for client in stage.all_kinds(stack):
            client.begin(feature_flags=unasked, producer=False)
            client.answer(alice)
            client.assert_ends_with(DENIED)
            client.cluster.wait_for_log(client.address, "too_soon")
        for client in patient:
            client.wait_until(INTERVAL_S)
            client.answer(alice)
        answered_at = time.monotonic()
        for client in patient:  # again, so that the next end is far from the use below
            client.wait_until(answered_at - client.connected_at + LIFETIME_S / 2)
            client.answer(alice)
        for client in patient:
            client.wait_until(1.1 * LIFETIME_S)  # the end that it had before
            client.assert_serves()


# ---- real clients

RENEWALS = 3
PLAY_S = 64
assert PLAY_S > RENEWALS * TOKEN_LIFETIME_S
"""No session lives longer than a token: who is still on the same connection after that was renewed so many times."""

CONNECTIONS_EACH = 2
"""A client has one in lookup mode and one relay."""

Options = dict[str, Any]
SMALL: Options = {"size": 100, "rate": 200}
LARGE: Options = {"size": 1_000_000, "rate": 4}
WITHOUT_RECONNECT: dict[str, tuple[str, Options]] = {
    "java small": ("java", SMALL),
    "java large": ("java", LARGE),
    "go small": ("go", SMALL),
    "go large": ("go", LARGE),
    "python consumer": ("python", {**LARGE, "does": "consume"}),
}
RECONNECTING: dict[str, tuple[str, Options]] = {"python producer": ("python", {**LARGE, "does": "produce"})}


@dataclass
class Play:
    """All clients, which are at it; the two clusters: the one whose clients stay, and the one whose client cannot."""

    staying: ProxyCluster
    leaving: ProxyCluster
    runs: dict[str, Run]
    before: Scrape
    until: float


@dataclass
class Concert:
    """What became of all clients, and of the two clusters."""

    outcomes: dict[str, Outcome]
    staying: dict[str, float]
    leaving: dict[str, float]
    logs: str

    def result(self, name: str) -> dict[str, Any]:
        """Of one client, which must have come to its end."""
        outcome = self.outcomes[name]
        assert outcome.result["ok"], f"{outcome.result}\n{outcome.log[-4000:]}"
        return outcome.result


@pytest.fixture(scope="module", autouse=True)
def begin_early(request: pytest.FixtureRequest) -> None:
    """Where the concert is asked for at all, the clients play while the tests on the wire run."""
    if any("concert" in getattr(item, "fixturenames", ()) for item in request.session.items):
        request.getfixturevalue("play")


@pytest.fixture(scope="module")
def play(every_client: list[Program], secured_broker: Standalone) -> Iterator[Play]:
    """All of them at the same time. Two clusters, so that each one's counters can be exact."""
    tables = authentication(secured_broker)
    programs = {program.name: program for program in every_client}
    shared = f"persistent://{NAMESPACE}/{uuid.uuid4().hex[:12]}"
    runs: dict[str, Run] = {}
    with ExitStack() as stack:
        staying, leaving = (stack.enter_context(running(ProxyCluster(tables))) for _ in range(2))
        for cluster, players in ((leaving, RECONNECTING), (staying, WITHOUT_RECONNECT)):
            for name, (library, options) in players.items():
                if library in programs:
                    topic = shared if library == "python" else f"{shared}-{name.replace(' ', '-')}"
                    begun = start(programs[library], cluster.service_url, topic, secured_broker.secret_key, **options)
                    runs[name] = stack.enter_context(begun)
        for run in runs.values():
            run.wait_for_progress(1)
        yield Play(staying, leaving, runs, staying.metrics(), time.monotonic() + PLAY_S)


@pytest.fixture(scope="module")
def concert(play: Play) -> Concert:
    """When they have played for long enough."""
    time.sleep(max(0.0, play.until - time.monotonic()))
    moved = play.staying.metrics().moved_since(play.before)
    with ThreadPoolExecutor(len(play.runs)) as pool:
        outcomes = dict(zip(play.runs, pool.map(Run.stop, play.runs.values()), strict=True))
    after = play.leaving.metrics()
    left = {name: after.total(name) for name in (SUCCESS, FAILURE, KILLED, NEW)}
    return Concert(outcomes, moved, left, play.staying.log_text() + play.leaving.log_text())


def library_of(concert: Concert, name: str) -> None:
    """Skip where this machine cannot build it; the tests of every client say why."""
    if name not in concert.outcomes:
        pytest.skip(f"no program for {name}")


@pytest.mark.conforms("kip-368.34")
@pytest.mark.parametrize("name", WITHOUT_RECONNECT)
def test_clients_are_renewed_without_a_reconnect(concert: Concert, name: str) -> None:
    """Three times and more on each connection; nothing lost, doubled, disordered or changed. (What the Python consumer
    gets is from a producer that reconnects, and so sends again what was not acknowledged.)
    """
    library_of(concert, name)
    result = concert.result(name)
    expected = {"missing": 0, "in_order": True, "corrupt": 0, "send_failures": 0}
    assert {key: result[key] for key in expected} == expected, result
    assert result["duplicates"] == 0 or name == "python consumer", result
    assert result["received"] > PLAY_S
    assert concert.outcomes[name].reconnect_lines == []
    assert result["minted"] >= CONNECTIONS_EACH * (1 + RENEWALS)


@pytest.mark.conforms("kip-368.31", "kip-368.34", "kip-368.38")
def test_the_proxy_has_counted_the_renewals_and_lost_no_connection(concert: Concert) -> None:
    clients = len(concert.outcomes) - len(RECONNECTING)
    assert concert.staying[SUCCESS] >= clients * CONNECTIONS_EACH * RENEWALS
    assert [concert.staying.get(name, 0) for name in (FAILURE, KILLED, NO_REAUTH, NEW)] == [0, 0, 0, 0]


@pytest.mark.conforms("kip-368.28", "kip-368.31")
def test_a_python_producer_of_large_messages_comes_back_with_a_fresh_token(concert: Concert) -> None:
    """It writes its answers into the middle of messages, so it is not asked: its relay ends when it is used past its
    end. The other Python client has got all it sent, and whole.
    """
    result = concert.result("python producer")
    assert result["send_failures"] == 0, result
    assert concert.result("python consumer")["received"] == result["sent"]
    assert concert.leaving[KILLED] >= RENEWALS / 2
    reconnects = concert.leaving[NEW] - CONNECTIONS_EACH
    assert concert.leaving[KILLED] - reconnects in {0, 1}, concert.leaving  # its last words may come too late
    assert concert.leaving[FAILURE] == 0
    assert concert.leaving[SUCCESS] > 0  # in lookup mode there is nothing that it could harm


@pytest.mark.conforms("kip-368.52")
def test_no_token_is_in_a_log(concert: Concert) -> None:
    """All of them begin with the header, and that is nowhere."""
    assert "eyJ" not in concert.logs
