"""The lookup worker's connections to brokers: one for each broker and principal, shared by all of its clients.

Per principal, because the broker decides by the *connection's* original principal what a lookup may see (4.0.8; the
lookup's own original_principal field is not used); and per forwarded credentials, where there are any. Bounded; idle
connections end.
"""

import random
import time
from collections import Counter
from dataclasses import dataclass, field

import trio

from lookup.brokers.credential_checks import OwnLogins
from lookup.connections.broker_connection import BrokerConnection
from lookup.connections.isolated import SuspectConnections
from lookup.connections.losses import Company
from lookup.connections.principals import LookupPrincipal
from lookup.targets.rules import Locate, Target
from proto.addresses import HostPort
from proto.commands import AUTH_REFRESH
from proto.connect_rules import BrokerIdentity, proxy_connect
from proto.lookup_answers import AnswerShapes
from proto.pulsar_pb2 import CommandConnect, CommandConnected, ServerError
from proxy import __version__
from proxy.config.types import Config
from proxy.runtime.loop.tasks import run_every, seconds
from proxy.runtime.network.broker_link import NOT_CONNECTED, BrokerLinkFactory, BrokerLinkFailed
from proxy.runtime.network.credentials import credentials_for
from proxy.runtime.network.dialing import Dialer
from proxy.runtime.rpc.client import RpcPool

PATIENCE_SHARE = 4
"""A broker that says nothing for this share of a lookup's time is asked whether it is there, and given up after two:
then half of the time is left for another one.
"""

SUSPECT_SHARE = 4
"""Beside the pooled connections there may be this share of brokers.pooled_connections_max for suspects."""

RENEWAL_RETRY_S = 5.0


Key = tuple[HostPort, LookupPrincipal]


@dataclass(slots=True)
class _Attempt:
    """One attempt to open a connection; all who wait for it share what comes of it."""

    done: trio.Event = field(default_factory=trio.Event)
    connection: BrokerConnection | None = None
    failure: Exception | None = None

    def outcome(self) -> BrokerConnection:
        """The connection, or what came instead of it."""
        if self.connection is None:
            raise self.failure or RuntimeError("an attempt without an outcome")
        return self.connection


@dataclass(slots=True)
class _Slot:
    """One broker and principal: the connection, and the attempt to open one that is under way."""

    locate: Locate
    connection: BrokerConnection | None = None
    attempt: _Attempt | None = None


class BrokerPool:
    """See the module. ``profile`` is what a broker last said in its CONNECTED, or None."""

    def __init__(
        self,
        config: Config,
        dialer: Dialer,
        auth: RpcPool,
        nursery: trio.Nursery,
        *,
        profile: CommandConnected | None = None,
        logins: OwnLogins | None = None,
    ) -> None:
        """``logins``: is told what brokers say to the proxy's credentials."""
        self._config = config
        self._logins = logins
        self._auth = auth
        self._nursery = nursery
        self._slots: dict[Key, _Slot] = {}
        self._shapes = AnswerShapes()
        suspects_max = max(2, config.brokers.pooled_connections_max // SUSPECT_SHARE)
        self._suspects = SuspectConnections(nursery, suspects_max)
        self._scope = trio.CancelScope()
        self._retired = False
        self._greeter = BrokerLinkFactory(
            dialer, config.limits.max_broker_frame_bytes, f"pulsar-trio-proxy-{__version__}"
        )
        self.profile = profile

    def __len__(self) -> int:
        return sum(1 for slot in self._slots.values() if slot.connection is not None and not slot.connection.closed)

    async def run(self) -> None:
        """Close what is idle, until ``retire``."""
        with self._scope:
            await run_every(seconds(self._config.brokers.idle_connection_timeout_ms) / 4, self._close_idle)

    def open_connection(self, broker: HostPort, asker: LookupPrincipal, now: float) -> BrokerConnection | None:
        """The connection to a broker on somebody's behalf, if there is one; ``now`` in Trio's time."""
        slot = self._slots.get((broker, asker))
        connection = None if slot is None else slot.connection
        if slot is None or connection is None or connection.closed:
            return None
        if connection.renew_at <= now and slot.attempt is None:
            self._begin(slot, broker, slot.locate, asker)  # meanwhile this one serves
        return connection

    async def connection(self, broker: HostPort, locate: Locate, asker: LookupPrincipal) -> BrokerConnection:
        """The connection to a broker on somebody's behalf, opened if need be.

        ``locate`` is asked for the broker's (checked) name and addresses only where one must be opened; it may raise,
        as BrokerLinkFailed is raised where it cannot be opened.
        """
        self._check_not_retired()
        slot = self._slots.get((broker, asker))
        if slot is None:
            self._make_room()
            slot = self._slots[broker, asker] = _Slot(locate)
        connection = self.open_connection(broker, asker, trio.current_time())
        if connection is not None:
            return connection
        attempt = slot.attempt or self._begin(slot, broker, locate, asker)
        await attempt.done.wait()
        return attempt.outcome()

    async def connection_apart(
        self, broker: HostPort, locate: Locate, asker: LookupPrincipal, company: Company
    ) -> BrokerConnection:
        """A connection for a company of suspects alone (see lookup.connections.isolated). Raises as ``connection``
        does.
        """
        self._check_not_retired()

        async def open_connection(broker: HostPort, target: Target) -> BrokerConnection:
            return await self._open(broker, target, asker)

        return await self._suspects.connection(broker, locate, open_connection, asker.principal, company)

    def _check_not_retired(self) -> None:
        if self._retired:
            raise BrokerLinkFailed("retired", "the lookup is older than a reload", message=NOT_CONNECTED)

    def _begin(self, slot: _Slot, broker: HostPort, locate: Locate, asker: LookupPrincipal) -> _Attempt:
        """Open a connection in a task of its own: whoever asked first may give up before it is there, and the others
        must not begin again then.
        """
        slot.attempt, slot.locate = _Attempt(), locate
        self._nursery.start_soon(self._try_to_open, slot, slot.attempt, broker, locate, asker)
        return slot.attempt

    async def _try_to_open(
        self, slot: _Slot, attempt: _Attempt, broker: HostPort, locate: Locate, asker: LookupPrincipal
    ) -> None:
        try:
            attempt.connection = await self._open(broker, await locate(), asker)
            self._nursery.start_soon(attempt.connection.run)
            old, slot.connection = slot.connection, attempt.connection
            if old is not None:
                old.retire()
        except Exception as failure:  # noqa: BLE001 -- whatever it is, it belongs to those who wait for it
            attempt.failure = failure
            if slot.connection is not None:  # that it could not be renewed disturbs nobody yet
                slot.connection.renew_at = trio.current_time() + RENEWAL_RETRY_S
        finally:
            slot.attempt = None
            attempt.done.set()
        if self._retired and slot.connection is not None:
            slot.connection.close()

    async def _open(self, broker: HostPort, target: Target, asker: LookupPrincipal) -> BrokerConnection:
        """A connection that shook hands; it is yet to be run."""
        configured = self._config.brokers.credentials is not None
        credentials = credentials_for(self._auth, target.broker.host, configured=configured)

        def make_connect(method: str, data: bytes) -> CommandConnect:
            return proxy_connect(BrokerIdentity(method, data, asker.principal, asker.credentials), __version__)

        async def answer_challenge(challenge: bytes) -> tuple[str, bytes]:
            nonlocal credentials
            if challenge != AUTH_REFRESH:  # a further round
                return await credentials.auth_data_for(challenge)
            credentials = credentials_for(self._auth, target.broker.host, configured=configured)
            return await credentials.auth_data_for(None)

        try:
            link = await self._greeter.open_link(target.broker, target.addresses, credentials, make_connect)
        except BrokerLinkFailed as failed:
            if self._logins is not None and failed.refusal is not None:
                self._logins.doubted(broker)
            raise
        if self._logins is not None and asker.credentials is None:  # else they may be what it was taken in for
            self._logins.accepted(broker)
        self.profile = link.connected.message
        return BrokerConnection(
            broker,
            link,
            max_frame_bytes=self._config.limits.max_broker_frame_bytes,
            keep_alive_s=seconds(self._config.limits.keep_alive_interval_ms),
            patience_s=seconds(self._config.limits.lookup_timeout_ms) / PATIENCE_SHARE,
            renew_at=_renew_at(credentials.expires_at_unix_ms),
            answer_challenge=answer_challenge if asker.credentials is None else None,
            shapes=self._shapes,
        )

    def _make_room(self) -> None:
        """Bound the slots: of the principal with the most of those that nobody waits on, the one unused for longest
        goes. Raises BrokerLinkFailed.
        """
        if len(self._slots) < self._config.brokers.pooled_connections_max:
            return
        free = [key for key, slot in self._slots.items() if _unused(slot)]
        if not free:
            message = "Too many lookups for too many principals at once"
            raise BrokerLinkFailed(
                "pool_full",
                "all brokers.pooled_connections_max connections are in use",
                code=ServerError.TooManyRequests,
                message=message,
            )
        held = Counter(asker.principal for _broker, asker in free)
        self._drop(min(free, key=lambda key: (-held[key[1].principal], _last_used(self._slots[key]))))

    async def _close_idle(self) -> None:
        oldest = trio.current_time() - seconds(self._config.brokers.idle_connection_timeout_ms)
        for key, slot in list(self._slots.items()):
            if _unused(slot) and _last_used(slot) <= oldest:
                self._drop(key)

    def _drop(self, key: Key) -> None:
        slot = self._slots.pop(key)
        if slot.connection is not None:
            slot.connection.close()

    async def retire(self, patience_s: float) -> None:
        """Give the lookups under way their time, then close everything."""
        self._scope.cancel()
        await trio.sleep(patience_s)
        self._retired = True
        for key in list(self._slots):
            self._drop(key)


def _unused(slot: _Slot) -> bool:
    return slot.attempt is None and (slot.connection is None or slot.connection.idle)


def _last_used(slot: _Slot) -> float:
    return float("-inf") if slot.connection is None else slot.connection.last_used


def _renew_at(expires_at_unix_ms: int) -> float:
    """When a connection should be replaced whose credentials end then (0: never), in Trio's time (KIP-368: at a random
    point within 85 to 95 % of the lifetime, so that not all are replaced at once).
    """
    if not expires_at_unix_ms:
        return float("inf")
    lifetime_s = expires_at_unix_ms / 1000 - time.time()
    # Credentials that have ended, or end in a moment, may be taken all the same: that must not become a storm.
    return trio.current_time() + max(RENEWAL_RETRY_S, lifetime_s * random.uniform(0.85, 0.95))  # noqa: S311 -- no secret
