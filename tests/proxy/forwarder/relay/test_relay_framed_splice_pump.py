"""proxy.forwarder.relay.framed_splice_pump: sessions that expire within a relay, over real sockets on loopback.

proxy.forwarder.relay.framed_copy_pump does the same in memory, so most tests are of both.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import sys
import termios
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from framed_fakes import (
    ANSWER_BYTES_MAX,
    CHALLENGE,
    FRAME_BYTES_MAX,
    NEARLY_PINGS,
    FakeReauthenticator,
    Now,
    alice,
    answer,
    denied,
    disguised,
    error_in,
    identity,
    message_frame,
    producer_frame,
    send_frame,
    session,
)
from pulsar_bytes import command, fields
from relay_fakes import Forwarder, Lane, Place, about_relay, open_lane, open_place, read, read_all, until

from proto import commands
from proto.connect_rules import AUTHENTICATION_FAILED
from proto.frames import encode_frame
from proto.pulsar_pb2 import BaseCommand, CommandConnect
from proto.relay_frames import SLOW_FRAMES_MAX
from proto.session_clock import NEVER
from proxy.forwarder.lifetime import reauthentication
from proxy.forwarder.lifetime.reauthentication import SESSION_EXPIRED, STREAM_CORRUPT
from proxy.forwarder.lifetime.session import PEEK_BYTES, ExpiringSession
from proxy.forwarder.lifetime.terms import challenge_permission
from proxy.forwarder.relay import engine, manager
from proxy.forwarder.relay.framed_splice_pump import HEADER_PEEK_BYTES
from proxy.forwarder.relay.pipes import Pipe, PipePool
from proxy.forwarder.relay.relay import RelayStartFailed
from proxy.forwarder.workers.authentication import Challenge
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.rpc.errors import RpcError
from proxy.runtime.shared.relay_table import TO_BROKER, TO_CLIENT

PING = commands.ping()


def queued_bytes(sock: int) -> int:
    """How many bytes wait to be read."""
    count = bytearray(4)
    fcntl.ioctl(sock, termios.FIONREAD, count)
    return int.from_bytes(count, sys.byteorder)


@pytest.fixture(autouse=True)
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker's silence is short here."""
    monkeypatch.setattr(reauthentication, "QUIET_S", 0.01)


@pytest.fixture(params=["spliced", "copied"])
async def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    """A place whose relays are moved by one of the two pumps."""
    if request.param == "copied":
        monkeypatch.setattr(manager, "splice_works", lambda: False)
    async with open_place() as place:
        yield place


only_spliced = pytest.mark.parametrize("place", ["spliced"], indirect=True)


async def framed(place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, **fields: Any) -> Forwarder:
    """A forwarder with one relay whose frames are followed."""
    forwarder = await place.forwarder()
    await forwarder.begin(lane, session=session(now, reauthenticator, **fields))
    await trio.testing.wait_all_tasks_blocked()  # it has looked at its clock
    return forwarder


def ask(forwarder: Forwarder) -> None:
    forwarder.relays.reauthentication.send_due_challenges()


async def expect_end(lane: Lane, text: str, *, before: bytes = b"") -> None:
    """The client is told why, behind what was on its way to it; the broker just sees an end."""
    rest = await read_all(lane.client)
    assert rest[: len(before)] == before
    error = error_in(rest[len(before) :])
    assert error.type == BaseCommand.ERROR
    assert error.error.request_id == commands.NO_REQUEST_ID
    assert error.error.message == text


def counted(metric: Any, **labels: str) -> float:
    return metric.labels(**labels)._value.get() if labels else metric._value.get()


# ---- frames pass untouched


async def test_frames_of_all_sizes_pass_untouched(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator
) -> None:
    forwarder = await framed(place, lane, now, reauthenticator)
    chance = random.Random(1)
    sizes = [0, 1, 2, 100, 5000, 70_000, 199_000]
    there = b"".join(send_frame(chance.randbytes(chance.choice(sizes))) for _ in range(100))
    back = b"".join(message_frame(chance.randbytes(chance.choice(sizes))) for _ in range(100))

    async def send(stream: TcpStream, data: bytes) -> None:
        at = 0
        while at < len(data):
            size = chance.choice([1, 3, 9, 11, 500, 60_000, 400_000])
            await stream.send_all(data[at : at + size])
            at += size
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send, lane.client, there)
        nursery.start_soon(send, lane.broker, back)
        assert await read(lane.broker, len(there)) == there
        assert await read(lane.client, len(back)) == back
    await until(lambda: forwarder.moved("to_broker") == len(there))


@only_spliced
async def test_of_large_frames_only_headers_are_looked_at(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator
) -> None:
    """A look costs a copy; where frames are small again, one look serves many."""
    forwarder = await framed(place, lane, now, reauthenticator)
    (relay,) = forwarder.relays._engine.relays
    framing = relay.to_broker.cursor
    assert framing is not None
    for frames, look_bytes in ((send_frame(bytes(150_000)) * 3, HEADER_PEEK_BYTES), (send_frame() * 50, PEEK_BYTES)):
        await lane.client.send_all(frames)
        assert await read(lane.broker, len(frames)) == frames
        assert framing.peek_bytes == look_bytes


@pytest.mark.parametrize("frame", [PING, send_frame()], ids=["keep-alive", "messages"])
async def test_a_turn_passes_only_so_many_tiny_frames(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, frame: bytes
) -> None:
    """All else has its turn between two of them."""
    forwarder = await framed(place, lane, now, reauthenticator, counts_messages=True)
    (relay,) = forwarder.relays._engine.relays
    direction, engine = relay.to_broker, forwarder.relays._engine
    data, turns = frame * 8 * SLOW_FRAMES_MAX, []
    pump, direction.pump = direction.pump, lambda _direction: None
    await lane.client.send_all(data)
    await until(lambda: queued_bytes(direction.source) == len(data))  # all of it, before the first turn

    def counted_pump(one: Any) -> None:
        before = engine.bytes_moved(relay)[0] + one.held_bytes
        pump(one)
        turns.append(engine.bytes_moved(relay)[0] + one.held_bytes - before)

    direction.pump = counted_pump
    engine.pump.wake_direction(direction)
    assert await read(lane.broker, len(data)) == data
    assert [moved // len(frame) for moved in turns if moved] == [SLOW_FRAMES_MAX] * 8


async def test_a_header_in_every_two_pieces(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator
) -> None:
    await framed(place, lane, now, reauthenticator)
    frame = send_frame(b"x" * 30)
    for cut in range(1, len(frame)):
        await lane.client.send_all(frame[:cut])
        await trio.sleep(0.001)
        await lane.client.send_all(frame[cut:])
        assert await read(lane.broker, len(frame)) == frame


async def test_first_bytes_are_followed_wherever_they_end(
    place: Place, now: Now, reauthenticator: FakeReauthenticator
) -> None:
    forwarder = await place.forwarder()
    frames = send_frame(b"one" * 50) + send_frame(b"two")
    first = len(send_frame(b"one" * 50))
    for cut in (*range(12), 100, *range(first - 2, first + 12), len(frames)):
        async with open_lane() as lane:
            await lane.client.send_all(frames[:cut])
            assert await read(lane.our_client, cut) == frames[:cut]
            await lane.broker.send_all(frames[:cut])
            assert await read(lane.our_broker, cut) == frames[:cut]
            about = await forwarder.begin(
                lane, to_broker=frames[:cut], to_client=frames[:cut], session=session(now, reauthenticator)
            )
            await lane.client.send_all(frames[cut:] + answer())
            await lane.broker.send_all(frames[cut:])
            assert await read(lane.broker, len(frames)) == frames
            assert await read(lane.client, len(frames)) == frames
            await lane.client.send_eof()
            assert await read_all(lane.broker) == b"", "the answer was taken out"
            await lane.broker.send_eof()
            await until(lambda about=about: about in forwarder.ended)


@pytest.mark.parametrize("cut", [1, 9, 10, 25, 44])
async def test_an_end_in_the_middle_of_a_frame(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, cut: int
) -> None:
    forwarder = await framed(place, lane, now, reauthenticator)
    frame = send_frame(b"x" * 30)
    for stream in (lane.client, lane.broker):
        await stream.send_all(frame + frame[:cut])
        await stream.send_eof()
    assert await read_all(lane.broker) == frame + frame[:cut]
    assert await read_all(lane.client) == frame + frame[:cut]
    await until(lambda: forwarder.ended)


@pytest.mark.parametrize("cut", [30, -1])
async def test_the_beginning_of_an_answer_reaches_no_broker(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, cut: int
) -> None:
    """It holds credentials, and they are the proxy's to verify."""
    await framed(place, lane, now, reauthenticator)
    await lane.client.send_all(send_frame() + answer()[:cut])
    await lane.client.send_eof()
    assert await read_all(lane.broker) == send_frame()


async def test_a_sink_that_does_not_take_is_waited_for(
    place: Place, narrow_lane: Lane, now: Now, reauthenticator: FakeReauthenticator
) -> None:
    await framed(place, narrow_lane, now, reauthenticator)
    frames = b"".join(send_frame(bytes([number]) * 40_000) for number in range(20))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(narrow_lane.client.send_all, frames)
        await trio.sleep(0.05)
        assert await read(narrow_lane.broker, len(frames)) == frames


async def test_frames_in_any_pieces_and_three_lives(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator
) -> None:
    forwarder = await framed(place, lane, now, reauthenticator)
    chance = random.Random(2)
    frame, back = send_frame(b"x" * 3000), message_frame(b"y" * 3000)
    for number in range(3):
        now.s += 90
        await lane.broker.send_all(back[:1000])
        assert await read(lane.client, 1000) == back[:1000]
        ask(forwarder)
        await lane.broker.send_all(back[1000:] + back)
        expected = back[1000:] + CHALLENGE + back
        assert await read(lane.client, len(expected)) == expected
        whole = frame + answer(b"%d" % number) + frame
        at = 0
        while at < len(whole):
            size = chance.choice([1, 7, 2000])
            await lane.client.send_all(whole[at : at + size])
            at += size
        assert await read(lane.broker, 2 * len(frame)) == frame + frame
        await trio.testing.wait_all_tasks_blocked()
    assert reauthenticator.given == [b"0", b"1", b"2"]


# ---- being asked


@pytest.mark.conforms("kip-368.18", "kip-368.25", "kip-368.26", "kip-368.50")
async def test_asked_and_answered(place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator) -> None:
    forwarder = await framed(place, lane, now, reauthenticator)
    for number in range(3):
        now.s += 84
        ask(forwarder)
        await lane.broker.send_all(message_frame(b"before"))
        assert await read(lane.client, len(message_frame(b"before"))) == message_frame(b"before")
        now.s += 2
        ask(forwarder)
        assert await read(lane.client, len(CHALLENGE)) == CHALLENGE
        ask(forwarder)
        await lane.client.send_all(send_frame(b"a") + answer(b"%d" % number) + send_frame(b"b"))
        assert await read(lane.broker, len(send_frame(b"a")) * 2) == send_frame(b"a") + send_frame(b"b")
        await until(lambda number=number: counted(forwarder.metrics.success, method="token") == number + 1)
    assert reauthenticator.given == [b"0", b"1", b"2"]
    assert counted(forwarder.metrics.failure, method="token") == 0
    now.s += 80  # beyond the first life's end
    await lane.client.send_all(send_frame(b"c"))
    assert await read(lane.broker, len(send_frame(b"c"))) == send_frame(b"c")


@pytest.mark.conforms("pip-1.15")
async def test_a_challenge_waits_for_a_boundary(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator
) -> None:
    forwarder = await framed(place, lane, now, reauthenticator)
    frame = message_frame(b"x" * 1000)
    await lane.broker.send_all(frame[:500])
    assert await read(lane.client, 500) == frame[:500]
    now.s += 90
    ask(forwarder)
    await trio.sleep(0.01)
    await lane.broker.send_all(frame[500:] + frame)
    expected = frame[500:] + CHALLENGE + frame
    assert await read(lane.client, len(expected)) == expected


async def test_a_challenge_that_an_unasked_answer_overtakes_is_not_put_in(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator
) -> None:
    """It would ask for a further round of what is being verified."""
    reauthenticator.gate = trio.Event()
    forwarder = await framed(place, lane, now, reauthenticator)
    frame = message_frame(b"x" * 1000)
    await lane.broker.send_all(frame[:500])
    assert await read(lane.client, 500) == frame[:500]
    now.s += 90
    ask(forwarder)  # it waits for a boundary
    await lane.client.send_all(answer(b"unasked"))
    await until(lambda: reauthenticator.given == [b"unasked"])
    await lane.broker.send_all(frame[500:] + frame)
    assert await read(lane.client, len(frame) - 500 + len(frame)) == frame[500:] + frame, "and nothing between"
    reauthenticator.gate.set()
    await until(lambda: counted(forwarder.metrics.success, method="token") == 1)
    now.s += 90
    ask(forwarder)
    assert await read(lane.client, len(CHALLENGE)) == CHALLENGE, "the next one comes in its time"
    await lane.client.send_all(answer(b"asked"))
    await until(lambda: reauthenticator.given == [b"unasked", b"asked"])


async def test_answers_of_any_size_in_any_pieces(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator
) -> None:
    forwarder = await framed(place, lane, now, reauthenticator)
    for number, size in enumerate([0, 1, 100, ANSWER_BYTES_MAX - 100]):
        now.s += 90
        ask(forwarder)
        assert await read(lane.client, len(CHALLENGE)) == CHALLENGE
        data = os.urandom(size)
        whole = send_frame(b"1") + answer(data) + send_frame(b"2")
        at = 0
        while at < len(whole):
            piece = random.choice([1, 7, 20, 3000])
            await lane.client.send_all(whole[at : at + piece])
            await trio.sleep(0.001)
            at += piece
        assert await read(lane.broker, 2 * len(send_frame(b"1"))) == send_frame(b"1") + send_frame(b"2")
        await until(lambda number=number: len(reauthenticator.given) == number + 1)
        assert reauthenticator.given[-1] == data
        await until(lambda number=number: counted(forwarder.metrics.success, method="token") == number + 1)


@pytest.mark.conforms("kip-368.46")
async def test_several_rounds(place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator) -> None:
    second = commands.auth_challenge("proxy", 21, "token", b"server first")
    reauthenticator.verdict = lambda data: Challenge(second) if data == b"client first" else identity()
    forwarder = await framed(place, lane, now, reauthenticator)
    for number in range(2):
        now.s += 90
        ask(forwarder)
        assert await read(lane.client, len(CHALLENGE)) == CHALLENGE
        await lane.client.send_all(answer(b"client first"))
        assert await read(lane.client, len(second)) == second
        await lane.client.send_all(answer(b"client final"))
        await until(lambda number=number: counted(forwarder.metrics.success, method="token") == number + 1)
    assert reauthenticator.given == [b"client first", b"client final"] * 2


@pytest.mark.conforms("kip-368.9", "kip-368.49")
async def test_a_client_that_comes_by_itself(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator
) -> None:
    """As KIP-368's clients do it; but no faster than once a second."""
    forwarder = await framed(place, lane, now, reauthenticator)
    now.s += 2
    await lane.client.send_all(answer())
    await until(lambda: counted(forwarder.metrics.success, method="token") == 1)
    now.s += 0.5
    await lane.client.send_all(answer())
    await expect_end(lane, AUTHENTICATION_FAILED)
    assert counted(forwarder.metrics.failure, method="token") == 1


async def test_an_unreachable_auth_worker_leaves_the_client_to_be_asked_again(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator
) -> None:
    """That is not the client's fault: it is asked again, though not at once."""

    def unreachable(_data: bytes) -> Any:
        raise RpcError("no auth worker")

    reauthenticator.verdict = unreachable
    forwarder = await framed(place, lane, now, reauthenticator)
    now.s += 90
    ask(forwarder)
    assert await read(lane.client, len(CHALLENGE)) == CHALLENGE
    await lane.client.send_all(answer())
    await until(lambda: forwarder.relays.reauthentication._due)
    ask(forwarder)
    now.s += 1.1
    reauthenticator.verdict = identity
    ask(forwarder)
    assert await read(lane.client, len(CHALLENGE)) == CHALLENGE
    await lane.client.send_all(answer())
    await until(lambda: counted(forwarder.metrics.success, method="token") == 1)


async def test_ended_sessions_and_former_deadlines_are_removed_from_the_challenge_schedule(
    nursery: trio.Nursery,
) -> None:
    """The sessions that go on are challenged once each."""
    now, reauthenticator = Now(), FakeReauthenticator()
    coordinator = reauthentication.ReauthenticationCoordinator(
        nursery, reauthentication.ReauthenticationMetrics(None), now
    )
    coordinator.fraction = lambda: 0.0
    asked: list[bytes] = []

    def watched(*, is_over: bool) -> ExpiringSession:
        known = session(now, reauthenticator)
        followed = ExpiringSession(about_relay(session=known.to_stored_session()), known.clock, reauthenticator)
        followed.control = SimpleNamespace(  # type: ignore[assignment]
            has_ended=is_over, has_opened_producer=False, send_challenge=asked.append, resume_after_verdict=lambda: None
        )
        coordinator.add_session(followed)
        return followed

    living = [watched(is_over=False) for _ in range(10)]
    for _ in range(10_000):
        watched(is_over=True)
    assert len(coordinator._due) <= reauthentication.DUE_MIN
    for _ in range(200):
        now.s += 2
        for followed in living:
            assert followed.clock is not None
            assert followed.clock.on_answer(now.s) is None
            coordinator._accept(followed, alice(), answer())
    assert len(coordinator._due) <= reauthentication.DUE_MIN
    now.s += 90
    coordinator.send_due_challenges()
    assert len(asked) == 10
    assert all(followed.scheduled_at_s == NEVER for followed in living)


# ---- failures


@pytest.mark.conforms("kip-368.15", "kip-368.47", "kip-368.48")
@pytest.mark.parametrize(
    "verdict",
    [
        denied,
        lambda _data: identity(name="bob"),
        lambda _data: identity(method="basic"),
        lambda _data: identity(proxy="another proxy"),
        lambda _data: Challenge(bytes(5000)),
    ],
)
async def test_a_failure_closes(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, verdict: Any
) -> None:
    reauthenticator.verdict = verdict
    forwarder = await framed(place, lane, now, reauthenticator)
    now.s += 90
    ask(forwarder)
    assert await read(lane.client, len(CHALLENGE)) == CHALLENGE
    await lane.client.send_all(send_frame(b"x") + answer())
    await expect_end(lane, AUTHENTICATION_FAILED)
    assert await read_all(lane.broker) == send_frame(b"x")
    assert counted(forwarder.metrics.failure, method="token") == 1
    assert counted(forwarder.metrics.expired_killed) == 0
    await until(lambda: forwarder.ended)


@pytest.mark.parametrize(
    "frame",
    [
        answer(method="basic"),
        answer(bytes(ANSWER_BYTES_MAX)),
        encode_frame(b"\x08\x25\xaa\x02\x03\xff\xff\xff"),
        encode_frame(b"\x08\x25\xa2\x02\x00"),
        encode_frame(b"\x08\x25"),
    ],
)
async def test_an_answer_that_is_none_closes(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, frame: bytes
) -> None:
    forwarder = await framed(place, lane, now, reauthenticator)
    now.s += 90
    ask(forwarder)
    assert await read(lane.client, len(CHALLENGE)) == CHALLENGE
    await lane.client.send_all(frame)
    await expect_end(lane, AUTHENTICATION_FAILED)
    assert await read_all(lane.broker) == b""
    assert reauthenticator.given == []
    await until(lambda: forwarder.ended)


async def test_answered_twice(place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator) -> None:
    reauthenticator.gate = trio.Event()
    await framed(place, lane, now, reauthenticator)
    now.s += 90
    await lane.client.send_all(answer(b"1") + answer(b"2"))
    await expect_end(lane, AUTHENTICATION_FAILED)
    reauthenticator.gate.set()
    assert reauthenticator.given in ([], [b"1"]), (
        "the first may have come to the coordinator before the second was there"
    )


@pytest.mark.conforms("kip-368.54")
@pytest.mark.parametrize("size", [0, 5, FRAME_BYTES_MAX + 1, 0x7FFFFFFF, 0xFFFFFFFF])
@pytest.mark.parametrize("way", [TO_BROKER, TO_CLIENT])
async def test_a_size_that_none_can_have(  # noqa: PLR0917 -- fixtures
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, size: int, way: int
) -> None:
    await framed(place, lane, now, reauthenticator)
    sender, receiver = (lane.client, lane.broker) if way == TO_BROKER else (lane.broker, lane.client)
    good = send_frame(b"good")
    await sender.send_all(good + size.to_bytes(4, "big") + bytes(20))
    if way == TO_BROKER:
        assert await read_all(receiver) == good
        await expect_end(lane, STREAM_CORRUPT)
    else:
        await expect_end(lane, STREAM_CORRUPT, before=good)
        assert await read_all(lane.broker) == b""


@pytest.mark.conforms("kip-368.53")
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("way", [TO_BROKER, TO_CLIENT])
async def test_1024_random_bytes_end_their_own_relay(  # noqa: PLR0917 -- fixtures
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, seed: int, way: int
) -> None:
    forwarder = await framed(place, lane, now, reauthenticator)
    async with open_lane() as other:
        await forwarder.begin(other, session=session(now, reauthenticator))
        sender = lane.client if way == TO_BROKER else lane.broker
        await sender.send_all(random.Random(seed).randbytes(1024))
        await expect_end(lane, STREAM_CORRUPT)
        assert await read_all(lane.broker) == b""
        await other.client.send_all(send_frame())
        assert await read(other.broker, len(send_frame())) == send_frame()


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("after_s", [0, 200])
async def test_a_command_that_begins_as_another_one_ends_it(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, after_s: int, *, counts: bool
) -> None:
    """Security: neither past the session's end nor past the count."""
    fields = {"clock": None, "counts_messages": True} if counts else {}
    forwarder = await framed(place, lane, now, reauthenticator, **fields)
    good = PING if after_s and not counts else send_frame(b"good")
    now.s += after_s
    await lane.client.send_all(good + disguised(send_frame(b"bad")) + send_frame())
    assert await read_all(lane.broker) == good
    await expect_end(lane, STREAM_CORRUPT)
    assert counted(forwarder.metrics.expired_killed) == 0


@only_spliced
@pytest.mark.parametrize("first", [send_frame(), producer_frame(), PING + send_frame()])
async def test_a_session_that_ended_while_connecting_to_the_broker_starts_no_relay(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, first: bytes
) -> None:
    forwarder = await place.forwarder()
    ended = session(now, reauthenticator, exempts_producers=True)
    now.s += 200
    with pytest.raises(RelayStartFailed, match="past the session's end"):
        await forwarder.begin(lane, to_broker=first, session=ended)


async def test_a_ping_that_came_before_a_relay_whose_session_has_ended_by_then(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator
) -> None:
    forwarder = await place.forwarder()
    ended = session(now, reauthenticator)
    now.s += 110  # past its end, within its grace
    await forwarder.begin(lane, to_broker=PING, to_client=message_frame(), session=ended)
    assert await read(lane.broker, len(PING)) == PING
    assert await read(lane.client, len(message_frame())) == message_frame()
    await lane.client.aclose()
    await lane.broker.aclose()
    await until(lambda: not place.slot.relays)


async def test_a_broker_is_believed_what_it_begins_with(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator
) -> None:
    """It decides anyway what its clients get; and a newer one may write what is not known here."""
    await framed(place, lane, now, reauthenticator)
    await lane.broker.send_all(disguised(message_frame(b"m")))
    assert await read(lane.client, len(disguised(message_frame(b"m")))) == disguised(message_frame(b"m"))


# ---- the end


@pytest.mark.conforms("kip-368.20", "kip-368.30")
async def test_used_past_its_end(place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator) -> None:
    """All before is delivered, what the broker answers to it, too; then the client is told."""
    forwarder = await framed(place, lane, now, reauthenticator)
    await lane.client.send_all(send_frame(b"in time"))
    assert await read(lane.broker, len(send_frame(b"in time"))) == send_frame(b"in time")
    now.s += 101
    await lane.client.send_all(PING + send_frame(b"too late") * 3)
    await lane.broker.send_all(message_frame(b"receipt"))
    await expect_end(lane, SESSION_EXPIRED, before=message_frame(b"receipt"))
    assert await read_all(lane.broker) == PING
    assert counted(forwarder.metrics.expired_killed) == 1
    await until(lambda: forwarder.ended)
    await lane.client.aclose()
    await lane.broker.aclose()
    await until(lambda: not place.slot.relays)


V5_COMMANDS = [encode_frame(command(kind, fields((1, kind)))) for kind in range(70, 83)]
"""Of Pulsar 5.0.0-M1, SCALABLE_TOPIC_LOOKUP to WATCH_TC_ASSIGNMENTS_CLOSE, and one that is newer."""


async def test_pulsar_5s_commands_pass_both_ways(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator
) -> None:
    await framed(place, lane, now, reauthenticator, counts_messages=True)
    everything = b"".join(V5_COMMANDS)
    for sender, receiver in ((lane.client, lane.broker), (lane.broker, lane.client)):
        await sender.send_all(everything)
        assert await read(receiver, len(everything)) == everything


@pytest.mark.conforms("kip-368.20")
@pytest.mark.parametrize("used", V5_COMMANDS)
async def test_pulsar_5s_commands_are_use_past_the_end(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, used: bytes
) -> None:
    await framed(place, lane, now, reauthenticator)
    now.s += 101
    await lane.client.send_all(PING + used)
    await expect_end(lane, SESSION_EXPIRED)
    assert await read_all(lane.broker) == PING


@pytest.mark.conforms("kip-368.17")
async def test_pulsar_5s_commands_wait_for_the_verdict(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator
) -> None:
    reauthenticator.gate = trio.Event()
    await framed(place, lane, now, reauthenticator)
    now.s += 150
    await lane.client.send_all(answer() + b"".join(V5_COMMANDS))
    await until(lambda: reauthenticator.given)
    with trio.move_on_after(0.02):
        pytest.fail(f"passed before the verdict: {await lane.broker.receive_some(100)!r}")
    reauthenticator.gate.set()
    assert await read(lane.broker, len(b"".join(V5_COMMANDS))) == b"".join(V5_COMMANDS)


@pytest.mark.conforms("kip-368.21", "kip-368.22")
async def test_idle_past_its_end(place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator) -> None:
    """Whoever only says that he is there is left alone, for ever; in its grace the broker may send to him."""
    forwarder = await framed(place, lane, now, reauthenticator, challenge=b"")
    now.s += 100
    for message in (message_frame(b"m"), message_frame(b"m"), b"", b""):
        await lane.broker.send_all(message + PING)
        await lane.client.send_all(commands.pong() + PING)
        assert await read(lane.client, len(message + PING)) == message + PING
        assert await read(lane.broker, len(PING) * 2) == commands.pong() + PING
        now.s += 29.9 if message else 1e6
    ask(forwarder)
    assert forwarder.ended == []
    assert counted(forwarder.metrics.expired_killed) == 0


@pytest.mark.parametrize("nearly", NEARLY_PINGS)
async def test_only_a_ping_or_pong_byte_for_byte_says_that_a_client_is_idle(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, nearly: bytes
) -> None:
    await framed(place, lane, now, reauthenticator)
    await lane.client.send_all(nearly)
    assert await read(lane.broker, len(nearly)) == nearly
    now.s += 200
    await lane.client.send_all(PING + nearly)
    assert await read_all(lane.broker) == PING
    await expect_end(lane, SESSION_EXPIRED)


async def test_a_ping_in_every_two_pieces_past_the_end(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator
) -> None:
    await framed(place, lane, now, reauthenticator)
    now.s += 200
    for cut in range(1, len(PING)):
        for sender, receiver in ((lane.client, lane.broker), (lane.broker, lane.client)):
            await sender.send_all(PING[:cut])
            await trio.sleep(0.001)
            await sender.send_all(PING[cut:])
            assert await read(receiver, len(PING)) == PING


@pytest.mark.conforms("kip-368.23")
@pytest.mark.parametrize("challenge", [CHALLENGE, b""])
async def test_a_session_that_receives_messages_past_its_grace_is_closed(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, challenge: bytes
) -> None:
    """A consumer with permits from before its session's end sends only keep-alive commands: the messages are delivered,
    and the close comes with an error.
    """
    forwarder = await framed(
        place, lane, now, reauthenticator, challenge=challenge, grace_ms=30_000, counts_messages=True
    )
    message = message_frame(b"m")
    for s in (100, 29.9):
        now.s += s
        await lane.broker.send_all(message)
        assert await read(lane.client, len(message)) == message
    now.s += 1
    await lane.broker.send_all(PING)
    await lane.client.send_all(commands.pong())
    assert await read(lane.client, len(PING)) == PING
    assert await read(lane.broker, len(PING)) == commands.pong()
    assert counted(forwarder.metrics.expired_killed) == 0
    await lane.broker.send_all(message * 3)
    await expect_end(lane, SESSION_EXPIRED, before=message * 3)
    assert await read_all(lane.broker) == b""
    assert counted(forwarder.metrics.expired_killed) == 1
    assert forwarder.relays._ledger.table.messages_total(TO_CLIENT) == 5, "each is counted"


async def test_without_a_grace_the_end_is_the_end(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator
) -> None:
    await framed(place, lane, now, reauthenticator, grace_ms=0)
    now.s += 100
    await lane.broker.send_all(message_frame(b"m"))
    await expect_end(lane, SESSION_EXPIRED, before=message_frame(b"m"))


@pytest.mark.conforms("kip-368.17")
async def test_a_client_past_its_grace_receives_messages_while_its_answer_is_verified(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator
) -> None:
    forwarder = await framed(place, lane, now, reauthenticator, grace_ms=0)
    message = message_frame(b"m")
    reauthenticator.gate = trio.Event()
    now.s += 150
    await lane.client.send_all(answer())
    await until(lambda: reauthenticator.given == [b"fresh"])
    await lane.broker.send_all(message)
    assert await read(lane.client, len(message)) == message
    (expiring,) = forwarder.relays.expiring_sessions()
    assert not expiring.close_reason
    reauthenticator.gate.set()
    await trio.testing.wait_all_tasks_blocked()
    await lane.broker.send_all(message)
    assert await read(lane.client, len(message)) == message


async def test_a_frame_that_began_in_time_goes_on(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator
) -> None:
    await framed(place, lane, now, reauthenticator)
    frame = send_frame(b"x" * 1000)
    await lane.client.send_all(frame[:300])
    assert await read(lane.broker, 300) == frame[:300]
    now.s += 159  # within its grace
    await lane.client.send_all(frame[300:] + frame)
    assert await read_all(lane.broker) == frame[300:]
    await expect_end(lane, SESSION_EXPIRED)


@pytest.mark.conforms("kip-368.17", "kip-368.19")
async def test_an_answer_past_the_end_saves_it(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator
) -> None:
    """And what is sent behind it waits for the verdict."""
    reauthenticator.gate = trio.Event()
    forwarder = await framed(place, lane, now, reauthenticator)
    now.s += 90
    ask(forwarder)
    assert await read(lane.client, len(CHALLENGE)) == CHALLENGE
    now.s += 50
    await lane.client.send_all(answer() + send_frame(b"waits"))
    await until(lambda: reauthenticator.given)
    with trio.move_on_after(0.02):
        pytest.fail(f"passed before the verdict: {await lane.broker.receive_some(100)!r}")
    reauthenticator.gate.set()
    assert await read(lane.broker, len(send_frame(b"waits"))) == send_frame(b"waits")
    assert counted(forwarder.metrics.success, method="token") == 1


async def test_a_frame_held_for_a_verdict_ends_the_session_if_a_further_round_is_required(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator
) -> None:
    """The frame precedes the client's next answer in the stream, so the answer could never be read first."""
    further = commands.auth_challenge("proxy", 21, "token", b"server first")
    reauthenticator.gate = trio.Event()
    reauthenticator.verdict = lambda _data: Challenge(further)
    await framed(place, lane, now, reauthenticator)
    now.s += 150
    await lane.client.send_all(answer() + send_frame(b"waits"))
    await until(lambda: reauthenticator.given)
    reauthenticator.gate.set()
    await expect_end(lane, SESSION_EXPIRED, before=further)
    assert await read_all(lane.broker) == b""


async def test_a_frame_held_for_a_verdict_is_not_forwarded_after_a_denial(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator
) -> None:
    reauthenticator.gate = trio.Event()
    reauthenticator.verdict = denied
    await framed(place, lane, now, reauthenticator)
    now.s += 150
    await lane.client.send_all(answer() + send_frame(b"waits"))
    await until(lambda: reauthenticator.given)
    reauthenticator.gate.set()
    await expect_end(lane, AUTHENTICATION_FAILED)
    assert await read_all(lane.broker) == b""


async def test_the_farewell_waits_for_a_boundary(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator
) -> None:
    await framed(place, lane, now, reauthenticator)
    frame = message_frame(b"x" * 1000)
    await lane.broker.send_all(frame[:500])
    assert await read(lane.client, 500) == frame[:500]
    now.s += 150
    await lane.client.send_all(send_frame())
    await trio.sleep(0.1)
    await lane.broker.send_all(frame[500:] + frame)
    await expect_end(lane, SESSION_EXPIRED, before=frame[500:])


async def test_a_broker_that_ends_while_the_client_is_being_seen_off(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reauthentication, "QUIET_S", 5)
    forwarder = await framed(place, lane, now, reauthenticator)
    now.s += 150
    await lane.client.send_all(send_frame())
    await until(lambda: forwarder.relays._engine.pump.half_closed)
    await lane.broker.send_all(message_frame(b"last"))
    await lane.broker.send_eof()
    await expect_end(lane, SESSION_EXPIRED, before=message_frame(b"last"))


@only_spliced
async def test_nothing_follows_the_beginning_of_a_frame_with_which_a_broker_ends(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error would be read as part of the frame. The client does not take that beginning at once."""
    monkeypatch.setattr(reauthentication, "QUIET_S", 5)
    forwarder = await framed(place, lane, now, reauthenticator)
    engine, (relay,) = forwarder.relays._engine, forwarder.relays._engine.relays
    now.s += 150
    await lane.client.send_all(send_frame())
    await until(lambda: engine.pump.half_closed)
    cursor, refused = relay.to_client.cursor, []
    assert cursor is not None
    await lane.broker.send_all(message_frame(b"last")[:5])
    await until(lambda: cursor.held_head)
    drain_pipe = engine.pump.drain_pipe

    def refuse_once(direction: Any) -> bool:
        if refused:
            return drain_pipe(direction)
        refused.append(direction)
        return False

    monkeypatch.setattr(engine.pump, "drain_pipe", refuse_once)
    await lane.broker.send_eof()
    await until(lambda: refused)
    engine.pump.wake_direction(relay.to_client)
    assert await read_all(lane.client) == message_frame(b"last")[:5]


# ---- clients that are challenged


@pytest.mark.conforms("kip-368.13", "kip-368.31")
async def test_a_client_with_a_producer_is_spared(place: Place, now: Now, reauthenticator: FakeReauthenticator) -> None:
    forwarder = await place.forwarder()
    async with open_lane() as with_producer, open_lane() as without, open_lane() as early:
        for lane in (with_producer, without):
            await forwarder.begin(lane, session=session(now, reauthenticator, exempts_producers=True))
        await forwarder.begin(
            early, to_broker=producer_frame(), session=session(now, reauthenticator, exempts_producers=True)
        )
        await with_producer.client.send_all(send_frame() + producer_frame() + send_frame())
        expected = send_frame() + producer_frame() + send_frame()
        assert await read(with_producer.broker, len(expected)) == expected
        now.s += 90
        ask(forwarder)
        assert await read(without.client, len(CHALLENGE)) == CHALLENGE
        await trio.sleep(0.02)
        now.s += 20
        for lane in (with_producer, early):
            await lane.client.send_all(send_frame())
            await expect_end(lane, SESSION_EXPIRED)


@pytest.mark.conforms("kip-368.13", "kip-368.28")
@pytest.mark.parametrize(
    ("version", "policy", "ever", "with_producer"),
    [
        ("Pulsar-CPP-v4.2.0", "by_client_kind", True, False),
        ("Pulsar-CPP-v4.0.0-node-client-v1.17.0", "by_client_kind", True, False),
        ("Pulsar-Java-v4.0.8", "by_client_kind", True, True),
        ("Pulsar Go 0.14", "by_client_kind", True, True),
        ("Pulsar-CPP-v4.2.0", "always", True, True),
        ("Pulsar-Java-v4.0.8", "never", False, False),
    ],
)
def test_which_clients_are_asked(version: str, policy: Any, ever: bool, with_producer: bool) -> None:
    connect = CommandConnect(client_version=version, feature_flags={"supports_auth_refresh": True})
    found = challenge_permission(connect, policy)
    assert (found.allowed, found.allowed_with_producer) == (ever, with_producer)
    assert not challenge_permission(CommandConnect(client_version=version), policy).allowed


@pytest.mark.parametrize(
    ("from_proxy", "proxy_version", "policy", "ever", "with_producer"),
    [
        (True, "pulsar-trio-proxy-0.1.0", "by_client_kind", True, True),
        (True, "pulsar-trio-proxy-0.1.0", "never", False, False),
        (True, "4.0.8", "by_client_kind", True, False),
        (False, "pulsar-trio-proxy-0.1.0", "by_client_kind", True, False),
    ],
    ids=["answers itself", "no client is asked", "another proxy", "says that it is one"],
)
def test_a_proxy_that_answers_by_itself_is_asked_whatever_client_is_behind_it(
    from_proxy: bool, proxy_version: str, policy: Any, ever: bool, with_producer: bool
) -> None:
    connect = CommandConnect(
        client_version="Pulsar-CPP-v4.2.0",
        proxy_version=proxy_version,
        feature_flags={"supports_auth_refresh": True},
    )
    found = challenge_permission(connect, policy, from_proxy=from_proxy)
    assert (found.allowed, found.allowed_with_producer) == (ever, with_producer)


# ---- beginnings


@pytest.mark.conforms("pip-1.14", "pip-1.15", "kip-368.7", "kip-368.9")
async def test_a_session_that_never_ends_is_blind(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator
) -> None:
    forwarder = await framed(place, lane, now, reauthenticator, lifetime_ms=0)
    await lane.client.send_all(b"anything" + answer())
    assert await read(lane.broker, 8 + len(answer())) == b"anything" + answer()
    assert forwarder.relays.expiring_sessions() == []


@only_spliced
async def test_no_relay_begins_with_what_is_no_frame(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator
) -> None:
    forwarder = await place.forwarder()
    for first in (bytes(20), answer()):
        with pytest.raises(RelayStartFailed):
            await forwarder.begin(lane, to_broker=first, session=session(now, reauthenticator))
    await forwarder.begin(lane)
    await lane.client.send_all(b"blind")
    assert await read(lane.broker, 5) == b"blind"


# ---- counting


async def test_expiring_sessions_lists_each_followed_relay_until_it_ends(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator
) -> None:
    forwarder = await framed(place, lane, now, reauthenticator)
    async with open_lane() as blind, open_lane() as counted_only:
        await forwarder.begin(blind)
        await forwarder.begin(counted_only, session=session(now, reauthenticator, clock=None, counts_messages=True))
        ends = [one.clock and one.clock.expires_at_s for one in forwarder.relays.expiring_sessions()]
        assert ends == [now.s + 100, None]
        await lane.client.send_eof()
        await lane.broker.send_eof()
        await until(lambda: len(forwarder.relays.expiring_sessions()) == 1)


@pytest.mark.conforms("pip-1.15")
async def test_messages_are_counted(place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator) -> None:
    forwarder = await place.forwarder()
    await forwarder.begin(lane, session=session(now, reauthenticator, clock=None, counts_messages=True))
    there = send_frame(b"1") + send_frame(b"x" * 100_000, messages=300) + PING + send_frame(b"2", messages=2)
    back = message_frame(b"a") * 5 + PING + message_frame(bytes(50_000))
    for cut in (1, 9, 30, 41, 60, len(there) - 1):
        await lane.client.send_all(there[:cut])
        await lane.broker.send_all(back[:cut])
        await trio.sleep(0.01)
        await lane.client.send_all(there[cut:])
        await lane.broker.send_all(back[cut:])
        assert await read(lane.broker, len(there)) == there
        assert await read(lane.client, len(back)) == back
    await until(lambda: forwarder.messages("alice", "to_broker") == 6 * 303)
    await until(lambda: forwarder.messages("alice", "to_client") == 6 * 6)
    await lane.client.send_all(answer())
    assert await read(lane.broker, len(answer())) == answer(), "nothing expires, so nothing is taken out"


@only_spliced
async def test_messages_that_waited_for_a_pipe_are_counted_once(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are billed. Whether the beginning of their frame is held or not, the scan sees it at each attempt."""
    monkeypatch.setattr(engine, "RECHECK_INTERVAL_S", 0.002)
    forwarder = await framed(place, lane, now, reauthenticator, clock=None, counts_messages=True)
    (relay,) = forwarder.relays._engine.relays
    cursor = relay.to_broker.cursor
    assert cursor is not None
    attempts: list[PipePool] = []

    def none_left(pool: PipePool, _size_bytes_max: int) -> Pipe:
        attempts.append(pool)
        raise OSError(errno.EMFILE, "Too many open files")

    frame = send_frame(b"x" * 100, messages=5)
    for number, cut in enumerate((0, 9, 20)):
        await lane.client.send_all(frame[:cut])
        await until(lambda cut=cut: len(cursor.held_head) == cut)
        with monkeypatch.context() as patch:
            patch.setattr(PipePool, "acquire_pipe", none_left)
            patch.setattr(PipePool, "has_free_pipe", property(lambda _pool: False))
            pool = forwarder.relays._engine._pool
            for pipe_lane in pool.lanes:
                if pipe_lane.ready is not None:
                    pool.release_pipe(pipe_lane.ready)
                    pipe_lane.ready = None
            attempts.clear()
            await lane.client.send_all(frame[cut:])
            await until(lambda: len(attempts) >= 3)
        assert await read(lane.broker, len(frame)) == frame
        await until(lambda number=number: forwarder.messages("alice", "to_broker") >= 5 * (number + 1))
        assert forwarder.messages("alice", "to_broker") == 5 * (number + 1)


async def test_a_stuck_client_ends_with_the_half_close_timeout(
    place: Place, narrow_lane: Lane, now: Now, reauthenticator: FakeReauthenticator
) -> None:
    """It does not take what stands before the farewell."""
    place._config = type(place._config)(half_close_timeout_ms=1500)
    forwarder = await framed(place, narrow_lane, now, reauthenticator)
    await fill_frames(narrow_lane.broker)
    now.s += 150
    await narrow_lane.client.send_all(send_frame())
    await until(lambda: forwarder.ended)


async def fill_frames(stream: TcpStream) -> None:
    with trio.move_on_after(0.2):
        while True:
            await stream.send_all(message_frame(bytes(30_000)))
