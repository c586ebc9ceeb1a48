"""Lookup mode: a client's requests, from its frames to the frames that answer them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from functools import partial

import trio
from google.protobuf.message import DecodeError

from proto import commands
from proto.commands import command_name
from proto.envelope import encode_embedded_request
from proto.errors import RemoteProtocolError
from proto.lookup_kinds import kind_of
from proto.pulsar_pb2 import BaseCommand, ServerError
from proto.rpc_frames import Reply
from proto.rpc_pb2 import EnvelopeResponse, RefusedRequest, Status
from proxy.common.logs import get_logger
from proxy.forwarder.client.lookup_failures import (
    CONNECT_AGAIN,
    NO_MEMORY,
    NO_ROOM,
    TOO_MANY,
    UNAVAILABLE,
    code_of_rpc_error,
    envelope_failure,
    failure_frame,
    parse_request,
)
from proxy.forwarder.client.transport import ClientTransport
from proxy.forwarder.metrics import ForwarderMetrics
from proxy.forwarder.workers.authentication import ANONYMOUS, ClientIdentity
from proxy.forwarder.workers.clients import WorkerClients
from proxy.runtime.fairness.byte_budget import REQUEST_OVERHEAD_BYTES, ByteReservation
from proxy.runtime.fairness.fair_capacity import Reservation
from proxy.runtime.fairness.owners import owner_of
from proxy.runtime.loop.tasks import InFlightCounter, ignore
from proxy.runtime.loop.tick import current_tick
from proxy.runtime.rpc.client import RETRIES_MAX
from proxy.runtime.rpc.errors import RpcConnectionLost, RpcDeadlineExceeded, RpcError

BYTES_MAX = 4 * 1024 * 1024
"""The bytes of requests in flight and of answers not yet sent that are kept for one client."""

LARGE_ANSWER_BYTES = 512 * 1024
"""What a request counts in advance, and until its answer has left, if its answer may be large."""

WAITING_BYTES = BYTES_MAX // 2
"""The same while it waits for room: only two requests of a client wait, and the others stay unread."""

DELIVERY_SHARE = 2
"""A client that has not taken a large answer in this share of a lookup's time is closed if others wait for room."""

DELIVERY_LOOK_S = 0.25

MODEST_BYTES = 64 * 1024
"""What a client may have in flight and unsent even when the process's budget is short; above it, reading stops."""

TOLERATED_BYTES = 16 * 1024
"""What may wait for a client in any case: behind TLS every answer waits for a moment."""

_OK = int(Status.OK)  # looked up once: access by the name of a protobuf enum costs a search
_ENVELOPE_OK = int(EnvelopeResponse.NONE)
_ENVELOPE_UNSUPPORTED = int(EnvelopeResponse.UNSUPPORTED_VERSION)


class LookupBatch:
    """The requests of one Envelope. ``waiting``: those without an answer, by their number in the Envelope.

    ``deadline``: in Trio's time, for all attempts together. ``answer_bytes``: how much was sent to the client in answer
    to them.
    """

    __slots__ = ("answer_bytes", "deadline", "waiting")

    def __init__(self, requests: Sequence[bytes], deadline: float) -> None:
        self.answer_bytes = 0
        self.deadline = deadline
        self.waiting = dict(enumerate(requests))

    def take_waiting(self) -> list[bytes]:
        """Return the requests without an answer, which wait no longer."""
        left = list(self.waiting.values())
        self.waiting.clear()
        return left

    def renumber_waiting(self) -> None:
        """Give the requests without an answer numbers from 0 on, for another Envelope."""
        self.waiting = dict(enumerate(self.waiting.values()))

    @contextmanager
    def fail_at_deadline(self) -> Iterator[None]:
        """Raise RpcDeadlineExceeded where the body takes until the deadline."""
        try:
            with trio.fail_at(self.deadline):
                yield
        except trio.TooSlowError:
            raise RpcDeadlineExceeded("no answer in time") from None


class LookupMode:
    """The requests of one client that are in flight, bounded in number and in bytes.

    Requests that are read together travel in one Envelope, and answers that come together leave together. A request is
    a serialized BaseCommand, which is not parsed here unless it fails. Above the number a request is answered with
    TooManyRequests. Above the bytes no more is read from this client until some of its answers have left: only this
    client feels that, and ``transport`` has its waiting frames handled then. ``on_corrupt`` is called for a request
    that turns out to be none, ``on_unsupported_envelope`` if a lookup worker does not know the version of an Envelope.

    A request whose answer may be large travels alone, once there is room for the answer (WorkerClients.room), which is
    reserved until the client has taken it.
    """

    def __init__(
        self,
        client_address: str,
        workers: WorkerClients,
        metrics: ForwarderMetrics,
        transport: ClientTransport,
        on_corrupt: Callable[[RemoteProtocolError], None],
    ) -> None:
        self.in_flight = InFlightCounter()
        self._client_address = client_address
        self._workers = workers
        self._metrics = metrics
        self._transport = transport
        self._tasks = transport.tasks
        self._on_corrupt = on_corrupt
        self.on_unsupported_envelope: Callable[[], None] = ignore
        self._in_flight_max = workers.config.limits.max_concurrent_lookups_per_connection
        self._tick = current_tick()
        self._is_closed = False
        self._is_full = False
        self._kept_bytes = 0
        self._reservations: set[Reservation] = set()
        self._batch: list[bytes] = []
        self._identity = ANONYMOUS
        self._owner = owner_of("", client_address)
        self._budget = workers.budget
        self._reserved_bytes = 0
        self._unsent = ByteReservation(workers.budget, self._owner)
        transport.on_unsent_changed = self._on_unsent_changed
        self._envelope_head = b""

    def set_identity(self, identity: ClientIdentity) -> None:
        """Send requests in the name of this client from now on, and count their memory for it."""
        self._identity = identity
        owner = owner_of(identity.role, self._client_address, self._workers.config.authentication.anonymous_role)
        if owner != self._owner:
            self._budget.transfer_bytes(self._owner, owner, self._reserved_bytes)
            self._unsent.transfer_to(owner)
            self._owner = owner
        self._envelope_head = self._workers.envelope_head(identity, self._client_address)

    @property
    def has_room(self) -> bool:
        """Return whether more requests may be taken in."""
        kept = self._kept_bytes + self._transport.unsent_bytes
        self._is_full = kept >= BYTES_MAX or (kept >= MODEST_BYTES and self._budget.shares_enforced)
        return not self._is_full

    def forward_request(self, request: bytes) -> None:
        """Take a request in; it leaves with the next ``send_batch``. Raises CommandCorrupt."""
        if self.in_flight.count >= self._in_flight_max:
            self._metrics.refused_commands.labels(reason="too_many_requests").inc()
            self._transport.send(failure_frame(*parse_request(request), ServerError.TooManyRequests, TOO_MANY))
            return
        if not self._reserve_request(request):
            return
        self.in_flight.increment()
        self._kept_bytes += len(request)
        self._batch.append(request)

    def forward_parsed_request(self, command: BaseCommand, request: bytes) -> None:
        """Take a request in that was parsed already. Raises CommandCorrupt where its message is missing."""
        if not kind_of(command).may_be_large or self.in_flight.count >= self._in_flight_max:
            self.forward_request(request)
            return
        if not self._reserve_request(request):
            return
        self.in_flight.increment()
        reservation = self._workers.room.try_reserve(self._owner)
        self._kept_bytes += len(request) + (WAITING_BYTES if reservation is None else LARGE_ANSWER_BYTES)
        batch = self._new_batch([request])
        if reservation is None:
            self._tasks.start_soon(self._wait_for_room, batch)
        else:
            self._reservations.add(reservation)
            self._tasks.start_soon(self._send_large, batch, reservation)

    def _reserve_request(self, request: bytes) -> bool:
        """Count a request's memory; refuse it where this process keeps as much as it may. Raises CommandCorrupt."""
        size = len(request) + REQUEST_OVERHEAD_BYTES
        if self._budget.reserve_bytes(self._owner, size):
            self._reserved_bytes += size
            return True
        self._metrics.refused_commands.labels(reason="too_many_requests").inc()
        self._transport.send(failure_frame(*parse_request(request), ServerError.TooManyRequests, NO_MEMORY))
        return False

    def _on_unsent_changed(self) -> None:
        """Count what the client does not take. Close one that takes nothing while others need the memory.

        Large answers are not counted here: they have reserved room of their own.
        """
        if self._is_closed:
            return
        reserved = sum(reservation.size_bytes for reservation in self._reservations)
        unsent = max(0, self._transport.unsent_bytes - reserved)
        if not self._unsent.resize(unsent) and unsent > TOLERATED_BYTES:
            get_logger().warning(
                "a client does not take its answers, and others need the memory",
                client=self._client_address,
                principal=self._identity.role,
                limit="limits.max_lookup_bytes",
            )
            self._transport.abort_sending()

    def send_batch(self) -> None:
        """Send the requests that were taken in since the last time: no more frames are here now."""
        if not self._batch or self._is_closed:
            return
        requests, self._batch = self._batch, []
        batch = self._new_batch(requests)
        if not self._send_now(batch):
            self._tasks.start_soon(self._send_in_task, batch)

    def _new_batch(self, requests: list[bytes]) -> LookupBatch:
        return LookupBatch(requests, self._tick.now + self._workers.answer_timeout_s)

    def close(self) -> None:
        """Give back what is counted for the client, which has gone; answers that still come are dropped."""
        self._is_closed = True
        self._on_corrupt = self.on_unsupported_envelope = ignore  # they lead back to the connection
        for reservation in self._reservations:  # some may belong to tasks that will not start
            reservation.release()
        self._budget.release_bytes(self._owner, self._reserved_bytes)
        self._reserved_bytes = 0
        self._unsent.resize(0)

    # ---- the fast path: no task waits for the answers

    def _send_now(self, batch: LookupBatch) -> bool:
        return self._workers.forward_envelope_now(self._envelope(batch), batch.deadline, partial(self._on_reply, batch))

    def _envelope(self, batch: LookupBatch) -> bytes:
        """Return the Envelope as its parts, joined: protobuf reads the fields of a message in any order."""
        return b"".join((self._envelope_head, *map(encode_embedded_request, batch.waiting.values())))

    def _on_reply(self, batch: LookupBatch, reply: Reply | None) -> None:
        if self._is_closed:
            return
        if reply is None or reply.status != _OK:
            self._tasks.start_soon(self._send_in_task, batch)
        else:
            self._deliver_answers(batch, reply.response, more=reply.has_more)

    # ---- the slow path: a task for each Envelope

    async def _send_in_task(self, batch: LookupBatch) -> None:
        try:
            await self._send_with_retries(batch)
        except RpcError as error:
            self._fail_all(batch, code_of_rpc_error(error), UNAVAILABLE, str(error))
        finally:
            self._finish_requests(batch.take_waiting())

    async def _wait_for_room(self, batch: LookupBatch) -> None:
        reservation: Reservation | None = None
        try:
            with trio.move_on_at(batch.deadline):
                reservation = await self._workers.room.reserve(self._owner)
            if reservation is None:
                self._metrics.refused_commands.labels(reason="too_many_requests").inc()
                self._fail_all(batch, ServerError.TooManyRequests, NO_ROOM, "limits.max_topic_lists_bytes")
                return
            self._reservations.add(reservation)
            self._kept_bytes += LARGE_ANSWER_BYTES
        finally:
            self._release_kept(WAITING_BYTES)
            if reservation is None:
                self._finish_requests(batch.take_waiting())
        await self._send_large(batch, reservation)

    async def _send_large(self, batch: LookupBatch, reservation: Reservation) -> None:
        """Send a request whose answer may be large, and which the client may be slow to take."""
        try:
            await self._send_in_task(batch)
            reservation.shrink_to(batch.answer_bytes)
            if self._transport.unsent_bytes:
                await self._wait_until_delivered(self._transport.queued_bytes)
        finally:
            self._reservations.discard(reservation)
            reservation.release()
            self._release_kept(LARGE_ANSWER_BYTES)

    async def _wait_until_delivered(self, position: int) -> None:
        """Wait until the client has taken what was sent up to a position of ``ClientTransport.queued_bytes``.

        While no other client waits for the room, it may take the time of any write; else its time is short.
        """
        room, delivery_s = self._workers.room, self._workers.answer_timeout_s / DELIVERY_SHARE
        is_late_at = trio.current_time() + delivery_s
        while True:
            with trio.move_on_after(DELIVERY_LOOK_S) as look:
                await self._transport.wait_until_taken(position)
            if not look.cancelled_caught:
                return
            if room.has_waiters and trio.current_time() >= is_late_at:
                get_logger().warning(
                    "a client does not take a large answer, and others wait for room",
                    client=self._client_address,
                    principal=self._identity.role,
                    waited_s=delivery_s,
                    limit="limits.max_topic_lists_bytes",
                )
                self._transport.abort_sending()
                return

    async def _send_with_retries(self, batch: LookupBatch) -> None:
        """Send a batch to a lookup worker; where that dies, send what is unanswered to another. Raises RpcError."""
        retries_left = RETRIES_MAX
        while batch.waiting:
            try:
                await self._send_once(batch)
            except RpcConnectionLost:
                retries_left -= 1
                if retries_left < 0:
                    raise

    async def _send_once(self, batch: LookupBatch) -> None:
        batch.renumber_waiting()
        envelope = self._envelope(batch)
        async with AsyncExitStack() as stack:
            with batch.fail_at_deadline():
                call = await stack.enter_async_context(self._workers.forward_envelope(envelope, batch.deadline))
            more = True
            while more:
                with batch.fail_at_deadline():
                    part, more = await call.next_part()
                self._deliver_answers(batch, part, more=more)

    # ---- answers, on both paths

    def _deliver_answers(self, batch: LookupBatch, part: bytes, *, more: bool) -> None:
        """Send the client the answers in a part of the reply; after the last part, fail requests without one."""
        try:
            response = EnvelopeResponse.FromString(part)
        except DecodeError:
            self._fail_all(batch, *envelope_failure(None), "a reply that cannot be read")
            return
        if response.error == _ENVELOPE_UNSUPPORTED:
            self._fail_all(batch, ServerError.ServiceNotReady, CONNECT_AGAIN, response.error_message)
            self.on_unsupported_envelope()
            return
        if response.error != _ENVELOPE_OK:
            self._fail_all(batch, *envelope_failure(response.error), response.error_message)
            return
        waiting = batch.waiting
        answered = response.answered[:]
        numbers = set(answered)
        if len(numbers) != len(answered) or not numbers <= waiting.keys():
            self._fail_all(batch, *envelope_failure(None), "a reply with an answer to nothing, or a second one")
            return
        frames = response.frames
        batch.answer_bytes += len(frames)
        self._transport.send(frames)
        self._finish_requests([waiting.pop(number) for number in numbers])
        for refused in response.refused:
            self._fail_refused(batch, refused)
        if not more and waiting:
            self._fail_all(batch, *envelope_failure(None), "the reply lacks an answer")

    def _fail_refused(self, batch: LookupBatch, refused: RefusedRequest) -> None:
        request = batch.waiting.pop(refused.index, None)
        if request is not None:
            self._fail([request], *envelope_failure(refused.error), refused.error_message)

    def _fail_all(self, batch: LookupBatch, code: int, text: str, reason: str) -> None:
        left = batch.take_waiting()
        if left:
            self._fail(left, code, text, reason)

    def _fail(self, requests: Sequence[bytes], code: int, text: str, reason: str) -> None:
        """Answer requests with an error."""
        try:
            parsed = [parse_request(request) for request in requests]
        except RemoteProtocolError as error:  # which is why they failed
            self._on_corrupt(error)
        else:
            self._transport.send(b"".join(failure_frame(command, kind, code, text) for command, kind in parsed))
            get_logger().warning(
                "lookups were not forwarded",
                client=self._client_address,
                principal=self._identity.role,
                requests=len(requests),
                kinds=",".join(sorted({kind.name for _, kind in parsed})),
                reason=reason,
            )
        self._finish_requests(requests)

    def _finish_requests(self, requests: Iterable[bytes]) -> None:
        count, size = 0, 0
        for request in requests:
            count += 1
            size += len(request)
        if count:
            self.in_flight.decrement(count)
            if not self._is_closed:
                taken = size + count * REQUEST_OVERHEAD_BYTES
                self._reserved_bytes -= taken
                self._budget.release_bytes(self._owner, taken)
            self._release_kept(size)

    def _release_kept(self, size: int) -> None:
        self._kept_bytes -= size
        if self._is_full and self.has_room:
            self._transport.handle_waiting_frames()

    def refuse_command(self, command: BaseCommand) -> None:
        """Answer a command that only a broker serves, in the form that its sender can match."""
        name = command_name(command.type)
        self._metrics.refused_commands.labels(reason="not_served").inc()
        get_logger().info(
            "refused a command that needs a broker",
            client=self._client_address,
            principal=self._identity.role,
            command=name,
        )
        text = f"{name} needs a connection to a broker; this one only serves lookups"
        self._transport.send(commands.refusal(command, ServerError.NotAllowedError, text))
