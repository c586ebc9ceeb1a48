"""The command import: what a Java proxy's keys become, and what differs in security or availability."""

from __future__ import annotations

import base64
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.commands.java_import.conversion import import_values
from proxy.commands.java_import.keys import KEYS
from proxy.commands.java_import.result import Result

BROKERS = {"brokerServiceURL": "pulsar://broker:6650"}
BROKERS_TLS = {"brokerServiceURLTLS": "pulsar+ssl://broker:6651", "tlsEnabledWithBroker": "true"}
TLS = {"servicePortTls": "6651", "tlsCertificateFilePath": "/tls.crt", "tlsKeyFilePath": "/tls.key"}
WEB = {"brokerWebServiceURL": "http://broker:8080"}
WEB_TLS = {"brokerWebServiceURLTLS": "https://broker:8443", "webServicePortTls": "8443"}
PROVIDERS = "org.apache.pulsar.broker.authentication."
TOKENS = {"authenticationEnabled": "true", "authenticationProviders": f"{PROVIDERS}AuthenticationProviderToken"}
ALL_PROVIDERS = ("Token", "Tls", "Basic", "Sasl", "OpenID")
PLUGINS = "org.apache.pulsar.client.impl.auth."
SECRET = "c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0LXNlY3JldC0xMjM0"
SUFFIX = "sUpErSeCrEt"


def imported(*layers: dict[str, str], release: str = "4", secrets: Path | None = None) -> tuple[dict[str, Any], Result]:
    """The TOML of these keys as a tree, and the result."""
    values = {key: value for layer in layers for key, value in layer.items()}
    result = import_values(values, release, secrets)
    return tomllib.loads(result.to_toml("proxy.conf")), result


def lost(result: Result) -> dict[str, str]:
    return dict(result.lost)


def test_no_key_of_java_vanishes() -> None:
    """Each with a value that is not its default is in the TOML (its own line or a comment of a line), or named."""
    everything = {**BROKERS_TLS, **BROKERS, **TLS, **TOKENS}
    everything["authenticationProviders"] = ",".join(f"AuthenticationProvider{one}" for one in ALL_PROVIDERS)
    web = {**WEB, **WEB_TLS}
    less = {**everything, "authenticationProviders": "", "servicePort": ""}
    no_web = {**everything, **web, "webServicePort": "", "webServicePortTls": ""}
    for base in ({}, BROKERS, everything, less, {**everything, **web}, {**BROKERS, **web}, no_web):
        for name in KEYS:
            full = name.replace("*", "x")
            for value in ("x-y", "true", "false", "7"):
                if value != KEYS[name].default:
                    text = import_values({**base, full: value}, "4").to_toml("proxy.conf")
                    assert re.search(rf"^# .*\b{full}\b", text, re.MULTILINE), (name, value)


def test_defaults_need_nothing() -> None:
    values = {name: key.default for name, key in KEYS.items() if "*" not in name}
    _, result = imported(values, BROKERS)
    assert (result.lost, result.needless) == ([], [])
    _, result = imported({name: "" for name in values if name not in {"servicePort", "webServicePort"}}, BROKERS)
    assert (result.lost, result.needless) == ([], [])


def test_a_blank_port_is_no_port_as_in_java() -> None:
    tree, result = imported(BROKERS, TLS, {"servicePort": "", "webServicePort": " "})
    assert [one["bind"] for one in tree["listener"]] == ["0.0.0.0:6651"]
    assert "admin" not in tree
    assert result.lost == []
    assert "servicePort" in lost(imported(BROKERS, {"servicePort": ""})[1])


def test_both_ports() -> None:
    tree, _ = imported(BROKERS, TLS, {"bindAddress": "::", "tlsTrustCertsFilePath": "/ca.crt", "servicePort": "6660"})
    plain, tls = tree["listener"]
    assert plain == {"bind": "[::]:6660"}
    assert tls["bind"] == "[::]:6651"
    assert tls["tls"] == {"certificate": "/tls.crt", "key": "/tls.key", "client_ca": "/ca.crt"}


@pytest.mark.parametrize("required", [True, False])
def test_clients_need_a_certificate_as_in_java(*, required: bool) -> None:
    more = {"tlsTrustCertsFilePath": "/ca.crt", "tlsRequireTrustedClientCertOnConnect": str(required)}
    tree, _ = imported(BROKERS, TLS, more)
    assert tree["listener"][1]["tls"].get("require_client_certificate", False) is required


# ---- brokers


@pytest.mark.parametrize(
    ("tls", "url", "other"),
    [("true", "pulsar+ssl://b:6651", "brokerServiceURL"), ("false", "pulsar://a:6650", "brokerServiceURLTLS")],
)
def test_tls_enabled_with_broker_chooses_the_url(tls: str, url: str, other: str) -> None:
    both = {"brokerServiceURL": "pulsar://a:6650", "brokerServiceURLTLS": "pulsar+ssl://b:6651"}
    tree, result = imported(both, {"tlsEnabledWithBroker": tls})
    assert tree["brokers"]["service_url"] == url
    assert [name for name, _ in result.needless] == [other]


def test_the_key_and_not_the_scheme_says_whether_brokers_use_tls() -> None:
    tree, _ = imported(BROKERS_TLS, {"brokerServiceURLTLS": "pulsar://b:6651"})
    assert tree["brokers"]["service_url"] == "pulsar+ssl://b:6651"
    tree, _ = imported({"brokerServiceURL": "pulsar+ssl://b:6651"})
    assert tree["brokers"]["service_url"] == "pulsar://b:6651"
    assert "brokerServiceURL" in lost(imported({"brokerServiceURL": "http://b:8080"})[1])


def test_the_url_that_counts_is_missing() -> None:
    _, result = imported(BROKERS, {"tlsEnabledWithBroker": "true"})
    assert "is empty" in lost(result)["brokerServiceURLTLS"]


@pytest.mark.parametrize("store", ["metadataStoreUrl", "zookeeperServers", "configurationStoreServers"])
def test_discovery_by_a_metadata_store_is_refused(store: str) -> None:
    _, result = imported({store: "zk:zk:2181"})
    assert "advise against" in lost(result)[store]
    _, result = imported({store: "zk:zk:2181"}, BROKERS)
    assert list(lost(result)) == ["brokerWebServiceURL"], "they served HTTP, whose brokers are not named"
    _, result = imported({store: "zk:zk:2181"}, BROKERS, {"webServicePort": ""})
    assert result.lost == []
    assert store in dict(result.needless)


@pytest.mark.parametrize(("release", "given", "verified"), [("4", "", False), ("5", "", True), ("5", "false", False)])
def test_names_of_brokers_are_verified_as_by_javas_default(release: str, given: str, *, verified: bool) -> None:
    tree, result = imported(BROKERS_TLS, {"tlsHostnameVerificationEnabled": given}, release=release)
    assert tree["brokers"]["tls"]["verify_hostname"] is verified
    assert ("tlsHostnameVerificationEnabled" in dict(result.notes)) is not verified


def test_tls_to_brokers_that_is_off_brings_no_files() -> None:
    files = {"brokerClientTrustCertsFilePath": "/ca.crt", "brokerClientKeyFilePath": "/k"}
    tree, result = imported(BROKERS, files)
    assert "tls" not in tree["brokers"]
    assert dict(result.needless)["brokerClientKeyFilePath"] == "tlsEnabledWithBroker is false"
    tree, _ = imported(BROKERS_TLS, files)
    assert tree["brokers"]["tls"] == {"verify_hostname": False, "trust": "/ca.crt", "key": "/k"}


def allowed(hosts: str, addresses: str) -> tuple[dict[str, Any], Result]:
    tree, result = imported(BROKERS, {"brokerProxyAllowedHostNames": hosts, "brokerProxyAllowedIPAddresses": addresses})
    return {key: value for key, value in tree["brokers"].items() if key.startswith("allowed_")}, result


def test_where_clients_may_go() -> None:
    rules, result = allowed("*", "*")
    assert (rules, result.lost) == ({}, [])
    assert "brokerProxyAllowedHostNames" in dict(result.notes)
    assert allowed("*.a, b", "*")[0] == {"allowed_hosts": ["*.a", "b"]}
    assert allowed("*", "10.0.0.0/255.0.0.0, 10.1.2.3/8,::1")[0] == {
        "allowed_addresses": ["10.0.0.0/8", "10.0.0.0/8", "::1/128"]
    }
    assert allowed("a,*", "10.0.0.0/8,*")[0] == {}


def test_a_rule_for_addresses_that_is_not_understood_leaves_no_wider_rule() -> None:
    rules, result = allowed("*.a.example", "10.*.*.*")
    assert rules == {}
    assert {"brokerProxyAllowedHostNames", "brokerProxyAllowedIPAddresses"} <= set(lost(result))


def test_ports_of_brokers() -> None:
    tree, _ = imported(BROKERS, {"brokerProxyAllowedTargetPorts": "6650, 6660"})
    assert tree["brokers"]["allowed_ports"] == [6650, 6660]
    for wrong in ("*", "0", "65536", "x", "1-3"):
        assert "brokerProxyAllowedTargetPorts" in lost(imported(BROKERS, {"brokerProxyAllowedTargetPorts": wrong})[1])


# ---- keystores


def test_keystores_are_named_with_the_commands_that_convert_them() -> None:
    stores = {
        "tlsEnabledWithKeyStore": "true",
        "tlsKeyStore": "/etc/a b.jks",
        "tlsKeyStorePassword": SUFFIX,
        "tlsTrustStore": "/etc/trust.p12",
        "tlsTrustStoreType": "PKCS12",
        "tlsTrustStorePassword": SUFFIX,
    }
    tree, result = imported(BROKERS, {"servicePortTls": "6651"}, stores)
    tls = {"certificate": "/etc/a b.jks.crt", "key": "/etc/a b.jks.key", "client_ca": "/etc/trust.p12.crt"}
    assert tree["listener"][1]["tls"] == tls
    reasons = lost(result)
    keytool = "keytool -importkeystore -srckeystore '/etc/a b.jks' -destkeystore '/etc/a b.jks.p12'"
    assert keytool in reasons["tlsKeyStore"]
    assert "umask 077; openssl pkcs12 -in '/etc/a b.jks.p12' -nocerts" in reasons["tlsKeyStore"]
    assert "keytool" not in reasons["tlsTrustStore"]
    assert "openssl pkcs12 -in /etc/trust.p12 -nokeys -out /etc/trust.p12.crt" in reasons["tlsTrustStore"]


def test_keystores_towards_brokers() -> None:
    stores = {"brokerClientTlsEnabledWithKeyStore": "true", "brokerClientTlsTrustStore": "/t.jks"}
    tree, result = imported(BROKERS_TLS, stores)
    assert tree["brokers"]["tls"]["trust"] == "/t.jks.crt"
    assert "brokerClientTlsTrustStore" in lost(result)
    _, result = imported(BROKERS_TLS, {"brokerClientTlsTrustStore": "/t.jks"})
    assert result.lost == []


# ---- authentication


def test_authentication_that_java_wants_is_never_off() -> None:
    for providers in ("", "org.example.Mine", f"{PROVIDERS}AuthenticationProviderAthenz"):
        tree, result = imported(BROKERS, TOKENS, {"authenticationProviders": providers})
        assert tree["authentication"]["enabled"] is True
        assert "authenticationProviders" in lost(result)


def test_clients_credentials_are_forwarded_as_by_javas_default() -> None:
    for release, flag, forwarded in (("4", "", False), ("5", "", True), ("4", "true", True), ("5", "false", False)):
        tree, _ = imported(BROKERS, TOKENS, {"forwardAuthorizationCredentials": flag}, release=release)
        assert tree["brokers"]["forward_authorization_credentials"] is forwarded


@pytest.mark.parametrize("url", ["file:///etc/a%20b.key", "file:/etc/a%20b.key", "/etc/a b.key"])
def test_a_key_by_url_or_path(url: str) -> None:
    tree, result = imported(BROKERS, TOKENS, {"tokenSecretKey": url})
    assert tree["authentication"]["token"] == {"secret_key": "/etc/a b.key"}
    assert result.lost == []


@pytest.mark.parametrize("value", [f"data:;base64,{SECRET}", SECRET])
def test_a_key_in_the_file_goes_to_a_file_of_its_own(value: str, tmp_path: Path) -> None:
    tree, result = imported(BROKERS, TOKENS, {"tokenSecretKey": value})
    path = tree["authentication"]["token"]["secret_key"]
    assert path in lost(result)["tokenSecretKey"]
    tree, result = imported(BROKERS, TOKENS, {"tokenSecretKey": value}, secrets=tmp_path)
    assert tree["authentication"]["token"]["secret_key"] == str(tmp_path / "token-secret.key")
    assert result.secrets["token-secret.key"] == base64.b64decode(SECRET)
    assert result.lost == []


@pytest.mark.parametrize("value", ["short", f"{SECRET}!", f"/{SECRET[1:]}", "data:,x"])
def test_what_may_be_a_key_is_not_written_as_a_path(value: str) -> None:
    _, result = imported(BROKERS, TOKENS, {"tokenSecretKey": value})
    assert "tokenSecretKey" in lost(result)
    assert value not in result.to_toml("proxy.conf")


def test_what_is_a_path_as_well_as_base64_is_not_guessed(tmp_path: Path) -> None:
    _, result = imported(BROKERS, TOKENS, {"tokenSecretKey": "/etc/pulsar/keys/secretkeyfile/1"}, secrets=tmp_path)
    assert "may be a path or Base64" in lost(result)["tokenSecretKey"]
    assert "token-secret.key" not in result.secrets


def test_of_two_keys_the_one_that_java_uses_counts() -> None:
    tree, result = imported(BROKERS, TOKENS, {"tokenSecretKey": "/s.key", "tokenPublicKey": "/p.der"})
    assert tree["authentication"]["token"] == {"secret_key": "/s.key"}
    assert "tokenPublicKey" in dict(result.needless)


def test_an_audience_counts_with_its_claim_alone() -> None:
    key = {"tokenPublicKey": "/p.der", "tokenAudience": "us"}
    assert "audience" not in imported(BROKERS, TOKENS, key)[0]["authentication"]["token"]
    tree, _ = imported(BROKERS, TOKENS, key, {"tokenAudienceClaim": "aud2"})
    assert tree["authentication"]["token"] == {"public_key": "/p.der", "audience_claim": "aud2", "audience": "us"}


def test_kerberos_keeps_javas_narrow_default() -> None:
    tree, result = imported(BROKERS, TOKENS, {"authenticationProviders": f"{PROVIDERS}AuthenticationProviderSasl"})
    assert tree["authentication"]["sasl"] == {"allowed_principals": ".*pulsar.*"}
    assert "saslJaasServerSectionName" in lost(result)


def test_openid_connect() -> None:
    openid = f"{PROVIDERS}oidc.AuthenticationProviderOpenID"
    keys = {
        "openIDAllowedTokenIssuers": "https://a,https://b",
        "openIDAllowedAudiences": "x,y",
        "openIDAcceptedTimeLeewaySeconds": "3",
        "openIDRequireIssuersUseHttps": "false",
        "openIDTokenIssuerTrustCertsFilePath": "/ca",
    }
    tree, result = imported(BROKERS, TOKENS, {"authenticationProviders": openid}, keys)
    assert tree["authentication"]["oidc"] == {
        "allowed_issuers": ["https://a", "https://b"],
        "allowed_audiences": ["x", "y"],
        "allowed_clock_skew_ms": 3000,
        "require_https": False,
        "trust": "/ca",
    }
    assert "allowed_roles" in lost(result)["openIDAllowedTokenIssuers"], "Java lets each issuer sign any role"


@pytest.mark.parametrize(
    ("mode", "discovery"),
    [("KUBERNETES_DISCOVER_TRUSTED_ISSUER", "trusted_issuer"), ("KUBERNETES_DISCOVER_PUBLIC_KEYS", "public_keys")],
)
def test_kubernetes_as_an_issuer_of_tokens(mode: str, discovery: str) -> None:
    openid = {"authenticationProviders": f"{PROVIDERS}oidc.AuthenticationProviderOpenID"}
    keys = {"openIDAllowedAudiences": "x", "openIDFallbackDiscoveryMode": mode}
    tree, result = imported(BROKERS, TOKENS, openid, keys)
    assert tree["authentication"]["oidc"] == {"allowed_audiences": ["x"], "kubernetes": {"discovery": discovery}}
    assert "`sub`" in dict(result.notes)["openIDFallbackDiscoveryMode"]
    _, result = imported(BROKERS, TOKENS, openid, keys, {"openIDAllowedTokenIssuers": "https://a"})
    assert "allowed_roles" in lost(result)["openIDAllowedTokenIssuers"]
    tree, result = imported(BROKERS, TOKENS, openid, {**keys, "openIDFallbackDiscoveryMode": "ELSEWHERE"})
    assert "kubernetes" not in tree["authentication"]["oidc"]
    assert "modes" in lost(result)["openIDFallbackDiscoveryMode"]


def test_keys_of_a_provider_that_is_not_used_need_nothing() -> None:
    _, result = imported(BROKERS, {"tokenSecretKey": f"data:;base64,{SECRET}", "basicAuthConf": "/users"})
    assert dict(result.needless) == dict.fromkeys(["tokenSecretKey", "basicAuthConf"], "authenticationEnabled is false")


def test_authorization_is_the_brokers() -> None:
    _, result = imported(BROKERS, {"authorizationEnabled": "true", "superUserRoles": "admin"})
    assert "brokers authorize" in lost(result)["authorizationEnabled"], "brokers may not, and then nothing does"
    assert "brokers authorize" in dict(result.needless)["superUserRoles"]


def test_expired_clients_stay_where_java_does_not_look() -> None:
    tree, _ = imported(BROKERS, TOKENS, {"authenticationRefreshCheckSeconds": "0", "tokenPublicKey": "/p"})
    assert tree["session"] == {"enforcement": "observe"}
    tree, _ = imported(BROKERS, TOKENS, {"authenticationRefreshCheckSeconds": "5", "tokenPublicKey": "/p"})
    assert "session" not in tree


# ---- the proxy's own credentials


@pytest.mark.parametrize(
    ("plugin", "parameters", "table", "secret"),
    [
        ("Token", "file:///etc/p.jwt", {"method": "token", "file": "/etc/p.jwt"}, None),
        ("Token", f"token:{SUFFIX}", {"method": "token", "file": "DIR/proxy.jwt"}, f"{SUFFIX}\n"),
        ("Token", f'{{"token":"{SUFFIX}"}}', {"method": "token", "file": "DIR/proxy.jwt"}, f"{SUFFIX}\n"),
        ("Token", SUFFIX, {"method": "token", "file": "DIR/proxy.jwt"}, f"{SUFFIX}\n"),
        (
            "Basic",
            f'{{"userId":"u","password":"{SUFFIX}"}}',
            {"method": "basic", "file": "DIR/proxy.basic"},
            f"u:{SUFFIX}\n",
        ),
        (
            "oauth2.AuthenticationOAuth2",
            '{"privateKey":"file:///k.json","issuerUrl":"https://i","audience":"a","scope":"s"}',
            {"method": "oauth2", "file": "/k.json", "issuer_url": "https://i", "audience": "a", "scope": "s"},
            None,
        ),
    ],
)
def test_the_proxys_credentials(
    plugin: str, parameters: str, table: dict[str, str], secret: str | None, tmp_path: Path
) -> None:
    name = plugin if "." in plugin else f"Authentication{plugin}"
    keys = {"brokerClientAuthenticationPlugin": PLUGINS + name, "brokerClientAuthenticationParameters": parameters}
    tree, result = imported(BROKERS, keys, secrets=tmp_path)
    assert tree["brokers"]["credentials"] == {key: value.replace("DIR", str(tmp_path)) for key, value in table.items()}
    assert [content.decode() for content in result.secrets.values()] == ([secret] if secret else [])
    assert result.lost == []
    assert "have the proxy's role" in dict(result.notes)["brokerClientAuthenticationPlugin"]
    assert "brokerClientAuthenticationPlugin" not in dict(imported(BROKERS, TOKENS, keys)[1].notes)


def test_credentials_by_certificate() -> None:
    keys = {
        "brokerClientAuthenticationPlugin": f"{PLUGINS}AuthenticationTls",
        "brokerClientAuthenticationParameters": "tlsCertFile:/c.pem,tlsKeyFile:/k.pem",
        "brokerClientCertificateFilePath": "/other.pem",
    }
    tree, result = imported(BROKERS_TLS, keys)
    assert tree["brokers"]["credentials"] == {"method": "tls"}
    assert tree["brokers"]["tls"] == {"certificate": "/c.pem", "key": "/k.pem", "verify_hostname": False}
    assert "brokerClientCertificateFilePath" in dict(result.needless)
    assert "brokerClientAuthenticationPlugin" in lost(imported(BROKERS, keys)[1])


def test_no_secret_is_in_the_toml_or_named(tmp_path: Path) -> None:
    secret_keys = [name for name in KEYS if name.endswith(("Password", "Params"))]
    secret_keys += ["brokerClientTlsFactoryConfig", "tlsFactoryConfig", "brokerClient_authParams", "unknownPassword"]
    plugins = ("Token", "Basic", "OAuth2", "Sasl", "Tls", "Athenz", "Disabled", "")
    forms = (SUFFIX, f"token:{SUFFIX}", f'{{"token":"{SUFFIX}"}}', f'{{"password":"{SUFFIX}","userId":"u"}}')
    forms += (
        f'{{"privateKey":"data:;base64,{SUFFIX}","issuerUrl":"i"}}',
        f"userId:u,password:{SUFFIX}",
    )
    for plugin in plugins:
        for form in forms:
            keys = {"brokerClientAuthenticationParameters": form, **dict.fromkeys(secret_keys, SUFFIX)}
            keys["brokerClientAuthenticationPlugin"] = f"{PLUGINS}Authentication{plugin}" if plugin else ""
            for directory in (None, tmp_path):
                _, result = imported(
                    BROKERS_TLS, TOKENS, {"tokenSecretKey": f"data:,{SUFFIX}"}, keys, secrets=directory
                )
                shown = result.to_toml("proxy.conf") + str(result.lost + result.notes + result.needless)
                assert SUFFIX not in shown, (plugin, form)


# ---- the admin port


def test_metrics_are_open_where_java_had_them_open() -> None:
    tree, result = imported(BROKERS)
    assert tree["admin"] == {"bind": "0.0.0.0:8080"}
    assert "webServicePort" in dict(result.notes)
    tree, _ = imported(BROKERS, TOKENS, {"tokenPublicKey": "/p", "authenticateMetricsEndpoint": "false"})
    assert tree["admin"] == {"bind": "0.0.0.0:8080"}


def test_metrics_that_needed_credentials_are_not_opened(tmp_path: Path) -> None:
    tree, result = imported(BROKERS, TOKENS, {"tokenPublicKey": "/p", "webServicePort": "8081"})
    assert tree["admin"] == {"bind": "127.0.0.1:8081"}
    assert "webServicePort" in dict(result.notes)
    tree, result = imported(BROKERS, TOKENS, {"tokenPublicKey": "/p"}, secrets=tmp_path)
    assert tree["admin"] == {"bind": "0.0.0.0:8080", "token_file": str(tmp_path / "admin-token")}
    assert re.fullmatch(rb"[0-9a-f]{64}\n", result.secrets["admin-token"])
    tree, _ = imported(BROKERS, {"enableProxyStatsEndpoints": "false"})
    assert tree["admin"] == {"bind": "127.0.0.1:8080"}


# ---- HTTP


def test_javas_web_port_serves_http_and_the_admin_port_is_another_one() -> None:
    tree, result = imported(BROKERS, WEB)
    assert tree["http_listener"] == [{"bind": "0.0.0.0:8080"}]
    assert tree["admin"] == {"bind": "0.0.0.0:8081"}
    assert "at the admin port, 8081" in str(result.notes)
    assert result.lost == []
    tree, _ = imported(BROKERS, WEB, {"webServicePort": "8081", "servicePort": "8080", "bindAddress": "::"})
    assert tree["http_listener"] == [{"bind": "[::]:8081"}]
    assert tree["admin"] == {"bind": "[::]:8082"}


def test_metrics_that_needed_credentials_are_not_opened_beside_http(tmp_path: Path) -> None:
    tokens = {**TOKENS, "tokenPublicKey": "/p"}
    assert imported(BROKERS, WEB, tokens)[0]["admin"] == {"bind": "127.0.0.1:8081"}
    tree, _ = imported(BROKERS, WEB, tokens, secrets=tmp_path)
    assert tree["admin"] == {"bind": "0.0.0.0:8081", "token_file": str(tmp_path / "admin-token")}
    only_tls = {**WEB_TLS, "tlsEnabledWithBroker": "true", "webServicePort": ""}
    assert imported(BROKERS_TLS, TLS, only_tls)[0]["admin"] == {"bind": "127.0.0.1:8080"}, "Java's was by TLS"


def test_both_web_ports() -> None:
    more = {"tlsRequireTrustedClientCertOnConnect": "true", "tlsTrustCertsFilePath": "/ca.crt"}
    web = {"webServiceTlsProtocols": "TLSv1.3", "webServiceTlsCiphers": "ECDHE-ECDSA-AES256-GCM-SHA384"}
    tree, result = imported(BROKERS_TLS, TLS, WEB_TLS, more, web)
    plain, tls = tree["http_listener"]
    assert plain == {"bind": "0.0.0.0:8080"}
    assert tls["bind"] == "0.0.0.0:8443"
    files = {"certificate": "/tls.crt", "key": "/tls.key", "client_ca": "/ca.crt", "require_client_certificate": True}
    assert tree["listener"][1]["tls"] == files
    assert tls["tls"] == {**files, "minimum_version": "1.3", "ciphers": "ECDHE-ECDSA-AES256-GCM-SHA384"}
    assert (result.lost, result.needless) == ([], [])


def test_the_web_port_alone_needs_the_certificate() -> None:
    files = {key: value for key, value in TLS.items() if key != "servicePortTls"}
    tree, result = imported(BROKERS, WEB, {"webServicePortTls": "8443"}, files)
    assert "tls" not in tree["listener"][0]
    assert tree["http_listener"][1]["tls"] == {"certificate": "/tls.crt", "key": "/tls.key"}
    assert result.lost == []
    tree, result = imported(BROKERS, {"webServicePortTls": "8443"}, files)
    assert "http_listener" not in tree
    assert list(lost(result)) == ["webServicePortTls"]
    assert "tlsKeyFilePath" in dict(result.needless)


def test_a_keystore_of_both_ports_is_named_once() -> None:
    stores = {"tlsEnabledWithKeyStore": "true", "tlsKeyStore": "/a.jks", "servicePortTls": "6651"}
    tree, result = imported(BROKERS, WEB, stores, {"webServicePortTls": "8443"})
    assert (
        tree["http_listener"][1]["tls"]
        == tree["listener"][1]["tls"]
        == {"certificate": "/a.jks.crt", "key": "/a.jks.key"}
    )
    assert [name for name, _ in result.lost] == ["tlsKeyStore"]


def test_without_the_brokers_web_url_there_is_no_http() -> None:
    tree, result = imported(BROKERS)
    assert "http_listener" not in tree
    assert "write brokers.web_service_url" in dict(result.notes)["brokerWebServiceURL"]
    assert "brokerWebServiceURL" in lost(imported(BROKERS, {"metadataStoreUrl": "zk:zk:2181"})[1])
    _, result = imported(BROKERS_TLS, WEB)
    assert "no HTTP is served" in lost(result)["brokerWebServiceURLTLS"], "Java does not use the one for plain HTTP"
    assert "brokerWebServiceURL" in dict(result.needless)


@pytest.mark.parametrize(
    "url", ["broker:8080", "pulsar://b:6650", "http://b:8080/base", f"http://u:{SUFFIX}@b", "http://b:x"]
)
def test_a_web_url_that_is_not_understood(url: str) -> None:
    tree, result = imported(BROKERS, {"brokerWebServiceURL": url})
    assert "http_listener" not in tree
    assert "host and a port alone" in lost(result)["brokerWebServiceURL"]
    assert SUFFIX not in result.to_toml("proxy.conf")


def test_without_a_web_port_nothing_is_about_http() -> None:
    keys = {
        "webServicePort": "",
        "httpProxyTimeout": "1",
        "webSocketServiceEnabled": "true",
        "httpReverseProxy.a.path": "/",
    }
    tree, result = imported(BROKERS, WEB, keys)
    assert {"http", "http_listener", "admin"} & set(tree) == set()
    assert result.lost == []
    assert len(result.needless) == 4


def test_a_route_with_tls_is_verified_as_brokers_are() -> None:
    for scheme in ("http", "https"):
        keys = {"httpReverseProxy.a.path": "/a", "httpReverseProxy.a.proxyTo": f"{scheme}://a"}
        _, result = imported(BROKERS, WEB, keys)
        assert ("httpReverseProxy.a.proxyTo" in dict(result.notes)) is (scheme == "https")


def routes(**keys: str) -> tuple[list[dict[str, str]], dict[str, str]]:
    named = {f"httpReverseProxy.{name.replace('_', '.')}": value for name, value in keys.items()}
    tree, result = imported(BROKERS, WEB, named)
    return tree.get("http", {}).get("routes", []), lost(result)


@pytest.mark.parametrize(
    ("path", "proxy_to", "url"),
    [
        ("/tools/", "http://t:8000/tools", "http://t:8000"),
        ("/ui/x", "https://u/ui/x/", "https://u"),
        ("/ui", "http://u:1", "http://u:1/"),
        ("/ui", "http://u:1/", "http://u:1/"),
        ("/ui", "http://u:1/base/", "http://u:1/base"),
    ],
)
def test_a_route_is_passed_on_with_the_path_that_java_gives_it(path: str, proxy_to: str, url: str) -> None:
    found, missing = routes(a_path=path, a_proxyTo=proxy_to)
    assert found == [{"path": path.rstrip("/"), "url": url}]
    assert missing == {}


@pytest.mark.parametrize(
    ("path", "proxy_to", "key"),
    [
        ("/a/../b", "http://t/a", "path"),
        ("a", "http://t/a", "path"),
        ("/a%2fb", "http://t/a", "path"),
        ("/a", "ftp://t/a", "proxyTo"),
        ("/a", "http://t/a?b=c", "proxyTo"),
        ("/a", f"http://u:{SUFFIX}@t/a", "proxyTo"),
        ("/a", "", "path"),
    ],
)
def test_routes_that_are_not_understood(path: str, proxy_to: str, key: str) -> None:
    found, missing = routes(x_path=path, x_proxyTo=proxy_to)
    assert found == []
    assert list(missing) == [f"httpReverseProxy.x.{key}"]
    assert SUFFIX not in str(missing)


def test_a_name_of_a_route_writes_no_key() -> None:
    name = "httpReverseProxy.x\n[admin]\nbind = 1\x00"
    tree, _ = imported(BROKERS, WEB, {f"{name}.path": "/a", f"{name}.proxyTo": "http://t/a"})
    assert tree["http"]["routes"] == [{"path": "/a", "url": "http://t"}]
    assert tree["admin"] == {"bind": "0.0.0.0:8081"}


def test_headers_of_responses() -> None:
    headers = '{"X-Frame-Options": "DENY", "Connection": "close", "X": 1, "Y": "a\\nb", "Z\\n": "c"}'
    tree, result = imported(BROKERS, WEB, {"proxyHttpResponseHeadersJson": headers})
    assert tree["http"]["response_headers"] == {"X-Frame-Options": "DENY"}
    assert len(result.lost) == 4
    assert (
        "no JSON"
        in lost(imported(BROKERS, WEB, {"proxyHttpResponseHeadersJson": "{"})[1])["proxyHttpResponseHeadersJson"]
    )


# ---- single values


@pytest.mark.parametrize(
    ("name", "value", "path", "expected"),
    [
        ("keepAliveIntervalSeconds", "7", "limits.keep_alive_interval_ms", 7000),
        ("keepAliveIntervalSeconds", "0", "", "cannot be turned off"),
        ("keepAliveIntervalSeconds", "x", "", "no integer"),
        ("keepAliveIntervalSeconds", "9" * 5000, "", "is not within"),
        ("brokerProxyConnectTimeoutMs", "3000", "brokers.connect_timeout_ms", 3000),
        ("maxConcurrentInboundConnections", "12", "limits.max_connections", 12),
        ("maxConcurrentInboundConnectionsPerIp", "5", "limits.max_connections_per_address", 5),
        ("maxConcurrentLookupRequests", "5", "limits.max_concurrent_lookups", 5),
        ("maxTopicListInFlightHeapMemSizeMB", "200", "limits.max_topic_lists_bytes", 200 * 1024**2),
        ("clusterName", 'a"b\\c', "cluster.name", 'a"b\\c'),
        ("clusterName", "a\x7f\x00\n\U0001f600", "cluster.name", "a\x7f\x00\n\U0001f600"),
        ("brokerWebServiceURL", "http://b:8080", "brokers.web_service_url", "http://b:8080"),
        ("functionWorkerWebServiceURL", "http://f:6750", "http.function_worker_url", "http://f:6750"),
        ("httpInputMaxReplayBufferSize", "7", "http.max_replay_bytes", 7),
        ("httpMaxRequestHeaderSize", "16384", "http.max_head_bytes", 16384),
        ("httpMaxRequestHeaderSize", "1000", "", "is not within 1024 to 1048576"),
        ("httpProxyTimeout", "60000", "http.response_timeout_ms", 60000),
        ("httpProxyIdleTimeout", "90000", "http.body_timeout_ms", 90000),
        ("httpProxyIdleTimeout", "0", "", "always a limit"),
        ("httpServerIdleTimeout", "90000", "http.idle_timeout_ms", 90000),
        ("maxHttpServerConnections", "5000", "http.max_connections", 5000),
        ("maxHttpServerConnections", "0", "", "always a limit"),
        ("maxHttpServerConnections", "10001", "", "is not within 1 to 10000"),
        ("maxConcurrentHttpRequests", "64", "http.max_requests", 64),
        ("httpRequestsLimitEnabled", "true", "", "http.max_requests"),
        ("webServiceTrustXForwardedFor", "true", "", "is not believed"),
        ("webSocketServiceEnabled", "true", "", "WebSocket"),
        ("checkActiveBrokers", "true", "", "allowed_hosts"),
        ("httpReverseProxy.a.path", "/a", "", "no .proxyTo"),
        ("tlsAllowInsecureConnection", "true", "", "are refused"),
        ("proxyLogLevel", "2", "", "not logged"),
    ],
)
def test_values(name: str, value: str, path: str, expected: object) -> None:
    tree, result = imported(BROKERS, {name: value})
    if path:
        table, _, key = path.partition(".")
        assert tree[table][key] == expected
        assert result.lost == []
    else:
        (reason,) = (reason for found, reason in result.lost if name in found)
        assert str(expected) in reason


@pytest.mark.parametrize(
    "name", ["numIOThreads", "numAcceptorThreads", "httpNumThreads", "tlsCertRefreshCheckDurationSec"]
)
def test_threads_and_the_like_are_not_copied(name: str) -> None:
    tree, result = imported(BROKERS, {name: "64"})
    assert "64" not in str(tree)
    assert [one for one, _ in result.needless] == [name]
    assert result.lost == []


def test_versions_and_ciphers_of_tls() -> None:
    def tls(**keys: str) -> dict[str, Any]:
        tree, result = imported(BROKERS, TLS, keys)
        return {**tree["listener"][1]["tls"], "lost": [name for name, _ in result.lost]}

    assert tls(tlsProtocols="TLSv1.3,TLSv1.2")["minimum_version"] == "1.2"
    assert tls(tlsProtocols="TLSv1.3")["minimum_version"] == "1.3"
    assert tls(tlsProtocols="TLSv1.1,TLSv1.2")["lost"] == ["tlsProtocols"]
    names = "TLS_AES_128_GCM_SHA256,TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,TLS_DHE_RSA_WITH_CHACHA20_POLY1305_SHA256"
    assert tls(tlsCiphers=names)["ciphers"] == "ECDHE-RSA-AES128-GCM-SHA256:DHE-RSA-CHACHA20-POLY1305"
    assert tls(tlsCiphers="ECDHE-ECDSA-AES256-GCM-SHA384")["ciphers"] == "ECDHE-ECDSA-AES256-GCM-SHA384"
    assert tls(tlsCiphers="TLS_RSA_WITH_AES_128_CBC_SHA")["lost"] == ["tlsCiphers"]
    assert "ciphers" not in tls(tlsCiphers="TLS_AES_128_GCM_SHA256")


def test_unknown_keys_are_named() -> None:
    _, result = imported(BROKERS, {"brokerServicURL": "", "x\n[admin]\nbind = 1": "y", "brokerClient_\x1b": "y"})
    shown = lost(result)
    assert 'did you mean "brokerServiceURL"?' in shown['"brokerServicURL"']
    assert len(shown) == 3
    assert "\x1b" not in str(list(shown))
    text = result.to_toml("x\n[relay]")
    assert not re.search(r"^(\[relay\]|bind = 1)", text, re.MULTILINE), "names end no comment"


TEXTS = st.text() | st.sampled_from(
    [
        "*",
        "true",
        "[]",
        '{"X":"y","\\ud800":"\\ud800"}',
        "/a",
        "https://a:1",
        "8443",
        '{"a":[]}',
        '{"token":"\\ud800"}',
        "file://[",
        "data:;base64,!",
        "::",
    ]
)


NAMES = sorted({*KEYS, "httpReverseProxy.a.path", "httpReverseProxy.a.proxyTo"} - {"httpReverseProxy.*"})


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), TEXTS), st.sampled_from(["4", "5"]), st.booleans())
def test_no_values_are_a_defect(values: dict[str, str], release: str, used: bool) -> None:
    providers = ",".join(f"AuthenticationProvider{one}" for one in ALL_PROVIDERS)
    base = {**BROKERS_TLS, **WEB_TLS, **TLS, **TOKENS, "authenticationProviders": providers} if used else {}
    for plugin in ("Token", "Basic", "Tls", "OAuth2", "Sasl"):
        tried = {**base, **values, "brokerClientAuthenticationPlugin": f"Authentication{plugin}"}
        text = import_values(tried, release).to_toml("proxy.conf")
        tomllib.loads(text)
        text.encode()


HTTP = {"brokerWebServiceURL": "http://b:8080", "webServicePort": "8080"}


@pytest.mark.parametrize(
    ("name", "table"), [("haProxyProtocolEnabled", "listener"), ("webServiceHaProxyProtocolEnabled", "http_listener")]
)
def test_the_proxy_protocol_needs_to_know_its_senders(name: str, table: str) -> None:
    """Java believes any client's header; so `check` refuses the result until the load balancers are named."""
    tree, result = imported(BROKERS, HTTP, {name: "TRUE"})
    [listener] = tree[table]
    assert listener["proxy_protocol"] == "optional"
    assert "proxy_protocol_sources" not in listener
    assert "load balancers' networks" in result.to_toml("proxy.conf")
    assert result.lost == []
    assert "proxy_protocol" not in imported(BROKERS, HTTP, {name: "false"})[0][table][0]


def test_brokers_are_sent_a_header_as_by_java() -> None:
    """With it on, Java's proxy begins each relay with one, and the brokers take it; not over HTTP."""
    assert imported(BROKERS, {"haProxyProtocolEnabled": "true"})[0]["brokers"]["proxy_protocol"] == "within_tls"
    assert "proxy_protocol" not in imported(BROKERS, HTTP, {"webServiceHaProxyProtocolEnabled": "true"})[0]["brokers"]
    assert "proxy_protocol" not in imported(BROKERS, {"haProxyProtocolEnabled": "false"})[0]["brokers"]


def test_the_proxy_protocol_without_http() -> None:
    _, result = imported(BROKERS, {"webServiceHaProxyProtocolEnabled": "true"})
    assert "no HTTP is served" in dict(result.needless)["webServiceHaProxyProtocolEnabled"]
