"""Links to brokers for relays: the target is checked by a lookup worker and here, then dialled in the client's name.

A link is opened in a task here, or by callback (proxy.forwarder.workers.broker_opening). The proxy's own credentials,
where it has some, come from an auth worker.
"""

import contextlib
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, replace
from functools import partial

import trio

from proto import commands
from proto.addresses import HostPort
from proto.connect_rules import broker_connect
from proto.pulsar_pb2 import CommandConnect
from proto.rpc_pb2 import Method, OriginalData, OtherBroker, ResolveTargetRequest, ResolveTargetResponse
from proxy import SERVER_VERSION, __version__
from proxy.common.errors import ProxyError
from proxy.common.logs import get_logger
from proxy.config.binds import listener_binds
from proxy.config.sni import tls_port
from proxy.config.types import Config
from proxy.forwarder.workers.authentication import ClientIdentity
from proxy.forwarder.workers.relay_outcomes import OnBrokerEnd, RelayOutcomes
from proxy.runtime.fairness.owners import owner_of
from proxy.runtime.loop.tasks import seconds
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.network.broker_link import (
    REASONS_TO_TRY_ANOTHER_BROKER,
    RETRYABLE_REFUSALS,
    BrokerLink,
    BrokerLinkFactory,
    BrokerLinkFailed,
    not_reached,
    too_slow,
)
from proxy.runtime.network.broker_refusals import ShownCredentials, explain_refusal
from proxy.runtime.network.credentials import CredentialExchange, Credentials, NoCredentials, credentials_for
from proxy.runtime.network.dial_check import DialCheck
from proxy.runtime.network.dial_rules import TargetDenied
from proxy.runtime.network.dialing import Dialer, DialFailed
from proxy.runtime.network.tls import TlsStream
from proxy.runtime.rpc.pool import RpcPool

Target = ResolveTargetResponse | OtherBroker
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
    """What a client that wants a relay has sent, and who it is. ``announcement``: its PROXY header for the broker."""

    connect: CommandConnect
    identity: ClientIdentity
    client_address: str
    announcement: bytes = b""


@dataclass(frozen=True, slots=True)
class NamedRequest:
    """The host that a client's TLS names (SNI), and who the client is. ``announcement``: as in BrokerRequest."""

    name: str
    client_address: str
    announcement: bytes = b""


@dataclass(frozen=True, slots=True)
class NamedLink:
    """A TCP connection to the broker of a NamedRequest, on which nothing was said but the client's PROXY header."""

    broker: HostPort
    stream: TcpStream


_Bound = tuple[str, bytes | None]


def _bound_to(asked: BrokerRequest | NamedRequest) -> _Bound:
    """Return what a lookup worker's verdict is about, and so holds for: the target and the sealed principal.

    None instead of a seal: the name in a client's TLS, for which no principal is needed, and nothing else.
    """
    if isinstance(asked, NamedRequest):
        return asked.name, None
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
    """Opens links to brokers. The constructor raises ConfigError where certificates are unusable.

    ``outcomes``: where the outcome of each link and its relay is recorded; None: nowhere.
    """

    def __init__(self, config: Config, auth: RpcPool, lookup: RpcPool, nursery: trio.Nursery) -> None:
        self.config = config
        self.dialer = Dialer(config.brokers, listener_binds(config))
        self._links = BrokerLinkFactory(self.dialer, config.limits.max_broker_frame_bytes, SERVER_VERSION)
        self.passing_dialer = Dialer(config.brokers, listener_binds(config), passes_tls=True)
        self._dial_check = DialCheck(config.brokers, nursery)
        self._auth = auth
        self._lookup = lookup
        self._known: dict[_Bound, tuple[float, ResolveTargetResponse]] = {}
        self.outcomes: RelayOutcomes | None = None

    # ---- a target

    def known_target(self, asked: BrokerRequest | NamedRequest) -> ResolveTargetResponse | None:
        """Return where to dial, if a link to this target was opened a moment ago for the same sealed principal and
        it may be dialled by callback; else None.
        """
        known = self._known.get(_bound_to(asked))
        return known[1] if known is not None and known[0] > trio.current_time() else None

    def _remember_target(self, asked: BrokerRequest | NamedRequest, target: ResolveTargetResponse) -> None:
        """Have ``known_target`` return a target, which was checked, for KNOWN_S, if there is no reason to look closer
        at it; none for a client that takes any broker.
        """
        name, sealed = bound_to = _bound_to(asked)
        is_simple = not any("%" in address for address in target.addresses)  # a scope would be looked up
        if not (name and is_simple and len(name) + len(sealed or b"") <= KNOWN_LENGTH_MAX):
            return
        if target.others or self.dialer.may_lead_back(target.port):
            return
        if len(self._known) >= KNOWN_MAX:
            self._known.clear()
        self._known[bound_to] = trio.current_time() + KNOWN_S, target

    def forget_target(self, asked: BrokerRequest | NamedRequest) -> None:
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

    def record_link(self, asked: BrokerRequest, target: Target) -> OnBrokerEnd | None:
        """Record that a broker has accepted a relay; return what is to be called when the broker ends it."""
        return None if self.outcomes is None else self.outcomes.record_link(target, self._owner_of(asked))

    def record_failure(self, asked: BrokerRequest, target: Target, failed: BrokerLinkFailed) -> None:
        """Record that a broker has taken no relay."""
        if self.outcomes is not None:
            self.outcomes.record_failure(target, self._owner_of(asked), failed)

    def _owner_of(self, asked: BrokerRequest) -> str:
        return owner_of(asked.identity.role, asked.client_address, self.config.authentication.anonymous_role)

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
        on_broker_end = self.record_link(asked, opened)
        return replace(
            link, answers_challenges=answers, original_data=opened.original_data, on_broker_end=on_broker_end
        )

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

    async def open_named(self, asked: NamedRequest) -> NamedLink:
        """Connect to the broker that a client's TLS names (SNI), over TCP alone: the TLS is the client's own.

        Nothing of the proxy's goes that way, so no principal is needed. Raises TargetRefused, BrokerLinkFailed,
        RpcError.
        """
        brokers = self.config.brokers
        timeout_s = seconds(brokers.handshake_timeout_ms)
        target = await self._resolve_target(
            ResolveTargetRequest(target=asked.name, client_address=asked.client_address, server_name=True)
        )
        broker = HostPort(target.host, target.port)
        await self._check_dialled(broker, target.addresses)
        port = tls_port(brokers, broker.port)
        if port is None:
            raise TargetRefused("port", f"{broker}: brokers.port_pairs has no port with TLS for it")
        target.port = port  # as it is dialled
        broker = HostPort(broker.host, port)
        try:
            with trio.fail_after(timeout_s):
                stream = await self.passing_dialer.dial_any(broker, tuple(target.addresses), asked.announcement)
        except trio.TooSlowError:
            raise too_slow(broker, timeout_s) from None
        except DialFailed as error:
            raise not_reached(broker, error.reason, str(error)) from None
        assert isinstance(stream, TcpStream)  # the dialer opens no TLS
        _put_first(target.addresses, stream)
        self._remember_target(asked, target)
        return NamedLink(broker, stream)

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
                    announcement=asked.announcement,
                )
            except BrokerLinkFailed as failed:
                self.record_failure(asked, target, failed)
                not_now = failed.reason == "refused" and failed.code in RETRYABLE_REFUSALS
                if is_last or not (not_now or failed.reason in REASONS_TO_TRY_ANOTHER_BROKER):
                    raise self.explain_failure(asked, target, failed) from None
                get_logger().warning(
                    "a client takes any broker, and one cannot serve it", broker=str(broker), reason=str(failed)
                )
            else:
                return link, target, credentials
        raise RuntimeError("no broker to open")
