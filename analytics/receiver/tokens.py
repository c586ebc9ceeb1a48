"""The senders' bearer tokens, of which only digests are kept in memory."""

from collections.abc import Sequence
from pathlib import Path

from proxy.common.bearer_tokens import token_digest
from proxy.common.errors import ConfigError
from proxy.common.reloading_file import ReloadingFile

KEY = "authentication.token_files"
TOKEN_BYTES_MIN = 16
TOKENS_MAX = 1000

Digests = tuple[bytes, ...]


def reloading_token_digests(files: Sequence[str]) -> ReloadingFile[Digests] | None:
    """Return the digests of the tokens in these files, reloaded when the files change; None without files.

    Raises ConfigError.
    """
    return ReloadingFile(KEY, files, lambda: read_tokens(files)) if files else None


def read_tokens(files: Sequence[str]) -> Digests:
    """Read the tokens, one a line, and return their digests. Raises ConfigError (never with a token in it), OSError."""
    found = [line.strip() for file in files for line in Path(file).read_bytes().splitlines()]
    tokens = [token for token in found if token]
    if not 0 < len(tokens) <= TOKENS_MAX:
        raise ConfigError(f"{KEY}: {', '.join(files)}: {len(tokens)} tokens; there must be 1 to {TOKENS_MAX}")
    if any(len(token) < TOKEN_BYTES_MIN for token in tokens):
        raise ConfigError(f"{KEY}: {', '.join(files)}: a token is shorter than {TOKEN_BYTES_MIN} bytes")
    return tuple(map(token_digest, tokens))
