"""proto.session_clock: the table of KIP-368, without a clock and without sockets."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from proto.errors import LocalProtocolError
from proto.rpc_pb2 import Principal
from proto.session_clock import NEVER, Phase, ReauthenticationFailure, SessionClock

UNIX_MS = 1_700_000_000_000.0


def alice(lives_s: float | None = None, **fields: Any) -> Principal:
    known: dict[str, Any] = {"type": "User", "name": "alice", "method": "token"}
    if lives_s is not None:
        known["expires_at_unix_ms"] = int(UNIX_MS + lives_s * 1000)
    return Principal(**(known | fields))


def clock(
    lives_s: float | None = None, *, at_most_s: float = 0, fraction: float = 0.0, now_s: float = 50
) -> SessionClock:
    return SessionClock(
        alice(lives_s),
        lifetime_ms_max=int(at_most_s * 1000),
        now_s=now_s,
        now_unix_ms=UNIX_MS,
        fraction=fraction,
    )


def accept(
    session: SessionClock, principal: Principal, now_s: float, *, later_ms: float = 0
) -> ReauthenticationFailure | None:
    return session.on_accepted(principal, now_s=now_s, now_unix_ms=UNIX_MS + later_ms, fraction=0.0)


def reauthenticate(
    session: SessionClock, principal: Principal, now_s: float, *, later_ms: float = 0
) -> ReauthenticationFailure | None:
    session.on_challenge_sent(now_s)
    assert session.on_answer(now_s) is None
    return accept(session, principal, now_s, later_ms=later_ms)


# ---- how long


@pytest.mark.conforms("kip-368.3", "kip-368.6", "kip-368.41", "kip-368.44")
@pytest.mark.parametrize(
    ("lives_s", "at_most_s", "lifetime_s"),
    [
        (100, 0, 100),  # at the credential's end, though there is no maximum
        (100, 40, 40),  # at the maximum
        (100, 300, 100),  # at the credential's end
        (None, 40, 40),  # a credential without an end
        (None, 0, NEVER),
        (-5, 0, 0),  # which has ended already
        (-5, 40, 0),
    ],
)
def test_the_shorter_of_both(lives_s: float | None, at_most_s: float, lifetime_s: float) -> None:
    session = clock(lives_s, at_most_s=at_most_s)
    assert session.expires_at_s == 50 + lifetime_s
    assert session.expires == (lifetime_s != NEVER)


@pytest.mark.conforms("kip-368.13")
@pytest.mark.parametrize(("fraction", "at_s"), [(0.0, 85), (0.5, 90), (0.9999, 95)])
def test_when_to_ask(fraction: float, at_s: float) -> None:
    session = clock(at_most_s=100, fraction=fraction)
    assert session.challenge_at_s == pytest.approx(50 + at_s, abs=0.01)
    assert session.challenge_at_s > 50 + at_s - 0.01
    assert session.challenge_at_s <= 50 + at_s + 0.01


@pytest.mark.conforms("kip-368.5")
def test_a_session_without_an_end_is_never_challenged() -> None:
    assert clock().challenge_at_s == NEVER
    assert clock().challenge_at_s > 1e12


def test_no_client_is_challenged_faster_than_once_a_second() -> None:
    assert clock(0.5).challenge_at_s == 51
    session = clock(at_most_s=100)
    session.on_challenge_sent(135)
    session.on_answer(135)
    session.on_answer_lost(135)
    assert session.challenge_at_s == 136


# ---- authenticating again


@pytest.mark.conforms("kip-368.18")
def test_two_in_one_connection() -> None:
    session = clock(at_most_s=100)
    for number in range(2):
        now_s = 50 + 90.0 * (number + 1)
        assert session.challenge_at_s <= now_s
        assert reauthenticate(session, alice(), now_s) is None
        assert session.expires_at_s == now_s + 100
        assert session.challenge_at_s == now_s + 85


def test_a_new_credential_gives_a_new_life_and_an_old_one_none() -> None:
    session = clock(100)
    assert reauthenticate(session, alice(300), 140, later_ms=90_000) is None
    assert session.expires_at_s == 140 + 210
    assert reauthenticate(session, alice(300), 200, later_ms=150_000) is None
    assert session.expires_at_s == 140 + 210


@pytest.mark.conforms("kip-368.46")
def test_several_rounds() -> None:
    session = clock(100)
    session.on_challenge_sent(140)
    for _ in range(3):
        assert session.on_answer(141) is None
        session.on_challenge_sent(141)
        assert session.phase is Phase.CHALLENGED_AGAIN
    assert session.on_answer(142) is None
    assert accept(session, alice(500), 142) is None
    assert session.phase is Phase.QUIET


@pytest.mark.conforms("kip-368.47", "kip-368.48")
@pytest.mark.parametrize(
    ("fields", "failure"),
    [
        ({"name": "bob"}, ReauthenticationFailure.ANOTHER_PRINCIPAL),
        ({"type": "Group"}, ReauthenticationFailure.ANOTHER_PRINCIPAL),
        ({"proxy": "p"}, ReauthenticationFailure.ANOTHER_PRINCIPAL),
        ({"method": "basic"}, ReauthenticationFailure.ANOTHER_METHOD),
    ],
)
def test_another_principal(fields: dict[str, str], failure: ReauthenticationFailure) -> None:
    session = clock(100)
    assert reauthenticate(session, alice(500, **fields), 140) is failure
    assert session.expires_at_s == 150, "no longer life for any session"


def test_the_first_principal_counts_and_not_the_last() -> None:
    session = clock(100)
    assert reauthenticate(session, alice(500), 140) is None
    assert session.principal.expires_at_unix_ms == alice(100).expires_at_unix_ms


def test_answered_twice() -> None:
    session = clock(100)
    session.on_challenge_sent(140)
    assert session.on_answer(141) is None
    assert session.on_answer(141) is ReauthenticationFailure.ANSWERED_TWICE


@pytest.mark.conforms("kip-368.49")
def test_unasked_but_not_too_often() -> None:
    session = clock(100)
    assert session.on_answer(50.9) is ReauthenticationFailure.TOO_SOON
    assert session.on_answer(51) is None
    assert accept(session, alice(100), 51) is None
    assert session.on_answer(51.5) is ReauthenticationFailure.TOO_SOON
    assert session.on_answer(52.0) is None


def test_a_lost_answer_is_an_attempt() -> None:
    """Or a client whose answers cannot be verified could send them as fast as it likes, each to the auth workers."""
    session = clock(100)
    assert session.on_answer(60) is None
    session.on_answer_lost(60.5)
    assert session.on_answer(61.4) is ReauthenticationFailure.TOO_SOON
    assert session.on_answer(61.5) is None


def test_a_lost_answer_brings_no_earlier_challenge() -> None:
    session = clock(at_most_s=100)
    asked_at_s = session.challenge_at_s
    assert session.on_answer(60) is None
    session.on_answer_lost(60.5)
    assert session.challenge_at_s == asked_at_s > 61.5


def test_a_second_challenge_while_one_is_outstanding_is_an_error() -> None:
    session = clock(100)
    session.on_challenge_sent(140)
    assert session.challenge_at_s > 1e9
    with pytest.raises(LocalProtocolError):
        session.on_challenge_sent(141)


@pytest.mark.parametrize("phase", [Phase.QUIET, Phase.CHALLENGED])
def test_a_verdict_on_no_answer(phase: Phase) -> None:
    session = clock(100)
    session.phase = phase
    with pytest.raises(LocalProtocolError):
        accept(session, alice(), 140)


def test_how_long_it_took() -> None:
    session = clock(100)
    session.on_challenge_sent(140)
    session.on_answer(141)
    session.on_challenge_sent(141.5)
    assert session.seconds_since_challenge(143) == 3


def test_how_long_it_took_a_client_that_was_not_asked() -> None:
    session = clock(100)
    session.on_answer(141)
    assert session.seconds_since_challenge(143) == 2


# ---- the wall clock


@pytest.mark.parametrize("step_ms", [-10 * 3_600_000, 10 * 3_600_000])
def test_a_step_of_the_wall_clock_moves_no_end(step_ms: float) -> None:
    """Only a new life asks what time it is."""
    session = clock(100)
    assert session.expires_at_s == 150
    reauthenticate(session, alice(200 + step_ms / 1000), 140, later_ms=90_000 + step_ms)
    assert session.expires_at_s == pytest.approx(140 + 110)


# ---- another process


@pytest.mark.parametrize("lives_s", [100, None])
def test_recalled_as_it_was(lives_s: float | None) -> None:
    session = clock(lives_s)
    again = SessionClock.from_snapshot(alice(lives_s), lifetime_ms_max=0, snapshot=session.snapshot, now_s=99)
    assert again.snapshot == session.snapshot


def test_a_client_under_verification_is_challenged_again_at_once() -> None:
    session = clock(100)
    session.on_challenge_sent(140)
    session.on_answer(141)
    again = SessionClock.from_snapshot(alice(), lifetime_ms_max=0, snapshot=session.snapshot, now_s=142)
    assert again.phase is Phase.QUIET
    assert again.challenge_at_s <= 142
    assert again.expires_at_s == 150


def test_a_failure_that_is_only_observed_leaves_the_old_end_and_asks_no_more() -> None:
    session = clock(100)
    session.on_challenge_sent(140)
    assert session.on_answer(141) is None
    session.on_observed_failure(142)
    assert (session.phase, session.challenge_at_s, session.expires_at_s) == (Phase.QUIET, NEVER, 150)
    assert session.on_answer(142.9) is ReauthenticationFailure.TOO_SOON
    assert session.on_answer(143) is None, "it may come by itself"
    assert accept(session, alice(1000), 143) is None
    assert session.challenge_at_s < NEVER


@pytest.mark.parametrize("lives_s", [100, None])
def test_a_challenge_is_not_hastened_after_a_failure_that_is_only_observed(lives_s: float | None) -> None:
    """Nor by a successor. A new lifetime forgets it, even one without an end."""
    session = clock(lives_s)
    session.on_challenge_sent(140)
    assert session.on_answer(141) is None
    session.on_observed_failure(142)
    session.end_observed = True
    after = SessionClock.from_snapshot(alice(lives_s), lifetime_ms_max=0, snapshot=session.snapshot, now_s=200)
    for one in (session, after):
        one.hasten_challenge(200)
        assert one.challenge_at_s == NEVER
    assert reauthenticate(after, alice(), 201) is None
    after.hasten_challenge(205)
    assert after.challenge_at_s == 205


def test_an_observed_end_is_kept_in_a_snapshot_and_cleared_by_a_reauthentication() -> None:
    session = clock(100)
    assert not session.snapshot.end_observed
    session.end_observed = True
    after = SessionClock.from_snapshot(alice(100), lifetime_ms_max=0, snapshot=session.snapshot, now_s=200)
    assert after.end_observed
    assert reauthenticate(after, alice(1000), 201) is None
    assert not after.end_observed


def test_every_phase_and_event() -> None:
    """Each event in each phase has an outcome, and none a new life but a verdict."""
    for phase, event in itertools.product(Phase, ("on_challenge_sent", "on_answer", "on_answer_lost")):
        session = clock(100)
        session.phase = phase
        try:
            getattr(session, event)(140)
        except LocalProtocolError:
            assert event == "on_challenge_sent"
            assert phase in {Phase.CHALLENGED, Phase.CHALLENGED_AGAIN}
        assert session.expires_at_s == 150
