"""A client's authentication, as the forwarder sees it: it carries bytes and knows nothing of mechanisms (PIP-30)."""

from collections.abc import Callable
from dataclasses import dataclass

import trio

from proto import commands
from proto.connect_rules import BrokerIdentity, OriginalCredentials, Refusal, original_credentials, refusal_for_denial
from proto.pulsar_pb2 import BaseCommand, CommandConnect
from proto.rpc_pb2 import AuthenticateRequest, AuthenticateResponse, Method, Principal
from proxy import __version__
from proxy.runtime.rpc.client import RpcClient

ABANDON_TIMEOUT_S = 5.0

SERVER_VERSION = f"pulsar-trio-proxy-{__version__}"


@dataclass(frozen=True, slots=True)
class ClientIdentity:
    """Who a client is, as the auth worker said; both parts empty where the cluster does not authenticate.

    ``original``: the client's own credentials, where they are forwarded.
    """

    principal: Principal
    sealed: bytes = b""
    original: OriginalCredentials | None = None

    @property
    def role(self) -> str:
        """The client's role; empty: none."""
        return str(self.principal.name)

    @property
    def proxy_log_fields(self) -> dict[str, str]:
        """For logs: the proxy before this one, if there is one."""
        return {"proxy": self.principal.proxy} if self.principal.proxy else {}

    def broker_identity(self, method: str, data: bytes) -> BrokerIdentity:
        """How a broker is told of this client, by a proxy with this method and data of its own."""
        return BrokerIdentity(method, data, self.role, self.original)


ANONYMOUS = ClientIdentity(Principal())


@dataclass(frozen=True, slots=True)
class ClientEndpoint:
    """What is known of a client by its connection alone.

    ``accepted_at``: in Trio's time. ``certificate``: as DER, checked in the TLS handshake; empty: none. ``listener``:
    the number of the one that it came to.
    """

    address: str
    accepted_at: float
    certificate: bytes = b""
    listener: int = 0


@dataclass(frozen=True, slots=True)
class Challenge:
    """The auth worker wants more: a frame for the client."""

    frame: bytes


@dataclass(frozen=True, slots=True)
class Denial:
    """No: what the client is told, and the reason, a short stable name for the log."""

    refusal: Refusal
    reason: str


Verdict = ClientIdentity | Challenge | Denial


class AuthenticationExchange:
    """One client's rounds, all with one auth worker, and within one deadline."""

    def __init__(
        self,
        worker: RpcClient,
        client: ClientEndpoint,
        connect: CommandConnect,
        *,
        timeout_s: float,
        forwards_credentials: bool,
        one_round_methods: frozenset[str],
    ) -> None:
        """``one_round_methods``: those of which the first round is the last, and may be asked twice."""
        self._worker = worker
        self._id = worker.new_id()
        self._client = client
        self._connect = connect
        self._deadline = trio.current_time() + timeout_s
        self._forwards_credentials = forwards_credentials
        self._has_one_round = commands.auth_method_of(connect) in one_round_methods
        self._rounds = 0
        self._under_way = False

    async def authenticate_round(self, command: BaseCommand) -> Verdict:
        """Have CONNECT or the answer to a challenge judged. Raises RpcError.

        Where the worker dies, the round is asked again only for a method of one round. What begins an exchange of
        several may be good for one use (a Kerberos server takes the same ticket's authenticator for a replay), and no
        answer to a challenge is ever given twice: there the client is told to come again.
        """
        first = not self._rounds
        request = self._first_request() if first else self._next_request(command)
        self._rounds += 1
        request.authentication_id = self._id
        request.client_address = self._client.address
        timeout_s = max(0.0, self._deadline - trio.current_time())
        response = await self._worker.call(
            Method.AUTHENTICATE, request, AuthenticateResponse, timeout_s=timeout_s, retry=first and self._has_one_round
        )
        verdict = self._verdict(response)
        self._under_way = isinstance(verdict, Challenge)
        return verdict

    def abandon_exchange(self) -> None:
        """The client has gone: what is kept of its rounds can be forgotten."""
        if self._under_way:
            self._under_way = False
            request = AuthenticateRequest(authentication_id=self._id, over=True)
            self._worker.send_notification(Method.AUTHENTICATE, request, timeout_s=ABANDON_TIMEOUT_S)

    def _first_request(self) -> AuthenticateRequest:
        return AuthenticateRequest(
            first_round=True,
            method=commands.auth_method_of(self._connect),
            data=self._connect.auth_data,
            client_certificate=self._client.certificate,
            original_principal=self._connect.original_principal,
            through_proxy=self._connect.HasField("proxy_version"),
        )

    @staticmethod
    def _next_request(command: BaseCommand) -> AuthenticateRequest:
        answer = command.auth_response.response
        return AuthenticateRequest(method=answer.auth_method_name, data=answer.auth_data)

    def _verdict(self, response: AuthenticateResponse) -> Verdict:
        outcome = response.WhichOneof("outcome")
        if outcome == "authenticated":
            principal = response.authenticated.principal
            return ClientIdentity(principal, response.authenticated.sealed_principal, self._original(principal))
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


ExchangeFactory = Callable[[CommandConnect], AuthenticationExchange]
"""Begins the rounds of a client that said this CONNECT."""


class Reauthenticator:
    """A client's rounds after the first ones: an AUTH_RESPONSE that answers no round begins them anew (KIP-368).

    It is judged as if the client came now and had said in CONNECT what it says in its answer; so nobody gets by it what
    a new connection would not get him.
    """

    def __init__(self, connect: CommandConnect, begin: ExchangeFactory) -> None:
        self._connect = connect
        self._begin = begin
        self._rounds: AuthenticationExchange | None = None
        self._is_over = False
        self.last_identity: ClientIdentity | None = None
        """Who the client last was; None before the first time."""

    async def reauthenticate(self, command: BaseCommand) -> Verdict:
        """See proxy.forwarder.relay.expiring.relay_session. Raises RpcError."""
        rounds = self._rounds or self._begin(self._connect_with(command))
        self._rounds = None
        try:
            verdict = await rounds.authenticate_round(command)
            if isinstance(verdict, Challenge) and not self._is_over:
                self._rounds = rounds
        finally:
            if self._rounds is None:
                rounds.abandon_exchange()
        if isinstance(verdict, ClientIdentity):
            self.last_identity = verdict
        return verdict

    def abandon_exchange(self) -> None:
        """The client has gone: what is kept of rounds under way, or still comes of them, can be forgotten."""
        self._is_over = True
        if self._rounds is not None:
            self._rounds.abandon_exchange()
            self._rounds = None

    def _connect_with(self, command: BaseCommand) -> CommandConnect:
        answer = command.auth_response.response
        connect = CommandConnect()
        connect.CopyFrom(self._connect)
        connect.auth_method_name = answer.auth_method_name or commands.auth_method_of(self._connect)
        connect.auth_data = answer.auth_data
        return connect
