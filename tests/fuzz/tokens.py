"""auth.jwt_rules: a stranger's token is denied, whatever it breaks, and of signed claims only those that count pass."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json

from auth.jwt_rules import (
    NEVER_S,
    check_token_size,
    claimed_expiry_unix_ms,
    expires_at_unix_ms,
    parse_unverified,
    role_in,
    verify_token,
)
from auth.state import AuthenticationDenied

SECRET = bytes(range(64))
SKEW_MS = 5000
STRANGERS, SIGNED = b"s", b"c"
"""The first byte: a whole token, or claims that are signed here."""


def _segment(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def _signed(header: bytes, claims: bytes, secret: bytes = SECRET) -> bytes:
    signed = _segment(header) + b"." + _segment(claims)
    return signed + b"." + _segment(hmac.digest(secret, signed, hashlib.sha256))


HEADER = b'{"alg":"HS256","typ":"JWT"}'
CLAIMS = {"sub": "alice", "aud": ["proxy"], "exp": 4_000_000_000}
TOKEN = _signed(HEADER, json.dumps(CLAIMS).encode())

_CLAIMS = (
    b'{"sub":"alice"}',
    b'{"sub":["alice","bob"],"aud":"proxy","exp":1e3,"nbf":0,"iat":"x"}',
    b'{"sub":"alice","exp":Infinity,"nbf":NaN,"aud":{}}',
    b'{"sub":"alice","exp":99999999999999999999,"aud":[["proxy"]]}',
    b'{"sub":"a","exp":"12"}{',
    b"[" * 50,
    b"1" * 50,
)
SEEDS = (
    STRANGERS + TOKEN,
    *(STRANGERS + _signed(HEADER, claims, b"another") for claims in _CLAIMS),
    STRANGERS + _signed(b'{"alg":"none"}', _CLAIMS[0]),
    STRANGERS + _signed(b'{"alg":"HS256","b64":false,"crit":["b64"],"kid":7,"zip":"DEF"}', _CLAIMS[0]),
    *(SIGNED + claims for claims in (json.dumps(CLAIMS).encode(), *_CLAIMS)),
)


def check(data: bytes) -> None:
    token = _signed(HEADER, data[1:]) if data[:1] == SIGNED else data[1:]
    try:
        check_token_size(token)
    except AuthenticationDenied:
        return
    _check_unverified(token)
    for audiences in ((), ("proxy",)):
        try:
            claims = verify_token(
                token, [(SECRET, ("HS256",))], audience_claim="aud", audiences=audiences, allowed_clock_skew_ms=SKEW_MS
            )
        except AuthenticationDenied as denied:
            _check_denial(denied)
            continue
        assert data[:1] == SIGNED or claims == CLAIMS, "a token that was not signed with the secret"
        _check_claims(claims)


def _check_unverified(token: bytes) -> None:
    try:
        header, claims = parse_unverified(token)
    except AuthenticationDenied as denied:
        _check_denial(denied)
        assert claimed_expiry_unix_ms(token) == 0
        return
    assert isinstance(header, dict)
    assert isinstance(claims, dict)
    assert 0 <= claimed_expiry_unix_ms(token) < NEVER_S * 1000


def _check_claims(claims: dict[str, object]) -> None:
    expires = expires_at_unix_ms(claims, SKEW_MS)
    assert expires is None or 0 < expires <= NEVER_S * 1000 + SKEW_MS
    try:
        assert role_in(claims, "sub").strip()
    except AuthenticationDenied as denied:
        _check_denial(denied)


def _check_denial(denied: AuthenticationDenied) -> None:
    assert len(str(denied)) <= 200
    assert str(denied).isprintable()
    assert denied.reason.replace("_", "").isalpha()
