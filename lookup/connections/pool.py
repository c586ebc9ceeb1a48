"""Pool of the lookup worker's connections to brokers: one for each broker and principal, shared by its clients.

Per principal, because the broker decides by the *connection's* original principal what a lookup may see (4.0.8; the
lookup's own original_principal field is not used); and per forwarded credentials, where there are any: those of two
clients with one role may allow different things (further roles of a token). The pool is bounded, as a whole and for
each principal at a broker, and closes connections that are idle, or that belong to credentials that have ended.
"""

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import trio

from lookup.brokers.credential_checks import CredentialChecks
from lookup.connections.broker_connection import BrokerConnection, ConnectionSettings
from lookup.connections.isolated import IsolatedConnections
from lookup.connections.losses import SuspectGroup
from lookup.connections.principals import LookupPrincipal
from lookup.targets.rules import LocateBroker, Target
from proto.addresses import HostPort
from proto.commands import AUTH_REFRESH
from proto.connect_rules import BrokerIdentity, proxy_connect
from proto.lookup_answers import AnswerTemplates
from proto.pulsar_pb2 import CommandConnect, CommandConnected, ServerError
from proto.rpc_pb2 import OriginalData
from proxy import SERVER_VERSION, __version__
from proxy.config.types import Config
from proxy.runtime.loop.single_flight import SingleFlight
from proxy.runtime.loop.tasks import run_every, seconds
from proxy.runtime.network.broker_link import NOT_CONNECTED, BrokerLinkFactory, BrokerLinkFailed
from proxy.runtime.network.broker_refusals import ShownCredentials, explain_refusal
from proxy.runtime.network.credentials import credentials_for
from proxy.runtime.network.dialing import Dialer
from proxy.runtime.rpc.pool import RpcPool

SILENCE_SHARE = 4
"""A broker that says nothing for this share of a lookup's time is asked whether it is there, and given up after two:
then half of the time is left for another one.
"""

ISOLATED_SHARE = 4
"""Beside the pooled connections there may be this share of brokers.pooled_connections_max for suspects."""

RENEWAL_RETRY_S = 5.0

ROOM_INTERVAL_S = 0.01
"""Time between two looks for an unused connection of a principal that has as many as it may. One caller looks, the
others queue behind it.
"""

ROOM_WAIT_S = 0.5
"""Time after which a connection in use makes room: with overlapping lookups of its credentials it is never unused."""

PoolKey = tuple[HostPort, LookupPrincipal]


@dataclass(slots=True)
class PoolSlot:
    """Slot of one broker and principal: the connection, and the attempt under way to open one."""

    locate: LocateBroker
    attempt: SingleFlight[BrokerConnection] = field(init=False)
    """Opens a connection: in a task of its own, since the first caller may give up before the others."""
    connection: BrokerConnection | None = None
    retiring: BrokerConnection | None = None
    """The connection before, which may still answer what is under way; of more of them only the last one."""
    waiting: int = 0
    """Callers that are about to send a request."""

    @property
    def is_unused(self) -> bool:
        """Whether it may be closed without a loss to any request."""
        return not self.waiting and not self.attempt.is_under_way and (self.connection is None or self.connection.idle)

    @property
    def last_used_at(self) -> float:
        """When a request was last sent, in Trio's time."""
        return float("-inf") if self.connection is None else self.connection.last_used_at


class PoolShare:
    """The slots of one principal at one broker: one for each of its clients' credentials.

    ``retiring``: connections without a slot, which still answer what is under way.
    """

    __slots__ = ("callers", "keys", "lock", "retiring")

    def __init__(self) -> None:
        self.lock = trio.Lock()  # fair: first come, first served
        self.callers = 0
        self.keys: set[PoolKey] = set()
        self.retiring: list[BrokerConnection] = []


class BrokerPool:
    """Bounded pool of connections by broker and principal."""

    def __init__(
        self,
        config: Config,
        dialer: Dialer,
        auth: RpcPool,
        nursery: trio.Nursery,
        credential_checks: CredentialChecks | None = None,
    ) -> None:
        """``credential_checks``: where brokers' answers to the proxy's credentials are reported; None: nowhere."""
        self._config = config
        self._credential_checks = credential_checks
        self._auth = auth
        self._nursery = nursery
        self._slots: dict[PoolKey, PoolSlot] = {}
        self._shares: dict[tuple[HostPort, str], PoolShare] = {}
        self._answer_templates = AnswerTemplates()
        suspects_max = max(2, config.brokers.pooled_connections_max // ISOLATED_SHARE)
        self._isolated = IsolatedConnections(nursery, suspects_max)
        self._scope = trio.CancelScope()
        self._retired = False
        self._link_factory = BrokerLinkFactory(dialer, config.limits.max_broker_frame_bytes, SERVER_VERSION)
        self.profile: CommandConnected | None = None
        """What a broker last said in its CONNECTED."""
        self.original_data_of: Callable[[HostPort, tuple[str, ...]], OriginalData] = lambda _broker, _addresses: (
            OriginalData.ORIGINAL_DATA_UNKNOWN
        )
        """Whether a broker checks clients' own credentials, for the text of its refusal."""
        self.observe_reauthentication: Callable[[float], None] = lambda _took_s: None
        """Called when a broker's challenge is answered, with the seconds since it came, through all rounds."""

    def __len__(self) -> int:
        return sum(1 for slot in self._slots.values() if slot.connection is not None and not slot.connection.closed)

    async def run(self) -> None:
        """Close idle connections, until ``retire_after`` is called."""
        with self._scope:
            await run_every(seconds(self._config.brokers.idle_connection_timeout_ms) / 4, self._close_idle_connections)

    def get_open_connection(self, broker: HostPort, principal: LookupPrincipal, now: float) -> BrokerConnection | None:
        """Return the open connection to a broker for a principal, or None; ``now`` in Trio's time.

        Where the connection is due for renewal, a new one is opened in the background.
        """
        slot = self._slots.get((broker, principal))
        connection = None if slot is None else slot.connection
        if slot is None or connection is None or connection.closed or connection.retired:
            return None
        if connection.renew_at <= now:
            slot.attempt.start()  # meanwhile this one serves
        return connection

    async def get_connection(
        self, broker: HostPort, locate: LocateBroker, principal: LookupPrincipal
    ) -> BrokerConnection:
        """Return the connection to a broker for a principal, opened if need be.

        ``locate`` is called for the broker's (checked) name and addresses only where a connection must be opened, and
        may raise. Raises BrokerLinkFailed where the connection cannot be opened.
        """
        self._check_not_retired()
        slot = self._slots.get((broker, principal)) or await self._slot_with_room(broker, locate, principal)
        connection = self.get_open_connection(broker, principal, trio.current_time())
        if connection is not None:
            return connection
        if not slot.attempt.is_under_way:
            slot.locate = locate
        slot.waiting += 1
        try:
            return await slot.attempt.result()
        finally:
            slot.waiting -= 1

    async def _slot_with_room(self, broker: HostPort, locate: LocateBroker, principal: LookupPrincipal) -> PoolSlot:
        """Return the slot of a broker and principal, made if need be.

        Where the principal has as many at this broker as it may, each for other credentials, wait until one is unused,
        and close that; after ROOM_WAIT_S let one in use make room. Raises BrokerLinkFailed where the pool is full.
        """
        where, key = (broker, principal.name), (broker, principal)
        share = self._shares.setdefault(where, PoolShare())
        share.callers += 1
        try:
            async with share.lock:
                waits_until = trio.current_time() + ROOM_WAIT_S
                while key not in self._slots and not self._make_room(share, waits_until):
                    await trio.sleep(ROOM_INTERVAL_S)
                    self._check_not_retired()
                slot = self._slots.get(key)
                if slot is None:
                    self._evict_if_full()
                    slot = self._slots[key] = PoolSlot(locate)
                    slot.attempt = SingleFlight(partial(self._open_in_slot, slot, broker, principal), self._nursery)
                    share.keys.add(key)
                return slot
        finally:
            share.callers -= 1
            self._drop_share_if_unused(where)

    def _make_room(self, share: PoolShare, waits_until: float) -> bool:
        """Return True if a principal may have one more slot at a broker, perhaps in place of its least recently used.

        A connection in use goes only if the time to wait is over, and takes no more requests. There may be as many
        such connections as slots.
        """
        slots_max = self._config.brokers.pooled_connections_per_principal_max
        if len(share.keys) < slots_max:
            return True
        by_last_use = sorted(share.keys, key=lambda key: self._slots[key].last_used_at)
        unused = next((key for key in by_last_use if self._slots[key].is_unused), None)
        if unused is not None:
            self._close_slot(unused)
            return True
        share.retiring = [connection for connection in share.retiring if not connection.closed]
        if trio.current_time() < waits_until or len(share.retiring) >= slots_max:
            return False
        for key in by_last_use:
            slot = self._slots[key]
            if slot.connection is not None and not slot.attempt.is_under_way and not slot.waiting:
                self._forget_slot(key)
                share.retiring.append(slot.connection)
                slot.connection.retire_when_idle()
                return True
        return False

    def _drop_share_if_unused(self, where: tuple[HostPort, str]) -> None:
        share = self._shares[where]
        if not share.keys and not share.callers:
            del self._shares[where]

    async def get_isolated_connection(
        self, broker: HostPort, locate: LocateBroker, principal: LookupPrincipal, suspect_group: SuspectGroup
    ) -> BrokerConnection:
        """Return a suspect group's own connection (lookup.connections.isolated); raises like ``get_connection``."""
        self._check_not_retired()

        async def open_connection(broker: HostPort, target: Target) -> BrokerConnection:
            return await self._open_connection(broker, target, principal)

        return await self._isolated.get_connection(broker, locate, open_connection, principal.name, suspect_group)

    def _check_not_retired(self) -> None:
        if self._retired:
            raise BrokerLinkFailed("retired", "the lookup is older than a reload", message=NOT_CONNECTED)

    async def _open_in_slot(self, slot: PoolSlot, broker: HostPort, principal: LookupPrincipal) -> BrokerConnection:
        """Open a slot's connection, in place of one that it may have. Raises what ``locate`` and opening raise."""
        try:
            connection = await self._open_connection(broker, await slot.locate(), principal)
            self._nursery.start_soon(connection.run)
            old, slot.connection = slot.connection, connection
            if old is not None:
                if slot.retiring is not None:  # a broker may challenge each connection, and answer nothing
                    slot.retiring.close()
                slot.retiring = old
                old.retire_when_idle()
        except Exception:
            if slot.connection is not None:  # that it could not be renewed disturbs no lookup yet
                slot.connection.renew_at = trio.current_time() + RENEWAL_RETRY_S
            raise
        finally:
            if self._retired and slot.connection is not None:
                slot.connection.close()
        return connection

    async def _open_connection(self, broker: HostPort, target: Target, principal: LookupPrincipal) -> BrokerConnection:
        """Open a connection and shake hands; the caller must run it."""
        configured = self._config.brokers.credentials is not None
        credentials = credentials_for(self._auth, target.broker.host, configured=configured)

        def make_connect(method: str, data: bytes) -> CommandConnect:
            identity = BrokerIdentity(method, data, principal.name, principal.credentials, principal.proxies + 1)
            return proxy_connect(identity, __version__)

        challenged_at: float | None = None

        async def answer_challenge(challenge: bytes) -> tuple[str, bytes]:
            nonlocal credentials, challenged_at
            if challenge != AUTH_REFRESH:  # a further round
                answer = await credentials.auth_data_for(challenge)
            else:
                challenged_at = trio.current_time()
                credentials = credentials_for(self._auth, target.broker.host, configured=configured)
                answer = await credentials.auth_data_for(None)
            if credentials.complete and challenged_at is not None:
                self.observe_reauthentication(trio.current_time() - challenged_at)
                challenged_at = None
            return answer

        try:
            link = await self._link_factory.open_link(target.broker, target.addresses, credentials, make_connect)
        except BrokerLinkFailed as failed:
            if self._credential_checks is not None and failed.refusal is not None:
                self._credential_checks.request_recheck(broker)
            shown = ShownCredentials(
                principal.name,
                principal.method,
                has_original=principal.credentials is not None,
                forwards=self._config.brokers.forward_authorization_credentials,
            )
            raise explain_refusal(failed, self.original_data_of(target.broker, target.addresses), shown) from None
        if (
            self._credential_checks is not None and principal.credentials is None
        ):  # else they may be what it was taken in for
            self._credential_checks.record_acceptance(broker)
        self.profile = link.connected.message
        return BrokerConnection(
            broker,
            link,
            ConnectionSettings(
                max_frame_bytes=self._config.limits.max_broker_frame_bytes,
                keep_alive_s=seconds(self._config.limits.keep_alive_interval_ms),
                silence_s=seconds(self._config.limits.lookup_timeout_ms) / SILENCE_SHARE,
                renew_at=_renew_at(credentials.expires_at_unix_ms),
                answer_challenge=answer_challenge if principal.credentials is None else None,
            ),
            self._answer_templates,
        )

    def _evict_if_full(self) -> None:
        """Evict an unused slot where the pool is full; raise BrokerLinkFailed where all are in use.

        The victim is the least recently used slot of the principal with the most unused ones.
        """
        if len(self._slots) < self._config.brokers.pooled_connections_max:
            return
        free = [key for key, slot in self._slots.items() if slot.is_unused]
        if not free:
            message = "Too many lookups for too many principals at once"
            raise BrokerLinkFailed(
                "pool_full",
                "all brokers.pooled_connections_max connections are in use",
                code=ServerError.TooManyRequests,
                message=message,
            )
        held = Counter(principal.name for _broker, principal in free)
        self._close_slot(min(free, key=lambda key: (-held[key[1].name], self._slots[key].last_used_at)))

    async def _close_idle_connections(self) -> None:
        oldest = trio.current_time() - seconds(self._config.brokers.idle_connection_timeout_ms)
        now_unix_ms = time.time() * 1000
        for key, slot in list(self._slots.items()):
            has_ended = 0 < key[1].expires_at_unix_ms <= now_unix_ms
            if slot.is_unused and (slot.last_used_at <= oldest or has_ended):
                self._close_slot(key)

    def _close_slot(self, key: PoolKey) -> None:
        slot = self._forget_slot(key)
        if slot.connection is not None:
            slot.connection.close()

    def _forget_slot(self, key: PoolKey) -> PoolSlot:
        where = key[0], key[1].name
        self._shares[where].keys.remove(key)
        self._drop_share_if_unused(where)
        return self._slots.pop(key)

    async def retire_after(self, grace_s: float) -> None:
        """Let the lookups under way finish within ``grace_s``, then close all connections."""
        self._scope.cancel()
        await trio.sleep(grace_s)
        self._retired = True
        for key in list(self._slots):
            self._close_slot(key)


def _renew_at(expires_at_unix_ms: int) -> float:
    """Return when to replace a connection whose credentials end at a time (0: never), in Trio's time.

    KIP-368: at a random point within 85 to 95 % of the lifetime, so that not all are replaced at once.
    """
    if not expires_at_unix_ms:
        return float("inf")
    lifetime_s = expires_at_unix_ms / 1000 - time.time()
    # Credentials that have ended, or end in a moment, may be taken all the same: that must not become a storm.
    return trio.current_time() + max(RENEWAL_RETRY_S, lifetime_s * random.uniform(0.85, 0.95))  # noqa: S311 -- no secret
