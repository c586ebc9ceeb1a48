"""proxy.forwarder.client.connection before the relay, as dialogues: what the client sends, what it receives, and
which workers are called."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import structlog.testing
import trio
import trio.testing
from forwarder_fakes import (
    AUTHENTICATED,
    CLIENT,
    Play,
    auth_response,
    authenticated,
    connect,
    lookup,
    lookup_answer,
)
from pulsar_bytes import command as command_bytes
from pulsar_bytes import decoded, fields, frame

from proto import commands
from proto.client_machine import State
from proto.commands import NO_REQUEST_ID
from proto.frames import encode_frame
from proto.pulsar_pb2 import BaseCommand, CommandConnected, ServerError
from proto.rpc_pb2 import (
    AuthenticateResponse,
    EnvelopeResponse,
    RefusedRequest,
)
from proxy.forwarder.client.lookup_failures import CONNECT_AGAIN

Start = Callable[..., Play]


# ---- into lookup mode


async def test_connect_leads_to_lookup_mode(play: Start) -> None:
    it = play()
    await it.client.send(connect())
    connected = (await it.client.expect_command(BaseCommand.CONNECTED)).connected
    assert connected.server_version.startswith("pulsar-trio-proxy")
    assert connected.protocol_version == 21
    assert it.session.state is State.LOOKUP
    assert it.value("pulsar_proxy_handshake_seconds_count", stage="total") == 1
    assert it.workers.opened == []


async def test_an_older_client_is_answered_in_its_own_version(play: Start) -> None:
    it = play()
    await it.client.send(connect(protocol_version=15))
    assert (await it.client.expect_command(BaseCommand.CONNECTED)).connected.protocol_version == 15


async def test_of_the_brokers_feature_flags_those_that_lookups_serve(play: Start) -> None:
    it = play()
    it.workers.profile = CommandConnected(server_version="b", protocol_version=20, max_message_size=12345)
    flags = it.workers.profile.feature_flags
    flags.supports_get_partitioned_metadata_without_auto_creation = True
    flags.supports_topic_watchers = flags.supports_scalable_topics = flags.supports_tc_metadata_discovery = True
    await it.client.send(connect())
    connected = (await it.client.expect_command(BaseCommand.CONNECTED)).connected
    assert connected.max_message_size == 12345
    assert connected.protocol_version == 20
    served = {"supports_get_partitioned_metadata_without_auto_creation": True}
    assert {descriptor.name: value for descriptor, value in connected.feature_flags.ListFields()} == served


async def test_every_way_of_cutting_connect_into_pieces(play: Start) -> None:
    data = commands.encode(connect())
    for cut in range(1, len(data), 7):
        it = play()
        await it.client.send(data[:cut])
        await trio.testing.wait_all_tasks_blocked()
        await it.client.send(data[cut:])
        await it.client.expect_command(BaseCommand.CONNECTED)


@pytest.mark.conforms("kip-590.1", "kip-590.3")
async def test_a_lookup_goes_in_an_envelope_whole(play: Start) -> None:
    it = await play().in_lookup_mode()
    request = lookup("topic", request_id=9)
    request.MergeFromString(b"\xfa\x3f\x03new")  # a field newer than this proxy
    await it.client.send(request)
    answer = await it.client.expect_command(BaseCommand.LOOKUP_RESPONSE)
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
    await it.client.send(lookup(request_id=1), lookup(request_id=2))
    await it.client.send(commands.ping())
    await it.client.expect_command(BaseCommand.PONG)
    for number in (2, 1):
        gates[number].set()
        assert (await it.client.expect_command(BaseCommand.LOOKUP_RESPONSE)).lookup_topic_response.request_id == number


# ---- what is read in one go


async def test_requests_read_together_are_sent_in_one_envelope(play: Start) -> None:
    it = await play().in_lookup_mode()
    await it.client.send(*(lookup(f"t{number}", number) for number in range(5)))
    heard = [(await it.client.expect_command(BaseCommand.LOOKUP_RESPONSE)).lookup_topic_response for _ in range(5)]
    assert sorted(one.request_id for one in heard) == list(range(5))
    [sent] = it.workers.sent
    assert sent.topics == ["t0", "t1", "t2", "t3", "t4"]


async def test_no_request_waits_for_the_next_one(play: Start) -> None:
    it = await play().in_lookup_mode()
    half = commands.encode(lookup("b"))
    await it.client.send(lookup("a"), half[:9])
    await it.client.expect_command(BaseCommand.LOOKUP_RESPONSE)
    await it.client.send(half[9:])
    await it.client.expect_command(BaseCommand.LOOKUP_RESPONSE)
    assert [sent.topics for sent in it.workers.sent] == [["a"], ["b"]]


@pytest.mark.parametrize(
    ("behind", "heard"),
    [
        (commands.ping(), BaseCommand.PONG),
        (BaseCommand(type=BaseCommand.PRODUCER, producer={"request_id": 5}), BaseCommand.ERROR),
    ],
)
async def test_another_command_between_two_requests_does_not_split_their_envelope(
    play: Start, behind: BaseCommand | bytes, heard: int
) -> None:
    it = await play().in_lookup_mode()
    it.workers.answer_by = None
    await it.client.send(lookup("a"), behind, lookup("b"), commands.pong())
    await it.client.expect_command(heard)
    await trio.testing.wait_all_tasks_blocked()
    assert [sent.topics for sent in it.workers.sent] == [["a", "b"]]


async def test_no_request_lies_while_room_is_waited_for(play: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those read so far must go, or nothing would ever give their bytes back. What a chunk brings goes as one."""
    monkeypatch.setattr("proxy.forwarder.client.lookup_mode.BYTES_MAX", 1000)
    it = await play().in_lookup_mode()
    it.workers.answer_by = None
    await it.client.send(*(lookup("t" * 400, number) for number in range(3)))
    for number in (3, 4):
        await trio.testing.wait_all_tasks_blocked()
        await it.client.send(lookup("t" * 400, number))
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
        await it.client.expect_command(BaseCommand.LOOKUP_RESPONSE)


async def test_no_request_lies_at_the_clients_half_close(play: Start) -> None:
    it = await play().in_lookup_mode()
    it.workers.answer_by = None
    await it.client.send(lookup("a"), lookup("b"))
    await it.client.stream.send_eof()
    await trio.testing.wait_all_tasks_blocked()
    [sent] = it.workers.sent
    sent.answer(1, 0)
    for _ in range(2):
        await it.client.expect_command(BaseCommand.LOOKUP_RESPONSE)
    await it.client.expect_end()
    assert await it.end() == "client_closed"


async def test_no_request_lies_while_the_client_is_pinged(play: Start, autojump_clock: trio.testing.MockClock) -> None:
    it = await play(limits={"keep_alive_interval_ms": 5_000, "lookup_timeout_ms": 60_000}).in_lookup_mode()
    it.workers.answer_by = None
    await it.client.send(lookup("a"))
    await it.client.expect_command(BaseCommand.PING)
    assert [sent.topics for sent in it.workers.sent] == [["a"]]
    await it.client.send(commands.pong())
    it.workers.sent[0].answer(0)
    await it.client.expect_command(BaseCommand.LOOKUP_RESPONSE)


# ---- ping and pong


async def test_ping_is_answered_before_and_after_connect(play: Start) -> None:
    it = play()
    await it.client.send(commands.ping())
    await it.client.expect_command(BaseCommand.PONG)
    await it.in_lookup_mode()
    await it.client.send(commands.pong(), commands.ping())
    await it.client.expect_command(BaseCommand.PONG)


async def test_ping_is_answered_while_authenticating_and_while_the_broker_is_awaited(play: Start) -> None:
    it = play(authentication=AUTHENTICATED)
    gate = trio.Event()

    async def slow() -> AuthenticateResponse:
        await gate.wait()
        return authenticated()

    it.workers.authentication.answers = [slow]
    it.workers.broker_gate = trio.Event()
    await it.client.send(connect("b0:6650"), commands.ping())
    await it.client.expect_command(BaseCommand.PONG)
    assert it.session.state is State.AUTHENTICATING
    gate.set()
    await trio.testing.wait_all_tasks_blocked()
    assert it.session.state is State.CONNECTING_TO_BROKER
    await it.client.send(commands.ping())
    await it.client.expect_command(BaseCommand.PONG)


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
    await it.client.send(command)
    error = (await it.client.expect_command(BaseCommand.ERROR)).error
    assert (error.request_id, error.error) == (request_id, ServerError.NotAllowedError)
    await it.client.send(lookup())
    await it.client.expect_command(BaseCommand.LOOKUP_RESPONSE)
    assert it.value("pulsar_proxy_refused_commands_total", reason="not_served") == 1


@pytest.mark.parametrize(
    ("kind", "answer", "error_field"),
    [
        (70, 71, 3),  # SCALABLE_TOPIC_LOOKUP: an update of its session
        (73, 74, 2),  # SCALABLE_TOPIC_SUBSCRIBE: its response
        (76, 77, 4),  # WATCH_SCALABLE_TOPICS: an update of the watch
        (79, 80, 3),  # WATCH_TC_ASSIGNMENTS: an update of the watch
        # What ends a stream of updates, what only brokers send, and what is newer than Pulsar 5.0.0-M1.
        *((kind, 14, 2) for kind in (71, 72, 74, 75, 77, 78, 80, 81, 82, 127)),
    ],
)
async def test_pulsar_5s_commands_are_answered_at_once_and_the_connection_stays(
    play: Start, kind: int, answer: int, error_field: int
) -> None:
    """By bytes, under the id that a V5 client waits for; to what begins no request, under that of the connection."""
    it = await play().in_lookup_mode()
    await it.client.send(frame(command_bytes(kind, fields((1, 7), (2, "topic://public/default/t")))))
    heard = dict(decoded((await it.client.expect_command(answer)).SerializeToString()))
    body = dict(decoded(bytes(heard[answer])))
    assert body[1] == (NO_REQUEST_ID if answer == BaseCommand.ERROR else 7)
    assert body[error_field] == ServerError.NotAllowedError
    assert b"needs a connection to a broker" in bytes(body[error_field + 1])
    await it.client.send(lookup())
    await it.client.expect_command(BaseCommand.LOOKUP_RESPONSE)
    assert it.value("pulsar_proxy_refused_commands_total", reason="not_served") == 1


async def test_a_message_is_answered_with_a_send_error(play: Start) -> None:
    it = await play().in_lookup_mode()
    await it.client.send(BaseCommand(type=BaseCommand.SEND, send={"producer_id": 1, "sequence_id": 2}))
    error = (await it.client.expect_command(BaseCommand.SEND_ERROR)).send_error
    assert (error.producer_id, error.sequence_id) == (1, 2)


@pytest.mark.conforms("kip-368.54")
async def test_a_frame_too_large(play: Start) -> None:
    it = await play(limits={"max_command_bytes": 2048}).in_lookup_mode()
    await it.client.send(b"\x7f\xff\xff\xff")
    code, text = await it.client.expect_error()
    assert (code, "Too large" in text) == (ServerError.NotAllowedError, True)
    assert await it.end() == "frame_too_large"


@pytest.mark.conforms("kip-368.53")
@pytest.mark.parametrize("seed", range(8))
async def test_1024_random_bytes_in_lookup_mode_end_their_own_connection(play: Start, seed: int) -> None:
    it, other = await play().in_lookup_mode(), await play().in_lookup_mode()
    await it.client.send(lookup())
    await it.client.expect_command(BaseCommand.LOOKUP_RESPONSE)
    await it.client.send(random.Random(seed).randbytes(1024))
    code, _text = await it.client.expect_error()
    assert code == ServerError.NotAllowedError
    assert await it.end() in {"frame_too_large", "protocol_error"}
    await other.client.send(lookup())
    await other.client.expect_command(BaseCommand.LOOKUP_RESPONSE)


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
    await it.client.send(garbage)
    code, _text = await it.client.expect_error()
    assert code == ServerError.NotAllowedError
    await it.end()
    assert it.workers.forwarded == []


async def test_an_http_client(play: Start) -> None:
    it = play()
    await it.client.send(b"GET / HTTP/1.1\r\nHost: proxy\r\n\r\n")
    await it.client.expect_error()
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
    await it.client.send(command)
    code, text = await it.client.expect_error()
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
    await it.client.send(connect(), command)
    code, _ = await it.client.expect_error()
    assert code == ServerError.NotAllowedError
    gate.set()
    assert await it.end() == "not_allowed"
    assert it.workers.forwarded == []


async def test_a_second_connect(play: Start) -> None:
    it = await play().in_lookup_mode()
    await it.client.send(connect())
    code, _ = await it.client.expect_error()
    assert code == ServerError.NotAllowedError
    assert await it.end() == "not_allowed"


@pytest.mark.conforms("pip-30.48")
async def test_an_authentication_frame_after_completion(play: Start) -> None:
    it = play(authentication=AUTHENTICATED)
    await it.in_lookup_mode()
    await it.client.send(auth_response(b"again"))
    await it.client.expect_error()
    assert await it.end() == "not_allowed"
    assert len(it.workers.authentication.rounds) == 1


# ---- a lookup worker of another version


UNSUPPORTED = EnvelopeResponse(error=EnvelopeResponse.UNSUPPORTED_VERSION, error_message="for the log")


@pytest.mark.conforms("kip-590.31")
@pytest.mark.parametrize("fast_path", [True, False])
async def test_an_envelope_of_an_unknown_version_makes_the_client_connect_again(play: Start, fast_path: bool) -> None:
    """An upgrade: of two workers, one is old. What the other one is asked is answered, and no more is taken."""
    it = await play().in_lookup_mode()
    it.workers.answer_by, it.workers.fast_path = None, fast_path
    await it.client.send(lookup("a", 1))
    await trio.testing.wait_all_tasks_blocked()
    await it.client.send(lookup("b", 2))
    await trio.testing.wait_all_tasks_blocked()
    refusing, serving = it.workers.sent
    refusing.send(UNSUPPORTED)
    answer = (await it.client.expect_command(BaseCommand.LOOKUP_RESPONSE)).lookup_topic_response
    assert (answer.request_id, answer.error) == (1, ServerError.ServiceNotReady)
    assert "for the log" not in str(answer)
    await it.client.send(lookup("c", 3))
    await trio.testing.wait_all_tasks_blocked()
    assert it.workers.sent == [refusing, serving]
    assert not it.ended.is_set()
    serving.answer(0)
    answer = (await it.client.expect_command(BaseCommand.LOOKUP_RESPONSE)).lookup_topic_response
    assert (answer.request_id, answer.error) == (2, 0)
    assert await it.client.expect_error() == (ServerError.ServiceNotReady, CONNECT_AGAIN)
    assert await it.end() == "envelope_unsupported"


async def test_a_worker_that_does_not_answer_delays_the_end_for_the_time_of_a_lookup(
    play: Start, autojump_clock: trio.testing.MockClock
) -> None:
    it = await play().in_lookup_mode()
    it.workers.answer_by = None
    for request_id in (1, 2):
        await it.client.send(lookup("a", request_id))
        await trio.testing.wait_all_tasks_blocked()
    began = trio.current_time()
    it.workers.sent[0].send(UNSUPPORTED)
    await it.client.expect_command(BaseCommand.LOOKUP_RESPONSE)
    assert await it.client.expect_error() == (ServerError.ServiceNotReady, CONNECT_AGAIN)
    assert await it.end() == "envelope_unsupported"
    assert trio.current_time() - began <= it.workers.answer_timeout_s + 1


# ---- requests that were not parsed


TORN = b"\x08\x17\xba\x01\x02\x0a\x7f"


@pytest.mark.parametrize("corrupt", [TORN, b"\x08\x17\xba\x01\x01\xff"])
@pytest.mark.parametrize("fast_path", [True, False])
async def test_a_request_that_turns_out_to_be_none_ends_the_connection(
    play: Start, corrupt: bytes, fast_path: bool
) -> None:
    """Security: no client may cause what looks like a defect of the proxy's, or be left waiting."""
    it = await play().in_lookup_mode()
    it.workers.answer_by, it.workers.fast_path = None, fast_path
    await it.client.send(lookup("a", 1), encode_frame(corrupt), lookup("b", 3))
    await trio.testing.wait_all_tasks_blocked()
    [sent] = it.workers.sent
    refused = RefusedRequest(index=1, error=EnvelopeResponse.INVALID_REQUEST, error_message="for the log")
    with structlog.testing.capture_logs() as logs:
        sent.send(EnvelopeResponse(frames=sent.frame(0), answered=[0], refused=[refused]), more=True)
        await it.client.expect_command(BaseCommand.LOOKUP_RESPONSE)
        code, text = await it.client.expect_error()
        assert await it.end() == "protocol_error"
    assert (code, text.split(":")[0]) == (ServerError.NotAllowedError, "Not Pulsar")
    assert [entry["event"] for entry in logs] == ["a client's connection failed"]
    assert not it.handshakes.count


@pytest.mark.parametrize("corrupt", [TORN, b"\x08\x17\xba\x01\x01\xff"])
async def test_nor_may_it_be_one_above_the_number(play: Start, corrupt: bytes) -> None:
    it = await play(limits={"max_concurrent_lookups_per_connection": 1}).in_lookup_mode()
    it.workers.answer_by = None
    await it.client.send(lookup(), encode_frame(corrupt))
    code, _text = await it.client.expect_error()
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
    """Security: to a reader of the beginning it is another command than to a parser."""
    it = await play().in_lookup_mode()
    await it.client.send(encode_frame(command))
    assert (await it.client.expect_error())[1].startswith("Not Pulsar: a command whose type")
    assert await it.end() == "protocol_error"
    assert it.workers.sent == []
