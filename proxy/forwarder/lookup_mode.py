"""Lookup mode: a client's requests, from its frames to the frames that answer them."""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import trio
from google.protobuf.message import DecodeError

from proto import commands
from proto.commands import command_name
from proto.frames import Frame, encode_frame
from proto.lookups import LookupKind, client_request_id, failure, kind_of
from proto.pulsar_pb2 import BaseCommand, ServerError
from proto.rpc_pb2 import EmbeddedResponse, EnvelopeError, EnvelopeResponse, Reply, Status
from proxy.forwarder.authentication import ClientIdentity
from proxy.forwarder.backends import Backends
from proxy.forwarder.metrics import ForwarderMetrics
from proxy.forwarder.wire import ClientWire
from proxy.runtime.logs import get_logger
from proxy.runtime.rpc_client import RETRIES_MAX, RpcCallRefused, RpcConnectionLost, RpcDeadlineExceeded, RpcError
from proxy.runtime.tasks import ByteBudget, InFlight

BYTES_MAX = 4 * 1024 * 1024
"""Requests under way and answers not yet sent that one client may make us keep."""

TOPIC_LIST_BYTES = 512 * 1024
"""What a request for a topic list counts beforehand, since its answer may be large."""

Send = Callable[[bytes], Awaitable[None]]

UNAVAILABLE = "The proxy's lookup service is not available"
_CODES: Mapping[int | None, int] = {
    Status.TOO_MANY_REQUESTS: ServerError.TooManyRequests,
    Status.UNKNOWN_SERVER_ERROR: ServerError.UnknownError,
}
"""What a call's failure is to the client; all others are ServiceNotReady, upon which it comes back."""

TOO_MANY_LISTS = "The proxy has too many topic lists under way"
NO_LONGER_VALID = "The credential of this connection is no longer valid"


@dataclass(frozen=True, slots=True)
class Request:
    """One request under way; ``size`` is what it counts in the client's bytes."""

    data: bytes
    kind: LookupKind
    request_id: int
    size: int

    def failed(self, code: int, text: str) -> bytes:
        """The frame that says that it failed."""
        return encode_frame(failure(self.kind, self.request_id, code, text).SerializeToString())


class LookupMode:
    """One client's requests under way, bounded in number and in bytes.

    Requests that are read in one go travel in one Envelope, and answers that come in one go leave in one go. Above the
    number a request is answered TooManyRequests. Above the bytes nothing more is read from this client until some of
    its answers have left: it feels that, and nobody else.
    """

    def __init__(  # noqa: PLR0917 -- what belongs to one session
        self,
        backends: Backends,
        metrics: ForwarderMetrics,
        client_address: str,
        nursery: trio.Nursery,
        wire: ClientWire,
        send: Send,
    ) -> None:
        self.under_way = InFlight()
        self._backends = backends
        self._metrics = metrics
        self._client_address = client_address
        self._nursery = nursery
        self._wire = wire
        self._send = send
        self._closed = False
        self._bytes = ByteBudget(BYTES_MAX)
        self._batch: list[Request] = []
        self._identity: ClientIdentity

    async def forward(self, command: BaseCommand, frame: Frame, identity: ClientIdentity) -> None:
        """Take a request in; it leaves with the next ``flush``. Raises CommandCorrupt where its message is missing."""
        kind = kind_of(command)
        request_id = client_request_id(command, kind)
        if self.under_way.count >= self._backends.config.limits.max_concurrent_lookups_per_connection:
            self._metrics.refused_commands.labels(reason="too_many_requests").inc()
            text = "Too many lookups under way in this connection"
            busy = failure(kind, request_id, ServerError.TooManyRequests, text)
            await self._send(commands.encode(busy))
            return
        size = len(frame.command) + (TOPIC_LIST_BYTES if command.type == BaseCommand.GET_TOPICS_OF_NAMESPACE else 0)
        if not self._bytes.has_room_for(size):
            self.flush()  # what waits here would wait for itself
            await self._bytes.take(size)
        else:
            self._bytes.add(size)
        self.under_way.begin()
        self._identity = identity
        request = Request(frame.command, kind, request_id, size)
        if command.type == BaseCommand.GET_TOPICS_OF_NAMESPACE:
            self._nursery.start_soon(self._list_topics, self._new_batch([request]))
        else:
            self._batch.append(request)

    def flush(self) -> None:
        """Send on what was taken in since the last time: nothing more is there to be read."""
        if not self._batch:
            return
        requests, self._batch = self._batch, []
        batch = self._new_batch(requests)
        if not self._ask_now(batch):
            self._nursery.start_soon(self._ask_later, batch)

    def _new_batch(self, requests: list[Request]) -> "_Batch":
        return _Batch(requests, self._identity, trio.current_time() + self._backends.answer_timeout_s)

    def close(self) -> None:
        """The client has gone: what is under way is nobody's business any more."""
        self._closed = True

    # ---- the short way: no task waits for the answers

    def _ask_now(self, batch: "_Batch") -> bool:
        requests = [request.data for request in batch.waiting.values()]
        envelope = self._backends.envelope(requests, batch.identity, self._client_address)
        return self._backends.forward_now(envelope, partial(self._heard, batch))

    def _heard(self, batch: "_Batch", reply: Reply | None) -> None:
        if self._closed:
            return
        if reply is None or reply.status != Status.OK:
            self._nursery.start_soon(self._ask_later, batch)
            return
        answered, frames = self._frames(batch, reply.response, more=reply.more)
        if self._wire.send_now(frames):
            self._done(answered)
        else:
            self._nursery.start_soon(self._deliver, answered, b"", len(frames))

    # ---- the long way

    async def _ask_later(self, batch: "_Batch") -> None:
        try:
            await self._ask(batch)
        except RpcError as error:
            status = error.status if isinstance(error, RpcCallRefused) else None
            code = _CODES.get(status, ServerError.ServiceNotReady)
            await self._fail_all(batch, code, UNAVAILABLE, str(error))
        finally:
            self._done(batch.take_all())

    async def _list_topics(self, batch: "_Batch") -> None:
        """The answer may be large, and its client slow to take it: of all clients only so many at a time."""
        lists = self._backends.topic_lists
        with trio.move_on_at(batch.deadline) as waiting:
            await lists.take(batch.identity.role)
        if waiting.cancelled_caught:
            await self._fail_all(batch, ServerError.TooManyRequests, TOO_MANY_LISTS, "limits.max_topic_lists_bytes")
            return
        try:
            await self._ask_later(batch)
        finally:
            lists.give(batch.identity.role)

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
        requests = [request.data for request in batch.waiting.values()]
        envelope = self._backends.envelope(requests, batch.identity, self._client_address)
        async with AsyncExitStack() as stack:
            with _in_time(batch):
                call = await stack.enter_async_context(self._backends.forward(envelope, batch.deadline))
            more = True
            while more:
                with _in_time(batch):
                    part, more = await call.next_part()
                # Not in the same time limit: what is answered must be sent, or nobody would know of it any more.
                answered, frames = self._frames(batch, part, more=more)
                await self._deliver(answered, frames, len(frames))

    async def _fail_all(self, batch: "_Batch", code: int, text: str, reason: str) -> None:
        answered, frames = self._failures(batch, code, text, reason)
        await self._deliver(answered, frames, len(frames))

    async def _deliver(self, answered: Sequence[Request], frames: bytes, size: int) -> None:
        self._bytes.add(size)
        try:
            await self._send(frames)
        finally:
            self._bytes.give(size)
            self._done(answered)

    # ---- both

    def _frames(self, batch: "_Batch", part: bytes, *, more: bool) -> tuple[list[Request], bytes]:
        """What a part of the reply answers, and the frames for the client. After the last part all are answered."""
        try:
            response = EnvelopeResponse.FromString(part)
        except DecodeError:
            return self._failures(batch, *_envelope_error(None), "a reply that cannot be read")
        if response.error != EnvelopeError.ENVELOPE_OK:
            return self._failures(batch, *_envelope_error(response.error), response.error_message)
        answered, frames = [], []
        for embedded in response.responses:
            request = batch.waiting.pop(embedded.index, None)
            if request is not None:  # an answer to nothing, or a second one, is dropped
                answered.append(request)
                frames.append(self._frame(batch, request, embedded))
        if not more and batch.waiting:
            left, said = self._failures(batch, *_envelope_error(None), "the reply lacks an answer")
            answered += left
            frames.append(said)
        return answered, b"".join(frames)

    def _frame(self, batch: "_Batch", request: Request, embedded: EmbeddedResponse) -> bytes:
        if embedded.error == EnvelopeError.ENVELOPE_OK:
            return encode_frame(embedded.response)
        self._log_failure(batch, [request], embedded.error_message)
        return request.failed(*_envelope_error(embedded.error))

    def _failures(self, batch: "_Batch", code: int, text: str, reason: str) -> tuple[list[Request], bytes]:
        """All that wait, and the frames that say that they failed."""
        left = batch.take_all()
        self._log_failure(batch, left, reason)
        return left, b"".join(request.failed(code, text) for request in left)

    def _log_failure(self, batch: "_Batch", requests: Sequence[Request], reason: str) -> None:
        kinds = sorted({request.kind.name for request in requests})
        get_logger().warning(
            "lookups were not forwarded",
            client=self._client_address,
            principal=batch.identity.role,
            requests=len(requests),
            kinds=",".join(kinds),
            reason=reason,
        )

    def _done(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._bytes.give(request.size)
            self.under_way.end()

    async def refuse(self, command: BaseCommand, identity: ClientIdentity) -> None:
        """Answer a command that only a broker serves, in the form that its sender can match."""
        name = command_name(command.type)
        self._metrics.refused_commands.labels(reason="not_served").inc()
        get_logger().info(
            "refused a command that needs a broker", client=self._client_address, principal=identity.role, command=name
        )
        text = f"{name} needs a connection to a broker; this one only serves lookups"
        await self._send(commands.refusal(command, ServerError.NotAllowedError, text))


class _Batch:
    """Requests that travel in one Envelope; ``waiting``: those without an answer, by their number."""

    def __init__(self, requests: Sequence[Request], identity: ClientIdentity, deadline: float) -> None:
        self.identity = identity
        self.deadline = deadline
        self.waiting = dict(enumerate(requests))

    def take_all(self) -> list[Request]:
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


def _envelope_error(error: int | None) -> tuple[int, str]:
    """KIP-590: an envelope's own error is no business of the client's, beyond whether to come back with a new one."""
    if error == EnvelopeError.PRINCIPAL_DESERIALIZATION_FAILURE:
        return ServerError.AuthenticationError, NO_LONGER_VALID
    return ServerError.UnknownError, "The proxy cannot forward this request"
