"""Checks that types cannot express: keys that need each other, addresses, files that can be read."""

import ipaddress
import os
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from proto.addresses import AddressInvalid, parse_broker_url, parse_host_port
from proxy.common.audit_key import read_role_key
from proxy.common.deny_list import read_deny_list
from proxy.common.errors import ConfigError
from proxy.common.networks import is_loopback, parse_network
from proxy.common.suggestions import did_you_mean
from proxy.config.admin_token import read_admin_token
from proxy.config.binds import check_binds
from proxy.config.http import check_http, check_proxy_protocol, uses_broker_tls
from proxy.config.issuer_roles import check_allowed_roles
from proxy.config.principal_rules import compile_principal_rules
from proxy.config.proxy_roles import ALL_METHODS, ProxyRoles, check_proxy_roles, configured_methods
from proxy.config.quotas import check_quotas
from proxy.config.sni import has_tls_port
from proxy.config.targets import check_targets, is_publicly_registrable
from proxy.config.types import (
    Audit,
    Authentication,
    BrokerCredentials,
    Brokers,
    BrokerTls,
    Config,
    ListenerTls,
    OidcAuthentication,
    Strict,
    TokenAuthentication,
)

RUNTIME_DIR_BYTES_MAX = 80
"""The path of a Unix socket holds about 107 bytes."""

_HOST_PATTERN = re.compile(r"[A-Za-z0-9_.*?-]+\Z")

LIFETIME_MS_MIN = 1_000
"""See proto.session_clock.REAUTHENTICATION_INTERVAL_S_MIN."""


def validate_config(config: Config) -> Config:
    """Check a configuration and return it. Raises ConfigError, which names the key."""
    if len(os.fsencode(config.cluster.runtime_dir)) > RUNTIME_DIR_BYTES_MAX:
        raise ConfigError(f"cluster.runtime_dir: longer than {RUNTIME_DIR_BYTES_MAX} bytes")
    if not config.listener:
        raise ConfigError("listener: at least one is needed")
    for index, listener in enumerate(config.listener):
        _check(f"listener[{index}].bind", parse_host_port, listener.bind)
        for key in ("allowed_networks", "denied_networks", "proxy_protocol_sources"):
            for network in getattr(listener, key):
                _check(f"listener[{index}].{key}", parse_network, network)
        check_proxy_protocol(f"listener[{index}]", listener)
    _check("admin.bind", parse_host_port, config.admin.bind)
    _check_files("admin", config.admin, "token_file")
    _check_admin_token(config.admin.token_file)
    _check_audit(config.audit)
    _check_admin_hosts(config.admin.allowed_hosts)
    _check("brokers.service_url", parse_broker_url, config.brokers.service_url)
    for network in config.brokers.allowed_addresses:
        if network != "*":
            _check("brokers.allowed_addresses", ipaddress.ip_network, network)
    _check_port_pairs(config.brokers)
    if config.brokers.ejection_time_max_ms < config.brokers.ejection_time_ms:
        raise ConfigError("brokers.ejection_time_max_ms: shorter than brokers.ejection_time_ms")
    if config.brokers.ejection_by_relays and config.brokers.through_proxy:
        raise ConfigError("brokers.ejection_by_relays: not with brokers.through_proxy, whose relays are other brokers'")
    _check_tls(config)
    _check_sni(config)
    _check_credentials(config.brokers)
    check_http(config)
    check_targets(config)
    _check_authentication(config)
    _check_session(config)
    check_quotas(config.quota)
    check_binds(config)
    return config


def _check_admin_token(file: str) -> None:
    """Check the admin token here, since the admin worker has no vote on a new configuration."""
    try:
        if file:
            read_admin_token(file)
    except OSError as error:  # gone since it was opened just now
        raise ConfigError(f"admin.token_file: {file} cannot be read: {error.strerror}") from None


def _check_audit(audit: Audit) -> None:
    """Check that there is a file where one is wanted, and the key. Raises ConfigError."""
    if audit.output == "file" and not os.path.isabs(audit.file):  # noqa: PTH117 -- a path of the configuration is text
        raise ConfigError('audit.file: an absolute path is needed for output = "file"')
    if audit.output != "file" and audit.file:
        raise ConfigError('audit.file: has no effect without output = "file"')
    if audit.output == "journald" and audit.format != "json":
        raise ConfigError('audit.format: has no effect with output = "journald", of which entries have fields')
    if audit.role_key_file and audit.roles != "hashed":
        raise ConfigError('audit.role_key_file: has no effect without roles = "hashed"')
    if audit.role_key_file:
        read_role_key(audit.role_key_file)


def _check_admin_hosts(patterns: tuple[str, ...]) -> None:
    """Refuse what no host name matches, and what matches names of strangers. Raises ConfigError."""
    for pattern in patterns:
        if not _HOST_PATTERN.match(pattern):
            raise ConfigError(
                f"admin.allowed_hosts: {pattern!r} is no host name or pattern of such, without a port (IP addresses "
                "need no entry)"
            )
        if pattern != "*" and is_publicly_registrable(pattern):
            raise ConfigError(
                f'admin.allowed_hosts: strangers can register names that match "{pattern}"; name your own, as in '
                '"*.example.com", or "*" for no check at all'
            )


def _check_port_pairs(brokers: Brokers) -> None:
    """Refuse a port in two places: of two brokers' ports, the wrong one might be dialled. Raises ConfigError."""
    ports = list(chain.from_iterable(brokers.port_pairs))
    twice = next((port for port in ports if ports.count(port) > 1), None)
    if twice is not None:
        raise ConfigError(f"brokers.port_pairs: {twice} is there twice")


def _check_tls(config: Config) -> None:
    for key, tls in listener_tls(config):
        if tls.require_client_certificate and not tls.client_ca:
            raise ConfigError(f"{key}.require_client_certificate: client_ca is needed, too")
        if tls.client_crl and not tls.client_ca:
            raise ConfigError(f"{key}.client_crl: client_ca is needed, too")
        _check_files(key, tls, "certificate", "key", "client_ca", "client_crl")
        for number, further in enumerate(tls.certificates):
            _check_files(f"{key}.certificates[{number}]", further, "certificate", "key")
        _check_ciphers(key, tls)
        _check_session_tickets(key, tls)
    brokers = config.brokers
    _check_ciphers("brokers.tls", brokers.tls)
    if brokers.tls != BrokerTls() and not uses_broker_tls(config):
        raise ConfigError("brokers.tls: brokers.service_url does not begin with pulsar+ssl")
    if bool(brokers.tls.certificate) != bool(brokers.tls.key):
        raise ConfigError("brokers.tls: certificate and key are needed together")
    _check_files("brokers.tls", brokers.tls, "trust", "certificate", "key")


def listener_tls(config: Config) -> Iterator[tuple[str, ListenerTls]]:
    """Yield the TLS tables of all listeners, those for HTTP, too, with their keys."""
    of_kind = {
        "listener": [listener.tls for listener in config.listener],
        "http_listener": [listener.tls for listener in config.http_listener],
    }
    for name, tables in of_kind.items():
        yield from ((f"{name}[{index}].tls", tls) for index, tls in enumerate(tables) if tls is not None)


def _check_ciphers(key: str, tls: ListenerTls | BrokerTls) -> None:
    if tls.ciphers and tls.minimum_version == "1.3":
        raise ConfigError(f'{key}.ciphers: these are for TLS 1.2, which minimum_version = "1.3" refuses')


def _check_session_tickets(key: str, tls: ListenerTls) -> None:
    """Refuse tickets where who steals their key could read traffic, or a certificate would go unchecked."""
    if tls.session_tickets and tls.minimum_version != "1.3":
        raise ConfigError(
            f'{key}.session_tickets: needs minimum_version = "1.3": with TLS 1.2 the key of tickets, which is as old '
            "as the fork server, decrypts what was recorded of their sessions"
        )
    if tls.session_tickets and tls.client_ca:
        raise ConfigError(
            f"{key}.session_tickets: not together with client_ca: the certificate of a client that resumes a session "
            "is not checked again"
        )


def _check_sni(config: Config) -> None:
    """Refuse listeners with routing "sni" that could lead nowhere, or that have settings of no effect there."""
    brokers = config.brokers
    for index, listener in enumerate(config.listener):
        if listener.routing != "sni":
            continue
        key = f"listener[{index}]"
        if listener.tls is not None:
            raise ConfigError(f'{key}.tls: routing = "sni" passes TLS through to brokers; leave this table out')
        if brokers.through_proxy:
            raise ConfigError(f'{key}.routing: "sni" leads to brokers alone; leave it out, or brokers.through_proxy')
        if not has_tls_port(brokers):
            raise ConfigError(
                f'{key}.routing: "sni" needs brokers with TLS; name their ports for it in brokers.service_url, with '
                "pulsar+ssl, or in brokers.port_pairs beside those of brokers.service_url"
            )


# ---- credentials


def _check_credentials(brokers: Brokers) -> None:
    credentials = brokers.credentials
    if credentials is None:
        if brokers.through_proxy:
            raise ConfigError("brokers.through_proxy: needs brokers.credentials; the other proxy must know this one")
        return
    table = "brokers.credentials"
    if credentials.token and (credentials.method != "token" or credentials.file):
        raise ConfigError(f"{table}.token: is for method token, in place of a file")
    for key in _needed(credentials):
        if not getattr(credentials, key):
            raise ConfigError(f"{table}.{key}: is needed for method {credentials.method}")
    if credentials.method == "oauth2":
        _check_issuer(f"{table}.issuer_url", credentials.issuer_url, plain_on_loopback=True)
    if credentials.method == "tls" and not brokers.tls.certificate:
        raise ConfigError(f"{table}.method: tls needs brokers.tls.certificate")
    _check_files(table, credentials, "file", "trust")


def _needed(credentials: BrokerCredentials) -> tuple[str, ...]:
    if credentials.method == "token":
        return () if credentials.token else ("file",)
    return {"basic": ("file",), "tls": (), "sasl": ("file", "principal"), "oauth2": ("file", "issuer_url")}[
        credentials.method
    ]


# ---- authentication


def _check_authentication(config: Config) -> None:
    authentication = config.authentication
    _check_roles_and_providers(config)
    _check_deny_file(authentication)
    if authentication.token is not None:
        _check_token(authentication.token)
    if authentication.tls is not None and not any(tls.client_ca for _key, tls in listener_tls(config)):
        raise ConfigError("authentication.tls: no listener has tls.client_ca, so no client can bring a certificate")
    if authentication.tls is not None:
        rules = authentication.tls.principal_mapping_rules
        compile_principal_rules(rules, "authentication.tls.principal_mapping_rules")
    if authentication.oidc is not None:
        _check_oidc(authentication.oidc)
    if authentication.sasl is not None:
        _check("authentication.sasl.allowed_principals", _pattern, authentication.sasl.allowed_principals)
        _check_files("authentication.sasl", authentication.sasl, "keytab")
    for name in ("basic", "scram"):
        provider = getattr(authentication, name)
        if provider is not None:
            _check_files(f"authentication.{name}", provider, "file")


def _check_deny_file(authentication: Authentication) -> None:
    if not authentication.deny_file:
        return
    if not authentication.enabled:
        raise ConfigError("authentication.deny_file: needs authentication.enabled")
    _check_files("authentication", authentication, "deny_file")
    try:
        read_deny_list(authentication.deny_file)
    except OSError as error:  # gone since it was opened just now
        raise ConfigError(f"authentication.deny_file: {authentication.deny_file}: {error.strerror}") from None


def _check_roles_and_providers(config: Config) -> None:
    authentication = config.authentication
    role = authentication.anonymous_role
    if authentication.enabled and not _has_provider(authentication):
        raise ConfigError("authentication.enabled: no provider is configured, e.g. [authentication.token]")
    if not authentication.enabled and authentication.proxy_roles:
        raise ConfigError("authentication.proxy_roles: needs authentication.enabled")
    if not authentication.enabled and config.brokers.through_proxy:
        raise ConfigError("brokers.through_proxy: needs authentication.enabled; the other proxy wants a principal")
    if role and not role.strip():
        raise ConfigError("authentication.anonymous_role: is blank")
    if not authentication.plugins:  # what methods they bring, auth workers know, and `check`
        check_proxy_roles(authentication, configured_methods(authentication))
    if ProxyRoles(authentication.proxy_roles).contains_role(role):
        raise ConfigError("authentication.anonymous_role: every client would be a proxy of authentication.proxy_roles")


def _has_provider(authentication: Authentication) -> bool:
    names = ("token", "tls", "basic", "scram", "sasl", "oidc")
    return bool(authentication.plugins) or any(getattr(authentication, name) is not None for name in names)


def _check_token(token: TokenAuthentication) -> None:
    table = "authentication.token"
    if not (token.secret_key or token.public_key or token.further_secret_keys or token.further_public_keys):
        raise ConfigError(f"{table}: secret_key or public_key is needed")
    _check_files(table, token, "secret_key", "public_key")
    for key in ("further_secret_keys", "further_public_keys"):
        for file in getattr(token, key):
            _check_file(f"{table}.{key}", file)


def _check_oidc(oidc: OidcAuthentication) -> None:
    table = "authentication.oidc"
    for key in ("allowed_audiences",) if oidc.kubernetes else ("allowed_issuers", "allowed_audiences"):
        if not getattr(oidc, key):
            raise ConfigError(f"{table}.{key}: at least one is needed")
    for issuer in oidc.allowed_issuers:
        _check_issuer(f"{table}.allowed_issuers", issuer, plain=not oidc.require_https)
    check_allowed_roles(oidc)
    _check_files(table, oidc, "trust")
    if oidc.kubernetes is not None:
        if oidc.kubernetes.api_server:
            _check_issuer(f"{table}.kubernetes.api_server", oidc.kubernetes.api_server)
        _check_files(f"{table}.kubernetes", oidc.kubernetes, "token_file", "trust")


def _check_issuer(key: str, url: str, *, plain: bool = False, plain_on_loopback: bool = False) -> None:
    """Check an issuer's URL: https, as secrets travel, except on this machine or where the operator allows http."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError as error:
        raise ConfigError(f"{key}: {url} is no URL: {error}") from None
    if not host or parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(f"{key}: {url} is no URL of an issuer: a scheme, a host, perhaps a port and a path")
    allowed = plain or (plain_on_loopback and is_loopback(host))
    if parts.scheme not in ({"https", "http"} if allowed else {"https"}):
        raise ConfigError(f"{key}: {url} does not begin with https://")


# ---- session


def _check_session(config: Config) -> None:
    tables = {"session": config.session} | {f"listener[{index}]": one for index, one in enumerate(config.listener)}
    for name, table in tables.items():
        _check_methods(f"{name}.methods_max_reauth_ms", table.methods_max_reauth_ms, config.authentication)
    for key, lifetime_ms in _lifetimes(config):
        if lifetime_ms > 0 and not config.authentication.enabled:
            # No authentication would end: dangerous for an operator who relies on it.
            raise ConfigError(f"{key}: needs authentication.enabled")
        if 0 < lifetime_ms < LIFETIME_MS_MIN:
            raise ConfigError(f"{key}: shorter than {LIFETIME_MS_MIN} ms; no client is authenticated again faster")


def _check_methods(key: str, methods: Iterable[str], authentication: Authentication) -> None:
    for method in methods:
        if method not in ALL_METHODS and not authentication.plugins:  # their methods only auth workers know
            meant = did_you_mean(method, ALL_METHODS) or f"; there are: {', '.join(ALL_METHODS)}"
            raise ConfigError(f"{key}.{method[:64]}: there is no such method{meant}")


def _lifetimes(config: Config) -> Iterator[tuple[str, int]]:
    session = config.session
    yield "session.connections_max_reauth_ms", session.connections_max_reauth_ms
    for method, lifetime_ms in session.methods_max_reauth_ms.items():
        yield f"session.methods_max_reauth_ms.{method}", lifetime_ms
    for index, listener in enumerate(config.listener):
        yield f"listener[{index}].connections_max_reauth_ms", listener.connections_max_reauth_ms
        for method, lifetime_ms in listener.methods_max_reauth_ms.items():
            yield f"listener[{index}].methods_max_reauth_ms.{method}", lifetime_ms


# ---- single values


def _pattern(text: str) -> None:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"is not a regular expression: {error}") from None


def _check_files(table: str, values: Strict, *keys: str) -> None:
    """Check that the files under these keys can be read; an empty name stands for no file."""
    for key in keys:
        file = getattr(values, key)
        if file:
            _check_file(f"{table}.{key}", file)


def _check(key: str, parse: Any, value: str) -> None:
    try:
        parse(value)
    except (AddressInvalid, ValueError) as error:
        raise ConfigError(f"{key}: {error}") from None


def _check_file(key: str, file: str) -> None:
    try:
        with Path(file).open("rb") as stream:
            stream.read(1)
    except OSError as error:
        raise ConfigError(f"{key}: {file} cannot be read: {error.strerror}") from None
    except ValueError as error:  # a NUL in the name
        raise ConfigError(f"{key}: {file!r} cannot be read: {error}") from None
