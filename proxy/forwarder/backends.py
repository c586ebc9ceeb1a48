"""What all sessions of a forwarder share: the way to the other workers, and the settings in force."""

from dataclasses import dataclass

import trio

from proto.addresses import HostPort
from proto.commands import auth_method_of
from proto.connect_rules import BrokerIdentity, broker_connect
from proto.pulsar_pb2 import CommandConnect, CommandConnected
from proto.rpc_pb2 import (
    AuthenticateRequest,
    AuthenticateResponse,
    BrokerProfileRequest,
    BrokerProfileResponse,
    EnvelopeRequest,
    EnvelopeResponse,
    Method,
    Principal,
    ResolveTargetRequest,
    ResolveTargetResponse,
)
from proxy import __version__
from proxy.config.types import Config
from proxy.runtime.broker_link import BrokerDialer, BrokerLink
from proxy.runtime.credentials import credentials_for
from proxy.runtime.rpc_client import RpcClient, RpcError, RpcPool
from proxy.runtime.tasks import seconds

SERVER_VERSION = f"pulsar-trio-proxy-{__version__}"

_ANSWER_GRACE_S = 1.0
"""How much longer than the lookup worker itself a forwarder waits for it: the worker's own error says more."""

_PROFILE_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class ClientIdentity:
    """Who a client is, as the auth worker said; both parts empty where the cluster does not authenticate."""

    principal: Principal
    sealed: bytes = b""

    @property
    def role(self) -> str:
        """The client's role; empty: none."""
        return str(self.principal.name)


ANONYMOUS = ClientIdentity(Principal())


class TargetRefused(Exception):
    """The lookup worker says that a relay's target is not allowed; ``reason`` is a short stable name."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Backends:
    """Calls to the auth and lookup workers, in the words of a session."""

    def __init__(self, config: Config, auth: RpcPool, lookup: RpcPool) -> None:
        self.config = config
        self._auth = auth
        self._lookup = lookup

    # ---- auth workers

    def new_authentication(self, client_address: str) -> "Authentication":
        """The rounds of one client, all with the same auth worker."""
        timeout_s = seconds(self.config.limits.handshake_timeout_ms)
        return Authentication(self._auth.pick(), client_address, timeout_s)

    # ---- lookup workers

    async def forward(self, request: bytes, identity: ClientIdentity, client_address: str) -> EnvelopeResponse:
        """Send a client's request, whole, in an Envelope. Raises RpcError."""
        envelope = EnvelopeRequest(
            request=request,
            principal_type=identity.principal.type,
            principal_name=identity.principal.name,
            sealed_principal=identity.sealed,
            client_address=client_address,
        )
        timeout_s = seconds(self.config.limits.lookup_timeout_ms) + _ANSWER_GRACE_S
        return await self._lookup.pick().call(
            Method.ENVELOPE, envelope, EnvelopeResponse, timeout_s=timeout_s, retry=True
        )

    async def broker_profile(self) -> CommandConnected | None:
        """What brokers of this cluster say of themselves; None where that is not known (yet)."""
        try:
            response = await self._lookup.pick().call(
                Method.BROKER_PROFILE,
                BrokerProfileRequest(),
                BrokerProfileResponse,
                timeout_s=_PROFILE_TIMEOUT_S,
                retry=True,
            )
        except RpcError:
            return None
        return CommandConnected.FromString(response.connected) if response.connected else None

    async def open_broker(self, connect: CommandConnect, identity: ClientIdentity, client_address: str) -> BrokerLink:
        """Open the broker's side of a relay. Raises TargetRefused, BrokerLinkFailed, RpcError."""
        brokers = self.config.brokers
        request = ResolveTargetRequest(
            target=connect.proxy_to_broker_url, client_address=client_address, principal_name=identity.role
        )
        target = await self._lookup.pick().call(
            Method.RESOLVE_TARGET,
            request,
            ResolveTargetResponse,
            timeout_s=seconds(brokers.handshake_timeout_ms),
            retry=True,
        )
        if target.denial:
            raise TargetRefused(target.denial, target.detail)

        def make_connect(proxy: BrokerIdentity) -> CommandConnect:
            return broker_connect(connect, proxy, __version__)

        dialer = BrokerDialer(brokers, self.config.limits.max_broker_frame_bytes, SERVER_VERSION)
        credentials = credentials_for(self._auth, target.host, configured=brokers.credentials is not None)
        broker = HostPort(target.host, target.port)
        return await dialer.open(broker, tuple(target.addresses), credentials, make_connect, identity.role)


class Authentication:
    """One client's authentication. The forwarder carries bytes and knows nothing of mechanisms (PIP-30)."""

    def __init__(self, client: RpcClient, client_address: str, timeout_s: float) -> None:
        self._client = client
        self._id = client.new_id()
        self._client_address = client_address
        self._deadline = trio.current_time() + timeout_s

    async def first_round(self, connect: CommandConnect) -> AuthenticateResponse:
        """Judge what came with CONNECT. Raises RpcError."""
        return await self._round(auth_method_of(connect), connect.auth_data, first=True)

    async def next_round(self, method: str, data: bytes) -> AuthenticateResponse:
        """Judge the answer to a challenge. Raises RpcError; never asked twice, whatever happens."""
        return await self._round(method, data, first=False)

    async def _round(self, method: str, data: bytes, *, first: bool) -> AuthenticateResponse:
        request = AuthenticateRequest(
            authentication_id=self._id,
            first_round=first,
            method=method,
            data=data,
            client_address=self._client_address,
        )
        timeout_s = max(0.0, self._deadline - trio.current_time())
        return await self._client.call(Method.AUTHENTICATE, request, AuthenticateResponse, timeout_s=timeout_s)
