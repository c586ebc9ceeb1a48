"""proxy.config.proxy_roles: a role by any method, or by one alone; an entry can be read in one way only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from proxy.common.errors import ConfigError
from proxy.config.checks import validate_config
from proxy.config.proxy_roles import ProxyRole, ProxyRoles, check_proxy_roles, configured_methods
from proxy.config.types import Authentication, Config


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A file that can be read."""
    (tmp_path / "file").write_text("x")
    return str(tmp_path / "file")


def config(file: str, *roles: str, **tables: Any) -> Config:
    """Clients may come by certificate, token and SCRAM."""
    listener = {"tls": {"certificate": file, "key": file, "client_ca": file}}
    providers = {"token": {"secret_key": file}, "tls": {}, "scram": {"file": file}}
    authentication = {"enabled": True, **providers, "proxy_roles": roles, **tables}
    return msgspec.convert({"listener": [listener], "authentication": authentication}, Config)


@pytest.mark.parametrize(
    ("entry", "parsed"),
    [
        ("proxy-a", ProxyRole("*", "proxy-a")),
        ("tls:proxy-a", ProxyRole("tls", "proxy-a")),
        ("*:proxy-a", ProxyRole("*", "proxy-a")),
        ("*:system:serviceaccount:ns:proxy", ProxyRole("*", "system:serviceaccount:ns:proxy")),
        ("token:system:proxy", ProxyRole("token", "system:proxy")),
        ("sasl:proxy/host@REALM", ProxyRole("sasl", "proxy/host@REALM")),
        ("SCRAM-SHA-256:proxy", ProxyRole("SCRAM-SHA-256", "proxy")),
    ],
)
def test_an_entry(entry: str, parsed: ProxyRole) -> None:
    assert ProxyRole.parse(entry) == parsed


@pytest.mark.conforms("pip-1.31")
def test_a_role_is_a_proxy_by_any_method_or_by_the_method_of_its_entry() -> None:
    roles = ProxyRoles(["a", "tls:b", "token:c", "tls:c"])
    proxies = {(role, method) for role in "abcd" for method in ("tls", "token", "sasl") if roles.includes(role, method)}
    assert proxies == {("a", "tls"), ("a", "token"), ("a", "sasl"), ("b", "tls"), ("c", "tls"), ("c", "token")}
    assert [role for role in "abcd" if roles.contains_role(role)] == ["a", "b", "c"]


@pytest.mark.parametrize("entry", ["a", "tls:a", "token:a:b", "*:a:b", "SCRAM-SHA-512:a"])
def test_entries_that_are_in_order(file: str, entry: str) -> None:
    validate_config(config(file, entry))


@pytest.mark.parametrize(
    "entry", ["tsl:proxy-a", "TLS:proxy-a", "basic:proxy-a", "scram-sha-256:proxy-a", "system:proxy", "none:a", ":a"]
)
def test_a_method_that_has_no_provider(file: str, entry: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate_config(config(file, "b", entry))
    method = entry.partition(":")[0]
    assert str(caught.value).startswith(f'authentication.proxy_roles: "{entry}" begins with "{method}", ')
    assert "there are: SCRAM-SHA-256, SCRAM-SHA-512, tls, token" in str(caught.value)
    assert str(caught.value).endswith(f'"*:{entry}"')


@pytest.mark.parametrize("entry", ["tls:", "tls: ", "*:", " "])
def test_an_entry_without_a_role(file: str, entry: str) -> None:
    with pytest.raises(ConfigError, match=r"^authentication\.proxy_roles: .* names no role"):
        validate_config(config(file, entry))


@pytest.mark.parametrize("entry", ["guest", "tls:guest", "*:guest"])
def test_an_anonymous_role_that_is_a_proxy_role_is_refused(file: str, entry: str) -> None:
    with pytest.raises(ConfigError, match=r"^authentication\.anonymous_role: "):
        validate_config(config(file, entry, anonymous_role="guest"))


def test_the_methods_of_plugins_are_known_once_they_are_made(file: str) -> None:
    """By the auth worker, and `check`."""
    with_plugin = config(file, "mine:proxy-a", plugins={"own": {}})
    assert validate_config(with_plugin) is with_plugin
    check_proxy_roles(with_plugin.authentication, {"token", "mine"})
    with pytest.raises(ConfigError, match=r"^authentication\.proxy_roles: .mine:proxy-a. begins with"):
        check_proxy_roles(with_plugin.authentication, {"token"})


def test_the_methods_of_all_providers() -> None:
    everything = {
        "sasl": {"principal": "p", "keytab": "f"},
        "oidc": {"allowed_issuers": ["i"], "allowed_audiences": ["a"]},
        "basic": {"file": "f"},
    }
    assert configured_methods(msgspec.convert(everything, Authentication)) == {"sasl", "token", "basic"}
