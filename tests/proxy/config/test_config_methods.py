"""proxy.config.methods: whose credentials can be forwarded, and what is said of the others."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from proto.connect_rules import original_credentials
from proto.pulsar_pb2 import CommandConnect
from proxy.config.methods import client_methods, forwarding_warnings, not_forwarded_methods, refused_methods
from proxy.config.proxy_roles import ALL_METHODS
from proxy.config.types import Config

EVERY: dict[str, Any] = {
    "token": {},
    "tls": {},
    "basic": {"file": "f"},
    "scram": {"file": "f"},
    "sasl": {"principal": "p", "keytab": "k"},
    "anonymous_role": "guest",
}
WANTS = "the broker wants the client's own credentials (authenticateOriginalAuthData)"


def config(authentication: dict[str, Any], **brokers: Any) -> Config:
    return msgspec.convert({"authentication": {"enabled": True, **authentication}, "brokers": brokers}, Config)


def test_all_methods_are_known() -> None:
    assert client_methods(config(EVERY).authentication) == set(ALL_METHODS)
    assert client_methods(config({"token": {}, "plugins": {"own": {}}}).authentication) == {"token", "own"}
    assert not_forwarded_methods(ALL_METHODS).keys() == set(ALL_METHODS) - {"token", "basic"}


@pytest.mark.parametrize("method", sorted({"token", "basic", "tls"}))
def test_the_methods_not_forwarded_are_those_that_forwarders_do_not_forward(method: str) -> None:
    connect = CommandConnect(auth_method_name=method, auth_data=b"something")
    forwarded = original_credentials(connect, from_proxy=False) is not None
    assert forwarded == (method not in not_forwarded_methods([method]))


def test_a_sentence_for_each_method() -> None:
    refused = refused_methods(config(EVERY))
    assert refused["tls"] == f"{WANTS}, and a certificate cannot be forwarded: set it to false at the brokers"
    assert "a SCRAM exchange cannot be forwarded" in refused["SCRAM-SHA-256"]
    assert "a Kerberos ticket cannot be forwarded" in refused["sasl"]
    assert "a client without credentials (authentication.anonymous_role) has none to forward" in refused["none"]
    assert not refused.keys() & {"token", "basic"}
    off = refused_methods(config(EVERY, forward_authorization_credentials=False))
    assert off["token"] == f"{WANTS}: set brokers.forward_authorization_credentials = true"
    assert off["tls"] == refused["tls"], "what would not help is not advised"


def test_plugins_say_how_many_rounds_they_need() -> None:
    plugin = config({"plugins": {"own": {}}})
    assert refused_methods(plugin) == {}
    refused = refused_methods(plugin, ["single", "double"], ["double"])
    assert list(refused) == ["double"]
    assert "an exchange of several rounds cannot be forwarded" in refused["double"]


def test_no_method_is_refused_without_principals_or_before_another_proxy() -> None:
    assert refused_methods(config({**EVERY, "enabled": False})) == {}
    assert refused_methods(config(EVERY, through_proxy=True)) == {}


def test_all_methods_that_are_not_forwarded_share_one_warning() -> None:
    [warning] = forwarding_warnings(config(EVERY))
    assert warning.startswith("credentials of clients by SCRAM-SHA-256, SCRAM-SHA-512, none, sasl, tls cannot be forw")
    assert warning.endswith("set it to false at the brokers")
    assert forwarding_warnings(config({"token": {}})) == []
    assert forwarding_warnings(config(EVERY, forward_authorization_credentials=False)) == []


def test_where_a_maximum_does_not_hold_is_said() -> None:
    """A proxy in front asks its own client; behind it no maximum can be applied."""
    behind = {"token": {}, "proxy_roles": ["front"]}

    def warnings(authentication: dict[str, object], **session: object) -> list[str]:
        return forwarding_warnings(
            msgspec.convert({"authentication": {"enabled": True, **authentication}, "session": session}, Config)
        )

    [warning] = warnings(behind, connections_max_reauth_ms=1)
    assert "set it at these proxies" in warning
    assert warnings(behind, methods_max_reauth_ms={"token": 1}) == [warning]
    assert warnings(behind) == warnings(behind, methods_max_reauth_ms={"tls": 1}) == []
    assert warnings({"token": {}}, connections_max_reauth_ms=1) == []
