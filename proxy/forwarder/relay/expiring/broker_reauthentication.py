"""Answers to brokers that ask the proxy itself for fresh credentials, within a relay (KIP-368).

A relay carries the proxy's own credentials towards the broker. Where these end, the relay's frames are followed, and
what the broker asks is taken out of its stream (proxy.forwarder.relay.expiring.splice_pump, framed_streams) and
answered here with
credentials from an auth worker; the client never sees it. With forwarded credentials it is the client that the broker
asks, and nothing is taken out.

Bounds: one exchange at a time in a relay (a second challenge before the answer ends the relay), begun at most once a
second; rounds as in a handshake (proto.broker_exchange); one task for a relay that is being asked.
"""

from collections.abc import Callable

import trio
from prometheus_client import CollectorRegistry, Counter

from proto import commands
from proto.broker_exchange import UNANSWERED, BrokerExchange, ChallengeOutOfTurn, ExchangePhase
from proto.commands import CommandCorrupt
from proto.pulsar_pb2 import BaseCommand
from proxy.common.logs import get_logger
from proxy.forwarder.relay.close_reason import CloseReason
from proxy.forwarder.relay.expiring.session import (
    BROKER_ANSWER_BYTES_MAX,
    ExpiringSession,
    RelaySessionControl,
    parse_frame_command,
)
from proxy.forwarder.workers.authentication import SERVER_VERSION
from proxy.runtime.network.credentials import Credentials, NoCredentials
from proxy.runtime.rpc.client import RpcError

EXCHANGE_INTERVAL_S = 1.0
"""No relay begins exchanges faster than this, whatever its broker asks."""

RETRY_S_MAX = 8.0
"""Where there are no credentials now, they are asked for again: after 1 s, and twice as late each time up to this."""

NO_CREDENTIALS = "no_credentials"
LOST_ROUNDS = "lost_rounds"
TOO_LARGE = "too_large"
OUT_OF_TURN = "out_of_turn"
REASONS = (NO_CREDENTIALS, LOST_ROUNDS, TOO_LARGE, OUT_OF_TURN)

BeginExchange = Callable[[str], Credentials]
"""Begins to authenticate the proxy at the broker of this host."""


class BrokerReauthenticationMetrics:
    """Count what becomes of brokers' challenges to the proxy itself."""

    def __init__(self, registry: CollectorRegistry | None) -> None:
        self.success = Counter(
            "pulsar_proxy_broker_reauthentication_success",
            "Times that the proxy has answered a broker that asked for fresh credentials of its own within a relay. "
            "A broker that does not accept the answer ends the relay.",
            registry=registry,
        )
        failure = Counter(
            "pulsar_proxy_broker_reauthentication_failure",
            "Times that it could not answer, by reason.",
            ["reason"],
            registry=registry,
        )
        self.failure = {reason: failure.labels(reason=reason) for reason in REASONS}


class BrokerReauthenticationFactory:
    """Make the BrokerChallenges of a forwarder's relays, which share what is here. ``begin`` may raise RpcError."""

    def __init__(
        self,
        nursery: trio.Nursery,
        metrics: BrokerReauthenticationMetrics | None = None,
        begin: BeginExchange = lambda _host: NoCredentials(),
    ) -> None:
        self.nursery = nursery
        self.metrics = metrics or BrokerReauthenticationMetrics(None)
        self.begin_exchange = begin

    def attach_to(self, followed: ExpiringSession) -> None:
        """Answer the challenges of this relay's broker, if that is for the proxy to do."""
        if followed.terms.broker_host:
            followed.broker_challenges = BrokerReauthentication(self, followed)


class BrokerReauthentication:
    """Answer the challenges of one relay's broker (proxy.forwarder.relay.expiring.session.BrokerSession)."""

    __slots__ = (
        "_begun_at",
        "_complete",
        "_credentials",
        "_exchange",
        "_followed",
        "_shared",
        "challenge_truncated",
        "control",
    )

    control: RelaySessionControl

    def __init__(self, shared: BrokerReauthenticationFactory, followed: ExpiringSession) -> None:
        self.challenge_truncated = False
        self._shared = shared
        self._followed = followed
        self._exchange = BrokerExchange()
        self._credentials: Credentials | None = None
        self._complete = True
        self._begun_at = float("-inf")

    # ---- what the relay's directions say

    @property
    def phase(self) -> ExchangePhase:
        """Where the exchange stands: what a successor has to know."""
        return self._exchange.phase

    @property
    def phase_after_answer(self) -> ExchangePhase:
        """Where it will stand as soon as the answer is on its way."""
        return self._exchange.phase_after(complete=self._complete)

    def restore_phase(self, phase: ExchangePhase) -> None:
        """Go on where a predecessor's exchange stood."""
        self._exchange = BrokerExchange(phase)

    def resume_exchange(self) -> None:
        """Answer what a predecessor took out of the stream and did not answer."""
        if self._followed.close_reason or self.challenge_truncated or self.phase not in UNANSWERED:
            return
        if self._exchange.on_challenge_lost():
            self._shared.nursery.start_soon(self._begin)
        else:
            self._give_up(LOST_ROUNDS, "the rounds died with another process")

    def on_challenge_frame(self, frame: bytes) -> None:
        """Take a challenge that was taken out of the broker's stream, the whole frame; of one that ``discards``, what
        was left of it.
        """
        discards, self.challenge_truncated = self.challenge_truncated, False
        if self._is_over:
            return
        try:
            if discards:
                is_known = self._exchange.on_challenge_lost()
                data = b""
            else:
                data = _challenge_in(frame)
                self._exchange.on_challenge(data)
                is_known = self.phase is ExchangePhase.ASKED or self._credentials is not None
        except (ChallengeOutOfTurn, CommandCorrupt) as error:
            self._shared.metrics.failure[OUT_OF_TURN].inc()
            self._log("a broker asks the proxy itself for credentials out of turn", str(error))
            self.control.start_closing(CloseReason.OUT_OF_TURN)
            return
        if not is_known:
            self._give_up(LOST_ROUNDS, "the rounds died with another process")
        elif self.phase is ExchangePhase.ASKED:
            self._shared.nursery.start_soon(self._begin)
        else:
            self._shared.nursery.start_soon(self._go_on_with, data)

    def on_answer_sent(self) -> None:
        """Note that the answer is on its way to the broker."""
        self._exchange.on_answer_sent(complete=self._complete)
        if self._complete:
            self._credentials = None
            self._shared.metrics.success.inc()

    # ---- answers

    @property
    def _is_over(self) -> bool:
        return bool(self._followed.close_reason) or self.control.has_ended

    async def _begin(self) -> None:
        """Begin a new exchange; where there are no credentials now, again and again, as long as the relay lives: the
        broker goes on with what it has, until the end of that.
        """
        retry_s = EXCHANGE_INTERVAL_S
        wait_s = self._begun_at + EXCHANGE_INTERVAL_S - trio.current_time()
        while True:
            await trio.sleep(max(0.0, wait_s))
            if self._is_over:
                return
            self._begun_at = trio.current_time()
            try:
                self._credentials = self._shared.begin_exchange(self._followed.terms.broker_host)
                method, data = await self._credentials.auth_data_for(None)
            except RpcError as error:
                why = str(error)
            else:
                if method:
                    self._answer(method, data)
                    return
                why = "no brokers.credentials are configured any more"
            if self._is_over:  # or a successor's, which answers
                return
            self._fail(NO_CREDENTIALS, why)
            wait_s, retry_s = retry_s, min(2 * retry_s, RETRY_S_MAX)

    async def _go_on_with(self, challenge: bytes) -> None:
        """Answer a further round; that is never tried twice."""
        credentials = self._credentials
        assert credentials is not None  # or it was given up
        try:
            method, data = await credentials.auth_data_for(challenge)
        except RpcError as error:
            if not self._is_over:
                self._give_up(NO_CREDENTIALS, str(error))
        else:
            self._answer(method, data)

    def _answer(self, method: str, data: bytes) -> None:
        assert self._credentials is not None  # it has just answered
        if self._is_over:
            return
        frame = commands.auth_response(SERVER_VERSION, commands.PROTOCOL_VERSION, method, data)
        if len(frame) > BROKER_ANSWER_BYTES_MAX:
            self._give_up(TOO_LARGE, f"an answer of {len(frame)} bytes; the limit is {BROKER_ANSWER_BYTES_MAX}")
        else:
            self._complete = self._credentials.complete
            self.control.send_broker_answer(frame)

    def _give_up(self, reason: str, detail: str) -> None:
        """Give an exchange up; a successor must know, or it would give the same one up once more."""
        self._exchange.on_failure()
        self.control.record_exchange()
        self._fail(reason, detail)

    def _fail(self, reason: str, detail: str) -> None:
        self._shared.metrics.failure[reason].inc()
        self._log("the proxy cannot answer a broker that asks for fresh credentials", detail)

    def _log(self, what: str, detail: str) -> None:
        relay = self._followed.relay_record
        get_logger().warning(
            what, client=relay.client_address, principal=relay.principal, broker=relay.target, reason=detail
        )


def _challenge_in(frame: bytes) -> bytes:
    """The data of an AUTH_CHALLENGE's frame. Raises CommandCorrupt."""
    command = parse_frame_command(frame)
    if command.type != BaseCommand.AUTH_CHALLENGE or not command.HasField("auth_challenge"):
        raise CommandCorrupt("no challenge")
    return bytes(command.auth_challenge.challenge.auth_data)
