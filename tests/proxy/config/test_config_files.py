"""proxy.config.files: which files the workers of a role read."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from proto.roles import Role
from proxy.common.files import SYSTEM_AUTHORITIES
from proxy.common.shape import without_none
from proxy.config.files import HOSTS, RESOLV_CONF, files_of_role
from proxy.config.types import Config

FILE_KEYS = {
    *(
        "file",
        "trust",
        "certificate",
        "key",
        "client_ca",
        "client_crl",
        "token_file",
        "keytab",
        "secret_key",
        "public_key",
    ),
    *("deny_file", "role_key_file", "further_secret_keys", "further_public_keys"),
}
"""The keys of the configuration that name files."""

EVERYTHING: dict[str, Any] = {
    "listener": [
        {"bind": "127.0.0.1:6650"},
        {
            "bind": "127.0.0.1:6651",
            "tls": {
                "certificate": "/l/c",
                "key": "/l/k",
                "client_ca": "/l/ca",
                "client_crl": "/l/crl",
                "certificates": [{"certificate": "/l/c1", "key": "/l/k1"}, {"certificate": "/l/c2", "key": "/l/k2"}],
            },
        },
    ],
    "brokers": {
        "service_url": "pulsar+ssl://b",
        "tls": {"trust": "/b/ca", "certificate": "/b/c", "key": "/b/k"},
        "credentials": {"method": "oauth2", "file": "/b/account", "trust": "/b/issuer"},
    },
    "admin": {"token_file": "/admin"},
    "audit": {"role_key_file": "/roles"},
    "authentication": {
        "deny_file": "/denied",
        "token": {
            "secret_key": "/t/s",
            "public_key": "/t/p",
            "further_secret_keys": ["/t/s2"],
            "further_public_keys": ["/t/p2", "/t/p3"],
        },
        "basic": {"file": "/basic"},
        "scram": {"file": "/scram"},
        "sasl": {"principal": "p/h@R", "keytab": "/keytab"},
        "oidc": {
            "allowed_issuers": ["https://i"],
            "allowed_audiences": ["a"],
            "trust": "/oidc",
            "kubernetes": {"token_file": "/kube/token", "trust": "/kube/ca"},
        },
    },
}


def config_of(tables: dict[str, Any]) -> Config:
    return msgspec.convert(tables, Config)


def files_below(value: Any) -> set[str]:
    """The values of all keys that name files."""
    found: set[str] = set()
    for key, one in value.items() if isinstance(value, dict) else enumerate(value):
        if key in FILE_KEYS:
            found |= {one} if isinstance(one, str) else set(one)
        elif isinstance(one, dict | list | tuple):
            found |= files_below(one)
    return found


def test_each_file_of_the_configuration_is_of_the_roles_that_read_it() -> None:
    """Security: no worker gets another role's keys."""
    config = config_of(EVERYTHING)
    broker_tls = {"/b/ca", "/b/c", "/b/k"}
    of_auth = files_below(EVERYTHING["authentication"]) | {"/b/account", "/b/issuer"}
    assert files_of_role(Role.ADMIN, config) == {"/admin"}
    of_listener = {"/l/c", "/l/k", "/l/ca", "/l/crl", "/l/c1", "/l/k1", "/l/c2", "/l/k2"}
    assert files_of_role(Role.FORWARDER, config) == {RESOLV_CONF, HOSTS, "/denied", "/roles"} | of_listener | broker_tls
    assert files_of_role(Role.LOOKUP, config) == {RESOLV_CONF, HOSTS} | broker_tls
    assert files_of_role(Role.AUTH, config) == {RESOLV_CONF, HOSTS} | of_auth


def test_no_file_of_the_configuration_is_forgotten() -> None:
    """A key of a new table has to be in EVERYTHING, and then in a role's files."""
    config = config_of(EVERYTHING)
    named = files_below(msgspec.to_builtins(config)) - {""}
    assert named == files_below(EVERYTHING)
    roles = (Role.ADMIN, Role.AUTH, Role.LOOKUP, Role.HTTP, Role.FORWARDER)
    read = frozenset().union(*(files_of_role(role, config) for role in roles))
    assert read - {RESOLV_CONF, HOSTS} == named
    fields = [field for kind in _structs(Config) for field in msgspec.structs.fields(kind) if field.type is not bool]
    named_so = ("file", "key", "keys", "keytab", "trust", "certificate", "_ca", "_crl")
    assert {field.name for field in fields if field.name.endswith(named_so)} <= FILE_KEYS


def _structs(kind: Any) -> set[Any]:
    """A table's type and those of all tables below it."""
    found = {kind}
    for field in msgspec.structs.fields(kind):
        type_ = without_none(field.type)
        for one in (type_, *getattr(type_, "__args__", ())):
            if isinstance(one, type) and issubclass(one, msgspec.Struct):
                found |= _structs(one)
    return found


@pytest.mark.parametrize(
    ("tables", "roles"),
    [
        ({"brokers": {"service_url": "pulsar+ssl://b"}}, {Role.LOOKUP, Role.FORWARDER}),
        ({"brokers": {"service_url": "pulsar://b", "credentials": {"method": "oauth2"}}}, {Role.AUTH}),
        (
            {"authentication": {"oidc": {"allowed_issuers": ["https://i"], "allowed_audiences": ["a"]}}},
            {Role.AUTH},
        ),
        ({"brokers": {"service_url": "pulsar://b", "tls": {"trust": "/unused"}}}, set()),
    ],
    ids=["brokers", "oauth2", "oidc", "none"],
)
def test_the_systems_authorities_are_for_those_that_trust_them(tables: dict[str, Any], roles: set[Role]) -> None:
    tables = {"brokers": {"service_url": "pulsar://b"}, **tables}
    config = config_of(tables)
    assert {
        role
        for role in (Role.ADMIN, Role.AUTH, Role.LOOKUP, Role.FORWARDER)
        if SYSTEM_AUTHORITIES in files_of_role(role, config)
    } == roles
    assert "/unused" not in files_of_role(Role.FORWARDER, config)
