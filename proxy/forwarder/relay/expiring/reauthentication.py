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
from proto.command_heads import FrameWrong
from proto.commands import NO_REQUEST_ID, CommandCorrupt
from proto.connect_rules import AUTHENTICATION_FAILED
from proto.pulsar_pb2 import BaseCommand, ServerError
from proto.rpc_pb2 import Principal
from proto.session_clock import NEVER, CommandDecision, Failure, SessionClock
from proxy.common.logs import get_logger
from proxy.forwarder.relay.close_schedule import until_quiet
from proxy.forwarder.relay.expiring.session import LEAVING, PUT_IN_BYTES_MAX, CloseReason, ExpiringSession, command_in
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


class NoReauth(enum.Enum):
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

    def cannot_renew(self, method: str, reason: NoReauth) -> None:
        """Count a client that is not asked to authenticate itself again."""
        self._no_reauth.labels(method=method, reason=reason.value).inc()

    def renewed(self, method: str, took_s: float) -> None:
        """Count a client that has authenticated itself again within so many seconds."""
        self.success.labels(method=method).inc()
        self.seconds.observe(took_s)
        self._maximum.observe(took_s, self._now())


class Reauthentication:
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

    def watch(self, followed: ExpiringSession) -> None:
        """A relay has begun, or was taken over."""
        if followed.closing > CloseReason.SAID:  # counted by the predecessor who began it
            self._nursery.start_soon(self._see_off, followed)
        elif not followed.closing:
            self._schedule(followed)

    def _schedule(self, followed: ExpiringSession) -> None:
        if followed.clock is None or not followed.about.challenge:
            return
        at = followed.clock.challenge_at_s
        if at == NEVER:
            return
        if not self._due or at < self._due[0][0]:
            self._earlier.set()
        heapq.heappush(self._due, (at, next(self._numbers), followed))
        if len(self._due) > self._due_max:
            self._forget_what_is_over()

    def forget(self, sessions: Iterable[ExpiringSession]) -> None:
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
            self.ask_those_due()

    def ask_those_due(self) -> None:
        """Ask all whose time has come."""
        now = self.now()
        while self._due and self._due[0][0] <= now:
            at, _, followed = heapq.heappop(self._due)
            # An earlier life's time is none any more.
            if followed.clock is None or followed.clock.challenge_at_s != at or _is_over(followed):
                continue
            if not (followed.about.spares_producers and followed.line.has_producer):
                followed.line.ask(followed.about.challenge)

    # ---- answers

    def answered(self, followed: ExpiringSession, frame: bytes) -> None:
        """The client's answer; it is being judged from now on."""
        self._nursery.start_soon(self._judge, followed, frame)

    def lost(self, followed: ExpiringSession) -> None:
        """An answer to a predecessor."""
        self._schedule(followed)

    async def _judge(self, followed: ExpiringSession, frame: bytes) -> None:
        principal = followed.about.principal
        if _is_over(followed):
            return
        try:
            command = _answer_in(frame)
            if command.auth_response.response.auth_method_name not in {principal.method, ""}:
                self.failed(followed, Failure.ANOTHER_METHOD)
                return
            verdict = await followed.reauthenticate(command)
        except CommandCorrupt:
            if not _is_over(followed):
                self.failed(followed, Failure.DENIED)
        except RpcError as error:
            if _is_over(followed):
                return
            get_logger().warning(
                "a client's answer could not be judged", client=followed.relay.client_address, reason=str(error)
            )
            self._not_judged(followed)
        else:
            if not _is_over(followed):
                self._take(followed, verdict)

    def _not_judged(self, followed: ExpiringSession) -> None:
        self._clock(followed).lost(self.now())
        followed.line.go_on()
        self._schedule(followed)

    def _take(self, followed: ExpiringSession, verdict: Verdict) -> None:
        if isinstance(verdict, ClientIdentity):
            self._accept(followed, verdict.principal)
        elif isinstance(verdict, Challenge):
            if len(verdict.frame) > PUT_IN_BYTES_MAX:
                self.failed(followed, Failure.TOO_LARGE)
            else:
                followed.line.ask(verdict.frame)
        elif verdict.refusal.code == ServerError.ServiceNotReady:  # which is not the client's fault
            self._not_judged(followed)
        else:
            self.failed(followed, Failure.DENIED, verdict)

    def _accept(self, followed: ExpiringSession, principal: Principal) -> None:
        clock, now = self._clock(followed), self.now()
        took_s = clock.seconds_since_asked(now)
        failure = clock.accepted(principal, now_s=now, now_unix_ms=self.unix_ms(), fraction=self.fraction())
        if failure is not None:
            self.failed(followed, failure)
            return
        self._metrics.renewed(principal.method, took_s)
        followed.line.go_on()
        self._schedule(followed)

    @staticmethod
    def _clock(followed: ExpiringSession) -> SessionClock:
        assert followed.clock is not None  # or nobody was asked
        return followed.clock

    def failed(
        self, followed: ExpiringSession, failure: Failure, denial: Denial | None = None, *, over_limit: bool = False
    ) -> None:
        """A client has not authenticated itself again: it is closed, unless that is only observed."""
        observes = followed.observes and not over_limit  # a limit holds all the same
        if not (observes and self._clock(followed).observed):  # else it could fill the log without being closed
            self._tell_of_failure(followed, failure, denial)
        if observes:
            self._go_on_after(followed, failure)
            return
        frame = (
            commands.error(NO_REQUEST_ID, denial.refusal.code, denial.refusal.message) if denial is not None else b""
        )
        followed.line.close(CloseReason.FAILED, frame)

    def _tell_of_failure(self, followed: ExpiringSession, failure: Failure, denial: Denial | None) -> None:
        self._metrics.failure.labels(method=followed.about.principal.method).inc()
        get_logger().warning(
            "a client has failed to authenticate itself again",
            client=followed.relay.client_address,
            principal=followed.relay.principal,
            reason=denial.reason if denial is not None else failure.value,
        )

    def _go_on_after(self, followed: ExpiringSession, failure: Failure) -> None:
        """Drop an answer that failed; another one that is being judged keeps its verdict."""
        if failure not in {Failure.ANSWERED_TWICE, Failure.TOO_SOON}:
            self._clock(followed).failed(self.now())
        self._observe(followed, CloseReason.FAILED)
        followed.line.go_on()

    # ---- ends

    def use(self, followed: ExpiringSession) -> CommandDecision:
        """Decide what may become of a command, and count an end that is only observed."""
        use = self._clock(followed).use(self.now())
        if use is CommandDecision.GO_ON or not followed.observes:
            return use
        if use is CommandDecision.CLOSE:
            self._observe(followed, CloseReason.EXPIRED)
        return CommandDecision.GO_ON

    def still_served(self, followed: ExpiringSession) -> None:
        """End a session, or count its end, over which the broker still sends past its grace."""
        if followed.observes:
            self._observe(followed, CloseReason.STILL_SERVED)
        else:
            followed.line.close(CloseReason.STILL_SERVED)

    def _observe(self, followed: ExpiringSession, why: CloseReason) -> None:
        """Count and log a session that enforcement would close, once in each of its lives."""
        clock = self._clock(followed)
        if clock.observed:
            return
        clock.observed = True
        followed.line.note_observed()
        if followed.closing:  # for another reason, which came first
            return
        listener, method = followed.enforcement.name_of(followed.listener), followed.about.principal.method
        reason = why.name.lower()
        self._metrics.expired_observed.labels(listener=listener, method=method, reason=reason).inc()
        get_logger().info(
            'a client\'s session would have been closed (session.enforcement = "observe")',
            client=followed.relay.client_address,
            principal=followed.relay.principal,
            listener=listener,
            method=method,
            reason=reason,
        )

    def spared(self, followed: ExpiringSession) -> None:
        """Count a client that is not asked any more, since it has opened its first producer."""
        if followed.about.spares_producers and followed.about.challenge:
            self._metrics.cannot_renew(followed.about.principal.method, NoReauth.HAS_PRODUCER)

    @staticmethod
    def corrupt(followed: ExpiringSession, error: FrameWrong) -> None:
        """What the client or the broker has sent is no frame: the relay is closed."""
        if not followed.closing:
            get_logger().warning(
                "a relay's frames cannot be followed",
                client=followed.relay.client_address,
                principal=followed.relay.principal,
                target=followed.relay.target,
                reason=str(error),
            )
        followed.line.close(CloseReason.CORRUPT)

    def closing(self, followed: ExpiringSession) -> None:
        """Nothing more passes to the broker; the client is to be told when what is on its way to it has come."""
        if followed.closing in {CloseReason.EXPIRED, CloseReason.STILL_SERVED}:
            self._metrics.expired_killed.inc()
        if followed.closing not in LEAVING:  # of which proxy.forwarder.relay.manager tells
            get_logger().info(
                "a client's session is being closed",
                client=followed.relay.client_address,
                principal=followed.relay.principal,
                reason=followed.closing.name.lower(),
            )
        self._nursery.start_soon(self._see_off, followed)

    async def _see_off(self, followed: ExpiringSession) -> None:
        deadline = trio.current_time() + GRACE_S
        if followed.closing is CloseReason.FAILED:
            await trio.sleep(seconds(followed.about.failure_delay_ms))
        left_s = deadline - trio.current_time()
        await until_quiet(lambda: followed.line.bytes_to_client, quiet_s=QUIET_S, most_s=left_s)
        followed.line.say_farewell(self.farewell(followed))

    def farewell(self, followed: ExpiringSession) -> bytes:
        """The frame that tells a client why its relay is being closed."""
        return followed.closing_frame or commands.error(NO_REQUEST_ID, *_TEXTS[followed.closing])


def _is_over(followed: ExpiringSession) -> bool:
    """Whether its client is told nothing more than why it is closed, or is a successor's to talk to."""
    return bool(followed.closing) or followed.line.is_over


def _answer_in(frame: bytes) -> BaseCommand:
    """The AUTH_RESPONSE of a frame that began like one. Raises CommandCorrupt."""
    command = command_in(frame)
    if command.type != BaseCommand.AUTH_RESPONSE or not command.HasField("auth_response"):
        raise CommandCorrupt("no answer to a challenge")
    return command
