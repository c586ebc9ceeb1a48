"""Relays that outlive their forwarder: killed anywhere, or handed over, and not a byte lost or doubled."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import trio
import trio.testing
from adoption_fakes import WAYS, Fuse, successor
from relay_fakes import (
    Lane,
    Place,
    about_relay,
    descriptors,
    disabled_fd_store,
    fill,
    kept_relay,
    open_lane,
    open_place,
    read,
    read_all,
    reset,
    until,
)

from proxy.common.deny_list import credential_digest, parse_deny_list
from proxy.config.types import Relay as RelayConfig
from proxy.forwarder.relay.fd_store_client import RelayHandover
from proxy.forwarder.relay.manager import RelayCallbacks, RelayManager, RelayOptions
from proxy.forwarder.relay.pipes import SMALL_PIPE_BYTES, Pipe
from proxy.forwarder.relay.relay import RelayStartFailed
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.shared.relay_table import PIPE, TO_BROKER, TO_CLIENT, row


@pytest.mark.parametrize("way", WAYS)
async def test_an_idle_relay_goes_on(place: Place, lane: Lane, way: str) -> None:
    first = await place.forwarder()
    about = await first.begin(lane, to_client=b"connected")
    assert await read(lane.client, 9) == b"connected"
    second = await successor(place, way)
    assert second.adopted == [about]
    assert second.relays.in_flight.count == 1
    for sender, receiver in ((lane.client, lane.broker), (lane.broker, lane.client)):
        await sender.send_all(b"on and on")
        assert await read(receiver, 9) == b"on and on"


@pytest.mark.parametrize("way", WAYS)
async def test_a_relay_of_a_credential_that_is_denied_already_ends_as_it_is_adopted(
    place: Place, lane: Lane, way: str
) -> None:
    """Security: the list may have come to name it while no forwarder ran."""
    first = await place.forwarder()
    about = await first.begin(lane, about=about_relay(credentials=[credential_digest("token-id", "7")]))
    place.denied = parse_deny_list(b"token-id 7", "file")
    second = await successor(place, way)
    assert second.adopted == [about]
    assert await read_all(lane.client) == await read_all(lane.broker) == b""


@pytest.mark.parametrize("way", WAYS)
async def test_bytes_in_the_pipes_of_both_ways_go_on(place: Place, narrow_lane: Lane, way: str) -> None:
    """Neither sink takes more; the bytes are in the kernel, and nowhere else."""
    first = await place.forwarder()
    about = await first.begin(narrow_lane)
    sent_there, sent_back = await fill(narrow_lane.client), await fill(narrow_lane.broker)
    assert first.pipe_of(about.id, TO_BROKER) != first.pipe_of(about.id, TO_CLIENT) != 0
    second = await successor(place, way)
    await narrow_lane.client.send_eof()
    await narrow_lane.broker.send_eof()
    assert len(await read_all(narrow_lane.broker)) == sent_there
    assert len(await read_all(narrow_lane.client)) == sent_back
    await until(lambda: second.ended == [about])
    assert (second.moved("to_broker"), second.moved("to_client")) == (sent_there, sent_back)


@pytest.mark.parametrize("way", WAYS)
async def test_bytes_that_arrive_between_two_forwarders(place: Place, lane: Lane, way: str) -> None:
    first = await place.forwarder()
    await first.begin(lane)
    if way == "killed":
        await first.kill()
    else:
        await first.relays.hand_over_relays()
    await lane.client.send_all(b"anybody there?")
    await lane.broker.send_all(b"here")
    await lane.broker.send_eof()
    await place.forwarder()
    assert await read(lane.broker, 14) == b"anybody there?"
    assert await read_all(lane.client) == b"here"


@pytest.mark.parametrize("way", WAYS)
async def test_a_half_closed_side_stays_half_closed(place: Place, lane: Lane, way: str) -> None:
    first = await place.forwarder()
    about = await first.begin(lane)
    await lane.client.send_all(b"question")
    await lane.client.send_eof()
    assert await read_all(lane.broker) == b"question"
    second = await successor(place, way)
    await lane.broker.send_all(b"answer")
    assert await read(lane.client, 6) == b"answer"
    await lane.broker.send_eof()
    assert await read_all(lane.client) == b""
    await until(lambda: second.ended == [about])


@pytest.mark.parametrize("way", WAYS)
async def test_a_source_that_has_ended_with_its_bytes_in_the_pipe(place: Place, narrow_lane: Lane, way: str) -> None:
    first = await place.forwarder()
    await first.begin(narrow_lane)
    sent = await fill(narrow_lane.client)
    await narrow_lane.client.aclose()
    await place.settle()
    second = await successor(place, way)
    assert len(await read_all(narrow_lane.broker)) == sent
    await narrow_lane.broker.aclose()
    await until(lambda: second.ended)


@pytest.mark.parametrize("way", WAYS)
async def test_a_side_that_broke_between_two_forwarders(place: Place, narrow_lane: Lane, way: str) -> None:
    first = await place.forwarder()
    await first.begin(narrow_lane)
    await fill(narrow_lane.client)
    if way == "killed":
        await first.kill()
    else:
        await first.relays.hand_over_relays()
    reset(narrow_lane.broker)
    second = await place.forwarder()
    assert await read_all(narrow_lane.client) == b""
    await narrow_lane.client.aclose()
    await until(lambda: second.ended)
    await until(lambda: not place.slot.relays)


async def test_a_relay_goes_from_hand_to_hand(place: Place, lane: Lane) -> None:
    forwarder = await place.forwarder()
    await forwarder.begin(lane)
    for number, way in zip(range(12), itertools.cycle(WAYS), strict=False):
        await lane.client.send_all(b"%3d" % number)
        await lane.broker.send_all(b"%3d" % number)
        forwarder = await successor(place, way)
        assert await read(lane.broker, 3) == b"%3d" % number
        assert await read(lane.client, 3) == b"%3d" % number
    await until(lambda: (forwarder.moved("to_broker"), forwarder.moved("to_client")) == (36, 36))


# ---- killed anywhere


async def converse(lane: Lane, seed: int) -> tuple[int, int]:
    """Portions of many sizes both ways, then both ends; all of it must arrive."""
    sizes = random.Random(seed)

    async def send(stream: TcpStream, data: bytes) -> None:
        at = 0
        while at < len(data):
            size = sizes.choice([1, 200, 5_000, 70_000])
            await stream.send_all(data[at : at + size])
            at += size
        await stream.send_eof()

    async def receive(stream: TcpStream, expected: bytes) -> None:
        found = await read_all(stream)
        assert len(found) == len(expected)
        assert found == expected

    there, back = sizes.randbytes(150_000), sizes.randbytes(90_001)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send, lane.client, there)
            nursery.start_soon(send, lane.broker, back)
            nursery.start_soon(receive, lane.broker, there)
            nursery.start_soon(receive, lane.client, back)
    return len(there), len(back)


async def follow(place: Place, fuse: Fuse, steps: Iterator[int]) -> None:
    """What the supervisor does: each that dies gets a successor."""
    while True:
        await place.forwarders[-1].gone.wait()
        fuse.disarm()
        await place.forwarder()
        if (left := next(steps, 0)) > 0:
            fuse.arm(place, left)


async def converse_and_die(fuse: Fuse, steps: list[int], seed: int = 1) -> None:
    left = iter(steps)
    async with open_place() as place, open_lane(buffer_bytes=4096) as lane:
        forwarder = await place.forwarder()
        about = await forwarder.begin(lane)
        fuse.arm(place, next(left))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow, place, fuse, left)
            sent = await converse(lane, seed)
            # Ended, said to be, and forgotten, by whichever of them.
            await until(lambda: place.slot.relays == {} and place.forwarders[-1].is_alive)
            fuse.disarm()
            nursery.cancel_scope.cancel()
        last = place.forwarders[-1]
        assert about.id in {ended.id for one in place.forwarders for ended in one.ended}
        # A kill between the moving of bytes and their counting leaves them uncounted; none is counted twice.
        assert last.moved("to_broker") <= sent[0]
        assert last.moved("to_client") <= sent[1]
        if len(place.forwarders) == 1:
            assert (last.moved("to_broker"), last.moved("to_client")) == sent


async def test_killed_once_at_every_step(fuse: Fuse) -> None:
    """After each splice, before each store, between the shutdowns at the end."""
    await converse_and_die(fuse, [1 << 30])
    steps = fuse.steps
    assert steps > 50
    for at in sorted({*range(1, 30), *range(30, steps - 24, 11), *range(max(1, steps - 24), steps + 3)}):
        await converse_and_die(fuse, [at])


@pytest.mark.parametrize("seed", range(12))
async def test_killed_again_and_again(fuse: Fuse, seed: int) -> None:
    chance = random.Random(seed)
    await converse_and_die(fuse, [chance.randrange(1, 60) for _ in range(10)], seed)


@pytest.mark.parametrize("seed", range(6))
async def test_handed_over_again_and_again_in_full_traffic(seed: int) -> None:
    chance = random.Random(seed)
    async with open_place() as place, open_lane(buffer_bytes=4096) as lane:
        forwarder = await place.forwarder()
        about = await forwarder.begin(lane)
        done = trio.Event()

        async def hand_on() -> None:
            for _ in range(10):
                await trio.sleep(chance.random() * 0.01)
                await successor(place, "handed over")
            done.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(hand_on)
            sent = await converse(lane, seed)
        await until(lambda: place.slot.relays == {})
        last = place.forwarders[-1]
        assert about.id in {ended.id for one in place.forwarders for ended in one.ended}
        assert (last.moved("to_broker"), last.moved("to_client")) == sent


# ---- pipes and ids


async def test_a_pipe_that_was_bound_and_empty_is_free(place: Place, lane: Lane) -> None:
    """The predecessor died before the first byte was in it."""
    first = await place.forwarder()
    about = await first.begin(lane)
    await place.settle()
    first.relays._ledger.table.cells[row(about.id, TO_BROKER) + PIPE] = min(place.slot.pipes)
    second = await successor(place, "killed")
    assert second.pipe_of(about.id, TO_BROKER) == 0
    assert ("drop pipe", min(place.slot.pipes)) not in second.fd_store.said
    await lane.client.send_all(b"x")
    assert await read(lane.broker, 1) == b"x"


async def test_a_pipe_with_bytes_of_no_relay_is_dropped(place: Place, lane: Lane) -> None:
    """Security: of a relay that had never begun, or was ended in that very moment; no other client may get them."""
    first = await place.forwarder()
    await first.begin(lane)
    await place.settle()
    for kept in place.slot.pipes.values():
        os.write(kept.second, b"another client's")
    strangers = set(place.slot.pipes)
    second = await successor(place, "killed")
    assert {number for said, number in second.fd_store.said if said == "drop pipe"} == strangers
    await place.settle()
    assert not strangers & set(place.slot.pipes)
    assert min(place.slot.pipes) > max(strangers), "no id is used twice"
    await lane.client.send_all(b"mine")
    assert await read(lane.broker, 4) == b"mine"


async def test_relay_ids_go_on_without_collisions(place: Place) -> None:
    async with open_lane() as one, open_lane() as two, open_lane() as three, open_lane() as four:
        first = await place.forwarder()
        ids = [(await first.begin(lane)).id for lane in (one, two, three)]
        await two.client.aclose()
        await two.broker.aclose()
        await until(lambda: first.ended)
        await place.settle()
        second = await successor(place, "killed")
        assert {about.id for about in second.adopted} == {ids[0], ids[2]}
        new = (await second.begin(four)).id
        assert new not in {ids[0], ids[2]}
        for lane in (one, three, four):
            await lane.client.send_all(b"%d" % id(lane))
            assert await read(lane.broker, len(b"%d" % id(lane))) == b"%d" % id(lane)


async def test_the_supervisors_supply_of_pipes_does_not_grow_with_every_successor(place: Place, lane: Lane) -> None:
    forwarder = await place.forwarder()
    await forwarder.begin(lane)
    await place.settle()
    pipes = len(place.slot.pipes)
    for _ in range(4):
        forwarder = await successor(place, "killed")
        await lane.client.send_all(b"x")
        await read(lane.broker, 1)
        await place.settle()
    assert len(place.slot.pipes) <= pipes + 1


async def test_a_pipe_that_did_not_come_ends_its_relay(place: Place, narrow_lane: Lane) -> None:
    """What was in it is unknown: an end can be seen, a hole in the stream cannot."""
    first = await place.forwarder()
    about = await first.begin(narrow_lane)
    sent = await fill(narrow_lane.client)
    await place.settle()
    place.slot.pipes.pop(first.pipe_of(about.id, TO_BROKER)).close()  # as if it could not be kept
    second = await successor(place, "killed")
    await narrow_lane.client.send_eof()
    assert len(await read_all(narrow_lane.broker)) < sent
    await narrow_lane.broker.aclose()
    await until(lambda: second.ended == [about])
    await until(lambda: place.slot.relays == {})


# ---- counters


@pytest.mark.parametrize("way", WAYS)
async def test_counters_go_on(place: Place, lane: Lane, way: str) -> None:
    first = await place.forwarder()
    await first.begin(lane, to_client=b"connected")
    async with open_lane() as ended:
        await first.begin(ended, to_broker=b"12345")
        await read(ended.broker, 5)
    await lane.client.send_all(b"123")
    await read(lane.broker, 3)
    await read(lane.client, 9)
    await until(lambda: len(first.ended) == 1)
    before = [first.moved(name) for name in ("to_broker", "to_client")]
    operations = [first.operations(name) for name in ("to_broker", "to_client")]
    assert before == [8, 9]
    second = await successor(place, way)
    assert [second.moved(name) for name in ("to_broker", "to_client")] == before
    assert [second.operations(name) for name in ("to_broker", "to_client")] == operations
    if way == "handed over":
        assert list(first.relays.collect()) == [], "each byte is counted once"
    await lane.client.send_all(b"4")
    await read(lane.broker, 1)
    assert second.moved("to_broker") == 9


@pytest.mark.parametrize("later", [False, True])
async def test_bytes_of_relays_that_ended_with_their_forwarder_stay_counted(
    place: Place, lane: Lane, *, later: bool
) -> None:
    """Relays that are not spliced end with their process; a counter never decreases."""
    first = await place.forwarder()
    about = await first.begin(lane)
    client, broker = await first.begin_copied(about_relay(), to_broker=b"12345")
    assert await broker.receive_some(10) == b"12345"
    assert first.moved("to_broker") == 5
    second = await successor(place, "killed")
    assert second.moved("to_broker") == 5
    async with open_lane() as other:
        new = await second.begin(other, to_broker=b"67")
        assert new.id != about.id
        await read(other.broker, 2)
        assert second.moved("to_broker") == 7
        assert second.relays._ledger.table.cells[row(new.id, TO_BROKER) + 1] == 2, "the new one's own"
    await client.aclose()
    await broker.aclose()


# ---- handing over


async def test_nothing_moves_after_a_hand_over(place: Place, lane: Lane) -> None:
    first = await place.forwarder()
    await first.begin(lane)
    await first.relays.hand_over_relays()
    await lane.client.send_all(b"for the successor")
    with trio.move_on_after(0.05):
        pytest.fail(f"moved: {await lane.broker.receive_some(100)!r}")
    assert first.ended == []
    assert first.relays.in_flight.count == 0
    await place.forwarder()
    assert await read(lane.broker, 17) == b"for the successor"


async def test_sockets_are_closed_and_not_shut_down(place: Place, lane: Lane) -> None:
    first = await place.forwarder()
    await first.begin(lane)
    await place.settle()
    before = descriptors()
    await first.relays.hand_over_relays()
    await trio.testing.wait_all_tasks_blocked(0.01)
    assert descriptors() <= before - 2
    with trio.move_on_after(0.05):
        pytest.fail(f"an end: {await lane.client.receive_some(1)!r}")


async def test_a_relay_dropped_before_a_hand_over_is_not_adopted(
    place: Place, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await place.forwarder()
    async with open_lane() as ended:
        await first.begin(lane)
        about = await first.begin(ended)
        await place.settle()
        monkeypatch.setattr(first.fd_store, "_drops_pending", trio.Event())  # it is not sent meanwhile
    await until(lambda: first.ended)
    assert about.id in place.slot.relays
    await first.relays.hand_over_relays()
    second = await place.forwarder()
    assert about.id not in {adopted.id for adopted in second.adopted}
    assert len(second.adopted) == 1


async def test_relays_that_are_not_spliced_go_on_and_count_in_the_same_place(place: Place, lane: Lane) -> None:
    """The process that has them tells no sums: its successor does, from the same table."""
    first = await place.forwarder()
    await first.begin(lane, to_broker=b"123")
    await read(lane.broker, 3)
    client, broker = await first.begin_copied(about_relay(), to_broker=b"12345")
    assert await broker.receive_some(10) == b"12345"
    assert first.moved("to_broker") == 8
    second = await successor(place, "handed over")
    assert (first.relays.in_flight.count, second.relays.in_flight.count) == (1, 1)
    assert list(first.relays.collect()) == []
    assert second.moved("to_broker") == 8
    await client.send_all(b"still here")
    assert await broker.receive_some(10) == b"still here"
    async with open_lane() as other:
        await second.begin(other, to_broker=b"1")
        await read(other.broker, 1)
    await client.send_eof()
    await broker.send_eof()
    await until(lambda: len(first.ended) == 1)
    assert list(first.relays.collect()) == []
    assert second.moved("to_broker") == 8 + 10 + 1
    assert first.relays.in_flight.count == 0
    await client.aclose()
    await broker.aclose()


async def test_a_lingering_relay_is_not_taken_from_its_successor(place: Place, lane: Lane) -> None:
    """Its sockets are the successor's to shut down."""
    first = await place.forwarder()
    about = await first.begin(lane)
    reset(lane.broker)
    assert await read_all(lane.client) == b""
    await lane.client.send_all(b"to nobody")
    await until(lambda: first.ended)
    await place.settle()
    assert about.id in place.slot.relays, "the client may still read"
    second = await successor(place, "handed over")
    assert second.adopted == [about]
    await first.leave()
    await lane.client.aclose()
    await until(lambda: second.ended)
    assert ("drop", about.id) not in first.fd_store.said


async def test_no_relay_begins_any_more(place: Place, lane: Lane) -> None:
    first = await place.forwarder()
    await first.relays.hand_over_relays()
    before = descriptors()
    with pytest.raises(RelayStartFailed, match="being replaced"):
        await first.begin(lane)
    assert descriptors() == before


# ---- what the store could not give


async def test_a_relay_without_its_row_and_pipes_goes_on(nursery: trio.Nursery, lane: Lane) -> None:
    """A successor with a table of its own, as after a change of the table's form."""
    left = RelayHandover()
    left.relays.append(kept_relay(lane, 7))
    pipe = Pipe.create(3, SMALL_PIPE_BYTES)
    left.pipes.append(pipe)
    ended: list[Any] = []
    callbacks = RelayCallbacks(lambda *end: ended.append(end))
    relays = RelayManager(nursery, disabled_fd_store(), left, callbacks, RelayOptions())
    relays.adopt_relays(left, RelayConfig())
    nursery.start_soon(relays.run)
    await lane.client.send_all(b"x")
    assert await read(lane.broker, 1) == b"x"
    await lane.client.aclose()
    await lane.broker.aclose()
    await until(lambda: ended)


NONSENSE = (-(2**63), -1, 1, 2**31, 2**60, 2**62, 2**63 - 1)


@pytest.mark.parametrize("number", NONSENSE)
async def test_nonsense_in_the_rows_of_one_relay_costs_no_other_one(place: Place, lane: Lane, number: int) -> None:
    """Security: a forwarder that was taken over writes it, and ends; each successor would end by it."""
    first = await place.forwarder()
    async with open_lane() as other:
        poisoned = await first.begin(lane)
        await first.begin(other)
        for way in (TO_BROKER, TO_CLIENT):
            for cell in range(4):
                first.relays._ledger.table.cells[row(poisoned.id, way) + cell] = number
        second = await successor(place, "killed")
        await lane.client.send_all(b"who knows")
        third = await successor(place, "killed")
        for sender, receiver in ((other.client, other.broker), (other.broker, other.client)):
            await sender.send_all(b"on and on")
            assert await read(receiver, 9) == b"on and on"
        assert second.relays is not third.relays
