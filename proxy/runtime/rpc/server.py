"""The answering side of the RPC: identifies callers, checks their right to a method, runs handlers with deadlines."""

from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import trio
from google.protobuf.message import DecodeError

from proto.roles import may_call
from proto.rpc_frames import Call, Cancel, Frame, Reply, RpcCorrupt, RpcDecoder, encode_reply
from proto.rpc_pb2 import Method, Status
from proxy.common.logs import get_logger
from proxy.runtime.loop.reactor import read_all
from proxy.runtime.loop.tasks import InFlightCounter, seconds
from proxy.runtime.rpc.peers import Caller
from proxy.runtime.rpc.writer import BatchedWriter, WriterFull

RPC_FRAME_OVERHEAD_BYTES = 64 * 1024
"""Room in an RPC frame beside the one large thing that it carries."""

CALLS_PER_CONNECTION_MAX = 20_000

WAITING_BYTES_MAX = 32 * 1024 * 1024
"""Replies that wait for room in the buffer of a caller that does not read them; above it its connection is closed."""

_OK = int(Status.OK)  # as a name of its enum it would be searched for each time

Handler = Callable[[bytes, Caller], Awaitable[bytes]]
"""Takes the serialized request and the caller, gives the serialized response; raises RpcRefused."""


class ReplyStream(Protocol):
    """Takes a response in parts, each with whether more follow it; at any time, from anybody, until the last."""

    def __call__(self, part: bytes, more: bool, /) -> None:  # noqa: FBT001 -- what every part comes with
        """Reply with a part."""
        ...

    async def wait_until_sent(self) -> None:
        """Wait until the caller's end of the connection has all parts so far, or is no more."""
        ...

    def close_connection(self, reason: str) -> None:
        """Close the caller's connection; whatever is kept for it is dropped."""
        ...


@dataclass(frozen=True, slots=True)
class StreamingHandler:
    """A handler without a task of its own, which answers in parts, when it can. It raises RpcRefused, DecodeError.

    ``unauthorized_response``: the response for a caller whose role may not call the method, where the method has a
    word for that; empty: the call is refused with a status, as those of all other methods.
    """

    handle: Callable[[bytes, Caller, ReplyStream], None]
    unauthorized_response: bytes = b""


Identify = Callable[[trio.socket.SocketType], Caller | None]


class RpcRefused(Exception):
    """A handler's refusal: travels to the caller as the reply's status and detail."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


class RpcServer:
    """Serves methods on connections. One instance may serve many connections and listeners at a time."""

    def __init__(
        self,
        handlers: Mapping[int, Handler | StreamingHandler],
        *,
        max_frame_bytes: int,
        max_waiting_bytes: int = WAITING_BYTES_MAX,
    ) -> None:
        self._handlers = handlers
        self._max_frame_bytes = max_frame_bytes
        self._max_waiting_bytes = max_waiting_bytes
        self._accepting = trio.CancelScope()
        self.connections = InFlightCounter()

    def stop_accepting(self) -> None:
        """Serve the callers that are here, and leave new ones to whoever else waits at the listeners."""
        self._accepting.cancel()

    async def serve_listener(self, listener: trio.SocketListener, identify: Identify) -> None:
        """Accept callers for ever. A stranger is closed without a reply (KIP-590: not on the privileged listener)."""
        log = get_logger()

        async def serve_one(stream: trio.SocketStream) -> None:
            caller = identify(stream.socket)
            if caller is None:
                log.warning(
                    "refused a process that is not part of this cluster", socket=str(stream.socket.getsockname())
                )
                await stream.aclose()
                return
            await self.serve_connection(stream, caller)

        async with trio.open_nursery() as callers:
            with self._accepting:
                await trio.serve_listeners(serve_one, [listener], handler_nursery=callers)

    async def serve_connection(self, stream: trio.abc.HalfCloseableStream, caller: Caller) -> None:
        """Serve one caller until it goes away; its unfinished calls are cancelled then."""
        connection = _Connection(self._handlers, caller, stream, self._max_frame_bytes, self._max_waiting_bytes)
        try:
            with self.connections:
                await connection.run()
        except* (RpcCorrupt, trio.BrokenResourceError, trio.ClosedResourceError, WriterFull) as group:
            get_logger().warning(
                "lost an internal connection", caller=caller.role.value, pid=caller.pid, reason=str(group.exceptions[0])
            )
        finally:
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(stream)


class _Connection:
    """One caller's connection."""

    def __init__(
        self,
        handlers: Mapping[int, Handler | StreamingHandler],
        caller: Caller,
        stream: trio.abc.HalfCloseableStream,
        max_frame_bytes: int,
        max_waiting_bytes: int,
    ) -> None:
        self._handlers = handlers
        self._max_waiting_bytes = max_waiting_bytes
        self._caller = caller
        self._stream = stream
        self._decoder = RpcDecoder(max_frame_bytes=max_frame_bytes)
        self._writer = BatchedWriter(stream, max_buffered_bytes=8 * max_frame_bytes)
        self._calls = 0
        self._over = False
        self._backlog: deque[tuple[bytes, bool]] = deque()
        """Parts of replies that wait for room, and whether each is the last one of its call."""
        self._backlog_taken = 0
        self._backlog_written = 0
        self._waiting_bytes = 0
        self._moved = trio.Event()
        self._broken_off = ""
        self._scopes: dict[int, trio.CancelScope] = {}
        self._nursery: trio.Nursery

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._writer.run)
            try:
                await self._read(nursery)
            finally:
                self._end()
            nursery.cancel_scope.cancel()
        if self._broken_off:
            raise WriterFull(self._broken_off)

    def _end(self) -> None:
        self._over = True  # an answer must not start a task in a nursery that is ending
        self._writer.mark_closed()
        self._moved.set()

    def close_connection(self, reason: str) -> None:
        """End the connection: its caller does not take what is said to it."""
        if not self._over:
            self._broken_off = reason
            self._end()
            self._nursery.cancel_scope.cancel()

    async def _read(self, nursery: trio.Nursery) -> None:
        def on_data(data: bytes | bytearray) -> None:
            self._decoder.receive_data(data)
            while (frame := self._decoder.next_frame()) is not None:
                self._take(frame, nursery)

        await read_all(self._stream, on_data)

    def _take(self, frame: Frame, nursery: trio.Nursery) -> None:
        if isinstance(frame, Cancel):
            scope = self._scopes.get(frame.correlation_id)
            if scope is not None:
                scope.cancel()
            return
        if not isinstance(frame, Call):
            raise RpcCorrupt("a caller sent something that is no call")
        call = frame
        handler = self._handlers.get(call.method)
        if not may_call(self._caller.role, call.method):
            get_logger().error(
                "a worker asked for what its role may not", caller=self._caller.role.value, method=_name(call.method)
            )
            detail = f"{self._caller.role} may not {_name(call.method)}"
            if isinstance(handler, StreamingHandler) and handler.unauthorized_response:
                self.write_in_turn(_reply(call, _OK, detail, handler.unauthorized_response), ends_call=False)
            else:
                self._refuse(call, Status.CLUSTER_AUTHORIZATION_FAILED, detail)
        elif handler is None:
            self._refuse(call, Status.UNSUPPORTED_VERSION, f"{_name(call.method)} is not served here")
        elif self._calls >= CALLS_PER_CONNECTION_MAX:
            self._refuse(call, Status.TOO_MANY_REQUESTS, "too many calls in flight")
        else:
            self._calls += 1
            if isinstance(handler, StreamingHandler):
                self._begin_in_parts(handler, call)
            else:
                nursery.start_soon(self._run_call, handler, call)

    def _refuse(self, call: Call, status: int, detail: str) -> None:
        self.write_in_turn(_reply(call, status, detail), ends_call=False)

    def _begin_in_parts(self, handler: StreamingHandler, call: Call) -> None:
        answer = _CallReplyStream(self, call)
        try:
            handler.handle(call.request, self._caller, answer)
        except Exception as error:  # noqa: BLE001 -- see _run_call
            answer.fail(error)

    def write_in_turn(self, reply: bytes, *, ends_call: bool) -> None:
        """Write, or wait for room behind those that wait already: the parts of a reply must keep their order. A call
        is under way until the last part is written.
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
                return
        if self._may_wait(len(reply)):
            self._backlog.append((reply, ends_call))
            self._backlog_taken += 1
            if len(self._backlog) == 1:
                self._nursery.start_soon(self._write_backlog)

    def _may_wait(self, size_bytes: int) -> bool:
        """Count a reply that waits; above the bound the connection ends, and nothing waits."""
        self._waiting_bytes += size_bytes
        if self._waiting_bytes > self._max_waiting_bytes:
            self.close_connection("the caller does not take its replies")
        return not self._over

    async def _write_backlog(self) -> None:
        while self._backlog:
            reply, ends_call = self._backlog[0]
            await self._writer.write_when_room(reply)
            self._backlog.popleft()
            self._backlog_written += 1
            self._waiting_bytes -= len(reply)
            self._calls -= ends_call
            self._moved.set()
            self._moved = trio.Event()

    async def wait_until_sent(self) -> None:
        """Wait until all parts of replies so far have left, or the connection is over."""
        end = self._backlog_taken
        while self._backlog_written < end and not self._over:
            await self._moved.wait()
        await self._writer.wait_until_sent()

    async def _run_call(self, handler: Handler, call: Call) -> None:
        wanted = self._scopes[call.correlation_id] = trio.CancelScope()
        response = b""
        try:
            with trio.fail_after(seconds(call.timeout_ms)), wanted:
                response = await handler(call.request, self._caller)
            reply = _reply(call, _OK, "", response)  # if it is not wanted any more, nobody hears it
        except Exception as error:  # noqa: BLE001 -- one bad call must not end the connection of all the others
            reply = _failure(call, error)
        # A caller that reads slowly makes its calls wait here, and count as under way; nobody else's.
        if self._may_wait(len(reply)):
            await self._writer.write_when_room(reply)
            self._waiting_bytes -= len(reply)
        self._calls -= 1
        self._scopes.pop(call.correlation_id, None)


class _CallReplyStream:
    """An Answer: the reply to one call."""

    __slots__ = ("_call", "_connection", "_over")

    def __init__(self, connection: _Connection, call: Call) -> None:
        self._connection = connection
        self._call = call
        self._over = False

    def __call__(self, part: bytes, more: bool, /) -> None:  # noqa: FBT001 -- an Answer
        if not self._over:
            self._over = not more
            self._connection.write_in_turn(_reply(self._call, _OK, "", part, more=more), ends_call=not more)

    def fail(self, error: Exception) -> None:
        """Reply that the call failed, unless it was answered."""
        if not self._over:
            self._over = True
            self._connection.write_in_turn(_failure(self._call, error), ends_call=True)

    async def wait_until_sent(self) -> None:
        await self._connection.wait_until_sent()

    def close_connection(self, reason: str) -> None:
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
