"""proxy.forwarder.relay.pipes: lent again, bounded, and told of before anything is in them."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from relay_fakes import descriptors

from proxy.forwarder.relay import pipes
from proxy.forwarder.relay.pipes import (
    FREE_SMALL_PIPES_MAX,
    HUGE_PIPE_BYTES,
    HUGE_PIPES_MAX,
    LARGE_PIPE_BYTES,
    LARGE_PIPES_MAX,
    RESERVE,
    SMALL_PIPE_BYTES,
    Pipe,
    PipePool,
)


class Told:
    """What a pool tells its owner."""

    def __init__(self) -> None:
        self.made: list[Pipe] = []
        self.closed: list[int] = []
        self.refusal: OSError | None = None

    def make(self, made: Sequence[Pipe]) -> None:
        if self.refusal is not None:
            raise self.refusal
        assert all(pipe.queued_bytes() == 0 for pipe in made)
        self.made += made

    def close(self, pipe: Pipe) -> None:
        self.closed.append(pipe.id)

    def pool(self, forwarders: int = 2) -> PipePool:
        return PipePool(self.make, self.close, forwarders=forwarders)


@pytest.fixture
def told() -> Iterator[Told]:
    told = Told()
    yield told
    for pipe in told.made:
        if pipe.id not in told.closed:
            pipe.close()


@pytest.mark.parametrize("forwarders", [1, 2, 10_000])
def test_the_largest_are_lent_first_and_all_are_bounded(told: Told, forwarders: int) -> None:
    """The kernel bounds all of a user's pipes together; a pipe of the smallest kind is always to be had."""
    before = descriptors()
    pool = told.pool(forwarders)
    huge, large = max(1, HUGE_PIPES_MAX // forwarders), max(1, LARGE_PIPES_MAX // forwarders)
    lent = [pool.acquire_pipe() for _ in range(huge + large + 100)]
    assert [pipe.wanted_bytes for pipe in lent] == (
        [HUGE_PIPE_BYTES] * huge + [LARGE_PIPE_BYTES] * large + [SMALL_PIPE_BYTES] * 100
    )
    assert not pool.has_free_pipe
    for pipe in lent:
        pool.release_pipe(pipe)
    assert pool.has_free_pipe
    assert descriptors() - before == 2 * (huge + large + FREE_SMALL_PIPES_MAX)
    again = [pool.acquire_pipe() for _ in range(huge + large)]
    assert Counter(pipe.wanted_bytes for pipe in again) == {HUGE_PIPE_BYTES: huge, LARGE_PIPE_BYTES: large}
    for pipe in again[1:]:
        pool.discard_pipe(pipe)


def test_ids_are_unique_and_told_before_use(told: Told) -> None:
    pool = told.pool()
    pool.reserve_pipes()
    assert [pipe.id for pipe in told.made] == list(range(1, RESERVE + 1))
    lent = [pool.acquire_pipe() for _ in range(RESERVE)]
    assert {pipe.id for pipe in lent} == set(range(1, RESERVE + 1)), "the reserve is lent before any is made"
    for pipe in lent:
        pool.discard_pipe(pipe)
    assert told.closed == [pipe.id for pipe in lent]
    assert pool.acquire_pipe().id == RESERVE + 1, "an id that was dropped is not used again"


def test_a_pipe_that_the_store_cannot_take_is_not_lent(told: Told) -> None:
    before = descriptors()
    pool = told.pool()
    told.refusal = BlockingIOError(errno.EAGAIN, "no room")
    with pytest.raises(BlockingIOError):
        pool.acquire_pipe()
    with pytest.raises(BlockingIOError):
        pool.reserve_pipes()
    assert descriptors() == before
    assert not pool.has_free_pipe
    told.refusal = None
    assert pool.acquire_pipe().queued_bytes() == 0


def test_no_descriptor_for_a_pipe(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    before = descriptors()

    def none_left(_flags: int) -> tuple[int, int]:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pipe2", none_left)
    with pytest.raises(OSError, match="Too many"):
        told.pool().acquire_pipe()
    assert descriptors() == before
    assert told.made == []


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_the_reserve_is_lent_where_no_pipe_can_be_made(told: Told, lost: int) -> None:
    """What is it for? Whatever size one would be made of, and whichever were discarded."""
    pool = told.pool(forwarders=HUGE_PIPES_MAX // 2)
    pool.reserve_pipes()
    for pipe in [pool.acquire_pipe() for _ in range(lost)]:
        pool.discard_pipe(pipe)
    told.refusal = BlockingIOError(errno.EAGAIN, "no room")
    for _ in range(RESERVE - lost):
        assert pool.has_free_pipe
        pool.acquire_pipe()
    assert not pool.has_free_pipe
    with pytest.raises(BlockingIOError):
        pool.acquire_pipe()


def test_a_reserve_is_only_filled_up(told: Told) -> None:
    """Or each successor would add to what its predecessors left."""
    pool = told.pool()
    pool.reserve_pipes()
    pool.reserve_pipes()
    pool.discard_pipe(pool.acquire_pipe())
    pool.reserve_pipes()
    assert len(told.made) == RESERVE + 1


def test_adopted_ones_count(told: Told) -> None:
    pool = told.pool(forwarders=HUGE_PIPES_MAX // 2)
    left = [Pipe.create(7, HUGE_PIPE_BYTES), Pipe.create(40, HUGE_PIPE_BYTES), Pipe.create(12, SMALL_PIPE_BYTES)]
    told.made += left
    for pipe in left:
        pool.adopt_pipe(pipe)
    lent = pool.acquire_pipe()
    assert (lent.wanted_bytes, lent.id) == (LARGE_PIPE_BYTES, 41), "there are as many huge ones as there may be"
    pool.release_pipe(left[0])
    assert pool.acquire_pipe() is left[0]


def test_a_kernel_that_grants_no_large_pipe(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above fs.pipe-user-pages-soft: what it gives instead is used, counted, and lent again."""
    fcntl = pipes.fcntl.fcntl

    def refuse(descriptor: int, command: int, *size: int) -> int:
        if command == pipes.fcntl.F_SETPIPE_SZ:
            fcntl(descriptor, command, 2 * SMALL_PIPE_BYTES)
            raise PermissionError
        return int(fcntl(descriptor, command, *size))

    monkeypatch.setattr(pipes.fcntl, "fcntl", refuse)
    pool = told.pool()
    first = pool.acquire_pipe()
    assert first.size_bytes == 2 * SMALL_PIPE_BYTES
    pool.release_pipe(first)
    assert pool.acquire_pipe() is first
    most = HUGE_PIPES_MAX // 2 + LARGE_PIPES_MAX // 2 + FREE_SMALL_PIPES_MAX
    for pipe in [pool.acquire_pipe() for _ in range(most + 50)]:
        pool.release_pipe(pipe)
    assert len(told.made) - len(told.closed) <= most


def test_a_pipe_is_non_blocking_not_inherited_and_reports_its_queued_bytes(told: Told) -> None:
    pipe = told.pool().acquire_pipe()
    assert pipe.queued_bytes() == 0
    os.write(pipe.write_end, b"12345")
    assert pipe.queued_bytes() == 5
    assert not os.get_inheritable(pipe.read_end)
    assert not os.get_blocking(pipe.write_end)
