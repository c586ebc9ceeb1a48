"""Users and passwords: method `basic` with real clients, SCRAM (RFC 5802) with one of raw frames; no client learns
which users exist.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from local.standalone import Standalone
from passlib.hash import bcrypt

from auth.providers.scram import credential_line
from proto.pulsar_pb2 import BaseCommand, ServerError

from .conftest import authentication, program, running
from .lab.cluster import ROOT, ProxyCluster
from .lab.programs import Program
from .lab.schema import NO_REQUEST_ID
from .lab.scram import MECHANISMS, ScramDialogue
from .lab.security import NAMESPACE
from .lab.waiting import eventually
from .lab.wire import WireClient
from .lab.witness import others_unharmed

GRANTED = f"persistent://{NAMESPACE}/passwords"
NOT_GRANTED = "persistent://public/default/passwords"
PASSWORD = "not-to-be-seen:even with a colon"
WRONG = "not-to-be-seen-either"
FAILURES = "pulsar_authentication_failures_total"


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files `basic` and `scram`: alice and bob."""
    directory = tmp_path_factory.mktemp("users")
    hashes = bcrypt.using(rounds=5, ident="2y")
    names = ("alice", "bob")
    (directory / "basic").write_text("".join(f"{name}:{hashes.hash(PASSWORD)}\n" for name in names))
    lines = [_written("alice", mechanism) for mechanism in MECHANISMS]
    lines += [credential_line("bob", PASSWORD, mechanism) + "\n" for mechanism in MECHANISMS]
    (directory / "scram").write_text("# users\n" + "".join(lines))
    return directory


def _written(user: str, mechanism: str) -> str:
    """A line as the command writes it."""
    command = [sys.executable, "-m", "proxy", "scram-credential", "--user", user, "--mechanism", mechanism]
    result = subprocess.run(command, input=PASSWORD, capture_output=True, text=True, timeout=120, check=True, cwd=ROOT)
    return result.stdout


@pytest.fixture(scope="module")
def proxy(secured_broker: Standalone, users: Path) -> Iterator[ProxyCluster]:
    """A cluster that takes tokens, passwords and SCRAM; two auth workers, so that rounds may meet the wrong one."""
    tables = authentication(secured_broker)
    tables["cluster"] = {"auth_workers": 2}
    tables["authentication.basic"] = {"file": str(users / "basic")}
    tables["authentication.scram"] = {"file": str(users / "scram")}
    with running(ProxyCluster(tables)) as cluster:
        yield cluster
        log = cluster.log_text()
        assert "not-to-be-seen" not in log
        assert "Traceback" not in log


@pytest.fixture
def wire(proxy: ProxyCluster) -> Iterator[WireClient]:
    """A connection."""
    with WireClient(proxy.port) as client:
        yield client


@pytest.fixture(params=["python", "java"])
def real_client(request: pytest.FixtureRequest, pulsar_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Program:
    """The clients that speak basic."""
    return program(request.param, pulsar_home, tmp_path_factory)


def refused(client: WireClient, cluster: ProxyCluster, reason: str) -> None:
    """The same words whatever is wrong; the reason is in the log."""
    answers = client.wait_for_end()
    assert [answer.type for answer in answers] == [BaseCommand.ERROR]
    error = answers[0].error
    assert (error.error, error.message) == (ServerError.AuthenticationError, "Failed to authenticate")
    assert error.request_id == NO_REQUEST_ID
    cluster.wait_for_log("authentication denied", client.address, f"reason={reason}")


def ended_by_an_error(client: WireClient) -> None:
    """No success, whatever the error."""
    assert [answer.type for answer in client.wait_for_end()] == [BaseCommand.ERROR]


def assert_works_as_alice(client: WireClient) -> None:
    """She may use one namespace and not the other."""
    assert client.lookup(GRANTED).lookup_topic_response.proxy_through_service_url
    answer = client.partitions(NOT_GRANTED).partition_metadata_response
    assert answer.error == ServerError.AuthorizationError


def assert_relays_as_alice(client: WireClient, broker: Standalone) -> None:
    """The same at the broker itself."""
    assert client.producer(NOT_GRANTED).error.error == ServerError.AuthorizationError
    with WireClient(broker.broker_port) as direct:  # so that the broker owns the topic
        direct.connect(token=broker.token("alice"))
        assert direct.lookup(GRANTED).lookup_topic_response.broker_service_url
    assert client.producer(GRANTED).type == BaseCommand.PRODUCER_SUCCESS


# ---- basic


def test_basic_with_real_clients(real_client: Program, proxy: ProxyCluster) -> None:
    topic = f"{GRANTED}-{real_client.name}"
    result = real_client.succeed("produce_consume", proxy.service_url, topic, basic=f"alice:{PASSWORD}", count=200)
    assert (result["received"], result["in_order"]) == (200, True)


def test_java_says_that_a_password_was_refused(java_client: Program, proxy: ProxyCluster) -> None:
    outcome = java_client.run("attempt", proxy.service_url, GRANTED, basic=f"alice:{WRONG}", timeout_s=5)
    assert outcome.result["ok"] is False
    assert "AuthenticationException" in outcome.result["error_type"], outcome.result


def test_basic_authorization_is_the_users_own(real_client: Program, proxy: ProxyCluster) -> None:
    outcome = real_client.run("attempt", proxy.service_url, GRANTED, basic=f"bob:{PASSWORD}", timeout_s=5)
    assert outcome.result["ok"] is False
    text = f"{outcome.result['error_type']} {outcome.result['error']}"
    assert "AuthorizationError" in text or "not authorized" in text


def test_basic_in_a_relay(wire: WireClient, secured_broker: Standalone) -> None:
    target = f"localhost:{secured_broker.broker_port}"
    data = f"alice:{PASSWORD}".encode()
    answer = wire.connect(auth_method_name="basic", auth_data=data, proxy_to_broker_url=target)
    assert answer.type == BaseCommand.CONNECTED
    assert_relays_as_alice(wire, secured_broker)


REFUSED: list[tuple[bytes, str]] = [
    (b"", "missing"),
    (b"alice", "malformed"),
    (b"\xff\xfe:\xff", "malformed"),
    (b"alice:" + b"x" * 2000, "malformed"),
    (f"alice:{WRONG}".encode(), "bad_password"),
    (f"alice:{'x' * 200}".encode(), "bad_password"),
    (f"nobody:{PASSWORD}".encode(), "unknown_user"),
]


def test_basic_that_is_refused(proxy: ProxyCluster, secured_broker: Standalone) -> None:
    alice = secured_broker.token("alice")
    with others_unharmed(proxy, topic=GRANTED, token=alice) as witness:
        for data, reason in REFUSED:
            with WireClient(proxy.port) as client:
                client.send_connect(auth_method_name="basic", auth_data=data)
                refused(client, proxy, reason)
        for reason, count in Counter(reason for _, reason in REFUSED).items():
            labels = {"auth_method": "basic", "provider_name": "BasicProvider", "reason": reason}
            witness.counted(FAILURES, times=count, **labels)


def test_basic_does_not_reveal_which_users_exist(proxy: ProxyCluster) -> None:
    """Byte for byte."""
    seen = set()
    for user in ("alice", "nobody"):
        with WireClient(proxy.port) as client:
            client.send_connect(auth_method_name="basic", auth_data=f"{user}:{WRONG}".encode())
            seen.add(client.read_to_end())
    assert len(seen) == 1


# ---- SCRAM


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_scram(wire: WireClient, mechanism: str) -> None:
    assert ScramDialogue(wire, "alice", PASSWORD, mechanism).authenticate().type == BaseCommand.CONNECTED
    assert_works_as_alice(wire)


def test_scram_in_a_relay(wire: WireClient, secured_broker: Standalone) -> None:
    target = f"localhost:{secured_broker.broker_port}"
    answer = ScramDialogue(wire, "alice", PASSWORD).authenticate(proxy_to_broker_url=target)
    assert answer.type == BaseCommand.CONNECTED
    assert_relays_as_alice(wire, secured_broker)


def test_scram_that_is_refused(proxy: ProxyCluster, secured_broker: Standalone) -> None:
    alice = secured_broker.token("alice")
    cases = [("alice", WRONG, "bad_password"), ("nobody", PASSWORD, "unknown_user")]
    with others_unharmed(proxy, topic=GRANTED, token=alice) as witness:
        for mechanism in MECHANISMS:
            for user, password, reason in cases:
                with WireClient(proxy.port) as client:
                    dialogue = ScramDialogue(client, user, password, mechanism)
                    dialogue.respond(dialogue.begin())
                    refused(client, proxy, reason)
        for mechanism in MECHANISMS:
            for *_, reason in cases:
                labels = {"auth_method": mechanism, "provider_name": "ScramProvider", "reason": reason}
                witness.counted(FAILURES, times=1, **labels)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_scram_does_not_reveal_which_users_exist(proxy: ProxyCluster, mechanism: str) -> None:
    """Rounds, lengths, the shape of the first answer, and every byte of the second."""
    firsts, ends, salts = set(), set(), {}
    for user in ("alice", "nobody", "alice", "nobody"):
        with WireClient(proxy.port) as client:
            dialogue = ScramDialogue(client, user, WRONG, mechanism)
            dialogue.respond(dialogue.begin())
            firsts.add((dialogue.shape(), len(dialogue.server_first)))
            salts.setdefault(user, set()).add(dialogue.server_first.split(",")[1])
            ends.add(client.read_to_end())
    assert (len(firsts), len(ends)) == (1, 1)
    assert b"e=" not in ends.pop()
    assert [len(salts[user]) for user in ("alice", "nobody")] == [1, 1]
    assert salts["alice"] != salts["nobody"]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "missing"),
        (b"garbage", "malformed"),
        (b"\xff" * 100, "malformed"),
        (b"n,,n=alice,r=" + b"x" * 2000, "malformed"),
        (b"n,a=bob,n=alice,r=abc", "malformed"),
        (b"p=tls-unique,,n=alice,r=abc", "channel_binding"),
    ],
)
def test_a_first_message_that_is_refused(wire: WireClient, proxy: ProxyCluster, data: bytes, reason: str) -> None:
    wire.send_connect(auth_method_name=MECHANISMS[0], auth_data=data)
    refused(wire, proxy, reason)


@pytest.mark.parametrize(
    ("data", "reason"), [(b"", "missing"), (b"garbage", "malformed"), (b"c=biws,r=abc,p=AAAA", "malformed")]
)
def test_a_final_message_that_is_refused(wire: WireClient, proxy: ProxyCluster, data: bytes, reason: str) -> None:
    dialogue = ScramDialogue(wire, "alice", PASSWORD)
    dialogue.begin()
    dialogue.respond(data)
    refused(wire, proxy, reason)


@pytest.mark.conforms("pip-30.49")
@pytest.mark.parametrize("method", ["token", "basic", MECHANISMS[1], "none"])
def test_another_method_in_the_response(wire: WireClient, proxy: ProxyCluster, method: str) -> None:
    dialogue = ScramDialogue(wire, "alice", PASSWORD)
    dialogue.respond(dialogue.begin(), method=method)
    refused(wire, proxy, "method_changed")


@pytest.mark.conforms("pip-30.50")
def test_a_round_answered_twice_at_once(wire: WireClient) -> None:
    """Whichever of the two the proxy has got to, no client is let in."""
    dialogue = ScramDialogue(wire, "alice", PASSWORD)
    final = dialogue.begin()
    dialogue.respond(final)
    dialogue.respond(final)
    answers = wire.wait_for_end()
    assert answers[-1].type == BaseCommand.ERROR
    assert BaseCommand.CONNECTED not in [answer.type for answer in answers]


@pytest.mark.parametrize("data", [b"again", b"v=", b"\0"])
def test_the_last_word_is_answered_with_nothing(wire: WireClient, proxy: ProxyCluster, data: bytes) -> None:
    dialogue = ScramDialogue(wire, "alice", PASSWORD)
    final = dialogue.begin()
    dialogue.respond(final)
    dialogue.take_last_word()
    dialogue.respond(final if data == b"again" else data)
    refused(wire, proxy, "unexpected_round")


@pytest.mark.conforms("pip-30.8")
def test_no_client_is_authenticated_before_the_last_answer(wire: WireClient) -> None:
    dialogue = ScramDialogue(wire, "alice", PASSWORD)
    dialogue.respond(dialogue.begin())
    dialogue.take_last_word()
    wire.send(BaseCommand.LOOKUP, lookup_topic={"topic": GRANTED, "request_id": 1})
    ended_by_an_error(wire)


def test_an_overheard_proof_is_of_no_use(wire: WireClient, proxy: ProxyCluster) -> None:
    overheard = ScramDialogue(wire, "alice", PASSWORD)
    final = overheard.begin()
    overheard.respond(final)
    overheard.take_last_word()
    with WireClient(proxy.port) as thief:
        dialogue = ScramDialogue(thief, "alice", WRONG)
        dialogue.begin()
        dialogue.respond(final)
        refused(thief, proxy, "malformed")


@pytest.mark.conforms("pip-30.48")
@pytest.mark.parametrize("data", [b"", b"n,,n=bob,r=abc"])
def test_an_auth_frame_after_completion(wire: WireClient, data: bytes) -> None:
    dialogue = ScramDialogue(wire, "alice", PASSWORD)
    assert dialogue.authenticate().type == BaseCommand.CONNECTED
    dialogue.respond(data)
    ended_by_an_error(wire)


def test_a_user_who_is_added_and_removed_again(proxy: ProxyCluster, users: Path) -> None:
    """Without a reload: workers look at most once a second."""

    def is_let_in() -> bool:
        with WireClient(proxy.port) as client:
            dialogue = ScramDialogue(client, "carol", PASSWORD)
            dialogue.respond(dialogue.begin())
            answer = client.receive()
            return bool(answer.type != BaseCommand.ERROR)

    before = (users / "scram").read_text()
    assert not is_let_in()
    (users / "scram").write_text(before + credential_line("carol", PASSWORD, MECHANISMS[0]) + "\n")
    eventually(is_let_in, what="carol is let in")
    (users / "scram").write_text(before)
    eventually(lambda: not (is_let_in() or is_let_in()), what="carol is denied by both workers")
