"""Links to brokers for relays: the target is checked by a lookup worker and here, then dialled in the client's name.

A link is opened in a task (BrokerLinks.open_link), or by callback (BrokerOpening), where the connection and the
handshakes, of TLS too, need no task. That is for what is usual: a target to which a link was opened a moment ago
(BrokerLinks.known_target), at the address that it had; where this one does not answer now, a task tries them all. The
proxy's own credentials, where it has some, come from an auth worker; to an opening by callback they come by callback,
too, for CONNECT and for each challenge of the broker.
"""

import contextlib
import math
import os
import select
import socket
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass, replace
from functools import partial

import trio

from proto import commands
from proto.addresses import HostPort
from proto.broker_handshake import BrokerHandshake, Challenged, Connected, HandshakeEvent, Refused, SendData
from proto.connect_rules import broker_connect
from proto.errors import RemoteProtocolError
from proto.pulsar_pb2 import CommandConnect
from proto.rpc_pb2 import Method, OriginalData, OtherBroker, ResolveTargetRequest, ResolveTargetResponse
from proxy import __version__
from proxy.common.errors import ProxyError
from proxy.common.logs import get_logger
from proxy.config.binds import listener_binds
from proxy.config.sni import tls_port
from proxy.config.types import Config
from proxy.forwarder.workers.authentication import SERVER_VERSION, ClientIdentity
from proxy.forwarder.workers.dial_check import DialCheck
from proxy.runtime.fairness.owners import owner_of
from proxy.runtime.loop.deadlines import Deadlines
from proxy.runtime.loop.reactor import Reactor, current_reactor
from proxy.runtime.loop.scoped_tasks import TaskSpawner
from proxy.runtime.loop.tasks import seconds
from proxy.runtime.loop.tcp_stream import RECEIVE_BYTES, TcpStream
from proxy.runtime.loop.tick import current_tick
from proxy.runtime.network.broker_link import (
    REASONS_TO_TRY_ANOTHER_BROKER,
    RETRYABLE_REFUSALS,
    BrokerLink,
    BrokerLinkFactory,
    BrokerLinkFailed,
    broken_off,
    not_reached,
    refused_by,
    too_slow,
    without_credentials,
)
from proxy.runtime.network.broker_refusals import ShownCredentials, explain_refusal
from proxy.runtime.network.credentials import AuthData, CredentialExchange, Credentials, NoCredentials, credentials_for
from proxy.runtime.network.dial_rules import TargetDenied
from proxy.runtime.network.dialing import ATTEMPT_DELAY_S, Dialer, DialFailed
from proxy.runtime.network.handshake_turns import HandshakeTurns
from proxy.runtime.network.tls import TlsFailed, TlsStream, continue_handshake
from proxy.runtime.rpc.errors import RpcError
from proxy.runtime.rpc.pool import RpcPool

_IN = select.EPOLLIN
_IN_AND_OUT = select.EPOLLIN | select.EPOLLOUT

Target = ResolveTargetResponse | OtherBroker
Outcome = BrokerLink | BrokerLinkFailed | None
"""Of an opening by callback. None: a task has to try the target's other addresses."""

BAD_LOOKUP_ANSWER = "bad_lookup_answer"
"""Reason of a TargetRefused: the forwarder's own check denies what the lookup worker has allowed."""

KNOWN_S = 1.0
"""How long a verdict holds without another check: as long as the shortest TTL of a lookup worker's resolver."""

KNOWN_MAX = 1_000
KNOWN_LENGTH_MAX = 600
"""Bound of a target's name and a principal's seal together."""


class TargetRefused(ProxyError):
    """A relay's target is not allowed, by the lookup worker or by the forwarder itself; ``reason`` is a short stable
    name.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class BrokerRequest:
    """What a client that wants a relay has sent, and who it is."""

    connect: CommandConnect
    identity: ClientIdentity
    client_address: str


def _bound_to(asked: BrokerRequest) -> tuple[str, bytes]:
    """Return what a lookup worker's verdict is about, and so holds for: the target and the sealed principal."""
    return asked.connect.proxy_to_broker_url, asked.identity.sealed


def _put_first(addresses: MutableSequence[str], stream: trio.abc.Stream) -> None:
    """Put the address first to which this stream leads: others may not answer."""
    transport = stream.transport if isinstance(stream, TlsStream) else stream
    if len(addresses) > 1 and isinstance(transport, TcpStream):
        with contextlib.suppress(OSError, ValueError):  # it has ended already, or the address is written otherwise
            address = transport.socket.getpeername()[0]
            addresses.remove(address)
            addresses.insert(0, address)


class BrokerLinks:
    """Opens links to brokers. The constructor raises ConfigError where certificates are unusable."""

    def __init__(self, config: Config, auth: RpcPool, lookup: RpcPool, nursery: trio.Nursery) -> None:
        self.config = config
        self.dialer = Dialer(config.brokers, listener_binds(config))
        self._links = BrokerLinkFactory(self.dialer, config.limits.max_broker_frame_bytes, SERVER_VERSION)
        self._passing_dialer = Dialer(config.brokers, listener_binds(config), passes_tls=True)
        self._dial_check = DialCheck(config.brokers, nursery)
        self._auth = auth
        self._lookup = lookup
        self._known: dict[tuple[str, bytes], tuple[float, ResolveTargetResponse]] = {}

    # ---- a target

    def known_target(self, asked: BrokerRequest) -> ResolveTargetResponse | None:
        """Return where to dial, if a link to this target was opened a moment ago for the same sealed principal and
        BrokerOpening may dial it; else None.
        """
        known = self._known.get(_bound_to(asked))
        return known[1] if known is not None and known[0] > trio.current_time() else None

    def _remember_target(self, asked: BrokerRequest, target: ResolveTargetResponse) -> None:
        """Have ``known_target`` return a target, which was checked, for KNOWN_S, if there is no reason to look closer
        at it; none for a client that takes any broker.
        """
        name, sealed = bound_to = _bound_to(asked)
        is_simple = not any("%" in address for address in target.addresses)  # a scope would be looked up
        if not (name and is_simple and len(name) + len(sealed) <= KNOWN_LENGTH_MAX):
            return
        if target.others or self.dialer.may_lead_back(target.port):
            return
        if len(self._known) >= KNOWN_MAX:
            self._known.clear()
        self._known[bound_to] = trio.current_time() + KNOWN_S, target

    def forget_target(self, asked: BrokerRequest) -> None:
        """Have ``known_target`` return a target no more, until a task has opened a link to it again."""
        self._known.pop(_bound_to(asked), None)

    async def _check_dialled(self, broker: HostPort, addresses: Sequence[str]) -> None:
        """Check what a lookup worker has answered, before it is dialled. Raises TargetRefused."""
        try:
            await self._dial_check.check_target(broker, addresses)
        except TargetDenied as denied:
            get_logger().error(
                "a lookup worker named what no relay may be dialled to", reason=denied.reason, detail=str(denied)
            )
            raise TargetRefused(BAD_LOOKUP_ANSWER, f"the lookup worker's answer is refused: {denied}") from None

    # ---- a link

    def connect_for(
        self, asked: BrokerRequest, target: Target, credentials: Credentials, method: str, data: bytes
    ) -> CommandConnect:
        """Return the CONNECT for a broker; ``method`` and ``data``: the proxy's own authentication."""
        identity, config = asked.identity.broker_identity(method, data), self.config.brokers
        answers = self.answers_challenges(asked, target, credentials)
        return broker_connect(
            asked.connect, identity, __version__, through_proxy=config.through_proxy, answers_challenges=answers
        )

    def answers_challenges(self, asked: BrokerRequest, target: Target, credentials: Credentials) -> bool | None:
        """Return whether the proxy answers the broker's challenges; None: they go to the client, or there are none.

        A broker with the client's own credentials challenges the client, and CONNECT says if it supports that. Without
        any credentials there are no challenges.
        """
        asks_client = asked.identity.original is not None and target.original_data != OriginalData.ORIGINAL_DATA_IGNORED
        none = asks_client or self.config.brokers.credentials is None
        return None if none else bool(credentials.expires_at_unix_ms)

    def challenge_answer(self, method: str, data: bytes) -> bytes:
        """Return the frame that answers a broker's challenge."""
        return commands.auth_response(SERVER_VERSION, commands.PROTOCOL_VERSION, method, data)

    def explain_failure(self, asked: BrokerRequest, target: Target, failed: BrokerLinkFailed) -> BrokerLinkFailed:
        """Add to a failure what is known of its broker."""
        identity = asked.identity
        shown = ShownCredentials(
            identity.role,
            identity.principal.method,
            has_original=identity.original is not None,
            forwards=self.config.brokers.forward_authorization_credentials,
        )
        return explain_refusal(failed, target.original_data, shown)

    def start_opening(
        self,
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
        reactor, target = current_reactor(), self.known_target(asked)
        if reactor is None or target is None:
            return None
        opening = BrokerOpening(self, reactor, deadlines, turns, tasks, asked=asked, target=target, on_done=on_done)
        opening.start()
        return opening

    async def open_link(self, asked: BrokerRequest) -> BrokerLink:
        """Connect a relay to the broker that CONNECT names, or to any broker where the name is empty.

        Raises TargetRefused, BrokerLinkFailed, RpcError.
        """
        target = await self._resolve_target(
            ResolveTargetRequest(
                target=asked.connect.proxy_to_broker_url,
                client_address=asked.client_address,
                principal_name=asked.identity.role,
                sealed_principal=asked.identity.sealed,
                any_broker=not asked.connect.proxy_to_broker_url,
            )
        )
        link, opened, credentials = await self._open_first(asked, [target, *target.others])
        _put_first(target.addresses, link.stream)
        self._remember_target(asked, target)
        answers = bool(self.answers_challenges(asked, opened, credentials))
        return replace(link, answers_challenges=answers, original_data=opened.original_data)

    async def _resolve_target(self, request: ResolveTargetRequest) -> ResolveTargetResponse:
        """Have a lookup worker check a target. Raises TargetRefused, RpcError."""
        target = await self._lookup.pick_client().call(
            Method.RESOLVE_TARGET,
            request,
            ResolveTargetResponse,
            timeout_s=seconds(self.config.brokers.handshake_timeout_ms),
            retry=True,
        )
        if target.denial:
            raise TargetRefused(target.denial, target.detail)
        return target

    async def open_named(self, name: str, client_address: str) -> tuple[HostPort, TcpStream]:
        """Connect to the broker that a client's TLS names (SNI), over TCP alone: the TLS is the client's own.

        Nothing of the proxy's goes that way, so no principal is needed. Raises TargetRefused, BrokerLinkFailed,
        RpcError.
        """
        brokers = self.config.brokers
        timeout_s = seconds(brokers.handshake_timeout_ms)
        target = await self._resolve_target(
            ResolveTargetRequest(target=name, client_address=client_address, server_name=True)
        )
        broker = HostPort(target.host, target.port)
        await self._check_dialled(broker, target.addresses)
        port = tls_port(brokers, broker.port)
        if port is None:
            raise TargetRefused("port", f"{broker}: brokers.port_pairs has no port with TLS for it")
        broker = HostPort(broker.host, port)
        try:
            with trio.fail_after(timeout_s):
                stream = await self._passing_dialer.dial_any(broker, tuple(target.addresses))
        except trio.TooSlowError:
            raise too_slow(broker, timeout_s) from None
        except DialFailed as error:
            raise not_reached(broker, error.reason, str(error)) from None
        assert isinstance(stream, TcpStream)  # the dialer opens no TLS
        return broker, stream

    def credentials_for(self, broker_host: str) -> CredentialExchange | NoCredentials:
        """Start an authentication of the proxy at a broker. Raises RpcError."""
        return credentials_for(self._auth, broker_host, configured=self.config.brokers.credentials is not None)

    async def _open_first(
        self, asked: BrokerRequest, targets: Sequence[Target]
    ) -> tuple[BrokerLink, Target, Credentials]:
        """Connect to the first of these brokers that is reachable and accepts clients; return which, and how, too.

        Each broker gets an equal share of the time left, so that a silent one leaves time for those behind it. Raises
        BrokerLinkFailed, TargetRefused.
        """
        brokers = self.config.brokers
        deadline = trio.current_time() + seconds(brokers.handshake_timeout_ms)
        for number, target in enumerate(targets, 1):
            is_last = number == len(targets)
            broker = HostPort(target.host, target.port)
            await self._check_dialled(broker, target.addresses)
            credentials = self.credentials_for(broker.host)
            left_s = max(0.0, deadline - trio.current_time())  # to get credentials takes time, too
            try:
                link = await self._links.open_link(
                    broker,
                    tuple(target.addresses),
                    credentials,
                    partial(self.connect_for, asked, target, credentials),
                    timeout_s=left_s / (len(targets) + 1 - number),
                )
            except BrokerLinkFailed as failed:
                not_now = failed.reason == "refused" and failed.code in RETRYABLE_REFUSALS
                if is_last or not (not_now or failed.reason in REASONS_TO_TRY_ANOTHER_BROKER):
                    raise self.explain_failure(asked, target, failed) from None
                get_logger().warning(
                    "a client takes any broker, and one cannot serve it", broker=str(broker), reason=str(failed)
                )
            else:
                return link, target, credentials
        raise RuntimeError("no broker to open")


class BrokerOpening:
    """One link that is opened by callback. ``on_done`` is called once, unless the opening was abandoned before."""

    __slots__ = (
        "_address",
        "_asked",
        "_broker",
        "_connect",
        "_connect_ends_at",
        "_credentials",
        "_deadline",
        "_ends_at",
        "_handshake",
        "_handshake_timeout_s",
        "_is_connected",
        "_is_over",
        "_is_reached",
        "_links",
        "_on_done",
        "_reactor",
        "_sock",
        "_target",
        "_tasks",
        "_tls",
        "_turns",
        "_unsent",
    )

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
        self._links = links
        self._reactor = reactor
        self._deadline = deadlines.new_deadline(self._on_deadline)
        self._turns = turns
        self._tasks = tasks
        self._asked = asked
        self._on_done = on_done
        self._credentials = links.credentials_for(target.host)
        self._handshake: BrokerHandshake
        self._is_over = False
        self._sock: socket.socket | None = None
        self._tls: TlsStream | None = None
        self._connect = self._unsent = b""
        self._target = target
        self._broker, self._address = HostPort(target.host, target.port), target.addresses[0]
        self._is_reached = self._is_connected = False  # by TCP; with TLS, too
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
            self._handshake.on_answer_sent(complete=self._credentials.complete)
            self._send_data(self._links.challenge_answer(*outcome))

    def _dial(self, method: str, data: bytes) -> None:
        links = self._links
        self._handshake = BrokerHandshake(
            max_frame_bytes=links.config.limits.max_broker_frame_bytes, complete=self._credentials.complete
        )
        connect = links.connect_for(self._asked, self._target, self._credentials, method, data)
        self._connect = commands.connect(connect)
        self._connect_ends_at = current_tick().now + seconds(links.config.brokers.connect_timeout_ms)
        attempt_s = ATTEMPT_DELAY_S if self._has_more_addresses else math.inf
        self._deadline.set(min(self._connect_ends_at, self._ends_at, current_tick().now + attempt_s))
        try:
            self._sock = links.dialer.start_connection(self._address, self._broker.port)
            self._tls = links.dialer.new_tls_stream(TcpStream(self._sock), self._broker.host)
        except (OSError, TlsFailed) as error:
            self._fail_to_reach(error)
            return
        if self._tls is None:
            self._unsent = self._connect
            self._send()  # to a broker nearby the connection is established already
        else:
            self._continue_tls(self._tls)

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
            self._turns.remove(self._owner, self)
            sock.close()

    def _finish(self, outcome: Outcome) -> None:
        self._end()
        self._on_done(outcome)

    # ---- the connection

    @property
    def _has_more_addresses(self) -> bool:
        return len(self._target.addresses) > 1

    def _fail_to_reach(self, error: OSError | TlsFailed) -> None:
        if isinstance(error, TlsFailed):
            self._give_up("tls", str(error))
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

    def _on_error(self, error: OSError) -> None:
        """Finish for an error of the socket."""
        if self._is_connected:
            self._finish(broken_off(self._broker, error))
        elif self._is_reached:
            text = f"the connection broke off during the TLS handshake: {error}"
            self._fail_to_reach(TlsFailed(text, "broke_off"))
        else:
            self._fail_to_reach(error)

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
            self._finish(broken_off(self._broker, error.__cause__ or error))
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
            self._finish(broken_off(self._broker, error))

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
            self._finish(broken_off(self._broker, session.error))
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
        self._finish(BrokerLink(self._broker, stream, connected, answers, original_data))
