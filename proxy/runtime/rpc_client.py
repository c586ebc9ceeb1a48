"""The calling side of the RPC: one connection to one worker's socket, kept up for as long as the caller lives.

The supervisor owns the sockets, so connecting works even while the worker behind one is being replaced: the call then
waits in the socket's queue, within its deadline.
"""

import contextlib
import itertools
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import trio
from google.protobuf.message import DecodeError, Message

from proto.rpc_frames import RpcCorrupt, RpcDecoder, encode_rpc
from proto.rpc_pb2 import Call, Frame, Reply, Status
from proxy.runtime.rpc_writer import BatchedWriter, WriterFull
from proxy.runtime.tasks import Backoff

QUIESCE_LOOK_S = 0.005

RETRIES_MAX = 5
"""A call whose very answer breaks the connection must not go on for ever."""

ResponseT = TypeVar("ResponseT", bound=Message)

Connect = Callable[[], Awaitable[trio.abc.HalfCloseableStream]]


class RpcError(Exception):
    """A call that brought no response."""


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


class RpcResponseCorrupt(RpcError):
    """The other side answered with bytes that are no response to this call."""


class _Pending:
    """A caller that waits for its reply."""

    __slots__ = ("done", "reply")

    def __init__(self) -> None:
        self.done = trio.Event()
        self.reply: Reply | None = None


class RpcClient:
    """Calls to one worker. ``run`` keeps the connection; ``call`` may be used by any number of tasks."""

    def __init__(self, connect: Connect, *, max_frame_bytes: int) -> None:
        self._connect = connect
        self._max_frame_bytes = max_frame_bytes
        self._pending: dict[int, _Pending] = {}
        # Not from 1: over a channel that was inherited, the answer to another program's call may still come.
        self._ids = itertools.count(secrets.randbits(32))
        self._writer: BatchedWriter | None = None
        self._decoder: RpcDecoder | None = None
        self._resumed = trio.Event()
        self._resumed.set()
        self._connected = trio.Event()
        self._over = False
        self._waiting = 0
        self.suspect = False
        """Whether the last call that ended ended by its deadline: the worker may hang."""

    @property
    def in_flight(self) -> int:
        """How many calls wait for their reply, or for a connection to begin."""
        return len(self._pending) + self._waiting

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
        backoff = Backoff(first_s=0.01, most_s=1.0)
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
            nursery.start_soon(writer.run)
            self._writer = writer
            self.suspect = False  # the worker that hung was replaced
            self._connected.set()
            while data := await stream.receive_some(262_144):
                backoff.reset()
                decoder.receive_data(data)
                while (frame := decoder.next_frame()) is not None:
                    self._take(frame)
            nursery.cancel_scope.cancel()

    def _take(self, frame: Frame) -> None:
        if not frame.HasField("reply"):
            raise RpcCorrupt("a worker sent something that is no reply")
        # A reply that nobody waits for came after its deadline, or twice: it is dropped.
        self.suspect = False
        pending = self._pending.pop(frame.reply.correlation_id, None)
        if pending is not None:
            pending.reply = frame.reply
            pending.done.set()

    def _lose(self) -> None:
        self._writer = None
        self._connected = trio.Event()
        pending, self._pending = self._pending, {}
        for one in pending.values():
            one.done.set()

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
                    reply = await self._call_once(method, body, deadline)
            except trio.TooSlowError:
                self.suspect = True
                raise RpcDeadlineExceeded(f"no answer within {timeout_s} s") from None
            except RpcConnectionLost:
                if not retries_left or self._over:
                    raise
                retries_left -= 1
                continue
            if reply.status != Status.OK:
                raise RpcCallRefused(reply.status, reply.detail)
            try:
                return response_type.FromString(reply.response)
            except DecodeError:
                raise RpcResponseCorrupt(f"bytes that are no {response_type.__name__}") from None

    def tell(self, method: int, request: Message, *, timeout_s: float) -> None:
        """Call a method whose answer nobody waits for; nothing is told where there is no connection."""
        call = Call(
            correlation_id=next(self._ids),
            method=method,  # type: ignore[arg-type]
            timeout_ms=int(timeout_s * 1000),
            request=request.SerializeToString(),
        )
        if self._writer is not None and self._resumed.is_set():
            with contextlib.suppress(WriterFull):
                self._writer.write(encode_rpc(Frame(call=call)))

    async def _call_once(self, method: int, body: bytes, deadline: float) -> Reply:
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
        call = Call(correlation_id=correlation_id, method=method, timeout_ms=timeout_ms, request=body)  # type: ignore[arg-type]
        pending = self._pending[correlation_id] = _Pending()
        try:
            writer.write(encode_rpc(Frame(call=call)))
            await pending.done.wait()
        except trio.Cancelled:
            with contextlib.suppress(WriterFull):
                writer.write(encode_rpc(Frame(cancel={"correlation_id": correlation_id})))
            raise
        except WriterFull:
            raise RpcCallRefused(Status.TOO_MANY_REQUESTS, "the worker does not keep up") from None
        finally:
            self._pending.pop(correlation_id, None)
        if pending.reply is None:
            raise RpcConnectionLost("the worker went away")
        return pending.reply


class RpcPool:
    """The workers of one role; each call goes to the one with the fewest in flight."""

    def __init__(self, clients: Sequence[RpcClient]) -> None:
        self._clients = clients
        self._turn = itertools.count()

    def pick(self) -> RpcClient:
        """The least busy client, in turn where several are; one without a connection, or that let a deadline pass, only
        where there is no other.
        """
        start = next(self._turn) % len(self._clients)
        rotated = [*self._clients[start:], *self._clients[:start]]
        return min(rotated, key=lambda client: (client.suspect, not client.connected, client.in_flight))

    async def run(self) -> None:
        """Keep all connections."""
        async with trio.open_nursery() as nursery:
            for client in self._clients:
                nursery.start_soon(client.run)


def _status_name(status: int) -> str:
    try:
        return Status.Name(status)
    except ValueError:  # a newer worker's
        return f"status {status}"


def connect_unix(path: str) -> Connect:
    """A way to connect to a worker's socket."""

    async def connect() -> trio.abc.HalfCloseableStream:
        return await trio.open_unix_socket(path)

    return connect
