"""proxy.forwarder.client.timeouts: the handshake's deadline and the keep-alive of lookup mode, as dialogues."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
import trio
import trio.testing
from forwarder_fakes import (
    AUTHENTICATED,
    Play,
    auth_response,
    challenge,
    connect,
    lookup,
)

from proto import commands
from proto.pulsar_pb2 import BaseCommand, ServerError

Start = Callable[..., Play]


async def test_a_client_that_never_says_connect(play: Start, autojump_clock: trio.testing.MockClock) -> None:
    it = play(limits={"handshake_timeout_ms": 3000})
    await it.client.expect_end()
    assert trio.current_time() == pytest.approx(3)
    assert await it.end() == "handshake_timeout"


async def test_pings_do_not_stretch_the_handshake(play: Start, autojump_clock: trio.testing.MockClock) -> None:
    it = play(limits={"handshake_timeout_ms": 3000})
    it.nursery.start_soon(ping_every_second, it)
    await it.ended.wait()
    assert trio.current_time() == pytest.approx(3)


async def ping_every_second(it: Play) -> None:
    with suppress(trio.BrokenResourceError):
        while not it.ended.is_set():
            await it.client.send(commands.ping())
            await it.client.receive()
            await trio.sleep(1)


async def test_half_a_connect_does_not_stretch_the_handshake(
    play: Start, autojump_clock: trio.testing.MockClock
) -> None:
    it = play(limits={"handshake_timeout_ms": 3000})
    for byte in commands.encode(connect())[:5]:
        await it.client.send(bytes([byte]))
        await trio.sleep(0.5)
    await it.client.expect_end()
    assert trio.current_time() == pytest.approx(3)


async def test_an_auth_worker_that_does_not_answer(play: Start, autojump_clock: trio.testing.MockClock) -> None:
    it = play(authentication=AUTHENTICATED, limits={"handshake_timeout_ms": 3000})
    it.workers.authentication.answers = [trio.sleep_forever]
    await it.client.send(connect())
    code, text = await it.client.expect_error()
    assert (code, text) == (ServerError.ServiceNotReady, "The handshake took too long")
    assert trio.current_time() == pytest.approx(3)
    assert await it.end() == "handshake_timeout"


@pytest.mark.conforms("pip-30.46")
async def test_a_client_that_does_not_answer_a_challenge(play: Start, autojump_clock: trio.testing.MockClock) -> None:
    it = play(authentication=AUTHENTICATED, limits={"handshake_timeout_ms": 3000})
    it.workers.authentication.answers = [challenge(b"q")]
    await it.client.send(connect())
    await it.client.expect_command(BaseCommand.AUTH_CHALLENGE)
    code, _ = await it.client.expect_error()
    assert code == ServerError.ServiceNotReady
    assert trio.current_time() == pytest.approx(3)


@pytest.mark.conforms("pip-30.46")
@pytest.mark.parametrize("rounds", range(4))
@pytest.mark.parametrize("stalls", ["client", "auth worker"])
async def test_each_round_has_a_deadline(
    play: Start, autojump_clock: trio.testing.MockClock, rounds: int, stalls: str
) -> None:
    """Whichever round does not come to its end, on either side; ``rounds``: those before it, each with its time."""
    it = play(authentication=AUTHENTICATED, limits={"handshake_timeout_ms": 3000})
    it.workers.authentication.answers = [challenge(b"q")] * rounds
    it.workers.authentication.answers.append(challenge(b"q") if stalls == "client" else trio.sleep_forever)
    with trio.fail_after(60):
        await it.client.send(connect())
        for _ in range(rounds):
            await it.client.expect_command(BaseCommand.AUTH_CHALLENGE)
            await trio.sleep(0.5)
            await it.client.send(auth_response(b"a"))
        if stalls == "client":
            await it.client.expect_command(BaseCommand.AUTH_CHALLENGE)
        code, text = await it.client.expect_error()
        assert (code, text) == (ServerError.ServiceNotReady, "The handshake took too long")
        assert trio.current_time() == pytest.approx(3), "one deadline for all rounds"
        assert await it.end() == "handshake_timeout"


async def test_a_silent_client_is_pinged_then_closed(play: Start, autojump_clock: trio.testing.MockClock) -> None:
    it = await play(limits={"keep_alive_interval_ms": 30_000, "handshake_timeout_ms": 10_000}).in_lookup_mode()
    started = trio.current_time()
    await it.client.send(lookup())
    await it.client.expect_command(BaseCommand.LOOKUP_RESPONSE)
    await it.client.expect_command(BaseCommand.PING)
    assert trio.current_time() - started == pytest.approx(30)
    await it.client.expect_end()
    assert trio.current_time() - started == pytest.approx(60)
    assert await it.end() == "keep_alive_timeout"


@pytest.mark.parametrize("handshake_ms", [5_000, 300_000])
async def test_the_first_ping_comes_after_the_interval_not_at_the_handshakes_deadline(
    play: Start, handshake_ms: int, autojump_clock: trio.testing.MockClock
) -> None:
    it = await play(limits={"keep_alive_interval_ms": 30_000, "handshake_timeout_ms": handshake_ms}).in_lookup_mode()
    await it.client.expect_command(BaseCommand.PING)
    assert trio.current_time() == pytest.approx(30)


async def test_a_client_that_answers_pings_stays(play: Start, autojump_clock: trio.testing.MockClock) -> None:
    it = await play(limits={"keep_alive_interval_ms": 30_000}).in_lookup_mode()
    for _ in range(5):
        await it.client.expect_command(BaseCommand.PING)
        await trio.sleep(1)
        await it.client.send(commands.pong())
    await it.client.send(lookup())
    await it.client.expect_command(BaseCommand.LOOKUP_RESPONSE)


@pytest.mark.parametrize("answer", [commands.pong(), lookup(), commands.ping()])
async def test_a_client_that_answers_pings_in_the_same_instant_stays(
    play: Start, answer: BaseCommand | bytes, autojump_clock: trio.testing.MockClock
) -> None:
    it = await play(limits={"keep_alive_interval_ms": 30_000}).in_lookup_mode()
    for number in range(1, 4):
        while (heard := await it.client.receive()) is not None and heard.type != BaseCommand.PING:
            pass
        assert heard is not None
        assert trio.current_time() == pytest.approx(30 * number)
        await it.client.send(answer)


async def test_a_client_that_is_heard_now_and_then_is_pinged_an_interval_after_the_last_time(
    play: Start, autojump_clock: trio.testing.MockClock
) -> None:
    it = await play(limits={"keep_alive_interval_ms": 30_000}).in_lookup_mode()
    for at in (11, 29, 58, 59):
        await trio.sleep_until(at)
        await it.client.send(commands.pong())
    await it.client.expect_command(BaseCommand.PING)
    assert trio.current_time() == pytest.approx(89)
    await it.client.expect_end()
    assert trio.current_time() == pytest.approx(119)
    assert await it.end() == "keep_alive_timeout"


async def test_a_client_that_is_not_read_is_not_taken_for_silent(
    play: Start, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """While its answers are waited for, what it says stays in the kernel, its PONGs, too."""
    monkeypatch.setattr("proxy.forwarder.client.lookup_mode.BYTES_MAX", 100)
    it = await play(limits={"keep_alive_interval_ms": 5_000, "lookup_timeout_ms": 120_000}).in_lookup_mode()
    it.workers.answer_by = None
    await it.client.send(lookup("t" * 200, 1))
    for number in range(2, 20):
        await trio.sleep(4)
        await it.client.send(lookup("t", number))
    assert len(it.workers.sent) == 1
    it.workers.answer_by = it.workers.answer_at_once
    it.workers.sent[0].answer(0)
    heard: list[int] = []
    while len(heard) < 19:
        command = await it.client.receive()
        assert command is not None, f"ended after {heard}"
        if command.type == BaseCommand.LOOKUP_RESPONSE:
            heard.append(command.lookup_topic_response.request_id)
    assert heard[0] == 1
    assert sorted(heard) == list(range(1, 20))


async def test_a_client_that_ended_its_direction_is_not_taken_for_silent(
    play: Start, autojump_clock: trio.testing.MockClock
) -> None:
    it = await play(limits={"keep_alive_interval_ms": 2_000, "lookup_timeout_ms": 60_000}).in_lookup_mode()
    it.workers.answer_by = None
    await it.client.send(lookup())
    await it.client.stream.send_eof()
    await trio.sleep(30)
    it.workers.sent[0].answer(0)
    await it.client.expect_command(BaseCommand.LOOKUP_RESPONSE)
    await it.client.expect_end()
    assert await it.end() == "client_closed"


async def test_a_client_that_does_not_read_our_ping(play: Start, autojump_clock: trio.testing.MockClock) -> None:
    it = play(lockstep=True, limits={"keep_alive_interval_ms": 5000})
    it.nursery.start_soon(it.client.send, connect())
    await it.client.expect_command(BaseCommand.CONNECTED)
    assert await it.end() in {"client_does_not_read", "keep_alive_timeout"}


async def test_a_client_that_is_gone_when_it_is_pinged(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    it = await Play(nursery, limits={"keep_alive_interval_ms": 5000}).in_lookup_mode()

    async def reset(_data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        raise trio.BrokenResourceError

    monkeypatch.setattr(it.stream, "send_all", reset)
    assert await it.end() == "client_broke_off"
    assert trio.current_time() == pytest.approx(5)


async def test_a_client_that_pings_by_itself_is_not_pinged(play: Start, autojump_clock: trio.testing.MockClock) -> None:
    it = await play(limits={"keep_alive_interval_ms": 30_000}).in_lookup_mode()
    for _ in range(10):
        await it.client.send(commands.ping())
        await it.client.expect_command(BaseCommand.PONG)
        await trio.sleep(20)
