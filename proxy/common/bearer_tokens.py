"""Bearer tokens (RFC 6750). Only digests are compared, and all of them: no comparison's time reveals a token's."""

import hashlib
import hmac
from collections.abc import Iterable


def token_digest(token: bytes) -> bytes:
    """Return what a token is known by."""
    return hashlib.sha256(token).digest()


def is_authorized(header: bytes, digests: Iterable[bytes]) -> bool:
    """Return True if an Authorization header holds one of the tokens."""
    scheme, _, token = header.partition(b" ")
    given = token_digest(token.strip())
    matches = [hmac.compare_digest(given, known) for known in digests]
    return any(matches) and scheme.lower() == b"bearer"
