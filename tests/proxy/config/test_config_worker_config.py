"""proxy.config.worker_config: what travels to workers, and which secrets do not."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from config_files import Files

from proxy.config.methods import one_round_methods
from proxy.config.types import Config
from proxy.config.worker_config import decode_config, encode_config, without_secrets


def test_a_configuration_is_equal_after_its_way_to_a_worker(files: Files, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"k")
    config = files.load(
        f"[brokers.credentials]\nmethod='token'\nfile='{tmp_path}/key'\n[limits]\nmax_connections = 5",
        BROKERS__ALLOWED_PORTS="[7]",
    )
    assert decode_config(encode_config(config)) == config
    assert decode_config(encode_config(Config())) == Config()


def test_workers_that_do_not_authenticate_get_no_secret() -> None:
    """Security: forwarders and lookup workers face strangers; keys and the names of their files are auth workers'."""
    config = msgspec.convert(
        {
            "brokers": {
                "credentials": {"method": "token", "token": "hush", "file": "hush", "principal": "hush"},
                "forward_authorization_credentials": True,
            },
            "authentication": {
                "enabled": True,
                "failure_delay_ms": 7,
                "anonymous_role": "guest",
                "proxy_roles": ["proxy-a"],
                "token": {"secret_key": "hush"},
                "tls": {},
                "basic": {"file": "hush"},
                "scram": {"file": "hush"},
                "sasl": {"principal": "hush", "keytab": "hush"},
                "oidc": {"allowed_issuers": ["hush"], "allowed_audiences": ["hush"]},
                "plugins": {"hush": {"password": "hush"}},
            },
            "limits": {"max_connections": 17},
        },
        Config,
    )
    told = without_secrets(config)
    assert b"hush" not in encode_config(told)
    assert decode_config(encode_config(told)) == told
    assert (told.authentication.enabled, told.authentication.failure_delay_ms) == (True, 7)
    assert told.authentication.proxy_roles == ("proxy-a",)
    assert told.authentication.anonymous_role == "guest", "its clients share by address"
    assert told.brokers.credentials is not None, "whether there are any is what they go by"
    assert told.brokers.forward_authorization_credentials
    assert told.limits == config.limits
    assert one_round_methods(told.authentication) == one_round_methods(config.authentication)
    without = msgspec.convert({"authentication": {"enabled": True, "scram": {"file": "hush"}}}, Config)
    assert not one_round_methods(without_secrets(without).authentication)


def test_without_secrets_nothing_else_is_missing() -> None:
    assert without_secrets(Config()) == Config()


NOTHING_FORWARDED: dict[str, Any] = {"brokers": {"forward_authorization_credentials": False}}


@pytest.mark.parametrize(
    ("authentication", "forwards"),
    [
        ({"token": {"secret_key": "hush"}}, True),
        ({"tls": {}, "scram": {"file": "hush"}, "anonymous_role": "guest"}, False),
        ({"tls": {}, "proxy_roles": ["proxy-a"]}, True),  # what a proxy's clients have brought
        ({"tls": {}, "plugins": {"own": {}}}, True),  # what it needs only the plugin knows
    ],
)
def test_workers_are_told_whether_anything_can_be_forwarded(authentication: dict[str, Any], forwards: bool) -> None:
    config = msgspec.convert({"authentication": {"enabled": True, **authentication}}, Config)
    assert config.brokers.forward_authorization_credentials, "by default"
    assert without_secrets(config).brokers.forward_authorization_credentials is forwards
    off = msgspec.convert({**NOTHING_FORWARDED, "authentication": {"enabled": True, **authentication}}, Config)
    assert not without_secrets(off).brokers.forward_authorization_credentials
