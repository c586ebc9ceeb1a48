"""Who may read what the admin port does not tell everybody: whoever brings the token of ``admin.token_file``."""

import hashlib
import hmac

from proxy.common.reloading_file import ReloadingFile
from proxy.config.admin_token import read_admin_token
from proxy.config.types import Admin

_KEY = "admin.token_file"


class TokenCheck:
    """Judges the ``Authorization`` of requests. Raises ConfigError where the file cannot be used at the beginning;
    one that becomes unusable later leaves the token from before.
    """

    def __init__(self, config: Admin) -> None:
        file = config.token_file
        self._token = ReloadingFile(_KEY, (file,), lambda: read_admin_token(file)) if file else None

    async def is_allowed(self, authorization: list[bytes]) -> bool:
        """Whether a request with these values of the header may read everything."""
        if self._token is None:
            return True
        token = await self._token.current_value()
        if len(authorization) != 1:
            return False
        scheme, _, given = authorization[0].partition(b" ")
        # Of digests, since the time of a comparison tells how long the token is.
        same = hmac.compare_digest(_digest(given.strip()), _digest(token))
        return same and scheme.lower() == b"bearer"


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
