"""proxy.forwarder.relay.closing, and how relays are ended by the proxy itself: spread, gently, in time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from adoption_fakes import successor
from framed_fakes import FakeReauthenticator, Now, error_in, message_frame, send_frame, session
from relay_fakes import (
    CopiedRelays,
    Forwarder,
    Lane,
    Place,
    about_relay,
    fill,
    open_lane,
    read,
    read_all,
    until,
)

from proto.command_heads import HEAD_BYTES
from proto.pulsar_pb2 import ServerError
from proto.rpc_pb2 import StoredRelay
from proxy.common.deny_list import credential_digest, parse_deny_list
from proxy.config.types import Limits
from proxy.forwarder.client import timeouts as age
from proxy.forwarder.client.timeouts import ConnectionAge
from proxy.forwarder.disconnect_cause import DisconnectCause
from proxy.forwarder.lifetime import reauthentication
from proxy.forwarder.lifetime.closing import QUIET_S, QUIET_S_MAX, CloseReason, until_quiet
from proxy.forwarder.lifetime.reauthentication import MAX_AGE_REACHED, SESSION_EXPIRED, SHUTTING_DOWN
from proxy.forwarder.relay import engine, manager
from proxy.forwarder.relay.closing import CLOSE_S_MAX, DUE_MIN, SPREAD_SHARE, CloseSchedule
from proxy.runtime.loop.deadlines import Deadlines
from proxy.runtime.shared.relay_table import CLOSING, TO_CLIENT, framed_row

WAYS = ["killed", "handed over"]
LONG_AGO_MS = 1


# ---- the schedule alone


@dataclass(eq=False)
class FakeRelay:
    on_close: Callable[[FakeRelay, CloseReason], None]
    on_abort: Callable[[FakeRelay], None]
    record: StoredRelay
    close_reason: CloseReason = CloseReason.NOT_CLOSING
    is_over: bool = False

    def close(self, why: CloseReason) -> None:
        self.on_close(self, why)

    def close_when_quiet(self) -> None:
        """Do nothing: ``close`` does not ask for it."""

    def abort(self) -> None:
        self.on_abort(self)


class Schedule:
    """A forwarder's close schedule, in the test's time."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.left: list[tuple[float, FakeRelay, CloseReason]] = []
        self.dropped: list[tuple[float, FakeRelay]] = []
        self.closes = CloseSchedule(lambda: self.now)

    def relay(self, leave_at_ms: int = 0, *, is_over: bool = False) -> FakeRelay:
        return FakeRelay(self._leave, self._drop, StoredRelay(leave_at_ms=leave_at_ms), is_over=is_over)

    def _leave(self, relay: FakeRelay, why: CloseReason) -> None:
        self.left.append((self.now, relay, why))

    def _drop(self, relay: FakeRelay) -> None:
        self.dropped.append((self.now, relay))

    def pass_s(self, seconds: float, step_s: float = 0.01) -> None:
        for _ in range(round(seconds / step_s)):
            self.now += step_s
            self.closes.close_due_relays()


@pytest.mark.parametrize("count", [1, 10, 100, 1000])
def test_a_drain_ends_relays_evenly(count: int) -> None:
    """In a drain of 30 s at most 10 % in any second (of few, one at a time), none at once, the last in time to end."""
    schedule = Schedule()
    relays = [schedule.relay() for _ in range(count)]
    schedule.closes.spread_closes(relays, 30)
    schedule.pass_s(31)
    assert {id(relay) for _, relay, _ in schedule.left} == {id(relay) for relay in relays}
    assert {why for _, _, why in schedule.left} == {CloseReason.SHUT_DOWN}
    times = [at - 1000 for at, _, _ in schedule.left]
    assert max(times) <= 30 * SPREAD_SHARE + 0.02
    assert min(times) >= 30 * SPREAD_SHARE / count / 2
    for start in range(300):
        in_a_second = sum(start / 10 <= at < start / 10 + 1 for at in times)
        assert in_a_second <= max(1, 0.1 * count)


def test_relays_that_stay_after_a_hand_over_are_ended_evenly_in_its_second_half() -> None:
    schedule = Schedule()
    schedule.closes.spread_closes([schedule.relay() for _ in range(100)], 60, after_s=30)
    schedule.pass_s(61)
    times = [at - 1000 for at, _, _ in schedule.left]
    assert len(times) == 100
    assert min(times) >= 30
    assert max(times) <= 30 + 30 * SPREAD_SHARE + 0.02
    for start in range(30, 60):
        assert sum(start <= at < start + 1 for at in times) <= 10


def test_several_forwarders_together_are_as_even_as_one() -> None:
    schedules = [Schedule() for _ in range(4)]
    for schedule in schedules:
        schedule.closes.spread_closes([schedule.relay() for _ in range(50)], 30)
        schedule.pass_s(31)
    seconds = Counter(int(at) for schedule in schedules for at, _, _ in schedule.left)
    assert max(seconds.values()) <= 20


def test_the_order_is_not_that_of_age() -> None:
    schedule = Schedule()
    relays = [schedule.relay() for _ in range(100)]
    schedule.closes.spread_closes(relays, 30)
    schedule.pass_s(31)
    assert [relay for _, relay, _ in schedule.left] != relays


def test_a_relay_that_starts_during_a_drain_is_closed_within_it() -> None:
    schedule = Schedule()
    schedule.closes.spread_closes([], 30)
    schedule.pass_s(10)
    late = schedule.relay()
    schedule.closes.add_relay(late)
    schedule.pass_s(20)
    [(at, relay, why)] = schedule.left
    assert (relay, why) == (late, CloseReason.SHUT_DOWN)
    assert at - 1000 <= 30 * SPREAD_SHARE + 0.02


def test_without_time_all_are_ended_at_once() -> None:
    schedule = Schedule()
    schedule.closes.spread_closes([schedule.relay(), schedule.relay()], 0)
    schedule.closes.close_due_relays()
    assert len(schedule.left) == 2


def test_a_relay_that_does_not_end_in_time_is_dropped_and_an_ended_one_is_left_alone() -> None:
    schedule = Schedule()
    stuck, ends, gone = schedule.relay(), schedule.relay(), schedule.relay(is_over=True)
    schedule.closes.spread_closes([stuck, ends, gone], 0)
    schedule.closes.close_due_relays()
    ends.is_over = True
    schedule.pass_s(CLOSE_S_MAX + 1)
    assert [relay for _, relay in schedule.dropped] == [stuck]
    assert schedule.dropped[0][0] == pytest.approx(1000 + CLOSE_S_MAX, abs=0.1)
    assert gone not in [relay for _, relay, _ in schedule.left]


def test_a_maximum_age() -> None:
    schedule = Schedule()
    old = schedule.relay(leave_at_ms=1_005_000)
    for relay in (old, schedule.relay()):
        schedule.closes.add_relay(relay)
    schedule.pass_s(100)
    [(at, relay, why)] = schedule.left
    assert (relay, why) == (old, CloseReason.MAX_AGE)
    assert at == pytest.approx(1005, abs=0.1)


def test_a_relay_closed_at_its_maximum_age_is_not_closed_again_by_a_drain() -> None:
    schedule = Schedule()
    old = schedule.relay(leave_at_ms=LONG_AGO_MS)
    schedule.closes.add_relay(old)
    schedule.closes.close_due_relays()
    schedule.closes.spread_closes([old], 5)
    schedule.pass_s(6)
    assert [why for _, _, why in schedule.left] == [CloseReason.MAX_AGE]


def test_a_relay_that_fails_to_close_is_dropped_and_the_others_are_closed() -> None:
    schedule = Schedule()
    bad, good = (schedule.relay(leave_at_ms=LONG_AGO_MS) for _ in range(2))

    def fails(*_: object) -> None:
        raise AttributeError("line")

    bad.on_close = fails
    for relay in (bad, good):
        schedule.closes.add_relay(relay)
    with structlog.testing.capture_logs() as logs:
        schedule.closes.close_due_relays()
    assert [relay for _, relay, _ in schedule.left] == [good]
    assert [relay for _, relay in schedule.dropped] == [bad]
    assert [entry["event"] for entry in logs if "exc_info" in entry] == ["closing a relay raised an unexpected error"]


def test_relays_that_have_ended_are_forgotten() -> None:
    schedule = Schedule()
    for _ in range(3 * DUE_MIN):
        schedule.closes.add_relay(schedule.relay(leave_at_ms=2_000_000, is_over=True))
    assert len(schedule.closes._due) <= DUE_MIN + 1


async def test_the_schedule_wakes_up_for_the_earliest_close(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    ended: list[tuple[float, CloseReason]] = []
    schedule = CloseSchedule(trio.current_time)

    def close(_relay: FakeRelay, why: CloseReason) -> None:
        ended.append((trio.current_time(), why))

    def relay(leave_at_ms: int) -> FakeRelay:
        return FakeRelay(close, lambda _relay: None, StoredRelay(leave_at_ms=leave_at_ms))

    nursery.start_soon(schedule.run)
    schedule.add_relay(relay(500_000))
    await trio.sleep(1)
    schedule.add_relay(relay(7_000))
    await trio.sleep(10)
    assert ended == [(pytest.approx(7), CloseReason.MAX_AGE)]
    nursery.cancel_scope.cancel()


# ---- how old a connection may become


def leave_at(age_ms: int, fraction: float, monkeypatch: pytest.MonkeyPatch, *, accepted_s_ago: float = 0.0) -> int:
    monkeypatch.setattr(age, "fraction", lambda: fraction)
    accepted_at = trio.current_time() - accepted_s_ago
    limits = Limits(max_connection_age_ms=age_ms)
    return ConnectionAge(Deadlines(), limits, accepted_at, lambda: None).leave_at_ms(5_000.0)


async def test_the_age_counts_from_accept_and_differs_by_connection(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    assert leave_at(100_000, 0.0, monkeypatch) == 5_090_000
    assert leave_at(100_000, 0.5, monkeypatch) == 5_100_000
    assert leave_at(100_000, 1.0, monkeypatch) == 5_110_000
    assert leave_at(100_000, 0.5, monkeypatch, accepted_s_ago=3.0) == 5_097_000


async def test_no_maximum_age(monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock) -> None:
    assert leave_at(0, 0.5, monkeypatch) == 0


# ---- relays in the kernel


@pytest.fixture(autouse=True)
def soon_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reauthentication, "QUIET_S", 0.01)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> trio.Event:
    """A broker that a relay waits for is silent when the test says so."""
    event = trio.Event()

    async def until_quiet(_position: object, **_bounds: float) -> None:
        await event.wait()

    for module in (engine, reauthentication):
        monkeypatch.setattr(module, "until_quiet", until_quiet)
    return event


def age_of(lane_about: StoredRelay) -> StoredRelay:
    """It reaches its age 50 s after Now begins."""
    lane_about.leave_at_ms = 1_050_000
    return lane_about


async def with_age(place: Place, lane: Lane, now: Now) -> Forwarder:
    """A relay that never expires but has a maximum age."""
    forwarder = await place.forwarder()
    await forwarder.begin(
        lane, about=age_of(about_relay()), session=session(now, FakeReauthenticator(), clock=None, challenge=b"")
    )
    await trio.testing.wait_all_tasks_blocked()
    return forwarder


def reach_age(forwarder: Forwarder, now: Now) -> None:
    now.s += 60
    forwarder.relays.close_schedule.close_due_relays()


@pytest.mark.conforms("pip-1.15")
@pytest.mark.parametrize("cut", [0, 9, 30])
async def test_a_relay_of_its_age_ends_at_frames_boundaries(place: Place, lane: Lane, now: Now, cut: int) -> None:
    """What has begun is finished, what begins afterwards does not pass, receipts come, and the client is told."""
    forwarder = await with_age(place, lane, now)
    there, back = send_frame(b"t" * 40), message_frame(b"b" * 40)
    await lane.client.send_all(there + there[:cut])
    await lane.broker.send_all(back[:20])
    assert await read(lane.client, 20) == back[:20]
    assert await read(lane.broker, len(there)) == there
    await trio.testing.wait_all_tasks_blocked(0.01)
    reach_age(forwarder, now)
    await lane.client.send_all((there[cut:] if cut else b"") + send_frame(b"too late"))
    await lane.broker.send_all(back[20:])
    rest = await read_all(lane.client)
    assert rest[: len(back[20:])] == back[20:]
    error = error_in(rest[len(back[20:]) :]).error
    assert (error.message, error.error) == (MAX_AGE_REACHED, ServerError.ServiceNotReady)
    assert await read_all(lane.broker) == (there if cut >= HEAD_BYTES else b""), "less is held: it has not begun"
    await until(lambda: forwarder.ended)


async def test_a_close_at_the_maximum_age_is_logged_at_debug_with_its_reason(
    place: Place, lane: Lane, now: Now
) -> None:
    forwarder = await with_age(place, lane, now)
    with structlog.testing.capture_logs() as logs:
        reach_age(forwarder, now)
    assert [(entry["log_level"], entry["reason"]) for entry in logs] == [("debug", "max_age")]
    await read_all(lane.client)


async def test_before_its_age_nothing_happens(place: Place, lane: Lane, now: Now) -> None:
    forwarder = await with_age(place, lane, now)
    now.s += 40
    forwarder.relays.close_schedule.close_due_relays()
    await lane.client.send_all(send_frame(b"x"))
    assert await read(lane.broker, len(send_frame(b"x"))) == send_frame(b"x")


@pytest.mark.parametrize("way", WAYS)
async def test_the_age_goes_on_in_a_successor(place: Place, lane: Lane, now: Now, way: str) -> None:
    await with_age(place, lane, now)
    second = await successor(place, way)
    now.s += 40
    second.relays.close_schedule.close_due_relays()
    await lane.client.send_all(send_frame(b"x"))
    assert await read(lane.broker, len(send_frame(b"x"))) == send_frame(b"x")
    reach_age(second, now)
    assert error_in(await read_all(lane.client)).error.message == MAX_AGE_REACHED
    await until(lambda: second.ended)


@pytest.mark.parametrize("way", WAYS)
async def test_an_end_that_has_begun_goes_on_in_a_successor(place: Place, lane: Lane, now: Now, way: str) -> None:
    forwarder = await with_age(place, lane, now)
    there = send_frame(b"t" * 40)
    await lane.client.send_all(there[:30])
    await read(lane.broker, 30)
    forwarder.relays.close_schedule.close_due_relays()
    now.s += 60
    forwarder.relays.close_schedule.close_due_relays()
    second = await successor(place, way)
    await lane.client.send_all(there[30:] + send_frame(b"too late"))
    assert error_in(await read_all(lane.client)).error.message == MAX_AGE_REACHED
    assert await read_all(lane.broker) == there[30:]
    await until(lambda: second.ended)


@pytest.mark.parametrize("way", WAYS)
async def test_an_end_for_a_reason_of_a_later_version_goes_on(place: Place, lane: Lane, now: Now, way: str) -> None:
    forwarder = await with_age(place, lane, now)
    [followed] = forwarder.relays.expiring_sessions()
    forwarder.relays._ledger.table.cells[framed_row(followed.relay_record.id, TO_CLIENT) + CLOSING] = 99
    second = await successor(place, way)
    assert error_in(await read_all(lane.client)).error.message == SESSION_EXPIRED
    await until(lambda: second.ended)


async def test_a_client_that_stays_in_the_middle_of_a_frame_has_its_time(place: Place, lane: Lane, now: Now) -> None:
    """Security: a byte now and then does not hold it up."""
    forwarder = await with_age(place, lane, now)
    there = send_frame(b"t" * 4000)
    await lane.client.send_all(there[:30])
    await read(lane.broker, 30)
    reach_age(forwarder, now)
    for at in range(30, 35):
        await lane.client.send_all(there[at : at + 1])
        assert await read(lane.broker, 1) == there[at : at + 1]
        assert not forwarder.ended
    now.s += CLOSE_S_MAX
    forwarder.relays.close_schedule.close_due_relays()
    await until(lambda: forwarder.ended)
    assert await read_all(lane.broker) == b""


async def blind(place: Place, lane: Lane) -> Forwarder:
    forwarder = await place.forwarder()
    await forwarder.begin(lane)
    await trio.testing.wait_all_tasks_blocked()
    return forwarder


async def test_a_blind_relay_ends_when_the_broker_has_answered(place: Place, lane: Lane, quiet: trio.Event) -> None:
    forwarder = await blind(place, lane)
    await lane.client.send_all(b"a request")
    assert await read(lane.broker, 9) == b"a request"
    forwarder.relays.spread_closes(0)
    forwarder.relays.close_schedule.close_due_relays()
    await lane.client.send_all(b"too late")
    await lane.broker.send_all(b"the answer")
    assert await read(lane.client, 10) == b"the answer"
    assert not forwarder.ended
    quiet.set()
    assert await read_all(lane.client) == b""
    assert await read_all(lane.broker) == b""
    await until(lambda: forwarder.ended)


async def test_a_blind_relay_whose_client_does_not_read_ends_all_the_same(place: Place, narrow_lane: Lane) -> None:
    forwarder = await blind(place, narrow_lane)
    await fill(narrow_lane.broker)
    forwarder.relays.spread_closes(0)
    forwarder.relays.close_schedule.close_due_relays()
    await until(lambda: forwarder.ended)


async def test_a_blind_relay_handed_over_while_it_is_being_ended_is_the_successors(
    place: Place, lane: Lane, quiet: trio.Event
) -> None:
    """Nothing of it is touched any more: its descriptors' numbers may be others' by then."""
    forwarder = await blind(place, lane)
    forwarder.relays.spread_closes(0)
    forwarder.relays.close_schedule.close_due_relays()
    second = await successor(place, "handed over")
    quiet.set()
    await trio.testing.wait_all_tasks_blocked(0.01)
    await lane.client.send_all(b"goes on")
    assert await read(lane.broker, 7) == b"goes on"
    second.relays.spread_closes(0)
    second.relays.close_schedule.close_due_relays()
    assert await read_all(lane.client) == b""
    await until(lambda: second.ended)


async def test_why_a_relay_has_ended_is_known_to_who_is_told(place: Place, now: Now) -> None:
    forwarder = await place.forwarder()
    causes: list[DisconnectCause] = []
    forwarder.relays._ledger._on_end = lambda _about, why, *_bytes: causes.append(why)
    for end in (lambda: reach_age(forwarder, now), lambda: None):
        async with open_lane() as lane:
            await forwarder.begin(
                lane,
                about=age_of(about_relay()),
                session=session(now, FakeReauthenticator(), clock=None, challenge=b""),
            )
            end()
            await lane.client.send_eof()
            await lane.broker.send_eof()
            await until(lambda: len(causes) == 1 or forwarder.relays.in_flight.count == 0)
        now.s = 1000.0
    assert causes == [DisconnectCause.MAX_AGE, DisconnectCause.RELAY_ENDED], "also where a number is used again"


@pytest.mark.parametrize("framed", [False, True])
async def test_a_relay_that_gives_way_ends_at_once(place: Place, lane: Lane, now: Now, *, framed: bool) -> None:
    forwarder = await place.forwarder()
    causes: list[DisconnectCause] = []
    forwarder.relays._ledger._on_end = lambda _about, why, *_bytes: causes.append(why)
    terms = session(now, FakeReauthenticator(), clock=None, challenge=b"")
    await forwarder.begin(lane, about=age_of(about_relay()) if framed else about_relay(), session=terms)
    [relay] = forwarder.relays._engine.relays
    assert (relay.session is not None) is framed
    relay.evict()
    assert causes == [DisconnectCause.OVER_SHARE]
    assert await read_all(lane.client) == await read_all(lane.broker) == b""


@pytest.mark.parametrize("framed", [False, True])
@pytest.mark.parametrize("listed_before", [False, True])
async def test_a_relay_of_a_denied_credential_ends_at_once(
    place: Place, lane: Lane, now: Now, *, framed: bool, listed_before: bool
) -> None:
    """Security: one that starts with the credential, and one that lives when the list comes to name it."""
    forwarder = await place.forwarder()
    causes: list[DisconnectCause] = []
    forwarder.relays._ledger._on_end = lambda _about, why, *_bytes: causes.append(why)
    denied = parse_deny_list(b"token-id 7", "file")
    if listed_before:
        forwarder.relays.deny_credentials(denied)
    about = age_of(about_relay()) if framed else about_relay()
    about.credentials.append(credential_digest("token-id", "7"))
    terms = session(now, FakeReauthenticator(), clock=None, challenge=b"")
    await forwarder.begin(lane, about=about, session=terms)
    if not listed_before:
        forwarder.relays.deny_credentials(parse_deny_list(b"token-id 8", "file"))
    assert bool(causes) is listed_before, "another's entry ends nothing"
    forwarder.relays.deny_credentials(denied)
    assert causes == [DisconnectCause.DENIED]
    assert await read_all(lane.client) == await read_all(lane.broker) == b""


async def test_a_relay_without_an_age_stays_blind(place: Place, lane: Lane, now: Now) -> None:
    forwarder = await place.forwarder()
    await forwarder.begin(lane, session=session(now, FakeReauthenticator(), clock=None, challenge=b""))
    assert forwarder.relays.expiring_sessions() == []


async def test_a_broker_is_silent_when_it_has_said_nothing_for_a_moment(
    autojump_clock: trio.testing.MockClock,
) -> None:
    said_until_s = 0.35
    await until_quiet(lambda: min(trio.current_time(), said_until_s))
    assert said_until_s < trio.current_time() <= said_until_s + 2 * QUIET_S


async def test_a_broker_that_goes_on_is_waited_for_no_longer_than_a_second(
    autojump_clock: trio.testing.MockClock,
) -> None:
    await until_quiet(trio.current_time)
    assert trio.current_time() == pytest.approx(QUIET_S_MAX, abs=2 * QUIET_S)


# ---- relays that are not spliced


@pytest.fixture
def not_spliced(copied: CopiedRelays, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(manager, "LINGER_S", 0.01)
    now = Now()
    ended: list[StoredRelay] = []
    relays = copied.new(ended.append, now=now)

    async def begun(
        *, with_age: bool, first: bytes = b"", at_once: Callable[[], None] = lambda: None
    ) -> tuple[Any, Any]:
        far_ends = await copied.begin(
            relays,
            age_of(about_relay()) if with_age else about_relay(),
            first_to_broker=first,
            session=session(now, FakeReauthenticator(), clock=None, challenge=b"") if with_age else None,
        )
        at_once()
        await trio.testing.wait_all_tasks_blocked()
        return far_ends

    begun.relays, begun.now, begun.ended = relays, now, ended  # type: ignore[attr-defined]
    return begun


async def test_behind_tls_a_relay_of_its_age_ends_at_frames_boundaries(not_spliced: Any) -> None:
    client, broker = await not_spliced(with_age=True)
    there, back = send_frame(b"t" * 40), message_frame(b"b" * 40)
    await client.send_all(there + there[:20])
    await broker.send_all(back[:20])
    await read(client, 20)
    await trio.testing.wait_all_tasks_blocked()
    not_spliced.now.s += 60
    not_spliced.relays.close_schedule.close_due_relays()
    await client.send_all(there[20:] + send_frame(b"too late"))
    await broker.send_all(back[20:])
    rest = await read_all(client)
    assert rest[: len(back) - 20] == back[20:]
    assert error_in(rest[len(back) - 20 :]).error.message == MAX_AGE_REACHED
    assert await read_all(broker) == there + there


@pytest.mark.parametrize("first", [b"", send_frame(b"first")])
async def test_behind_tls_a_relay_that_is_due_at_once_ends(not_spliced: Any, first: bytes) -> None:
    """Before its task has run its first step: the client was slow to connect, or the drain is nearly over."""
    not_spliced.now.s += 60
    end = not_spliced.relays.close_schedule.close_due_relays
    with structlog.testing.capture_logs() as logs:
        client, broker = await not_spliced(with_age=True, first=first, at_once=end)
        assert error_in(await read_all(client)).error.message == MAX_AGE_REACHED
    assert await read_all(broker) in {b"", first}
    assert "error" not in {entry["log_level"] for entry in logs}
    await client.aclose()
    await until(lambda: not_spliced.ended)


async def test_behind_tls_a_blind_relay_that_is_due_at_once_ends(not_spliced: Any) -> None:
    not_spliced.relays.spread_closes(0)
    client, broker = await not_spliced(with_age=False, at_once=not_spliced.relays.close_schedule.close_due_relays)
    assert await read_all(client) == b""
    assert await read_all(broker) == b""


async def test_behind_tls_one_that_is_dropped_at_once_ends(not_spliced: Any) -> None:
    def drop() -> None:
        for relay in not_spliced.relays._engine.relays:
            relay.abort()

    for with_age in (True, False):
        client, broker = await not_spliced(with_age=with_age, at_once=drop)
        assert await read_all(client) == b""
        assert await read_all(broker) == b""


@pytest.mark.parametrize("with_age", [False, True])
async def test_behind_tls_one_that_gives_way_ends_at_once(not_spliced: Any, *, with_age: bool) -> None:
    causes: list[DisconnectCause] = []
    not_spliced.relays._ledger._on_end = lambda _about, why, *_bytes: causes.append(why)
    client, broker = await not_spliced(with_age=with_age)
    not_spliced.relays._engine.relays[0].evict()
    assert await read_all(client) == await read_all(broker) == b""
    await until(lambda: causes)
    assert causes == [DisconnectCause.OVER_SHARE]


async def test_behind_tls_a_blind_relay_ends_when_the_broker_has_answered(not_spliced: Any, quiet: trio.Event) -> None:
    client, broker = await not_spliced(with_age=False)
    await client.send_all(b"a request")
    assert await read(broker, 9) == b"a request"
    not_spliced.relays.spread_closes(0)
    not_spliced.relays.close_schedule.close_due_relays()
    await trio.testing.wait_all_tasks_blocked(0.001)
    await client.send_all(b"too late")
    await broker.send_all(b"the answer")
    assert await read(client, 10) == b"the answer"
    quiet.set()
    assert await read_all(client) == b""
    assert await read_all(broker) == b""


@pytest.mark.usefixtures("quiet")
async def test_behind_tls_one_that_does_not_end_is_dropped(not_spliced: Any) -> None:
    client, broker = await not_spliced(with_age=True)
    await client.send_all(send_frame(b"t" * 4000)[:30])
    await read(broker, 30)
    not_spliced.now.s += 60
    not_spliced.relays.close_schedule.close_due_relays()
    await trio.testing.wait_all_tasks_blocked(0.001)
    assert not not_spliced.relays._engine.relays[0].is_over
    not_spliced.now.s += CLOSE_S_MAX
    not_spliced.relays.close_schedule.close_due_relays()
    await read_all(broker)
    await client.aclose()
    await until(lambda: not_spliced.ended)


async def test_a_drain_tells_clients_where_frames_are_followed(not_spliced: Any) -> None:
    client, _broker = await not_spliced(with_age=True)
    not_spliced.relays.spread_closes(0)
    not_spliced.relays.close_schedule.close_due_relays()
    assert error_in(await read_all(client)).error.message == SHUTTING_DOWN
