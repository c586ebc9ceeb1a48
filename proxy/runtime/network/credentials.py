"""The proxy's own credentials, as a forwarder or lookup worker gets them: asked from an auth worker, never kept."""

from typing import Protocol

from proto.rpc_pb2 import BrokerCredentialsRequest, BrokerCredentialsResponse, Method
from proxy.runtime.rpc.client import RpcClient, RpcPool

CREDENTIALS_TIMEOUT_S = 5.0


class Credentials(Protocol):
    """One authentication at one broker."""

    @property
    def complete(self) -> bool:
        """Whether the broker may take the proxy in after the last answer: it owes no proof of its own."""
        ...

    @property
    def expires_at_unix_ms(self) -> int:
        """When the credentials of the last answer end; 0: never, or it is not known."""
        ...

    async def auth_data_for(self, challenge: bytes | None) -> tuple[str, bytes]:
        """Method and data for CONNECT (no challenge yet), or for the broker's challenge. Raises RpcError."""
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
        """Whether the broker may take the proxy in after the last answer: it owes no proof of its own."""
        self.expires_at_unix_ms = 0
        """When the credentials of the last answer end; 0: never, or it is not known."""

    async def auth_data_for(self, challenge: bytes | None) -> tuple[str, bytes]:
        """Method and data for CONNECT (no challenge yet), or for the broker's challenge. Raises RpcError."""
        request = BrokerCredentialsRequest(exchange_id=self._exchange_id, broker_host=self._broker_host)
        if challenge is not None:
            request.challenge = challenge
        response = await self._client.call(
            Method.BROKER_CREDENTIALS,
            request,
            BrokerCredentialsResponse,
            timeout_s=CREDENTIALS_TIMEOUT_S,
            retry=challenge is None,  # to begin once more harms nothing; to answer a challenge twice would
        )
        self.complete = not response.incomplete
        self.expires_at_unix_ms = int(response.expires_at_unix_ms)
        return response.method, response.data


class NoCredentials:
    """For a proxy that does not authenticate itself: nothing to ask for."""

    complete = True
    expires_at_unix_ms = 0

    async def auth_data_for(self, challenge: bytes | None) -> tuple[str, bytes]:
        """No method and no data; a broker that still asks gets an empty answer, and refuses it in its own words."""
        return ("", b"") if challenge is None else ("none", b"")


def credentials_for(auth: RpcPool, broker_host: str, *, configured: bool) -> Credentials:
    """The credentials for one handshake with a broker."""
    return CredentialExchange(auth.pick_client(), broker_host) if configured else NoCredentials()
