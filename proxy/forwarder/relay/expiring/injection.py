"""Injection of the proxy's own bytes into a framed relay's stream, at a frame boundary, through the empty pipe.

A successor must know of what is in the pipe whether it is the proxy's own. FramedJournal describes the order of stores.
"""

import os
from collections.abc import Callable

from proto.session_clock import Phase
from proxy.forwarder.relay.close_reason import CloseReason
from proxy.forwarder.relay.expiring.control import SplicedSessionControl
from proxy.forwarder.relay.expiring.framed_relay import FramedDirection
from proxy.forwarder.relay.expiring.journal import FramedJournal
from proxy.forwarder.relay.expiring.session import INJECTION_BYTES_MAX, FrameCursor, Injection
from proxy.forwarder.relay.splice_pump import SplicePump


class FrameInjector:
    """Puts challenges, errors, answers to brokers and held heads into the pipes of framed directions.

    ``now``: seconds of the clock that all of the cluster's processes share.
    """

    def __init__(self, pump: SplicePump, journal: FramedJournal, now: Callable[[], float]) -> None:
        self._pump = pump
        self._journal = journal
        self._now = now

    def inject(
        self, direction: FramedDirection, cursor: FrameCursor, data: bytes, what: Injection, completion: int
    ) -> bool:
        """Put bytes into the direction's pipe, which is empty, and deliver what the sink accepts at once.

        ``completion`` is the value of the one store that makes it true for a successor. Returns False if there is no
        pipe now.
        """
        if len(data) > INJECTION_BYTES_MAX:
            pipe = self._pump.get_pipe_for(direction, len(data))
        else:
            pipe = self._pump.get_empty_pipe(direction)
        if pipe is None:
            return False
        self._journal.begin_injection(direction, cursor, pipe, what)
        written = os.write(pipe.write_end, data)
        assert written == len(data)  # it was empty, and is large enough
        self._journal.complete_injection(cursor, what, completion)
        direction.in_pipe = written
        self._pump.lend_pipe(direction, pipe)
        self._pump.drain_pipe(direction)
        return True

    def inject_pending(self, direction: FramedDirection, cursor: FrameCursor, frame: bytes, what: Injection) -> bool:
        """Inject the cursor's pending frame, or drop it if it is obsolete; return False if there is no pipe now."""
        if what is Injection.CLOSING_ERROR:
            if self.inject(direction, cursor, frame, what, CloseReason.ERROR_SENT):
                cursor.pending_injection = None
            return cursor.pending_injection is None
        if what is Injection.BROKER_ANSWER:
            return self._inject_broker_answer(direction, cursor, frame)
        return self._inject_challenge(direction, cursor, frame)

    def _inject_challenge(self, direction: FramedDirection, cursor: FrameCursor, frame: bytes) -> bool:
        session = cursor.session
        clock = session.clock
        assert clock is not None  # or there is no challenge
        if (frame == session.terms.challenge) != (clock.phase is Phase.QUIET):
            cursor.pending_injection = None  # overtaken by an answer that came unasked
            return True
        phase = Phase.CHALLENGED if clock.phase is Phase.QUIET else Phase.CHALLENGED_AGAIN
        if not self.inject(direction, cursor, frame, Injection.CHALLENGE, phase):
            return False
        cursor.pending_injection = None
        clock.on_challenge_sent(self._now())
        control_of(cursor).recheck_held_command()  # a command that waited for this round's verdict came too late
        return True

    def _inject_broker_answer(self, direction: FramedDirection, cursor: FrameCursor, frame: bytes) -> bool:
        session = cursor.session
        challenges = session.broker_challenges
        assert challenges is not None  # or there is no answer
        if not session.close_reason:  # else nothing more passes to the broker
            if not self.inject(direction, cursor, frame, Injection.BROKER_ANSWER, challenges.phase_after_answer):
                return False
            challenges.on_answer_sent()
        cursor.pending_injection = None
        return True


def control_of(cursor: FrameCursor) -> SplicedSessionControl:
    """Return the control of a framed relay that is spliced."""
    control = cursor.session.control
    assert isinstance(control, SplicedSessionControl)  # FramedSplicePump set it
    return control
