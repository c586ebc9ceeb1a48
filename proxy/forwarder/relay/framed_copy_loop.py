"""Relay with inspected frames in user space, for relays with TLS on a side.

The rules are proto.framed_stream's. The bytes are in memory here, so frames are cut out of them without a peek, and an
injected or removed frame needs no journal: such a relay ends with its process.

Two tasks may write to each side. Towards the client a lock is held from the decision what may pass until it is sent.
Towards the broker a command may wait for a verdict in between, so the lock is held for each send only, and the bytes
*sent* determine whether the broker is at a boundary.
"""

import contextlib
from collections.abc import Callable

import trio

from proto.command_heads import INCOMPLETE, FrameInvalid
from proto.framed_stream import Action, Own
from proto.pulsar_pb2 import BaseCommand
from proto.relay_frames import NO_STOP, FrameCutter
from proxy.forwarder.lifetime.closing import CloseReason
from proxy.forwarder.lifetime.session import ExpiringSession, ReauthenticationHandler
from proxy.runtime.shared.relay_table import TO_BROKER, TO_CLIENT

Stream = trio.abc.HalfCloseableStream
Count = Callable[[int], None]

CHUNK_BYTES = 65536


class FramedCopyLoop:
    """One relay and its RelayControl, which works before ``relay_streams`` too; that is called once.

    ``count_messages`` receives a way and the number of messages that went there.
    """

    def __init__(
        self,
        session: ExpiringSession,
        count_messages: Callable[[int, int], None],
        reauthentication: ReauthenticationHandler,
        now: Callable[[], float],
    ) -> None:
        session.control = self
        if session.broker_challenges is not None:
            session.broker_challenges.control = self
        self._session = session
        self._reauthentication = reauthentication
        self._now = now
        self._count_messages = count_messages
        self._scanners = (session.new_scanner(TO_BROKER), session.new_scanner(TO_CLIENT))
        self._streams = (session.new_stream(TO_BROKER), session.new_stream(TO_CLIENT))
        self._to_broker, self._to_client = self._cutters = (
            FrameCutter(self._scanners[0]),
            FrameCutter(self._scanners[1]),
        )
        self._client_lock = trio.Lock()
        """Held by the task that writes to the client."""
        self._broker_lock = trio.Lock()
        """Held by the task that writes to the broker."""
        self._broker_at_boundary = True
        """Whether the bytes sent to the broker end with a frame, so that an answer may be sent."""
        self._broker_answer_ready = trio.Event()
        self._client_frame_ready = trio.Event()
        self._verdict = trio.Event()
        self._to_broker_scope = trio.CancelScope()
        self.has_opened_producer = False
        self.bytes_sent_to_client = 0
        self.has_ended = False
        self._ended_directions = 0
        self._has_idle_timeout = False
        self._half_close_timeout_s = float("inf")
        self._relay_scope = trio.CancelScope()
        self._client: Stream
        self._broker: Stream

    async def relay_streams(
        self,
        client: Stream,
        broker: Stream,
        *,
        first_to_broker: bytes,
        first_to_client: bytes,
        half_close_timeout_s: float,
        count_to_broker: Count,
        count_to_client: Count,
    ) -> None:
        """Copy bytes until both directions have ended; closes neither stream.

        ``first_to_broker`` and ``first_to_client`` were read ahead of the relay and are delivered before all else.
        Memory is bounded by one chunk a direction: a side that does not read stops the reading on the other.
        """
        self._client, self._broker = client, broker
        self._half_close_timeout_s = half_close_timeout_s
        self._extend_idle_timeout()  # it may be closing already
        try:
            with self._relay_scope:
                await self._copy_both(first_to_broker, count_to_broker, first_to_client, count_to_client)
        finally:
            self.has_ended = True

    async def _copy_both(
        self, first_to_broker: bytes, count_to_broker: Count, first_to_client: bytes, count_to_client: Count
    ) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._run_to_broker, first_to_broker, count_to_broker)
            nursery.start_soon(self._run_to_client, first_to_client, count_to_client)
            nursery.start_soon(self._run_client_frames)
            if self._session.broker_challenges is not None:
                nursery.start_soon(self._run_broker_answers)

    def _extend_idle_timeout(self) -> None:
        """Postpone the end of a relay with one direction ended: the other one ends when its bytes stop moving."""
        if self._has_idle_timeout:
            self._relay_scope.deadline = trio.current_time() + self._half_close_timeout_s

    def _on_direction_end(self) -> None:
        self._ended_directions += 1
        self._has_idle_timeout = True
        self._extend_idle_timeout()
        if self._ended_directions == len(self._scanners):
            self._relay_scope.cancel()  # neither side can receive anything more

    def _count_new_messages(self, way: int) -> None:
        if messages := self._scanners[way].take_message_count():
            self._count_messages(way, messages)

    # ---- frames of both directions

    async def _next_passable(self, way: int) -> bytes:
        """Return the bytes that may pass next; empty if none of the received ones may."""
        session, cutter, stream = self._session, self._cutters[way], self._streams[way]
        if not cutter.at_boundary and (action := stream.decide_rest(self._now())) is not Action.PASS:
            self._reauthentication.on_action(session, stream, action)
            if action is Action.CUT:
                await self._cut_frame(way)
        while True:
            self._scanners[way].stop_types = stream.stop_types(self._now())
            passing = cutter.take_passable(one_frame=stream.decide_boundary() is not Action.PASS)
            command_type = cutter.stopped_at
            if passing or command_type in {NO_STOP, INCOMPLETE}:
                return passing
            action = stream.decide_frame(command_type, cutter.stopped_frame_length(), self._now())
            self._reauthentication.on_action(session, stream, action)
            if action is Action.REMOVE:
                if (frame := cutter.remove_frame()) is None:
                    return b""
                self._on_frame_removed(way, frame)
            elif action is Action.HOLD:
                self._verdict = trio.Event()
                await self._verdict.wait()
            elif command_type == BaseCommand.PRODUCER and action is Action.PASS and stream.watches_producers:
                self.has_opened_producer = True
                stream.record_producer()
                self._reauthentication.on_producer_opened(session)
            await trio.lowlevel.checkpoint()  # a client that sends only answers starves no other; closing ends it here

    async def _cut_frame(self, way: int) -> None:
        """End a direction in the middle of a frame."""
        if way == TO_CLIENT:  # which would read an error as part of the frame
            await self._end_both_sides()
        self._to_broker_scope.cancel()
        await trio.lowlevel.checkpoint()

    def _on_frame_removed(self, way: int, frame: bytes) -> None:
        session, clock = self._session, self._session.clock
        if way == TO_CLIENT:
            assert session.broker_challenges is not None  # or nothing is removed
            session.broker_challenges.on_challenge_frame(frame)
            return
        assert clock is not None  # or no command is stopped at
        failure = clock.on_answer(self._now())
        if failure is not None:
            self._reauthentication.on_failure(session, failure)
        else:
            self._reauthentication.on_answer(session, frame)

    # ---- to the broker

    async def _run_to_broker(self, first: bytes, count: Count) -> None:
        try:
            with self._to_broker_scope:
                await self._copy_frames_to_broker(first, count)
        except FrameInvalid as error:
            self._reauthentication.on_invalid_frame(self._session, error)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            # Where the source has gone, its end is passed on; where the sink has, that fails and does nothing.
            pass
        if self._session.close_reason:
            return  # the error to the client ends it
        self._has_idle_timeout = True  # also while the broker does not read an answer of the proxy
        self._extend_idle_timeout()
        async with self._broker_lock:
            self._broker_at_boundary = False
            await _send_eof(self._broker)
        self._on_direction_end()

    async def _copy_frames_to_broker(self, first: bytes, count: Count) -> None:
        data = first or await self._client.receive_some(CHUNK_BYTES)
        while data:
            self._to_broker.receive_data(data)
            del data  # a waiting relay holds no chunk
            while passing := await self._next_passable(TO_BROKER):
                await self._send_to_broker(passing)
                count(len(passing))
                self._extend_idle_timeout()
                if self._session.close_reason and self._to_broker.at_boundary:
                    self._to_broker_scope.cancel()
            self._count_new_messages(TO_BROKER)
            data = await self._client.receive_some(CHUNK_BYTES)
        if rest := self._to_broker.take_unread_data():
            async with self._broker_lock:
                self._broker_at_boundary = False
                await self._broker.send_all(rest)
            count(len(rest))

    async def _send_to_broker(self, passing: bytes) -> None:
        at_boundary = self._to_broker.at_boundary
        async with self._broker_lock:
            self._broker_at_boundary = False  # also where the send is cancelled
            await self._broker.send_all(passing)
            self._broker_at_boundary = at_boundary
            await self._send_broker_answer_at_boundary()

    async def _run_broker_answers(self) -> None:
        """Send answers to the broker while the client is silent."""
        while True:
            await self._broker_answer_ready.wait()
            self._broker_answer_ready = trio.Event()
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                async with self._broker_lock:
                    await self._send_broker_answer_at_boundary()

    async def _send_broker_answer_at_boundary(self) -> None:
        broker, stream = self._session.broker_challenges, self._streams[TO_BROKER]
        if stream.own is None or broker is None or not self._broker_at_boundary:
            return
        action, (_, frame), stream.own = stream.decide_boundary(), stream.own, None
        if action is Action.DROP:
            return
        self._broker_at_boundary = False
        broker.on_answer_sent()  # the broker may send a challenge before the send has returned
        await self._broker.send_all(frame)
        self._broker_at_boundary = True

    # ---- to the client

    async def _run_to_client(self, first: bytes, count: Count) -> None:
        try:
            data = first or await self._broker.receive_some(CHUNK_BYTES)
            while data:
                self._to_client.receive_data(data)
                del data
                await self._copy_frames_to_client(count)
                self._count_new_messages(TO_CLIENT)
                data = await self._broker.receive_some(CHUNK_BYTES)
            await self._finish_to_client(count)
        except FrameInvalid as error:
            self._reauthentication.on_invalid_frame(self._session, error)
            return
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            await _send_eof(self._client)
        self.has_ended = True
        self._on_direction_end()

    async def _copy_frames_to_client(self, count: Count) -> None:
        while True:
            async with self._client_lock:
                await self._send_client_frame_at_boundary()
                passing = await self._next_passable(TO_CLIENT)
                if not passing:
                    return
                await self._client.send_all(passing)
            count(len(passing))
            self.bytes_sent_to_client += len(passing)
            self._extend_idle_timeout()

    async def _finish_to_client(self, count: Count) -> None:
        rest = self._to_client.take_unread_data()
        if rest:
            await self._client.send_all(rest)
            count(len(rest))
        elif self._session.close_reason and self._streams[TO_CLIENT].own is None:
            self.close_with_error(self._reauthentication.closing_error_frame(self._session))
        async with self._client_lock:
            if not rest:
                await self._send_client_frame_at_boundary()
            await self._client.send_eof()

    async def _run_client_frames(self) -> None:
        """Send injected frames to the client while the broker is silent."""
        while True:
            await self._client_frame_ready.wait()
            self._client_frame_ready = trio.Event()
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                async with self._client_lock:
                    await self._send_client_frame_at_boundary()

    async def _send_client_frame_at_boundary(self) -> None:
        stream, clock = self._streams[TO_CLIENT], self._session.clock
        if stream.own is None or not self._to_client.at_boundary:
            return
        action, (kind, frame), stream.own = stream.decide_boundary(), stream.own, None
        if action is Action.DROP:
            return
        if kind is not Own.ERROR and clock is not None:
            clock.on_challenge_sent(self._now())
            self.resume_after_verdict()  # a command that waits for this round's verdict was too late
        await self._client.send_all(frame)
        if kind is Own.ERROR:
            await self._end_both_sides()

    async def _end_both_sides(self) -> None:
        for stream in (self._client, self._broker):
            await _send_eof(stream)
        self._relay_scope.cancel()

    # ---- SessionControl

    def send_challenge(self, challenge: bytes) -> None:
        """Inject a challenge frame towards the client at the next boundary."""
        self._queue_client_frame(self._session.own_challenge(challenge))

    def _queue_client_frame(self, own: tuple[Own, bytes]) -> None:
        self._streams[TO_CLIENT].own = own
        self._client_frame_ready.set()

    def send_broker_answer(self, frame: bytes) -> None:
        """Inject an answer towards the broker at the next boundary of that direction."""
        self._streams[TO_BROKER].own = Own.BROKER_ANSWER, frame
        self._broker_answer_ready.set()

    def resume_after_verdict(self) -> None:
        """Let a waiting command continue after a verdict that the session's clock has recorded."""
        self._streams[TO_BROKER].awaits_verdict = False
        self._verdict.set()

    def record_observed_end(self) -> None:
        """Do nothing: the relay ends with its process, so no successor needs the record."""

    def record_exchange(self) -> None:
        """Do nothing: the relay ends with its process, so no successor needs the record."""

    def start_closing(self, reason: CloseReason, error_frame: bytes = b"") -> None:
        """Start to close: from the next boundary on nothing passes to the broker.

        ``error_frame``: the error for the client; empty: the reason's usual one.
        """
        if self._session.close_reason:
            return
        self._session.close_reason = reason
        self._session.closing_error_frame = error_frame
        if self._to_broker.at_boundary:
            self._to_broker_scope.cancel()
        self._ended_directions = max(self._ended_directions, 1)
        self._has_idle_timeout = True
        self._extend_idle_timeout()
        self._reauthentication.on_closing(self._session)

    def close_with_error(self, error_frame: bytes) -> None:
        """Send the client an error at the next boundary, then end both directions."""
        self._queue_client_frame((Own.ERROR, error_frame))


async def _send_eof(stream: Stream) -> None:
    """Send a stream's end of file, unless a send is under way there: that ends with the relay."""
    with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError):
        await stream.send_eof()
