"""Lookup mode: a client's requests, from its frames to the frames that answer them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from functools import partial

import trio
from google.protobuf.message import DecodeError

from proto import commands
from proto.commands import CommandCorrupt, command_name, parse_command
from proto.envelope import encode_embedded_request
from proto.errors import RemoteProtocolError
from proto.frames import encode_frame
from proto.lookup_kinds import KINDS, LookupKind, client_request_id, failure, kind_of
from proto.pulsar_pb2 import BaseCommand, ServerError
from proto.rpc_frames import Reply
from proto.rpc_pb2 import EnvelopeResponse, RefusedRequest, Status
from proxy.common.logs import get_logger
from proxy.config.types import Config
from proxy.forwarder.metrics import ForwarderMetrics
from proxy.forwarder.session.transport import ClientTransport
from proxy.forwarder.workers.authentication import ANONYMOUS, ClientIdentity
from proxy.forwarder.workers.clients import WorkerClients
from proxy.runtime.fairness.byte_budget import REQUEST_OVERHEAD_BYTES, ByteReservation
from proxy.runtime.fairness.fair_capacity import Reservation, owner_of
from proxy.runtime.loop.scoped_tasks import TaskSpawner
from proxy.runtime.loop.tasks import InFlightCounter
from proxy.runtime.loop.tick import current_tick
from proxy.runtime.rpc.client import RETRIES_MAX, RpcCallRefused, RpcConnectionLost, RpcDeadlineExceeded, RpcError

BYTES_MAX = 4 * 1024 * 1024
"""Requests under way and answers not yet sent that one client may make us keep."""

LARGE_ANSWER_BYTES = 512 * 1024
"""What a request counts beforehand, and until its answer has left, whose answer may be large."""

WAITING_BYTES = BYTES_MAX // 2
"""The same while it waits for room: only two of a client's do, and the others stay unread."""

DELIVERY_SHARE = 2
"""A client that has not taken a large answer in this share of a lookup's time is given up if others wait for room."""

DELIVERY_LOOK_S = 0.25

MODEST_BYTES = 64 * 1024
"""What a client may have under way and unsent although the process's budget is short; above it, it is read no more."""

TOLERATED_BYTES = 16 * 1024
"""What may wait for a client in any case: behind TLS every answer waits for a moment."""

UNAVAILABLE = "The proxy's lookup service is not available"
_CODES: Mapping[int | None, int] = {
    Status.TOO_MANY_REQUESTS: ServerError.TooManyRequests,
    Status.UNKNOWN_SERVER_ERROR: ServerError.UnknownError,
}
"""What a call's failure is to the client; all others are ServiceNotReady, upon which it comes back."""

_OK = int(Status.OK)  # as names of their enums they would be searched for each time
_ENVELOPE_OK = int(EnvelopeResponse.NONE)

NO_MEMORY = "The proxy has too many lookups under way"
TOO_MANY = "Too many lookups under way in this connection"
NO_ROOM = "The proxy has too many large answers under way"
NO_LONGER_VALID = "The credential of this connection is no longer valid"


class LookupMode:
    """One client's requests under way, bounded in number and in bytes.

    Requests that are read in one go travel in one Envelope, and answers that come in one go leave in one go. A request
    is a serialized BaseCommand, and nobody looks into it here unless it fails. Above the number a request is answered
    TooManyRequests. Above the bytes nothing more is read from this client until some of its answers have left: it feels
    that, and nobody else; ``on_room`` is called then. ``on_corrupt``: for a request that turns out to be none.

    A request whose answer may be large is asked by itself, once there is room for the answer (Backends.room), which is
    its until the client has taken it.
    """

    def __init__(  # noqa: PLR0917 -- what belongs to one session
        self,
        backends: WorkerClients,
        metrics: ForwarderMetrics,
        client_address: str,
        tasks: TaskSpawner,
        wire: ClientTransport,
        on_room: Callable[[], None],
        on_corrupt: Callable[[RemoteProtocolError], None],
    ) -> None:
        self.in_flight = InFlightCounter()
        self._workers = backends
        self._metrics = metrics
        self._client_address = client_address
        self._tasks = tasks
        self._transport = wire
        self._on_room = on_room
        self._on_corrupt = on_corrupt
        self._most = backends.config.limits.max_concurrent_lookups_per_connection
        self._tick = current_tick()
        self._closed = False
        self._full = False
        self._bytes = 0
        self._loans: set[Reservation] = set()
        self._batch: list[bytes] = []
        self._identity = ANONYMOUS
        self._owner = owner_of("", client_address)
        self._budget = backends.budget
        self._taken = 0
        self._unsent = ByteReservation(backends.budget, self._owner)
        wire.on_unsent_changed = self._unsent_changed
        self._head = b""

    def set_identity(self, identity: ClientIdentity) -> None:
        """Whose requests these are, from now on."""
        self._identity = identity
        owner = budget_owner(identity, self._client_address, self._workers.config)
        if owner != self._owner:
            self._budget.transfer_bytes(self._owner, owner, self._taken)
            self._unsent.transfer_to(owner)
            self._owner = owner
        self._head = self._workers.envelope_head(identity, self._client_address)

    @property
    def has_room(self) -> bool:
        """Whether more requests may be taken in."""
        kept = self._bytes + self._transport.unsent_bytes
        self._full = kept >= BYTES_MAX or (kept >= MODEST_BYTES and self._budget.shares_enforced)
        return not self._full

    def forward_request(self, request: bytes) -> None:
        """Take a request in; it leaves with the next ``flush``. Raises CommandCorrupt."""
        if self.in_flight.count >= self._most:
            self._metrics.refused_commands.labels(reason="too_many_requests").inc()
            self._transport.send(_failed(*_parsed(request), ServerError.TooManyRequests, TOO_MANY))
            return
        if not self._take_bytes(request):
            return
        self.in_flight.increment()
        self._bytes += len(request)
        self._batch.append(request)

    def forward_parsed_request(self, command: BaseCommand, request: bytes) -> None:
        """The same, where it was parsed already. Raises CommandCorrupt where its message is missing."""
        if not kind_of(command).may_be_large or self.in_flight.count >= self._most:
            self.forward_request(request)
            return
        if not self._take_bytes(request):
            return
        self.in_flight.increment()
        loan = self._workers.room.try_reserve(self._owner)
        self._bytes += len(request) + (WAITING_BYTES if loan is None else LARGE_ANSWER_BYTES)
        batch = self._new_batch([request])
        if loan is None:
            self._tasks.start_soon(self._wait_for_room, batch)
        else:
            self._loans.add(loan)
            self._tasks.start_soon(self._ask_large, batch, loan)

    def _take_bytes(self, request: bytes) -> bool:
        """Count a request, or refuse it where this process keeps as much as it may. Raises CommandCorrupt."""
        size = len(request) + REQUEST_OVERHEAD_BYTES
        if self._budget.reserve_bytes(self._owner, size):
            self._taken += size
            return True
        self._metrics.refused_commands.labels(reason="too_many_requests").inc()
        self._transport.send(_failed(*_parsed(request), ServerError.TooManyRequests, NO_MEMORY))
        return False

    def _unsent_changed(self) -> None:
        """Count what the client does not take. One that takes nothing while others need the memory is closed. What
        was lent room for (large answers) is counted there.
        """
        if self._closed:
            return
        unsent = max(0, self._transport.unsent_bytes - sum(loan.size_bytes for loan in self._loans))
        if not self._unsent.resize(unsent) and unsent > TOLERATED_BYTES:
            get_logger().warning(
                "a client does not take its answers, and others need the memory",
                client=self._client_address,
                principal=self._identity.role,
                limit="limits.max_lookup_bytes",
            )
            self._transport.abort_sending()

    def send_batch(self) -> None:
        """Send on what was taken in since the last time: nothing more is there to be read."""
        if not self._batch or self._closed:
            return
        requests, self._batch = self._batch, []
        batch = self._new_batch(requests)
        if not self._ask_now(batch):
            self._tasks.start_soon(self._ask_later, batch)

    def _new_batch(self, requests: list[bytes]) -> "_Batch":
        return _Batch(requests, self._tick.now + self._workers.answer_timeout_s)

    def close(self) -> None:
        """The client has gone: what is under way is nobody's business any more."""
        self._closed = True
        for loan in self._loans:  # of which some may belong to tasks that will not begin
            loan.release()
        self._budget.release_bytes(self._owner, self._taken)
        self._taken = 0
        self._unsent.resize(0)

    # ---- the short way: no task waits for the answers

    def _ask_now(self, batch: "_Batch") -> bool:
        return self._workers.forward_envelope_now(self._envelope(batch), batch.deadline, partial(self._heard, batch))

    def _envelope(self, batch: "_Batch") -> bytes:
        """Its parts are one message: protobuf reads fields in any order."""
        return b"".join((self._head, *map(encode_embedded_request, batch.waiting.values())))

    def _heard(self, batch: "_Batch", reply: Reply | None) -> None:
        if self._closed:
            return
        if reply is None or reply.status != _OK:
            self._tasks.start_soon(self._ask_later, batch)
        else:
            self._deliver(batch, reply.response, more=reply.has_more)

    # ---- the long way

    async def _ask_later(self, batch: "_Batch") -> None:
        try:
            await self._ask(batch)
        except RpcError as error:
            status = error.status if isinstance(error, RpcCallRefused) else None
            code = _CODES.get(status, ServerError.ServiceNotReady)
            self._fail_all(batch, code, UNAVAILABLE, str(error))
        finally:
            self._done(batch.take_all())

    async def _wait_for_room(self, batch: "_Batch") -> None:
        loan: Reservation | None = None
        try:
            with trio.move_on_at(batch.deadline):
                loan = await self._workers.room.reserve(self._owner)
            if loan is None:
                self._metrics.refused_commands.labels(reason="too_many_requests").inc()
                self._fail_all(batch, ServerError.TooManyRequests, NO_ROOM, "limits.max_topic_lists_bytes")
                return
            self._loans.add(loan)
            self._bytes += LARGE_ANSWER_BYTES
        finally:
            self._give(WAITING_BYTES)
            if loan is None:
                self._done(batch.take_all())
        await self._ask_large(batch, loan)

    async def _ask_large(self, batch: "_Batch", loan: Reservation) -> None:
        """The answer may be large, and its client slow to take it."""
        try:
            await self._ask_later(batch)
            loan.shrink_to(batch.answer_bytes)
            if self._transport.unsent_bytes:
                await self._until_taken(self._transport.queued_bytes)
        finally:
            self._loans.discard(loan)
            loan.release()
            self._give(LARGE_ANSWER_BYTES)

    async def _until_taken(self, position: int) -> None:
        """Wait until the client has taken what was sent up to there. While nobody else wants the room, its time is that
        of any write; else it is short.
        """
        room, patience_s = self._workers.room, self._workers.answer_timeout_s / DELIVERY_SHARE
        is_late_at = trio.current_time() + patience_s
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
                    waited_s=patience_s,
                    limit="limits.max_topic_lists_bytes",
                )
                self._transport.abort_sending()
                return

    async def _ask(self, batch: "_Batch") -> None:
        """Ask a lookup worker, and another one for what is left where it dies. Raises RpcError."""
        retries_left = RETRIES_MAX
        while batch.waiting:
            try:
                await self._ask_once(batch)
            except RpcConnectionLost:
                retries_left -= 1
                if retries_left < 0:
                    raise

    async def _ask_once(self, batch: "_Batch") -> None:
        batch.renumber()
        envelope = self._envelope(batch)
        async with AsyncExitStack() as stack:
            with _in_time(batch):
                call = await stack.enter_async_context(self._workers.forward_envelope(envelope, batch.deadline))
            more = True
            while more:
                with _in_time(batch):
                    part, more = await call.next_part()
                self._deliver(batch, part, more=more)

    # ---- both

    def _deliver(self, batch: "_Batch", part: bytes, *, more: bool) -> None:
        """Send the client what a part of the reply answers. After the last part all are answered."""
        try:
            response = EnvelopeResponse.FromString(part)
        except DecodeError:
            self._fail_all(batch, *_envelope_error(None), "a reply that cannot be read")
            return
        if response.error != _ENVELOPE_OK:
            self._fail_all(batch, *_envelope_error(response.error), response.error_message)
            return
        waiting = batch.waiting
        answered = response.answered[:]
        numbers = set(answered)
        if len(numbers) != len(answered) or not numbers <= waiting.keys():
            self._fail_all(batch, *_envelope_error(None), "a reply with an answer to nothing, or a second one")
            return
        frames = response.frames
        batch.answer_bytes += len(frames)
        self._transport.send(frames)
        self._done([waiting.pop(number) for number in numbers])
        for refused in response.refused:
            self._refused(batch, refused)
        if not more and waiting:
            self._fail_all(batch, *_envelope_error(None), "the reply lacks an answer")

    def _refused(self, batch: "_Batch", refused: RefusedRequest) -> None:
        request = batch.waiting.pop(refused.index, None)
        if request is not None:
            self._fail([request], *_envelope_error(refused.error), refused.error_message)

    def _fail_all(self, batch: "_Batch", code: int, text: str, reason: str) -> None:
        left = batch.take_all()
        if left:
            self._fail(left, code, text, reason)

    def _fail(self, requests: Sequence[bytes], code: int, text: str, reason: str) -> None:
        """Tell the client that these failed."""
        try:
            parsed = [_parsed(request) for request in requests]
        except RemoteProtocolError as error:  # that is why they failed
            self._on_corrupt(error)
        else:
            self._transport.send(b"".join(_failed(command, kind, code, text) for command, kind in parsed))
            get_logger().warning(
                "lookups were not forwarded",
                client=self._client_address,
                principal=self._identity.role,
                requests=len(requests),
                kinds=",".join(sorted({kind.name for _, kind in parsed})),
                reason=reason,
            )
        self._done(requests)

    def _done(self, requests: Iterable[bytes]) -> None:
        count, size = 0, 0
        for request in requests:
            count += 1
            size += len(request)
        if count:
            self.in_flight.decrement(count)
            if not self._closed:
                taken = size + count * REQUEST_OVERHEAD_BYTES
                self._taken -= taken
                self._budget.release_bytes(self._owner, taken)
            self._give(size)

    def _give(self, size: int) -> None:
        self._bytes -= size
        if self._full and self.has_room:
            self._on_room()

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


class _Batch:
    """Requests that travel in one Envelope; ``waiting``: those without an answer, by their number."""

    __slots__ = ("answer_bytes", "deadline", "waiting")

    def __init__(self, requests: Sequence[bytes], deadline: float) -> None:
        self.answer_bytes = 0
        """How much has been sent to the client in answer to them."""
        self.deadline = deadline
        self.waiting = dict(enumerate(requests))

    def take_all(self) -> list[bytes]:
        """Those that wait; nobody waits any more then."""
        left = list(self.waiting.values())
        self.waiting.clear()
        return left

    def renumber(self) -> None:
        """What is left travels once more."""
        self.waiting = dict(enumerate(self.waiting.values()))


@contextmanager
def _in_time(batch: _Batch) -> Iterator[None]:
    """Raises RpcDeadlineExceeded at the batch's deadline."""
    try:
        with trio.fail_at(batch.deadline):
            yield
    except trio.TooSlowError:
        raise RpcDeadlineExceeded("no answer in time") from None


def budget_owner(identity: ClientIdentity, client_address: str, config: Config) -> str:
    """Name who shares the memory for clients as one: a principal, or an address without one."""
    is_somebody = identity.role != config.authentication.anonymous_role
    return owner_of(identity.role if is_somebody else "", client_address)


def _parsed(request: bytes) -> tuple[BaseCommand, LookupKind]:
    """A request and its kind. Raises CommandCorrupt where it only began as one."""
    command = parse_command(request)
    if command.type not in KINDS:
        raise CommandCorrupt(f"{command_name(command.type)} that begins as another command")
    return command, kind_of(command)


def _failed(command: BaseCommand, kind: LookupKind, code: int, text: str) -> bytes:
    """The frame that says that a request failed."""
    return encode_frame(failure(kind, client_request_id(command, kind), code, text).SerializeToString())


def _envelope_error(error: int | None) -> tuple[int, str]:
    """KIP-590: an envelope's own error is no business of the client's, beyond whether to come back with a new one."""
    if error == EnvelopeResponse.PRINCIPAL_DESERIALIZATION_FAILURE:
        return ServerError.AuthenticationError, NO_LONGER_VALID
    return ServerError.UnknownError, "The proxy cannot forward this request"
