"""Links to brokers for relays that are opened by callback, where the connection and the handshakes, of TLS too, need no
task.

That is for what is usual: a target to which a task has opened a link a moment ago (BrokerLinks.known_target), at the
address that it had; where this one does not answer now, a task tries them all. The proxy's own credentials come by
callback, too, for CONNECT and for each challenge of the broker. A broker that a client's TLS names is dialled alone.
"""

import contextlib
import errno
import math
import os
import select
import socket
from collections.abc import Callable
from typing import Generic, TypeVar

import trio

from proto import commands
from proto.addresses import HostPort
from proto.broker_handshake import BrokerHandshake, Challenged, Connected, HandshakeEvent, Refused, SendData
from proto.errors import RemoteProtocolError
from proto.rpc_pb2 import ResolveTargetResponse
from proxy.forwarder.workers.broker_links import BrokerLinks, BrokerRequest, NamedLink, NamedRequest
from proxy.runtime.fairness.owners import owner_of
from proxy.runtime.loop.deadlines import Deadlines
from proxy.runtime.loop.reactor import Reactor, current_reactor
from proxy.runtime.loop.scoped_tasks import TaskSpawner
from proxy.runtime.loop.tasks import ignore, seconds
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
from proxy.runtime.network.dialing import ATTEMPT_DELAY_S
from proxy.runtime.network.handshake_turns import HandshakeTurns
from proxy.runtime.network.tls import TlsFailed, TlsStream, broke_off_in_handshake, continue_handshake
from proxy.runtime.rpc.errors import RpcError

_IN = select.EPOLLIN
_IN_AND_OUT = select.EPOLLIN | select.EPOLLOUT
_OUT = select.EPOLLOUT

Outcome = BrokerLink | BrokerLinkFailed | None
"""Of an opening by callback. None: a task has to try the target's other addresses."""

NamedOutcome = NamedLink | BrokerLinkFailed | None
LinkT = TypeVar("LinkT", BrokerLink, NamedLink)


def start_opening(
    links: BrokerLinks,
    asked: BrokerRequest,
    deadlines: Deadlines,
    turns: HandshakeTurns,
    tasks: TaskSpawner,
    *,
    on_done: Callable[[Outcome], None],
) -> "BrokerOpening | None":
    """Start to open a link without a task; return None where that is not possible.

    ``tasks``: for credentials from an auth worker that cannot be reached at once.
    """
    reactor, target = current_reactor(), links.known_target(asked)
    if reactor is None or target is None:
        return None
    opening = BrokerOpening(links, reactor, deadlines, turns, tasks, asked=asked, target=target, on_done=on_done)
    opening.start()
    return opening


def start_named_opening(
    links: BrokerLinks, asked: NamedRequest, deadlines: Deadlines, *, on_done: Callable[[NamedOutcome], None]
) -> "NamedOpening | None":
    """Start to dial a broker that a client's TLS names, without a task; return None where that is not possible."""
    reactor, target = current_reactor(), links.known_target(asked)
    if reactor is None or target is None:
        return None
    opening = NamedOpening(links, reactor, deadlines, asked=asked, target=target, on_done=on_done)
    opening.start()
    return opening


class _Opening(Generic[LinkT]):
    """A target that is dialled by callback, within the deadlines of a connection and of all that follows it.

    ``on_done`` is called once, unless the opening was abandoned before.
    """

    __slots__ = (
        "_address",
        "_asked",
        "_broker",
        "_connect_ends_at",
        "_deadline",
        "_ends_at",
        "_handshake_timeout_s",
        "_is_connected",
        "_is_over",
        "_links",
        "_on_done",
        "_reactor",
        "_sock",
        "_target",
    )

    def __init__(
        self,
        links: BrokerLinks,
        reactor: Reactor,
        deadlines: Deadlines,
        *,
        asked: BrokerRequest | NamedRequest,
        target: ResolveTargetResponse,
        on_done: Callable[[LinkT | BrokerLinkFailed | None], None],
    ) -> None:
        self._links = links
        self._reactor = reactor
        self._deadline = deadlines.new_deadline(self._on_deadline)
        self._asked = asked
        self._on_done: Callable[[LinkT | BrokerLinkFailed | None], None] = on_done
        self._is_over = self._is_connected = False
        self._sock: socket.socket | None = None
        self._target = target
        self._broker, self._address = HostPort(target.host, target.port), target.addresses[0]
        self._handshake_timeout_s = seconds(links.config.brokers.handshake_timeout_ms)
        self._connect_ends_at = math.inf
        self._ends_at = current_tick().now + self._handshake_timeout_s

    def abandon(self) -> bool:
        """Close what is open, and ask for no more: the client has gone. Return False if the opening was over before."""
        if self._is_over:
            return False
        self._end()
        return True

    def _start_connection(self) -> socket.socket | None:
        """Start to connect; return None where that has failed at once, and the opening is over."""
        now = current_tick().now
        self._connect_ends_at = now + seconds(self._links.config.brokers.connect_timeout_ms)
        attempt_s = ATTEMPT_DELAY_S if self._has_more_addresses else math.inf
        self._deadline.set(min(self._connect_ends_at, self._ends_at, now + attempt_s))
        try:
            self._sock = self._links.dialer.start_connection(self._address, self._broker.port)
        except OSError as error:
            self._fail_to_reach(error)
        return self._sock

    def _end(self) -> None:
        self._is_over = True
        self._deadline.close()
        self._on_done = ignore  # which leads back to who has the opening
        sock, self._sock = self._sock, None
        if sock is not None:
            self._reactor.forget(sock.fileno())
            sock.close()

    def _finish(self, outcome: LinkT | BrokerLinkFailed | None) -> None:
        on_done = self._on_done
        self._end()
        on_done(outcome)

    @property
    def _has_more_addresses(self) -> bool:
        return len(self._target.addresses) > 1

    def _fail_to_reach(self, error: OSError | TlsFailed) -> None:
        if isinstance(error, TlsFailed):
            self._give_up("tls", self._links.dialer.explain(error))
        else:
            self._give_up("unreachable", error.strerror or str(error))

    def _give_up(self, reason: str, detail: str) -> None:
        """Finish without a connection to this address; a task tries the others, if there are some."""
        failed = not_reached(self._broker, reason, f"{self._address}: {detail}")
        if self._has_more_addresses:
            self._links.forget_target(self._asked)
        self._finish(None if self._has_more_addresses else failed)

    def _on_deadline(self) -> None:
        if self._is_connected or self._connect_ends_at > self._ends_at <= current_tick().now:
            self._finish(too_slow(self._broker, self._handshake_timeout_s))
        else:
            timeout_ms = self._links.config.brokers.connect_timeout_ms
            self._give_up("unreachable", f"no answer within {timeout_ms} ms")


class NamedOpening(_Opening[NamedLink]):
    """The broker that a client's TLS names, over TCP alone: all that is said there, behind a PROXY header, is the
    client's.
    """

    __slots__ = ()

    def start(self) -> None:
        """Dial the target."""
        if self._start_connection() is not None:
            self._look_for_connection()  # to a broker nearby it is established already

    def _look_for_connection(self) -> None:
        sock = self._sock
        assert sock is not None  # it is dialled, and not closed
        if error := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._fail_to_reach(OSError(error, os.strerror(error)))
            return
        try:
            sock.getpeername()
        except OSError:
            self._reactor.watch(sock.fileno(), _OUT, self._look_for_connection)
            return
        self._reactor.forget(sock.fileno())
        header, _ = self._links.passing_dialer.headers(self._asked.announcement)
        try:
            is_sent = not header or sock.send(header) == len(header)  # a new connection has room for it
        except OSError as failure:
            self._fail_to_reach(failure)
            return
        if not is_sent:
            self._fail_to_reach(OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS)))
            return
        self._sock = None
        self._finish(NamedLink(self._broker, TcpStream(sock)))


class BrokerOpening(_Opening[BrokerLink]):
    """One link that is opened by callback, up to the broker's CONNECTED."""

    __slots__ = (
        "_connect",
        "_credentials",
        "_handshake",
        "_is_reached",
        "_tasks",
        "_tls",
        "_turns",
        "_unsent",
    )
    _asked: BrokerRequest

    def __init__(
        self,
        links: BrokerLinks,
        reactor: Reactor,
        deadlines: Deadlines,
        turns: HandshakeTurns,
        tasks: TaskSpawner,
        *,
        asked: BrokerRequest,
        target: ResolveTargetResponse,
        on_done: Callable[[Outcome], None],
    ) -> None:
        super().__init__(links, reactor, deadlines, asked=asked, target=target, on_done=on_done)
        self._turns = turns
        self._tasks = tasks
        self._credentials = links.credentials_for(target.host)
        self._handshake: BrokerHandshake
        self._tls: TlsStream | None = None
        self._connect = self._unsent = b""
        self._is_reached = False  # by TCP; it is connected behind TLS, too

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
            self._handshake.on_answer_sent(complete=self._credentials.complete)
            self._send_data(self._links.challenge_answer(*outcome))

    def _dial(self, method: str, data: bytes) -> None:
        links = self._links
        self._handshake = BrokerHandshake(
            max_frame_bytes=links.config.limits.max_broker_frame_bytes, complete=self._credentials.complete
        )
        connect = links.connect_for(self._asked, self._target, self._credentials, method, data)
        self._connect = commands.connect(connect)
        sock = self._start_connection()
        if sock is None:
            return
        try:
            self._tls = links.dialer.new_tls_stream(TcpStream(sock), self._broker.host)
        except TlsFailed as error:
            self._fail_to_reach(error)
            return
        before_tls, within_tls = links.dialer.headers(self._asked.announcement)
        self._unsent = before_tls
        if self._tls is None:
            self._unsent += self._connect
            self._send()  # to a broker nearby the connection is established already
        else:
            self._connect = within_tls + self._connect
            self._continue_tls(self._tls)

    def _end(self) -> None:
        self._credentials.cancel_round()
        if self._tls is not None:
            self._turns.remove(self._owner, self)
        super()._end()

    # ---- the connection

    def _on_error(self, error: OSError) -> None:
        """Finish for an error of the socket."""
        if self._is_connected:
            self._break_off(error)
        elif self._is_reached:
            self._fail_to_reach(broke_off_in_handshake(error))
        else:
            self._fail_to_reach(error)

    def _break_off(self, error: BaseException) -> None:
        self._finish(broken_off(self._broker, error, self._links.dialer.header_hint))

    def _on_ready(self) -> None:
        if self._unsent:
            self._send()
        if self._sock is None or not self._is_reached:
            return
        if self._is_connected:
            self._receive(self._sock.fileno())
        else:
            self._reactor.forget(self._sock.fileno())  # until it has had its turn
            self._turns.add(self._owner, self)

    def take_turn(self) -> None:
        """Continue the TLS handshake with what is there from the broker."""
        assert self._sock is not None  # what has ended has no turn
        self._receive(self._sock.fileno())

    @property
    def _owner(self) -> str:
        role = self._links.config.authentication.anonymous_role
        return owner_of(self._asked.identity.role, self._asked.client_address, role)

    def _send_data(self, data: bytes) -> None:
        try:
            self._unsent += data if self._tls is None else self._tls.encrypt(memoryview(data))
        except trio.BrokenResourceError as error:  # a record that was damaged came with what this answers
            self._break_off(error.__cause__ or error)
        else:
            self._send()

    def _send(self) -> None:
        """Send what is to be sent, as far as the broker takes it, and wait for what follows."""
        assert self._sock is not None  # it is dialled, and not closed
        descriptor = self._sock.fileno()
        try:
            sent = os.write(descriptor, self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._on_error(error)
            return
        self._unsent = self._unsent[sent:]
        if sent and not self._is_reached:
            self._is_reached = True
            if self._tls is None:
                self._on_broker_reached()
            else:
                self._deadline.set(min(self._connect_ends_at, self._ends_at))
        self._reactor.watch(descriptor, _IN_AND_OUT if self._unsent else _IN, self._on_ready)

    def _on_broker_reached(self) -> None:
        self._is_connected = True
        self._deadline.set(self._ends_at)

    def _receive(self, descriptor: int) -> None:
        try:
            data = os.read(descriptor, RECEIVE_BYTES)
        except BlockingIOError:
            self._send()
            return
        except OSError as error:
            self._on_error(error)
            return
        if self._tls is None:
            self._receive_data(data)
        elif self._is_connected:
            self._receive_records(self._tls, data)
        else:
            self._continue_tls(self._tls, data, is_end=not data)

    def _receive_data(self, data: bytes) -> None:
        try:
            self._handshake.receive_data(data)
            while not self._is_over and (event := self._handshake.next_event()) is not None:
                self._handle_event(event)
        except RemoteProtocolError as error:
            self._break_off(error)

    # ---- TLS

    def _continue_tls(self, tls: TlsStream, data: bytes = b"", *, is_end: bool = False) -> None:
        """Continue the TLS handshake, and send CONNECT behind it."""
        session = tls.session
        try:
            is_done = continue_handshake(session, data, is_end=is_end)
        except TlsFailed as error:
            assert self._sock is not None  # it is dialled, and not closed
            with contextlib.suppress(OSError):
                os.write(self._sock.fileno(), self._unsent + session.take_outgoing())  # the alert, with the reason
            self._fail_to_reach(error)
            return
        self._unsent += session.take_outgoing()
        if is_done:
            self._on_broker_reached()
            self._send_data(self._connect)
            if not self._is_over:
                self._receive_records(tls)
        else:
            self._send()

    def _receive_records(self, tls: TlsStream, records: bytes | None = None) -> None:
        """Take what the broker has sent, at last its end: ``records`` is empty then, and None behind the handshake."""
        session = tls.session
        data = tls.take_read_ahead(records or b"")
        session.has_ended |= records == b""
        if data:
            self._receive_data(data)
        if self._is_over:
            return
        if session.error is not None:
            self._break_off(session.error)
        elif session.has_ended:
            self._receive_data(b"")
        elif session.waiting_record_bytes:
            self._send_data(b"")

    def _handle_event(self, event: HandshakeEvent) -> None:
        match event:
            case Connected():
                self._on_connected(event)
            case Refused():
                failed = refused_by(self._broker, event)
                self._finish(self._links.explain_failure(self._asked, self._target, failed))
            case SendData():
                self._send_data(event.data)
            case Challenged():
                self._credentials.start_round(event.data, self._tasks, self._on_credentials)

    def _on_connected(self, connected: Connected) -> None:
        sock, self._sock = self._sock, None
        assert sock is not None  # something was received
        self._reactor.forget(sock.fileno())
        stream = self._tls or TcpStream(sock)
        answers = bool(self._links.answers_challenges(self._asked, self._target, self._credentials))
        original_data = self._target.original_data
        on_broker_end = self._links.record_link(self._asked, self._target)
        self._finish(BrokerLink(self._broker, stream, connected, answers, original_data, on_broker_end))

    def _finish(self, outcome: Outcome) -> None:
        if isinstance(outcome, BrokerLinkFailed):
            self._links.record_failure(self._asked, self._target, outcome)
        super()._finish(outcome)
