"""The deny list's parser."""

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.common import deny_list
from proxy.common.deny_list import DenyList, credential_digest, parse_deny_list, read_deny_list, serial_value
from proxy.common.errors import ConfigError

DIGEST = "ab" * 32


def test_entries_of_each_kind_in_any_spelling(tmp_path: Path) -> None:
    file = tmp_path / "denied"
    colons = ":".join(["AB"] * 32)
    file.write_text(
        f"# leaked\n\ncertificate-sha256 {colons}\r\ntoken-sha256 {DIGEST}\ncertificate-serial 0A:0b\n"
        "certificate-serial 0C CN=ca, O=example\ntoken-id job #7\n"
    )
    found = read_deny_list(str(file))
    assert dict(found.kinds) == {
        credential_digest("certificate-sha256", DIGEST): "certificate-sha256",
        credential_digest("token-sha256", DIGEST): "token-sha256",
        credential_digest("certificate-serial", serial_value(0xA0B)): "certificate-serial",
        credential_digest("certificate-serial", serial_value(0xC, "CN=ca,O=example")): "certificate-serial",
        credential_digest("token-id", "job #7"): "token-id",
    }
    assert found.matching_kind([b"other", credential_digest("token-id", "job #7")]) == "token-id"
    assert not found.matching_kind([b"other"])
    assert read_deny_list("") == DenyList()


@pytest.mark.parametrize(
    "line",
    [
        b"token-sha256 eyJhbGciOi.secret",
        b"certificate-sha256 abcd",
        b"certificate-serial xyz",
        b"certificate-serial 0a example",
        b"certificate-serial 0a C = DE, O = example",
        b"certificate-serial 0a nickname=eyJ",
        b"certificate-serial 0a CN=" + b"CN=a," * 205 + b"CN=a",
        b"certificate-serial " + b"1" * 65,
        b"token-id",
        b"token-id \x01",
        b"secret-thing 1",
        b"\xff",
    ],
)
def test_a_broken_line_is_named_and_not_quoted(line: bytes) -> None:
    with pytest.raises(ConfigError, match="the file, line 2: ") as caught:
        parse_deny_list(b"# first\n" + line + b"\n", "the file")
    assert "secret-thing" not in str(caught.value)
    assert "eyJ" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "issuer"),
    [
        (r"O=a\2C b, CN=ca", r"O=a\, b,CN=ca"),
        ("O=a\\,  b,CN=ca", "O=a\\,  b,CN=ca"),
        ("emailAddress=a@example,CN=ca", "1.2.840.113549.1.9.1=a@example,CN=ca"),
        ("2.5.4.3=ca", "CN=ca"),
    ],
)
def test_an_issuer_is_compared_as_a_name(text: str, issuer: str) -> None:
    denied = parse_deny_list(f"certificate-serial 0a {text}".encode(), "the file")
    assert denied.matching_kind([credential_digest("certificate-serial", serial_value(10, issuer))])
    assert not denied.matching_kind([credential_digest("certificate-serial", serial_value(10))])


def test_bytes_and_entries_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deny_list, "ENTRIES_MAX", 2)
    with pytest.raises(ConfigError, match="line 3: more than 2 entries"):
        parse_deny_list(b"token-id a\ntoken-id b\ntoken-id c", "the file")
    monkeypatch.setattr(deny_list, "FILE_BYTES_MAX", 2)
    with pytest.raises(ConfigError, match="more than 2 bytes"):
        parse_deny_list(b"###", "the file")


@given(st.binary() | st.text().map(lambda text: b"certificate-serial 1 " + text.encode()))
def test_any_bytes_are_a_list_or_a_configuration_error(data: bytes) -> None:
    with contextlib.suppress(ConfigError):
        parse_deny_list(data, "the file")
