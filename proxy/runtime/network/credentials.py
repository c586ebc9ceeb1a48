"""The proxy's own credentials for brokers: fetched from an auth worker for each handshake, never kept."""

from typing import Protocol

from proto.rpc_pb2 import BrokerCredentialsRequest, BrokerCredentialsResponse, Method
from proxy.runtime.rpc.client import RpcClient
from proxy.runtime.rpc.pool import RpcPool

CREDENTIALS_TIMEOUT_S = 5.0


class Credentials(Protocol):
    """The proxy's side of one authentication at one broker."""

    @property
    def complete(self) -> bool:
        """True once the broker may accept the proxy: it owes no proof of its own after the last answer."""
        ...

    @property
    def expires_at_unix_ms(self) -> int:
        """Expiry of the last answer's credentials, in Unix milliseconds; 0: never, or unknown."""
        ...

    async def auth_data_for(self, challenge: bytes | None) -> tuple[str, bytes]:
        """Return method and data for CONNECT (challenge is None) or for the broker's challenge. Raises RpcError."""
        ...


class CredentialExchange:
    """The rounds of one authentication at one broker (PIP-30's ``getAuthData(brokerHostName)``).

    All rounds go to the same auth worker: it holds the mechanism's state.
    """

    def __init__(self, client: RpcClient, broker_host: str) -> None:
        self._client = client
        self._exchange_id = client.new_id()
        self._broker_host = broker_host
        self.complete = False
        """True once the broker may accept the proxy: it owes no proof of its own after the last answer."""
        self.expires_at_unix_ms = 0
        """Expiry of the last answer's credentials, in Unix milliseconds; 0: never, or unknown."""

    async def auth_data_for(self, challenge: bytes | None) -> tuple[str, bytes]:
        """Return method and data for CONNECT (challenge is None) or for the broker's challenge. Raises RpcError."""
        request = BrokerCredentialsRequest(exchange_id=self._exchange_id, broker_host=self._broker_host)
        if challenge is not None:
            request.challenge = challenge
        response = await self._client.call(
            Method.BROKER_CREDENTIALS,
            request,
            BrokerCredentialsResponse,
            timeout_s=CREDENTIALS_TIMEOUT_S,
            retry=challenge is None,  # a first round may be repeated; an answer to a challenge may not
        )
        self.complete = not response.incomplete
        self.expires_at_unix_ms = int(response.expires_at_unix_ms)
        return response.method, response.data


class NoCredentials:
    """Credentials of a proxy that does not authenticate itself at brokers."""

    complete = True
    expires_at_unix_ms = 0

    async def auth_data_for(self, challenge: bytes | None) -> tuple[str, bytes]:
        """Return no method and no data; a broker that still sends a challenge gets an empty answer and refuses it."""
        return ("", b"") if challenge is None else self.answer_to(challenge)

    def answer_to(self, _challenge: bytes) -> tuple[str, bytes]:
        """Return the empty answer to a challenge."""
        return "none", b""


def credentials_for(auth: RpcPool, broker_host: str, *, configured: bool) -> Credentials:
    """Return the credentials for one handshake with a broker."""
    return CredentialExchange(auth.pick_client(), broker_host) if configured else NoCredentials()
