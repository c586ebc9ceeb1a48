"""The files that workers read after their start, by role: what the supervisor opens for them."""

from collections.abc import Iterable, Iterator

from proto.addresses import speaks_tls
from proto.roles import Role
from proxy.common.files import SYSTEM_AUTHORITIES
from proxy.config.http import web_uses_tls
from proxy.config.types import Authentication, Brokers, Config, HttpListener, Listener, ListenerTls

RESOLV_CONF = "/etc/resolv.conf"
HOSTS = "/etc/hosts"


def files_of_role(role: Role, config: Config) -> frozenset[str]:
    """Return the paths of the files that workers of a role may read, and SYSTEM_AUTHORITIES where they need these."""
    return frozenset(file for file in _FILES[role](config) if file)


def _admin_files(config: Config) -> Iterator[str]:
    yield config.admin.token_file


def _forwarder_files(config: Config) -> Iterator[str]:
    yield from _broker_tls_files(config.brokers)
    yield from _files_for_clients(config, config.listener)


def _http_files(config: Config) -> Iterator[str]:
    if web_uses_tls(config):
        yield from _tls_files(config.brokers)
    yield from _files_for_clients(config, config.http_listener)


def _files_for_clients(config: Config, listeners: Iterable[Listener | HttpListener]) -> Iterator[str]:
    yield from (RESOLV_CONF, HOSTS)  # for the names of brokers.service_url, or of upstreams
    yield config.authentication.deny_file
    yield config.audit.role_key_file
    for listener in listeners:
        yield from _listener_files(listener.tls)


def _listener_files(tls: ListenerTls | None) -> Iterator[str]:
    if tls is not None:
        yield from (tls.certificate, tls.key, tls.client_ca, tls.client_crl)
        for further in tls.certificates:
            yield from (further.certificate, further.key)


def _lookup_files(config: Config) -> Iterator[str]:
    yield from (RESOLV_CONF, HOSTS)
    yield from _broker_tls_files(config.brokers)


def _broker_tls_files(brokers: Brokers) -> Iterator[str]:
    if speaks_tls(brokers.service_url):
        yield from _tls_files(brokers)


def _tls_files(brokers: Brokers) -> Iterator[str]:
    yield from (brokers.tls.trust or SYSTEM_AUTHORITIES, brokers.tls.certificate, brokers.tls.key)


def _auth_files(config: Config) -> Iterator[str]:
    yield from (RESOLV_CONF, HOSTS)  # for the names of issuers
    yield from _provider_files(config.authentication)
    credentials = config.brokers.credentials
    if credentials is not None:
        yield credentials.file
        if credentials.method == "oauth2":
            yield credentials.trust or SYSTEM_AUTHORITIES


def _provider_files(authentication: Authentication) -> Iterator[str]:
    yield authentication.deny_file
    token = authentication.token
    if token is not None:
        yield from (token.secret_key, token.public_key, *token.further_secret_keys, *token.further_public_keys)
    if authentication.basic is not None:
        yield authentication.basic.file
    if authentication.scram is not None:
        yield authentication.scram.file
    if authentication.sasl is not None:
        yield authentication.sasl.keytab
    if authentication.oidc is not None:
        yield authentication.oidc.trust or SYSTEM_AUTHORITIES
        if authentication.oidc.kubernetes is not None:
            yield from (authentication.oidc.kubernetes.token_file, authentication.oidc.kubernetes.trust)


_FILES = {
    Role.ADMIN: _admin_files,
    Role.AUTH: _auth_files,
    Role.LOOKUP: _lookup_files,
    Role.FORWARDER: _forwarder_files,
    Role.HTTP: _http_files,
}
