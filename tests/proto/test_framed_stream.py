"""The rules at a frame's boundary, held against a table of its own: written from KIP-368 and docs/session-lifetime.md,
not from the module.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from proto.framed_stream import (
    CHALLENGE_BYTES_MAX,
    OWN_FRAMES,
    RULES,
    Action,
    FramedStream,
    Own,
    Seen,
    Standing,
    standing_at,
)
from proto.pulsar_pb2 import BaseCommand
from proto.relay_frames import ALL_TYPES, NO_TYPES
from proto.rpc_pb2 import Principal
from proto.session_clock import Phase, SessionClock

BEGIN_S, END_S, GRACE_S = 1000.0, 1100.0, 30.0
LATE_S = END_S + GRACE_S
ANSWER_BYTES_MAX = 100

PASS, REMOVE, REFUSE, HOLD = Action.PASS, Action.REMOVE, Action.REFUSE, Action.HOLD
COUNT, CLOSE, CUT, WAIT = Action.COUNT, Action.CLOSE, Action.CUT, Action.WAIT
INJECT, DROP = Action.INJECT, Action.DROP


@dataclass
class Session:
    """What a stream knows of its session."""

    clock: SessionClock | None
    close_reason: int = 0
    observes_ends: bool = False
    grace_s: float = GRACE_S
    answer_bytes_max: int = ANSWER_BYTES_MAX


def session(phase: Phase = Phase.QUIET, *, counted: bool = False, observes: bool = False, closing: int = 0) -> Session:
    """One that ends at END_S."""
    clock = SessionClock(Principal(), lifetime_ms_max=100_000, now_s=BEGIN_S, now_unix_ms=0, fraction=0)
    clock.phase, clock.end_observed = phase, counted
    return Session(clock, closing, observes)


def endless(closing: int = 0) -> Session:
    return Session(None, closing)


# fmt: off
STANDINGS: list[tuple[Session, float, Standing]] = [
    (session(),                                              END_S - 0.001, Standing.LIVE),
    (session(Phase.VERIFYING, counted=True, observes=True),  END_S - 0.001, Standing.LIVE),
    (endless(),                                              1e12,          Standing.LIVE),
    (session(),                                              END_S,         Standing.ENDED),
    (session(Phase.CHALLENGED),                              END_S,         Standing.ENDED),
    (session(Phase.CHALLENGED_AGAIN),                        LATE_S - .001, Standing.ENDED),
    (session(Phase.VERIFYING),                               END_S,         Standing.VERIFYING),
    (session(Phase.VERIFYING),                               1e12,          Standing.VERIFYING),
    (session(),                                              LATE_S,        Standing.OVERDUE),
    (session(Phase.CHALLENGED),                              LATE_S,        Standing.OVERDUE),
    (session(Phase.CHALLENGED_AGAIN),                        LATE_S,        Standing.OVERDUE),
    (session(observes=True),                                 END_S,         Standing.OBSERVED),
    (session(observes=True),                                 LATE_S,        Standing.OBSERVED_OVERDUE),
    (session(Phase.VERIFYING, observes=True),                LATE_S,        Standing.TOLERATED),
    (session(counted=True, observes=True),                   END_S,         Standing.TOLERATED),
    (session(counted=True),                                  END_S,         Standing.ENDED),
    (session(closing=2),                                     END_S - 0.001, Standing.CLOSING),
    (session(closing=2),                                     LATE_S - .001, Standing.CLOSING),
    (session(closing=2, observes=True),                      LATE_S,        Standing.CLOSING),
    (endless(closing=2),                                     1e12,          Standing.CLOSING),
    (session(closing=2),                                     LATE_S,        Standing.CLOSING_OVERDUE),
    (session(Phase.VERIFYING, closing=2),                    LATE_S,        Standing.CLOSING_OVERDUE),
]

COLUMNS = (
    Standing.LIVE, Standing.VERIFYING, Standing.ENDED, Standing.OVERDUE, Standing.OBSERVED, Standing.OBSERVED_OVERDUE,
    Standing.TOLERATED, Standing.CLOSING, Standing.CLOSING_OVERDUE,
)
TABLE: dict[Seen, tuple[Action, ...]] = {
    # columns:               live    verifying ended   overdue observed  .. overdue tolerated closing .. overdue
    Seen.CLIENT_KEEP_ALIVE: (PASS,   PASS,     PASS,   PASS,   PASS,     PASS,      PASS,     WAIT,   WAIT),
    Seen.ANSWER:            (REMOVE, REMOVE,   REMOVE, REMOVE, REMOVE,   REMOVE,    REMOVE,   WAIT,   WAIT),
    Seen.LARGE_ANSWER:      (REFUSE, REFUSE,   REFUSE, REFUSE, REFUSE,   REFUSE,    REFUSE,   WAIT,   WAIT),
    Seen.COMMAND:           (PASS,   HOLD,     CLOSE,  CLOSE,  COUNT,    COUNT,     PASS,     WAIT,   WAIT),
    Seen.COMMAND_REST:      (PASS,   PASS,     PASS,   CUT,    PASS,     COUNT,     PASS,     PASS,   CUT),
    Seen.BROKER_KEEP_ALIVE: (PASS,   PASS,     PASS,   PASS,   PASS,     PASS,      PASS,     PASS,   PASS),
    Seen.CHALLENGE:         (REMOVE, REMOVE,   REMOVE, REMOVE, REMOVE,   REMOVE,    REMOVE,   REMOVE, REMOVE),
    Seen.LARGE_CHALLENGE:   (REFUSE, REFUSE,   REFUSE, REFUSE, REFUSE,   REFUSE,    REFUSE,   REFUSE, REFUSE),
    Seen.DELIVERY:          (PASS,   PASS,     PASS,   CLOSE,  PASS,     COUNT,     PASS,     PASS,   PASS),
    Seen.DELIVERY_REST:     (PASS,   PASS,     PASS,   CUT,    PASS,     COUNT,     PASS,     PASS,   PASS),
}

OWN_TABLE: dict[Own, tuple[Action, ...]] = {
    # columns:         quiet   challenged verifying challenged again, and the same while the session closes
    Own.CHALLENGE:     (INJECT, DROP,      DROP,     DROP,   INJECT, DROP,   DROP,   DROP),
    Own.ROUND:         (DROP,   DROP,      INJECT,   DROP,   DROP,   DROP,   INJECT, DROP),
    Own.ERROR:         (INJECT, INJECT,    INJECT,   INJECT, INJECT, INJECT, INJECT, INJECT),
    Own.BROKER_ANSWER: (INJECT, INJECT,    INJECT,   INJECT, DROP,   DROP,   DROP,   DROP),
}
# fmt: on

CASES = [
    pytest.param(seen, standing, action, id=f"{seen.name}-{standing.name}")
    for seen, actions in TABLE.items()
    for standing, action in zip(COLUMNS, actions, strict=True)
]
IN_STANDING = {standing: (known, now_s) for known, now_s, standing in STANDINGS}
"""One session and time for each."""


def test_the_tables_of_this_test_are_complete() -> None:
    assert set(TABLE) == set(Seen) == set(RULES)
    assert set(COLUMNS) == set(Standing) == set(IN_STANDING)
    assert set(OWN_TABLE) == set(Own) == set(OWN_FRAMES)


@pytest.mark.conforms("kip-368.17")
@pytest.mark.parametrize(("known", "now_s", "standing"), STANDINGS)
def test_how_a_session_stands(known: Session, now_s: float, standing: Standing) -> None:
    assert standing_at(known, now_s) is standing


@pytest.mark.parametrize(("seen", "standing", "action"), CASES)
def test_every_rule(seen: Seen, standing: Standing, action: Action) -> None:
    assert RULES[seen][standing] is action


FRAMES = {
    # the way to the broker, the type, the length
    Seen.ANSWER: (True, BaseCommand.AUTH_RESPONSE, ANSWER_BYTES_MAX),
    Seen.LARGE_ANSWER: (True, BaseCommand.AUTH_RESPONSE, ANSWER_BYTES_MAX + 1),
    Seen.COMMAND: (True, BaseCommand.SEND, 1 << 20),
    Seen.CHALLENGE: (False, BaseCommand.AUTH_CHALLENGE, CHALLENGE_BYTES_MAX),
    Seen.LARGE_CHALLENGE: (False, BaseCommand.AUTH_CHALLENGE, CHALLENGE_BYTES_MAX + 1),
    Seen.DELIVERY: (False, BaseCommand.MESSAGE, 1 << 20),
}
RESTS = {Seen.COMMAND_REST: True, Seen.DELIVERY_REST: False}


@pytest.mark.conforms("kip-368.20", "kip-368.23")
@pytest.mark.parametrize(("seen", "standing", "action"), CASES)
def test_a_stream_decides_by_the_rules(seen: Seen, standing: Standing, action: Action) -> None:
    known, now_s = IN_STANDING[standing]
    if seen in FRAMES and known.clock is not None:
        to_broker, command_type, length = FRAMES[seen]
        stream = FramedStream(known, to_broker=to_broker, removes_challenges=True)
        assert stream.decide_frame(command_type, length, now_s) is action
        assert stream.awaits_verdict is (action is HOLD)
    elif seen in RESTS:
        assert FramedStream(known, to_broker=RESTS[seen]).decide_rest(now_s) is action


@pytest.mark.parametrize("standing", Standing)
def test_a_stream_stops_at_what_the_rules_do_not_let_pass(standing: Standing) -> None:
    """A scan is as fast as it can be where they let everything pass."""
    known, now_s = IN_STANDING[standing]
    for to_broker, seen, usual in (
        (True, Seen.COMMAND, {BaseCommand.AUTH_RESPONSE} if known.clock is not None else set()),
        (False, Seen.DELIVERY, {BaseCommand.AUTH_CHALLENGE}),
    ):
        stream = FramedStream(known, to_broker=to_broker, removes_challenges=True)
        assert stream.usual_stop_types == usual
        stops = stream.stop_types(now_s)
        if known.clock is None or now_s < known.clock.expires_at_s or RULES[seen][standing] is PASS:
            assert stops == usual
        else:
            assert stops is ALL_TYPES


def test_a_challenge_that_is_the_clients_passes() -> None:
    stream = FramedStream(session(), to_broker=False)
    assert stream.stop_types(BEGIN_S) == NO_TYPES
    assert stream.decide_frame(BaseCommand.AUTH_CHALLENGE, 10, BEGIN_S) is PASS


def test_only_the_first_producer_is_stopped_at() -> None:
    stream = FramedStream(session(), to_broker=True, watches_producers=True)
    assert stream.stop_types(BEGIN_S) == {BaseCommand.AUTH_RESPONSE, BaseCommand.PRODUCER}
    assert stream.watches_producers
    assert stream.decide_frame(BaseCommand.PRODUCER, 10, BEGIN_S) is PASS
    stream.record_producer()
    assert not stream.watches_producers
    assert stream.stop_types(BEGIN_S) == {BaseCommand.AUTH_RESPONSE}


# ---- at a boundary


@pytest.mark.parametrize("own", Own)
def test_an_own_frame_is_put_in_unless_it_is_obsolete(own: Own) -> None:
    cases = [(closing, phase) for closing in (0, 2) for phase in Phase]
    assert sorted(Phase) == [Phase.QUIET, Phase.CHALLENGED, Phase.VERIFYING, Phase.CHALLENGED_AGAIN]
    for (closing, phase), action in zip(cases, OWN_TABLE[own], strict=True):
        stream = FramedStream(session(phase, closing=closing), to_broker=own is Own.BROKER_ANSWER)
        stream.own, stream.ends = (own, b"frame"), True
        assert stream.decide_boundary() is action, (own, phase, closing)


@pytest.mark.parametrize("to_broker", [False, True])
def test_at_a_boundary_own_frames_come_first_then_the_end_then_waits(to_broker: bool) -> None:
    known = session()
    stream = FramedStream(known, to_broker=to_broker)
    assert stream.decide_boundary() is PASS
    known.close_reason = 2
    assert stream.decide_boundary() is (WAIT if to_broker else PASS), "the broker's last frames are delivered"
    known.close_reason, stream.awaits_verdict = 0, True
    assert stream.decide_boundary() is WAIT
    stream.ends = True
    assert stream.decide_boundary() is Action.END
    stream.own = Own.ERROR, b"frame"
    assert stream.decide_boundary() is INJECT
    assert stream.decide_boundary(may_inject=False) is Action.END


def test_without_a_clock_only_a_broker_is_answered() -> None:
    stream = FramedStream(endless(), to_broker=True)
    assert stream.usual_stop_types == NO_TYPES
    stream.own = Own.BROKER_ANSWER, b"frame"
    assert stream.decide_boundary() is INJECT
