"""Who is to blame for the end of a relay: the broker, if its side was the first to end, and the proxy did not close it.

Relays of each pump: spliced, with frames that are followed or without, and copied.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio
from framed_fakes import FakeReauthenticator, Now, session
from relay_fakes import Forwarder, Lane, Place, about_relay, fill, read, read_all, reset, until

from proto import commands

CLOSED, BROKEN_OFF = "the broker closed the relay", "the broker broke off the relay"


class Watched:
    """One relay, and what is heard of its broker's end."""

    def __init__(self, it: Forwarder, lane: Lane) -> None:
        self.it = it
        self.lane = lane
        self.heard: list[str] = []

    async def begin(self, kind: str) -> None:
        relays = self.it.relays
        relays._splices = kind != "copied"
        terms = session(Now(), FakeReauthenticator()) if kind == "framed" else None
        start = self.it.start(self.lane, about_relay(), session=terms)
        await relays.start_relay(replace(start, on_broker_end=self.heard.append))
        await self.lane.client.send_all(commands.pong())
        await read(self.lane.broker, len(commands.pong()))

    async def is_over(self) -> None:
        assert await self.it.relays.in_flight.wait_until_empty(timeout_s=5)


@pytest.fixture(params=["spliced", "framed", "copied"])
async def watched(request: pytest.FixtureRequest, place: Place, lane: Lane) -> Watched:
    watched = Watched(await place.forwarder(), lane)
    await watched.begin(request.param)
    return watched


async def test_the_broker_closes(watched: Watched) -> None:
    watched.lane.broker.close_now()
    await read_all(watched.lane.client)
    watched.lane.client.close_now()
    await watched.is_over()
    assert watched.heard == [CLOSED]


async def test_the_broker_resets(watched: Watched) -> None:
    reset(watched.lane.broker)
    await read_all(watched.lane.client)
    watched.lane.client.close_now()
    await watched.is_over()
    assert watched.heard == [BROKEN_OFF]


@pytest.mark.parametrize("how", ["closes", "resets"])
async def test_the_client_ends_it_first(watched: Watched, how: str) -> None:
    client, broker = watched.lane.client, watched.lane.broker
    if how == "closes":
        client.close_now()
    else:
        reset(client)
    await read_all(broker)
    reset(broker)
    await watched.is_over()
    assert watched.heard == []


async def test_an_end_that_the_proxy_makes_is_not_the_brokers(watched: Watched) -> None:
    [relay] = watched.it.relays.live
    assert watched.it.relays.disconnect(relay)
    watched.lane.broker.close_now()
    await trio.lowlevel.checkpoint()
    watched.lane.client.close_now()
    await watched.is_over()
    assert watched.heard == []


@pytest.mark.parametrize("kind", ["spliced", "copied"])
@pytest.mark.parametrize("side", ["broker", "client"])
async def test_a_side_that_resets_while_bytes_wait_for_it_is_to_blame(
    place: Place, narrow_lane: Lane, kind: str, side: str
) -> None:
    """The error may come from a send to it, before any from a receive."""
    watched = Watched(await place.forwarder(), narrow_lane)
    await watched.begin(kind)
    client, broker = narrow_lane.client, narrow_lane.broker
    far, sender = (broker, client) if side == "broker" else (client, broker)
    await fill(sender)
    [relay] = watched.it.relays.live
    direction = relay.to_broker if side == "broker" else relay.to_client
    assert direction.held_bytes
    reset(far)
    await until(lambda: relay.to_broker.done or relay.to_client.done)
    reset(sender)
    await watched.is_over()
    assert watched.heard == ([BROKEN_OFF] if side == "broker" else [])
