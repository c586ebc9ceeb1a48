"""Clients that ask many things at once, and keep a ledger of what they asked and what came back."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import trio

from proto.frames import FrameDecoder, encode_frame
from proto.pulsar_pb2 import BaseCommand, ServerError

from .schema import LOOKUP_FAILED, Command
from .waiting import BUSY_S
from .wire import frame

HOST = "127.0.0.1"
RETRIABLE = frozenset({ServerError.ServiceNotReady, ServerError.TooManyRequests, ServerError.MetadataError})
"""Clients ask again upon these. The last is a broker's own: it looked for the load of another that has just died."""
_FRAME_BYTES_MAX = 64 * 1024 * 1024
_CHUNK_BYTES = 1 << 18
_METADATA_FAILED = 1
_ANSWERS = {
    BaseCommand.LOOKUP_RESPONSE: "lookup_topic_response",
    BaseCommand.PARTITIONED_METADATA_RESPONSE: "partition_metadata_response",
    BaseCommand.GET_TOPICS_OF_NAMESPACE_RESPONSE: "get_topics_of_namespace_response",
    BaseCommand.ERROR: "error",
}


@dataclass(eq=False)
class SentRequest:
    """One request and what became of it; times are Trio's."""

    request_id: int
    data: bytes
    topic: str
    sent_at: float = 0.0
    answered_at: float | None = None
    answer: Any = None
    size_bytes: int = 0
    done: trio.Event = field(default_factory=trio.Event)

    @property
    def took_s(self) -> float:
        """From sending to the answer; without an answer it is infinite."""
        return float("inf") if self.answered_at is None else self.answered_at - self.sent_at

    @property
    def is_answered(self) -> bool:
        """Whether an answer has come, be it an error."""
        return self.answered_at is not None

    @property
    def error(self) -> tuple[int, str] | None:
        """Code and text, where the answer is an error."""
        body = getattr(self.answer, _ANSWERS[self.answer.type])
        match self.answer.type:
            case BaseCommand.LOOKUP_RESPONSE:
                failed = body.response == LOOKUP_FAILED
            case BaseCommand.PARTITIONED_METADATA_RESPONSE:
                failed = body.response == _METADATA_FAILED
            case kind:
                failed = kind == BaseCommand.ERROR
        return (body.error, body.message) if failed else None


_ids = itertools.count(1)


def lookup(topic: str) -> SentRequest:
    """Which broker has the topic?"""
    request_id = next(_ids)
    body = {"topic": topic, "request_id": request_id}
    return SentRequest(request_id, frame(BaseCommand.LOOKUP, lookup_topic=body), topic)


def partitions(topic: str) -> SentRequest:
    """How many partitions has the topic? It is not created by that."""
    request_id = next(_ids)
    body = {"topic": topic, "request_id": request_id, "metadata_auto_creation_enabled": False}
    return SentRequest(request_id, frame(BaseCommand.PARTITIONED_METADATA, partition_metadata=body), topic)


def topics_of_namespace(namespace: str) -> SentRequest:
    """Which topics are there?"""
    request_id = next(_ids)
    command = BaseCommand(type=BaseCommand.GET_TOPICS_OF_NAMESPACE)
    command.get_topics_of_namespace.request_id = request_id
    command.get_topics_of_namespace.namespace = namespace
    return SentRequest(request_id, encode_frame(command.SerializeToString()), namespace)


class Questioner:
    """A connection that has said CONNECT. ``run`` reads; nothing here waits unless it says so."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.asked: list[SentRequest] = []
        self.order: list[int] = []
        """The request ids of the answers, as they came."""
        self.strays: list[Any] = []
        """Answers to nothing that we asked, or to something that was answered before; other commands."""
        self.ended = ""
        self._stream = stream
        self._open: dict[int, SentRequest] = {}
        self._decoder = FrameDecoder(max_frame_bytes=_FRAME_BYTES_MAX)

    @property
    def in_flight(self) -> int:
        """Questions without an answer."""
        return len(self._open)

    async def connect(self, **fields: Any) -> None:
        """Say CONNECT (``token=…``: a token); the answer must be CONNECTED."""
        if "token" in fields:
            fields |= {"auth_method_name": "token", "auth_data": fields.pop("token").encode()}
        features = {"supports_get_partitioned_metadata_without_auto_creation": True}
        hello = {"client_version": "load", "protocol_version": 19, "feature_flags": features, **fields}
        await self._stream.send_all(frame(BaseCommand.CONNECT, connect=hello))
        while (received := self._decoder.next_frame()) is None:
            data = await self._stream.receive_some(_CHUNK_BYTES)
            assert data, "closed before CONNECTED"
            self._decoder.receive_data(data)
        command = Command.FromString(received.command)
        assert command.type == BaseCommand.CONNECTED, command

    async def ask(self, requests: Sequence[SentRequest]) -> None:
        """Send them all in one go."""
        now = trio.current_time()
        for request in requests:
            request.sent_at = now
            self._open[request.request_id] = request
        self.asked += requests
        try:
            await self._stream.send_all(b"".join(request.data for request in requests))
        except trio.BrokenResourceError:
            self.ended = self.ended or "reset while sending"

    async def run(self) -> None:
        """Take answers until cancelled, or until the other side ends: then ``ended`` says so."""
        try:
            while data := await self._stream.receive_some(_CHUNK_BYTES):
                self._decoder.receive_data(data)
                while (received := self._decoder.next_frame()) is not None:
                    await self._take(received.command)
            self.ended = self.ended or "end of stream"
        except trio.BrokenResourceError:
            self.ended = self.ended or "reset"

    async def _take(self, data: bytes) -> None:
        command = Command.FromString(data)
        if command.type == BaseCommand.PING:
            await self._stream.send_all(frame(BaseCommand.PONG, pong={}))
            return
        if command.type == BaseCommand.GET_TOPICS_OF_NAMESPACE_RESPONSE:
            command = BaseCommand.FromString(data)
        name = _ANSWERS.get(command.type)
        request = None if name is None else self._open.pop(getattr(command, name).request_id, None)
        if request is None:
            self.strays.append(command)
            return
        self.order.append(request.request_id)
        request.answer, request.answered_at, request.size_bytes = command, trio.current_time(), len(data)
        request.done.set()


@asynccontextmanager
async def questioner(port: int, *, reads: bool = True, **fields: Any) -> AsyncIterator[Questioner]:
    """A connection that reads in the background, unless it shall not."""
    async with await trio.open_tcp_stream(HOST, port) as stream, trio.open_nursery() as nursery:
        asking = Questioner(stream)
        await asking.connect(**fields)
        if reads:
            nursery.start_soon(asking.run)
        yield asking
        nursery.cancel_scope.cancel()


async def wait_for_answers(requests: Sequence[SentRequest], within_s: float) -> None:
    """Return when all are answered or the time is over."""
    with trio.move_on_after(within_s):
        for request in requests:
            await request.done.wait()


class Load:
    """Clients that look topics up without end, in a thread of their own. Use as a context manager.

    Each of ``clients`` sends up to ``batch`` lookups, then pauses, and has at most ``in_flight_max`` without an answer.
    After the block all are given ``patience_s`` for their last answers.
    """

    def __init__(
        self,
        port: int,
        topics: Sequence[str],
        *,
        clients: int,
        batch: int,
        pause_s: float,
        patience_s: float,
        in_flight_max: int = 1000,
        **fields: Any,
    ) -> None:
        self.askers: list[Questioner] = []
        self._plan = (port, topics, clients, batch, pause_s, patience_s, in_flight_max, fields)
        self._stop = threading.Event()
        self._running = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._in_thread)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._running.wait(BUSY_S), "not connected in time"
        assert self._error is None, self._error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        if kind is None and self._error is not None:
            raise self._error

    @property
    def requests(self) -> list[SentRequest]:
        """All that was asked."""
        return [request for asker in self.askers for request in list(asker.asked)]

    def _in_thread(self) -> None:
        try:
            trio.run(self._run)
        except BaseException as error:  # noqa: BLE001 -- __exit__ raises it
            self._error = error
        self._running.set()

    async def _run(self) -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(self._plan[2]):
                await nursery.start(self._one)
            self._running.set()

    async def _one(self, task_status: trio.TaskStatus[None]) -> None:
        port, topics, _, batch, pause_s, patience_s, in_flight_max, fields = self._plan
        async with questioner(port, **fields) as asker:
            self.askers.append(asker)
            task_status.started()
            while not self._stop.is_set() and not asker.ended:
                room = min(batch, in_flight_max - asker.in_flight)
                if room > 0:
                    await asker.ask([lookup(random.choice(topics)) for _ in range(room)])
                await trio.sleep(pause_s * random.uniform(0.5, 1.5))
            await wait_for_answers(asker.asked, patience_s)

    def assert_well(self, longest_s: float) -> tuple[int, int]:
        """No client saw its connection end; each request has one answer, in time, which is the topic's broker or an
        error upon which clients ask again. Returns the number of requests, and of those that failed.
        """
        assert [asker.ended for asker in self.askers if asker.ended] == []
        assert [asker.strays for asker in self.askers if asker.strays] == []
        requests = self.requests
        late = [request for request in requests if request.took_s > longest_s]
        assert not late, f"{len(late)} of {len(requests)} late, {late[0].topic}: {late[0].took_s} s, {late[0].answer}"
        errors = [request.error for request in requests if request.error is not None]
        assert {error[0] for error in errors} <= RETRIABLE, set(errors)
        return len(requests), len(errors)
