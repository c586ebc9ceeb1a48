"""proxy.forwarder.lifetime.broker_reauthentication in relays that are not spliced: as behind TLS."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import trio
import trio.testing
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
from relay_fakes import CopiedRelays, expect, read_all, until

from proto import commands
from proto.framed_stream import CHALLENGE_BYTES_MAX
from proxy.config.types import Relay as RelayConfig
from proxy.forwarder.lifetime import reauthentication
from proxy.forwarder.lifetime.broker_reauthentication import BrokerReauthenticationFactory
from proxy.forwarder.lifetime.closing import CloseReason
from proxy.forwarder.lifetime.reauthentication import BROKER_OUT_OF_TURN, SESSION_EXPIRED, STREAM_CORRUPT
from proxy.forwarder.lifetime.session_factory import SessionOptions
from proxy.forwarder.relay.engine import RECHECK_INTERVAL_S
from proxy.forwarder.relay.manager import LINGER_S
from proxy.runtime.loop.tcp_stream import TcpStream


class Stage:
    """A relay that is not spliced, and its far ends; a client's session that never ends, unless ``fields`` say so."""

    client: TcpStream
    broker: TcpStream

    def __init__(self, nursery: trio.Nursery, copied: CopiedRelays) -> None:
        self.now, self.reauthenticator, self.credentials = Now(), FakeReauthenticator(), FakeCredentials()
        self.brokers = BrokerReauthenticationFactory(nursery, begin=self.credentials.begin)
        self._copied = copied
        self.relays = copied.new(now=self.now, sessions=SessionOptions(broker_factory=self.brokers))
        self.relays.reauthentication.fraction = lambda: 0.0

    async def begin(self, *, buffer_bytes: int = 0, **fields: Any) -> Stage:
        known: dict[str, Any] = {"lifetime_ms": 0, "broker_host": BROKER_HOST} | fields
        terms = session(self.now, self.reauthenticator, **known)
        self.client, self.broker = await self._copied.begin(self.relays, buffer_bytes=buffer_bytes, session=terms)
        await trio.testing.wait_all_tasks_blocked()
        return self

    def succeeded(self) -> float:
        return self.brokers.metrics.success._value.get()

    def failed(self, reason: str) -> float:
        return self.brokers.metrics.failure[reason]._value.get()

    def took_s(self) -> float:
        """Seconds of all exchanges that were answered in full."""
        return self.brokers.metrics.seconds._sum.get()

    async def broker_is_full(self) -> None:
        """Wait until the broker's socket takes no more."""
        (relay,) = self.relays._engine.relays
        await until(lambda: relay.to_broker.held_bytes)


@pytest.fixture
def stage(nursery: trio.Nursery, copied: CopiedRelays) -> Stage:
    return Stage(nursery, copied)


async def test_the_proxy_answers_and_the_client_sees_nothing(
    autojump_clock: trio.testing.MockClock, stage: Stage
) -> None:
    await stage.begin()
    for number in range(1, 4):
        await stage.broker.send_all(message_frame() + BROKER_ASKS + message_frame())
        await expect(stage.client, message_frame() * 2)
        await expect(stage.broker, proxys_answer(b"%d" % number))
    assert stage.credentials.challenges == [None] * 3
    assert stage.reauthenticator.given == []
    assert stage.succeeded() == 3


@pytest.mark.parametrize("cut", range(1, len(BROKER_ASKS)))
async def test_a_challenge_in_every_two_pieces(autojump_clock: trio.testing.MockClock, stage: Stage, cut: int) -> None:
    await stage.begin()
    await stage.broker.send_all(message_frame() + BROKER_ASKS[:cut])
    await expect(stage.client, message_frame())
    assert stage.credentials.begun == 0
    await stage.broker.send_all(BROKER_ASKS[cut:] + message_frame())
    await expect(stage.client, message_frame())
    await expect(stage.broker, proxys_answer(b"1"))


async def test_all_rounds_are_answered_within_one_exchange(
    autojump_clock: trio.testing.MockClock, stage: Stage
) -> None:
    stage.credentials.rounds = 2
    await stage.begin()
    for number in (1, 2):
        await stage.broker.send_all(BROKER_ASKS)
        await expect(stage.broker, proxys_answer(b"%d" % number))
        await stage.broker.send_all(SERVER_FIRST)
        await expect(stage.broker, proxys_answer(b"%d." % number))
    assert stage.credentials.challenges == [None, b"server first"] * 2
    assert stage.succeeded() == 2


@pytest.mark.conforms("kip-368.33")
async def test_the_time_of_an_answer_is_from_the_challenge_through_all_rounds(
    autojump_clock: trio.testing.MockClock, stage: Stage
) -> None:
    stage.credentials.rounds = 2
    await stage.begin()
    await trio.sleep(100)
    await stage.broker.send_all(BROKER_ASKS)
    await expect(stage.broker, proxys_answer(b"1"))
    await trio.sleep(3)
    assert stage.took_s() == 0, "an exchange that is not over is not counted"
    await stage.broker.send_all(SERVER_FIRST)
    await expect(stage.broker, proxys_answer(b"1."))
    assert stage.took_s() == pytest.approx(3)


@pytest.mark.conforms("kip-368.33")
async def test_the_time_of_an_answer_includes_what_delays_it(
    autojump_clock: trio.testing.MockClock, stage: Stage
) -> None:
    """Credentials that are not there at first, and a client in the middle of a frame."""
    await stage.begin()
    frame = send_frame(b"x" * 3000)
    await stage.client.send_all(frame[:1000])
    await expect(stage.broker, frame[:1000])
    stage.credentials.failing = 2
    await stage.broker.send_all(BROKER_ASKS)
    await trio.sleep(10)
    assert (stage.credentials.begun, stage.took_s()) == (3, 0)
    await stage.client.send_all(frame[1000:])
    await expect(stage.broker, frame[1000:] + proxys_answer(b"3"))
    assert stage.took_s() == pytest.approx(10)


async def test_an_answer_is_never_put_into_a_clients_frame(
    autojump_clock: trio.testing.MockClock, stage: Stage
) -> None:
    await stage.begin()
    frame = send_frame(b"x" * 3000)
    await stage.client.send_all(frame[:1000])
    await expect(stage.broker, frame[:1000])
    await stage.broker.send_all(BROKER_ASKS)
    await trio.testing.wait_all_tasks_blocked()
    assert stage.credentials.begun == 1
    await stage.client.send_all(frame[1000:] + frame)
    await expect(stage.broker, frame[1000:] + proxys_answer(b"1") + frame)


async def test_a_client_that_never_ends_a_portion_with_a_frame_does_not_hold_the_answer_up(
    autojump_clock: trio.testing.MockClock, stage: Stage
) -> None:
    """As a busy producer of large messages: the boundary within a portion is made use of."""
    await stage.begin()
    frame = send_frame(b"x" * 3000)
    half = len(frame) // 2
    await stage.client.send_all(frame[:half])
    await expect(stage.broker, frame[:half])
    await stage.broker.send_all(BROKER_ASKS)
    await trio.testing.wait_all_tasks_blocked()
    await stage.client.send_all(frame[half:] + frame[:half])
    await expect(stage.broker, frame[half:] + proxys_answer(b"1") + frame[:half])


NARROW_BYTES = 4096
FRAME = send_frame(b"x" * 150_000)
"""More than the buffers of a narrow relay hold, and a portion."""


@pytest.fixture
async def stuck(nursery: trio.Nursery, stage: Stage) -> Stage:
    """A relay whose client sends a frame, of which the broker's socket has taken the beginning."""
    await stage.begin(buffer_bytes=NARROW_BYTES, lifetime_ms=100_000, challenge=b"")
    nursery.start_soon(stage.client.send_all, FRAME)
    await stage.broker_is_full()
    return stage


async def test_an_answer_waits_until_a_half_sent_frame_is_sent_whole(
    autojump_clock: trio.testing.MockClock, stuck: Stage
) -> None:
    await stuck.broker.send_all(BROKER_ASKS)
    await trio.testing.wait_all_tasks_blocked()
    assert stuck.credentials.begun == 1
    await expect(stuck.broker, FRAME + proxys_answer(b"1"))


PADDING = bytes(50_000)
LARGE_ANSWER = proxys_answer(b"1" + PADDING)
"""More than a narrow socket takes at once."""


@pytest.fixture
async def unread(stage: Stage) -> Stage:
    """A relay whose broker has asked, and has not read the answer."""
    stage.credentials.padding = PADDING
    await stage.begin(buffer_bytes=NARROW_BYTES)
    await stage.broker.send_all(BROKER_ASKS)
    await stage.broker_is_full()
    return stage


async def test_a_client_frame_waits_while_an_answer_is_being_sent(
    autojump_clock: trio.testing.MockClock, unread: Stage
) -> None:
    await unread.client.send_all(send_frame())
    await trio.testing.wait_all_tasks_blocked()
    await expect(unread.broker, LARGE_ANSWER + send_frame())


async def test_an_answer_that_the_broker_does_not_read_does_not_keep_a_half_closed_relay(
    autojump_clock: trio.testing.MockClock, unread: Stage
) -> None:
    """The client has said all, and the broker neither reads nor ends."""
    (about,) = (followed.relay_record for followed in unread.relays.expiring_sessions())
    await unread.client.send_eof()
    timeout_s = RelayConfig().half_close_timeout_ms / 1000
    await trio.sleep(timeout_s - 1)
    assert [followed.relay_record for followed in unread.relays.expiring_sessions()] == [about]
    await trio.sleep(1 + 2 * RECHECK_INTERVAL_S + 2 * LINGER_S)
    assert unread.relays.expiring_sessions() == []


async def test_an_answer_that_the_broker_reads_late_comes_before_its_end(
    autojump_clock: trio.testing.MockClock, unread: Stage
) -> None:
    await unread.client.send_eof()
    await trio.testing.wait_all_tasks_blocked()
    await unread.broker.send_all(message_frame())
    await expect(unread.client, message_frame())
    assert await read_all(unread.broker) == LARGE_ANSWER


async def test_a_broker_in_the_middle_of_a_frame_is_ended_with_the_relay(
    autojump_clock: trio.testing.MockClock, stuck: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reauthentication, "QUIET_S", 0.01)
    stuck.now.s += 200
    await stuck.broker.send_all(BROKER_ASKS + message_frame())
    rest = await read_all(stuck.client)
    assert error_in(rest[len(message_frame()) :]).error.message == SESSION_EXPIRED
    assert FRAME.startswith(await read_all(stuck.broker))


async def test_an_answer_that_waits_is_dropped_once_the_relay_is_being_closed(
    autojump_clock: trio.testing.MockClock, stage: Stage
) -> None:
    await stage.begin()
    frame = send_frame(b"x" * 3000)
    await stage.client.send_all(frame[:1000])
    await expect(stage.broker, frame[:1000])
    await stage.broker.send_all(BROKER_ASKS)
    await trio.testing.wait_all_tasks_blocked()
    assert stage.credentials.begun == 1
    (followed,) = stage.relays.expiring_sessions()
    followed.control.start_closing(CloseReason.MAX_AGE)
    await stage.client.send_all(frame[1000:])
    assert await read_all(stage.broker) == frame[1000:]
    assert stage.succeeded() == 0


async def test_both_sides_are_asked_at_the_same_time(autojump_clock: trio.testing.MockClock, stage: Stage) -> None:
    await stage.begin(lifetime_ms=100_000)
    for number in (1, 2):
        stage.now.s += 90
        await stage.broker.send_all(BROKER_ASKS[:30])
        stage.relays.reauthentication.send_due_challenges()
        await expect(stage.client, CHALLENGE)
        await stage.broker.send_all(BROKER_ASKS[30:] + message_frame())
        await expect(stage.client, message_frame())
        await expect(stage.broker, proxys_answer(b"%d" % number))
        await stage.client.send_all(answer(b"alice's") + send_frame())
        await expect(stage.broker, send_frame())
        await trio.testing.wait_all_tasks_blocked()  # the verdict
    assert stage.reauthenticator.given == [b"alice's"] * 2


async def test_an_expired_client_that_waits_for_its_verdict_does_not_hold_the_answer_up(
    autojump_clock: trio.testing.MockClock, stage: Stage
) -> None:
    stage.reauthenticator.gate = trio.Event()
    await stage.begin(lifetime_ms=100_000)
    stage.now.s += 110
    await stage.client.send_all(answer() + send_frame())
    await trio.testing.wait_all_tasks_blocked()
    await stage.broker.send_all(BROKER_ASKS)
    await expect(stage.broker, proxys_answer(b"1"))
    stage.reauthenticator.gate.set()
    await expect(stage.broker, send_frame())


async def test_without_a_host_the_client_is_asked_as_ever(autojump_clock: trio.testing.MockClock, stage: Stage) -> None:
    await stage.begin(broker_host="", counts_messages=True)
    await stage.broker.send_all(BROKER_ASKS)
    await expect(stage.client, BROKER_ASKS)
    await stage.client.send_all(answer(b"alice's own"))
    await expect(stage.broker, answer(b"alice's own"))
    assert stage.credentials.begun == 0


async def test_exchanges_begin_no_faster_than_once_a_second(
    autojump_clock: trio.testing.MockClock, stage: Stage
) -> None:
    await stage.begin()
    times = []
    for number in range(1, 5):
        await stage.broker.send_all(BROKER_ASKS)
        await expect(stage.broker, proxys_answer(b"%d" % number))
        times.append(trio.current_time())
    assert [late - early for early, late in itertools.pairwise(times)] == pytest.approx([1, 1, 1])
    assert stage.failed("out_of_turn") == 0


async def test_no_credentials_now_is_tried_again_less_and_less_often(
    autojump_clock: trio.testing.MockClock, stage: Stage
) -> None:
    stage.credentials.failing = 6
    await stage.begin()
    begun = trio.current_time()
    await stage.broker.send_all(BROKER_ASKS)
    await expect(stage.broker, proxys_answer(b"7"))
    assert trio.current_time() - begun == pytest.approx(1 + 2 + 4 + 8 + 8 + 8)
    assert stage.failed("no_credentials") == 6


async def expect_end(stage: Stage, text: str) -> None:
    assert error_in(await read_all(stage.client)).error.message == text
    await trio.testing.wait_all_tasks_blocked()


@pytest.mark.parametrize("more", [1, 1000])
async def test_a_second_challenge_before_the_answer_ends_the_relay(
    autojump_clock: trio.testing.MockClock, stage: Stage, more: int
) -> None:
    """However many there are, it is said once."""
    stage.credentials.gate = trio.Event()
    await stage.begin()
    await stage.broker.send_all(BROKER_ASKS * (1 + more))
    await expect_end(stage, BROKER_OUT_OF_TURN)
    assert stage.failed("out_of_turn") == 1
    stage.credentials.gate.set()
    assert await read_all(stage.broker) == b""


async def test_a_flood_of_answers_is_one_failure(autojump_clock: trio.testing.MockClock, stage: Stage) -> None:
    """A client that answers over and over has a turn for each, in the first of which the way to the broker ends."""
    failures: list[object] = []
    await stage.begin(lifetime_ms=100_000)
    fail = stage.relays.reauthentication.on_failure
    stage.relays.reauthentication.on_failure = lambda *arguments: (failures.append(arguments), fail(*arguments))[1]  # type: ignore[assignment]
    await stage.client.send_all(answer() * 1000)
    await read_all(stage.client)
    assert len(failures) == 1


async def test_a_challenge_that_is_too_large_ends_the_relay_unread(
    autojump_clock: trio.testing.MockClock, stage: Stage
) -> None:
    await stage.begin()
    large = commands.auth_challenge("broker", 21, "token", bytes(CHALLENGE_BYTES_MAX))
    await stage.broker.send_all(large[:100])
    await expect_end(stage, STREAM_CORRUPT)
    assert stage.credentials.begun == 0


async def test_a_client_that_has_said_all_leaves_the_broker_unanswered(
    autojump_clock: trio.testing.MockClock, stage: Stage
) -> None:
    await stage.begin()
    await stage.client.send_eof()
    assert await read_all(stage.broker) == b""
    await stage.broker.send_all(BROKER_ASKS + message_frame())
    await expect(stage.client, message_frame())
    assert stage.succeeded() == 0


@pytest.mark.parametrize("seed", range(10))
async def test_everything_in_any_pieces(autojump_clock: trio.testing.MockClock, stage: Stage, seed: int) -> None:
    """Not a byte is lost, doubled or moved out of its frame, while both are asked all the time."""
    chance = random.Random(seed)
    await stage.begin()
    there = [send_frame(chance.randbytes(chance.choice([0, 10, 3000])), number) for number in range(30)]
    back = [message_frame(chance.randbytes(chance.choice([0, 10, 3000]))) for number in range(30)]

    async def send(stream: Any, data: bytes) -> None:
        at = 0
        while at < len(data):
            size = chance.choice([1, 7, 500, 5000])
            await stream.send_all(data[at : at + size])
            at += size
            if chance.random() < 0.1:
                await trio.sleep(chance.random())

    async def converse() -> None:
        for number, frame in enumerate(back):
            await send(stage.broker, frame + (BROKER_ASKS if number % 10 == 9 else b""))
            await trio.sleep(1)

    expected = len(b"".join(there)) + 3 * len(proxys_answer(b"1"))
    found = bytearray()
    with trio.fail_after(600):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send, stage.client, b"".join(there))
            nursery.start_soon(converse)
            nursery.start_soon(expect, stage.client, b"".join(back))
            while len(found) < expected:
                found += await stage.broker.receive_some()
    for number in range(1, 4):
        at = bytes(found).index(proxys_answer(b"%d" % number))
        del found[at : at + len(proxys_answer(b"1"))]
    assert found == b"".join(there)
