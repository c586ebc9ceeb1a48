"""The framed copy pump: follows the frames of relays through this process's memory (KIP-368).

For sessions that can expire, and where messages are counted. The rules are proto.framed_stream's. A portion that was
received goes into the direction's cutter, which lets pass what the rules do, and only when nothing more of it may pass
the next portion is received. So a direction holds at most one portion, and the beginning of a frame before it; while a
command is held it receives nothing.

The sink is at a boundary where the direction's cutter is, since nothing is cut out while the sink has not taken all
that was before it.
"""

from collections.abc import Callable

from proto.command_heads import INCOMPLETE, FrameInvalid
from proto.framed_stream import Action, FramedStream
from proto.pulsar_pb2 import BaseCommand
from proto.relay_frames import NO_STOP, FrameCutter
from proxy.forwarder.lifetime.reauthentication import ReauthenticationCoordinator
from proxy.forwarder.lifetime.session import ExpiringSession
from proxy.forwarder.relay.copy_pump import CopiedRelay, CopyDirection, CopyPump
from proxy.forwarder.relay.framed_control import FramedControl, control_of
from proxy.forwarder.relay.framed_journal import FramedJournal
from proxy.forwarder.relay.pump import PumpHost
from proxy.forwarder.relay.relay import Direction
from proxy.runtime.shared.relay_table import TO_BROKER, TO_CLIENT, RelayTable

_PASS = Action.PASS


class FramedCopyPump(CopyPump):
    """The pump of copied relays of which the frames are followed.

    ``reauthentication`` is called with what is found in the streams. ``now``: seconds of the clock that all of the
    cluster's processes share.
    """

    def __init__(
        self,
        table: RelayTable,
        host: PumpHost,
        journal: FramedJournal,
        reauthentication: ReauthenticationCoordinator,
        now: Callable[[], float],
    ) -> None:
        super().__init__(table, host)
        self._journal = journal
        self._reauthentication = reauthentication
        self._now = now

    def follow_relay(self, relay: CopiedRelay, session: ExpiringSession) -> None:
        """Follow a relay that has not started."""
        self._table.record_framed(relay.record.id)
        FramedControl(relay, session, self, self._journal, self._reauthentication)
        for direction in (relay.to_broker, relay.to_client):
            direction.pump = self.pump
            self.wake_direction(direction)  # for what was read ahead, which no edge announces

    # ---- pumping

    def pump(self, direction: Direction) -> None:
        """Send what may pass of what is here, then move at most one portion; see Pump.pump."""
        self._give_turn(direction, self._take_framed_turn)

    def _take_framed_turn(self, direction: CopyDirection) -> None:
        try:
            if not (self._send_held(direction) and self._let_pass(direction)):
                return
            if direction.source_has_ended:
                self._on_source_end(direction)
                return
            self._move_portion(direction)
            if direction.source_has_ended and not direction.done:
                self.enqueue(direction)  # some of what came before the end may be left
        except FrameInvalid as error:
            self._reauthentication.on_invalid_frame(_session_of(direction), error)

    def _deliver(self, direction: CopyDirection, plaintext: memoryview) -> bool:
        """Send what may pass of what was received; return True if no more of it may.

        Raises FrameInvalid.
        """
        direction.cutter.receive_data(plaintext)
        return self._let_pass(direction)

    def _let_pass(self, direction: CopyDirection) -> bool:
        """Send what may pass of what is here; return True if the next portion may be received. Raises FrameInvalid."""
        while (goes_on := self._take_step(direction, direction.cutter, direction.stream)) is None:
            pass
        return goes_on

    def _take_step(self, direction: CopyDirection, cutter: FrameCutter, stream: FramedStream) -> bool | None:
        """Do what is due, or send what may pass; return None if that was all, else what ``_let_pass`` is to return."""
        now_s, action = self._now(), stream.decide_boundary()
        if cutter.at_boundary and action is not _PASS:
            return self._process_boundary(direction, stream, action)
        if not cutter.at_boundary and (late := stream.decide_rest(now_s)) is not _PASS:
            self._reauthentication.on_action(_session_of(direction), stream, late)
            if late is Action.CUT:
                return self._cut_frame(direction)
        cutter.scanner.stop_types = stream.stop_types(now_s)
        passing = cutter.take_passable(one_frame=action is not _PASS)
        if messages := cutter.scanner.take_message_count():
            way = TO_BROKER if stream.to_broker else TO_CLIENT
            self._table.add_messages(direction.relay.record.id, way, messages)
        if passing:
            return self._pass_on(direction, passing)
        if cutter.stopped_at in {NO_STOP, INCOMPLETE}:
            return True
        return self._on_stop_type(direction, cutter, stream, now_s)

    def _pass_on(self, direction: CopyDirection, data: bytes) -> bool | None:
        """Send; return None if all was sent and the turn goes on, as ``_take_step`` does."""
        if not super()._deliver(direction, memoryview(data)):
            return False
        if direction.cutter.scanner.slow_frames_left > 0:
            return None
        self.enqueue(direction)
        return False

    def _process_boundary(self, direction: CopyDirection, stream: FramedStream, action: Action) -> bool | None:
        if action is Action.INJECT:
            assert stream.own is not None
            (kind, frame), stream.own = stream.own, None
            control_of(_session_of(direction)).record_own_frame(kind, self._now())
            return self._pass_on(direction, frame)
        if action is Action.DROP:
            stream.own = None
            return None
        if action is Action.END:
            self._end(direction)
        return False

    def _cut_frame(self, direction: CopyDirection) -> bool | None:
        """Let nothing more pass of the frame that has begun to pass."""
        if direction.stream.to_broker:
            direction.cutter.drop_rest()
            return None
        self._end(direction)  # the client would read an error as part of the frame
        return False

    # ---- commands that the scan stops at

    def _on_stop_type(
        self, direction: CopyDirection, cutter: FrameCutter, stream: FramedStream, now_s: float
    ) -> bool | None:
        """Do what is due for a command stopped at; if it may pass, it is scanned once more. Raises FrameInvalid."""
        session = _session_of(direction)
        action = stream.decide_frame(cutter.stopped_at, cutter.stopped_frame_length(), now_s)
        self._reauthentication.on_action(session, stream, action)
        if action is Action.REMOVE:
            if (frame := cutter.remove_frame()) is None:
                return True
            self._on_frame_removed(session, stream, frame)
            self.enqueue(direction)  # one frame in each round, for clients that send nothing else
            return False
        if action is _PASS and cutter.stopped_at == BaseCommand.PRODUCER and stream.watches_producers:
            self._journal.write_producer(session, stream)
            self._reauthentication.on_producer_opened(session)
        return None

    def _on_frame_removed(self, session: ExpiringSession, stream: FramedStream, frame: bytes) -> None:
        if not stream.to_broker:
            assert session.broker_challenges is not None  # or nothing is removed
            session.broker_challenges.on_challenge_frame(frame)
            return
        assert session.clock is not None
        failure = session.clock.on_answer(self._now())
        if failure is not None:
            self._reauthentication.on_failure(session, failure)
        else:
            self._reauthentication.on_answer(session, frame)

    # ---- ends

    def _on_source_end(self, direction: CopyDirection) -> None:
        session, cutter, stream = _session_of(direction), direction.cutter, direction.stream
        rest = cutter.take_unread_data() if cutter.stopped_at == INCOMPLETE else b""
        if session.close_reason and not stream.to_broker and cutter.at_boundary and not rest:
            session.control.close_with_error(self._reauthentication.closing_error_frame(session))
        else:
            self._end(direction, rest)

    def _end(self, direction: CopyDirection, rest: bytes = b"") -> None:
        """End a direction behind ``rest``, which is no whole frame, and behind what the sink did not take yet."""
        direction.source_has_ended = True
        direction.pump = super().pump  # which looks at no frame any more
        if not rest or super()._deliver(direction, memoryview(rest)):
            self._pass_end_on(direction)


def _session_of(direction: Direction) -> ExpiringSession:
    assert direction.relay.session is not None  # or it has another pump
    return direction.relay.session
