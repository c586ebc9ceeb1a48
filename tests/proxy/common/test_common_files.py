"""proxy.common.files: files by descriptors, and copies for libraries that take nothing but a path."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import trustme

from proxy.common import files
from proxy.common.files import (
    SYSTEM_AUTHORITIES,
    open_directly,
    path_of_copy,
    read_file,
    set_opener,
)


@pytest.fixture(autouse=True)
def opener() -> Iterator[None]:
    yield
    set_opener(open_directly)


def test_files_are_opened_by_the_processs_own_way(tmp_path: Path) -> None:
    """As in a worker, which asks the supervisor."""
    file = tmp_path / "file"
    file.write_bytes(b"0123456789")
    asked = []

    def opener(path: str) -> int:
        asked.append(path)
        return os.open(file, os.O_RDONLY)

    set_opener(opener)
    assert read_file("/one") == b"0123456789"
    assert read_file("/two", 4) == b"0123"
    with path_of_copy("/three") as path:
        assert Path(path).read_bytes() == b"0123456789"
    assert asked == ["/one", "/two", "/three"]


def test_a_copy_is_no_file_and_ends_with_its_use(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"k" * 3_000_000)
    before = len(os.listdir("/proc/self/fd"))
    with path_of_copy(str(file)) as path:
        assert os.readlink(path).startswith("/memfd:")
        assert Path(path).read_bytes() == file.read_bytes()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_is_missing_leaves_nothing_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError), path_of_copy(str(tmp_path / "missing")):
        pass
    assert len(os.listdir("/proc/self/fd")) == before


def paths(cafile: Path | None, capath: Path | None) -> object:
    return SimpleNamespace(cafile=cafile and str(cafile), capath=capath and str(capath))


def test_the_systems_authorities_are_its_file_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "all.pem"))
    monkeypatch.setattr(ssl, "get_default_verify_paths", lambda: paths(tmp_path / "all.pem", tmp_path))
    assert read_file(SYSTEM_AUTHORITIES) == authority.cert_pem.bytes()


def test_the_systems_authorities_are_the_files_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's: a link for each, with the hash that OpenSSL looks for; other names do not count."""
    for name in ("0123abcd.0", "0123abcd.1", "ca.pem"):
        trustme.CA().cert_pem.write_to_path(str(tmp_path / name))
    (tmp_path / "ffffffff.0").symlink_to(tmp_path / "gone")
    monkeypatch.setattr(ssl, "get_default_verify_paths", lambda: paths(None, tmp_path))
    context = ssl.create_default_context(cadata=read_file(SYSTEM_AUTHORITIES).decode())
    assert len(context.get_ca_certs()) == 2


def test_files_are_opened_directly_by_default(tmp_path: Path) -> None:
    assert files._opener is open_directly
