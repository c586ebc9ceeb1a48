"""proxy.runtime.shared.address_tables: what forwarders tell each other about client addresses."""

from __future__ import annotations

import fcntl
import mmap
import os

import pytest
import structlog.testing
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from proxy.runtime.shared import address_tables
from proxy.runtime.shared.address_tables import (
    CHECK_INTERVAL_S,
    TABLE_BYTES,
    AddressTables,
    is_sealed_table,
)

ADDRESS = "192.0.2.1"


def two() -> tuple[AddressTables, AddressTables]:
    """A writer, and a reader of its table."""
    writer, reader = AddressTables(), AddressTables()
    writer.start_publishing(lambda table: reader.read_table(3, table))
    writer.track_connections({})
    return writer, reader


def test_no_two_addresses_are_one_number() -> None:
    networks = [ADDRESS, "192.0.2.2", "0.0.0.0", "::/64", "2001:db8::/64", "2001:db8:0:1::/64"]
    assert len({address_tables._number_of(one) for one in networks}) == len(networks)
    assert 0 not in {address_tables._number_of(one) for one in networks}


def test_others_read_what_is_written() -> None:
    writer, reader = two()
    for address in (ADDRESS, "2001:db8::/64"):
        writer.set_connections(address, 4)
        assert reader.others_connections(address, 9, 100) == 4
    writer.set_connections(ADDRESS, 0)
    assert reader.others_connections(ADDRESS, 9, 100) == 0
    assert reader.others_connections("no address", 9, 100) == 0
    writer.set_connections("no address", 5)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5)), max_size=60))
def test_many_addresses(steps: list[tuple[int, int]]) -> None:
    writer, reader = two()
    expected = dict[str, int]()
    for number, count in steps:
        address = f"10.0.0.{number}"
        writer.set_connections(address, count)
        expected[address] = count
    for address, count in expected.items():
        assert reader.others_connections(address, 1000, 1000) == count


def test_rows_are_used_again() -> None:
    writer, reader = two()
    for number in range(50_000):
        address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
        writer.set_connections(address, 1)
        if number % 1000 == 0:
            assert reader.others_connections(address, 9, 100) == 1
        writer.set_connections(address, 0)


async def test_a_table_that_claims_more_than_one_forwarder_may_have_is_not_believed(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Security: a forwarder that was taken over cannot have all clients refused."""
    writer, reader = two()
    for number in range(10):
        writer.set_connections(f"192.0.2.{number}", 20)
    assert reader.others_connections(ADDRESS, 10, 199) == 0
    assert reader.others_connections(ADDRESS, 10, 200) == 20
    writer.set_connections(ADDRESS, 2**64 - 1)
    await trio.sleep(CHECK_INTERVAL_S)
    assert reader.others_connections(ADDRESS, 10, 200) == 0


def test_only_its_owner_can_write_a_table() -> None:
    """Security: also not by opening the memory once more."""
    tables: list[int] = []
    writer = AddressTables()
    writer.start_publishing(tables.append)
    writer.track_connections({ADDRESS: 2})
    [table] = tables
    assert is_sealed_table(table)
    again = os.open(f"/proc/self/fd/{table}", os.O_RDWR)
    for descriptor in (table, again):
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, TABLE_BYTES)
        with pytest.raises(PermissionError):
            os.pwrite(descriptor, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 0)
        os.close(descriptor)


@pytest.mark.parametrize("what", ["unsealed", "too small", "a pipe"])
def test_an_unsealed_or_short_memory_or_a_pipe_is_no_address_table(what: str) -> None:
    reading, writing = os.pipe()
    memory = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, TABLE_BYTES // 2 if what == "too small" else TABLE_BYTES)
    if what == "too small":
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, address_tables._SEALS)
    assert not is_sealed_table(reading if what == "a pipe" else memory)
    for descriptor in (reading, writing, memory):
        os.close(descriptor)


def test_a_table_that_was_made_too_early_is_published_later() -> None:
    writer, reader = AddressTables(), AddressTables()
    writer.track_connections({ADDRESS: 2})
    writer.start_publishing(lambda table: reader.read_table(3, table))
    assert reader.others_connections(ADDRESS, 9, 100) == 2
    writer.track_connections(None)
    writer.set_connections(ADDRESS, 7)
    assert reader.others_connections(ADDRESS, 9, 100) == 2, "it is its successor's to say"
    writer.track_connections({ADDRESS: 1})
    assert reader.others_connections(ADDRESS, 9, 100) == 1


def test_a_kernel_that_cannot_seal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_tables, "_SEALS", 1 << 20)
    writer = AddressTables()
    writer.start_publishing(lambda _table: pytest.fail("published"))
    with structlog.testing.capture_logs() as logs:
        writer.track_connections({ADDRESS: 2})
    assert [entry["log_level"] for entry in logs] == ["warning"]
