"""proxy.forwarder.relay.usage: use by principal, bounded, exact, and never going back."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from proxy.admin.exposition import PROCESS_BYTES_MAX, SERIES_MAX
from proxy.forwarder.relay.usage import ANONYMOUS, LABEL_BYTES_MAX, OTHER, PrincipalUsage, label_of
from proxy.runtime.observability.metrics import render_metrics
from proxy.runtime.shared import relay_table
from proxy.runtime.shared.relay_table import (
    BYTES,
    MESSAGES,
    PRINCIPALS_MAX,
    TO_BROKER,
    TO_CLIENT,
    RelayTable,
    create_table,
    framed_row,
    row,
)
from tests.analytics.counter_model import Sample, windows
from tests.proxy.runtime.shared.test_shared_relay_table import Died, Fragile

IDLE_S = 600.0


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = create_table()
    yield descriptor
    os.close(descriptor)


def begin(table: RelayTable, principals: PrincipalUsage, name: str, owner: str = "") -> int:
    relay_id = table.allocate_relay_id()
    table.record_principal(relay_id, principals.row_number_of(name, owner))
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
    assert found(PrincipalUsage(table, 10, IDLE_S)) == {ANONYMOUS: (1, 0), **expected}, (
        "a successor reads the same names"
    )


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
    assert found(principals) == {label_of(name): (3, 0)}
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
        assert found(known) == {OTHER: (20, 0), label_of(fits): (3, 0), "bob": (1, 0)}


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


# ---- rows go by use


class Clock:
    """The monotonic clock and the wall clock in one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1_800_000_000.0
        monkeypatch.setattr(relay_table.time, "time", lambda: self.now_s)

    def __call__(self) -> float:
        return self.now_s

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_the_row_of_an_idle_principal_goes_to_a_newcomer(clock: Clock) -> None:
    """Security: an issuer's hundred one-shot roles would have all rows for as long as the cluster runs."""
    table = RelayTable()
    principals = PrincipalUsage(table, 100, IDLE_S, clock)
    for number in range(100):
        relay_id = begin(table, principals, f"one-shot-{number}")
        use(table, relay_id, 1)
        table.release_relay_id(relay_id)
    use(table, begin(table, principals, "bob"), 10)
    assert found(principals)[OTHER] == (10, 0)
    clock.pass_s(IDLE_S)
    use(table, begin(table, principals, "bob"), 20)
    after = found(principals)
    assert after["bob"] == (20, 0), "his own, from zero: what was counted in `other` stays there"
    assert after[OTHER] == (10, 0), "the sums of a row that ends were scraped, and are not billed again"
    assert "one-shot-0" not in after
    assert len(after) == 101
    assert created(principals)["bob"] == {clock.now_s}


def test_the_principal_that_is_idle_for_the_longest_time_loses_its_row(clock: Clock) -> None:
    table = RelayTable()
    principals = PrincipalUsage(table, 2, IDLE_S, clock)
    for name in ("alice", "carol"):
        table.release_relay_id(begin(table, principals, name))
        found(principals)
        clock.pass_s(1)
    table.release_relay_id(begin(table, principals, "alice"))
    found(principals)
    clock.pass_s(IDLE_S)
    begin(table, principals, "bob")
    assert found(principals, "sessions") == {"alice": (2,), "bob": (1,)}


@pytest.mark.parametrize("why", ["a relay", "no scrape since", "a short time", "it came back"])
def test_a_principal_that_is_not_idle_keeps_its_row(clock: Clock, why: str) -> None:
    table = RelayTable()
    principals = PrincipalUsage(table, 1, IDLE_S, clock)
    found(principals)
    relay_id = begin(table, principals, "alice")
    if why == "a relay":
        found(principals)
    else:
        table.release_relay_id(relay_id)
    if why != "no scrape since":
        found(principals)
    clock.pass_s(IDLE_S - (why == "a short time"))
    if why == "it came back":
        table.release_relay_id(begin(table, principals, "alice"))
    assert principals.row_number_of("bob") == 0


def test_a_role_that_is_idle_has_its_row_again_when_it_returns(clock: Clock) -> None:
    table = RelayTable()
    principals = PrincipalUsage(table, 1, IDLE_S, clock)
    table.release_relay_id(begin(table, principals, "alice"))
    found(principals)
    clock.pass_s(10 * IDLE_S)
    begin(table, principals, "alice")
    assert found(principals, "sessions") == {"alice": (2,)}, "a row that no other principal needs stays"


def test_an_address_does_not_take_all_rows_though_each_of_its_principals_has_a_relay(memory: int, clock: Clock) -> None:
    """Security: an issuer's roles, all with relays, and none of them idle."""
    table = RelayTable(memory)
    principals = PrincipalUsage(table, 10, IDLE_S, clock)
    for number in range(30):
        begin(table, principals, f"one-{number}", "address 192.0.2.1")
    begin(table, principals, "bob", "address 192.0.2.2")
    assert {"bob", OTHER} < set(found(principals, "sessions"))
    assert len(found(principals, "sessions")) == 10 + 2
    successor = PrincipalUsage(RelayTable(memory), 10, IDLE_S, clock)
    assert successor.row_number_of("another", "address 192.0.2.1") == 0, "it knows the owners, too"
    table.release_relay_id(begin(table, successor, "carol", "proxy p"))
    found(successor)
    clock.pass_s(IDLE_S)
    assert successor.row_number_of("another", "address 192.0.2.1") == 0, "nor does it take idle rows of others"
    assert successor.row_number_of("another", "address 192.0.2.2") > 0


def test_an_address_has_as_many_rows_as_ever_once_those_of_another_one_are_idle(clock: Clock) -> None:
    """As of a load balancer that has moved."""
    table = RelayTable()
    principals = PrincipalUsage(table, 10, IDLE_S, clock)
    for number in range(10):
        table.release_relay_id(begin(table, principals, f"old-{number}", "address 192.0.2.1"))
    found(principals)
    clock.pass_s(IDLE_S)
    numbers = {principals.row_number_of(f"new-{number}", "address 192.0.2.2") for number in range(10)}
    assert len(numbers - {0}) == 10


def test_a_relay_counts_its_session_in_the_row_of_its_bytes_though_another_is_free_by_then(clock: Clock) -> None:
    table = RelayTable()
    principals = PrincipalUsage(table, 1, IDLE_S, clock)
    table.release_relay_id(begin(table, principals, "alice"))
    found(principals)
    relay_id = table.allocate_relay_id()
    table.record_principal(relay_id, principals.row_number_of("bob"))
    clock.pass_s(IDLE_S)
    table.add_session(table.principal_of(relay_id))
    assert found(principals, "sessions") == {"alice": (1,), OTHER: (1,)}


@pytest.mark.parametrize("seed", range(8))
def test_every_byte_is_billed_once_to_its_row_however_often_rows_change_hands(
    memory: int, clock: Clock, seed: int
) -> None:
    """What the analytics make of the scrapes, over principals that come and go, and forwarders that are killed."""
    chance = random.Random(seed)
    idle_s, scrape_s = 120.0, 30.0
    table = RelayTable(memory)
    principals = PrincipalUsage(table, 3, idle_s, clock)
    live: dict[int, str] = {}
    moved: Counter[str] = Counter()
    series: dict[str, list[Sample]] = {}
    newly_named = 0
    for _ in range(400):
        for _ in range(chance.randrange(4)):
            clock.pass_s(1)
            role, owner = f"role-{chance.randrange(12)}", f"address {chance.randrange(3)}"
            before = table.principal_names()
            relay_id = begin(table, principals, role, owner)
            newly_named += table.principal_names() != before
            live[relay_id] = role if table.principal_of(relay_id) else OTHER
        for relay_id in list(live):
            size = chance.randrange(1000)
            use(table, relay_id, size)
            moved[live[relay_id]] += size
            if chance.random() < 0.5:
                table.release_relay_id(relay_id)
                del live[relay_id]
        clock.pass_s(scrape_s)
        if chance.random() < 0.9:  # Prometheus misses one now and then
            starts = created(principals)
            for name, values in found(principals).items():
                now_ms, (start_s,) = round(clock.now_s * 1000), starts[name]
                series.setdefault(name, []).append(Sample(now_ms, values[0], round(start_s * 1000)))
        if chance.random() < 0.05:
            table = RelayTable(memory)
            table.adopt_rows(set(live))
            principals = PrincipalUsage(table, 3, idle_s, clock)
    clock.pass_s(scrape_s)
    for name, values in found(principals).items():
        (start_s,) = created(principals)[name]
        series.setdefault(name, []).append(Sample(round(clock.now_s * 1000), values[0], round(start_s * 1000)))
    billed = {name: sum(window.increase for window in windows(of, 60_000, 30)) for name, of in series.items()}
    assert billed == {name: float(size) for name, size in moved.items()}
    assert newly_named > 12, "or no row changed hands"


def test_a_successor_bills_to_no_principal_what_another_used_wherever_its_predecessor_was_killed(clock: Clock) -> None:
    stores, done = 0, False
    alice, bob = "alice" * 20, "bob" * 30
    while not done:
        memory = create_table()
        table = RelayTable(memory)
        principals = PrincipalUsage(table, 2, IDLE_S, clock)
        relay_id = begin(table, principals, alice)
        use(table, relay_id, 5, 6)
        table.release_relay_id(relay_id)
        stays = begin(table, principals, "carol")  # in the row behind
        use(table, stays, 7)
        found(principals)
        clock.pass_s(IDLE_S)
        table.cells = Fragile(table.cells, stores)  # type: ignore[assignment]
        try:
            principals.row_number_of(bob)
            done = True
        except Died:
            stores += 1
        after = RelayTable(memory)
        after.adopt_rows({stays})
        successor = PrincipalUsage(after, 2, IDLE_S, clock)
        assert found(successor) in ({alice: (5, 6), "carol": (7, 0)}, {"carol": (7, 0)}), stores
        if alice not in found(successor):
            use(after, begin(after, successor, bob), 1)
            assert found(successor) == {label_of(bob): (1, 0), "carol": (7, 0)}, stores
        os.close(memory)
    assert stores > 20


POISON = st.dictionaries(
    st.integers(relay_table.principal_row(0), relay_table.principal_row(5) - 1),
    st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-1, 9)),
    max_size=40,
)


@given(POISON)
@settings(max_examples=100)
def test_a_successor_names_rows_whatever_stands_in_a_table(poison: dict[int, int]) -> None:
    """Security: a forwarder that was taken over writes what it likes, and ends."""
    table = RelayTable()
    principals = PrincipalUsage(table, 3, IDLE_S)
    for name in ("alice", "bob", "carol"):
        begin(table, principals, name)
    for cell, number in poison.items():
        table.cells[cell] = number
    times = iter(range(0, 100 * int(IDLE_S), int(IDLE_S)))
    successor = PrincipalUsage(table, 3, IDLE_S, lambda: next(times))
    for number in range(8):
        table.release_relay_id(begin(table, successor, f"role-{number}", f"address {number}"))
        list(successor.collect())
    assert sum(values[0] for values in found(successor, "sessions").values()) != 0
    table.cells.release()


# ---- labels


def test_a_long_role_has_a_short_label_that_no_other_role_has() -> None:
    """Security: a role that is named like the label of another one would share its row on the bill."""
    long = "x" * 300
    roles = [long, long + "x", "y" + long, "ä" * 100, "\U0001f511" * 60, f"principal:{long}", "x" * 128, "x" * 129]
    roles += [label_of(role) for role in roles] + [f"principal:{label_of(role)}" for role in roles]
    labels = {label_of(role) for role in set(roles)}
    assert len(labels) == len(set(roles))
    assert max(len(label.encode()) for label in labels) <= LABEL_BYTES_MAX
    assert label_of("x" * 128) == "x" * 128
    assert label_of(long).startswith("principal:sha256:")
    assert label_of(long).endswith(":" + "x" * 78)


@pytest.mark.parametrize("character", ['"', "\\", "\n", "ä"])
def test_the_longest_names_of_the_most_principals_fit_into_what_the_admin_worker_takes(character: str) -> None:
    """Security: 470 roles of 448 bytes made all metrics of a forwarder vanish."""
    table = RelayTable()
    principals = PrincipalUsage(table, PRINCIPALS_MAX, IDLE_S)
    bytes_max = LABEL_BYTES_MAX - 4
    for number in range(PRINCIPALS_MAX):
        name = f"{number:04}" + character * (bytes_max // len(character.encode()))
        relay_id = begin(table, principals, name)
        use(table, relay_id, 10**15 + number, 10**15 + number)
    registry = CollectorRegistry()
    registry.register(principals)  # type: ignore[arg-type]
    text = render_metrics(registry)
    assert len([line for line in text.splitlines() if line[0] != "#"]) == 10 * PRINCIPALS_MAX <= SERIES_MAX / 2
    assert len(text.encode()) < PROCESS_BYTES_MAX * 0.95, "with place for all other metrics"
