"""proxy.runtime.network.tls_options: ciphers and groups, through handshakes, and what is no good in a configuration."""

from __future__ import annotations

import ssl
from typing import Any

import pytest
from e2e.lab.certificates import Authority, Pair
from tls_handshakes import TLS_1_2, TLS_1_3, front_context, shake_hands
from trustme import KeyType

from proxy.common.errors import ConfigError
from proxy.config.types import BrokerTls
from proxy.runtime.network.tls import TlsFailed, broker_context

AES_128, AES_256 = "ECDHE-ECDSA-AES128-GCM-SHA256", "ECDHE-ECDSA-AES256-GCM-SHA384"
VERSIONS = pytest.mark.parametrize("version", [TLS_1_2, TLS_1_3], ids=["1.2", "1.3"])


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "ours")


@pytest.fixture(scope="module")
def server(authority: Authority) -> Pair:
    return authority.server("server")


def client_context(authority: Authority, version: ssl.TLSVersion = TLS_1_2, **more: Any) -> ssl.SSLContext:
    """As the configuration of brokers makes it."""
    context = broker_context(BrokerTls(trust=authority.file, **more)).value
    context.maximum_version = version
    return context


@pytest.mark.parametrize("cipher", [AES_128, AES_256])
def test_a_listeners_cipher_is_the_one_negotiated(authority: Authority, server: Pair, cipher: str) -> None:
    _, client = shake_hands(front_context(server, ciphers=cipher), client_context(authority))
    assert client._tls.cipher() == (cipher, "TLSv1.2", int(cipher[15:18]))


@pytest.mark.parametrize("cipher", [AES_128, AES_256])
def test_brokers_are_offered_the_ciphers_of_the_configuration(authority: Authority, server: Pair, cipher: str) -> None:
    ours, _ = shake_hands(front_context(server), client_context(authority, ciphers=cipher))
    assert ours._tls.cipher() == (cipher, "TLSv1.2", int(cipher[15:18]))


def test_a_client_without_a_cipher_of_the_listener_is_refused(authority: Authority, server: Pair) -> None:
    with pytest.raises(TlsFailed) as caught:
        shake_hands(front_context(server, ciphers=AES_256), client_context(authority, ciphers=AES_128))
    assert caught.value.kind == "no_shared_cipher"


def test_ciphers_are_for_tls_1_2_alone(authority: Authority, server: Pair) -> None:
    context = client_context(authority, TLS_1_3, ciphers=AES_128)
    assert shake_hands(front_context(server, ciphers=AES_256), context)[0].version == "TLSv1.3"


@VERSIONS
def test_a_listeners_group_is_the_one_negotiated(authority: Authority, version: ssl.TLSVersion) -> None:
    """With RSA: an ECDSA certificate of TLS 1.2 has to be of one of the client's groups itself (RFC 8422, 5.3)."""
    front = front_context(authority.server("rsa", key_type=KeyType.RSA), groups=("P-384",))
    assert shake_hands(front, client_context(authority, version))
    assert shake_hands(front, only_group(client_context(authority, version), "secp384r1"))
    with pytest.raises(TlsFailed) as caught:
        shake_hands(front, only_group(client_context(authority, version), "prime256v1"))
    assert caught.value.kind == ("no_shared_group" if version == TLS_1_3 else "no_shared_cipher")


@VERSIONS
def test_brokers_are_offered_the_group_of_the_configuration(
    authority: Authority, server: Pair, version: ssl.TLSVersion
) -> None:
    context = client_context(authority, version, groups=("P-256",))
    assert shake_hands(only_group(server_context(server), "prime256v1"), context)
    with pytest.raises(TlsFailed):
        shake_hands(only_group(server_context(server), "secp384r1"), context)


def only_group(context: ssl.SSLContext, name: str) -> ssl.SSLContext:
    context.set_ecdh_curve(name)
    return context


def server_context(pair: Pair) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    return context


@pytest.mark.parametrize("name", ["X25519", "X448", "P-256", "P-384", "P-521"])
def test_groups_of_every_openssl(authority: Authority, server: Pair, name: str) -> None:
    context = client_context(authority, TLS_1_3, groups=(name,))
    assert shake_hands(front_context(server, groups=(name,)), context)


@pytest.mark.parametrize("groups", [("X25519", "P-256"), ("X25519MLKEM768",)])
def test_some_groups_need_a_newer_python(
    authority: Authority, server: Pair, monkeypatch: pytest.MonkeyPatch, groups: tuple[str, ...]
) -> None:
    monkeypatch.delattr(ssl.SSLContext, "set_groups", raising=False)
    for make, key in ((lambda **more: front_context(server, **more), "listener[0].tls"), *broker_side(authority)):
        with pytest.raises(ConfigError) as caught:
            make(groups=groups)
        assert str(caught.value).startswith(f"{key}.groups: several, and those with MLKEM, need Python 3.15")


def broker_side(authority: Authority) -> list[tuple[Any, str]]:
    return [(lambda **more: client_context(authority, **more), "brokers.tls")]


def test_several_groups_where_python_can_set_them(
    authority: Authority, server: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of connections at once, too: the front context has them as well."""
    found: list[tuple[ssl.SSLContext, str]] = []
    monkeypatch.setattr(ssl.SSLContext, "set_groups", lambda *call: found.append(call), raising=False)
    front = front_context(server, groups=("X25519MLKEM768", "P-256"))
    context = client_context(authority, groups=("X25519MLKEM768", "P-256"))
    assert [groups for _, groups in found] == ["X25519MLKEM768:P-256"] * 3
    assert [found[1][0], found[2][0]] == [front, context]


@pytest.mark.parametrize("method", ["set_groups", "set_ecdh_curve"])
def test_a_group_that_openssl_does_not_know(server: Pair, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    def unknown(_context: ssl.SSLContext, name: str) -> None:
        raise ValueError(name)

    monkeypatch.delattr(ssl.SSLContext, "set_groups", raising=False)
    monkeypatch.setattr(ssl.SSLContext, method, unknown, raising=False)
    with pytest.raises(ConfigError) as caught:
        front_context(server, groups=("P-521",))
    assert str(caught.value).startswith("listener[0].tls.groups: P-521: not known to OpenSSL")


SELECTS_NONE, WEAK = "selects no cipher for TLS 1.2", "which is weak, or does not encrypt at all"

BAD_CIPHERS = [
    ("TYPO", f"'TYPO' {SELECTS_NONE}"),
    (f"{AES_256}:TYPO", f"'TYPO' {SELECTS_NONE}"),  # OpenSSL by itself goes on with the rest
    (f"TYPO {AES_256}", f"'TYPO' {SELECTS_NONE}"),
    ("TLS_AES_256_GCM_SHA384", SELECTS_NONE),
    ("a\0b", SELECTS_NONE),
    (":", SELECTS_NONE),
    ("HIGH:!HIGH", SELECTS_NONE),
    ("EXPORT", SELECTS_NONE),
    ("ALL", "which does not authenticate"),
    ("aNULL", "which does not authenticate"),
    (f"{AES_256}:ADH-AES256-GCM-SHA384", "which does not authenticate"),
    (f"{AES_256}:AECDH", "which does not authenticate"),
    ("eNULL", WEAK),
    ("NULL", WEAK),
    (f"{AES_256}:NULL-SHA256", WEAK),
    ("COMPLEMENTOFALL", WEAK),
    ("HIGH:!aNULL@SECLEVEL=0", "@SECLEVEL must not be below 2"),
    ("@SECLEVEL=1:HIGH:!aNULL", "@SECLEVEL must not be below 2"),
]


@pytest.mark.parametrize(("ciphers", "text"), BAD_CIPHERS)
def test_ciphers_that_are_no_good(authority: Authority, server: Pair, ciphers: str, text: str) -> None:
    """Security: no cipher without a certificate, or without encryption."""
    for make, key in ((lambda **more: front_context(server, **more), "listener[0].tls"), *broker_side(authority)):
        with pytest.raises(ConfigError) as caught:
            make(ciphers=ciphers)
        assert str(caught.value).startswith(f"{key}.ciphers: '")
        assert text in str(caught.value)


@pytest.mark.parametrize(
    "ciphers",
    [
        *(AES_256, f"{AES_256}:{AES_128}", f"{AES_256},{AES_128}", "ECDHE+AESGCM:ECDHE+CHACHA20", "DEFAULT:@STRENGTH"),
        "HIGH:!aNULL:!MD5:!EXPORT:+AES256@SECLEVEL=3",
    ],
)
def test_ciphers_that_are_good(authority: Authority, server: Pair, ciphers: str) -> None:
    shake_hands(front_context(server, ciphers=ciphers), client_context(authority, ciphers=ciphers))
