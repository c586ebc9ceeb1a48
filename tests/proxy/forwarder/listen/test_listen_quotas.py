"""proxy.forwarder.listen.quotas: connections, and new ones a second, by principal, tenant and address."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator

import pytest
import trio
import trio.testing

from proxy.config.types import Limits, Quota
from proxy.forwarder.listen.admission import Admission, AdmittedConnection, Refusal, sender_key
from proxy.forwarder.listen.eviction import Place
from proxy.runtime.fairness.owners import owner_of
from proxy.runtime.fairness.quotas import AppliedQuota, Limit
from proxy.runtime.shared.connection_count import ConnectionCounters, create_shared_counters

ALICE, BOB = owner_of("alice", ""), owner_of("bob", "")
MAX, RATE = "quota[0].max_connections", "quota[0].new_connections_per_second"


class Forwarder:
    """The admission of one of two forwarders."""

    def __init__(self, memory: int, number: int, *quotas: Quota, limits: Limits) -> None:
        self.exceeded: list[tuple[int, Limit, str]] = []
        self.admission = Admission(limits, ConnectionCounters(memory), number, on_quota_exceeded=self._on_exceeded)
        self.admission.set_quotas(quotas)

    def _on_exceeded(self, applied: AppliedQuota, limit: Limit, owner: str) -> None:
        self.exceeded.append((applied.index, limit, owner))

    def connect(self, owner: str, address: str = "192.0.2.1") -> AdmittedConnection | str:
        """A client that authenticates; return its connection, or why it has none."""
        refused = self.admission.check_admission(address)
        if refused is not None:
            return refused
        admitted = self.admission.admit_client(address)
        limit = admitted.take_place(owner, admitted.release)
        admitted.stop_counting()
        if limit is None:
            return admitted
        admitted.release()
        return limit

    def connects(self, owner: str, count: int, address: str = "192.0.2.1") -> int:
        """Return how many of so many connections are let in."""
        return sum(isinstance(self.connect(owner, address), AdmittedConnection) for _ in range(count))


class Make:
    def __init__(self, memory: int) -> None:
        self._memory = memory

    def __call__(self, *quotas: Quota, number: int = 0, **limits: int) -> Forwarder:
        return Forwarder(self._memory, number, *quotas, limits=Limits(**limits))


@pytest.fixture
def make(autojump_clock: trio.testing.MockClock) -> Iterator[Make]:
    descriptor = create_shared_counters(2)
    yield Make(descriptor)
    os.close(descriptor)


async def test_connections_of_each_principal(make: Make) -> None:
    """Security: of all forwarders together it has no more."""
    quota = Quota(max_connections=5)
    first, second = make(quota), make(quota, number=1)
    places = [first.connect(ALICE) for _ in range(3)]
    assert (first.connect(ALICE), second.connects(ALICE, 9)) == (MAX, 2)
    assert first.connects(BOB, 9) == 3
    assert first.exceeded[0] == (0, "max_connections", ALICE)
    assert isinstance(places[0], AdmittedConnection)
    places[0].release()
    assert first.connects(ALICE, 9) == 1


async def test_clients_without_a_principal_count_by_address(make: Make) -> None:
    forwarder = make(Quota(max_connections=2))
    first, second = owner_of("", "[2001:db8::1]:5"), owner_of("", "[2001:db8::2]:5")
    assert forwarder.connects(first, 1) == 1
    assert forwarder.connects(second, 1) == 0, "one network"
    assert forwarder.connects(owner_of("", "192.0.2.9:5"), 1) == 1


async def test_a_small_quota_is_one_for_each_forwarder(make: Make) -> None:
    """Otherwise a client would get in at one of them alone, by chance."""
    quota = Quota(max_connections=1)
    assert make(quota).connects(ALICE, 2) == 1
    assert make(quota, number=1).connects(ALICE, 2) == 1


async def test_roles_of_a_tenant_together(make: Make) -> None:
    """Security: more roles are no more connections."""
    forwarder = make(Quota(by="tenant", tenant="acme", principals=("acme-*",), max_connections=6))
    assert [forwarder.connects(owner_of(f"acme-{number}", ""), 2) for number in range(3)] == [2, 1, 0]
    assert forwarder.connects(ALICE, 9) == 9


async def test_a_connection_that_was_taken_away_counts_no_longer(make: Make) -> None:
    forwarder = make(Quota(max_connections=100), max_connections=32)
    assert forwarder.connects(ALICE, 16) == 16
    assert forwarder.connects(BOB, 1) == 1
    assert forwarder.admission.quotas._held == {(0, ALICE): 15, (0, BOB): 1}, "alice's last one gave way"


async def test_new_connections_a_second(make: Make) -> None:
    """Security: those that end at once count, too."""
    forwarder = make(Quota(new_connections_per_second=4, burst_ms=2000))
    for _ in range(4):
        place = forwarder.connect(ALICE)
        assert isinstance(place, AdmittedConnection)
        place.release()
    assert forwarder.connect(ALICE) == RATE
    assert forwarder.connects(BOB, 9) == 4
    await trio.sleep(1)
    assert forwarder.connects(ALICE, 9) == 2


async def test_new_connections_of_an_address(make: Make) -> None:
    """Security: before anything is read, and before another one is evicted for them."""
    forwarder = make(
        Quota(by="address", new_connections_per_second=4, burst_ms=1000), max_unauthenticated_connections=4
    )
    evicted: list[str] = []
    admitted = forwarder.admission.admit_client("198.51.100.1")
    admitted.evict = lambda: evicted.append("silent")
    for _ in range(2):
        assert forwarder.admission.check_admission("192.0.2.1") is None
    forwarder.admission.admit_client("198.51.100.2")
    assert forwarder.admission.check_admission("192.0.2.1") is Refusal.RATE_OF_ADDRESS
    assert not evicted
    assert Refusal.RATE_OF_ADDRESS.key == "quota.new_connections_per_second"
    assert forwarder.admission.check_admission("192.0.2.2") is None
    assert forwarder.exceeded == [(0, "new_connections_per_second", "address 192.0.2.1")]


async def test_a_load_balancer_is_no_address(make: Make) -> None:
    forwarder = make(Quota(by="address", new_connections_per_second=2, burst_ms=1000))
    for _ in range(5):
        assert forwarder.admission.check_admission(sender_key("192.0.2.1")) is None
    assert forwarder.connects(ALICE, 5) == 1


async def test_a_dry_run_lets_all_in_and_counts(make: Make) -> None:
    forwarder = make(
        Quota(max_connections=4, new_connections_per_second=2, burst_ms=1000, dry_run=True),
        Quota(by="address", new_connections_per_second=2, burst_ms=1000, dry_run=True),
    )
    assert forwarder.connects(ALICE, 4) == 4
    assert sorted(set(forwarder.exceeded)) == [
        (0, "max_connections", ALICE),
        (0, "new_connections_per_second", ALICE),
        (1, "new_connections_per_second", "address 192.0.2.1"),
    ]


async def test_a_reload_counts_what_is_there_and_fills_no_bucket(make: Make) -> None:
    """Security."""
    forwarder = make(Quota(new_connections_per_second=6, burst_ms=1000))
    assert forwarder.connects(ALICE, 9) == 3
    forwarder.admission.set_quotas((Quota(new_connections_per_second=6, burst_ms=1000),))
    assert forwarder.connects(ALICE, 9) == 0
    forwarder.admission.set_quotas((Quota(max_connections=8),))
    assert forwarder.connects(ALICE, 9) == 1
    forwarder.admission.set_quotas(())
    assert forwarder.connects(ALICE, 9) == 9
    assert not forwarder.admission.quotas._held


async def test_by_default_one_credential_that_takes_all_connections_keeps_no_other_out(make: Make) -> None:
    """Security: with no quota at all, over both forwarders; each newcomer gets all that it needs."""
    forwarders = [make(), make(number=1)]
    part = Limits().max_connections // 2
    for forwarder in forwarders:
        assert forwarder.connects(ALICE, part + 10) == part
        for number in range(100):
            assert forwarder.connects(owner_of(f"other{number}", ""), 5, f"198.51.100.{number}") == 5
            assert not isinstance(forwarder.connect(ALICE), AdmittedConnection)
        assert forwarder.admission.shares.counts()[ALICE] == part - 500
        assert not forwarder.exceeded


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_comes_goes_gives_way_or_is_reloaded_each_place_counts_once(make: Make, seed: int) -> None:
    """Against a count of what is open, over thousands of random steps."""
    chance = random.Random(seed)
    tables = (
        Quota(max_connections=6, principals=("a*",)),
        Quota(max_connections=4, dry_run=True),
        Quota(max_connections=9),
        Quota(by="tenant", tenant="t", max_connections=8, principals=("a*", "bob")),
    )
    forwarder = make(*tables, max_connections=30)
    admission, handshakes, relays = forwarder.admission, dict[AdmittedConnection, str](), dict[Place, str]()

    def come(owner: str) -> None:
        admitted = admission.admit_client("192.0.2.1")

        def give_way() -> None:
            del handshakes[admitted]
            admitted.release()

        if admitted.take_place(owner, give_way) is None:
            handshakes[admitted] = owner
        else:
            admitted.release()

    def become_relay(admitted: AdmittedConnection) -> None:
        owner = handshakes.pop(admitted)
        place = admission.shares.adopt_place(owner, lambda: end_relay(place))
        relays[place] = owner
        admitted.on_relay_started()

    def end_relay(place: Place) -> None:
        del relays[place]
        admission.release_client("192.0.2.1")
        admission.shares.leave_place(place)

    for _ in range(3000):
        step = chance.random()
        if step < 0.5:
            come(chance.choice([ALICE, BOB, owner_of("anna", ""), "address 192.0.2.9"]))
        elif step < 0.7 and handshakes:
            become_relay(chance.choice([*handshakes]))
        elif step < 0.8 and handshakes:
            admitted = chance.choice([*handshakes])
            del handshakes[admitted]
            admitted.release()
            admitted.release()
        elif step < 0.98 and relays:
            end_relay(chance.choice([*relays]))
        else:
            admission.set_quotas(chance.sample(tables, chance.randrange(5)))
        is_open = Counter([*handshakes.values(), *relays.values()])
        assert admission.shares.counts() == is_open
        assert admission.connections == is_open.total()
        held: Counter[tuple[int, str]] = Counter()
        for owner, count in is_open.items():
            for applied in admission.quotas._counts.for_owner(owner):
                held[applied.index, applied.subject] += count
        assert admission.quotas._held == held
