"""Check of the token of ``admin.token_file``, which the protected paths of the admin port require."""

from proxy.common.bearer_tokens import is_authorized, token_digest
from proxy.common.reloading_file import ReloadingFile
from proxy.config.admin_token import read_admin_token
from proxy.config.types import Admin

_KEY = "admin.token_file"


class TokenCheck:
    """Checks the ``Authorization`` of requests. Raises ConfigError where the file cannot be used at the start.

    A file that becomes unusable later leaves the previous token in force.
    """

    def __init__(self, config: Admin) -> None:
        file = config.token_file
        self._token = ReloadingFile(_KEY, (file,), lambda: read_admin_token(file)) if file else None

    async def is_allowed(self, authorization: list[bytes]) -> bool:
        """Return True if a request with these values of the header may read the protected paths."""
        if self._token is None:
            return True
        digest = token_digest(await self._token.current_value())
        return len(authorization) == 1 and is_authorized(authorization[0], (digest,))
