"""The auth worker's service: rounds of authentication for forwarders, the proxy's credentials for those who dial."""

import time
import traceback
from dataclasses import dataclass, replace

import trio

from auth.broker_credentials import broker_authentication
from auth.chain import Claim, principal_behind
from auth.metrics import AuthMetrics
from auth.registry import ProviderRegistry, configured_providers
from auth.rounds import Rounds
from auth.state import (
    AuthenticationDenied,
    AuthState,
    BrokerAuthentication,
    BrokerAuthState,
    ClientContext,
    CredentialsUnavailable,
    is_fit_for_a_role,
)
from proto.broker_handshake import ROUNDS_MAX as CHALLENGES_MAX
from proto.rpc_pb2 import (
    AuthenticateRequest,
    AuthenticateResponse,
    BrokerCredentialsRequest,
    BrokerCredentialsResponse,
    Method,
    Principal,
    Status,
)
from proto.sealed_principal import seal
from proxy.config.types import Config
from proxy.runtime.logs import get_logger
from proxy.runtime.peers import Caller
from proxy.runtime.rpc_server import Handler, RpcRefused
from proxy.runtime.tasks import seconds
from proxy.runtime.worker import WorkerContext


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One client's authentication between two rounds.

    ``complete``: nothing is missing but that the client has seen the server's last word.
    """

    state: AuthState
    claim: Claim
    complete: bool = False


class AuthService:
    """See the module. Holds what the configuration says, and the states of rounds under way."""

    def __init__(self, context: WorkerContext) -> None:
        self._seal_key = context.seal_key
        self._metrics = AuthMetrics(context.registry)
        self._configure(context.config)

    def _configure(self, config: Config) -> None:
        # Build all before keeping any: a reload that fails leaves everything as it was.
        registry = ProviderRegistry(config.authentication, configured_providers)
        broker = broker_authentication(config.brokers.credentials)
        self._registry, self._broker = registry, broker
        self._proxy_roles = frozenset(config.authentication.proxy_roles)
        self._metrics.providers = registry
        timeout_s = seconds(config.limits.handshake_timeout_ms)
        self._clients: Rounds[_Exchange] = Rounds(lifetime_s=timeout_s)
        # CONNECT's own round, and as many challenges as the handshake itself allows.
        self._exchanges: Rounds[BrokerAuthState] = Rounds(lifetime_s=timeout_s, rounds_max=CHALLENGES_MAX + 2)

    def handlers(self) -> dict[int, Handler]:
        """The methods served to forwarders and lookup workers."""
        return {Method.AUTHENTICATE: self._authenticate, Method.BROKER_CREDENTIALS: self._broker_credentials}

    async def start(self) -> None:
        """Nothing to wait for: keys were read when the service was made."""

    async def configure(self, config: Config) -> None:
        """Read keys and settings anew. Rounds under way are denied, as after a restart of the worker."""
        self._configure(config)

    async def drain(self, timeout_s: float, *, hand_over: bool) -> None:
        """Rounds under way end with their forwarders, which were drained before."""

    def status(self) -> dict[str, object]:
        """The methods served, and the rounds under way."""
        return {"methods": list(self._registry.methods), "authentications_under_way": len(self._clients)}

    def _expect_nothing(data: bytes) -> None:
    if data:
        raise AuthenticationDenied("unexpected_round", "data in answer to the server's last word")
