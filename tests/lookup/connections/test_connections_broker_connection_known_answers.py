"""lookup.connections.broker_connection: answers that came before are known again, and mean just what they would if
parsed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import trio
import trio.testing
from lookup_fakes import CONNECT, FAILED, asked, connected, host_port, lookup, lookup_response

from lookup.connections.broker_connection import BrokerConnection, ConnectionSettings
from proto import commands
from proto.broker_handshake import Connected
from proto.frames import Frame, FrameDecoder
from proto.lookup_answers import AnswerTemplates, BrokerAnswer, ClientAnswer
from proto.pulsar_pb2 import BaseCommand
from proxy.runtime.network.broker_link import BrokerLink

Heard = list[tuple[str, str]]
"""Which topic was asked for, and the URL or the error's text that came."""


class Asking:
    def __init__(self, topic: str, heard: Heard, *, ready: bool = True) -> None:
        self.proxy_id = b""
        self._topic, self._heard, self._ready = topic, heard, ready

    def on_broker_answer(self, answer: BrokerAnswer | None) -> None:
        if answer is None:
            self._heard.append((self._topic, "lost"))
            return
        body = answer.command.lookup_topic_response
        self._heard.append((self._topic, body.broker_service_url or body.message or answer.command.error.message))
        if self._ready and body.response == CONNECT and answer.client_answer is None:
            copy = BaseCommand()
            copy.CopyFrom(answer.command)
            answer.client_answer = ClientAnswer(copy)


class Line:
    """A connection, and the bytes at the broker's end."""

    def __init__(self, nursery: trio.Nursery, shapes: AnswerTemplates) -> None:
        ours, self.broker = trio.testing.memory_stream_pair()
        greeting = connected()
        link = BrokerLink(
            host_port("b0"), ours, Connected(Frame(greeting.SerializeToString()), greeting.connected, b"")
        )
        self.connection = BrokerConnection(
            host_port("broker"),
            link,
            ConnectionSettings(65536, keep_alive_s=30.0, silence_s=2.5, renew_at=float("inf"), answer_challenge=None),
            shapes,
        )
        self._decoder = FrameDecoder(max_frame_bytes=65536)
        nursery.start_soon(self.connection.run)

    def ask(self, topic: str, heard: Heard, *, ready: bool = True) -> None:
        self.connection.send_request(asked(lookup(topic)), Asking(topic, heard, ready=ready), trio.current_time())

    async def requests(self, count: int) -> list[BaseCommand]:
        found: list[BaseCommand] = []
        while len(found) < count:
            frame = self._decoder.next_frame()
            if frame is None:
                self._decoder.receive_data(await self.broker.receive_some(65536))
            else:
                found.append(commands.parse_command(frame.command))
        return found


Open = Callable[[AnswerTemplates], Awaitable[Line]]


@pytest.fixture
async def open_line(nursery: trio.Nursery) -> AsyncIterator[Open]:
    async def opened(shapes: AnswerTemplates) -> Line:
        line = Line(nursery, shapes)
        await trio.testing.wait_all_tasks_blocked()
        return line

    yield opened
    nursery.cancel_scope.cancel()


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What was parsed."""
    seen: list[bytes] = []
    parse_command = commands.parse_command

    def parse(data: bytes) -> BaseCommand:
        seen.append(data)
        return parse_command(data)

    monkeypatch.setattr("lookup.connections.broker_connection.commands.parse_command", parse)
    return seen


def mixed(requests: list[BaseCommand]) -> bytes:
    """Answers to five requests: of two kinds that are known, one that is not, an error, and more between them."""
    urls = ("pulsar://b0:6650", "pulsar://b1:6650", "pulsar://new:6650")
    said = [
        commands.encode(lookup_response(requests[0], CONNECT, urls[0])),
        commands.pong(),
        commands.encode(lookup_response(requests[1], CONNECT, urls[1])),
        commands.encode(lookup_response(requests[2], FAILED, error=4, message="no")),
        commands.error(requests[3].lookup_topic.request_id, 6, "?"),
        commands.encode(lookup_response(requests[0], CONNECT, urls[0])),  # again: no request waits
        commands.encode(lookup_response(requests[4], CONNECT, urls[2])),
    ]
    return b"".join(said)


EXPECTED = [
    ("t0", "pulsar://b0:6650"),
    ("t1", "pulsar://b1:6650"),
    ("t2", "no"),
    ("t3", "?"),
    ("t4", "pulsar://new:6650"),
]


async def learned(open_line: Open) -> AnswerTemplates:
    """What a first connection leaves known."""
    shapes, heard = AnswerTemplates(), Heard()
    line = await open_line(shapes)
    for number in range(2):
        line.ask(f"t{number}", heard)
    for number, request in enumerate(await line.requests(2)):
        await line.broker.send_all(commands.encode(lookup_response(request, CONNECT, f"pulsar://b{number}:6650")))
    await trio.testing.wait_all_tasks_blocked()
    assert len(heard) == 2
    return shapes


async def test_a_known_answer_is_not_parsed_again_on_any_connection(open_line: Open, parsed: list[bytes]) -> None:
    shapes = await learned(open_line)
    line, heard = await open_line(shapes), Heard()
    for number in range(100):
        line.ask(f"t{number}", heard)
    requests = await line.requests(100)
    parsed.clear()
    said = [
        commands.encode(lookup_response(request, CONNECT, f"pulsar://b{number % 2}:6650"))
        for number, request in enumerate(requests)
    ]
    await line.broker.send_all(b"".join(said))
    await trio.testing.wait_all_tasks_blocked()
    assert heard == [(f"t{number}", f"pulsar://b{number % 2}:6650") for number in range(100)]
    assert parsed == []


@pytest.mark.parametrize("known", [True, False])
async def test_however_answers_are_cut_on_the_way(open_line: Open, parsed: list[bytes], known: bool) -> None:
    """At every byte in two, and once in single bytes."""
    shapes = await learned(open_line) if known else AnswerTemplates()
    size = 0
    cut = 1
    while not size or cut <= size:
        line, heard = await open_line(shapes if known else AnswerTemplates()), Heard()
        for number in range(5):
            line.ask(f"t{number}", heard)
        data = mixed(await line.requests(5))
        size = len(data)
        pieces = [data[:cut], data[cut:]] if cut < size else [bytes([byte]) for byte in data]
        for piece in pieces:
            await line.broker.send_all(piece)
            await trio.testing.wait_all_tasks_blocked()
        assert heard == EXPECTED, cut
        assert not line.connection.closed
        assert line.connection.idle
        cut += 1
        line.connection.close()


async def test_bytes_of_a_known_answer_within_another_answer_are_no_answer(open_line: Open) -> None:
    """Security: a client that chooses part of an answer (a schema, a topic's name) must not answer others by it."""
    line, heard = await open_line(await learned(open_line)), Heard()
    for topic in ("schema", "victim"):
        line.ask(topic, heard)
    first, second = await line.requests(2)
    within = commands.encode(lookup_response(second, CONNECT, "pulsar://b0:6650"))
    answer = lookup_response(first, CONNECT, "pulsar://b0:6650")
    answer.lookup_topic_response.MergeFromString(b"\xfa\x01" + bytes([len(within)]) + within)
    data = commands.encode(answer)
    cut = data.index(within)
    for piece in (data[:cut], data[cut:]):
        await line.broker.send_all(piece)
        await trio.testing.wait_all_tasks_blocked()
    assert heard == [("schema", "pulsar://b0:6650")]
    assert not line.connection.closed


async def test_an_answer_that_was_not_prepared_is_parsed_each_time(open_line: Open, parsed: list[bytes]) -> None:
    """A redirect, a topic list: it is looked at again each time."""
    line, heard = await open_line(AnswerTemplates()), Heard()
    for _ in range(3):
        line.ask("t", heard, ready=False)
        [request] = await line.requests(1)
        parsed.clear()
        await line.broker.send_all(commands.encode(lookup_response(request, CONNECT, "pulsar://b0:6650")))
        await trio.testing.wait_all_tasks_blocked()
        assert len(parsed) == 1
    assert len(heard) == 3


async def test_each_waiting_task_gets_its_own_copy_of_a_known_answer(open_line: Open) -> None:
    """The answer is changed on its way to the client; the next request must not see that."""
    shapes = await learned(open_line)
    line = await open_line(shapes)
    answers: list[BaseCommand] = []

    async def ask() -> None:
        answers.append(await line.connection.request_answer(asked(lookup("t"))))

    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(ask)
            [request] = await line.requests(1)
            await line.broker.send_all(commands.encode(lookup_response(request, CONNECT, "pulsar://b0:6650")))
            await trio.testing.wait_all_tasks_blocked()
            answers[-1].lookup_topic_response.broker_service_url = "changed"
            answers[-1].lookup_topic_response.proxy_through_service_url = True
    heard = Heard()
    line.ask("t", heard)
    [request] = await line.requests(1)
    await line.broker.send_all(commands.encode(lookup_response(request, CONNECT, "pulsar://b0:6650")))
    await trio.testing.wait_all_tasks_blocked()
    assert heard == [("t", "pulsar://b0:6650")]


async def test_a_known_answer_with_an_id_that_is_none_of_ours_is_dropped(open_line: Open) -> None:
    shapes = await learned(open_line)
    line, heard = await open_line(shapes), Heard()
    line.ask("t", heard)
    [request] = await line.requests(1)
    other: Any = BaseCommand()
    other.CopyFrom(request)
    other.lookup_topic.request_id += 1
    for one in (other, request):
        await line.broker.send_all(commands.encode(lookup_response(one, CONNECT, f"pulsar://b{one is request:d}:6650")))
    await trio.testing.wait_all_tasks_blocked()
    assert heard == [("t", "pulsar://b1:6650")]
