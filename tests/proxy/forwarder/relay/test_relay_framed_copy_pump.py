"""proxy.forwarder.relay.framed_copy_pump: sessions that expire within a relay that is not spliced."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import trio
import trio.testing
from framed_fakes import (
    ANSWER_BYTES_MAX,
    CHALLENGE,
    NEARLY_PINGS,
    FakeReauthenticator,
    Now,
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
from relay_fakes import CopiedRelays, read, read_all

from proto import commands
from proto.connect_rules import AUTHENTICATION_FAILED
from proxy.forwarder.lifetime import reauthentication
from proxy.forwarder.lifetime.reauthentication import SESSION_EXPIRED, STREAM_CORRUPT
from proxy.forwarder.relay.manager import RelayManager
from proxy.forwarder.workers.authentication import Challenge
from proxy.runtime.loop.tcp_stream import TcpStream

PING = commands.ping()


@dataclass
class Stage:
    """A relay that is not spliced, and its far ends."""

    relays: RelayManager
    now: Now
    reauthenticator: FakeReauthenticator
    client: TcpStream
    broker: TcpStream

    def ask(self) -> None:
        self.relays.reauthentication.send_due_challenges()

    async def expect_end(self, text: str, *, before: bytes = b"") -> None:
        rest = await read_all(self.client)
        assert rest[: len(before)] == before
        assert error_in(rest[len(before) :]).error.message == text


@pytest.fixture
def begin(copied: CopiedRelays, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(reauthentication, "QUIET_S", 0.01)
    now, reauthenticator = Now(), FakeReauthenticator()
    relays = copied.new(now=now)
    relays.reauthentication.fraction = lambda: 0.0

    async def begun(first: bytes = b"", **fields: Any) -> Stage:
        terms = session(now, reauthenticator, **fields)
        client, broker = await copied.begin(relays, first_to_broker=first, session=terms)
        await trio.testing.wait_all_tasks_blocked()
        return Stage(relays, now, reauthenticator, client, broker)

    return begun


async def test_frames_in_any_pieces_and_three_lives(begin: Any) -> None:
    stage = await begin()
    chance = random.Random(2)
    frame, back = send_frame(b"x" * 3000), message_frame(b"y" * 3000)
    for number in range(3):
        stage.now.s += 90
        await stage.broker.send_all(back[:1000])
        assert await read(stage.client, 1000) == back[:1000]
        stage.ask()
        await stage.broker.send_all(back[1000:] + back)
        expected = back[1000:] + CHALLENGE + back
        assert await read(stage.client, len(expected)) == expected
        whole = frame + answer(b"%d" % number) + frame
        at = 0
        while at < len(whole):
            size = chance.choice([1, 7, 2000])
            await stage.client.send_all(whole[at : at + size])
            at += size
        assert await read(stage.broker, 2 * len(frame)) == frame + frame
        await trio.testing.wait_all_tasks_blocked()
    assert stage.reauthenticator.given == [b"0", b"1", b"2"]


async def test_a_frame_held_for_a_verdict_ends_the_session_if_a_further_round_is_required(begin: Any) -> None:
    stage = await begin()
    further = commands.auth_challenge("proxy", 21, "token", b"server first")
    stage.reauthenticator.verdict = lambda _data: Challenge(further)
    stage.now.s += 150
    (followed,) = stage.relays.expiring_sessions()
    assert followed.clock is not None
    await stage.client.send_all(answer() + send_frame(b"waits"))
    assert await read(stage.client, len(further)) == further
    await stage.expect_end(SESSION_EXPIRED)
    assert await read_all(stage.broker) == b""


async def test_a_silent_broker_and_several_rounds(begin: Any) -> None:
    stage = await begin()
    further = commands.auth_challenge("proxy", 21, "token", b"server first")
    stage.reauthenticator.verdict = lambda data: Challenge(further) if data == b"1" else identity()
    stage.now.s += 90
    stage.ask()
    assert await read(stage.client, len(CHALLENGE)) == CHALLENGE
    await stage.client.send_all(answer(b"1"))
    assert await read(stage.client, len(further)) == further
    await stage.client.send_all(answer(b"2"))
    await trio.testing.wait_all_tasks_blocked()
    stage.now.s += 50
    await stage.client.send_all(send_frame())
    assert await read(stage.broker, len(send_frame())) == send_frame()


async def test_a_challenge_that_an_unasked_answer_overtakes_is_not_put_in(begin: Any) -> None:
    """It would ask for a further round of what is being verified."""
    stage = await begin()
    stage.reauthenticator.gate = trio.Event()
    frame = message_frame(b"x" * 1000)
    await stage.broker.send_all(frame[:500])
    assert await read(stage.client, 500) == frame[:500]
    stage.now.s += 90
    stage.ask()  # it waits for a boundary
    await stage.client.send_all(answer(b"unasked"))
    await trio.testing.wait_all_tasks_blocked()
    assert stage.reauthenticator.given == [b"unasked"]
    await stage.broker.send_all(frame[500:] + frame)
    assert await read(stage.client, len(frame) - 500 + len(frame)) == frame[500:] + frame, "and nothing between"
    stage.reauthenticator.gate.set()
    await trio.testing.wait_all_tasks_blocked()
    stage.now.s += 90
    stage.ask()
    assert await read(stage.client, len(CHALLENGE)) == CHALLENGE, "the next one comes in its time"
    await stage.client.send_all(answer(b"asked"))
    await trio.testing.wait_all_tasks_blocked()
    assert stage.reauthenticator.given == [b"unasked", b"asked"]


async def test_used_past_its_end(begin: Any) -> None:
    stage = await begin(challenge=b"")
    stage.now.s += 101
    await stage.client.send_all(PING + send_frame() * 2)
    await stage.broker.send_all(message_frame(b"receipt"))
    await stage.expect_end(SESSION_EXPIRED, before=message_frame(b"receipt"))
    assert await read_all(stage.broker) == PING


@pytest.mark.parametrize(
    "frames", [answer(b"bad"), answer(method="basic"), answer(bytes(ANSWER_BYTES_MAX)), answer() + answer()]
)
async def test_a_failure_closes(begin: Any, frames: bytes) -> None:
    stage = await begin()
    stage.reauthenticator.verdict = denied
    stage.now.s += 90
    stage.ask()
    assert await read(stage.client, len(CHALLENGE)) == CHALLENGE
    await stage.client.send_all(send_frame() + frames)
    await stage.expect_end(AUTHENTICATION_FAILED)
    assert await read_all(stage.broker) == send_frame()
    assert bytes(ANSWER_BYTES_MAX) not in stage.reauthenticator.given


async def test_a_frame_behind_an_answer_past_the_sessions_end_waits_for_the_verdict(begin: Any) -> None:
    stage = await begin()
    stage.reauthenticator.gate = trio.Event()
    stage.now.s += 150
    await stage.client.send_all(answer() + send_frame())
    await trio.testing.wait_all_tasks_blocked()
    with trio.move_on_after(0.02):
        pytest.fail(f"passed before the verdict: {await stage.broker.receive_some()!r}")
    stage.reauthenticator.gate.set()
    assert await read(stage.broker, len(send_frame())) == send_frame()


@pytest.mark.parametrize("way", ["client", "broker"])
async def test_a_size_that_none_can_have(begin: Any, way: str) -> None:
    stage = await begin()
    await getattr(stage, way).send_all(send_frame() + b"\xff" * 20)
    await stage.expect_end(STREAM_CORRUPT, before=send_frame() if way == "broker" else b"")


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("way", ["client", "broker"])
async def test_1024_random_bytes_end_their_own_relay(begin: Any, way: str, seed: int) -> None:
    stage, other = await begin(), await begin()
    await getattr(stage, way).send_all(random.Random(seed).randbytes(1024))
    await stage.expect_end(STREAM_CORRUPT)
    assert await read_all(stage.broker) == b""
    await other.client.send_all(send_frame())
    assert await read(other.broker, len(send_frame())) == send_frame()


@pytest.mark.parametrize("after_s", [0, 200])
async def test_a_command_that_begins_as_another_one_ends_it(begin: Any, after_s: int) -> None:
    stage = await begin(counts_messages=True)
    stage.now.s += after_s
    await stage.client.send_all(PING + disguised(send_frame()) + send_frame())
    await stage.expect_end(STREAM_CORRUPT)
    assert await read_all(stage.broker) == PING


@pytest.mark.parametrize("nearly", NEARLY_PINGS)
async def test_only_a_ping_or_pong_byte_for_byte_says_that_a_client_is_idle(begin: Any, nearly: bytes) -> None:
    stage = await begin()
    stage.now.s += 200
    for cut in range(1, len(PING)):
        for sender, receiver in ((stage.client, stage.broker), (stage.broker, stage.client)):
            await sender.send_all(PING[:cut])
            await sender.send_all(PING[cut:])
            assert await read(receiver, len(PING)) == PING
    await stage.client.send_all(PING + nearly)
    await stage.expect_end(SESSION_EXPIRED)
    assert await read_all(stage.broker) == PING


async def test_a_session_that_receives_messages_past_its_grace_is_closed(begin: Any) -> None:
    stage = await begin(challenge=b"", grace_ms=30_000)
    message = message_frame(b"m")
    stage.now.s += 129
    await stage.broker.send_all(message)
    assert await read(stage.client, len(message)) == message
    stage.now.s += 2
    await stage.broker.send_all(PING)
    assert await read(stage.client, len(PING)) == PING
    await stage.broker.send_all(message * 3)
    await stage.expect_end(SESSION_EXPIRED, before=message * 3)


async def test_a_producer_is_spared(begin: Any) -> None:
    stage = await begin(producer_frame(), exempts_producers=True)
    stage.now.s += 90
    stage.ask()
    await trio.testing.wait_all_tasks_blocked()
    await stage.broker.send_all(message_frame())
    assert await read(stage.client, len(message_frame())) == message_frame()


@pytest.mark.parametrize("cut", [0, 5, 20])
async def test_each_direction_ends_by_itself(begin: Any, cut: int) -> None:
    stage = await begin()
    frame = send_frame(b"x" * 30)
    await stage.client.send_all(frame + frame[:cut])
    await stage.client.send_eof()
    assert await read_all(stage.broker) == frame + frame[:cut]
    await stage.broker.send_all(frame + frame[:cut])
    await stage.broker.send_eof()
    assert await read_all(stage.client) == frame + frame[:cut]
    await trio.testing.wait_all_tasks_blocked()
    assert stage.relays.in_flight.count == 0


async def test_a_broker_that_ends_while_the_client_is_seen_off(begin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reauthentication, "QUIET_S", 5)
    stage = await begin(challenge=b"")
    stage.now.s += 150
    await stage.client.send_all(send_frame())
    await trio.testing.wait_all_tasks_blocked()
    await stage.broker.send_all(message_frame())
    await stage.broker.send_eof()
    await stage.expect_end(SESSION_EXPIRED, before=message_frame())


async def test_messages_are_counted(begin: Any) -> None:
    stage = await begin(clock=None, counts_messages=True)
    await stage.client.send_all(send_frame(messages=5) + PING)
    await stage.broker.send_all(message_frame() * 2)
    await trio.testing.wait_all_tasks_blocked()
    assert stage.relays._ledger.table.principal_sums(range(2, 3))[2][2:4] == [5, 2]
