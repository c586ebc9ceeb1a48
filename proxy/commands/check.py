"""The command ``check``: constructs once what workers construct from a configuration."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
import trio

from auth.broker_credentials import broker_authentication
from auth.jwt_rules import claimed_expiry_unix_ms
from auth.registry import ProviderRegistry, configured_providers
from auth.state import BrokerAuthentication, CredentialsUnavailable
from proto.addresses import speaks_tls
from proxy.admin.service import TokenCheck
from proxy.commands.connect import ClientMethods
from proxy.common.errors import ConfigError
from proxy.config.checks import listener_tls
from proxy.config.http import http_warnings, web_uses_tls
from proxy.config.methods import ANONYMOUS, forwarding_warnings
from proxy.config.proxy_roles import check_proxy_roles
from proxy.config.types import Config
from proxy.forwarder.listen.transports import listener_transports
from proxy.http.listeners import http_transports
from proxy.http.upstream import dial_brokers
from proxy.runtime.network.certificate_ends import CRL_KEY, crl_warning, read_ends
from proxy.runtime.network.dialing import Dialer
from proxy.runtime.network.kernel_tls import kernel_tls_obstacle
from proxy.runtime.network.tls import broker_certificates, listener_certificates
from proxy.runtime.process import seccomp
from proxy.supervisor.startup.sockets import StartFailed, runtime_dir_obstacle


async def check_objects(config: Config) -> tuple[BrokerAuthentication | None, ClientMethods]:
    """Construct what workers construct from a configuration; return the proxy's credentials at brokers, and the
    methods of clients. Raises ConfigError.
    """
    await trio.lowlevel.checkpoint()
    listener_transports(config)
    Dialer(config.brokers)
    http_transports(config)
    if config.http_listener and web_uses_tls(config):
        dial_brokers(config.brokers)
    TokenCheck(config.admin)
    registry = ProviderRegistry(config.authentication, configured_providers)
    check_proxy_roles(config.authentication, registry.methods)
    anonymous = (ANONYMOUS,) if config.authentication.anonymous_role else ()
    methods = ClientMethods((*registry.methods, *anonymous), registry.several_round_methods)
    return broker_authentication(config.brokers.credentials), methods


async def find_warnings(config: Config, credentials: BrokerAuthentication | None, methods: ClientMethods) -> list[str]:
    """Find problems of the moment, which a replaced file or another user may solve, and what clients may meet. Raises
    ConfigError.
    """
    return [
        *_runtime_dir(config.cluster.runtime_dir),
        *_seccomp(),
        *await _credentials(config, credentials),
        *_certificates(config),
        *_kernel_tls(config.relay.kernel_tls),
        *_sni_warnings(config),
        *_header_warnings(config),
        *http_warnings(config),
        *forwarding_warnings(config, methods.names, methods.several_rounds),
    ]


def _certificates(config: Config) -> Iterator[str]:
    files = broker_certificates(config.brokers.tls)
    for key, tls in listener_tls(config):
        files += listener_certificates(key, tls)
    now = time.time()
    for key, end in read_ends(files).items():
        if key.endswith(CRL_KEY) and (event := crl_warning(end, now)):
            yield f"{key}: {event}"
        elif end <= now:
            yield f"{key}: a certificate has expired"


def _kernel_tls(setting: str) -> Iterator[str]:
    if reason := kernel_tls_obstacle(setting):
        yield f'relay.kernel_tls: "{setting}" moves no relay into the kernel on this machine: {reason}'


def _sni_warnings(config: Config) -> Iterator[str]:
    for index, listener in enumerate(config.listener):
        if listener.routing == "sni" and config.authentication.enabled:
            yield (
                f'listener[{index}].routing: "sni" passes TLS through: the broker alone authenticates these clients; '
                "[authentication] and [session] do not apply to them"
            )


def _header_warnings(config: Config) -> Iterator[str]:
    mode, speaks = config.brokers.proxy_protocol, speaks_tls(config.brokers.service_url)
    if mode == "before_tls" and speaks and not config.brokers.through_proxy:
        yield 'brokers.proxy_protocol: Pulsar\'s brokers expect the header "within_tls"; other receivers "before_tls"'
    for index, listener in enumerate(config.listener):
        if mode == "within_tls" and listener.routing == "sni":
            yield (
                f'listener[{index}].routing: with "sni" TLS is the client\'s own, so brokers.proxy_protocol = '
                '"within_tls" sends no header for these clients'
            )


def _runtime_dir(path: str) -> Iterator[str]:
    """Warn only where another user could start: a service often runs as another user than the one who checks."""
    try:
        obstacle = runtime_dir_obstacle(path)
    except StartFailed as error:
        raise ConfigError(str(error)) from None
    if obstacle:
        yield f"{obstacle}; `serve` would not start as this user"


def _seccomp() -> Iterator[str]:
    if not seccomp.is_available():
        yield "the kernel has no seccomp filters here: a worker that was taken over could execute programs"


async def _credentials(config: Config, credentials: BrokerAuthentication | None) -> list[str]:
    table = config.brokers.credentials
    if table is None or credentials is None or table.method != "token":
        return []
    try:
        token = await credentials.get_auth_data("").authenticate(None)
    except CredentialsUnavailable:
        return []
    return list(_expired("the proxy's token (brokers.credentials)", claimed_expiry_unix_ms(token)))


def _expired(what: str, expires_at_unix_ms: int) -> Iterator[str]:
    ago_s = time.time() - expires_at_unix_ms / 1000
    if expires_at_unix_ms and ago_s >= 0:
        yield f"{what} has expired {ago_s:.0f} s ago: brokers refuse it"


@contextmanager
def suppress_logs() -> Iterator[None]:
    """Drop log entries: the command prints its findings itself."""
    before = structlog.get_config()
    structlog.configure(processors=[_drop])
    try:
        yield
    finally:
        structlog.configure(**before)


def _drop(_logger: object, _method: str, _entry: object) -> dict[str, object]:
    raise structlog.DropEvent
