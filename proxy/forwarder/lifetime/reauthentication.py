"""Coordinator of clients' re-authentication: challenges in time, verdicts on answers, and ends of sessions (KIP-368).

The pumps of framed relays find answers and ends in what they move (framed_splice_pump, framed_copy_pump of
proxy.forwarder.relay) and report them here. The session clock decides (proto.session_clock); auth workers verify
answers.

A session ends gently if it was used past its end, if the broker still sent to it past its grace, or if its client
failed to authenticate again. From the next boundary on nothing more passes to the broker. What the broker still sends,
receipts for what it has received among it, is delivered until the broker is silent for a moment. Then the client
receives an error at a boundary, and both sides are closed in order.
"""

import heapq
import itertools
import random
import time
from collections.abc import Callable, Iterable

import trio

from proto import commands
from proto.command_heads import FrameInvalid
from proto.commands import NO_REQUEST_ID, CommandCorrupt
from proto.connect_rules import AUTHENTICATION_FAILED
from proto.framed_stream import CHALLENGE_BYTES_MAX, Action, FramedStream
from proto.pulsar_pb2 import BaseCommand, ServerError
from proto.rpc_pb2 import Principal
from proto.session_clock import NEVER, ReauthenticationFailure, SessionClock
from proxy.common.logs import get_logger
from proxy.forwarder.lifetime.closing import PLANNED_CLOSE_REASONS, CloseReason, until_quiet
from proxy.forwarder.lifetime.metrics import NoReauthReason, ReauthenticationMetrics
from proxy.forwarder.lifetime.session import INJECTION_BYTES_MAX, ExpiringSession, parse_frame_command
from proxy.forwarder.workers.authentication import Challenge, ClientIdentity, Denial, Verdict
from proxy.runtime.loop.tasks import ignore, seconds
from proxy.runtime.rpc.errors import RpcError

SESSION_EXPIRED = "The proxy closes this connection: session expired"
MAX_AGE_REACHED = "The proxy closes this connection: it has reached its maximum age; connect again"
SHUTTING_DOWN = "The proxy closes this connection: it is shutting down; connect again"
DISCONNECTED = "The proxy closes this connection: an operator has ended it; connect again"
BROKER_OUT_OF_TURN = "The proxy closes this connection: its broker asks for credentials out of turn; connect again"
STREAM_CORRUPT = "The proxy closes this connection: what was sent is no frame of a Pulsar client's or broker's"

QUIET_S = 0.1
GRACE_S = 1.0
"""Silence after which a broker is taken to have sent all that it had to send, and the longest wait for that silence."""

DUE_MIN = 1_000
"""Size of the schedule that is always allowed; above it, at most as many entries are out of date as are not."""

_TEXTS = {
    CloseReason.EXPIRED: (ServerError.AuthenticationError, SESSION_EXPIRED),
    CloseReason.FAILED: (ServerError.AuthenticationError, AUTHENTICATION_FAILED),
    CloseReason.STILL_SERVED: (ServerError.AuthenticationError, SESSION_EXPIRED),
    CloseReason.CORRUPT: (ServerError.UnknownError, STREAM_CORRUPT),
    CloseReason.MAX_AGE: (ServerError.ServiceNotReady, MAX_AGE_REACHED),
    CloseReason.SHUT_DOWN: (ServerError.ServiceNotReady, SHUTTING_DOWN),
    CloseReason.DISCONNECTED: (ServerError.ServiceNotReady, DISCONNECTED),
    CloseReason.OUT_OF_TURN: (ServerError.ServiceNotReady, BROKER_OUT_OF_TURN),
}


class ReauthenticationCoordinator:
    """Coordinator of a forwarder's sessions, in relays and in lookup mode. ``run`` sends challenges.

    ``unix_ms`` reads the wall clock; ``fraction`` draws a number from 0 to 1. Both are replaced in tests.
    ``on_credentials_changed`` is called with a session whose client has renewed it by other credentials.
    ``on_verdict`` is called with each one whose client has authenticated itself again, or why it failed to.
    """

    def __init__(self, nursery: trio.Nursery, metrics: ReauthenticationMetrics, now: Callable[[], float]) -> None:
        self.now = now
        self.unix_ms: Callable[[], float] = lambda: time.time() * 1000
        self.fraction: Callable[[], float] = random.random  # no secret
        self.on_credentials_changed: Callable[[ExpiringSession], None] = ignore
        self.on_verdict: Callable[[ExpiringSession, str], None] = ignore
        self._nursery = nursery
        self._metrics = metrics
        self._due: list[tuple[float, int, ExpiringSession]] = []
        self._due_max = DUE_MIN
        self._numbers = itertools.count()
        self._rescheduled = trio.Event()

    # ---- schedule of challenges

    def add_session(self, session: ExpiringSession) -> None:
        """Add the session of a new or inherited relay; continue a close that a predecessor started."""
        if session.close_reason > CloseReason.ERROR_SENT:  # counted by the predecessor that started it
            self._nursery.start_soon(self._close_when_quiet, session)
        elif not session.close_reason:
            self._schedule(session)

    def _schedule(self, session: ExpiringSession) -> None:
        if session.clock is None or not session.terms.challenge:
            return
        at = session.clock.challenge_at_s
        if at in {NEVER, session.scheduled_at_s}:
            return
        session.scheduled_at_s = at
        if not self._due or at < self._due[0][0]:
            self._rescheduled.set()
        heapq.heappush(self._due, (at, next(self._numbers), session))
        if len(self._due) > self._due_max:
            self._remove_outdated()

    def remove_sessions(self, sessions: Iterable[ExpiringSession]) -> None:
        """Remove sessions from the schedule, since their relays were handed over to a successor."""
        removed = {id(session) for session in sessions}
        self._due = [entry for entry in self._due if id(entry[2]) not in removed]
        heapq.heapify(self._due)

    def _remove_outdated(self) -> None:
        """Remove the entries of ended relays and earlier lifetimes, which would otherwise stay for hours until due."""
        due, self._due = self._due, []
        for entry in due:
            at, _, session = entry
            if _is_due_at(session, at):
                self._due.append(entry)
            else:
                _forget_schedule(session, at)
        heapq.heapify(self._due)
        self._due_max = max(DUE_MIN, 2 * len(self._due))

    async def run(self) -> None:
        """Send each client its challenge in time. Runs until cancelled."""
        while True:
            self._rescheduled = trio.Event()
            wait_s = self._due[0][0] - self.now() if self._due else NEVER
            with trio.move_on_after(max(0.0, wait_s)):
                await self._rescheduled.wait()
            self.send_due_challenges()

    def send_due_challenges(self) -> None:
        """Send the challenges that are due."""
        now = self.now()
        while self._due and self._due[0][0] <= now:
            at, _, session = heapq.heappop(self._due)
            _forget_schedule(session, at)
            if _is_due_at(session, at) and not (session.terms.spares_producers and session.control.has_opened_producer):
                session.control.send_challenge(session.terms.challenge)

    def challenge_soon(self, session: ExpiringSession) -> None:
        """Challenge a client as soon as it may be, since its broker asks for fresh credentials, too."""
        if session.clock is not None and not session.close_reason:
            session.clock.hasten_challenge(self.now())
            self._schedule(session)

    # ---- answers

    def on_answer(self, session: ExpiringSession, frame: bytes) -> None:
        """Start to verify the client's answer to a challenge."""
        self._nursery.start_soon(self._verify_answer, session, frame)

    def on_answer_lost(self, session: ExpiringSession) -> None:
        """Schedule another challenge after an answer to a predecessor's challenge."""
        self._schedule(session)

    async def _verify_answer(self, session: ExpiringSession, frame: bytes) -> None:
        principal = session.terms.principal
        if _is_over(session):
            return
        try:
            command = _answer_in(frame)
            if command.auth_response.response.auth_method_name not in {principal.method, ""}:
                self.on_failure(session, ReauthenticationFailure.ANOTHER_METHOD)
                return
            verdict = await session.reauthenticate(command)
        except CommandCorrupt:
            if not _is_over(session):
                self.on_failure(session, ReauthenticationFailure.DENIED)
        except RpcError as error:
            if _is_over(session):
                return
            get_logger().warning(
                "a client's answer could not be judged", client=session.relay_record.client_address, reason=str(error)
            )
            self._challenge_again(session)
        else:
            if not _is_over(session):
                self._apply_verdict(session, verdict, frame)

    def _challenge_again(self, session: ExpiringSession) -> None:
        self._clock(session).on_answer_lost(self.now())
        session.control.resume_after_verdict()
        self._schedule(session)

    def _apply_verdict(self, session: ExpiringSession, verdict: Verdict, frame: bytes) -> None:
        if isinstance(verdict, ClientIdentity):
            changed = tuple(session.relay_record.credentials) != verdict.credentials
            session.relay_record.credentials[:] = verdict.credentials
            self._accept(session, verdict.principal, frame)
            if changed:
                self.on_credentials_changed(session)
        elif isinstance(verdict, Challenge):
            if len(verdict.frame) > INJECTION_BYTES_MAX:
                self.on_failure(session, ReauthenticationFailure.TOO_LARGE)
            else:
                session.control.send_challenge(verdict.frame)
        elif verdict.refusal.code == ServerError.ServiceNotReady:  # not the client's fault
            self._challenge_again(session)
        else:
            self.on_failure(session, ReauthenticationFailure.DENIED, verdict)

    def _accept(self, session: ExpiringSession, principal: Principal, frame: bytes) -> None:
        clock, now = self._clock(session), self.now()
        took_s = clock.seconds_since_challenge(now)
        failure = clock.on_accepted(principal, now_s=now, now_unix_ms=self.unix_ms(), fraction=self.fraction())
        if failure is not None:
            self.on_failure(session, failure)
            return
        self._metrics.record_success(principal.method, took_s)
        self.on_verdict(session, "")
        if session.broker_challenges is not None:
            session.broker_challenges.on_answer_accepted(frame)
        session.control.resume_after_verdict()
        self._schedule(session)

    @staticmethod
    def _clock(session: ExpiringSession) -> SessionClock:
        assert session.clock is not None  # or it was never challenged
        return session.clock

    def on_failure(
        self,
        session: ExpiringSession,
        failure: ReauthenticationFailure,
        denial: Denial | None = None,
        *,
        over_limit: bool = False,
    ) -> None:
        """Close the session of a client that failed to authenticate again, unless failures are only observed.

        ``denial``: the auth worker's, if there is one. ``over_limit``: the answer is too large to be removed from the
        stream, so the relay ends in any case.
        """
        observes = session.observes_ends and not over_limit  # a limit is enforced in any case
        if not (
            observes and self._clock(session).end_observed
        ):  # else a client could fill the log without being closed
            self._report_failure(session, failure, denial)
        if observes:
            self._continue_after(session, failure)
            return
        frame = (
            commands.error(NO_REQUEST_ID, denial.refusal.code, denial.refusal.message) if denial is not None else b""
        )
        session.control.start_closing(CloseReason.FAILED, frame)

    def _report_failure(
        self, session: ExpiringSession, failure: ReauthenticationFailure, denial: Denial | None
    ) -> None:
        reason = denial.reason if denial is not None else failure.value
        self._metrics.count_failure(session.terms.principal.method)
        self.on_verdict(session, reason)
        get_logger().warning(
            "a client has failed to authenticate itself again",
            client=session.relay_record.client_address,
            principal=session.relay_record.principal,
            reason=reason,
        )

    def _continue_after(self, session: ExpiringSession, failure: ReauthenticationFailure) -> None:
        """Drop an answer that failed. Another one that is being verified still gets its verdict."""
        if failure not in {ReauthenticationFailure.ANSWERED_TWICE, ReauthenticationFailure.TOO_SOON}:
            self._clock(session).on_observed_failure(self.now())
        self._observe(session, CloseReason.FAILED)
        session.control.resume_after_verdict()

    # ---- ends

    def on_action(self, session: ExpiringSession, stream: FramedStream, action: Action) -> None:
        """Close the session, or count its end, where a stream's decision says so.

        Raises FrameInvalid for a broker's challenge that is too large.
        """
        why = CloseReason.EXPIRED if stream.to_broker else CloseReason.STILL_SERVED
        if action is Action.COUNT:
            self._observe(session, why)
        elif action in {Action.CLOSE, Action.CUT}:
            session.control.start_closing(why)
        elif action is Action.REFUSE and stream.to_broker:
            self.on_failure(session, ReauthenticationFailure.TOO_LARGE, over_limit=True)
        elif action is Action.REFUSE:
            raise FrameInvalid(f"a challenge to the proxy of more than {CHALLENGE_BYTES_MAX} bytes")

    def _observe(self, session: ExpiringSession, why: CloseReason) -> None:
        """Count and log a session that enforcement would close, once per lifetime."""
        clock = self._clock(session)
        if clock.end_observed:
            return
        clock.end_observed = True
        session.control.record_observed_end()
        if session.close_reason:  # for another reason that came first
            return
        listener, method = session.enforcement.listener_name(session.listener), session.terms.principal.method
        reason = why.name.lower()
        self._metrics.count_observed_end(listener, method, reason)
        get_logger().info(
            'a client\'s session would have been closed (session.enforcement = "observe")',
            client=session.relay_record.client_address,
            principal=session.relay_record.principal,
            listener=listener,
            method=method,
            reason=reason,
        )

    def on_producer_opened(self, session: ExpiringSession) -> None:
        """Count a client that is no longer challenged because it has opened its first producer."""
        if session.terms.spares_producers and session.terms.challenge:
            self._metrics.count_never_asked(session.terms.principal.method, NoReauthReason.HAS_PRODUCER)

    @staticmethod
    def on_invalid_frame(session: ExpiringSession, error: FrameInvalid) -> None:
        """Close a relay after bytes of the client or the broker that are no frame."""
        if not session.close_reason:
            get_logger().warning(
                "a relay's frames cannot be followed",
                client=session.relay_record.client_address,
                principal=session.relay_record.principal,
                target=session.relay_record.target,
                reason=str(error),
            )
        session.control.start_closing(CloseReason.CORRUPT)

    def on_closing(self, session: ExpiringSession) -> None:
        """Send the client its error as soon as the broker's bytes on the way to it have arrived."""
        if session.close_reason in {CloseReason.EXPIRED, CloseReason.STILL_SERVED}:
            self._metrics.expired_killed.inc()
        if session.close_reason not in PLANNED_CLOSE_REASONS:  # proxy.forwarder.relay.manager logs those
            get_logger().info(
                "a client's session is being closed",
                client=session.relay_record.client_address,
                principal=session.relay_record.principal,
                reason=session.close_reason.name.lower(),
            )
        self._nursery.start_soon(self._close_when_quiet, session)

    async def _close_when_quiet(self, session: ExpiringSession) -> None:
        deadline = trio.current_time() + GRACE_S
        if session.close_reason is CloseReason.FAILED:
            await trio.sleep(seconds(session.terms.failure_delay_ms))
        left_s = deadline - trio.current_time()
        await until_quiet(lambda: session.control.bytes_sent_to_client, quiet_s=QUIET_S, most_s=left_s)
        session.control.close_with_error(self.closing_error_frame(session))

    def closing_error_frame(self, session: ExpiringSession) -> bytes:
        """Return the error frame that tells the client why its relay closes."""
        return session.closing_error_frame or commands.error(NO_REQUEST_ID, *_TEXTS[session.close_reason])


def _is_over(session: ExpiringSession) -> bool:
    """Return whether the session is closing, or its relay has ended or was handed over to a successor."""
    return bool(session.close_reason) or session.control.has_ended


def _is_due_at(session: ExpiringSession, at: float) -> bool:
    """Return whether the client is still to be challenged then; the time may be an earlier lifetime's."""
    return session.clock is not None and session.clock.challenge_at_s == at and not _is_over(session)


def _forget_schedule(session: ExpiringSession, at: float) -> None:
    """Record that an entry has left the schedule, unless it was replaced by one at another time."""
    if session.scheduled_at_s == at:
        session.scheduled_at_s = NEVER


def _answer_in(frame: bytes) -> BaseCommand:
    """Parse the AUTH_RESPONSE of a frame that begins like one. Raises CommandCorrupt."""
    command = parse_frame_command(frame)
    if command.type != BaseCommand.AUTH_RESPONSE or not command.HasField("auth_response"):
        raise CommandCorrupt("no answer to a challenge")
    return command
