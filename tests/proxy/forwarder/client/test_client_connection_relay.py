"""proxy.forwarder.client.connection on its way into the relay: what may reach the broker, and when."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from forwarder_fakes import CLIENT, Play, authenticated, connect, denied, lookup
from relay_fakes import end_all, tcp_pair

from proto import commands
from proto.client_machine import State
from proto.frames import encode_frame
from proto.pulsar_pb2 import BaseCommand, ServerError
from proto.rpc_pb2 import OriginalData, Principal
from proxy.forwarder.client.phases import Phase
from proxy.forwarder.relay.engine import RECHECK_INTERVAL_S
from proxy.forwarder.relay.relay import RelayStartFailed
from proxy.forwarder.workers.broker_links import TargetRefused
from proxy.runtime.loop.reactor import Reactor
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.network.broker_link import BrokerLinkFailed
from proxy.runtime.rpc.errors import RpcDeadlineExceeded

Start = Callable[..., Play]
TARGET = "b0:6650"
PRODUCER = BaseCommand(type=BaseCommand.PRODUCER, producer={"request_id": 5})


@pytest.fixture
async def play(nursery: trio.Nursery) -> AsyncIterator[Start]:
    """Start a session. Its relay is spliced only where the test gives the client's streams."""
    opened: list[TcpStream] = []

    def start(*, streams: tuple[TcpStream, TcpStream] | None = None, **kwargs: Any) -> Play:
        clients, brokers = streams or tcp_pair(), tcp_pair()
        opened.extend((*clients, *brokers))
        it = Play(nursery, streams=None if kwargs.get("lockstep") else clients, **kwargs)
        it.workers.connect_broker(*brokers)
        if streams is None:
            it.relays._splices = False
            nursery.start_soon(it.relays._engine.run)
        return it

    yield start
    await end_all(nursery)
    for stream in opened:
        stream.close_now()


async def relaying(play: Start) -> Play:
    it = play()
    await it.client.send(connect(TARGET))
    await it.client.expect_command(BaseCommand.CONNECTED)
    return it


@pytest.mark.conforms("pip-1.9", "pip-1.13")
async def test_the_way_into_the_relay(play: Start) -> None:
    it = play(authentication={"enabled": True})
    it.workers.authentication.answers = [authenticated()]
    await it.client.send(connect(TARGET))
    connected = (await it.client.expect_command(BaseCommand.CONNECTED)).connected
    assert connected == it.workers.broker_connected, "the broker's own Connected"
    [(message, identity, client)] = it.workers.opened
    assert (message.proxy_to_broker_url, identity.role, identity.sealed, client) == (TARGET, "alice", b"sealed", CLIENT)
    assert it.session.state is State.RELAYING
    for stage in ("authentication", "broker", "total"):
        assert it.value("pulsar_proxy_handshake_seconds_count", stage=stage) == 1


@pytest.mark.conforms("pip-1.14")
async def test_bytes_are_relayed_blind_both_ways(play: Start) -> None:
    it = await relaying(play)
    await it.client.send(b"\xff\xff\xff\xff this is no frame")
    assert await it.workers.broker.read_exactly(21) == b"\xff\xff\xff\xff this is no frame"
    await it.workers.broker.send(b"nor is this")
    assert await it.client.read_exactly(11) == b"nor is this"
    assert it.value("pulsar_proxy_binary_bytes_total", direction="to_broker") == 21
    assert it.value("pulsar_proxy_binary_ops_total", direction="to_client") == 2


@pytest.mark.parametrize("seed", range(4))
async def test_1024_random_bytes_are_the_brokers_business(play: Start, seed: int) -> None:
    """Of a session that never ends no frame is looked at."""
    it = await relaying(play)
    noise = random.Random(seed).randbytes(1024)
    await it.client.send(noise)
    assert await it.workers.broker.read_exactly(1024) == noise
    await it.workers.broker.send(noise)
    assert await it.client.read_exactly(1024) == noise


async def test_bytes_behind_the_brokers_connected_follow_it(play: Start) -> None:
    it = play()
    it.workers.broker_rest = b"first bytes of the relay"
    await it.client.send(connect(TARGET))
    await it.client.expect_command(BaseCommand.CONNECTED)
    assert await it.client.read_exactly(24) == b"first bytes of the relay"


@pytest.mark.parametrize("answers", [True, False])
async def test_a_brokers_challenge_is_relayed_to_the_client_unless_the_proxy_answers_it(
    play: Start, answers: bool
) -> None:
    it = play()
    it.workers.answers_challenges = answers
    await it.client.send(connect(TARGET))
    await it.client.expect_command(BaseCommand.CONNECTED)
    asked = commands.auth_challenge("broker", 21, "token", commands.AUTH_REFRESH)
    await it.workers.broker.send(asked + commands.ping())
    if not answers:
        assert await it.client.read_exactly(len(asked)) == asked
    assert await it.client.read_exactly(len(commands.ping())) == commands.ping()
    assert [followed.relay_record.session.broker_host for followed in it.relays.expiring_sessions()] == ["b0"] * answers


@pytest.mark.parametrize("original_data", OriginalData.values())
async def test_whether_the_broker_checks_credentials_decides_how_a_relay_is_followed(
    play: Start, original_data: OriginalData
) -> None:
    """With forwarded credentials that end, and no maximum: a broker that checks them is left alone."""
    it = play(authentication={"enabled": True}, brokers={"forward_authorization_credentials": True})
    it.workers.original_data = original_data
    principal = Principal(
        type="User", name="alice", method="token", expires_at_unix_ms=int(time.time() * 1000) + 60_000
    )
    it.workers.authentication.answers = [authenticated(principal)]
    await it.client.send(connect(TARGET))
    await it.client.expect_command(BaseCommand.CONNECTED)
    followed = [one.relay_record.session.passes_answers for one in it.relays.expiring_sessions()]
    assert (
        followed
        == {
            OriginalData.ORIGINAL_DATA_UNKNOWN: [True],
            OriginalData.ORIGINAL_DATA_IGNORED: [False],
            OriginalData.ORIGINAL_DATA_CHECKED: [],
            OriginalData.ORIGINAL_DATA_SEEMS_CHECKED: [True],
        }[original_data]
    )


async def test_ping_is_the_brokers_once_relaying(play: Start) -> None:
    it = await relaying(play)
    await it.client.send(commands.ping())
    assert (await it.workers.broker.expect_command(BaseCommand.PING)).type == BaseCommand.PING


async def test_an_idle_relay_has_no_deadline(play: Start, autojump_clock: trio.testing.MockClock) -> None:
    it = await relaying(play)
    await trio.sleep(24 * 3600)
    await it.client.send(b"x")
    assert await it.workers.broker.read_exactly(1) == b"x"


async def test_the_session_ends_where_the_relay_begins(play: Start) -> None:
    it = play(authentication={"enabled": True})
    alice = Principal(type="User", name="alice", method="token", expires_at_unix_ms=1_900_000_000_000)
    it.workers.authentication.answers = [authenticated(alice)]
    started = time.time() * 1000
    await it.client.send(connect(TARGET))
    await it.client.expect_command(BaseCommand.CONNECTED)
    await it.ended.wait()
    assert it.session.phase is Phase.RELAYED
    assert it.relays.in_flight.count == 1
    await it.workers.broker.send(PRODUCER)  # a frame: of sessions that expire these are followed
    assert await it.client.expect_command(BaseCommand.PRODUCER) == PRODUCER, "both streams are open"
    await it.client.stream.aclose()
    await it.workers.broker.stream.aclose()
    about = await it.relay_ended()
    assert (about.client_address, about.principal, about.target) == (CLIENT, "alice", TARGET)
    assert about.expires_at_unix_ms == 1_900_000_000_000
    # The wall clock may be set back meanwhile, by some milliseconds.
    assert abs(about.started_at_unix_ms - started) < 60_000


@pytest.mark.conforms("pip-1.14")
async def test_a_relay_between_plain_sockets_is_the_kernels(play: Start, nursery: trio.Nursery) -> None:
    streams = tcp_pair()
    it = play(streams=streams)
    nursery.start_soon(it.relays.run)
    it.workers.broker_rest = b"rest"
    it.workers.connect_broker(*tcp_pair())
    it.workers.broker_gate = trio.Event()
    await it.client.send(connect(TARGET), PRODUCER)
    await trio.testing.wait_all_tasks_blocked(0.01)
    it.workers.broker_gate.set()
    await it.client.expect_command(BaseCommand.CONNECTED)
    assert await it.client.read_exactly(4) == b"rest"
    assert (await it.workers.broker.expect_command(BaseCommand.PRODUCER)) == PRODUCER
    await it.ended.wait()
    assert it.session.phase is Phase.RELAYED
    assert streams[0].socket.fileno() == -1, "its descriptor is the relay's"
    await it.client.stream.aclose()
    await it.workers.broker.expect_end()
    assert (await it.relay_ended()).principal == it.session.identity.role


@pytest.mark.parametrize("held", [(), (PRODUCER,)])
async def test_a_relay_that_does_not_begin(play: Start, monkeypatch: pytest.MonkeyPatch, held: Any) -> None:
    """The client may come again, to this forwarder or another."""
    it = play()

    async def refuse(*_: Any, **__: Any) -> None:
        await trio.lowlevel.checkpoint()
        raise RelayStartFailed("for the log")

    monkeypatch.setattr(it.relays, "start_relay", refuse)
    with structlog.testing.capture_logs() as logs:
        await it.client.send(connect(TARGET), *held)
        code, text = await it.client.expect_error()
        assert await it.end() == "relay_not_begun"
    assert (code, text) == (ServerError.ServiceNotReady, "The proxy cannot relay at the moment")
    assert it.session.phase is Phase.ENDING
    assert not it.session.handshake.serves_lookups, "what its audit event says"
    [entry] = logs
    assert (entry["cause"], entry["reason"], entry["target"]) == ("relay_not_begun", "for the log", TARGET)
    assert await it.workers.broker.read_all() == b"", "the broker's side is closed"


async def test_a_defect_in_the_start_of_a_relay_ends_its_connection_only(
    play: Start, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    reactor = Reactor()
    nursery.start_soon(reactor.run)
    await trio.testing.wait_all_tasks_blocked()
    it = play(streams=tcp_pair())
    it.workers.connect_broker(*tcp_pair())

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(it.relays, "start_relay_now", fail)
    monkeypatch.setattr(it.relays, "start_relay", fail)
    with structlog.testing.capture_logs() as logs:
        await it.client.send(connect(TARGET))
        await it.client.expect_end()
        assert await it.end() == "defect"
    assert [entry["event"] for entry in logs] == ["a client's connection met a defect"]
    assert await it.workers.broker.read_all() == b"", "the broker's side is closed"
    await it.client.stream.aclose()
    await it.workers.broker.stream.aclose()


async def test_cancelled_while_a_relay_begins(nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(*_: Any, **__: Any) -> None:
        await trio.sleep_forever()

    async with trio.open_nursery() as inner:
        it = Play(inner)
        monkeypatch.setattr(it.relays, "start_relay", hang)
        await it.client.send(connect(TARGET))
        await trio.testing.wait_all_tasks_blocked()
        assert it.session.state is State.RELAYING
        assert it.handshakes.count == 1, "it is not a relay yet"
        inner.cancel_scope.cancel()
    assert it.session.phase is Phase.ENDING
    await it.client.expect_end()
    assert await it.workers.broker.read_all() == b""


async def test_a_session_counts_as_a_handshake_until_it_is_connected_or_ends(play: Start) -> None:
    it = play()
    await trio.testing.wait_all_tasks_blocked()
    assert it.handshakes.count == 1
    it.workers.broker_gate = trio.Event()
    await it.client.send(connect(TARGET))
    await trio.testing.wait_all_tasks_blocked()
    assert it.handshakes.count == 1
    other = await play().in_lookup_mode()
    assert not other.handshakes.count
    await other.client.stream.aclose()
    await other.end()
    assert not other.handshakes.count


# ---- a client in a hurry


async def awaiting_the_broker(play: Start, *early: BaseCommand | bytes, **tables: Any) -> Play:
    """A session that waits for its broker, and what its client says meanwhile."""
    it = play(**tables)
    it.workers.broker_gate = trio.Event()
    await it.client.send(connect(TARGET))
    await trio.testing.wait_all_tasks_blocked()
    assert it.session.state is State.CONNECTING_TO_BROKER
    if early:
        await it.client.send(*early)
        await trio.testing.wait_all_tasks_blocked()
    return it


async def test_early_frames_are_held_and_are_the_relays_first(
    play: Start, autojump_clock: trio.testing.MockClock
) -> None:
    """Nothing may reach the broker before its Connected, and nothing is lost."""
    second = encode_frame(lookup().SerializeToString(), b"with a payload")
    it = await awaiting_the_broker(play, PRODUCER, second, b"\x00\x00\x00\x09half a fr")
    with trio.move_on_after(5):
        pytest.fail(f"reached the broker early: {await it.workers.broker.stream.receive_some(100)!r}")
    it.workers.broker_gate.set()
    await it.client.expect_command(BaseCommand.CONNECTED)
    expected = commands.encode(PRODUCER) + second + b"\x00\x00\x00\x09half a fr"
    assert await it.workers.broker.read_exactly(len(expected)) == expected


async def test_early_frames_in_one_piece_with_connect_are_held_too(play: Start) -> None:
    it = play()
    it.workers.broker_gate = trio.Event()
    await it.client.send(connect(TARGET), PRODUCER)
    await trio.testing.wait_all_tasks_blocked()
    it.workers.broker_gate.set()
    await it.client.expect_command(BaseCommand.CONNECTED)
    assert (await it.workers.broker.expect_command(BaseCommand.PRODUCER)) == PRODUCER


async def test_pings_among_early_frames_keep_their_order_behind_the_first_held(play: Start) -> None:
    it = await awaiting_the_broker(play, commands.ping(), PRODUCER, commands.ping())
    await it.client.expect_command(BaseCommand.PONG)
    it.workers.broker_gate.set()
    await it.client.expect_command(BaseCommand.CONNECTED)
    expected = commands.encode(PRODUCER) + commands.ping()
    assert await it.workers.broker.read_exactly(len(expected)) == expected


async def test_a_frame_that_comes_in_the_same_instant_as_connected_is_not_lost(
    play: Start, autojump_clock: trio.testing.MockClock
) -> None:
    """Trio runs what is ready at the same time in random order; no order may lose the frame."""
    for attempt in range(24):
        it = await awaiting_the_broker(play)
        assert isinstance(it.client.stream, TcpStream)
        it.client.stream.socket.send(commands.encode(PRODUCER))  # without a checkpoint before the next line
        it.workers.broker_gate.set()
        await it.client.expect_command(BaseCommand.CONNECTED)
        with trio.move_on_after(5) as patience:
            assert (await it.workers.broker.expect_command(BaseCommand.PRODUCER)) == PRODUCER
        assert not patience.cancelled_caught, f"the frame was lost in attempt {attempt}"


CONNECT = commands.encode(connect(TARGET))
EARLY = commands.encode(PRODUCER) + encode_frame(b"\xff", b"no command") + commands.ping() + b"\x00\x00\x00\x09half"


@pytest.mark.parametrize("ready", range(3))
@pytest.mark.parametrize("cut", [1, len(CONNECT) - 1, len(CONNECT), len(CONNECT) + 5, len(CONNECT) + 13, -8, -1])
async def test_no_byte_is_lost_on_the_way_from_the_reactor_to_the_kernel(
    play: Start, nursery: trio.Nursery, cut: int, ready: int
) -> None:
    """Wherever the client's bytes are cut, and whenever the broker is there."""
    reactor = Reactor()
    reactor.may_linger = lambda: False
    nursery.start_soon(reactor.run)
    await trio.testing.wait_all_tasks_blocked()
    streams = tcp_pair()
    it = play(streams=streams)
    nursery.start_soon(it.relays.run)
    it.workers.connect_broker(*tcp_pair())
    it.workers.broker_gate = trio.Event()
    said = CONNECT + EARLY
    pieces = [said[:cut], said[cut:], b"\xffraw" * 1000]
    for number, piece in enumerate(pieces):
        if number == ready:
            it.workers.broker_gate.set()
        await it.client.send(piece)
        await trio.testing.wait_all_tasks_blocked(0.002)
    await it.client.expect_command(BaseCommand.CONNECTED)
    expected = EARLY + pieces[-1]
    with trio.fail_after(60):
        assert await it.workers.broker.read_exactly(len(expected)) == expected
    await it.workers.broker.send(b"and back")
    assert await it.client.read_exactly(8) == b"and back"
    await it.client.stream.aclose()
    await it.workers.broker.expect_end()
    assert (await it.relay_ended()).target == TARGET
    assert not it.handshakes.count


async def test_a_client_that_took_half_a_frame_gets_no_relay(
    play: Start, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """Connected would be read as the other half of a PONG."""
    it = play(lockstep=True, limits={"keep_alive_interval_ms": 2000, "handshake_timeout_ms": 60_000})
    it.workers.broker_gate = trio.Event()

    async def never(_data: bytes) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(it.stream, "send_all", never)
    await it.client.send(connect(TARGET), commands.ping())
    await trio.sleep(1)
    it.workers.broker_gate.set()
    await trio.testing.wait_all_tasks_blocked()
    assert it.session.state is State.RELAYING
    assert await it.end() == "client_does_not_read"
    assert trio.current_time() == pytest.approx(2)
    assert it.session.phase is Phase.ENDING
    assert not it.relays.in_flight.count
    assert await it.workers.broker.read_all() == b""


async def test_frames_queued_before_connected_are_sent_before_it(
    play: Start, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    it = play(limits={"keep_alive_interval_ms": 2000})
    it.workers.broker_gate = trio.Event()
    send_all = it.stream.send_all

    async def slowly(data: bytes) -> None:
        await trio.sleep(1)
        await send_all(data)

    monkeypatch.setattr(it.stream, "send_all", slowly)
    await it.client.send(connect(TARGET), commands.ping())
    await trio.testing.wait_all_tasks_blocked()
    it.workers.broker_gate.set()
    await it.client.expect_command(BaseCommand.PONG)
    await it.client.expect_command(BaseCommand.CONNECTED)


async def test_a_held_frame_does_not_stretch_the_handshake(play: Start, autojump_clock: trio.testing.MockClock) -> None:
    it = await awaiting_the_broker(play, PRODUCER, limits={"handshake_timeout_ms": 3000})
    code, text = await it.client.expect_error()
    assert (code, text) == (ServerError.ServiceNotReady, "The handshake took too long")
    assert trio.current_time() == pytest.approx(3)
    assert await it.end() == "handshake_timeout"


async def test_a_held_frame_is_dropped_when_the_broker_refuses(play: Start) -> None:
    it = await awaiting_the_broker(play, PRODUCER)
    it.workers.broker_failure = TargetRefused("host", "no")
    it.workers.broker_gate.set()
    await it.client.expect_error()
    assert await it.end() == "target_denied"


@pytest.mark.parametrize("command", [connect(), BaseCommand(type=BaseCommand.AUTH_RESPONSE, auth_response={})])
async def test_out_of_turn_while_the_broker_is_awaited(play: Start, command: BaseCommand) -> None:
    it = await awaiting_the_broker(play, command)
    code, _ = await it.client.expect_error()
    assert code == ServerError.NotAllowedError
    it.workers.broker_gate.set()
    assert await it.end() == "not_allowed"


# ---- failures


async def test_a_denied_target_in_the_java_proxys_words_and_no_others(play: Start) -> None:
    """Security: why a target is denied would tell a stranger what is behind the proxy."""
    it = play()
    it.workers.broker_failure = TargetRefused("address", "b0:6650 is at 10.0.0.1, outside the rules")
    with structlog.testing.capture_logs() as logs:
        await it.client.send(connect(TARGET))
        assert await it.client.expect_error() == (ServerError.ServiceNotReady, "Target broker cannot be validated.")
        assert await it.end() == "target_denied"
    assert it.value("pulsar_proxy_broker_connection_failures_total", reason="address") == 1
    [entry] = logs
    assert (entry["target"], entry["reason"]) == (TARGET, "b0:6650 is at 10.0.0.1, outside the rules")


async def test_a_broker_that_refuses_is_quoted(play: Start) -> None:
    it = play()
    it.workers.broker_failure = BrokerLinkFailed(
        "refused", "for the log", code=ServerError.AuthorizationError, message="Invalid roles."
    )
    await it.client.send(connect(TARGET))
    assert await it.client.expect_error() == (ServerError.AuthorizationError, "Invalid roles.")
    assert await it.end() == "broker_failed"
    assert it.value("pulsar_proxy_broker_connection_failures_total", reason="refused") == 1


async def test_no_answer_from_the_lookup_worker(play: Start) -> None:
    it = play()
    it.workers.broker_failure = RpcDeadlineExceeded("no answer")
    await it.client.send(connect(TARGET))
    code, _ = await it.client.expect_error()
    assert code == ServerError.ServiceNotReady
    assert await it.end() == "lookup_unavailable"


async def test_the_handshakes_deadline_covers_the_broker(play: Start, autojump_clock: trio.testing.MockClock) -> None:
    it = play(limits={"handshake_timeout_ms": 3000})
    it.workers.broker_gate = trio.Event()
    await it.client.send(connect(TARGET))
    await it.client.expect_error()
    assert trio.current_time() == pytest.approx(3)
    assert await it.end() == "handshake_timeout"


@pytest.mark.conforms("pip-1.10")
async def test_no_target_is_looked_at_before_its_client_is_authenticated(play: Start) -> None:
    """Security: a stranger could have names of his choice resolved, and learn which there are."""
    it = play(authentication={"enabled": True, "failure_delay_ms": 0})
    it.workers.authentication.answers = [denied()]
    it.workers.broker_failure = TargetRefused("host", "not allowed")
    await it.client.send(connect(TARGET))
    assert await it.client.expect_error() == (ServerError.AuthenticationError, "Failed to authenticate")
    assert await it.end() == "authentication_failed"
    assert it.workers.opened == []


@pytest.mark.conforms("pip-1.7", "pip-1.35", "pip-1.39")
async def test_each_connection_is_a_relay_of_its_own_to_the_broker_that_it_names(play: Start) -> None:
    relays = []
    for target in ("b0:6650", "b1:6650", "b1:6650"):
        it = play()
        await it.client.send(connect(target))
        await it.client.expect_command(BaseCommand.CONNECTED)
        assert [message.proxy_to_broker_url for message, _, _ in it.workers.opened] == [target]
        relays.append((it, target.encode()))
    for it, data in relays:
        await it.client.send(data)
    for it, data in relays:
        assert await it.workers.broker.read_exactly(len(data)) == data


@pytest.mark.conforms("pip-1.9")
async def test_an_unauthenticated_client_reaches_no_broker(play: Start) -> None:
    """Security."""
    it = play(authentication={"enabled": True, "failure_delay_ms": 0})
    it.workers.authentication.answers = [RpcDeadlineExceeded("no answer")] * 2  # by callback, then in a task
    await it.client.send(connect(TARGET))
    await it.client.expect_error()
    await it.end()
    assert it.workers.opened == []


async def test_the_client_leaves_while_the_broker_is_awaited(play: Start) -> None:
    it = play()
    it.workers.broker_gate = trio.Event()
    await it.client.send(connect(TARGET))
    await trio.testing.wait_all_tasks_blocked()
    await it.client.stream.aclose()
    assert await it.end() == "client_closed"


async def test_a_broker_that_is_there_too_late_is_closed(play: Start, nursery: trio.Nursery) -> None:
    it = play(lockstep=True)
    it.workers.broker_gate = trio.Event()
    nursery.start_soon(it.client.send, connect(TARGET))
    await trio.testing.wait_all_tasks_blocked()
    nursery.start_soon(it.client.send, connect())  # out of turn; and the client is slow to read what it is told
    await trio.testing.wait_all_tasks_blocked()
    it.workers.broker_gate.set()
    await trio.testing.wait_all_tasks_blocked()
    assert it.session.handshake.link.stream is it.workers.broker_stream
    await it.client.expect_command(BaseCommand.ERROR)
    await it.client.stream.aclose()
    assert await it.end() == "not_allowed"
    assert await it.workers.broker.read_all() == b""


# ---- the end


@pytest.mark.conforms("pip-1.16")
async def test_the_broker_closes(play: Start) -> None:
    it = await relaying(play)
    await it.workers.broker.send(b"last words")
    await it.workers.broker.stream.aclose()
    assert await it.client.read_all() == b"last words"
    await it.client.stream.aclose()
    assert (await it.relay_ended()).target == TARGET


async def test_the_client_closes(play: Start) -> None:
    it = await relaying(play)
    await it.client.send(b"last words")
    await it.client.stream.send_eof()
    assert await it.workers.broker.read_all() == b"last words"
    await it.workers.broker.send(b"answer")
    await it.workers.broker.stream.aclose()
    assert await it.client.read_all() == b"answer"
    assert (await it.relay_ended()).target == TARGET


async def test_the_end_of_a_relay_is_logged_with_its_figures(play: Start) -> None:
    it = await relaying(play)
    with structlog.testing.capture_logs() as logs:
        await it.client.send(b"12345")
        await it.client.stream.send_eof()
        await it.workers.broker.read_all()
        await it.workers.broker.stream.aclose()
        await it.relay_ended()
    [entry] = logs
    assert (entry["client"], entry["broker"], entry["bytes_to_broker"]) == (CLIENT, TARGET, 5)


async def test_half_close_timeout(play: Start, autojump_clock: trio.testing.MockClock) -> None:
    it = play(relay={"half_close_timeout_ms": 4000})
    await it.client.send(connect(TARGET))
    await it.client.expect_command(BaseCommand.CONNECTED)
    await it.client.stream.send_eof()
    await it.relay_ended()
    assert 4 <= trio.current_time() <= 4 + 2 * RECHECK_INTERVAL_S
    assert await it.workers.broker.read_all() == b"", "both sides are closed"
    await it.client.expect_end()


async def test_drain_leaves_a_relay_to_its_client(play: Start) -> None:
    it = await relaying(play)
    it.session.drain()
    await it.client.send(b"still working")
    assert await it.workers.broker.read_exactly(13) == b"still working"


async def test_drain_while_the_broker_is_awaited_leads_into_the_relay(play: Start) -> None:
    it = play()
    it.workers.broker_gate = trio.Event()
    await it.client.send(connect(TARGET))
    await trio.testing.wait_all_tasks_blocked()
    it.session.drain()
    it.workers.broker_gate.set()
    await it.client.expect_command(BaseCommand.CONNECTED)


# ---- any broker (apache/pulsar#25879)


async def test_an_empty_target_leads_to_a_broker_and_none_to_lookups(play: Start) -> None:
    it = play()
    await it.client.send(connect(proxy_to_broker_url=""))
    connected = (await it.client.expect_command(BaseCommand.CONNECTED)).connected
    assert connected == it.workers.broker_connected, "the broker's own Connected"
    assert it.session.state is State.RELAYING
    await it.client.stream.aclose()
    await it.workers.broker.stream.aclose()
    assert (await it.relay_ended()).target == "b0:6650", "the one that it got"
    other = await play().in_lookup_mode()
    assert other.session.state is State.LOOKUP
    assert other.workers.opened == []


async def test_an_empty_target_is_told_apart_in_the_log(play: Start) -> None:
    it = play()
    it.workers.broker_failure = TargetRefused("metadata", "why")
    with structlog.testing.capture_logs() as logs:
        await it.client.send(connect(proxy_to_broker_url=""))
        await it.client.expect_error()
        await it.end()
    assert [entry["target"] for entry in logs] == ["any broker"]


@pytest.mark.parametrize("length", [299, 300, 301, 4000])
async def test_a_long_target_is_cut_for_the_log_alone(play: Start, length: int) -> None:
    """What a client says must not fill the disk; the lookup worker decides on all of it."""
    it = play()
    it.workers.broker_failure = TargetRefused("host", "why")
    target = "b" * length
    with structlog.testing.capture_logs() as logs:
        await it.client.send(connect(target))
        await it.client.expect_error()
        await it.end()
    assert [entry["target"] for entry in logs] == [target[:300]]
    assert it.workers.opened[0][0].proxy_to_broker_url == target
