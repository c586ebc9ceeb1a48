"""proxy.forwarder.client.lookup_control: what comes while the session is being closed, or is over."""

from __future__ import annotations

import trio
import trio.testing
from forwarder_fakes import (
    ALICE,
    lookup,
)
from lifetime_fakes import FAILED, Begin, Held, answer_again, token, unix_ms

from proto.session_clock import Phase
from proxy.forwarder.lifetime.closing import CloseReason

# ---- when a session ends, and when its client is asked


async def test_a_verdict_that_comes_while_it_is_being_closed_changes_nothing(
    life: Begin, autojump_clock: trio.testing.MockClock
) -> None:
    """Not even where a command waits for it; and what it was closed for first is why."""
    it = await Held(life, token(100)).it.enter()
    session = it.session.lifetime.expiring_session
    assert session is not None
    await it.must_be_asked()
    await it.client.send(answer_again())
    await it.at(101)
    await it.client.send(lookup())
    await it.settle()
    session.control.start_closing(CloseReason.FAILED)
    session.control.start_closing(CloseReason.EXPIRED)
    assert session.clock is not None
    session.clock.on_accepted(ALICE, now_s=trio.current_time(), now_unix_ms=unix_ms(), fraction=0)
    session.control.resume_after_verdict()
    await it.must_be_over("reauthentication_failed", FAILED)
    assert it.workers.forwarded == []


async def test_a_session_in_lookup_mode_has_no_producer_and_is_over_when_it_is(
    life: Begin, autojump_clock: trio.testing.MockClock
) -> None:
    it = await life(100).enter()
    session = it.session.lifetime.expiring_session
    assert session is not None
    assert session.clock is not None
    assert not session.control.has_opened_producer
    assert not session.control.has_ended
    assert session.clock.phase is Phase.QUIET
    await it.client.stream.aclose()
    await it.end()
    assert session.control.has_ended
    session.control.close_with_error(b"too late")
