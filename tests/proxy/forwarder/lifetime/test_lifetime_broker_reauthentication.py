"""proxy.forwarder.lifetime.broker_reauthentication in spliced relays: the broker asks the proxy, and the client
sees nothing."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing
from adoption_fakes import successor
from framed_fakes import (
    BROKER_ASKS,
    BROKER_HOST,
    CHALLENGE,
    SERVER_FIRST,
    FakeCredentials,
    FakeReauthenticator,
    Now,
    answer,
    error_in,
    message_frame,
    proxys_answer,
    send_frame,
    session,
)
from relay_fakes import PATIENCE_S, Forwarder, Lane, Place, expect, read, read_all, until

from proto import commands
from proto.broker_handshake import ROUNDS_MAX
from proto.framed_stream import CHALLENGE_BYTES_MAX
from proto.frames import encode_frame
from proxy.forwarder.lifetime import broker_reauthentication, reauthentication
from proxy.forwarder.lifetime.broker_reauthentication import LOST_ROUNDS, NO_CREDENTIALS, OUT_OF_TURN, TOO_LARGE
from proxy.forwarder.lifetime.closing import CloseReason
from proxy.forwarder.lifetime.reauthentication import BROKER_OUT_OF_TURN, STREAM_CORRUPT
from proxy.forwarder.lifetime.session import (
    BROKER_ANSWER_BYTES_MAX,
    INJECTION_BYTES_MAX,
)
from proxy.forwarder.relay.pipes import SMALL_PIPE_BYTES, PipePool
from proxy.forwarder.relay.relay import Direction, RelayStartFailed
from proxy.runtime.shared.relay_table import EXCHANGE, TO_BROKER, framed_row

WAYS = ["killed", "handed over"]


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reauthentication, "QUIET_S", 0.01)
    monkeypatch.setattr(broker_reauthentication, "EXCHANGE_INTERVAL_S", 0.01)


async def begun(place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, **fields: Any) -> Forwarder:
    """A relay whose client's session never ends, but that of the proxy at its broker does."""
    forwarder = await place.forwarder()
    known: dict[str, Any] = {"lifetime_ms": 0, "broker_host": BROKER_HOST} | fields
    await forwarder.begin(lane, session=session(now, reauthenticator, **known))
    return forwarder


def succeeded(forwarder: Forwarder) -> float:
    return forwarder.broker_metrics.success._value.get()


def timed(forwarder: Forwarder) -> float:
    return sum(bucket.get() for bucket in forwarder.broker_metrics.seconds._buckets)


def failed(forwarder: Forwarder, reason: str) -> float:
    return forwarder.broker_metrics.failure[reason]._value.get()


# ---- asked and answered


@pytest.mark.conforms("kip-368.11", "kip-368.33")
async def test_the_proxy_answers_and_the_client_sees_nothing(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, credentials: FakeCredentials
) -> None:
    forwarder = await begun(place, lane, now, reauthenticator)
    for number in range(1, 4):
        before, behind = message_frame(b"before"), message_frame(b"behind")
        await lane.broker.send_all(before + BROKER_ASKS + behind)
        await expect(lane.client, before + behind)
        await expect(lane.broker, proxys_answer(b"%d" % number))
        await until(lambda number=number: succeeded(forwarder) == number)
        assert timed(forwarder) == number
    assert credentials.hosts == [BROKER_HOST] * 3
    assert credentials.challenges == [None] * 3, "each time as if it connected"
    assert reauthenticator.given == []


@pytest.mark.parametrize("cut", [1, 4, 9, 10, 11, 25, len(BROKER_ASKS) - 1])
async def test_a_challenge_in_every_two_pieces(  # noqa: PLR0917 -- fixtures
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, credentials: FakeCredentials, cut: int
) -> None:
    await begun(place, lane, now, reauthenticator)
    await lane.broker.send_all(message_frame() + BROKER_ASKS[:cut])
    await expect(lane.client, message_frame())
    await trio.testing.wait_all_tasks_blocked(0.01)
    assert credentials.begun == 0
    await lane.broker.send_all(BROKER_ASKS[cut:] + message_frame())
    await expect(lane.client, message_frame())
    await expect(lane.broker, proxys_answer(b"1"))


@pytest.mark.conforms("kip-368.11")
async def test_all_rounds_are_answered_within_one_exchange(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, credentials: FakeCredentials
) -> None:
    credentials.rounds = 2
    forwarder = await begun(place, lane, now, reauthenticator)
    for number in (1, 2):
        await lane.broker.send_all(BROKER_ASKS)
        await expect(lane.broker, proxys_answer(b"%d" % number))
        assert succeeded(forwarder) == number - 1, "the broker owes a proof yet"
        await lane.broker.send_all(SERVER_FIRST + message_frame())
        await expect(lane.client, message_frame())
        await expect(lane.broker, proxys_answer(b"%d." % number))
        await until(lambda number=number: succeeded(forwarder) == number)
    assert credentials.challenges == [None, b"server first"] * 2


async def test_an_answer_is_never_put_into_a_clients_frame(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, credentials: FakeCredentials
) -> None:
    """Neither where its beginning has passed, nor into what waits in the pipe."""
    await begun(place, lane, now, reauthenticator)
    frame = send_frame(b"x" * 3000)
    await lane.client.send_all(frame[:1000])
    await expect(lane.broker, frame[:1000])
    await lane.broker.send_all(BROKER_ASKS)
    await until(lambda: credentials.begun)
    await trio.testing.wait_all_tasks_blocked(0.01)
    await lane.client.send_all(frame[1000:] + frame)
    await expect(lane.broker, frame[1000:] + proxys_answer(b"1") + frame)


async def test_an_answer_waits_for_what_the_broker_does_not_take(
    place: Place, narrow_lane: Lane, now: Now, reauthenticator: FakeReauthenticator, credentials: FakeCredentials
) -> None:
    await begun(place, narrow_lane, now, reauthenticator)
    frames = [send_frame(bytes([number]) * 40_000, number) for number in range(1, 21)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(narrow_lane.client.send_all, b"".join(frames))
        await trio.testing.wait_all_tasks_blocked(0.02)  # as much as there is room for is on its way
        await narrow_lane.broker.send_all(BROKER_ASKS)
        await until(lambda: credentials.begun)
        found = await read(narrow_lane.broker, len(b"".join(frames)) + len(proxys_answer(b"1")))
    at = found.index(proxys_answer(b"1"))
    ends = {sum(map(len, frames[:number])) for number in range(len(frames) + 1)}
    assert at in ends
    assert found[:at] + found[at + len(proxys_answer(b"1")) :] == b"".join(frames)


async def test_an_answer_overtakes_the_beginning_of_a_frame_that_is_held(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, credentials: FakeCredentials
) -> None:
    """A client that stops within a header delays no reauthentication: nothing of that frame was sent."""
    await begun(place, lane, now, reauthenticator)
    frame = send_frame(b"x" * 30)
    await lane.client.send_all(frame + frame[:7])
    await expect(lane.broker, frame)
    await trio.testing.wait_all_tasks_blocked(0.01)
    await lane.broker.send_all(BROKER_ASKS)
    await expect(lane.broker, proxys_answer(b"1"))
    await lane.client.send_all(frame[7:])
    await expect(lane.broker, frame)


async def test_an_answer_overtakes_a_clients_own_that_is_being_taken_out(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, credentials: FakeCredentials
) -> None:
    await begun(place, lane, now, reauthenticator, lifetime_ms=100_000)
    now.s += 10
    await lane.client.send_all(answer(b"unasked" * 10)[:60])
    await trio.testing.wait_all_tasks_blocked(0.01)
    await lane.broker.send_all(BROKER_ASKS)
    await expect(lane.broker, proxys_answer(b"1"))
    await lane.client.send_all(answer(b"unasked" * 10)[60:] + send_frame())
    await expect(lane.broker, send_frame())
    await until(lambda: reauthenticator.given == [b"unasked" * 10])


async def test_both_sides_are_asked_at_the_same_time(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, credentials: FakeCredentials
) -> None:
    """The client for its own credentials, by the proxy; the proxy for its own, by the broker."""
    forwarder = await begun(place, lane, now, reauthenticator, lifetime_ms=100_000)
    for number in (1, 2):
        now.s += 90
        await lane.broker.send_all(BROKER_ASKS[:30])
        await trio.testing.wait_all_tasks_blocked(0.01)
        forwarder.relays.reauthentication.send_due_challenges()
        await expect(lane.client, CHALLENGE)
        await lane.broker.send_all(BROKER_ASKS[30:] + message_frame())
        await expect(lane.client, message_frame())
        await expect(lane.broker, proxys_answer(b"%d" % number))
        await lane.client.send_all(answer(b"alice's") + send_frame())
        await expect(lane.broker, send_frame())
        await until(lambda number=number: reauthenticator.given == [b"alice's"] * number)
        await until(lambda number=number: forwarder.metrics.success.labels(method="token")._value.get() == number)
    assert succeeded(forwarder) == 2


async def test_an_expired_client_that_waits_for_its_verdict_does_not_hold_the_answer_up(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, credentials: FakeCredentials
) -> None:
    reauthenticator.gate = trio.Event()
    await begun(place, lane, now, reauthenticator, lifetime_ms=100_000)
    now.s += 110
    await lane.client.send_all(answer() + send_frame())
    await until(lambda: reauthenticator.given)
    await lane.broker.send_all(BROKER_ASKS)
    await expect(lane.broker, proxys_answer(b"1"))
    reauthenticator.gate.set()
    await expect(lane.broker, send_frame())


async def test_a_challenge_past_the_grace_of_the_client_is_no_use(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, credentials: FakeCredentials
) -> None:
    await begun(place, lane, now, reauthenticator, lifetime_ms=100_000, challenge=b"", grace_ms=0)
    now.s += 200
    await lane.broker.send_all(BROKER_ASKS + commands.ping())
    await expect(lane.client, commands.ping())
    await expect(lane.broker, proxys_answer(b"1"))


async def test_without_a_host_the_client_is_asked_as_ever(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, credentials: FakeCredentials
) -> None:
    """With forwarded credentials; where the frames are followed for another reason, too."""
    await begun(place, lane, now, reauthenticator, broker_host="", counts_messages=True)
    await lane.broker.send_all(BROKER_ASKS)
    await expect(lane.client, BROKER_ASKS)
    await lane.client.send_all(answer(b"alice's own"))
    await expect(lane.broker, answer(b"alice's own"))
    assert credentials.begun == 0


async def test_where_neither_ends_the_relay_is_blind(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, credentials: FakeCredentials
) -> None:
    forwarder = await begun(place, lane, now, reauthenticator, broker_host="")
    await lane.broker.send_all(b"anything")
    await expect(lane.client, b"anything")
    assert forwarder.relays.expiring_sessions() == []


async def test_a_challenge_right_behind_connected_begins_no_relay(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, credentials: FakeCredentials
) -> None:
    forwarder = await place.forwarder()
    known = session(now, reauthenticator, lifetime_ms=0, broker_host=BROKER_HOST)
    with pytest.raises(RelayStartFailed, match="before the relay began"):
        await forwarder.begin(lane, to_client=message_frame() + BROKER_ASKS, session=known)


# ---- large answers


async def test_an_answer_larger_than_a_page(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, credentials: FakeCredentials
) -> None:
    await begun(place, lane, now, reauthenticator)
    credentials.padding = bytes(BROKER_ANSWER_BYTES_MAX - 100)
    expected = proxys_answer(b"1" + credentials.padding)
    assert INJECTION_BYTES_MAX < len(expected) <= BROKER_ANSWER_BYTES_MAX
    await lane.broker.send_all(BROKER_ASKS)
    await expect(lane.broker, expected)


async def test_an_answer_that_is_too_large_is_not_given(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, credentials: FakeCredentials
) -> None:
    """The relay goes on for as long as the broker lets it; when it asks again, that is answered."""
    forwarder = await begun(place, lane, now, reauthenticator)
    credentials.padding = bytes(BROKER_ANSWER_BYTES_MAX)
    await lane.broker.send_all(BROKER_ASKS)
    await until(lambda: failed(forwarder, TOO_LARGE) == 1)
    await lane.client.send_all(send_frame())
    await expect(lane.broker, send_frame())
    credentials.padding = b""
    await lane.broker.send_all(BROKER_ASKS)
    await expect(lane.broker, proxys_answer(b"2"))


async def test_a_large_answer_waits_for_a_large_pipe_and_holds_nothing_up(  # noqa: PLR0917 -- fixtures
    place: Place,
    lane: Lane,
    now: Now,
    reauthenticator: FakeReauthenticator,
    credentials: FakeCredentials,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No pipe is lost on the way."""
    forwarder = await begun(place, lane, now, reauthenticator)
    credentials.padding = bytes(10_000)
    monkeypatch.setattr(PipePool, "_may_create", lambda _pool, wanted: wanted == SMALL_PIPE_BYTES)
    pool = forwarder.relays._engine._pool
    large = [pipe for free in pool._free.values() for pipe in free if pipe.size_bytes > SMALL_PIPE_BYTES]
    pump = forwarder.relays._engine.pump
    pipe_lane = pool.lanes[0]
    monkeypatch.setattr(pipe_lane, "ready", None)
    for free in pool._free.values():
        free.clear()
    pool.release_pipe(small := pool._create(SMALL_PIPE_BYTES))
    monkeypatch.setattr(small, "size_bytes", SMALL_PIPE_BYTES)
    await lane.broker.send_all(BROKER_ASKS)
    await until(lambda: pump.to_recheck)
    for number in range(3):
        await lane.client.send_all(send_frame(b"%d" % number))
        await expect(lane.broker, send_frame(b"%d" % number))
    in_hand = [] if pipe_lane.ready is None else [pipe_lane.ready]
    assert [*in_hand, *(pipe for free in pool._free.values() for pipe in free)] == [small]
    for pipe in large:
        pool.release_pipe(pipe)
    await expect(lane.broker, proxys_answer(b"1" + credentials.padding))


# ---- what goes wrong


async def test_no_credentials_now_is_tried_again(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, credentials: FakeCredentials
) -> None:
    credentials.failing = 3
    forwarder = await begun(place, lane, now, reauthenticator)
    await lane.broker.send_all(BROKER_ASKS)
    await expect(lane.broker, proxys_answer(b"4"))
    assert failed(forwarder, NO_CREDENTIALS) == 3
    await until(lambda: succeeded(forwarder) == 1)


async def test_credentials_that_are_not_configured_any_more_are_not_answered_with_none(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, credentials: FakeCredentials
) -> None:
    credentials.configured = False
    forwarder = await begun(place, lane, now, reauthenticator)
    await lane.broker.send_all(BROKER_ASKS)
    await until(lambda: failed(forwarder, NO_CREDENTIALS))
    credentials.configured = True
    await until(lambda: succeeded(forwarder) == 1)
    assert (await lane.broker.receive_some()) == proxys_answer(b"%d" % credentials.begun)


async def test_an_ended_relay_gets_no_credentials(  # noqa: PLR0917 -- fixtures
    place: Place,
    lane: Lane,
    now: Now,
    reauthenticator: FakeReauthenticator,
    credentials: FakeCredentials,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broker_reauthentication, "RETRY_S_MAX", 0.01)
    credentials.failing = 1 << 30
    forwarder = await begun(place, lane, now, reauthenticator)
    await lane.broker.send_all(BROKER_ASKS)
    await until(lambda: credentials.begun > 1)
    await lane.broker.send_eof()
    await lane.client.send_eof()
    await until(lambda: forwarder.ended)
    begun_by_then = credentials.begun
    with trio.fail_after(PATIENCE_S):  # no task wakes up any more
        await trio.testing.wait_all_tasks_blocked(2 * broker_reauthentication.RETRY_S_MAX)
    assert credentials.begun <= begun_by_then + 1


async def test_a_further_round_is_never_tried_twice(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, credentials: FakeCredentials
) -> None:
    credentials.rounds = 2
    forwarder = await begun(place, lane, now, reauthenticator)
    await lane.broker.send_all(BROKER_ASKS)
    await expect(lane.broker, proxys_answer(b"1"))
    credentials.failing = 1
    await lane.broker.send_all(SERVER_FIRST)
    await until(lambda: failed(forwarder, NO_CREDENTIALS) == 1)
    await lane.broker.send_all(BROKER_ASKS)
    await expect(lane.broker, proxys_answer(b"2"))
    assert credentials.challenges == [None, b"server first", None]


async def expect_out_of_turn(lane: Lane, forwarder: Forwarder) -> None:
    error = error_in(await read_all(lane.client)).error
    assert error.message == BROKER_OUT_OF_TURN
    assert failed(forwarder, OUT_OF_TURN) == 1
    await until(lambda: forwarder.ended)


async def test_a_second_challenge_before_the_answer_ends_the_relay(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, credentials: FakeCredentials
) -> None:
    credentials.gate = trio.Event()
    forwarder = await begun(place, lane, now, reauthenticator)
    await lane.broker.send_all(BROKER_ASKS)
    await until(lambda: credentials.challenges)
    await lane.broker.send_all(BROKER_ASKS)
    await expect_out_of_turn(lane, forwarder)
    credentials.gate.set()
    assert await read_all(lane.broker) == b"", "nothing passes to a broker that is being left"


async def test_an_answer_that_waits_is_dropped_once_the_relay_is_being_closed(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, credentials: FakeCredentials
) -> None:
    forwarder = await begun(place, lane, now, reauthenticator)
    frame = send_frame(b"x" * 3000)
    await lane.client.send_all(frame[:1000])
    await expect(lane.broker, frame[:1000])
    await lane.broker.send_all(BROKER_ASKS)
    (followed,) = forwarder.relays.expiring_sessions()
    (relay,) = forwarder.relays._engine.relays
    await until(lambda: relay.to_broker.cursor is not None and relay.to_broker.cursor.stream.own)
    followed.control.start_closing(CloseReason.MAX_AGE)
    await lane.client.send_all(frame[1000:])
    assert await read_all(lane.broker) == frame[1000:]
    assert succeeded(forwarder) == 0


async def test_a_flood_of_challenges_starves_no_other_relay(  # noqa: PLR0917 -- fixtures
    place: Place,
    lane: Lane,
    now: Now,
    reauthenticator: FakeReauthenticator,
    credentials: FakeCredentials,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In each turn of its relay one is taken out; between turns all other relays have theirs."""
    credentials.gate = trio.Event()
    forwarder = await begun(place, lane, now, reauthenticator)
    (relay,) = forwarder.relays._engine.relays
    pump, take = relay.to_client.pump, broker_reauthentication.BrokerReauthentication.on_challenge_frame
    taken: list[bytes] = []
    in_turns: list[int] = []

    def noted(challenges: Any, frame: bytes) -> None:
        taken.append(frame)
        take(challenges, frame)

    def counted(direction: Direction) -> None:
        before = len(taken)
        pump(direction)
        in_turns.append(len(taken) - before)

    monkeypatch.setattr(broker_reauthentication.BrokerReauthentication, "on_challenge_frame", noted)
    relay.to_client.pump = counted
    await lane.broker.send_all(BROKER_ASKS * 500)
    await expect_out_of_turn(lane, forwarder)
    assert len(taken) > 1
    assert max(in_turns) == 1


async def test_exchanges_begin_no_faster_than_once_a_second(  # noqa: PLR0917 -- fixtures
    place: Place,
    lane: Lane,
    now: Now,
    reauthenticator: FakeReauthenticator,
    credentials: FakeCredentials,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A broker that asks as soon as it is answered waits; none of it counts as a mistake."""
    monkeypatch.setattr(broker_reauthentication, "EXCHANGE_INTERVAL_S", 0.3)
    forwarder = await begun(place, lane, now, reauthenticator)
    times = []
    for number in range(1, 4):
        await lane.broker.send_all(BROKER_ASKS)
        await expect(lane.broker, proxys_answer(b"%d" % number))
        times.append(trio.current_time())
    assert times[1] - times[0] > 0.2
    assert times[2] - times[1] > 0.2
    assert failed(forwarder, OUT_OF_TURN) == 0


async def test_endless_rounds_end_the_relay(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, credentials: FakeCredentials
) -> None:
    credentials.rounds = 1000
    forwarder = await begun(place, lane, now, reauthenticator)
    await lane.broker.send_all(BROKER_ASKS)
    for number in range(ROUNDS_MAX):
        await expect(lane.broker, proxys_answer(b"1" + b"." * number))
        await lane.broker.send_all(SERVER_FIRST)
    await expect_out_of_turn(lane, forwarder)
    assert len(credentials.challenges) == ROUNDS_MAX


@pytest.mark.parametrize(
    "body", [b"\x08\x24\xff\xff", b"\x08\x24", b"\x08\x24\xa2\x02\x7f"], ids=["no protobuf", "empty", "cut off"]
)
async def test_a_challenge_that_is_none_ends_the_relay(  # noqa: PLR0917 -- fixtures
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, credentials: FakeCredentials, body: bytes
) -> None:
    forwarder = await begun(place, lane, now, reauthenticator)
    await lane.broker.send_all(encode_frame(body))
    await expect_out_of_turn(lane, forwarder)
    assert credentials.begun == 0


async def test_a_challenge_that_is_too_large_ends_the_relay_unread(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, credentials: FakeCredentials
) -> None:
    forwarder = await begun(place, lane, now, reauthenticator)
    large = commands.auth_challenge("broker", 21, "token", bytes(CHALLENGE_BYTES_MAX))
    await lane.broker.send_all(message_frame() + large[:100])
    rest = await read_all(lane.client)
    assert rest.startswith(message_frame())
    assert error_in(rest[len(message_frame()) :]).error.message == STREAM_CORRUPT
    await until(lambda: forwarder.ended)
    assert credentials.begun == 0


async def test_a_broker_that_ends_within_a_challenge(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, credentials: FakeCredentials
) -> None:
    forwarder = await begun(place, lane, now, reauthenticator)
    await lane.broker.send_all(message_frame() + BROKER_ASKS[:20])
    await lane.broker.send_eof()
    assert await read_all(lane.client) == message_frame()
    await lane.client.send_eof()
    await until(lambda: forwarder.ended)


async def test_a_client_that_has_said_all_leaves_the_broker_unanswered(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, credentials: FakeCredentials
) -> None:
    """Nothing can be said to that broker any more; what it still says is delivered."""
    forwarder = await begun(place, lane, now, reauthenticator)
    await lane.client.send_eof()
    assert await read_all(lane.broker) == b""
    await lane.broker.send_all(BROKER_ASKS + message_frame())
    await expect(lane.client, message_frame())
    await lane.broker.send_eof()
    await until(lambda: forwarder.ended)


# ---- and the forwarder dies


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cut", [0, 1, 9, 10, 30, len(BROKER_ASKS) - 1, len(BROKER_ASKS)])
async def test_a_challenge_survives_its_forwarder(  # noqa: PLR0917 -- fixtures
    place: Place,
    lane: Lane,
    now: Now,
    reauthenticator: FakeReauthenticator,
    credentials: FakeCredentials,
    way: str,
    cut: int,
) -> None:
    """However much of it was taken out, and where its answer was under way: the successor answers it, once."""
    credentials.gate = trio.Event()
    await begun(place, lane, now, reauthenticator)
    await lane.broker.send_all(message_frame() + BROKER_ASKS[:cut])
    await expect(lane.client, message_frame())
    await trio.testing.wait_all_tasks_blocked(0.01)
    second = await successor(place, way)
    credentials.gate.set()
    await lane.broker.send_all(BROKER_ASKS[cut:] + message_frame())
    await expect(lane.client, message_frame())
    await expect(lane.broker, proxys_answer(b"%d" % (2 if cut == len(BROKER_ASKS) else 1)))
    await until(lambda: succeeded(second) == 1)
    await lane.broker.send_all(BROKER_ASKS)
    await expect(lane.broker, proxys_answer(b"%d" % (3 if cut == len(BROKER_ASKS) else 2)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cut", [0, 30, len(SERVER_FIRST)])
async def test_rounds_die_with_their_forwarder(  # noqa: PLR0917 -- fixtures
    place: Place,
    lane: Lane,
    now: Now,
    reauthenticator: FakeReauthenticator,
    credentials: FakeCredentials,
    way: str,
    cut: int,
) -> None:
    """No other worker can go on with them: what belongs to them is taken out and not answered; a new exchange is."""
    credentials.rounds = 2
    await begun(place, lane, now, reauthenticator)
    await lane.broker.send_all(BROKER_ASKS)
    await expect(lane.broker, proxys_answer(b"1"))
    credentials.gate = trio.Event()
    await lane.broker.send_all(message_frame() + SERVER_FIRST[:cut])
    await expect(lane.client, message_frame())
    await trio.testing.wait_all_tasks_blocked(0.01)
    second = await successor(place, way)
    credentials.gate.set()
    await lane.broker.send_all(SERVER_FIRST[cut:] + message_frame())
    await expect(lane.client, message_frame())
    await until(lambda: failed(second, LOST_ROUNDS) == 1)
    await lane.broker.send_all(BROKER_ASKS)
    await expect(lane.broker, proxys_answer(b"2"))


async def test_the_table_says_where_the_exchange_stands(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, credentials: FakeCredentials
) -> None:
    credentials.rounds = 2
    credentials.gate = trio.Event()
    forwarder = await begun(place, lane, now, reauthenticator)
    (followed,) = forwarder.relays.expiring_sessions()
    cells, cell = forwarder.relays._ledger.table.cells, framed_row(followed.relay_record.id, TO_BROKER) + EXCHANGE

    async def stands_at(phase: int) -> None:
        await until(lambda: cells[cell] == phase)

    await stands_at(0)
    await lane.broker.send_all(BROKER_ASKS)
    await stands_at(1)
    credentials.gate.set()
    await stands_at(2)
    credentials.gate = trio.Event()
    await lane.broker.send_all(SERVER_FIRST)
    await stands_at(3)
    credentials.gate.set()
    await stands_at(0)


@pytest.mark.parametrize("way", WAYS)
async def test_lost_rounds_are_given_up_once(  # noqa: PLR0917 -- fixtures
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, credentials: FakeCredentials, way: str
) -> None:
    """Not by each successor again."""
    credentials.rounds = 2
    await begun(place, lane, now, reauthenticator)
    await lane.broker.send_all(BROKER_ASKS)
    await expect(lane.broker, proxys_answer(b"1"))
    credentials.gate = trio.Event()
    await lane.broker.send_all(SERVER_FIRST)
    await until(lambda: len(credentials.challenges) == 2)
    given_up = [failed(await successor(place, way), LOST_ROUNDS) for _ in range(3)]
    assert given_up == [1, 0, 0]


@pytest.mark.parametrize("why", [NO_CREDENTIALS, TOO_LARGE])
async def test_the_table_says_that_an_exchange_was_given_up(  # noqa: PLR0917 -- fixtures
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, credentials: FakeCredentials, why: str
) -> None:
    credentials.rounds = 2
    forwarder = await begun(place, lane, now, reauthenticator)
    await lane.broker.send_all(BROKER_ASKS)
    await expect(lane.broker, proxys_answer(b"1"))
    credentials.failing = why == NO_CREDENTIALS
    credentials.padding = bytes(BROKER_ANSWER_BYTES_MAX)
    await lane.broker.send_all(SERVER_FIRST)
    await until(lambda: failed(forwarder, why) == 1)
    (followed,) = forwarder.relays.expiring_sessions()
    cells = forwarder.relays._ledger.table.cells
    await until(lambda: cells[framed_row(followed.relay_record.id, TO_BROKER) + EXCHANGE] == 0)
