"""What the judge of a followed relay says to it, where the engine moves its bytes
(proxy.forwarder.relay.expiring.splice_pump).
"""

from proxy.forwarder.relay.expiring.journal import FramedJournal
from proxy.forwarder.relay.expiring.session import CloseReason, Injection, ReauthenticationCoordinator
from proxy.forwarder.relay.relay import Relay
from proxy.forwarder.relay.splice_pump import SplicePump


class SplicedSessionControl:
    """One relay's (proxy.forwarder.relay.expiring.session.Line). All that it says is done at boundaries, in its
    directions' turns.

    Verdicts and credentials may arrive after the relay has moved to a successor. Then it is over for this process, and
    nothing that is said has an effect: the relay's rows in the table are the successor's, or another relay's already.
    """

    __slots__ = ("_journal", "_judge", "_mover", "_relay")

    def __init__(
        self, relay: Relay, mover: SplicePump, journal: FramedJournal, judge: ReauthenticationCoordinator
    ) -> None:
        self._relay = relay
        self._mover = mover
        self._journal = journal
        self._judge = judge

    # ---- what the judge asks

    @property
    def has_producer(self) -> bool:
        """Whether the client ever had a producer, where that counts."""
        return self._journal.has_producer(self._relay)

    @property
    def bytes_to_client(self) -> int:
        """How many have gone."""
        return self._mover.bytes_moved(self._relay.to_client)

    @property
    def is_over(self) -> bool:
        """Whether the client can be told nothing any more, by this process."""
        return self._relay.handed_over or self._relay.to_client.done

    # ---- what it says

    def ask(self, challenge: bytes) -> None:
        """Put a challenge in at the next boundary."""
        if self._relay.handed_over:
            return
        framing = self._relay.to_client.cursor
        assert framing is not None
        framing.to_put_in = (challenge, Injection.CHALLENGE)
        self._mover.wake_direction(self._relay.to_client)

    def go_on(self) -> None:
        """There is a verdict, and the clock knows it."""
        if self._relay.handed_over:
            return
        self._journal.write_clock(self._relay)
        self.judge_anew()

    def note_observed(self) -> None:
        """Write down that the clock knows of an observed end, so that a successor does not count it again."""
        if not self._relay.handed_over:
            self._journal.write_clock(self._relay)

    def judge_anew(self) -> None:
        """A command that waits for a verdict waits no longer."""
        framing = self._relay.to_broker.cursor
        assert framing is not None
        framing.waits = False
        self._mover.wake_direction(self._relay.to_broker)

    def answer_broker(self, frame: bytes) -> None:
        """Put an answer in towards the broker, at the next boundary of what it is sent."""
        if self._relay.handed_over:
            return
        framing = self._relay.to_broker.cursor
        assert framing is not None
        framing.to_put_in = (frame, Injection.ANSWER)
        self._mover.wake_direction(self._relay.to_broker)

    def note_exchange(self) -> None:
        """Write down where the exchange with the broker stands, so that no successor gives it up once more."""
        followed = self._relay.session
        if not self._relay.handed_over and followed is not None and followed.broker is not None:
            self._journal.write_exchange(self._relay, followed.broker.phase)

    def close(self, why: CloseReason, frame: bytes = b"") -> None:
        """Begin to close: nothing passes to the broker from the next boundary on. ``frame``: what to tell the client;
        empty: the usual.
        """
        relay, followed = self._relay, self._relay.session
        assert followed is not None
        if followed.closing or relay.handed_over:
            return
        followed.closing = why
        followed.closing_frame = frame
        self._journal.write_close_reason(relay, why)
        self._stop()
        self._mover.start_idle_timeout(relay)
        self._judge.closing(followed)

    def _stop(self) -> None:
        for direction in (self._relay.to_broker, self._relay.to_client):
            assert direction.cursor is not None
            # The broker's may go on to what it has to say, unless nobody knows where its frames begin.
            direction.cursor.stopped = direction is self._relay.to_broker
        self._relay.broken = True

    def go_on_closing(self, why: CloseReason) -> None:
        """A predecessor had begun to close."""
        followed = self._relay.session
        assert followed is not None
        followed.closing = why
        self._stop()
        if why is CloseReason.SAID:
            self._end_at_boundaries()

    def say_farewell(self, frame: bytes) -> None:
        """Tell the client at the next boundary; then both directions end, each at a boundary of its own."""
        framing = self._relay.to_client.cursor
        assert framing is not None
        if framing.over or self._relay.handed_over:
            return
        framing.to_put_in = (frame, Injection.FAREWELL)
        self._end_at_boundaries()

    def _end_at_boundaries(self) -> None:
        for direction in (self._relay.to_client, self._relay.to_broker):
            assert direction.cursor is not None
            direction.cursor.over = True
            self._mover.wake_direction(direction)
