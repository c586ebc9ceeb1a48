"""The terms of a session that a relay needs to know, where its frames are inspected (KIP-368).

A relay is started with a SessionTerms, or with None: then its frames are not inspected. A SessionTerms contains the
callable that verifies answers of the client:

    async def reauthenticate(command: BaseCommand) -> Verdict

It receives each AUTH_RESPONSE, one at a time. The first one, and the first one after a ClientIdentity, a Denial or an
exception, starts a new exchange of the mechanism (the client was challenged with ``PulsarAuthRefresh``). After a
Challenge it is the client's answer to that. RpcError means that no auth worker could verify the answer: the client is
then challenged once more.

A relay outlives its process, a callable does not. ``RelayManager`` therefore takes a ``ReauthenticatorFactory``, which
makes the callable again from what the fd store kept: the principal and SessionTerms's ``context``.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from proto.connect_rules import SELF_ANSWERING_PROXY_PREFIX
from proto.pulsar_pb2 import BaseCommand, CommandConnect
from proto.rpc_pb2 import Principal, StoredRelay, StoredSession
from proto.session_clock import SessionClock
from proxy.forwarder.workers.authentication import Verdict
from proxy.runtime.rpc.errors import RpcError

Reauthenticate = Callable[[BaseCommand], Awaitable[Verdict]]
ReauthenticatorFactory = Callable[[StoredRelay], Reauthenticate]

DEFAULT_GRACE_MS = 60_000
"""Grace of relays from before the setting `session.grace_ms` existed."""

_CPP = "Pulsar-CPP"
"""Prefix of the C++ client's version, also in Python's and Node's wrappers (`Pulsar-CPP-v4.2.0`, for example with
`-node-client-v1.17.0` behind it).
"""


@dataclass(frozen=True, slots=True)
class SessionTerms:
    """Terms of a session with frames to inspect: it can expire, its messages are counted, or its broker is answered.

    * ``clock``: the session's, in seconds of time.monotonic; None where nothing expires. ``lifetime_ms_max``: the bound
      that it was made with.
    * ``challenge``: the frame that asks for fresh credentials; empty: the client is never challenged.
      ``exempts_producers``: the client is not challenged once it has opened a producer.
    * ``frame_bytes_max``: see proto.relay_frames.frame_bytes_max; ``answer_bytes_max``: of the client's answers.
    * ``failure_delay_ms``: delay before the client receives the error of a failure. ``grace_ms``: how long the broker
      may send past the session's end.
    * ``listener``: bind address of the client's listener; empty: unknown, and ends are enforced.
    * ``context``: opaque bytes from which a ReauthenticatorFactory restores ``reauthenticate``.
    * ``broker_host``: the proxy answers the broker's challenges with its own credentials for this host; empty: it does
      not.
    * ``passes_answers``: the broker has the client's credentials, too: its challenges are removed, the proxy asks the
      client, and an accepted answer goes on to the broker. Without both the broker's challenges go to the client.
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
    passes_answers: bool = False

    @property
    def inspects_frames(self) -> bool:
        """Whether the relay has to inspect frames at all."""
        return self.expires or self.counts_messages or bool(self.broker_host)

    @property
    def expires(self) -> bool:
        """Whether the session can expire."""
        return self.clock is not None and self.clock.expires

    def to_stored_session(self) -> StoredSession:
        """Build the part of the session that the fd store keeps."""
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
            passes_answers=self.passes_answers,
        )


@dataclass(frozen=True, slots=True)
class ChallengePermission:
    """Permission to challenge a client within a relay, and to do so when it has a producer."""

    allowed: bool
    allowed_with_producer: bool


def challenge_permission(
    connect: CommandConnect, policy: Literal["by_client_kind", "always", "never"], *, from_proxy: bool = False
) -> ChallengePermission:
    """Apply the configuration's ``session.relay_reauthentication`` to a client.

    ``from_proxy``: the client was authenticated as a proxy. If its CONNECT also says that the proxy answers challenges
    itself, the client behind it does not matter.
    """
    ever = policy != "never" and connect.feature_flags.supports_auth_refresh
    answers_at_boundaries = from_proxy and _answers_itself(connect)
    with_producer = policy == "always" or answers_at_boundaries or not connect.client_version.startswith(_CPP)
    return ChallengePermission(ever, ever and with_producer)


def passes_challenges_on(connect: CommandConnect) -> bool:
    """Return whether a client that is a proxy lets its own client answer challenges, with that one's credentials."""
    return connect.feature_flags.supports_auth_refresh and not _answers_itself(connect)


def _answers_itself(proxy: CommandConnect) -> bool:
    return proxy.proxy_version.startswith(SELF_ANSWERING_PROXY_PREFIX)


def stored_grace_ms(session: StoredSession) -> int:
    """Return for how long the broker may send past the session's end, in milliseconds."""
    return session.grace_ms if session.HasField("grace_ms") else DEFAULT_GRACE_MS


def reauthentication_unavailable(_relay: StoredRelay) -> Reauthenticate:
    """ReauthenticatorFactory for sessions that cannot be re-authenticated: they end when they expire."""

    async def reauthenticate(_command: BaseCommand) -> Verdict:
        raise RpcError("no auth worker can verify the answers of this relay's client")

    return reauthenticate
