"""proxy.forwarder.client.handshake: each step returns its outcome; one that comes too late does nothing.

The ways through a handshake are told as dialogues in test_client_handshake_dialogues.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from forwarder_fakes import ALICE, CERTIFICATE, CLIENT, Play, auth_response, authenticated, challenge, connect, denied

from proto.addresses import HostPort
from proto.broker_handshake import Connected
from proto.client_machine import Action, Event, State
from proto.connect_rules import AUTHENTICATION_FAILED
from proto.frames import Frame
from proto.pulsar_pb2 import BaseCommand, CommandConnected, ServerError
from proto.rpc_pb2 import Status, StoredRelay
from proxy.forwarder.client.failures import CANNOT_CHECK, TARGET_REFUSED, ConnectionFailure
from proxy.forwarder.client.handshake import ANY_BROKER, TARGET_SHOWN_MAX, Handshake, RoundOutcome
from proxy.forwarder.client.services import ConnectionServices
from proxy.forwarder.disconnect_cause import DisconnectCause
from proxy.forwarder.listen.eviction import PreAuthConnection, PreAuthConnections
from proxy.forwarder.relay.relay import RelayStart
from proxy.forwarder.workers.authentication import Challenge, ClientEndpoint, ClientIdentity
from proxy.forwarder.workers.broker_links import TargetRefused
from proxy.runtime.loop.deadlines import Deadlines
from proxy.runtime.loop.tasks import InFlightCounter
from proxy.runtime.network.broker_link import BrokerLink, BrokerLinkFailed
from proxy.runtime.observability.metrics import LABEL_VALUES_MAX
from proxy.runtime.rpc.errors import RpcCallRefused, RpcConnectionLost

ENABLED = {"authentication": {"enabled": True, "failure_delay_ms": 200}}
TARGET = "pulsar://b0:6650"
CONNECT = connect(TARGET)
WHO = ClientIdentity(ALICE, b"sealed")


class Steps:
    """A handshake by itself, and what it works with."""

    def __init__(self, nursery: trio.Nursery, **tables: Any) -> None:
        self.play = Play(nursery, **tables)
        self.workers = self.play.workers
        self.in_progress = InFlightCounter()
        self.tasks = TaskInTest()
        services = ConnectionServices(
            self.workers,  # type: ignore[arg-type]
            self.play.relays,  # type: ignore[arg-type]
            self.play.metrics,
            self.in_progress,
            nursery,
            Deadlines(),
        )
        client = ClientEndpoint(CLIENT, trio.current_time(), CERTIFICATE, announcement=b"header")
        self.handshake = Handshake(client, services, self.tasks)

    async def connect_broker(self, failure: Exception | None = None) -> ConnectionFailure | None:
        self.workers.broker_failure = failure
        outcomes: list[ConnectionFailure | None] = []
        self.handshake.connect_broker(WHO, outcomes.append)
        await self.tasks.run()
        (outcome,) = outcomes
        return outcome


class TaskInTest:
    """Runs the one task that is started within the test's own: what it raises is the test's to see."""

    def start_soon(self, async_fn: Callable[..., Awaitable[Any]], *args: Any) -> None:
        self.run = partial(async_fn, *args)


@pytest.fixture
def asked(nursery: trio.Nursery) -> Steps:
    """The client has asked for a broker."""
    steps = Steps(nursery)
    assert steps.handshake.receive_connect(CONNECT) is None
    return steps


# ---- outcomes


async def test_the_broker_gets_the_clients_header(asked: Steps) -> None:
    assert await asked.connect_broker() is None
    assert asked.workers.announcements == [b"header"]


async def test_a_task_tries_what_an_opening_by_callback_leaves_to_it(
    asked: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Callable[[None], None]] = []

    def start_opening(*_: object, on_done: Callable[[None], None]) -> object:
        started.append(on_done)
        return object()

    monkeypatch.setattr("proxy.forwarder.client.handshake.start_opening", start_opening)
    outcomes: list[ConnectionFailure | None] = []
    asked.handshake.connect_broker(WHO, outcomes.append)
    assert not asked.workers.opened
    started[0](None)
    await asked.tasks.run()
    assert (outcomes, len(asked.workers.opened)) == ([None], 1)


async def test_a_connect_that_is_refused(nursery: trio.Nursery) -> None:
    it = Steps(nursery, **ENABLED)
    failure = it.handshake.receive_connect(connect(protocol_version=9))
    assert failure is not None
    assert (failure.event, failure.cause) == (Event.DENIED, DisconnectCause.NOT_ALLOWED)
    assert failure.code == ServerError.UnsupportedVersionError
    assert not it.handshake.needs_rounds


@pytest.mark.parametrize("enabled", [True, False])
async def test_rounds_are_needed_where_clients_are_authenticated(nursery: trio.Nursery, enabled: bool) -> None:
    it = Steps(nursery, authentication={"enabled": enabled})
    assert it.handshake.receive_connect(connect()) is None
    assert it.handshake.needs_rounds is enabled
    assert not it.handshake.wants_broker


async def test_the_outcome_of_each_round(nursery: trio.Nursery) -> None:
    it = Steps(nursery, **ENABLED)
    it.workers.authentication.answers = [challenge(b"q"), authenticated()]
    assert it.handshake.receive_connect(connect()) is None
    outcomes: list[RoundOutcome] = []
    it.handshake.start_round(connect(), outcomes.append)
    await trio.testing.wait_all_tasks_blocked()
    it.handshake.start_round(auth_response(b"a"), outcomes.append)
    await trio.testing.wait_all_tasks_blocked()
    question, accepted = outcomes
    assert isinstance(question, Challenge)
    assert accepted == ClientIdentity(ALICE, b"sealed")


@pytest.mark.parametrize(
    ("answer", "cause", "code", "delay_s"),
    [
        (denied(), DisconnectCause.AUTHENTICATION_FAILED, ServerError.AuthenticationError, 0.2),
        (
            RpcCallRefused(Status.TOO_MANY_REQUESTS, "full"),
            DisconnectCause.AUTHENTICATION_UNAVAILABLE,
            ServerError.ServiceNotReady,
            0.0,
        ),
    ],
    ids=["denied", "no verdict"],
)
async def test_a_round_that_fails_says_how_the_connection_ends(
    nursery: trio.Nursery, answer: Any, cause: DisconnectCause, code: int, delay_s: float
) -> None:
    it = Steps(nursery, **ENABLED)
    it.workers.authentication.answers = [answer]
    assert it.handshake.receive_connect(connect()) is None
    outcomes: list[RoundOutcome] = []
    it.handshake.start_round(connect(), outcomes.append)
    await trio.testing.wait_all_tasks_blocked()
    [failure] = outcomes
    assert isinstance(failure, ConnectionFailure)
    assert (failure.event, failure.cause, failure.code, failure.delay_s) == (Event.DENIED, cause, code, delay_s)


async def test_the_broker_is_connected_or_the_failure_returned(nursery: trio.Nursery) -> None:
    it = Steps(nursery)
    assert it.handshake.receive_connect(connect(TARGET)) is None
    assert it.handshake.wants_broker
    assert await it.connect_broker() is None
    assert it.handshake.has_link
    assert it.handshake.target == TARGET
    other = Steps(nursery)
    assert other.handshake.receive_connect(connect(TARGET)) is None
    failure = await other.connect_broker(TargetRefused("allowed_ports", "port 22"))
    assert failure is not None
    assert (failure.event, failure.cause) == (Event.BROKER_FAILED, DisconnectCause.TARGET_DENIED)
    assert other.play.value("pulsar_proxy_broker_connection_failures_total", reason="allowed_ports") == 1
    await it.handshake.close_link()


async def test_reasons_that_a_captured_lookup_worker_invents_are_bounded_labels(nursery: trio.Nursery) -> None:
    it = Steps(nursery)
    assert it.handshake.receive_connect(connect(TARGET)) is None
    for number in range(LABEL_VALUES_MAX + 2):
        assert await it.connect_broker(TargetRefused(f"invented-{number}", "no target")) is not None
    assert it.play.value("pulsar_proxy_broker_connection_failures_total", reason="invented-0") == 1
    assert it.play.value("pulsar_proxy_broker_connection_failures_total", reason="other") == 2


async def test_the_target_that_logs_show(nursery: trio.Nursery) -> None:
    it = Steps(nursery)
    assert it.handshake.receive_connect(connect("b" * 2 * TARGET_SHOWN_MAX)) is None
    assert it.handshake.target == "b" * TARGET_SHOWN_MAX
    anywhere = BaseCommand()
    anywhere.CopyFrom(connect())
    anywhere.connect.proxy_to_broker_url = ""
    assert it.handshake.receive_connect(anywhere) is None
    assert it.handshake.target == ANY_BROKER
    assert await it.connect_broker() is None
    assert it.handshake.target == "b0:6650"
    await it.handshake.close_link()


# ---- the broker's side


async def test_a_broker_link_is_opened_with_the_clients_identity(asked: Steps) -> None:
    await asked.connect_broker()
    assert asked.workers.opened == [(CONNECT.connect, WHO, CLIENT)]
    assert asked.handshake.link.stream is asked.workers.broker_stream
    assert asked.handshake.link.connected.message.server_version == "the broker"


async def test_before_it_is_open_there_is_no_link(asked: Steps) -> None:
    with pytest.raises(RuntimeError, match="without a broker"):
        _ = asked.handshake.link


@pytest.mark.parametrize(
    ("failure", "cause", "reason", "code", "message", "detail"),
    [
        (
            TargetRefused("allowed_ports", "port 22 is not in brokers.allowed_ports"),
            DisconnectCause.TARGET_DENIED,
            "allowed_ports",
            ServerError.ServiceNotReady,
            TARGET_REFUSED,
            "port 22 is not in brokers.allowed_ports",
        ),
        (
            RpcConnectionLost("the lookup worker has gone"),
            DisconnectCause.LOOKUP_UNAVAILABLE,
            "lookup_worker",
            ServerError.ServiceNotReady,
            CANNOT_CHECK,
            "no answer from the lookup worker: the lookup worker has gone",
        ),
        (
            RpcCallRefused(Status.PRINCIPAL_DESERIALIZATION_FAILURE, "the sealed principal is expired"),
            DisconnectCause.AUTHENTICATION_FAILED,
            "bad_principal",
            ServerError.AuthenticationError,
            AUTHENTICATION_FAILED,
            "PRINCIPAL_DESERIALIZATION_FAILURE: the sealed principal is expired",
        ),
        (
            RpcCallRefused(Status.TOO_MANY_REQUESTS, "busy"),
            DisconnectCause.LOOKUP_UNAVAILABLE,
            "lookup_worker",
            ServerError.ServiceNotReady,
            CANNOT_CHECK,
            "no answer from the lookup worker: TOO_MANY_REQUESTS: busy",
        ),
    ],
    ids=["denied", "no worker can say", "bad principal", "busy"],
)
async def test_a_failed_connect_tells_the_client_the_cause_and_the_log_the_detail(  # noqa: PLR0917 -- the table
    asked: Steps, failure: Exception, cause: DisconnectCause, reason: str, code: int, message: str, detail: str
) -> None:
    failed = await asked.connect_broker(failure)
    assert failed is not None
    assert failed == ConnectionFailure(Event.BROKER_FAILED, cause, code, message, detail)
    assert asked.play.value("pulsar_proxy_broker_connection_failures_total", reason=reason) == 1


async def test_a_brokers_refusal_reaches_the_client_with_its_code_and_message(asked: Steps) -> None:
    refusal = BrokerLinkFailed("refused", "for the log", code=ServerError.AuthorizationError, message="for the client")
    failed = await asked.connect_broker(refusal)
    assert failed is not None
    assert failed.cause is DisconnectCause.BROKER_FAILED
    assert failed.code == ServerError.AuthorizationError
    assert (failed.message, failed.detail) == ("for the client", "for the log")
    assert asked.play.value("pulsar_proxy_broker_connection_failures_total", reason="refused") == 1


async def test_a_defect_is_not_hidden(asked: Steps) -> None:
    with pytest.raises(ZeroDivisionError):
        await asked.connect_broker(ZeroDivisionError())


async def test_close(asked: Steps) -> None:
    await asked.handshake.close_link()
    await asked.connect_broker()
    await asked.handshake.close_link()
    assert await asked.workers.broker.receive() is None


async def test_the_relay_begins_with_what_both_sides_have_said(asked: Steps) -> None:
    """Connected is the relay's first word: nothing can come before it."""
    await asked.connect_broker()
    frame = Frame(b"the CONNECTED frame")
    ends: list[str] = []
    asked.handshake._link = BrokerLink(
        HostPort("b0", 6650),
        asked.workers.broker_stream,
        Connected(frame, CommandConnected(), b"more"),
        on_broker_end=ends.append,
    )
    client, about = trio.testing.memory_stream_pair()[0], StoredRelay(client_address=CLIENT)
    start = asked.handshake.relay_start(client, about, first_to_broker=b"a client in a hurry", session=None)
    assert (start.client, start.broker, start.stored) == (client, asked.workers.broker_stream, about)
    assert start == RelayStart(
        client,
        asked.workers.broker_stream,
        about,
        asked.workers.config.relay,
        first_to_broker=b"a client in a hurry",
        first_to_client=frame.encode() + b"more",
        session=None,
        on_broker_end=ends.append,
    )


# ---- what is counted


async def test_a_handshake_is_counted_until_it_is_decided(nursery: trio.Nursery) -> None:
    it = Steps(nursery)
    assert it.in_progress.count == 0
    it.handshake.finish_handshake()
    assert it.in_progress.count == 0, "it has not started"
    it.handshake.start_handshake()
    assert it.in_progress.count == 1
    for _ in range(2):
        it.handshake.finish_handshake()
        assert it.in_progress.count == 0


# ---- outcomes that come too late


class Late(Play):
    """A session that is over for its machine before the outcome comes; nothing has cancelled its tasks yet."""

    async def over_before_the_verdict(self, target: str = "") -> None:
        """The session ends while the client is authenticated, or while the broker is opened."""
        await self.client.send(connect(target))
        while self.session.state is State.AWAITING_CONNECT:
            await trio.lowlevel.checkpoint()
        assert self.session._machine.handle(Event.SHUT_DOWN) is Action.CLOSE
        await trio.testing.wait_all_tasks_blocked()
        assert self.session.state is State.CLOSED

    def end_now(self) -> None:
        """Let the session end, as what has closed its machine does."""
        self.session._end(DisconnectCause.SHUT_DOWN)

    async def expect_nothing(self) -> None:
        with trio.move_on_after(1) as nothing:
            await self.client.stream.receive_some(1)
        assert nothing.cancelled_caught


async def test_a_yes_that_comes_too_late_leads_nowhere(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    it = Late(nursery, **ENABLED)
    await it.over_before_the_verdict()
    await it.expect_nothing()
    assert it.handshakes.count == 1, "its session's end says so"
    it.end_now()
    await it.ended.wait()
    assert not it.handshakes.count


async def test_a_question_that_comes_too_late_is_not_asked(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    it = Late(nursery, **ENABLED)
    it.workers.authentication.answers = [challenge(b"q")]
    await it.over_before_the_verdict()
    await it.expect_nothing()
    it.end_now()
    await it.ended.wait()
    assert it.workers.authentication.given_up == [it.workers.authentication.requests[0].authentication_id]


async def test_a_yes_that_comes_too_late_opens_no_broker(nursery: trio.Nursery) -> None:
    it = Late(nursery, **ENABLED)
    it.workers.authentication.answers = [authenticated()]
    await it.over_before_the_verdict(TARGET)
    assert it.workers.opened == []
    it.end_now()


async def test_a_broker_that_is_there_too_late_begins_no_relay(nursery: trio.Nursery) -> None:
    it = Late(nursery)
    it.workers.broker_gate = trio.Event()
    await it.over_before_the_verdict(TARGET)
    assert len(it.workers.opened) == 1
    it.workers.broker_gate.set()
    await trio.testing.wait_all_tasks_blocked()
    assert it.session.state is State.CLOSED
    assert not it.relays.in_flight.count
    assert await it.workers.broker.read_all() == b"", "the broker's side is closed"
    assert not it.ended.is_set(), "what has closed the machine ends the session"
    it.end_now()


# ---- whether it may be closed for a newcomer


def counted(all_: PreAuthConnections) -> PreAuthConnection:
    """One more connection that has not authenticated."""
    one = PreAuthConnection(all_, CLIENT)
    all_.add_connection(one)
    return one


async def test_a_client_that_is_asked_something_is_silent_until_it_answers(nursery: trio.Nursery) -> None:
    """Security: after half an authentication no client keeps a place by saying nothing."""
    all_ = PreAuthConnections()
    it = Play(nursery, pre_auth=counted(all_), **ENABLED)
    gate = trio.Event()

    async def slow() -> Any:
        await gate.wait()
        return challenge(b"q")

    it.workers.authentication.answers = [slow, authenticated()]
    it.workers.broker_gate = trio.Event()
    assert all_.has_silent
    await it.client.send(connect("b0:6650"))
    await trio.testing.wait_all_tasks_blocked()
    assert not all_.has_silent, "the auth worker has to answer"
    gate.set()
    await trio.testing.wait_all_tasks_blocked()
    assert all_.has_silent
    await it.client.send(auth_response(b"a"))
    await trio.testing.wait_all_tasks_blocked()
    assert all_.count == 0, "it is known, whatever its broker does"


async def test_without_authentication_it_is_counted_until_it_has_what_it_came_for(nursery: trio.Nursery) -> None:
    all_ = PreAuthConnections()
    it = Play(nursery, pre_auth=counted(all_))
    it.workers.broker_gate = trio.Event()
    await it.client.send(connect("b0:6650"))
    await trio.testing.wait_all_tasks_blocked()
    assert (all_.count, all_.has_silent) == (1, False)
