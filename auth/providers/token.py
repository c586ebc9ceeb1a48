"""Method ``token``: JSON Web Tokens, as Pulsar's AuthenticationProviderToken takes them."""

from collections.abc import Sequence

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import (
    load_der_private_key,
    load_der_public_key,
    load_pem_public_key,
)

from auth.jwt_rules import Key, check_token_size, expires_at_unix_ms, public_key_algorithms, role_in, verify_token
from auth.state import AuthenticationProvider, ClientContext, Identity
from proxy.common.eager import eager
from proxy.common.errors import ConfigError
from proxy.common.files import read_file
from proxy.common.reloading_file import ReloadingFile
from proxy.config.types import TokenAuthentication

_HMAC_KEY_BYTES_MIN = {"HS256": 32, "HS384": 48, "HS512": 64}
"""RFC 7518, section 3.2: a shorter secret than the hash can be guessed."""


class TokenProvider(AuthenticationProvider):
    """Provider that checks a token's signature, expiry and audience, and takes the role from a claim."""

    method = "token"

    def __init__(self, config: TokenAuthentication) -> None:
        self._config = config
        files = (
            *_files(config.secret_key, config.further_secret_keys),
            *_files(config.public_key, config.further_public_keys),
        )
        self._keys = ReloadingFile("authentication.token", files, lambda: _all_keys(config))

    @eager
    async def identify(self, data: bytes, client: ClientContext) -> Identity:  # noqa: ARG002 -- the interface's
        """Verify a token."""
        check_token_size(data)
        config = self._config
        claims = verify_token(
            data,
            await self._keys.current_value(),
            audience_claim=config.audience_claim,
            audiences=(config.audience,) if config.audience else (),
            allowed_clock_skew_ms=config.allowed_clock_skew_ms,
        )
        return Identity(role_in(claims, config.role_claim), expires_at_unix_ms(claims, config.allowed_clock_skew_ms))


def _files(first: str, further: Sequence[str]) -> tuple[str, ...]:
    return (*([first] if first else ()), *further)


def _all_keys(config: TokenAuthentication) -> tuple[Key, ...]:
    secrets = [_secret_key(file) for file in _files(config.secret_key, config.further_secret_keys)]
    return (*secrets, *(_public_key(file) for file in _files(config.public_key, config.further_public_keys)))


def _secret_key(file: str) -> Key:
    key = _read("authentication.token.secret_key", file)
    if not key:
        raise ConfigError(f"authentication.token.secret_key: {file} is empty")
    asymmetric = _asymmetric_kind(key)
    if asymmetric is not None:
        # Whoever has the public key could sign tokens with it, as with a shared secret (RFC 8725, section 2.1).
        raise ConfigError(
            f"authentication.token.secret_key: {file} holds a {asymmetric}; a shared secret is wanted here, and the "
            "public key of a pair under authentication.token.public_key"
        )
    algorithms = tuple(name for name, least in _HMAC_KEY_BYTES_MIN.items() if len(key) >= least)
    if not algorithms:
        least = min(_HMAC_KEY_BYTES_MIN.values())
        raise ConfigError(f"authentication.token.secret_key: {file} has {len(key)} bytes; {least} are needed")
    return key, algorithms


def _asymmetric_kind(key: bytes) -> str | None:
    """Name what a file holds that is no shared secret: one key of a pair, or a certificate, as PEM or DER."""
    if key.lstrip().startswith(b"-----BEGIN "):
        label = key.lstrip()[len(b"-----BEGIN ") :].partition(b"-----")[0].lower()
        kinds = {b"public key": "public key", b"certificate": "certificate"}
        return kinds.get(label, "private key" if label.endswith(b"private key") else "PEM file")
    if not key.startswith(b"\x30"):  # DER: all of these are sequences
        return None
    for kind, load in (("public key", load_der_public_key), ("private key", _load_private)):
        try:
            load(key)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            continue
        return kind
    return None


def _load_private(data: bytes) -> object:
    return load_der_private_key(data, password=None)


def _public_key(file: str) -> Key:
    data = _read("authentication.token.public_key", file)
    kind = _asymmetric_kind(data)
    if kind is not None and kind != "public key":
        raise ConfigError(f"authentication.token.public_key: {file} holds a {kind}; the public key is wanted")
    try:
        key = load_pem_public_key(data) if data.lstrip().startswith(b"-----") else load_der_public_key(data)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"authentication.token.public_key: {file} holds no public key: {error}") from None
    try:
        return key, public_key_algorithms(key)
    except ValueError as error:
        raise ConfigError(f"authentication.token.public_key: {file} {error}") from None


def _read(key: str, file: str) -> bytes:
    try:
        return read_file(file)
    except OSError as error:
        raise ConfigError(f"{key}: {file} cannot be read: {error.strerror}") from None
