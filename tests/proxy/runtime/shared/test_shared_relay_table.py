"""proxy.runtime.shared.relay_table: what a forwarder's successor finds, and counters that never go back."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.runtime.shared import relay_table
from proxy.runtime.shared.memory import create_shared_memory
from proxy.runtime.shared.relay_table import (
    BYTES,
    MESSAGES,
    OPERATIONS,
    PIPE,
    TO_BROKER,
    TO_CLIENT,
    RelayTable,
    create_table,
    framed_row,
    row,
    upgrade_table,
)


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = create_table()
    yield descriptor
    os.close(descriptor)


def moved(table: RelayTable, relay_id: int, to_broker: int, to_client: int) -> None:
    for way, size in ((TO_BROKER, to_broker), (TO_CLIENT, to_client)):
        table.cells[row(relay_id, way) + BYTES] += size
        table.cells[row(relay_id, way) + OPERATIONS] += 1


def totals(table: RelayTable) -> tuple[int, ...]:
    return tuple(table.total(way, cell) for way in (TO_BROKER, TO_CLIENT) for cell in (BYTES, OPERATIONS))


def test_rows_do_not_overlap() -> None:
    rows = [row(relay_id, way) for relay_id in range(5) for way in (TO_BROKER, TO_CLIENT)]
    assert rows == sorted(set(rows))
    assert min(later - earlier for earlier, later in itertools.pairwise(rows)) > OPERATIONS


def test_the_memory_is_the_supervisors(memory: int) -> None:
    assert not os.get_inheritable(memory)
    assert os.fstat(memory).st_blocks == 0, "rows that were never used cost nothing"
    one, other = RelayTable(memory), RelayTable(os.dup(memory))
    one.cells[row(3, TO_CLIENT) + PIPE] = 12345678901
    assert other.cells[row(3, TO_CLIENT) + PIPE] == 12345678901
    assert RelayTable().cells[row(3, TO_CLIENT) + PIPE] == 0


def test_ids_are_taken_and_given() -> None:
    table = RelayTable()
    assert [table.allocate_relay_id() for _ in range(3)] == [1, 2, 3]
    table.release_relay_id(2)
    assert table.allocate_relay_id() == 2
    assert table.allocate_relay_id() == 4


def test_a_full_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_table, "RELAYS_MAX", 2)
    table = RelayTable()
    table.allocate_relay_id()
    table.allocate_relay_id()
    for _ in range(2):
        with pytest.raises(OverflowError, match="at most 2"):
            table.allocate_relay_id()
    table.release_relay_id(1)
    assert table.allocate_relay_id() == 1


def test_the_last_row_is_inside() -> None:
    table = RelayTable()
    table.cells[row(relay_table.RELAYS_MAX, TO_CLIENT) + OPERATIONS] = 1


def test_counters_of_those_that_live_and_those_that_ended() -> None:
    table = RelayTable()
    first, second = table.allocate_relay_id(), table.allocate_relay_id()
    moved(table, first, 10, 20)
    moved(table, second, 3, 4)
    assert totals(table) == (13, 2, 24, 2)
    table.release_relay_id(first)
    assert totals(table) == (13, 2, 24, 2)
    assert table.allocate_relay_id() == first
    moved(table, first, 100, 0)
    assert totals(table) == (113, 3, 24, 3)


def test_the_cells_of_a_released_relay_id_are_cleared() -> None:
    table = RelayTable()
    relay_id = table.allocate_relay_id()
    moved(table, relay_id, 1, 2)
    table.cells[row(relay_id, TO_CLIENT) + PIPE] = 7
    table.release_relay_id(relay_id)
    assert table.allocate_relay_id() == relay_id
    for way in (TO_BROKER, TO_CLIENT):
        assert [table.cells[row(relay_id, way) + cell] for cell in (PIPE, BYTES, OPERATIONS)] == [0, 0, 0]


def test_a_successor_goes_on_with_those_that_are_left(memory: int) -> None:
    first = RelayTable(memory)
    ids = [first.allocate_relay_id() for _ in range(6)]
    for relay_id in ids:
        moved(first, relay_id, relay_id, 10 * relay_id)
        first.cells[row(relay_id, TO_BROKER) + PIPE] = 100 + relay_id
    first.release_relay_id(4)
    before = totals(first)
    second = RelayTable(memory)
    second.adopt_rows({2, 5})
    assert totals(second) == before, "whatever became of the others"
    assert second.cells[row(2, TO_BROKER) + PIPE] == 102
    assert second.cells[row(5, TO_BROKER) + BYTES] == 5
    taken = [second.allocate_relay_id() for _ in range(6)]
    assert len({*taken, 2, 5}) == 8
    for relay_id in taken:
        assert all(second.cells[row(relay_id, TO_BROKER) + cell] == 0 for cell in (PIPE, BYTES, OPERATIONS))
    assert totals(second) == before


@pytest.mark.parametrize("left", [set(), {1}, {3}, {1, 2, 3}])
def test_counters_never_go_back(memory: int, left: set[int]) -> None:
    """Prometheus would take that for a restart, and count all of it again."""
    table, last = RelayTable(memory), (0, 0, 0, 0)
    for generation in range(4):
        for _ in range(3):
            moved(table, table.allocate_relay_id(), 7, generation)
        assert all(now >= then for now, then in zip(totals(table), last, strict=True))
        last = totals(table)
        table = RelayTable(memory)
        table.adopt_rows(left)
        assert totals(table) == last
    assert last[0] == 4 * 3 * 7


def test_adopting_nothing_begins_anew(memory: int) -> None:
    table = RelayTable(memory)
    table.adopt_rows(set())
    assert table.allocate_relay_id() == 1
    assert totals(table) == (0, 0, 0, 0)


def messages(table: RelayTable) -> tuple[list[int], list[int]]:
    """Messages of all relays, and of the principal in row 2."""
    return [table.messages_total(way) for way in (TO_BROKER, TO_CLIENT)], table.principal_sums(range(3))[2][2:4]


def test_messages_of_a_relay_that_goes_on_count_once_in_whichever_forwarder_has_it(memory: int) -> None:
    """They are billed. The relay stays in the forwarder that was replaced, or its successor has taken it over."""
    first = RelayTable(memory)
    moves_on, ended = first.allocate_relay_id(), first.allocate_relay_id()
    for relay_id in (moves_on, ended):
        first.record_principal(relay_id, 2)
        first.record_framed(relay_id)
        first.add_messages(relay_id, TO_BROKER, 10)
        first.add_messages(relay_id, TO_CLIENT, 20)
    assert messages(first) == ([20, 40], [20, 40])
    second = RelayTable(memory)
    second.adopt_rows({moves_on})
    assert messages(second) == ([20, 40], [20, 40]), "neither lost nor counted twice"
    first.add_messages(moves_on, TO_BROKER, 3)
    second.add_messages(moves_on, TO_CLIENT, 4)
    assert messages(second) == ([23, 44], [23, 44])
    third = RelayTable(memory)
    third.adopt_rows({moves_on})
    assert messages(third) == ([23, 44], [23, 44])
    third.release_relay_id(moves_on)
    assert messages(third) == ([23, 44], [23, 44])
    assert third.allocate_relay_id() == moves_on
    third.record_principal(moves_on, 2)
    third.record_framed(moves_on)
    assert messages(third) == ([23, 44], [23, 44]), "the next relay with this id begins at nothing"


# ---- killed while summing up


class Died(BaseException):
    pass


class Fragile:
    """Cells of which a store is the last thing that their process does."""

    def __init__(self, cells: memoryview, stores: int) -> None:
        self.cells = cells
        self.left = stores

    def __getitem__(self, key: slice) -> memoryview:
        return self.cells[key]

    def __setitem__(self, key: int, new: int) -> None:
        if not self.left:
            raise Died
        self.left -= 1
        self.cells[key] = new


def test_sums_are_exact_wherever_it_was_killed(memory: int) -> None:
    stores, done = 0, False
    while not done:
        table = RelayTable(memory)
        table.adopt_rows(set())
        before = totals(table), table.principal_sums(range(3))
        relay_id = table.allocate_relay_id()
        table.record_principal(relay_id, 2)
        table.record_framed(relay_id)
        moved(table, relay_id, 10, 20)
        table.cells[framed_row(relay_id, TO_BROKER) + MESSAGES] = 3
        table.cells = Fragile(table.cells, stores)  # type: ignore[assignment]
        try:
            table.release_relay_id(relay_id)
            done = True
        except Died:
            stores += 1
        after = RelayTable(memory)
        after.adopt_rows(set())
        assert totals(after) == tuple(a + b for a, b in zip(before[0], (10, 1, 20, 1), strict=True)), stores
        sums = after.principal_sums(range(3))
        assert sums[2] == [a + b for a, b in zip(before[1][2], (10, 20, 3, 0, 0), strict=True)], stores
        assert sums[0] == before[1][0]
        assert not after.is_framed(relay_id)
    assert stores > 30


def test_an_older_table_is_made_this_ones_size() -> None:
    size = relay_table._FRAMED_AT * 8
    old = create_shared_memory("old", size)
    with mmap.mmap(old, size) as memory_:
        cells = memoryview(memory_).cast("q")
        cells[3] = 2  # ids in use
        cells[row(0, TO_CLIENT) + BYTES] = 100
        cells[row(2, TO_CLIENT) + BYTES] = 23
        cells[row(2, TO_CLIENT) + PIPE] = 9
        cells.release()
    new = upgrade_table(old)
    table = RelayTable(new)
    table.adopt_rows({2})
    assert table.total(TO_CLIENT, BYTES) == 123
    assert table.cells[row(2, TO_CLIENT) + PIPE] == 9
    assert not table.is_framed(2)
    assert upgrade_table(new) == new
    os.close(new)


# ---- nonsense in a cell

NUMBERS = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([-(2**63), -1, 2**60, 2**62, 2**63 - 1]),
    st.builds(lambda relay, principal: relay + relay_table._IDS * principal, st.integers(0, 5), st.integers(0, 2**40)),
)
CELLS = st.one_of(
    st.integers(0, row(4, TO_BROKER)),
    st.integers(framed_row(0, TO_BROKER), framed_row(4, TO_BROKER)),
    st.integers(relay_table.principal_row(0), relay_table.principal_row(4)),
    st.integers(relay_table._JOURNAL_AT, relay_table._JOURNAL_AT + relay_table._JOURNAL_CELLS - 1),
)


@given(st.dictionaries(CELLS, NUMBERS, max_size=40), st.sets(st.integers(1, 3)))
@settings(max_examples=300)
def test_a_successor_goes_on_whatever_stands_in_a_table(poison: dict[int, int], taken: set[int]) -> None:
    """Security: a forwarder that was taken over writes what it likes, and ends."""
    descriptor = create_table()
    try:
        before = RelayTable(descriptor)
        for name in ("alice", "bob"):
            relay_id = before.allocate_relay_id()
            before.name_principal(relay_id + 1, name)
            before.record_principal(relay_id, relay_id + 1)
            before.record_framed(relay_id)
            before.add_session(relay_id + 1)
        for cell, number in poison.items():
            before.cells[cell] = number
        after = RelayTable(descriptor)
        after.adopt_rows(taken)
        for relay_id in taken:
            for way in (TO_BROKER, TO_CLIENT):
                after.add_moved(row(relay_id, way), 1 << 20)
                if after.is_framed(relay_id):
                    after.add_messages(relay_id, way, 1000)
        for number in range(4):
            assert isinstance(after.principal_name(number), str)
            after.add_session(number)
            after.principal_since_s(number)
        after.principal_sums(range(4))
        with contextlib.suppress(OverflowError):  # it may look full
            taken.add(after.allocate_relay_id())
        for relay_id in taken:
            after.release_relay_id(relay_id)
        after.total(TO_BROKER, BYTES)
        after.messages_total(TO_CLIENT)
        after.cells.release()
        before.cells.release()
    finally:
        os.close(descriptor)


def test_nonsense_in_the_rows_of_one_relay_changes_nothing_of_another(memory: int) -> None:
    """Security."""
    table = RelayTable(memory)
    bad, good = table.allocate_relay_id(), table.allocate_relay_id()
    for relay_id in (bad, good):
        table.record_principal(relay_id, relay_id + 1)
        table.record_framed(relay_id)
    moved(table, good, 10, 20)
    table.cells[framed_row(good, TO_BROKER) + MESSAGES] = 3
    for way in (TO_BROKER, TO_CLIENT):
        for cell in range(4):
            table.cells[row(bad, way) + cell] = -(2**63)
        for cell in range(16):
            table.cells[framed_row(bad, way) + cell] = 2**63 - 1
    after = RelayTable(memory)
    after.adopt_rows({bad, good})
    after.release_relay_id(bad)
    assert after.principal_sums(range(4))[good + 1] == [10, 20, 3, 0, 0]
    assert after.messages_of(good) == (3, 0)
    after.release_relay_id(good)
    assert after.principal_sums(range(4))[good + 1] == [10, 20, 3, 0, 0]
