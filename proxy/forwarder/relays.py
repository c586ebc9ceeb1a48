"""All relays of a forwarder, and what they have moved.

Where both sides are plain sockets and the kernel splices, the engine moves the bytes (proxy.forwarder.engine). Anything
else goes the way through user space (proxy.forwarder.relay), behind the same call.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import trio
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from proxy.config.types import Relay
from proxy.forwarder.engine import FIRST_BYTES_MAX, SPLICE_FLAGS, RelayEngine
from proxy.forwarder.relay import relay
from proxy.runtime.logs import get_logger
from proxy.runtime.tasks import seconds

Stream = trio.abc.HalfCloseableStream


class Flow(Protocol):
    """What one direction has moved so far."""

    bytes_moved: int
    operations: int


@dataclass(slots=True)
class Moved:
    """A Flow of its own: of a relay in user space, or the sum over those that have ended."""

    bytes_moved: int = 0
    operations: int = 0

    def count(self, size: int) -> None:
        """One more portion."""
        self.bytes_moved += size
        self.operations += 1

    def add(self, flow: Flow) -> None:
        """Take over what an ended relay moved."""
        self.bytes_moved += flow.bytes_moved
        self.operations += flow.operations


FlowT = TypeVar("FlowT", bound=Flow)


@dataclass(frozen=True, slots=True, eq=False)
class Flows(Generic[FlowT]):
    """Both directions of one relay."""

    to_broker: FlowT
    to_client: FlowT


class Relays(Collector):
    """See the module. As a collector it counts live relays too, so that no event has to touch a metric."""

    def __init__(self) -> None:
        self._engine = RelayEngine() if splice_works() else None
        self._live: set[Flows[Any]] = set()
        self._ended = Flows(Moved(), Moved())

    async def run(self) -> None:
        """Move bytes until cancelled."""
        if self._engine is None:
            get_logger().warning("the kernel refuses to splice; relays go through user space, which costs more")
            return
        await self._engine.run()

    async def relay(
        self,
        client: Stream,
        broker: Stream,
        *,
        first_to_broker: bytes,
        first_to_client: bytes,
        config: Relay,
    ) -> Flows[Moved]:
        """Relay until both directions have ended; closes neither stream. What was read ahead goes first."""
        half_close_timeout_s = seconds(config.half_close_timeout_ms)
        for stream in (client, broker):
            if isinstance(stream, trio.SocketStream):
                # A peer that takes nothing also keeps the other's end from being seen: it stands behind the bytes.
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, config.user_timeout_ms)
        if (
            self._engine is None
            or not isinstance(client, trio.SocketStream)
            or not isinstance(broker, trio.SocketStream)
        ):
            flows = Flows(to_broker := Moved(), to_client := Moved())
            with self._counted(flows):
                await relay(
                    client,
                    broker,
                    first_to_broker=first_to_broker,
                    first_to_client=first_to_client,
                    half_close_timeout_s=half_close_timeout_s,
                    count_to_broker=to_broker.count,
                    count_to_client=to_client.count,
                )
            return flows
        return await self._splice(self._engine, client, broker, first_to_broker, first_to_client, half_close_timeout_s)

    async def _splice(  # noqa: PLR0917 -- private, and called once
        self,
        engine: RelayEngine,
        client: trio.SocketStream,
        broker: trio.SocketStream,
        first_to_broker: bytes,
        first_to_client: bytes,
        half_close_timeout_s: float,
    ) -> Flows[Moved]:
        ahead = Flows(Moved(), Moved())
        with self._counted(ahead), trio.move_on_after(half_close_timeout_s) as patience:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_send_ahead, broker, first_to_broker, ahead.to_broker)
                nursery.start_soon(_send_ahead, client, first_to_client, ahead.to_client)
        if patience.cancelled_caught:
            return ahead
        spliced = engine.add(
            client.socket,
            broker.socket,
            to_broker=_preloaded(first_to_broker),
            to_client=_preloaded(first_to_client),
            half_close_timeout_s=half_close_timeout_s,
        )
        flows = Flows(spliced.to_broker, spliced.to_client)
        with self._counted(flows):
            try:
                await spliced.finished.wait()
            finally:
                engine.drop(spliced)
        return _sum(ahead, flows)

    @contextlib.contextmanager
    def _counted(self, flows: Flows[Any]) -> Iterator[None]:
        """Count a relay among the live ones, then among those that have ended."""
        self._live.add(flows)
        try:
            yield
        finally:
            self._live.discard(flows)
            self._ended = _sum(self._ended, flows)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Prometheus: bytes and portions by direction."""
        total = _sum(self._ended, *self._live)
        bytes_moved = CounterMetricFamily(
            "pulsar_proxy_binary_bytes", "Bytes relayed, by direction.", labels=["direction"]
        )
        operations = CounterMetricFamily(
            "pulsar_proxy_binary_ops", "Portions of bytes relayed, by direction.", labels=["direction"]
        )
        for name, moved in (("to_broker", total.to_broker), ("to_client", total.to_client)):
            bytes_moved.add_metric([name], moved.bytes_moved)
            operations.add_metric([name], moved.operations)
        yield bytes_moved
        yield operations


def _sum(*relays: Flows[Any]) -> Flows[Moved]:
    total = Flows(Moved(), Moved())
    for flows in relays:
        total.to_broker.add(flows.to_broker)
        total.to_client.add(flows.to_client)
    return total


def _preloaded(first: bytes) -> bytes:
    """What the engine begins with: all that fits the smallest pipe, or nothing, where it was sent ahead."""
    return first if len(first) <= FIRST_BYTES_MAX else b""


async def _send_ahead(stream: trio.SocketStream, first: bytes, moved: Moved) -> None:
    """Send what is too much for the smallest pipe."""
    if len(first) > FIRST_BYTES_MAX:
        with contextlib.suppress(trio.BrokenResourceError):  # the relay will find out
            await stream.send_all(first)
            moved.count(len(first))


def splice_works() -> bool:
    """Whether this kernel splices between a socket and a pipe (some sandboxes refuse)."""
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe2(os.O_CLOEXEC)
    try:
        theirs.send(b"x")
        return os.splice(ours.fileno(), writing, 1, flags=SPLICE_FLAGS) == 1
    except OSError:
        return False
    finally:
        ours.close()
        theirs.close()
        os.close(reading)
        os.close(writing)
