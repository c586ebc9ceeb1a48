"""The interfaces of PIP-30 in Python's manner.

A *provider* knows one authentication method and makes an *AuthState* for each client; the state takes the client's
data round by round until it is complete and knows the role. Providers that need only one round share OneStageAuthState.
The other direction, the proxy at a broker, is BrokerAuthentication: made per broker host, answers challenges.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

ROLE_CHARACTERS_MAX = 1024


class AuthenticationDenied(Exception):
    """A client is not who it says, or nobody.

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
    """Whether a text can be a role: not empty, of bounded length, and harmless in logs."""
    return bool(text.strip()) and len(text) <= ROLE_CHARACTERS_MAX and text.isprintable()


@dataclass(frozen=True, slots=True)
class ClientContext:
    """What a provider may know of a client beside its data.

    ``certificate``: what the client showed in TLS, as DER; the listener has checked it. Empty: none.
    """

    address: str
    certificate: bytes = b""


class AuthState(Protocol):
    """One client's authentication (PIP-30: AuthState)."""

    async def authenticate(self, data: bytes) -> bytes | None:
        """Take one round's data. Returns the challenge for the client, or None when complete.

        A mechanism whose last word is the server's returns it with the round that completes it: the client gets it as
        a challenge, to which it answers nothing. Raises AuthenticationDenied; the state is of no use afterwards.
        """
        ...

    def is_complete(self) -> bool:
        """Whether the identity is known."""
        ...

    def get_auth_role(self) -> str:
        """The client's role; only when complete."""
        ...

    def get_identity(self) -> Identity:
        """The role and the credential's expiry; only when complete."""
        ...


class Provider(Protocol):
    """One authentication method (PIP-30: AuthenticationProvider)."""

    method: str

    def new_auth_state(self, client: ClientContext) -> AuthState:
        """A state for one client."""
        ...


class OneStageProvider(Protocol):
    """A provider that knows after one round."""

    method: str

    async def identify(self, data: bytes, client: ClientContext) -> Identity:
        """Judge the data; raises AuthenticationDenied."""
        ...


class Identified:
    """What all states share: an identity, from the moment when it is known."""

    _identity: Identity | None = None

    def is_complete(self) -> bool:
        """Whether all rounds were there and went well."""
        return self._identity is not None

    def get_auth_role(self) -> str:
        """The client's role."""
        return self.get_identity().role

    def get_identity(self) -> Identity:
        """Role and expiry; a defect of the caller before completion."""
        if self._identity is None:
            raise RuntimeError("the authentication is not complete")
        return self._identity


class OneStageAuthState(Identified):
    """The state that all one-round providers share."""

    def __init__(self, provider: OneStageProvider, client: ClientContext) -> None:
        self._provider = provider
        self._client = client
        self._asked = False

    async def authenticate(self, data: bytes) -> bytes | None:
        """Judge the one round's data; a second round is denied."""
        if self._asked:
            raise AuthenticationDenied("unexpected_round", "data after the only round of this method")
        self._asked = True
        self._identity = await self._provider.identify(data, self._client)
        return None


class BrokerAuthState(Protocol):
    """The proxy's side of one authentication at one broker (PIP-30: AuthenticationDataProvider.authenticate)."""

    async def authenticate(self, challenge: bytes | None) -> bytes:
        """The data for CONNECT (no challenge yet) or for a challenge. Raises CredentialsUnavailable."""
        ...

    def is_complete(self) -> bool:
        """Whether the broker may take the proxy in now: it owes no proof of its own."""
        ...


class BrokerAuthentication(Protocol):
    """How the proxy authenticates itself at brokers."""

    method: str

    def get_auth_data(self, broker_host: str) -> BrokerAuthState:
        """A state for one handshake with one broker (PIP-30: getAuthData)."""
        ...


class OneForAllBrokers(ABC):
    """Credentials without rounds: whatever a broker asks, the answer is the same, and the broker proves nothing."""

    method: str

    def get_auth_data(self, broker_host: str) -> BrokerAuthState:  # noqa: ARG002 -- it is the same everywhere
        """One state serves all brokers: the credentials themselves."""
        return self

    def is_complete(self) -> bool:
        """Always."""
        return True

    @abstractmethod
    async def authenticate(self, challenge: bytes | None) -> bytes:
        """The data, for CONNECT and for every challenge. Raises CredentialsUnavailable."""


class CredentialsUnavailable(Exception):
    """The proxy's own credentials cannot be had; says why, without them."""
