"""The key of ``audit.role_key_file``, by which roles are hashed in audit events."""

from proxy.common.errors import ConfigError
from proxy.common.files import read_file

KEY_BYTES_MIN = 16
KEY_BYTES_MAX = 4096


def read_role_key(file: str) -> bytes:
    """Read the key, without the white space around it. Raises ConfigError."""
    try:
        key = read_file(file, KEY_BYTES_MAX + 1).strip()
    except OSError as error:
        raise ConfigError(f"audit.role_key_file: {file} cannot be read: {error.strerror}") from None
    if not KEY_BYTES_MIN <= len(key) <= KEY_BYTES_MAX:
        raise ConfigError(f"audit.role_key_file: {file} must hold {KEY_BYTES_MIN} to {KEY_BYTES_MAX} bytes")
    return key
