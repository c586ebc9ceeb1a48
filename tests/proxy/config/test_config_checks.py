"""proxy.config.checks: keys that need each other, addresses, files; each mistake is named by its key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from proxy.common.errors import ConfigError
from proxy.config.admin_token import TOKEN_BYTES_MAX
from proxy.config.checks import _check_sni, validate_config
from proxy.config.session_lifetime import max_reauth_ms
from proxy.config.types import Authentication, Config, TokenAuthentication

Tables = dict[str, Any]
Make = Callable[[Tables], Config]
PROVIDERS = ("token", "tls", "basic", "scram", "sasl", "oidc")


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A configuration; the text FILE in it becomes the name of a file that can be read."""
    file = tmp_path / "file"
    file.write_text("hush")

    def with_files(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: with_files(item) for key, item in value.items()}
        if isinstance(value, list):
            return [with_files(item) for item in value]
        return str(file) if value == "FILE" else value

    return lambda tables: msgspec.convert(with_files(tables), Config)


def error(config: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        validate_config(config)
    assert caught.value.__cause__ is None
    assert "hush" not in str(caught.value)
    return str(caught.value)


def listener(**tls: Any) -> Tables:
    return {"listener": [{"tls": {"certificate": "FILE", "key": "FILE", **tls}}]}


def brokers(**keys: Any) -> Tables:
    return {"brokers": {"service_url": "pulsar+ssl://b", **keys}}


def credentials(**keys: Any) -> Tables:
    return brokers(credentials=keys)


def authentication(**keys: Any) -> Tables:
    return {"authentication": {"enabled": True, **keys}}


OIDC = {"allowed_issuers": ["https://issuer"], "allowed_audiences": ["proxy"]}
KUBERNETES = {"token_file": "FILE", "trust": "FILE"}
OF_KUBERNETES = {"allowed_audiences": ["proxy"], "kubernetes": KUBERNETES}
SASL = {"principal": "broker/h@R", "keytab": "FILE"}
TOKEN = {"secret_key": "FILE"}

GOOD: dict[str, Tables] = {
    "nothing at all": {},
    "names of the admin port": {"admin": {"allowed_hosts": ["proxy-1", "*.pulsar.svc.cluster.local", "*"]}},
    "tls for clients": listener(),
    "tls with certificates of clients": listener(client_ca="FILE", require_client_certificate=True),
    "tls with a CRL": listener(client_ca="FILE", client_crl="FILE"),
    "tls with several certificates": listener(certificates=[{"certificate": "FILE", "key": "FILE"}] * 2),
    "tls with tickets": listener(session_tickets=True, minimum_version="1.3"),
    "tls with ciphers": listener(ciphers="HIGH") | brokers(tls={"ciphers": "HIGH"}),
    "tls for brokers": brokers(tls={"trust": "FILE", "certificate": "FILE", "key": "FILE"}),
    "tls by the system's authorities": brokers(),
    "brokers by SRV records": {"brokers": {"service_url": "pulsar+srv://b.example"}},
    "brokers by SRV records, with tls": brokers(service_url="pulsar+ssl+srv://b", tls={"trust": "FILE"}),
    "ejection for always the same time": {"brokers": {"ejection_time_ms": 2000, "ejection_time_max_ms": 2000}},
    "brokers' ports of any numbers": {"brokers": {"port_pairs": [[6650, 6651], [1, 65535]]}},
    "brokers of which no pair of ports is known": {"brokers": {"port_pairs": []}},
    "a token in a file": credentials(method="token", file="FILE"),
    "a token in the configuration": credentials(method="token", token="t"),
    "a password": credentials(method="basic", file="FILE"),
    "a certificate": brokers(credentials={"method": "tls"}, tls={"certificate": "FILE", "key": "FILE"}),
    "kerberos": credentials(method="sasl", file="FILE", principal="proxy/h@R"),
    "oauth2": credentials(method="oauth2", file="FILE", issuer_url="https://issuer", trust="FILE"),
    "tokens": authentication(token={"secret_key": "FILE"}),
    "tokens by public key": authentication(token={"public_key": "FILE"}),
    "tokens by one of several secrets": authentication(token={"further_secret_keys": ["FILE", "FILE"]}),
    "tokens by one of several public keys": authentication(token={"further_public_keys": ["FILE"]}),
    "certificates": listener(client_ca="FILE") | authentication(tls={}),
    "certificates with SPIFFE IDs": listener(client_ca="FILE")
    | authentication(tls={"identity_source": "SAN:URI", "principal_mapping_rules": ["RULE:(.*)/$1/L", "DEFAULT"]}),
    "passwords": authentication(basic={"file": "FILE"}),
    "scram": authentication(scram={"file": "FILE"}),
    "kerberos of clients": authentication(sasl=SASL | {"allowed_principals": "^[a-z]+@R$"}),
    "issuers": authentication(oidc=OIDC | {"trust": "FILE"}),
    "issuers without tls": authentication(oidc=OIDC | {"allowed_issuers": ["http://i"], "require_https": False}),
    "service accounts": authentication(oidc=OF_KUBERNETES),
    "service accounts of an API server elsewhere": authentication(
        oidc=OF_KUBERNETES | {"kubernetes": KUBERNETES | {"api_server": "https://api:6443"}}
    ),
    "tokens of two kinds": authentication(token=TOKEN, oidc=OIDC),
    "a plugin alone": authentication(plugins={"own": {}}),
    "guests": authentication(token=TOKEN, anonymous_role="guest", proxy_roles=["proxy-a"]),
    "prepared, but not enabled": {"authentication": {"enabled": False, "token": TOKEN}},
    "no forwarded credentials": authentication(token=TOKEN) | brokers(forward_authorization_credentials=False),
    "nothing to forward": brokers(forward_authorization_credentials=True),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_consistent_configuration_is_accepted(make: Make, name: str) -> None:
    config = make(GOOD[name])
    assert validate_config(config) is config


BAD: list[tuple[str, Tables]] = [
    ("cluster.runtime_dir", {"cluster": {"runtime_dir": "/" + "x" * 80}}),
    ("listener", {"listener": []}),
    ("listener[1].bind", {"listener": [{}, {"bind": "6650"}]}),
    *(
        (f"listener[1].{key}", {"listener": [{}, {key: ["10.0.0.0/8", network]}]})
        for key in ("allowed_networks", "denied_networks", "proxy_protocol_sources")
        for network in ("10.0.0.1/8", "10.0.0.0/33", "host", "*", "10.0.0.0/-1", "::ffff:10.0.0.1/104")
    ),
    ("listener[0].proxy_protocol_sources", {"listener": [{"proxy_protocol": "optional"}]}),
    ("listener[0].proxy_protocol_sources", {"listener": [{"proxy_protocol_sources": ["10.0.0.0/8"]}]}),
    ("admin.bind", {"admin": {"bind": "localhost:99999"}}),
    ("admin.token_file", {"admin": {"token_file": "/nowhere"}}),
    *(
        ("admin.allowed_hosts", {"admin": {"allowed_hosts": ["proxy.example.com", name]}})
        for name in ("proxy:8080", "http://proxy", "[::1]", "a b", "*.com", "proxy-*")
    ),
    ("brokers.service_url", {"brokers": {"service_url": "http://b"}}),
    ("brokers.service_url", {"brokers": {"service_url": "pulsar+ssl://"}}),
    ("brokers.service_url", {"brokers": {"service_url": "pulsar+srv://b:6650"}}),
    ("brokers.ejection_time_max_ms", {"brokers": {"ejection_time_ms": 2000, "ejection_time_max_ms": 1999}}),
    ("brokers.ejection_by_relays", {"brokers": {"ejection_by_relays": True, "through_proxy": True}}),
    ("brokers.allowed_addresses", {"brokers": {"allowed_addresses": ["*", "broker"]}}),
    ("brokers.port_pairs", {"brokers": {"port_pairs": [[6650, 6650]]}}),
    ("brokers.port_pairs", {"brokers": {"port_pairs": [[6650, 6651], [6660, 6651]]}}),
    ("brokers.port_pairs", {"brokers": {"port_pairs": [[6650, 6651], [6651, 6652]]}}),
    # TLS
    ("listener[0].tls.certificate", listener(certificate="/nowhere")),
    ("listener[0].tls.key", listener(key="/nowhere")),
    ("listener[0].tls.client_ca", listener(client_ca="/nowhere")),
    ("listener[0].tls.client_crl", listener(client_crl="FILE")),
    *(
        (f"listener[0].tls.certificates[1].{key}", listener(certificates=[one, one | {key: "/nowhere"}]))
        for key in ("certificate", "key")
        for one in [{"certificate": "FILE", "key": "FILE"}]
    ),
    ("listener[0].tls.ciphers", listener(ciphers="HIGH", minimum_version="1.3")),
    ("listener[0].tls.session_tickets", listener(session_tickets=True)),
    (
        "listener[0].tls.session_tickets",
        listener(session_tickets=True, minimum_version="1.3", client_ca="FILE", require_client_certificate=True),
    ),
    ("listener[0].tls.session_tickets", listener(session_tickets=True, minimum_version="1.3", client_ca="FILE")),
    ("brokers.tls.ciphers", brokers(tls={"ciphers": "HIGH", "minimum_version": "1.3"})),
    ("listener[0].tls.client_crl", listener(client_ca="FILE", client_crl="/nowhere")),
    ("listener[0].tls.require_client_certificate", listener(require_client_certificate=True)),
    ("listener[1].tls.key", {"listener": [{}, {"tls": {"certificate": "FILE", "key": "/"}}]}),
    ("brokers.tls", {"brokers": {"tls": {"trust": "FILE"}}}),
    ("brokers.tls", {"brokers": {"tls": {"verify_hostname": False}}}),
    ("brokers.tls", brokers(tls={"certificate": "FILE"})),
    ("brokers.tls", brokers(tls={"key": "FILE"})),
    ("brokers.tls.trust", brokers(tls={"trust": "/nowhere"})),
    ("brokers.tls.certificate", brokers(tls={"certificate": "/nowhere", "key": "FILE"})),
    ("brokers.tls.key", brokers(tls={"certificate": "FILE", "key": "/nowhere"})),
    # the proxy's credentials
    ("brokers.credentials.file", credentials(method="token")),
    ("brokers.credentials.file", credentials(method="basic")),
    ("brokers.credentials.file", credentials(method="sasl", principal="p/h@R")),
    ("brokers.credentials.file", credentials(method="oauth2", issuer_url="https://i")),
    ("brokers.credentials.file", credentials(method="basic", file="/nowhere")),
    ("brokers.credentials.file", credentials(method="token", file="/a\0b")),
    ("brokers.credentials.principal", credentials(method="sasl", file="FILE")),
    ("brokers.credentials.issuer_url", credentials(method="oauth2", file="FILE")),
    ("brokers.credentials.trust", credentials(method="oauth2", file="FILE", issuer_url="https://i", trust="/nowhere")),
    ("brokers.credentials.token", credentials(method="token", token="hush", file="FILE")),
    ("brokers.credentials.token", credentials(method="basic", token="hush", file="FILE")),
    ("brokers.credentials.token", credentials(method="tls", token="hush")),
    ("brokers.credentials.method", credentials(method="tls")),
    # who may come
    ("authentication.enabled", authentication()),
    ("authentication.enabled", authentication(anonymous_role="guest")),
    ("authentication.proxy_roles", {"authentication": {"proxy_roles": ["proxy-a"]}}),
    ("authentication.anonymous_role", authentication(token=TOKEN, anonymous_role=" ")),
    ("authentication.anonymous_role", authentication(token=TOKEN, anonymous_role="p", proxy_roles=["o", "p"])),
    # providers
    ("authentication.token", authentication(token={})),
    ("authentication.token", authentication(token={"audience": "x"})),
    ("authentication.token.secret_key", authentication(token={"secret_key": "/nowhere"})),
    ("authentication.token.public_key", authentication(token={"public_key": "/nowhere"})),
    ("authentication.token.further_secret_keys", authentication(token={"further_secret_keys": ["FILE", "/nowhere"]})),
    ("authentication.token.further_public_keys", authentication(token={"further_public_keys": ["/nowhere"]})),
    ("authentication.tls", authentication(tls={})),
    ("authentication.tls", listener() | authentication(tls={})),
    (
        "authentication.tls.principal_mapping_rules[1]",
        listener(client_ca="FILE") | authentication(tls={"principal_mapping_rules": ["RULE:a/b/", "RULE:(/x/"]}),
    ),
    ("authentication.basic.file", authentication(basic={"file": "/nowhere"})),
    ("authentication.scram.file", authentication(scram={"file": "/nowhere"})),
    ("authentication.sasl.keytab", authentication(sasl=SASL | {"keytab": "/nowhere"})),
    ("authentication.sasl.allowed_principals", authentication(sasl=SASL | {"allowed_principals": "("})),
    ("authentication.oidc.allowed_issuers", authentication(oidc=OIDC | {"allowed_issuers": []})),
    ("authentication.oidc.allowed_audiences", authentication(oidc=OIDC | {"allowed_audiences": []})),
    ("authentication.oidc.allowed_issuers", authentication(oidc=OIDC | {"allowed_issuers": ["http://issuer"]})),
    (
        "authentication.oidc.allowed_issuers",
        authentication(oidc=OIDC | {"allowed_issuers": ["https://i", "ftp://i"], "require_https": False}),
    ),
    ("authentication.oidc.trust", authentication(oidc=OIDC | {"trust": "/nowhere"})),
    ("authentication.oidc.allowed_audiences", authentication(oidc=OF_KUBERNETES | {"allowed_audiences": []})),
    *(
        (
            f"authentication.oidc.kubernetes.{key}",
            authentication(oidc=OF_KUBERNETES | {"kubernetes": KUBERNETES | wrong}),
        )
        for key, wrong in (
            ("api_server", {"api_server": "http://api"}),
            ("token_file", {"token_file": "/nowhere"}),
            ("trust", {"trust": "/nowhere"}),
        )
    ),
]


@pytest.mark.parametrize(("key", "tables"), BAD, ids=[f"{number}-{key}" for number, (key, _) in enumerate(BAD)])
def test_a_mistake_is_named_by_its_key(make: Make, key: str, tables: Tables) -> None:
    assert error(make(tables)).startswith(f"{key}:")


SNI: Tables = {"listener": {"routing": "sni"}}
WITH_TLS = {"service_url": "pulsar+ssl://localhost:6651"}


@pytest.mark.parametrize(
    ("key", "todo", "tables"),
    [
        (
            "listener[0].tls",
            "leave this table out",
            {"listener": {"routing": "sni", "tls": {"certificate": "c", "key": "k"}}, "brokers": WITH_TLS},
        ),
        ("listener[0].routing", "leave it out, or", {**SNI, "brokers": {**WITH_TLS, "through_proxy": True}}),
        *(
            ("listener[0].routing", "in brokers.port_pairs beside those of", {**SNI, "brokers": without_tls})
            for without_tls in (
                {"service_url": "pulsar://localhost:6650", "port_pairs": []},
                {"service_url": "pulsar://localhost:7650,other:7660"},
                {"service_url": "pulsar+srv://brokers", "port_pairs": []},
            )
        ),
    ],
)
def test_sni_routing_terminates_no_tls_and_needs_brokers_with_tls(key: str, todo: str, tables: Any) -> None:
    """What is wrong, and what to do."""
    tables = {**tables, "listener": [tables["listener"]]}
    with pytest.raises(ConfigError) as caught:
        _check_sni(msgspec.convert(tables, Config))
    assert str(caught.value).startswith(f"{key}:")
    assert todo in str(caught.value)


@pytest.mark.parametrize(
    "tables",
    [
        WITH_TLS,
        {"service_url": "pulsar+ssl+srv://brokers", "port_pairs": []},
        {"service_url": "pulsar+srv://brokers"},
        {"service_url": "pulsar://localhost,localhost:7650"},
        {"service_url": "pulsar://localhost:7650", "port_pairs": [[7650, 7651]]},
    ],
)
def test_brokers_that_sni_routing_can_lead_to(tables: Any) -> None:
    _check_sni(msgspec.convert({"listener": [SNI["listener"]], "brokers": tables}, Config))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_mistakes_count_before_authentication_is_enabled(make: Make, provider: str) -> None:
    """Who turns it on later is not surprised then."""
    tables: Tables = {
        "token": {},
        "tls": {},
        "basic": {"file": "/nowhere"},
        "scram": {"file": "/nowhere"},
        "sasl": SASL | {"keytab": "/nowhere"},
        "oidc": OIDC | {"allowed_audiences": []},
    }
    config = make({"authentication": {"enabled": False, provider: tables[provider]}})
    assert error(config).startswith(f"authentication.{provider}")


# ---- sessions


ENABLED = {"enabled": True, "token": {"secret_key": "FILE"}}


@pytest.mark.parametrize(
    ("tables", "key"),
    [
        ({"session": {"connections_max_reauth_ms": 999}}, "session.connections_max_reauth_ms"),
        ({"session": {"methods_max_reauth_ms": {"token": 1}}}, "session.methods_max_reauth_ms.token"),
        ({"listener": [{}, {"connections_max_reauth_ms": 500}]}, "listener[1].connections_max_reauth_ms"),
        ({"listener": [{"methods_max_reauth_ms": {"tls": 500}}]}, "listener[0].methods_max_reauth_ms.tls"),
    ],
)
def test_lifetimes_of_sessions(make: Make, tables: Tables, key: str) -> None:
    assert error(make({**tables, "authentication": ENABLED})).startswith(f"{key}: shorter than 1000 ms")
    assert error(make(tables)) == f"{key}: needs authentication.enabled"


def test_sessions_without_a_bound_need_no_authentication(make: Make) -> None:
    tables = {"session": {"connections_max_reauth_ms": 0, "methods_max_reauth_ms": {"token": 0}}, "listener": [{}]}
    assert validate_config(make(tables)).session.connections_max_reauth_ms == 0


@pytest.mark.conforms("kip-368.4", "kip-368.35")
def test_by_default_there_is_no_maximum(make: Make) -> None:
    """KIP-368: the default is 0, for every listener and method."""
    config = validate_config(make({"listener": [{}, {"bind": "0.0.0.0:1"}], "authentication": ENABLED}))
    assert config.session.connections_max_reauth_ms == 0
    assert {max_reauth_ms(config, listener, method) for listener in (0, 1) for method in ("token", "sasl", "tls")} == {
        0
    }


@pytest.mark.conforms("kip-368.1", "kip-368.2")
def test_the_nearest_lifetime_counts(make: Make) -> None:
    session = {"connections_max_reauth_ms": 3000, "methods_max_reauth_ms": {"basic": 2000, "sasl": 0}}
    by_method = {"methods_max_reauth_ms": {"token": 5000, "basic": 0}}
    listeners = [
        {},
        {"connections_max_reauth_ms": 1000, "bind": "0.0.0.0:1"},
        {"connections_max_reauth_ms": 0, "bind": "0.0.0.0:2"},
        {"connections_max_reauth_ms": 4000, **by_method, "bind": "0.0.0.0:3"},
        by_method | {"bind": "0.0.0.0:4"},
    ]
    config = validate_config(make({"session": session, "listener": listeners, "authentication": ENABLED}))
    found = {
        (listener, method): max_reauth_ms(config, listener, method)
        for listener in range(5)
        for method in ("token", "basic", "sasl")
    }
    assert found == {
        (0, "token"): 3000,
        (0, "basic"): 2000,
        (0, "sasl"): 0,
        **{(1, method): 1000 for method in ("token", "basic", "sasl")},
        **{(2, method): 0 for method in ("token", "basic", "sasl")},
        (3, "token"): 5000,
        (3, "basic"): 0,
        (3, "sasl"): 4000,
        (4, "token"): 5000,
        (4, "basic"): 0,
        (4, "sasl"): 0,
    }


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "holds no token"),
        (b" \n", "holds no token"),
        (b"one two", "what no HTTP header can"),
        ("\u00e9".encode(), "what no HTTP header can"),
        (b"x" * (TOKEN_BYTES_MAX + 1), "holds more than a token"),
    ],
)
def test_the_admin_ports_token_is_read(make: Make, tmp_path: Path, text: bytes, reason: str) -> None:
    """Security: by the supervisor, before a reload, as the admin worker has no say in it."""
    file = tmp_path / "admin-token"
    config = make({"admin": {"token_file": str(file)}})
    file.write_bytes(b" a-token\n")
    assert validate_config(config) is config
    file.write_bytes(text)
    with pytest.raises(ConfigError, match=rf"admin\.token_file: .*{reason}") as caught:
        validate_config(config)
    assert "two" not in str(caught.value), "whatever it holds may be a secret"


# ---- addresses


@pytest.mark.parametrize(
    ("binds", "admin", "taken"),
    [
        (["0.0.0.0:6650", "0.0.0.0:6651"], "127.0.0.1:8080", None),
        (["127.0.0.1:6650", "127.0.0.2:6650", "[::1]:6650"], "127.0.0.3:6650", None),
        (["a:6650", "b:6650"], "127.0.0.1:6650", None),
        (["0.0.0.0:6650", "0.0.0.0:6650"], "127.0.0.1:8080", "listener[1].bind"),
        (["0.0.0.0:6650", "127.0.0.1:6650"], "127.0.0.1:8080", "listener[1].bind"),
        (["10.0.0.1:6650", "0.0.0.0:6650"], "127.0.0.1:8080", "listener[1].bind"),
        (["[::]:6650", "10.0.0.1:6650"], "127.0.0.1:8080", "listener[1].bind"),
        (["0.0.0.0:6650", "[::]:6650"], "127.0.0.1:8080", "listener[1].bind"),
        (["[::]:6650", "[::1]:6650"], "127.0.0.1:8080", "listener[1].bind"),
        (["[::0]:6650", "[0:0::0]:6650"], "127.0.0.1:8080", "listener[1].bind"),
        (["0.0.0.0:6650", "[::1]:6650"], "127.0.0.1:8080", None),
        (["0.0.0.0:6650", "[::ffff:10.0.0.1]:6650"], "127.0.0.1:8080", "listener[1].bind"),
        (["0.0.0.0:6650", "proxy.example:6650"], "127.0.0.1:8080", "listener[1].bind"),
        (["[::]:6650", "proxy.example:6650"], "127.0.0.1:8080", "listener[1].bind"),
        (["Proxy.example:6650", "proxy.example:6650"], "127.0.0.1:8080", "listener[1].bind"),
        (["localhost:6650", "127.0.0.1:6650"], "127.0.0.1:8080", "listener[1].bind"),
        (["0.0.0.0:8080"], "127.0.0.1:8080", "admin.bind"),
        (["127.0.0.1:8080"], "0.0.0.0:8080", "admin.bind"),
        (["127.0.0.1:8080"], "localhost:8080", "admin.bind"),
    ],
)
def test_two_at_one_address(  # noqa: PLR0917 -- fixtures and cases
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, binds: list[str], admin: str, taken: str | None
) -> None:
    """To bind both succeeds; the second could not listen, which would be found out when the cluster has started."""
    sysctl = tmp_path / "bindv6only"
    sysctl.write_text("0\n")
    monkeypatch.setattr("proxy.config.binds._BINDV6ONLY", sysctl)
    config = make({"listener": [{"bind": bind} for bind in binds], "admin": {"bind": admin}})
    if taken is None:
        assert validate_config(config) is config
    else:
        assert error(config).startswith(f"{taken}: ")
        assert "is taken by listener[0].bind (" in error(config)


def test_ipv6_alone(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where the kernel keeps [::] to IPv6, 0.0.0.0 is another address."""
    sysctl = tmp_path / "bindv6only"
    monkeypatch.setattr("proxy.config.binds._BINDV6ONLY", sysctl)
    config = make({"listener": [{"bind": "0.0.0.0:6650"}, {"bind": "[::]:6650"}]})
    sysctl.write_text("1\n")
    assert validate_config(config) is config
    sysctl.unlink()
    assert error(config).startswith("listener[1].bind: [::]:6650 is taken by listener[0].bind (0.0.0.0:6650)")


# ---- names of methods


@pytest.mark.parametrize(("table", "named"), [("session", "session"), ("listener", "listener[1]")])
@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("tokn", 'there is no such method; did you mean "token"?'),
        ("scram-sha-256", 'there is no such method; did you mean "SCRAM-SHA-256"?'),
        ("zzzz", "there is no such method; there are: token, tls, basic, "),
    ],
)
def test_lifetimes_of_methods_that_are_none(make: Make, table: str, named: str, method: str, says: str) -> None:
    lifetimes = {"methods_max_reauth_ms": {method: 5000}}
    own: Tables = (
        {"session": lifetimes} if table == "session" else {"listener": [{}, {"bind": "0.0.0.0:1", **lifetimes}]}
    )
    tables: Tables = {**own, "authentication": ENABLED}
    assert error(make(tables)).startswith(f"{named}.methods_max_reauth_ms.{method}: {says}")
    config = make({**tables, "authentication": {**ENABLED, "plugins": {"own": {}}}})
    assert validate_config(config) is config, "only the plugin knows"


def test_a_broken_deny_list_is_named_with_its_line(tmp_path: Path) -> None:
    file, key = tmp_path / "denied", tmp_path / "key"
    key.write_bytes(b"k" * 32)
    file.write_text("# leaked\ntoken-id\n")
    authentication = Authentication(enabled=True, deny_file=str(file), token=TokenAuthentication(secret_key=str(key)))
    with pytest.raises(ConfigError, match=rf"authentication\.deny_file: {file}, line 2: "):
        validate_config(Config(authentication=authentication))
    file.write_text("# leaked\n")
    validate_config(Config(authentication=authentication))


def test_keys_of_the_audit_that_have_no_effect_are_refused(make: Make) -> None:
    for audit, key in (
        ({"output": "journald", "file": "/audit"}, "audit.file"),
        ({"output": "stdout", "file": "/audit"}, "audit.file"),
        ({"output": "journald", "format": "logfmt"}, "audit.format"),
    ):
        assert error(make({"audit": audit})).startswith(f"{key}: has no effect")
    validate_config(make({"audit": {"output": "journald"}}))
