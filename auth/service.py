"""The auth worker's service: authentication rounds for forwarders, and the proxy's credentials for brokers."""

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import trio

from auth.broker_credentials import broker_authentication, end_of_token_unix_ms
from auth.denied_credentials import certificate_digests, token_digests
from auth.effective_principal import ProxyClaim, resolve_effective_principal
from auth.exchange_store import ExchangeStore
from auth.jwt_rules import claimed_expiry_unix_ms
from auth.metrics import AuthMetrics
from auth.registry import ProviderRegistry, configured_providers
from auth.state import (
    ROLE_CHARACTERS_MAX,
    AuthenticationDenied,
    AuthState,
    BrokerAuthentication,
    BrokerAuthState,
    ClientContext,
    CredentialsUnavailable,
    is_fit_for_a_role,
)
from proto.broker_handshake import ROUNDS_MAX as CHALLENGES_MAX
from proto.connect_rules import INVALID_ROLES, OVERLOADED
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
from proxy.common.deny_list import KEY, read_deny_list
from proxy.common.eager import call_eagerly
from proxy.common.logs import get_logger
from proxy.common.reloading_file import ReloadingFile
from proxy.config.proxy_roles import ProxyRoles, check_proxy_roles
from proxy.config.types import Config
from proxy.runtime.dns.resolver import Hostnames, Resolver
from proxy.runtime.fairness.byte_budget import REQUEST_OVERHEAD_BYTES, ByteBudget
from proxy.runtime.fairness.owners import ADDRESS_CHARACTERS_MAX, owner_of
from proxy.runtime.loop.tasks import seconds
from proxy.runtime.process.worker import WorkerContext
from proxy.runtime.rpc.peers import Caller
from proxy.runtime.rpc.server import EagerHandler, RpcRefused

ISSUER_NAME_TIMEOUT_S = 3.0
ISSUER_NAME_TTL_MAX_S = 30.0
REQUEST_BYTES_MAX = 16 * 1024 * 1024
"""Bound of clients' requests under way, of all forwarders: they wait for a check, or for an issuer's keys. Another as
large is that of requests for the proxy's own credentials.
"""

TOKEN_CHECK_INTERVAL_S = 2.0
"""How often the end of the proxy's own token is read: a file may change at any time."""


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One client's authentication between two rounds.

    ``credentials``: what the deny list knows them by, so far; none without a deny list. ``complete``: the client only
    has to receive the server's last message.
    """

    state: AuthState
    claim: ProxyClaim
    credentials: tuple[bytes, ...] = ()
    complete: bool = False


class AuthService:
    """RPC service of an auth worker: builds providers from the configuration, and keeps exchanges between rounds."""

    def __init__(self, context: WorkerContext) -> None:
        self._nursery = context.nursery
        self._seal_key = context.seal_key
        self._metrics = AuthMetrics(context.registry)
        self._client_bytes = ByteBudget(0)
        self._broker_bytes = ByteBudget(REQUEST_BYTES_MAX)
        self._configure(context.config)

    def _configure(self, config: Config) -> None:
        # Build all before keeping any: a reload that fails leaves everything as it was.
        registry = ProviderRegistry(config.authentication, configured_providers)
        check_proxy_roles(config.authentication, registry.methods)
        file = config.authentication.deny_file
        denied = ReloadingFile(KEY, [file], lambda: read_deny_list(file))
        broker = broker_authentication(config.brokers.credentials)
        self._registry, self._broker, self._denied = registry, broker, denied
        self._has_deny_file = bool(file)
        self._proxy_roles = ProxyRoles(config.authentication.proxy_roles)
        self._metrics.providers = registry
        # The largest request must fit even where two other addresses have requests under way.
        self._client_bytes.resize(max(REQUEST_BYTES_MAX, 4 * config.limits.max_command_bytes))
        timeout_s = seconds(config.limits.handshake_timeout_ms)
        self._client_exchanges: ExchangeStore[_Exchange] = ExchangeStore(lifetime_s=timeout_s)
        # CONNECT's own round, and as many challenges as the handshake itself allows.
        self._broker_exchanges: ExchangeStore[BrokerAuthState] = ExchangeStore(
            lifetime_s=timeout_s, rounds_max=CHALLENGES_MAX + 2
        )

    def handlers(self) -> dict[int, EagerHandler]:
        """Return the methods served to forwarders and lookup workers."""
        return {
            Method.AUTHENTICATE: EagerHandler(self._authenticate),
            Method.BROKER_CREDENTIALS: EagerHandler(self._broker_credentials),
        }

    async def start(self) -> None:
        """Start to watch the proxy's own token; keys were read when the service was made."""
        issuers = Resolver(self._nursery, timeout_s=ISSUER_NAME_TIMEOUT_S, ttl_max_s=ISSUER_NAME_TTL_MAX_S)
        trio.socket.set_custom_hostname_resolver(Hostnames(issuers))
        self._nursery.start_soon(self._watch_own_token)

    async def _watch_own_token(self) -> None:
        while True:
            self._metrics.broker_credentials_end.unix_ms = await end_of_token_unix_ms(self._broker)
            await trio.sleep(TOKEN_CHECK_INTERVAL_S)

    async def configure(self, config: Config) -> None:
        """Apply new settings and read keys again. Exchanges under way are denied, as after a restart of the worker."""
        self._configure(config)

    async def drain(self, timeout_s: float, *, hand_over: bool) -> None:
        """Do nothing: exchanges end with their forwarders, which were drained before."""

    def status(self) -> dict[str, object]:
        """Return the methods served, and the number of exchanges under way."""
        return {"methods": list(self._registry.methods), "authentications_under_way": len(self._client_exchanges)}

    async def _authenticate(self, data: bytes, caller: Caller) -> bytes:
        request = AuthenticateRequest.FromString(data)
        if request.over:
            self._client_exchanges.drop_exchange((caller.pid, request.authentication_id))
            return b""
        started = trio.current_time()
        response = AuthenticateResponse()
        try:
            with _reserved_bytes(self._client_bytes, owner_of("", request.client_address), len(data)):
                await self._run_round_safely(request, caller, response)
        except AuthenticationDenied as denied:
            response.denied.reason = denied.reason
            self._metrics.count_failure(request.method, denied.reason)
            get_logger().warning(
                "authentication denied",
                client=request.client_address,
                method=request.method[:64],
                reason=denied.reason,
                detail=str(denied),
            )
        self._metrics.observe_round(trio.current_time() - started)
        return response.SerializeToString()

    async def _run_round_safely(
        self, request: AuthenticateRequest, caller: Caller, response: AuthenticateResponse
    ) -> None:
        """Run a round; an internal error in a mechanism becomes a denial like any other, indistinguishable by time."""
        try:
            await self._run_round(request, caller, response)
        except AuthenticationDenied:
            raise
        except Exception as error:  # noqa: BLE001 -- see above
            # Not the error's text, which may quote what the client sent.
            frames = traceback.extract_tb(error.__traceback__)[-3:]
            where = ", ".join(f"{frame.filename}:{frame.lineno}" for frame in frames)
            get_logger().error("a provider met a defect", method=request.method[:64], where=where)
            raise AuthenticationDenied("defect", type(error).__name__) from None

    async def _run_round(self, request: AuthenticateRequest, caller: Caller, response: AuthenticateResponse) -> None:
        key = (caller.pid, request.authentication_id)
        clients = (
            self._client_exchanges
        )  # a reload in the meantime ends this exchange: its state was made from the old keys
        number = 0
        if request.first_round:
            if len(request.original_principal) > ROLE_CHARACTERS_MAX:  # an exchange of several rounds would keep it
                raise AuthenticationDenied(INVALID_ROLES, "the client names an original principal that is too long")
            address = request.client_address[:ADDRESS_CHARACTERS_MAX]
            client = ClientContext(address, request.client_certificate)
            claim = ProxyClaim(request.original_principal, request.through_proxy, request.http)
            found: list[bytes] = []
            if self._has_deny_file:
                found = [*certificate_digests(client.certificate), *token_digests(request.original_token)]
            exchange = _Exchange(self._registry.new_auth_state(request.method, client), claim, tuple(found))
        else:
            # A state that is missing has finished, was forgotten, or was lost with a worker: never restart in the
            # middle.
            stored = clients.pop_exchange(key, request.method)
            exchange, number = stored.state, stored.rounds_done
        if exchange.complete:
            _require_no_data(request.data)
            await self._complete_exchange(request.method, exchange, response)
            return
        if self._has_deny_file:
            exchange = replace(exchange, credentials=(*exchange.credentials, *_data_digests(request)))
        challenge = await call_eagerly(exchange.state.authenticate, request.data)
        complete = exchange.state.is_complete()
        if complete and not challenge:
            await self._complete_exchange(request.method, exchange, response)
        elif challenge is None:
            raise AuthenticationDenied("no_challenge", "the provider neither finished nor asked for more")
        else:
            # The server's last word has no place in Pulsar's Connected: it goes out as a challenge, before it.
            clients.store_exchange(key, request.method, replace(exchange, complete=complete), number=number + 1)
            response.challenge = challenge

    async def _complete_exchange(self, method: str, exchange: _Exchange, response: AuthenticateResponse) -> None:
        denied = (await self._denied.current_value()).matching_kind(exchange.credentials)
        if denied:
            raise AuthenticationDenied("denied_credential", f"an entry {denied} of authentication.deny_file names it")
        identity = exchange.state.get_identity()
        if not is_fit_for_a_role(identity.role):
            raise AuthenticationDenied("bad_role", "the role is empty, too long, or has control characters")
        behind = resolve_effective_principal(identity.role, method, exchange.claim, self._proxy_roles)
        principal = Principal(type="User", name=behind.principal, method=method, proxy=behind.proxy)
        if identity.expires_at_unix_ms is not None:
            if identity.expires_at_unix_ms <= time.time() * 1000:
                raise AuthenticationDenied("expired", "the credential has expired")
            principal.expires_at_unix_ms = identity.expires_at_unix_ms
        response.authenticated.credentials.extend(exchange.credentials)
        response.authenticated.principal.CopyFrom(principal)
        response.authenticated.sealed_principal = seal(principal, self._seal_key)
        self._metrics.count_success(method)

    async def _broker_credentials(self, data: bytes, caller: Caller) -> bytes:
        request = BrokerCredentialsRequest.FromString(data)
        broker = self._broker
        if broker is None:
            raise RpcRefused(Status.INVALID_REQUEST, "no brokers.credentials are configured")
        try:
            with _reserved_bytes(self._broker_bytes, request.broker_host, len(data)):
                answer, state = await self._broker_round(broker, request, (caller.pid, request.exchange_id))
        except AuthenticationDenied as lost:
            raise RpcRefused(Status.INVALID_REQUEST, str(lost)) from None
        except CredentialsUnavailable as error:
            get_logger().error(
                "the proxy has no credentials for a broker", broker=request.broker_host, reason=str(error)
            )
            raise RpcRefused(Status.INVALID_REQUEST, str(error)) from None
        says_so_itself = broker.method == "token"
        response = BrokerCredentialsResponse(
            method=broker.method,
            data=answer,
            incomplete=not state.is_complete(),
            expires_at_unix_ms=claimed_expiry_unix_ms(answer) if says_so_itself else state.expires_at_unix_ms,
        )
        return response.SerializeToString()

    async def _broker_round(
        self, broker: BrokerAuthentication, request: BrokerCredentialsRequest, key: tuple[int, int]
    ) -> tuple[bytes, BrokerAuthState]:
        exchanges = self._broker_exchanges
        challenge, number = None, 0
        if request.HasField("challenge"):
            found = exchanges.pop_exchange(key, broker.method)
            state, number, challenge = found.state, found.rounds_done, request.challenge
        else:
            state = broker.get_auth_data(request.broker_host)
        answer = await call_eagerly(state.authenticate, challenge)
        # Whether the broker will ask for more is not known here: most exchanges end unseen, so the oldest make room.
        exchanges.store_exchange(key, broker.method, state, number=number + 1, replaces_oldest=True)
        return answer, state


@contextmanager
def _reserved_bytes(budget: ByteBudget, owner: str, request_bytes: int) -> Iterator[None]:
    """Reserve the bytes of a request while it is under way. Raises AuthenticationDenied where its owner may not have
    them.
    """
    size_bytes = request_bytes + REQUEST_OVERHEAD_BYTES
    if not budget.reserve_bytes(owner, size_bytes):
        text = f"requests under way have {budget.used_bytes} bytes, and this one {request_bytes}"
        raise AuthenticationDenied(OVERLOADED, f"{text}; see cluster.auth_workers")
    try:
        yield
    finally:
        budget.release_bytes(owner, size_bytes)


def _data_digests(request: AuthenticateRequest) -> list[bytes]:
    return token_digests(request.data) if request.method == "token" else []


def _require_no_data(data: bytes) -> None:
    if data:
        raise AuthenticationDenied("unexpected_round", "data in answer to the server's last word")
