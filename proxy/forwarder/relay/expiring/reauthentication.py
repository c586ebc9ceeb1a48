"""When clients of relays are asked for fresh credentials, what becomes of their answers, how sessions end (KIP-368).

The engine and user space find answers and ends in what they move (proxy.forwarder.relay.expiring.splice_pump,
framed_streams) and tell them
here; the session clock decides (proto.session_clock); auth workers judge.

A session that was used past its end, over which the broker still sent something past its grace, or whose client failed
to authenticate again, ends gently: from the next boundary on nothing more passes to the broker; what the broker still
says, receipts for what it has got among it, is delivered until it falls silent for a moment; then the client is told
why, at a boundary, and both sides are closed in order.
"""

import enum
import heapq
import itertools
import random
import time
from collections.abc import Callable, Iterable

import trio
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from proto import commands
from proto.command_heads import FrameInvalid
from proto.commands import NO_REQUEST_ID, CommandCorrupt
from proto.connect_rules import AUTHENTICATION_FAILED
from proto.pulsar_pb2 import BaseCommand, ServerError
from proto.rpc_pb2 import Principal
from proto.session_clock import NEVER, CommandDecision, ReauthenticationFailure, SessionClock
from proxy.common.logs import get_logger
from proxy.forwarder.relay.close_reason import PLANNED_CLOSE_REASONS, CloseReason
from proxy.forwarder.relay.close_schedule import until_quiet
from proxy.forwarder.relay.expiring.session import INJECTION_BYTES_MAX, ExpiringSession, parse_frame_command
from proxy.forwarder.workers.authentication import Challenge, ClientIdentity, Denial, Verdict
from proxy.runtime.loop.tasks import seconds
from proxy.runtime.observability.metrics import LATENCY_BUCKETS_S
from proxy.runtime.observability.windowed_maximum import WINDOW_S, WindowedMaximum
from proxy.runtime.rpc.client import RpcError

SESSION_EXPIRED = "The proxy closes this connection: session expired"
MAX_AGE_REACHED = "The proxy closes this connection: it has reached its maximum age; connect again"
SHUTTING_DOWN = "The proxy closes this connection: it is shutting down; connect again"
BROKER_OUT_OF_TURN = "The proxy closes this connection: its broker asks for credentials out of turn; connect again"
STREAM_CORRUPT = "The proxy closes this connection: what was sent is no frame of a Pulsar client's or broker's"

QUIET_S = 0.1
GRACE_S = 1.0
"""A broker that is silent for so long has said what it had to say; none is waited for longer than the second."""

DUE_MIN = 1_000
"""Entries that may always wait; above, at most as many are out of date as are not."""

_TEXTS = {
    CloseReason.EXPIRED: (ServerError.AuthenticationError, SESSION_EXPIRED),
    CloseReason.FAILED: (ServerError.AuthenticationError, AUTHENTICATION_FAILED),
    CloseReason.STILL_SERVED: (ServerError.AuthenticationError, SESSION_EXPIRED),
    CloseReason.CORRUPT: (ServerError.UnknownError, STREAM_CORRUPT),
    CloseReason.MAX_AGE: (ServerError.ServiceNotReady, MAX_AGE_REACHED),
    CloseReason.SHUT_DOWN: (ServerError.ServiceNotReady, SHUTTING_DOWN),
    CloseReason.OUT_OF_TURN: (ServerError.ServiceNotReady, BROKER_OUT_OF_TURN),
}


class NoReauthReason(enum.Enum):
    """Why an authenticated client is not asked again; the values are the metric's labels."""

    CLIENT_CANNOT = "client_cannot"
    HAS_PRODUCER = "has_producer"


class ReauthenticationMetrics:
    """KIP-368's, for lookup mode and relays together; `method` is an authentication method's name.

    ``now``: seconds of a clock that goes forward only.
    """

    def __init__(self, registry: CollectorRegistry | None, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._maximum = WindowedMaximum()
        self.success = Counter(
            "pulsar_proxy_reauthentication_success",
            "Clients that have authenticated themselves again on their connection, by method.",
            ["method"],
            registry=registry,
        )
        self.failure = Counter(
            "pulsar_proxy_reauthentication_failure",
            "Clients that have failed to, and were closed, by the method of their session.",
            ["method"],
            registry=registry,
        )
        self.seconds = Histogram(
            "pulsar_proxy_reauthentication_seconds",
            "Time from the challenge to the verdict, the client's own time included, of those that succeeded.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        maximum = Gauge(
            "pulsar_proxy_reauthentication_max_seconds",
            f"The longest such time of the last {WINDOW_S} seconds; 0: there was none.",
            registry=registry,
        )
        maximum.set_function(lambda: self._maximum.value(self._now()))
        self._no_reauth = Counter(
            "pulsar_proxy_authentication_no_reauth",
            "Clients that have authenticated themselves but are not asked to again on their connection, by method and "
            "reason: client_cannot, has_producer.",
            ["method", "reason"],
            registry=registry,
        )
        self.expired_killed = Counter(
            "pulsar_proxy_expired_connections_killed",
            "Clients' connections closed because they were used, or still served, after their session had expired.",
            registry=registry,
        )
        self.expired_observed = Counter(
            "pulsar_proxy_expired_connections_observed",
            "Lives of sessions that enforcement would have closed, but session.enforcement is observe, by listener, "
            "method and reason: expired, still_served, failed.",
            ["listener", "method", "reason"],
            registry=registry,
        )
        self.expired_sessions = Gauge(
            "pulsar_proxy_expired_sessions",
            "Sessions that are past their end, and open: idle ones, and those whose end is only observed.",
            registry=registry,
        )

    def count_never_asked(self, method: str, reason: NoReauthReason) -> None:
        """Count a client that is not asked to authenticate itself again."""
        self._no_reauth.labels(method=method, reason=reason.value).inc()

    def record_success(self, method: str, took_s: float) -> None:
        """Count a client that has authenticated itself again within so many seconds."""
        self.success.labels(method=method).inc()
        self.seconds.observe(took_s)
        self._maximum.observe(took_s, self._now())


class ReauthenticationCoordinator:
    """See the module; framed.Judge. ``run`` asks clients in time."""

    def __init__(self, nursery: trio.Nursery, metrics: ReauthenticationMetrics, now: Callable[[], float]) -> None:
        self.now = now
        self.unix_ms: Callable[[], float] = lambda: time.time() * 1000
        self.fraction: Callable[[], float] = random.random  # no secret
        self._nursery = nursery
        self._metrics = metrics
        self._due: list[tuple[float, int, ExpiringSession]] = []
        self._due_max = DUE_MIN
        self._numbers = itertools.count()
        self._earlier = trio.Event()

    # ---- when to ask

    def add_session(self, followed: ExpiringSession) -> None:
        """A relay has begun, or was taken over."""
        if followed.close_reason > CloseReason.ERROR_SENT:  # counted by the predecessor who began it
            self._nursery.start_soon(self._see_off, followed)
        elif not followed.close_reason:
            self._schedule(followed)

    def _schedule(self, followed: ExpiringSession) -> None:
        if followed.clock is None or not followed.terms.challenge:
            return
        at = followed.clock.challenge_at_s
        if at == NEVER:
            return
        if not self._due or at < self._due[0][0]:
            self._earlier.set()
        heapq.heappush(self._due, (at, next(self._numbers), followed))
        if len(self._due) > self._due_max:
            self._forget_what_is_over()

    def remove_sessions(self, sessions: Iterable[ExpiringSession]) -> None:
        """Ask nothing more in these sessions, whose relays are a successor's."""
        gone = {id(followed) for followed in sessions}
        self._due = [entry for entry in self._due if id(entry[2]) not in gone]
        heapq.heapify(self._due)

    def _forget_what_is_over(self) -> None:
        """Entries of relays that have ended, or were renewed earlier, would stay until their time comes: for hours."""
        self._due = [
            entry
            for entry in self._due
            if entry[2].clock is not None and entry[2].clock.challenge_at_s == entry[0] and not _is_over(entry[2])
        ]
        heapq.heapify(self._due)
        self._due_max = max(DUE_MIN, 2 * len(self._due))

    async def run(self) -> None:
        """Ask each client when it is time."""
        while True:
            self._earlier = trio.Event()
            wait_s = self._due[0][0] - self.now() if self._due else NEVER
            with trio.move_on_after(max(0.0, wait_s)):
                await self._earlier.wait()
            self.send_due_challenges()

    def send_due_challenges(self) -> None:
        """Ask all whose time has come."""
        now = self.now()
        while self._due and self._due[0][0] <= now:
            at, _, followed = heapq.heappop(self._due)
            # An earlier life's time is none any more.
            if followed.clock is None or followed.clock.challenge_at_s != at or _is_over(followed):
                continue
            if not (followed.terms.spares_producers and followed.control.has_opened_producer):
                followed.control.send_challenge(followed.terms.challenge)

    # ---- answers

    def on_answer(self, followed: ExpiringSession, frame: bytes) -> None:
        """The client's answer; it is being judged from now on."""
        self._nursery.start_soon(self._judge, followed, frame)

    def on_answer_lost(self, followed: ExpiringSession) -> None:
        """An answer to a predecessor."""
        self._schedule(followed)

    async def _judge(self, followed: ExpiringSession, frame: bytes) -> None:
        principal = followed.terms.principal
        if _is_over(followed):
            return
        try:
            command = _answer_in(frame)
            if command.auth_response.response.auth_method_name not in {principal.method, ""}:
                self.on_failure(followed, ReauthenticationFailure.ANOTHER_METHOD)
                return
            verdict = await followed.reauthenticate(command)
        except CommandCorrupt:
            if not _is_over(followed):
                self.on_failure(followed, ReauthenticationFailure.DENIED)
        except RpcError as error:
            if _is_over(followed):
                return
            get_logger().warning(
                "a client's answer could not be judged", client=followed.relay_record.client_address, reason=str(error)
            )
            self._not_judged(followed)
        else:
            if not _is_over(followed):
                self._take(followed, verdict)

    def _not_judged(self, followed: ExpiringSession) -> None:
        self._clock(followed).on_answer_lost(self.now())
        followed.control.resume_after_verdict()
        self._schedule(followed)

    def _take(self, followed: ExpiringSession, verdict: Verdict) -> None:
        if isinstance(verdict, ClientIdentity):
            self._accept(followed, verdict.principal)
        elif isinstance(verdict, Challenge):
            if len(verdict.frame) > INJECTION_BYTES_MAX:
                self.on_failure(followed, ReauthenticationFailure.TOO_LARGE)
            else:
                followed.control.send_challenge(verdict.frame)
        elif verdict.refusal.code == ServerError.ServiceNotReady:  # which is not the client's fault
            self._not_judged(followed)
        else:
            self.on_failure(followed, ReauthenticationFailure.DENIED, verdict)

    def _accept(self, followed: ExpiringSession, principal: Principal) -> None:
        clock, now = self._clock(followed), self.now()
        took_s = clock.seconds_since_challenge(now)
        failure = clock.on_accepted(principal, now_s=now, now_unix_ms=self.unix_ms(), fraction=self.fraction())
        if failure is not None:
            self.on_failure(followed, failure)
            return
        self._metrics.record_success(principal.method, took_s)
        followed.control.resume_after_verdict()
        self._schedule(followed)

    @staticmethod
    def _clock(followed: ExpiringSession) -> SessionClock:
        assert followed.clock is not None  # or nobody was asked
        return followed.clock

    def on_failure(
        self,
        followed: ExpiringSession,
        failure: ReauthenticationFailure,
        denial: Denial | None = None,
        *,
        over_limit: bool = False,
    ) -> None:
        """A client has not authenticated itself again: it is closed, unless that is only observed."""
        observes = followed.observes_ends and not over_limit  # a limit holds all the same
        if not (observes and self._clock(followed).end_observed):  # else it could fill the log without being closed
            self._tell_of_failure(followed, failure, denial)
        if observes:
            self._go_on_after(followed, failure)
            return
        frame = (
            commands.error(NO_REQUEST_ID, denial.refusal.code, denial.refusal.message) if denial is not None else b""
        )
        followed.control.start_closing(CloseReason.FAILED, frame)

    def _tell_of_failure(
        self, followed: ExpiringSession, failure: ReauthenticationFailure, denial: Denial | None
    ) -> None:
        self._metrics.failure.labels(method=followed.terms.principal.method).inc()
        get_logger().warning(
            "a client has failed to authenticate itself again",
            client=followed.relay_record.client_address,
            principal=followed.relay_record.principal,
            reason=denial.reason if denial is not None else failure.value,
        )

    def _go_on_after(self, followed: ExpiringSession, failure: ReauthenticationFailure) -> None:
        """Drop an answer that failed; another one that is being judged keeps its verdict."""
        if failure not in {ReauthenticationFailure.ANSWERED_TWICE, ReauthenticationFailure.TOO_SOON}:
            self._clock(followed).on_observed_failure(self.now())
        self._observe(followed, CloseReason.FAILED)
        followed.control.resume_after_verdict()

    # ---- ends

    def decide_command(self, followed: ExpiringSession) -> CommandDecision:
        """Decide what may become of a command, and count an end that is only observed."""
        use = self._clock(followed).decide_command(self.now())
        if use is CommandDecision.PASS or not followed.observes_ends:
            return use
        if use is CommandDecision.CLOSE:
            self._observe(followed, CloseReason.EXPIRED)
        return CommandDecision.PASS

    def on_served_past_grace(self, followed: ExpiringSession) -> None:
        """End a session, or count its end, over which the broker still sends past its grace."""
        if followed.observes_ends:
            self._observe(followed, CloseReason.STILL_SERVED)
        else:
            followed.control.start_closing(CloseReason.STILL_SERVED)

    def _observe(self, followed: ExpiringSession, why: CloseReason) -> None:
        """Count and log a session that enforcement would close, once in each of its lives."""
        clock = self._clock(followed)
        if clock.end_observed:
            return
        clock.end_observed = True
        followed.control.record_observed_end()
        if followed.close_reason:  # for another reason, which came first
            return
        listener, method = followed.enforcement.listener_name(followed.listener), followed.terms.principal.method
        reason = why.name.lower()
        self._metrics.expired_observed.labels(listener=listener, method=method, reason=reason).inc()
        get_logger().info(
            'a client\'s session would have been closed (session.enforcement = "observe")',
            client=followed.relay_record.client_address,
            principal=followed.relay_record.principal,
            listener=listener,
            method=method,
            reason=reason,
        )

    def on_producer_opened(self, followed: ExpiringSession) -> None:
        """Count a client that is not asked any more, since it has opened its first producer."""
        if followed.terms.spares_producers and followed.terms.challenge:
            self._metrics.count_never_asked(followed.terms.principal.method, NoReauthReason.HAS_PRODUCER)

    @staticmethod
    def on_invalid_frame(followed: ExpiringSession, error: FrameInvalid) -> None:
        """What the client or the broker has sent is no frame: the relay is closed."""
        if not followed.close_reason:
            get_logger().warning(
                "a relay's frames cannot be followed",
                client=followed.relay_record.client_address,
                principal=followed.relay_record.principal,
                target=followed.relay_record.target,
                reason=str(error),
            )
        followed.control.start_closing(CloseReason.CORRUPT)

    def on_closing(self, followed: ExpiringSession) -> None:
        """Nothing more passes to the broker; the client is to be told when what is on its way to it has come."""
        if followed.close_reason in {CloseReason.EXPIRED, CloseReason.STILL_SERVED}:
            self._metrics.expired_killed.inc()
        if followed.close_reason not in PLANNED_CLOSE_REASONS:  # of which proxy.forwarder.relay.manager tells
            get_logger().info(
                "a client's session is being closed",
                client=followed.relay_record.client_address,
                principal=followed.relay_record.principal,
                reason=followed.close_reason.name.lower(),
            )
        self._nursery.start_soon(self._see_off, followed)

    async def _see_off(self, followed: ExpiringSession) -> None:
        deadline = trio.current_time() + GRACE_S
        if followed.close_reason is CloseReason.FAILED:
            await trio.sleep(seconds(followed.terms.failure_delay_ms))
        left_s = deadline - trio.current_time()
        await until_quiet(lambda: followed.control.bytes_sent_to_client, quiet_s=QUIET_S, most_s=left_s)
        followed.control.close_with_error(self.closing_error_frame(followed))

    def closing_error_frame(self, followed: ExpiringSession) -> bytes:
        """The frame that tells a client why its relay is being closed."""
        return followed.closing_error_frame or commands.error(NO_REQUEST_ID, *_TEXTS[followed.close_reason])


def _is_over(followed: ExpiringSession) -> bool:
    """Whether its client is told nothing more than why it is closed, or is a successor's to talk to."""
    return bool(followed.close_reason) or followed.control.has_ended


def _answer_in(frame: bytes) -> BaseCommand:
    """The AUTH_RESPONSE of a frame that began like one. Raises CommandCorrupt."""
    command = parse_frame_command(frame)
    if command.type != BaseCommand.AUTH_RESPONSE or not command.HasField("auth_response"):
        raise CommandCorrupt("no answer to a challenge")
    return command
