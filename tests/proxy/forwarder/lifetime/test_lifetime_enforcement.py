"""proxy.forwarder.lifetime.enforcement: sessions whose ends are only observed, in both kinds of relay and in
lookup mode."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from adoption_fakes import WAYS, successor
from forwarder_fakes import ALICE, lookup, make_config
from forwarder_fakes import denied as auth_worker_denies
from framed_fakes import (
    ANSWER_BYTES_MAX,
    CHALLENGE,
    FakeReauthenticator,
    Now,
    answer,
    denied,
    error_in,
    identity,
    message_frame,
    producer_frame,
    send_frame,
    session,
)
from lifetime_fakes import EXPIRED, Begin, answer_again, token
from prometheus_client import CollectorRegistry
from relay_fakes import CopiedRelays, Lane, Place, read, read_all

from proto.connect_rules import AUTHENTICATION_FAILED
from proto.rpc_pb2 import Principal
from proxy.config.types import Config
from proxy.forwarder.lifetime import reauthentication
from proxy.forwarder.lifetime.closing import CloseReason
from proxy.forwarder.lifetime.enforcement import UNKNOWN_LISTENER, Enforcement
from proxy.forwarder.lifetime.metrics import ReauthenticationMetrics
from proxy.forwarder.lifetime.reauthentication import MAX_AGE_REACHED, SESSION_EXPIRED
from proxy.forwarder.lifetime.session_factory import SessionOptions
from proxy.forwarder.relay.manager import RelayManager
from proxy.forwarder.workers.authentication import Challenge
from proxy.runtime.observability.windowed_maximum import WINDOW_S
from proxy.runtime.rpc.errors import RpcConnectionLost

BIND = "127.0.0.1:6650"
OBSERVED = "a client's session would have been closed"
FAILED = "a client has failed to authenticate itself again"
SEND, MESSAGE = send_frame(b"to the broker"), message_frame(b"to the client")


def observing(**tables: Any) -> Config:
    """A configuration whose only listener's ends are observed."""
    return make_config(session={"enforcement": "observe"}, listener=[{"bind": BIND}], **tables)


ENFORCING = make_config(listener=[{"bind": BIND}])


@dataclass
class Stage:
    """A relay whose session ends after 100 s, and its far ends."""

    relays: RelayManager
    metrics: ReauthenticationMetrics
    now: Now
    reauthenticator: FakeReauthenticator
    client: Any
    broker: Any

    async def must_pass(self, frame: bytes = SEND, times: int = 1) -> None:
        """What the client sends reaches the broker."""
        await self.client.send_all(frame * times)
        assert await read(self.broker, len(frame) * times) == frame * times

    async def must_come(self, frame: bytes = MESSAGE) -> None:
        """What the broker sends reaches the client, and nothing stands before it."""
        await self.broker.send_all(frame)
        assert await read(self.client, len(frame)) == frame

    async def must_end(self, text: str) -> None:
        with trio.fail_after(60):
            assert error_in(await read_all(self.client)).error.message == text

    def asked(self) -> None:
        self.relays.reauthentication.send_due_challenges()

    async def settle(self) -> None:
        await trio.testing.wait_all_tasks_blocked(0.01)

    @property
    def observed(self) -> dict[str, float]:
        """How many lives were counted, by reason."""
        samples = self.metrics.expired_observed.collect()[0].samples
        return {
            one.labels["reason"]: one.value
            for one in samples
            if one.name.endswith("_total") and (one.labels["listener"], one.labels["method"]) == _WHERE
        }

    @property
    def counted(self) -> tuple[float, float, float]:
        """Successes, failures, and connections killed."""
        metrics = self.metrics
        by_method = (metric.labels(method="token")._value.get() for metric in (metrics.success, metrics.failure))
        return (*by_method, metrics.expired_killed._value.get())  # type: ignore[return-value]


_WHERE = (BIND, "token")


@pytest.fixture(params=["in the kernel", "in user space"])
async def begin(
    request: pytest.FixtureRequest,
    place: Place,
    lane: Lane,
    copied: CopiedRelays,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Any]:
    monkeypatch.setattr(reauthentication, "QUIET_S", 0.01)
    now, reauthenticator = Now(), FakeReauthenticator()
    place.now = now
    place.recall = reauthenticator.recall

    async def begun(first: bytes = b"", config: Config | None = None, late_s: float = 0, **fields: Any) -> Stage:
        known = session(now, reauthenticator, **{"listener": BIND, **fields})
        now.s += late_s
        enforcement = Enforcement(config or observing())
        if request.param == "in the kernel":
            forwarder = await place.forwarder()
            forwarder.relays.enforcement.configure(config or observing())
            if first:
                await lane.client.send_all(first)
                await lane.our_client.receive_some(len(first))
            await forwarder.begin(lane, to_broker=first, session=known)
            stage = Stage(forwarder.relays, forwarder.metrics, now, reauthenticator, lane.client, lane.broker)
        else:
            metrics = ReauthenticationMetrics(None, now)
            relays = copied.new(now=now, sessions=SessionOptions(enforcement=enforcement, metrics=metrics))
            client, broker = await copied.begin(relays, first_to_broker=first, session=known)
            stage = Stage(relays, metrics, now, reauthenticator, client, broker)
        stage.relays.reauthentication.fraction = lambda: 0.0
        await trio.testing.wait_all_tasks_blocked()
        return stage

    return begun


# ---- which listeners


def test_a_listener_says_it_before_the_session_table() -> None:
    modes: list[dict[str, str]] = [{}, {"session_enforcement": "observe"}, {"session_enforcement": "enforce"}]
    listeners = [{"bind": f"127.0.0.1:{port}"} | mode for port, mode in enumerate(modes, 1)]
    enforced, observed = (
        Enforcement(make_config(session={"enforcement": one}, listener=listeners)) for one in ("enforce", "observe")
    )
    assert [enforced.observes_ends(f"127.0.0.1:{port}") for port in (1, 2, 3)] == [False, True, False]
    assert [observed.observes_ends(f"127.0.0.1:{port}") for port in (1, 2, 3)] == [True, True, False]


def test_of_a_listener_that_is_not_known_ends_are_enforced() -> None:
    """Sessions from before the listener was kept, or of one that the configuration has no more."""
    enforcement = Enforcement(observing())
    assert not enforcement.observes_ends("")
    assert not enforcement.observes_ends("127.0.0.1:6651")
    assert not Enforcement().observes_ends(BIND)
    assert [enforcement.listener_name(one) for one in (BIND, "127.0.0.1:6651", "")] == [
        BIND,
        UNKNOWN_LISTENER,
        UNKNOWN_LISTENER,
    ]


def test_a_listener_is_the_same_one_with_another_number() -> None:
    """As after an upgrade that puts another one before it."""
    public, internal = {"bind": BIND}, {"bind": "127.0.0.1:6655", "session_enforcement": "observe"}
    for listeners in ([public, internal], [internal, public]):
        enforcement = Enforcement(make_config(listener=listeners))
        assert (enforcement.observes_ends(BIND), enforcement.observes_ends("127.0.0.1:6655")) == (False, True)


@pytest.mark.parametrize("number", [0, 1])
def test_where_one_of_two_of_a_name_enforces_ends_are_enforced(number: int) -> None:
    listeners = [{"bind": "127.0.0.1:0", "session_enforcement": "observe"} for _ in range(2)]
    assert Enforcement(make_config(listener=listeners)).observes_ends("127.0.0.1:0")
    listeners[number]["session_enforcement"] = "enforce"
    assert not Enforcement(make_config(listener=listeners)).observes_ends("127.0.0.1:0")


# ---- within a relay


@pytest.mark.conforms("kip-368.20")
async def test_used_past_its_end_it_goes_on_and_is_counted_once(begin: Any) -> None:
    stage = await begin(challenge=b"")
    stage.now.s += 99
    await stage.must_pass()
    assert stage.observed == {}
    stage.now.s += 2
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            await stage.must_pass(times=5)
            await stage.must_come()
        stage.now.s += 1000
        await stage.must_pass()
        await stage.must_come()
    assert stage.observed == {"expired": 1}
    assert stage.counted == (0, 0, 0)
    (entry,) = (entry for entry in logs if OBSERVED in entry["event"])
    assert (entry["reason"], entry["principal"], entry["listener"], entry["method"]) == ("expired", "alice", *_WHERE)


async def test_an_observed_session_served_past_its_grace_goes_on_and_is_counted_once(begin: Any) -> None:
    stage = await begin(challenge=b"", grace_ms=30_000)
    stage.now.s += 129
    await stage.must_come()
    assert stage.observed == {}
    stage.now.s += 2
    for _ in range(3):
        await stage.must_come()
    await stage.must_pass()
    assert stage.observed == {"still_served": 1}


async def test_a_new_life_is_counted_again(begin: Any) -> None:
    stage = await begin()
    stage.now.s += 101
    await stage.must_pass()
    await stage.client.send_all(answer())
    await stage.settle()
    assert stage.counted == (1, 0, 0)
    await stage.must_pass()
    assert stage.observed == {"expired": 1}
    stage.now.s += 101
    await stage.must_pass()
    assert stage.observed == {"expired": 2}


async def test_a_client_of_an_observed_session_is_challenged_and_renews_it(begin: Any) -> None:
    stage = await begin()
    stage.now.s += 90
    stage.asked()
    assert await read(stage.client, len(CHALLENGE)) == CHALLENGE
    await stage.client.send_all(answer())
    await stage.settle()
    stage.now.s += 20
    await stage.must_pass()
    assert stage.observed == {}
    assert stage.counted == (1, 0, 0)


async def _fail(stage: Stage, how: str) -> None:
    """Give an answer that ends a session where ends are enforced."""
    if how == "denied":
        stage.reauthenticator.verdict = denied
        await stage.client.send_all(answer(b"bad"))
    elif how == "another principal":
        stage.reauthenticator.verdict = lambda _data: identity(name="bob")
        await stage.client.send_all(answer())
    elif how == "another method":
        await stage.client.send_all(answer(method="basic"))
    elif how == "too large a challenge":
        stage.reauthenticator.verdict = lambda _data: Challenge(bytes(5000))
        await stage.client.send_all(answer())
    await stage.settle()


@pytest.mark.parametrize("how", ["denied", "another principal", "another method", "too large a challenge"])
async def test_a_failure_is_counted_once_and_the_client_is_asked_no_more(begin: Any, how: str) -> None:
    stage = await begin()
    stage.now.s += 90
    stage.asked()
    assert await read(stage.client, len(CHALLENGE)) == CHALLENGE
    with structlog.testing.capture_logs() as logs:
        for _ in range(5):
            await _fail(stage, how)
            await stage.must_pass()
            stage.now.s += 1.5
            stage.asked()
            await stage.must_come()
        stage.now.s += 1000
        await stage.must_pass()
        await stage.must_come()
    assert stage.observed == {"failed": 1}
    assert stage.counted == (0, 1, 0)
    assert [sum(text in entry["event"] for entry in logs) for text in (OBSERVED, FAILED)] == [1, 1]
    stage.reauthenticator.verdict = identity
    await stage.client.send_all(answer())
    await stage.settle()
    assert stage.counted == (1, 1, 0), "it may still come by itself"
    stage.now.s += 90
    stage.asked()
    assert await read(stage.client, len(CHALLENGE)) == CHALLENGE, "in its new life it is asked"


async def test_answers_that_follow_each_other_too_closely_are_not_verified(begin: Any) -> None:
    stage = await begin()
    stage.reauthenticator.verdict = denied
    stage.now.s += 5
    for _ in range(10):
        await stage.client.send_all(answer(b"bad"))
        await stage.must_pass()
    await stage.settle()
    assert stage.reauthenticator.given == [b"bad"]
    assert stage.observed == {"failed": 1}


async def test_a_second_answer_leaves_the_first_one_its_verdict(begin: Any) -> None:
    stage = await begin()
    stage.reauthenticator.gate = trio.Event()
    stage.now.s += 90
    await stage.client.send_all(answer(b"first"))
    await stage.settle()
    await stage.client.send_all(answer(b"second"))
    await stage.must_pass()
    stage.reauthenticator.gate.set()
    await stage.settle()
    assert stage.reauthenticator.given == [b"first"]
    assert stage.counted == (1, 1, 0)
    stage.now.s += 50
    await stage.must_pass()
    assert stage.observed == {"failed": 1}


async def test_nothing_waits_for_a_verdict(begin: Any) -> None:
    """Nor is it counted: it would have gone on after it."""
    stage = await begin()
    stage.reauthenticator.gate = trio.Event()
    stage.now.s += 150
    await stage.client.send_all(answer())
    await stage.must_pass(times=3)
    stage.reauthenticator.gate.set()
    await stage.settle()
    await stage.must_pass()
    assert stage.observed == {}
    assert stage.counted == (1, 0, 0)


async def test_a_limit_holds_all_the_same(begin: Any) -> None:
    stage = await begin()
    stage.now.s += 90
    await stage.client.send_all(answer(bytes(ANSWER_BYTES_MAX)))
    await stage.must_end(AUTHENTICATION_FAILED)
    assert stage.observed == {}


async def test_to_enforce_ends_those_that_were_observed(begin: Any) -> None:
    stage = await begin(challenge=b"")
    stage.now.s += 101
    await stage.must_pass()
    stage.relays.enforcement.configure(ENFORCING)
    await stage.client.send_all(SEND)
    await stage.must_end(SESSION_EXPIRED)
    assert stage.counted == (0, 0, 1)


async def test_to_enforce_ends_those_that_are_only_served(begin: Any) -> None:
    stage = await begin(challenge=b"", grace_ms=0)
    stage.now.s += 101
    await stage.must_come()
    stage.relays.enforcement.configure(ENFORCING)
    await stage.broker.send_all(MESSAGE)
    assert await read(stage.client, len(MESSAGE)) == MESSAGE
    await stage.must_end(SESSION_EXPIRED)


async def test_to_observe_spares_those_that_are_there(begin: Any) -> None:
    stage = await begin(config=ENFORCING, challenge=b"")
    stage.now.s += 101
    stage.relays.enforcement.configure(observing())
    await stage.must_pass()
    assert stage.observed == {"expired": 1}


async def test_a_frame_held_for_a_verdict_passes_despite_a_denial_once_ends_are_observed(begin: Any) -> None:
    stage = await begin(config=ENFORCING)
    stage.reauthenticator.gate = trio.Event()
    stage.reauthenticator.verdict = denied
    stage.now.s += 150
    await stage.client.send_all(answer() + SEND)
    await stage.settle()
    stage.relays.enforcement.configure(observing())
    stage.reauthenticator.gate.set()
    assert await read(stage.broker, len(SEND)) == SEND
    assert stage.observed == {"failed": 1}


@pytest.mark.parametrize("was_used", [True, False])
async def test_an_observed_one_can_leave(begin: Any, was_used: bool) -> None:
    """A client that goes on sending while it is seen off neither holds that up, nor is counted."""
    stage = await begin(challenge=b"")
    if was_used:
        stage.now.s += 101
        await stage.must_pass()
    (followed,) = stage.relays.expiring_sessions()
    await stage.client.send_all(SEND[:20])  # what ends is in the middle of a frame
    await stage.settle()
    stage.now.s += 101
    followed.control.start_closing(CloseReason.MAX_AGE)
    with trio.move_on_after(5):
        await stage.client.send_all(SEND[20:] + SEND * 100)
    await stage.must_end(MAX_AGE_REACHED)
    assert stage.observed == ({"expired": 1} if was_used else {})


async def test_without_a_listener_an_end_is_enforced(begin: Any) -> None:
    """A relay from before an upgrade."""
    stage = await begin(challenge=b"", listener="")
    stage.now.s += 101
    await stage.client.send_all(SEND)
    await stage.must_end(SESSION_EXPIRED)


async def test_first_frames_of_an_observed_session_that_ended_while_connecting_pass(begin: Any) -> None:
    stage = await begin(SEND, late_s=101, challenge=b"")
    assert await read(stage.broker, len(SEND)) == SEND
    await stage.must_pass()
    assert stage.observed == {"expired": 1}


# ---- who is not asked, since it has a producer


@pytest.mark.conforms("kip-368.27", "kip-368.28")
@pytest.mark.parametrize("first", [b"", producer_frame()])
async def test_a_producer_exempt_from_challenges_is_counted_once(begin: Any, first: bytes) -> None:
    stage = await begin(first, config=ENFORCING, exempts_producers=True)
    if not first:
        assert _spared(stage) == 0
        await stage.must_pass(producer_frame())
    else:
        assert await read(stage.broker, len(first)) == first
    await stage.must_pass(producer_frame(), times=3)
    assert _spared(stage) == 1


@pytest.mark.parametrize(
    "fields",
    [{"exempts_producers": False}, {"exempts_producers": True, "challenge": b""}],
    ids=["asked", "never asked"],
)
async def test_a_producer_without_an_exemption_from_challenges_is_not_counted(
    begin: Any, fields: dict[str, Any]
) -> None:
    stage = await begin(**fields)
    await stage.must_pass(producer_frame())
    stage.now.s += 101
    await stage.must_pass(producer_frame(), times=2)
    assert _spared(stage) == 0


def _spared(stage: Stage) -> float:
    samples = stage.metrics._no_reauth.collect()[0].samples
    wanted = {"method": "token", "reason": "has_producer"}
    return sum(one.value for one in samples if one.name.endswith("_total") and one.labels == wanted)


async def test_an_exempt_producer_is_counted_once_while_its_answer_is_verified(begin: Any) -> None:
    """Its session has ended, and each of its commands is inspected meanwhile."""
    stage = await begin(exempts_producers=True)
    stage.reauthenticator.gate = trio.Event()
    stage.now.s += 150
    await stage.client.send_all(answer())
    await stage.must_pass(producer_frame(), times=3)
    assert _spared(stage) == 1


# ---- how long it takes


@pytest.mark.conforms("kip-368.29")
async def test_the_longest_re_authentication_is_a_metric_for_some_minutes() -> None:
    now, registry = Now(), CollectorRegistry()
    metrics = ReauthenticationMetrics(registry, now)

    def longest() -> float | None:
        return registry.get_sample_value("pulsar_proxy_reauthentication_max_seconds")

    assert longest() == 0
    for took_s in (0.5, 7.25, 1.0):
        metrics.record_success("token", took_s)
        now.s += 1
    assert longest() == longest() == 7.25, "no scrape resets it"
    now.s += WINDOW_S + 30
    assert longest() == 0
    assert registry.get_sample_value("pulsar_proxy_reauthentication_seconds_count") == 3


# ---- a successor


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("was_counted", [True, False])
async def test_a_successor_counts_no_life_twice(
    place: Place, lane: Lane, monkeypatch: pytest.MonkeyPatch, way: str, was_counted: bool
) -> None:
    monkeypatch.setattr(reauthentication, "QUIET_S", 0.01)
    now, reauthenticator = Now(), FakeReauthenticator()
    place.now, place.recall = now, reauthenticator.recall
    first = await place.forwarder()
    first.relays.enforcement.configure(observing())
    await first.begin(lane, session=session(now, reauthenticator, listener=BIND, challenge=b"", exempts_producers=True))
    stage = Stage(first.relays, first.metrics, now, reauthenticator, lane.client, lane.broker)
    await stage.must_pass(producer_frame())
    now.s += 101
    if was_counted:
        await stage.must_pass()
    second = await successor(place, way)
    second.relays.enforcement.configure(observing())
    after = Stage(second.relays, second.metrics, now, reauthenticator, lane.client, lane.broker)
    await after.must_pass(times=3)
    assert (stage.observed, after.observed) == (({"expired": 1}, {}) if was_counted else ({}, {"expired": 1}))
    await after.client.send_all(answer())
    await after.settle()
    now.s += 101
    await after.must_pass()
    assert after.observed["expired"] == (1 if was_counted else 2)


async def test_a_successor_challenges_no_client_after_an_observed_failure(
    place: Place, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reauthentication, "QUIET_S", 0.01)
    now, reauthenticator = Now(), FakeReauthenticator(denied)
    place.now, place.recall = now, reauthenticator.recall
    first = await place.forwarder()
    first.relays.enforcement.configure(observing())
    await first.begin(lane, session=session(now, reauthenticator, listener=BIND))
    stage = Stage(first.relays, first.metrics, now, reauthenticator, lane.client, lane.broker)
    now.s += 90
    await stage.client.send_all(answer())
    await stage.settle()
    assert stage.observed == {"failed": 1}
    second = await successor(place, "killed")
    second.relays.enforcement.configure(observing())
    now.s += 5
    second.relays.reauthentication.send_due_challenges()
    await stage.must_come()


async def test_a_successor_that_enforces_ends_it(place: Place, lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reauthentication, "QUIET_S", 0.01)
    now, reauthenticator = Now(), FakeReauthenticator()
    place.now, place.recall = now, reauthenticator.recall
    first = await place.forwarder()
    first.relays.enforcement.configure(observing())
    await first.begin(lane, session=session(now, reauthenticator, listener=BIND, challenge=b""))
    stage = Stage(first.relays, first.metrics, now, reauthenticator, lane.client, lane.broker)
    now.s += 101
    await stage.must_pass()
    await successor(place, "killed")
    await stage.client.send_all(SEND)
    await stage.must_end(SESSION_EXPIRED)


# ---- in lookup mode

TABLES: dict[str, Any] = {"session": {"enforcement": "observe"}, "listener": [{"bind": "127.0.0.1:6650"}]}


def observed_in(it: Any, reason: str) -> float:
    labels = {"listener": _WHERE[0], "method": _WHERE[1], "reason": reason}
    return it.value("pulsar_proxy_expired_connections_observed_total", **labels) or 0


def observe(it: Any) -> Any:
    """Have a session's ends observed."""
    it.relays.enforcement.configure(it.workers.config)
    return it


async def test_in_lookup_mode_it_goes_on_and_is_counted_once(
    life: Begin,
    autojump_clock: trio.testing.MockClock,
) -> None:
    it = await observe(life(100, **TABLES)).enter(refresh=False)
    await it.at(99)
    await it.must_serve()
    assert observed_in(it, "expired") == 0
    await it.at(101)
    assert it.session.lifetime.has_expired
    for request_id in range(5):
        await it.must_serve(request_id)
    assert observed_in(it, "expired") == 1
    assert it.counted() == (0, 0, 0)
    assert not it.session.lifetime.has_expired, "its frames are not looked at one by one any more"
    it.relays.enforcement.configure(ENFORCING)
    await it.client.send(lookup())
    await it.must_be_over("session_expired", EXPIRED)


async def test_in_lookup_mode_no_client_becomes_another_principal(
    life: Begin,
    autojump_clock: trio.testing.MockClock,
) -> None:
    """An answer that is another's fails, and its lookups stay as they were, even where a later one is not verified."""
    bob = Principal(type="User", name="bob", method="token")
    verdicts = token(100, bob, b"sealed for bob"), not_verified, token(100, ALICE, b"new")
    it = await observe(life(100, *verdicts, **TABLES)).enter()
    await it.must_be_asked()
    await it.client.send(answer_again())
    await it.settle()
    await it.must_serve()
    assert it.session.identity.role == "alice"
    assert observed_in(it, "failed") == 1
    await it.at(90)
    await it.client.send(answer_again())
    await it.settle()
    await it.must_serve()
    assert it.session.identity.role == "alice"
    assert it.session.identity.sealed == b"sealed"
    await it.at(95)
    await it.client.send(answer_again())
    await it.settle()
    assert it.session.identity.sealed == b"new"
    assert it.counted() == (1, 1, 0)


async def not_verified() -> Any:
    """An auth worker that dies."""
    await trio.lowlevel.checkpoint()
    raise RpcConnectionLost("gone")


async def test_in_lookup_mode_a_failure_is_counted_once(
    life: Begin,
    autojump_clock: trio.testing.MockClock,
) -> None:
    it = await observe(life(100, *[auth_worker_denies("bad_token")] * 3, **TABLES)).enter()
    await it.must_be_asked()
    for _ in range(3):
        await it.client.send(answer_again())
        await it.settle()
        await it.must_serve()
        await trio.sleep(2)
    await it.at(500)
    await it.must_serve()  # and no challenge before it
    assert observed_in(it, "failed") == 1
    assert it.counted() == (0, 1, 0)


# ---- a frame that is not at its end when the session is

LARGE = 60_000
GRACE_MS = 30_000


async def half_of(source: Any, sink: Any, frame: bytes) -> None:
    """The frame has begun to pass."""
    await source.send_all(frame[: LARGE // 2])
    assert await read(sink, LARGE // 2) == frame[: LARGE // 2]


async def test_a_command_begun_in_time_is_cut_off_past_the_grace(begin: Any) -> None:
    """Until then it passes."""
    stage = await begin(config=ENFORCING, grace_ms=GRACE_MS)
    frame = send_frame(bytes(LARGE))
    await half_of(stage.client, stage.broker, frame)
    stage.now.s += 129.9
    await stage.client.send_all(frame[LARGE // 2 : -1000])
    assert await read(stage.broker, LARGE // 2 - 1000 + len(frame) - LARGE)
    assert stage.counted == (0, 0, 0)
    stage.now.s += 0.1
    await stage.client.send_all(frame[-1000:] + SEND)
    await stage.must_end(SESSION_EXPIRED)
    assert await read_all(stage.broker) == b"", "it ends in the middle of the frame"
    assert stage.counted == (0, 0, 1)


async def test_a_command_begun_in_time_and_ended_within_the_grace_passes(begin: Any) -> None:
    stage = await begin(config=ENFORCING, grace_ms=GRACE_MS)
    frame = send_frame(bytes(LARGE))
    await half_of(stage.client, stage.broker, frame)
    stage.now.s += 129.9
    await stage.client.send_all(frame[LARGE // 2 :])
    assert await read(stage.broker, len(frame) - LARGE // 2) == frame[LARGE // 2 :]
    assert stage.counted == (0, 0, 0)


async def test_a_relay_that_closes_already_is_cut_off_past_the_grace_too(begin: Any) -> None:
    """A frame's rest may pass after a close for another reason, but not for ever."""
    stage = await begin(config=ENFORCING, grace_ms=GRACE_MS)
    frame = send_frame(bytes(LARGE))
    await half_of(stage.client, stage.broker, frame)
    (followed,) = stage.relays.expiring_sessions()
    followed.control.start_closing(CloseReason.MAX_AGE)
    stage.now.s += 130
    await stage.client.send_all(frame[LARGE // 2 :])
    await stage.must_end(MAX_AGE_REACHED)
    assert await read_all(stage.broker) == b""


async def test_a_delivery_begun_in_time_is_cut_off_past_the_grace(begin: Any) -> None:
    """The client is told nothing: an error in the middle of a frame would be read as part of it."""
    stage = await begin(config=ENFORCING, grace_ms=GRACE_MS)
    frame = message_frame(bytes(LARGE))
    await half_of(stage.broker, stage.client, frame)
    stage.now.s += 130
    await stage.broker.send_all(frame[LARGE // 2 :])
    assert await read_all(stage.client) == b""
    assert await read_all(stage.broker) == b""
    assert stage.counted == (0, 0, 1)


async def test_where_ends_are_observed_a_frame_that_takes_too_long_is_counted_once(begin: Any) -> None:
    stage = await begin(grace_ms=GRACE_MS)
    frame = send_frame(bytes(LARGE))
    await half_of(stage.client, stage.broker, frame)
    stage.now.s += 130
    await stage.client.send_all(frame[LARGE // 2 : -1000])
    assert await read(stage.broker, LARGE // 2 - 1000 + len(frame) - LARGE)
    await stage.client.send_all(frame[-1000:])
    assert await read(stage.broker, 1000) == frame[-1000:]
    assert stage.observed == {"expired": 1}
    await stage.must_pass()
    assert stage.observed == {"expired": 1}
