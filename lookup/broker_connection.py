"""One connection to a broker, shared by all lookups of one principal: requests multiplexed by request id."""

import itertools
from collections.abc import Awaitable, Callable

import trio

from lookup.turn import Turn
from proto import commands
from proto.addresses import HostPort
from proto.errors import RemoteProtocolError
from proto.frames import FrameDecoder, encode_frame
from proto.lookups import LookupKind, numbered_request, response_request_id
from proto.pulsar_pb2 import BaseCommand
from proxy.runtime.broker_link import BrokerLink
from proxy.runtime.logs import get_logger
from proxy.runtime.rpc_client import RpcError
from proxy.runtime.rpc_writer import BatchedWriter, WriterFull

LOOKS_PER_PATIENCE = 8

WRITE_BUFFER_BYTES_MAX = 16 * 1024 * 1024

OnAnswer = Callable[[BaseCommand | None], None]
AnswerChallenge = Callable[[bytes], Awaitable[tuple[str, bytes]]]


class BrokerConnectionLost(Exception):
    """The connection ended before the answer came; whether the broker saw the request is unknown."""


class BrokerConnection:
    """Ask with ``ask`` or ``request``; ``run`` reads the answers until the connection ends.

    ``keep_alive_s``: how long it may be silent before it is asked whether it is there; ``patience_s``: the same while
    somebody waits for an answer. ``renew_at``: when another one should take its place, in Trio's time.
    """

    def __init__(
        self,
        broker: HostPort,
        link: BrokerLink,
        turn: Turn,
        *,
        max_frame_bytes: int,
        keep_alive_s: float,
        patience_s: float,
        renew_at: float,
        answer_challenge: AnswerChallenge | None,
    ) -> None:
        self.broker = broker
        self.last_used = trio.current_time()
        self.closed = False
        self._link = link
        self._turn = turn
        self._keep_alive_s = keep_alive_s
        self._patience_s = patience_s
        self._waiting_since = 0.0
        self._pinged_at = float("-inf")
        self._asked = trio.Event()
        self.renew_at = renew_at
        self._credentials = answer_challenge
        self._decoder = FrameDecoder(max_frame_bytes=max_frame_bytes)
        self._decoder.receive_data(link.connected.rest)
        self._writer = BatchedWriter(link.stream, max_buffered_bytes=WRITE_BUFFER_BYTES_MAX)
        self._pending: dict[int, OnAnswer] = {}
        self._request_ids = itertools.count(1)
        self._heard_at = trio.current_time()
        self._scope = trio.CancelScope()
        self._retired = False

    @property
    def idle(self) -> bool:
        """Whether nobody waits for an answer."""
        return not self._pending

    def ask(self, command: BaseCommand, kind: LookupKind, on_answer: OnAnswer) -> int:
        """Send a request under an id of our own, which is returned. Raises BrokerConnectionLost.

        ``on_answer`` is called once, in the task that reads: with the answer as the broker wrote it, or None where the
        connection was lost.
        """
        if self.closed:
            raise BrokerConnectionLost(f"{self.broker} closed the connection")
        request_id = next(self._request_ids)
        try:
            self._writer.hold(encode_frame(numbered_request(command, kind, request_id)))
        except WriterFull:
            raise BrokerConnectionLost(f"{self.broker} does not take requests") from None
        self._turn.touch(self._writer)
        self.last_used = trio.current_time()
        if not self._pending:
            self._waiting_since = self.last_used
            self._asked.set()
        self._pending[request_id] = on_answer
        return request_id

    def forget(self, request_id: int) -> None:
        """Nobody waits any more; an answer that still comes is dropped."""
        self._pending.pop(request_id, None)

    async def request(self, command: BaseCommand, kind: LookupKind) -> BaseCommand:
        """Ask, and wait for the answer. Raises BrokerConnectionLost."""
        done = trio.Event()
        answers: list[BaseCommand | None] = []

        def on_answer(answer: BaseCommand | None) -> None:
            answers.append(answer)
            done.set()

        request_id = self.ask(command, kind, on_answer)
        self._turn.end()
        try:
            await done.wait()
        finally:
            self.forget(request_id)
        if answers[0] is None:
            raise BrokerConnectionLost(f"{self.broker} closed the connection")
        return answers[0]

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
            pending, self._pending = self._pending, {}
            for on_answer in pending.values():
                on_answer(None)
            self._turn.end()
            await trio.aclose_forcefully(self._link.stream)
            get_logger().debug("a connection for lookups has ended", broker=str(self.broker), reason=reason)

    def retire(self) -> None:
        """Another one has taken its place: end once nobody waits for an answer."""
        self._retired = True
        if not self._pending:
            self.close()

    def close(self) -> None:
        """End the connection; who still waits gets BrokerConnectionLost."""
        self.closed = True
        self._scope.cancel()

    async def _read(self, nursery: trio.Nursery) -> None:
        while True:
            while (frame := self._decoder.next_frame()) is not None:
                self._take(commands.parse_command(frame.command), nursery)
            self._turn.end()
            if self._retired and not self._pending:
                return
            data = await self._link.stream.receive_some(262_144)
            if not data:
                return
            self._heard_at = trio.current_time()
            self._decoder.receive_data(data)

    def _take(self, command: BaseCommand, nursery: trio.Nursery) -> None:
        if command.type == BaseCommand.PING:
            self._writer.write(commands.pong())
        elif command.type == BaseCommand.AUTH_CHALLENGE:
            nursery.start_soon(self._answer_challenge, bytes(command.auth_challenge.challenge.auth_data))
        else:
            request_id = response_request_id(command)
            on_answer = None if request_id is None else self._pending.pop(request_id, None)
            if on_answer is not None:
                on_answer(command)
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
                limit_s, since = self._patience_s, max(self._heard_at, self._waiting_since)
            else:
                limit_s, since = self._keep_alive_s, self._heard_at
            if now - since >= 2 * limit_s:
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
