"""proxy.forwarder.session.handshake: each step returns its outcome; one that comes too late does nothing.

The ways through a handshake are told as dialogues in test_session_handshake_dialogues.
"""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing
from forwarder_fakes import ALICE, CERTIFICATE, CLIENT, Play, auth_response, authenticated, challenge, connect, denied

from proto.client_machine import Action, Event, State
from proto.pulsar_pb2 import BaseCommand, ServerError
from proxy.forwarder.disconnect_cause import DisconnectCause
from proxy.forwarder.listen.pre_auth import PreAuthConnection, PreAuthConnections
from proxy.forwarder.session.broker_connector import BrokerConnector
from proxy.forwarder.session.failures import ConnectionFailure
from proxy.forwarder.session.handshake import ANY_BROKER, TARGET_SHOWN_MAX, Handshake
from proxy.forwarder.workers.authentication import Challenge, ClientEndpoint, ClientIdentity
from proxy.forwarder.workers.broker_links import TargetRefused
from proxy.runtime.loop.deadlines import Deadlines
from proxy.runtime.loop.tasks import InFlightCounter
from proxy.runtime.observability.metrics import LABEL_VALUES_MAX
from proxy.runtime.rpc.client import RpcConnectionLost

ENABLED = {"authentication": {"enabled": True, "failure_delay_ms": 200}}
TARGET = "pulsar://b0:6650"


class Steps:
    """A handshake by itself, and what it works with."""

    def __init__(self, nursery: trio.Nursery, **tables: Any) -> None:
        self.play = Play(nursery, **tables)
        self.workers = self.play.workers
        self.connector = BrokerConnector(self.workers, CLIENT, Deadlines(), nursery)  # type: ignore[arg-type]
        self.in_progress = InFlightCounter()
        self.handshake = Handshake(
            ClientEndpoint(CLIENT, trio.current_time(), CERTIFICATE),
            self.workers,  # type: ignore[arg-type]
            self.play.metrics,
            self.connector,
            self.in_progress,
        )

    async def connect_broker(self) -> ConnectionFailure | None:
        send, receive = trio.open_memory_channel[ConnectionFailure | None](1)
        self.handshake.connect_broker(ClientIdentity(ALICE), send.send_nowait)
        return await receive.receive()


# ---- outcomes


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
    assert isinstance(await it.handshake.run_round(connect()), Challenge)
    accepted = await it.handshake.run_round(auth_response(b"a"))
    assert accepted == ClientIdentity(ALICE, b"sealed")


@pytest.mark.parametrize(
    ("answer", "cause", "code", "delay_s"),
    [
        (denied(), DisconnectCause.AUTHENTICATION_FAILED, ServerError.AuthenticationError, 0.2),
        (
            RpcConnectionLost("gone"),
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
    failure = await it.handshake.run_round(connect())
    assert isinstance(failure, ConnectionFailure)
    assert (failure.event, failure.cause, failure.code, failure.delay_s) == (Event.DENIED, cause, code, delay_s)


async def test_the_broker_is_connected_or_the_failure_returned(nursery: trio.Nursery) -> None:
    it = Steps(nursery)
    assert it.handshake.receive_connect(connect(TARGET)) is None
    assert it.handshake.wants_broker
    assert await it.connect_broker() is None
    assert it.connector.is_open
    assert it.handshake.target == TARGET
    other = Steps(nursery)
    other.workers.broker_failure = TargetRefused("allowed_ports", "port 22")
    assert other.handshake.receive_connect(connect(TARGET)) is None
    failure = await other.connect_broker()
    assert failure is not None
    assert (failure.event, failure.cause) == (Event.BROKER_FAILED, DisconnectCause.TARGET_DENIED)
    assert other.play.value("pulsar_proxy_broker_connection_failures_total", reason="allowed_ports") == 1
    await it.connector.close_link()


async def test_reasons_that_a_captured_lookup_worker_invents_are_bounded_labels(nursery: trio.Nursery) -> None:
    it = Steps(nursery)
    assert it.handshake.receive_connect(connect(TARGET)) is None
    for number in range(LABEL_VALUES_MAX + 2):
        it.workers.broker_failure = TargetRefused(f"invented-{number}", "no target")
        assert await it.connect_broker() is not None
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
    await it.connector.close_link()


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
