"""Logins at a broker with the proxy's own credentials: a handshake for no client, after which nothing is asked.

Brokers with authorization refuse a proxy role that names no original principal, and any other role that names one
("Invalid roles."); any other role that names none, but a ``proxy_version``, is refused in other words (tried on 4.0.8,
tests/e2e/test_check_connect.py). So the CONNECT names a principal of our own where clients' connections name theirs.

A broker with ``authenticateOriginalAuthData`` wants that principal's credentials, too, and answers AuthenticationError,
as it does where the proxy's own are wrong. A second login that names no principal tells the two apart. Where clients'
credentials are forwarded, the login has no credentials: without any, such a broker would let it in as its
``anonymousUserRole`` if it has one.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from lookup.brokers.discovery import CredentialVerdict, Endpoint
from proto.commands import error_name
from proto.connect_rules import (
    INVALID_ROLES_TEXT,
    NO_PROXY_VERSION,
    BrokerIdentity,
    OriginalCredentials,
    proxy_connect,
)
from proto.pulsar_pb2 import CommandConnect, ServerError
from proto.rpc_pb2 import OriginalData
from proxy import __version__
from proxy.config.types import Config
from proxy.runtime.loop.tasks import close_forcefully
from proxy.runtime.network.broker_link import BrokerLinkFactory, BrokerLinkFailed
from proxy.runtime.network.credentials import Credentials

CHECK_PRINCIPAL = "pulsar-trio-proxy-check"
"""The original principal of a login. It is authorized for nothing, and nothing is asked in its name."""

CHECK_CREDENTIALS = OriginalCredentials("token", CHECK_PRINCIPAL)
"""The original credentials of a login. They are no token: a broker that checks any refuses these."""

DETAIL_CHARACTERS_MAX = 300
"""Longest text about a login: a broker chooses a part of it."""


@dataclass(frozen=True, slots=True)
class LoginResult:
    """Result of one login. ``code``: Pulsar's, where the broker refused. ``original_data``: whether the broker checks
    clients' own credentials, where this was found out.
    """

    verdict: CredentialVerdict
    detail: str = ""
    code: int | None = None
    expires_at_unix_ms: int = 0
    original_data: OriginalData = OriginalData.ORIGINAL_DATA_UNKNOWN

    @property
    def connected(self) -> bool:
        """Return True if the broker said CONNECTED."""
        return self.verdict is CredentialVerdict.ACCEPTED and self.code is None


class LoginFactory:
    """Logins as the configuration that workers are told (proxy.config.worker_config) has clients' connections."""

    def __init__(self, link_factory: BrokerLinkFactory, config: Config) -> None:
        self._link_factory = link_factory
        self._config = config
        forwards = config.brokers.forward_authorization_credentials
        self.original: OriginalCredentials | None = CHECK_CREDENTIALS if forwards else None

    async def log_in(
        self, broker: Endpoint, new_credentials: Callable[[], Credentials], *, finds_original_data: bool = True
    ) -> LoginResult:
        """Shake hands with a broker as relays and lookups do, and close the connection.

        ``finds_original_data``: find out, too, whether the broker checks clients' own credentials. If it does, its log
        has a failed authentication; and the login's result is that of a second one, without a principal. Another proxy
        (``through_proxy``) checks none, but a broker behind it may.
        """
        if not (self._config.authentication.enabled and finds_original_data):
            return await self.log_in_as(broker, new_credentials(), "")
        login = await self.log_in_as(broker, new_credentials(), CHECK_PRINCIPAL)
        if self._config.brokers.through_proxy:
            return login
        if login.connected:
            return replace(login, original_data=OriginalData.ORIGINAL_DATA_IGNORED)
        if login.code != ServerError.AuthenticationError:
            return login
        without = await self.log_in_as(broker, new_credentials(), "")
        checked = without.verdict is CredentialVerdict.ACCEPTED
        return replace(without, original_data=OriginalData.ORIGINAL_DATA_CHECKED) if checked else without

    async def log_in_as(self, broker: Endpoint, credentials: Credentials, principal: str) -> LoginResult:
        """Shake hands with an original principal (empty: without one), and close the connection."""
        original = self.original if principal else None

        def make_connect(method: str, data: bytes) -> CommandConnect:
            return proxy_connect(BrokerIdentity(method, data, principal, original), __version__)

        try:
            link = await self._link_factory.open_link(broker, broker.addresses, credentials, make_connect)
        except BrokerLinkFailed as failed:
            left_out = self._config.authentication.enabled and not principal
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
