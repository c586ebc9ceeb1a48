"""What the judge of a followed relay says to it, where the engine moves its bytes
(proxy.forwarder.relay.expiring.splice_pump).
"""

from proxy.forwarder.relay.close_reason import CloseReason
from proxy.forwarder.relay.expiring.framed_relay import FramedRelay
from proxy.forwarder.relay.expiring.journal import FramedJournal
from proxy.forwarder.relay.expiring.session import Injection, ReauthenticationHandler
from proxy.forwarder.relay.splice_pump import SplicePump


class SplicedSessionControl:
    """One relay's (proxy.forwarder.relay.expiring.session.Line). All that it says is done at boundaries, in its
    directions' turns.

    Verdicts and credentials may arrive after the relay has moved to a successor. Then it is over for this process, and
    nothing that is said has an effect: the relay's rows in the table are the successor's, or another relay's already.
    """

    __slots__ = ("_journal", "_pump", "_reauthentication", "_relay")

    def __init__(
        self, relay: FramedRelay, pump: SplicePump, journal: FramedJournal, reauthentication: ReauthenticationHandler
    ) -> None:
        self._relay = relay
        self._pump = pump
        self._journal = journal
        self._reauthentication = reauthentication

    # ---- what the judge asks

    @property
    def has_opened_producer(self) -> bool:
        """Whether the client ever had a producer, where that counts."""
        return self._journal.has_producer(self._relay)

    @property
    def bytes_sent_to_client(self) -> int:
        """How many have gone."""
        return self._pump.bytes_moved(self._relay.to_client)

    @property
    def has_ended(self) -> bool:
        """Whether the client can be told nothing any more, by this process."""
        return self._relay.handed_over or self._relay.to_client.done

    # ---- what it says

    def send_challenge(self, challenge: bytes) -> None:
        """Put a challenge in at the next boundary."""
        if self._relay.handed_over:
            return
        framing = self._relay.to_client.cursor
        assert framing is not None
        framing.pending_injection = (challenge, Injection.CHALLENGE)
        self._pump.wake_direction(self._relay.to_client)

    def resume_after_verdict(self) -> None:
        """There is a verdict, and the clock knows it."""
        if self._relay.handed_over:
            return
        self._journal.write_clock(self._relay)
        self.recheck_held_command()

    def record_observed_end(self) -> None:
        """Write down that the clock knows of an observed end, so that a successor does not count it again."""
        if not self._relay.handed_over:
            self._journal.write_clock(self._relay)

    def recheck_held_command(self) -> None:
        """A command that waits for a verdict waits no longer."""
        framing = self._relay.to_broker.cursor
        assert framing is not None
        framing.awaits_verdict = False
        self._pump.wake_direction(self._relay.to_broker)

    def send_broker_answer(self, frame: bytes) -> None:
        """Put an answer in towards the broker, at the next boundary of what it is sent."""
        if self._relay.handed_over:
            return
        framing = self._relay.to_broker.cursor
        assert framing is not None
        framing.pending_injection = (frame, Injection.BROKER_ANSWER)
        self._pump.wake_direction(self._relay.to_broker)

    def record_exchange(self) -> None:
        """Write down where the exchange with the broker stands, so that no successor gives it up once more."""
        followed = self._relay.session
        if not self._relay.handed_over and followed.broker_challenges is not None:
            self._journal.write_exchange(self._relay, followed.broker_challenges.phase)

    def start_closing(self, reason: CloseReason, error_frame: bytes = b"") -> None:
        """Begin to close: nothing passes to the broker from the next boundary on. ``frame``: what to tell the client;
        empty: the usual.
        """
        relay, followed = self._relay, self._relay.session
        if followed.close_reason or relay.handed_over:
            return
        followed.close_reason = reason
        followed.closing_error_frame = error_frame
        self._journal.write_close_reason(relay, reason)
        self._stop()
        self._pump.start_idle_timeout(relay)
        self._reauthentication.on_closing(followed)

    def _stop(self) -> None:
        for direction in (self._relay.to_broker, self._relay.to_client):
            assert direction.cursor is not None
            # The broker's may go on to what it has to say, unless nobody knows where its frames begin.
            direction.cursor.stops_at_boundary = direction is self._relay.to_broker
        self._relay.broken = True

    def resume_closing(self, why: CloseReason) -> None:
        """A predecessor had begun to close."""
        followed = self._relay.session
        followed.close_reason = why
        self._stop()
        if why is CloseReason.ERROR_SENT:
            self._end_at_boundaries()

    def close_with_error(self, error_frame: bytes) -> None:
        """Tell the client at the next boundary; then both directions end, each at a boundary of its own."""
        framing = self._relay.to_client.cursor
        assert framing is not None
        if framing.ends_at_boundary or self._relay.handed_over:
            return
        framing.pending_injection = (error_frame, Injection.CLOSING_ERROR)
        self._end_at_boundaries()

    def _end_at_boundaries(self) -> None:
        for direction in (self._relay.to_client, self._relay.to_broker):
            assert direction.cursor is not None
            direction.cursor.ends_at_boundary = True
            self._pump.wake_direction(direction)
