"""One connection to a broker, shared by all lookups of one principal: requests multiplexed by request id."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import trio

from lookup.connections.losses import ConnectionLoss
from lookup.errors import LookupWorkerError
from proto import commands
from proto.addresses import HostPort
from proto.errors import RemoteProtocolError
from proto.frames import FrameDecoder
from proto.lookup_answers import AnswerTemplates, BrokerAnswer
from proto.lookup_kinds import LookupKind, response_request_id, shorten_answer
from proto.lookup_requests import LookupRequest, encode_proxy_id, proxy_request_ids
from proto.pulsar_pb2 import BaseCommand
from proxy.common.logs import get_logger
from proxy.runtime.loop.reactor import read_all
from proxy.runtime.loop.tick import current_tick
from proxy.runtime.network.broker_link import BrokerLink
from proxy.runtime.rpc.errors import RpcError
from proxy.runtime.rpc.writer import BatchedWriter, WriterFull

CHECKS_PER_SILENCE = 8

SMALL_ANSWER_BYTES_MAX = 16 * 1024
"""Of an answer for which no room was made: thousands of them may be under way."""

WRITE_BUFFER_BYTES_MAX = 16 * 1024 * 1024

AnswerChallenge = Callable[[bytes], Awaitable[tuple[str, bytes]]]


class AnswerReceiver(Protocol):
    """Receiver of a broker's answer to one request."""

    kind: LookupKind
    """What kind of request it is."""
    proxy_id: bytes
    """The id of our own under which it was asked."""

    def on_broker_answer(self, answer: BrokerAnswer | None) -> None:
        """Handle the answer, or None where the connection was lost; called once, in the task that reads."""
        ...


class BrokerConnectionLost(LookupWorkerError):
    """The connection ended before the answer came; whether the broker saw the request is unknown.

    ``loss``: the request was under way, and perhaps the broker closed the connection upon it.
    """

    def __init__(self, message: str, loss: ConnectionLoss | None = None) -> None:
        super().__init__(message)
        self.loss = loss


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """Settings of one connection to a broker."""

    max_frame_bytes: int
    keep_alive_s: float
    """Longest silence of the broker before it is pinged."""
    silence_s: float
    """The same while a request waits for an answer."""
    renew_at: float
    """When another connection should replace this one, in Trio's time."""
    answer_challenge: AnswerChallenge | None
    """Makes the answer to a challenge; None where the broker wants a client's fresh credentials, which are not here."""


class BrokerConnection:
    """Connection to a broker that multiplexes the lookups of one principal.

    ``send_request`` and ``request_answer`` send; ``run`` reads the answers until the connection ends.
    """

    def __init__(
        self,
        broker: HostPort,
        link: BrokerLink,
        settings: ConnectionSettings,
        answer_templates: AnswerTemplates,
    ) -> None:
        """``answer_templates``: answers that came before, also over other connections."""
        self.broker = broker
        self.last_used_at = trio.current_time()
        self.last_received_at = self.last_used_at
        self.closed = False
        self.retired = False
        """Whether it takes no new requests; those under way are still answered."""
        self.loss: ConnectionLoss | None = None
        """What was under way when the broker ended it; None where that was nothing, or it ended for another reason."""
        self._link = link
        self._tick = current_tick()
        self._keep_alive_s = settings.keep_alive_s
        self._silence_s = settings.silence_s
        self._waiting_since = 0.0
        self._pinged_at = float("-inf")
        self._request_sent = trio.Event()
        self.renew_at = settings.renew_at
        self._make_challenge_answer = settings.answer_challenge
        self._decoder = FrameDecoder(max_frame_bytes=settings.max_frame_bytes)
        self._writer = BatchedWriter(link.stream, max_buffered_bytes=WRITE_BUFFER_BYTES_MAX)
        self._answer_templates = answer_templates
        self._pending: dict[bytes, AnswerReceiver] = {}
        self._proxy_ids = proxy_request_ids()
        self._unsent: list[bytes] = []
        self._scope = trio.CancelScope()
        self._retires_after_use = False
        self._no_request_is_to_blame = False

    @property
    def idle(self) -> bool:
        """Return True if no request waits for an answer."""
        return not self._pending

    def send_request(self, request: LookupRequest, receiver: AnswerReceiver, now: float) -> None:
        """Send a request at the end of the event loop's tick, under one of the proxy's own ids.

        Raises BrokerConnectionLost where the connection is closed; later losses are reported to ``receiver``.
        """
        if self.closed:
            raise BrokerConnectionLost(f"{self.broker} closed the connection")
        receiver.proxy_id = number = next(self._proxy_ids)
        self.last_used_at = now
        if self._retires_after_use:
            self.retired = True
        if not self._pending:
            self._waiting_since = now
            self._request_sent.set()
        self._pending[number] = receiver
        self._unsent.append(request.frame_with_id(number))
        if len(self._unsent) == 1:
            self._tick.schedule_flush(self)

    def flush(self) -> None:
        """Write the requests of this tick in one piece."""
        requests, self._unsent = self._unsent, []
        try:
            self._writer.write(b"".join(requests))
        except WriterFull:
            self._fail_requests(list(self._pending)[-len(requests) :])

    def forget_request(self, receiver: AnswerReceiver) -> None:
        """Drop a request whose answer is no longer wanted; an answer that still comes is ignored."""
        self._pending.pop(receiver.proxy_id, None)
        if self.retired and not self._pending:
            self.close()

    async def request_answer(self, request: LookupRequest) -> BaseCommand:
        """Ask, and wait for the answer. Raises BrokerConnectionLost."""
        asked = _WaitingTask(request.kind)
        self.send_request(request, asked, trio.current_time())
        try:
            await asked.done.wait()
        finally:
            self.forget_request(asked)
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
                    await self._read_answers(nursery)
                    nursery.cancel_scope.cancel()
        except* (trio.BrokenResourceError, RemoteProtocolError, RpcError, WriterFull) as group:
            reason = str(group.exceptions[0]) or type(group.exceptions[0]).__name__
        except* Exception as group:  # noqa: BLE001 -- a defect that one broker's answer meets must not end the worker
            get_logger().error("a connection for lookups met a defect", broker=str(self.broker), exc_info=group)
        finally:
            self.closed = True
            if self._pending and not self._no_request_is_to_blame:
                self.loss = ConnectionLoss(self.broker, len(self._pending))
            self._fail_requests(list(self._pending))
            await trio.aclose_forcefully(self._link.stream)
            get_logger().debug("a connection for lookups has ended", broker=str(self.broker), reason=reason)

    def retire_when_idle(self) -> None:
        """Take no part in new lookups; close once no request waits for an answer."""
        self.retired = True
        if not self._pending:
            self.close()

    def retire_after_use(self) -> None:
        """Close once the requests that are about to be sent are answered: it serves one suspect group only."""
        self._retires_after_use = True

    def close(self) -> None:
        """Close the connection; requests that still wait end with BrokerConnectionLost."""
        self.closed = self._no_request_is_to_blame = True
        self._scope.cancel()

    def _fail_requests(self, numbers: list[bytes]) -> None:
        """Report to the receivers of these requests that no answer will come."""
        with self._tick:
            for number in numbers:
                asked = self._pending.pop(number, None)
                if asked is not None:
                    asked.on_broker_answer(None)

    async def _read_answers(self, nursery: trio.Nursery) -> None:
        def on_data(data: bytes | bytearray) -> None:
            self._receive_data(bytes(data), nursery)
            if self.retired and not self._pending:
                self.close()

        with self._tick:
            on_data(self._link.connected.trailing_data)
        await read_all(self._link.stream, on_data)

    def _receive_data(self, data: bytes, nursery: trio.Nursery) -> None:
        self.last_received_at = trio.current_time()
        while data:
            if self._decoder.is_empty:
                data = data[self._deliver_known_answers(data) :]
                if not data:
                    return
            self._decoder.receive_data(data)
            frame = self._decoder.next_frame()
            if frame is None:
                return
            self._handle_command(frame.command, nursery)
            data = self._decoder.take_unread_data()

    def _deliver_known_answers(self, data: bytes) -> int:
        """Deliver the leading answers that match a template without parsing them; return how many bytes they took."""
        find, pending, at = self._answer_templates.find_answer, self._pending, 0
        while (found := find(data, at)) is not None:
            answer, number, at = found
            asked = pending.pop(number, None)
            if asked is not None:
                asked.on_broker_answer(answer)
        return at

    def _handle_command(self, data: bytes, nursery: trio.Nursery) -> None:
        command = commands.parse_command(data)
        if command.type == BaseCommand.PING:
            self._writer.write(commands.pong())
        elif command.type == BaseCommand.AUTH_CHALLENGE:
            self._on_challenge(bytes(command.auth_challenge.challenge.auth_data), nursery)
        else:
            self._handle_answer(data, command)

    def _on_challenge(self, challenge: bytes, nursery: trio.Nursery) -> None:
        """Have a challenge answered; where it is for a client, whose credentials have ended, retire the connection.

        That client's next request brings its fresh credentials, and is sent over another connection. Until the broker
        closes this one, which is no request's fault, it answers what is under way.
        """
        if self._make_challenge_answer is not None:
            nursery.start_soon(self._answer_challenge, self._make_challenge_answer, challenge)
        else:
            self._no_request_is_to_blame = True
            self.retire_when_idle()

    def _handle_answer(self, data: bytes, command: BaseCommand) -> None:
        request_id = response_request_id(command)
        number = None if request_id is None else encode_proxy_id(request_id)
        asked = None if number is None else self._pending.pop(number, None)
        if asked is not None:
            if len(data) > SMALL_ANSWER_BYTES_MAX and not asked.kind.may_be_large:
                get_logger().warning(
                    "a broker's answer is too large", broker=str(self.broker), request=asked.kind.name, bytes=len(data)
                )
                command = shorten_answer(command, asked.kind)
            answer = BrokerAnswer(command)
            asked.on_broker_answer(answer)
            if answer.client_answer is not None:
                self._answer_templates.learn_answer(data, answer)
        elif command.type == BaseCommand.ERROR and request_id == commands.NO_REQUEST_ID:
            raise RemoteProtocolError(f"{self.broker} ended the connection: {command.error.message}")

    async def _answer_challenge(self, make_answer: AnswerChallenge, challenge: bytes) -> None:
        """Send the proxy's fresh credentials that the broker wants (PIP-55)."""
        method, data = await make_answer(challenge)
        version = commands.PROTOCOL_VERSION
        self._writer.write(commands.auth_response("pulsar-trio-proxy", version, method, data))

    async def _keep_alive(self) -> None:
        """Ping a silent broker, and give it up if it stays silent.

        While a request waits, the limit is shorter: a broker that has frozen would otherwise use up all of the lookup's
        time, and leave none for another broker.
        """
        while True:
            now = trio.current_time()
            if self._pending:
                limit_s, since = self._silence_s, max(self.last_received_at, self._waiting_since)
            else:
                limit_s, since = self._keep_alive_s, self.last_received_at
            if now - since >= 2 * limit_s:
                self._no_request_is_to_blame = True  # the broker closed nothing
                raise RemoteProtocolError(f"{self.broker} has been silent for {now - since:.1f} s")
            if now - max(since, self._pinged_at) >= limit_s:
                self._pinged_at = now
                self._writer.write(commands.ping())
            await self._wait_for_next_check(limit_s)

    async def _wait_for_next_check(self, limit_s: float) -> None:
        """Sleep until the next check: long on an idle connection, since there may be many, but woken by a request."""
        if self._pending:
            await trio.sleep(limit_s / CHECKS_PER_SILENCE)
            return
        self._request_sent = trio.Event()
        with trio.move_on_after(limit_s / 2):
            await self._request_sent.wait()


class _WaitingTask:
    """Receiver that wakes a task with the answer."""

    def __init__(self, kind: LookupKind) -> None:
        self.kind = kind
        self.proxy_id = b""
        self.done = trio.Event()
        self.answer: BaseCommand | None = None

    def on_broker_answer(self, answer: BrokerAnswer | None) -> None:
        if answer is not None:
            self.answer = BaseCommand()
            self.answer.CopyFrom(answer.command)
        self.done.set()
