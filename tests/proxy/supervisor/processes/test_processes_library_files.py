"""proxy.supervisor.processes.library_files: what an auth worker may open by itself, and when it is replaced for it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog.testing
import trio
import trio.testing

from proxy.config.types import Config
from proxy.runtime.process.hardening import FileAccess
from proxy.supervisor.processes import library_files
from proxy.supervisor.processes.library_files import POLL_INTERVAL_S, files_of_libraries, watch_library_files

SASL = {"sasl": {"principal": "p/h@R", "keytab": "/keytab"}}


def config_of(authentication: dict[str, Any], credentials: dict[str, Any] | None = None) -> Config:
    brokers = {"service_url": "pulsar://b", **({"credentials": credentials} if credentials else {})}
    return msgspec.convert({"authentication": authentication, "brokers": brokers}, Config)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KRB5_CONFIG", "KRB5RCACHEDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)


def test_without_kerberos_and_third_parties_there_is_nothing() -> None:
    """Security."""
    config = config_of({"token": {"secret_key": "/key"}, "basic": {"file": "/users"}}, {"method": "token"})
    assert files_of_libraries(config) == FileAccess()


@pytest.mark.parametrize("config", [config_of(SASL), config_of({}, {"method": "sasl", "principal": "p/h@R"})])
def test_kerberos_reads_its_configuration_and_writes_its_cache_of_replays(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Security: keytabs are not among them (auth.gss.Keytab), nor Python's packages."""
    access = files_of_libraries(config)
    assert {"/etc/krb5.conf", "/etc/krb5.conf.d", "/etc/resolv.conf"} <= set(access.readable)
    assert not {"/etc", "/", "/keytab", *sys.path} & set(access.readable)
    assert access.writable == ("/var/tmp",)
    monkeypatch.setenv("KRB5_CONFIG", "/a/krb5.conf:/b/krb5.conf")
    monkeypatch.setenv("TMPDIR", "/t")
    access = files_of_libraries(config)
    assert {"/a/krb5.conf", "/b/krb5.conf"} <= set(access.readable)
    assert "/etc/krb5.conf" not in access.readable
    assert access.writable == ("/t",)
    monkeypatch.setenv("KRB5RCACHEDIR", "/r")
    assert files_of_libraries(config).writable == ("/r",)


def test_a_third_partys_provider_reads_packages_and_what_its_table_names() -> None:
    """Security: it writes nothing. A slash alone, and text with a slash in it, name nothing."""
    table = {"file": "/v/users", "more": {"deep": ["/v/one", 7, "relative/one"]}, "root": "/", "url": "ldap://h/x"}
    access = files_of_libraries(config_of({"plugins": {"voucher": table}}))
    assert {"/v/users", "/v/one", *(path for path in sys.path if path)} <= set(access.readable)
    assert not {"/", "", "relative/one", "ldap://h/x", "/etc/krb5.conf"} & set(access.readable)
    assert access.writable == ()


class Watched:
    """A file that a provider's table names, and how often auth workers were replaced for it."""

    def __init__(self, nursery: trio.Nursery, folder: Path) -> None:
        self.file = folder / "users"
        self.file.write_text("one")
        self.config = config_of({"plugins": {"voucher": {"file": str(self.file)}}})
        self.replaced = 0
        nursery.start_soon(watch_library_files, lambda: self.config, self._replace)

    async def _replace(self) -> None:
        await trio.lowlevel.checkpoint()
        self.replaced += 1

    async def poll(self) -> int:
        """Wait for a poll, and return how often auth workers were replaced until then."""
        await trio.sleep(POLL_INTERVAL_S)
        await trio.testing.wait_all_tasks_blocked()
        return self.replaced


@pytest.fixture
async def watched(
    nursery: trio.Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> Watched:
    async def read_at_once(read: Any, argument: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return read(argument)

    monkeypatch.setattr(library_files, "in_thread_without_signals", read_at_once)
    one = Watched(nursery, tmp_path)
    await trio.testing.wait_all_tasks_blocked()
    await trio.sleep(0.5)
    return one


async def test_a_file_in_anothers_place_needs_new_workers(watched: Watched, nursery: trio.Nursery) -> None:
    """As Kubernetes replaces a secret, and editors a file: Landlock's rule is for the file that was there."""
    assert await watched.poll() == 0
    watched.file.write_text("changed in its place")
    assert await watched.poll() == 0
    (watched.file.parent / "new").write_text("two")
    (watched.file.parent / "new").rename(watched.file)
    with structlog.testing.capture_logs() as logs:
        assert await watched.poll() == 1
    assert str(watched.file) in logs[0]["files"]
    assert await watched.poll() == 1
    nursery.cancel_scope.cancel()


async def test_a_file_that_is_missing_for_a_while_needs_new_workers_when_it_is_there(
    watched: Watched, nursery: trio.Nursery
) -> None:
    watched.file.unlink()
    assert await watched.poll() == 0
    watched.file.write_text("back")
    assert await watched.poll() == 1
    nursery.cancel_scope.cancel()


async def test_a_library_file_added_by_a_reload_replaces_no_auth_workers(
    watched: Watched, nursery: trio.Nursery, tmp_path: Path
) -> None:
    (tmp_path / "other").write_text("x")
    watched.config = config_of({"plugins": {"voucher": {"file": str(tmp_path / "other")}}})
    assert await watched.poll() == 0
    nursery.cancel_scope.cancel()
