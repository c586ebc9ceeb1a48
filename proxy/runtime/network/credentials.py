"""The proxy's own credentials for brokers: fetched from an auth worker for each handshake, never kept."""

from collections.abc import Callable
from typing import Protocol

from proto.rpc_pb2 import BrokerCredentialsRequest, BrokerCredentialsResponse, Method
from proxy.runtime.loop.scoped_tasks import TaskSpawner
from proxy.runtime.rpc.callback_call import CallbackCall
from proxy.runtime.rpc.client import RpcClient
from proxy.runtime.rpc.errors import RpcError
from proxy.runtime.rpc.pool import RpcPool

CREDENTIALS_TIMEOUT_S = 5.0

AuthData = tuple[str, bytes]
"""Method and data of one round."""

_BROKER_CREDENTIALS = int(Method.BROKER_CREDENTIALS)  # looked up once: access to an enum's member costs a search


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

    async def auth_data_for(self, challenge: bytes | None) -> AuthData:
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
        self._call: CallbackCall[BrokerCredentialsResponse, AuthData] | None = None

    async def auth_data_for(self, challenge: bytes | None) -> AuthData:
        """Return method and data for CONNECT (challenge is None) or for the broker's challenge. Raises RpcError."""
        return self._auth_data(
            await self._client.call(
                _BROKER_CREDENTIALS,
                self._request(challenge),
                BrokerCredentialsResponse,
                timeout_s=CREDENTIALS_TIMEOUT_S,
                retry=challenge is None,  # a first round may be repeated; an answer to a challenge may not
            )
        )

    def start_round(
        self, challenge: bytes | None, tasks: TaskSpawner, on_outcome: Callable[[AuthData | RpcError], None]
    ) -> None:
        """Have ``on_outcome`` called once with what ``auth_data_for`` would return or raise, unless the round is
        cancelled before. ``tasks``: see CallbackCall.
        """
        self._call = CallbackCall(
            self._client,
            _BROKER_CREDENTIALS,
            self._request(challenge),
            BrokerCredentialsResponse,
            tasks=tasks,
            read=self._auth_data,
            on_outcome=on_outcome,
            timeout_s=CREDENTIALS_TIMEOUT_S,
            retry=challenge is None,
        )

    def cancel_round(self) -> None:
        """Cancel the round that is under way, if there is one."""
        if self._call is not None:
            self._call.cancel()

    def _request(self, challenge: bytes | None) -> BrokerCredentialsRequest:
        return BrokerCredentialsRequest(
            exchange_id=self._exchange_id, broker_host=self._broker_host, challenge=challenge
        )

    def _auth_data(self, response: BrokerCredentialsResponse) -> AuthData:
        self.complete = not response.incomplete
        self.expires_at_unix_ms = int(response.expires_at_unix_ms)
        return response.method, response.data


class NoCredentials:
    """Credentials of a proxy that does not authenticate itself at brokers."""

    complete = True
    expires_at_unix_ms = 0

    async def auth_data_for(self, challenge: bytes | None) -> AuthData:
        """Return no method and no data; a broker that still sends a challenge gets an empty answer and refuses it."""
        return self._auth_data(challenge)

    def start_round(
        self, challenge: bytes | None, _tasks: TaskSpawner, on_outcome: Callable[[AuthData | RpcError], None]
    ) -> None:
        """Call back at once, with what ``auth_data_for`` returns."""
        on_outcome(self._auth_data(challenge))

    def cancel_round(self) -> None:
        """Do nothing."""

    @staticmethod
    def _auth_data(challenge: bytes | None) -> AuthData:
        return ("", b"") if challenge is None else ("none", b"")


def credentials_for(auth: RpcPool, broker_host: str, *, configured: bool) -> CredentialExchange | NoCredentials:
    """Return the credentials for one handshake with a broker."""
    return CredentialExchange(auth.pick_client(), broker_host) if configured else NoCredentials()
