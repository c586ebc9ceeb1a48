"""proxy.common.reloading_file: looked at once a second, made again when changed, and never lost."""

# ruff: noqa: ASYNC240 -- what a test writes is small, and the clock stands still meanwhile

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import structlog.testing
import trio
import trio.testing

from proxy.common.eager import Finished, continue_in_task, start_eagerly
from proxy.common.errors import ConfigError
from proxy.common.reloading_file import (
    CHECK_INTERVAL_S,
    HeldFile,
    ReloadingFile,
    file_stamps,
    take_over_held_files,
)

KEY = "table.key"


class Value:
    """What a file holds; counts how often it was read."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.builds = 0
        self.threads: list[threading.Thread] = []

    def __call__(self) -> str:
        self.builds += 1
        self.threads.append(threading.current_thread())
        text = self.file.read_text()
        if text.startswith("bad"):
            raise ConfigError(f"{KEY}: {self.file} is {text}")
        return text


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "file"
    file.write_text("first")
    return file


@pytest.fixture
def value(file: Path) -> Value:
    return Value(file)


async def a_second_later(watched: ReloadingFile[str]) -> str:
    await trio.sleep(CHECK_INTERVAL_S)
    return await watched.current_value()


def test_the_value_is_made_at_once_in_the_calling_thread(file: Path, value: Value) -> None:
    assert ReloadingFile(KEY, [str(file)], value).value == "first"
    assert value.threads == [threading.current_thread()]


def test_a_value_that_cannot_be_made_at_first_is_a_configuration_error(file: Path, value: Value) -> None:
    file.write_text("bad")
    with pytest.raises(ConfigError, match=f"^{KEY}: .*{file.name} is bad$"):
        ReloadingFile(KEY, [str(file)], value)
    file.unlink()
    with pytest.raises(ConfigError, match=f"^{KEY}: {file}: No such file or directory$"):
        ReloadingFile(KEY, [str(file)], value)


def test_an_error_without_a_name_names_all_files(file: Path) -> None:
    """OpenSSL's know none."""

    def build() -> str:
        raise PermissionError(13, "Permission denied")

    with pytest.raises(ConfigError, match=f"^{KEY}: {file}, other: Permission denied$"):
        ReloadingFile(KEY, [str(file), "", "other"], build)


async def test_a_change_is_taken_over_within_a_second(
    file: Path, value: Value, autojump_clock: trio.testing.MockClock
) -> None:
    watched = ReloadingFile(KEY, [str(file)], value)
    assert await watched.current_value() == "first"
    file.write_text("second")
    assert await watched.current_value() == "first", "it was looked at a moment ago"
    with structlog.testing.capture_logs() as logs:
        assert await a_second_later(watched) == "second"
    [entry] = logs
    assert (entry["log_level"], entry["key"], entry["files"]) == ("info", KEY, str(file))
    assert value.threads[-1] is not threading.current_thread(), "it may take long: not in the loop"


async def test_the_value_of_an_unchanged_file_is_not_made_again(
    file: Path, value: Value, autojump_clock: trio.testing.MockClock
) -> None:
    watched = ReloadingFile(KEY, [str(file)], value)
    for _ in range(5):
        assert await a_second_later(watched) == "first"
    assert value.builds == 1


async def test_the_file_is_checked_at_most_once_a_second(
    file: Path, value: Value, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = ReloadingFile(KEY, [str(file)], value)
    looks = 0
    real = watched._read_stamp

    def count() -> object:
        nonlocal looks
        looks += 1
        return real()

    monkeypatch.setattr(watched, "_read_stamp", count)
    for _ in range(100):
        await watched.current_value()
        await trio.sleep(CHECK_INTERVAL_S / 25)
    assert looks == 4


async def test_a_value_of_no_file_is_never_looked_at_again() -> None:
    """Of a key that is not set: otherwise each process would start a thread a second for nothing."""
    watched = ReloadingFile(KEY, [""], lambda: "value")
    assert not watched.is_check_due
    assert await watched.current_value() == "value"


async def test_a_change_of_any_of_the_files(
    file: Path, value: Value, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    other = tmp_path / "other"
    watched = ReloadingFile(KEY, [str(file), "", str(other)], value)
    other.write_text("it is there now")
    await a_second_later(watched)
    assert value.builds == 2
    other.unlink()
    await a_second_later(watched)
    assert value.builds == 3


async def test_a_file_of_the_same_size_with_another_time_or_inode_is_read_again(
    file: Path, value: Value, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """A new content may have the same size, and a copied file the same modification time."""
    watched = ReloadingFile(KEY, [str(file)], value)
    before = file.stat()
    file.write_text("1st!!")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert await a_second_later(watched) == "1st!!"
    new = tmp_path / "new"
    new.write_text("2nd!!")
    os.utime(new, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    os.replace(new, file)
    assert await a_second_later(watched) == "2nd!!"


async def test_the_links_of_kubernetes(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    """A mounted secret is a link to a folder that is itself a link, and only that one is changed."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    (tmp_path / "..data").symlink_to("one")
    (tmp_path / "file").symlink_to("..data/file")
    watched = ReloadingFile(KEY, [str(tmp_path / "file")], Value(tmp_path / "file"))
    (tmp_path / "new").symlink_to("two")
    os.replace(tmp_path / "new", tmp_path / "..data")
    assert await a_second_later(watched) == "two"


@pytest.mark.parametrize("how", ["bad", "gone"])
async def test_a_broken_change_keeps_what_was_and_is_said_once(
    file: Path, value: Value, how: str, autojump_clock: trio.testing.MockClock
) -> None:
    watched = ReloadingFile(KEY, [str(file)], value)
    file.write_text("bad") if how == "bad" else file.unlink()
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            assert await a_second_later(watched) == "first"
    [entry] = logs
    assert (entry["log_level"], entry["key"], entry["files"]) == ("error", KEY, str(file))
    assert {"bad": "is bad", "gone": "No such file"}[how] in entry["reason"]
    file.write_text("bad again")
    with structlog.testing.capture_logs() as logs:
        await a_second_later(watched)
        await a_second_later(watched)
    assert [entry["log_level"] for entry in logs] == ["error"], "another change, another word"
    file.write_text("mended")
    assert await a_second_later(watched) == "mended"


async def test_a_failed_value_is_made_again_while_its_file_is_unchanged(
    file: Path, value: Value, autojump_clock: trio.testing.MockClock
) -> None:
    """The cause may be elsewhere: a mount, a permission."""
    watched = ReloadingFile(KEY, [str(file)], value)
    file.write_text("later")
    broken = True
    build = watched._build

    def build_or_not() -> str:
        if broken:
            raise PermissionError(13, "Permission denied")
        return build()

    watched._build = build_or_not
    assert await a_second_later(watched) == "first"
    broken = False
    assert await a_second_later(watched) == "later"


async def test_a_change_while_it_is_being_made_is_not_missed(
    file: Path, value: Value, autojump_clock: trio.testing.MockClock
) -> None:
    watched = ReloadingFile(KEY, [str(file)], value)
    build = watched._build

    def build_too_early() -> str:
        found = build()
        if found == "second":
            file.write_text("third one")
        return found

    watched._build = build_too_early
    file.write_text("second")
    assert await a_second_later(watched) == "second"
    assert await a_second_later(watched) == "third one"


async def test_while_one_makes_it_others_have_the_one_before(file: Path, value: Value) -> None:
    watched = ReloadingFile(KEY, [str(file)], value)
    file.write_text("second")
    going, go = threading.Event(), threading.Event()
    build = watched._build

    def build_slowly() -> str:
        going.set()
        assert go.wait(60)
        return build()

    watched._build = build_slowly
    found: list[str] = []

    async def ask() -> None:
        found.append(await watched.current_value())

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.to_thread.run_sync(going.wait)
            for _ in range(3):
                assert await watched.current_value() == "first"
            go.set()
    assert found == ["second"]
    assert value.builds == 2


async def test_a_defect_does_not_end_the_looking(
    file: Path, value: Value, autojump_clock: trio.testing.MockClock
) -> None:
    watched = ReloadingFile(KEY, [str(file)], value)
    build = watched._build

    def defect() -> str:
        raise RuntimeError("a defect")

    watched._build = defect
    file.write_text("second")
    assert await watched.current_value() == "first"
    watched._build = build
    assert await a_second_later(watched) == "second"


# ---- held


def stamps_of(*files: Path) -> dict[str, str]:
    return file_stamps([str(file) for file in files])


async def test_a_held_value_changes_when_it_is_told_to_and_by_nothing_else(file: Path, value: Value) -> None:
    held = HeldFile(KEY, [str(file)], value)
    file.write_text("another")
    assert held.value == "first"
    await take_over_held_files(stamps_of(file))
    assert held.value == "another"
    assert value.threads[-1] is not threading.current_thread(), "it may take long: not in the loop"


async def test_only_the_content_that_was_accepted_is_taken_over(file: Path, value: Value) -> None:
    """Two changes in a row: the second one has not been tried."""
    held = HeldFile(KEY, [str(file)], value)
    file.write_text("accepted")
    accepted = stamps_of(file)
    file.write_text("not tried yet")
    with pytest.raises(ConfigError, match=f"^{KEY}: {file}: changed once more$"):
        await take_over_held_files(accepted)
    assert held.value == "first"


async def test_a_content_that_changes_while_it_is_read_is_not_taken_over(file: Path) -> None:
    built: list[str] = []

    def build() -> str:
        text = file.read_text()
        if built:
            file.write_text("changed while it was read")
        built.append(text)
        return text

    held = HeldFile(KEY, [str(file)], build)
    file.write_text("accepted")
    with pytest.raises(ConfigError, match="changed once more"):
        await take_over_held_files(stamps_of(file))
    assert held.value == "first"


async def test_values_of_other_files_are_left_alone(file: Path, value: Value, tmp_path: Path) -> None:
    """Of the configuration before, which lookups under way still use; and those without files."""
    other = tmp_path / "other"
    other.write_text("other")
    before = HeldFile(KEY, [str(file), str(other)], value)
    without: HeldFile[str] = HeldFile(KEY, [""], lambda: str(len(value.threads)))
    file.write_text("another")
    await take_over_held_files(stamps_of(file))
    assert (before.value, without.value) == ("first", "1")
    await take_over_held_files(stamps_of(file, other))
    assert before.value == "another"


async def test_a_held_file_that_cannot_be_read_does_not_keep_others_from_changing(
    file: Path, value: Value, tmp_path: Path
) -> None:
    missing = tmp_path / "missing"
    missing.write_text("there")
    broken = HeldFile("other.key", [str(missing)], missing.read_text)
    held = HeldFile(KEY, [str(file)], value)
    missing.unlink()
    file.write_text("another")
    with pytest.raises(ConfigError, match=f"^other.key: {missing}: No such file or directory$"):
        await take_over_held_files(stamps_of(file, missing))
    assert (held.value, broken.value) == ("another", "there")


async def test_callers_that_get_a_task_to_look_at_files_look_once(
    file: Path, value: Value, autojump_clock: trio.testing.MockClock
) -> None:
    watched = ReloadingFile(KEY, [str(file)], value)
    file.write_text("second")
    coroutines = [watched.current_value() for _ in range(2)]
    assert [start_eagerly(coroutine) for coroutine in coroutines] == [None, None]
    assert [await continue_in_task(coroutine) for coroutine in coroutines] == ["second", "second"]
    assert value.builds == 2
    assert start_eagerly(watched.current_value()) == Finished("second"), "it was looked at just now"
    file.write_text("the third")
    later = watched.current_value()
    await trio.sleep(CHECK_INTERVAL_S)
    assert start_eagerly(later) is None
    await watched.current_value()
    threads = len(value.threads)
    assert await continue_in_task(later) == "the third"
    assert len(value.threads) == threads
