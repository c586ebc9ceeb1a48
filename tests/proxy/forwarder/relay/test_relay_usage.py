"""proxy.forwarder.relay.usage: use by principal, bounded, exact, and never going back."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from proxy.forwarder.relay.usage import ANONYMOUS, OTHER, PrincipalUsage
from proxy.runtime.shared import relay_table
from proxy.runtime.shared.relay_table import (
    BYTES,
    MESSAGES,
    TO_BROKER,
    TO_CLIENT,
    RelayTable,
    framed_row,
    row,
)
from proxy.runtime.shared.relay_table_memory import create_table

IDLE_S = 600.0


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = create_table()
    yield descriptor
    os.close(descriptor)


def begin(table: RelayTable, principals: PrincipalUsage, name: str) -> int:
    relay_id = table.allocate_relay_id()
    table.record_principal(relay_id, principals.row_number_of(name))
    table.add_session(table.principal_of(relay_id))
    return relay_id


def use(table: RelayTable, relay_id: int, to_broker: int, to_client: int = 0) -> None:
    table.cells[row(relay_id, TO_BROKER) + BYTES] += to_broker
    table.cells[row(relay_id, TO_CLIENT) + BYTES] += to_client


def found(principals: PrincipalUsage, kind: str = "bytes") -> dict[str, tuple[float, ...]]:
    """Principal to its values."""
    values: dict[str, dict[str, float]] = {}
    for family in principals.collect():
        for sample in family.samples:
            if sample.name == f"pulsar_proxy_principal_{kind}_total":
                values.setdefault(sample.labels["principal"], {})[sample.labels.get("direction", "")] = sample.value
    return {name: tuple(by[key] for key in ("to_broker", "to_client", "") if key in by) for name, by in values.items()}


def test_by_name_of_those_that_live_and_those_that_ended() -> None:
    table = RelayTable()
    principals = PrincipalUsage(table, 100, IDLE_S)
    first, second = begin(table, principals, "alice"), begin(table, principals, "bob")
    use(table, first, 10, 1)
    use(table, second, 20, 2)
    third = begin(table, principals, "alice")
    use(table, third, 5, 5)
    before = {"alice": (15, 6), "bob": (20, 2)}
    assert found(principals) == before
    assert found(principals, "sessions") == {"alice": (2,), "bob": (1,)}
    table.release_relay_id(first)
    assert found(principals) == before
    again = begin(table, principals, "bob")
    assert again == first
    use(table, again, 1)
    assert found(principals) == {"alice": (15, 6), "bob": (21, 2)}


def test_names_are_bounded_and_counted_ones_stay() -> None:
    table = RelayTable()
    principals = PrincipalUsage(table, 2, IDLE_S)
    for number, name in enumerate(["a", "b", "c", "d", "a"]):
        use(table, begin(table, principals, name), 10**number)
    assert {name: values[0] for name, values in found(principals).items()} == {"a": 10_001, "b": 10, OTHER: 1100}
    assert found(principals, "sessions")[OTHER] == (2,)
    more = PrincipalUsage(table, 3, IDLE_S)  # after a restart with a larger number
    use(table, begin(table, more, "c"), 7)
    assert found(more)["c"] == (7, 0), "what was counted as other stays there"
    assert found(more)[OTHER] == (1100, 0)
    fewer = PrincipalUsage(table, 0, IDLE_S)
    assert found(fewer) == found(more), "who has a name keeps it"


def test_names_that_are_ours() -> None:
    table = RelayTable()
    principals = PrincipalUsage(table, 10, IDLE_S)
    for name in ("", ANONYMOUS, OTHER, f"principal:{OTHER}"):
        use(table, begin(table, principals, name), 1)
    expected = {"principal:other": (1, 0), "principal:anonymous": (1, 0), "principal:principal:other": (1, 0)}
    assert found(principals) == {ANONYMOUS: (1, 0), **expected}
    assert found(PrincipalUsage(table, 10, IDLE_S)) == {ANONYMOUS: (1, 0), **expected}, "a successor reads the same names"


def test_a_role_named_other_is_billed_apart_from_those_beyond_the_bound() -> None:
    table = RelayTable()
    principals = PrincipalUsage(table, 1, IDLE_S)
    for name, size in ((OTHER, 5), ("carol", 7)):
        use(table, begin(table, principals, name), size)
    assert found(principals) == {"principal:other": (5, 0), OTHER: (7, 0)}


@pytest.mark.parametrize("name", ["ä" * 5, "x" * relay_table.NAME_BYTES_MAX, "1234567", "12345678", "123456789", "\0"])
def test_names_survive(memory: int, name: str) -> None:
    first = RelayTable(memory)
    use(first, begin(first, PrincipalUsage(first, 5, IDLE_S), name), 3)
    second = RelayTable(memory)
    principals = PrincipalUsage(second, 5, IDLE_S)
    assert found(principals) == {name: (3, 0)}
    assert principals.row_number_of(name) == 2


def test_a_name_that_is_too_long() -> None:
    table = RelayTable()
    assert PrincipalUsage(table, 5, IDLE_S).row_number_of("x" * (relay_table.NAME_BYTES_MAX + 1)) == 0


@pytest.mark.parametrize("character", ["ä", "角", "🔑"])
def test_a_name_is_as_long_as_its_bytes(memory: int, character: str) -> None:
    """A name of more bytes than its row has would be written over the next principal's sums."""
    whole, rest = divmod(relay_table.NAME_BYTES_MAX, len(character.encode()))
    fits = character * whole + "x" * rest
    table = RelayTable(memory)
    principals = PrincipalUsage(table, 5, IDLE_S)
    use(table, begin(table, principals, fits), 3)
    for too_long in (fits + "x", character * relay_table.NAME_BYTES_MAX):
        use(table, begin(table, principals, too_long), 10)
    use(table, begin(table, principals, "bob"), 1)
    for known in (principals, PrincipalUsage(RelayTable(memory), 5, IDLE_S)):
        assert found(known) == {OTHER: (20, 0), fits: (3, 0), "bob": (1, 0)}


def test_messages() -> None:
    table = RelayTable()
    principals = PrincipalUsage(table, 5, IDLE_S)
    relay_id = begin(table, principals, "alice")
    table.record_framed(relay_id)
    table.cells[framed_row(relay_id, TO_BROKER) + MESSAGES] = 7
    table.cells[framed_row(relay_id, TO_CLIENT) + MESSAGES] = 8
    for _ in range(2):
        assert found(principals, "messages") == {"alice": (7, 8)}
        assert (table.messages_total(TO_BROKER), table.messages_total(TO_CLIENT)) == (7, 8)
        if not table._free:
            table.release_relay_id(relay_id)


def created(principals: PrincipalUsage) -> dict[str, set[float]]:
    """Principal to the moments from which its counters count."""
    moments: dict[str, set[float]] = {}
    for family in principals.collect():
        for sample in family.samples:
            if sample.name.endswith("_created"):
                moments.setdefault(sample.labels["principal"], set()).add(sample.value)
    return moments


def test_counters_tell_since_when_they_count_and_a_successor_the_same(
    memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = RelayTable(memory)
    principals = PrincipalUsage(first, 5, IDLE_S)
    for second, name in ((1000.5, "alice"), (1001.25, "bob"), (1002.0, "alice"), (1003.0, OTHER)):
        monkeypatch.setattr(relay_table.time, "time", lambda second=second: second)
        relay_id = begin(first, principals, name)
    expected = {"alice": {1000.5}, "bob": {1001.25}, f"principal:{OTHER}": {1003.0}}
    assert created(principals) == expected
    first.release_relay_id(relay_id)
    assert created(PrincipalUsage(RelayTable(memory), 5, IDLE_S)) == expected
    families = {sample.name for family in principals.collect() for sample in family.samples}
    assert {f"pulsar_proxy_principal_{kind}_created" for kind in ("bytes", "messages", "sessions")} <= families


def test_a_registry_takes_it() -> None:
    table = RelayTable()
    principals = PrincipalUsage(table, 5, IDLE_S)
    begin(table, principals, 'quo"te\n')
    registry = CollectorRegistry()
    registry.register(principals)  # type: ignore[arg-type]
    labels = {"principal": 'quo"te\n'}
    assert registry.get_sample_value("pulsar_proxy_principal_sessions_total", labels) == 1
