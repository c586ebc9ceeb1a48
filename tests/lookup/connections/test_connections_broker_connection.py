"""lookup.connections.broker_connection: requests of many clients over one connection, matched to their answers by
our own ids."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from lookup_fakes import CONNECT, BrokerEnd, asked, connected, gather, host_port, lookup, lookup_response

from lookup.connections import broker_connection
from lookup.connections.broker_connection import (
    CHECKS_PER_SILENCE,
    SMALL_ANSWER_BYTES_MAX,
    BrokerConnection,
    BrokerConnectionLost,
    ConnectionSettings,
)
from proto import commands
from proto.broker_handshake import Connected
from proto.frames import Frame
from proto.lookup_answers import AnswerTemplates, BrokerAnswer
from proto.lookup_requests import encode_proxy_id
from proto.pulsar_pb2 import BaseCommand, ServerError
from proxy.runtime.loop.tick import Tick, current_tick
from proxy.runtime.network.broker_link import BrokerLink
from proxy.runtime.rpc.errors import RpcError

KEEP_ALIVE_S = 30.0
SILENCE_S = 2.5
LOOK_S = SILENCE_S / CHECKS_PER_SILENCE


@dataclass
class Line:
    """A connection under test, and the broker at its other end."""

    connection: BrokerConnection
    broker: BrokerEnd
    turn: Tick
    fresh: list[tuple[str, bytes]] = field(default_factory=list)
    results: list[object] = field(default_factory=list)
    ended: trio.Event = field(default_factory=trio.Event)
    nursery: trio.Nursery | None = None

    def ask(self, topic: str, request_id: int = 7) -> None:
        """Ask in a task of its own; what comes of it is put into ``results``."""

        async def one() -> None:
            try:
                answer = await self.connection.request_answer(asked(lookup(topic, request_id)))
                self.results.append(answer.lookup_topic_response.broker_service_url or answer)
            except BrokerConnectionLost as lost:
                self.results.append(lost)

        assert self.nursery is not None
        self.nursery.start_soon(one)

    async def request(self) -> BaseCommand:
        """The next request that the broker sees."""
        command = await self.broker.read()
        assert command is not None
        return command

    async def answer(self, request: BaseCommand, url: str) -> None:
        await self.broker.send(lookup_response(request, CONNECT, url))

    async def run(self) -> None:
        await self.connection.run()
        self.ended.set()


Open = Callable[..., Awaitable[Line]]


@pytest.fixture
async def line_opener(nursery: trio.Nursery) -> AsyncIterator[Open]:
    async def open_line(
        rest: bytes = b"", *, refuse_credentials: bool = False, streams: tuple[Any, Any] | None = None
    ) -> Line:
        ours, theirs = streams or trio.testing.memory_stream_pair()
        turn = current_tick()
        greeting = connected()
        link = BrokerLink(
            host_port("b0"), ours, Connected(Frame(greeting.SerializeToString()), greeting.connected, rest)
        )

        async def answer_challenge(_challenge: bytes) -> tuple[str, bytes]:
            await trio.lowlevel.checkpoint()
            if refuse_credentials:
                raise RpcError("no auth worker")
            line.fresh.append(("token", b"fresh-%d" % (len(line.fresh) + 1)))
            return line.fresh[-1]

        connection = BrokerConnection(
            host_port("broker"),
            link,
            ConnectionSettings(
                max_frame_bytes=65536,
                keep_alive_s=KEEP_ALIVE_S,
                silence_s=SILENCE_S,
                renew_at=float("inf"),
                answer_challenge=answer_challenge,
            ),
            AnswerTemplates(),
        )
        line = Line(connection, BrokerEnd(theirs), turn, nursery=nursery)
        nursery.start_soon(line.run)
        await trio.testing.wait_all_tasks_blocked()
        return line

    yield open_line
    nursery.cancel_scope.cancel()


@pytest.fixture
async def line(line_opener: Open) -> Line:
    return await line_opener()


async def test_pipelined_requests_answered_out_of_order(line: Line) -> None:
    for topic in ("a", "b", "c"):
        line.ask(topic, request_id=7)  # three clients, each with the same id of its own
    requests = [await line.request() for _ in range(3)]
    assert len({request.lookup_topic.request_id for request in requests}) == 3
    requests.sort(key=lambda request: str(request.lookup_topic.topic), reverse=True)
    for request in requests:
        await line.answer(request, f"pulsar://{request.lookup_topic.topic}:1")
        await trio.testing.wait_all_tasks_blocked()
    assert line.results == ["pulsar://c:1", "pulsar://b:1", "pulsar://a:1"]


async def test_every_caller_gets_the_answer_to_its_own_request(line: Line) -> None:
    answers = gather(
        *(lambda topic=topic: line.connection.request_answer(asked(lookup(topic))) for topic in ("a", "b"))  # type: ignore[misc]
    )

    async def serve() -> None:
        first, second = await line.request(), await line.request()
        await line.answer(second, second.lookup_topic.topic)
        await line.answer(first, first.lookup_topic.topic)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        a, b = await answers
    assert (a.lookup_topic_response.broker_service_url, b.lookup_topic_response.broker_service_url) == ("a", "b")


@pytest.mark.conforms("kip-590.29")
async def test_an_answer_after_its_caller_has_left_is_dropped(line: Line) -> None:
    assert line.nursery is not None
    scope = trio.CancelScope()

    async def impatient() -> None:
        with scope:
            await line.connection.request_answer(asked(lookup("slow")))

    line.nursery.start_soon(impatient)
    slow = await line.request()
    scope.cancel()
    await trio.testing.wait_all_tasks_blocked()
    assert line.connection.idle
    line.ask("next")
    following = await line.request()
    await line.answer(slow, "late")
    await line.answer(following, "right")
    await trio.testing.wait_all_tasks_blocked()
    assert line.results == ["right"]


@pytest.mark.conforms("kip-590.29")
async def test_of_two_answers_for_one_id_the_first_counts(line: Line) -> None:
    line.ask("a")
    first = await line.request()
    await line.answer(first, "first")
    await line.answer(first, "second")
    line.ask("b")
    await line.answer(await line.request(), "b")
    await trio.testing.wait_all_tasks_blocked()
    assert line.results == ["first", "b"]
    assert not line.connection.closed


async def test_an_error_with_the_requests_id_is_its_answer(line: Line) -> None:
    line.ask("a")
    request = await line.request()
    await line.broker.send(commands.error(request.lookup_topic.request_id, 11, "no such topic"))
    await trio.testing.wait_all_tasks_blocked()
    [answer] = line.results
    assert isinstance(answer, BaseCommand)
    assert (answer.type, answer.error.error, answer.error.message) == (BaseCommand.ERROR, 11, "no such topic")


async def test_an_error_for_the_connection_ends_it(line: Line) -> None:
    line.ask("a")
    line.ask("b")
    await line.request()
    await line.broker.send(commands.error(commands.NO_REQUEST_ID, 6, "shutting down"))
    await line.ended.wait()
    await trio.testing.wait_all_tasks_blocked()
    assert [type(result) for result in line.results] == [BrokerConnectionLost, BrokerConnectionLost]
    assert line.connection.closed


async def test_an_error_for_an_unknown_id_is_dropped(line: Line) -> None:
    await line.broker.send(commands.error(12345, 6, "?"))
    line.ask("a")
    await line.answer(await line.request(), "a")
    await trio.testing.wait_all_tasks_blocked()
    assert line.results == ["a"]


async def test_ping_is_answered(line: Line) -> None:
    await line.broker.send(commands.ping())
    assert (await line.request()).type == BaseCommand.PONG


async def test_other_commands_are_ignored(line: Line) -> None:
    await line.broker.send(commands.pong())
    await line.broker.send(commands.encode(BaseCommand(type=BaseCommand.SUCCESS)))
    line.ask("a")
    await line.answer(await line.request(), "a")
    await trio.testing.wait_all_tasks_blocked()
    assert line.results == ["a"]


async def test_each_challenge_is_answered_with_fresh_credentials(line: Line) -> None:
    for expected in (b"fresh-1", b"fresh-2"):
        await line.broker.send(commands.auth_challenge("broker", 21, "token", b"PulsarAuthRefresh"))
        answer = await line.request()
        assert answer.type == BaseCommand.AUTH_RESPONSE
        assert answer.auth_response.response.auth_method_name == "token"
        assert answer.auth_response.response.auth_data == expected


async def test_a_challenge_without_credentials_ends_the_connection(line_opener: Open) -> None:
    line = await line_opener(refuse_credentials=True)
    line.ask("a")
    await line.request()
    await line.broker.send(commands.auth_challenge("broker", 21, "token", b"PulsarAuthRefresh"))
    await line.ended.wait()
    await trio.testing.wait_all_tasks_blocked()
    assert isinstance(line.results[0], BrokerConnectionLost)


async def test_a_silent_broker_is_pinged_then_given_up(line: Line, autojump_clock: trio.testing.MockClock) -> None:
    """No request waits: one PING after the interval, and the end after another one."""
    started = trio.current_time()
    assert (await line.request()).type == BaseCommand.PING
    assert KEEP_ALIVE_S <= trio.current_time() - started <= KEEP_ALIVE_S + LOOK_S
    with structlog.testing.capture_logs() as logs:
        assert await line.broker.read() is None, "one PING is enough"
        await line.ended.wait()
    assert 2 * KEEP_ALIVE_S <= trio.current_time() - started <= 2 * KEEP_ALIVE_S + LOOK_S
    assert ["has been silent" in entry["reason"] for entry in logs] == [True]


@pytest.mark.parametrize("idle_s", [0.0, 0.1, 1.1, 2.4, 26.0, 31.0])
async def test_a_frozen_broker_is_given_up_after_half_of_a_lookups_time(
    line: Line, autojump_clock: trio.testing.MockClock, idle_s: float
) -> None:
    """Whenever the request comes; the other half is for another broker."""
    await trio.sleep(idle_s)
    if idle_s > KEEP_ALIVE_S:
        assert (await line.request()).type == BaseCommand.PING
    started = trio.current_time()
    line.ask("a")
    assert (await line.request()).type == BaseCommand.LOOKUP
    assert (await line.request()).type == BaseCommand.PING
    assert SILENCE_S <= trio.current_time() - started <= SILENCE_S + LOOK_S
    await trio.sleep(1)
    line.ask("b")  # does not lengthen it
    await line.ended.wait()
    assert 2 * SILENCE_S <= trio.current_time() - started <= 2 * SILENCE_S + LOOK_S
    await trio.testing.wait_all_tasks_blocked()
    assert [type(result) for result in line.results] == [BrokerConnectionLost] * 2
    assert line.connection.loss is None, "which says nothing of the requests"


async def test_a_broker_that_only_takes_its_time_is_kept(line: Line, autojump_clock: trio.testing.MockClock) -> None:
    """A topic is being loaded: the broker answers PINGs meanwhile."""
    line.ask("slow")
    request = await line.request()
    for _ in range(4):
        assert (await line.request()).type == BaseCommand.PING
        await line.broker.send(commands.pong())
    await line.answer(request, "at last")
    await trio.testing.wait_all_tasks_blocked()
    assert line.results == ["at last"]


async def test_a_broker_that_answers_pings_is_kept(line: Line, autojump_clock: trio.testing.MockClock) -> None:
    for _ in range(5):
        assert (await line.request()).type == BaseCommand.PING
        await line.broker.send(commands.pong())
    assert not line.connection.closed


async def test_a_talkative_broker_is_not_pinged(line: Line, autojump_clock: trio.testing.MockClock) -> None:
    for _ in range(20):
        await trio.sleep(KEEP_ALIVE_S / 4)
        await line.broker.send(commands.pong())
    with trio.move_on_after(0.1):
        pytest.fail(f"{await line.request()}")


async def test_the_broker_closes_and_all_who_wait_are_told(line: Line) -> None:
    line.ask("a")
    line.ask("b")
    await line.request()
    await line.request()
    await trio.aclose_forcefully(line.broker.stream)
    await line.ended.wait()
    await trio.testing.wait_all_tasks_blocked()
    assert [type(result) for result in line.results] == [BrokerConnectionLost, BrokerConnectionLost]
    assert line.connection.loss is not None
    assert line.connection.loss.request_count == 2, "each is a suspect"
    assert [result.loss for result in line.results] == [line.connection.loss] * 2
    with pytest.raises(BrokerConnectionLost):
        await line.connection.request_answer(asked())
    assert line.connection.idle


async def test_end_of_stream_is_the_same(line: Line) -> None:
    line.ask("a")
    await line.request()
    await line.broker.stream.send_eof()
    await line.ended.wait()
    await trio.testing.wait_all_tasks_blocked()
    assert isinstance(line.results[0], BrokerConnectionLost)


async def test_close_tells_all_who_wait(line: Line) -> None:
    line.ask("a")
    await line.request()
    line.connection.close()
    await line.ended.wait()
    await trio.testing.wait_all_tasks_blocked()
    assert isinstance(line.results[0], BrokerConnectionLost)
    assert await line.broker.read() is None, "the stream is closed"
    assert line.connection.loss is None, "it was not the broker that closed it"
    with pytest.raises(BrokerConnectionLost):
        await line.connection.request_answer(asked())


async def test_bytes_behind_connected_are_not_lost(line_opener: Open) -> None:
    line = await line_opener(rest=commands.ping() + commands.ping()[:5])
    assert (await line.request()).type == BaseCommand.PONG
    await line.broker.send(commands.ping()[5:])
    assert (await line.request()).type == BaseCommand.PONG


@pytest.mark.parametrize(
    "garbage",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",  # a size of more than a gigabyte
        b"\x00\x00\x00\x01\x00\x00\x00\x00\x00",  # no room for the command's size
        b"\x00\x00\x00\x06\x00\x00\x00\x02\xff\xff",  # no BaseCommand
        b"\x00\x00\x00\x06\x00\x00\x00\xff\x08\x12",  # a command beyond its frame
    ],
)
async def test_garbage_ends_the_connection(line: Line, garbage: bytes) -> None:
    line.ask("a")
    await line.request()
    await line.broker.send(garbage)
    await line.ended.wait()
    await trio.testing.wait_all_tasks_blocked()
    assert isinstance(line.results[0], BrokerConnectionLost)


async def test_a_broker_that_takes_no_more_requests(line_opener: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_connection, "WRITE_BUFFER_BYTES_MAX", 100)
    line = await line_opener()
    gate = trio.Event()

    async def blocked(_data: object) -> None:
        await gate.wait()

    monkeypatch.setattr(line.connection._link.stream, "send_all", blocked)
    line.ask("a")  # leaves the buffer, and is stuck in the stream
    await trio.testing.wait_all_tasks_blocked()
    line.ask("b" * 90)  # fills the buffer, and waits in it
    await trio.testing.wait_all_tasks_blocked()
    with pytest.raises(BrokerConnectionLost, match="does not take requests"):
        await line.connection.request_answer(asked(lookup("c" * 90)))
    assert len(line.results) == 0
    gate.set()


async def test_idle_and_last_used(line: Line, autojump_clock: trio.testing.MockClock) -> None:
    assert line.connection.idle
    await trio.sleep(5)
    line.ask("a")
    request = await line.request()
    assert not line.connection.idle
    assert line.connection.last_used_at == trio.current_time()
    await line.answer(request, "a")
    await trio.testing.wait_all_tasks_blocked()
    assert line.connection.idle


# ---- without a task


class Hearing:
    """Hears answers without a task."""

    def __init__(self, on_answer: Callable[[BrokerAnswer | None], None]) -> None:
        self.proxy_id = b""
        self.on_answer = on_answer

    def on_broker_answer(self, answer: BrokerAnswer | None) -> None:
        self.on_answer(answer)


def ask(line: Line, topic: str, on_answer: Callable[[BrokerAnswer | None], None]) -> Hearing:
    hearing = Hearing(on_answer)
    line.connection.send_request(asked(lookup(topic)), hearing, trio.current_time())
    return hearing


def listen(line: Line, topic: str, heard: list[Any]) -> Hearing:
    """Ask without a task."""

    def on_answer(answer: BrokerAnswer | None) -> None:
        heard.append(None if answer is None else answer.command.lookup_topic_response.broker_service_url)

    return ask(line, topic, on_answer)


async def test_requests_of_one_tick_are_sent_at_its_end(line: Line) -> None:
    heard: list[Any] = []
    with line.turn:
        ids = [listen(line, topic, heard).proxy_id for topic in ("a", "b")]
        assert not line.connection.idle
        await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(0.01):
            pytest.fail(f"{await line.request()}")
    requests = [await line.request(), await line.request()]
    assert [encode_proxy_id(request.lookup_topic.request_id) for request in requests] == ids
    await line.broker.send(
        b"".join(commands.encode(lookup_response(one, CONNECT, one.lookup_topic.topic)) for one in reversed(requests))
    )
    await trio.testing.wait_all_tasks_blocked()
    assert heard == ["b", "a"]
    assert line.connection.idle


async def test_a_turn_ends_with_each_chunk_of_answers(line: Line) -> None:
    """What the answers of a chunk lead to is said once, behind them all."""
    heard: list[Any] = []

    class Speaker:
        def flush(self) -> None:
            heard.append("said")

    speaker = Speaker()

    def on_answer(_answer: BrokerAnswer | None) -> None:
        heard.append("answer")
        line.turn.schedule_flush(speaker)

    for _ in range(3):
        ask(line, "t", on_answer)
    requests = [await line.request() for _ in range(3)]
    await line.broker.send(b"".join(commands.encode(lookup_response(one, CONNECT, "x")) for one in requests[:2]))
    await trio.testing.wait_all_tasks_blocked()
    assert heard == ["answer", "answer", "said"]
    line.connection.close()
    await line.ended.wait()
    assert heard == ["answer", "answer", "said", "answer", "said"]


async def test_the_answer_to_a_forgotten_request_is_dropped(line: Line) -> None:
    heard: list[Any] = []
    forgotten = listen(line, "a", heard)
    listen(line, "b", heard)
    line.connection.forget_request(forgotten)
    for _ in range(2):
        request = await line.request()
        await line.answer(request, request.lookup_topic.topic)
    await trio.testing.wait_all_tasks_blocked()
    assert heard == ["b"]
    line.connection.forget_request(forgotten)
    assert line.connection.idle


@pytest.mark.parametrize("by", ["broker", "close"])
async def test_each_who_waits_without_a_task_is_told_once(line: Line, by: str) -> None:
    heard: list[Any] = []
    for topic in ("a", "b"):
        listen(line, topic, heard)
    await line.answer(await line.request(), "answered")
    await trio.testing.wait_all_tasks_blocked()
    if by == "broker":
        await line.broker.stream.aclose()
    else:
        line.connection.close()
        with pytest.raises(BrokerConnectionLost):
            listen(line, "late", heard)
    await line.ended.wait()
    assert heard == ["answered", None]
    with pytest.raises(BrokerConnectionLost):
        listen(line, "late", heard)


async def test_a_defect_that_an_answer_meets_ends_this_connection_and_no_more(line: Line) -> None:
    heard: list[Any] = []

    def broken(answer: BrokerAnswer | None) -> None:
        if answer is not None:
            raise ZeroDivisionError

    ask(line, "x", broken)
    listen(line, "a", heard)
    with structlog.testing.capture_logs() as logs:
        await line.answer(await line.request(), "x")
        await line.ended.wait()
    assert heard == [None]
    assert [entry["log_level"] for entry in logs if entry["log_level"] != "debug"] == ["error"]
    assert line.connection.closed


# ---- another one takes its place


async def test_an_idle_connection_that_retires_ends_at_once(line: Line) -> None:
    line.connection.retire_when_idle()
    await line.ended.wait()
    assert line.connection.closed


async def test_a_connection_that_retires_serves_those_who_wait(line: Line) -> None:
    line.ask("a")
    line.ask("b")
    requests = [await line.request(), await line.request()]
    line.connection.retire_when_idle()
    await line.answer(requests[0], "a")
    await trio.testing.wait_all_tasks_blocked()
    assert not line.ended.is_set()
    await line.answer(requests[1], "b")
    await line.ended.wait()
    await trio.testing.wait_all_tasks_blocked()
    assert line.results == ["a", "b"]


async def test_a_connection_that_retires_ends_even_where_its_last_request_is_given_up(
    line: Line, autojump_clock: trio.testing.MockClock
) -> None:
    heard: list[Any] = []
    forgotten = listen(line, "a", heard)
    assert (await line.request()).type == BaseCommand.LOOKUP
    line.connection.retire_when_idle()
    line.connection.forget_request(forgotten)

    async def answer_pings() -> None:
        while (command := await line.broker.read()) is not None:
            assert command.type == BaseCommand.PING
            await line.broker.send(commands.pong())

    assert line.nursery is not None
    line.nursery.start_soon(answer_pings)
    with trio.fail_after(2 * KEEP_ALIVE_S):
        await line.ended.wait()


# ---- answers for which no room was made


@pytest.mark.parametrize(
    ("url_bytes", "error"), [(SMALL_ANSWER_BYTES_MAX // 2, 0), (2 * SMALL_ANSWER_BYTES_MAX, ServerError.UnknownError)]
)
async def test_a_lookup_has_no_large_answer(line: Line, url_bytes: int, error: int) -> None:
    """Security: thousands may be under way, so that a broker, or who has taken it over, could fill the memory."""
    url = "pulsar://" + "b" * url_bytes
    with structlog.testing.capture_logs() as logs:
        line.ask("large")
        await line.answer(await line.request(), url)
        await trio.testing.wait_all_tasks_blocked()
    [result] = line.results
    if url_bytes < SMALL_ANSWER_BYTES_MAX:
        assert result == url
    else:
        assert isinstance(result, BaseCommand)
        assert result.lookup_topic_response.error == error
        assert result.lookup_topic_response.message == "The broker's answer is too large"
        assert result.ByteSize() < 200
        assert [(entry["request"], entry["bytes"] > url_bytes) for entry in logs] == [("lookup", True)]
    line.ask("next")
    await line.answer(await line.request(), "pulsar://b:1")
    await trio.testing.wait_all_tasks_blocked()
    assert line.results[1] == "pulsar://b:1", "the connection goes on"


async def test_a_schema_may_be_large(line: Line) -> None:
    schema = BaseCommand(type=BaseCommand.GET_SCHEMA, get_schema={"topic": "t", "request_id": 10})
    answers: list[BaseCommand] = []

    async def one() -> None:
        answers.append(await line.connection.request_answer(asked(schema)))

    assert line.nursery is not None
    line.nursery.start_soon(one)
    request = await line.request()
    body = {"request_id": request.get_schema.request_id, "error_message": "x" * 2 * SMALL_ANSWER_BYTES_MAX}
    await line.broker.send(BaseCommand(type=BaseCommand.GET_SCHEMA_RESPONSE, get_schema_response=body))
    await trio.testing.wait_all_tasks_blocked()
    assert len(answers[0].get_schema_response.error_message) == 2 * SMALL_ANSWER_BYTES_MAX
