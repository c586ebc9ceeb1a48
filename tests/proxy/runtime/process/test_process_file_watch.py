"""proxy.runtime.process.file_watch: what became of files, whether or not anything uses them."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog.testing
import trio
import trio.testing

from proxy.common.errors import ConfigError
from proxy.common.reloading_file import CHECK_INTERVAL_S, HeldFile, ReloadingFile, file_stamps, take_over_held_files
from proxy.runtime.network.certificate_ends import CRL_WARNING_S
from proxy.runtime.observability.metrics import new_registry
from proxy.runtime.process.file_watch import CHECK_PAUSE_S, CRL_WARNING_PAUSE_S, FileWatch

DAY_S = 86400.0
ENDS = "pulsar_proxy_certificate_expiry_timestamp_seconds"


class Watched:
    """A watch, its metrics, and a value of a file; ``key`` is the test's own, since files are the process's."""

    def __init__(self, key: str, file: Path) -> None:
        self.key, self.file = key, file
        self.unix_s = 0.0
        self.end = 1000 * DAY_S
        self.watch = FileWatch(lambda: self.unix_s)
        self.watch.shows_ends = True
        self._registry = new_registry()
        self._registry.register(self.watch)
        file.write_text("first")
        self.value = self.new_value()

    def new_value(self) -> ReloadingFile[str]:
        return ReloadingFile(self.key, [str(self.file)], self.build, self.read_ends)

    def read_ends(self) -> dict[str, float]:
        return {f"{self.key}.client_crl": self.end}

    def build(self) -> str:
        text = self.file.read_text()
        if text.startswith("bad"):
            raise ConfigError(f"{self.key}: it is {text}")
        return text

    def get(self, name: str, **labels: str) -> float | None:
        return self._registry.get_sample_value(name, labels)

    async def check(self, times: int = 1) -> None:
        for _ in range(times):
            await trio.sleep(CHECK_INTERVAL_S)
            await self.watch.check()

    @property
    def shown(self) -> tuple[float | None, ...]:
        """What is in force, and the numbers of successes and failures."""
        counts = [self.get("pulsar_proxy_file_reloads_total", key=self.key, result=r) for r in ("success", "failure")]
        return self.get("pulsar_proxy_file_last_reload_successful", key=self.key), *counts

    @property
    def shown_end(self) -> float | None:
        return self.get(ENDS, key=f"{self.key}.client_crl")


@pytest.fixture
def it(request: pytest.FixtureRequest, tmp_path: Path) -> Watched:
    return Watched(request.node.name, tmp_path / "file")


async def test_files_are_looked_at_regularly(
    it: Watched, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked_at: list[float] = []

    async def check() -> None:
        await trio.lowlevel.checkpoint()
        checked_at.append(trio.current_time())

    monkeypatch.setattr(it.watch, "check", check)
    start = trio.current_time()
    nursery.start_soon(it.watch.run)
    await trio.sleep(2.5 * CHECK_PAUSE_S)
    assert checked_at == [start, start + CHECK_PAUSE_S, start + 2 * CHECK_PAUSE_S]
    nursery.cancel_scope.cancel()


async def test_a_file_that_nothing_uses(it: Watched, autojump_clock: trio.testing.MockClock) -> None:
    """An alert begins when a file is broken, and ends when it is mended, though no client needs it meanwhile."""
    await it.check()
    assert it.shown == (1, 0, 0)
    it.file.write_text("bad, very bad")
    await it.check(3)
    assert it.shown == (0, 0, 1), "the same change is counted once"
    it.file.write_text("bad again")
    await it.check()
    assert it.shown == (0, 0, 2)
    it.file.write_text("mended")
    await it.check()
    assert (it.shown, it.value.value) == ((1, 1, 2), "mended")


async def test_a_file_that_is_moved_aside_and_back(it: Watched, autojump_clock: trio.testing.MockClock) -> None:
    aside = it.file.with_name("aside")
    it.file.rename(aside)
    await it.check()
    assert it.shown == (0, 0, 1)
    aside.rename(it.file)
    await it.check()
    assert it.shown == (1, 0, 1)


async def test_the_end_is_that_of_what_is_in_force(it: Watched, autojump_clock: trio.testing.MockClock) -> None:
    """Security: a certificate that ends soon must not be hidden by a file that cannot be used."""
    before, it.end = it.end, 2000 * DAY_S
    it.file.write_text("bad")
    await it.check()
    assert it.shown_end == before
    it.file.write_text("another")
    await it.check()
    assert it.shown_end == it.end


async def test_a_held_value(tmp_path: Path) -> None:
    """The supervisor itself says whether a held file is in force."""
    file, key = tmp_path / "held", "test_a_held_value"
    file.write_text("1")
    held = HeldFile(key, [str(file)], file.read_text, lambda: {key: float(file.read_text())})
    watch, registry = FileWatch(), new_registry()
    watch.shows_ends = True
    registry.register(watch)
    file.write_text("22")
    assert registry.get_sample_value(ENDS, {"key": key}) == 1, "no broker has accepted it yet"
    await take_over_held_files(file_stamps([str(file)]))
    assert registry.get_sample_value(ENDS, {"key": key}) == 22
    file.write_text("333")
    with pytest.raises(ConfigError):
        await take_over_held_files({str(file): "another"})
    counts = [
        registry.get_sample_value("pulsar_proxy_file_reloads_total", {"key": key, "result": result})
        for result in ("success", "failure")
    ]
    assert (counts, held.value) == ([1, 1], "22")
    assert registry.get_sample_value(ENDS, {"key": key}) == 22
    assert registry.get_sample_value("pulsar_proxy_file_last_reload_successful", {"key": key}) is None


async def test_only_one_worker_of_a_role_shows_ends(it: Watched) -> None:
    it.watch.shows_ends = False
    assert (it.shown_end, it.shown) == (None, (1, 0, 0))


async def test_the_newest_value_of_a_key_counts(it: Watched) -> None:
    """A reload of the configuration replaces values; connections may keep the old one for a while."""
    before, it.end = it.value, 5 * DAY_S
    it.value = it.new_value()
    assert (before.ends, it.shown_end) == ({f"{it.key}.client_crl": 1000 * DAY_S}, it.end)
    after = ReloadingFile(it.key, [""], str)
    assert (it.shown_end, after.files) == (None, ()), "the key names no file any more"


async def test_a_crl_that_ends_is_logged_as_time_passes(it: Watched, autojump_clock: trio.testing.MockClock) -> None:
    """Security: all clients of its issuer are refused from then on."""

    async def logged_at(unix_s: float) -> list[str]:
        it.unix_s = unix_s
        with structlog.testing.capture_logs() as logs:
            await it.check(2)
        own = [entry for entry in logs if entry.get("key") == f"{it.key}.client_crl"]
        return [entry["event"].partition(":")[0] for entry in own]

    await it.check()
    assert await logged_at(it.end - CRL_WARNING_S) == []
    soon = it.end - CRL_WARNING_S + 1
    assert await logged_at(soon) == ["a CRL expires soon"], "once, not at each check"
    assert await logged_at(soon + CRL_WARNING_PAUSE_S - 1) == []
    assert await logged_at(soon + CRL_WARNING_PAUSE_S) == ["a CRL expires soon"]
    assert await logged_at(it.end - 1) == ["a CRL expires soon"]
    assert await logged_at(it.end) == ["a CRL has expired"], "at once"
    it.end += DAY_S
    it.file.write_text("another, which is logged where it is loaded")
    assert await logged_at(it.end - DAY_S / 2) == []
    it.watch.shows_ends = False
    assert await logged_at(it.end) == []
