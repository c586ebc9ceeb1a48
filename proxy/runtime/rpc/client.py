"""The calling side of the RPC: one connection to one worker's socket, reconnected whenever it is lost.

The supervisor owns the sockets, so connecting works even while the worker behind one is being replaced: the call then
waits in the socket's queue, within its deadline.
"""

import contextlib
import itertools
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import trio
from google.protobuf.message import Message

from proto.rpc_frames import Call, Cancel, Frame, Reply, RpcCorrupt, RpcDecoder, encode_call, encode_cancel
from proto.rpc_pb2 import Status
from proxy.common.errors import ProxyError
from proxy.common.logs import get_logger
from proxy.runtime.loop.reactor import read_all
from proxy.runtime.loop.tasks import Backoff, run_every
from proxy.runtime.rpc.errors import RpcCallRefused, RpcConnectionLost, RpcDeadlineExceeded
from proxy.runtime.rpc.peers import bound_path, peer_credentials
from proxy.runtime.rpc.replies import CallbackReply, PendingCall, ReplyReceiver, ResponseT, parse_whole
from proxy.runtime.rpc.writer import BatchedWriter, WriterFull

QUIESCE_POLL_INTERVAL_S = 0.005
OVERDUE_CHECK_INTERVAL_S = 0.25

RETRIES_MAX = 5
"""Limit of retries: a call whose answer itself breaks the connection must not be repeated for ever."""

Connect = Callable[[], Awaitable[trio.abc.HalfCloseableStream]]


class NoMoreConnections(ProxyError):
    """No further connection can be made; a Connect function raises it to end ``RpcClient.run``."""


class RpcClient:
    """A client of one worker. ``run`` keeps the connection; any number of tasks may call at a time."""

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
        self._reply_received = False
        self.suspect = False
        """True while the last call that ended was ended by its deadline: the worker may hang."""

    @property
    def in_flight(self) -> int:
        """Number of calls that wait for their reply, or for a connection."""
        return len(self._pending) + self._waiting

    @property
    def awaits_first_reply(self) -> bool:
        """True while calls wait on a connection that has not brought any reply yet: its worker may not run yet, since
        the supervisor owns the socket.
        """
        return not self._reply_received and self.in_flight > 0

    @property
    def connected(self) -> bool:
        """True while a call would be sent at once."""
        return self._writer is not None

    async def quiesce(self, *, timeout_s: float) -> bool:
        """Hold new calls back until ``resume`` and wait for those under way to end, at most ``timeout_s`` seconds.

        Return True if the connection exists and is idle: its descriptor may then be handed to another program.
        """
        if self._resumed.is_set():
            self._resumed = trio.Event()
        with trio.move_on_after(timeout_s):
            while not self._is_quiet():  # noqa: ASYNC110 -- happens once, at an upgrade
                await trio.sleep(QUIESCE_POLL_INTERVAL_S)
            return self._writer is not None
        return False

    def resume(self) -> None:
        """Send calls again after ``quiesce``."""
        self._resumed.set()

    def _is_quiet(self) -> bool:
        nothing_written = self._writer is None or self._writer.is_empty
        nothing_read = self._decoder is None or self._decoder.is_empty
        return not self._pending and nothing_written and nothing_read

    def new_id(self) -> int:
        """Return a number that this client has not used, to name an exchange of several calls."""
        return next(self._ids)

    async def run(self) -> None:
        """Connect, and reconnect whenever the connection is lost, until cancelled. Pending calls fail when it ends."""
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
                await self._serve_connection(stream, backoff)
            except* (trio.BrokenResourceError, trio.ClosedResourceError, RpcCorrupt):
                pass
            finally:
                self._on_disconnected()
                with trio.CancelScope(shield=True):
                    await trio.aclose_forcefully(stream)
            await trio.sleep(backoff.next_pause_s())

    async def _serve_connection(self, stream: trio.abc.HalfCloseableStream, backoff: Backoff) -> None:
        decoder = self._decoder = RpcDecoder(max_frame_bytes=self._max_frame_bytes)
        writer = BatchedWriter(stream, max_buffered_bytes=8 * self._max_frame_bytes)
        async with trio.open_nursery() as nursery:
            self._reply_received = False
            nursery.start_soon(writer.run)
            nursery.start_soon(run_every, OVERDUE_CHECK_INTERVAL_S, self._drop_overdue)
            self._writer = writer
            self.suspect = False  # the worker that hung was replaced
            self._connected.set()

            def on_data(data: bytes | bytearray) -> None:
                backoff.reset()
                decoder.receive_data(data)
                while (frame := decoder.next_frame()) is not None:
                    self._on_frame(frame)

            await read_all(stream, on_data)
            nursery.cancel_scope.cancel()

    def _on_frame(self, frame: Frame) -> None:
        if not isinstance(frame, Reply):
            raise RpcCorrupt("a worker sent something that is no reply")
        # A reply to no pending call came after its deadline, or twice: it is dropped.
        self.suspect = False
        self._reply_received = True
        if frame.has_more:
            pending = self._pending.get(frame.correlation_id)
        else:
            pending = self._pending.pop(frame.correlation_id, None)
        if pending is not None:
            pending.on_part(frame)

    def _on_disconnected(self) -> None:
        self._writer = None
        self._connected = trio.Event()
        pending, self._pending = self._pending, {}
        for one in pending.values():
            one.on_lost()

    async def call(
        self, method: int, request: Message, response_type: type[ResponseT], *, timeout_s: float, retry: bool = False
    ) -> ResponseT:
        """Call a method and return its response. Raises a subclass of RpcError.

        ``retry``: send the call again over a new connection when the old one is lost, RETRIES_MAX times within the same
        deadline. Only for calls that may be carried out twice, such as lookups, never for a round of authentication.
        """
        retries_left = RETRIES_MAX if retry else 0
        deadline = trio.current_time() + timeout_s
        body = request.SerializeToString()
        while True:
            try:
                with trio.fail_at(deadline):
                    return await self._call_once(method, body, response_type, deadline)
            except trio.TooSlowError:
                raise RpcDeadlineExceeded(f"no answer within {timeout_s} s") from None
            except RpcConnectionLost:
                if not retries_left or self._over:
                    raise
                retries_left -= 1

    def send_notification(self, method: int, request: Message, *, timeout_s: float) -> None:
        """Send a call and ignore its reply. Without a connection the call is dropped."""
        call = Call(next(self._ids), method, int(timeout_s * 1000), request.SerializeToString())
        if self._writer is not None and self._resumed.is_set():
            with contextlib.suppress(WriterFull):
                self._writer.write(encode_call(call))

    def start_call(
        self, method: int, body: bytes, on_reply: Callable[[Reply | None], None], *, timeout_ms: int, deadline: float
    ) -> int | None:
        """Start a call without a task that waits for it; return its number, or None if it cannot be sent now.

        ``on_reply`` gets each part of the reply, or None once no more will come: the worker is gone, or the deadline
        has passed. ``timeout_ms``: the same as ``deadline`` (Trio's clock), for the worker.
        """
        writer = self._writer
        if writer is None or not self._resumed.is_set():
            return None
        correlation_id = next(self._ids)
        try:
            writer.write(encode_call(Call(correlation_id, method, timeout_ms, body)))
        except WriterFull:
            return None
        self._pending[correlation_id] = CallbackReply(on_reply, deadline)
        return correlation_id

    def cancel_call(self, number: int) -> None:
        """Cancel a call of ``start_call``: its callback gets nothing more, and the worker drops it."""
        if self._pending.pop(number, None) is not None and self._writer is not None:
            with contextlib.suppress(WriterFull):
                self._writer.write(encode_cancel(Cancel(number)))

    async def _drop_overdue(self) -> None:
        now = trio.current_time()
        overdue = [one for one in self._pending.items() if isinstance(one[1], CallbackReply) and one[1].deadline <= now]
        for correlation_id, pending in overdue:
            self.suspect = True
            if self._pending.pop(correlation_id, None) is not None:
                pending.on_lost()

    async def _call_once(self, method: int, body: bytes, response_type: type[ResponseT], deadline: float) -> ResponseT:
        async with self.open_call(method, body, deadline) as pending:
            response, more = await pending.next_part()
            return parse_whole(response, response_type, more=more)

    @asynccontextmanager
    async def open_call(self, method: int, body: bytes, deadline: float) -> AsyncIterator[PendingCall]:
        """Open a call with a reply in parts; parts that come after the end of the context are dropped.

        ``deadline`` (Trio's clock) is sent to the worker; the caller must enforce it on this side. Raises
        RpcConnectionLost, RpcCallRefused.
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


class WrongListener(ProxyError, OSError):
    """Another process than expected listens at a Unix socket's path: it has put a socket of its own in its place."""


def unix_connector(path: str, *, listener_pid: int | None = None) -> Connect:
    """Return a function that connects to the Unix socket at ``path``.

    ``listener_pid``: the process that has called listen(2) there. The function raises WrongListener where another one
    has, or where the socket was bound under another name (one worker's was moved to the place of another's), before
    anything is sent.
    """

    async def connect() -> trio.abc.HalfCloseableStream:
        stream = await trio.open_unix_socket(path)
        if listener_pid is None:
            return stream
        found_pid, _ = peer_credentials(stream.socket)
        bound = bound_path(stream.socket)
        if found_pid != listener_pid or bound.name != Path(path).name:
            await trio.aclose_forcefully(stream)
            get_logger().error(
                "another process listens at a worker's socket; it gets no call",
                path=path,
                pid=found_pid,
                bound=str(bound),
            )
            raise WrongListener(f"{path}: process {found_pid} listens at {bound}, not {listener_pid}")
        return stream

    return connect
