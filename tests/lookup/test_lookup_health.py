"""lookup.health: whether the configured brokers answer a PING."""

from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from lookup_fakes import FakeBroker, Network, make_config
from prometheus_client import CollectorRegistry

from lookup.health import HealthChecks, broker_up_gauge
from proto import commands
from proxy.runtime.dialing import Dialer


class OnlyPings(FakeBroker):
    """A broker that answers a PING before CONNECT with given bytes, or closes where there are none."""

    def __init__(self, answer: bytes) -> None:
        super().__init__()
        self.answer = answer

    async def _serve(self, end: Any) -> None:
        command = await end.read()
        self.requests.append(("", command))
        if self.answer:
            await end.say(self.answer)
            await end.read()


class Checks:
    def __init__(self, **brokers: Any) -> None:
        self.registry = CollectorRegistry()
        config = make_config(brokers=brokers)
        self.health = HealthChecks(config, Dialer(config.brokers), broker_up_gauge(self.registry))

    def up(self, broker: str) -> float | None:
        return self.registry.get_sample_value("pulsar_proxy_broker_up", {"broker": broker})

    def detail(self) -> str:
        return str(self.health.status()[0]["detail"])


async def test_nothing_is_reachable_before_the_first_look() -> None:
    checks = Checks()
    assert not checks.health.any_reachable
    assert checks.health.status() == []


async def test_a_broker_that_answers(network: Network) -> None:
    broker = network.add("b0", "10.0.0.1", FakeBroker())
    checks = Checks(service_url="pulsar://b0:6650")
    await checks.health.look()
    assert checks.health.any_reachable
    assert checks.health.status() == [{"broker": "b0:6650", "reachable": True, "detail": "answers at 10.0.0.1"}]
    assert checks.up("b0:6650") == 1
    assert broker.connects == [], "no handshake: nothing for the broker to complain of"
    await trio.testing.wait_all_tasks_blocked()
    assert broker.open == 0, "the connection is closed again"


async def test_one_of_two_is_enough(network: Network) -> None:
    network.add("b1", "10.0.0.2", FakeBroker())
    network.names["b0"] = [["10.0.0.1"]]
    checks = Checks(service_url="pulsar://b0,b1")
    await checks.health.look()
    assert checks.health.any_reachable
    assert [entry["reachable"] for entry in checks.health.status()] == [False, True]
    assert (checks.up("b0:6650"), checks.up("b1:6650")) == (0, 1)


@pytest.mark.parametrize(
    ("answer", "detail"),
    [
        (b"", "closed"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not speak Pulsar"),
        (b"\x00\x00\x00\x06\x00\x00\x00\x02\xff\xff", "does not speak Pulsar"),
        (commands.ping(), "PING in answer to PING"),
    ],
)
async def test_a_port_that_is_no_broker(network: Network, answer: bytes, detail: str) -> None:
    network.add("b0", "10.0.0.1", OnlyPings(answer))
    checks = Checks(service_url="pulsar://b0:6650")
    await checks.health.look()
    assert not checks.health.any_reachable
    assert detail in checks.detail()
    assert checks.up("b0:6650") == 0


async def test_down(network: Network) -> None:
    network.names["b0"] = [["10.0.0.1"]]
    checks = Checks(service_url="pulsar://b0:6650")
    await checks.health.look()
    assert checks.detail() == "10.0.0.1: Connection refused"


async def test_unknown_host(network: Network) -> None:
    checks = Checks(service_url="pulsar://nowhere:6650")
    await checks.health.look()
    assert "nowhere" in checks.detail()


async def test_a_name_without_addresses(network: Network) -> None:
    network.names["b0"] = [[]]
    checks = Checks(service_url="pulsar://b0:6650")
    await checks.health.look()
    assert not checks.health.any_reachable


async def test_silent(network: Network, autojump_clock: trio.testing.MockClock) -> None:
    class Silent(FakeBroker):
        async def _serve(self, end: Any) -> None:
            await trio.sleep_forever()

    network.add("b0", "10.0.0.1", Silent())
    checks = Checks(service_url="pulsar://b0:6650", handshake_timeout_ms=3000)
    await checks.health.look()
    assert trio.current_time() == pytest.approx(3)
    assert checks.detail() == "no answer within 3.0 s"


async def test_the_second_address_is_tried(network: Network) -> None:
    network.brokers["10.0.0.2", 6650] = FakeBroker()
    network.names["b0"] = [["10.0.0.1", "10.0.0.2"]]
    checks = Checks(service_url="pulsar://b0:6650")
    await checks.health.look()
    assert checks.detail() == "answers at 10.0.0.2"


async def test_the_second_address_is_tried_after_a_silent_one_too(
    network: Network, autojump_clock: trio.testing.MockClock
) -> None:
    """As lookups and relays do: connect_timeout_ms is for one address."""
    network.silent.add("10.0.0.1")
    network.brokers["10.0.0.2", 6650] = FakeBroker()
    network.names["b0"] = [["10.0.0.1", "10.0.0.2"]]
    checks = Checks(service_url="pulsar://b0:6650", connect_timeout_ms=2000, handshake_timeout_ms=5000)
    await checks.health.look()
    assert checks.health.any_reachable


async def test_run_looks_again_and_notices_changes(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    broker = network.add("b0", "10.0.0.1", FakeBroker())
    checks = Checks(service_url="pulsar://b0:6650", probe_interval_ms=1000)
    with structlog.testing.capture_logs() as logs:
        nursery.start_soon(checks.health.run)
        await trio.sleep(2.5)
        assert checks.health.any_reachable
        del network.brokers["10.0.0.1", 6650]
        await trio.sleep(2)
        assert not checks.health.any_reachable
        network.brokers["10.0.0.1", 6650] = broker
        await trio.sleep(2)
        assert checks.health.any_reachable
    assert [entry["event"] for entry in logs] == [
        "a broker is reachable",
        "a broker is not reachable",
        "a broker is reachable",
    ], "one entry a change, not one a look"


async def test_stop_ends_the_looking_and_the_reporting(
    network: Network, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    network.add("b0", "10.0.0.1", FakeBroker())
    checks = Checks(service_url="pulsar://b0:6650", probe_interval_ms=1000)
    nursery.start_soon(checks.health.run)
    await trio.sleep(0.5)
    checks.health.stop()
    assert checks.up("b0:6650") is None
    looks = len(network.dialled)
    await trio.sleep(10)
    assert len(network.dialled) == looks
    assert checks.up("b0:6650") is None
