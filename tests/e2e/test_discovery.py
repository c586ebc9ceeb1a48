"""BrokerDirectory by DNS over real sockets: SRV records, several addresses of which one is dead, names that change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import dns.asyncresolver
import dns.name
import dns.nameserver
import msgspec
import pytest
import trio
from prometheus_client import CollectorRegistry

from lookup.brokers.directory import BrokerDirectory
from lookup.metrics import BrokerMetrics
from proxy.config.types import Config
from proxy.runtime.dns.resolver import Resolver
from proxy.runtime.network.dialing import Dialer

from .lab.dns import NameServer
from .lab.fakes import FakeBroker, LookupBroker
from .lab.schema import LOOKUP_CONNECT


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServer]:
    """The only name server that the code under test knows."""
    with NameServer() as server:

        def resolver() -> dns.asyncresolver.Resolver:
            made = dns.asyncresolver.Resolver(configure=False)
            made.domain = dns.name.root
            made.nameservers = [dns.nameserver.Do53Nameserver("127.0.0.1", server.port)]
            return made

        monkeypatch.setattr("proxy.runtime.dns.resolver._read_resolv_conf", resolver)
        yield server


@pytest.fixture
def pulsar() -> Iterator[FakeBroker]:
    """A broker at 127.0.0.1 that answers PING; none is at 127.0.0.2."""
    with FakeBroker(LookupBroker({"response": LOOKUP_CONNECT, "broker_service_url": "pulsar://b:1"})) as broker:
        yield broker


def find(nursery: trio.Nursery, service_url: str) -> BrokerDirectory:
    brokers: dict[str, Any] = {"service_url": service_url, "probe_interval_ms": 300}
    config = msgspec.convert({"brokers": brokers}, Config)
    resolver = Resolver(nursery, timeout_s=5, ttl_max_s=30)
    found = BrokerDirectory(config, Dialer(config.brokers), resolver, BrokerMetrics(CollectorRegistry()))
    nursery.start_soon(found.run)
    return found


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(60):
        while not condition():  # noqa: ASYNC110 -- no event tells
            await trio.sleep(0.01)


def firsts(brokers: BrokerDirectory) -> Counter[str]:
    chosen = [brokers.next_broker() for _ in range(10)]
    return Counter(f"{one} {one.addresses[0]}" for one in chosen if one is not None)


async def test_srv_records(names: NameServer, pulsar: FakeBroker, nursery: trio.Nursery) -> None:
    names.add("_pulsar._tcp.brokers.test", "SRV", f"0 1 {pulsar.port} b0.test.", f"1 1 {pulsar.port} b1.test.")
    names.add("b0.test", "A", "127.0.0.1")
    names.add("b1.test", "A", "127.0.0.2")
    brokers = find(nursery, "pulsar+srv://brokers.test")
    await until(lambda: brokers.any_reachable)
    assert firsts(brokers) == {f"b0.test:{pulsar.port} 127.0.0.1": 10}
    names.add("_pulsar._tcp.brokers.test", "SRV", f"0 1 {pulsar.port} moved.test.")
    names.add("moved.test", "A", "127.0.0.1")
    await until(lambda: firsts(brokers) == {f"moved.test:{pulsar.port} 127.0.0.1": 10})


async def test_two_addresses_of_which_one_is_dead(names: NameServer, pulsar: FakeBroker, nursery: trio.Nursery) -> None:
    names.add("b.test", "A", "127.0.0.2", "127.0.0.1")
    brokers = find(nursery, f"pulsar://b.test:{pulsar.port}")
    await until(lambda: brokers.any_reachable and firsts(brokers) == {f"b.test:{pulsar.port} 127.0.0.1": 10})
    assert sorted((entry["broker"], entry["reachable"]) for entry in brokers.status()) == [
        (f"b.test:{pulsar.port} at 127.0.0.1", True),
        (f"b.test:{pulsar.port} at 127.0.0.2", False),
    ]


async def test_a_name_with_more_addresses_than_a_datagram_holds(
    names: NameServer, pulsar: FakeBroker, nursery: trio.Nursery
) -> None:
    names.add("many.test", "A", *(f"127.0.1.{number}" for number in range(1, 101)))
    brokers = find(nursery, f"pulsar://many.test:{pulsar.port}")
    await until(lambda: len(brokers.status()) == 100)
    assert {transport for transport, _, kind in names.asked if kind == "A"} == {"udp", "tcp"}
