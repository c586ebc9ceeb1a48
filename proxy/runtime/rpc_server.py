"""The answering side of the RPC: identifies callers, checks their right to a method, runs handlers with deadlines."""

from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import trio
from google.protobuf.message import DecodeError

from proto.roles import may_call
from proto.rpc_frames import Call, Cancel, Frame, Reply, RpcCorrupt, RpcDecoder, encode_reply
from proto.rpc_pb2 import Method, Status
from proxy.runtime.logs import get_logger
from proxy.runtime.peers import Caller
from proxy.runtime.reactor import read_all
from proxy.runtime.rpc_writer import BatchedWriter, WriterFull
from proxy.runtime.tasks import InFlight, seconds

RPC_FRAME_OVERHEAD_BYTES = 64 * 1024
"""Room in an RPC frame beside the one large thing that it carries."""

CALLS_PER_CONNECTION_MAX = 20_000

_OK = int(Status.OK)  # as a name of its enum it would be searched for each time

Handler = Callable[[bytes, Caller], Awaitable[bytes]]
"""Takes the serialized request and the caller, gives the serialized response; raises RpcRefused."""

Answer = Callable[[bytes, bool], None]
"""Takes a part of the response, and whether more follow it; may be called at any time, by anybody, until the last."""


@dataclass(frozen=True, slots=True)
class InParts:
    """A handler without a task of its own, which answers in parts, when it can. It raises RpcRefused, DecodeError."""

    handle: Callable[[bytes, Caller, Answer], None]


Identify = Callable[[trio.socket.SocketType], Caller | None]


class RpcRefused(Exception):
    """A handler's refusal: travels to the caller as the reply's status and detail."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


class RpcServer:
    """Serves methods on connections. One instance may serve many connections and listeners at a time."""

    def __init__(self, handlers: Mapping[int, Handler | InParts], *, max_frame_bytes: int) -> None:
        self._handlers = handlers
        self._max_frame_bytes = max_frame_bytes
        self._accepting = trio.CancelScope()
        self.connections = InFlight()

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
        connection = _Connection(self._handlers, caller, stream, self._max_frame_bytes)
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
        handlers: Mapping[int, Handler | InParts],
        caller: Caller,
        stream: trio.abc.HalfCloseableStream,
        max_frame_bytes: int,
    ) -> None:
        self._handlers = handlers
        self._caller = caller
        self._stream = stream
        self._decoder = RpcDecoder(max_frame_bytes=max_frame_bytes)
        self._writer = BatchedWriter(stream, max_buffered_bytes=8 * max_frame_bytes)
        self._calls = 0
        self._over = False
        self._backlog: deque[bytes] = deque()
        self._scopes: dict[int, trio.CancelScope] = {}

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._writer.run)
            try:
                await self._read(nursery)
            finally:
                self._over = True  # an answer must not start a task in a nursery that is ending
            nursery.cancel_scope.cancel()

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
            self._writer.write(
                _reply(call, Status.CLUSTER_AUTHORIZATION_FAILED, f"{self._caller.role} may not {_name(call.method)}")
            )
        elif handler is None:
            self._writer.write(_reply(call, Status.UNSUPPORTED_VERSION, f"{_name(call.method)} is not served here"))
        elif self._calls >= CALLS_PER_CONNECTION_MAX:
            self._writer.write(_reply(call, Status.TOO_MANY_REQUESTS, "too many calls in flight"))
        else:
            self._calls += 1
            if isinstance(handler, InParts):
                self._begin_in_parts(handler, call, nursery)
            else:
                nursery.start_soon(self._run_call, handler, call)

    def _begin_in_parts(self, handler: InParts, call: Call, nursery: trio.Nursery) -> None:
        over = False

        def answer(part: bytes, more: bool) -> None:  # noqa: FBT001 -- an Answer
            nonlocal over
            if over or self._over:
                return
            if not more:
                over = True
                self._calls -= 1
            self._write_in_turn(_reply(call, _OK, "", part, more=more), nursery)

        try:
            handler.handle(call.request, self._caller, answer)
        except Exception as error:  # noqa: BLE001 -- see _run_call
            if not over:
                over = True
                self._calls -= 1
                self._write_in_turn(_failure(call, error), nursery)

    def _write_in_turn(self, reply: bytes, nursery: trio.Nursery) -> None:
        """Write, or wait for room behind those that wait already: the parts of a reply must keep their order."""
        if not self._backlog:
            try:
                self._writer.write(reply)
            except WriterFull:
                self._backlog.append(reply)
                nursery.start_soon(self._write_backlog)
        else:
            self._backlog.append(reply)

    async def _write_backlog(self) -> None:
        while self._backlog:
            await self._writer.write_when_there_is_room(self._backlog[0])
            self._backlog.popleft()

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
        await self._writer.write_when_there_is_room(reply)
        self._calls -= 1
        self._scopes.pop(call.correlation_id, None)


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
