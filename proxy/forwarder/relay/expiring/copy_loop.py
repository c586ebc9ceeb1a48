"""The framed relay in user space, where TLS is spoken on a side: the same rules as in
proxy.forwarder.relay.expiring.splice_pump.

The bytes are in memory here, so boundaries are cut rather than looked for, and a frame that is put in or taken out
needs no journal: such a relay ends with its process.

Two tasks may have something to write to each side. To the client a lock is held from the look at what may pass until it
is sent. On the way to the broker a command may wait for a verdict in between, so there the lock is held for each
sending, and what was *sent* says whether the broker is at a boundary.
"""

import contextlib
from collections.abc import Callable

import trio

from proto.command_heads import INCOMPLETE, FrameInvalid
from proto.pulsar_pb2 import BaseCommand
from proto.relay_frames import NO_STOP, FrameCutter
from proto.session_clock import CommandDecision, Phase, ReauthenticationFailure
from proxy.forwarder.relay.close_reason import CloseReason
from proxy.forwarder.relay.copy_loop import CHUNK_BYTES, Count
from proxy.forwarder.relay.expiring.session import ExpiringSession, ReauthenticationHandler, check_challenge_size
from proxy.runtime.shared.relay_table import TO_BROKER, TO_CLIENT

Stream = trio.abc.HalfCloseableStream


class FramedCopyLoop:
    """One relay; a Line for its judge, also before ``relay``, which is called once. ``count_messages`` hears of a way
    and how many went there.
    """

    def __init__(
        self,
        followed: ExpiringSession,
        count_messages: Callable[[int, int], None],
        judge: ReauthenticationHandler,
        now: Callable[[], float],
    ) -> None:
        followed.control = self
        if followed.broker_challenges is not None:
            followed.broker_challenges.control = self
        self._followed = followed
        self._judge = judge
        self._now = now
        self._count_messages = count_messages
        self._to_broker = FrameCutter(walk := followed.new_scanner(TO_BROKER))
        self._stops = walk.stop_types
        self._walks = (walk, back := followed.new_scanner(TO_CLIENT))
        self._to_client = FrameCutter(back)
        self._client_stops = back.stop_types
        self._speaking = trio.Lock()
        """Whoever writes to the client."""
        self._sending = trio.Lock()
        """Whoever writes to the broker."""
        self._broker_at_boundary = True
        """Whether all that was sent to the broker ends with a frame, and more may be sent."""
        self._to_answer: bytes | None = None
        self._something_to_answer = trio.Event()
        self._something_to_say = trio.Event()
        self._verdict = trio.Event()
        self._to_say: tuple[bytes, bool] | None = None
        self._stopped = trio.CancelScope()
        self.has_opened_producer = False
        self.bytes_sent_to_client = 0
        self.has_ended = False
        self._ended = 0
        self._must_move = False
        self._half_close_timeout_s = float("inf")
        self._over = trio.CancelScope()
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
        """As proxy.forwarder.relay.copy_loop.relay."""
        self._client, self._broker = client, broker
        self._half_close_timeout_s = half_close_timeout_s
        self._moved()  # it may be closing already
        try:
            with self._over:
                await self._move(first_to_broker, count_to_broker, first_to_client, count_to_client)
        finally:
            self.has_ended = True

    async def _move(
        self, first_to_broker: bytes, count_to_broker: Count, first_to_client: bytes, count_to_client: Count
    ) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._move_to_broker, first_to_broker, count_to_broker)
            nursery.start_soon(self._move_to_client, first_to_client, count_to_client)
            nursery.start_soon(self._speak)
            if self._followed.broker_challenges is not None:
                nursery.start_soon(self._answer)

    def _moved(self) -> None:
        """Once one direction has ended, the other lives only as long as its bytes move."""
        if self._must_move:
            self._over.deadline = trio.current_time() + self._half_close_timeout_s

    def _end_of_one(self) -> None:
        self._ended += 1
        self._must_move = True
        self._moved()
        if self._ended == len(self._walks):
            self._over.cancel()  # nobody is left to be told anything

    def _note_messages(self, way: int) -> None:
        if messages := self._walks[way].take_message_count():
            self._count_messages(way, messages)

    # ---- to the broker

    async def _move_to_broker(self, first: bytes, count: Count) -> None:
        try:
            with self._stopped:
                await self._pass_all_to_broker(first, count)
        except FrameInvalid as error:
            self._judge.on_invalid_frame(self._followed, error)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # see proxy.forwarder.relay.copy_loop
        if self._followed.close_reason:
            return  # the farewell ends it
        self._must_move = True  # also while an answer of the proxy's is being sent that the broker does not read
        self._moved()
        async with self._sending:
            self._broker_at_boundary = False
            await _end(self._broker)
        self._end_of_one()

    async def _pass_all_to_broker(self, first: bytes, count: Count) -> None:
        data = first or await self._client.receive_some(CHUNK_BYTES)
        while data:
            self._to_broker.receive_data(data)
            del data  # a relay that waits keeps none
            while passing := await self._next_to_broker():
                await self._send_to_broker(passing)
                count(len(passing))
                self._moved()
                if self._followed.close_reason and self._to_broker.at_boundary:
                    self._stopped.cancel()
            self._note_messages(TO_BROKER)
            data = await self._client.receive_some(CHUNK_BYTES)
        if rest := self._to_broker.take_unread_data():
            async with self._sending:
                self._broker_at_boundary = False
                await self._broker.send_all(rest)
            count(len(rest))

    async def _send_to_broker(self, passing: bytes) -> None:
        at_boundary = self._to_broker.at_boundary
        async with self._sending:
            self._broker_at_boundary = False  # also where the sending is broken off
            await self._broker.send_all(passing)
            self._broker_at_boundary = at_boundary
            await self._answer_at_boundary()

    async def _answer(self) -> None:
        """Answer the broker while the client is silent."""
        while True:
            await self._something_to_answer.wait()
            self._something_to_answer = trio.Event()
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                async with self._sending:
                    await self._answer_at_boundary()

    async def _answer_at_boundary(self) -> None:
        broker = self._followed.broker_challenges
        if self._to_answer is None or broker is None or self._followed.close_reason or not self._broker_at_boundary:
            return
        frame, self._to_answer = self._to_answer, None
        self._broker_at_boundary = False
        broker.on_answer_sent()  # the broker may ask again before the sending has returned
        await self._broker.send_all(frame)
        self._broker_at_boundary = True

    async def _next_to_broker(self) -> bytes:
        """What may pass next; empty: nothing of what is there."""
        cutter = self._to_broker
        while True:
            self._walks[TO_BROKER].stop_types = self._followed.current_stop_types(TO_BROKER, self._stops, self._now())
            passing = cutter.take_passable(one_frame=bool(self._followed.close_reason) or self._to_answer is not None)
            if passing or cutter.stopped_at in {NO_STOP, INCOMPLETE}:
                return passing
            if cutter.stopped_at == BaseCommand.AUTH_RESPONSE:
                if not self._take_answer():
                    return b""
                await trio.lowlevel.checkpoint()  # whoever sends nothing else has a turn for each
            elif passing := await self._stopped_at(cutter.stopped_at):
                return passing

    async def _stopped_at(self, command_type: int) -> bytes:
        """Do what a command is stopped for; its frame's bytes where it may pass."""
        use = self._judge.decide_command(self._followed)
        if use is CommandDecision.PASS:
            if command_type == BaseCommand.PRODUCER and not self.has_opened_producer:
                self.has_opened_producer = True
                self._stops -= {BaseCommand.PRODUCER}
                self._judge.on_producer_opened(self._followed)
            return self._to_broker.take_stopped_frame_bytes()
        if use is CommandDecision.HOLD:
            self._verdict = trio.Event()
            await self._verdict.wait()
        else:
            self.start_closing(CloseReason.EXPIRED)
            await trio.lowlevel.checkpoint()
        return b""

    def _take_answer(self) -> bool:
        """Take what is there of the client's answer; whether that was all of it."""
        followed, clock = self._followed, self._followed.clock
        assert clock is not None  # nothing else stops
        if self._to_broker.stopped_frame_length() > followed.terms.answer_bytes_max:
            self._judge.on_failure(followed, ReauthenticationFailure.TOO_LARGE, over_limit=True)
            return False
        frame = self._to_broker.remove_frame()
        if frame is None:
            return False
        failure = clock.on_answer(self._now())
        if failure is not None:
            self._judge.on_failure(followed, failure)
        else:
            self._judge.on_answer(followed, frame)
        return True

    # ---- to the client

    async def _move_to_client(self, first: bytes, count: Count) -> None:
        try:
            data = first or await self._broker.receive_some(CHUNK_BYTES)
            while data:
                self._to_client.receive_data(data)
                del data
                await self._pass_to_client(count)
                self._note_messages(TO_CLIENT)
                data = await self._broker.receive_some(CHUNK_BYTES)
            await self._end_to_client(count)
        except FrameInvalid as error:
            self._judge.on_invalid_frame(self._followed, error)
            return
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            await _end(self._client)
        self.has_ended = True
        self._end_of_one()

    async def _pass_to_client(self, count: Count) -> None:
        while True:
            async with self._speaking:
                await self._say_at_boundary()
                passing = self._next_to_client()
                if not passing:
                    return
                await self._client.send_all(passing)
            count(len(passing))
            self.bytes_sent_to_client += len(passing)
            self._moved()

    def _next_to_client(self) -> bytes:
        """What may pass next; empty: nothing of what is there."""
        cutter, walk = self._to_client, self._walks[TO_CLIENT]
        while True:
            walk.stop_types = self._followed.current_stop_types(TO_CLIENT, self._client_stops, self._now())
            passing = cutter.take_passable(one_frame=self._to_say is not None)
            if passing or cutter.stopped_at in {NO_STOP, INCOMPLETE}:
                return passing
            if cutter.stopped_at == BaseCommand.AUTH_CHALLENGE and self._followed.broker_challenges is not None:
                check_challenge_size(cutter.stopped_frame_length())
                if (frame := cutter.remove_frame()) is None:
                    return b""
                self._followed.broker_challenges.on_challenge_frame(frame)
            else:
                self._judge.on_served_past_grace(
                    self._followed
                )  # with which nothing but challenges is stopped at any more

    async def _end_to_client(self, count: Count) -> None:
        rest = self._to_client.take_unread_data()
        if rest:
            await self._client.send_all(rest)
            count(len(rest))
        elif self._followed.close_reason and self._to_say is None:
            self.close_with_error(self._judge.closing_error_frame(self._followed))
        async with self._speaking:
            if not rest:
                await self._say_at_boundary()
            await self._client.send_eof()

    async def _speak(self) -> None:
        """Say what is to be said while the broker is silent."""
        while True:
            await self._something_to_say.wait()
            self._something_to_say = trio.Event()
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                async with self._speaking:
                    await self._say_at_boundary()

    async def _say_at_boundary(self) -> None:
        if self._to_say is None or not self._to_client.at_boundary:
            return
        (frame, is_last), self._to_say = self._to_say, None
        clock = self._followed.clock
        if not is_last and clock is not None:
            if (frame == self._followed.terms.challenge) != (clock.phase is Phase.QUIET):
                return  # overtaken by an answer that came unasked
            clock.on_challenge_sent(self._now())
            self._verdict.set()  # a command that waited for this round's verdict came too late
        await self._client.send_all(frame)
        if is_last:
            await self._end_both()

    async def _end_both(self) -> None:
        for stream in (self._client, self._broker):
            await _end(stream)
        self._over.cancel()

    # ---- the judge says

    def send_challenge(self, challenge: bytes) -> None:
        """Put a challenge in at the next boundary."""
        self._say(challenge, is_last=False)

    def _say(self, frame: bytes, *, is_last: bool) -> None:
        self._to_say = frame, is_last
        self._something_to_say.set()

    def send_broker_answer(self, frame: bytes) -> None:
        """Put an answer in towards the broker, at the next boundary of what it is sent."""
        self._to_answer = frame
        self._something_to_answer.set()

    def resume_after_verdict(self) -> None:
        """There is a verdict, and the clock knows it."""
        self._verdict.set()

    def record_observed_end(self) -> None:
        """Nothing to write down: the relay ends with its process."""

    def record_exchange(self) -> None:
        """Nothing to write down: the relay ends with its process."""

    def start_closing(self, reason: CloseReason, error_frame: bytes = b"") -> None:
        """Begin to close: nothing passes to the broker from the next boundary on."""
        if self._followed.close_reason:
            return
        self._followed.close_reason = reason
        self._followed.closing_error_frame = error_frame
        if self._to_broker.at_boundary:
            self._stopped.cancel()
        self._ended = max(self._ended, 1)
        self._must_move = True
        self._moved()
        self._judge.on_closing(self._followed)

    def close_with_error(self, error_frame: bytes) -> None:
        """Tell the client at the next boundary; then both directions end."""
        self._say(error_frame, is_last=True)


async def _end(stream: Stream) -> None:
    """End a stream's sending, but not in the middle of what is being sent there: that ends with the relay."""
    with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError):
        await stream.send_eof()
