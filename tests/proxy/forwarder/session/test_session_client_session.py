"""proxy.forwarder.session.client_session before the relay, as dialogues: what the client says, what it must hear, who
is asked."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
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
from proto.commands import NO_REQUEST_ID
from proto.connect_rules import OriginalCredentials
from proto.frames import encode_frame
from proto.pulsar_pb2 import BaseCommand, CommandConnected, ServerError
from proto.rpc_pb2 import (
    AuthenticateResponse,
    EnvelopeResponse,
    Principal,
    RefusedRequest,
    Status,
)
from proxy.forwarder.session.transport import PONGS_BYTES_MAX
from proxy.runtime.fairness.fair_capacity import owner_of
from proxy.runtime.loop.reactor import Reactor
from proxy.runtime.rpc.client import RpcConnectionLost, RpcDeadlineExceeded

Start = Callable[..., Play]


@pytest.fixture(params=["memory", "reactor"])
async def play(
    request: pytest.FixtureRequest, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Start]:
    """Start a session; takes the configuration's tables. Its client's stream is read by a task, as TLS is, or plain."""
    if request.param == "memory":
        yield partial(Play, nursery)
        return
    for module in ("manager", "spliced_start"):  # these are no TCP sockets
        monkeypatch.setattr(f"proxy.forwarder.relay.{module}.tune_for_relay", lambda *_: None)
    reactor = Reactor()
    reactor.may_linger = lambda: False
    nursery.start_soon(reactor.run)
    await trio.testing.wait_all_tasks_blocked()
    streams: list[trio.SocketStream] = []

    def start(*, lockstep: bool = False, **tables: Any) -> Play:
        if lockstep:  # nothing leaves that the client has not asked for: no socket is like that
            return Play(nursery, lockstep=True, **tables)
        pair = [trio.SocketStream(end) for end in trio.socket.socketpair()]
        streams.extend(pair)
        return Play(nursery, streams=(pair[0], pair[1]), **tables)

    yield start
    nursery.cancel_scope.cancel()
    with trio.CancelScope(shield=True):
        await trio.testing.wait_all_tasks_blocked()
    for stream in streams:
        stream.socket.close()


AUTHENTICATED = {"enabled": True, "failure_delay_ms": 200}


# ---- into lookup mode


async def test_connect_leads_to_lookup_mode(play: Start) -> None:
    it = play()
    await it.client.say(connect())
    connected = (await it.client.must_hear(BaseCommand.CONNECTED)).connected
    assert connected.server_version.startswith("pulsar-trio-proxy")
    assert connected.protocol_version == 21
    assert it.session.state is State.LOOKUP
    assert it.value("pulsar_proxy_handshake_seconds_count", stage="total") == 1
    assert it.workers.opened == []


async def test_an_older_client_is_answered_in_its_own_version(play: Start) -> None:
    it = play()
    await it.client.say(connect(protocol_version=15))
    assert (await it.client.must_hear(BaseCommand.CONNECTED)).connected.protocol_version == 15


async def test_feature_flags_are_the_brokers_but_for_topic_watchers(play: Start) -> None:
    it = play()
    it.workers.profile = CommandConnected(server_version="b", protocol_version=20, max_message_size=12345)
    it.workers.profile.feature_flags.supports_topic_watchers = True
    it.workers.profile.feature_flags.supports_partial_producer = True
    await it.client.say(connect())
    connected = (await it.client.must_hear(BaseCommand.CONNECTED)).connected
    assert connected.max_message_size == 12345
    assert connected.protocol_version == 20
    assert connected.feature_flags.supports_partial_producer
    assert not connected.feature_flags.supports_topic_watchers


async def test_every_way_of_cutting_connect_into_pieces(play: Start) -> None:
    data = commands.encode(connect())
    for cut in range(1, len(data), 7):
        it = play()
        await it.client.say(data[:cut])
        await trio.testing.wait_all_tasks_blocked()
        await it.client.say(data[cut:])
        await it.client.must_hear(BaseCommand.CONNECTED)


@pytest.mark.conforms("kip-590.1", "kip-590.3")
async def test_a_lookup_goes_in_an_envelope_whole(play: Start) -> None:
    it = await play().in_lookup_mode()
    request = lookup("topic", request_id=9)
    request.MergeFromString(b"\xfa\x3f\x03new")  # a field newer than this proxy
    await it.client.say(request)
    answer = await it.client.must_hear(BaseCommand.LOOKUP_RESPONSE)
    assert answer == lookup_answer(9)
    [(sent, identity, client)] = it.workers.forwarded
    assert sent == request.SerializeToString()
    assert (identity.role, identity.sealed, client) == ("", b"", CLIENT)


async def test_lookups_are_answered_as_their_answers_come(play: Start) -> None:
    it = await play().in_lookup_mode()
    gates = {1: trio.Event(), 2: trio.Event()}

    async def answer_by(request: bytes) -> BaseCommand:
        request_id = commands.parse_command(request).lookup_topic.request_id
        await gates[request_id].wait()
        return lookup_answer(request_id)

    it.workers.answer_by = answer_by
    await it.client.say(lookup(request_id=1), lookup(request_id=2))
    await it.client.say(commands.ping())
    await it.client.must_hear(BaseCommand.PONG)
    for number in (2, 1):
        gates[number].set()
        assert (await it.client.must_hear(BaseCommand.LOOKUP_RESPONSE)).lookup_topic_response.request_id == number


# ---- what is read in one go


async def test_what_is_read_in_one_go_travels_in_one_envelope(play: Start) -> None:
    it = await play().in_lookup_mode()
    await it.client.say(*(lookup(f"t{number}", number) for number in range(5)))
    heard = [(await it.client.must_hear(BaseCommand.LOOKUP_RESPONSE)).lookup_topic_response for _ in range(5)]
    assert sorted(one.request_id for one in heard) == list(range(5))
    [sent] = it.workers.sent
    assert sent.topics == ["t0", "t1", "t2", "t3", "t4"]


async def test_no_request_waits_for_the_next_one(play: Start) -> None:
    it = await play().in_lookup_mode()
    half = commands.encode(lookup("b"))
    await it.client.say(lookup("a"), half[:9])
    await it.client.must_hear(BaseCommand.LOOKUP_RESPONSE)
    await it.client.say(half[9:])
    await it.client.must_hear(BaseCommand.LOOKUP_RESPONSE)
    assert [sent.topics for sent in it.workers.sent] == [["a"], ["b"]]


@pytest.mark.parametrize(
    ("behind", "heard"),
    [
        (commands.ping(), BaseCommand.PONG),
        (BaseCommand(type=BaseCommand.PRODUCER, producer={"request_id": 5}), BaseCommand.ERROR),
    ],
)
async def test_what_else_comes_in_one_go_keeps_no_request_back(
    play: Start, behind: BaseCommand | bytes, heard: int
) -> None:
    it = await play().in_lookup_mode()
    it.workers.answer_by = None
    await it.client.say(lookup("a"), behind, lookup("b"), commands.pong())
    await it.client.must_hear(heard)
    await trio.testing.wait_all_tasks_blocked()
    assert [sent.topics for sent in it.workers.sent] == [["a", "b"]]


async def test_no_request_lies_while_room_is_waited_for(play: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those read so far must go, or nothing would ever give their bytes back. What a chunk brings goes as one."""
    monkeypatch.setattr("proxy.forwarder.session.lookup_mode.BYTES_MAX", 1000)
    it = await play().in_lookup_mode()
    it.workers.answer_by = None
    await it.client.say(*(lookup("t" * 400, number) for number in range(3)))
    for number in (3, 4):
        await trio.testing.wait_all_tasks_blocked()
        await it.client.say(lookup("t" * 400, number))
    await trio.testing.wait_all_tasks_blocked()
    assert [len(sent.requests) for sent in it.workers.sent] == [3]
    it.workers.sent[0].answer(0, more=True)
    await trio.testing.wait_all_tasks_blocked()
    assert [len(sent.requests) for sent in it.workers.sent] == [3, 1], "816 bytes: room for a chunk"
    for sent in it.workers.sent[1:]:
        sent.answer(0)
        await trio.testing.wait_all_tasks_blocked()
    it.workers.sent[0].answer(1, 2)
    await trio.testing.wait_all_tasks_blocked()
    assert [len(sent.requests) for sent in it.workers.sent] == [3, 1, 1]
    it.workers.sent[-1].answer(0)
    for _ in range(5):
        await it.client.must_hear(BaseCommand.LOOKUP_RESPONSE)


async def test_no_request_lies_at_the_clients_half_close(play: Start) -> None:
    it = await play().in_lookup_mode()
    it.workers.answer_by = None
    await it.client.say(lookup("a"), lookup("b"))
    await it.client.stream.send_eof()
    await trio.testing.wait_all_tasks_blocked()
    [sent] = it.workers.sent
    sent.answer(1, 0)
    for _ in range(2):
        await it.client.must_hear(BaseCommand.LOOKUP_RESPONSE)
    await it.client.must_hear_end()
    assert await it.end() == "client_closed"


async def test_no_request_lies_while_the_client_is_pinged(play: Start, autojump_clock: trio.testing.MockClock) -> None:
    it = await play(limits={"keep_alive_interval_ms": 5_000, "lookup_timeout_ms": 60_000}).in_lookup_mode()
    it.workers.answer_by = None
    await it.client.say(lookup("a"))
    await it.client.must_hear(BaseCommand.PING)
    assert [sent.topics for sent in it.workers.sent] == [["a"]]
    await it.client.say(commands.pong())
    it.workers.sent[0].answer(0)
    await it.client.must_hear(BaseCommand.LOOKUP_RESPONSE)


# ---- the session ends with answers on their way


Ending = Callable[[SentEnvelope], None]
ENDINGS: list[Ending] = [
    lambda sent: sent.answer(0, 1),
    lambda sent: sent.answer(1, more=True),
    lambda sent: sent.refuse(Status.TOO_MANY_REQUESTS),
    lambda sent: sent.lose(),
    lambda sent: sent.say(b"\xff\xff"),
]


@pytest.mark.parametrize("short_way", [True, False])
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("passes", range(8))
async def test_an_answer_at_any_moment_of_the_sessions_end(
    play: Start, passes: int, ending: Ending, short_way: bool
) -> None:
    """A nursery is closed a moment before its session knows; whatever comes then must start nothing in it."""
    it = await play().in_lookup_mode()
    it.workers.answer_by, it.workers.short_way = None, short_way
    await it.client.say(lookup("a", 1), lookup("b", 2))
    await trio.testing.wait_all_tasks_blocked()
    [sent] = it.workers.sent
    await it.client.say(connect())  # out of turn: the connection ends at once
    for _ in range(passes):
        await trio.lowlevel.checkpoint()
    ending(sent)
    await it.client.read_all()
    await it.client.stream.aclose()
    assert await it.end() == "not_allowed"


async def test_the_end_from_outside_with_answers_on_their_way(play: Start) -> None:
    it = await play().in_lookup_mode()
    it.workers.answer_by = None
    await it.client.say(lookup("a", 1), lookup("b", 2))
    await trio.testing.wait_all_tasks_blocked()
    it.session.shut_down()
    it.session.shut_down()
    assert await it.end() == "shut_down"
    [sent] = it.workers.sent
    sent.answer(0)
    sent.lose()
    await trio.testing.wait_all_tasks_blocked()
    assert len(it.workers.sent) == 1
    await it.client.must_hear_end()


# ---- ping and pong


async def test_ping_is_answered_before_and_after_connect(play: Start) -> None:
    it = play()
    await it.client.say(commands.ping())
    await it.client.must_hear(BaseCommand.PONG)
    await it.in_lookup_mode()
    await it.client.say(commands.pong(), commands.ping())
    await it.client.must_hear(BaseCommand.PONG)


async def test_ping_is_answered_while_authenticating_and_while_the_broker_is_awaited(play: Start) -> None:
    it = play(authentication=AUTHENTICATED)
    gate = trio.Event()

    async def slow() -> AuthenticateResponse:
        await gate.wait()
        return authenticated()

    it.workers.authentication.answers = [slow]
    it.workers.broker_gate = trio.Event()
    await it.client.say(connect("b0:6650"), commands.ping())
    await it.client.must_hear(BaseCommand.PONG)
    assert it.session.state is State.AUTHENTICATING
    gate.set()
    await trio.testing.wait_all_tasks_blocked()
    assert it.session.state is State.CONNECTING_TO_BROKER
    await it.client.say(commands.ping())
    await it.client.must_hear(BaseCommand.PONG)


@pytest.mark.parametrize("when", ["before CONNECT", "in lookup mode"])
async def test_a_client_that_asks_for_pongs_and_does_not_read_them_is_read_no_further(
    play: Start, nursery: trio.Nursery, when: str
) -> None:
    """Security: a PING costs its sender nothing, so few of the answers may wait here."""
    it = play(lockstep=True)
    if when == "in lookup mode":
        await it.in_lookup_mode()
    pings = 5_000
    nursery.start_soon(it.client.say, commands.ping() * pings)
    await trio.testing.wait_all_tasks_blocked()
    assert it.session._transport.unsent_bytes <= PONGS_BYTES_MAX + len(commands.pong())
    for _ in range(pings):
        await it.client.must_hear(BaseCommand.PONG)
    await it.client.say(commands.ping())
    await it.client.must_hear(BaseCommand.PONG)


# ---- what a client may not do


@pytest.mark.parametrize(
    ("command", "request_id"),
    [
        (BaseCommand(type=BaseCommand.PRODUCER, producer={"request_id": 5}), 5),
        (BaseCommand(type=BaseCommand.SUBSCRIBE, subscribe={"request_id": 6}), 6),
        (BaseCommand(type=BaseCommand.WATCH_TOPIC_LIST, watch_topic_list={"request_id": 7}), 7),
        (BaseCommand(type=BaseCommand.GET_OR_CREATE_SCHEMA, get_or_create_schema={"request_id": 8}), 8),
        (BaseCommand(type=BaseCommand.TC_CLIENT_CONNECT_REQUEST, tc_client_connect_request={"request_id": 9}), 9),
        (BaseCommand(type=BaseCommand.FLOW), NO_REQUEST_ID),
        (BaseCommand(type=BaseCommand.CONNECTED), NO_REQUEST_ID),
    ],
)
async def test_a_command_that_needs_a_broker_is_answered_and_the_connection_stays(
    play: Start, command: BaseCommand, request_id: int
) -> None:
    it = await play().in_lookup_mode()
    await it.client.say(command)
    error = (await it.client.must_hear(BaseCommand.ERROR)).error
    assert (error.request_id, error.error) == (request_id, ServerError.NotAllowedError)
    await it.client.say(lookup())
    await it.client.must_hear(BaseCommand.LOOKUP_RESPONSE)
    assert it.value("pulsar_proxy_refused_commands_total", reason="not_served") == 1


async def test_a_message_is_answered_with_a_send_error(play: Start) -> None:
    it = await play().in_lookup_mode()
    await it.client.say(BaseCommand(type=BaseCommand.SEND, send={"producer_id": 1, "sequence_id": 2}))
    error = (await it.client.must_hear(BaseCommand.SEND_ERROR)).send_error
    assert (error.producer_id, error.sequence_id) == (1, 2)


@pytest.mark.conforms("kip-368.54")
async def test_a_frame_too_large(play: Start) -> None:
    it = await play(limits={"max_command_bytes": 2048}).in_lookup_mode()
    await it.client.say(b"\x7f\xff\xff\xff")
    code, text = await it.client.must_hear_error()
    assert (code, "Too large" in text) == (ServerError.NotAllowedError, True)
    assert await it.end() == "frame_too_large"


@pytest.mark.conforms("kip-368.53")
@pytest.mark.parametrize("seed", range(8))
async def test_1024_random_bytes_in_lookup_mode_end_their_own_connection(play: Start, seed: int) -> None:
    it, other = await play().in_lookup_mode(), await play().in_lookup_mode()
    await it.client.say(lookup())
    await it.client.must_hear(BaseCommand.LOOKUP_RESPONSE)
    await it.client.say(random.Random(seed).randbytes(1024))
    code, _text = await it.client.must_hear_error()
    assert code == ServerError.NotAllowedError
    assert await it.end() in {"frame_too_large", "protocol_error"}
    await other.client.say(lookup())
    await other.client.must_hear(BaseCommand.LOOKUP_RESPONSE)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00\x00\x00\x06\x00\x00\x00\x02\xff\xff",
        b"\x00\x00\x00\x01\x00",
        b"\x00\x00\x00\x06\x00\x00\x00\xff\x08\x12",
        commands.encode(BaseCommand(type=BaseCommand.LOOKUP)),
    ],
)
async def test_garbage(play: Start, first: bool, garbage: bytes) -> None:
    it = play()
    if not first:
        await it.in_lookup_mode()
    await it.client.say(garbage)
    code, _text = await it.client.must_hear_error()
    assert code == ServerError.NotAllowedError
    await it.end()
    assert it.workers.forwarded == []


async def test_an_http_client(play: Start) -> None:
    it = play()
    await it.client.say(b"GET / HTTP/1.1\r\nHost: proxy\r\n\r\n")
    await it.client.must_hear_error()
    assert await it.end() == "frame_too_large"


@pytest.mark.conforms("kip-590.5", "kip-368.55")
@pytest.mark.parametrize(
    "command",
    [
        lookup(),
        auth_response(b"x"),
        BaseCommand(type=BaseCommand.PRODUCER, producer={"request_id": 5}),
        BaseCommand(type=BaseCommand.PARTITIONED_METADATA, partition_metadata={"topic": "t", "request_id": 1}),
    ],
)
async def test_any_command_before_connect_ends_the_connection(play: Start, command: BaseCommand) -> None:
    """Security: nothing is served to a client that has not been authenticated."""
    it = play(authentication=AUTHENTICATED)
    await it.client.say(command)
    code, text = await it.client.must_hear_error()
    assert code == ServerError.NotAllowedError
    assert commands.command_name(command.type) in text
    assert await it.end() == "not_allowed"
    assert it.workers.forwarded == []
    assert it.workers.authentication.rounds == []


@pytest.mark.conforms("kip-590.5", "kip-368.55")
@pytest.mark.parametrize("command", [lookup(), connect(), auth_response(b"x"), BaseCommand(type=BaseCommand.FLOW)])
async def test_any_command_while_authenticating_ends_the_connection(play: Start, command: BaseCommand) -> None:
    """Security: a client cannot slip a request in before the verdict."""
    it = play(authentication=AUTHENTICATED)
    gate = trio.Event()

    async def slow() -> AuthenticateResponse:
        await gate.wait()
        return authenticated()

    it.workers.authentication.answers = [slow]
    await it.client.say(connect(), command)
    code, _ = await it.client.must_hear_error()
    assert code == ServerError.NotAllowedError
    gate.set()
    assert await it.end() == "not_allowed"
    assert it.workers.forwarded == []


async def test_a_second_connect(play: Start) -> None:
    it = await play().in_lookup_mode()
    await it.client.say(connect())
    code, _ = await it.client.must_hear_error()
    assert code == ServerError.NotAllowedError
    assert await it.end() == "not_allowed"


@pytest.mark.conforms("pip-30.48")
async def test_an_authentication_frame_after_completion(play: Start) -> None:
    it = play(authentication=AUTHENTICATED)
    await it.in_lookup_mode()
    await it.client.say(auth_response(b"again"))
    await it.client.must_hear_error()
    assert await it.end() == "not_allowed"
    assert len(it.workers.authentication.rounds) == 1


@pytest.mark.parametrize("version", [0, 9])
async def test_a_protocol_version_too_old(play: Start, version: int) -> None:
    it = play()
    await it.client.say(connect(protocol_version=version))
    code, _ = await it.client.must_hear_error()
    assert code == ServerError.UnsupportedVersionError
    assert await it.end() == "not_allowed"


@pytest.mark.parametrize(
    "authentication",
    [
        {},
        {"enabled": True},
        {"enabled": False, "proxy_roles": ["proxy-a"]},  # no configuration that is checked has this
    ],
)
async def test_a_client_may_not_say_that_it_is_a_proxy(play: Start, authentication: dict[str, Any]) -> None:
    """Security: a broker decides by this field whether to believe an original principal.

    Where no proxy may come, nobody is asked who it is; least of all where nobody is ever asked.
    """
    it = play(authentication=authentication)
    await it.client.say(connect("b0:6650", proxy_version="4.0.8", original_principal="admin"))
    assert await it.client.must_hear_error() == (ServerError.NotAllowedError, "Must not provide proxyVersion")
    assert await it.end() == "not_allowed"
    assert it.workers.opened == []
    assert it.workers.authentication.rounds == []


PROXIES = {**AUTHENTICATED, "proxy_roles": ["proxy-a"]}
BEHIND = Principal(type="User", name="alice", method="token", proxy="proxy-a")


async def test_a_proxy_is_for_the_auth_worker_to_judge(play: Start) -> None:
    it = play(authentication=PROXIES)
    it.workers.authentication.answers = [authenticated(BEHIND)]
    await it.client.say(connect(proxy_version="a", original_principal="alice"))
    await it.client.must_hear(BaseCommand.CONNECTED)
    [request] = it.workers.authentication.requests
    assert (request.through_proxy, request.original_principal, request.first_round) == (True, "alice", True)
    assert request.client_certificate == CERTIFICATE
    await it.client.say(lookup())
    await it.client.must_hear(BaseCommand.LOOKUP_RESPONSE)
    [(_, identity, _)] = it.workers.forwarded
    assert (identity.role, identity.principal.proxy) == ("alice", "proxy-a")


@pytest.mark.parametrize(
    ("reason", "code", "message"),
    [
        ("invalid_roles", ServerError.AuthorizationError, "Invalid roles."),
        ("not_a_proxy", ServerError.NotAllowedError, "Must not provide proxyVersion"),
    ],
)
async def test_roles_that_do_not_go_together_are_told_as_brokers_do_and_after_the_fixed_delay(
    play: Start, reason: str, code: int, message: str, autojump_clock: trio.testing.MockClock
) -> None:
    it = play(authentication=PROXIES)
    it.workers.authentication.answers = [denied(reason)]
    started = trio.current_time()
    await it.client.say(connect("b0:6650", original_principal="admin"))
    assert await it.client.must_hear_error() == (code, message)
    assert trio.current_time() - started == pytest.approx(0.2)
    assert await it.end() == "authentication_failed"
    assert it.workers.opened == []


async def test_without_authentication_nobody_is_behind_anybody(play: Start) -> None:
    it = play(brokers={"forward_authorization_credentials": True})
    await it.client.say(connect(original_principal="admin", original_auth_data="x", original_auth_method="token"))
    await it.client.must_hear(BaseCommand.CONNECTED)
    await it.client.say(lookup())
    await it.client.must_hear(BaseCommand.LOOKUP_RESPONSE)
    [(_, identity, _)] = it.workers.forwarded
    assert (identity.role, identity.sealed, identity.original) == ("", b"", None)


@pytest.mark.parametrize("target", ["", "b0:6650"])
@pytest.mark.parametrize("forwards", [False, True])
async def test_whether_credentials_go_on(play: Start, target: str, forwards: bool) -> None:
    it = play(authentication=AUTHENTICATED, brokers={"forward_authorization_credentials": forwards})
    await it.client.say(connect(target))
    await it.client.must_hear(BaseCommand.CONNECTED)
    if target:
        [(_, identity, _)] = it.workers.opened
    else:
        await it.client.say(lookup())
        await it.client.must_hear(BaseCommand.LOOKUP_RESPONSE)
        [(_, identity, _)] = it.workers.forwarded
    assert identity.original == (OriginalCredentials("token", SECRET.decode()) if forwards else None)


async def test_what_a_connect_says_of_who_is_behind_it_counts_for_nothing(play: Start) -> None:
    it = play(authentication=AUTHENTICATED)
    await it.client.say(connect(original_principal="admin", original_auth_data="x", original_auth_method="token"))
    await it.client.must_hear(BaseCommand.CONNECTED)
    assert it.session.identity.role == "alice"


# ---- authentication


@pytest.mark.conforms("pip-30.2", "pip-30.3", "pip-30.11")
async def test_authenticated_at_once(play: Start) -> None:
    it = play(authentication=AUTHENTICATED)
    await it.client.say(connect())
    await it.client.must_hear(BaseCommand.CONNECTED)
    assert it.workers.authentication.rounds == [("token", SECRET)]
    await it.client.say(lookup())
    await it.client.must_hear(BaseCommand.LOOKUP_RESPONSE)
    [(_, identity, _)] = it.workers.forwarded
    assert (identity.principal, identity.sealed) == (ALICE, b"sealed")


@pytest.mark.conforms("pip-30.10", "pip-30.12", "pip-30.16", "pip-30.25")
async def test_challenge_rounds(play: Start) -> None:
    it = play(authentication=AUTHENTICATED)
    it.workers.authentication.answers = [challenge(b"q1"), challenge(b"q2"), authenticated()]
    await it.client.say(connect(auth_method_name="sasl", auth_data=b"a0"))
    for number in (1, 2):
        asked = (await it.client.must_hear(BaseCommand.AUTH_CHALLENGE)).auth_challenge
        assert (asked.challenge.auth_method_name, asked.challenge.auth_data) == ("sasl", b"q%d" % number)
        assert asked.protocol_version == 21
        await it.client.say(auth_response(b"a%d" % number, "sasl"))
    await it.client.must_hear(BaseCommand.CONNECTED)
    assert it.workers.authentication.rounds == [("sasl", b"a0"), ("sasl", b"a1"), ("sasl", b"a2")]


@pytest.mark.conforms("pip-30.8")
async def test_the_servers_last_word_must_be_answered_before_connected(play: Start) -> None:
    """To the client it is a challenge as any other; only the answer to it leads on."""
    it = play(authentication=AUTHENTICATED)
    it.workers.authentication.answers = [challenge(b"v=signature"), authenticated()]
    await it.client.say(connect(auth_method_name="SCRAM-SHA-256"))
    asked = (await it.client.must_hear(BaseCommand.AUTH_CHALLENGE)).auth_challenge.challenge
    assert (asked.auth_method_name, asked.auth_data) == ("SCRAM-SHA-256", b"v=signature")
    await trio.testing.wait_all_tasks_blocked()
    assert it.session.state is State.AWAITING_AUTH_RESPONSE
    assert it.session.identity.role == ""
    await it.client.say(auth_response(b"", "SCRAM-SHA-256"))
    await it.client.must_hear(BaseCommand.CONNECTED)
    assert it.workers.authentication.rounds[1] == ("SCRAM-SHA-256", b"")


@pytest.mark.conforms("pip-30.50")
async def test_a_round_answered_twice(play: Start) -> None:
    """Security: the second answer is out of turn while the first one is judged, and the connection ends."""
    it = play(authentication=AUTHENTICATED)
    gate = trio.Event()

    async def slow() -> AuthenticateResponse:
        await gate.wait()
        return authenticated()

    it.workers.authentication.answers = [challenge(b"q"), slow]
    await it.client.say(connect())
    await it.client.must_hear(BaseCommand.AUTH_CHALLENGE)
    await it.client.say(auth_response(b"a"), auth_response(b"a"))
    code, _ = await it.client.must_hear_error()
    assert code == ServerError.NotAllowedError
    gate.set()
    assert await it.end() == "not_allowed"
    assert len(it.workers.authentication.rounds) == 2
    assert it.session.identity.role == ""


@pytest.mark.conforms("pip-30.21", "pip-30.51")
@pytest.mark.parametrize("data", [b"", b"\xff" * 1000])
async def test_whatever_is_in_an_answer_is_the_auth_workers_to_judge(play: Start, data: bytes) -> None:
    it = play(authentication=AUTHENTICATED)
    it.workers.authentication.answers = [challenge(b"q"), authenticated()]
    await it.client.say(connect(auth_data=data))
    await it.client.must_hear(BaseCommand.AUTH_CHALLENGE)
    await it.client.say(auth_response(data))
    await it.client.must_hear(BaseCommand.CONNECTED)
    assert it.workers.authentication.rounds == [("token", data), ("token", data)]


@pytest.mark.conforms("pip-30.49")
async def test_another_method_in_an_answer_reaches_the_auth_worker_as_it_is(
    play: Start, autojump_clock: trio.testing.MockClock
) -> None:
    it = play(authentication=AUTHENTICATED)
    it.workers.authentication.answers = [challenge(b"q"), denied("other_method")]
    await it.client.say(connect(auth_method_name="sasl"))
    await it.client.must_hear(BaseCommand.AUTH_CHALLENGE)
    await it.client.say(auth_response(b"a", "token"))
    await it.client.must_hear_error()
    assert it.workers.authentication.rounds[1] == ("token", b"a")


@pytest.mark.parametrize("command", [lookup(), connect(), BaseCommand(type=BaseCommand.FLOW)])
async def test_any_other_command_in_answer_to_a_challenge(play: Start, command: BaseCommand) -> None:
    it = play(authentication=AUTHENTICATED)
    it.workers.authentication.answers = [challenge(b"q"), authenticated()]
    await it.client.say(connect())
    await it.client.must_hear(BaseCommand.AUTH_CHALLENGE)
    await it.client.say(command)
    await it.client.must_hear_error()
    assert await it.end() == "not_allowed"
    assert it.workers.forwarded == []


@pytest.mark.conforms("pip-30.44", "pip-30.55", "pip-30.56")
@pytest.mark.parametrize("verdict", [denied("expired"), denied(""), AuthenticateResponse()])
async def test_a_denial_is_generic_and_comes_after_the_fixed_delay(
    play: Start, verdict: AuthenticateResponse, autojump_clock: trio.testing.MockClock
) -> None:
    """Security: neither text nor time may help whoever guesses. An answer without a verdict is a denial too."""
    it = play(authentication=AUTHENTICATED)
    it.workers.authentication.answers = [verdict]
    started = trio.current_time()
    await it.client.say(connect())
    assert await it.client.must_hear_error() == (ServerError.AuthenticationError, "Failed to authenticate")
    assert trio.current_time() - started == pytest.approx(0.2)
    assert await it.end() == "authentication_failed"
    assert it.workers.forwarded == []
    assert it.session.identity.role == ""


@pytest.mark.conforms("pip-30.56")
async def test_a_denial_in_a_later_round_is_the_same(play: Start, autojump_clock: trio.testing.MockClock) -> None:
    it = play(authentication=AUTHENTICATED)
    it.workers.authentication.answers = [challenge(b"q"), denied()]
    await it.client.say(connect())
    await it.client.must_hear(BaseCommand.AUTH_CHALLENGE)
    started = trio.current_time()
    await it.client.say(auth_response(b"a"))
    assert await it.client.must_hear_error() == (ServerError.AuthenticationError, "Failed to authenticate")
    assert trio.current_time() - started == pytest.approx(0.2)


async def test_nothing_is_answered_while_a_denial_waits(play: Start, autojump_clock: trio.testing.MockClock) -> None:
    it = play(authentication={"enabled": True, "failure_delay_ms": 5000})
    it.workers.authentication.answers = [denied()]
    await it.client.say(connect())
    await trio.sleep(1)
    await it.client.say(lookup(), connect(), commands.ping())
    assert await it.client.must_hear_error() == (ServerError.AuthenticationError, "Failed to authenticate")
    assert it.workers.forwarded == []
    assert len(it.workers.authentication.rounds) == 1


@pytest.mark.conforms("pip-30.52")
@pytest.mark.parametrize("error", [RpcConnectionLost("gone"), RpcDeadlineExceeded("late")])
async def test_no_verdict_is_no_admission(play: Start, error: Exception) -> None:
    """Security: the auth worker is gone in the middle; deny, and never ask again."""
    it = play(authentication=AUTHENTICATED)
    it.workers.authentication.answers = [challenge(b"q"), error, authenticated()]
    await it.client.say(connect())
    await it.client.must_hear(BaseCommand.AUTH_CHALLENGE)
    await it.client.say(auth_response(b"a"))
    code, _ = await it.client.must_hear_error()
    assert code == ServerError.ServiceNotReady
    assert await it.end() == "authentication_unavailable"
    assert len(it.workers.authentication.rounds) == 2


async def test_authentication_off_asks_nobody(play: Start) -> None:
    it = await play().in_lookup_mode()
    assert it.workers.authentication.rounds == []


@pytest.mark.conforms("kip-368.52")
async def test_no_secret_in_any_log_or_error(play: Start, autojump_clock: trio.testing.MockClock) -> None:
    """Security: every way in which a session with a credential can end."""
    stories: list[tuple[list[Any], list[BaseCommand | bytes]]] = [
        ([denied()], []),
        ([RpcConnectionLost("gone")], []),
        ([authenticated()], [connect(), b"\x00\x00\x00\x06\x00\x00\x00\x02\xff\xff"]),
        ([challenge(b"q")], [auth_response(SECRET), lookup()]),
        ([challenge(b"q")], [b"\x7f\xff\xff\xff" + SECRET]),
        ([authenticated()], [lookup(), BaseCommand(type=BaseCommand.PRODUCER)]),
    ]
    with structlog.testing.capture_logs() as logs:
        for answers, says in stories:
            it = play(authentication=AUTHENTICATED)
            it.workers.authentication.answers = answers
            await it.client.say(connect())
            for one in says:
                await it.client.say(one)
                await trio.sleep(0.1)
            await trio.sleep(1)
            await it.client.stream.send_eof()
            assert SECRET not in await it.client.read_all()
            await it.end()
    assert logs
    assert SECRET.decode() not in str(logs)
    assert SECRET.hex() not in str(logs)


# ---- deadlines


async def test_a_client_that_never_says_connect(play: Start, autojump_clock: trio.testing.MockClock) -> None:
    it = play(limits={"handshake_timeout_ms": 3000})
    await it.client.must_hear_end()
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
            await it.client.say(commands.ping())
            await it.client.hear()
            await trio.sleep(1)


async def test_half_a_connect_does_not_stretch_the_handshake(
    play: Start, autojump_clock: trio.testing.MockClock
) -> None:
    it = play(limits={"handshake_timeout_ms": 3000})
    for byte in commands.encode(connect())[:5]:
        await it.client.say(bytes([byte]))
        await trio.sleep(0.5)
    await it.client.must_hear_end()
    assert trio.current_time() == pytest.approx(3)


async def test_an_auth_worker_that_does_not_answer(play: Start, autojump_clock: trio.testing.MockClock) -> None:
    it = play(authentication=AUTHENTICATED, limits={"handshake_timeout_ms": 3000})
    it.workers.authentication.answers = [trio.sleep_forever]
    await it.client.say(connect())
    code, text = await it.client.must_hear_error()
    assert (code, text) == (ServerError.ServiceNotReady, "The handshake took too long")
    assert trio.current_time() == pytest.approx(3)
    assert await it.end() == "handshake_timeout"


@pytest.mark.conforms("pip-30.46")
async def test_a_client_that_does_not_answer_a_challenge(play: Start, autojump_clock: trio.testing.MockClock) -> None:
    it = play(authentication=AUTHENTICATED, limits={"handshake_timeout_ms": 3000})
    it.workers.authentication.answers = [challenge(b"q")]
    await it.client.say(connect())
    await it.client.must_hear(BaseCommand.AUTH_CHALLENGE)
    code, _ = await it.client.must_hear_error()
    assert code == ServerError.ServiceNotReady
    assert trio.current_time() == pytest.approx(3)


async def test_a_silent_client_is_pinged_then_closed(play: Start, autojump_clock: trio.testing.MockClock) -> None:
    it = await play(limits={"keep_alive_interval_ms": 30_000, "handshake_timeout_ms": 10_000}).in_lookup_mode()
    started = trio.current_time()
    await it.client.say(lookup())
    await it.client.must_hear(BaseCommand.LOOKUP_RESPONSE)
    await it.client.must_hear(BaseCommand.PING)
    assert trio.current_time() - started == pytest.approx(30)
    await it.client.must_hear_end()
    assert trio.current_time() - started == pytest.approx(60)
    assert await it.end() == "keep_alive_timeout"


@pytest.mark.parametrize("handshake_ms", [5_000, 300_000])
async def test_the_first_ping_comes_after_the_interval_not_at_the_handshakes_deadline(
    play: Start, handshake_ms: int, autojump_clock: trio.testing.MockClock
) -> None:
    it = await play(limits={"keep_alive_interval_ms": 30_000, "handshake_timeout_ms": handshake_ms}).in_lookup_mode()
    await it.client.must_hear(BaseCommand.PING)
    assert trio.current_time() == pytest.approx(30)


async def test_a_client_that_answers_pings_stays(play: Start, autojump_clock: trio.testing.MockClock) -> None:
    it = await play(limits={"keep_alive_interval_ms": 30_000}).in_lookup_mode()
    for _ in range(5):
        await it.client.must_hear(BaseCommand.PING)
        await trio.sleep(1)
        await it.client.say(commands.pong())
    await it.client.say(lookup())
    await it.client.must_hear(BaseCommand.LOOKUP_RESPONSE)


@pytest.mark.parametrize("answer", [commands.pong(), lookup(), commands.ping()])
async def test_a_client_that_answers_pings_in_the_same_instant_stays(
    play: Start, answer: BaseCommand | bytes, autojump_clock: trio.testing.MockClock
) -> None:
    it = await play(limits={"keep_alive_interval_ms": 30_000}).in_lookup_mode()
    for number in range(1, 4):
        while (heard := await it.client.hear()) is not None and heard.type != BaseCommand.PING:
            pass
        assert heard is not None
        assert trio.current_time() == pytest.approx(30 * number)
        await it.client.say(answer)


async def test_a_client_that_is_heard_now_and_then_is_pinged_an_interval_after_the_last_time(
    play: Start, autojump_clock: trio.testing.MockClock
) -> None:
    it = await play(limits={"keep_alive_interval_ms": 30_000}).in_lookup_mode()
    for at in (11, 29, 58, 59):
        await trio.sleep_until(at)
        await it.client.say(commands.pong())
    await it.client.must_hear(BaseCommand.PING)
    assert trio.current_time() == pytest.approx(89)
    await it.client.must_hear_end()
    assert trio.current_time() == pytest.approx(119)
    assert await it.end() == "keep_alive_timeout"


async def test_a_client_that_nobody_reads_is_not_taken_for_silent(
    play: Start, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """While its answers are waited for, what it says stays in the kernel, its PONGs, too."""
    monkeypatch.setattr("proxy.forwarder.session.lookup_mode.BYTES_MAX", 100)
    it = await play(limits={"keep_alive_interval_ms": 5_000, "lookup_timeout_ms": 120_000}).in_lookup_mode()
    it.workers.answer_by = None
    await it.client.say(lookup("t" * 200, 1))
    for number in range(2, 20):
        await trio.sleep(4)
        await it.client.say(lookup("t", number))
    assert len(it.workers.sent) == 1
    it.workers.answer_by = it.workers.answer_at_once
    it.workers.sent[0].answer(0)
    heard: list[int] = []
    while len(heard) < 19:
        command = await it.client.hear()
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
    await it.client.say(lookup())
    await it.client.stream.send_eof()
    await trio.sleep(30)
    it.workers.sent[0].answer(0)
    await it.client.must_hear(BaseCommand.LOOKUP_RESPONSE)
    await it.client.must_hear_end()
    assert await it.end() == "client_closed"


async def test_a_client_that_does_not_read_our_ping(play: Start, autojump_clock: trio.testing.MockClock) -> None:
    it = play(lockstep=True, limits={"keep_alive_interval_ms": 5000})
    it.nursery.start_soon(it.client.say, connect())
    await it.client.must_hear(BaseCommand.CONNECTED)
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
        await it.client.say(commands.ping())
        await it.client.must_hear(BaseCommand.PONG)
        await trio.sleep(20)


# ---- limits and slowness


async def test_the_limit_of_lookups_in_one_connection(play: Start) -> None:
    it = await play(limits={"max_concurrent_lookups_per_connection": 2}).in_lookup_mode()
    gate = trio.Event()

    async def answer_by(request: bytes) -> BaseCommand:
        await gate.wait()
        request_id = commands.parse_command(request).lookup_topic.request_id
        return lookup_answer(request_id)

    it.workers.answer_by = answer_by
    await it.client.say(*(lookup(request_id=number) for number in (1, 2, 3)))
    refused = (await it.client.must_hear(BaseCommand.LOOKUP_RESPONSE)).lookup_topic_response
    assert (refused.request_id, refused.error) == (3, ServerError.TooManyRequests)
    metadata = BaseCommand(type=BaseCommand.PARTITIONED_METADATA, partition_metadata={"topic": "t", "request_id": 4})
    await it.client.say(metadata)
    body = (await it.client.must_hear(BaseCommand.PARTITIONED_METADATA_RESPONSE)).partition_metadata_response
    assert (body.request_id, body.error) == (4, ServerError.TooManyRequests)
    assert it.value("pulsar_proxy_refused_commands_total", reason="too_many_requests") == 2
    gate.set()
    answered = {
        (await it.client.must_hear(BaseCommand.LOOKUP_RESPONSE)).lookup_topic_response.request_id for _ in range(2)
    }
    assert answered == {1, 2}
    await it.client.say(lookup(request_id=5))
    answer = (await it.client.must_hear(BaseCommand.LOOKUP_RESPONSE)).lookup_topic_response
    assert (answer.request_id, answer.error) == (5, 0)


async def test_what_one_client_makes_us_keep_is_bounded(play: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the bound nothing more is read from it, and nothing is lost."""
    monkeypatch.setattr("proxy.forwarder.session.lookup_mode.BYTES_MAX", 1000)
    it = await play().in_lookup_mode()
    gate = trio.Event()

    async def answer_by(request: bytes) -> BaseCommand:
        await gate.wait()
        request_id = commands.parse_command(request).lookup_topic.request_id
        return lookup_answer(request_id)

    it.workers.answer_by = answer_by
    for number in range(5):
        await it.client.say(lookup("t" * 400, request_id=number))
        await trio.testing.wait_all_tasks_blocked()
    assert len(it.workers.forwarded) == 3, "the last one may pass it"
    gate.set()
    answered = {
        (await it.client.must_hear(BaseCommand.LOOKUP_RESPONSE)).lookup_topic_response.request_id for _ in range(5)
    }
    assert answered == set(range(5))


async def test_topic_lists_count_for_the_answers_that_they_may_bring(
    play: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.forwarder.session.lookup_mode.BYTES_MAX", 1000)
    monkeypatch.setattr("proxy.forwarder.session.lookup_mode.LARGE_ANSWER_BYTES", 600)
    it = await play().in_lookup_mode()
    it.workers.answer_by = None
    topics = BaseCommand(
        type=BaseCommand.GET_TOPICS_OF_NAMESPACE, get_topics_of_namespace={"namespace": "n", "request_id": 1}
    )
    await it.client.say(topics, topics, topics)
    await trio.testing.wait_all_tasks_blocked()
    assert len(it.workers.forwarded) == 2, "the last one may pass it"
    it.workers.sent[0].answer(0)
    await trio.testing.wait_all_tasks_blocked()
    assert len(it.workers.forwarded) == 3


async def test_a_client_that_does_not_read_its_answers(play: Start, autojump_clock: trio.testing.MockClock) -> None:
    it = play(lockstep=True, limits={"keep_alive_interval_ms": 5000})
    it.nursery.start_soon(it.client.say, connect())
    await it.client.must_hear(BaseCommand.CONNECTED)
    started = trio.current_time()
    await it.client.say(lookup())
    assert await it.end() == "client_does_not_read"
    assert trio.current_time() - started == pytest.approx(5)


async def test_a_client_that_does_not_read_its_pong(play: Start, autojump_clock: trio.testing.MockClock) -> None:
    it = play(lockstep=True, limits={"keep_alive_interval_ms": 5000})
    it.nursery.start_soon(it.client.say, commands.ping())
    assert await it.end() == "client_does_not_read"


async def test_many_answers_to_a_client_that_does_not_read_end_it_as_soon(
    play: Start, autojump_clock: trio.testing.MockClock
) -> None:
    it = play(lockstep=True, limits={"keep_alive_interval_ms": 5000})
    it.nursery.start_soon(it.client.say, connect())
    await it.client.must_hear(BaseCommand.CONNECTED)
    started = trio.current_time()
    await it.client.say(*(lookup(request_id=number) for number in range(5)))
    assert await it.end() == "client_does_not_read"
    assert trio.current_time() - started == pytest.approx(5)


async def test_a_client_is_read_on_once_it_has_taken_a_large_answer(
    play: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It alone is more than the bound: what has left must not count any more when it is asked whether there is room."""
    monkeypatch.setattr("proxy.forwarder.session.lookup_mode.BYTES_MAX", 100_000)
    it = await play().in_lookup_mode()
    it.workers.answer_by = None
    for number in range(3):
        await it.client.say(lookup(request_id=number))
        await trio.testing.wait_all_tasks_blocked()
        it.workers.sent[-1].answer(0, padding=3_000_000)
        await it.client.say(commands.ping())
        await trio.testing.wait_all_tasks_blocked()
        answer = (await it.client.must_hear(BaseCommand.LOOKUP_RESPONSE)).lookup_topic_response
        assert (answer.request_id, len(answer.broker_service_url)) == (number, 3_000_000 + len("pulsar://b0:6650"))
        with trio.fail_after(60):
            await it.client.must_hear(BaseCommand.PONG)


# ---- requests that nobody looked into


TORN = b"\x08\x17\xba\x01\x02\x0a\x7f"
"""A field of its message is longer than the frame."""


@pytest.mark.parametrize("corrupt", [TORN, b"\x08\x17\xba\x01\x01\xff"])
@pytest.mark.parametrize("short_way", [True, False])
async def test_a_request_that_turns_out_to_be_none_ends_the_connection(
    play: Start, corrupt: bytes, short_way: bool
) -> None:
    """Security: no client may cause what looks like a defect of the proxy's, or be left waiting."""
    it = await play().in_lookup_mode()
    it.workers.answer_by, it.workers.short_way = None, short_way
    await it.client.say(lookup("a", 1), encode_frame(corrupt), lookup("b", 3))
    await trio.testing.wait_all_tasks_blocked()
    [sent] = it.workers.sent
    refused = RefusedRequest(index=1, error=EnvelopeResponse.INVALID_REQUEST, error_message="for the log")
    with structlog.testing.capture_logs() as logs:
        sent.say(EnvelopeResponse(frames=sent.frame(0), answered=[0], refused=[refused]), more=True)
        await it.client.must_hear(BaseCommand.LOOKUP_RESPONSE)
        code, text = await it.client.must_hear_error()
        assert await it.end() == "protocol_error"
    assert (code, text.split(":")[0]) == (ServerError.NotAllowedError, "Not Pulsar")
    assert [entry["event"] for entry in logs] == ["a client's connection failed"]
    assert not it.handshakes.count


async def test_room_that_comes_with_the_end_is_nobodys(play: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is over is read no further, or its descriptor would be watched while it is closed."""
    monkeypatch.setattr("proxy.forwarder.session.lookup_mode.BYTES_MAX", 100)
    it = await play().in_lookup_mode()
    it.workers.answer_by = None
    await it.client.say(lookup("t" * 100), encode_frame(TORN))
    await trio.testing.wait_all_tasks_blocked()
    await it.client.say(commands.ping())
    await trio.testing.wait_all_tasks_blocked()
    resumed: list[bool] = []
    monkeypatch.setattr(it.session._transport, "resume_reading", lambda: resumed.append(True))
    [sent] = it.workers.sent
    sent.say(EnvelopeResponse(error=EnvelopeResponse.INVALID_REQUEST))
    await it.client.must_hear_error()
    assert await it.end() == "protocol_error"
    assert resumed == []


@pytest.mark.parametrize("corrupt", [TORN, b"\x08\x17\xba\x01\x01\xff"])
async def test_nor_may_it_be_one_above_the_number(play: Start, corrupt: bytes) -> None:
    it = await play(limits={"max_concurrent_lookups_per_connection": 1}).in_lookup_mode()
    it.workers.answer_by = None
    await it.client.say(lookup(), encode_frame(corrupt))
    code, _text = await it.client.must_hear_error()
    assert code == ServerError.NotAllowedError
    assert await it.end() == "protocol_error"


LOOKUP_BYTES = lookup("topic", 9).SerializeToString()


@pytest.mark.parametrize(
    "command",
    [
        LOOKUP_BYTES + b"\x08\x12",
        b"\x08\x12" + LOOKUP_BYTES,
        LOOKUP_BYTES[2:] + LOOKUP_BYTES[:2],
        LOOKUP_BYTES + LOOKUP_BYTES[:2],
        LOOKUP_BYTES + b"\x88\x00\x17",
        b"\x08\x12\x92\x01\x00" + LOOKUP_BYTES,
        b"\x08\x97\x00" + LOOKUP_BYTES[2:],
    ],
    ids=[
        "PING behind",
        "PING before",
        "last",
        "twice",
        "twice, another way",
        "whole PING before",
        "longer than needed",
    ],
)
async def test_a_type_that_does_not_stand_first_and_once_ends_the_connection(play: Start, command: bytes) -> None:
    """Security: to whoever reads the beginning it is another command than to whoever parses it."""
    it = await play().in_lookup_mode()
    await it.client.say(encode_frame(command))
    assert (await it.client.must_hear_error())[1].startswith("Not Pulsar: a command whose type")
    assert await it.end() == "protocol_error"
    assert it.workers.sent == []


# ---- a client in a hurry


async def test_frames_wait_while_the_profile_is_asked_for(play: Start) -> None:
    """A client that does not wait for Connected must not be told, depending on a moment, that it is out of turn."""
    it = play()
    it.workers.profile_gate = trio.Event()
    await it.client.say(connect(), lookup("early", 1), commands.ping())
    await trio.testing.wait_all_tasks_blocked()
    await it.client.say(lookup("later", 2))
    await trio.testing.wait_all_tasks_blocked()
    assert (it.session.state, it.handshakes.count, it.workers.sent) == (State.AUTHENTICATING, 1, [])
    it.workers.profile_gate.set()
    await it.client.must_hear(BaseCommand.CONNECTED)
    kinds = {(await it.client.hear()).type for _ in range(3)}  # type: ignore[union-attr]
    assert kinds == {BaseCommand.PONG, BaseCommand.LOOKUP_RESPONSE}
    assert [topic for sent in it.workers.sent for topic in sent.topics] == ["early", "later"]
    assert not it.handshakes.count


@pytest.mark.parametrize("target", ["", "b0:6650"])
async def test_while_frames_wait_nothing_is_read(play: Start, target: str) -> None:
    """Security: nobody may make us keep what it likes before it is let in."""
    it = play()
    it.workers.profile_gate = it.workers.broker_gate = trio.Event()
    await it.client.say(connect(target), BaseCommand(type=BaseCommand.PRODUCER, producer={"request_id": 5}))
    await trio.testing.wait_all_tasks_blocked()
    it.nursery.start_soon(it.client.say, *[b"\x00" * 60_000] * 20)
    await trio.testing.wait_all_tasks_blocked()
    assert len(it.session._transport._decoder.take_unread_data()) <= 65_536 + 100


async def test_with_a_fresh_profile_nothing_waits(play: Start) -> None:
    it = play()
    it.workers.profile = CommandConnected(server_version="b", protocol_version=20, max_message_size=12345)
    it.workers.is_profile_fresh = True
    await it.client.say(connect(), lookup("at once"))
    connected = (await it.client.must_hear(BaseCommand.CONNECTED)).connected
    assert connected.max_message_size == 12345
    await it.client.must_hear(BaseCommand.LOOKUP_RESPONSE)
    assert it.workers.profile_asked == 0


async def test_a_client_that_left_while_the_profile_was_asked_for(play: Start) -> None:
    it = play()
    it.workers.profile_gate = trio.Event()
    await it.client.say(connect(), lookup("early"))
    await trio.testing.wait_all_tasks_blocked()
    await it.client.stream.aclose()
    await trio.testing.wait_all_tasks_blocked()
    it.workers.profile_gate.set()
    assert await it.end() in {"client_closed", "client_broke_off"}
    assert not it.handshakes.count


async def test_the_handshakes_deadline_covers_the_profile(play: Start, autojump_clock: trio.testing.MockClock) -> None:
    it = play(limits={"handshake_timeout_ms": 3000})
    it.workers.profile_gate = trio.Event()
    await it.client.say(connect(), lookup("early"))
    code, _text = await it.client.must_hear_error()
    assert (code, trio.current_time()) == (ServerError.ServiceNotReady, pytest.approx(3))
    it.workers.profile_gate.set()
    assert await it.end() == "handshake_timeout"
    assert it.workers.forwarded == []


async def test_after_an_authentication_frames_wait_for_the_profile_too(play: Start) -> None:
    it = play(authentication=AUTHENTICATED)
    it.workers.profile_gate = trio.Event()
    await it.client.say(connect())
    await trio.testing.wait_all_tasks_blocked()
    await it.client.say(lookup("early"))
    await trio.testing.wait_all_tasks_blocked()
    it.workers.profile_gate.set()
    await it.client.must_hear(BaseCommand.CONNECTED)
    await it.client.must_hear(BaseCommand.LOOKUP_RESPONSE)
    [(_, identity, _)] = it.workers.forwarded
    assert identity.role == "alice"


async def test_drain_while_the_profile_is_asked_for(play: Start) -> None:
    it = play()
    it.workers.profile_gate = trio.Event()
    await it.client.say(connect())
    await trio.testing.wait_all_tasks_blocked()
    it.session.drain()
    await trio.testing.wait_all_tasks_blocked()
    assert not it.ended.is_set()
    it.workers.profile_gate.set()
    await it.client.must_hear(BaseCommand.CONNECTED)
    await it.client.must_hear_end()
    assert await it.end() == "shut_down"


# ---- leaving


async def test_the_client_leaves(play: Start) -> None:
    for story in ([], [connect()], [connect(), lookup()]):
        it = play()
        for command in story:
            await it.client.say(command)
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
    await it.client.say(lookup())
    await it.client.stream.send_eof()
    await trio.testing.wait_all_tasks_blocked()
    gate.set()
    await it.client.must_hear(BaseCommand.LOOKUP_RESPONSE)
    await it.client.must_hear_end()
    assert await it.end() == "client_closed"


async def test_the_client_leaves_while_it_is_judged(play: Start) -> None:
    it = play(authentication=AUTHENTICATED)
    it.workers.authentication.answers = [trio.sleep_forever]
    await it.client.say(connect())
    await trio.testing.wait_all_tasks_blocked()
    await it.client.stream.aclose()
    assert await it.end() == "client_closed"


@pytest.mark.parametrize("ends", ["leaves", "answers wrongly"])
async def test_the_auth_worker_need_not_keep_what_nobody_goes_on_with(play: Start, ends: str) -> None:
    it = play(authentication=AUTHENTICATED)
    it.workers.authentication.answers = [challenge(b"q")]
    await it.client.say(connect())
    await it.client.must_hear(BaseCommand.AUTH_CHALLENGE)
    if ends == "leaves":
        await it.client.stream.aclose()
    else:
        await it.client.say(lookup())
        await it.client.must_hear_error()
    await it.end()
    assert it.workers.authentication.given_up == [1]


async def test_an_authentication_that_is_over_is_not_given_up(play: Start) -> None:
    it = play(authentication=AUTHENTICATED)
    it.workers.authentication.answers = [challenge(b"q"), denied()]
    await it.client.say(connect())
    await it.client.must_hear(BaseCommand.AUTH_CHALLENGE)
    await it.client.say(auth_response(b"a"))
    await it.client.must_hear_error()
    assert it.workers.authentication.given_up == []


async def test_the_connection_breaks(nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    it = await Play(nursery).in_lookup_mode()
    gate = trio.Event()

    async def reset(_size: int) -> bytes:
        await gate.wait()
        raise trio.BrokenResourceError

    monkeypatch.setattr(it.stream, "receive_some", reset)
    await it.client.say(commands.ping())
    await it.client.must_hear(BaseCommand.PONG)
    gate.set()
    assert await it.end() == "client_broke_off"


async def test_a_client_that_is_gone_when_its_error_is_to_be_said(
    play: Start, autojump_clock: trio.testing.MockClock
) -> None:
    it = play(authentication=AUTHENTICATED)
    it.workers.authentication.answers = [denied()]
    await it.client.say(connect())
    await trio.sleep(0.1)
    await it.client.stream.aclose()
    assert await it.end() == "authentication_failed"


async def test_a_client_that_is_gone_when_its_answer_comes(play: Start) -> None:
    it = await play().in_lookup_mode()

    async def answer_by(_request: bytes) -> BaseCommand:
        await it.client.stream.aclose()
        return lookup_answer(1)

    it.workers.answer_by = answer_by
    await it.client.say(lookup())
    assert await it.end() in {"client_closed", "client_broke_off"}, "its end is met twice: who reads, who sends"


async def test_drain_while_idle_in_lookup_mode(play: Start) -> None:
    it = await play().in_lookup_mode()
    it.session.drain()
    await it.client.must_hear_end()
    assert await it.end() == "shut_down"


async def test_drain_before_connect(play: Start) -> None:
    it = play()
    await trio.testing.wait_all_tasks_blocked()
    it.session.drain()
    await it.client.must_hear_end()
    assert await it.end() == "shut_down"


async def test_drain_lets_lookups_finish(play: Start) -> None:
    it = await play().in_lookup_mode()
    gate = trio.Event()

    async def answer_by(_request: bytes) -> BaseCommand:
        await gate.wait()
        return lookup_answer(7)

    it.workers.answer_by = answer_by
    await it.client.say(lookup())
    await trio.testing.wait_all_tasks_blocked()
    it.session.drain()
    await trio.testing.wait_all_tasks_blocked()
    assert not it.ended.is_set()
    gate.set()
    await it.client.must_hear(BaseCommand.LOOKUP_RESPONSE)
    await it.client.must_hear_end()
    assert await it.end() == "shut_down"


async def test_drain_lets_an_authentication_finish(play: Start) -> None:
    it = play(authentication=AUTHENTICATED)
    gate = trio.Event()

    async def slow() -> AuthenticateResponse:
        await gate.wait()
        return authenticated(Principal(name="bob"))

    it.workers.authentication.answers = [slow]
    await it.client.say(connect())
    await trio.testing.wait_all_tasks_blocked()
    it.session.drain()
    await trio.testing.wait_all_tasks_blocked()
    assert not it.ended.is_set()
    gate.set()
    await it.client.must_hear(BaseCommand.CONNECTED)
    await it.client.must_hear_end()
    assert await it.end() == "shut_down"


async def test_a_defect_ends_this_session_and_is_not_hidden(play: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    it = await play().in_lookup_mode()

    def defect(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(it.workers, "forward_envelope_now", defect)
    with structlog.testing.capture_logs() as logs:
        await it.client.say(lookup())
        assert await it.end() == "defect"
    [entry] = logs
    assert (entry["client"], type(entry["exc_info"])) == (CLIENT, ZeroDivisionError)
    await it.client.must_hear_end()


async def test_a_defect_in_a_task_ends_this_session_and_is_not_hidden(play: Start) -> None:
    it = play(authentication=AUTHENTICATED)

    async def defect() -> AuthenticateResponse:
        await trio.lowlevel.checkpoint()
        raise ZeroDivisionError

    it.workers.authentication.answers = [defect]
    with structlog.testing.capture_logs() as logs:
        await it.client.say(connect())
        assert await it.end() == "defect"
    assert [type(entry["exc_info"]) for entry in logs] == [ZeroDivisionError]
    await it.client.must_hear_end()


async def test_failures_are_logged_with_who_and_why(play: Start, autojump_clock: trio.testing.MockClock) -> None:
    it = play(authentication=AUTHENTICATED)
    it.workers.authentication.answers = [denied("expired")]
    with structlog.testing.capture_logs() as logs:
        await it.client.say(connect("b0:6650"))
        await it.end()
    [entry] = logs
    assert entry["client"] == CLIENT
    assert entry["target"] == "b0:6650"
    assert entry["cause"] == "authentication_failed"
    assert "expired" in entry["reason"]


# ---- frames that are never finished


async def test_what_is_here_of_a_large_frame_is_bounded_over_all_clients(play: Start) -> None:
    """Security: 10,000 connections with 128 KiB each would be more memory than there is."""
    it = play(limits={"max_lookup_bytes": 100 * 1024})
    others = it.workers.budget
    assert others.reserve_bytes("others", 50 * 1024)
    await it.client.say(connect())
    await it.client.must_hear(BaseCommand.CONNECTED)
    unfinished = encode_frame(bytes(100_000))[: 40 * 1024]
    await it.client.stream.send_all(unfinished)
    error = (await it.client.must_hear(BaseCommand.ERROR)).error
    assert error.error == ServerError.ServiceNotReady
    assert await it.end() == "no_memory"
    assert others._by_owner == {"others": 50 * 1024}


async def test_whole_frames_of_a_client_that_is_not_read_do_not_end_it(
    play: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy itself lets them lie; others have taken the memory."""
    monkeypatch.setattr("proxy.forwarder.session.lookup_mode.BYTES_MAX", 1000)
    monkeypatch.setattr("proxy.forwarder.session.client_session.UNFINISHED_BYTES_MIN", 1)
    it = await play().in_lookup_mode()
    it.workers.answer_by = None
    await it.client.say(*(lookup("t" * 400, number) for number in range(3)))
    await trio.testing.wait_all_tasks_blocked()
    it.workers.budget.resize(1)
    await it.client.say(*(lookup("t" * 400, number) for number in range(3, 9)))
    await trio.testing.wait_all_tasks_blocked()
    assert it.session._is_full
    assert it.session._transport.partial_frame_bytes
    assert not it.session.is_over


async def test_what_is_here_of_a_frame_counts_for_the_clients_principal(play: Start) -> None:
    """Security: not for its address, which many share."""
    it = play(authentication=AUTHENTICATED)
    it.workers.authentication.answers = [authenticated()]
    await it.client.say(connect())
    await it.client.must_hear(BaseCommand.CONNECTED)
    await it.client.stream.send_all(encode_frame(bytes(100_000))[: 30 * 1024])
    await trio.testing.wait_all_tasks_blocked()
    assert it.workers.budget._by_owner == {owner_of("alice", CLIENT): 30 * 1024}


async def test_a_large_frame_that_is_finished_counts_no_more(play: Start) -> None:
    it = play()
    await it.client.say(connect())
    await it.client.must_hear(BaseCommand.CONNECTED)
    frame = commands.encode(lookup("t" * (40 * 1024)))
    await it.client.stream.send_all(frame[: 30 * 1024])
    await trio.testing.wait_all_tasks_blocked()
    assert it.workers.budget.used_bytes == 30 * 1024
    await it.client.stream.send_all(frame[30 * 1024 :])
    await it.client.must_hear(BaseCommand.LOOKUP_RESPONSE)
    await trio.testing.wait_all_tasks_blocked()
    assert it.workers.budget.used_bytes == 0
