"""proxy.forwarder.session.handshake and farewell: what comes too late does nothing, and what nobody reads is not
waited for.

The ways through a handshake are told as dialogues in test_session_client_session.
"""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing
from forwarder_fakes import CLIENT, Play, authenticated, challenge, connect

from proto.client_machine import ClientMachine, State
from proxy.forwarder.listen.pre_auth import PreAuthConnection, PreAuthConnections
from proxy.forwarder.session.broker_connector import BrokerConnector
from proxy.forwarder.session.closing import ConnectionCloser
from proxy.forwarder.session.handshake import Handshake
from proxy.forwarder.session.transport import ClientTransport
from proxy.forwarder.workers.authentication import ClientEndpoint
from proxy.runtime.loop.tasks import InFlightCounter


class Shaking:
    """A handshake, in place of whose session there is a list of what it was told."""

    def __init__(self, nursery: trio.Nursery, **tables: Any) -> None:
        self.backends = Play(nursery, **tables).workers
        ours, self.theirs = trio.testing.memory_stream_pair()
        self.wire = ClientTransport(ours, nursery, max_frame_bytes=1 << 20, write_timeout_ms=1000)
        self.wire.start_reading(lambda: None, lambda _error: None)
        self.machine = ClientMachine()
        self.told: list[str] = []
        self.handshakes = InFlightCounter()
        self.strangers = PreAuthConnections()
        self.stranger = PreAuthConnection(self.strangers, CLIENT)
        self.strangers.add(self.stranger)
        self.handshake = Handshake(
            self,
            ClientEndpoint(CLIENT, trio.current_time(), b"the client's certificate"),
            self.backends,  # type: ignore[arg-type]
            Play(nursery).metrics,
            broker=BrokerConnector(self.backends, CLIENT),  # type: ignore[arg-type]
            machine=self.machine,
            wire=self.wire,
            tasks=nursery,
            handshakes=self.handshakes,
            stranger=self.stranger,
        )
        self.handshake.begin()

    def __getattr__(self, name: str) -> Any:
        return lambda *_args, **_kwargs: self.told.append(name)

    async def over_before_the_verdict(self, target: str = "") -> None:
        """The session ends while it is judged, or while the broker is opened."""
        self.machine.state = State.AUTHENTICATING
        self.handshake.take(connect(target))
        self.machine.state = State.CLOSED
        await trio.testing.wait_all_tasks_blocked()
        assert self.machine.state is State.CLOSED


ENABLED = {"authentication": {"enabled": True}}


async def test_a_yes_that_comes_too_late_leads_nowhere(nursery: trio.Nursery) -> None:
    it = Shaking(nursery, **ENABLED)
    await it.over_before_the_verdict()
    assert "enter_lookup_mode" not in it.told
    assert it.handshakes.count == 1, "its session's end says so"
    it.handshake.end()
    assert not it.handshakes.count


async def test_a_question_that_comes_too_late_is_not_asked(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    it = Shaking(nursery, **ENABLED)
    it.backends.authentication.answers = [challenge(b"q")]
    await it.over_before_the_verdict()
    with trio.move_on_after(1) as nothing:
        await it.theirs.receive_some(1)
    assert nothing.cancelled_caught
    it.handshake.end()
    assert it.backends.authentication.given_up == [it.backends.authentication.requests[0].authentication_id]


async def test_a_yes_that_comes_too_late_opens_no_broker(nursery: trio.Nursery) -> None:
    it = Shaking(nursery, **ENABLED)
    it.backends.authentication.answers = [authenticated()]
    await it.over_before_the_verdict("pulsar://b0:6650")
    assert it.backends.opened == []


async def test_a_broker_that_is_there_too_late_begins_no_relay(nursery: trio.Nursery) -> None:
    it = Shaking(nursery)
    it.backends.broker_gate = trio.Event()
    it.machine.state = State.AUTHENTICATING
    it.handshake.take(connect("pulsar://b0:6650"))
    await trio.testing.wait_all_tasks_blocked()
    assert len(it.backends.opened) == 1
    it.machine.state = State.CLOSED
    it.backends.broker_gate.set()
    await trio.testing.wait_all_tasks_blocked()
    assert "begin_relay" not in it.told
    assert "fail" not in it.told


# ---- whether it may be closed for a newcomer


async def test_a_client_that_is_asked_something_is_silent_until_it_answers(nursery: trio.Nursery) -> None:
    """Security: after half an authentication nobody keeps a place by saying nothing."""
    it = Shaking(nursery, **ENABLED)
    it.backends.authentication.answers = [challenge(b"q"), authenticated()]
    assert it.strangers.any_silent
    it.machine.state = State.AUTHENTICATING
    it.handshake.take(connect())
    assert not it.strangers.any_silent, "the auth worker has to answer"
    await trio.testing.wait_all_tasks_blocked()
    assert it.strangers.any_silent
    it.machine.state = State.AUTHENTICATING
    it.handshake.take(connect("b0:6650"))
    await trio.testing.wait_all_tasks_blocked()
    assert it.strangers.count == 0, "it is known, whatever its broker does"


async def test_without_authentication_it_is_a_stranger_until_it_has_what_it_came_for(nursery: trio.Nursery) -> None:
    it = Shaking(nursery)
    it.backends.broker_gate = trio.Event()
    it.machine.state = State.AUTHENTICATING
    it.handshake.take(connect("b0:6650"))
    await trio.testing.wait_all_tasks_blocked()
    assert (it.strangers.count, it.strangers.any_silent) == (1, False)


# ---- the last word


async def last_word(stream: trio.abc.HalfCloseableStream, nursery: trio.Nursery) -> ConnectionCloser:
    """Said, as far as the client takes it; nothing more is read from it."""
    wire = ClientTransport(stream, nursery, max_frame_bytes=1 << 20, write_timeout_ms=1000)
    wire.start_reading(lambda: None, lambda _error: None)
    farewell = ConnectionCloser(wire)
    farewell.set_final_frame(b"the last word")
    await farewell.send_final_frame()
    await wire.stop_reading()
    return farewell


async def test_whoever_does_not_take_the_last_word_is_not_waited_for(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    takes_nothing = trio.testing.MemorySendStream(send_all_hook=trio.sleep_forever)
    stream = trio.StapledStream(takes_nothing, trio.testing.MemoryReceiveStream())
    farewell = await last_word(stream, nursery)
    began = trio.current_time()
    assert began == pytest.approx(1.0)
    await farewell.close_connection()
    assert trio.current_time() == began


async def test_a_client_may_read_its_last_word_though_the_process_ends(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """A close with unread bytes would be a reset, and take the word away from it."""
    ours, theirs = trio.testing.memory_stream_pair()
    farewell = await last_word(ours, nursery)
    with trio.CancelScope() as ending:
        ending.cancel()
        await farewell.close_connection()
    assert trio.current_time() == pytest.approx(1.0), "it had its time"
    assert await theirs.receive_some() == b"the last word"
