"""proxy.forwarder.relay.framed_splice_pump: relays whose frames are followed, killed anywhere; not a byte lost or
doubled, no boundary
lost, and a client that had to authenticate again still has to.
"""

from __future__ import annotations

import itertools
import os
import random
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import trio
import trio.testing
from adoption_fakes import Fuse, successor
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
    message_frame,
    producer_frame,
    proxys_answer,
    send_frame,
    session,
)
from relay_fakes import Forwarder, Lane, Place, about_relay, expect, open_lane, open_place, read, read_all, until

from proto import commands
from proto.command_heads import HEAD_BYTES
from proto.commands import parse_command
from proto.connect_rules import AUTHENTICATION_FAILED
from proto.frames import FrameDecoder
from proto.pulsar_pb2 import BaseCommand
from proto.relay_frames import HEADER_BYTES
from proxy.common.deny_list import credential_digest, parse_deny_list
from proxy.forwarder.lifetime import broker_reauthentication, reauthentication
from proxy.forwarder.lifetime import session as followed
from proxy.forwarder.lifetime.reauthentication import SESSION_EXPIRED
from proxy.forwarder.workers.authentication import Challenge
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.shared.relay_table import EXCHANGE, PHASE, TO_BROKER, TO_CLIENT, framed_row

WAYS = ["killed", "handed over"]


@pytest.fixture(autouse=True)
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reauthentication, "QUIET_S", 0.01)


async def begun(place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, **fields: Any) -> None:
    forwarder = await place.forwarder()
    await forwarder.begin(lane, session=session(now, reauthenticator, **fields))
    await trio.testing.wait_all_tasks_blocked()  # it has looked at its clock


# ---- one step at a time


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cut", [0, 1, 4, 9, 10, 11, 12, 25, 40])
async def test_the_boundary_is_found_again(  # noqa: PLR0917 -- fixtures
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, way: str, cut: int
) -> None:
    """In the middle of a frame or of its header, both ways; a challenge and its answer prove it."""
    await begun(place, lane, now, reauthenticator)
    there, back = send_frame(b"t" * 40), message_frame(b"b" * 40)
    await lane.client.send_all(there + there[:cut])
    await lane.broker.send_all(back + back[:cut])
    # The beginning of a header is held.
    passed_there, passed = (cut if cut >= enough else 0 for enough in (HEAD_BYTES, HEADER_BYTES))
    assert await read(lane.broker, len(there) + passed_there) == there + there[:passed_there]
    assert await read(lane.client, len(back) + passed) == back + back[:passed]
    await trio.testing.wait_all_tasks_blocked(0.01)
    second = await successor(place, way)
    now.s += 90
    second.relays.reauthentication.send_due_challenges()
    await lane.broker.send_all(back[cut:] + back)
    rest = back[passed:]
    found = await read(lane.client, 2 * len(back) - passed + len(CHALLENGE))
    assert found in {CHALLENGE + rest + back, rest + CHALLENGE + back, rest + back + CHALLENGE}
    await lane.client.send_all(there[cut:] + answer() + there)
    assert await read(lane.broker, 2 * len(there) - passed_there) == there[passed_there:] + there
    await until(lambda: reauthenticator.given == [b"fresh"])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cut", [0, 1, 9, 10, 12, 13, 30, len(answer()) - 1])
async def test_an_outstanding_challenge(  # noqa: PLR0917 -- fixtures
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, way: str, cut: int
) -> None:
    """What was there of an answer dies with its process: the client is asked once more. An answer that comes whole
    to the successor is verified.
    """
    forwarder = await place.forwarder()
    await forwarder.begin(lane, session=session(now, reauthenticator))
    now.s += 90
    forwarder.relays.reauthentication.send_due_challenges()
    assert await read(lane.client, len(CHALLENGE)) == CHALLENGE
    await lane.client.send_all(answer()[:cut])
    await trio.testing.wait_all_tasks_blocked(0.01)
    second = await successor(place, way)
    await lane.client.send_all(answer()[cut:] + send_frame(b"behind"))
    assert await read(lane.broker, len(send_frame(b"behind"))) == send_frame(b"behind")
    if cut >= 13:  # it had begun to be taken out
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert reauthenticator.given == []
        now.s += 1.5
        second.relays.reauthentication.send_due_challenges()
        assert await read(lane.client, len(CHALLENGE)) == CHALLENGE
        await lane.client.send_all(answer())
    await until(lambda: reauthenticator.given == [b"fresh"])
    await until(lambda: second.metrics.success.labels(method="token")._value.get() == 1)


@pytest.mark.conforms("kip-368.58", "kip-368.59")
@pytest.mark.parametrize("way", WAYS)
async def test_a_successor_counts_no_client_that_is_never_asked(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, way: str
) -> None:
    """It was counted when it connected, or opened its first producer."""
    first = await place.forwarder()
    await first.begin(lane, session=session(now, reauthenticator, exempts_producers=True))
    await lane.client.send_all(producer_frame())
    await expect(lane.broker, producer_frame())
    assert _no_reauth(first) == 1
    second = await successor(place, way)
    await lane.client.send_all(producer_frame())
    await expect(lane.broker, producer_frame())
    assert _no_reauth(second) == 0


def _no_reauth(forwarder: Forwarder) -> float:
    (family,) = forwarder.metrics._no_reauth.collect()
    return sum(sample.value for sample in family.samples)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cut", [0, 1, 9, 12])
async def test_a_ping_past_the_end_and_the_grace(  # noqa: PLR0917 -- fixtures
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, way: str, cut: int
) -> None:
    """Its beginning is held, like any; the successor knows the end, and the grace that the relay began with."""
    await begun(place, lane, now, reauthenticator, challenge=b"", grace_ms=30_000)
    ping = commands.ping()
    now.s += 110
    await lane.client.send_all(ping + ping[:cut])
    await lane.broker.send_all(ping + ping[:cut])
    assert await read(lane.broker, len(ping)) == ping
    assert await read(lane.client, len(ping)) == ping
    await trio.testing.wait_all_tasks_blocked(0.01)
    second = await successor(place, way)
    await lane.client.send_all(ping[cut:])
    await lane.broker.send_all(ping[cut:] + message_frame(b"in its grace"))
    assert await read(lane.broker, len(ping)) == ping
    expected = ping + message_frame(b"in its grace")
    assert await read(lane.client, len(expected)) == expected
    now.s += 30
    await lane.broker.send_all(message_frame(b"past it"))
    rest = await read_all(lane.client)
    assert rest.startswith(message_frame(b"past it"))
    assert error_in(rest[len(message_frame(b"past it")) :]).error.message == SESSION_EXPIRED
    assert second.metrics.expired_killed._value.get() == 1


@pytest.mark.parametrize("way", WAYS)
async def test_an_answer_that_was_being_verified_is_given_to_the_successor(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, way: str
) -> None:
    reauthenticator.gate = trio.Event()
    await begun(place, lane, now, reauthenticator)
    now.s += 90
    place.forwarders[-1].relays.reauthentication.send_due_challenges()
    assert await read(lane.client, len(CHALLENGE)) == CHALLENGE
    await lane.client.send_all(answer(b"1"))
    await until(lambda: reauthenticator.given == [b"1"])
    second = await successor(place, way)
    reauthenticator.gate.set()
    now.s += 1.5
    second.relays.reauthentication.send_due_challenges()
    assert await read(lane.client, len(CHALLENGE)) == CHALLENGE
    await lane.client.send_all(answer(b"2"))
    await until(lambda: second.metrics.success.labels(method="token")._value.get() == 1)


@pytest.mark.parametrize("way", WAYS)
async def test_rounds_begin_anew(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, way: str
) -> None:
    """Only who began them could go on with them."""
    further = commands.auth_challenge("proxy", 21, "token", b"server first")
    reauthenticator.verdict = lambda data: Challenge(further) if data == b"client first" else identity()
    await begun(place, lane, now, reauthenticator)
    now.s += 90
    place.forwarders[-1].relays.reauthentication.send_due_challenges()
    assert await read(lane.client, len(CHALLENGE)) == CHALLENGE
    await lane.client.send_all(answer(b"client first"))
    assert await read(lane.client, len(further)) == further
    second = await successor(place, way)
    await lane.client.send_all(answer(b"client final"))
    await until(lambda: second.relays.reauthentication._due)
    now.s += 1.5
    second.relays.reauthentication.send_due_challenges()
    assert await read(lane.client, len(CHALLENGE)) == CHALLENGE
    assert reauthenticator.given == [b"client first"]
    await lane.client.send_all(answer(b"client first"))
    assert await read(lane.client, len(further)) == further
    await lane.client.send_all(answer(b"client final"))
    await until(lambda: second.metrics.success.labels(method="token")._value.get() == 1)


@pytest.mark.parametrize("way", WAYS)
async def test_phases_of_a_later_version(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, way: str
) -> None:
    """An upgrade that is taken back: what the phases mean is not known, and the relay goes on."""
    credentials = FakeCredentials()
    place.broker_credentials = credentials.begin
    await begun(place, lane, now, reauthenticator, broker_host=BROKER_HOST)
    (one,) = place.forwarders[-1].relays.expiring_sessions()
    cells = place.forwarders[-1].relays._ledger.table.cells
    cells[framed_row(one.relay_record.id, TO_BROKER) + EXCHANGE] = 99
    cells[framed_row(one.relay_record.id, TO_CLIENT) + PHASE] = 99
    second = await successor(place, way)
    await lane.broker.send_all(BROKER_ASKS)
    assert await read(lane.broker, len(proxys_answer(b"1"))) == proxys_answer(b"1")
    await lane.client.send_all(answer(b"of a round that is not known") + send_frame())
    assert await read(lane.broker, len(send_frame())) == send_frame()
    assert reauthenticator.given == []
    now.s += 90
    second.relays.reauthentication.send_due_challenges()
    assert await read(lane.client, len(CHALLENGE)) == CHALLENGE
    await lane.client.send_all(answer(b"fresh"))
    await until(lambda: second.metrics.success.labels(method="token")._value.get() == 1)


@pytest.mark.parametrize("way", WAYS)
async def test_a_longer_life_is_inherited(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, way: str
) -> None:
    await begun(place, lane, now, reauthenticator)
    now.s += 90
    await lane.client.send_all(answer())
    await until(lambda: place.forwarders[-1].metrics.success.labels(method="token")._value.get() == 1)
    second = await successor(place, way)
    now.s += 50
    second.relays.reauthentication.send_due_challenges()
    await lane.client.send_all(send_frame())
    assert await read(lane.broker, len(send_frame())) == send_frame()
    now.s += 60
    await lane.client.send_all(send_frame())
    assert error_in(await read_all(lane.client)).error.message == SESSION_EXPIRED


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("verdict", [None, denied])
async def test_a_successor_completes_a_close_that_its_predecessor_began(  # noqa: PLR0917 -- fixtures
    place: Place,
    lane: Lane,
    now: Now,
    reauthenticator: FakeReauthenticator,
    way: str,
    verdict: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reauthentication, "QUIET_S", 0.3)
    reauthenticator.verdict = verdict
    await begun(place, lane, now, reauthenticator)
    now.s += 150
    await lane.client.send_all((answer() if verdict else b"") + send_frame())
    await until(lambda: place.forwarders[-1].relays._engine.pump.half_closed)
    second = await successor(place, way)
    await lane.broker.send_all(message_frame(b"late"))
    rest = await read_all(lane.client)
    assert rest[: len(message_frame(b"late"))] == message_frame(b"late")
    text = AUTHENTICATION_FAILED if verdict else SESSION_EXPIRED
    assert error_in(rest[len(message_frame(b"late")) :]).error.message == text
    assert await read_all(lane.broker) == b""
    await until(lambda: second.ended)
    if not verdict:
        killed = [one.metrics.expired_killed._value.get() for one in (place.forwarders[0], second)]
        assert killed == [1, 0], "counted once, by who began it"


async def test_a_client_with_a_producer_stays_spared(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator
) -> None:
    await begun(place, lane, now, reauthenticator, exempts_producers=True)
    producer = b"\0\0\0\x0a\0\0\0\x06\x08\x05\x2a\x02\x18\x07"
    await lane.client.send_all(producer)
    assert await read(lane.broker, len(producer)) == producer
    second = await successor(place, "killed")
    now.s += 90
    second.relays.reauthentication.send_due_challenges()
    await lane.broker.send_all(message_frame())
    assert await read(lane.client, len(message_frame())) == message_frame()


# ---- killed anywhere


class FusedSocket(socket.socket):
    """Each time bytes leave it for good may be the last thing that its process does."""

    fuse: Fuse

    def recv(self, *arguments: Any) -> bytes:
        self.fuse.step()
        data = super().recv(*arguments)
        self.fuse.step()
        return data


@pytest.fixture
def framed_fuse(fuse: Fuse, monkeypatch: pytest.MonkeyPatch) -> Fuse:
    write = os.write

    def fused_write(descriptor: int, data: bytes) -> int:
        fuse.step()
        written = write(descriptor, data)
        fuse.step()
        return written

    class Sockets:
        """The module socket, as Framing sees it."""

        AF_INET, SOCK_STREAM, MSG_PEEK = socket.AF_INET, socket.SOCK_STREAM, socket.MSG_PEEK

        @staticmethod
        def socket(*arguments: Any, **named: Any) -> socket.socket:
            made = FusedSocket(*arguments, **named)
            made.fuse = fuse
            return made

    monkeypatch.setattr(followed, "socket", Sockets)
    monkeypatch.setattr(os, "write", fused_write)
    return fuse


class Talk:
    """A client and a broker that talk in frames of all sizes, the client answering every challenge."""

    def __init__(self, lane: Lane, seed: int) -> None:
        self.chance = random.Random(seed)
        self.lane = lane
        self.answers = 0
        sizes = [0, 5, 300, 9_000, 40_000]
        self.there = [send_frame(self.chance.randbytes(self.chance.choice(sizes)), number) for number in range(12)]
        self.back = [message_frame(self.chance.randbytes(self.chance.choice(sizes))) for _ in range(12)]
        self.writing = trio.Lock()
        self.challenges = 0
        self.padding = b""

    async def run(self) -> None:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.send, self.lane.client, self.there)
                nursery.start_soon(self.send, self.lane.broker, self.back)
                nursery.start_soon(self.receive_as_client)
                nursery.start_soon(self.receive_as_broker)

    async def send(self, stream: TcpStream, frames: list[bytes]) -> None:
        for frame in frames:
            async with self.writing if stream is self.lane.client else trio.Lock():
                at = 0
                while at < len(frame):
                    size = self.chance.choice([1, 3, 12, 5_000, 60_000])
                    await stream.send_all(frame[at : at + size])
                    at += size
                    if self.chance.random() < 0.2:
                        await trio.sleep(0.001)
        if stream is self.lane.broker:
            await stream.send_eof()

    async def receive_as_broker(self) -> None:
        expected = b"".join(self.there)
        found = await read(self.lane.broker, len(expected))
        assert found == expected

    async def receive_as_client(self) -> None:
        decoder, found = FrameDecoder(max_frame_bytes=1 << 20), []
        async for data in self.lane.client:
            decoder.receive_data(data)
            while (frame := decoder.next_frame()) is not None:
                whole = frame.encode()
                if whole != CHALLENGE:
                    found.append(whole)
                    continue
                self.challenges += 1
                async with self.writing:
                    self.answers += 1
                    await self.lane.client.send_all(answer(b"%d" % self.answers + self.padding))
        assert found == self.back


class TalkWithBothAsked(Talk):
    """A broker beside it that asks the proxy, too, and goes on asking as soon as it was answered."""

    def __init__(self, lane: Lane, seed: int) -> None:
        super().__init__(lane, seed)
        self.asked = self.answered = 0
        self.is_last = False
        self.answer_came = trio.Event()
        self.answer_came.set()

    async def send(self, stream: TcpStream, frames: list[bytes]) -> None:
        if stream is self.lane.client:
            await super().send(stream, frames)
            return
        for frame in frames:
            asks = self.answer_came.is_set()
            if asks:
                self.asked += 1
                self.answer_came = trio.Event()
            data = (BROKER_ASKS if asks else b"") + frame
            at = 0
            while at < len(data):
                size = self.chance.choice([1, 3, 12, 5_000, 60_000])
                await stream.send_all(data[at : at + size])
                at += size
            if self.chance.random() < 0.3:
                await self.answer_came.wait()
        await self.answer_came.wait()
        self.is_last, self.asked, self.answer_came = True, self.asked + 1, trio.Event()
        await stream.send_all(BROKER_ASKS)
        await self.answer_came.wait()
        await stream.send_eof()

    async def receive_as_broker(self) -> None:
        decoder, found = FrameDecoder(max_frame_bytes=1 << 20), []
        while len(found) < len(self.there) or not self.is_last or self.answered < self.asked:
            decoder.receive_data(await self.lane.broker.receive_some())
            while (frame := decoder.next_frame()) is not None:
                if parse_command(frame.command).type != BaseCommand.AUTH_RESPONSE:
                    found.append(frame.encode())
                    continue
                self.answered += 1
                assert self.answered == self.asked, "each challenge is answered once"
                self.answer_came.set()
        assert found == self.there


class TalkWithForwardedAnswers(TalkWithBothAsked):
    """A broker that asks the client, and gets the answers that the proxy has had verified; some larger than a page."""

    def __init__(self, lane: Lane, seed: int) -> None:
        super().__init__(lane, seed)
        self.padding = bytes(seed % 2 * 5_000)


async def follow(place: Place, fuse: Fuse, steps: Iterator[int]) -> None:
    """What the supervisor does: each that dies gets a successor."""
    while True:
        await place.forwarders[-1].gone.wait()
        fuse.disarm()
        await place.forwarder()
        if (left := next(steps, 0)) > 0:
            fuse.arm(place, left)


async def age(place: Place, now: Now) -> None:
    """Time passes fast, but never so fast that a session expires; while no forwarder has the relay, it stands still.

    Near the end it goes on from challenge to challenge alone: an answer that was lost is asked for a second later.
    """
    while True:
        await trio.sleep(0.002)
        forwarder = place.forwarders[-1]
        if not hasattr(forwarder, "relays") or forwarder.gone.is_set():
            continue
        for clock in (one.clock for one in forwarder.relays.expiring_sessions()):
            assert clock is not None
            if clock.expires_at_s > now.s + 40:  # so that more seconds are left than answers are lost
                now.s += 24
            elif now.s < clock.challenge_at_s < clock.expires_at_s:
                now.s = clock.challenge_at_s
        forwarder.relays.reauthentication.send_due_challenges()


async def talk_and_die(
    fuse: Fuse,
    steps: list[int],
    seed: int = 1,
    *,
    kind: type[Talk] = Talk,
) -> int:
    left = iter(steps)
    now, reauthenticator = Now(), FakeReauthenticator()
    async with open_place() as place, open_lane(buffer_bytes=4096) as lane:
        place.now, place.recall = now, reauthenticator.recall
        # Answers of more than a page, too: they are put in another way.
        place.broker_credentials = FakeCredentials(padding=bytes(seed % 2 * 9_000)).begin
        forwarder = await place.forwarder()
        fields = {TalkWithBothAsked: {"broker_host": BROKER_HOST}, TalkWithForwardedAnswers: {"passes_answers": True}}
        await forwarder.begin(lane, session=session(now, reauthenticator, lifetime_ms=200_000, **fields.get(kind, {})))
        talk = kind(lane, seed)
        fuse.arm(place, next(left))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow, place, fuse, left)
            nursery.start_soon(age, place, now)
            await talk.run()
            fuse.disarm()
            nursery.cancel_scope.cancel()
        failures = [forwarder.metrics.failure.labels(method="token")._value.get() for forwarder in place.forwarders]
        assert not any(failures)
    return talk.challenges


async def test_killed_once_at_every_step(framed_fuse: Fuse) -> None:
    """After each splice, write and receipt, before each store."""
    await talk_and_die(framed_fuse, [1 << 30])
    steps = framed_fuse.steps
    assert steps > 200
    challenges = 0
    for at in sorted({*range(1, 60), *range(60, steps, max(1, steps // 60))}):
        challenges += await talk_and_die(framed_fuse, [at])
    assert challenges > 50


@pytest.mark.parametrize("seed", range(20))
async def test_killed_again_and_again(framed_fuse: Fuse, seed: int) -> None:
    chance = random.Random(seed)
    await talk_and_die(framed_fuse, [chance.randrange(1, 80) for _ in range(12)], seed)


@pytest.mark.parametrize("seed", [1, 2], ids=["large answers", "small answers"])
async def test_killed_once_at_every_step_while_the_broker_asks_the_proxy(
    framed_fuse: Fuse, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each challenge is answered exactly once, at a boundary, whenever it happens; the client sees none of it."""
    monkeypatch.setattr(broker_reauthentication, "EXCHANGE_INTERVAL_S", 0.0)
    await talk_and_die(framed_fuse, [1 << 30], seed, kind=TalkWithBothAsked)
    steps = framed_fuse.steps
    assert steps > 200
    for at in sorted({*range(1, 40), *range(40, steps, max(1, steps // 80))}):
        await talk_and_die(framed_fuse, [at], seed, kind=TalkWithBothAsked)


@pytest.mark.parametrize("seed", range(20))
async def test_killed_again_and_again_while_the_broker_asks_the_proxy(
    framed_fuse: Fuse, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_reauthentication, "EXCHANGE_INTERVAL_S", 0.0)
    chance = random.Random(seed)
    left = [chance.randrange(1, 80) for _ in range(12)]
    await talk_and_die(framed_fuse, left, seed, kind=TalkWithBothAsked)


@pytest.mark.parametrize("seed", [1, 2], ids=["large answers", "small answers"])
async def test_killed_once_at_every_step_while_the_broker_asks_the_client(framed_fuse: Fuse, seed: int) -> None:
    """Each challenge of the broker's is answered exactly once, at a boundary, with an answer that was accepted."""
    await talk_and_die(framed_fuse, [1 << 30], seed, kind=TalkWithForwardedAnswers)
    steps = framed_fuse.steps
    assert steps > 200
    for at in sorted({*range(1, 40), *range(40, steps, max(1, steps // 80))}):
        await talk_and_die(framed_fuse, [at], seed, kind=TalkWithForwardedAnswers)


@pytest.mark.parametrize("seed", range(20))
async def test_killed_again_and_again_while_the_broker_asks_the_client(framed_fuse: Fuse, seed: int) -> None:
    chance = random.Random(seed)
    left = [chance.randrange(1, 80) for _ in range(12)]
    await talk_and_die(framed_fuse, left, seed, kind=TalkWithForwardedAnswers)


def test_types_are_those_of_the_wire() -> None:
    assert (BaseCommand.AUTH_RESPONSE, BaseCommand.SEND) == (0x25, 6)
    assert list(itertools.islice(answer()[8:], 2)) == [8, 0x25]


NONSENSE = (-(2**63), -1, 1, 2**31, 2**60, 2**62, 2**63 - 1)


@pytest.mark.parametrize("number", NONSENSE)
async def test_nonsense_in_the_rows_of_one_framed_relay_costs_no_other_one(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, number: int
) -> None:
    """Security: a forwarder that was taken over writes it, and ends; each successor would end by it."""
    first = await place.forwarder()
    poisoned = await first.begin(lane, session=session(now, reauthenticator))
    cells = first.relays._ledger.table.cells
    async with open_lane() as other:
        await first.begin(other)
        for way in (TO_BROKER, TO_CLIENT):
            for cell in range(16):
                cells[framed_row(poisoned.id, way) + cell] = number
        await successor(place, "killed")
        await lane.client.send_all(send_frame(b"who knows"))
        await successor(place, "killed")
        for sender, receiver in ((other.client, other.broker), (other.broker, other.client)):
            await sender.send_all(b"on and on")
            assert await read(receiver, 9) == b"on and on"


@pytest.mark.parametrize("way", WAYS)
async def test_a_successor_knows_the_credentials_of_a_renewed_session(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, way: str
) -> None:
    """Security: those that the deny list may come to name are the last ones, and no longer those before."""
    old, new = (credential_digest("token-id", text) for text in ("old", "new"))
    reauthenticator.verdict = lambda _data: replace(identity(), credentials=(new,))
    about = about_relay(credentials=[old])
    first = await place.forwarder()
    await first.begin(lane, about=about, session=session(now, reauthenticator))
    await trio.testing.wait_all_tasks_blocked()
    now.s += 90
    first.relays.reauthentication.send_due_challenges()
    assert await read(lane.client, len(CHALLENGE)) == CHALLENGE
    await lane.client.send_all(answer(b"1"))
    await until(lambda: first.metrics.success.labels(method="token")._value.get() == 1)
    await place.settle()
    second = await successor(place, way)
    second.relays.deny_credentials(parse_deny_list(b"token-id old", "file"))
    await expect_passes(lane)
    second.relays.deny_credentials(parse_deny_list(b"token-id new", "file"))
    assert await read_all(lane.client) == await read_all(lane.broker) == b""


async def test_a_session_renewed_by_a_denied_credential_ends(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator
) -> None:
    """Security: even if an auth worker that has not read the list yet takes it."""
    reauthenticator.verdict = lambda _data: replace(identity(), credentials=(credential_digest("token-id", "7"),))
    await begun(place, lane, now, reauthenticator)
    (forwarder,) = place.forwarders
    forwarder.relays.deny_credentials(parse_deny_list(b"token-id 7", "file"))
    await expect_passes(lane)
    now.s += 90
    forwarder.relays.reauthentication.send_due_challenges()
    assert await read(lane.client, len(CHALLENGE)) == CHALLENGE
    await lane.client.send_all(answer(b"1"))
    assert await read_all(lane.client) == await read_all(lane.broker) == b""


async def expect_passes(lane: Lane) -> None:
    await lane.broker.send_all(message_frame(b"on"))
    await expect(lane.client, message_frame(b"on"))
