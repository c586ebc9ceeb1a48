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
    SHARE_FACTOR,
    SMALL_PIPE_BYTES,
    Pipe,
    PipePool,
    PipeShare,
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


# ---- shares


def hold(pool: PipePool, share: PipeShare, data: bytes = b"x") -> Pipe:
    """What a pump does for an owner's direction of which the receiver does not read."""
    pipe = pool.acquire_pipe(share.lane.size_bytes_max)
    os.write(pipe.write_end, data)
    pool.lend_pipe(pipe, share)
    return pipe


def let_go(pool: PipePool, pipe: Pipe) -> None:
    os.read(pipe.read_end, HUGE_PIPE_BYTES)
    pool.release_pipe(pipe)


def sizes(held: list[Pipe]) -> Counter[int]:
    return Counter(pipe.wanted_bytes for pipe in held)


@pytest.mark.parametrize("forwarders", [1, 2, 4])
def test_an_owner_that_holds_its_share_gets_small_pipes_and_others_get_large_ones(told: Told, forwarders: int) -> None:
    pool = told.pool(forwarders)
    greedy = pool.share_of("greedy")
    held = [hold(pool, greedy) for _ in range((HUGE_PIPES_MAX + LARGE_PIPES_MAX) // forwarders + 100)]
    huge, large = HUGE_PIPES_MAX // forwarders, LARGE_PIPES_MAX // forwarders
    part = SHARE_FACTOR / (SHARE_FACTOR + 1)
    got = sizes(held)
    assert 0 <= huge * part - got[HUGE_PIPE_BYTES] < 1
    assert 0 <= large * part - got[LARGE_PIPE_BYTES] < 1
    assert pool.share_of("other").lane.size_bytes_max == HUGE_PIPE_BYTES
    assert hold(pool, pool.share_of("other")).size_bytes == HUGE_PIPE_BYTES


@pytest.mark.parametrize("greedy", [2, 3])
def test_several_greedy_owners_leave_a_large_pipe_for_a_newcomer(told: Told, greedy: int) -> None:
    pool = told.pool(forwarders=1)
    owners = [pool.share_of(f"greedy {number}") for number in range(greedy)]
    for owner in owners:
        while owner.lane.size_bytes_max > SMALL_PIPE_BYTES:
            hold(pool, owner)
    newcomer = pool.share_of("newcomer")
    assert hold(pool, newcomer).wanted_bytes >= LARGE_PIPE_BYTES


def test_an_owner_whose_readers_read_again_gets_the_largest_pipes_again(told: Told) -> None:
    pool = told.pool()
    owner = pool.share_of("owner")
    held = [hold(pool, owner) for _ in range(LARGE_PIPES_MAX)]
    assert owner.lane.size_bytes_max == SMALL_PIPE_BYTES
    for pipe in held:
        let_go(pool, pipe)
    assert owner.lane.size_bytes_max == HUGE_PIPE_BYTES


def test_an_owner_may_hold_more_once_another_one_holds_less(told: Told) -> None:
    """Although nothing happens to its own pipes."""
    pool = told.pool(forwarders=1)
    first, second = pool.share_of("first"), pool.share_of("second")
    of_first = [hold(pool, first) for _ in range(16)]
    while second.lane.size_bytes_max == HUGE_PIPE_BYTES:
        hold(pool, second)
    for pipe in of_first:
        let_go(pool, pipe)
    assert second.lane.size_bytes_max == LARGE_PIPE_BYTES
    pool.rebalance()
    assert second.lane.size_bytes_max == HUGE_PIPE_BYTES


def test_a_discarded_pipe_is_not_held_any_more(told: Told) -> None:
    pool = told.pool(forwarders=HUGE_PIPES_MAX)
    owner = pool.share_of("owner")
    pipe = hold(pool, owner)
    assert owner.lane.size_bytes_max == LARGE_PIPE_BYTES
    pool.discard_pipe(pipe)
    assert owner.lane.size_bytes_max == HUGE_PIPE_BYTES


def test_a_share_is_forgotten_with_its_last_direction(told: Told) -> None:
    pool = told.pool()
    share = pool.share_of("owner")
    assert pool.share_of("owner") is share
    pipe = hold(pool, share)
    del share
    assert pool.share_of("owner").held[HUGE_PIPE_BYTES] == 1, "bytes of a relay that has ended count"
    let_go(pool, pipe)
    assert not pool._shares


def test_an_owner_above_its_share_gets_a_large_pipe_where_no_small_one_can_be_made(told: Told) -> None:
    """Slow is better than not at all, and nothing wakes it before a pipe is free."""
    pool = told.pool(forwarders=HUGE_PIPES_MAX)
    owner = pool.share_of("owner")
    hold(pool, owner)
    while owner.lane.size_bytes_max > SMALL_PIPE_BYTES:
        hold(pool, owner)
    large = pool.acquire_pipe()
    pool.release_pipe(large)
    told.refusal = BlockingIOError(errno.EAGAIN, "no room")
    assert pool.acquire_pipe(owner.lane.size_bytes_max) is large
    with pytest.raises(BlockingIOError):
        pool.acquire_pipe(owner.lane.size_bytes_max)


# ---- pipes that shrink


@pytest.mark.parametrize(("pieces", "smaller_bytes"), [(1, SMALL_PIPE_BYTES), (3, LARGE_PIPE_BYTES), (200, None)])
def test_a_pipe_without_movement_shrinks_as_far_as_its_pieces_fit(
    told: Told, pieces: int, smaller_bytes: int | None
) -> None:
    """In place: it is the same pipe for a successor, with the same bytes."""
    pool = told.pool(forwarders=HUGE_PIPES_MAX)
    owner = pool.share_of("owner")
    data = os.urandom(pieces * 4096)
    pipe = hold(pool, owner, data)
    ends = pipe.id, pipe.read_end, pipe.write_end
    pool.rebalance()
    assert pipe.size_bytes == HUGE_PIPE_BYTES, "it may just have been lent"
    pool.rebalance()
    assert pipe.wanted_bytes == pipe.size_bytes == (smaller_bytes or HUGE_PIPE_BYTES)
    assert (pipe.id, pipe.read_end, pipe.write_end) == ends
    assert (owner.lane.size_bytes_max == HUGE_PIPE_BYTES) == (smaller_bytes is not None)
    assert os.read(pipe.read_end, 2 * len(data)) == data
    pool.release_pipe(pipe)
    assert (owner.held[HUGE_PIPE_BYTES], owner.held[LARGE_PIPE_BYTES]) == (0, 0)
    replaced = smaller_bytes is not None
    assert (pool.acquire_pipe() is pipe) == (not replaced), "a huge one may be made in its place"


def test_a_pipe_that_drains_slowly_keeps_its_size(told: Told) -> None:
    pool = told.pool()
    pipe = hold(pool, pool.share_of("owner"), b"1234567890")
    for _ in range(8):
        pool.rebalance()
        os.read(pipe.read_end, 1)
    assert pipe.size_bytes == HUGE_PIPE_BYTES


def test_a_pipe_is_tried_to_shrink_once_until_bytes_move(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = told.pool(forwarders=HUGE_PIPES_MAX)
    pipe = hold(pool, pool.share_of("owner"), bytes(200 * 4096))
    attempts: list[int] = []

    def refuse(_pipe: Pipe, size_bytes: int) -> bool:
        attempts.append(size_bytes)
        return False

    monkeypatch.setattr(Pipe, "shrink_to", refuse)
    for _ in range(5):
        pool.rebalance()
    assert attempts == [SMALL_PIPE_BYTES, LARGE_PIPE_BYTES]
    os.read(pipe.read_end, 4096)
    for _ in range(5):
        pool.rebalance()
    assert len(attempts) == 4


def test_a_predecessors_shrunk_pipe_counts_by_its_present_size(told: Told) -> None:
    """The fd store knows the size that was requested first. What a captured predecessor wrote is no size of ours."""
    pool = told.pool(forwarders=HUGE_PIPES_MAX)
    shrunk, odd = Pipe.create(7, HUGE_PIPE_BYTES), Pipe.create(8, HUGE_PIPE_BYTES)
    told.made += [shrunk, odd]
    assert shrunk.shrink_to(SMALL_PIPE_BYTES)
    shrunk.wanted_bytes, odd.wanted_bytes = HUGE_PIPE_BYTES, 17
    for pipe in (shrunk, odd):
        pool.adopt_pipe(pipe)
        assert pipe.wanted_bytes == SMALL_PIPE_BYTES
    assert pool.acquire_pipe().wanted_bytes == HUGE_PIPE_BYTES
    pool.release_pipe(shrunk)
    pool.release_pipe(odd)


def test_a_smaller_ready_pipe_gives_way_to_a_larger_one_that_is_free(told: Told) -> None:
    """Or a busy forwarder would go on with the one of its worst moment."""
    pool = told.pool()
    unlimited = pool.lanes[0]
    unlimited.ready = pool.acquire_pipe(SMALL_PIPE_BYTES)
    pool.rebalance()
    assert unlimited.ready is None
    unlimited.ready = pool.acquire_pipe()
    assert unlimited.ready.wanted_bytes == HUGE_PIPE_BYTES
    pool.rebalance()
    assert unlimited.ready is not None
    pool.release_pipe(unlimited.ready)
