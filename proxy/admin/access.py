"""Who may read what the admin port does not tell everybody: whoever brings the token of ``admin.token_file``."""

import hashlib
import hmac
from pathlib import Path

from proxy.config.errors import ConfigError
from proxy.config.types import Admin
from proxy.runtime.watched import Watched

TOKEN_BYTES_MAX = 4096

_KEY = "admin.token_file"


def read_token(file: str) -> bytes:
    """Read the token of a file, without the white space around it. Raises OSError, ConfigError."""
    with Path(file).open("rb") as stream:
        token = stream.read(TOKEN_BYTES_MAX + 1).strip()
    if not token:
        raise ConfigError(f"{_KEY}: {file} holds no token")
    if len(token) > TOKEN_BYTES_MAX:
        raise ConfigError(f"{_KEY}: {file} holds more than a token: over {TOKEN_BYTES_MAX} bytes")
    if not all(33 <= byte <= 126 for byte in token):  # noqa: PLR2004 -- what a header may hold, but for the space
        raise ConfigError(f"{_KEY}: {file} holds what no HTTP header can: one token of printable ASCII is wanted")
    return token


class Access:
    """Judges the ``Authorization`` of requests. Raises ConfigError where the file cannot be used at the beginning;
    one that becomes unusable later leaves the token from before.
    """

    def __init__(self, config: Admin) -> None:
        file = config.token_file
        self._token = Watched(_KEY, (file,), lambda: read_token(file)) if file else None

    async def allows(self, authorization: list[bytes]) -> bool:
        """Whether a request with these values of the header may read everything."""
        if self._token is None:
            return True
        token = await self._token.current()
        if len(authorization) != 1:
            return False
        scheme, _, given = authorization[0].partition(b" ")
        # Of digests, since the time of a comparison tells how long the token is.
        same = hmac.compare_digest(_digest(given.strip()), _digest(token))
        return same and scheme.lower() == b"bearer"


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
