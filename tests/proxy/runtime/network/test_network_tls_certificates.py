"""proxy.runtime.network.tls_certificates: which of a listener's certificates a client gets, by the name it asks for."""

# ruff: noqa: ASYNC240 -- what a test writes is small, and the clock stands still meanwhile

from __future__ import annotations

import datetime as dt
import ssl
import sys
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from e2e.lab.certificates import Authority, Pair
from hypothesis import given
from hypothesis import strategies as st
from tls_handshakes import TLS_1_2, TLS_1_3, front_context, shake_hands
from trustme import KeyType

from proxy.common import reloading_file
from proxy.common.errors import ConfigError
from proxy.config.types import ListenerCertificate, ListenerTls
from proxy.runtime.network.tls import ListenerContexts, TlsFailed, continue_handshake
from proxy.runtime.network.tls_certificates import NamedContexts, _is_dns_name, ignore_names_that_are_no_text
from proxy.runtime.network.tls_session import TlsSession

VERSIONS = pytest.mark.parametrize("version", [TLS_1_2, TLS_1_3], ids=["1.2", "1.3"])


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "ours")


@pytest.fixture(scope="module")
def pairs(authority: Authority) -> dict[str, Pair]:
    return {
        "default": authority.server("default", "default.example"),
        "exact": authority.server("exact", "a.example", "b.example"),
        "wild": authority.server("wild", "*.example"),
        "exact within wild": authority.server("within", "in.wild.example"),
        "wild below": authority.server("below", "*.Wild.example"),
    }


def further(*pairs: Pair) -> tuple[ListenerCertificate, ...]:
    return tuple(ListenerCertificate(certificate=pair.certificate, key=pair.key) for pair in pairs)


def client_context(
    authority: Authority, version: ssl.TLSVersion = TLS_1_3, pair: Pair | None = None, ciphers: str = ""
) -> ssl.SSLContext:
    """Of a client that takes a certificate of any name."""
    context = ssl.create_default_context(cafile=authority.file)
    context.check_hostname = False
    context.maximum_version = version
    if pair is not None:
        context.load_cert_chain(pair.certificate, pair.key)
    if ciphers:
        context.set_ciphers(ciphers)
    return context


def serial_of(pair: Pair) -> int:
    return x509.load_pem_x509_certificate(Path(pair.certificate).read_bytes()).serial_number


def serial_for(front: ssl.SSLContext, client: ssl.SSLContext, host: str | None) -> int:
    """Of the certificate that a client of this name gets."""
    _, theirs = shake_hands(front, client, host)
    return x509.load_der_x509_certificate(theirs.peer_certificate()).serial_number


NAMES = [
    ("default.example", "default"),
    (None, "default"),
    ("127.0.0.1", "default"),  # no name of a host (RFC 6066, 3)
    ("strange", "default"),
    ("strange.invalid", "default"),
    ("a.example", "exact"),
    ("B.EXAMPLE", "exact"),
    ("c.example", "wild"),
    ("example", "default"),
    ("c.d.example", "default"),  # one label, not two
    ("wild.example", "wild"),
    ("in.wild.example", "exact within wild"),
    ("other.wild.example", "wild below"),
]


@VERSIONS
@pytest.mark.parametrize(("host", "which"), NAMES)
def test_the_certificate_is_of_the_name_that_a_client_asks_for(
    authority: Authority, pairs: dict[str, Pair], version: ssl.TLSVersion, host: str | None, which: str
) -> None:
    first, *others = pairs.values()
    front = front_context(first, certificates=further(*others))
    assert serial_for(front, client_context(authority, version), host) == serial_of(pairs[which])


@given(st.one_of(st.none(), st.text(max_size=300), st.sampled_from([".", "..", "*.example", ".example", "x..example"])))
def test_no_name_is_too_strange(name: str | None) -> None:
    """Security: whatever a client sends as its name, the handshake goes on with one of the certificates."""
    default, wild = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    assert NamedContexts(default, {"*.example": wild, "*.": wild}, ()).for_name(name) in (default, wild)


@pytest.mark.parametrize(("name", "is_wild"), [("a.example.", True), ("A.example", True), (".example", False)])
def test_forms_of_a_name(name: str, is_wild: bool) -> None:
    default, wild = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    assert (NamedContexts(default, {"*.example": wild}, ()).for_name(name) is wild) == is_wild


# ---- clients' certificates


@VERSIONS
@pytest.mark.parametrize("host", [None, "default.example", "a.example", "c.example", "strange.invalid"])
def test_no_name_leads_around_the_authentication_of_clients(
    authority: Authority, pairs: dict[str, Pair], tmp_path: Path, version: ssl.TLSVersion, host: str | None
) -> None:
    """Security: a client's certificate is required, of our authority and not revoked, whatever name it asks for."""
    alice, bob, mallory = authority.client("alice"), authority.client("bob"), Authority(tmp_path, "x").client("mallory")
    crl = tmp_path / "crl.pem"
    crl.write_bytes(authority.crl(bob))
    first, *others = pairs.values()
    rules: dict[str, Any] = {"client_ca": authority.file, "client_crl": str(crl), "require_client_certificate": True}
    front = front_context(first, certificates=further(*others), **rules)
    ours, _ = shake_hands(front, client_context(authority, version, alice), host)
    assert ours.peer_certificate()
    for pair, kind in ((None, "no_certificate"), (mallory, "unknown_ca"), (bob, "certificate_revoked")):
        with pytest.raises(TlsFailed) as caught:
            shake_hands(front, client_context(authority, version, pair), host)
        assert caught.value.kind == kind


@pytest.mark.parametrize("host", [None, "a.example", "c.example"])
def test_versions_ciphers_and_groups_are_of_all_names(
    authority: Authority, pairs: dict[str, Pair], host: str | None
) -> None:
    first, *others = pairs.values()
    cipher = "ECDHE-ECDSA-AES256-GCM-SHA384"
    front = front_context(first, certificates=further(*others), ciphers=cipher, groups=("P-256",))
    for context, kind in (
        (client_context(authority, TLS_1_2, ciphers="ECDHE-ECDSA-AES128-GCM-SHA256"), "no_shared_cipher"),
        (client_context(authority, TLS_1_3), "no_shared_group"),
    ):
        context.set_ecdh_curve("prime256v1" if kind == "no_shared_cipher" else "X25519")
        with pytest.raises(TlsFailed) as caught:
            shake_hands(front, context, host)
        assert caught.value.kind == kind
    front = front_context(first, certificates=further(*others), minimum_version="1.3")
    with pytest.raises(TlsFailed) as caught:
        shake_hands(front, client_context(authority, TLS_1_2), host)
    assert caught.value.kind == "no_shared_version"


def test_the_end_of_a_crl_is_logged_once(authority: Authority, pairs: dict[str, Pair], tmp_path: Path) -> None:
    crl = tmp_path / "crl.pem"
    crl.write_bytes(authority.crl(days=6))
    first, *others = pairs.values()
    with structlog.testing.capture_logs() as logs:
        front_context(first, certificates=further(*others), client_ca=authority.file, client_crl=str(crl))
    assert len(logs) == 1


# ---- several for one name


def test_of_two_types_of_keys_a_client_gets_the_one_that_it_can_use(authority: Authority) -> None:
    rsa = authority.server("rsa", "two.example", key_type=KeyType.RSA)
    ecdsa = authority.server("ecdsa", "two.example")
    other = authority.server("other", "other.example", key_type=KeyType.RSA)
    for front, host in (
        (front_context(rsa, certificates=further(ecdsa)), None),
        (front_context(rsa, certificates=further(ecdsa)), "two.example"),
        (front_context(other, certificates=further(rsa, ecdsa)), "two.example"),
    ):
        for pair, cipher in ((rsa, "ECDHE-RSA-AES256-GCM-SHA384"), (ecdsa, "ECDHE-ECDSA-AES256-GCM-SHA384")):
            context = client_context(authority, TLS_1_2, ciphers=cipher)
            assert serial_for(front, context, host) == serial_of(pair)
    with pytest.raises(TlsFailed):  # the first alone is for all others
        shake_hands(
            front, client_context(authority, TLS_1_2, ciphers="ECDHE-ECDSA-AES256-GCM-SHA384"), "strange.invalid"
        )


def test_a_name_of_two_certificates_and_one_of_one(authority: Authority) -> None:
    both = authority.server("both", "a.example", "b.example", key_type=KeyType.RSA)
    one = authority.server("one", "a.example")
    front = front_context(both, certificates=further(one))
    context = client_context(authority, TLS_1_2, ciphers="ECDHE-ECDSA-AES256-GCM-SHA384")
    assert serial_for(front, context, "a.example") == serial_of(one)
    with pytest.raises(TlsFailed):
        shake_hands(front, context, "b.example")


@pytest.mark.parametrize("key_type", [KeyType.RSA, KeyType.ECDSA])
def test_two_certificates_of_one_name_and_type_are_refused(authority: Authority, key_type: KeyType) -> None:
    first = authority.server("first")
    one = authority.server("one", "a.example", "z.example", key_type=key_type)
    other = authority.server("other", "b.example", "Z.example", key_type=key_type)
    with pytest.raises(ConfigError) as caught:
        front_context(first, certificates=further(one, other))
    text = str(caught.value)
    assert text.startswith(f"listener[0].tls.certificates[1].certificate: {other.certificate} is for z.example")
    assert text.endswith(f"as {one.certificate}")
    with pytest.raises(ConfigError, match=r"certificates\[0\].certificate.* is for localhost"):
        front_context(first, certificates=further(first))


@pytest.mark.parametrize("host", ["127.0.0.2", "alice@a.example"])
def test_a_further_certificate_without_a_name_of_a_host_is_refused(authority: Authority, host: str) -> None:
    with pytest.raises(ConfigError, match=r"^listener\[0\].tls.certificates\[0\].certificate: .* has no DNS name"):
        front_context(authority.server("first"), certificates=further(authority.server("nameless", host)))


# ---- files


@pytest.mark.parametrize("what", ["certificate", "key"])
@pytest.mark.parametrize("content", [None, b"", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
def test_a_further_file_that_is_no_good_is_named(
    authority: Authority, pairs: dict[str, Pair], tmp_path: Path, what: str, content: bytes | None
) -> None:
    file = tmp_path / "spoilt.pem"
    if content is not None:
        file.write_bytes(content)
    good = pairs["exact"]
    spoilt = ListenerCertificate(**{"certificate": good.certificate, "key": good.key, what: str(file)})
    with pytest.raises(ConfigError) as caught:
        front_context(pairs["default"], certificates=(*further(pairs["wild"]), spoilt))
    assert str(caught.value).startswith("listener[0].tls.certificates[1].")
    assert str(file) in str(caught.value)


def test_a_key_of_another_certificate_is_refused(pairs: dict[str, Pair]) -> None:
    wrong = ListenerCertificate(certificate=pairs["exact"].certificate, key=pairs["wild"].key)
    with pytest.raises(ConfigError, match=r"^listener\[0\].tls.certificates\[0\]"):
        front_context(pairs["default"], certificates=(wrong,))


async def test_a_further_certificate_is_reloaded_with_the_others(
    authority: Authority, autojump_clock: trio.testing.MockClock
) -> None:
    first, other = authority.server("first"), authority.server("renewed", "old.example")
    config = ListenerTls(certificate=first.certificate, key=first.key, certificates=further(other))
    contexts = ListenerContexts("listener[0].tls", config)
    context = client_context(authority)
    old = serial_of(other)
    assert serial_for(contexts.front_context, context, "old.example") == old
    authority.server("renewed", "new.example")
    await trio.sleep(reloading_file.CHECK_INTERVAL_S)
    await contexts.check_files()
    assert serial_for(contexts.front_context, context, "new.example") == serial_of(other) != old
    assert serial_for(contexts.front_context, context, "old.example") == serial_of(first)
    Path(other.key).write_bytes(b"broken")
    await trio.sleep(reloading_file.CHECK_INTERVAL_S)
    with structlog.testing.capture_logs() as logs:
        await contexts.check_files()
    assert [entry["log_level"] for entry in logs] == ["error"]
    assert serial_for(contexts.front_context, context, "new.example") == serial_of(other)


# ---- the name, as bytes


def hello(authority: Authority, name: bytes) -> bytes:
    """A ClientHello with these bytes as its name."""
    session = TlsSession(client_context(authority), server_side=False, host="x" * 60 + ".example")
    continue_handshake(session)
    placeholder = b"x" * 60 + b".example"
    found = session.take_outgoing()
    assert placeholder in found
    return found.replace(placeholder, name.ljust(len(placeholder), b"y"))


@pytest.mark.parametrize("name", [b"*.example", b"..", b"a" * 68, b"-", b"%s%n", b" \t\r\n", b"'\"<>"])
def test_a_name_of_strange_characters_gets_the_default(
    authority: Authority, pairs: dict[str, Pair], name: bytes
) -> None:
    first, *others = pairs.values()
    session = TlsSession(front_context(first, certificates=further(*others)), server_side=True)
    assert not continue_handshake(session, hello(authority, name))
    assert session.take_outgoing()[0] == 22, "a ServerHello, and no alert"


@pytest.mark.parametrize("name", [b"\xff\xfe", b"\xc3\xa4.example", b"a\0.example"])
def test_a_name_that_is_no_text_ends_the_handshake_and_nothing_else(
    authority: Authority, pairs: dict[str, Pair], name: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Security: with an alert, and without a traceback on stderr, which strangers could fill."""
    reported: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    ignore_names_that_are_no_text()
    session = TlsSession(front_context(pairs["default"]), server_side=True)
    with pytest.raises(TlsFailed, match="not ASCII" if b"\0" not in name else "bad extension"):
        continue_handshake(session, hello(authority, name))
    assert session.take_outgoing()[0] == 21, "an alert"
    assert reported == []


def test_what_else_python_cannot_raise_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    ignore_names_that_are_no_text()

    class Broken:
        def __del__(self) -> None:
            raise UnicodeDecodeError("ascii", b"\xff", 0, 1, "no")

    Broken()
    assert [one.exc_type for one in reported] == [UnicodeDecodeError]


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        *(("a", True), ("a.example", True), ("*.example", True)),
        *(("", False), ("*", False), ("*.", False), ("f*.example", False), ("*.*.example", False), ("a.*", False)),
    ],
)
def test_a_wildcard_is_all_of_the_first_label(name: str, counts: bool) -> None:
    assert _is_dns_name(name) == counts


def test_names_in_a_certificate_are_of_any_case_and_some_count_for_nothing(
    authority: Authority, pairs: dict[str, Pair], tmp_path: Path
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "common.example")])
    now = dt.datetime.now(dt.UTC)
    names = [x509.DNSName("Big.EXAMPLE"), x509.DNSName("f*.example")]
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 7, now, now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    own = Pair(str(tmp_path / "own.pem"), str(tmp_path / "own.key"))
    Path(own.certificate).write_bytes(certificate.public_bytes(Encoding.PEM))
    Path(own.key).write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    front = front_context(pairs["default"], certificates=further(own))
    client = client_context(authority)
    client.load_verify_locations(own.certificate)
    assert serial_for(front, client, "big.example") == 7
    for host in ("foo.example", "common.example"):
        assert serial_for(front, client, host) == serial_of(pairs["default"])
