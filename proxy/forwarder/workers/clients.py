"""Clients of the auth and lookup workers, and the settings in force, shared by all connections of a forwarder."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import trio

from proto.envelope import ENVELOPE_VERSION
from proto.pulsar_pb2 import CommandConnect, CommandConnected
from proto.rpc_frames import Reply
from proto.rpc_pb2 import (
    BrokerProfileRequest,
    BrokerProfileResponse,
    EnvelopeRequest,
    Method,
)
from proxy.config.methods import one_round_methods
from proxy.config.types import Config
from proxy.forwarder.workers.authentication import (
    AuthenticationExchange,
    ClientEndpoint,
    ClientIdentity,
    ExchangeSettings,
)
from proxy.forwarder.workers.broker_links import BrokerLinks
from proxy.forwarder.workers.relay_outcomes import RelayOutcomes
from proxy.runtime.fairness.byte_budget import ByteBudget
from proxy.runtime.fairness.fair_capacity import FairCapacity
from proxy.runtime.loop.tasks import seconds
from proxy.runtime.rpc.errors import RpcError
from proxy.runtime.rpc.pool import RpcPool
from proxy.runtime.rpc.replies import PendingCall

_ENVELOPE = int(Method.ENVELOPE)  # a constant: access to an enum's member costs a look-up each time

_ANSWER_GRACE_S = 1.0
"""Additional wait of a forwarder beyond the lookup worker's own timeout: the worker's error has more details."""

_PROFILE_TIMEOUT_S = 1.0
_PROFILE_LIFETIME_S = 1.0


class WorkerClients:
    """Calls to the auth and lookup workers, as connections need them.

    The constructor raises ConfigError where certificates are unusable. ``outcomes``: where outcomes of relays are
    recorded, if the settings ask for it.
    """

    def __init__(
        self,
        config: Config,
        auth: RpcPool,
        lookup: RpcPool,
        nursery: trio.Nursery,
        outcomes: RelayOutcomes | None = None,
    ) -> None:
        self.config = config
        self.answer_timeout_s = seconds(config.limits.lookup_timeout_ms) + _ANSWER_GRACE_S
        """Timeout of an Envelope's answers, in seconds."""
        self._answer_timeout_ms = int(self.answer_timeout_s * 1000)
        self.room = FairCapacity(config.limits.max_topic_lists_bytes, config.limits.max_broker_frame_bytes)
        """Capacity for answers that may be large."""
        self.budget = ByteBudget(config.limits.max_lookup_bytes)
        """Budget for everything else that is held for clients before the relay."""
        self.broker_links = BrokerLinks(config, auth, lookup, nursery)
        if config.brokers.ejection_by_relays:
            self.broker_links.outcomes = outcomes
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
        timeout_ms = self._answer_timeout_ms
        return worker.start_call(_ENVELOPE, envelope, on_reply, timeout_ms=timeout_ms, deadline=deadline) is not None

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
