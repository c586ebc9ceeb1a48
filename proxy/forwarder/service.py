"""The forwarding worker's service: takes clients in from the inherited listeners and gives each a session."""

from collections import Counter
from functools import partial

import trio

from proto import commands
from proto.addresses import HostPort
from proto.client_machine import State
from proto.commands import NO_REQUEST_ID
from proto.pulsar_pb2 import ServerError
from proto.roles import Role
from proxy.config.types import Config
from proxy.forwarder.admission import Admission
from proxy.forwarder.backends import Backends
from proxy.forwarder.cause import Cause
from proxy.forwarder.metrics import ForwarderMetrics
from proxy.forwarder.relays import Relays
from proxy.forwarder.session import ClientSession
from proxy.runtime.broker_link import tune_socket
from proxy.runtime.connection_count import ConnectionCounters
from proxy.runtime.descriptors import adopt_listener
from proxy.runtime.logs import get_logger
from proxy.runtime.rpc_client import RpcClient, RpcPool, connect_unix
from proxy.runtime.rpc_server import Handler
from proxy.runtime.tasks import InFlight, close_politely
from proxy.runtime.worker import WorkerContext

TURNED_AWAY_AT_ONCE_MAX = 100
"""Clients that are being told at a time that there is no room; the rest are closed without a word."""


class ForwarderService:
    """See the module."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._metrics = ForwarderMetrics(context.registry)
        self._metrics.active_connections.set_function(lambda: self._admission.connections)
        for state in State:
            gauge = self._metrics.connections_by_state.labels(state=state.value.replace(" ", "_"))
            gauge.set_function(partial(self._count_in, state))
        counters = ConnectionCounters(context.descriptors.connections)
        self._admission = Admission(context.config.limits, counters, context.index)
        self._auth = self._pool(Role.AUTH, context.config.cluster.auth_workers)
        self._lookup = self._pool(Role.LOOKUP, context.config.cluster.lookup_workers)
        self._backends = Backends(context.config, self._auth, self._lookup)
        self._relays = Relays()
        context.registry.register(self._relays)
        self._sessions: set[ClientSession] = set()
        self._in_flight = InFlight()
        self._accepting = trio.CancelScope()
        self._serving = trio.CancelScope()
        self._turning_away = 0

    def _pool(self, role: Role, workers: int) -> RpcPool:
        size = self._context.rpc_frame_bytes_max()
        paths = [self._context.socket_path(role, index) for index in range(workers)]
        return RpcPool([RpcClient(connect_unix(path), max_frame_bytes=size) for path in paths])

    def _count_in(self, state: State) -> int:
        return sum(1 for session in self._sessions if session.state is state)

    def _by_state(self) -> Counter[State]:
        return Counter(session.state for session in self._sessions)

    def handlers(self) -> dict[int, Handler]:
        """A forwarder serves no other worker."""
        return {}

    async def start(self) -> None:
        """Begin to accept."""
        nursery = self._context.nursery
        nursery.start_soon(self._auth.run)
        nursery.start_soon(self._lookup.run)
        nursery.start_soon(self._relays.run)
        nursery.start_soon(self._serve)

    async def configure(self, config: Config) -> None:
        """New settings for connections that come from now on."""
        self._admission.limits = config.limits
        self._backends = Backends(config, self._auth, self._lookup)

    async def drain(self, timeout_s: float) -> None:
        """Accept no more; let clients leave in their own time, then close what is left."""
        self._accepting.cancel()
        for session in list(self._sessions):
            session.drain()
        if not await self._in_flight.wait_until_empty(timeout_s=timeout_s):
            get_logger().warning("the drain's time is over; closing what is left", connections=len(self._sessions))
        self._serving.cancel()

    def status(self) -> dict[str, object]:
        """Connections by state."""
        states = {state.value: count for state, count in self._by_state().items()}
        return {"connections": self._admission.connections, "connections_by_state": states}

    # ---- clients

    async def _serve(self) -> None:
        listeners = [adopt_listener(descriptor) for descriptor in self._context.descriptors.listeners]
        with self._serving:
            async with trio.open_nursery() as clients:
                with self._accepting:
                    await trio.serve_listeners(self._serve_client, listeners, handler_nursery=clients)

    async def _serve_client(self, stream: trio.SocketStream) -> None:
        try:
            ip, port = stream.socket.getpeername()[:2]
            tune_socket(stream.socket)
        except OSError:  # it has gone again
            await trio.aclose_forcefully(stream)
            return
        if self._accepting.cancel_called:  # in the very instant of a drain, which would not wait for it
            await trio.aclose_forcefully(stream)
            return
        address = str(HostPort(ip, port))
        refusal = self._admission.refusal(ip)
        if refusal is not None:
            await self._turn_away(stream, address, refusal)
            return
        self._metrics.new_connections.inc()
        self._admission.enter(ip)
        session = ClientSession(stream, address, self._backends, self._relays, self._metrics)
        self._sessions.add(session)
        try:
            with self._in_flight:
                await session.run()
        except Exception as error:  # noqa: BLE001 -- a defect that one client meets must not end all the others
            get_logger().error("a client's connection met a defect", client=session.address, exc_info=error)
            session.cause = Cause.DEFECT
        finally:
            self._sessions.discard(session)
            self._admission.leave(ip)
            self._metrics.ended_connections.labels(cause=session.cause.value).inc()

    async def _turn_away(self, stream: trio.SocketStream, client: str, reason: str) -> None:
        self._metrics.rejected_connections.labels(reason=reason).inc()
        get_logger().warning("a client was turned away", client=client, reason=reason)
        if self._turning_away >= TURNED_AWAY_AT_ONCE_MAX:
            await trio.aclose_forcefully(stream)
            return
        self._turning_away += 1
        try:
            text = f"The proxy has reached its limit ({reason})"
            with trio.move_on_after(1):
                await stream.send_all(commands.error(NO_REQUEST_ID, ServerError.NotAllowedError, text))
            await close_politely(stream)
        except trio.BrokenResourceError:
            await trio.aclose_forcefully(stream)
        finally:
            self._turning_away -= 1
