"""proxy.forwarder.client.connection: the ends of a connection, and what is under way in that moment."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import structlog.testing
import trio
import trio.testing
from forwarder_fakes import (
    AUTHENTICATED,
    CLIENT,
    Play,
    SentEnvelope,
    auth_response,
    authenticated,
    challenge,
    connect,
    denied,
    lookup,
    lookup_answer,
)

from proto import commands
from proto.client_machine import State
from proto.errors import LocalProtocolError
from proto.pulsar_pb2 import BaseCommand, ServerError
from proto.rpc_pb2 import (
    AuthenticateResponse,
    Principal,
    Status,
)
from proxy.common.deny_list import credential_digest, parse_deny_list
from proxy.forwarder.client.phases import NEXT_PHASES, Phase
from proxy.forwarder.disconnect_cause import DisconnectCause
from proxy.forwarder.lifetime.reauthentication import DISCONNECTED

Start = Callable[..., Play]


# ---- phases

SERVING, DRAINING, STARTING_RELAY, RELAYED, ENDING = Phase

CHANGES = {
    *product((SERVING, DRAINING), (DRAINING, STARTING_RELAY, ENDING)),
    *product((STARTING_RELAY,), (RELAYED, ENDING)),
}


@pytest.mark.parametrize(("before", "after"), list(product(Phase, Phase)))
async def test_every_pair_of_phases(play: Start, before: Phase, after: Phase) -> None:
    session = play().session
    assert session.phase is SERVING
    session.phase = before
    if (before, after) in CHANGES:
        session.enter_phase(after)
        assert session.phase is after
    else:
        with pytest.raises(LocalProtocolError, match=f"^{after.value} after {before.value}$"):
            session.enter_phase(after)
        assert session.phase is before


def test_the_table_of_phases_is_complete() -> None:
    assert set(NEXT_PHASES) == set(Phase)


@pytest.mark.parametrize("phase", [STARTING_RELAY, RELAYED, ENDING])
async def test_a_connection_that_is_served_no_more_is_not_ended_from_outside(play: Start, phase: Phase) -> None:
    session = play().session
    session.phase = phase
    session.drain()
    session.shut_down()
    session.evict(DisconnectCause.OVER_SHARE)
    assert not session.disconnect()
    assert session.phase is phase
    assert session.state is State.AWAITING_CONNECT, "its machine is told nothing"
    assert session.cause is DisconnectCause.SHUT_DOWN, "as if nothing had been asked for"


async def test_a_connection_of_a_denied_credential_ends(play: Start) -> None:
    session = play().session
    session.identity = replace(session.identity, credentials=(credential_digest("token-id", "7"),))
    session.deny_if_listed(parse_deny_list(b"token-id 8", "file"))
    assert session.phase is SERVING
    session.deny_if_listed(parse_deny_list(b"token-id 7", "file"))
    assert session.phase is ENDING
    assert session.cause is DisconnectCause.DENIED


async def test_an_operators_end_comes_behind_the_answers_and_is_told(play: Start) -> None:
    it = await play().in_lookup_mode()
    it.workers.answer_by = None
    await it.client.send(lookup("a", 1))
    await trio.testing.wait_all_tasks_blocked()
    [sent] = it.workers.sent
    assert it.session.disconnect()
    await trio.testing.wait_all_tasks_blocked()
    assert it.session.phase is SERVING
    sent.answer(0)
    await it.client.expect_command(BaseCommand.LOOKUP_RESPONSE)
    assert await it.client.expect_error() == (ServerError.ServiceNotReady, DISCONNECTED)
    assert await it.end() == "disconnected"
    assert it.session.listed(0) is None


# ---- the session ends with answers on their way


Ending = Callable[[SentEnvelope], None]


ENDINGS: list[Ending] = [
    lambda sent: sent.answer(0, 1),
    lambda sent: sent.answer(1, more=True),
    lambda sent: sent.refuse(Status.TOO_MANY_REQUESTS),
    lambda sent: sent.lose(),
    lambda sent: sent.send(b"\xff\xff"),
]


@pytest.mark.parametrize("fast_path", [True, False])
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("passes", range(8))
async def test_an_answer_at_any_moment_of_the_sessions_end(
    play: Start, passes: int, ending: Ending, fast_path: bool
) -> None:
    """A nursery is closed a moment before its session knows; whatever comes then must start nothing in it."""
    it = await play().in_lookup_mode()
    it.workers.answer_by, it.workers.fast_path = None, fast_path
    await it.client.send(lookup("a", 1), lookup("b", 2))
    await trio.testing.wait_all_tasks_blocked()
    [sent] = it.workers.sent
    await it.client.send(connect())  # out of turn: the connection ends at once
    for _ in range(passes):
        await trio.lowlevel.checkpoint()
    ending(sent)
    await it.client.read_all()
    await it.client.stream.aclose()
    assert await it.end() == "not_allowed"


async def test_the_end_from_outside_with_answers_on_their_way(play: Start) -> None:
    it = await play().in_lookup_mode()
    it.workers.answer_by = None
    await it.client.send(lookup("a", 1), lookup("b", 2))
    await trio.testing.wait_all_tasks_blocked()
    it.session.shut_down()
    it.session.shut_down()
    assert await it.end() == "shut_down"
    [sent] = it.workers.sent
    sent.answer(0)
    sent.lose()
    await trio.testing.wait_all_tasks_blocked()
    assert len(it.workers.sent) == 1
    await it.client.expect_end()


# ---- leaving


async def test_the_client_leaves(play: Start) -> None:
    for story in ([], [connect()], [connect(), lookup()]):
        it = play()
        for command in story:
            await it.client.send(command)
            await trio.testing.wait_all_tasks_blocked()
        await it.client.stream.send_eof()
        assert await it.end() == "client_closed"
        assert it.session.state is State.CLOSED


async def test_a_client_that_ends_its_direction_still_gets_its_answers(play: Start) -> None:
    it = await play().in_lookup_mode()
    gate = trio.Event()

    async def answer_by(_request: bytes) -> BaseCommand:
        await gate.wait()
        return lookup_answer(7)

    it.workers.answer_by = answer_by
    await it.client.send(lookup())
    await it.client.stream.send_eof()
    await trio.testing.wait_all_tasks_blocked()
    gate.set()
    await it.client.expect_command(BaseCommand.LOOKUP_RESPONSE)
    await it.client.expect_end()
    assert await it.end() == "client_closed"


async def test_the_client_leaves_while_it_is_authenticated(play: Start) -> None:
    it = play(authentication=AUTHENTICATED)
    it.workers.authentication.answers = [trio.sleep_forever]
    await it.client.send(connect())
    await trio.testing.wait_all_tasks_blocked()
    await it.client.stream.aclose()
    assert await it.end() == "client_closed"


@pytest.mark.parametrize("ends", ["leaves", "answers wrongly"])
async def test_the_auth_worker_is_told_of_an_abandoned_exchange(play: Start, ends: str) -> None:
    it = play(authentication=AUTHENTICATED)
    it.workers.authentication.answers = [challenge(b"q")]
    await it.client.send(connect())
    await it.client.expect_command(BaseCommand.AUTH_CHALLENGE)
    if ends == "leaves":
        await it.client.stream.aclose()
    else:
        await it.client.send(lookup())
        await it.client.expect_error()
    await it.end()
    assert it.workers.authentication.given_up == [1]


async def test_an_authentication_that_is_over_is_not_given_up(play: Start) -> None:
    it = play(authentication=AUTHENTICATED)
    it.workers.authentication.answers = [challenge(b"q"), denied()]
    await it.client.send(connect())
    await it.client.expect_command(BaseCommand.AUTH_CHALLENGE)
    await it.client.send(auth_response(b"a"))
    await it.client.expect_error()
    assert it.workers.authentication.given_up == []


@pytest.mark.parametrize("cause", [ConnectionResetError(), ssl.SSLError(1, "too many records without data")])
async def test_the_connection_breaks(nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch, cause: OSError) -> None:
    """Nobody needs to know of a reset, but of what a peer has done to TLS."""
    it = await Play(nursery).in_lookup_mode()
    gate = trio.Event()

    async def reset(_size: int) -> bytes:
        await gate.wait()
        raise trio.BrokenResourceError("why") from cause

    monkeypatch.setattr(it.stream, "receive_some", reset)
    await it.client.send(commands.ping())
    await it.client.expect_command(BaseCommand.PONG)
    with structlog.testing.capture_logs() as logs:
        gate.set()
        assert await it.end() == "client_broke_off"
    events = [(line["event"], line["reason"]) for line in logs]
    is_tls = isinstance(cause, ssl.SSLError)
    assert events == ([("a client's connection ends, since TLS has failed", "why")] if is_tls else [])


async def test_a_client_that_is_gone_when_its_error_is_to_be_said(
    play: Start, autojump_clock: trio.testing.MockClock
) -> None:
    it = play(authentication=AUTHENTICATED)
    it.workers.authentication.answers = [denied()]
    await it.client.send(connect())
    await trio.sleep(0.1)
    await it.client.stream.aclose()
    assert await it.end() == "authentication_failed"


async def test_a_client_that_is_gone_when_its_answer_comes(play: Start) -> None:
    it = await play().in_lookup_mode()

    async def answer_by(_request: bytes) -> BaseCommand:
        await it.client.stream.aclose()
        return lookup_answer(1)

    it.workers.answer_by = answer_by
    await it.client.send(lookup())
    assert await it.end() in {"client_closed", "client_broke_off"}, "its end is met twice: who reads, who sends"


async def test_drain_while_idle_in_lookup_mode(play: Start) -> None:
    it = await play().in_lookup_mode()
    it.session.drain()
    await it.client.expect_end()
    assert await it.end() == "shut_down"


async def test_drain_before_connect(play: Start) -> None:
    it = play()
    await trio.testing.wait_all_tasks_blocked()
    it.session.drain()
    await it.client.expect_end()
    assert await it.end() == "shut_down"


async def test_drain_lets_lookups_finish(play: Start) -> None:
    it = await play().in_lookup_mode()
    gate = trio.Event()

    async def answer_by(_request: bytes) -> BaseCommand:
        await gate.wait()
        return lookup_answer(7)

    it.workers.answer_by = answer_by
    await it.client.send(lookup())
    await trio.testing.wait_all_tasks_blocked()
    it.session.drain()
    await trio.testing.wait_all_tasks_blocked()
    assert not it.ended.is_set()
    gate.set()
    await it.client.expect_command(BaseCommand.LOOKUP_RESPONSE)
    await it.client.expect_end()
    assert await it.end() == "shut_down"


async def test_drain_lets_an_authentication_finish(play: Start) -> None:
    it = play(authentication=AUTHENTICATED)
    gate = trio.Event()

    async def slow() -> AuthenticateResponse:
        await gate.wait()
        return authenticated(Principal(name="bob"))

    it.workers.authentication.answers = [slow]
    await it.client.send(connect())
    await trio.testing.wait_all_tasks_blocked()
    it.session.drain()
    await trio.testing.wait_all_tasks_blocked()
    assert not it.ended.is_set()
    gate.set()
    await it.client.expect_command(BaseCommand.CONNECTED)
    await it.client.expect_end()
    assert await it.end() == "shut_down"


async def test_a_defect_ends_this_session_and_is_not_hidden(play: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    it = await play().in_lookup_mode()

    def defect(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(it.workers, "forward_envelope_now", defect)
    with structlog.testing.capture_logs() as logs:
        await it.client.send(lookup())
        assert await it.end() == "defect"
    [entry] = logs
    assert (entry["client"], type(entry["exc_info"])) == (CLIENT, ZeroDivisionError)
    await it.client.expect_end()


async def test_a_defect_in_a_task_ends_this_session_and_is_not_hidden(play: Start) -> None:
    it = play(authentication=AUTHENTICATED)

    async def defect() -> AuthenticateResponse:
        await trio.lowlevel.checkpoint()
        raise ZeroDivisionError

    it.workers.authentication.answers, it.workers.authentication.nursery = [defect], None
    with structlog.testing.capture_logs() as logs:
        await it.client.send(connect())
        assert await it.end() == "defect"
    assert [type(entry["exc_info"]) for entry in logs] == [ZeroDivisionError]
    await it.client.expect_end()


async def test_failures_are_logged_with_who_and_why(play: Start, autojump_clock: trio.testing.MockClock) -> None:
    it = play(authentication=AUTHENTICATED)
    it.workers.authentication.answers = [denied("expired")]
    with structlog.testing.capture_logs() as logs:
        await it.client.send(connect("b0:6650"))
        await it.end()
    [entry] = logs
    assert entry["client"] == CLIENT
    assert entry["target"] == "b0:6650"
    assert entry["cause"] == "authentication_failed"
    assert "expired" in entry["reason"]
