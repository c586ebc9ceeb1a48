"""The broker's side of a relay, opened by callback: the connection and the handshake need no task.

For what is usual: brokers on plain TCP, no credentials of the proxy's own, and a target with one address, to which a
link was opened a moment ago (BrokerLinks.known_target). All else is opened by BrokerLinks.open_link, in a task.
"""

import os
import select
import socket
from collections.abc import Callable

from proto import commands
from proto.addresses import HostPort
from proto.broker_handshake import BrokerHandshake, Challenged, Connected, HandshakeEvent, Refused, SendData
from proto.errors import RemoteProtocolError
from proto.rpc_pb2 import ResolveTargetResponse
from proxy.forwarder.workers.broker_links import BrokerLinks, BrokerRequest
from proxy.runtime.loop.deadlines import Deadlines
from proxy.runtime.loop.reactor import Reactor
from proxy.runtime.loop.tasks import seconds
from proxy.runtime.loop.tcp_stream import RECEIVE_BYTES, TcpStream
from proxy.runtime.loop.tick import current_tick
from proxy.runtime.network.broker_link import (
    BrokerLink,
    BrokerLinkFailed,
    broken_off,
    not_reached,
    refused_by,
    too_slow,
)
from proxy.runtime.network.credentials import NoCredentials

_IN = select.EPOLLIN
_IN_AND_OUT = select.EPOLLIN | select.EPOLLOUT
_CREDENTIALS = NoCredentials()

Outcome = BrokerLink | BrokerLinkFailed


class BrokerOpening:
    """One link that is being opened. ``on_done`` is called once, unless the opening was abandoned before."""

    __slots__ = (
        "_address",
        "_asked",
        "_broker",
        "_deadline",
        "_dialled_at",
        "_handshake",
        "_handshake_timeout_s",
        "_is_connected",
        "_is_over",
        "_links",
        "_on_done",
        "_reactor",
        "_sock",
        "_target",
        "_unsent",
    )

    def __init__(
        self,
        links: BrokerLinks,
        reactor: Reactor,
        deadlines: Deadlines,
        asked: BrokerRequest,
        *,
        target: ResolveTargetResponse,
        on_done: Callable[[Outcome], None],
    ) -> None:
        self._links = links
        self._reactor = reactor
        self._deadline = deadlines.new_deadline(self._on_deadline)
        self._asked = asked
        self._on_done = on_done
        self._handshake = BrokerHandshake(max_frame_bytes=links.config.limits.max_broker_frame_bytes)
        self._is_over = False
        self._sock: socket.socket | None = None
        self._unsent = b""
        self._target = target
        self._broker, self._address = HostPort(target.host, target.port), target.addresses[0]
        self._is_connected = False
        self._handshake_timeout_s = seconds(links.config.brokers.handshake_timeout_ms)
        self._dialled_at = 0.0

    def start(self) -> None:
        """Dial the target."""
        config = self._links.config.brokers
        self._unsent = commands.connect(self._links.connect_for(self._asked, self._target, _CREDENTIALS, "", b""))
        self._dialled_at = current_tick().now
        self._deadline.set(self._dialled_at + seconds(min(config.connect_timeout_ms, config.handshake_timeout_ms)))
        try:
            self._sock = self._links.dialer.start_connection(self._address, self._broker.port)
        except OSError as error:
            self._finish(self._not_reached(error))
        else:
            self._send()  # to a broker nearby the connection is established already

    def abandon(self) -> None:
        """Close what is open: the client has gone."""
        if not self._is_over:
            self._is_over = True
            self._deadline.clear()
            self._close()

    def _close(self) -> None:
        sock, self._sock = self._sock, None
        if sock is not None:
            self._reactor.forget(sock.fileno())
            sock.close()

    def _finish(self, outcome: Outcome) -> None:
        self._is_over = True
        self._deadline.clear()
        if not isinstance(outcome, BrokerLink):
            self._close()
        self._on_done(outcome)

    # ---- the connection

    def _not_reached(self, error: OSError) -> BrokerLinkFailed:
        return not_reached(self._broker, "unreachable", f"{self._address}: {error.strerror or error}")

    def _on_deadline(self) -> None:
        config = self._links.config.brokers
        if self._is_connected or config.connect_timeout_ms > config.handshake_timeout_ms:
            self._finish(too_slow(self._broker, self._handshake_timeout_s))
        else:
            detail = f"{self._address}: no answer within {config.connect_timeout_ms} ms"
            self._finish(not_reached(self._broker, "unreachable", detail))

    def _on_ready(self) -> None:
        if self._unsent:
            self._send()
        if self._is_connected and self._sock is not None:
            self._receive(self._sock.fileno())

    def _send(self) -> None:
        """Send what is to be sent, as far as the broker takes it, and wait for what follows."""
        assert self._sock is not None  # it is dialled, and not closed
        descriptor = self._sock.fileno()
        try:
            sent = os.write(descriptor, self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._finish(broken_off(self._broker, error) if self._is_connected else self._not_reached(error))
            return
        self._unsent = self._unsent[sent:]
        if sent and not self._is_connected:
            self._is_connected = True
            self._deadline.set(self._dialled_at + self._handshake_timeout_s)
        self._reactor.watch(descriptor, _IN_AND_OUT if self._unsent else _IN, self._on_ready)

    def _receive(self, descriptor: int) -> None:
        try:
            data = os.read(descriptor, RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._finish(broken_off(self._broker, error))
            return
        try:
            self._handshake.receive_data(data)
            while not self._is_over and (event := self._handshake.next_event()) is not None:
                self._handle_event(event)
        except RemoteProtocolError as error:
            self._finish(broken_off(self._broker, error))

    def _handle_event(self, event: HandshakeEvent) -> None:
        match event:
            case Connected():
                self._on_connected(event)
            case Refused():
                failed = refused_by(self._broker, event)
                self._finish(self._links.explain_failure(self._asked, self._target, failed))
            case SendData():
                self._unsent += event.data
                self._send()
            case Challenged():
                self._unsent += self._links.challenge_answer(*_CREDENTIALS.answer_to(event.data))
                self._handshake.on_answer_sent()
                self._send()

    def _on_connected(self, connected: Connected) -> None:
        sock, self._sock = self._sock, None
        assert sock is not None  # something was received
        self._reactor.forget(sock.fileno())
        stream = TcpStream(sock)
        self._finish(BrokerLink(self._broker, stream, connected, original_data=self._target.original_data))
