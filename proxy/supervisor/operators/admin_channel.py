"""The supervisor's end of the admin worker's channel: health, readiness, status, the page's overview and
metrics, and nothing else.

The worker serves the operators' HTTP port and so reads unauthenticated input. The supervisor, which holds the seal key,
only reads its calls, on a socket of the worker's own (proxy/admin/supervisor_client.py is its other end).
"""

import contextlib
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Generic, TypeVar

import trio

from proto.roles import Role
from proto.rpc_pb2 import Empty, Method, Place, Places, Status, Text
from proxy.common.logs import get_logger
from proxy.runtime.loop.single_flight import SingleFlight
from proxy.runtime.process.listener_channel import pass_listeners, wait_for_request
from proxy.runtime.process.process_identity import ProcessIdentity
from proxy.runtime.rpc.peers import Caller
from proxy.runtime.rpc.server import Handler, RpcRefused, RpcServer
from proxy.supervisor.operators.overview import ClusterOverview
from proxy.supervisor.operators.report import ClusterReport, MetricsTooLarge
from proxy.supervisor.processes.worker_process import WorkerProcess

ADMIN_BACKLOG = 128

FRAME_BYTES_MAX = 64 * 1024
"""Longest request frame."""

CONCURRENT_CALLS_MAX = 32
"""Concurrent calls: each may make the supervisor call every worker."""

REPORT_INTERVAL_S = 0.2
"""Shortest time between the starts of two reports of a kind: each makes every forwarder scan all its sessions."""

ValueT = TypeVar("ValueT")


class RateLimitedAnswer(Generic[ValueT]):
    """Runs ``make`` once for all who ask at the same time, and begins at most once in ``interval_s`` seconds.

    Nothing is kept: who asks after a run waits for the next one.
    """

    def __init__(self, make: Callable[[], Awaitable[ValueT]], interval_s: float) -> None:
        self._make = make
        self._interval_s = interval_s
        self._began_at_s = float("-inf")
        self.current = SingleFlight(self._begin).result
        """Return a fresh answer. Raises what ``make`` raises, in all callers that wait for it."""

    async def _begin(self) -> ValueT:
        await trio.sleep_until(self._began_at_s + self._interval_s)
        self._began_at_s = trio.current_time()
        return await self._make()


class AdminChannel:
    """RPC server for admin workers, each on a socket. ``listener`` returns the descriptor of the operators' port."""

    def __init__(
        self,
        report: ClusterReport,
        overview: ClusterOverview,
        listener: Callable[[], int],
        interval_s: float = REPORT_INTERVAL_S,
    ) -> None:
        self._report = report
        self._listener = listener
        self._interval_s = interval_s
        self._calls = 0
        self._readiness_answer = RateLimitedAnswer(report.readiness, interval_s)
        self._status_json = RateLimitedAnswer(report.status_json, interval_s)
        self._overview_json = RateLimitedAnswer(overview.overview_json, interval_s)
        self._metrics_of: dict[ProcessIdentity, RateLimitedAnswer[str]] = {}

    async def serve(self, worker: WorkerProcess) -> None:
        """Send a worker the operators' listener when it asks for it, and serve its calls until it has ended."""
        sock = worker.questions_socket
        if sock is None:
            raise RuntimeError("an admin worker without a channel to the supervisor")
        with contextlib.closing(sock):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._serve_socket, sock, worker.pid)
                await worker.wait()  # a child of the worker may hold the socket's other end open for longer
                nursery.cancel_scope.cancel()

    async def _serve_socket(self, sock: socket.socket, pid: int) -> None:
        try:
            if not await wait_for_request(sock):
                return
            await pass_listeners(sock, {0: self._listener()})
        except OSError as error:
            get_logger().error("the admin worker was not given its port", reason=str(error))
            sock.close()  # so that it need not wait
            return
        server = RpcServer(self._handlers(), max_frame_bytes=FRAME_BYTES_MAX)
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
        await server.serve_connection(stream, Caller(Role.ADMIN, pid))

    def _handlers(self) -> dict[int, Handler]:
        handlers: dict[int, Handler] = {
            Method.REPORT_HEALTH: self._health,
            Method.REPORT_READINESS: self._readiness,
            Method.REPORT_STATUS: self._status,
            Method.REPORT_PLACES: self._places,
            Method.REPORT_METRICS: self._metrics,
            Method.REPORT_OVERVIEW: self._overview,
        }
        return {method: self._bounded(handler) for method, handler in handlers.items()}

    def _bounded(self, handler: Handler) -> Handler:
        async def handle(data: bytes, caller: Caller) -> bytes:
            if self._calls >= CONCURRENT_CALLS_MAX:
                raise RpcRefused(Status.TOO_MANY_REQUESTS, "too many calls at a time")
            self._calls += 1
            try:
                return await handler(data, caller)
            finally:
                self._calls -= 1

        return handle

    async def _health(self, data: bytes, _caller: Caller) -> bytes:
        Empty.FromString(data)
        await trio.lowlevel.checkpoint()
        return b""

    async def _readiness(self, data: bytes, _caller: Caller) -> bytes:
        Empty.FromString(data)
        return (await self._readiness_answer.current()).SerializeToString()

    async def _status(self, data: bytes, _caller: Caller) -> bytes:
        Empty.FromString(data)
        return Text(text=(await self._status_json.current()).decode()).SerializeToString()

    async def _overview(self, data: bytes, _caller: Caller) -> bytes:
        Empty.FromString(data)
        return Text(text=(await self._overview_json.current()).decode()).SerializeToString()

    async def _places(self, data: bytes, _caller: Caller) -> bytes:
        Empty.FromString(data)
        await trio.lowlevel.checkpoint()
        return Places(places=[place.to_protobuf() for place in self._report.places()]).SerializeToString()

    async def _metrics(self, data: bytes, _caller: Caller) -> bytes:
        place = ProcessIdentity.from_protobuf(Place.FromString(data))
        try:
            text = await self._metrics_at(place)
        except MetricsTooLarge as error:
            raise RpcRefused(Status.INVALID_REQUEST, str(error)) from None
        return Text(text=text).SerializeToString()

    async def _metrics_at(self, place: ProcessIdentity) -> str:
        """Return one process's metrics; "" where there is no such process. Raises MetricsTooLarge."""
        places = self._report.places()
        if place not in places:  # so that there is a bound on how many are kept here
            await trio.lowlevel.checkpoint()
            return ""
        paced = self._metrics_of.get(place)
        if paced is None:
            for ended in self._metrics_of.keys() - set(places):
                del self._metrics_of[ended]
            paced = self._metrics_of[place] = RateLimitedAnswer(partial(self._report.metrics, place), self._interval_s)
        return await paced.current()
