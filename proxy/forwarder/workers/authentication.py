"""A client's authentication by an auth worker. The forwarder carries bytes and knows no mechanism (PIP-30)."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from proto import commands
from proto.connect_rules import (
    BrokerIdentity,
    OriginalCredentials,
    Refusal,
    count_proxies,
    original_credentials,
    refusal_for_denial,
)
from proto.pulsar_pb2 import BaseCommand, CommandConnect
from proto.rpc_pb2 import AuthenticateRequest, AuthenticateResponse, Method, Principal
from proxy import SERVER_VERSION
from proxy.runtime.loop.scoped_tasks import TaskSpawner
from proxy.runtime.rpc.callback_call import CallbackCall
from proxy.runtime.rpc.client import RpcClient
from proxy.runtime.rpc.errors import RpcError

ABANDON_TIMEOUT_S = 5.0

_AUTHENTICATE = int(Method.AUTHENTICATE)  # looked up once: access by the name of a protobuf enum costs a search


@dataclass(frozen=True, slots=True)
class ClientIdentity:
    """A client's principal and its sealed form; both empty where the cluster does not authenticate.

    ``original``: the client's own credentials, where they are forwarded. ``proxies``: how many are before this one.
    ``credentials``: what the deny list knows them by.
    """

    principal: Principal
    sealed: bytes = b""
    original: OriginalCredentials | None = None
    proxies: int = 0
    credentials: tuple[bytes, ...] = ()

    @property
    def role(self) -> str:
        """The client's role; empty: none."""
        return str(self.principal.name)

    @property
    def proxy_log_fields(self) -> dict[str, str]:
        """Log fields that name the proxy before this one, if there is one."""
        return {"proxy": self.principal.proxy} if self.principal.proxy else {}

    def broker_identity(self, method: str, data: bytes) -> BrokerIdentity:
        """Build this client's identity for a broker, with the proxy's own authentication ``method`` and ``data``."""
        return BrokerIdentity(method, data, self.role, self.original, self.proxies + 1)


ANONYMOUS = ClientIdentity(Principal())


_next_number = itertools.count(1).__next__


@dataclass(frozen=True, slots=True)
class ClientEndpoint:
    """Facts about a client from its connection alone.

    ``accepted_at``: in Trio's time. ``certificate``: as DER, verified in the TLS handshake; empty: none. ``listener``:
    the index of the listener that accepted it. ``announcement``: its PROXY header for brokers; empty where these get
    none. ``number``: of this process's clients, in the order in which they came.
    """

    address: str
    accepted_at: float
    certificate: bytes = b""
    listener: int = 0
    announcement: bytes = b""
    number: int = field(default_factory=_next_number, compare=False)


@dataclass(frozen=True, slots=True)
class Challenge:
    """The auth worker needs another round: a frame for the client."""

    frame: bytes


@dataclass(frozen=True, slots=True)
class Denial:
    """The auth worker denied the client: the error for the client, and a short stable reason for the log."""

    refusal: Refusal
    reason: str


Verdict = ClientIdentity | Challenge | Denial
RoundResult = Verdict | RpcError


@dataclass(frozen=True, slots=True)
class ExchangeSettings:
    """Settings of authentication exchanges.

    ``timeout_s``: for all rounds of an exchange together. ``forwards_credentials``: the client's credentials go to the
    broker. ``one_round_methods``: those with a single round, which may be sent to an auth worker twice.
    """

    timeout_s: float
    forwards_credentials: bool
    one_round_methods: frozenset[str]


class AuthenticationExchange:
    """One exchange of a client: rounds with the same auth worker, within one deadline."""

    def __init__(
        self, worker: RpcClient, client: ClientEndpoint, connect: CommandConnect, settings: ExchangeSettings
    ) -> None:
        self._worker = worker
        self._id = worker.new_id()
        self._client = client
        self._connect = connect
        self._deadline = trio.current_time() + settings.timeout_s
        self._forwards_credentials = settings.forwards_credentials
        self._has_one_round = commands.auth_method_of(connect) in settings.one_round_methods
        self._rounds = 0
        self._under_way = False
        self._call: CallbackCall[AuthenticateResponse, Verdict] | None = None

    def start_round(self, command: BaseCommand, tasks: TaskSpawner, on_outcome: Callable[[RoundResult], None]) -> None:
        """Have CONNECT, or the answer to a challenge, verified as ``authenticate_round`` does.

        ``on_outcome`` is called once, unless the exchange is abandoned before. A task is started (in ``tasks``) only
        where the auth worker cannot be reached at once, or is lost meanwhile.
        """
        request, may_repeat = self._next_request(command)
        self._call = CallbackCall(
            self._worker,
            _AUTHENTICATE,
            request,
            AuthenticateResponse,
            tasks=tasks,
            read=self._verdict,
            on_outcome=on_outcome,
            timeout_s=max(0.0, self._deadline - trio.current_time()),
            retry=may_repeat,
        )

    async def authenticate_round(self, command: BaseCommand) -> Verdict:
        """Send CONNECT, or the answer to a challenge, to the auth worker and return its verdict. Raises RpcError.

        If the worker ends meanwhile, the round is repeated only for a method of one round. The first data of several
        rounds may be valid only once (a Kerberos server takes the same ticket's authenticator for a replay), and no
        answer to a challenge is ever sent twice: such a client has to connect again.
        """
        request, may_repeat = self._next_request(command)
        timeout_s = max(0.0, self._deadline - trio.current_time())
        response = await self._worker.call(
            _AUTHENTICATE, request, AuthenticateResponse, timeout_s=timeout_s, retry=may_repeat
        )
        return self._verdict(response)

    def abandon_exchange(self) -> None:
        """Tell the auth worker to drop the state of an unfinished exchange: the client has closed."""
        if self._call is not None:
            self._call.cancel()
        if self._under_way:
            self._under_way = False
            request = AuthenticateRequest(authentication_id=self._id, over=True)
            self._worker.send_notification(_AUTHENTICATE, request, timeout_s=ABANDON_TIMEOUT_S)

    def _next_request(self, command: BaseCommand) -> tuple[AuthenticateRequest, bool]:
        """Return the request of the next round, and whether it may be sent to an auth worker twice."""
        is_first = not self._rounds
        self._rounds += 1
        if is_first:
            request = AuthenticateRequest(
                first_round=True,
                method=commands.auth_method_of(self._connect),
                data=self._connect.auth_data,
                client_certificate=self._client.certificate,
                original_principal=self._connect.original_principal,
                through_proxy=self._connect.HasField("proxy_version"),
                original_token=_original_token(self._connect),
            )
        else:
            answer = command.auth_response.response
            request = AuthenticateRequest(method=answer.auth_method_name, data=answer.auth_data)
        request.authentication_id = self._id
        request.client_address = self._client.address
        return request, is_first and self._has_one_round

    def _verdict(self, response: AuthenticateResponse) -> Verdict:
        outcome = response.WhichOneof("outcome")
        self._under_way = outcome == "challenge"
        if outcome == "authenticated":
            principal = response.authenticated.principal
            sealed = response.authenticated.sealed_principal
            credentials = tuple(response.authenticated.credentials)
            original, proxies = self._original(principal), count_proxies(self._connect)
            return ClientIdentity(principal, sealed, original, proxies, credentials)
        if outcome == "challenge":
            method = commands.auth_method_of(self._connect)
            version = min(self._connect.protocol_version, commands.PROTOCOL_VERSION)
            return Challenge(commands.auth_challenge(SERVER_VERSION, version, method, response.challenge))
        reason = str(response.denied.reason) or "no verdict"
        return Denial(refusal_for_denial(reason), reason)

    def _original(self, principal: Principal) -> OriginalCredentials | None:
        from_proxy = bool(principal.proxy)
        if not self._forwards_credentials or (self._rounds > 1 and not from_proxy):
            return None
        return original_credentials(self._connect, from_proxy=from_proxy)


def _original_token(connect: CommandConnect) -> bytes:
    is_token = connect.original_auth_method == "token"
    return connect.original_auth_data.encode("utf-8", "surrogatepass") if is_token else b""


ExchangeFactory = Callable[[CommandConnect], AuthenticationExchange]
"""Callable that starts an exchange for a client with this CONNECT."""


class Reauthenticator:
    """Re-authentication of a client: an AUTH_RESPONSE that answers no round starts a new exchange (KIP-368).

    The exchange is verified as if the client connected now with a CONNECT that contains its answer's data. So a client
    gains nothing by re-authentication that a new connection would not give it.
    """

    def __init__(self, connect: CommandConnect, new_exchange: ExchangeFactory) -> None:
        self._connect = connect
        self._new_exchange = new_exchange
        self._exchange: AuthenticationExchange | None = None
        self._is_over = False
        self.last_identity: ClientIdentity | None = None
        """Identity of the last successful re-authentication; None before the first one."""

    async def reauthenticate(self, command: BaseCommand) -> Verdict:
        """Have an AUTH_RESPONSE verified, one at a time, as proxy.forwarder.lifetime.terms describes.

        Raises RpcError.
        """
        exchange = self._exchange or self._new_exchange(self._connect_with(command))
        self._exchange = None
        try:
            verdict = await exchange.authenticate_round(command)
            if isinstance(verdict, Challenge) and not self._is_over:
                self._exchange = exchange
        finally:
            if self._exchange is None:
                exchange.abandon_exchange()
        if isinstance(verdict, ClientIdentity):
            self.last_identity = verdict
        return verdict

    def abandon_exchange(self) -> None:
        """Abandon an unfinished exchange, also one that has a round under way: the client has closed."""
        self._is_over = True
        if self._exchange is not None:
            self._exchange.abandon_exchange()
            self._exchange = None

    def _connect_with(self, command: BaseCommand) -> CommandConnect:
        answer = command.auth_response.response
        connect = CommandConnect()
        connect.CopyFrom(self._connect)
        connect.auth_method_name = answer.auth_method_name or commands.auth_method_of(self._connect)
        connect.auth_data = answer.auth_data
        return connect
