"""lookup.brokers.probe: whether a broker answers a PING."""

from typing import Any

import pytest
import trio
import trio.testing
from lookup_fakes import FakeBroker, Network, make_config

from lookup.brokers.probe import probe
from proto import commands
from proto.addresses import HostPort
from proxy.runtime.network.dialing import Dialer

B0 = HostPort("b0", 6650)


class OnlyPings(FakeBroker):
    """A broker that answers a PING before CONNECT with given bytes, or closes where there are none."""

    def __init__(self, answer: bytes) -> None:
        super().__init__()
        self.answer = answer

    async def _serve(self, end: Any) -> None:
        command = await end.read()
        self.requests.append(("", command))
        if self.answer:
            await end.send(self.answer)
            await end.read()


async def look(*addresses: str, **brokers: Any) -> tuple[bool, str]:
    return await probe(Dialer(make_config(brokers=brokers).brokers), B0, addresses or ("10.0.0.1",))


async def test_a_broker_that_answers(network: Network) -> None:
    broker = network.add("b0", "10.0.0.1", FakeBroker())
    assert await look() == (True, "answers at 10.0.0.1")
    assert broker.connects == [], "no handshake: nothing for the broker to complain of"
    await trio.testing.wait_all_tasks_blocked()
    assert broker.open == 0, "the connection is closed again"


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
    reachable, text = await look()
    assert not reachable
    assert detail in text


async def test_down(network: Network) -> None:
    assert await look() == (False, "10.0.0.1: Connection refused")


async def test_silent(network: Network, autojump_clock: trio.testing.MockClock) -> None:
    class Silent(FakeBroker):
        async def _serve(self, end: Any) -> None:
            await trio.sleep_forever()

    network.add("b0", "10.0.0.1", Silent())
    assert await look(handshake_timeout_ms=3000) == (False, "no answer within 3.0 s")
    assert trio.current_time() == pytest.approx(3)


async def test_a_broker_that_answers_at_one_of_two_addresses_is_alive(
    network: Network, autojump_clock: trio.testing.MockClock
) -> None:
    network.silent.add("fd00::1")
    network.brokers["10.0.0.1", 6650] = FakeBroker()
    assert await look("fd00::1", "10.0.0.1") == (True, "answers at fd00::1 or 10.0.0.1")
