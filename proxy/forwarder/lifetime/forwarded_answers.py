"""Clients' answers that go on to a broker which has the clients' credentials, too, and asks for fresh ones (PIP-30).

Both the proxy and such a broker ask the client of a relay. The client is asked only once for both: a broker's challenge
is removed from its stream, and the proxy challenges the client at once, unless it has a challenge outstanding already.
The next answer that an auth worker accepts goes on to the broker, byte for byte; one that is denied never does. Without
a challenge of the broker's no answer goes on: a broker that ignores clients' credentials would take it for the proxy's
own and close the relay.

A client that the proxy may not challenge (`session.relay_reauthentication`) is not challenged for the broker either.

A successor learns from the relay table that the broker waits for an answer, and challenges the client once more if its
answer is lost. Bounds: one answer waits for its boundary in a relay, and clients are challenged at most once a second.
"""

from collections.abc import Callable

from proto.broker_exchange import ExchangePhase
from proxy.forwarder.lifetime.session import ExpiringSession, RelayControl

RequestChallenge = Callable[[ExpiringSession], None]
"""Callable that has a session's client challenged as soon as possible."""


class ForwardedAnswers:
    """BrokerChallengeHandler of one relay: answers its broker's challenges with what its client answers the proxy."""

    __slots__ = ("_request_challenge", "_session", "challenge_truncated", "control", "phase")

    control: RelayControl

    def __init__(self, session: ExpiringSession, request_challenge: RequestChallenge) -> None:
        self.challenge_truncated = False  # a challenge is not read, so that it does not matter
        self.phase = ExchangePhase.QUIET
        self._session = session
        self._request_challenge = request_challenge

    @property
    def phase_after_answer(self) -> ExchangePhase:
        """Phase of the exchange as soon as the answer is sent: credentials that are forwarded need one round."""
        return ExchangePhase.QUIET

    def restore_phase(self, phase: ExchangePhase) -> None:
        """Continue in the phase of a predecessor's exchange."""
        self.phase = phase

    def resume_exchange(self) -> None:
        """Ask the client for the answer to a challenge that a predecessor removed from the stream."""
        if self.phase is ExchangePhase.ASKED:
            self._request_challenge(self._session)

    def on_challenge_frame(self, frame: bytes) -> None:  # noqa: ARG002 -- every challenge asks for the same
        """Ask the client for the answer to a challenge that was removed from the broker's stream.

        One answer serves all challenges before it: while the broker waits for one, another challenge changes nothing.
        """
        if self.phase is not ExchangePhase.ASKED:
            self.phase = ExchangePhase.ASKED
            self._request_challenge(self._session)

    def on_answer_accepted(self, frame: bytes) -> None:
        """Pass a client's accepted answer on to the broker, if that waits for one."""
        if self.phase is ExchangePhase.ASKED:
            self.control.send_broker_answer(frame)

    def on_answer_sent(self) -> None:
        """Record that the answer was sent to the broker."""
        self.phase = ExchangePhase.QUIET
