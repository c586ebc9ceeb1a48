"""Logins at a broker with the proxy's own credentials: a handshake for no client, after which nothing is asked.

Brokers with authorization refuse a proxy role that names no original principal, and any other role that names one
("Invalid roles."); any other role that names none, but a ``proxy_version``, is refused in other words (tried on 4.0.8,
tests/e2e/test_check_connect.py). So the CONNECT names a principal of our own where clients' connections name theirs. It
is not named where clients' credentials are forwarded: brokers with ``authenticateOriginalAuthData`` would want that
principal's credentials, too, and their absence would look like a fault of the proxy's.
"""

from dataclasses import dataclass

from lookup.brokers.discovery import CredentialVerdict, Endpoint
from proto.commands import error_name
from proto.connect_rules import INVALID_ROLES_TEXT, NO_PROXY_VERSION, BrokerIdentity, proxy_connect
from proto.pulsar_pb2 import CommandConnect, ServerError
from proxy import __version__
from proxy.config.types import Config
from proxy.runtime.loop.tasks import close_forcefully
from proxy.runtime.network.broker_link import BrokerLinkFactory, BrokerLinkFailed
from proxy.runtime.network.credentials import Credentials

CHECK_PRINCIPAL = "pulsar-trio-proxy-check"
"""The original principal of a login. It is authorized for nothing, and nothing is asked in its name."""

DETAIL_CHARACTERS_MAX = 300
"""Longest text about a login: a broker chooses a part of it."""


@dataclass(frozen=True, slots=True)
class LoginResult:
    """Result of one login. ``code``: Pulsar's, where the broker refused."""

    verdict: CredentialVerdict
    detail: str = ""
    code: int | None = None
    expires_at_unix_ms: int = 0

    @property
    def connected(self) -> bool:
        """Return True if the broker said CONNECTED."""
        return self.verdict is CredentialVerdict.ACCEPTED and self.code is None


def login_principal(config: Config) -> str:
    """Return the original principal of a login, so that the broker treats it as it treats clients' connections."""
    named = config.authentication.enabled and not config.brokers.forward_authorization_credentials
    return CHECK_PRINCIPAL if named else ""


async def log_in(
    link_factory: BrokerLinkFactory, broker: Endpoint, credentials: Credentials, config: Config
) -> LoginResult:
    """Shake hands with a broker as relays and lookups do, and close the connection."""
    return await log_in_as(link_factory, broker, credentials, login_principal(config), config)


async def log_in_as(
    link_factory: BrokerLinkFactory, broker: Endpoint, credentials: Credentials, principal: str, config: Config
) -> LoginResult:
    """Shake hands with an original principal (empty: without one), and close the connection."""

    def make_connect(method: str, data: bytes) -> CommandConnect:
        return proxy_connect(BrokerIdentity(method, data, principal), __version__)

    try:
        link = await link_factory.open_link(broker, broker.addresses, credentials, make_connect)
    except BrokerLinkFailed as failed:
        left_out = config.authentication.enabled and not principal
        return _failure_result(failed, principal_left_out=left_out)
    await close_forcefully(link.stream)
    return LoginResult(CredentialVerdict.ACCEPTED, expires_at_unix_ms=credentials.expires_at_unix_ms)


def _failure_result(failed: BrokerLinkFailed, *, principal_left_out: bool) -> LoginResult:
    """Classify a failed login.

    Only what a broker says of the credentials or the role is a refusal: that it is shutting down, has too many
    connections (NotAllowedError, too, of one address, which clients can bring about), or is not there is none.
    """
    refusal = failed.refusal
    if refusal is None:
        return LoginResult(CredentialVerdict.UNKNOWN, _printable(str(failed)))
    detail = _printable(f"{error_name(refusal.error)}: {refusal.message}")
    verdict = CredentialVerdict.UNKNOWN
    if refusal.error == ServerError.AuthenticationError:
        verdict = CredentialVerdict.REFUSED
    elif refusal.error == ServerError.AuthorizationError:
        # It has authenticated the proxy, and judges the role: a proxy's, which must name a principal, or not.
        is_proxys = principal_left_out and refusal.message == INVALID_ROLES_TEXT
        verdict = CredentialVerdict.ACCEPTED if is_proxys else CredentialVerdict.REFUSED
    elif refusal.error == ServerError.NotAllowedError and refusal.message == NO_PROXY_VERSION:
        verdict = CredentialVerdict.REFUSED  # by another proxy, of whose authentication.proxy_roles this one is not
    return LoginResult(verdict, detail, int(refusal.error))


def _printable(text: str) -> str:
    return "".join(one if one.isascii() and one.isprintable() else "?" for one in text[:DETAIL_CHARACTERS_MAX])
