"""Relays that have moved to a successor, while verdicts and credentials for them are still on their way to the old
forwarder, which lives on: they change nothing of what is the successor's.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable

import pytest
import structlog.testing
import trio
import trio.testing
from framed_fakes import (
    BROKER_ASKS,
    BROKER_HOST,
    CHALLENGE,
    FakeCredentials,
    FakeReauthenticator,
    Now,
    answer,
    denied,
    error_in,
    identity,
    proxys_answer,
    send_frame,
    session,
)
from relay_fakes import PATIENCE_S, Forwarder, Lane, Place, busy_channel, open_lane, read, until

from proto import commands
from proto.commands import CommandCorrupt
from proto.connect_rules import AUTHENTICATION_FAILED
from proto.framed_stream import Action
from proto.session_clock import ReauthenticationFailure
from proxy.forwarder.lifetime import broker_reauthentication, reauthentication
from proxy.forwarder.lifetime.broker_reauthentication import NO_CREDENTIALS, TOO_LARGE
from proxy.forwarder.lifetime.closing import CloseReason
from proxy.forwarder.lifetime.session import BROKER_ANSWER_BYTES_MAX
from proxy.forwarder.workers.authentication import Challenge, Verdict
from proxy.runtime.rpc.errors import RpcError
from proxy.runtime.shared.relay_table import CLOSING, TO_CLIENT, framed_row

SERVER_FIRST = commands.auth_challenge("broker", 21, "token", b"server first")


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reauthentication, "QUIET_S", 0.01)
    monkeypatch.setattr(broker_reauthentication, "EXCHANGE_INTERVAL_S", 0.01)
    monkeypatch.setattr(broker_reauthentication, "RETRY_S_MAX", 0.01)


async def replaced(place: Place) -> Forwarder:
    """The successor of a forwarder that lives on."""
    await place.forwarders[-1].relays.hand_over_relays()
    return await place.forwarder()


def cells_of(forwarder: Forwarder, relay_id: int) -> list[int]:
    """All that the table says of a followed relay."""
    start = framed_row(relay_id, 0)
    end = framed_row(relay_id, 1) + framed_row(relay_id, 1) - start
    return list(forwarder.relays._ledger.table.cells[start:end])


def failures(forwarder: Forwarder) -> float:
    return float(forwarder.metrics.failure.labels(method="token")._value.get())


def successes(forwarder: Forwarder) -> float:
    return float(forwarder.metrics.success.labels(method="token")._value.get())


def broker_failures(forwarder: Forwarder, reason: str) -> float:
    return float(forwarder.broker_metrics.failure[reason]._value.get())


def no_service(_data: bytes) -> Verdict:
    raise RpcError("no auth worker")


def nonsense(_data: bytes) -> Verdict:
    raise CommandCorrupt("nonsense")


# ---- verdicts


@pytest.mark.parametrize(
    "verdict",
    [
        denied,
        identity,
        lambda _data: identity(name="bob"),
        lambda _data: Challenge(CHALLENGE),
        lambda _data: Challenge(bytes(5000)),
        no_service,
        nonsense,
    ],
    ids=["denied", "accepted", "another", "a further round", "too large a round", "no service", "corrupt"],
)
async def test_a_late_verdict_is_none(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, verdict: Callable[[bytes], Verdict]
) -> None:
    """The successor has asked the client again, and has a verdict of its own."""
    first = await place.forwarder()
    about = await first.begin(lane, session=session(now, reauthenticator))
    now.s += 86
    first.relays.reauthentication.send_due_challenges()
    await read(lane.client, len(CHALLENGE))
    reauthenticator.gate = late = trio.Event()
    await lane.client.send_all(answer())
    await until(lambda: reauthenticator.given)
    second = await replaced(place)
    reauthenticator.gate = None
    now.s += 1.5
    second.relays.reauthentication.send_due_challenges()
    await read(lane.client, len(CHALLENGE))
    await lane.client.send_all(answer())
    await until(lambda: successes(second) == 1)
    await place.settle()
    before = cells_of(second, about.id)
    reauthenticator.verdict = verdict
    with structlog.testing.capture_logs() as logs:
        late.set()
        await trio.testing.wait_all_tasks_blocked(0.01)
    assert cells_of(second, about.id) == before
    assert (failures(first), logs) == (0, [])
    reauthenticator.verdict = identity
    third = await replaced(place)
    await lane.client.send_all(send_frame())
    assert await read(lane.broker, len(send_frame())) == send_frame()
    assert third.relays.expiring_sessions()[0].close_reason is CloseReason.NOT_CLOSING


async def test_a_late_verdict_does_not_lengthen_another_relays_session(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator
) -> None:
    """The relay has ended meanwhile, and its number is another's."""
    first = await place.forwarder()
    about = await first.begin(lane, session=session(now, reauthenticator))
    now.s += 86
    reauthenticator.gate = trio.Event()
    await lane.client.send_all(answer())
    await until(lambda: reauthenticator.given)
    second = await replaced(place)
    for stream in (lane.client, lane.broker):
        await stream.aclose()
    await until(lambda: second.ended)
    await place.settle()
    async with open_lane() as other:
        short = await second.begin(other, session=session(now, reauthenticator, lifetime_ms=2000))
        assert short.id == about.id
        before = cells_of(second, short.id)
        reauthenticator.gate.set()
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert cells_of(second, short.id) == before


@pytest.mark.parametrize("word", ["failed", "still served", "go on", "ask"])
async def test_whatever_is_decided_late_is_not_said(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, word: str
) -> None:
    """Each of the line's words, from either side."""
    first = await place.forwarder()
    about = await first.begin(lane, session=session(now, reauthenticator))
    (followed,) = first.relays.expiring_sessions()
    second = await replaced(place)
    before = cells_of(second, about.id)
    line = followed.control
    if word == "failed":
        first.relays.reauthentication.on_failure(followed, ReauthenticationFailure.DENIED)
    elif word == "still served":
        first.relays.reauthentication.on_action(followed, followed.new_stream(TO_CLIENT), Action.CLOSE)
    elif word == "go on":
        line.record_observed_end()
        line.resume_after_verdict()
    else:
        line.send_challenge(CHALLENGE)
        line.close_with_error(CHALLENGE)
        assert not first.relays._engine.run_queue.active, "nothing would pump it"
    await trio.testing.wait_all_tasks_blocked(0.01)
    assert line.has_ended
    assert cells_of(second, about.id) == before


async def test_a_successor_completes_the_close_of_a_denied_client(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator
) -> None:
    first = await place.forwarder()
    await first.begin(lane, session=session(now, reauthenticator, failure_delay_ms=20))
    reauthenticator.verdict = denied
    now.s += 86
    await lane.client.send_all(answer())
    row = framed_row(1, TO_CLIENT)
    await until(lambda: first.relays._ledger.table.cells[row + CLOSING])
    await replaced(place)
    told = b""
    with trio.fail_after(60):
        async for data in lane.client:
            told += data
    assert error_in(told).error.message == AUTHENTICATION_FAILED


# ---- the proxy's own credentials


async def test_only_the_successor_goes_on_trying(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, credentials: FakeCredentials
) -> None:
    credentials.failing = 1 << 30
    first = await place.forwarder()
    await first.begin(lane, session=session(now, reauthenticator, lifetime_ms=0, broker_host=BROKER_HOST))
    await lane.broker.send_all(BROKER_ASKS)
    await until(lambda: broker_failures(first, NO_CREDENTIALS))
    await first.relays.hand_over_relays()
    by_then, begun = broker_failures(first, NO_CREDENTIALS), credentials.begun
    with trio.fail_after(PATIENCE_S):  # no task wakes up any more
        await trio.testing.wait_all_tasks_blocked(2 * broker_reauthentication.RETRY_S_MAX)
    assert broker_failures(first, NO_CREDENTIALS) == by_then
    assert credentials.begun == begun
    credentials.failing = 0
    second = await place.forwarder()
    assert await read(lane.broker, len(proxys_answer(b"1"))) == proxys_answer(b"%d" % credentials.begun)
    await until(lambda: second.broker_metrics.success._value.get() == 1)
    assert not any(bucket.get() for bucket in second.broker_metrics.seconds._buckets), "when it was asked is not known"


@pytest.mark.parametrize("how", ["answered", "failed", "too large"])
@pytest.mark.parametrize("further", [False, True])
async def test_late_credentials_are_not_used(  # noqa: PLR0917 -- fixtures
    place: Place,
    lane: Lane,
    now: Now,
    reauthenticator: FakeReauthenticator,
    credentials: FakeCredentials,
    how: str,
    further: bool,
) -> None:
    credentials.rounds = 2
    first = await place.forwarder()
    about = await first.begin(lane, session=session(now, reauthenticator, lifetime_ms=0, broker_host=BROKER_HOST))
    if further:
        await lane.broker.send_all(BROKER_ASKS)
        await read(lane.broker, len(proxys_answer(b"1")))
    credentials.gate = late = trio.Event()
    await lane.broker.send_all(SERVER_FIRST if further else BROKER_ASKS)
    await until(lambda: len(credentials.challenges) == 1 + further)
    await first.relays.hand_over_relays()
    before = cells_of(first, about.id)
    credentials.failing = how == "failed"
    credentials.padding = bytes(BROKER_ANSWER_BYTES_MAX) if how == "too large" else b""
    with structlog.testing.capture_logs() as logs:
        late.set()
        await trio.testing.wait_all_tasks_blocked(0.02)
    assert cells_of(first, about.id) == before
    assert (broker_failures(first, NO_CREDENTIALS), broker_failures(first, TOO_LARGE), logs) == (0, 0, [])
    assert first.broker_metrics.success._value.get() == 0


# ---- what is counted, and what is left


async def test_sessions_that_have_moved_are_not_this_forwarders(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator
) -> None:
    first = await place.forwarder()
    await first.begin(lane, session=session(now, reauthenticator))
    assert len(first.relays.expiring_sessions()) == 1
    second = await replaced(place)
    assert first.relays.expiring_sessions() == []
    assert len(second.relays.expiring_sessions()) == 1


async def test_a_relay_that_starts_during_a_hand_over_leaks_no_socket(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator
) -> None:
    """The garbage collector would close a leaked socket's descriptor when its number may belong to another one."""
    first = await place.forwarder()
    async with trio.open_nursery() as nursery, busy_channel(first.fd_store) as release:

        async def begin() -> None:
            await first.begin(lane, session=session(now, reauthenticator))

        nursery.start_soon(begin)
        await trio.testing.wait_all_tasks_blocked(0.01)
        nursery.start_soon(first.relays.hand_over_relays)
        await trio.testing.wait_all_tasks_blocked(0.01)
        release()
    second = await place.forwarder()
    assert len(second.adopted) == 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gc.collect()
    assert [str(one.message) for one in caught if issubclass(one.category, ResourceWarning)] == []
