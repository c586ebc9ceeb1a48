"""proxy.forwarder.lifetime.forwarded_answers, in both kinds of relay: the broker has the client's credentials,
too, and asks for fresh ones. The client is asked once for both, and only an accepted answer goes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import trio
import trio.testing
from adoption_fakes import WAYS, successor
from forwarder_fakes import make_config
from framed_fakes import (
    ANSWER_BYTES_MAX,
    BROKER_ASKS,
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
from relay_fakes import CopiedRelays, Lane, Place, expect, read, read_all, until

from proto.connect_rules import AUTHENTICATION_FAILED
from proxy.forwarder.lifetime import reauthentication
from proxy.forwarder.lifetime.enforcement import Enforcement
from proxy.forwarder.lifetime.forwarded_answers import ForwardedAnswers
from proxy.forwarder.lifetime.metrics import ReauthenticationMetrics
from proxy.forwarder.lifetime.reauthentication import SESSION_EXPIRED
from proxy.forwarder.lifetime.session import BROKER_ANSWER_BYTES_MAX, INJECTION_BYTES_MAX
from proxy.forwarder.lifetime.session_factory import SessionOptions
from proxy.forwarder.relay.manager import RelayManager
from proxy.runtime.rpc.errors import RpcConnectionLost

BIND = "127.0.0.1:6650"
SEND, MESSAGE = send_frame(b"to the broker"), message_frame(b"to the client")


@dataclass
class Stage:
    """A relay whose session ends after 100 s, and its far ends."""

    relays: RelayManager
    metrics: ReauthenticationMetrics
    now: Now
    reauthenticator: FakeReauthenticator
    client: Any
    broker: Any

    async def broker_asks(self) -> None:
        """Its challenge does not reach the client."""
        await self.broker.send_all(MESSAGE + BROKER_ASKS)
        await expect(self.client, MESSAGE)
        await trio.testing.wait_all_tasks_blocked(0.01)

    def proxy_asks(self) -> None:
        self.relays.reauthentication.send_due_challenges()

    async def client_is_asked(self) -> None:
        self.proxy_asks()
        await expect(self.client, CHALLENGE)

    async def client_answers(self, data: bytes = b"fresh") -> None:
        await self.client.send_all(answer(data))
        await until(lambda: self.reauthenticator.given[-1:] == [data])
        await trio.testing.wait_all_tasks_blocked(0.01)

    async def broker_must_have(self, *frames: bytes) -> None:
        """These, and nothing else before the client's next frame."""
        await self.client.send_all(SEND)
        await expect(self.broker, b"".join(frames) + SEND)

    async def client_must_have_nothing(self) -> None:
        await self.broker.send_all(MESSAGE)
        await expect(self.client, MESSAGE)

    @property
    def counted(self) -> tuple[float, float]:
        """Successes and failures."""
        metrics = self.metrics
        success, failure = (metric.labels(method="token")._value.get() for metric in (metrics.success, metrics.failure))
        return success, failure


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reauthentication, "QUIET_S", 0.01)


@pytest.fixture(params=["in the kernel", "in user space"])
def begin(  # noqa: PLR0917 -- fixtures
    request: pytest.FixtureRequest,
    place: Place,
    lane: Lane,
    copied: CopiedRelays,
    now: Now,
    reauthenticator: FakeReauthenticator,
) -> Any:
    async def begun(enforcement: str = "enforce", **fields: Any) -> Stage:
        config = make_config(session={"enforcement": enforcement}, listener=[{"bind": BIND}])
        terms = session(now, reauthenticator, **{"passes_answers": True, "listener": BIND, **fields})
        if request.param == "in the kernel":
            forwarder = await place.forwarder()
            forwarder.relays.enforcement.configure(config)
            await forwarder.begin(lane, session=terms)
            stage = Stage(forwarder.relays, forwarder.metrics, now, reauthenticator, lane.client, lane.broker)
        else:
            metrics = ReauthenticationMetrics(None, now)
            options = SessionOptions(enforcement=Enforcement(config), metrics=metrics)
            relays = copied.new(now=now, sessions=options)
            client, broker = await copied.begin(relays, session=terms)
            stage = Stage(relays, metrics, now, reauthenticator, client, broker)
        stage.relays.reauthentication.fraction = lambda: 0.0
        await trio.testing.wait_all_tasks_blocked()
        return stage

    return begun


# ---- who is asked, and what goes on


@pytest.mark.conforms("kip-368.24")
async def test_the_client_is_asked_by_the_proxy_and_its_answer_goes_on(begin: Any) -> None:
    stage = await begin()
    for number in (b"1", b"2"):
        stage.now.s += 10
        await stage.broker_asks()
        stage.proxy_asks()
        await expect(stage.client, CHALLENGE)
        await stage.client_answers(number)
        await stage.broker_must_have(answer(number))
    assert stage.reauthenticator.given == [b"1", b"2"]
    assert stage.counted == (2, 0)


@pytest.mark.conforms("kip-368.24")
async def test_the_maximum_holds(begin: Any) -> None:
    """Whether or not the broker has asked: who does not answer ends, and the broker gets nothing."""
    stage = await begin()
    stage.now.s += 90
    await stage.client_is_asked()
    await stage.broker_asks()
    stage.now.s += 11
    await stage.client.send_all(SEND)
    assert error_in(await read_all(stage.client)).error.message == SESSION_EXPIRED
    assert await read_all(stage.broker) == b""


async def test_both_ask_and_the_client_hears_one_challenge(begin: Any) -> None:
    """A second answer would be one too many."""
    stage = await begin()
    stage.now.s += 90
    await stage.client_is_asked()
    await stage.broker_asks()
    stage.proxy_asks()
    await stage.client_must_have_nothing()
    await stage.client_answers()
    await stage.broker_must_have(answer())
    await stage.client_must_have_nothing()
    assert stage.counted == (1, 0)


async def test_an_answer_that_is_being_verified_serves_the_broker_too(begin: Any) -> None:
    stage = await begin()
    stage.reauthenticator.gate = trio.Event()
    stage.now.s += 10
    await stage.client_answers()
    await stage.broker_asks()
    stage.reauthenticator.gate.set()
    await trio.testing.wait_all_tasks_blocked(0.01)
    await stage.broker_must_have(answer())
    stage.proxy_asks()
    await stage.client_must_have_nothing()


async def test_without_a_challenge_of_the_brokers_no_answer_goes_on(begin: Any) -> None:
    """Security: a broker that ignores clients' credentials would take it for the proxy's own."""
    stage = await begin()
    stage.now.s += 90
    await stage.client_is_asked()
    await stage.client_answers()
    await stage.broker_must_have()
    stage.now.s += 10
    await stage.client_answers(b"unasked")
    await stage.broker_must_have()
    assert stage.counted == (2, 0)


REFUSED = pytest.mark.parametrize(
    "verdict", [denied, lambda _data: identity(name="mallory")], ids=["denied", "another user"]
)


@REFUSED
async def test_only_an_accepted_answer_goes_on(begin: Any, verdict: Any) -> None:
    """Security: also where the broker would accept it."""
    stage = await begin()
    stage.reauthenticator.verdict = verdict
    stage.now.s += 10
    await stage.broker_asks()
    await stage.client_is_asked()
    await stage.client.send_all(answer() + SEND)
    assert error_in(await read_all(stage.client)).error.message == AUTHENTICATION_FAILED
    assert answer() not in await read_all(stage.broker)
    assert stage.counted == (0, 1)


@REFUSED
async def test_where_ends_are_only_observed_it_does_not_go_on_either(begin: Any, verdict: Any) -> None:
    stage = await begin("observe")
    stage.reauthenticator.verdict = verdict
    stage.now.s += 10
    await stage.broker_asks()
    await stage.client_is_asked()
    await stage.client_answers()
    await stage.broker_must_have()
    stage.reauthenticator.verdict = identity
    stage.now.s += 10
    await stage.client_answers(b"unasked")
    await stage.broker_must_have(answer(b"unasked"))


def lost(_data: bytes) -> Any:
    raise RpcConnectionLost("gone")


async def test_an_answer_without_a_verdict_is_asked_for_once_more(begin: Any) -> None:
    stage = await begin()
    stage.reauthenticator.verdict = lost
    stage.now.s += 10
    await stage.broker_asks()
    await stage.client_is_asked()
    await stage.client_answers(b"1")
    await stage.broker_must_have()
    stage.reauthenticator.verdict = identity
    stage.now.s += 90
    await stage.client_is_asked()
    await stage.client_answers(b"2")
    await stage.broker_must_have(answer(b"2"))


# ---- who is not asked


@pytest.mark.parametrize(
    "fields", [{"challenge": b""}, {"exempts_producers": True}], ids=["never", "a producer of the C++ library"]
)
async def test_whom_the_proxy_may_not_ask_is_not_asked_for_the_broker(begin: Any, fields: dict[str, Any]) -> None:
    """A C++ producer would write its answer into a message. What such a client says unasked goes on."""
    stage = await begin(**fields)
    await stage.client.send_all(producer_frame())
    await expect(stage.broker, producer_frame())
    stage.now.s += 10
    await stage.broker_asks()
    stage.proxy_asks()
    await stage.client_must_have_nothing()
    await stage.broker_must_have()
    await stage.client_answers()
    await stage.broker_must_have(answer())


async def test_where_ends_are_only_observed_a_client_that_failed_is_not_asked_for_the_broker(begin: Any) -> None:
    """Not in that lifetime."""
    stage = await begin("observe")
    stage.reauthenticator.verdict = denied
    stage.now.s += 90
    await stage.client_is_asked()
    await stage.client_answers(b"wrong")
    stage.now.s += 2
    await stage.broker_asks()
    stage.proxy_asks()
    await stage.client_must_have_nothing()


# ---- bounds


async def test_a_flood_of_challenges_keeps_no_memory(begin: Any) -> None:
    """Within the second in which the client may not be asked again."""
    stage = await begin()
    stage.now.s += 0.5
    for _ in range(30):
        await stage.broker.send_all(BROKER_ASKS * 200)
        await trio.testing.wait_all_tasks_blocked(0.01)
    await stage.client_must_have_nothing()
    assert len(stage.relays.reauthentication._due) == 2, "the lifetime's, and the one for the broker"
    stage.now.s += 0.6
    await stage.client_is_asked()


async def test_a_single_answer_covers_all_challenges_sent_before_it(begin: Any) -> None:
    """Also those sent while the answer waits for the end of the client's frame."""
    stage = await begin()
    stage.now.s += 10
    await stage.broker_asks()
    await stage.client_is_asked()
    await stage.client.send_all(answer() + SEND[:20])
    await expect(stage.broker, SEND[:20])
    await until(lambda: stage.counted == (1, 0))
    stage.now.s += 10
    await stage.broker_asks()
    stage.proxy_asks()
    await stage.client_must_have_nothing()
    await stage.client.send_all(SEND[20:])
    await expect(stage.broker, SEND[20:] + answer())
    await stage.broker_must_have()


async def test_answers_without_a_verdict_keep_no_memory(begin: Any) -> None:
    """Each has the same challenge scheduled, hours ahead perhaps."""
    stage = await begin()
    stage.reauthenticator.verdict = lost
    for number in range(10):
        stage.now.s += 2
        await stage.client_answers(b"%d" % number)
    assert len(stage.relays.reauthentication._due) == 1
    stage.now.s += 70
    await stage.client_is_asked()


async def test_a_challenge_that_left_the_schedule_is_scheduled_once_more(begin: Any) -> None:
    """An entry counts as out of date while an answer is being verified, but the answer may be lost."""
    stage = await begin()
    stage.reauthenticator.gate, stage.reauthenticator.verdict = trio.Event(), lost
    stage.now.s += 10
    await stage.client_answers()
    stage.relays.reauthentication._remove_outdated()
    stage.reauthenticator.gate.set()
    await trio.testing.wait_all_tasks_blocked(0.01)
    assert len(stage.relays.reauthentication._due) == 1
    stage.now.s += 80
    await stage.client_is_asked()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Challenges that were removed from the stream."""
    frames: list[bytes] = []
    take = ForwardedAnswers.on_challenge_frame

    def noted(challenges: ForwardedAnswers, frame: bytes) -> None:
        frames.append(frame)
        take(challenges, frame)

    monkeypatch.setattr(ForwardedAnswers, "on_challenge_frame", noted)
    return frames


async def test_a_chunk_of_challenges_does_not_hold_up_other_relays(begin: Any, taken: list[bytes]) -> None:
    """Between the turns of a relay all others have theirs."""
    stage = await begin()
    (relay,) = stage.relays._engine.relays
    pump = relay.to_client.pump
    in_turns: list[int] = []

    def counted(direction: Any) -> None:
        before = len(taken)
        pump(direction)
        in_turns.append(len(taken) - before)

    relay.to_client.pump = counted
    await stage.broker.send_all(BROKER_ASKS * 1000)
    await until(lambda: len(taken) == 1000)
    assert max(in_turns) == 1


async def test_a_client_is_asked_at_most_once_a_second(begin: Any) -> None:
    """However often its broker asks; that ends no relay."""
    stage = await begin()
    stage.now.s += 10
    await stage.broker.send_all(BROKER_ASKS * 100)
    await trio.testing.wait_all_tasks_blocked(0.01)
    await stage.client_is_asked()
    await stage.client_must_have_nothing()
    await stage.client_answers()
    await stage.broker_must_have(answer())
    await stage.broker_asks()
    stage.now.s += 0.9
    stage.proxy_asks()
    await stage.client_must_have_nothing()
    stage.now.s += 0.2
    await stage.client_is_asked()


async def test_a_flood_of_answers_is_still_a_failure(begin: Any) -> None:
    stage = await begin()
    stage.reauthenticator.gate = trio.Event()
    stage.now.s += 10
    await stage.broker_asks()
    await stage.client_is_asked()
    await stage.client.send_all(answer() * 3)
    assert error_in(await read_all(stage.client)).error.message == AUTHENTICATION_FAILED
    assert await read_all(stage.broker) == b""


@pytest.mark.parametrize("size", [INJECTION_BYTES_MAX + 1, BROKER_ANSWER_BYTES_MAX - 100])
async def test_an_answer_larger_than_a_page(begin: Any, size: int) -> None:
    stage = await begin(answer_bytes_max=BROKER_ANSWER_BYTES_MAX)
    large = b"x" * size
    stage.now.s += 10
    await stage.broker_asks()
    await stage.client_is_asked()
    await stage.client_answers(large)
    await stage.broker_must_have(answer(large))


async def test_an_answer_that_is_too_large_ends_the_session(begin: Any) -> None:
    stage = await begin()
    stage.now.s += 10
    await stage.broker_asks()
    await stage.client_is_asked()
    await stage.client.send_all(answer(b"x" * ANSWER_BYTES_MAX))
    assert error_in(await read_all(stage.client)).error.message == AUTHENTICATION_FAILED
    assert await read_all(stage.broker) == b""


# ---- order


async def test_an_answer_waits_for_the_end_of_the_clients_frame(begin: Any) -> None:
    stage = await begin()
    stage.reauthenticator.gate = trio.Event()
    stage.now.s += 10
    await stage.broker_asks()
    await stage.client_is_asked()
    frame = send_frame(b"x" * 3000)
    await stage.client_answers()
    await stage.client.send_all(frame[:1000])
    await expect(stage.broker, frame[:1000])
    stage.reauthenticator.gate.set()
    await trio.testing.wait_all_tasks_blocked(0.01)
    await stage.client.send_all(frame[1000:] + SEND)
    await expect(stage.broker, frame[1000:] + answer() + SEND)


async def test_an_answer_does_not_wait_for_the_command_behind_it(begin: Any) -> None:
    stage = await begin()
    stage.reauthenticator.gate = trio.Event()
    stage.now.s += 90
    await stage.broker_asks()
    await stage.client_is_asked()
    stage.now.s += 20
    await stage.client.send_all(answer() + SEND)
    await until(lambda: stage.reauthenticator.given)
    stage.reauthenticator.gate.set()
    assert await read(stage.broker, len(answer() + SEND)) in {answer() + SEND, SEND + answer()}


# ---- another forwarder


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("moment", ["asked", "answering", "answered", "verified"])
async def test_a_successor_knows_that_the_broker_waits(  # noqa: PLR0917 -- fixtures
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator, way: str, moment: str
) -> None:
    """Whatever became of the client's answer."""
    forwarder = await place.forwarder()
    await forwarder.begin(lane, session=session(now, reauthenticator, passes_answers=True))
    now.s += 10
    await lane.broker.send_all(BROKER_ASKS)
    await trio.testing.wait_all_tasks_blocked(0.01)
    forwarder.relays.reauthentication.send_due_challenges()
    await expect(lane.client, CHALLENGE)
    if moment == "answering":  # most of the answer is lost with its process
        await lane.client.send_all(answer(b"lost")[:-1])
        await trio.testing.wait_all_tasks_blocked(0.01)
    elif moment != "asked":
        reauthenticator.gate = trio.Event()
        await lane.client.send_all(answer(b"lost") + SEND[:20])
        await expect(lane.broker, SEND[:20])
        await until(lambda: reauthenticator.given)
    if moment == "verified":  # but not sent, since the client is in the middle of a frame
        reauthenticator.gate.set()
        await until(forwarder.metrics.success.labels(method="token")._value.get)
    following = await successor(place, way)
    reauthenticator.gate = None
    if moment == "answering":
        await lane.client.send_all(answer(b"lost")[-1:] + SEND[:20])
        await expect(lane.broker, SEND[:20])
    now.s += 2
    following.relays.reauthentication.send_due_challenges()
    if moment != "asked":
        await expect(lane.client, CHALLENGE)
    rest = b"" if moment == "asked" else SEND[20:]
    await lane.client.send_all(rest + answer(b"again"))
    await until(lambda: reauthenticator.given[-1:] == [b"again"])
    await trio.testing.wait_all_tasks_blocked(0.01)
    await lane.client.send_all(SEND)
    await expect(lane.broker, rest + answer(b"again") + SEND)


async def test_a_successor_passes_nothing_on_where_the_broker_has_not_asked(
    place: Place, lane: Lane, now: Now, reauthenticator: FakeReauthenticator
) -> None:
    forwarder = await place.forwarder()
    await forwarder.begin(lane, session=session(now, reauthenticator, passes_answers=True))
    now.s += 10
    await successor(place, "killed")
    await lane.client.send_all(answer() + SEND)
    await expect(lane.broker, SEND)
    await until(lambda: reauthenticator.given == [b"fresh"])
