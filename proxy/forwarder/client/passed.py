"""Connections that HTTP workers pass on once they are upgraded to WebSocket: each pair becomes a blind relay.

The client's side and the broker's side have both agreed to the upgrade. What an HTTP worker says of them is believed,
as it has authenticated the client; but one that was taken over may say anything, and send any descriptors. So each
request is checked and bounded here: all that it costs is a refusal.
"""

import ipaddress
import socket
import time
from collections.abc import Callable
from typing import Final

import trio
from google.protobuf.message import DecodeError

from proto.addresses import AddressInvalid, parse_host_port
from proto.rpc_pb2 import RelayRequest, StoredRelay
from proxy.common.logs import get_logger
from proxy.config.types import Config
from proxy.forwarder.client.timeouts import ConnectionAge
from proxy.forwarder.listen.admission import Admission
from proxy.forwarder.listen.eviction import Place
from proxy.forwarder.metrics import ForwarderMetrics
from proxy.forwarder.relay.blocked_splice import BlockedSpliceWatch
from proxy.forwarder.relay.manager import RelayManager
from proxy.forwarder.relay.relay import RelayStart, RelayStartFailed
from proxy.forwarder.relay.sockets import ip_of
from proxy.runtime.loop.deadlines import Deadlines
from proxy.runtime.loop.tasks import InFlightCounter, ignore
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.network.dialing import set_timeouts, tune_socket
from proxy.runtime.shared.fd_store_channel import close_descriptors
from proxy.runtime.shared.relay_request_channel import (
    ACCEPTED,
    REFUSED,
    PassedConnectionGone,
    PassedConnectionInvalid,
    RelayRequestChannel,
    answer_request,
    passed_sockets,
)

REQUESTS_PER_WAKE_UP_MAX: Final = 16
PAUSE_S: Final = 0.01
"""After so many requests, all else of this process has its turn: 1,600 a second are more than clients come with."""

RECORD_CHARACTERS_MAX: Final = 1024
"""The longest text of a request: a role, or a broker's address."""

CREDENTIALS_MAX: Final = 16
CREDENTIAL_BYTES_MAX: Final = 64


class PassedConnections:
    """Takes the requests of HTTP workers, and starts their relays. ``owner_of``: whose share a relay counts for."""

    def __init__(
        self,
        channel: RelayRequestChannel,
        *,
        admission: Admission,
        relays: RelayManager,
        deadlines: Deadlines,
        under_way: InFlightCounter,
        metrics: ForwarderMetrics,
        owner_of: Callable[[StoredRelay], str],
        config: Callable[[], Config],
    ) -> None:
        self.relay_count = 0
        """Relays of this forwarder that came this way: they have half of its places."""
        self._watch = BlockedSpliceWatch(self._on_blocked)
        self._is_closed = False
        self._channel = channel
        self._admission = admission
        self._relays = relays
        self._deadlines = deadlines
        self._under_way = under_way
        self._metrics = metrics
        self._owner_of = owner_of
        self._config = config

    def on_live(self) -> None:
        """Count a relay that came this way, and has started or was adopted."""
        self.relay_count += 1
        self._watch.start()

    def on_over(self) -> None:
        """Count one no longer."""
        self.relay_count -= 1
        if not self.relay_count:
            self._watch.stop()

    def _on_blocked(self) -> None:
        """End all these relays, and take no others: an HTTP worker has made a connection block that it has passed."""
        self._is_closed = True
        relays = self._relays.shut_down_passed()
        get_logger().critical(
            "a connection that an HTTP worker passed has blocked this forwarder: an HTTP worker may be taken over; all "
            "WebSocket relays of this forwarder are ended, and it takes no others",
            relays=relays,
        )

    async def run(self, nursery: trio.Nursery) -> None:
        """Take requests until cancelled, or a connection has blocked; a relay that must wait starts in ``nursery``."""
        taken = 0
        while not self._is_closed:
            try:
                received = await self._channel.receive()
            except DecodeError:
                self._count("malformed")
                received = None
            if received is not None:
                self._take(*received, nursery)
                taken += 1
            if received is None or taken >= REQUESTS_PER_WAKE_UP_MAX:
                taken = 0
                await trio.sleep(PAUSE_S)

    def _count(self, result: str) -> None:
        self._metrics.passed_connections.labels(result=result).inc()

    def _take(self, request: RelayRequest, descriptors: list[int], nursery: trio.Nursery) -> None:
        """Start a request's relay, or refuse it. Raises nothing."""
        try:
            stored = _record_of(request)
            client, broker, answer = passed_sockets(descriptors)
        except PassedConnectionGone:
            close_descriptors(descriptors)
            self._count("gone")
            return
        except PassedConnectionInvalid as error:
            close_descriptors(descriptors)
            self._count("malformed")
            get_logger().error("an HTTP worker passed what is no connection to be relayed", reason=str(error))
            return
        passing = _Passing(TcpStream(client), TcpStream(broker), answer)
        try:
            self._admit(request, stored, passing, nursery)
        except Exception as error:  # noqa: BLE001 -- a barrier around each request
            _log_defect(error)
            passing.close()

    def _admit(self, request: RelayRequest, stored: StoredRelay, passing: "_Passing", nursery: trio.Nursery) -> None:
        admission, owner, config = self._admission, self._owner_of(stored), self._config()
        if self._is_closed:
            self._refuse(passing, stored, "closed", "a connection has blocked this forwarder")
            return
        if self.relay_count >= max(1, admission.part // 2):
            self._refuse(passing, stored, "max_connections", "half of limits.max_connections is used by them")
            return
        if (refusal := admission.check_admission(ip_of(stored), owner)) is not None:
            self._refuse(passing, stored, refusal.value, refusal.key)
            return
        if (limit := admission.quotas.check_owner(owner)) is not None:
            self._refuse(passing, stored, "quota", limit)
            return
        place = admission.shares.take_place(owner, ignore)  # until the relay has one; what starts now cannot give way
        if place is None:
            self._refuse(passing, stored, "max_connections", "limits.max_connections")
            return
        admission.adopt_client(ip_of(stored))
        try:
            start = self._relay_start(request, stored, passing, config)
            if not self._relays.start_relay_now(start):
                self._under_way.increment()
                nursery.start_soon(self._start, start, passing, place)
                return
        except (RelayStartFailed, OSError) as error:
            admission.release_client(ip_of(stored))
            self._refuse(passing, stored, "not_begun", str(error))
        except BaseException:
            admission.release_client(ip_of(stored))
            admission.shares.leave_place(place)
            raise
        else:
            self._accept(passing)
        admission.shares.leave_place(place)

    def _relay_start(
        self, request: RelayRequest, stored: StoredRelay, passing: "_Passing", config: Config
    ) -> RelayStart:
        """Return the start of a relay. Raises OSError where a connection has gone."""
        for stream in (passing.client, passing.broker):
            if stream.socket.family != socket.AF_UNIX:
                tune_socket(stream.socket)
                set_timeouts(stream.socket, config.relay)
        stored.leave_at_ms = self._leave_at_ms(request, config)
        return RelayStart(
            passing.client,
            passing.broker,
            stored,
            config.relay,
            first_to_broker=request.first_to_broker,
            first_to_client=request.first_to_client,
        )

    async def _start(self, start: RelayStart, passing: "_Passing", place: Place) -> None:
        """Start a relay that has to wait: for a pipe, or for a broker that takes what comes first."""
        try:
            with trio.CancelScope(shield=True):
                await self._relays.start_relay(start)
            self._accept(passing)
        except RelayStartFailed as error:
            self._admission.release_client(ip_of(start.stored))
            self._refuse(passing, start.stored, "not_begun", str(error))
        except Exception as error:  # noqa: BLE001 -- it would end this worker
            self._admission.release_client(ip_of(start.stored))
            _log_defect(error)
            passing.close()
        finally:
            self._admission.shares.leave_place(place)
            self._under_way.decrement()

    def _leave_at_ms(self, request: RelayRequest, config: Config) -> int:
        """Return when the relay is to end: at its maximum age, or at the end of its client's credentials, if it is
        enforced, since nobody can ask for others.
        """
        now_s = self._relays.now()
        age = ConnectionAge(self._deadlines, config.limits, trio.current_time(), ignore)  # no deadline ends a relay
        ends = [age.leave_at_ms(now_s)]
        if request.HasField("expires_at_unix_ms") and config.session.enforcement != "observe":
            ends.append(max(1, round(now_s * 1000 + request.expires_at_unix_ms - time.time() * 1000)))
        return min((end for end in ends if end), default=0)

    def _accept(self, passing: "_Passing") -> None:
        self._count("started")
        self._metrics.new_connections.inc()
        answer_request(passing.answer, ACCEPTED)
        passing.answer.close()

    def _refuse(self, passing: "_Passing", stored: StoredRelay, result: str, reason: str) -> None:
        self._count(result)
        get_logger().warning(
            "a WebSocket connection was not relayed", client=stored.client_address, reason=result, detail=reason
        )
        answer_request(passing.answer, REFUSED)
        passing.close()


def _log_defect(error: Exception) -> None:
    get_logger().error("a request of an HTTP worker met a defect", exc_info=error)


class _Passing:
    """What came with a request."""

    def __init__(self, client: TcpStream, broker: TcpStream, answer: socket.socket) -> None:
        self.client, self.broker, self.answer = client, broker, answer

    def close(self) -> None:
        """Close this process's copies; the sender has its own."""
        for stream in (self.client, self.broker):
            stream.close_now()
        self.answer.close()


def _record_of(request: RelayRequest) -> StoredRelay:
    """Return the record of a request's relay. Raises PassedConnectionInvalid."""
    texts = (request.client_address, request.principal, request.proxy, request.target)
    if any(len(text) > RECORD_CHARACTERS_MAX or not text.isprintable() for text in texts):
        raise PassedConnectionInvalid("a text that is too long, or not printable")
    credentials = request.credentials
    if len(credentials) > CREDENTIALS_MAX or any(len(one) > CREDENTIAL_BYTES_MAX for one in credentials):
        raise PassedConnectionInvalid("too many credentials")
    try:
        ipaddress.ip_address(parse_host_port(request.client_address).host)
    except (AddressInvalid, ValueError):
        raise PassedConnectionInvalid("a client's address that is none") from None
    return StoredRelay(
        client_address=request.client_address,
        principal=request.principal,
        proxy=request.proxy,
        credentials=credentials,
        target=request.target,
        started_at_unix_ms=int(time.time() * 1000),
        expires_at_unix_ms=request.expires_at_unix_ms if request.HasField("expires_at_unix_ms") else None,
        passed=True,
    )
