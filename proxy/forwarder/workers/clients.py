"""Clients of the auth and lookup workers, and the settings in force, shared by all sessions of a forwarder."""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial

import trio

from proto.addresses import HostPort
from proto.connect_rules import broker_connect
from proto.envelope import ENVELOPE_VERSION
from proto.pulsar_pb2 import CommandConnect, CommandConnected
from proto.rpc_frames import Reply
from proto.rpc_pb2 import (
    BrokerProfileRequest,
    BrokerProfileResponse,
    EnvelopeRequest,
    Method,
    OriginalData,
    OtherBroker,
    ResolveTargetRequest,
    ResolveTargetResponse,
)
from proxy import __version__
from proxy.common.logs import get_logger
from proxy.config.binds import listener_binds
from proxy.config.methods import one_round_methods
from proxy.config.types import Config
from proxy.forwarder.workers.authentication import (
    SERVER_VERSION,
    AuthenticationExchange,
    ClientEndpoint,
    ClientIdentity,
    ExchangeSettings,
)
from proxy.forwarder.workers.dial_check import DialCheck
from proxy.runtime.fairness.byte_budget import ByteBudget
from proxy.runtime.fairness.fair_capacity import FairCapacity
from proxy.runtime.loop.tasks import seconds
from proxy.runtime.network.broker_link import (
    REASONS_TO_TRY_ANOTHER_BROKER,
    RETRYABLE_REFUSALS,
    BrokerLink,
    BrokerLinkFactory,
    BrokerLinkFailed,
)
from proxy.runtime.network.broker_refusals import ShownCredentials, explain_refusal
from proxy.runtime.network.credentials import Credentials, credentials_for
from proxy.runtime.network.dial_rules import TargetDenied
from proxy.runtime.network.dialing import Dialer
from proxy.runtime.rpc.errors import RpcError
from proxy.runtime.rpc.pool import RpcPool
from proxy.runtime.rpc.replies import PendingCall

_ENVELOPE = int(Method.ENVELOPE)  # a constant: access to an enum's member costs a look-up each time

_ANSWER_GRACE_S = 1.0
"""Additional wait of a forwarder beyond the lookup worker's own timeout: the worker's error has more details."""

_Target = ResolveTargetResponse | OtherBroker

_PROFILE_TIMEOUT_S = 1.0
_PROFILE_LIFETIME_S = 1.0


BAD_LOOKUP_ANSWER = "bad_lookup_answer"
"""Reason of a TargetRefused: the forwarder's own check denies what the lookup worker has allowed."""


class TargetRefused(Exception):
    """A relay's target is not allowed, by the lookup worker or by the forwarder itself; ``reason`` is a short stable
    name.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class WorkerClients:
    """Calls to the auth and lookup workers, as sessions need them.

    The constructor raises ConfigError where certificates are unusable.
    """

    def __init__(self, config: Config, auth: RpcPool, lookup: RpcPool, nursery: trio.Nursery) -> None:
        self.config = config
        self._dial_check = DialCheck(config.brokers, nursery)
        self.answer_timeout_s = seconds(config.limits.lookup_timeout_ms) + _ANSWER_GRACE_S
        """Timeout of an Envelope's answers, in seconds."""
        self._answer_timeout_ms = int(self.answer_timeout_s * 1000)
        self.room = FairCapacity(config.limits.max_topic_lists_bytes, config.limits.max_broker_frame_bytes)
        """Capacity for answers that may be large."""
        self.budget = ByteBudget(config.limits.max_lookup_bytes)
        """Budget for everything else that is held for clients before the relay."""
        self._broker_links = BrokerLinkFactory(
            Dialer(config.brokers, listener_binds(config)),
            config.limits.max_broker_frame_bytes,
            SERVER_VERSION,
        )
        self._exchange_settings = ExchangeSettings(
            timeout_s=seconds(config.limits.handshake_timeout_ms),
            forwards_credentials=config.brokers.forward_authorization_credentials,
            one_round_methods=one_round_methods(config.authentication),
        )
        self._auth = auth
        self._lookup = lookup
        self.profile: CommandConnected | None = None

    def inherit_budgets(self, room: FairCapacity, budget: ByteBudget) -> None:
        """Continue with the capacity and budget of the previous settings.

        What is lent from them still counts; otherwise each reload would add a capacity of its own.
        """
        limits = self.config.limits
        room.resize(limits.max_topic_lists_bytes, limits.max_broker_frame_bytes)
        self.room = room
        budget.resize(limits.max_lookup_bytes)
        self.budget = budget
        self._profile_at = 0.0

    # ---- auth workers

    def new_authentication_exchange(self, client: ClientEndpoint, connect: CommandConnect) -> AuthenticationExchange:
        """Start the exchange of one client with one auth worker."""
        return AuthenticationExchange(self._auth.pick_client(), client, connect, self._exchange_settings)

    # ---- lookup workers

    @staticmethod
    def envelope_head(identity: ClientIdentity, client_address: str) -> bytes:
        """Encode the common part of a client's Envelopes, which names the principal of the requests (KIP-590)."""
        envelope = EnvelopeRequest(
            version=ENVELOPE_VERSION,
            principal_type=identity.principal.type,
            principal_name=identity.principal.name,
            sealed_principal=identity.sealed,
            client_address=client_address,
            proxies=identity.proxies,
        )
        if identity.original is not None:
            envelope.original_auth_method = identity.original.method
            envelope.original_auth_data = identity.original.data
        return envelope.SerializeToString()

    def forward_envelope_now(self, envelope: bytes, deadline: float, on_reply: Callable[[Reply | None], None]) -> bool:
        """Send an Envelope to a lookup worker if one can be reached at once; return False otherwise.

        See RpcClient.start_call for the callback.
        """
        worker = self._lookup.pick_client()
        return worker.start_call(_ENVELOPE, envelope, on_reply, timeout_ms=self._answer_timeout_ms, deadline=deadline)

    def forward_envelope(self, envelope: bytes, deadline: float) -> AbstractAsyncContextManager[PendingCall]:
        """Send an Envelope to a lookup worker. Raises RpcError."""
        return self._lookup.pick_client().open_call(_ENVELOPE, envelope, deadline)

    @property
    def is_profile_fresh(self) -> bool:
        """Whether ``profile`` is recent enough: it changes when brokers are upgraded."""
        return self.profile is not None and trio.current_time() - self._profile_at < _PROFILE_LIFETIME_S

    async def broker_profile(self) -> CommandConnected | None:
        """Return the CONNECTED with which brokers of this cluster answer; None while it is unknown."""
        now = trio.current_time()
        try:
            response = await self._lookup.pick_client().call(
                Method.BROKER_PROFILE,
                BrokerProfileRequest(),
                BrokerProfileResponse,
                timeout_s=_PROFILE_TIMEOUT_S,
                retry=True,
            )
        except RpcError:
            return None
        self.profile = CommandConnected.FromString(response.connected) if response.connected else None
        self._profile_at = now
        return self.profile

    async def open_broker(self, connect: CommandConnect, identity: ClientIdentity, client_address: str) -> BrokerLink:
        """Connect a relay to the broker that CONNECT names, or to any broker where the name is empty.

        Raises TargetRefused, BrokerLinkFailed, RpcError.
        """
        brokers = self.config.brokers
        request = ResolveTargetRequest(
            target=connect.proxy_to_broker_url,
            client_address=client_address,
            principal_name=identity.role,
            sealed_principal=identity.sealed,
            any_broker=not connect.proxy_to_broker_url,
        )
        target = await self._lookup.pick_client().call(
            Method.RESOLVE_TARGET,
            request,
            ResolveTargetResponse,
            timeout_s=seconds(brokers.handshake_timeout_ms),
            retry=True,
        )
        if target.denial:
            raise TargetRefused(target.denial, target.detail)

        def answers_challenges(target: _Target, credentials: Credentials) -> bool | None:
            # A broker with the client's own credentials challenges the client, and CONNECT says if it supports that.
            # Without any credentials there are no challenges.
            asks_client = identity.original is not None and target.original_data != OriginalData.ORIGINAL_DATA_IGNORED
            return None if asks_client or brokers.credentials is None else bool(credentials.expires_at_unix_ms)

        def make_connect(target: _Target, credentials: Credentials, method: str, data: bytes) -> CommandConnect:
            broker_identity = identity.broker_identity(method, data)
            answers = answers_challenges(target, credentials)
            return broker_connect(
                connect, broker_identity, __version__, through_proxy=brokers.through_proxy, answers_challenges=answers
            )

        shown = ShownCredentials(
            identity.role,
            identity.principal.method,
            has_original=identity.original is not None,
            forwards=brokers.forward_authorization_credentials,
        )

        def explain(target: _Target, failed: BrokerLinkFailed) -> BrokerLinkFailed:
            return explain_refusal(failed, target.original_data, shown)

        link, opened, credentials = await self._open_first([target, *target.others], make_connect, explain)
        answers = bool(answers_challenges(opened, credentials))
        return replace(link, answers_challenges=answers, original_data=opened.original_data)

    async def _check_dialled(self, broker: HostPort, addresses: Sequence[str]) -> None:
        """Check what a lookup worker has answered, before it is dialled. Raises TargetRefused."""
        try:
            await self._dial_check.check_target(broker, addresses)
        except TargetDenied as denied:
            get_logger().error(
                "a lookup worker named what no relay may be dialled to", reason=denied.reason, detail=str(denied)
            )
            raise TargetRefused(BAD_LOOKUP_ANSWER, f"the lookup worker's answer is refused: {denied}") from None

    def broker_credentials(self, broker_host: str) -> Credentials:
        """Start another authentication of the proxy at a relay's broker. Raises RpcError."""
        return credentials_for(self._auth, broker_host, configured=self.config.brokers.credentials is not None)

    async def _open_first(
        self,
        targets: Sequence[_Target],
        make_connect: Callable[[_Target, Credentials, str, bytes], CommandConnect],
        explain: Callable[[_Target, BrokerLinkFailed], BrokerLinkFailed],
    ) -> tuple[BrokerLink, _Target, Credentials]:
        """Connect to the first of these brokers that is reachable and accepts clients; return which, and how, too.

        ``explain`` adds to a failure what is known of its broker. Each broker gets an equal share of the time left, so
        that a silent one leaves time for those behind it. Raises BrokerLinkFailed, TargetRefused.
        """
        brokers = self.config.brokers
        deadline = trio.current_time() + seconds(brokers.handshake_timeout_ms)
        for number, target in enumerate(targets, 1):
            is_last = number == len(targets)
            broker = HostPort(target.host, target.port)
            await self._check_dialled(broker, target.addresses)
            credentials = self.broker_credentials(broker.host)
            left_s = max(0.0, deadline - trio.current_time())  # to get credentials takes time, too
            try:
                link = await self._broker_links.open_link(
                    broker,
                    tuple(target.addresses),
                    credentials,
                    partial(make_connect, target, credentials),
                    timeout_s=left_s / (len(targets) + 1 - number),
                )
            except BrokerLinkFailed as failed:
                not_now = failed.reason == "refused" and failed.code in RETRYABLE_REFUSALS
                if is_last or not (not_now or failed.reason in REASONS_TO_TRY_ANOTHER_BROKER):
                    raise explain(target, failed) from None
                get_logger().warning(
                    "a client takes any broker, and one cannot serve it", broker=str(broker), reason=str(failed)
                )
            else:
                return link, target, credentials
        raise RuntimeError("no broker to open")
