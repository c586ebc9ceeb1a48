"""lookup.requests.scheduler: who is let in, what is asked once for several, and that each gets one answer, under
its own id."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from lookup_fakes import CONNECT, REDIRECT, lookup, lookup_response, make_config
from prometheus_client import CollectorRegistry

from lookup.connections.principals import LookupPrincipal, LookupPrincipals
from lookup.metrics import LookupMetrics
from lookup.requests.executor import LookupExecutor
from lookup.requests.scheduler import OVERDUE_CHECK_S, LookupScheduler, PendingLookup, RequestBatch
from proto.connect_rules import OriginalCredentials
from proto.frames import FrameDecoder
from proto.lookup_answers import BrokerAnswer, ClientAnswer
from proto.lookup_kinds import error_of, failure_answer, response_request_id
from proto.lookup_requests import LookupRequest, RequestParser
from proto.pulsar_pb2 import BaseCommand, ServerError
from proxy.runtime.loop.tick import current_tick
from proxy.runtime.observability.quota_refusals import QuotaRefusals

METADATA = BaseCommand(type=BaseCommand.PARTITIONED_METADATA, partition_metadata={"topic": "t", "request_id": 8})
SCHEMA = BaseCommand(type=BaseCommand.GET_SCHEMA, get_schema={"topic": "t", "request_id": 9})
TIMEOUT_S = 10.0


def topics(request_id: int = 7) -> BaseCommand:
    return BaseCommand(
        type=BaseCommand.GET_TOPICS_OF_NAMESPACE, get_topics_of_namespace={"namespace": "t/n", "request_id": request_id}
    )


def schema(request_id: int = 9) -> BaseCommand:
    return BaseCommand(type=BaseCommand.GET_SCHEMA, get_schema={"topic": "t", "request_id": request_id})


LARGE = pytest.mark.parametrize("request_of", [topics, schema])
"""What may have a large answer."""

BROKER = object()
INDEX = 3


class Asked:
    """One question under way to a broker, and the connection that it is under way on."""

    broker = BROKER
    last_received_at = 0.0
    loss = None

    def __init__(
        self, lookups: FakeExecutor, request: LookupRequest, asker: LookupPrincipal, question: PendingLookup
    ) -> None:
        self.command = request.to_command()
        self.asker = asker
        self.forgotten = False
        self._lookups = lookups
        self.question = question

    def on_answer(self, answer: BaseCommand | None) -> None:
        self.last_received_at = trio.current_time()
        self.question.on_broker_answer(None if answer is None else BrokerAnswer(answer))

    def answer(self, url: str = "pulsar://b0:6650") -> None:
        self.on_answer(lookup_response(self.command, CONNECT, url))


class FakeExecutor:
    """Brokers, answered by the test: ``asked`` the short way, ``long_way`` the long one."""

    def __init__(self) -> None:
        self.open = True
        self.asked: list[Asked] = []
        self.long_way: list[tuple[BaseCommand, BaseCommand | None, float]] = []
        self.lost: list[object] = []
        self.heard_of: list[tuple[object, bool]] = []
        """Which broker was heard of, and whether it answered."""
        self.gate = trio.Event()
        self.failure: Exception | None = None

    def send_on_open_connection(
        self, request: LookupRequest, asker: LookupPrincipal, question: PendingLookup, _now: float
    ) -> Any:
        if not self.open:
            return None
        asked = Asked(self, request, asker, question)
        self.asked.append(asked)
        return asked

    def record_fast_path_outcome(self, connection: Asked, answer: BrokerAnswer | None) -> None:
        self.heard_of.append((connection.broker, answer is not None))

    @staticmethod
    def abandon_request(connection: Asked, question: PendingLookup) -> None:
        assert connection.question is question
        connection.forgotten = True

    @staticmethod
    def prepare_answer(answer: BrokerAnswer, kind: Any, _asker: LookupPrincipal, _client: str) -> ClientAnswer | None:
        if not LookupExecutor.is_final_answer(answer.command, kind):
            return None
        copy = BaseCommand()
        copy.CopyFrom(answer.command)
        return ClientAnswer(copy)

    async def execute_lookup(
        self,
        command: BaseCommand,
        kind: Any,
        _asker: LookupPrincipal,
        _client: str,
        answer: Any,
        *,
        deadline: float,
        losses: Any,
    ) -> BaseCommand:
        self.long_way.append((command, answer, deadline))
        self.lost.append(None if losses is None else losses.last_lost_at)
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        if kind.response_type == BaseCommand.LOOKUP_RESPONSE:
            return lookup_response(command, CONNECT, "pulsar://long:6650")
        return failure_answer(kind, 0, ServerError.TopicNotFound, "gone")

    @staticmethod
    def timeout_answer(_command: BaseCommand, kind: Any, *_: object) -> BaseCommand:
        return failure_answer(kind, 0, ServerError.ServiceNotReady, "too slow")


class Setup:
    """A scheduler, its brokers, and what its clients receive."""

    def __init__(self, nursery: trio.Nursery, quota: Sequence[dict[str, Any]] = (), **limits: int) -> None:
        self.lookups = FakeExecutor()
        self.turn = current_tick()
        self.askers = LookupPrincipals()
        self.registry = CollectorRegistry()
        self.nursery = nursery
        self.sent = trio.Event()
        """Whether the forwarder has got the answers."""
        self.sent.set()
        self.heard: list[tuple[str, int, int | None]] = []
        """Whose request, its id, and the error."""
        self.quota: Any = quota
        config = make_config(limits={"lookup_timeout_ms": int(TIMEOUT_S * 1000), **limits}, quota=self.quota)
        refusals, metrics = QuotaRefusals(self.registry), LookupMetrics(self.registry)
        self.scheduler = LookupScheduler(config, self.lookups, metrics, nursery, refusals.count_refusal)  # type: ignore[arg-type]

    def ask(
        self,
        command: BaseCommand | None = None,
        who: str | LookupPrincipal = "alice",
        name: str = "",
        address: str = "192.0.2.7:4000",
    ) -> None:
        request, request_id = RequestParser().parse_request((command or lookup()).SerializeToString())
        asker = who if isinstance(who, LookupPrincipal) else self.askers.get_principal(who)

        def add_answer(index: int, frame: bytes) -> None:
            assert index == INDEX
            decoder = FrameDecoder(max_frame_bytes=1 << 20)
            decoder.receive_data(frame)
            decoded = decoder.next_frame()
            assert decoded is not None
            answer = BaseCommand.FromString(decoded.command)
            request_id = response_request_id(answer)
            assert request_id is not None
            self.heard.append((name or asker.name, request_id, error_of(answer)))

        async def wait_until_sent(_timeout_s: float) -> None:
            await self.sent.wait()

        answers: Any = SimpleNamespace(add_answer=add_answer, wait_until_sent=wait_until_sent)
        with self.turn:
            self.scheduler.submit_request(request, request_id, INDEX, RequestBatch(asker, address, answers))

    def reload(self, **limits: int) -> FakeExecutor:
        """Another configuration; gives the old brokers."""
        old, self.lookups = self.lookups, FakeExecutor()
        self.scheduler.apply_config(make_config(limits=limits, quota=self.quota), self.lookups)  # type: ignore[arg-type]
        return old

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"pulsar_proxy_{name}", labels)

    def nothing_left(self) -> None:
        assert self.scheduler.under_way.count == 0
        assert self.scheduler._pending == {}
        assert self.scheduler._count_by_principal == {}
        assert (self.scheduler._budget.used_bytes, self.scheduler._budget._by_owner) == (0, {})


@pytest.fixture
def make(nursery: trio.Nursery) -> Callable[..., Setup]:
    return lambda **limits: Setup(nursery, **limits)


Make = Callable[..., Setup]


# ---- asked once


async def test_equal_concurrent_requests_are_sent_once_and_each_is_answered_under_its_own_id(make: Make) -> None:
    it = make()
    for number in range(5):
        it.ask(lookup("t", request_id=2**63 + number), name=f"client-{number}")
    [asked] = it.lookups.asked
    assert it.scheduler.under_way.count == 5
    asked.answer()
    assert it.heard == [(f"client-{number}", 2**63 + number, None) for number in range(5)]
    assert it.value("lookup_requests_total") == 5
    assert it.value("lookup_answers_total", request="lookup", error="none") == 5
    it.nothing_left()


@pytest.mark.parametrize("command", [lookup(), METADATA])
async def test_on_the_long_way_too(make: Make, command: BaseCommand) -> None:
    it = make()
    it.lookups.open = False
    for _ in range(3):
        it.ask(command)
    await trio.testing.wait_all_tasks_blocked()
    assert len(it.lookups.long_way) == 1
    it.ask(command)
    it.lookups.gate.set()
    await trio.testing.wait_all_tasks_blocked()
    assert len(it.heard) == 4
    assert len(it.lookups.long_way) == 1
    it.nothing_left()


async def test_a_result_is_never_given_to_who_asks_later(make: Make) -> None:
    it = make()
    it.ask()
    it.lookups.asked[0].answer("pulsar://old:6650")
    it.ask()
    assert len(it.lookups.asked) == 2
    it.lookups.asked[0].on_answer(None)  # a second word on the first question
    await trio.testing.wait_all_tasks_blocked()
    assert len(it.heard) == 1 or it.lookups.long_way, "it must not answer the second"


def with_field(field: bytes) -> BaseCommand:
    """A LOOKUP with something more in it."""
    command = lookup()
    command.lookup_topic.MergeFromString(field)
    return command


OTHERS: list[Any] = [
    ("another topic", lookup("other"), "alice", None),
    ("authoritative", lookup(authoritative=True), "alice", None),
    ("a listener", lookup(advertised_listener_name="inside"), "alice", None),
    ("properties", with_field(b"\x42\x05\x0a\x01k\x12\x00"), "alice", None),
    ("a field that is newer than this proxy", with_field(b"\xfa\x01\x03new"), "alice", None),
    ("another kind", METADATA, "alice", None),
    ("another principal", lookup(), "bob", None),
    ("nobody", lookup(), "", None),
    ("forwarded credentials", lookup(), "alice", OriginalCredentials("token", "a")),
    ("other credentials", lookup(), "alice", OriginalCredentials("token", "b")),
    ("another method", lookup(), "alice", OriginalCredentials("basic", "a")),
]


async def test_requests_that_differ_in_a_field_or_in_the_principal_are_sent_separately(make: Make) -> None:
    """Security: no principal gets what another one may see."""
    it = make()
    it.ask()
    for _, command, principal, credentials in OTHERS:
        it.ask(command, it.askers.get_principal(principal, credentials))
        it.ask(command, it.askers.get_principal(principal, credentials))
    assert len(it.lookups.asked) == 1 + len(OTHERS)
    assert len({(one.asker, one.command.SerializeToString()) for one in it.lookups.asked}) == 1 + len(OTHERS)


async def test_a_clients_own_claims_are_forgotten_and_distinguish_no_principal(make: Make) -> None:
    """Security: only the connection's handshake, which is the proxy's, says who asks."""
    it = make()
    for name in ("admin", "root"):
        it.ask(lookup(original_principal=name, original_auth_data=name, original_auth_method="token"))
    it.ask()
    [asked] = it.lookups.asked
    body = asked.command.lookup_topic
    for field in ("original_principal", "original_auth_data", "original_auth_method"):
        assert not body.HasField(field)


@LARGE
async def test_requests_with_large_answers_are_sent_separately(
    make: Make, request_of: Callable[[int], BaseCommand]
) -> None:
    """Memory for a copy of a large answer for each waiting client would not be bounded."""
    it = make()
    for number in range(3):
        it.ask(request_of(number))
    await trio.testing.wait_all_tasks_blocked()
    assert it.lookups.asked == []
    assert len(it.lookups.long_way) == 3
    it.lookups.gate.set()
    await trio.testing.wait_all_tasks_blocked()
    assert sorted(it.heard) == [("alice", number, ServerError.TopicNotFound) for number in range(3)]
    it.nothing_left()


# ---- a reload in the middle


async def test_nothing_is_shared_across_a_reload(make: Make) -> None:
    it = make()
    it.ask(lookup(request_id=1))
    old = it.reload()
    it.ask(lookup(request_id=2))
    assert (len(old.asked), len(it.lookups.asked)) == (1, 1)
    it.lookups.asked[0].answer()
    assert it.heard == [("alice", 2, None)]
    old.asked[0].answer()
    assert it.heard == [("alice", 2, None), ("alice", 1, None)]
    it.nothing_left()


@pytest.mark.parametrize("way", ["answer", "long", "lists"])
async def test_counters_are_exact_across_reloads(make: Make, way: str) -> None:
    it = make()
    it.ask(topics() if way == "lists" else lookup())
    await trio.testing.wait_all_tasks_blocked()
    old = it.reload()
    assert it.scheduler._count_by_principal == {"alice": 1}, "it still has its place"
    if way == "answer":
        old.asked[0].answer()
    elif way == "long":
        old.asked[0].on_answer(None)
    old.gate.set()
    await trio.testing.wait_all_tasks_blocked()
    assert len(it.heard) == 1
    it.nothing_left()


async def test_the_limit_of_a_reload_counts_for_who_comes_now(make: Make) -> None:
    it = make(max_concurrent_lookups=2)
    it.ask(lookup("a"), "")
    it.ask(lookup("b"), "")
    it.reload(max_concurrent_lookups=3)
    it.ask(lookup("c", request_id=3), "")
    it.ask(lookup("d", request_id=4), "")
    assert it.heard == [("", 4, ServerError.TooManyRequests)]


async def test_a_reload_that_shortens_the_time_applies_to_waiting_requests(
    make: Make, autojump_clock: trio.testing.MockClock
) -> None:
    it = make()
    it.nursery.start_soon(it.scheduler.run)
    it.ask(lookup("long", request_id=1))
    it.reload(lookup_timeout_ms=1000)
    it.ask(lookup("short", request_id=2))
    started = trio.current_time()
    for request_id, limit_s in ((2, 1.0), (1, TIMEOUT_S)):
        heard = len(it.heard)
        while len(it.heard) == heard:  # noqa: ASYNC110 -- time itself is looked at
            await trio.sleep(0.01)
        assert it.heard[-1][1] == request_id
        assert limit_s <= trio.current_time() - started <= limit_s + OVERDUE_CHECK_S + 0.02


# ---- limits and fairness


async def test_above_the_limit_each_is_told_so_in_its_own_form_at_once(make: Make) -> None:
    it = make(max_concurrent_lookups=2)
    it.ask(lookup("a"), "")
    it.ask(lookup("a"), "")  # who waits with another one counts too
    for command in (lookup(request_id=7), METADATA, SCHEMA, topics(10)):
        it.ask(command, "")
    assert it.heard == [("", number, ServerError.TooManyRequests) for number in (7, 8, 9, 10)]
    assert len(it.lookups.asked) == 1
    assert it.scheduler.under_way.count == 2
    for name in ("lookup", "partitions_metadata", "get_schema", "get_topics_of_namespace"):
        assert it.value(f"rejected_{name}_requests_total") == 1
    it.lookups.asked[0].answer()
    it.nothing_left()
    it.ask()
    assert len(it.lookups.asked) == 2, "there is room again"


def fill(it: Setup, who: str, most: int = 1000) -> int:
    """Ask for ever other topics until one is refused; how many were let in."""
    before = it.scheduler.under_way.count
    for number in range(most):
        refused = len(it.heard)
        it.ask(lookup(f"{who}-{number}"), who)
        if len(it.heard) > refused:
            assert it.heard[-1][2] == ServerError.TooManyRequests
            break
    return it.scheduler.under_way.count - before


async def test_a_single_principal_leaves_room_for_a_second_which_gets_a_share(make: Make) -> None:
    it = make(max_concurrent_lookups=100)
    greedy = fill(it, "greedy")
    assert 50 <= greedy < 100
    assert fill(it, "modest") >= 10
    assert fill(it, "greedy") == 0


@pytest.mark.parametrize("most", [2, 10, 100])
async def test_a_single_principal_gets_half_of_the_concurrent_lookups(make: Make, most: int) -> None:
    assert fill(make(max_concurrent_lookups=most), "greedy") == most // 2


async def test_of_several_that_take_what_they_get_each_gets_something(make: Make) -> None:
    it = make(max_concurrent_lookups=1000)
    shares = [fill(it, f"p{number}") for number in range(3)]
    assert sum(shares) <= 1000
    assert min(shares) >= 100, shares


async def test_room_that_is_given_back_is_not_all_the_greedy_ones(make: Make) -> None:
    it = make(max_concurrent_lookups=100)
    fill(it, "greedy")
    fill(it, "modest")
    for asked in [asked for asked in it.lookups.asked if asked.asker.name == "greedy"]:
        asked.answer()
    fill(it, "greedy")
    assert fill(it, "third") >= 1


async def test_without_authentication_one_owner_may_use_all_slots(make: Make) -> None:
    it = make(max_concurrent_lookups=100)
    assert fill(it, "") == 100


async def test_requests_are_bounded_in_bytes_and_shared_fairly(make: Make) -> None:
    """A request may have max_command_bytes: their number alone bounds no memory."""
    it = make(max_lookup_bytes=100 * 1024)
    it.lookups.open = False
    for number in range(4):
        it.ask(lookup(f"{number}" + "x" * (15 * 1024), request_id=number), "greedy")
    assert it.heard == [("greedy", 3, ServerError.TooManyRequests)]
    it.ask(lookup("y" * (15 * 1024), request_id=9), "modest")
    it.ask(lookup("0" + "x" * (15 * 1024), request_id=8), "modest")
    assert len(it.heard) == 1
    it.lookups.gate.set()
    await trio.testing.wait_all_tasks_blocked()
    assert len(it.heard) == 6
    it.nothing_left()


async def test_without_authentication_the_lookup_bytes_are_shared_by_client_address(make: Make) -> None:
    it = make(max_lookup_bytes=100 * 1024)
    for number in range(4):
        it.ask(lookup(f"{number}" + "x" * (15 * 1024), request_id=number), "", address=f"192.0.2.7:400{number}")
    it.ask(lookup("y" * (15 * 1024), request_id=9), "", address="192.0.2.8:4000")
    assert it.heard == [("", 3, ServerError.TooManyRequests)]
    it.reload(max_lookup_bytes=1024)
    it.ask(lookup("z", request_id=10), "", address="192.0.2.9:4000")
    assert it.heard[-1] == ("", 10, ServerError.TooManyRequests)


async def test_requests_that_join_an_equal_request_count_their_bytes_too(make: Make) -> None:
    it = make(max_lookup_bytes=100 * 1024)
    for number in range(4):
        it.ask(lookup("x" * (15 * 1024), request_id=number), "alice")
    assert it.heard == [("alice", 3, ServerError.TooManyRequests)]
    it.lookups.asked[0].answer()
    assert len(it.heard) == 4
    it.nothing_left()


@pytest.mark.parametrize("most", [1, 2, 3, 4])
async def test_the_smallest_limits_let_each_in_while_there_is_room(make: Make, most: int) -> None:
    it = make(max_concurrent_lookups=most)
    for number in range(most):
        it.ask(lookup("t"), f"p{number}")
        assert it.heard == []
    it.ask(lookup("t"), "late")
    assert it.heard == [("late", 7, ServerError.TooManyRequests)]


async def test_a_principal_that_is_refused_does_not_count(make: Make) -> None:
    it = make(max_concurrent_lookups=1)
    it.ask()
    for number in range(100):
        it.ask(who=f"p{number}")
    assert it.scheduler._count_by_principal == {"alice": 1}


# ---- the end of each


async def test_an_answer_from_the_long_way(make: Make) -> None:
    it = make()
    it.lookups.open = False
    it.ask()
    await trio.testing.wait_all_tasks_blocked()
    [(_, known, deadline)] = it.lookups.long_way
    assert known is None
    assert deadline == pytest.approx(trio.current_time() + TIMEOUT_S, abs=1)
    it.lookups.gate.set()
    await trio.testing.wait_all_tasks_blocked()
    assert it.heard == [("alice", 7, None)]
    it.nothing_left()


async def test_a_redirect_after_the_short_way_is_followed_on_the_long_one(make: Make) -> None:
    it = make()
    it.ask()
    [asked] = it.lookups.asked
    redirect = lookup_response(asked.command, REDIRECT, "pulsar://b1:6650")
    asked.on_answer(redirect)
    await trio.testing.wait_all_tasks_blocked()
    assert it.heard == []
    assert [known for _, known, _ in it.lookups.long_way] == [redirect]
    assert it.lookups.lost == [None]
    it.ask(lookup(request_id=8))  # meanwhile
    it.lookups.gate.set()
    await trio.testing.wait_all_tasks_blocked()
    assert it.heard == [("alice", 7, None), ("alice", 8, None)]
    it.nothing_left()


async def test_a_connection_lost_on_the_short_way_leads_to_the_long_one(make: Make) -> None:
    it = make()
    it.ask()
    it.lookups.asked[0].on_answer(None)
    it.lookups.gate.set()
    await trio.testing.wait_all_tasks_blocked()
    assert it.heard == [("alice", 7, None)]
    assert [known for _, known, _ in it.lookups.long_way] == [None]
    assert it.lookups.lost == [BROKER], "it is asked last"
    assert it.lookups.heard_of == [(BROKER, False)]
    it.nothing_left()


@pytest.mark.parametrize("phase_s", [0.0, 0.1, 0.24])
async def test_an_unanswered_request_is_ended_in_time_and_forgotten(
    make: Make, autojump_clock: trio.testing.MockClock, phase_s: float
) -> None:
    it = make()
    it.nursery.start_soon(it.scheduler.run)
    await trio.sleep(phase_s)
    started = trio.current_time()
    it.ask(lookup(request_id=1))
    await trio.sleep(1)
    it.ask(lookup(request_id=2))
    it.ask(lookup("later", request_id=3))
    said: list[float] = []

    class Speaker:
        def flush(self) -> None:
            said.append(trio.current_time() - started)

    while not it.heard:
        with it.turn:
            it.turn.schedule_flush(Speaker())
        await trio.sleep(0.01)
    assert it.heard == [("alice", 1, ServerError.ServiceNotReady), ("alice", 2, ServerError.ServiceNotReady)]
    assert TIMEOUT_S <= trio.current_time() - started <= TIMEOUT_S + OVERDUE_CHECK_S + 0.02
    assert said, "and it is said: the turn ends"
    assert [asked.forgotten for asked in it.lookups.asked] == [True, False]
    it.lookups.asked[0].on_answer(None)  # too late
    await trio.testing.wait_all_tasks_blocked()
    assert it.lookups.long_way == [], "no request waits any more"
    await trio.sleep(2)
    assert len(it.heard) == 3
    it.nothing_left()


async def test_a_request_interrupted_by_a_defect_on_the_fast_path_fails_at_its_timeout(
    make: Make, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = make()
    it.nursery.start_soon(it.scheduler.run)
    it.ask()

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(it.lookups, "prepare_answer", broken)
    with pytest.raises(ZeroDivisionError):  # ends the connection
        it.lookups.asked[0].answer()
    await trio.sleep(TIMEOUT_S + 1)
    assert it.heard == [("alice", 7, ServerError.ServiceNotReady)]
    it.nothing_left()


async def test_on_the_long_way_a_question_keeps_its_own_time(
    make: Make, autojump_clock: trio.testing.MockClock
) -> None:
    it = make()
    it.nursery.start_soon(it.scheduler.run)
    it.ask()
    it.lookups.asked[0].on_answer(None)
    await trio.sleep(TIMEOUT_S + 1)
    assert it.heard == [], "Lookups.answer has its deadline"
    it.lookups.gate.set()
    await trio.sleep(0.1)
    assert it.heard == [("alice", 7, None)]
    it.nothing_left()


@LARGE
async def test_requests_with_large_answers_wait_for_room_until_their_timeout(
    make: Make, autojump_clock: trio.testing.MockClock, request_of: Callable[[int], BaseCommand]
) -> None:
    it = make(max_topic_lists_bytes=3 * 1024, max_broker_frame_bytes=1024)
    for number in range(3):
        it.ask(request_of(number))
    it.ask(lookup(request_id=99))
    assert len(it.lookups.asked) == 1, "other requests do not wait for it"
    await trio.sleep(1)
    assert len(it.lookups.long_way) == 2, "one principal leaves the last to others"
    with structlog.testing.capture_logs() as logs:
        await trio.sleep(TIMEOUT_S)
    assert [error for _, _, error in it.heard] == [ServerError.TooManyRequests]
    assert [entry["limit"] for entry in logs] == ["limits.max_topic_lists_bytes"]
    it.lookups.gate.set()
    await trio.sleep(0.1)
    assert len(it.heard) == 3
    it.ask(request_of(7))
    await trio.sleep(0.1)
    assert len(it.heard) == 4
    it.lookups.asked[0].answer()
    it.nothing_left()
    assert it.scheduler._large_answer_room.free_bytes == 3 * 1024


@LARGE
async def test_a_large_answer_keeps_its_room_until_the_forwarder_has_it(
    make: Make, request_of: Callable[[int], BaseCommand]
) -> None:
    it = make(max_topic_lists_bytes=1024, max_broker_frame_bytes=1024)
    it.lookups.gate.set()
    it.sent = trio.Event()
    for number in range(2):
        it.ask(request_of(number), "")
    await trio.testing.wait_all_tasks_blocked()
    assert len(it.heard) == len(it.lookups.long_way) == 1, "the other one waits"
    it.sent.set()
    await trio.testing.wait_all_tasks_blocked()
    assert len(it.heard) == 2
    assert it.scheduler._large_answer_room.free_bytes == 1024
    it.nothing_left()


@LARGE
async def test_without_authentication_one_address_does_not_hold_up_another(
    make: Make, request_of: Callable[[int], BaseCommand]
) -> None:
    it = make(max_topic_lists_bytes=4 * 1024, max_broker_frame_bytes=1024)
    for number in range(10):
        it.ask(request_of(number), "", address=f"192.0.2.1:{4000 + number}")
    await trio.testing.wait_all_tasks_blocked()
    assert len(it.lookups.long_way) == 3
    it.ask(request_of(100), "", address="192.0.2.2:4000")
    await trio.testing.wait_all_tasks_blocked()
    assert len(it.lookups.long_way) == 4
    it.lookups.gate.set()
    await trio.testing.wait_all_tasks_blocked()
    it.nothing_left()


async def test_topic_lists_of_one_principal_do_not_hold_up_anothers(make: Make) -> None:
    it = make(max_topic_lists_bytes=1024, max_broker_frame_bytes=1024)
    for number in range(100):
        it.ask(topics(number), "greedy")
    await trio.testing.wait_all_tasks_blocked()
    it.ask(topics(1000), "modest")
    await trio.testing.wait_all_tasks_blocked()
    it.lookups.gate.set()
    while len(it.heard) < 101:
        await trio.lowlevel.checkpoint()
    assert [name for name, _, _ in it.heard].index("modest") <= 2
    it.nothing_left()


@pytest.mark.parametrize("command", [lookup(), topics()])
async def test_a_defect_on_the_long_way_is_one_requests_own(make: Make, command: BaseCommand) -> None:
    it = make()
    it.lookups.open = False
    it.lookups.failure = ZeroDivisionError("secret detail")
    it.lookups.gate.set()
    it.ask(command)
    with structlog.testing.capture_logs() as logs:
        await trio.testing.wait_all_tasks_blocked()
    assert it.heard == [("alice", 7, ServerError.UnknownError)]
    assert [entry["log_level"] for entry in logs] == ["error"]
    it.nothing_left()
    it.lookups.failure = None
    it.ask(command)
    await trio.testing.wait_all_tasks_blocked()
    assert len(it.heard) == 2


# ---- all together


@settings(deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["ask", "ask", "ask", "list", "answer", "lose", "redirect", "wait", "reload", "closed"]),
            st.integers(0, 3),
        ),
        max_size=40,
    )
)
def test_whatever_happens_each_request_is_answered_once(steps: list[tuple[str, int]]) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            it = Setup(nursery, max_concurrent_lookups=8)
            nursery.start_soon(it.scheduler.run)
            all_lookups = [it.lookups]
            asked_ids: list[int] = []
            for number, (step, which) in enumerate(steps):
                under_way = [one for lookups in all_lookups for one in lookups.asked if not one.forgotten]
                match step:
                    case "ask":
                        asked_ids.append(number)
                        it.ask(lookup(f"t{which % 2}", request_id=number), f"p{which // 2}")
                    case "list":
                        asked_ids.append(number)
                        it.ask(topics(number), f"p{which // 2}")
                    case "answer" | "lose" | "redirect" if which < len(under_way):
                        asked = under_way[which]
                        asked.forgotten = True
                        response = REDIRECT if step == "redirect" else CONNECT
                        answer = lookup_response(asked.command, response, "pulsar://x:1")
                        asked.on_answer(None if step == "lose" else answer)
                    case "wait":
                        await trio.sleep(TIMEOUT_S / 3)
                    case "reload":
                        it.reload(max_concurrent_lookups=8, lookup_timeout_ms=5000)
                        all_lookups.append(it.lookups)
                    case "closed":
                        it.lookups.open = not it.lookups.open
                    case _:
                        pass
                assert it.scheduler.under_way.count <= 8
                assert sum(it.scheduler._count_by_principal.values()) == it.scheduler.under_way.count
            for lookups in all_lookups:
                lookups.gate.set()
            await trio.sleep(TIMEOUT_S + 1)
            assert Counter(request_id for _, request_id, _ in it.heard) == Counter(asked_ids)
            it.nothing_left()
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


async def test_the_anonymous_role_shares_room_by_address(make: Make) -> None:
    """All principals share it: one of them must not take the room of all."""
    it = make(max_topic_lists_bytes=3 * 1024, max_broker_frame_bytes=1024)
    it.scheduler._anonymous_role = "alice"
    it.ask(schema(1))
    await trio.testing.wait_all_tasks_blocked()
    assert "principal alice" not in it.scheduler._large_answer_room._held
    assert it.scheduler._large_answer_room.free_bytes == 2 * 1024
    it.lookups.gate.set()
    await trio.testing.wait_all_tasks_blocked()
    it.nothing_left()


# ---- quotas

TWO_A_SECOND = {"lookups_per_second": 2, "burst_ms": 1000}


def refused(it: Setup) -> list[str]:
    return [name for name, _, error in it.heard if error == ServerError.TooManyRequests]


async def test_lookups_a_second_of_each_principal(make: Make, autojump_clock: trio.testing.MockClock) -> None:
    """Security: of all kinds together, also those that are asked once for several."""
    it = make(quota=[TWO_A_SECOND])
    for command in (lookup("t"), lookup("t"), lookup("t"), METADATA, topics()):
        it.ask(command)
    assert refused(it) == ["alice"] * 3
    it.ask(who="bob")
    assert refused(it) == ["alice"] * 3
    labels = {"limit": "lookups_per_second", "by": "principal", "dry_run": "false"}
    assert it.value("quota_refusals_total", **labels) == 3
    assert it.value("rejected_lookup_requests_total") == 1
    await trio.sleep(0.5)
    it.ask()
    it.ask()
    assert refused(it) == ["alice"] * 4
    for asked in list(it.lookups.asked):
        asked.answer()
    it.nothing_left()


async def test_without_a_principal_by_address(make: Make) -> None:
    it = make(quota=[TWO_A_SECOND])
    for address in ("192.0.2.7:1", "192.0.2.7:2", "192.0.2.7:3", "192.0.2.8:1"):
        it.ask(who="", name=address, address=address)
    assert refused(it) == ["192.0.2.7:3"]


async def test_lookups_a_second_of_a_tenant(make: Make) -> None:
    """Security: of all clients, however the topic is written."""
    it = make(quota=[{"by": "tenant", "tenant": "acme", **TWO_A_SECOND}])
    it.ask(lookup("persistent://acme/ns/a"), who="alice")
    it.ask(lookup("acme/ns/b"), who="bob")
    it.ask(lookup("non-persistent://acme/ns/c"), who="carol")
    it.ask(lookup("persistent://other/ns/c"), who="dave")
    it.ask(lookup("c"), who="erin")
    namespace = BaseCommand(
        type=BaseCommand.GET_TOPICS_OF_NAMESPACE, get_topics_of_namespace={"namespace": "acme/ns", "request_id": 1}
    )
    it.ask(namespace, who="frank")
    assert refused(it) == ["carol", "frank"]


async def test_the_text_names_the_limit(make: Make) -> None:
    it = make(quota=[{"lookups_per_second": 1, "burst_ms": 1}])
    texts: list[str] = []

    def failure(kind: Any, request_id: int, code: int, text: str) -> BaseCommand:
        texts.append(text)
        return failure_answer(kind, request_id, code, text)

    with pytest.MonkeyPatch.context() as patch, structlog.testing.capture_logs() as logs:
        patch.setattr("lookup.requests.scheduler.failure_answer", failure)
        it.ask()
        it.ask()
    assert texts == ["The proxy has reached its limit (quota[0].lookups_per_second)"]
    assert logs == [
        {
            "event": "a quota has refused a client",
            "log_level": "warning",
            "client": "principal alice",
            "key": "quota[0].lookups_per_second",
            "subject": "principal alice",
        }
    ]


async def test_a_dry_run_of_lookups(make: Make) -> None:
    it = make(quota=[{**TWO_A_SECOND, "dry_run": True}])
    for _ in range(5):
        it.ask()
    assert not refused(it)
    labels = {"limit": "lookups_per_second", "by": "principal", "dry_run": "true"}
    assert it.value("quota_refusals_total", **labels) == 3


async def test_a_reload_fills_no_bucket_and_takes_changes_over(make: Make) -> None:
    """Security."""
    it = make(quota=[TWO_A_SECOND])
    for _ in range(2):
        it.ask()
    it.reload(max_concurrent_lookups=100)
    it.ask()
    assert refused(it) == ["alice"]
    it.quota = [{"lookups_per_second": 1, "principals": ["bob"]}]
    it.reload()
    for _ in range(3):
        it.ask()
    assert refused(it) == ["alice"]


async def test_by_default_one_credential_with_all_lookups_refuses_no_other(make: Make) -> None:
    """Security: with no quota at all."""
    it = make()
    it.lookups.open = True
    for number in range(it.scheduler._lookups_max):
        it.ask(lookup(f"t{number}"))
    assert set(refused(it)) == {"alice"}
    refused_before = len(it.heard)
    for number in range(100):
        it.ask(lookup("mine"), who=f"other{number}")
    assert len(it.heard) == refused_before
