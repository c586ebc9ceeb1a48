"""proxy.runtime.network.certificate_ends: the first end in a file."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest
from cryptography import x509
from e2e.lab.certificates import Authority

from proxy.runtime.network.certificate_ends import CRL_WARNING_S, crl_warning, read_ends


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


def end_of(file: str) -> float:
    return x509.load_pem_x509_certificate(Path(file).read_bytes()).not_valid_after_utc.timestamp()


def test_the_first_end_in_a_file_counts(authority: Authority, tmp_path: Path) -> None:
    """Of a chain as of a bundle, wherever it stands."""
    good, old = authority.server("good").certificate, authority.server("old", expired=True).certificate
    assert end_of(old) < end_of(good)
    both = tmp_path / "both.pem"
    for first, second in ((good, old), (old, good)):
        both.write_bytes(Path(first).read_bytes() + Path(second).read_bytes())
        assert read_ends([("a", good), ("b", str(both))]) == {"a": end_of(good), "b": end_of(old)}


def test_a_private_key_in_the_file_is_passed_over(authority: Authority, tmp_path: Path) -> None:
    pair, both = authority.server("good"), tmp_path / "both.pem"
    both.write_bytes(Path(pair.key).read_bytes() + Path(pair.certificate).read_bytes())
    assert read_ends([("a", str(both))]) == {"a": end_of(pair.certificate)}


def test_the_first_next_update_of_several_crls(authority: Authority, tmp_path: Path) -> None:
    file = tmp_path / "crl.pem"
    file.write_bytes(authority.crl(days=30) + authority.crl(days=3))
    [(key, end)] = read_ends([("listener[0].tls.client_crl", str(file))]).items()
    assert key == "listener[0].tls.client_crl"
    assert 2.9 < (end - dt.datetime.now(dt.UTC).timestamp()) / 86400 < 3.1


@pytest.mark.parametrize("content", [b"", b"no PEM", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
def test_what_cannot_be_read_has_no_end(authority: Authority, tmp_path: Path, content: bytes) -> None:
    """It is of another opinion than OpenSSL, which has loaded the file: no reason to end a worker."""
    file, good = tmp_path / "file", authority.server("good").certificate
    file.write_bytes(content)
    found = read_ends([("a", str(file)), ("b", ""), ("c", str(tmp_path / "missing")), ("d", good)])
    assert found == {"d": end_of(good)}


@pytest.mark.parametrize(
    ("left_s", "event"),
    [
        (CRL_WARNING_S, ""),
        (CRL_WARNING_S - 1, "a CRL expires soon"),
        (1, "a CRL expires soon"),
        (0, "a CRL has expired"),
    ],
)
def test_when_to_warn(left_s: float, event: str) -> None:
    assert crl_warning(1000.0 + left_s, 1000.0).partition(":")[0] == event
