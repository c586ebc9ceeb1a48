"""proxy.runtime.loop.deadlines: many deadlines, one task."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import structlog.testing
import trio
import trio.testing

from proxy.runtime.loop.deadlines import GRAIN_S, Deadline, Deadlines


class Owner:
    """Something that has a deadline; ``passed``: when it was woken."""

    def __init__(self, deadlines: Deadlines, then: Callable[[Deadline], None] = lambda _: None) -> None:
        self.passed: list[float] = []
        self._then = then
        self.deadline = deadlines.new_deadline(self._wake)

    def _wake(self) -> None:
        self.passed.append(trio.current_time())
        self._then(self.deadline)


@pytest.fixture
async def deadlines(nursery: trio.Nursery) -> Deadlines:
    made = Deadlines()
    nursery.start_soon(made.run)
    await trio.testing.wait_all_tasks_blocked()
    return made


async def test_no_deadline_is_early_and_none_much_late(
    deadlines: Deadlines, autojump_clock: trio.testing.MockClock
) -> None:
    began = trio.current_time()
    owners = {after: Owner(deadlines) for after in (5.0, 0.01, 5.04, 3.0, 0.1, 30.0)}
    for after, owner in owners.items():
        owner.deadline.set(began + after)
    await trio.sleep(40)
    for after, owner in owners.items():
        [passed] = owner.passed
        assert began + after <= passed <= began + after + GRAIN_S + 1e-6


async def test_an_earlier_one_that_comes_later(deadlines: Deadlines, autojump_clock: trio.testing.MockClock) -> None:
    late, early = Owner(deadlines), Owner(deadlines)
    late.deadline.set(trio.current_time() + 20)
    await trio.sleep(1)
    early.deadline.set(trio.current_time() + 1)
    await trio.sleep(1.2)
    assert (len(early.passed), len(late.passed)) == (1, 0)


async def test_a_deadline_that_is_moved_or_cleared_does_not_pass_at_its_old_time(
    deadlines: Deadlines, autojump_clock: trio.testing.MockClock
) -> None:
    moved, cleared = Owner(deadlines), Owner(deadlines)
    for owner in (moved, cleared):
        owner.deadline.set(trio.current_time() + 1)
    moved.deadline.set(trio.current_time() + 3)
    cleared.deadline.clear()
    cleared.deadline.clear()
    await trio.sleep(2)
    assert (moved.passed, cleared.passed) == ([], [])
    await trio.sleep(2)
    assert (len(moved.passed), cleared.passed) == (1, [])


async def test_a_deadline_can_be_set_again_in_its_own_callback(
    deadlines: Deadlines, autojump_clock: trio.testing.MockClock
) -> None:
    owner = Owner(deadlines, lambda deadline: deadline.set(trio.current_time() + 1))
    owner.deadline.set(trio.current_time() + 1)
    await trio.sleep(5.5)
    assert len(owner.passed) >= 4


async def test_a_callback_may_clear_another_deadline_due_at_the_same_time(
    deadlines: Deadlines, autojump_clock: trio.testing.MockClock
) -> None:
    when = trio.current_time() + 1
    second = Owner(deadlines)
    first = Owner(deadlines, lambda _: second.deadline.clear())
    first.deadline.set(when)
    second.deadline.set(when)
    await trio.sleep(2)
    assert (len(first.passed), len(second.passed)) == (1, 0)


async def test_a_defect_of_one_is_not_the_others(deadlines: Deadlines, autojump_clock: trio.testing.MockClock) -> None:
    def defect(_: Deadline) -> None:
        raise ZeroDivisionError

    broken, other = Owner(deadlines, defect), Owner(deadlines)
    for owner in (broken, other):
        owner.deadline.set(trio.current_time() + 1)
    with structlog.testing.capture_logs() as logs:
        await trio.sleep(2)
    assert (len(broken.passed), len(other.passed), len(logs)) == (1, 1, 1)
    assert isinstance(logs[0]["exc_info"], ZeroDivisionError)


async def test_a_cleared_deadline_keeps_no_reference_to_its_owner(
    deadlines: Deadlines, autojump_clock: trio.testing.MockClock
) -> None:
    owner = Owner(deadlines)
    owner.deadline.set(trio.current_time() + 1000)
    gone = weakref.ref(owner)
    owner.deadline.clear()
    del owner
    gc.collect()
    assert gone() is None
    assert not deadlines._by_grain
