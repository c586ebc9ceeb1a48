"""The proxy's own credentials towards brokers."""

import trio

from auth.state import BrokerAuthentication, BrokerAuthState, CredentialsUnavailable
from proxy.config.types import BrokerCredentials

REREAD_INTERVAL_S = 1.0
TOKEN_FILE_BYTES_MAX = 64 * 1024


class TokenCredentials:
    """A token from a file, read again so that it can be rotated: at most once a second, in a thread.

    Every challenge is answered with the token as it is now: that is what a broker asks for when the old one is about
    to expire (PIP-55).
    """

    method = "token"

    def __init__(self, file: str) -> None:
        self._path = trio.Path(file)
        self._token = b""
        self._read_at = float("-inf")
        self._reading = trio.Lock()

    def get_auth_data(self, broker_host: str) -> BrokerAuthState:  # noqa: ARG002 -- a token is the same everywhere
        """One state serves all brokers, since a token has no rounds."""
        return self

    async def authenticate(self, challenge: bytes | None) -> bytes:  # noqa: ARG002 -- whatever is asked, this is the answer
        """The token; raises CredentialsUnavailable."""
        async with self._reading:  # many who ask at once read it once
            if trio.current_time() - self._read_at >= REREAD_INTERVAL_S:
                self._token = await self._read()
                self._read_at = trio.current_time()
        return self._token

    async def _read(self) -> bytes:
        try:
            token = (await self._path.read_bytes())[: TOKEN_FILE_BYTES_MAX + 1].strip()
        except OSError as error:
            raise CredentialsUnavailable(
                f"brokers.credentials.file: {self._path} cannot be read: {error.strerror}"
            ) from None
        if not token or len(token) > TOKEN_FILE_BYTES_MAX:
            raise CredentialsUnavailable(f"brokers.credentials.file: {self._path} holds no token")
        return token


def broker_authentication(config: BrokerCredentials | None) -> BrokerAuthentication | None:
    """What the configuration asks for; None where the proxy does not authenticate itself."""
    return None if config is None else TokenCredentials(config.file)
