"""The proxy's own re-authentication at brokers, within relays (KIP-368).

A relay's connection to its broker carries the proxy's own credentials. Where these expire, the relay's frames are
inspected: the broker's challenges are removed from its stream (by the pumps of framed relays) and answered
here with credentials from an auth worker. The client never sees them. With forwarded credentials the broker challenges
the client instead (proxy.forwarder.lifetime.forwarded_answers).

Bounds: one exchange at a time in a relay (a second challenge before the answer ends the relay), started at most once a
second; rounds as in a handshake (proto.broker_exchange); one task per relay with a challenge to answer.
"""

from collections.abc import Callable

import trio
from prometheus_client import CollectorRegistry, Counter

from proto import commands
from proto.broker_exchange import UNANSWERED, BrokerExchange, ChallengeOutOfTurn, ExchangePhase
from proto.commands import CommandCorrupt
from proto.pulsar_pb2 import BaseCommand
from proxy import SERVER_VERSION
from proxy.common.logs import get_logger
from proxy.forwarder.lifetime.closing import CloseReason
from proxy.forwarder.lifetime.session import (
    BROKER_ANSWER_BYTES_MAX,
    ExpiringSession,
    RelayControl,
    parse_frame_command,
)
from proxy.runtime.network.credentials import Credentials, NoCredentials
from proxy.runtime.observability.metrics import broker_reauthentication_seconds
from proxy.runtime.rpc.errors import RpcError

EXCHANGE_INTERVAL_S = 1.0
"""Least time between two exchanges of a relay, however often its broker sends challenges."""

RETRY_S_MAX = 8.0
"""Limit of the delay between attempts to get credentials; the first is 1 s, and each is twice the one before."""

NO_CREDENTIALS = "no_credentials"
LOST_ROUNDS = "lost_rounds"
TOO_LARGE = "too_large"
OUT_OF_TURN = "out_of_turn"
REASONS = (NO_CREDENTIALS, LOST_ROUNDS, TOO_LARGE, OUT_OF_TURN)

BeginExchange = Callable[[str], Credentials]
"""Callable that starts to authenticate the proxy at the broker with this host."""


class BrokerReauthenticationMetrics:
    """Counters of answered and unanswered challenges of brokers to the proxy itself, and the time of the answers."""

    def __init__(self, registry: CollectorRegistry | None) -> None:
        self.success = Counter(
            "pulsar_proxy_broker_reauthentication_success",
            "Brokers' challenges for fresh credentials of the proxy itself, within a relay, that it has answered. "
            "A broker that does not accept the answer ends the relay.",
            registry=registry,
        )
        failure = Counter(
            "pulsar_proxy_broker_reauthentication_failure",
            "Brokers' challenges to the proxy itself that it could not answer, by reason.",
            ["reason"],
            registry=registry,
        )
        self.failure = {reason: failure.labels(reason=reason) for reason in REASONS}
        self.seconds = broker_reauthentication_seconds(registry)


class BrokerReauthenticationFactory:
    """Factory and shared parts of the BrokerReauthentications of a forwarder. ``begin`` may raise RpcError."""

    def __init__(
        self,
        nursery: trio.Nursery,
        metrics: BrokerReauthenticationMetrics | None = None,
        begin: BeginExchange = lambda _host: NoCredentials(),
    ) -> None:
        self.nursery = nursery
        self.metrics = metrics or BrokerReauthenticationMetrics(None)
        self.begin_exchange = begin

    def attach_to(self, session: ExpiringSession) -> None:
        """Have the proxy answer the challenges of this session's broker, if its terms say so."""
        if session.terms.broker_host:
            session.broker_challenges = BrokerReauthentication(self, session)


class BrokerReauthentication:
    """BrokerChallengeHandler of one relay: answers its broker's challenges with the proxy's credentials."""

    __slots__ = (
        "_challenged_at",
        "_complete",
        "_credentials",
        "_exchange",
        "_session",
        "_shared",
        "_started_at",
        "challenge_truncated",
        "control",
    )

    control: RelayControl

    def __init__(self, shared: BrokerReauthenticationFactory, session: ExpiringSession) -> None:
        self.challenge_truncated = False
        self._shared = shared
        self._session = session
        self._exchange = BrokerExchange()
        self._credentials: Credentials | None = None
        self._complete = True
        self._started_at = float("-inf")
        self._challenged_at: float | None = None  # unknown where a predecessor was challenged

    # ---- events of the relay

    @property
    def phase(self) -> ExchangePhase:
        """Phase of the exchange, which a successor has to know."""
        return self._exchange.phase

    @property
    def phase_after_answer(self) -> ExchangePhase:
        """Phase of the exchange as soon as the answer is sent."""
        return self._exchange.phase_after(complete=self._complete)

    def restore_phase(self, phase: ExchangePhase) -> None:
        """Continue in the phase of a predecessor's exchange."""
        self._exchange = BrokerExchange(phase)

    def resume_exchange(self) -> None:
        """Answer a challenge that a predecessor removed from the stream and did not answer."""
        if self._session.close_reason or self.challenge_truncated or self.phase not in UNANSWERED:
            return
        if self._exchange.on_challenge_lost():
            self._shared.nursery.start_soon(self._start_exchange)
        else:
            self._abandon_exchange(LOST_ROUNDS, "the exchange was lost with another process")

    def on_challenge_frame(self, frame: bytes) -> None:
        """Handle a challenge frame that was removed from the broker's stream.

        With ``challenge_truncated`` it is only the rest of a frame.
        """
        truncated, self.challenge_truncated = self.challenge_truncated, False
        if self._is_over:
            return
        try:
            if truncated:
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
            self._abandon_exchange(LOST_ROUNDS, "the exchange was lost with another process")
        elif self.phase is ExchangePhase.ASKED:
            self._challenged_at = trio.current_time()
            self._shared.nursery.start_soon(self._start_exchange)
        else:
            self._shared.nursery.start_soon(self._answer_further_round, data)

    def on_answer_accepted(self, frame: bytes) -> None:
        """Do nothing: a broker that challenges the proxy does not want the client's answer."""

    def on_answer_sent(self) -> None:
        """Record that the answer was sent to the broker."""
        self._exchange.on_answer_sent(complete=self._complete)
        if self._complete:
            self._credentials = None
            self._shared.metrics.success.inc()
            if self._challenged_at is not None:
                self._shared.metrics.seconds.observe(trio.current_time() - self._challenged_at)

    # ---- answers

    @property
    def _is_over(self) -> bool:
        return bool(self._session.close_reason) or self.control.has_ended

    async def _start_exchange(self) -> None:
        """Start a new exchange; without credentials repeat the attempt for as long as the relay exists.

        Meanwhile the broker continues with the credentials that it has, until they expire.
        """
        retry_s = EXCHANGE_INTERVAL_S
        wait_s = self._started_at + EXCHANGE_INTERVAL_S - trio.current_time()
        while True:
            await trio.sleep(max(0.0, wait_s))
            if self._is_over:
                return
            self._started_at = trio.current_time()
            try:
                self._credentials = self._shared.begin_exchange(self._session.terms.broker_host)
                method, data = await self._credentials.auth_data_for(None)
            except RpcError as error:
                why = str(error)
            else:
                if method:
                    self._send_answer(method, data)
                    return
                why = "no brokers.credentials are configured any more"
            if self._is_over:  # or handed over to a successor, which answers
                return
            self._count_failure(NO_CREDENTIALS, why)
            wait_s, retry_s = retry_s, min(2 * retry_s, RETRY_S_MAX)

    async def _answer_further_round(self, challenge: bytes) -> None:
        """Answer a further round, without a second attempt."""
        credentials = self._credentials
        assert credentials is not None  # or the exchange was abandoned
        try:
            method, data = await credentials.auth_data_for(challenge)
        except RpcError as error:
            if not self._is_over:
                self._abandon_exchange(NO_CREDENTIALS, str(error))
        else:
            self._send_answer(method, data)

    def _send_answer(self, method: str, data: bytes) -> None:
        assert self._credentials is not None  # it has just answered
        if self._is_over:
            return
        frame = commands.auth_response(SERVER_VERSION, commands.PROTOCOL_VERSION, method, data)
        if len(frame) > BROKER_ANSWER_BYTES_MAX:
            self._abandon_exchange(
                TOO_LARGE, f"an answer of {len(frame)} bytes; the limit is {BROKER_ANSWER_BYTES_MAX}"
            )
        else:
            self._complete = self._credentials.complete
            self.control.send_broker_answer(frame)

    def _abandon_exchange(self, reason: str, detail: str) -> None:
        """Abandon an exchange, and record that: a successor would otherwise abandon the same one once more."""
        self._exchange.on_failure()
        self.control.record_exchange()
        self._count_failure(reason, detail)

    def _count_failure(self, reason: str, detail: str) -> None:
        self._shared.metrics.failure[reason].inc()
        self._log("the proxy cannot answer a broker that asks for fresh credentials", detail)

    def _log(self, what: str, detail: str) -> None:
        relay = self._session.relay_record
        get_logger().warning(
            what, client=relay.client_address, principal=relay.principal, broker=relay.target, reason=detail
        )


def _challenge_in(frame: bytes) -> bytes:
    """Return the data of an AUTH_CHALLENGE frame. Raises CommandCorrupt."""
    command = parse_frame_command(frame)
    if command.type != BaseCommand.AUTH_CHALLENGE or not command.HasField("auth_challenge"):
        raise CommandCorrupt("no challenge")
    return bytes(command.auth_challenge.challenge.auth_data)
