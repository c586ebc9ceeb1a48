"""Whom the script of `helm test` trusts, and what it shows; tests/e2e has the rest of it."""

import runpy
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
import trustme
from local.generate import CHART

from tests.deploy.metric_names import ROOT


@pytest.fixture
def tls_context(monkeypatch: pytest.MonkeyPatch) -> Callable[[], ssl.SSLContext]:
    for name in ("CA_FILE", "CERTIFICATE_FILE", "KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    function = runpy.run_path(str(ROOT / CHART / "files/smoke.py"))["tls_context"]
    assert callable(function)
    return function


def test_the_authority_of_the_secret_is_trusted(
    tls_context: Callable[[], ssl.SSLContext], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trustme.CA().cert_pem.write_to_path(tmp_path / "ca.crt")
    monkeypatch.setenv("CA_FILE", str(tmp_path / "ca.crt"))
    context = tls_context()
    assert len(context.get_ca_certs()) == 1
    assert context.verify_mode is ssl.CERT_REQUIRED


def test_without_one_the_systems_authorities_are_and_names_are_still_checked(
    tls_context: Callable[[], ssl.SSLContext], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CA_FILE", str(tmp_path / "not-there"))
    context = tls_context()
    assert context.get_ca_certs() == ssl.create_default_context().get_ca_certs()
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)


def test_a_clients_certificate_is_loaded(
    tls_context: Callable[[], ssl.SSLContext], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    certificate = trustme.CA().issue_cert("client.example.org")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "tls.crt")
    certificate.private_key_pem.write_to_path(tmp_path / "tls.key")
    monkeypatch.setenv("CERTIFICATE_FILE", str(tmp_path / "tls.crt"))
    monkeypatch.setenv("KEY_FILE", str(tmp_path / "tls.key"))
    tls_context()
    monkeypatch.setenv("CERTIFICATE_FILE", str(tmp_path / "not-there"))
    with pytest.raises(FileNotFoundError):
        tls_context()
