"""Injection of the proxy's own bytes into a framed relay's stream, at a frame boundary, through the empty pipe.

A successor must know of what is in the pipe whether it is the proxy's own. FramedJournal describes the order of stores.
"""

import os
from collections.abc import Callable

from proto.broker_exchange import ExchangePhase
from proto.framed_stream import Own
from proto.session_clock import Phase
from proxy.forwarder.lifetime.closing import CloseReason
from proxy.forwarder.lifetime.session import INJECTION_BYTES_MAX, FrameCursor, Injection
from proxy.forwarder.relay.framed_control import control_of
from proxy.forwarder.relay.framed_journal import FramedJournal
from proxy.forwarder.relay.relay import Direction
from proxy.forwarder.relay.splice_pump import SplicePump

_INJECTIONS: dict[Own, tuple[Injection, int]] = {
    Own.CHALLENGE: (Injection.CHALLENGE, Phase.CHALLENGED),
    Own.ROUND: (Injection.CHALLENGE, Phase.CHALLENGED_AGAIN),
    Own.ERROR: (Injection.CLOSING_ERROR, CloseReason.ERROR_SENT),
    Own.BROKER_ANSWER: (Injection.BROKER_ANSWER, ExchangePhase.QUIET),
}
"""How the journal knows each, and the value of the store that completes it."""


class FrameInjector:
    """Puts challenges, errors, answers to brokers and held heads into the pipes of framed directions.

    ``now``: seconds of the clock that all of the cluster's processes share.
    """

    def __init__(self, pump: SplicePump, journal: FramedJournal, now: Callable[[], float]) -> None:
        self._pump = pump
        self._journal = journal
        self._now = now

    def inject(self, direction: Direction, cursor: FrameCursor, data: bytes, what: Injection, completion: int) -> bool:
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
        direction.held_bytes = written
        self._pump.lend_pipe(direction, pipe)
        self._pump.drain_pipe(direction)
        return True

    def inject_own(self, direction: Direction, cursor: FrameCursor) -> bool:
        """Put in the stream's own frame; return False if there is no pipe now."""
        session, stream = cursor.session, cursor.stream
        assert stream.own is not None
        kind, frame = stream.own
        what, completion = _INJECTIONS[kind]
        if session.broker_challenges is not None and kind is Own.BROKER_ANSWER:
            completion = session.broker_challenges.phase_after_answer
        if not self.inject(direction, cursor, frame, what, completion):
            return False
        stream.own = None
        control_of(session).record_own_frame(kind, self._now())
        return True
