"""The proxy's own credentials towards brokers, by method."""

import functools
from typing import TYPE_CHECKING

from auth.jwt_rules import claimed_expiry_unix_ms, parse_unverified
from auth.state import AuthenticationDenied, BrokerAuthentication, OneForAllBrokers
from proxy.common.eager import eager
from proxy.common.errors import ConfigError
from proxy.common.files import read_file
from proxy.common.reloading_file import HeldFile
from proxy.config.types import BrokerCredentials

if TYPE_CHECKING:
    from auth.broker_oauth2 import OAuth2Credentials

SECRET_BYTES_MAX = 64 * 1024
KEY = "brokers.credentials.file"


class SecretCredentials(OneForAllBrokers):
    """The same secret for all brokers, from a file that may change at any time: a token, or user and password.

    Every challenge is answered with the last secret that a broker accepted: that is what a broker asks for when the old
    one is about to expire (PIP-55).
    """

    def __init__(self, method: str, file: str) -> None:
        self.method = method
        read = _read_token if method == "token" else read_secret
        self._secret = HeldFile(KEY, [file], lambda: read(file))

    @eager
    async def authenticate(self, challenge: bytes | None) -> bytes:  # noqa: ARG002 -- whatever is asked, this is the answer
        """Return the secret, for CONNECT and for every challenge."""
        return self._secret.value


class FixedCredentials(OneForAllBrokers):
    """What does not change: a token in the configuration; nothing at all where TLS has shown the certificate."""

    def __init__(self, method: str, data: bytes) -> None:
        self.method = method
        self._data = data

    @eager
    async def authenticate(self, challenge: bytes | None) -> bytes:  # noqa: ARG002 -- whatever is asked, this is the answer
        """Return the secret, for CONNECT and for every challenge."""
        return self._data


@functools.lru_cache(maxsize=1)
def _oauth2_credentials(config: BrokerCredentials) -> "OAuth2Credentials":
    """Kept over reloads that leave the table as it is: the token with it, whether the issuer is there or not."""
    from auth.broker_oauth2 import OAuth2Credentials

    return OAuth2Credentials(config)


def read_secret(file: str) -> bytes:
    """Return a file's content without surrounding white space. Raises ConfigError, OSError."""
    secret = read_file(file, SECRET_BYTES_MAX + 1).strip()
    if not secret or len(secret) > SECRET_BYTES_MAX:
        raise ConfigError(f"{KEY}: {file} is empty, or longer than {SECRET_BYTES_MAX} bytes")
    return secret


def _read_token(file: str) -> bytes:
    """Read a token from a file; raises ConfigError, OSError."""
    token = read_secret(file)
    check_jwt(f"{KEY}: {file}", token)
    return token


def check_jwt(source: str, token: bytes) -> None:
    """Refuse what is no JSON Web Token, which no broker takes by method ``token``. Raises ConfigError, which names
    ``source`` and quotes nothing.
    """
    try:
        parse_unverified(token)
    except AuthenticationDenied:
        hint = ""
        if token.startswith((b"token:", b"file:", b"data:")):
            hint = "; it begins as an authentication parameter of Pulsar's clients: the token alone is wanted"
        elif token.startswith(b"-----BEGIN"):
            hint = "; it is a PEM file, such as a key: the token is what was signed with the private key"
        raise ConfigError(f"{source} holds no JSON Web Token (three parts with dots between them){hint}") from None


def broker_authentication(config: BrokerCredentials | None) -> BrokerAuthentication | None:
    """Return the configured credentials; None where the proxy does not authenticate itself. Raises ConfigError."""
    if config is None:
        return None
    if config.method == "sasl":
        from auth.broker_sasl import SaslCredentials

        return SaslCredentials(config)
    if config.method == "oauth2":
        kept = _oauth2_credentials(config)
        kept.read_account()
        return kept
    if config.method == "tls":
        return FixedCredentials("tls", b"")
    if config.token:
        check_jwt("brokers.credentials.token", config.token.encode())
        return FixedCredentials("token", config.token.encode())
    return SecretCredentials(config.method, config.file)


async def end_of_token_unix_ms(broker: BrokerAuthentication | None) -> int:
    """Return when the token ends that an operator has to replace, in the configuration or its file; 0: never, or none.

    Tokens from an issuer and Kerberos' tickets are renewed by the proxy itself.
    """
    if isinstance(broker, SecretCredentials | FixedCredentials) and broker.method == "token":
        return claimed_expiry_unix_ms(await broker.authenticate(None))
    return 0
