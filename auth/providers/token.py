"""Method ``token``: JSON Web Tokens, as Pulsar's AuthenticationProviderToken takes them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.serialization import load_der_public_key, load_pem_public_key

from auth.state import AuthenticationDenied, AuthState, ClientContext, Identity, OneStageAuthState
from proxy.config.errors import ConfigError
from proxy.config.types import TokenAuthentication
from proxy.runtime.watched import Watched

Key = tuple[Any, tuple[str, ...]]
"""A key, and the algorithms that it may be used with."""

TOKEN_BYTES_MAX = 64 * 1024
RSA_BITS_MIN = 2048  # RFC 7518, section 3.3
NEVER_S = 253_402_300_799  # the end of the year 9999

_HMAC_KEY_BYTES_MIN = {"HS256": 32, "HS384": 48, "HS512": 64}
"""RFC 7518, section 3.2: a shorter secret than the hash can be guessed."""

_RSA = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
_EC_BY_CURVE = {"secp256r1": "ES256", "secp384r1": "ES384", "secp521r1": "ES512"}

_REASONS: tuple[tuple[type[Exception], str], ...] = (
    (jwt.ExpiredSignatureError, "expired"),
    (jwt.InvalidSignatureError, "bad_signature"),
    (jwt.InvalidAudienceError, "bad_audience"),
    (jwt.ImmatureSignatureError, "not_yet_valid"),
    (jwt.InvalidAlgorithmError, "bad_algorithm"),
    (jwt.DecodeError, "malformed"),
)


class TokenProvider:
    """Judges tokens by signature, expiry, audience, and takes the role from a claim.

    Which algorithms count is settled by the kind of each key, never by the token: a token that names HMAC cannot have
    a public key taken for its secret.
    """

    method = "token"

    def __init__(self, config: TokenAuthentication) -> None:
        self._config = config
        files = (
            *_files(config.secret_key, config.further_secret_keys),
            *_files(config.public_key, config.further_public_keys),
        )
        self._keys = Watched("authentication.token", files, lambda: _all_keys(config))

    def new_auth_state(self, client: ClientContext) -> AuthState:
        """A state for one client."""
        return OneStageAuthState(self, client)

    async def identify(self, data: bytes, client: ClientContext) -> Identity:  # noqa: ARG002 -- the interface's
        """Judge a token."""
        if not data:
            raise AuthenticationDenied("missing", "no token")
        if len(data) > TOKEN_BYTES_MAX:
            raise AuthenticationDenied("malformed", f"a token of {len(data)} bytes")
        claims = self._claims(data, await self._keys.current())
        return Identity(self._role(claims), self._expires_at(claims))

    def _expires_at(self, claims: dict[str, Any]) -> int | None:
        """When the token ends, the allowed skew included; None where it never does."""
        if "exp" not in claims:
            return None
        expires_at_s = int(claims["exp"])  # a whole number, or the signature's check would have failed
        if expires_at_s > NEVER_S:  # issuers write the largest number they know for "never"
            return None
        return expires_at_s * 1000 + self._config.allowed_clock_skew_ms

    def _claims(self, token: bytes, keys: Sequence[Key]) -> dict[str, Any]:
        denied: AuthenticationDenied | None = None
        for key, algorithms in keys:
            try:
                return self._decoded(token, key, algorithms)
            except jwt.PyJWTError as error:
                denial = AuthenticationDenied(_reason(error), _detail(error))
                # With several keys, the one whose kind of algorithm the token does not even name tells least.
                if denied is None or denied.reason == "bad_algorithm":
                    denied = denial
            except Exception as error:  # noqa: BLE001 -- a stranger's bytes: whatever they break in a parser, they are denied
                denied = denied or AuthenticationDenied("malformed", type(error).__name__)
        raise denied or AuthenticationDenied("malformed")

    def _decoded(self, token: bytes, key: Any, algorithms: tuple[str, ...]) -> dict[str, Any]:
        claims: dict[str, Any] = jwt.decode(
            token,
            key,
            algorithms=list(algorithms),
            leeway=self._config.allowed_clock_skew_ms / 1000,
            # The audience is checked below, since its claim may have another name. "iat" is no condition in Pulsar.
            options={"verify_aud": False, "verify_iat": False, "verify_sub": False, "verify_jti": False},
        )
        self._check_audience(claims)
        return claims

    def _check_audience(self, claims: dict[str, Any]) -> None:
        if not self._config.audience:
            return
        found = claims.get(self._config.audience_claim)
        audiences = found if isinstance(found, list) else [found]
        if self._config.audience not in audiences:
            raise jwt.InvalidAudienceError("the token is meant for somebody else")

    def _role(self, claims: dict[str, Any]) -> str:
        role = claims.get(self._config.role_claim)
        if isinstance(role, list) and role:
            role = role[0]
        if not isinstance(role, str) or not role.strip():
            raise AuthenticationDenied("no_role", f"the token has no role in its claim {self._config.role_claim}")
        return role


def _reason(error: jwt.PyJWTError) -> str:
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), "invalid")


def _detail(error: jwt.PyJWTError) -> str:
    # PyJWT's texts name what is wrong but may quote the header, which is the stranger's: keep it short and printable.
    return "".join(character for character in str(error)[:200] if character.isprintable())


def _files(first: str, further: Sequence[str]) -> tuple[str, ...]:
    return (*([first] if first else ()), *further)


def _all_keys(config: TokenAuthentication) -> tuple[Key, ...]:
    secrets = [_secret_key(file) for file in _files(config.secret_key, config.further_secret_keys)]
    return (*secrets, *(_public_key(file) for file in _files(config.public_key, config.further_public_keys)))


def _secret_key(file: str) -> Key:
    key = _read("authentication.token.secret_key", file)
    if not key:
        raise ConfigError(f"authentication.token.secret_key: {file} is empty")
    algorithms = tuple(name for name, least in _HMAC_KEY_BYTES_MIN.items() if len(key) >= least)
    if not algorithms:
        least = min(_HMAC_KEY_BYTES_MIN.values())
        raise ConfigError(f"authentication.token.secret_key: {file} has {len(key)} bytes; {least} are needed")
    return key, algorithms


def _public_key(file: str) -> Key:
    data = _read("authentication.token.public_key", file)
    try:
        key = load_pem_public_key(data) if data.lstrip().startswith(b"-----") else load_der_public_key(data)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"authentication.token.public_key: {file} holds no public key: {error}") from None
    if isinstance(key, RSAPublicKey):
        if key.key_size < RSA_BITS_MIN:
            raise ConfigError(
                f"authentication.token.public_key: {file} has {key.key_size} bits; {RSA_BITS_MIN} are needed"
            )
        return key, _RSA
    if isinstance(key, EllipticCurvePublicKey) and key.curve.name in _EC_BY_CURVE:
        return key, (_EC_BY_CURVE[key.curve.name],)
    raise ConfigError(
        f"authentication.token.public_key: {file} is neither an RSA key nor an EC key on P-256, P-384 or P-521"
    )


def _read(key: str, file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}: {file} cannot be read: {error.strerror}") from None
