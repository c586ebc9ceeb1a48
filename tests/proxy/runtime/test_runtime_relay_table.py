"""proxy.runtime.relay_table: what a forwarder's successor finds, and counters that never go back."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest

from proxy.runtime import relay_table
from proxy.runtime.relay_table import BYTES, OPERATIONS, PIPE, TO_BROKER, TO_CLIENT, RelayTable, new_table, row


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = new_table()
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
    assert [table.take() for _ in range(3)] == [1, 2, 3]
    table.give(2)
    assert table.take() == 2
    assert table.take() == 4


def test_a_full_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_table, "RELAYS_MAX", 2)
    table = RelayTable()
    table.take()
    table.take()
    for _ in range(2):
        with pytest.raises(OverflowError, match="at most 2"):
            table.take()
    table.give(1)
    assert table.take() == 1


def test_the_last_row_is_inside() -> None:
    table = RelayTable()
    table.cells[row(relay_table.RELAYS_MAX, TO_CLIENT) + OPERATIONS] = 1


def test_counters_of_those_that_live_and_those_that_ended() -> None:
    table = RelayTable()
    first, second = table.take(), table.take()
    moved(table, first, 10, 20)
    moved(table, second, 3, 4)
    assert totals(table) == (13, 2, 24, 2)
    table.give(first)
    assert totals(table) == (13, 2, 24, 2)
    assert table.take() == first
    moved(table, first, 100, 0)
    assert totals(table) == (113, 3, 24, 3)


def test_what_is_given_back_is_clear() -> None:
    table = RelayTable()
    relay_id = table.take()
    moved(table, relay_id, 1, 2)
    table.cells[row(relay_id, TO_CLIENT) + PIPE] = 7
    table.give(relay_id)
    assert table.take() == relay_id
    for way in (TO_BROKER, TO_CLIENT):
        assert [table.cells[row(relay_id, way) + cell] for cell in (PIPE, BYTES, OPERATIONS)] == [0, 0, 0]


def test_a_successor_goes_on_with_those_that_are_left(memory: int) -> None:
    first = RelayTable(memory)
    ids = [first.take() for _ in range(6)]
    for relay_id in ids:
        moved(first, relay_id, relay_id, 10 * relay_id)
        first.cells[row(relay_id, TO_BROKER) + PIPE] = 100 + relay_id
    first.give(4)
    before = totals(first)
    second = RelayTable(memory)
    second.adopt({2, 5})
    assert totals(second) == before, "whatever became of the others"
    assert second.cells[row(2, TO_BROKER) + PIPE] == 102
    assert second.cells[row(5, TO_BROKER) + BYTES] == 5
    taken = [second.take() for _ in range(6)]
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
            moved(table, table.take(), 7, generation)
        assert all(now >= then for now, then in zip(totals(table), last, strict=True))
        last = totals(table)
        table = RelayTable(memory)
        table.adopt(left)
        assert totals(table) == last
    assert last[0] == 4 * 3 * 7


def test_adopting_nothing_begins_anew(memory: int) -> None:
    table = RelayTable(memory)
    table.adopt(set())
    assert table.take() == 1
    assert totals(table) == (0, 0, 0, 0)
