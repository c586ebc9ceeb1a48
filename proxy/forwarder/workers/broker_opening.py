"""The broker's side of a relay, opened by callback: the connection and the handshake need no task.

For what is usual: brokers on plain TCP, and a target with one address, to which a link was opened a moment ago
(BrokerLinks.known_target). All else is opened by BrokerLinks.open_link, in a task. The proxy's own credentials, where
it has some, come from an auth worker by callback, too, for CONNECT and for each challenge of the broker.
"""

import math
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
from proxy.runtime.loop.scoped_tasks import TaskSpawner
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
    without_credentials,
)
from proxy.runtime.network.credentials import AuthData
from proxy.runtime.rpc.errors import RpcError

_IN = select.EPOLLIN
_IN_AND_OUT = select.EPOLLIN | select.EPOLLOUT

Outcome = BrokerLink | BrokerLinkFailed


class BrokerOpening:
    """One link that is being opened. ``on_done`` is called once, unless the opening was abandoned before."""

    __slots__ = (
        "_address",
        "_asked",
        "_broker",
        "_connect_ends_at",
        "_credentials",
        "_deadline",
        "_ends_at",
        "_handshake",
        "_handshake_timeout_s",
        "_is_connected",
        "_is_over",
        "_links",
        "_on_done",
        "_reactor",
        "_sock",
        "_target",
        "_tasks",
        "_unsent",
    )

    def __init__(
        self,
        links: BrokerLinks,
        reactor: Reactor,
        deadlines: Deadlines,
        tasks: TaskSpawner,
        asked: BrokerRequest,
        *,
        target: ResolveTargetResponse,
        on_done: Callable[[Outcome], None],
    ) -> None:
        self._links = links
        self._reactor = reactor
        self._deadline = deadlines.new_deadline(self._on_deadline)
        self._tasks = tasks
        self._asked = asked
        self._on_done = on_done
        self._credentials = links.credentials_for(target.host)
        self._handshake: BrokerHandshake
        self._is_over = False
        self._sock: socket.socket | None = None
        self._unsent = b""
        self._target = target
        self._broker, self._address = HostPort(target.host, target.port), target.addresses[0]
        self._is_connected = False
        self._handshake_timeout_s = seconds(links.config.brokers.handshake_timeout_ms)
        self._connect_ends_at = math.inf
        self._ends_at = current_tick().now + self._handshake_timeout_s

    def start(self) -> None:
        """Ask for the proxy's credentials, if it has some, and dial the target with them."""
        self._credentials.start_round(None, self._tasks, self._on_credentials)
        if self._sock is None and not self._is_over:  # credentials are awaited
            self._deadline.set(self._ends_at)

    def _on_credentials(self, outcome: AuthData | RpcError) -> None:
        if isinstance(outcome, RpcError):
            self._finish(without_credentials(self._broker, outcome))
        elif self._sock is None:
            self._dial(*outcome)
        else:
            self._unsent += self._links.challenge_answer(*outcome)
            self._handshake.on_answer_sent(complete=self._credentials.complete)
            self._send()

    def _dial(self, method: str, data: bytes) -> None:
        links = self._links
        self._handshake = BrokerHandshake(
            max_frame_bytes=links.config.limits.max_broker_frame_bytes, complete=self._credentials.complete
        )
        connect = links.connect_for(self._asked, self._target, self._credentials, method, data)
        self._unsent = commands.connect(connect)
        self._connect_ends_at = current_tick().now + seconds(links.config.brokers.connect_timeout_ms)
        self._deadline.set(min(self._connect_ends_at, self._ends_at))
        try:
            self._sock = links.dialer.start_connection(self._address, self._broker.port)
        except OSError as error:
            self._finish(self._not_reached(error))
        else:
            self._send()  # to a broker nearby the connection is established already

    def abandon(self) -> None:
        """Close what is open, and ask for no more: the client has gone."""
        if not self._is_over:
            self._end()

    def _end(self) -> None:
        self._is_over = True
        self._deadline.clear()
        self._credentials.cancel_round()
        sock, self._sock = self._sock, None
        if sock is not None:
            self._reactor.forget(sock.fileno())
            sock.close()

    def _finish(self, outcome: Outcome) -> None:
        self._end()
        self._on_done(outcome)

    # ---- the connection

    def _not_reached(self, error: OSError) -> BrokerLinkFailed:
        return not_reached(self._broker, "unreachable", f"{self._address}: {error.strerror or error}")

    def _on_deadline(self) -> None:
        if self._is_connected or self._connect_ends_at > self._ends_at:
            self._finish(too_slow(self._broker, self._handshake_timeout_s))
        else:
            detail = f"{self._address}: no answer within {self._links.config.brokers.connect_timeout_ms} ms"
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
            self._deadline.set(self._ends_at)
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
                self._credentials.start_round(event.data, self._tasks, self._on_credentials)

    def _on_connected(self, connected: Connected) -> None:
        sock, self._sock = self._sock, None
        assert sock is not None  # something was received
        self._reactor.forget(sock.fileno())
        stream = TcpStream(sock)
        answers = bool(self._links.answers_challenges(self._asked, self._target, self._credentials))
        original_data = self._target.original_data
        self._finish(BrokerLink(self._broker, stream, connected, answers, original_data))
