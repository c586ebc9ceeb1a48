"""Relays whose TLS is moved into the kernel: which, when, and how they end. Without such a kernel: the keys go to a
fake, and from then on the two ends send plain bytes. With one: tests/e2e/test_kernel_tls_relays.py.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import trio
from adoption_fakes import WAYS, successor
from framed_fakes import FakeReauthenticator, Now, session
from relay_fakes import (
    Contexts,
    Forwarder,
    Lane,
    Place,
    TlsLane,
    about_relay,
    open_lane,
    open_tls,
    read,
    read_all,
    until,
)
from tls_ends import ALL_CIPHERS, Scene, kernel_with

from proxy.forwarder.relay import kernel_tls_pump, manager
from proxy.forwarder.relay.kernel_tls_pump import KernelTlsDirection, KernelTlsRelay
from proxy.forwarder.relay.pipes import SMALL_PIPE_BYTES
from proxy.forwarder.relay.relay import Direction, RelayStart, RelayStartFailed
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.network.kernel_tls import Following, KernelTlsNotPossible, KeyPair, use_kernel_tls
from proxy.runtime.network.tls import TlsStream

SIDES = pytest.mark.parametrize("sides", ["client", "broker", "both"])


class FakeKernel:
    """What the kernel is asked for. ``given``: for each socket that got keys, how many relays the store had then."""

    def __init__(self) -> None:
        self.forwarder: Forwarder | None = None
        self.attached: list[int] = []
        self.given: list[tuple[int, int]] = []
        self.ended: list[int] = []
        self.pushed: list[int] = []
        self.has_tls = self.has_keys = True
        self.error: Exception | None = None

    def attach_tls(self, connection: socket.socket) -> bool:
        self.attached.append(connection.fileno())
        return self.has_tls

    def give_keys(self, connection: socket.socket, keys: KeyPair) -> None:
        assert keys.sending != keys.receiving
        assert self.forwarder is not None
        if self.error is not None:
            raise self.error
        self.given.append((connection.fileno(), len(self.forwarder.fd_store.said)))

    def send_close_notify(self, connection: socket.socket) -> bool:
        self.ended.append(connection.fileno())
        return True


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKernel]:
    fake = FakeKernel()
    for module, names in ((manager, ("attach_tls", "give_keys")), (kernel_tls_pump, ("send_close_notify",))):
        for name in names:
            monkeypatch.setattr(module, name, getattr(fake, name))
    monkeypatch.setattr(kernel_tls_pump, "has_keys", lambda _socket: fake.has_keys)
    monkeypatch.setattr(kernel_tls_pump, "push_records", lambda sock: fake.pushed.append(sock.fileno()))
    monkeypatch.setattr(manager, "LINGER_S", 0.2)
    with kernel_with(*ALL_CIPHERS):
        yield fake


@pytest.fixture
def contexts(kernel: FakeKernel, tmp_path: Path) -> Contexts:
    scene = Scene(tmp_path)
    return scene.listener.front_context, scene.client


class Sources:
    """What ``os.splice`` returns for some sources, 0 or an error; None, and in the end: as the kernel has it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.outcomes: dict[int, list[int | None]] = {}
        self.calls = 0
        self._splice = os.splice
        monkeypatch.setattr(os, "splice", self.splice)

    def splice(self, source: int, sink: int, *arguments: Any, **named: Any) -> int:
        outcomes = self.outcomes.get(source)
        outcome = outcomes.pop(0) if outcomes else None
        if outcome is None:
            return self._splice(source, sink, *arguments, **named)
        self.calls += 1
        if outcome:
            raise OSError(outcome, os.strerror(outcome))
        return 0


async def begin(
    place: Place, lane: Lane, contexts: Contexts, kernel: FakeKernel, sides: str = "client", **first: bytes
) -> Forwarder:
    """Start a relay whose TLS is the kernel's from then on."""
    kernel.forwarder = it = await place.forwarder()
    tls = await open_tls(lane, contexts, sides)
    await tls.begin(it, **first)
    assert kernel.given
    return it


def the_relay(it: Forwarder) -> KernelTlsRelay:
    (relay,) = it.relays._engine.relays
    assert isinstance(relay, KernelTlsRelay)
    return relay


# ---- which are moved, and when


@SIDES
async def test_a_blind_relay_is_moved_once_the_store_has_it(
    place: Place, lane: Lane, contexts: Contexts, kernel: FakeKernel, sides: str
) -> None:
    """Of the client first: the broker's side waits for it."""
    kernel.forwarder = it = await place.forwarder()
    tls = await open_tls(lane, contexts, sides)
    ours = [
        stream.transport.socket.fileno() for stream in (tls.our_client, tls.our_broker) if isinstance(stream, TlsStream)
    ]
    record = await tls.begin(it, to_broker=b"held ", to_client=b"connected ")
    assert kernel.attached == ours
    assert kernel.given == [(descriptor, 1) for descriptor in ours]
    assert it.relays.kernel_tls_relays == 1
    assert (record.client_kernel_tls, record.broker_kernel_tls) == (sides != "broker", sides != "client")
    await lane.client.send_all(b"there")
    await lane.broker.send_all(b"back")
    assert await read(lane.broker, 10) == b"held there"
    assert await read(lane.client, 14) == b"connected back"
    await lane.client.send_eof()
    await lane.broker.send_eof()
    assert await read_all(lane.client) == await read_all(lane.broker) == b""
    await until(lambda: it.ended == [record])
    assert len(kernel.ended) == len(ours), "close_notify to each, once"


async def test_where_bytes_a_second_are_limited_portions_are_small(
    place: Place, lane: Lane, contexts: Contexts, kernel: FakeKernel
) -> None:
    """As those of other relays: see test_where_a_limit_is_set_portions_are_small."""
    it = await begin(place, lane, contexts, kernel)
    direction, portions = the_relay(it).to_client, []

    def pump_and_count(direction: Direction) -> None:
        before = it.relays.bytes_moved(direction.relay)[1]
        pump(direction)
        portions.append(it.relays.bytes_moved(direction.relay)[1] - before)

    pump, direction.pump = direction.pump, pump_and_count
    it.relays.run_queue.limit_bytes(1_800_000, dry_run=False)
    said = os.urandom(400_000)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lane.broker.send_all, said)
        assert await read(lane.client, len(said)) == said
    await until(lambda: sum(portions) == len(said))
    assert max(portions) <= 18_000


async def stays(place: Place, tls: TlsLane, kernel: FakeKernel, **start: Any) -> Forwarder:
    """Start a relay, which is copied, with the TLS that it had."""
    kernel.forwarder = it = await place.forwarder()
    record = await tls.begin(it, **start)
    assert (kernel.given, it.fd_store.said) == ([], [])
    assert it.relays.kernel_tls_relays == 0
    assert (record.client_kernel_tls, record.broker_kernel_tls) == (False, False)
    await tls.client.send_all(b"there")
    await tls.broker.send_all(b"back")
    assert await read(tls.client, 4) == b"back"
    return it


@SIDES
async def test_a_relay_of_which_the_frames_are_followed_stays(  # noqa: PLR0917 -- fixtures
    place: Place,
    lane: Lane,
    contexts: Contexts,
    kernel: FakeKernel,
    sides: str,
    now: Now,
    reauthenticator: FakeReauthenticator,
) -> None:
    kernel.forwarder = it = await place.forwarder()
    tls = await open_tls(lane, contexts, sides)
    record = await tls.begin(it, session=session(now, reauthenticator))
    assert (kernel.given, it.fd_store.said) == ([], [])
    assert (record.client_kernel_tls, record.broker_kernel_tls) == (False, False)


@SIDES
async def test_tls_1_2_stays(place: Place, lane: Lane, contexts: Contexts, kernel: FakeKernel, sides: str) -> None:
    tls = await open_tls(lane, contexts, f"{sides} 1.2")
    await stays(place, tls, kernel)
    assert await read(tls.broker, 5) == b"there"


@SIDES
async def test_with_the_setting_off(
    place: Place, lane: Lane, contexts: Contexts, kernel: FakeKernel, sides: str
) -> None:
    use_kernel_tls("off")
    await stays(place, await open_tls(lane, contexts, sides), kernel)
    assert kernel.attached == []


@SIDES
async def test_a_connection_that_the_kernel_does_not_prepare(
    place: Place, lane: Lane, contexts: Contexts, kernel: FakeKernel, sides: str
) -> None:
    kernel.has_tls = False
    await stays(place, await open_tls(lane, contexts, sides), kernel)


async def test_bytes_that_were_read_and_not_decrypted(
    place: Place, lane: Lane, contexts: Contexts, kernel: FakeKernel
) -> None:
    """The beginning of a record is in this process's memory."""
    tls = await open_tls(lane, contexts, "client")
    assert isinstance(tls.client, TlsStream)
    assert isinstance(tls.our_client, TlsStream)
    record = tls.client.session.encrypt(memoryview(b"early "))
    tls.our_client.session.unread = record[:7]
    await lane.client.send_all(record[7:])
    await stays(place, tls, kernel)
    assert await read(tls.broker, 11) == b"early there"


@pytest.mark.parametrize("more", [0, 1])
@SIDES
async def test_what_goes_ahead_of_the_relay(  # noqa: PLR0917 -- fixtures
    place: Place, lane: Lane, contexts: Contexts, kernel: FakeKernel, sides: str, more: int
) -> None:
    """Security: more than a pipe holds goes ahead, before the kernel has keys: never in the clear to a TLS broker."""
    first = os.urandom(SMALL_PIPE_BYTES + more)
    if more and sides != "client":
        tls = await open_tls(lane, contexts, sides)
        await stays(place, tls, kernel, to_broker=first)
        assert await read(tls.broker, len(first) + 5) == first + b"there"  # which only its records can say
        return
    await begin(place, lane, contexts, kernel, sides, to_broker=first)
    assert await read(lane.broker, len(first)) == first


@pytest.mark.parametrize("more", [False, True])
async def test_a_start_that_needs_no_waiting(
    place: Place, lane: Lane, contexts: Contexts, kernel: FakeKernel, more: bool
) -> None:
    kernel.forwarder = it = await place.forwarder()
    tls = await open_tls(lane, contexts, "client")
    first = b"x" * (SMALL_PIPE_BYTES + more)
    start = RelayStart(tls.our_client, tls.our_broker, about_relay(), it.config, first)
    assert it.relays.start_relay_now(start) is not more
    assert len(kernel.given) == (not more)


@pytest.mark.parametrize("error", [KernelTlsNotPossible("no keys"), OSError(errno.EINVAL, "no receiving keys")])
@SIDES
async def test_a_kernel_that_refuses_the_keys(  # noqa: PLR0917 -- fixtures
    place: Place, lane: Lane, contexts: Contexts, kernel: FakeKernel, sides: str, error: Exception
) -> None:
    """Security: nobody may encrypt any more with keys of which the kernel may have some: the connection is cut."""
    kernel.forwarder = it = await place.forwarder()
    kernel.error = error
    tls = await open_tls(lane, contexts, sides)
    with pytest.raises(RelayStartFailed, match="keys"):
        await tls.begin(it, to_client=b"connected")
    for far, ours in ((lane.client, tls.our_client), (lane.broker, tls.our_broker)):
        if isinstance(ours, TlsStream):
            assert await read_all(far) == b""
    await place.settle()
    assert place.slot.relays == {}
    assert it.relays.in_flight.count == 0


# ---- in a successor


@pytest.mark.parametrize("way", WAYS)
@SIDES
async def test_a_successor_goes_on(  # noqa: PLR0917 -- fixtures
    place: Place, lane: Lane, contexts: Contexts, kernel: FakeKernel, sides: str, way: str
) -> None:
    await begin(place, lane, contexts, kernel, sides)
    second = await successor(place, way)
    assert isinstance(the_relay(second), KernelTlsRelay)
    await lane.client.send_all(b"there")
    await lane.broker.send_all(b"back")
    assert (await read(lane.broker, 5), await read(lane.client, 4)) == (b"there", b"back")


@SIDES
async def test_a_successor_of_a_forwarder_that_was_killed_before_the_kernel_had_the_keys(
    place: Place, lane: Lane, contexts: Contexts, kernel: FakeKernel, sides: str
) -> None:
    """Security: the relay ends, and not a byte of what waits in its pipes and sockets goes out in the clear."""
    await begin(place, lane, contexts, kernel, sides, to_client=b"")
    first = place.forwarders[-1]
    await first.kill()
    await lane.client.send_all(b"there")
    await lane.broker.send_all(b"back")
    kernel.has_keys = False
    with structlog.testing.capture_logs() as said:
        second = await place.forwarder()
    assert [(one["event"], one["client"], one["reason"]) for one in said if one["log_level"] == "error"] == [
        ("a relay cannot be taken over", "192.0.2.7:4000", "its forwarder ended before the kernel had the keys")
    ]
    assert await read_all(lane.client) == await read_all(lane.broker) == b""
    await until(lambda: second.ended and not place.slot.relays)
    assert second.relays.in_flight.count == 0


# ---- what the kernel says of a source


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> Sources:
    return Sources(monkeypatch)


async def other_relay_echoes(it: Forwarder) -> None:
    async with open_lane() as lane:
        await it.begin(lane)
        await lane.client.send_all(b"another")
        assert await read(lane.broker, 7) == b"another"


def breaks(said: list[Any]) -> list[tuple[str, str, str]]:
    return [(one["client"], one["side"], one["reason"]) for one in said if one["event"] == "a relay's TLS is broken"]


@pytest.mark.parametrize("errors", [["EMSGSIZE"], ["EBADMSG", "EBADMSG"], ["EINVAL"], ["EIO"], ["EKEYEXPIRED"]])
@pytest.mark.parametrize("data", [b"", b"x" * kernel_tls_pump.LARGE_RECORD_BYTES], ids=["", "behind data"])
async def test_an_error_that_the_kernel_says_once(  # noqa: PLR0917 -- fixtures
    place: Place,
    lane: Lane,
    contexts: Contexts,
    kernel: FakeKernel,
    sources: Sources,
    errors: list[str],
    data: bytes,
) -> None:
    """Security: then it says EAGAIN for good; the relay ends, behind what came before, and is not left to wait."""
    it = await begin(place, lane, contexts, kernel)
    relay = the_relay(it)
    client = relay.to_broker.source
    expected = errors[0] if errors[0] not in {"EINVAL", "EIO"} else "the peer does not speak TLS any more"
    before: list[int | None] = [None] if data else []
    sources.outcomes[client] = [*before, *(getattr(errno, name) for name in errors), *[errno.EAGAIN] * 20]
    with structlog.testing.capture_logs() as said:
        if data:
            await lane.client.send_all(data)
        else:
            it.relays._engine.pump.wake_direction(relay.to_broker)
        assert await read_all(lane.broker) == data
        await lane.broker.aclose()
        await until(lambda: it.ended)
    assert [(address, side) for address, side, _ in breaks(said)] == [("192.0.2.7:4000", "client")]
    assert expected in breaks(said)[0][2]
    await other_relay_echoes(it)


async def test_an_error_that_only_the_sink_meets(
    place: Place, lane: Lane, contexts: Contexts, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Security: the same socket as a source says EAGAIN for good then."""
    it = await begin(place, lane, contexts, kernel)
    relay = the_relay(it)
    client, splice = relay.to_broker.source, os.splice

    def refusing(source: int, sink: int, *arguments: Any) -> int:
        if sink == client:
            raise OSError(errno.EINVAL, "the error of what came from this socket")
        return splice(source, sink, *arguments)

    monkeypatch.setattr(os, "splice", refusing)
    await lane.broker.send_all(b"for a client that is none")
    assert await read_all(lane.broker) == b""
    await until(lambda: it.ended)
    await other_relay_echoes(it)


async def test_an_error_of_this_proxy_itself(
    place: Place, lane: Lane, contexts: Contexts, kernel: FakeKernel, sources: Sources
) -> None:
    """It ends this relay, and is told as what it is."""
    it = await begin(place, lane, contexts, kernel)
    relay = the_relay(it)
    with structlog.testing.capture_logs() as said:
        sources.outcomes[relay.to_broker.source] = [errno.EBADF]
        await lane.client.send_all(b"x")
        await until(lambda: it.ended)
    assert "a relay was ended by an unexpected error" in [one["event"] for one in said]
    await other_relay_echoes(it)


async def test_many_records_without_data_take_turns(  # noqa: PLR0917 -- fixtures
    place: Place,
    lane: Lane,
    contexts: Contexts,
    kernel: FakeKernel,
    sources: Sources,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Security: a peer may send any number of empty ones; no turn takes more than some, and data behind them comes."""
    it = await begin(place, lane, contexts, kernel)
    relay = the_relay(it)
    looks: list[bool] = []
    monkeypatch.setattr(
        kernel_tls_pump, "examine", lambda _socket, *, was_refused: looks.append(was_refused) or Following.DATA
    )
    sources.outcomes[relay.to_broker.source] = [0] * 2_000
    per_turn = longest_turn(it, relay.to_broker, sources, monkeypatch)
    await lane.client.send_all(b"data")
    assert await read(lane.broker, 4) == b"data"
    assert looks == [False] * 2_000
    assert per_turn() == kernel_tls_pump.RECORDS_WITHOUT_DATA_MAX


def longest_turn(
    it: Forwarder, direction: Direction, sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], int]:
    turns = [0]
    fill = it.relays._engine._kernel_tls_pump._fill_pipe

    def counted(*arguments: Any) -> Following:
        before = sources.calls
        following = fill(*arguments)
        turns.append(sources.calls - before)
        return following

    monkeypatch.setattr(it.relays._engine._kernel_tls_pump, "_fill_pipe", counted)
    return lambda: max(turns)


async def test_close_notify_waits_for_room(
    place: Place, lane: Lane, contexts: Contexts, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TCP's end comes only behind it: without it a record may be lost (tests/kernel_tls)."""
    it = await begin(place, lane, contexts, kernel)
    relay = the_relay(it)
    is_full = [True, True]
    monkeypatch.setattr(kernel_tls_pump, "send_close_notify", lambda _socket: not is_full or is_full.pop() is None)
    await lane.broker.send_eof()
    direction = relay.to_client
    assert isinstance(direction, KernelTlsDirection)
    await until(lambda: direction.is_ending)
    assert not direction.done
    for _ in range(2):
        direction.pump(direction)
    assert await read_all(lane.client) == b""
    assert direction.done
    assert not direction.held_bytes


async def test_what_the_kernel_holds_is_pushed_while_a_sink_has_no_room(
    place: Place, narrow_lane: Lane, contexts: Contexts, kernel: FakeKernel
) -> None:
    """Before Linux 6.5 a record may wait for room that only itself would make (see push_records)."""
    await begin(place, narrow_lane, contexts, kernel)
    sent = 0
    while not kernel.pushed:
        sent += await send_some(narrow_lane.broker)
    got = 0
    while got < sent:
        got += len(await narrow_lane.client.receive_some())


async def send_some(stream: TcpStream) -> int:
    try:
        return stream.socket.send(bytes(65536))
    except BlockingIOError:
        await trio.sleep(0.001)
        return 0
