"""The serving side of the RPC: identifies callers, checks their right to a method, runs handlers with deadlines."""

from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import trio
from google.protobuf.message import DecodeError

from proto.roles import may_call
from proto.rpc_frames import Call, Cancel, Frame, Reply, RpcCorrupt, RpcDecoder, encode_reply
from proto.rpc_pb2 import Method, Status
from proxy.common.eager import continue_in_task, start_eagerly
from proxy.common.errors import ProxyError
from proxy.common.logs import get_logger
from proxy.runtime.loop.reactor import read_all
from proxy.runtime.loop.tasks import InFlightCounter, seconds
from proxy.runtime.rpc.peers import Caller
from proxy.runtime.rpc.writer import BatchedWriter, WriterFull

RPC_FRAME_OVERHEAD_BYTES = 64 * 1024
"""Room in an RPC frame beside the one large thing that it carries."""

CONNECTIONS_PER_CALLER_MAX = 4
"""A caller has one; another may be there until this process has noticed the end of the one before."""

CALLS_PER_CONNECTION_MAX = 20_000

EAGER_CALLS_PER_TURN_MAX = 64
"""So many calls of one connection are answered without a task, before it is others' turn: other connections', and that
of the process's tasks. Its further calls wait meanwhile, and nothing is read from it.
"""

WAITING_BYTES_MAX = 32 * 1024 * 1024
"""Bound of replies that wait, over all connections of a server, because callers do not read. Above it the caller for
which most waits loses the connection with most of it.
"""

UNCHECKED_BYTES = 256 * 1024
"""So much may wait for one connection without a look at the others: replies of one tick are sent at its end."""

_OK = int(Status.OK)  # the enum would look the name up at each use

Handler = Callable[[bytes, Caller], Awaitable[bytes]]
"""Takes the serialized request and the caller, returns the serialized response; raises RpcRefused."""


@dataclass(frozen=True, slots=True)
class StreamingHandler:
    """A handler without a task of its own, which replies in parts, possibly later. It raises RpcRefused, DecodeError.

    ``unauthorized_response``: the response to a caller whose role may not call the method, for a method whose response
    can say so. Empty: the call is refused with a status, like those of all other methods.
    """

    handle: Callable[[bytes, Caller, "ReplyStream"], None]
    unauthorized_response: bytes = b""


@dataclass(frozen=True, slots=True)
class EagerHandler:
    """A handler that is started without a task, which its call gets where it calls ``enter_task``
    (proxy.common.eager). A call's deadline and its cancellation concern that task.
    """

    handle: Callable[[bytes, Caller], Coroutine[Any, Any, bytes]]


AnyHandler = Handler | StreamingHandler | EagerHandler

Identify = Callable[[trio.socket.SocketType], Caller | None]


class RpcRefused(ProxyError):
    """A handler's refusal; the caller gets it as the reply's status and detail."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


class RpcServer:
    """A server of RPC methods. One instance may serve many connections and listeners at a time.

    ``max_waiting_bytes``: of replies that wait, over all connections.
    """

    def __init__(
        self,
        handlers: Mapping[int, AnyHandler],
        *,
        max_frame_bytes: int,
        max_waiting_bytes: int = WAITING_BYTES_MAX,
    ) -> None:
        self._handlers = handlers
        self._max_frame_bytes = max_frame_bytes
        self._max_waiting_bytes = max(max_waiting_bytes, 2 * max_frame_bytes)  # the largest reply is not too much
        self._accepting = trio.CancelScope()
        self._connections_by_pid: Counter[int] = Counter()
        self._open: set[_Connection] = set()
        self.connections = InFlightCounter()

    def stop_accepting(self) -> None:
        """Accept no new connections; they queue for the next process that accepts on the same listener."""
        self._accepting.cancel()

    async def serve_listener(self, listener: trio.SocketListener, identify: Identify) -> None:
        """Accept callers until cancelled.

        A process outside the cluster is disconnected without a reply (KIP-590: not on the privileged listener).
        """
        log = get_logger()

        async def serve_one(stream: trio.SocketStream) -> None:
            caller = identify(stream.socket)
            if caller is None:
                log.warning(
                    "refused a process that is not part of this cluster", socket=str(stream.socket.getsockname())
                )
                await stream.aclose()
                return
            if self._connections_by_pid[caller.pid] >= CONNECTIONS_PER_CALLER_MAX:
                log.error(
                    "a worker opens more connections than it needs; refused", caller=caller.role.value, pid=caller.pid
                )
                await trio.aclose_forcefully(stream)
                return
            self._connections_by_pid[caller.pid] += 1
            try:
                await self.serve_connection(stream, caller)
            finally:
                self._connections_by_pid[caller.pid] -= 1
                self._connections_by_pid += Counter()  # without those that have none left

        async with trio.open_nursery() as callers:
            with self._accepting:
                await trio.serve_listeners(serve_one, [listener], handler_nursery=callers)

    async def serve_connection(self, stream: trio.abc.HalfCloseableStream, caller: Caller) -> None:
        """Serve one caller until it disconnects; its unfinished calls are cancelled then."""
        connection = _Connection(self._handlers, caller, stream, self._max_frame_bytes, self._bound_waiting_bytes)
        self._open.add(connection)
        try:
            with self.connections:
                await connection.run()
        except* (RpcCorrupt, trio.BrokenResourceError, trio.ClosedResourceError, WriterFull) as group:
            get_logger().warning(
                "lost an internal connection", caller=caller.role.value, pid=caller.pid, reason=str(group.exceptions[0])
            )
        finally:
            self._open.discard(connection)
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(stream)

    def _bound_waiting_bytes(self) -> None:
        """Close connections until what waits for all of them is within the bound."""
        while sum(one.waiting_bytes for one in self._open) > self._max_waiting_bytes:
            by_caller: Counter[int] = Counter()
            for one in self._open:
                by_caller[one.caller.pid] += one.waiting_bytes
            worst = max(self._open, key=lambda one: (by_caller[one.caller.pid], one.waiting_bytes))
            self._open.discard(worst)
            worst.close_connection("the caller does not take its replies")


class _Connection:
    """One caller's connection: decodes calls, runs handlers, queues replies."""

    def __init__(
        self,
        handlers: Mapping[int, AnyHandler],
        caller: Caller,
        stream: trio.abc.HalfCloseableStream,
        max_frame_bytes: int,
        bound_waiting_bytes: Callable[[], None],
    ) -> None:
        self._handlers = handlers
        self._bound_waiting_bytes = bound_waiting_bytes
        self.caller = caller
        self._stream = stream
        self._decoder = RpcDecoder(max_frame_bytes=max_frame_bytes)
        self._writer = BatchedWriter(stream, max_buffered_bytes=8 * max_frame_bytes)
        self._calls = 0
        self._eager_calls_left = EAGER_CALLS_PER_TURN_MAX
        self._over = False
        self._backlog: deque[tuple[bytes, bool]] = deque()
        """Parts of replies that wait for room; True marks the last part of a call."""
        self._backlog_queued = 0
        self._backlog_written = 0
        self._backlog_bytes = 0
        self._backlog_progress = trio.Event()
        self._close_reason = ""
        self._scopes: dict[int, trio.CancelScope] = {}
        self._nursery: trio.Nursery

    @property
    def waiting_bytes(self) -> int:
        """Number of bytes of replies that the caller has not taken."""
        return self._backlog_bytes + self._writer.unsent_bytes

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._writer.run)
            try:
                await self._read(nursery)
            finally:
                self._on_closed()
            nursery.cancel_scope.cancel()
        if self._close_reason:
            raise WriterFull(self._close_reason)

    def _on_closed(self) -> None:
        self._over = True  # a reply must not start a task in a nursery that is ending
        self._writer.mark_closed()
        self._backlog_progress.set()

    def close_connection(self, reason: str) -> None:
        """Close the connection of a caller that does not read its replies."""
        if not self._over:
            self._close_reason = reason
            self._on_closed()
            self._nursery.cancel_scope.cancel()

    async def _read(self, nursery: trio.Nursery) -> None:
        def process_turn() -> bool:
            self._eager_calls_left = EAGER_CALLS_PER_TURN_MAX
            while self._eager_calls_left:
                if (frame := self._decoder.next_frame()) is None:
                    return False
                self._on_frame(frame, nursery)
            return True

        def on_data(data: bytes | bytearray) -> bool:
            self._decoder.receive_data(data)
            return process_turn()

        await read_all(self._stream, on_data, process_turn)

    def _on_frame(self, frame: Frame, nursery: trio.Nursery) -> None:
        if isinstance(frame, Cancel):
            scope = self._scopes.get(frame.correlation_id)
            if scope is not None:
                scope.cancel()
            return
        if not isinstance(frame, Call):
            raise RpcCorrupt("a caller sent something that is no call")
        call = frame
        handler = self._handlers.get(call.method)
        if not may_call(self.caller.role, call.method):
            get_logger().error(
                "a worker asked for what its role may not", caller=self.caller.role.value, method=_name(call.method)
            )
            detail = f"{self.caller.role} may not {_name(call.method)}"
            if isinstance(handler, StreamingHandler) and handler.unauthorized_response:
                self.write_in_order(_reply(call, _OK, detail, handler.unauthorized_response), ends_call=False)
            else:
                self._refuse(call, Status.CLUSTER_AUTHORIZATION_FAILED, detail)
        elif handler is None:
            self._refuse(call, Status.UNSUPPORTED_VERSION, f"{_name(call.method)} is not served here")
        elif self._calls >= CALLS_PER_CONNECTION_MAX:
            self._refuse(call, Status.TOO_MANY_REQUESTS, "too many calls in flight")
        else:
            self._calls += 1
            if isinstance(handler, StreamingHandler):
                self._start_streaming_call(handler, call)
            elif isinstance(handler, EagerHandler):
                self._start_eager_call(handler, call)
            else:
                nursery.start_soon(self._run_call, partial(handler, call.request, self.caller), call)

    def _refuse(self, call: Call, status: int, detail: str) -> None:
        self.write_in_order(_reply(call, status, detail), ends_call=False)

    def _start_streaming_call(self, handler: StreamingHandler, call: Call) -> None:
        replies = ReplyStream(self, call)
        try:
            handler.handle(call.request, self.caller, replies)
        except Exception as error:  # noqa: BLE001 -- see _run_call
            replies.send_failure(error)

    def _start_eager_call(self, handler: EagerHandler, call: Call) -> None:
        self._eager_calls_left -= 1
        coroutine = handler.handle(call.request, self.caller)
        try:
            finished = start_eagerly(coroutine)
        except Exception as error:  # noqa: BLE001 -- see _run_call
            self.write_in_order(_failure(call, error), ends_call=True)
            return
        if finished is None:
            self._nursery.start_soon(self._run_call, partial(continue_in_task, coroutine), call)
        else:
            self.write_in_order(_reply(call, _OK, "", finished.value), ends_call=True)

    def write_in_order(self, reply: bytes, *, ends_call: bool) -> None:
        """Write a reply, or queue it behind those that wait already: the parts of a reply must keep their order.

        A call counts as under way until its last part is written.
        """
        if self._over:
            return
        if not self._backlog:
            try:
                self._writer.write(reply)
            except WriterFull:
                pass
            else:
                self._calls -= ends_call
                self._check_waiting_bytes()
                return
        if self._may_wait(len(reply)):
            self._backlog.append((reply, ends_call))
            self._backlog_queued += 1
            if len(self._backlog) == 1:
                self._nursery.start_soon(self._write_backlog)

    def _may_wait(self, size_bytes: int) -> bool:
        """Count a reply that waits; return False where the connection was closed because too much waits."""
        self._backlog_bytes += size_bytes
        self._check_waiting_bytes()
        return not self._over

    def _check_waiting_bytes(self) -> None:
        if self.waiting_bytes > UNCHECKED_BYTES:
            self._bound_waiting_bytes()

    async def _write_backlog(self) -> None:
        while self._backlog:
            reply, ends_call = self._backlog[0]
            await self._writer.write_when_room(reply)
            self._backlog.popleft()
            self._backlog_written += 1
            self._backlog_bytes -= len(reply)
            self._calls -= ends_call
            self._backlog_progress.set()
            self._backlog_progress = trio.Event()

    async def wait_until_sent(self) -> None:
        """Wait until all parts of replies so far have been sent, or the connection is closed."""
        end = self._backlog_queued
        while self._backlog_written < end and not self._over:
            await self._backlog_progress.wait()
        await self._writer.wait_until_sent()

    async def _run_call(self, answer: Callable[[], Awaitable[bytes]], call: Call) -> None:
        scope = self._scopes[call.correlation_id] = trio.CancelScope()
        response = b""
        try:
            with trio.fail_after(seconds(call.timeout_ms)), scope:
                response = await answer()
            reply = _reply(call, _OK, "", response)  # to a cancelled call: the caller drops it
        except Exception as error:  # noqa: BLE001 -- one bad call must not end the connection of all the others
            reply = _failure(call, error)
        # Calls of a caller that reads slowly wait here and count as under way; those of other callers do not.
        if self._may_wait(len(reply)):
            await self._writer.write_when_room(reply)
            self._backlog_bytes -= len(reply)
            self._check_waiting_bytes()
        self._calls -= 1
        self._scopes.pop(call.correlation_id, None)


class ReplyStream:
    """The reply to one call, sent in parts: at any time, from any task or callback, until the last part."""

    __slots__ = ("_call", "_connection", "_over")

    def __init__(self, connection: _Connection, call: Call) -> None:
        self._connection = connection
        # Without the request: the handler has it, and need not keep it until the last reply.
        self._call = Call(call.correlation_id, call.method, call.timeout_ms, b"")
        self._over = False

    def __call__(self, part: bytes, more: bool, /) -> None:  # noqa: FBT001 -- what every part comes with
        """Send a part; ``more``: further parts follow."""
        if not self._over:
            self._over = not more
            self._connection.write_in_order(_reply(self._call, _OK, "", part, more=more), ends_call=not more)

    def send_failure(self, error: Exception) -> None:
        """Reply that the call failed, unless its last part was sent."""
        if not self._over:
            self._over = True
            self._connection.write_in_order(_failure(self._call, error), ends_call=True)

    async def wait_until_sent(self) -> None:
        """Wait until all parts so far have been sent, or the connection is closed."""
        await self._connection.wait_until_sent()

    def close_connection(self, reason: str) -> None:
        """Close the caller's connection and drop what is queued for it. ``reason`` is for the log."""
        self._connection.close_connection(reason)


def _failure(call: Call, error: Exception) -> bytes:
    match error:
        case RpcRefused():
            return _reply(call, error.status, error.detail)
        case trio.TooSlowError():
            return _reply(call, Status.REQUEST_TIMED_OUT, f"{_name(call.method)} took too long")
        case DecodeError():
            return _reply(call, Status.INVALID_REQUEST, f"{_name(call.method)}: bytes that are no request")
    get_logger().error("an internal call failed; this is a defect", method=_name(call.method), exc_info=error)
    return _reply(call, Status.UNKNOWN_SERVER_ERROR, type(error).__name__)


def _reply(call: Call, status: int, detail: str, response: bytes = b"", *, more: bool = False) -> bytes:
    return encode_reply(Reply(call.correlation_id, status, response, more, detail))


def _name(method: int) -> str:
    try:
        return Method.Name(method)
    except ValueError:
        return f"method {method}"
