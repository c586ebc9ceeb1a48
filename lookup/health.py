"""Whether the configured brokers answer: looked at from time to time, for /readyz, /status and metrics.

The look is a PING before any CONNECT, which a broker answers in every state: it shows that a broker (not just an open
port) is there, needs no credentials, and leaves no authentication failure in the broker's log.
"""

from dataclasses import dataclass

import trio
from prometheus_client import CollectorRegistry, Gauge

from proto import commands
from proto.addresses import HostPort, parse_service_url
from proto.errors import RemoteProtocolError
from proto.frames import FrameDecoder
from proto.pulsar_pb2 import BaseCommand
from proxy.config.types import Config
from proxy.runtime.dialing import Dialer, NotDialled
from proxy.runtime.logs import get_logger
from proxy.runtime.resolve import ResolutionFailed, new_resolver_threads, resolve
from proxy.runtime.tasks import repeat, seconds


@dataclass(frozen=True, slots=True)
class BrokerHealth:
    """What the last look at a broker showed."""

    reachable: bool
    detail: str


class HealthChecks:
    """Looks at every broker of ``service_url`` now and then."""

    def __init__(self, config: Config, dialer: Dialer, gauge: Gauge, before: "HealthChecks | None" = None) -> None:
        self._config = config
        self._dialer = dialer
        self._threads = new_resolver_threads()
        self._gauge = gauge
        self._brokers = parse_service_url(config.brokers.service_url)
        self._health: dict[HostPort, BrokerHealth] = {}
        if before is not None:  # a reload: what was seen is still true
            self._health.update((broker, seen) for broker, seen in before.seen().items() if broker in self._brokers)
        self._scope = trio.CancelScope()

    async def run(self) -> None:
        """Look until ``stop``."""
        with self._scope:
            await repeat(seconds(self._config.brokers.probe_interval_ms), self.look)

    def stop(self) -> None:
        """Look no more, and report no more."""
        self._scope.cancel()
        self._gauge.clear()

    async def look(self) -> None:
        """Look at all brokers once, at the same time."""
        async with trio.open_nursery() as nursery:
            for broker in self._brokers:
                nursery.start_soon(self._look_at, broker)

    async def _look_at(self, broker: HostPort) -> None:
        health = await self._probe(broker)
        before = self._health.get(broker)
        self._health[broker] = health
        self._gauge.labels(broker=str(broker)).set(1 if health.reachable else 0)
        if before is not None and before.reachable == health.reachable:
            return
        if health.reachable:
            get_logger().info("a broker is reachable", broker=str(broker))
        else:
            get_logger().error("a broker is not reachable", broker=str(broker), reason=health.detail)

    async def _probe(self, broker: HostPort) -> BrokerHealth:
        timeout_s = seconds(self._config.brokers.handshake_timeout_ms)
        detail = f"no answer within {timeout_s} s"
        with trio.move_on_after(timeout_s):
            try:
                return await self._ping(broker)
            except ResolutionFailed as error:
                detail = str(error)
            except NotDialled as error:
                detail = str(error)
            except (trio.BrokenResourceError, RemoteProtocolError) as error:
                detail = f"it does not speak Pulsar: {error}"
        return BrokerHealth(reachable=False, detail=detail)

    async def _ping(self, broker: HostPort) -> BrokerHealth:
        timeout_s = seconds(self._config.brokers.connect_timeout_ms)
        addresses = await resolve(broker.host, timeout_s=timeout_s, threads=self._threads)
        failure = NotDialled("unreachable", "no address")
        for address in addresses:
            try:
                stream = await self._dialer.dial_any(broker, (address,))
            except NotDialled as error:
                failure = error
                continue
            async with stream:
                await _expect_pong(stream)
            return BrokerHealth(reachable=True, detail=f"answers at {address}")
        raise failure

    def seen(self) -> dict[HostPort, BrokerHealth]:
        """What the last looks showed."""
        return dict(self._health)

    def known_down(self, broker: HostPort) -> bool:
        """Whether a broker did not answer when last looked at; one that was not looked at yet may be up."""
        health = self._health.get(broker)
        return health is not None and not health.reachable

    @property
    def any_reachable(self) -> bool:
        """Whether there is a broker to be asked."""
        return any(health.reachable for health in self._health.values())

    def status(self) -> list[dict[str, object]]:
        """One entry a broker, for operators."""
        return [
            {"broker": str(broker), "reachable": health.reachable, "detail": health.detail}
            for broker, health in sorted(self._health.items(), key=lambda entry: str(entry[0]))
        ]


async def _expect_pong(stream: trio.abc.HalfCloseableStream) -> None:
    decoder = FrameDecoder(max_frame_bytes=1024)
    await stream.send_all(commands.ping())
    while (frame := decoder.next_frame()) is None:
        data = await stream.receive_some(4096)
        if not data:
            raise RemoteProtocolError("the connection was closed")
        decoder.receive_data(data)
    command = commands.parse_command(frame.command)
    if command.type != BaseCommand.PONG:
        raise RemoteProtocolError(f"{commands.command_name(command.type)} in answer to PING")


def broker_up_gauge(registry: CollectorRegistry) -> Gauge:
    """The gauge that shows what HealthChecks saw; brokers are the operator's, so the label is bounded."""
    return Gauge(
        "pulsar_proxy_broker_up",
        "Whether a broker of brokers.service_url answered when last looked at (1) or not (0).",
        ["broker"],
        registry=registry,
    )
