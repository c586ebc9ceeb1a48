"""What a relay has to know of the session that it belongs to, where that session can expire (KIP-368).

``RelayManager.start_relay`` takes a RelaySession, or None: then nobody looks at the relay's frames. Who
makes
one says with it how answers of the client are judged:

    async def reauthenticate(command: BaseCommand) -> Verdict

It is given each AUTH_RESPONSE, one at a time. The first one, and the first after a ClientIdentity, a Denial or an
exception, begins the rounds of the mechanism anew (the client was asked with ``PulsarAuthRefresh``); after a Challenge
it is the client's answer to that. It says RpcError where nobody could judge: the client is then asked once more.

A relay outlives its process, a callable does not. ``RelayManager`` therefore takes a ``ReauthenticatorFactory``,
which makes it again from
what the store kept: the principal, and whatever RelaySession put into ``context``.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from proto.connect_rules import SELF_ANSWERING_PROXY_PREFIX
from proto.pulsar_pb2 import BaseCommand, CommandConnect
from proto.rpc_pb2 import Principal, StoredRelay, StoredSession
from proto.session_clock import SessionClock
from proxy.forwarder.workers.authentication import Verdict
from proxy.runtime.rpc.client import RpcError

Reauthenticate = Callable[[BaseCommand], Awaitable[Verdict]]
ReauthenticatorFactory = Callable[[StoredRelay], Reauthenticate]

DEFAULT_GRACE_MS = 60_000
"""Of relays that began before there was `session.grace_ms`."""

_CPP = "Pulsar-CPP"
"""How the version begins that the C++ client says, also where Python or Node wrap it (`Pulsar-CPP-v4.2.0`, with
`-node-client-v1.17.0` behind it, say).
"""


@dataclass(frozen=True, slots=True)
class RelaySession:
    """A session whose frames a relay follows, since it can expire, or since its messages are counted.

    ``clock``: the session's, in seconds of time.monotonic; None where only messages are counted.
    ``lifetime_ms_max``: what it was made with.
    ``challenge``: the frame that asks for fresh credentials; empty: this client is never asked.
    ``spares_producers``: it is not asked once it has opened a producer.
    ``frame_bytes_max``: see proto.relay_frames.frame_bytes_max; ``answer_bytes_max``: of the client's answers.
    ``failure_delay_ms``: for how long a failure is not told. ``grace_ms``: for how long past the session's end the
    broker may go on sending. ``listener``: where the client's is bound; empty: unknown, and ends are enforced.
    ``context``: see the module. ``broker_host``: the broker's challenges are answered with the proxy's credentials for
    this host; empty: they go to the client.
    """

    principal: Principal
    clock: SessionClock | None
    reauthenticate: Reauthenticate
    frame_bytes_max: int
    answer_bytes_max: int
    lifetime_ms_max: int = 0
    challenge: bytes = b""
    exempts_producers: bool = False
    counts_messages: bool = False
    failure_delay_ms: int = 0
    grace_ms: int = DEFAULT_GRACE_MS
    listener: str = ""
    context: bytes = b""
    broker_host: str = ""

    @property
    def inspects_frames(self) -> bool:
        """Tell whether the relay has to look at frames at all."""
        return self.expires or self.counts_messages or bool(self.broker_host)

    @property
    def expires(self) -> bool:
        """Whether the relay has to look at the clock at all."""
        return self.clock is not None and self.clock.expires

    def to_stored_session(self) -> StoredSession:
        """What of it the store keeps."""
        return StoredSession(
            principal=self.principal,
            expires=self.expires,
            lifetime_ms_max=self.lifetime_ms_max,
            challenge=self.challenge,
            spares_producers=self.exempts_producers,
            frame_bytes_max=self.frame_bytes_max,
            answer_bytes_max=self.answer_bytes_max,
            counts_messages=self.counts_messages,
            failure_delay_ms=self.failure_delay_ms,
            grace_ms=self.grace_ms,
            listener_bind=self.listener,
            context=self.context,
            broker_host=self.broker_host,
        )


@dataclass(frozen=True, slots=True)
class ChallengePermission:
    """Whether a client may be asked for fresh credentials within a relay, and whether still when it has a producer."""

    allowed: bool
    allowed_with_producer: bool


def challenge_permission(
    connect: CommandConnect, policy: Literal["by_client_kind", "always", "never"], *, from_proxy: bool = False
) -> ChallengePermission:
    """What the configuration's ``session.relay_reauthentication`` means for a client. ``from_proxy``: it was
    authenticated as a proxy; then what its CONNECT says of the client behind it does not matter, as far as it says that
    the proxy answers by itself.
    """
    ever = policy != "never" and connect.feature_flags.supports_auth_refresh
    answers_at_boundaries = from_proxy and connect.proxy_version.startswith(SELF_ANSWERING_PROXY_PREFIX)
    with_producer = policy == "always" or answers_at_boundaries or not connect.client_version.startswith(_CPP)
    return ChallengePermission(ever, ever and with_producer)


def stored_grace_ms(session: StoredSession) -> int:
    """For how long past its end the broker may go on sending."""
    return session.grace_ms if session.HasField("grace_ms") else DEFAULT_GRACE_MS


def reauthentication_unavailable(_relay: StoredRelay) -> Reauthenticate:
    """The Recall of relays whose sessions nobody knows how to go on with: they end when they expire."""

    async def reauthenticate(_command: BaseCommand) -> Verdict:
        raise RpcError("nobody can judge the answers of this relay's client")

    return reauthenticate
