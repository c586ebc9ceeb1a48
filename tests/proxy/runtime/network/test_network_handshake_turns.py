"""proxy.runtime.network.handshake_turns: fair between owners, and few at a time."""

import structlog.testing
import trio
import trio.testing

from proxy.runtime.loop.tick import current_tick
from proxy.runtime.network.handshake_turns import TURNS_PER_WAKE_UP_MAX, HandshakeTurns


class FakeOpening:
    """Notes its turns."""

    def __init__(self, name: str, turns: list[str]) -> None:
        self._name, self._turns = name, turns

    def take_turn(self) -> None:
        self._turns.append(self._name)
        if self._name == "broken":
            raise RuntimeError(self._name)


async def test_turns_are_fair_between_addresses_and_leave_others_theirs() -> None:
    """Security: a flood of hellos keeps neither another address's waiting nor the relays."""
    order: list[str] = []
    turns = HandshakeTurns()

    async def serve_relay() -> None:
        await trio.lowlevel.checkpoint()
        order.append("a relay")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_relay)
        with current_tick():
            for number in range(50):
                turns.add("address flood", FakeOpening(f"flood {number}", order))
            turns.add("address other", FakeOpening("other", order))
        assert len(order) == TURNS_PER_WAKE_UP_MAX
        assert order.index("other") == 1
        with current_tick():
            turns.add("address late", FakeOpening("late", order))
        assert len(order) == TURNS_PER_WAKE_UP_MAX, "the others' turns are not over"
        while len(order) < 53:
            await trio.lowlevel.checkpoint()
    assert order.index("a relay") <= 4 * TURNS_PER_WAKE_UP_MAX
    assert order.index("late") <= 2 * TURNS_PER_WAKE_UP_MAX


async def test_relays_move_between_any_two_turns() -> None:
    """Security: a flood of hellos delays a relay's bytes by one turn, however many more are taken in this tick."""
    order: list[str] = []
    turns = HandshakeTurns(lambda: order.append("relays"))
    with current_tick():
        for number in range(3 * TURNS_PER_WAKE_UP_MAX):
            turns.add("address", FakeOpening(str(number), order))
    await trio.testing.wait_all_tasks_blocked()
    assert order == [step for number in range(3 * TURNS_PER_WAKE_UP_MAX) for step in (str(number), "relays")]


async def test_handshakes_that_wait_keep_the_reactor_from_polling() -> None:
    order: list[str] = []
    turns = HandshakeTurns()
    with current_tick():
        for number in range(TURNS_PER_WAKE_UP_MAX + 1):
            turns.add("address", FakeOpening(str(number), order))
    assert turns.are_waiting
    await trio.testing.wait_all_tasks_blocked()
    assert len(order) == TURNS_PER_WAKE_UP_MAX + 1
    assert not turns.are_waiting


async def test_a_defect_in_one_turn_leaves_the_others_theirs() -> None:
    order: list[str] = []
    turns = HandshakeTurns()
    names = [*["broken"] * (TURNS_PER_WAKE_UP_MAX + 1), "last"]
    with structlog.testing.capture_logs() as logs:
        with current_tick():
            for name in names:
                turns.add("address", FakeOpening(name, order))
        await trio.testing.wait_all_tasks_blocked()
    assert order == names
    assert len(logs) == TURNS_PER_WAKE_UP_MAX + 1
