"""proxy.forwarder.relay.adoption: use is exact for relays that cannot move, through one successor after another."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import structlog.testing
from relay_fakes import Forwarder, Lane, Place, about_relay, open_lane, open_place, read_all, until

from proto.rpc_pb2 import RelayLeftBehind, StoredRelay, StoreMessage
from proxy.common.deny_list import credential_digest, parse_deny_list
from proxy.forwarder.relay import adoption, manager
from proxy.forwarder.relay.adoption import RelaysLeftBehind
from proxy.forwarder.relay.fd_store_client import RelayHandover
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.shared.relay_table import BYTES, TO_BROKER, RelayTable, row

CLIENT_IP = "203.0.113.7"


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is to take a second."""
    monkeypatch.setattr(adoption, "LOOK_INTERVAL_S", 0.01)


class Stream:
    """A relay that is not spliced, as one with TLS is."""

    def __init__(self, about: StoredRelay, client: TcpStream, broker: TcpStream) -> None:
        self.about = about
        self._client = client
        self._broker = broker

    async def send(self, data: bytes) -> None:
        """From the client to the broker."""
        await self._client.send_all(data)
        received = b""
        while len(received) < len(data):
            received += bytes(await self._broker.receive_some())
        assert received == data

    async def wait_for_end(self) -> None:
        """Until both sides have been told."""
        assert await read_all(self._client) == await read_all(self._broker) == b""

    async def end(self) -> None:
        for stream in (self._client, self._broker):
            await stream.aclose()


async def begin(forwarder: Forwarder, client_port: int = 1000, **fields: Any) -> Stream:
    about = about_relay(client_address=f"{CLIENT_IP}:{client_port}", principal="alice", **fields)
    return Stream(about, *await forwarder.begin_copied(about))


def used(forwarder: Forwarder, who: str = "alice") -> int:
    """What Prometheus is told of bytes of a principal towards the broker."""
    labels = {"principal": who, "direction": "to_broker"}
    return int(forwarder.registry.get_sample_value("pulsar_proxy_principal_bytes_total", labels) or 0)


async def replaced(place: Place) -> Forwarder:
    await place.forwarders[-1].relays.hand_over_relays()
    return await place.forwarder()


@pytest.fixture(params=[True, False], ids=["crash-safe", "not crash-safe"])
async def place(request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    async with open_place(crash_safe=request.param) as place:
        yield place


@pytest.fixture
async def lane() -> AsyncIterator[Lane]:
    async with open_lane() as lane:
        yield lane


async def test_a_relay_that_stays_in_a_predecessor_ends_there_when_its_credential_is_denied(place: Place) -> None:
    """Security: a copied relay, as one with TLS is; the predecessor lives on for it."""
    first = await place.forwarder()
    stream = await begin(first, credentials=[credential_digest("token-id", "7")])
    other = await begin(first, 1001)
    await replaced(place)
    first.relays.deny_credentials(parse_deny_list(b"token-id 7", "file"))
    await stream.wait_for_end()
    assert first.ended == [stream.about]
    await other.send(b"on and on")
    await other.end()


# ---- what is used


async def test_several_generations_count_in_one_series(place: Place) -> None:
    """Nothing is counted twice, nothing is lost, no sample is ever lower than the one before it."""
    streams, seen = [], []
    forwarder = await place.forwarder()
    for generation in range(3):
        streams.append(await begin(forwarder, 1000 + generation))
        for stream in streams:
            await stream.send(b"x" * 10)
            seen.append(used(place.forwarders[-1]))
        forwarder = await replaced(place)
        seen.append(used(forwarder))
    for stream in streams:
        await stream.send(b"x" * 7)
        seen.append(used(forwarder))
        await stream.end()
    await until(lambda: len(forwarder.gone_behind) == 3)
    assert used(forwarder) == 10 * (1 + 2 + 3) + 3 * 7
    assert seen == sorted(seen)
    assert forwarder.gone_behind == [CLIENT_IP] * 3
    assert forwarder.relays.left_behind.count == 0
    for number, old in enumerate(place.forwarders[:-1]):
        assert old.gone_behind == [CLIENT_IP] * number, "counted for the limits where they are looked after"
        assert list(old.relays.collect()) == [], "or it would be counted twice"


async def test_the_last_line_tells_everything(place: Place) -> None:
    first = await place.forwarder()
    stream = await begin(first)
    await stream.send(b"before")
    await replaced(place)
    await stream.send(b"and after")
    with structlog.testing.capture_logs() as logs:
        await stream.end()
        await until(lambda: len(first.ended) == 1)
    [line] = [entry for entry in logs if entry["event"] == "a relay has ended"]
    assert line["bytes_to_broker"] == len(b"before" + b"and after")


async def test_a_predecessor_that_is_killed(place: Place) -> None:
    """What it had counted stands in memory that it does not take along."""
    first = await place.forwarder()
    stream = await begin(first)
    await stream.send(b"12345")
    second = await replaced(place)
    await stream.send(b"678")
    first.relays._engine.frozen = True
    await first.kill()
    assert second.relays.left_behind.count == 1, "until the supervisor says so"
    assert used(second) == 8
    place.slot.on_process_ended(1)
    await until(lambda: second.gone_behind == [CLIENT_IP])
    assert used(second) == 8
    assert place.slot.left_behind == {}
    third = await replaced(place)
    assert (used(third), third.relays.left_behind.count) == (8, 0)


async def test_a_successor_that_is_killed(place: Place) -> None:
    """Its own successor knows of its predecessor's relays, too."""
    first = await place.forwarder()
    stream = await begin(first)
    await stream.send(b"12345")
    second = await replaced(place)
    await stream.send(b"678")
    await second.kill()
    third = await place.forwarder()
    await stream.send(b"9")
    assert used(third) == 9
    await stream.end()
    await until(lambda: third.gone_behind == [CLIENT_IP])
    assert used(third) == 9


async def test_rows_are_not_anothers_before_they_are_free(place: Place) -> None:
    first = await place.forwarder()
    stream = await begin(first)
    second = await replaced(place)
    other = await begin(second)
    assert other.about.id != stream.about.id
    await stream.end()
    await until(lambda: second.relays.left_behind.count == 0)
    await until(lambda: place.slot.left_behind[1] == {})
    again = await begin(second)
    assert again.about.id == stream.about.id, "and then they are"
    await again.send(b"12")
    third = await replaced(place)
    assert set(place.slot.left_behind[2]) == {other.about.id, again.about.id}
    assert used(third) == 2
    for one in (other, again):
        await one.end()
    await until(lambda: third.relays.left_behind.count == 0)
    assert used(third) == 2


async def test_a_predecessor_that_ends_during_a_hand_over(place: Place) -> None:
    first = await place.forwarder()
    stream = await begin(first)
    await stream.send(b"123")
    second = await replaced(place)
    await second.relays.hand_over_relays()
    place.slot.on_process_ended(1)
    third = await place.forwarder()
    assert (used(third), third.relays.left_behind.count) == (3, 0)


async def test_relays_that_move_delay_no_drain(lane: Lane) -> None:
    async with open_place() as place:
        first = await place.forwarder()
        about = await first.begin(lane, to_broker=b"1")
        await begin(first)
        second = await replaced(place)
        assert first.moved_away == [about]
        assert (first.relays.in_flight.count, second.relays.in_flight.count) == (1, 1)
        assert second.relays.left_behind.count == 1


async def test_spliced_relays_that_may_not_move_stay_and_count(lane: Lane) -> None:
    """relay.crash_safe = false: the engine goes on in the process that was replaced."""
    async with open_place(crash_safe=False) as place:
        first = await place.forwarder()
        about = about_relay(client_address=f"{CLIENT_IP}:1", principal="alice")
        await first.begin(lane, to_broker=b"123", about=about)
        await read(lane, 3)
        second = await replaced(place)
        await lane.client.send_all(b"45")
        await read(lane, 2)
        await until(lambda: used(second) == 5)
        assert first.moved_away == []
        await lane.client.aclose()
        await lane.broker.aclose()
        await until(lambda: second.gone_behind == [CLIENT_IP])
        assert used(second) == 5
        assert len(first.ended) == 1


async def read(lane: Lane, size: int) -> None:
    left = size
    while left:
        left -= len(await lane.broker.receive_some(left))


async def test_a_second_word_to_hand_over_changes_nothing(place: Place) -> None:
    first = await place.forwarder()
    stream = await begin(first)
    second = await replaced(place)
    await first.relays.hand_over_relays()
    await stream.send(b"12")
    assert used(second) == 2


async def test_a_drain_ends_those_that_stay(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "LINGER_S", 0.01)
    first = await place.forwarder()
    stream = await begin(first)
    await stream.send(b"12")
    second = await replaced(place)
    first.relays.spread_closes(0.02)
    await until(lambda: len(first.ended) == 1)
    await until(lambda: second.gone_behind == [CLIENT_IP])
    assert used(second) == 2


async def test_relays_left_behind_end_at_their_maximum_age(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The close schedule of the replaced forwarder goes on."""
    monkeypatch.setattr(manager, "LINGER_S", 0.01)
    first = await place.forwarder()
    stream = await begin(first, leave_at_ms=int(first.now() * 1000) + 300)
    second = await replaced(place)
    await until(lambda: second.gone_behind == [CLIENT_IP])
    assert stream.about == first.ended[0]


async def test_relays_that_have_moved_are_not_ended_here(lane: Lane) -> None:
    """Their maximum age is the successor's to watch."""
    async with open_place() as place:
        first = await place.forwarder()
        await first.begin(lane, about=about_relay(leave_at_ms=int(first.now() * 1000) + 3_600_000))
        second = await replaced(place)
        assert first.relays.close_schedule._due == []
        assert len(second.relays.close_schedule._due) == 1


# ---- its own logic


def table_with(*ids: int) -> RelayTable:
    table = RelayTable()
    for relay_id in ids:
        assert table.allocate_relay_id() == relay_id
        table.cells[row(relay_id, TO_BROKER) + BYTES] = relay_id
    return table


def test_a_relay_that_was_adopted_is_not_counted_as_left_behind() -> None:
    """Security: a captured forwarder reports a relay both as kept and as moved."""
    left = RelaysLeftBehind(table_with(1, 2), lambda *_: None)
    left.adopt_relays({7: {1: "a", 2: "b"}}, taken={2})
    assert (left.ids, left.client_ips, left.count) == ({1}, ["a"], 1)


def test_only_those_that_have_ended_are_summed_up() -> None:
    ended: list[tuple[int, str]] = []
    table = table_with(1, 2, 3)
    left = RelaysLeftBehind(table, lambda *relay: ended.append(relay))
    left.adopt_relays({7: {1: "a", 2: "b"}, 8: {3: "c"}}, taken=set())
    table.record_ended_behind(2)
    left.sum_up_ended()
    left.sum_up_ended()
    assert ended == [(2, "b")]
    left.on_process_ended(9)
    left.on_process_ended(8)
    left.on_process_ended(8)
    assert ended == [(2, "b"), (3, "c")]
    assert (table.cells[row(0, TO_BROKER) + BYTES], table.total(TO_BROKER, BYTES)) == (5, 6)
    left.forget_relays()
    left.on_process_ended(7)
    assert len(ended) == 2, "the table is another's"


@pytest.mark.parametrize("said_first", ["that they are there", "that it has ended"])
def test_a_predecessor_that_ends_while_its_relays_are_named(said_first: str) -> None:
    messages = [
        StoreMessage(left_behind=[RelayLeftBehind(id=1, client_ip="a")], predecessor_pid=7),
        StoreMessage(ended_predecessor_pids=[7]),
    ]
    if said_first == "that it has ended":
        messages.reverse()
    left = RelayHandover()
    for message in (*messages, StoreMessage(complete=True)):
        left.add_message(message, [])
    assert left.left_behind == {}
