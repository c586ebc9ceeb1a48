"""Group commit: who shares a sync, what happens when the disk is slow, full or broken."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from analytics.receiver import group_commit
from analytics.receiver.config import Spool
from analytics.receiver.group_commit import GroupCommit, NotCommittedError
from analytics.receiver.metrics import Metrics
from analytics.spool.records import SpoolError
from analytics.spool.writer import SpoolFullError

CONFIG = Spool(queue_requests_max=4, queue_bytes_max=1000, commit_timeout_ms=5_000)


class FakeWriter:
    def __init__(self) -> None:
        self.groups: list[list[bytes]] = []
        self.gate: threading.Event | None = None
        self.error: SpoolError | None = None

    def append_records(self, records: Sequence[bytes]) -> None:
        if self.gate is not None:
            assert self.gate.wait(60)
        if self.error is not None:
            raise self.error
        self.groups.append(list(records))


@asynccontextmanager
async def running(writer: FakeWriter, config: Spool = CONFIG) -> AsyncIterator[GroupCommit]:
    commit = GroupCommit(writer, config, Metrics())  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(commit.commit_groups)
        yield commit
        commit.stop_accepting()
    assert commit.finished.is_set()


async def test_requests_that_come_together_share_a_sync() -> None:
    writer = FakeWriter()
    writer.gate = threading.Event()
    async with running(writer) as commit, trio.open_nursery() as nursery:
        for text in (b"a", b"b", b"c"):
            nursery.start_soon(commit.commit_record, text)
            await trio.testing.wait_all_tasks_blocked()
        assert writer.groups == []
        writer.gate.set()
    assert writer.groups == [[b"a"], [b"b", b"c"]]


async def test_groups_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_commit, "GROUP_BYTES_MAX", 4)
    writer = FakeWriter()
    writer.gate = threading.Event()
    async with running(writer) as commit, trio.open_nursery() as nursery:
        for text in (b"first", b"aa", b"bb", b"c"):
            nursery.start_soon(commit.commit_record, text)
            await trio.testing.wait_all_tasks_blocked()
        writer.gate.set()
    assert writer.groups == [[b"first"], [b"aa", b"bb"], [b"c"]]


async def test_no_success_is_answered_before_the_sync() -> None:
    writer = FakeWriter()
    writer.gate = threading.Event()
    told = False

    async def ask(commit: GroupCommit) -> None:
        nonlocal told
        await commit.commit_record(b"a")
        assert writer.groups == [[b"a"]]
        told = True

    async with running(writer) as commit, trio.open_nursery() as nursery:
        nursery.start_soon(ask, commit)
        await trio.testing.wait_all_tasks_blocked()
        assert not told
        writer.gate.set()
    assert told


async def test_a_slow_disk_bounds_the_wait_and_the_queue(autojump_clock: trio.testing.MockClock) -> None:
    writer = FakeWriter()
    writer.gate = threading.Event()
    outcomes: list[str] = []

    async def ask(commit: GroupCommit, record: bytes) -> None:
        try:
            await commit.commit_record(record)
        except NotCommittedError as error:
            outcomes.append(f"{error.reason}: {error}")
        else:
            outcomes.append("written")

    async with running(writer) as commit:
        began_at = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(ask, commit, b"x")
        assert trio.current_time() - began_at == pytest.approx(5.0)
        assert sorted(outcomes) == ["slow: the disk does not keep up"] * 2 + ["slow: the disk takes too long"] * 4
        outcomes.clear()
        await ask(commit, b"y")  # abandoned ones still take room
        assert outcomes == ["slow: the disk does not keep up"]
        writer.gate.set()
    assert sum(map(len, writer.groups)) == 4  # they got there; told was that they may not have


async def test_the_queue_is_bounded_in_bytes() -> None:
    writer = FakeWriter()
    writer.gate = threading.Event()
    async with running(writer) as commit, trio.open_nursery() as nursery:
        nursery.start_soon(commit.commit_record, b"x" * 600)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(NotCommittedError) as caught:
            await commit.commit_record(b"x" * 401)
        assert caught.value.reason == "slow"
        nursery.start_soon(commit.commit_record, b"x" * 400)
        await trio.testing.wait_all_tasks_blocked()
        writer.gate.set()


@pytest.mark.parametrize(("error", "reason"), [(SpoolFullError("full"), "full"), (SpoolError("broken"), "failed")])
async def test_a_failed_commit_is_told_to_all_of_the_group_and_the_next_one_is_tried(
    error: SpoolError, reason: str
) -> None:
    writer = FakeWriter()
    writer.error = error
    async with running(writer) as commit:
        for _ in range(10):  # more than the queue holds: nothing is left in it
            with pytest.raises(NotCommittedError) as caught:
                await commit.commit_record(b"a")
            assert caught.value.reason == reason
        writer.error = None
        await commit.commit_record(b"b")
    assert writer.groups == [[b"b"]]


async def test_closing_commits_what_is_there_and_takes_no_more() -> None:
    writer = FakeWriter()
    writer.gate = threading.Event()
    async with trio.open_nursery() as nursery, running(writer) as commit:
        for text in (b"a", b"b"):
            nursery.start_soon(commit.commit_record, text)
            await trio.testing.wait_all_tasks_blocked()
        commit.stop_accepting()
        with pytest.raises(NotCommittedError):
            await commit.commit_record(b"late")
        writer.gate.set()
    assert writer.groups == [[b"a"], [b"b"]]
