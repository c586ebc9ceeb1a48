"""JSON Web Tokens (HS256) for a local broker, without a library, which the system's Python lacks."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time


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
