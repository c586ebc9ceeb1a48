"""lookup.brokers.directory: whose turn it is, who is set aside and comes back, and what operators see of it."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from fake_dns import Names
from lookup_fakes import FakeBroker, Network, make_config
from prometheus_client import CollectorRegistry

from lookup.brokers.directory import BrokerDirectory, DirectoryOptions
from lookup.brokers.discovery import Endpoint
from lookup.metrics import BrokerMetrics
from proto.addresses import HostPort
from proxy.runtime.dns.resolver import Resolver
from proxy.runtime.network.dialing import Dialer

THREE = "pulsar://10.0.0.1,10.0.0.2,10.0.0.3"


class FakeConnection:
    """A connection."""


class Ring:
    """BrokerDirectory under one configuration; they are looked at when ``run`` is."""

    def __init__(self, nursery: trio.Nursery, before: Ring | None = None, **brokers: Any) -> None:
        self.nursery = nursery
        brokers = {"service_url": THREE, "ejection_time_ms": 5000, "ejection_time_max_ms": 60_000, **brokers}
        config = make_config(brokers=brokers)
        self.registry = before.registry if before else CollectorRegistry()
        self.metrics = before.metrics if before else BrokerMetrics(self.registry)
        resolver = Resolver(nursery, timeout_s=5, ttl_max_s=300)
        dialer = Dialer(config.brokers)
        known = before.brokers if before else None
        self.brokers: BrokerDirectory = BrokerDirectory(
            config, dialer, resolver, self.metrics, DirectoryOptions(known, rng=random.Random(6))
        )

    def run(self) -> None:
        self.nursery.start_soon(self.brokers.run)

    @property
    def all(self) -> tuple[Endpoint, ...]:
        return self.brokers.discovery.endpoints

    def firsts(self, count: int = 6) -> list[str]:
        return [self.all_addresses(self.brokers.next_broker()) for _ in range(count)]

    @staticmethod
    def all_addresses(endpoint: Endpoint | None) -> str:
        return "none" if endpoint is None else "+".join(endpoint.addresses)

    def fail(self, number: int, times: int = 3, reason: str = "unreachable") -> None:
        for _ in range(times):
            self.brokers.record_failure(self.all[number], reason, FakeConnection())

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"pulsar_proxy_{name}", labels)

    def status(self, broker: str) -> dict[str, Any]:
        [entry] = [entry for entry in self.brokers.status() if entry["broker"] == broker]
        return entry


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch, network: Network) -> Names:
    """DNS proper, in place of the network's names."""
    return Names(monkeypatch)


# ---- whose turn it is


async def test_each_in_its_turn(nursery: trio.Nursery) -> None:
    assert Ring(nursery).firsts(7) == [
        "10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.1",
    ]  # fmt: skip


async def test_all_of_them_beginning_with_whose_turn_it_is(nursery: trio.Nursery) -> None:
    ring = Ring(nursery)
    first, second, third = ring.all
    assert ring.brokers.brokers_in_order()[0] is first
    assert ring.brokers.brokers_in_order()[0] is second
    assert ring.brokers.brokers_in_order(third)[0] is third
    assert set(ring.brokers.brokers_in_order()) == {first, second, third}
    assert len(ring.brokers.brokers_in_order()) == 3


async def test_none_is_known(network: Network, nursery: trio.Nursery) -> None:
    ring = Ring(nursery, service_url="pulsar://nowhere")
    assert ring.brokers.next_broker() is None
    assert ring.brokers.brokers_in_order() == []
    assert ring.brokers.none_known_reason == "no broker of brokers.service_url is known"
    ring.run()
    await ring.brokers.discovery.wait_until_any_found()
    assert ring.brokers.next_broker() is None
    assert "nowhere" in ring.brokers.none_known_reason
    assert not ring.brokers.any_reachable


async def services(names: Names, nursery: trio.Nursery, *records: str) -> Ring:
    names.server.add("_pulsar._tcp.b", "SRV", *records)
    for number in range(1, 5):
        names.server.add(f"h{number}", "A", f"10.0.0.{number}")
    ring = Ring(nursery, service_url="pulsar+srv://b")
    ring.run()
    await ring.brokers.discovery.wait_until_all_resolved()
    return ring


async def test_by_weight(names: Names, nursery: trio.Nursery) -> None:
    ring = await services(names, nursery, "0 10 6650 h1.", "0 30 6650 h2.", "0 60 6650 h3.", "0 0 6650 h4.")
    counts = Counter(ring.firsts(10_000))
    assert counts["10.0.0.1"] == pytest.approx(1000, rel=0.1)
    assert counts["10.0.0.2"] == pytest.approx(3000, rel=0.1)
    assert counts["10.0.0.3"] == pytest.approx(6000, rel=0.1)
    assert counts["10.0.0.4"] < 20
    rest = Counter(ring.all_addresses(ring.brokers.brokers_in_order(ring.all[0])[1]) for _ in range(10_000))
    others = [one for one in ring.all if one is not ring.all[0]]
    total = sum(one.health.weight for one in others)
    for one in others:
        if one.health.weight > 1:
            expected = 10_000 * one.health.weight / total
            assert rest[ring.all_addresses(one)] == pytest.approx(expected, rel=0.1), "the others by weight, too"


async def test_weights_that_are_all_zero_are_equal(names: Names, nursery: trio.Nursery) -> None:
    ring = await services(names, nursery, "0 0 6650 h1.", "0 0 6650 h2.")
    assert Counter(ring.firsts(10)) == {"10.0.0.1": 5, "10.0.0.2": 5}


async def test_the_next_priority_only_where_all_of_the_first_are_set_aside(names: Names, nursery: trio.Nursery) -> None:
    ring = await services(names, nursery, "5 1 6650 h3.", "1 1 6650 h1.", "1 1 6650 h2.", "9 1 6650 h4.")
    place = {ring.all_addresses(one): number for number, one in enumerate(ring.all)}
    assert set(ring.firsts(10)) == {"10.0.0.1", "10.0.0.2"}
    order = [ring.all_addresses(one) for one in ring.brokers.brokers_in_order()]
    assert (set(order[:2]), order[2:]) == ({"10.0.0.1", "10.0.0.2"}, ["10.0.0.3", "10.0.0.4"])
    ring.fail(place["10.0.0.1"])
    assert set(ring.firsts(10)) == {"10.0.0.2"}
    ring.fail(place["10.0.0.2"])
    assert set(ring.firsts(10)) == {"10.0.0.3"}
    assert {ring.all_addresses(one) for one in ring.brokers.brokers_in_order()[2:]} == {"10.0.0.1", "10.0.0.2"}


# ---- set aside, and back


async def test_set_aside_after_so_many_failures_in_a_row(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    ring = Ring(nursery)
    ring.fail(0, 2)
    assert "10.0.0.1" in ring.firsts()
    ring.brokers.record_answer(ring.all[0])
    ring.fail(0, 2)
    assert "10.0.0.1" in ring.firsts(), "an answer in between: they begin again"
    ring.fail(0, 1)
    assert set(ring.firsts()) == {"10.0.0.2", "10.0.0.3"}
    assert ring.brokers.brokers_in_order()[-1] is ring.all[0], "asked last"
    assert ring.value("broker_set_aside", broker="10.0.0.1:6650") == 1
    assert ring.value("broker_set_aside", broker="10.0.0.2:6650") == 0
    assert ring.value("broker_ejections_total", reason="unreachable") == 1
    await trio.sleep(4.9)
    assert ring.status("10.0.0.1:6650")["set_aside_s"] == pytest.approx(0.1)
    assert "10.0.0.1" not in ring.firsts()
    await trio.sleep(0.2)
    assert "10.0.0.1" in ring.firsts(), "its time is over"
    assert ring.value("broker_set_aside", broker="10.0.0.1:6650") == 0
    assert ring.status("10.0.0.1:6650")["set_aside_s"] == 0


async def test_for_twice_as_long_each_time_up_to_a_bound(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    ring = Ring(nursery)
    ring.fail(0, 2)
    for pause_s in (5, 10, 20, 40, 60, 60):
        ring.fail(0, 1)
        assert ring.status("10.0.0.1:6650")["set_aside_s"] == pytest.approx(pause_s)
        await trio.sleep(pause_s - 0.1)
        assert "10.0.0.1" not in ring.firsts()
        await trio.sleep(0.2)
        assert "10.0.0.1" in ring.firsts()
    ring.brokers.record_answer(ring.all[0])
    ring.fail(0, 2)
    assert "10.0.0.1" in ring.firsts()
    ring.fail(0, 1)
    assert ring.status("10.0.0.1:6650")["set_aside_s"] == pytest.approx(5), "an answer: all is forgotten"


async def test_failures_while_set_aside_change_nothing(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    ring = Ring(nursery)
    ring.fail(0, 50)
    assert ring.value("broker_ejections_total", reason="unreachable") == 1
    assert ring.status("10.0.0.1:6650")["set_aside_s"] == pytest.approx(5)


async def test_where_all_are_set_aside_none_is(nursery: trio.Nursery, autojump_clock: trio.testing.MockClock) -> None:
    ring = Ring(nursery)
    for number in range(3):
        ring.fail(number)
    assert set(ring.firsts()) == {"10.0.0.1", "10.0.0.2", "10.0.0.3"}
    ring.brokers.record_answer(ring.all[1])
    assert set(ring.firsts()) == {"10.0.0.2"}, "one that answers is back at once"


async def test_failures_of_many_lookups_on_one_connection_count_once(nursery: trio.Nursery) -> None:
    ring = Ring(nursery)
    connections = [FakeConnection(), FakeConnection(), FakeConnection()]
    for _ in range(100):
        for connection in connections[:2]:
            ring.brokers.record_failure(ring.all[0], "lost", connection)
    assert "10.0.0.1" in ring.firsts()
    ring.brokers.record_failure(ring.all[0], "lost", connections[2])
    assert "10.0.0.1" not in ring.firsts()


async def test_brokers_that_others_named_are_none_of_ours(nursery: trio.Nursery) -> None:
    ring = Ring(nursery)
    for _ in range(5):
        ring.brokers.record_failure(HostPort("10.0.0.1", 6650), "lost", FakeConnection())
    ring.brokers.record_answer(HostPort("10.0.0.1", 6650))
    assert len(set(ring.firsts())) == 3


async def test_by_name_where_only_one_has_it(names: Names, nursery: trio.Nursery) -> None:
    names.server.add("two", "A", "10.0.0.1", "10.0.0.2")
    names.server.add("one", "A", "10.0.0.3")
    ring = Ring(nursery, service_url="pulsar://two,one")
    ring.run()
    await ring.brokers.discovery.wait_until_all_resolved()
    assert ring.brokers.broker_named(HostPort("one", 6650)) is ring.all[2]
    assert ring.brokers.broker_named(HostPort("two", 6650)) is None
    assert ring.brokers.broker_named(HostPort("one", 6651)) is None


# ---- looks


async def test_looks(network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock) -> None:
    network.brokers["10.0.0.2", 6650] = FakeBroker()
    ring = Ring(nursery, service_url="pulsar://10.0.0.1,10.0.0.2", probe_interval_ms=1000)
    assert not ring.brokers.any_reachable
    assert ring.value("broker_up", broker="10.0.0.1:6650") is None, "no check has ended yet"
    with structlog.testing.capture_logs() as logs:
        ring.run()
        await trio.sleep(0.5)
        assert ring.brokers.any_reachable
        assert set(ring.firsts()) == {"10.0.0.2"}, "one failed look is enough"
        assert ring.brokers.status() == [
            {
                "broker": "10.0.0.1:6650",
                "addresses": ["10.0.0.1"],
                "reachable": False,
                "probed_s_ago": 0.5,
                "set_aside_s": 9.5,
                "failures": 0,
                "detail": "10.0.0.1: Connection refused",
            },
            {
                "broker": "10.0.0.2:6650",
                "addresses": ["10.0.0.2"],
                "reachable": True,
                "probed_s_ago": 0.5,
                "set_aside_s": 0.0,
                "failures": 0,
                "detail": "answers at 10.0.0.2",
            },
        ]
        assert (ring.value("broker_up", broker="10.0.0.1:6650"), ring.value("broker_up", broker="10.0.0.2:6650")) == (
            0,
            1,
        )
        await trio.sleep(100)
        assert set(ring.firsts()) == {"10.0.0.2"}, "as long as no look shows that it is back"
        assert ring.value("broker_ejections_total", reason="probe") == 1
        network.brokers["10.0.0.1", 6650] = FakeBroker()
        await trio.sleep(1.1)
        assert set(ring.firsts()) == {"10.0.0.1", "10.0.0.2"}
    assert [(entry["event"], entry["broker"]) for entry in sorted(logs, key=lambda entry: entry["broker"])] == [
        ("a broker is not reachable", "10.0.0.1:6650"),
        ("a broker is ejected", "10.0.0.1:6650"),
        ("a broker is reachable", "10.0.0.1:6650"),
        ("a broker is no longer ejected", "10.0.0.1:6650"),
        ("a broker is reachable", "10.0.0.2:6650"),
    ], "one entry a change, not one a look"


@pytest.mark.parametrize(
    ("reason", "back"), [("unreachable", True), ("lost", True), ("tls", True), ("handshake", False), ("timeout", False)]
)
async def test_a_look_brings_back_what_failed_in_a_way_that_it_sees(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock, reason: str, *, back: bool
) -> None:
    for address in ("10.0.0.1", "10.0.0.2", "10.0.0.3"):
        network.brokers[address, 6650] = FakeBroker()
    ring = Ring(nursery, probe_interval_ms=1000)
    ring.run()
    await trio.sleep(0.5)
    ring.fail(0, reason=reason)
    await trio.sleep(1)
    assert ("10.0.0.1" in ring.firsts()) is back
    ring.fail(0, 1)
    assert "10.0.0.1" not in ring.firsts(), "it has not answered since"
    await trio.sleep(11)
    assert "10.0.0.1" in ring.firsts()


async def test_an_answer_of_an_old_connection_does_not_outweigh_a_look(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    network.brokers["10.0.0.2", 6650] = FakeBroker()
    ring = Ring(nursery, service_url="pulsar://10.0.0.1,10.0.0.2")
    ring.run()
    await trio.sleep(0.5)
    ring.fail(0, 1)
    ring.brokers.record_answer(ring.all[0])
    assert set(ring.firsts()) == {"10.0.0.2"}


async def test_a_new_broker_is_looked_at_as_soon_as_it_is_found(
    names: Names, network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    names.server.add("b", "A", "10.0.0.1", ttl=3)
    network.brokers["10.0.0.2", 6650] = FakeBroker()
    network.dial_delay_s = 2
    ring = Ring(nursery, service_url="pulsar://b", probe_interval_ms=100_000)
    ring.run()
    await trio.sleep(2.5)
    assert network.dialled == [("10.0.0.1", 6650)], "once"
    names.server.add("b", "A", "10.0.0.1", "10.0.0.2", ttl=1)
    await trio.sleep(2)
    assert network.dialled == [("10.0.0.1", 6650), ("10.0.0.2", 6650)]
    assert not ring.brokers.any_reachable
    await trio.sleep(2.5)
    assert ring.brokers.any_reachable
    assert len(network.dialled) == 2


async def test_looks_are_bounded(
    network: Network, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    monkeypatch.setattr("lookup.brokers.directory.PROBES_MAX", 2)
    network.dial_delay_s = 1
    ring = Ring(nursery, service_url="pulsar://" + ",".join(f"10.0.0.{number}" for number in range(1, 7)))
    await ring.brokers.probe_all()
    assert trio.current_time() == pytest.approx(3)


# ---- for operators


async def test_brokers_that_are_no_longer_there_are_forgotten(
    names: Names, network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    names.server.add("b", "A", "10.0.0.1", "10.0.0.2", ttl=3)
    ring = Ring(nursery, service_url="pulsar://b,unknown", probe_interval_ms=1000)
    ring.run()
    await trio.sleep(0.5)
    assert [entry["broker"] for entry in ring.brokers.status()] == [
        "b:6650 at 10.0.0.1", "b:6650 at 10.0.0.2", "unknown:6650",
    ]  # fmt: skip
    assert ring.value("broker_up", broker="b:6650 at 10.0.0.1") == 0
    assert ring.value("broker_up", broker="unknown:6650") == 0
    assert "not resolved" in ring.status("unknown:6650")["detail"]
    names.server.add("b", "A", "10.0.0.2", ttl=3)
    names.server.add("unknown", "A", "10.0.0.9")
    await trio.sleep(5)
    assert [entry["broker"] for entry in ring.brokers.status()] == ["b:6650", "unknown:6650"]
    assert ring.value("broker_up", broker="b:6650 at 10.0.0.1") is None
    assert ring.value("broker_set_aside", broker="b:6650 at 10.0.0.1") is None
    assert ring.value("broker_up", broker="b:6650") == 0


async def test_a_reload_goes_on_with_what_is_known(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    network.brokers["10.0.0.2", 6650] = FakeBroker()
    old = Ring(nursery, service_url="pulsar://10.0.0.1,10.0.0.2", probe_interval_ms=1000)
    old.run()
    await trio.sleep(0.5)
    new = Ring(nursery, old, service_url="pulsar://10.0.0.1,10.0.0.2,10.0.0.3", probe_interval_ms=1000)
    assert new.brokers.any_reachable
    old.brokers.stop()
    dialled = len(network.dialled)
    assert "10.0.0.1" not in new.firsts()
    new.run()
    await trio.testing.wait_all_tasks_blocked()
    assert new.value("broker_up", broker="10.0.0.1:6650") == 0
    assert len(network.dialled) == dialled + 3, "the old one looks no more"
    old.fail(1)
    assert new.value("broker_set_aside", broker="10.0.0.3:6650") is not None, "nor does it report any more"


async def test_stop(network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock) -> None:
    ring = Ring(nursery)
    ring.run()
    await trio.sleep(0.5)
    ring.brokers.stop()
    dialled = len(network.dialled)
    await trio.sleep(100)
    assert len(network.dialled) == dialled
    assert ring.value("broker_up", broker="10.0.0.1:6650") is None
