"""proxy.supervisor.config_watch: a changed file is tried as soon as it stands still, and again where that failed."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from prometheus_client import CollectorRegistry
from supervisor_fakes import make_config
from test_supervisor_main import Setup

from proxy.common.errors import ConfigError
from proxy.config.load import load_config, load_plan
from proxy.supervisor.config_watch import (
    DISABLED_POLL_S,
    MISSING,
    NOT_WATCHED,
    RETRY_PAUSE_FIRST_S,
    RETRY_PAUSE_MAX_S,
    ChangeDetector,
    ConfigFileWatcher,
    ReloadMetrics,
    fingerprint,
    in_thread_without_signals,
)
from proxy.supervisor.handover.exec_handover import SIGNALS
from proxy.supervisor.processes.configure import ReloadRefused

SECRET = "eyJhbGciOiJIUzI1NiJ9-the-secret"


# ---- when


def looks(contents: str) -> list[int]:
    """At which looks a content is tried; a letter stands for each content."""
    detector = ChangeDetector()
    return [number for number, content in enumerate(contents) if detector.is_due(content.encode(), 0.0)]


@pytest.mark.parametrize(
    ("contents", "tried_at"),
    [
        ("aaaa", [1]),
        ("aabbbb", [1, 3]),
        ("aabcdee", [1, 6]),
        ("aaba", [1]),
        ("aabaabb", [1, 6]),
        ("aabbaa", [1, 3, 5]),
    ],
    ids=[
        "what is there at the start",
        "a change, once",
        "only the last of several, when it stands still",
        "a change that is taken back while it is written",
        "such a change, made again",
        "what was tried before counts again after another",
    ],
)
def test_a_content_is_tried_once_when_it_was_the_same_at_two_looks(contents: str, tried_at: list[int]) -> None:
    assert looks(contents) == tried_at


def test_a_content_with_a_noted_attempt_is_not_due() -> None:
    detector = ChangeDetector()
    detector.note_attempt(b"a")
    assert [detector.is_due(b"a", 0.0) for _ in range(3)] == [False] * 3


def tried_at(detector: ChangeDetector, until_s: int) -> list[int]:
    """In which seconds one content, which fails each time, is tried."""
    found = []
    for second in range(until_s):
        if detector.is_due(b"a", float(second)):
            detector.note_failure(float(second))
            found.append(second)
    return found


def test_a_failed_content_is_due_again_with_growing_pauses() -> None:
    times = tried_at(ChangeDetector(), 4000)
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert pauses[:5] == [
        RETRY_PAUSE_FIRST_S,
        2 * RETRY_PAUSE_FIRST_S,
        4 * RETRY_PAUSE_FIRST_S,
        8 * RETRY_PAUSE_FIRST_S,
        RETRY_PAUSE_MAX_S,
    ]
    assert set(pauses[5:]) == {RETRY_PAUSE_MAX_S}


def test_another_content_does_not_wait_for_the_pause() -> None:
    detector = ChangeDetector()
    tried_at(detector, 4000)
    assert [detector.is_due(b"b", 4000.0) for _ in range(3)] == [False, True, False]
    detector.note_failure(4000.0)
    assert not detector.is_due(b"b", 4000.0 + RETRY_PAUSE_FIRST_S - 1)
    assert detector.is_due(b"b", 4000.0 + RETRY_PAUSE_FIRST_S), "the pauses begin again"


def test_a_failed_content_is_due_again_after_a_noted_attempt() -> None:
    detector = ChangeDetector()
    assert tried_at(detector, 10) == [1]
    detector.note_attempt(b"a")
    assert detector.is_due(b"a", 1 + RETRY_PAUSE_FIRST_S)


def test_a_noted_chance_makes_a_failed_content_due_once() -> None:
    detector = ChangeDetector()
    assert tried_at(detector, 10) == [1]
    detector.note_chance()
    assert [detector.is_due(b"a", 10.0) for _ in range(3)] == [True, False, False]


def test_an_unwatched_file_is_never_due() -> None:
    detector = ChangeDetector()
    assert [detector.is_due(NOT_WATCHED, 0.0) for _ in range(3)] == [False] * 3


# ---- changes of content


def test_content_counts_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "proxy.toml"
    file.write_text("a = 1")
    first = fingerprint(file)
    os.utime(file, ns=(1, 1))
    assert fingerprint(file) == first
    stamp = file.stat()
    file.write_text("a = 2")
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # a file system with a coarse clock
    assert fingerprint(file) != first


def test_a_config_map_that_is_swapped(tmp_path: Path) -> None:
    """Kubernetes: proxy.toml → ..data/proxy.toml, ..data → a folder, and the link is renamed over the old one."""
    for version in ("1", "2"):
        folder = tmp_path / f"..{version}"
        folder.mkdir()
        (folder / "proxy.toml").write_text(f"a = {version}")
    (tmp_path / "..data").symlink_to("..1")
    file = tmp_path / "proxy.toml"
    file.symlink_to("..data/proxy.toml")
    before = fingerprint(file)
    (tmp_path / "..data_tmp").symlink_to("..2")
    (tmp_path / "..data_tmp").rename(tmp_path / "..data")
    assert fingerprint(file) not in {before, MISSING}


def test_a_file_that_is_missing_is_one_more_content(tmp_path: Path) -> None:
    assert fingerprint(tmp_path / "none") == MISSING
    assert looks("aammaa") == [1, 3, 5]


def test_a_pipe_is_not_watched(tmp_path: Path) -> None:
    """No task waits for its writer, and none reads what another reader wants."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert fingerprint(pipe) == NOT_WATCHED
    assert fingerprint(tmp_path) in {MISSING, NOT_WATCHED}, "nor is a folder"


# ---- the loop


run_in_thread = trio.to_thread.run_sync
mask_of_this_thread = signal.pthread_sigmask


async def test_a_thread_that_looks_takes_no_signals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It outlives the look; a signal that it took in the moment of an upgrade's exec would be lost."""
    masks: list[Any] = []

    def read(path: Path) -> Path:
        assert threading.current_thread() is not threading.main_thread()
        masks.append(mask_of_this_thread(signal.SIG_BLOCK, ()))
        return path

    monkeypatch.setattr(signal, "pthread_sigmask", mask_of_this_thread)
    monkeypatch.setattr(trio.to_thread, "run_sync", run_in_thread)
    assert await in_thread_without_signals(read, tmp_path) == tmp_path
    assert masks[0] >= SIGNALS
    assert not SIGNALS & mask_of_this_thread(signal.SIG_BLOCK, ())


@pytest.fixture(autouse=True)
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's clock would not wait for them."""

    async def run_sync(work: Callable[..., Any], *arguments: object, **_options: object) -> object:
        await trio.lowlevel.checkpoint()
        return work(*arguments)

    monkeypatch.setattr(trio.to_thread, "run_sync", run_sync)
    monkeypatch.setattr(signal, "pthread_sigmask", lambda _how, _which: set())


async def test_the_watch_can_be_turned_off_and_on(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    file = tmp_path / "proxy.toml"
    file.write_text("a = 1")
    interval_ms = 0
    tried: list[str] = []

    async def on_change() -> bool:
        await trio.lowlevel.checkpoint()
        tried.append(file.read_text())
        return True

    nursery.start_soon(ConfigFileWatcher(file, lambda: interval_ms, on_change).run)
    await trio.sleep(10 * DISABLED_POLL_S)
    assert tried == []
    interval_ms = 1000
    await trio.sleep(2 * DISABLED_POLL_S)
    await _eventually(lambda: tried == ["a = 1"])
    nursery.cancel_scope.cancel()


async def _eventually(condition: Callable[[], object], *, patience_s: float = 60) -> None:
    with trio.fail_after(patience_s):
        while not condition():  # noqa: ASYNC110 -- a watch looks in its own time
            await trio.sleep(1)


# ---- in the supervisor


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Setup:
    setup = Setup(monkeypatch, tmp_path)
    setup.cluster.registry = CollectorRegistry()  # type: ignore[assignment]
    setup.config_file.write_text("")
    setup.config = load_plan(setup.config_file, {}, running_forwarders=0).require().config  # as a cluster has it
    return setup


def successful(setup: Setup) -> float | None:
    registry: CollectorRegistry = setup.cluster.registry  # type: ignore[assignment]
    return registry.get_sample_value("pulsar_proxy_config_last_reload_successful")


async def test_a_change_takes_effect_by_itself(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    await setup.run(nursery)
    await trio.sleep(60)
    assert setup.cluster.reloaded == [], "what is in force already makes no difference"
    setup.config_file.write_text("[limits]\nmax_connections = 5\n")
    await _eventually(lambda: setup.cluster.reloaded)
    assert [config.limits.max_connections for config in setup.cluster.reloaded] == [5]
    assert successful(setup) == 1
    nursery.cancel_scope.cancel()


async def test_a_bad_change_is_told_once_and_the_next_good_one_counts(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    await setup.run(nursery)
    with structlog.testing.capture_logs() as logs:
        setup.config_file.write_text("[limits]\nmax_conections = 5\n")
        await _eventually(lambda: successful(setup) == 0)
        await trio.sleep(600)
        assert [entry["event"] for entry in logs] == ["the configuration was not reloaded; the old one stays"]
        assert "max_conections" in logs[0]["reason"]
        setup.config_file.write_text("")  # as it was
        await _eventually(lambda: successful(setup) == 1)
    assert setup.cluster.reloaded == []
    nursery.cancel_scope.cancel()


async def test_a_change_that_the_cluster_refuses_is_logged_once(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    await setup.run(nursery)
    setup.cluster.reload_error = ReloadRefused("a restart is needed to change: admin.bind")
    with structlog.testing.capture_logs() as logs:
        setup.config_file.write_text("[limits]\nmax_connections = 5\n")
        await _eventually(lambda: successful(setup) == 0)
        await trio.sleep(600)
    assert len(logs) == 1
    nursery.cancel_scope.cancel()


async def test_a_failure_that_passes_is_tried_again_and_another_reason_is_told(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """A worker that is slow for a moment, a mounted Secret that comes after its ConfigMap."""
    await setup.run(nursery)
    with structlog.testing.capture_logs() as logs:
        for reason in ("a worker does not answer", "no such file"):
            setup.cluster.reload_error = ReloadRefused(reason)
            setup.config_file.write_text("[limits]\nmax_connections = 5\n")
            await trio.sleep(2000)
            assert successful(setup) == 0
        setup.cluster.reload_error = None
        await _eventually(lambda: successful(setup) == 1, patience_s=2 * RETRY_PAUSE_MAX_S)
    assert [config.limits.max_connections for config in setup.cluster.reloaded] == [5]
    reasons = [entry["reason"] for entry in logs if entry["log_level"] == "error"]
    assert reasons == ["a worker does not answer", "no such file"]
    nursery.cancel_scope.cancel()


async def test_a_defect_does_not_end_the_cluster(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    ended = await setup.run(nursery)
    setup.cluster.reload_error = RecursionError()
    with structlog.testing.capture_logs() as logs:
        setup.config_file.write_text("[limits]\nmax_connections = 5\n")
        await _eventually(lambda: successful(setup) == 0)
        await trio.sleep(600)
    assert [entry["event"] for entry in logs] == ["a changed configuration met a defect; the old one stays"]
    assert not ended.is_set()
    nursery.cancel_scope.cancel()


async def test_a_change_in_a_drain_is_left_alone(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    setup.config = make_config(shutdown={"delay_ms": 600_000})
    ended = await setup.run(nursery)
    setup.supervisor._drain_wanted.set()
    setup.config_file.write_text("[limits]\nmax_connections = 5\n")
    await ended.wait()
    assert setup.cluster.reloaded == []
    nursery.cancel_scope.cancel()


def test_metrics() -> None:
    registry = CollectorRegistry()
    now = 1_000.0
    metrics = ReloadMetrics(registry, lambda: now)

    def values() -> list[float | None]:
        names = ("successful", "success_timestamp_seconds")
        return [registry.get_sample_value(f"pulsar_proxy_config_last_reload_{name}") for name in names]

    assert values() == [1, 1_000]
    now = 2_000.0
    metrics.record_failure()
    assert values() == [0, 1_000]
    metrics.record_success()
    assert values() == [1, 2_000]


@pytest.mark.parametrize(
    "text",
    [
        f'[brokers.credentials]\nmethod = "token"\ntoken = "{SECRET}\n',
        f'[brokers.credentials]\nmethod = "token"\ntoken = {SECRET}\n',
        f'[brokers.credentials]\nmethod = "token"\ntoken = ["{SECRET}"]\n',
        f'[brokers.credentials]\nmethod = "token"\ntoken = {{ value = "{SECRET}" }}\n',
        f'[brokers.credentials]\nmethod = 1\ntoken = "{SECRET}"\n',
        f'[brokers.credentials]\nmethod = "token"\ntoken = "{SECRET}"\ntoken = "{SECRET}"\n',
        f'[brokers.credentials]\nmethod = "token"\ntoken = "{SECRET}"\nfile = "/also"\n',
        f'[brokers.credentials]\nmethod = "token"\ntoken = """{SECRET}\n',
        f'[brokers]\ntoken = "{SECRET}"\n',
        f'[brokers.credentials]\nmethod = "token"\ntoken = "{SECRET}"\n[limits]\nmax_conections = 1\n',
    ],
)
def test_no_error_of_a_configuration_says_a_secret(tmp_path: Path, text: str) -> None:
    """Security: the reason is logged, without an operator having asked for the reload."""
    file = tmp_path / "proxy.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(file, {})
    assert SECRET not in str(error.value)
