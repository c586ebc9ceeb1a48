"""Rules for JSON Web Tokens of any issuer: which algorithms a key may be used with, which claims count.

The kind of each key decides the algorithms, never the token: a token that names HMAC cannot have a public key taken for
its secret (RFC 8725, section 3.1).
"""

from collections.abc import Sequence
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from auth.state import AuthenticationDenied

Key = tuple[Any, tuple[str, ...]]
"""A key, and the algorithms that it may be used with."""

TOKEN_BYTES_MAX = 64 * 1024
RSA_BITS_MIN = 2048  # RFC 7518, section 3.3
NEVER_S = 253_402_300_799  # the end of the year 9999

_RSA = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
_EC_BY_CURVE = {"secp256r1": "ES256", "secp384r1": "ES384", "secp521r1": "ES512"}
ASYMMETRIC = frozenset((*_RSA, *_EC_BY_CURVE.values()))

_REASONS: tuple[tuple[type[Exception], str], ...] = (
    (jwt.ExpiredSignatureError, "expired"),
    (jwt.InvalidSignatureError, "bad_signature"),
    (jwt.InvalidAudienceError, "bad_audience"),
    (jwt.ImmatureSignatureError, "not_yet_valid"),
    (jwt.InvalidAlgorithmError, "bad_algorithm"),
    (jwt.MissingRequiredClaimError, "missing_claim"),
    (jwt.DecodeError, "malformed"),
)


def public_key_algorithms(key: Any) -> tuple[str, ...]:
    """Return the algorithms of a public key; raise ValueError, with a text to follow the key's name."""
    if isinstance(key, RSAPublicKey):
        if key.key_size < RSA_BITS_MIN:
            raise ValueError(f"has {key.key_size} bits; {RSA_BITS_MIN} are needed")
        return _RSA
    if isinstance(key, EllipticCurvePublicKey) and key.curve.name in _EC_BY_CURVE:
        return (_EC_BY_CURVE[key.curve.name],)
    raise ValueError("is neither an RSA key nor an EC key on P-256, P-384 or P-521")


def check_token_size(token: bytes) -> None:
    """Check that there is a token of an acceptable size; raise AuthenticationDenied."""
    if not token:
        raise AuthenticationDenied("missing", "no token")
    if len(token) > TOKEN_BYTES_MAX:
        raise AuthenticationDenied("malformed", f"a token of {len(token)} bytes")


def parse_unverified(token: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a token's header and claims, which anyone may have written; raise AuthenticationDenied."""
    try:
        found = jwt.decode_complete(token, options={"verify_signature": False})
    except Exception as error:  # noqa: BLE001 -- a stranger's bytes: whatever they break in a parser, they are denied
        raise _denial(error) from None
    return found["header"], found["payload"]


def claimed_expiry_unix_ms(token: bytes) -> int:
    """Return when a token claims to end; 0: never, or not readable. Nothing is verified."""
    try:
        expires_at_s = int(parse_unverified(token)[1]["exp"])
    except (AuthenticationDenied, KeyError, TypeError, ValueError, OverflowError):
        return 0
    return expires_at_s * 1000 if 0 < expires_at_s < NEVER_S else 0


def verify_token(
    token: bytes,
    keys: Sequence[Key],
    *,
    audience_claim: str,
    audiences: Sequence[str],
    allowed_clock_skew_ms: int,
    required: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the claims of a token that one of the keys has signed, and that is valid now for one of the audiences.

    ``audiences``: none means that any will do. ``required``: claims that must be there. Raises AuthenticationDenied.
    """
    denied: AuthenticationDenied | None = None
    for key, algorithms in keys:
        try:
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=list(algorithms),
                leeway=allowed_clock_skew_ms / 1000,
                # The audience is checked below, since its claim may have another name. "iat" is no condition in Pulsar.
                options={
                    "verify_aud": False,
                    "verify_iat": False,
                    "verify_sub": False,
                    "verify_jti": False,
                    "require": list(required),
                },
            )
            _check_audience(claims.get(audience_claim), audiences)
        except Exception as error:  # noqa: BLE001 -- a stranger's bytes: whatever they break in a parser, they are denied
            # With several keys, the one whose kind of algorithm the token does not even name tells least.
            if denied is None or denied.reason == "bad_algorithm":
                denied = _denial(error)
        else:
            return claims
    raise denied or AuthenticationDenied("malformed")


def role_in(claims: dict[str, Any], claim: str) -> str:
    """Return the role in verified claims; of a list the first entry counts. Raises AuthenticationDenied."""
    role = claims.get(claim)
    if isinstance(role, list) and role:
        role = role[0]
    if not isinstance(role, str) or not role.strip():
        raise AuthenticationDenied("no_role", f"the token has no role in its claim {claim}")
    return role


def expires_at_unix_ms(claims: dict[str, Any], allowed_clock_skew_ms: int) -> int | None:
    """Return when verified claims end, the allowed skew included; None where they never do."""
    if "exp" not in claims:
        return None
    expires_at_s = int(claims["exp"])  # a whole number, or the signature's check would have failed
    if expires_at_s > NEVER_S:  # issuers write the largest number they know for "never"
        return None
    return expires_at_s * 1000 + allowed_clock_skew_ms


def _check_audience(found: object, audiences: Sequence[str]) -> None:
    named = found if isinstance(found, list) else [found]
    if audiences and not any(audience in audiences for audience in named):
        raise jwt.InvalidAudienceError("the token is meant for another audience")


def _denial(error: Exception) -> AuthenticationDenied:
    if not isinstance(error, jwt.PyJWTError):
        return AuthenticationDenied("malformed", type(error).__name__)
    reason = next((reason for kind, reason in _REASONS if isinstance(error, kind)), "invalid")
    # PyJWT's texts name what is wrong but may quote the header, which is the stranger's: keep it short and printable.
    return AuthenticationDenied(reason, "".join(one for one in str(error)[:200] if one.isprintable()))
