"""One connection to a broker, shared by all lookups of one principal: requests multiplexed by request id."""

from collections.abc import Awaitable, Callable
from typing import Protocol

import trio

from lookup.connections.losses import Loss
from proto import commands
from proto.addresses import HostPort
from proto.errors import RemoteProtocolError
from proto.frames import FrameDecoder
from proto.lookup_answers import AnswerShapes, BrokerAnswer
from proto.lookup_kinds import LookupKind, in_short, response_request_id
from proto.lookup_requests import Request, number_of, request_numbers
from proto.pulsar_pb2 import BaseCommand
from proxy.common.logs import get_logger
from proxy.runtime.loop.reactor import read_all
from proxy.runtime.loop.tick import current_tick
from proxy.runtime.network.broker_link import BrokerLink
from proxy.runtime.rpc.client import RpcError
from proxy.runtime.rpc.writer import BatchedWriter, WriterFull

LOOKS_PER_PATIENCE = 8

SMALL_ANSWER_BYTES_MAX = 16 * 1024
"""Of an answer for which no room was made: thousands of them may be under way."""

WRITE_BUFFER_BYTES_MAX = 16 * 1024 * 1024

AnswerChallenge = Callable[[bytes], Awaitable[tuple[str, bytes]]]


class Asked(Protocol):
    """Who waits for an answer."""

    kind: LookupKind
    """What kind of request it is."""
    number: bytes
    """The id of our own under which it was asked."""

    def answered(self, answer: BrokerAnswer | None) -> None:
        """Take the answer, or None where the connection was lost; called once, in the task that reads."""
        ...


class BrokerConnectionLost(Exception):
    """The connection ended before the answer came; whether the broker saw the request is unknown.

    ``loss``: the request was under way, and perhaps the broker closed the connection upon it.
    """

    def __init__(self, message: str, loss: Loss | None = None) -> None:
        super().__init__(message)
        self.loss = loss


class BrokerConnection:
    """Ask with ``ask`` or ``request``; ``run`` reads the answers until the connection ends.

    ``keep_alive_s``: how long it may be silent before it is asked whether it is there; ``patience_s``: the same while
    somebody waits for an answer. ``renew_at``: when another one should take its place, in Trio's time. ``shapes``:
    answers that came before, also over other connections.
    """

    def __init__(
        self,
        broker: HostPort,
        link: BrokerLink,
        *,
        max_frame_bytes: int,
        keep_alive_s: float,
        patience_s: float,
        renew_at: float,
        answer_challenge: AnswerChallenge | None,
        shapes: AnswerShapes,
    ) -> None:
        self.broker = broker
        self.last_used = trio.current_time()
        self.heard_at = self.last_used
        self.closed = False
        self.loss: Loss | None = None
        """What was under way when the broker ended it; None where that was nothing, or it ended for another reason."""
        self._link = link
        self._turn = current_tick()
        self._keep_alive_s = keep_alive_s
        self._patience_s = patience_s
        self._waiting_since = 0.0
        self._pinged_at = float("-inf")
        self._asked = trio.Event()
        self.renew_at = renew_at
        self._credentials = answer_challenge
        self._decoder = FrameDecoder(max_frame_bytes=max_frame_bytes)
        self._writer = BatchedWriter(link.stream, max_buffered_bytes=WRITE_BUFFER_BYTES_MAX)
        self._shapes = shapes
        self._pending: dict[bytes, Asked] = {}
        self._numbers = request_numbers()
        self._unsent: list[bytes] = []
        self._scope = trio.CancelScope()
        self._retired = False
        self._retires_once_asked = False
        self._no_request_to_blame = False

    @property
    def idle(self) -> bool:
        """Whether nobody waits for an answer."""
        return not self._pending

    def ask(self, request: Request, asked: Asked, now: float) -> None:
        """Send a request at the end of the turn, under an id of our own. Raises BrokerConnectionLost."""
        if self.closed:
            raise BrokerConnectionLost(f"{self.broker} closed the connection")
        asked.number = number = next(self._numbers)
        self.last_used = now
        if self._retires_once_asked:
            self._retired = True
        if not self._pending:
            self._waiting_since = now
            self._asked.set()
        self._pending[number] = asked
        self._unsent.append(request.numbered(number))
        if len(self._unsent) == 1:
            self._turn.schedule_flush(self)

    def flush(self) -> None:
        """Send what was asked in this turn."""
        requests, self._unsent = self._unsent, []
        try:
            self._writer.write(b"".join(requests))
        except WriterFull:
            self._lose(list(self._pending)[-len(requests) :])

    def forget(self, asked: Asked) -> None:
        """Nobody waits any more; an answer that still comes is dropped."""
        self._pending.pop(asked.number, None)
        if self._retires_once_asked and self._retired and not self._pending:
            self.close()

    async def request(self, request: Request) -> BaseCommand:
        """Ask, and wait for the answer. Raises BrokerConnectionLost."""
        asked = _Waiting(request.kind)
        self.ask(request, asked, trio.current_time())
        try:
            await asked.done.wait()
        finally:
            self.forget(asked)
        if asked.answer is None:
            why = "closed the connection" if self.closed else "does not take requests"
            raise BrokerConnectionLost(f"{self.broker} {why}", self.loss)
        return asked.answer

    async def run(self) -> None:
        """Read answers and keep the connection alive, until the broker ends it or ``close`` is called."""
        reason = "the broker closed it"
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._writer.run)
                    nursery.start_soon(self._keep_alive)
                    await self._read(nursery)
                    nursery.cancel_scope.cancel()
        except* (trio.BrokenResourceError, RemoteProtocolError, RpcError, WriterFull) as group:
            reason = str(group.exceptions[0]) or type(group.exceptions[0]).__name__
        except* Exception as group:  # noqa: BLE001 -- a defect that one broker's answer meets must not end the worker
            get_logger().error("a connection for lookups met a defect", broker=str(self.broker), exc_info=group)
        finally:
            self.closed = True
            if self._pending and not self._no_request_to_blame:
                self.loss = Loss(self.broker, len(self._pending))
            self._lose(list(self._pending))
            await trio.aclose_forcefully(self._link.stream)
            get_logger().debug("a connection for lookups has ended", broker=str(self.broker), reason=reason)

    def retire(self) -> None:
        """Another one has taken its place: end once nobody waits for an answer."""
        self._retired = True
        if not self._pending:
            self.close()

    def retire_once_asked(self) -> None:
        """It is there for a few requests only: end once these are answered."""
        self._retires_once_asked = True

    def close(self) -> None:
        """End the connection; who still waits gets BrokerConnectionLost."""
        self.closed = self._no_request_to_blame = True
        self._scope.cancel()

    def _lose(self, numbers: list[bytes]) -> None:
        """Tell those who wait that no answer will come."""
        with self._turn:
            for number in numbers:
                asked = self._pending.pop(number, None)
                if asked is not None:
                    asked.answered(None)

    async def _read(self, nursery: trio.Nursery) -> None:
        def on_data(data: bytes | bytearray) -> None:
            self._receive(bytes(data), nursery)
            if self._retired and not self._pending:
                self.close()

        with self._turn:
            on_data(self._link.connected.trailing_data)
        await read_all(self._link.stream, on_data)

    def _receive(self, data: bytes, nursery: trio.Nursery) -> None:
        self.heard_at = trio.current_time()
        while data:
            if self._decoder.is_empty:
                data = data[self._take_known(data) :]
                if not data:
                    return
            self._decoder.receive_data(data)
            frame = self._decoder.next_frame()
            if frame is None:
                return
            self._take(frame.command, nursery)
            data = self._decoder.take_unread_data()

    def _take_known(self, data: bytes) -> int:
        """Take the answers in front that came before, but for their ids, and are not parsed again; how many bytes."""
        find, pending, at = self._shapes.find, self._pending, 0
        while (found := find(data, at)) is not None:
            answer, number, at = found
            asked = pending.pop(number, None)
            if asked is not None:
                asked.answered(answer)
        return at

    def _take(self, data: bytes, nursery: trio.Nursery) -> None:
        command = commands.parse_command(data)
        if command.type == BaseCommand.PING:
            self._writer.write(commands.pong())
        elif command.type == BaseCommand.AUTH_CHALLENGE:
            nursery.start_soon(self._answer_challenge, bytes(command.auth_challenge.challenge.auth_data))
        else:
            self._take_answer(data, command)

    def _take_answer(self, data: bytes, command: BaseCommand) -> None:
        request_id = response_request_id(command)
        number = None if request_id is None else number_of(request_id)
        asked = None if number is None else self._pending.pop(number, None)
        if asked is not None:
            if len(data) > SMALL_ANSWER_BYTES_MAX and not asked.kind.may_be_large:
                get_logger().warning(
                    "a broker's answer is too large", broker=str(self.broker), request=asked.kind.name, bytes=len(data)
                )
                command = in_short(command, asked.kind)
            answer = BrokerAnswer(command)
            asked.answered(answer)
            if answer.ready is not None:
                self._shapes.learn(data, answer)
        elif command.type == BaseCommand.ERROR and request_id == commands.NO_REQUEST_ID:
            raise RemoteProtocolError(f"{self.broker} ended the connection: {command.error.message}")

    async def _answer_challenge(self, challenge: bytes) -> None:
        """The broker wants fresh credentials (PIP-55): the proxy's own, or a client's, which nobody here has."""
        if self._credentials is None:
            raise RemoteProtocolError(f"{self.broker} wants fresh credentials of a client")
        method, data = await self._credentials(challenge)
        version = commands.PROTOCOL_VERSION
        self._writer.write(commands.auth_response("pulsar-trio-proxy", version, method, data))

    async def _keep_alive(self) -> None:
        """Ping a broker that says nothing; one that then says nothing either is given up.

        Where somebody waits for an answer the patience is short: a broker that has frozen would otherwise take all of a
        lookup's time, and another one none.
        """
        while True:
            now = trio.current_time()
            if self._pending:
                limit_s, since = self._patience_s, max(self.heard_at, self._waiting_since)
            else:
                limit_s, since = self._keep_alive_s, self.heard_at
            if now - since >= 2 * limit_s:
                self._no_request_to_blame = True  # the broker closed nothing
                raise RemoteProtocolError(f"{self.broker} has been silent for {now - since:.1f} s")
            if now - max(since, self._pinged_at) >= limit_s:
                self._pinged_at = now
                self._writer.write(commands.ping())
            await self._until_next_look(limit_s)

    async def _until_next_look(self, limit_s: float) -> None:
        """An idle connection sleeps for long, since there may be many; but not once somebody waits for an answer."""
        if self._pending:
            await trio.sleep(limit_s / LOOKS_PER_PATIENCE)
            return
        self._asked = trio.Event()
        with trio.move_on_after(limit_s / 2):
            await self._asked.wait()


class _Waiting:
    """A task that waits for an answer."""

    def __init__(self, kind: LookupKind) -> None:
        self.kind = kind
        self.number = b""
        self.done = trio.Event()
        self.answer: BaseCommand | None = None

    def answered(self, answer: BrokerAnswer | None) -> None:
        if answer is not None:
            self.answer = BaseCommand()
            self.answer.CopyFrom(answer.command)
        self.done.set()
