"""The calling side of the RPC: one connection to one worker's socket, kept up for as long as the caller lives.

The supervisor owns the sockets, so connecting works even while the worker behind one is being replaced: the call then
waits in the socket's queue, within its deadline.
"""

import contextlib
import itertools
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

import trio
from google.protobuf.message import DecodeError, Message

from proto.rpc_frames import Call, Cancel, Frame, Reply, RpcCorrupt, RpcDecoder, encode_call, encode_cancel
from proto.rpc_pb2 import Status
from proxy.common.logs import get_logger
from proxy.runtime.loop.reactor import read_all
from proxy.runtime.loop.tasks import Backoff, run_every
from proxy.runtime.rpc.writer import BatchedWriter, WriterFull

QUIESCE_LOOK_S = 0.005
OVERDUE_LOOK_S = 0.25

RETRIES_MAX = 5
"""A call whose very answer breaks the connection must not go on for ever."""

ResponseT = TypeVar("ResponseT", bound=Message)

Connect = Callable[[], Awaitable[trio.abc.HalfCloseableStream]]


class RpcError(Exception):
    """A call that brought no response."""

    @property
    def reason(self) -> str:
        """What an operator is told: words, without the names of statuses."""
        return str(self)


class RpcConnectionLost(RpcError):
    """The connection broke while the call was under way; whether it was carried out is unknown."""


class RpcDeadlineExceeded(RpcError):
    """No answer in time. One that comes later is dropped."""


class NoMoreConnections(Exception):
    """What a Connect raises when there never will be another connection."""


class RpcCallRefused(RpcError):
    """The other side answered with a status other than OK."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(f"{_status_name(status)}: {detail}")
        self.status = status
        self._detail = detail

    @property
    def reason(self) -> str:
        """What the other side said of it; of a defect of its own it says nothing of use."""
        return (
            "a defect of the proxy's; its log says more" if self.status == Status.UNKNOWN_SERVER_ERROR else self._detail
        )


class RpcResponseCorrupt(RpcError):
    """The other side answered with bytes that are no response to this call."""


class ReplyReceiver(Protocol):
    """Who waits for a call's reply."""

    def on_part(self, reply: Reply) -> None:
        """A part has come, or the whole."""
        ...

    def on_lost(self) -> None:
        """Nothing will come any more."""
        ...


class CallbackReply:
    """Somebody without a task: ``on_reply`` gets each part, or None where nothing will come any more."""

    __slots__ = ("deadline", "on_reply")

    def __init__(self, on_reply: Callable[[Reply | None], None], deadline: float) -> None:
        self.on_reply = on_reply
        self.deadline = deadline

    def on_part(self, reply: Reply | None) -> None:
        """Pass it on. A defect that one reply meets must not end the connection of all the others."""
        try:
            self.on_reply(reply)
        except Exception as error:  # noqa: BLE001 -- see above
            get_logger().error("a reply met a defect", exc_info=error)

    def on_lost(self) -> None:
        """Pass that on, too."""
        self.on_part(None)


class PendingCall:
    """A call that a task waits for. Its reply may come in parts."""

    __slots__ = ("_arrived", "_lost", "_replies")

    def __init__(self) -> None:
        self._arrived = trio.Event()
        self._replies: deque[Reply] = deque()
        self._lost = False

    def on_part(self, reply: Reply) -> None:
        """A part has come."""
        self._replies.append(reply)
        self._arrived.set()

    def on_lost(self) -> None:
        """Nothing will come any more."""
        self._lost = True
        self._arrived.set()

    async def next_part(self) -> tuple[bytes, bool]:
        """The next part, and whether more follow it. Raises RpcCallRefused, RpcConnectionLost."""
        while not self._replies:
            if self._lost:
                raise RpcConnectionLost("the worker went away")
            self._arrived = trio.Event()
            await self._arrived.wait()
        reply = self._replies.popleft()
        if reply.status != Status.OK:
            raise RpcCallRefused(reply.status, reply.detail)
        return reply.response, reply.has_more


class RpcClient:
    """Calls to one worker. ``run`` keeps the connection; ``call`` may be used by any number of tasks."""

    def __init__(self, connect: Connect, *, max_frame_bytes: int) -> None:
        self._connect = connect
        self._max_frame_bytes = max_frame_bytes
        self._pending: dict[int, ReplyReceiver] = {}
        # Not from 1: over a channel that was inherited, the answer to another program's call may still come.
        self._ids = itertools.count(secrets.randbits(32))
        self._writer: BatchedWriter | None = None
        self._decoder: RpcDecoder | None = None
        self._resumed = trio.Event()
        self._resumed.set()
        self._connected = trio.Event()
        self._over = False
        self._waiting = 0
        self._heard = False
        self.suspect = False
        """Whether the last call that ended ended by its deadline: the worker may hang."""

    @property
    def in_flight(self) -> int:
        """How many calls wait for their reply, or for a connection to begin."""
        return len(self._pending) + self._waiting

    @property
    def awaits_first_reply(self) -> bool:
        """Whether calls wait on a connection where nothing was heard yet: its worker may not be there yet, since the
        supervisor owns the socket.
        """
        return not self._heard and self.in_flight > 0

    @property
    def connected(self) -> bool:
        """Whether a call would go out at once."""
        return self._writer is not None

    async def quiesce(self, *, timeout_s: float) -> bool:
        """Begin no call until ``resume``, and let those under way end; whether nothing is on its way then: the
        connection's descriptor may be handed to another program.
        """
        if self._resumed.is_set():
            self._resumed = trio.Event()
        with trio.move_on_after(timeout_s):
            while not self._is_quiet():  # noqa: ASYNC110 -- once in a cluster's life
                await trio.sleep(QUIESCE_LOOK_S)
            return self._writer is not None
        return False

    def resume(self) -> None:
        """Let calls go out again."""
        self._resumed.set()

    def _is_quiet(self) -> bool:
        nothing_written = self._writer is None or self._writer.is_empty
        nothing_read = self._decoder is None or self._decoder.is_empty
        return not self._pending and nothing_written and nothing_read

    def new_id(self) -> int:
        """A number that is unique among this client's, for naming multi-call exchanges."""
        return next(self._ids)

    async def run(self) -> None:
        """Connect, and connect again whenever the connection is lost, until cancelled. No call outlives it."""
        try:
            await self._keep_connected()
        finally:
            self._over = True
            self._connected.set()

    async def _keep_connected(self) -> None:
        backoff = Backoff(initial_s=0.01, max_s=1.0)
        while True:
            try:
                stream = await self._connect()
            except OSError:
                await trio.sleep(backoff.next_pause_s())
                continue
            except NoMoreConnections:
                return
            try:
                await self._hold(stream, backoff)
            except* (trio.BrokenResourceError, trio.ClosedResourceError, RpcCorrupt):
                pass
            finally:
                self._lose()
                with trio.CancelScope(shield=True):
                    await trio.aclose_forcefully(stream)
            await trio.sleep(backoff.next_pause_s())

    async def _hold(self, stream: trio.abc.HalfCloseableStream, backoff: Backoff) -> None:
        decoder = self._decoder = RpcDecoder(max_frame_bytes=self._max_frame_bytes)
        writer = BatchedWriter(stream, max_buffered_bytes=8 * self._max_frame_bytes)
        async with trio.open_nursery() as nursery:
            self._heard = False
            nursery.start_soon(writer.run)
            nursery.start_soon(run_every, OVERDUE_LOOK_S, self._drop_overdue)
            self._writer = writer
            self.suspect = False  # the worker that hung was replaced
            self._connected.set()

            def on_data(data: bytes | bytearray) -> None:
                backoff.reset()
                decoder.receive_data(data)
                while (frame := decoder.next_frame()) is not None:
                    self._take(frame)

            await read_all(stream, on_data)
            nursery.cancel_scope.cancel()

    def _take(self, frame: Frame) -> None:
        if not isinstance(frame, Reply):
            raise RpcCorrupt("a worker sent something that is no reply")
        # A reply that nobody waits for came after its deadline, or twice: it is dropped.
        self.suspect = False
        self._heard = True
        if frame.has_more:
            pending = self._pending.get(frame.correlation_id)
        else:
            pending = self._pending.pop(frame.correlation_id, None)
        if pending is not None:
            pending.on_part(frame)

    def _lose(self) -> None:
        self._writer = None
        self._connected = trio.Event()
        pending, self._pending = self._pending, {}
        for one in pending.values():
            one.on_lost()

    async def call(
        self, method: int, request: Message, response_type: type[ResponseT], *, timeout_s: float, retry: bool = False
    ) -> ResponseT:
        """Call a method. Raises RpcError's kinds.

        ``retry`` asks again over a new connection when the old one is lost, a few times within the same deadline: only
        for calls that may be carried out twice, such as lookups, never for a round of authentication.
        """
        retries_left = RETRIES_MAX if retry else 0
        deadline = trio.current_time() + timeout_s
        body = request.SerializeToString()
        while True:
            try:
                with trio.fail_at(deadline):
                    response = await self._call_once(method, body, deadline)
            except trio.TooSlowError:
                raise RpcDeadlineExceeded(f"no answer within {timeout_s} s") from None
            except RpcConnectionLost:
                if not retries_left or self._over:
                    raise
                retries_left -= 1
                continue
            try:
                return response_type.FromString(response)
            except DecodeError:
                raise RpcResponseCorrupt(f"bytes that are no {response_type.__name__}") from None

    def send_notification(self, method: int, request: Message, *, timeout_s: float) -> None:
        """Call a method whose answer nobody waits for; nothing is told where there is no connection."""
        call = Call(next(self._ids), method, int(timeout_s * 1000), request.SerializeToString())
        if self._writer is not None and self._resumed.is_set():
            with contextlib.suppress(WriterFull):
                self._writer.write(encode_call(call))

    def start_call(
        self, method: int, body: bytes, on_reply: Callable[[Reply | None], None], *, timeout_ms: int, deadline: float
    ) -> bool:
        """Begin a call without a task that waits for it; whether it could go out now.

        ``on_reply`` gets each part of the reply, or None where nothing will come any more: the worker has gone, or the
        deadline has passed. ``timeout_ms``: the same as the deadline, for the worker.
        """
        writer = self._writer
        if writer is None or not self._resumed.is_set():
            return False
        correlation_id = next(self._ids)
        try:
            writer.write(encode_call(Call(correlation_id, method, timeout_ms, body)))
        except WriterFull:
            return False
        self._pending[correlation_id] = CallbackReply(on_reply, deadline)
        return True

    async def _drop_overdue(self) -> None:
        now = trio.current_time()
        overdue = [one for one in self._pending.items() if isinstance(one[1], CallbackReply) and one[1].deadline <= now]
        for correlation_id, pending in overdue:
            self.suspect = True
            if self._pending.pop(correlation_id, None) is not None:
                pending.on_lost()

    async def _call_once(self, method: int, body: bytes, deadline: float) -> bytes:
        async with self.open_call(method, body, deadline) as pending:
            response, more = await pending.next_part()
            if more:
                raise RpcResponseCorrupt("a part, where the whole was expected")
            return response

    @asynccontextmanager
    async def open_call(self, method: int, body: bytes, deadline: float) -> AsyncIterator[PendingCall]:
        """Begin a call whose reply comes in parts; what has not come at the end of the context is dropped.

        ``deadline`` is told the worker; to keep it here is the caller's part. Raises RpcConnectionLost, RpcCallRefused.
        """
        while (writer := self._writer) is None or not self._resumed.is_set():
            if self._over:
                raise RpcConnectionLost("the worker has gone")
            self._waiting += 1
            try:
                await (self._connected if writer is None else self._resumed).wait()
            finally:
                self._waiting -= 1
        correlation_id = next(self._ids)
        timeout_ms = max(1, int((deadline - trio.current_time()) * 1000))
        pending = self._pending[correlation_id] = PendingCall()
        try:
            writer.write(encode_call(Call(correlation_id, method, timeout_ms, body)))
            yield pending
        except (trio.Cancelled, RpcDeadlineExceeded):
            self.suspect |= trio.current_time() >= deadline
            with contextlib.suppress(WriterFull):
                writer.write(encode_cancel(Cancel(correlation_id)))
            raise
        except WriterFull:
            raise RpcCallRefused(Status.TOO_MANY_REQUESTS, "the worker does not keep up") from None
        finally:
            self._pending.pop(correlation_id, None)


class RpcPool:
    """The workers of one role; each call goes to the one with the fewest in flight."""

    def __init__(self, clients: Sequence[RpcClient]) -> None:
        self._clients = clients
        self._turn = itertools.count()

    def pick_client(self) -> RpcClient:
        """The least busy client, in turn where several are. One that let a deadline pass, has no connection, or heard
        nothing on it (but for one call, which finds out), only where there is no other.
        """
        if len(self._clients) == 1:
            return self._clients[0]
        start = next(self._turn) % len(self._clients)
        rotated = [*self._clients[start:], *self._clients[:start]]
        return min(rotated, key=_rank)

    async def run(self) -> None:
        """Keep all connections."""
        async with trio.open_nursery() as nursery:
            for client in self._clients:
                nursery.start_soon(client.run)


def _rank(client: RpcClient) -> tuple[bool, bool, bool, int]:
    return client.suspect, not client.connected, client.awaits_first_reply, client.in_flight


def _status_name(status: int) -> str:
    try:
        return Status.Name(status)
    except ValueError:  # a newer worker's
        return f"status {status}"


def unix_connector(path: str) -> Connect:
    """A way to connect to a worker's socket."""

    async def connect() -> trio.abc.HalfCloseableStream:
        return await trio.open_unix_socket(path)

    return connect
