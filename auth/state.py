"""The interfaces of PIP-30 in Python's manner.

A *provider* knows one authentication method and makes an *AuthState* for each client; the state takes the client's
data round by round until it is complete and knows the role. Providers that need only one round share OneStageAuthState.
Providers from elsewhere derive from AuthenticationProvider, and their states from AuthenticationState, which have
PIP-30's defaults. The other direction, the proxy at a broker, is BrokerAuthentication: made per broker host, answers
challenges.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

from auth.errors import AuthError
from proxy.common.eager import call_eagerly, eager

ROLE_CHARACTERS_MAX = 1024


class AuthenticationDenied(AuthError):
    """Denial of a client: its credential is wrong, missing or not acceptable.

    ``reason`` is a short stable name, fit for a metric's label; the text is for the log and holds no secret. Neither
    goes to the client.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Identity:
    """The outcome of an authentication: the role, and when its credential ends (None: it does not)."""

    role: str
    expires_at_unix_ms: int | None = None


def is_fit_for_a_role(text: str) -> bool:
    """Return True if a text can be a role: not empty, of bounded length, and harmless in logs."""
    return bool(text.strip()) and len(text) <= ROLE_CHARACTERS_MAX and text.isprintable()


@dataclass(frozen=True, slots=True)
class ClientContext:
    """What a provider may know of a client beside its data (PIP-30: AuthenticationDataSource).

    ``certificate``: what the client showed in TLS, as DER; the listener has checked it. Empty: none.
    """

    address: str
    certificate: bytes = b""


class AuthState(Protocol):
    """One client's authentication (PIP-30: AuthState)."""

    async def authenticate(self, data: bytes) -> bytes | None:
        """Process one round's data. Returns the challenge for the client, or None when complete.

        A mechanism in which the server sends last returns that message with the round that completes it: the client
        gets it as a challenge, to which it answers nothing. Raises AuthenticationDenied; the state is of no use
        afterwards.
        """
        ...

    def is_complete(self) -> bool:
        """Return True if the identity is known."""
        ...

    def get_auth_role(self) -> str:
        """Return the client's role; only when complete."""
        ...

    def get_identity(self) -> Identity:
        """Return the role and the credential's expiry; only when complete."""
        ...


class Provider(Protocol):
    """One authentication method (PIP-30: AuthenticationProvider)."""

    @property
    def method(self) -> str:
        """The method's name in clients' CONNECT."""
        ...

    def new_auth_state(self, client: ClientContext) -> AuthState:
        """Make a state for one client."""
        ...


class OneStageProvider(Protocol):
    """A provider that knows after one round."""

    async def identify(self, data: bytes, client: ClientContext) -> Identity:
        """Judge the data; raises AuthenticationDenied."""
        ...


class Identified:
    """Base of states: an identity, once it is known."""

    _identity: Identity | None = None

    def is_complete(self) -> bool:
        """Return True if all rounds were done and succeeded."""
        return self._identity is not None

    def get_auth_role(self) -> str:
        """Return the client's role."""
        return self.get_identity().role

    def get_identity(self) -> Identity:
        """Return role and expiry; raise RuntimeError before completion, which is the caller's error."""
        if self._identity is None:
            raise RuntimeError("the authentication is not complete")
        return self._identity


class OneStageAuthState(Identified):
    """The state that all one-round providers share."""

    def __init__(self, provider: OneStageProvider, client: ClientContext) -> None:
        self._provider = provider
        self._client = client
        self._asked = False

    @eager
    async def authenticate(self, data: bytes) -> bytes | None:
        """Judge the one round's data; a second round is denied."""
        if self._asked:
            raise AuthenticationDenied("unexpected_round", "data after the only round of this method")
        self._asked = True
        self._identity = await call_eagerly(self._provider.identify, data, self._client)
        return None


class AuthenticationProvider(ABC):
    """Base of providers, with PIP-30's defaults: one that knows after one round has ``method`` and ``identify`` alone.
    One that needs several overrides ``new_auth_state``, and needs no ``identify``.
    """

    @property
    @abstractmethod
    def method(self) -> str:
        """Name the method as clients do in CONNECT (PIP-30: getAuthMethodName)."""

    async def identify(self, data: bytes, client: ClientContext) -> Identity:
        """Judge the one round's data (PIP-30: authenticate); raises AuthenticationDenied."""
        raise NotImplementedError(f"{type(self).__name__} has neither identify nor new_auth_state")

    def get_auth_data_source(self, client: ClientContext) -> ClientContext:
        """Make what this provider's states know of a connection; by default the context itself."""
        return client

    def new_auth_state(self, client: ClientContext) -> AuthState:
        """Make a state for one client; by default one of a single round, which asks ``identify``. ``client``: what
        ``get_auth_data_source`` made.
        """
        return OneStageAuthState(self, client)


class AuthenticationState(ABC):
    """Base of states of several rounds, with what PIP-30's AuthenticationState has: three methods. Where the credential
    ends at some time, ``get_identity`` is overridden, too.
    """

    @abstractmethod
    async def authenticate(self, data: bytes) -> bytes | None:
        """Take one round's data; see AuthState."""

    @abstractmethod
    def is_complete(self) -> bool:
        """Return True if the role is known."""

    @abstractmethod
    def get_auth_role(self) -> str:
        """Return the client's role; only when complete."""

    def get_identity(self) -> Identity:
        """Return the role, with a credential that does not end; only when complete."""
        return Identity(self.get_auth_role())


def new_auth_state(provider: Provider, client: ClientContext) -> AuthState:
    """Make a state for one client as PIP-30 has it: the provider makes its data source, then the state from that."""
    if isinstance(provider, AuthenticationProvider):
        client = provider.get_auth_data_source(client)
    return provider.new_auth_state(client)


class BrokerAuthState(Protocol):
    """The proxy's side of one authentication at one broker (PIP-30: AuthenticationDataProvider.authenticate)."""

    async def authenticate(self, challenge: bytes | None) -> bytes:
        """Return the data for CONNECT (no challenge yet) or for a challenge. Raises CredentialsUnavailable."""
        ...

    def is_complete(self) -> bool:
        """Return True if the broker may accept the proxy now: it owes no proof of its own."""
        ...

    @property
    def expires_at_unix_ms(self) -> int:
        """When the credentials of the last data end; 0: never, unknown, or the data says so itself, as a token does."""
        ...


class BrokerAuthentication(Protocol):
    """The proxy's own authentication at brokers, by one method."""

    method: str

    def get_auth_data(self, broker_host: str) -> BrokerAuthState:
        """Make a state for one handshake with one broker (PIP-30: getAuthData)."""
        ...


class OneForAllBrokers(ABC):
    """Credentials without rounds: one answer to every broker and challenge; brokers prove nothing."""

    method: str

    def get_auth_data(self, broker_host: str) -> BrokerAuthState:  # noqa: ARG002 -- it is the same everywhere
        """One state serves all brokers: the credentials themselves."""
        return self

    def is_complete(self) -> bool:
        """Return True always."""
        return True

    @property
    def expires_at_unix_ms(self) -> int:
        """Nothing is known but what a token says of itself."""
        return 0

    @abstractmethod
    async def authenticate(self, challenge: bytes | None) -> bytes:
        """Return the data, for CONNECT and for every challenge. Raises CredentialsUnavailable."""


class CredentialsUnavailable(AuthError):
    """The proxy's own credentials are not available; the text says why, without them."""
