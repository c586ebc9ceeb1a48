"""proxy.forwarder.client.lifetime: sessions that expire (KIP-368), in lookup mode as dialogues, and as a relay is
told of them.

The clock is the test's: trio's, for what goes forward, and the wall clock behind it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from forwarder_fakes import (
    ALICE,
    CERTIFICATE,
    CLIENT,
    SECRET,
    Play,
    authenticated,
    challenge,
    connect,
    denied,
    lookup,
    make_config,
)
from framed_fakes import NEARLY_PINGS
from lifetime_fakes import EXPIRED, FAILED, NEW_SECRET, Begin, Held, answer_again, gated, token, unix_ms

from proto import commands
from proto.client_machine import State
from proto.commands import AUTH_REFRESH
from proto.connect_rules import SELF_ANSWERING_PROXY_PREFIX, OriginalCredentials
from proto.pulsar_pb2 import BaseCommand, CommandConnected, ServerError
from proto.rpc_pb2 import AuthenticateResponse, OriginalData, Principal, StoredRelay, StoredSession
from proxy.forwarder.client.handshake import LISTENER_BIND_MAX
from proxy.forwarder.client.lifetime import SessionLifetime, reauthenticator_factory
from proxy.forwarder.client.lookup_control import LifetimeEvent
from proxy.forwarder.lifetime.session import BROKER_ANSWER_BYTES_MAX
from proxy.forwarder.lifetime.terms import SessionTerms, stored_grace_ms
from proxy.forwarder.workers.authentication import Challenge, ClientEndpoint, ClientIdentity, Denial
from proxy.runtime.rpc.errors import RpcConnectionLost, RpcDeadlineExceeded

# ---- when a session ends, and when its client is asked


@pytest.mark.conforms("kip-368.1", "kip-368.3", "kip-368.6", "kip-368.41", "kip-368.44")
@pytest.mark.parametrize(
    ("lives_s", "session", "listener", "ends_at"),
    [
        pytest.param(100, {}, {}, 100, id="with its token, though there is no maximum"),
        pytest.param(1000, {"connections_max_reauth_ms": 100_000}, {}, 100, id="at the maximum"),
        pytest.param(0, {"connections_max_reauth_ms": 100_000}, {}, 100, id="at the maximum, with a token for ever"),
        pytest.param(50, {"connections_max_reauth_ms": 100_000}, {}, 50, id="with its token, before the maximum"),
        pytest.param(1000, {}, {"connections_max_reauth_ms": 100_000}, 100, id="at the listener's maximum"),
        pytest.param(
            200,
            {"connections_max_reauth_ms": 100_000},
            {"connections_max_reauth_ms": 0},
            200,
            id="the listener has none",
        ),
        pytest.param(1000, {"methods_max_reauth_ms": {"token": 100_000}}, {}, 100, id="at the method's maximum"),
    ],
)
async def test_a_session_ends(  # noqa: PLR0917 -- the table
    life: Begin,
    autojump_clock: trio.testing.MockClock,
    lives_s: float,
    session: dict[str, Any],
    listener: dict[str, Any],
    ends_at: float,
) -> None:
    it = await life(lives_s, session=session, listener=[listener]).enter()
    assert await it.must_be_asked() == pytest.approx(0.85 * ends_at)
    await it.at(ends_at - 0.1)
    await it.must_serve()
    await it.at(ends_at)
    await it.client.send(lookup(request_id=8))
    await it.must_be_over("session_expired", EXPIRED)
    assert it.counted() == (0, 0, 1)
    assert len(it.workers.forwarded) == 1


@pytest.mark.conforms("kip-368.12", "kip-368.13", "kip-368.56")
@pytest.mark.parametrize(("fraction", "second"), [(0.0, 85), (0.5, 90), (0.999999, 95)])
async def test_clients_are_asked_at_a_point_drawn_at_random(
    life: Begin, autojump_clock: trio.testing.MockClock, fraction: float, second: float
) -> None:
    it = await life(100, fraction=fraction).enter()
    assert await it.must_be_asked() == pytest.approx(second, abs=0.01)


@pytest.mark.conforms("kip-368.5", "kip-368.7", "kip-368.8", "kip-368.9", "kip-368.36")
async def test_a_session_that_never_ends_is_left_alone(life: Begin, autojump_clock: trio.testing.MockClock) -> None:
    it = await life(0).enter()
    await it.at(500_000)
    await it.must_serve()
    assert it.session.lifetime.expiring_session is None
    await it.client.send(answer_again())
    assert await it.client.expect_error() == (ServerError.NotAllowedError, "Not allowed: AUTH_RESPONSE while lookup")
    assert await it.end() == "not_allowed"
    assert it.session.state is State.CLOSED


@pytest.mark.conforms("kip-368.7")
@pytest.mark.parametrize("tables", [{}, {"metrics": {"count_messages": True}}])
async def test_without_authentication_no_client_is_asked(
    life: Begin, autojump_clock: trio.testing.MockClock, tables: dict[str, Any]
) -> None:
    """Not even with a maximum: there is nothing that a client could show."""
    tables = {"authentication": {"enabled": False}, "session": {"connections_max_reauth_ms": 1000}, **tables}
    it = await life(0, **tables).enter(refresh=False)
    await it.at(100)
    await it.must_serve()
    await it.client.send(answer_again())
    assert await it.client.expect_error() == (ServerError.NotAllowedError, "Not allowed: AUTH_RESPONSE while lookup")
    assert it.workers.authentication.requests == []
    assert it.value("pulsar_proxy_authentication_no_reauth_total", method="", reason="client_cannot") is None


# ---- re-authentication


@pytest.mark.conforms("kip-368.18", "kip-368.25", "kip-368.26", "kip-368.29")
async def test_two_in_one_connection(life: Begin, autojump_clock: trio.testing.MockClock) -> None:
    it = await life(100, token(100), token(1000), fraction=0.5).enter()
    assert await it.must_be_asked() == pytest.approx(90)
    await it.at(92)
    await it.client.send(answer_again(b"second"))
    assert await it.must_be_asked() == pytest.approx(92 + 90)
    await it.must_serve()
    await it.at(185)
    await it.client.send(answer_again(b"third"))
    await it.at(1000)
    await it.must_serve()
    assert it.workers.authentication.rounds == [("token", SECRET), ("token", b"second"), ("token", b"third")]
    assert all(request.first_round for request in it.workers.authentication.requests)
    assert it.counted() == (2, 0, 0)
    assert it.value("pulsar_proxy_reauthentication_seconds_count") == 2
    assert it.value("pulsar_proxy_reauthentication_seconds_sum") == pytest.approx(2 + 3)


@pytest.mark.conforms("kip-368.14")
async def test_an_answer_is_verified_as_a_new_connection_would_be(
    life: Begin, autojump_clock: trio.testing.MockClock
) -> None:
    """Security: with the certificate and the address of this connection, and all that its CONNECT said."""
    proxies = {"proxy_roles": ["proxy-a"]}
    it = await life(100, token(100), authentication=proxies).enter(original_principal="bob", proxy_version="1")
    await it.must_be_asked()
    await it.client.send(answer_again())
    await it.settle()
    first, again = it.workers.authentication.requests
    assert (again.client_address, again.client_certificate) == (CLIENT, CERTIFICATE)
    assert (again.original_principal, again.through_proxy) == ("bob", True)
    assert (again.method, again.data) == ("token", NEW_SECRET)
    assert first.authentication_id != again.authentication_id


@pytest.mark.conforms("kip-368.46")
async def test_over_several_rounds(life: Begin, autojump_clock: trio.testing.MockClock) -> None:
    sasl = Principal(type="User", name="alice", method="sasl")
    verdicts = challenge(b"q1"), challenge(b"q2"), token(1000, sasl)
    it = await life(100, *verdicts, principal=sasl).enter(auth_method_name="sasl")
    told: list[str] = []
    it.relays.reauthentication.on_verdict = lambda _session, failure: told.append(failure)
    await it.must_be_asked(method="sasl")
    for answer, question in ((b"a0", b"q1"), (b"a1", b"q2")):
        await it.client.send(answer_again(answer, "sasl"))
        await it.must_be_asked(question, "sasl")
        await it.must_serve()
    await it.client.send(answer_again(b"a2", "sasl"))
    await it.at(500)
    await it.must_serve()
    assert it.value("pulsar_proxy_reauthentication_success_total", method="sasl") == 1
    assert told == [""]
    _, *again = it.workers.authentication.requests
    assert [request.first_round for request in again] == [True, False, False]
    assert len({request.authentication_id for request in again}) == 1
    assert [request.data for request in again] == [b"a0", b"a1", b"a2"]
    assert it.workers.authentication.given_up == []


@pytest.mark.conforms("kip-368.9")
async def test_a_client_may_come_unasked(life: Begin, autojump_clock: trio.testing.MockClock) -> None:
    """As KIP-368's clients do."""
    it = await life(100, token(1000)).enter()
    await it.at(10)
    await it.client.send(answer_again())
    await it.at(500)
    await it.must_serve()
    assert it.counted() == (1, 0, 0)


RENEWALS = 300


async def test_many_renewals_keep_no_object_of_any(life: Begin, autojump_clock: trio.testing.MockClock) -> None:
    """Of hundreds more on one connection nothing is left: counted, since the memory of a real process is too coarse."""
    it = await life(100).enter()
    auth = it.workers.authentication

    async def renew_often() -> int:
        """Renew, forget what the fakes have kept of it, and count Python's allocated blocks."""
        for number in range(RENEWALS):
            auth.answers = [token(100)]
            await it.at(it.second + 1)
            await it.client.send(answer_again(b"%d" % number))
            await it.settle()
            auth.requests.clear()
        gc.collect()
        return sys.getallocatedblocks()

    before = await renew_often()
    assert await renew_often() - before < RENEWALS / 2
    assert it.counted() == (2 * RENEWALS, 0, 0)


@pytest.mark.conforms("kip-368.9", "kip-368.49")
@pytest.mark.parametrize(("pause_s", "passes"), [(0.9, False), (1.0, True)])
@pytest.mark.parametrize("after_another", [False, True])
async def test_again_at_once_is_too_soon(
    life: Begin, autojump_clock: trio.testing.MockClock, pause_s: float, passes: bool, after_another: bool
) -> None:
    it = await life(100, token(100), token(100)).enter()
    if after_another:
        await it.at(50)
        await it.client.send(answer_again())
        await it.settle()
    await it.at(it.second + pause_s)
    await it.client.send(answer_again())
    if passes:
        await it.must_serve()
        assert it.counted() == (1 + after_another, 0, 0)
    else:
        await it.must_be_over("reauthentication_failed", FAILED)
        assert it.counted() == (after_another, 1, 0)


@pytest.mark.conforms("kip-368.17", "kip-368.50")
async def test_requests_in_flight_go_on_and_are_answered_as_the_brokers_do(
    life: Begin, autojump_clock: trio.testing.MockClock
) -> None:
    verdict = trio.Event()
    it = await life(100, gated(verdict, token(100))).enter()
    it.workers.answer_by = None
    await it.must_be_asked()
    await it.client.send(lookup(request_id=1), answer_again(), lookup(request_id=2))
    await it.settle()
    await it.client.send(lookup(request_id=3))
    await it.settle()
    first, last = it.workers.sent
    assert [len(sent.requests) for sent in (first, last)] == [2, 1], "no command waits for a verdict"
    first.answer(0, more=True)
    verdict.set()
    await it.settle()
    last.answer(0)
    first.answer(1)
    heard = [(await it.client.expect_command(BaseCommand.LOOKUP_RESPONSE)).lookup_topic_response for _ in range(3)]
    assert [answer.request_id for answer in heard] == [1, 3, 2], "as their answers come"
    assert it.counted() == (1, 0, 0)


async def test_lookups_go_by_the_new_principal_from_then_on(
    life: Begin, autojump_clock: trio.testing.MockClock
) -> None:
    """The old one's seal says until when it holds, and a lookup worker believes that."""
    it = await life(100, token(100, sealed=b"new seal")).enter()
    await it.must_serve()
    await it.must_be_asked()
    await it.client.send(answer_again())
    await it.settle()
    await it.must_serve()
    sent = [one.envelope for one in it.workers.sent]
    assert [one.sealed_principal for one in sent] == [b"sealed", b"new seal"]
    assert it.session.identity.sealed == b"new seal"


async def test_forwarded_credentials_are_the_fresh_ones(life: Begin, autojump_clock: trio.testing.MockClock) -> None:
    it = await life(100, token(100), brokers={"forward_authorization_credentials": True}).enter()
    await it.must_serve()
    await it.must_be_asked()
    await it.client.send(answer_again())
    await it.must_serve()
    await it.must_serve()
    sent = [(one.envelope.original_auth_method, one.envelope.original_auth_data) for one in it.workers.sent]
    assert sent[0] == ("token", SECRET.decode())
    assert sent[-1] == ("token", NEW_SECRET.decode())
    assert it.session.identity.original == OriginalCredentials("token", NEW_SECRET.decode())


# ---- failures


@pytest.mark.conforms("kip-368.47", "kip-368.48")
@pytest.mark.parametrize(
    "another",
    [
        Principal(type="User", name="mallory", method="token"),
        Principal(type="User", name="alice", method="basic"),
        Principal(type="User", name="alice", method="token", proxy="a-proxy"),
    ],
    ids=["another principal", "another method", "another proxy"],
)
async def test_another_principal_is_closed(
    life: Begin, autojump_clock: trio.testing.MockClock, another: Principal
) -> None:
    """Security: and nothing is ever looked up in that name."""
    it = await life(100, token(100, another, b"another's")).enter()
    await it.must_be_asked()
    await it.client.send(answer_again())
    await it.settle()
    await it.client.send(lookup())
    await it.must_be_over("reauthentication_failed", FAILED)
    assert it.counted() == (0, 1, 0)
    assert it.workers.forwarded == []
    assert it.session.identity.sealed == b"sealed"


@pytest.mark.conforms("kip-368.48")
async def test_another_method_in_the_answer_is_closed_and_never_verified(
    life: Begin, autojump_clock: trio.testing.MockClock
) -> None:
    it = await life(100, token(100)).enter()
    await it.must_be_asked()
    await it.client.send(answer_again(method="basic"))
    await it.must_be_over("reauthentication_failed", FAILED)
    assert it.counted() == (0, 1, 0)
    assert len(it.workers.authentication.requests) == 1


async def test_an_answer_without_a_method_is_of_the_sessions(
    life: Begin, autojump_clock: trio.testing.MockClock
) -> None:
    it = await life(100, token(100)).enter()
    await it.must_be_asked()
    await it.client.send(answer_again(method=""))
    await it.settle()
    assert it.counted() == (1, 0, 0)
    assert it.workers.authentication.rounds[1] == ("token", NEW_SECRET)


@pytest.mark.conforms("kip-368.15", "kip-368.16", "kip-368.26")
async def test_a_denial_closes_after_the_fixed_delay_and_nothing_is_tried_again(
    life: Begin, autojump_clock: trio.testing.MockClock
) -> None:
    it = await life(100, denied("expired")).enter()
    await it.must_be_asked()
    await it.client.send(answer_again())
    second = await it.must_be_over("reauthentication_failed", FAILED)
    assert 85.2 <= second <= 86.5
    assert it.counted() == (0, 1, 0)
    assert len(it.workers.authentication.requests) == 2


async def test_an_answer_that_is_none_is_closed(life: Begin, autojump_clock: trio.testing.MockClock) -> None:
    it = await life(100).enter()
    await it.must_be_asked()
    await it.client.send(BaseCommand(type=BaseCommand.AUTH_RESPONSE))
    await it.must_be_over("reauthentication_failed", FAILED)
    assert len(it.workers.authentication.requests) == 1


async def test_a_second_answer_while_the_first_is_verified_is_closed(
    life: Begin, autojump_clock: trio.testing.MockClock
) -> None:
    verdict = trio.Event()
    it = await life(100, gated(verdict, token(100, sealed=b"new"))).enter()
    await it.must_be_asked()
    await it.client.send(answer_again())
    await it.settle()
    await it.client.send(answer_again())
    await it.settle()
    verdict.set()
    await it.must_be_over("reauthentication_failed", FAILED)
    assert it.counted() == (0, 1, 0)
    assert it.session.identity.sealed == b"sealed"


@pytest.mark.conforms("kip-368.16")
@pytest.mark.parametrize(
    "trouble",
    [RpcConnectionLost("gone"), RpcDeadlineExceeded("late"), denied("unknown_round")],
    ids=["it dies", "it is late", "it does not know the round"],
)
async def test_without_an_auth_worker_the_client_is_asked_again(
    life: Begin, autojump_clock: trio.testing.MockClock, trouble: Any
) -> None:
    it = await life(100, trouble, token(1000)).enter()
    await it.must_be_asked()
    await it.client.send(answer_again(b"lost"))
    assert await it.must_be_asked() == pytest.approx(86), "not at once"
    await it.client.send(answer_again())
    await it.at(500)
    await it.must_serve()
    assert it.counted() == (1, 0, 0)


async def test_the_auth_worker_dies_between_two_rounds(life: Begin, autojump_clock: trio.testing.MockClock) -> None:
    """No answer is given twice: the rounds begin again, with another worker."""
    it = await life(100, challenge(b"q"), RpcConnectionLost("gone"), token(1000)).enter()
    await it.must_be_asked()
    await it.client.send(answer_again(b"a0"))
    await it.must_be_asked(b"q")
    await it.client.send(answer_again(b"a1"))
    await it.must_be_asked()
    await it.client.send(answer_again(b"again"))
    await it.settle()
    assert it.counted() == (1, 0, 0)
    _, begun, lost, repeated = it.workers.authentication.requests
    assert (begun.first_round, lost.first_round, repeated.first_round) == (True, False, True)
    assert it.workers.authentication.given_up == [begun.authentication_id]


# ---- past the end


@pytest.mark.conforms("kip-368.27", "kip-368.51")
async def test_a_client_that_cannot_renew_is_counted_never_challenged_and_closed_at_its_next_use(
    life: Begin, autojump_clock: trio.testing.MockClock
) -> None:
    it = await life(100).enter(refresh=False)
    assert it.value("pulsar_proxy_authentication_no_reauth_total", method="token", reason="client_cannot") == 1
    await it.at(99)
    await it.must_serve()  # and nothing else was said meanwhile
    await it.at(1000)
    assert it.session.state is State.LOOKUP
    await it.client.send(lookup())
    await it.must_be_over("session_expired", EXPIRED)
    assert it.counted() == (0, 0, 1)


@pytest.mark.conforms("kip-368.32")
async def test_the_log_tells_of_each_session_that_is_closed(
    life: Begin, autojump_clock: trio.testing.MockClock
) -> None:
    it = await life(100).enter(refresh=False)
    await it.at(101)
    with structlog.testing.capture_logs() as logs:
        await it.client.send(lookup())
        await it.must_be_over("session_expired", EXPIRED)
    [entry] = [entry for entry in logs if entry["event"] == "a client's session is being closed"]
    assert (entry["client"], entry["principal"], entry["reason"]) == (CLIENT, "alice", "expired")


@pytest.mark.conforms("kip-368.38", "kip-368.40")
async def test_a_client_that_can_renew_is_not_counted_as_one_that_cannot(
    life: Begin, autojump_clock: trio.testing.MockClock
) -> None:
    it = await life(100).enter()
    assert it.value("pulsar_proxy_authentication_no_reauth_total", method="token", reason="client_cannot") is None


@pytest.mark.conforms("kip-368.22")
async def test_keep_alive_commands_do_not_count_as_use_of_an_expired_session(
    life: Begin, autojump_clock: trio.testing.MockClock
) -> None:
    it = await life(100, limits={"keep_alive_interval_ms": 30_000}).enter(refresh=False)
    while it.second < 1000:
        await it.client.expect_command(BaseCommand.PING)
        await it.client.send(commands.encode(BaseCommand(type=BaseCommand.PONG, pong={})), commands.ping())
        await it.client.expect_command(BaseCommand.PONG)
    assert it.session.state is State.LOOKUP
    await it.client.send(lookup())
    await it.must_be_over("session_expired", EXPIRED)


@pytest.mark.conforms("kip-368.22")
@pytest.mark.parametrize("nearly", NEARLY_PINGS)
async def test_commands_that_only_resemble_keep_alive_count_as_use_of_an_expired_session(
    life: Begin, autojump_clock: trio.testing.MockClock, nearly: bytes
) -> None:
    it = await life(100).enter(refresh=False)
    await it.at(101)
    await it.client.send(nearly)
    await it.must_be_over("session_expired", EXPIRED)


@pytest.mark.conforms("kip-368.8", "kip-368.21")
async def test_a_client_asked_that_does_not_answer_is_left_alone_until_it_is_used(
    life: Begin, autojump_clock: trio.testing.MockClock
) -> None:
    it = await life(100).enter()
    await it.must_be_asked()
    await it.at(10_000)
    await it.client.send(lookup())
    await it.must_be_over("session_expired", EXPIRED)
    assert it.counted() == (0, 0, 1)


@pytest.mark.conforms("kip-368.20")
async def test_an_answer_past_the_end_renews(life: Begin, autojump_clock: trio.testing.MockClock) -> None:
    it = await life(100, token(100)).enter()
    await it.must_be_asked()
    await it.at(500)
    await it.client.send(answer_again())
    await it.must_serve()
    assert it.counted() == (1, 0, 0)


@pytest.mark.conforms("kip-368.20")
async def test_requests_in_flight_at_the_sessions_end_are_answered_before_the_client_is_closed(
    life: Begin, autojump_clock: trio.testing.MockClock
) -> None:
    it = await life(100).enter()
    it.workers.answer_by = None
    await it.must_be_asked()
    await it.client.send(lookup(request_id=1))
    await it.at(101)
    await it.client.send(lookup(request_id=2), lookup(request_id=3))
    await it.at(111)
    [sent] = it.workers.sent
    sent.answer(0)
    answer = await it.client.expect_command(BaseCommand.LOOKUP_RESPONSE)
    assert answer.lookup_topic_response.request_id == 1
    assert await it.must_be_over("session_expired", EXPIRED) == pytest.approx(111)
    assert len(it.workers.forwarded) == 1


async def test_an_expired_session_waits_a_bounded_time_for_requests_in_flight(
    life: Begin, autojump_clock: trio.testing.MockClock
) -> None:
    it = await life(100, limits={"lookup_timeout_ms": 5000, "keep_alive_interval_ms": 1_000_000}).enter(refresh=False)
    it.workers.answer_by = None
    await it.at(99.9)
    await it.client.send(lookup())
    await it.at(100)
    await it.client.send(lookup())
    assert await it.must_be_over("session_expired", EXPIRED) == pytest.approx(100.1 + 6)


@pytest.mark.conforms("kip-368.20")
@pytest.mark.parametrize("command", [lookup(), BaseCommand(type=BaseCommand.SEEK), connect()])
async def test_any_command_past_the_end_is_use(
    life: Begin, autojump_clock: trio.testing.MockClock, command: BaseCommand
) -> None:
    it = await life(100).enter(refresh=False)
    await it.at(100)
    await it.client.send(command)
    await it.must_be_over("session_expired", EXPIRED)


async def test_garbage_past_the_end_is_garbage(life: Begin, autojump_clock: trio.testing.MockClock) -> None:
    it = await life(100).enter(refresh=False)
    await it.at(100)
    await it.client.send(b"\x00\x00\x00\x06\x00\x00\x00\x02\xff\xff")
    code, text = await it.client.expect_error()
    assert code == ServerError.NotAllowedError
    assert text.startswith("Not Pulsar")
    assert await it.end() == "protocol_error"


# ---- an answer is verified while the session has expired


@pytest.mark.conforms("kip-368.17", "kip-368.19")
async def test_a_command_waits_for_the_verdict_then_goes_on(
    life: Begin, autojump_clock: trio.testing.MockClock
) -> None:
    it = await Held(life, token(100, sealed=b"new seal")).hold()
    await it.client.expect_command(BaseCommand.PONG)
    answers = [await it.client.expect_command(BaseCommand.LOOKUP_RESPONSE) for _ in range(2)]
    assert {answer.lookup_topic_response.request_id for answer in answers} == {1, 2}
    assert [commands.parse_command(one[0]).lookup_topic.request_id for one in it.workers.forwarded] == [1, 2]
    assert {one.envelope.sealed_principal for one in it.workers.sent} == {b"new seal"}
    assert it.counted() == (1, 0, 0)


async def test_a_command_waits_for_the_verdict_in_vain(life: Begin, autojump_clock: trio.testing.MockClock) -> None:
    it = await Held(life, denied()).hold()
    await it.must_be_over("reauthentication_failed", FAILED)
    assert it.workers.forwarded == []
    assert it.counted() == (0, 1, 0)


@pytest.mark.parametrize("trouble", [RpcConnectionLost("gone"), denied("unknown_round")])
async def test_a_command_waited_and_the_auth_worker_was_unavailable(
    life: Begin, autojump_clock: trio.testing.MockClock, trouble: Any
) -> None:
    """It is use past the end, then."""
    it = await Held(life, trouble).hold()
    await it.must_be_over("session_expired", EXPIRED)
    assert it.workers.forwarded == []
    assert it.counted() == (0, 0, 1)


async def test_a_command_waited_and_a_further_round_begins(life: Begin, autojump_clock: trio.testing.MockClock) -> None:
    """The client's answer would stand behind it: it cannot wait any longer."""
    it = await Held(life, challenge(b"q")).hold()
    await it.must_be_asked(b"q")
    await it.must_be_over("session_expired", EXPIRED)
    assert it.workers.forwarded == []
    assert it.workers.authentication.given_up == [it.workers.authentication.requests[1].authentication_id]


async def test_a_client_that_waits_for_a_verdict_is_not_closed_as_silent(
    life: Begin, autojump_clock: trio.testing.MockClock
) -> None:
    """The proxy reads nothing from the client meanwhile, so an answer to its PING may be unread."""
    held = Held(life, token(1000), limits={"keep_alive_interval_ms": 1000, "handshake_timeout_ms": 1_000_000})
    it = held.it
    await it.enter()

    async def stay_alive_until(second: float) -> None:
        while it.second < second:
            await it.client.send(commands.ping())
            await it.client.expect_command(BaseCommand.PONG)
            await trio.sleep(0.25)

    await stay_alive_until(84.5)
    await it.must_be_asked()
    await it.client.send(answer_again())
    await stay_alive_until(101)
    await it.client.send(lookup())
    await it.at(200)
    held.verdict.set()
    await it.client.expect_command(BaseCommand.LOOKUP_RESPONSE)


# ---- an end in the middle


@pytest.mark.parametrize("verdict", [challenge(b"q"), authenticated(), denied()])
async def test_the_client_leaves_while_it_is_authenticated(
    life: Begin, autojump_clock: trio.testing.MockClock, verdict: AuthenticateResponse
) -> None:
    gate = trio.Event()
    it = await life(100, gated(gate, verdict)).enter()
    await it.must_be_asked()
    await it.client.send(answer_again())
    await it.settle()
    await it.client.stream.aclose()
    assert await it.end() == "client_closed"
    gate.set()
    await it.settle()
    assert it.counted() == (0, 0, 0)
    rounds = [it.workers.authentication.requests[1].authentication_id]
    assert it.workers.authentication.given_up == (rounds if verdict.HasField("challenge") else [])


async def test_the_client_leaves_between_two_rounds(life: Begin, autojump_clock: trio.testing.MockClock) -> None:
    it = await life(100, challenge(b"q")).enter()
    await it.must_be_asked()
    await it.client.send(answer_again())
    await it.must_be_asked(b"q")
    await it.client.stream.aclose()
    assert await it.end() == "client_closed"
    assert it.workers.authentication.given_up == [it.workers.authentication.requests[1].authentication_id]


async def test_a_client_that_has_left_is_not_asked(life: Begin, autojump_clock: trio.testing.MockClock) -> None:
    it = await life(100).enter()
    await it.client.stream.aclose()
    assert await it.end() == "client_closed"
    await it.at(1000)


async def test_a_client_that_leaves_while_it_is_being_closed(
    life: Begin, autojump_clock: trio.testing.MockClock
) -> None:
    it = await life(100).enter(refresh=False)
    await it.at(100)
    await it.client.send(lookup())
    await it.settle()
    await it.client.stream.aclose()
    assert await it.end() in {"client_closed", "session_expired"}
    await it.at(200)


@pytest.mark.parametrize("when", ["asked", "verified", "held", "closing"])
async def test_drain_in_the_middle(life: Begin, autojump_clock: trio.testing.MockClock, when: str) -> None:
    """The client leaves, and comes back to another forwarder with fresh credentials."""
    held = Held(life, token(100))
    it = await held.it.enter()
    await it.must_be_asked()
    if when in {"verified", "held"}:
        await it.at(99)
        await it.client.send(answer_again())
    await it.at(101)
    if when in {"held", "closing"}:
        await it.client.send(lookup())
    await it.settle()
    it.session.drain()
    assert await it.end() == "shut_down"
    held.verdict.set()
    await it.at(200)
    assert it.workers.forwarded == []


async def test_drain_lets_what_is_under_way_finish_before_an_expired_session_is_told(
    life: Begin, autojump_clock: trio.testing.MockClock
) -> None:
    it = await life(100).enter(refresh=False)
    it.workers.answer_by = None
    await it.at(99)
    await it.client.send(lookup(request_id=1))
    await it.settle()
    it.session.drain()
    await it.at(100)
    it.workers.sent[0].answer(0)
    await it.client.expect_command(BaseCommand.LOOKUP_RESPONSE)
    await it.client.expect_end()
    assert await it.end() == "shut_down"


# ---- secrets


@pytest.mark.conforms("kip-368.52")
async def test_no_secret_in_any_log_error_or_repr(life: Begin, autojump_clock: trio.testing.MockClock) -> None:
    secrets = SECRET.decode(), NEW_SECRET.decode(), "0riginal"
    shown: list[str] = []
    with structlog.testing.capture_logs() as logs:
        for verdict in (token(100), denied("bad_token"), RpcConnectionLost("gone"), token(100, Principal(name="x"))):
            it = await life(100, verdict).enter(original_auth_method="token", original_auth_data="0riginal")
            await it.must_be_asked()
            await it.client.send(answer_again())
            await it.settle()
            session = it.session.lifetime.expiring_session
            assert session is not None
            shown += [repr(session), repr(it.session.identity), str(session.relay_record), repr(session.control)]
            shown.append(repr(it.session.lifetime._session))
            await it.client.stream.aclose()
            await it.end()
    assert any("authenticate itself again" in entry["event"] for entry in logs)
    for text in [*map(str, logs), *shown]:
        assert not any(secret in text for secret in secrets), text


# ---- as a relay needs it

TARGET = "pulsar://b0:6650"
BROKER = CommandConnected(server_version="b", max_message_size=5_000_000)


class RelaySetup:
    """The lifetime of a client that becomes a relay."""

    def __init__(self, nursery: trio.Nursery, principal: Principal = ALICE, **tables: Any) -> None:
        tables.setdefault("authentication", {"enabled": True, "failure_delay_ms": 200})
        self.play = Play(nursery, **tables)
        self.play.relays.now = trio.current_time
        self.play.relays.reauthentication.unix_ms = unix_ms
        self.play.relays.reauthentication.fraction = lambda: 0.0
        self.principal = Principal()
        self.principal.CopyFrom(principal)
        self.client = ClientEndpoint(CLIENT, trio.current_time(), CERTIFICATE)
        self.events: list[LifetimeEvent] = []
        self.lifetime = self.lifetime_of(self.client)

    def lifetime_of(self, client: ClientEndpoint) -> SessionLifetime:
        play = self.play
        return SessionLifetime(client, play.workers, play.relays, play.metrics, self.events.append)  # type: ignore[arg-type]

    def expiring(self, lives_s: float = 100) -> RelaySetup:
        self.principal.expires_at_unix_ms = round(unix_ms() + lives_s * 1000)
        return self

    def session(
        self,
        original: OriginalCredentials | None = None,
        original_data: OriginalData = OriginalData.ORIGINAL_DATA_UNKNOWN,
        **fields: Any,
    ) -> SessionTerms | None:
        fields = {"proxy_to_broker_url": TARGET, "feature_flags": {"supports_auth_refresh": True}, **fields}
        self.lifetime.on_authenticated(connect(**fields).connect, self.principal)
        identity = ClientIdentity(self.principal, b"sealed", original)
        return self.lifetime.relay_session(BROKER, identity, original_data=original_data)

    def relay_session(self, original: OriginalCredentials | None = None, *known: Any, **fields: Any) -> SessionTerms:
        session = self.session(original, *known, **fields)
        assert session is not None
        return session


MakeRelaySetup = Callable[..., RelaySetup]


@pytest.fixture
def relay_setup(nursery: trio.Nursery) -> MakeRelaySetup:
    return lambda *args, **kwargs: RelaySetup(nursery, *args, **kwargs)


def test_a_relay_that_began_before_there_was_a_grace() -> None:
    """An upgrade takes it over."""
    assert stored_grace_ms(StoredSession()) == make_config().session.grace_ms == 60_000
    assert stored_grace_ms(StoredSession(grace_ms=0)) == 0


@pytest.mark.conforms("pip-1.15", "kip-368.12")
async def test_a_relay_whose_session_can_expire(relay_setup: MakeRelaySetup) -> None:
    tables = {
        "session": {"connections_max_reauth_ms": 50_000, "grace_ms": 7_000},
        "limits": {"max_command_bytes": 12_345},
    }
    session = relay_setup(**tables).expiring().relay_session(protocol_version=15)
    assert session.expires
    assert session.clock is not None
    assert session.clock.expires_at_s == pytest.approx(trio.current_time() + 50)
    assert session.clock.challenge_at_s == pytest.approx(trio.current_time() + 42.5)
    assert session.lifetime_ms_max == 50_000
    assert session.principal.name == "alice"
    assert session.answer_bytes_max == 12_345
    assert session.frame_bytes_max > 5_000_000
    assert session.failure_delay_ms == 200
    assert session.grace_ms == stored_grace_ms(session.to_stored_session()) == 7_000
    assert not session.counts_messages
    asked = commands.parse_command(session.challenge[8:]).auth_challenge
    assert (asked.challenge.auth_method_name, asked.challenge.auth_data) == ("token", AUTH_REFRESH)
    assert asked.protocol_version == 15


@pytest.mark.parametrize("count_messages", [False, True])
async def test_without_authentication_a_relay_is_told_only_what_counting_needs(
    relay_setup: MakeRelaySetup, count_messages: bool
) -> None:
    tables = {"authentication": {"enabled": False}, "metrics": {"count_messages": count_messages}}
    session = relay_setup(Principal(), session={"connections_max_reauth_ms": 1000}, **tables).session()
    if not count_messages:
        assert session is None
        return
    assert session is not None
    assert session.counts_messages
    assert not session.expires
    assert session.lifetime_ms_max == 0


@pytest.mark.conforms("kip-368.7")
async def test_a_relay_that_never_expires_is_blind(relay_setup: MakeRelaySetup) -> None:
    assert relay_setup().session() is None


FORWARDED = OriginalCredentials("token", SECRET.decode())
MAXIMUM = {"session": {"connections_max_reauth_ms": 50_000}}


async def test_a_broker_that_checks_forwarded_credentials_asks_and_the_proxy_keeps_out(
    relay_setup: MakeRelaySetup,
) -> None:
    """Where no maximum applies, which the broker would not know."""
    checked = OriginalData.ORIGINAL_DATA_CHECKED
    session = relay_setup(metrics={"count_messages": True}).expiring().relay_session(FORWARDED, checked)
    assert session.clock is None
    assert session.challenge == b""
    assert not session.passes_answers
    assert session.counts_messages
    blind = relay_setup().expiring().relay_session(FORWARDED, checked)
    assert not blind.inspects_frames


async def test_only_tokens_are_left_to_brokers(relay_setup: MakeRelaySetup) -> None:
    """Security: that a broker ends what a client by another method, as a plugin's, has begun is not known."""
    principal = Principal(type="User", name="alice", method="of-a-plugin")
    forwarded = OriginalCredentials("of-a-plugin", SECRET.decode())
    checked = OriginalData.ORIGINAL_DATA_CHECKED
    session = relay_setup(principal).expiring().relay_session(forwarded, checked)
    assert session.expires
    assert session.passes_answers


@pytest.mark.conforms("kip-368.24")
@pytest.mark.parametrize(
    ("original_data", "tables", "ends_after_s"),
    [
        (OriginalData.ORIGINAL_DATA_CHECKED, MAXIMUM, 50),
        (OriginalData.ORIGINAL_DATA_CHECKED, {"session": {"methods_max_reauth_ms": {"token": 50_000}}}, 50),
        (OriginalData.ORIGINAL_DATA_CHECKED, {"listener": [{"connections_max_reauth_ms": 50_000}]}, 50),
        (OriginalData.ORIGINAL_DATA_UNKNOWN, MAXIMUM, 50),
        (OriginalData.ORIGINAL_DATA_UNKNOWN, {}, 100),
        (OriginalData.ORIGINAL_DATA_SEEMS_CHECKED, {}, 100),
        (OriginalData.ORIGINAL_DATA_IGNORED, MAXIMUM, 50),
        (OriginalData.ORIGINAL_DATA_IGNORED, {}, 100),
    ],
)
async def test_with_forwarded_credentials_the_end_holds(
    relay_setup: MakeRelaySetup, original_data: OriginalData, tables: dict[str, Any], ends_after_s: float
) -> None:
    """The client is asked by the proxy; nothing goes on to a broker that ignores its credentials."""
    session = relay_setup(**tables).expiring().relay_session(FORWARDED, original_data)
    assert session.clock is not None
    assert session.clock.expires_at_s == pytest.approx(trio.current_time() + ends_after_s)
    assert session.challenge
    assert session.passes_answers is (original_data != OriginalData.ORIGINAL_DATA_IGNORED)
    assert session.to_stored_session().passes_answers is session.passes_answers
    assert session.broker_host == ""


@pytest.mark.parametrize("limit", [12_345, 1 << 20])
async def test_an_answer_that_goes_on_fits_a_pipe(relay_setup: MakeRelaySetup, limit: int) -> None:
    setup = relay_setup(limits={"max_command_bytes": limit})
    session = setup.expiring().relay_session(FORWARDED)
    assert session.answer_bytes_max == min(limit, BROKER_ANSWER_BYTES_MAX)


@pytest.mark.parametrize("original_data", OriginalData.values())
async def test_forwarded_credentials_that_never_end_leave_the_relay_blind(
    relay_setup: MakeRelaySetup, original_data: OriginalData
) -> None:
    assert relay_setup().session(FORWARDED, original_data) is None


async def test_without_forwarded_credentials_it_does_not_matter_what_the_broker_checks(
    relay_setup: MakeRelaySetup,
) -> None:
    session = relay_setup().expiring().relay_session(None, OriginalData.ORIGINAL_DATA_CHECKED)
    assert session.expires
    assert not session.passes_answers


@pytest.mark.parametrize("original_data", OriginalData.values())
@pytest.mark.parametrize(
    ("front", "is_asked", "expires"),
    [
        ({"proxy_version": "4.0.8"}, False, False),
        ({"proxy_version": "pulsar-trio-proxy-1"}, True, True),
        ({"proxy_version": "4.0.8", "feature_flags": {}}, False, True),
    ],
    ids=["its client answers", "it answers itself", "no client can be asked"],
)
async def test_a_proxy_with_the_credentials_of_its_client(
    relay_setup: MakeRelaySetup, original_data: OriginalData, front: dict[str, Any], is_asked: bool, expires: bool
) -> None:
    """An answer of its client's would be another principal's. The front proxy holds its client's session."""
    principal = Principal(type="User", name="alice", method="token", proxy="front")
    session = relay_setup(principal).expiring().relay_session(FORWARDED, original_data, **front)
    assert not session.passes_answers
    assert bool(session.challenge) is is_asked
    assert session.expires is expires


@pytest.mark.conforms("pip-1.15")
@pytest.mark.parametrize("expires", [True, False])
async def test_a_relay_whose_broker_the_proxy_answers_is_followed_whether_the_client_expires_or_not(
    relay_setup: MakeRelaySetup, expires: bool
) -> None:
    it = relay_setup(limits={"max_command_bytes": 12_345})
    if expires:
        it.expiring()
    it.lifetime.on_authenticated(connect(TARGET).connect, it.principal)
    identity = ClientIdentity(it.principal, b"sealed")
    session = it.lifetime.relay_session(BROKER, identity, answers_broker="b0")
    assert session is not None
    assert session.inspects_frames
    assert session.expires is expires
    assert session.to_stored_session().broker_host == "b0"
    assert session.frame_bytes_max > 5_000_000
    blind = it.lifetime.relay_session(BROKER, identity)
    assert (blind is None) is not expires
    assert blind is None or blind.broker_host == ""


CPP: dict[str, Any] = {"client_version": "Pulsar-CPP-v4.2.0"}
JAVA: dict[str, Any] = {"client_version": "Pulsar-Java-v4.0.8"}
OLD: dict[str, Any] = {"feature_flags": {"supports_auth_refresh": False}}


@pytest.mark.parametrize(
    ("policy", "client", "asked", "spared"),
    [
        ("by_client_kind", JAVA, True, False),
        ("by_client_kind", CPP, True, True),
        ("by_client_kind", OLD, False, True),
        ("always", CPP, True, False),
        ("always", OLD, False, True),
        ("never", JAVA, False, True),
        ("never", CPP, False, True),
    ],
)
async def test_the_relay_reauthentication_policy_and_the_client_kind_decide_on_a_challenge(
    relay_setup: MakeRelaySetup, policy: str, client: dict[str, Any], asked: bool, spared: bool
) -> None:
    session = relay_setup(session={"relay_reauthentication": policy}).expiring().relay_session(**client)
    assert session.expires, "a client that is not asked ends all the same"
    assert bool(session.challenge) is asked
    assert session.exempts_producers is spared


@pytest.mark.parametrize(("proxy", "spared"), [("a-proxy", False), ("", True)], ids=["a proxy", "a client"])
async def test_the_marker_of_a_self_answering_proxy_counts_only_from_an_authenticated_proxy(
    relay_setup: MakeRelaySetup, proxy: str, spared: bool
) -> None:
    """Security: what a client writes into ``proxy_version`` does not change how it is asked."""
    principal = Principal(type="User", name="alice", method="token", proxy=proxy)
    marker = f"{SELF_ANSWERING_PROXY_PREFIX}0.1.0"
    session = relay_setup(principal).expiring().relay_session(**CPP, proxy_version=marker)
    assert session.exempts_producers is spared


async def test_an_empty_target_makes_a_relay_as_any_other(relay_setup: MakeRelaySetup) -> None:
    """Whether a client can be asked, and whether it named its broker, have nothing to do with each other."""
    anywhere = {"proxy_to_broker_url": ""}
    assert relay_setup().expiring().relay_session(**CPP, **anywhere).exempts_producers
    never = relay_setup(session={"relay_reauthentication": "never"}).expiring().relay_session(**JAVA, **anywhere)
    assert never.challenge == b""


@pytest.mark.parametrize("policy", ["never", "by_client_kind"])
async def test_in_lookup_mode_all_are_asked_that_can_be(
    life: Begin, autojump_clock: trio.testing.MockClock, policy: str
) -> None:
    """There no large frame is written into."""
    it = await life(100, session={"relay_reauthentication": policy}).enter(**CPP)
    assert await it.must_be_asked() == pytest.approx(85)


@pytest.mark.conforms("kip-368.58")
async def test_after_a_restart_nothing_is_counted_until_the_first_such_client_connects(
    relay_setup: MakeRelaySetup,
) -> None:
    name = "pulsar_proxy_authentication_no_reauth_total"
    before = relay_setup().expiring()
    before.session(**OLD)
    assert before.play.value(name, method="token", reason="client_cannot") == 1
    after = relay_setup().expiring()
    after.session(**JAVA)
    assert after.play.value(name, method="token", reason="client_cannot") is None, "not even 0"


@pytest.mark.conforms("kip-368.57")
async def test_a_client_from_before_feature_flags_is_one_that_cannot(
    life: Begin, autojump_clock: trio.testing.MockClock
) -> None:
    it = life(100)
    await it.client.send(connect(client_version="1.20", protocol_version=12))
    answer = await it.client.expect_command(BaseCommand.CONNECTED)
    assert answer.connected.protocol_version == 12
    assert it.value("pulsar_proxy_authentication_no_reauth_total", method="token", reason="client_cannot") == 1
    await it.at(101)
    await it.client.send(lookup())
    await it.must_be_over("session_expired", EXPIRED)


@pytest.mark.conforms("kip-368.27", "kip-368.40")
@pytest.mark.parametrize("client", [OLD, {"feature_flags": None}], ids=["without the flag", "without flags"])
async def test_a_relay_counts_who_cannot_renew(relay_setup: MakeRelaySetup, client: dict[str, Any]) -> None:
    it = relay_setup().expiring()
    it.session(**client)
    assert it.play.value("pulsar_proxy_authentication_no_reauth_total", method="token", reason="client_cannot") == 1


@pytest.mark.conforms("kip-368.27", "kip-368.28", "kip-368.40")
@pytest.mark.parametrize(
    ("policy", "expiring", "connect", "counted"),
    [
        ("never", True, JAVA, {"disabled": 1}),
        ("never", True, CPP, {"disabled": 1}),
        ("never", True, OLD, {"client_cannot": 1}),
        ("never", False, JAVA, {}),
        ("by_client_kind", True, JAVA, {}),
        ("always", True, CPP, {}),
    ],
    ids=["Java", "C++", "that cannot, counted once", "that never expires", "by kind", "always"],
)
async def test_a_relay_counts_who_is_not_asked_by_the_policy(
    relay_setup: MakeRelaySetup, policy: str, expiring: bool, connect: dict[str, Any], counted: dict[str, int]
) -> None:
    it = relay_setup(session={"relay_reauthentication": policy}, metrics={"count_messages": True})
    if expiring:
        it.expiring()
    it.session(**connect)
    found = {
        reason: it.play.value("pulsar_proxy_authentication_no_reauth_total", method="token", reason=reason)
        for reason in ("client_cannot", "has_producer", "disabled")
    }
    assert {reason: value for reason, value in found.items() if value} == counted


async def test_lookup_mode_counts_no_client_by_the_policy_of_relays(
    life: Begin, autojump_clock: trio.testing.MockClock
) -> None:
    it = await life(100, session={"relay_reauthentication": "never"}).enter()
    assert it.value("pulsar_proxy_authentication_no_reauth_total", method="token", reason="disabled") is None


async def test_a_stored_session_contains_no_credentials(relay_setup: MakeRelaySetup) -> None:
    session = relay_setup().expiring().relay_session(original_auth_method="token", original_auth_data="0riginal")
    stored = session.to_stored_session().SerializeToString()
    assert SECRET not in stored
    assert b"0riginal" not in stored


async def test_the_end_of_the_handshake_forgets_no_rounds_of_a_relay(relay_setup: MakeRelaySetup) -> None:
    """The session that became a relay has ended; its client answers later, in as many rounds as it takes."""
    it = relay_setup().expiring()
    session = it.relay_session()
    it.lifetime.abandon_reauthentication()
    it.play.workers.authentication.answers = [challenge(b"q"), authenticated()]
    assert isinstance(await session.reauthenticate(answer_again(b"a0")), Challenge)
    assert isinstance(await session.reauthenticate(answer_again(b"a1")), ClientIdentity)
    first, second = it.play.workers.authentication.requests
    assert first.authentication_id == second.authentication_id
    assert it.play.workers.authentication.given_up == []


async def test_a_session_that_never_authenticated_ends(relay_setup: MakeRelaySetup) -> None:
    relay_setup().lifetime.abandon_reauthentication()


async def test_a_successor_authenticates_as_its_predecessor_did(relay_setup: MakeRelaySetup) -> None:
    """All but secrets is kept: the auth worker is told the same, in the same words."""
    it = relay_setup().expiring()
    session = it.relay_session(
        original_principal="bob", proxy_version="1", auth_method_name="token", original_auth_data="0riginal"
    )
    relay = StoredRelay(client_address=CLIENT)
    relay.session.CopyFrom(session.to_stored_session())
    workers = it.play.workers
    recalled = reauthenticator_factory(lambda: workers)(StoredRelay.FromString(relay.SerializeToString()))  # type: ignore[arg-type, return-value]
    verdicts = []
    for reauthenticate in (session.reauthenticate, recalled):
        workers.authentication.answers = [challenge(b"q"), denied()]
        verdicts.append([await reauthenticate(answer_again(data, "")) for data in (b"a0", b"a1")])
    assert verdicts[0] == verdicts[1]
    assert isinstance(verdicts[0][1], Denial)
    before, after = workers.authentication.requests[:2], workers.authentication.requests[2:]
    for request in (*before, *after):
        request.authentication_id = 0
    assert before == after
    assert before[0].original_principal == "bob"
    assert before[0].client_certificate == CERTIFICATE


async def test_a_successor_authenticates_by_the_settings_in_force(relay_setup: MakeRelaySetup) -> None:
    it = relay_setup().expiring()
    relay = StoredRelay(client_address=CLIENT)
    relay.session.CopyFrom(it.relay_session().to_stored_session())
    current = it.play.workers
    recalled = reauthenticator_factory(lambda: current)(relay)  # type: ignore[arg-type, return-value]
    current.config = make_config(brokers={"forward_authorization_credentials": True})
    verdict = await recalled(answer_again())
    assert isinstance(verdict, ClientIdentity)
    assert verdict.original == OriginalCredentials("token", NEW_SECRET.decode())


async def test_the_listener_and_the_certificate_are_kept(relay_setup: MakeRelaySetup) -> None:
    """A successor's auth worker is told the certificate, and the listener's maximum goes on to count."""
    listeners = [{"connections_max_reauth_ms": 0}, {"bind": "127.0.0.1:6651", "connections_max_reauth_ms": 7000}]
    it = relay_setup(listener=listeners)
    client = ClientEndpoint(CLIENT, 0.0, CERTIFICATE, listener=1)
    lifetime = it.lifetime_of(client)
    lifetime.on_authenticated(connect(TARGET).connect, it.principal)
    session = lifetime.relay_session(BROKER, ClientIdentity(it.principal))
    assert session is not None
    assert session.lifetime_ms_max == 7000
    assert session.to_stored_session().listener_bind == "127.0.0.1:6651", "its number may be another's in a successor"
    relay = StoredRelay(client_address=CLIENT)
    relay.session.CopyFrom(session.to_stored_session())
    workers = it.play.workers
    recalled = reauthenticator_factory(lambda: workers)(StoredRelay.FromString(relay.SerializeToString()))  # type: ignore[arg-type, return-value]
    for reauthenticate in (session.reauthenticate, recalled):
        await reauthenticate(answer_again())
        client = workers.authentication_clients[-1]
        assert (client.address, client.certificate) == (CLIENT, CERTIFICATE)
        assert workers.authentication.requests[-1].client_certificate == CERTIFICATE


async def test_a_listener_whose_name_is_too_long_is_not_kept(relay_setup: MakeRelaySetup) -> None:
    """Its sessions' ends are enforced."""
    it = relay_setup(listener=[{"bind": f"{'a' * LISTENER_BIND_MAX}:6650", "connections_max_reauth_ms": 7000}])
    lifetime = it.lifetime_of(ClientEndpoint(CLIENT, 0.0))
    lifetime.on_authenticated(connect(TARGET).connect, it.principal)
    session = lifetime.relay_session(BROKER, ClientIdentity(it.principal))
    assert session is not None
    assert session.to_stored_session().listener_bind == ""
