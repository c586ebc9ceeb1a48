"""Secrets of plugins do not get into the ConfigMap."""

from typing import Any

import pytest

from tests.deploy.chart import Refused, needs_tools, render

pytestmark = needs_tools

PLUGINS = "config.authentication.plugins"


def plugin(**options: Any) -> dict[str, Any]:
    return {"config": {"authentication": {"enabled": True, "plugins": {"voucher": options}}}}


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"password": "x"}, "password"),
        ({"password": 1234}, "password"),
        ({"ldap_bind_passwd": "x"}, "ldap_bind_passwd"),
        ({"clientSecret": "x"}, "clientSecret"),
        ({"access-token": "x"}, "access-token"),
        ({"API_KEY": "x"}, "API_KEY"),
        ({"key2": "x"}, "key2"),
        ({"apikey": "x"}, "apikey"),
        ({"private_key_pem": "x"}, "private_key_pem"),
        ({"tokens": ["x"]}, "tokens"),
        ({"keys": {"alice": "x"}}, "keys.alice"),
        ({"server": {"credentials": "x"}}, "server.credentials"),
        ({"servers": [{"url": "u"}, {"passphrase": "x"}]}, "servers[1].passphrase"),
    ],
)
def test_an_option_that_looks_like_a_secret_is_refused(options: dict[str, Any], path: str) -> None:
    with pytest.raises(Refused) as raised:
        render(**plugin(**options))
    assert f"{PLUGINS}.voucher.{path}: looks like a secret" in str(raised.value)
    assert "extraVolumes" in str(raised.value)
    assert "PULSAR_TRIO_PROXY__AUTHENTICATION__PLUGINS from it, the whole table (extraEnv" in str(raised.value)


def test_files_names_switches_and_limits_are_no_secrets() -> None:
    options = {
        "password_file": "/a",
        "tokenPath": "/b",
        "key_files": ["/c"],
        "keys": {"path": "/d"},
        "public_key": "x",
        "token_claim": "sub",
        "token": {"leeway": "x"},
        "require_token": True,
        "keys_lifetime_ms": 5,
        "secret": "",
        "vouchers_at": "https://example.org",
        "monkey": "x",
    }
    table = render(**plugin(**options)).configuration["authentication"]["plugins"]["voucher"]
    assert table == options
