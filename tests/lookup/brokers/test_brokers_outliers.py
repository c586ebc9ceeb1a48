"""lookup.brokers.outliers: which reported brokers are ejected, for how long, and how many at most."""

from __future__ import annotations

import random
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from lookup_fakes import FakeBroker, Network, make_config
from prometheus_client import CollectorRegistry

from lookup.brokers.directory import BrokerDirectory, DirectoryOptions
from lookup.brokers.outliers import ERROR_CHARACTERS_MAX
from lookup.metrics import BrokerMetrics
from proto.rpc_pb2 import ReportOutlierRequest
from proxy.runtime.dns.resolver import Resolver
from proxy.runtime.network.dialing import Dialer

WINDOW_S = 10


class Cause:
    """A connection that was lost."""


class Reported:
    """A directory of brokers at 10.0.0.1, 10.0.0.2, …, of which outliers are reported."""

    def __init__(self, nursery: trio.Nursery, count: int = 3, **brokers: Any) -> None:
        self.nursery = nursery
        url = "pulsar://" + ",".join(f"10.0.0.{number + 1}" for number in range(count))
        times = {"ejection_time_ms": 5000, "ejection_time_max_ms": 60_000}
        config = make_config(brokers={"service_url": url, "ejection_by_relays": True, **times, **brokers})
        self.registry = CollectorRegistry()
        resolver = Resolver(nursery, timeout_s=5, ttl_max_s=300)
        options = DirectoryOptions(rng=random.Random(6))
        self.brokers: BrokerDirectory = BrokerDirectory(
            config, Dialer(config.brokers), resolver, BrokerMetrics(self.registry), options
        )
        self.all = self.brokers.discovery.endpoints

    def report(self, number: int, **fields: Any) -> bool:
        """Report a broker; return whether an ejection follows."""
        before = self.ejections
        values = {"owners": 4, "owners_failing": 3, "last_error": "reset", "window_ms": 1000 * WINDOW_S}
        where = {"addresses": [f"10.0.0.{number + 1}"], "port": 6650}
        self.brokers.outliers.eject_reported(ReportOutlierRequest(**(where | values | fields)))
        return self.ejections > before

    @property
    def ejections(self) -> float:
        return self.registry.get_sample_value("pulsar_proxy_broker_ejections_total", {"reason": "relays"}) or 0

    @property
    def asked(self) -> set[int]:
        """The brokers that are asked first, by number."""
        found = [self.brokers.next_broker() for _ in range(2 * len(self.all))]
        return {self.all.index(one) for one in found if one is not None}

    def status(self, number: int) -> dict[str, Any]:
        name = f"10.0.0.{number + 1}:6650"
        [entry] = [entry for entry in self.brokers.status() if entry["broker"] == name]
        return entry


async def test_a_reported_broker_is_ejected_for_a_time(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    it = Reported(nursery)
    with structlog.testing.capture_logs() as log:
        assert it.report(0)
    assert it.asked == {1, 2}
    assert [entry for entry in log if entry["event"] == "a broker is ejected"] == [
        {
            "event": "a broker is ejected",
            "log_level": "warning",
            "broker": "10.0.0.1:6650",
            "reason": "relays",
            "owners_failing": 3,
            "owners": 4,
            "last_error": "reset",
            "pause_s": 5.0,
        }
    ]
    status = it.status(0)
    assert status["set_aside_s"] == 5
    assert status["detail"] == "not looked at yet; relays of 3 of 4 owners fail: reset"
    assert it.registry.get_sample_value("pulsar_proxy_broker_set_aside", {"broker": "10.0.0.1:6650"}) == 1
    await trio.sleep(4.9)
    assert it.asked == {1, 2}
    await trio.sleep(0.2)
    assert it.asked == {0, 1, 2}
    assert it.status(0)["detail"] == "not looked at yet"


async def test_no_report_ejects_a_broker_unless_the_setting_asks_for_it(nursery: trio.Nursery) -> None:
    it = Reported(nursery, ejection_by_relays=False)
    assert not it.report(0)
    assert it.asked == {0, 1, 2}


async def test_answers_to_lookups_and_probes_bring_it_not_back(
    nursery: trio.Nursery, network: Network, autojump_clock: trio.testing.MockClock
) -> None:
    for number in range(3):
        network.add(f"b{number}", f"10.0.0.{number + 1}", FakeBroker())
    it = Reported(nursery)
    assert it.report(0)
    await it.brokers.probe_all()
    it.brokers.record_failure(it.all[0], "lost", Cause())
    it.brokers.record_answer(it.all[0])
    assert it.status(0)["reachable"]
    assert it.asked == {1, 2}
    await trio.sleep(5.1)
    assert it.asked == {0, 1, 2}


async def test_for_twice_as_long_each_time_up_to_a_bound_and_from_the_start_after_a_good_time(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    it = Reported(nursery)
    for pause_s in (5, 10, 20, 40, 60, 60):
        assert it.report(0)
        assert it.status(0)["set_aside_s"] == pytest.approx(pause_s)
        it.brokers.record_answer(it.all[0])
        await trio.sleep(pause_s + WINDOW_S + 0.1)
        assert it.asked == {0, 1, 2}
    await trio.sleep(60)
    assert it.report(0)
    assert it.status(0)["set_aside_s"] == pytest.approx(5)


async def test_what_has_failed_before_an_ejection_does_not_eject_it_again(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    it = Reported(nursery)
    assert it.report(0)
    assert not it.report(0), "by another forwarder, for the same failures"
    await trio.sleep(5.1)
    assert it.asked == {0, 1, 2}
    assert not it.report(0), "a window that began before"
    await trio.sleep(WINDOW_S)
    assert it.report(0)


@pytest.mark.parametrize(("count", "most"), [(1, 0), (2, 1), (3, 1), (5, 1), (6, 2), (9, 3), (11, 3)])
async def test_at_most_a_third_are_ejected_at_a_time_and_never_the_only_one(
    nursery: trio.Nursery, count: int, most: int, autojump_clock: trio.testing.MockClock
) -> None:
    """A captured forwarder reports all of them, again and again."""
    it = Reported(nursery, count)
    with structlog.testing.capture_logs() as log:
        assert [it.report(number) for number in [*range(count)] * 3].count(True) == most
    assert len(it.asked) == count - most
    spared = [entry for entry in log if entry["event"] == "a broker is not ejected: others are"]
    assert len(spared) == 1, "not one for each report"
    assert (spared[0]["owners_failing"], spared[0]["last_error"]) == (3, "reset")
    await trio.sleep(5.1)
    assert len(it.asked) == count


async def test_the_last_one_that_is_not_ejected_stays(nursery: trio.Nursery) -> None:
    it = Reported(nursery, ejection_failures=1)
    for number in (0, 1):
        it.brokers.record_failure(it.all[number], "unreachable", Cause())
    assert it.asked == {2}
    assert not it.report(2)


async def test_a_report_changes_nothing_of_an_ejection_for_other_reasons(nursery: trio.Nursery) -> None:
    it = Reported(nursery, ejection_failures=1)
    it.brokers.record_failure(it.all[0], "unreachable", Cause())
    assert not it.report(0)
    it.brokers.record_answer(it.all[0])
    assert it.asked == {0, 1, 2}, "an answer brings it back"


async def test_a_report_of_what_is_no_broker_or_more_than_one_is_ignored(nursery: trio.Nursery) -> None:
    it = Reported(nursery)
    assert not it.report(0, addresses=["10.0.0.9"])
    assert not it.report(0, addresses=[])
    assert not it.report(0, port=6651)
    assert not it.report(0, addresses=["10.0.0.1", "10.0.0.2"])
    assert it.asked == {0, 1, 2}


async def test_a_long_error_is_cut(nursery: trio.Nursery) -> None:
    it = Reported(nursery)
    assert it.report(0, last_error="x" * 10_000)
    assert it.status(0)["detail"].count("x") == ERROR_CHARACTERS_MAX
