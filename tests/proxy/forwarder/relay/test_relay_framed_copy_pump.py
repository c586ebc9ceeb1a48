"""proxy.forwarder.relay.framed_copy_pump: sessions that expire within a relay that is not spliced.

What both pumps of framed relays do is in test_relay_framed_splice_pump.py.
"""

from __future__ import annotations

import trio
import trio.testing
from framed_fakes import FakeReauthenticator, Now, answer, send_frame, session
from relay_fakes import CopiedRelays, read, until

from proxy.forwarder.relay.copy_pump import PORTION_BYTES, CopyDirection
from proxy.forwarder.relay.manager import RelayManager

FRAMES = send_frame(b"x" * 100_000) * 100
"""More than the kernel takes of a client whose relay reads nothing."""


def cut_bytes(relays: RelayManager) -> int:
    """How much the only relay holds of what the client has sent."""
    (relay,) = relays._engine.relays
    direction = relay.to_broker
    assert isinstance(direction, CopyDirection)
    return len(direction.cutter._bytes)


async def test_behind_a_command_that_is_held_nothing_is_received(copied: CopiedRelays, nursery: trio.Nursery) -> None:
    """It is held for as long as an auth worker takes, and meanwhile a client must not use up memory."""
    now, reauthenticator = Now(), FakeReauthenticator(gate=trio.Event())
    relays = copied.new(now=now)
    client, broker = await copied.begin(relays, session=session(now, reauthenticator))
    now.s += 150
    nursery.start_soon(client.send_all, answer() + FRAMES)
    await until(lambda: reauthenticator.given)
    await trio.testing.wait_all_tasks_blocked(0.01)
    assert 0 < cut_bytes(relays) <= PORTION_BYTES
    assert reauthenticator.gate is not None
    reauthenticator.gate.set()
    assert await read(broker, len(FRAMES)) == FRAMES
    assert cut_bytes(relays) == 0


async def test_while_the_broker_takes_nothing_no_more_than_a_portion_is_received(
    copied: CopiedRelays, nursery: trio.Nursery
) -> None:
    now = Now()
    relays = copied.new(now=now)
    client, broker = await copied.begin(relays, session=session(now, FakeReauthenticator()))
    nursery.start_soon(client.send_all, FRAMES)
    (relay,) = relays._engine.relays
    await until(lambda: relay.to_broker.held_bytes)
    await trio.testing.wait_all_tasks_blocked(0.01)
    assert relay.to_broker.held_bytes + cut_bytes(relays) <= PORTION_BYTES
    assert await read(broker, len(FRAMES)) == FRAMES
