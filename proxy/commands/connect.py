"""``check --connect``: from this machine to every broker, with the proxy's own credentials. No cluster needs to run.

Each broker is asked as workers do it: its name is resolved, it is dialled (TLS included), and a CONNECT is taken
through all rounds. Nothing is asked on such a connection, so nothing changes at the broker, but its log has a line for
each. The second and third CONNECT, which show whether the broker looks at roles and credentials at all, are ones that
it should refuse. Of a broker that checks clients' own credentials too, there is a line for each method of clients.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

from auth.state import BrokerAuthentication, CredentialsUnavailable
from lookup.brokers.discovery import BrokerDiscovery, CredentialVerdict, Endpoint
from lookup.brokers.login import CHECK_PRINCIPAL, LoginFactory, LoginResult
from lookup.brokers.probe import probe
from proto.addresses import HostPort, parse_broker_url, speaks_tls
from proto.pulsar_pb2 import ServerError
from proto.rpc_pb2 import OriginalData, Status
from proxy import SERVER_VERSION
from proxy.config.binds import listener_binds
from proxy.config.methods import refused_methods
from proxy.config.types import Config
from proxy.config.worker_config import without_secrets
from proxy.runtime.dns.resolver import Resolver
from proxy.runtime.loop.tasks import seconds
from proxy.runtime.network.broker_link import BrokerLinkFactory
from proxy.runtime.network.credentials import Credentials, NoCredentials
from proxy.runtime.network.dialing import Dialer
from proxy.runtime.rpc.errors import RpcCallRefused

BROKERS_MAX = 64
"""Brokers that are tried; of more, the first ones, and then not all is well."""
AT_A_TIME = 8


@dataclass(frozen=True, slots=True)
class Finding:
    """One line for the operator."""

    good: bool
    text: str


class InProcessCredentials:
    """The rounds of one authentication at one broker, without an auth worker."""

    def __init__(self, authentication: BrokerAuthentication, broker_host: str) -> None:
        self._method = authentication.method
        self._state = authentication.get_auth_data(broker_host)

    @property
    def complete(self) -> bool:
        """Return True if the broker owes no further proof."""
        return self._state.is_complete()

    @property
    def expires_at_unix_ms(self) -> int:
        """End of the last answer's credentials in Unix milliseconds; 0: never, or unknown."""
        return self._state.expires_at_unix_ms

    async def auth_data_for(self, challenge: bytes | None) -> tuple[str, bytes]:
        """Return method and data, as an auth worker would. Raises RpcError."""
        try:
            return self._method, await self._state.authenticate(challenge)
        except CredentialsUnavailable as error:
            raise RpcCallRefused(Status.INVALID_REQUEST, str(error)) from None


@dataclass(frozen=True, slots=True)
class ClientMethods:
    """The methods by which clients come; of these ``several_rounds`` are plugins' that need more than one round."""

    names: tuple[str, ...] = ()
    several_rounds: tuple[str, ...] = ()


async def check_brokers(
    config: Config, authentication: BrokerAuthentication | None, methods: ClientMethods
) -> list[Finding]:
    """Try every broker of ``brokers.service_url``."""
    async with discovered(config) as found:
        findings = [Finding(good=False, text=f"{name}: not resolved: {why}") for name, why in found.failures.items()]
        endpoints = found.endpoints[:BROKERS_MAX]
        told: dict[Endpoint, list[Finding]] = {}
        trial = _BrokerCheck(config, authentication, methods)
        at_a_time = trio.CapacityLimiter(AT_A_TIME)

        async def try_one(endpoint: Endpoint) -> None:
            async with at_a_time:
                told[endpoint] = await trial.findings(endpoint)

        async with trio.open_nursery() as nursery:
            for endpoint in endpoints:
                nursery.start_soon(try_one, endpoint)
        for endpoint in endpoints:
            findings += told[endpoint]
        if len(found.endpoints) > BROKERS_MAX:
            left = len(found.endpoints) - BROKERS_MAX
            were = "1 more broker was" if left == 1 else f"{left} more brokers were"
            text = f"{were} not tried: {BROKERS_MAX} at most are. Check the rest with a brokers.service_url of its own"
            findings.append(Finding(good=False, text=text))
        if not found.endpoints and not findings:
            findings.append(Finding(good=False, text=f"{config.brokers.service_url} names no broker"))
        return findings


@asynccontextmanager
async def discovered(config: Config) -> AsyncIterator[BrokerDiscovery]:
    """Resolve the names of the URL, each once."""
    brokers = config.brokers
    async with trio.open_nursery() as nursery:
        resolver = Resolver(
            nursery,
            timeout_s=seconds(brokers.connect_timeout_ms),
            ttl_max_s=seconds(brokers.dns_ttl_max_ms),
        )
        discovery = BrokerDiscovery(parse_broker_url(brokers.service_url), resolver)
        nursery.start_soon(discovery.run)
        await discovery.wait_until_all_resolved()
        yield discovery
        nursery.cancel_scope.cancel()


def login_factory(config: Config, dialer: Dialer) -> LoginFactory:
    """Return logins as those of lookup workers."""
    link_factory = BrokerLinkFactory(dialer, config.limits.max_broker_frame_bytes, SERVER_VERSION)
    return LoginFactory(link_factory, without_secrets(config))


def own_credentials(authentication: BrokerAuthentication | None, broker: Endpoint) -> Credentials:
    """Return the proxy's own credentials for one handshake."""
    return NoCredentials() if authentication is None else InProcessCredentials(authentication, broker.host)


class _BrokerCheck:
    """The logins at one broker, and the findings that follow."""

    def __init__(self, config: Config, authentication: BrokerAuthentication | None, methods: ClientMethods) -> None:
        self._config = config
        self._authentication = authentication
        self._methods = methods
        self._dialer = Dialer(config.brokers, listener_binds(config))
        self._logins = login_factory(config, self._dialer)

    async def findings(self, broker: Endpoint) -> list[Finding]:
        """Try one broker, in at most five times ``brokers.handshake_timeout_ms``."""
        where = f"{HostPort(broker.host, broker.port)} at {' and '.join(broker.addresses)}"
        reachable, detail = await probe(self._dialer, broker, broker.addresses)
        if not reachable:
            return [Finding(good=False, text=f"{where}: {detail}")]
        tls = " by TLS, with a certificate that is accepted" if speaks_tls(self._config.brokers.service_url) else ""
        login = await self._logins.log_in(broker, lambda: self._own(broker))
        shown = await self._login_finding(broker, login)
        of_clients = self._client_findings(login)
        return [
            Finding(good=shown.good, text=f"{where}: answers{tls}; {shown.text}"),
            *(Finding(good=one.good, text=f"{where}: {one.text}") for one in of_clients),
        ]

    def _client_findings(self, login: LoginResult) -> list[Finding]:
        """Return what clients of each method meet at a broker that checks their own credentials."""
        if login.original_data != OriginalData.ORIGINAL_DATA_CHECKED:
            return []
        methods = self._methods
        refused = refused_methods(self._config, methods.names, methods.several_rounds)
        return [
            Finding(good=method not in refused, text=f"clients by {method}: {refused.get(method, _ARE_FORWARDED)}")
            for method in methods.names
        ]

    async def _login_finding(self, broker: Endpoint, login: LoginResult) -> Finding:
        failure = self._failure(login)
        if failure:
            return Finding(good=False, text=failure)
        if self._authentication is None:
            return Finding(good=True, text="it takes the proxy without credentials (brokers.credentials is not set)")
        if self._config.authentication.enabled:
            return await self._role(broker, login)
        if login.connected:
            return await self._credentials_finding(broker, "")
        return Finding(
            good=False,
            text="it accepts the proxy's credentials, but wants to be told a principal, which clients of this proxy do "
            f"not have (authentication.enabled = false): {login.detail}",
        )

    def _failure(self, login: LoginResult) -> str:
        """Return what is wrong, apart from the role; "" where nothing is."""
        if login.connected:
            return ""
        if login.code is None:
            return f"no login: {login.detail}"
        if self._authentication is None:
            return f"it refuses the proxy ({login.detail}), which has no brokers.credentials"
        if login.code == ServerError.AuthenticationError:
            return f"it does NOT accept the proxy's credentials ({login.detail})"
        if login.code == ServerError.AuthorizationError:
            return ""
        advice = ""
        if login.verdict is CredentialVerdict.REFUSED and self._config.brokers.through_proxy:
            advice = "; is this proxy's role among the authentication.proxy_roles of the proxy there?"
        return f"it refuses the proxy ({login.detail}){advice}"

    async def _role(self, broker: Endpoint, login: LoginResult) -> Finding:
        """Find whether the role is among proxyRoles: such a role must name a principal, any other must not."""
        if login.verdict is CredentialVerdict.REFUSED:
            return Finding(
                good=False,
                text=f"it accepts the proxy's credentials, but their role is NOT in its proxyRoles ({login.detail})",
            )
        checked = login.original_data == OriginalData.ORIGINAL_DATA_CHECKED
        without = login if checked else await self._logins.log_in_as(broker, self._own(broker), "")
        if without.verdict is CredentialVerdict.ACCEPTED and not without.connected:
            return Finding(good=True, text="it accepts the proxy's credentials, and their role is in its proxyRoles")
        if without.connected:
            return await self._credentials_finding(broker, "" if checked else CHECK_PRINCIPAL)
        return Finding(good=True, text=f"it takes the proxy; whether it looks at roles is not known ({without.detail})")

    async def _credentials_finding(self, broker: Endpoint, principal: str) -> Finding:
        """Find whether a broker that took the credentials also accepts a client without any."""
        nothing = await self._logins.log_in_as(broker, NoCredentials(), principal)
        if nothing.code == ServerError.AuthenticationError:
            return Finding(good=True, text="it accepts the proxy's credentials; it does not look at proxyRoles")
        if nothing.connected:
            return Finding(
                good=True, text="it takes any client, with or without credentials: nothing is shown of the proxy's"
            )
        return Finding(good=True, text=f"it takes the proxy; more is not known ({nothing.detail})")

    def _own(self, broker: Endpoint) -> Credentials:
        return own_credentials(self._authentication, broker)


_ARE_FORWARDED = "the broker wants their own credentials, too (authenticateOriginalAuthData), which are forwarded"

NOT_SHOWN = (
    "not shown by this: whether clients' credentials are accepted, what their principals may do, and whether the "
    "brokers that lookups name are allowed as targets"
)
