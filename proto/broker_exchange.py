"""State machine of the proxy's own re-authentication at a relay's broker (KIP-368, PIP-55, PIP-30).

A broker that holds a session of the proxy near its end sends AUTH_CHALLENGE with AUTH_REFRESH: the proxy starts a new
exchange of its mechanism. Where the mechanism has several rounds, the broker's further challenges belong to it.

    QUIET ──challenge──▶ ASKED ──────────answer──▶ QUIET, or UNPROVEN where the broker still owes a proof of its own
    UNPROVEN ──challenge──▶ ASKED_FURTHER ──answer──▶ QUIET, or UNPROVEN
    UNPROVEN ──AUTH_REFRESH──▶ ASKED

The protocol does not confirm the last answer: a broker that does not accept it closes the connection. No broker sends a
second challenge before it has an answer (Pulsar 4.0.8 closes instead), so a second one ends the relay. The number of
rounds is limited as in a handshake. The caller limits how fast exchanges follow each other.
"""

import enum

from proto.broker_handshake import ROUNDS_MAX
from proto.commands import AUTH_REFRESH
from proto.errors import LocalProtocolError, RemoteProtocolError


class ExchangePhase(enum.IntEnum):
    """Phase of the exchange. A forwarder's successor reads the numbers: add, never renumber."""

    QUIET = 0
    ASKED = 1
    """The broker waits for the first data of a new exchange."""
    UNPROVEN = 2
    """The proxy has answered, and the broker still owes a proof in another challenge."""
    ASKED_FURTHER = 3
    """The broker waits for the answer of a further round, which only the process that started the exchange has."""


UNANSWERED = frozenset({ExchangePhase.ASKED, ExchangePhase.ASKED_FURTHER})
"""Phases in which the broker waits for an answer."""


class ChallengeOutOfTurn(RemoteProtocolError):
    """A challenge that no broker sends in this phase. The text states why."""


class BrokerExchange:
    """Exchange of one relay with its broker. ``phase``: the phase in which a predecessor left it."""

    __slots__ = ("_rounds", "phase")

    def __init__(self, phase: ExchangePhase = ExchangePhase.QUIET) -> None:
        self.phase = phase
        self._rounds = 0

    def on_challenge(self, data: bytes) -> None:
        """Handle a challenge with its data; ``phase`` tells what it asks for. Raises ChallengeOutOfTurn."""
        if self.phase in UNANSWERED:
            raise ChallengeOutOfTurn("a challenge before the one before it was answered")
        if self.phase is ExchangePhase.QUIET or data == AUTH_REFRESH:
            self._rounds = 0
            self.phase = ExchangePhase.ASKED
        else:
            self.phase = ExchangePhase.ASKED_FURTHER
        self._rounds += 1
        if self._rounds > ROUNDS_MAX:
            raise ChallengeOutOfTurn(f"more than {ROUNDS_MAX} authentication rounds")

    def on_challenge_lost(self) -> bool:
        """Handle a challenge with data that a predecessor lost; return whether it can be answered all the same.

        It can if it must have asked for a new exchange.
        """
        if self.phase in {ExchangePhase.QUIET, ExchangePhase.ASKED}:
            self.phase = ExchangePhase.ASKED
            return True
        self.phase = ExchangePhase.QUIET
        return False

    def on_failure(self) -> None:
        """Abandon an exchange; the broker may start another one."""
        self.phase = ExchangePhase.QUIET

    @staticmethod
    def phase_after(*, complete: bool) -> ExchangePhase:
        """Return the phase that follows an answer; ``complete``: the broker owes no proof after it."""
        return ExchangePhase.QUIET if complete else ExchangePhase.UNPROVEN

    def on_answer_sent(self, *, complete: bool) -> None:
        """Record that the answer was sent to the broker. Raises LocalProtocolError without a challenge."""
        if self.phase not in UNANSWERED:
            raise LocalProtocolError("an answer without a challenge")
        self.phase = self.phase_after(complete=complete)
