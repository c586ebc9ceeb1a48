"""proxy.runtime.fairness.fair_capacity: bytes are lent in turn, no owner gets all of them, and none gets lost."""

from __future__ import annotations

import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from proxy.runtime.fairness.fair_capacity import FairCapacity, Reservation

LARGEST = 10


class Room:
    """Tasks that want capacity, in the order in which they got it."""

    def __init__(self, nursery: trio.Nursery, total_bytes: int) -> None:
        self.capacity = FairCapacity(total_bytes, LARGEST)
        self._nursery = nursery
        self.got: list[str] = []
        self.reservations: list[Reservation] = []

    async def want(self, owner: str) -> trio.CancelScope:
        scope = trio.CancelScope()

        async def one() -> None:
            with scope:
                self.reservations.append(await self.capacity.reserve(owner))
                self.got.append(owner)

        self._nursery.start_soon(one)
        await trio.testing.wait_all_tasks_blocked()
        return scope

    async def give(self, owner: str) -> None:
        reservation = next(reservation for reservation in self.reservations if reservation.owner == owner)
        self.reservations.remove(reservation)
        reservation.release()
        await trio.testing.wait_all_tasks_blocked()


async def test_room_that_is_free_is_lent_at_once(nursery: trio.Nursery) -> None:
    it = Room(nursery, 2 * LARGEST)
    for owner in "abc":
        await it.want(owner)
    assert it.got == ["a", "b"]
    assert it.capacity.has_waiters
    await it.give("b")
    assert it.got == ["a", "b", "c"]
    assert not it.capacity.has_waiters
    for owner in "ac":
        await it.give(owner)
    await it.want("d")
    await it.want("e")
    assert it.got == ["a", "b", "c", "d", "e"]


async def test_the_turn_goes_round_among_those_who_wait(nursery: trio.Nursery) -> None:
    it = Room(nursery, LARGEST)
    for owner in ("first", "a", "a", "a", "b", "b", "c"):
        await it.want(owner)
    for owner in ("first", "a", "b", "c", "a", "b"):
        await it.give(owner)
    assert it.got == ["first", "a", "b", "c", "a", "b", "a"]
    await it.give("a")
    assert it.capacity.free_bytes == LARGEST
    assert not it.capacity._waiting, "no waiter is remembered"
    assert not it.capacity._held


async def test_the_last_room_is_for_another(nursery: trio.Nursery) -> None:
    """One who keeps what it got for ever must not keep others from theirs."""
    it = Room(nursery, 3 * LARGEST)
    for _ in range(5):
        await it.want("a")
    assert it.got == ["a", "a"]
    for owner in "bcb":
        await it.want(owner)
    assert it.got == ["a", "a", "b"]
    await it.give("b")
    await it.give("c")
    assert it.got == ["a", "a", "b", "c", "b"]
    await it.give("a")
    assert it.got == ["a", "a", "b", "c", "b", "a"]


async def test_shrinking_reservations_frees_capacity_for_waiting_owners(nursery: trio.Nursery) -> None:
    it = Room(nursery, 2 * LARGEST)
    await it.want("a")
    await it.want("b")
    await it.want("c")
    it.reservations[0].shrink_to(4)
    await trio.testing.wait_all_tasks_blocked()
    assert it.got == ["a", "b"], "six bytes are not capacity for what may have ten"
    it.reservations[1].shrink_to(6)
    await trio.testing.wait_all_tasks_blocked()
    assert it.got == ["a", "b", "c"]
    assert it.capacity.free_bytes == 0
    it.reservations[0].shrink_to(LARGEST)
    assert it.reservations[0].size_bytes == 4, "no owner gets more than was lent"
    for reservation in it.reservations * 2:
        reservation.release()
    assert it.capacity.free_bytes == 2 * LARGEST


async def test_there_is_always_room_for_one(nursery: trio.Nursery) -> None:
    it = Room(nursery, 1)
    await it.want("a")
    await it.want("b")
    assert it.got == ["a"]
    await it.give("a")
    assert it.got == ["a", "b"]


async def test_a_cancelled_waiter_is_skipped(nursery: trio.Nursery) -> None:
    it = Room(nursery, LARGEST)
    await it.want("first")
    leaving = [await it.want(owner) for owner in ("a", "b")]
    await it.want("a")
    for scope in leaving:
        scope.cancel()
    await trio.testing.wait_all_tasks_blocked()
    assert list(it.capacity._waiting) == ["a"]
    await it.give("first")
    assert it.got == ["first", "a"]


async def test_room_that_comes_in_the_moment_of_leaving_is_not_lost(nursery: trio.Nursery) -> None:
    it = Room(nursery, LARGEST)
    await it.want("first")
    leaving = await it.want("a")
    await it.want("b")
    leaving.cancel()
    await it.give("first")
    assert it.got == ["first", "b"]
    leaving = await it.want("c")
    reservation = it.reservations.pop()
    reservation.release()
    leaving.cancel()
    await trio.testing.wait_all_tasks_blocked()
    await it.want("d")
    assert it.got in (["first", "b", "d"], ["first", "b", "c"])
    if it.got[-1] == "c":
        await it.give("c")
    assert it.got[-1] == "d"


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["lend", "shrink", "give"]), st.integers(0, LARGEST)))
)
def test_no_byte_is_lent_twice_or_lost(steps: list[tuple[str, str, int]]) -> None:
    capacity = FairCapacity(35, LARGEST)
    reservations: list[Reservation] = []
    for owner, step, number in steps:
        if step == "lend":
            reservation = capacity.try_reserve(owner)
            reservations += [] if reservation is None else [reservation]
        elif reservations and step == "shrink":
            reservations[number % len(reservations)].shrink_to(number)
        elif reservations:
            reservations.pop(number % len(reservations)).release()
        lent = sum(reservation.size_bytes for reservation in reservations)
        assert capacity.free_bytes == 35 - lent >= 0
        for one in "abc":
            assert (
                sum(reservation.size_bytes for reservation in reservations if reservation.owner == one) <= 35 - LARGEST
            )
    for reservation in reservations:
        reservation.release()
    assert capacity.free_bytes == 35
    assert not capacity._held


async def test_more_room_is_lent_to_who_waits_and_less_takes_nothing_back(nursery: trio.Nursery) -> None:
    """A reload changes the bounds; what is lent under the old ones goes on counting."""
    it = Room(nursery, 2 * LARGEST)
    await it.want("a")
    await it.want("b")
    await it.want("c")
    assert it.got == ["a", "b"]
    it.capacity.resize(3 * LARGEST, LARGEST)
    await trio.testing.wait_all_tasks_blocked()
    assert it.got == ["a", "b", "c"]
    it.capacity.resize(LARGEST, LARGEST)
    assert it.capacity.free_bytes == -2 * LARGEST
    await it.want("d")
    for reservation in it.reservations[:2]:
        reservation.release()
    await trio.testing.wait_all_tasks_blocked()
    assert it.got == ["a", "b", "c"]
    it.reservations[2].release()
    await trio.testing.wait_all_tasks_blocked()
    assert it.got == ["a", "b", "c", "d"]
