"""The token of ``admin.token_file``: one line that an HTTP header can hold."""

from proxy.common.errors import ConfigError
from proxy.common.files import read_file

TOKEN_BYTES_MAX = 4096

_KEY = "admin.token_file"


def read_admin_token(file: str) -> bytes:
    """Read the token of a file, without the white space around it. Raises OSError, ConfigError."""
    token = read_file(file, TOKEN_BYTES_MAX + 1).strip()
    if not token:
        raise ConfigError(f"{_KEY}: {file} holds no token")
    if len(token) > TOKEN_BYTES_MAX:
        raise ConfigError(f"{_KEY}: {file} holds more than a token: over {TOKEN_BYTES_MAX} bytes")
    if not all(33 <= byte <= 126 for byte in token):  # noqa: PLR2004 -- what a header may hold, but for the space
        raise ConfigError(f"{_KEY}: {file} holds what no HTTP header can: one token of printable ASCII is wanted")
    return token
