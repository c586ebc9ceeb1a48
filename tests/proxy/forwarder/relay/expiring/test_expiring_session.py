"""proxy.forwarder.relay.expiring.session: the commands to stop at, by the session's time and phase."""

from __future__ import annotations

import pytest
from framed_fakes import FakeReauthenticator, Now, session
from relay_fakes import about_relay

from proto.pulsar_pb2 import BaseCommand
from proto.relay_frames import ALL_TYPES, NO_TYPES
from proto.session_clock import Phase
from proxy.forwarder.relay.close_reason import CloseReason
from proxy.forwarder.relay.expiring.session import ExpiringSession
from proxy.runtime.shared.relay_table import TO_BROKER, TO_CLIENT

BEGIN_S, END_S, GRACE_S = 1000.0, 1100.0, 30.0
ANSWERS = frozenset({BaseCommand.AUTH_RESPONSE})


@pytest.fixture
def expiring() -> ExpiringSession:
    terms = session(Now(), FakeReauthenticator(), grace_ms=int(GRACE_S * 1000))
    expiring = ExpiringSession(about_relay(session=terms.to_stored_session()), terms.clock, terms.reauthenticate)
    assert expiring.clock is not None
    assert expiring.clock.expires_at_s == END_S
    return expiring


def test_before_the_end_only_answers_are_stopped_at(expiring: ExpiringSession) -> None:
    for now_s in (BEGIN_S, END_S - 0.001):
        assert expiring.current_stop_types(TO_BROKER, ANSWERS, now_s) == ANSWERS
        assert expiring.current_stop_types(TO_CLIENT, NO_TYPES, now_s) == NO_TYPES


@pytest.mark.conforms("kip-368.20")
@pytest.mark.parametrize("phase", Phase)
def test_past_the_end_each_command_of_the_client_is_stopped_at(expiring: ExpiringSession, phase: Phase) -> None:
    """Also while an answer is verified: then it waits for the verdict."""
    assert expiring.clock is not None
    expiring.clock.phase = phase
    assert expiring.current_stop_types(TO_BROKER, ANSWERS, END_S) is ALL_TYPES


@pytest.mark.conforms("kip-368.23")
@pytest.mark.parametrize("phase", [Phase.QUIET, Phase.CHALLENGED, Phase.CHALLENGED_AGAIN])
def test_past_its_grace_the_broker_is_stopped(expiring: ExpiringSession, phase: Phase) -> None:
    """A challenge is no answer."""
    assert expiring.clock is not None
    expiring.clock.phase = phase
    assert expiring.current_stop_types(TO_CLIENT, NO_TYPES, END_S) == NO_TYPES
    assert expiring.current_stop_types(TO_CLIENT, NO_TYPES, END_S + GRACE_S - 0.001) == NO_TYPES
    assert expiring.current_stop_types(TO_CLIENT, NO_TYPES, END_S + GRACE_S) is ALL_TYPES


@pytest.mark.conforms("kip-368.17")
def test_while_an_answer_is_verified_the_broker_may_send_past_the_grace(expiring: ExpiringSession) -> None:
    """An auth worker's slowness closes no client; with the verdict the broker is stopped, or a new lifetime begins."""
    clock, late_s = expiring.clock, END_S + 10 * GRACE_S
    assert clock is not None
    clock.phase = Phase.VERIFYING
    assert expiring.current_stop_types(TO_CLIENT, NO_TYPES, late_s) == NO_TYPES
    clock.on_answer_lost(late_s)
    assert expiring.current_stop_types(TO_CLIENT, NO_TYPES, late_s) is ALL_TYPES


def test_while_the_relay_closes_the_brokers_last_frames_are_delivered(expiring: ExpiringSession) -> None:
    expiring.close_reason = CloseReason.EXPIRED
    assert expiring.current_stop_types(TO_CLIENT, NO_TYPES, END_S + 10 * GRACE_S) == NO_TYPES
    assert expiring.current_stop_types(TO_BROKER, ANSWERS, END_S + 10 * GRACE_S) is ALL_TYPES


def test_without_a_clock_nothing_ends() -> None:
    terms = session(Now(), FakeReauthenticator(), clock=None, counts_messages=True)
    counted = ExpiringSession(about_relay(session=terms.to_stored_session()), None, terms.reauthenticate)
    for way in (TO_BROKER, TO_CLIENT):
        assert counted.current_stop_types(way, NO_TYPES, 1e12) == NO_TYPES
