"""proxy.config.targets: all hosts at all addresses, and credentials to lose, do not go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from proxy.common.errors import ConfigError
from proxy.config.checks import validate_config
from proxy.config.targets import is_publicly_registrable
from proxy.config.types import Config

ALL_HOSTS = [
    "*",
    "**",
    "*.*",
    "?*",
    "*?",
    "???*",
    "[a-z]*",
    "broker-*",
    "*-broker",
    "*.com",
    "*com",
    "*example.com",
    "*.",
]
SOMEBODYS_HOSTS = [
    "broker",
    "broker.",
    "broker-0.example.com",
    "*.example.com",
    "*.pulsar-broker.ns.svc.cluster.local",
    "broker-*.example.com",
    "broker-?.dc?.example.com.",
]
ALL_ADDRESSES = [
    ["*"],
    ["*", "10.0.0.0/8"],
    ["0.0.0.0/0", "::/0"],
    ["0.0.0.0/0"],
    ["::/0"],
    ["0.0.0.0/1", "128.0.0.0/1"],
    ["0.0.0.0/1"],
    ["8.0.0.0/8", "9.0.0.0/8"],
    ["10.0.0.0/8", "2000::/3"],
    ["2a00::/12"],
]
SOMEBODYS_ADDRESSES = [["10.0.0.0/8"], ["10.0.0.0/8", "fd00::/8"], ["fc00::/7"], ["203.0.113.7"], ["2a01:4f8::/29"]]


@pytest.fixture
def secret(tmp_path: Path) -> str:
    """A file that can be read."""
    file = tmp_path / "secret"
    file.write_text("hush")
    return str(file)


def secrets(file: str) -> dict[str, dict[str, Any]]:
    """Each kind of what a broker is shown."""
    plain, tls = {"service_url": "pulsar://b"}, {"service_url": "pulsar+ssl://b"}
    own = {"certificate": file, "key": file}
    return {
        "a token": {**plain, "credentials": {"method": "token", "file": file}},
        "a token from the environment": {**plain, "credentials": {"method": "token", "token": "hush"}},
        "a password": {**plain, "credentials": {"method": "basic", "file": file}},
        "a ticket": {**plain, "credentials": {"method": "sasl", "file": file, "principal": "proxy/h@R"}},
        "an issuer's token": {**plain, "credentials": {"method": "oauth2", "file": file, "issuer_url": "https://i"}},
        "a token, over TLS": {**tls, "credentials": {"method": "token", "file": file}},
        "a certificate": {**tls, "tls": own, "credentials": {"method": "tls"}},
        "a certificate alone": {**tls, "tls": own},
        "clients' own": plain,
    }


def config(brokers: dict[str, Any], file: str) -> Config:
    authentication = {"enabled": True, "token": {"secret_key": file}}
    return msgspec.convert({"brokers": brokers, "authentication": authentication}, Config)


def refusal(brokers: dict[str, Any], file: str) -> str:
    with pytest.raises(ConfigError) as caught:
        validate_config(config(brokers, file))
    assert "hush" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("what", secrets(""))
@pytest.mark.parametrize("rules", [{"allowed_hosts": ["*"]}, {"allowed_addresses": ["*"]}], ids=["hosts", "addresses"])
def test_whatever_the_credentials_are(secret: str, what: str, rules: dict[str, Any]) -> None:
    brokers = secrets(secret)[what]
    validate_config(config(brokers, secret))
    text = refusal({**brokers, **rules}, secret)
    assert text.startswith(f"brokers.{next(iter(rules))}: ")
    shown = "clients' credentials" if what == "clients' own" else "the proxy's own c"
    assert shown in text
    assert "Leave both keys out" in text


@pytest.mark.parametrize("hosts", ALL_HOSTS)
def test_all_hosts(secret: str, hosts: str) -> None:
    brokers = secrets(secret)["a token"]
    assert refusal({**brokers, "allowed_hosts": ["b", hosts]}, secret).startswith(
        f'brokers.allowed_hosts: with "{hosts}"'
    )
    for addresses in ALL_ADDRESSES:
        refusal({**brokers, "allowed_hosts": [hosts], "allowed_addresses": addresses}, secret)
    for addresses in SOMEBODYS_ADDRESSES:
        validate_config(config({**brokers, "allowed_hosts": [hosts], "allowed_addresses": addresses}, secret))


@pytest.mark.parametrize("addresses", ALL_ADDRESSES)
def test_all_addresses(secret: str, addresses: list[str]) -> None:
    brokers = secrets(secret)["a token"]
    assert refusal({**brokers, "allowed_addresses": addresses}, secret).startswith("brokers.allowed_addresses: with ")
    for hosts in SOMEBODYS_HOSTS:
        validate_config(config({**brokers, "allowed_hosts": [hosts], "allowed_addresses": addresses}, secret))


@pytest.mark.parametrize("addresses", SOMEBODYS_ADDRESSES)
def test_somebodys_addresses(secret: str, addresses: list[str]) -> None:
    validate_config(config({**secrets(secret)["a token"], "allowed_addresses": addresses}, secret))


@pytest.mark.parametrize("hosts", SOMEBODYS_HOSTS)
def test_somebodys_hosts(secret: str, hosts: str) -> None:
    validate_config(config({**secrets(secret)["a token"], "allowed_hosts": [hosts]}, secret))
    assert not is_publicly_registrable(hosts)


def test_without_credentials_there_is_nothing_to_lose(secret: str) -> None:
    everything: dict[str, Any] = {"allowed_hosts": ["*"], "allowed_addresses": ["*"]}
    everything["forward_authorization_credentials"] = False
    validate_config(config({"service_url": "pulsar://b", **everything}, secret))
    validate_config(config({"service_url": "pulsar+ssl://b", "tls": {"trust": secret}, **everything}, secret))


def test_clients_credentials_are_lost_by_default_only_where_clients_have_any() -> None:
    """Security: they go to whichever host a client names."""
    brokers = {"service_url": "pulsar://b", "allowed_hosts": ["*"]}
    validate_config(msgspec.convert({"brokers": brokers}, Config))
    scram = {"enabled": True, "scram": {"file": __file__}}
    validate_config(msgspec.convert({"brokers": brokers, "authentication": scram}, Config))
    token = {"enabled": True, "token": {"secret_key": __file__}}
    with pytest.raises(ConfigError, match="be sent clients' credentials"):
        validate_config(msgspec.convert({"brokers": brokers, "authentication": token}, Config))


def test_another_proxy_is_the_only_one_that_is_shown_them(secret: str) -> None:
    brokers = {**secrets(secret)["a token"], "through_proxy": True, "allowed_hosts": ["*"], "allowed_addresses": ["*"]}
    validate_config(config(brokers, secret))
