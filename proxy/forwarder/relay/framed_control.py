"""SessionControl of a relay in the engine of which the frames are followed."""

from proto.framed_stream import Own
from proxy.forwarder.lifetime.closing import CloseReason
from proxy.forwarder.lifetime.reauthentication import ReauthenticationCoordinator
from proxy.forwarder.lifetime.session import ExpiringSession
from proxy.forwarder.relay.framed_journal import FramedJournal
from proxy.forwarder.relay.pump import Pump
from proxy.forwarder.relay.relay import Direction, Relay


class FramedControl:
    """RelayControl of one relay. Every action takes effect at a frame boundary, when its direction runs.

    Verdicts and credentials may arrive after the relay was handed over to a successor. The relay has then ended for
    this process and no action has an effect: the relay's rows in the relay table belong to the successor, or to another
    relay already. Of a relay that is not spliced no successor reads the journal.
    """

    __slots__ = ("_journal", "_pump", "_reauthentication", "_relay", "_session")

    def __init__(
        self,
        relay: Relay,
        session: ExpiringSession,
        pump: Pump,
        journal: FramedJournal,
        reauthentication: ReauthenticationCoordinator,
    ) -> None:
        self._relay = relay
        self._session = session
        self._pump = pump
        self._journal = journal
        self._reauthentication = reauthentication
        session.control = self
        if session.broker_challenges is not None:
            session.broker_challenges.control = self

    # ---- state

    @property
    def relay(self) -> Relay:
        """The relay whose session this controls."""
        return self._relay

    @property
    def has_opened_producer(self) -> bool:
        """Whether the client has ever opened a producer, where the session depends on that."""
        return self._journal.has_producer(self._session)

    @property
    def bytes_sent_to_client(self) -> int:
        """Number of bytes sent to the client so far."""
        return self._pump.bytes_moved(self._relay.to_client)

    @property
    def has_ended(self) -> bool:
        """Whether this process can send the client nothing more."""
        return self._relay.handed_over or self._relay.to_client.done

    # ---- actions

    def send_challenge(self, challenge: bytes) -> None:
        """Inject a challenge frame towards the client at the next boundary."""
        self._put_in(self._relay.to_client, self._session.own_challenge(challenge))

    def send_broker_answer(self, frame: bytes) -> None:
        """Inject an answer towards the broker at the next boundary of that direction."""
        self._put_in(self._relay.to_broker, (Own.BROKER_ANSWER, frame))

    def _put_in(self, direction: Direction, own: tuple[Own, bytes]) -> None:
        if self._relay.handed_over:
            return
        direction.stream.own = own
        self._pump.wake_direction(direction)

    def resume_after_verdict(self) -> None:
        """Let a waiting command continue after a verdict that the session's clock has recorded."""
        if self._relay.handed_over:
            return
        self._journal.write_clock(self._session)
        self.recheck_held_command()

    def record_observed_end(self) -> None:
        """Record in the relay table that an observed end was counted, so that a successor does not count it again."""
        if not self._relay.handed_over:
            self._journal.write_clock(self._session)

    def recheck_held_command(self) -> None:
        """Run the direction to the broker, so that it decides about a waiting command again."""
        self._relay.to_broker.stream.awaits_verdict = False
        self._pump.wake_direction(self._relay.to_broker)

    def record_own_frame(self, kind: Own, now_s: float) -> None:
        """Record that an own frame was put into its stream."""
        session = self._session
        if session.broker_challenges is not None and kind is Own.BROKER_ANSWER:
            session.broker_challenges.on_answer_sent()
        elif session.clock is not None and kind is not Own.ERROR:
            session.clock.on_challenge_sent(now_s)
            self.recheck_held_command()  # a command that waited for this round's verdict came too late

    def record_exchange(self) -> None:
        """Record the phase of an abandoned exchange with the broker, so that no successor abandons it once more."""
        session = self._session
        if not self._relay.handed_over and session.broker_challenges is not None:
            self._journal.write_exchange(session, session.broker_challenges.phase)

    # ---- closing

    def start_closing(self, reason: CloseReason, error_frame: bytes = b"") -> None:
        """Start to close: from the next boundary on nothing passes to the broker.

        ``error_frame``: the error for the client; empty: the reason's usual one.
        """
        relay, session = self._relay, self._session
        if session.close_reason or relay.handed_over:
            return
        session.close_reason = reason
        session.closing_error_frame = error_frame
        self._journal.write_close_reason(session, reason)
        relay.broken = True
        self._pump.start_idle_timeout(relay)
        self._reauthentication.on_closing(session)

    def resume_closing(self, reason: CloseReason) -> None:
        """Continue a close that a predecessor started."""
        self._session.close_reason = reason
        self._relay.broken = True
        if reason is CloseReason.ERROR_SENT:
            self._end_at_boundaries()

    def close_with_error(self, error_frame: bytes) -> None:
        """Send the client an error at the next boundary, then end both directions, each at its next boundary."""
        stream = self._relay.to_client.stream
        if stream.ends or self._relay.handed_over:
            return
        stream.own = Own.ERROR, error_frame
        self._end_at_boundaries()

    def _end_at_boundaries(self) -> None:
        for direction in (self._relay.to_client, self._relay.to_broker):
            direction.stream.ends = True
            self._pump.wake_direction(direction)


def control_of(session: ExpiringSession) -> FramedControl:
    """Return the control of a session in a relay of the engine."""
    assert isinstance(session.control, FramedControl)
    return session.control
