"""proxy.runtime.network.tls: the context for connections to servers, by a file of authorities or by the system's."""

from __future__ import annotations

import ssl
from pathlib import Path
from types import SimpleNamespace

import pytest
import trustme

from proxy.runtime.network.tls import new_client_context


def paths(cafile: Path | None) -> object:
    return SimpleNamespace(cafile=cafile and str(cafile), capath=None)


def test_the_systems_authorities_are_trusted_where_no_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "all.pem"))
    monkeypatch.setattr(ssl, "get_default_verify_paths", lambda: paths(tmp_path / "all.pem"))
    assert len(new_client_context("").get_ca_certs()) == 1


def test_a_system_without_authorities_trusts_no_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssl, "get_default_verify_paths", lambda: paths(None))
    monkeypatch.setattr(ssl.SSLContext, "load_default_certs", lambda *_: None)
    context = new_client_context("")
    assert context.get_ca_certs() == []
    assert context.verify_mode is ssl.CERT_REQUIRED


def test_a_file_without_authorities_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(ssl.SSLError):
        new_client_context(str(tmp_path / "empty"))
    with pytest.raises(FileNotFoundError):
        new_client_context(str(tmp_path / "missing"))
