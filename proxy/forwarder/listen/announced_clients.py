"""Clients that a load balancer announces by a PROXY header: they are admitted once their address is known.

Until then a connection counts among those that have not authenticated, under the load balancer's address, but for no
limit of that address as a client's.
"""

from collections.abc import Callable
from typing import Protocol

from proto.addresses import HostPort
from proto.proxy_protocol import NoProxyHeader, ProxyHeader
from proxy.common.logs import get_logger
from proxy.forwarder.listen.admission import Admission, AdmittedConnection, Refusal, sender_key
from proxy.runtime.loop.deadlines import Deadlines
from proxy.runtime.loop.reactor import Reactor
from proxy.runtime.loop.tasks import InFlightCounter
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.network.proxy_header import Outcome, ProxyHeaderReading

Address = tuple[str, int]


class OnClient(Protocol):
    """Takes a client of which the address is known; ``accepted_at``: in Trio's time. ``header``: that announces it."""

    def __call__(
        self, index: int, stream: TcpStream, peer: Address, accepted_at: float, header: ProxyHeader | None = None
    ) -> None:
        """Serve the client, or turn it away."""
        ...


class AnnouncedClients:
    """The connections of which the header is not there yet. ``on_refused`` is told why one has ended without it."""

    def __init__(
        self,
        reactor: Reactor,
        deadlines: Deadlines,
        admission: Admission,
        in_flight: InFlightCounter,
        *,
        on_client: OnClient,
        on_refused: Callable[[Refusal], None],
    ) -> None:
        self._reactor = reactor
        self._deadlines = deadlines
        self._admission = admission
        self._in_flight = in_flight
        self._on_client = on_client
        self._on_refused = on_refused
        self.readings: dict[ProxyHeaderReading, Callable[[], None]] = {}
        """With what ends each of them at once."""

    def await_header(
        self, index: int, stream: TcpStream, sender: Address, *, required: bool, accepted_at: float, deadline: float
    ) -> Refusal | None:
        """Admit a client of a listener once its address is known; return why its connection is refused before."""
        key, address = sender_key(sender[0]), str(HostPort(*sender))
        refusal = self._admission.check_admission(key)
        if refusal is not None:
            return refusal
        admitted = self._admission.admit_client(key)
        self._in_flight.increment()

        def on_done(reading: ProxyHeaderReading, outcome: Outcome) -> None:
            self._stop(reading, admitted)
            match outcome:
                case ProxyHeader(client=HostPort(host, port)) as header:
                    self._on_client(index, stream, (host, port), accepted_at, header)
                case ProxyHeader() | NoProxyHeader():
                    self._on_client(index, stream, sender, accepted_at)
                case None:  # a health check, mostly
                    stream.close_now()
                case _:
                    stream.close_now()
                    get_logger().warning("no client behind a load balancer", sender=address, reason=str(outcome))
                    self._on_refused(Refusal.PROXY_PROTOCOL)

        reading = ProxyHeaderReading(self._reactor, self._deadlines, stream, required=required, on_done=on_done)

        def abandon() -> None:
            reading.cancel()
            self._stop(reading, admitted)
            stream.close_now()

        def evict() -> None:
            abandon()
            get_logger().warning("a connection gave way to another before its PROXY header came", sender=address)
            self._on_refused(Refusal.UNAUTHENTICATED)

        self.readings[reading] = abandon
        admitted.evict = evict
        reading.start(deadline)
        return None

    def _stop(self, reading: ProxyHeaderReading, admitted: AdmittedConnection) -> None:
        del self.readings[reading]
        admitted.release()
        self._in_flight.decrement()

    def shut_down(self) -> None:
        """Close all connections of which the header is not there yet."""
        for abandon in list(self.readings.values()):
            abandon()
