"""JSON Web Tokens (HS256) for a local broker and proxy, without a library, which the system's Python lacks, and files
for these and other secrets.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from pathlib import Path


def write_private(path: Path, content: bytes) -> None:
    """Write a file for its owner alone; a missing directory is made for the owner alone, too."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(content)


def make_token(key: bytes, role: str, lifetime_s: float | None = None, **claims: object) -> str:
    """Return a token with the subject `role`; a negative lifetime makes an expired one, None one without expiry."""
    payload: dict[str, object] = {"sub": role, **claims}
    if lifetime_s is not None:
        payload["exp"] = int(time.time() + lifetime_s)
    signed = f"{_encode({'alg': 'HS256'})}.{_encode(payload)}"
    return f"{signed}.{_base64url(hmac.digest(key, signed.encode(), hashlib.sha256))}"


def _encode(value: dict[str, object] | dict[str, str]) -> str:
    return _base64url(json.dumps(value, separators=(",", ":")).encode())


def _base64url(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()
