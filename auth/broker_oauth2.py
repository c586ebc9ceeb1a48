"""The proxy's own token from an OAuth 2.0 issuer: client credentials (RFC 6749, section 4.4), as Pulsar's
AuthenticationOAuth2 has them. Brokers get it as any other token.
"""

import random

import httpx
import msgspec

from auth.broker_credentials import KEY, read_secret
from auth.http import HttpFailed, IssuerClient, discovery_url
from auth.refreshing_cache import Fetched, NotAvailable, RefreshingCache
from auth.state import CredentialsUnavailable, OneForAllBrokers
from proxy.common.eager import eager
from proxy.common.errors import ConfigError
from proxy.common.reloading_file import HeldFile
from proxy.config.types import BrokerCredentials

REQUEST_TIMEOUT_MS = 2_000
"""Two requests of this length end before ``brokers.handshake_timeout_ms`` does, as it comes."""

RETRY_INTERVAL_S = 5.0
"""A failure is remembered for so long: every dial to a broker asks, and an issuer in trouble is not to be hammered."""

LIFETIME_UNKNOWN_S = 60
"""For an issuer that does not say how long its token lives."""


class OAuth2Credentials(OneForAllBrokers):
    """One token for all brokers, renewed on demand.

    It is renewed at a random point within 85 to 95 % of its lifetime, so that not all proxies ask at one time; the old
    one is used for as long as it is valid where the issuer cannot be asked.

    The key file is JSON in Pulsar's form; after a change that a broker accepted the next use fetches a new token.
    ``brokers.credentials.issuer_url`` and all that the issuer names must be https, but at loopback hosts: the secret
    goes there. ``transport`` replaces the network in tests. Raises ConfigError.
    """

    method = "token"

    def __init__(self, config: BrokerCredentials, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._config = config
        self._client = IssuerClient(
            "brokers.credentials.trust",
            trust=config.trust,
            timeout_ms=REQUEST_TIMEOUT_MS,
            plain_http="at loopback",
            transport=transport,
        )
        self._account = HeldFile(KEY, [config.file], lambda: _account(config.file))
        self._tokens = _TokenCache(config, self._client, self._account.value)

    def read_account(self) -> None:
        """Read the key file again, as a reload does with all files. Raises ConfigError."""
        self._account.read_again()

    @eager
    async def authenticate(self, challenge: bytes | None) -> bytes:  # noqa: ARG002 -- whatever is asked, this is the answer
        """Return the token, for CONNECT and for every challenge."""
        account = self._account.value
        if account != self._tokens.account:
            self._tokens = _TokenCache(self._config, self._client, account)
        try:
            return await self._tokens.current_token()
        except NotAvailable as error:
            raise CredentialsUnavailable(f"brokers.credentials: {error}") from None


class _Account(msgspec.Struct, frozen=True):
    """Pulsar's key file. What else it says (issuer_url, client_email) is in the configuration, or not needed."""

    client_id: str
    client_secret: str
    type: str = "client_credentials"

    def __repr__(self) -> str:
        return "the proxy's account"  # so that no log holds a secret


class _Metadata(msgspec.Struct):
    issuer: str
    token_endpoint: str


class _Answer(msgspec.Struct):
    """RFC 6749, section 5.1."""

    access_token: str
    expires_in: int | None = None


class _TokenCache:
    """The token of one account."""

    def __init__(self, config: BrokerCredentials, client: IssuerClient, account: _Account) -> None:
        self.account = account
        self._config = config
        self._client = client
        self._token = RefreshingCache("the proxy's token for brokers", self._fetch, retry_interval_s=RETRY_INTERVAL_S)

    async def current_token(self) -> bytes:
        """Return the token; raise NotAvailable."""
        return await self._token.current_value()

    async def _fetch(self) -> Fetched[bytes]:
        config = self._config
        url = discovery_url(config.issuer_url)
        metadata = await self._client.get_json(url, _Metadata)
        # Pulsar's clients take the URL with and without the slash at its end, and their manuals write either.
        if metadata.issuer.removesuffix("/") != config.issuer_url.removesuffix("/"):
            raise HttpFailed(f"{url}: is another issuer's")
        form = {
            "grant_type": "client_credentials",
            "client_id": self.account.client_id,
            "client_secret": self.account.client_secret,
        }
        form |= {name: value for name in ("audience", "scope") if (value := getattr(config, name))}
        answer = await self._client.post_form(metadata.token_endpoint, _Answer, form)
        if not answer.access_token.isascii() or not answer.access_token.isprintable() or not answer.access_token:
            raise HttpFailed(f"{metadata.token_endpoint}: the answer holds no token")
        lives_s = answer.expires_in if answer.expires_in and answer.expires_in > 0 else LIFETIME_UNKNOWN_S
        return Fetched(answer.access_token.encode(), lives_s * random.uniform(0.85, 0.95), lives_s)  # noqa: S311


def _account(file: str) -> _Account:
    data = read_secret(file)
    try:
        account = msgspec.json.decode(data, type=_Account)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:  # whose texts quote no values
        raise ConfigError(f"{KEY}: {file}: {error}") from None
    if account.type != "client_credentials":
        raise ConfigError(f"{KEY}: {file}: its type is not client_credentials")
    if not account.client_id or not account.client_secret:
        raise ConfigError(f"{KEY}: {file}: client_id or client_secret is empty")
    return account
