"""The proxy's own re-authentication at the broker of a relay: which challenge asks for what (KIP-368, PIP-55, PIP-30).

A broker whose session with the proxy nears its end sends AUTH_CHALLENGE with AUTH_REFRESH: the proxy begins the rounds
of its mechanism anew. Where the mechanism has several rounds, the broker's further challenges belong to these.

    QUIET ──challenge──▶ ASKED ──────────answer──▶ QUIET, or UNPROVEN where the broker still owes a proof of its own
    UNPROVEN ──challenge──▶ ASKED_FURTHER ──answer──▶ QUIET, or UNPROVEN
    UNPROVEN ──AUTH_REFRESH──▶ ASKED

Nothing tells the proxy whether its last answer was accepted: a broker that does not accept it ends the connection. No
broker asks a second time before it was answered (Pulsar 4.0.8 closes instead), so that ends the relay; rounds are
capped as in a handshake. How fast exchanges may follow each other is the caller's to see to.
"""

import enum

from proto.broker_handshake import ROUNDS_MAX
from proto.commands import AUTH_REFRESH
from proto.errors import LocalProtocolError, RemoteProtocolError


class ExchangePhase(enum.IntEnum):
    """Where the exchange stands. The numbers are what a relay's successor reads: add, never renumber."""

    QUIET = 0
    ASKED = 1
    """For the first data of a new exchange."""
    UNPROVEN = 2
    """The proxy has answered, and the broker owes a proof: another challenge."""
    ASKED_FURTHER = 3
    """For the answer to a further round: only the process that began the rounds can give it."""


UNANSWERED = frozenset({ExchangePhase.ASKED, ExchangePhase.ASKED_FURTHER})
"""The broker waits for an answer."""


class ChallengeOutOfTurn(RemoteProtocolError):
    """A challenge that no broker sends here; says why."""


class BrokerExchange:
    """Follow one relay's exchange, one call for each event. ``phase``: where a predecessor left it."""

    __slots__ = ("_rounds", "phase")

    def __init__(self, phase: ExchangePhase = ExchangePhase.QUIET) -> None:
        self.phase = phase
        self._rounds = 0

    def on_challenge(self, data: bytes) -> None:
        """Take a challenge's data; the phase says what it asks for. Raises ChallengeOutOfTurn."""
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
        """Take a challenge whose data died with a predecessor; return whether it can be answered all the same: it can
        where it must have asked for a new exchange.
        """
        if self.phase in {ExchangePhase.QUIET, ExchangePhase.ASKED}:
            self.phase = ExchangePhase.ASKED
            return True
        self.phase = ExchangePhase.QUIET
        return False

    def on_failure(self) -> None:
        """Give an exchange up; the broker may begin another one."""
        self.phase = ExchangePhase.QUIET

    @staticmethod
    def phase_after(*, complete: bool) -> ExchangePhase:
        """Name the phase that follows an answer; ``complete``: the broker owes no proof after it."""
        return ExchangePhase.QUIET if complete else ExchangePhase.UNPROVEN

    def on_answer_sent(self, *, complete: bool) -> None:
        """Note that the answer is on its way to the broker."""
        if self.phase not in UNANSWERED:
            raise LocalProtocolError("an answer without a challenge")
        self.phase = self.phase_after(complete=complete)
