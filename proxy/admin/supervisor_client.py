"""The admin worker's RPC client of the supervisor, on a socket of its own."""

import contextlib
import socket

import trio

from proto.rpc_pb2 import Empty, Method, Places, Reasons, Text
from proxy.common.errors import ProxyError
from proxy.runtime.process.descriptors import adopt_socket
from proxy.runtime.process.listener_channel import request_listeners
from proxy.runtime.process.process_identity import ProcessIdentity
from proxy.runtime.process.worker import CONTROL_FRAME_BYTES_MAX
from proxy.runtime.rpc.client import NoMoreConnections, RpcClient
from proxy.runtime.rpc.errors import RpcError

ANSWER_TIMEOUT_S = 5.0
"""Longer than the supervisor waits for a worker (proxy.supervisor.operators.report)."""

GONE_TIMEOUT_S = 30.0
"""After this long without an acknowledgement, or room, a client is taken for gone: a viewer of the page that has lost
its network would keep its place for a quarter of an hour.
"""

HEALTH_INTERVAL_S = 5.0
SILENCE_S_MAX = 15.0
"""After this long without an answer the supervisor counts as unresponsive; shorter delays are a busy machine's."""


class ChannelLost(ProxyError):
    """The supervisor has closed the socket."""


class SupervisorClient:
    """The channel to the supervisor: first ``receive_listener``, then ``run`` as a task beside all calls."""

    def __init__(self, descriptor: int) -> None:
        self._socket = adopt_socket(descriptor)
        self._rpc = RpcClient(self._connect_once, max_frame_bytes=CONTROL_FRAME_BYTES_MAX)
        self._connected = False
        self._last_answer_s = float("-inf")

    async def receive_listener(self) -> trio.SocketListener:
        """Request and return the operators' listener. Raises ChannelLost."""
        try:
            [listener] = (await request_listeners(self._socket)).values()
        except ConnectionAbortedError as error:
            raise ChannelLost(str(error)) from None
        self._last_answer_s = trio.current_time()
        # Accepted connections inherit it (tcp(7)).
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(GONE_TIMEOUT_S * 1000))
        return trio.SocketListener(trio.socket.from_stdlib_socket(listener))

    async def run(self) -> None:
        """Run the channel and poll the supervisor's health; return when it has closed the channel."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._poll_supervisor)
            await self._rpc.run()
            nursery.cancel_scope.cancel()

    async def _poll_supervisor(self) -> None:
        while True:
            with contextlib.suppress(RpcError):
                await self._rpc.call(Method.REPORT_HEALTH, Empty(), Empty, timeout_s=ANSWER_TIMEOUT_S)
                self._last_answer_s = trio.current_time()
            await trio.sleep(HEALTH_INTERVAL_S)

    async def _connect_once(self) -> trio.abc.HalfCloseableStream:
        if self._connected:
            raise NoMoreConnections
        self._connected = True
        return trio.SocketStream(trio.socket.from_stdlib_socket(self._socket))

    def is_responsive(self) -> bool:
        """Return True if the supervisor has answered within SILENCE_S_MAX."""
        return trio.current_time() - self._last_answer_s < SILENCE_S_MAX

    async def readiness(self) -> Reasons:
        """Return why load balancers should send no clients here now, and which would fail all the same. Raises
        RpcError.
        """
        return await self._rpc.call(Method.REPORT_READINESS, Empty(), Reasons, timeout_s=ANSWER_TIMEOUT_S)

    async def status(self) -> str:
        """Return the status of the whole cluster as JSON. Raises RpcError."""
        return (await self._rpc.call(Method.REPORT_STATUS, Empty(), Text, timeout_s=ANSWER_TIMEOUT_S)).text

    async def overview(self) -> str:
        """Return what the page shows, as JSON in one line. Raises RpcError."""
        return (await self._rpc.call(Method.REPORT_OVERVIEW, Empty(), Text, timeout_s=ANSWER_TIMEOUT_S)).text

    async def places(self) -> list[ProcessIdentity]:
        """Return the processes whose metrics can be read. Raises RpcError."""
        reply = await self._rpc.call(Method.REPORT_PLACES, Empty(), Places, timeout_s=ANSWER_TIMEOUT_S)
        return [ProcessIdentity.from_protobuf(place) for place in reply.places]

    async def metrics(self, place: ProcessIdentity) -> str:
        """Return one process's metrics. Raises RpcError."""
        request = place.to_protobuf()
        return (await self._rpc.call(Method.REPORT_METRICS, request, Text, timeout_s=ANSWER_TIMEOUT_S)).text
