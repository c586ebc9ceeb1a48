"""Admission of clients: accepted in fair shares, and limits on connections, checked before anything is read.

Each forwarder has an equal part of ``limits.max_connections`` for itself, and refuses no client for what another
forwarder says about its number of clients: one that was taken over could have all clients refused otherwise. Where one
is full, another takes the client (all wait on the same listeners), so all parts are used up before any client is turned
away.
"""

import enum
import socket
from collections import Counter
from collections.abc import Callable, Iterable

import trio

from proxy.common.networks import network_of
from proxy.config.types import Limits, Quota
from proxy.forwarder.listen.eviction import ConnectionShares, Place, PreAuthConnection, PreAuthConnections
from proxy.forwarder.listen.quotas import ConnectionQuotas
from proxy.runtime.fairness.quotas import OnExceeded
from proxy.runtime.loop.tasks import ignore
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.network.accepting import accept_waiting
from proxy.runtime.shared.address_tables import AddressTables
from proxy.runtime.shared.connection_count import ConnectionCounters

PRE_AUTH_CONNECTIONS_MIN = 8
"""Connections without authentication that each forwarder has room for, if the configuration does not say."""

NEWCOMERS_MAX = 8
"""Connections by which each forwarder may exceed its part until it is known to which owners they belong."""

GIVE_WAY_S = 0.002
"""How long a forwarder with more than its share of the clients leaves a new one to the others."""

FULL_LOOK_S = 0.005
FULL_MAX_S = 1.0
"""How long a forwarder without room leaves clients in the queue: for others, or until it has room itself."""

TURN_AWAY_S = 1.0
"""How long a forwarder turns clients away at once, after it has waited for room in vain."""

_SENDER = "sender "


class Refusal(enum.StrEnum):
    """The reason for which a client is refused, a limit, its network or its PROXY header: the label of
    pulsar_proxy_rejected_connections_total.
    """

    MAX_CONNECTIONS = "max_connections"
    PER_ADDRESS = "max_connections_per_address"
    UNAUTHENTICATED = "max_unauthenticated_connections"
    RATE_OF_ADDRESS = "new_connections_per_second"
    NETWORK = "network"
    PROXY_PROTOCOL = "proxy_protocol"

    @property
    def key(self) -> str:
        """Where the configuration has the limit."""
        return f"{'quota' if self is Refusal.RATE_OF_ADDRESS else 'limits'}.{self}"


def sender_key(address: str) -> str:
    """Return what connections from an address count as until their PROXY header has announced their clients: as no
    client of that address, nor for its limit, but for the bounds of connections before authentication.
    """
    return _SENDER + network_of(address)


class AdmittedConnection(PreAuthConnection):
    """A connection that is counted for the limits, from accept until ``release``."""

    __slots__ = ("_admission", "_place")

    def __init__(self, admission: "Admission", all_: PreAuthConnections, address: str) -> None:
        super().__init__(all_, address)
        self._admission: Admission | None = admission
        self._place: Place | None = None

    def take_place(self, owner: str, give_way: Callable[[], None]) -> str | None:
        """Count the connection for its owner; return the limit for which it has to close, or None.

        That is a quota, or MAX_CONNECTIONS if all places are taken, and none gives way to it.
        """
        admission = self._admission
        if admission is None:
            return Refusal.MAX_CONNECTIONS
        refused = admission.quotas.check_owner(owner)
        if refused is not None:
            return refused
        self._place = admission.shares.take_place(owner, give_way)
        return Refusal.MAX_CONNECTIONS if self._place is None else None

    def _leave_place(self) -> None:
        if self._admission is not None and self._place is not None:
            self._admission.shares.leave_place(self._place)
            self._place = None  # which leads back to the connection

    def release(self) -> None:
        """Count the connection no longer. May be repeated."""
        self._leave_place()
        admission, self._admission = self._admission, None
        if admission is not None:
            self.stop_counting()
            admission.release_client(self.address)

    def on_relay_started(self) -> None:
        """Leave it to the relay to be counted, until ``Admission.release_client``: it outlives the handshake."""
        self.stop_counting()
        self._leave_place()
        self._admission = None


class Admission:
    """The admission of one forwarder: counts its clients in total, by address, and before authentication."""

    def __init__(
        self,
        limits: Limits,
        counters: ConnectionCounters,
        forwarder: int,
        addresses: AddressTables | None = None,
        on_quota_exceeded: OnExceeded = ignore,
    ) -> None:
        self.connections = 0
        self._by_address: Counter[str] = Counter()
        self._pre_auth = PreAuthConnections()
        self.quotas = ConnectionQuotas(counters.forwarders, self._part_of, on_quota_exceeded)
        self.shares = ConnectionShares(0, self.quotas.count)
        self._counters = counters
        self._forwarder = forwarder
        self._retired = False
        self._addresses = addresses or AddressTables()
        self.limits = limits
        counters.set_connections(forwarder, 0)

    @property
    def limits(self) -> Limits:
        """The limits in force, which are those of the whole cluster."""
        return self._limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._limits = limits
        self._part = self._part_of(limits.max_connections)
        self.shares.resize(self._part)
        if limits.max_unauthenticated_connections:
            pre_auth_max = max(1, self._part_of(limits.max_unauthenticated_connections))
        else:
            pre_auth_max = max(PRE_AUTH_CONNECTIONS_MIN, self._part_of(limits.max_connections // 4))
        self._pre_auth_max = pre_auth_max
        self._pre_auth_of_address_max = max(1, pre_auth_max // 2)
        self._addresses.track_connections(self._by_address if limits.max_connections_per_address else None)

    def set_quotas(self, quotas: Iterable[Quota]) -> None:
        """Enforce these quotas for connections that come from now on."""
        self.quotas.configure(quotas, self.shares.counts())

    @property
    def part(self) -> int:
        """This forwarder's part of ``limits.max_connections``."""
        return self._part

    def _part_of(self, limit: int) -> int:
        part, rest = divmod(limit, self._counters.forwarders)
        return part + (self._forwarder < rest)

    def retire_counters(self) -> None:
        """Leave this forwarder's cells among the shared counters to its successor."""
        self._retired = True
        self._addresses.track_connections(None)

    # ---- whether to accept

    def has_more_than_its_share(self) -> bool:
        """Return whether another forwarder should take the next client."""
        return self._counters.is_above_mean(self._forwarder)

    def is_full(self) -> bool:
        """Return whether the next client would be refused for max_connections, since no connection can be evicted."""
        return self.connections >= self._part and not self._pre_auth.has_silent

    def is_busy(self) -> bool:
        """Return whether all pre-auth connections that are allowed are busy: soon there will be room again."""
        return self._pre_auth.count >= self._pre_auth_max and not self._pre_auth.has_silent

    def others_have_room(self) -> bool:
        """Return whether other forwarders say that they are not full. They may be wrong, or lie."""
        return self._counters.total_connections() < self._limits.max_connections

    # ---- in and out

    def check_admission(self, address: str, owner: str = "") -> Refusal | None:
        """Return why a client at an IP address is refused, or None. A silent connection may be evicted for it.

        ``owner``: its owner, where that is known already (proxy.runtime.fairness.owners).
        """
        address = network_of(address)
        per_address = self._limits.max_connections_per_address
        if per_address and not address.startswith(_SENDER) and self._connections_of(address) >= per_address:
            return Refusal.PER_ADDRESS
        # Before any connection is evicted: who comes too often takes nobody's place.
        if not address.startswith(_SENDER) and self.quotas.check_address(address) is not None:
            return Refusal.RATE_OF_ADDRESS
        pre_auth = self._pre_auth
        if pre_auth.count_of_address(address) >= self._pre_auth_of_address_max:
            if not self._evict(address):
                return Refusal.UNAUTHENTICATED
        elif pre_auth.count >= self._pre_auth_max and not self._evict():
            return Refusal.UNAUTHENTICATED
        if self.connections >= self._part:
            newcomers_max = NEWCOMERS_MAX if self.shares.can_make_room(owner) else 0
            if self.connections >= self._part + newcomers_max and not self._evict():
                return Refusal.MAX_CONNECTIONS
        return None

    def _connections_of(self, address: str) -> int:
        here = self._by_address[address]
        enough = self._limits.max_connections_per_address - here
        if enough <= 0:
            return here
        part_max = -(-self._limits.max_connections // self._counters.forwarders)
        return here + self._addresses.others_connections(address, enough, part_max)

    def _evict(self, address: str = "") -> bool:
        """Evict a silent pre-auth connection, of one address or of any. Return False if there is none."""
        silent = self._pre_auth.find_longest_silent(address)
        if not isinstance(silent, AdmittedConnection):
            return False
        close = silent.evict
        silent.release()  # first: to close it may take its time
        close()
        return True

    def admit_client(self, address: str) -> AdmittedConnection:
        """Count a new client, until its connection is released."""
        address = network_of(address)
        self._count_in(address)
        admitted = AdmittedConnection(self, self._pre_auth, address)
        self._pre_auth.add_connection(admitted)
        return admitted

    def adopt_client(self, address: str) -> None:
        """Count the client of a predecessor's relay, until ``release_client``."""
        self._count_in(network_of(address))

    def _count_in(self, address: str) -> None:
        self.connections += 1
        self._by_address[address] += 1
        self._tell_others(address)

    def release_client(self, address: str) -> None:
        """Count a client of this address no longer."""
        address = network_of(address)
        self.connections -= 1
        self._by_address[address] -= 1
        self._tell_others(address)
        if not self._by_address[address]:
            del self._by_address[address]

    def _tell_others(self, address: str) -> None:
        if not self._retired:
            self._counters.set_connections(self._forwarder, self.connections)
            self._addresses.set_connections(address, self._by_address[address])


async def accept_clients(
    listener: socket.socket,
    admission: Admission,
    on_client: Callable[[TcpStream, tuple[str, int]], None],
) -> None:
    """Accept until cancelled. ``on_client`` is called with each connection, and its IP address and port."""
    turning_away_until = float("-inf")

    def take_in(stream: TcpStream, address: tuple[str, int]) -> bool:
        on_client(stream, address)
        return _should_wait(admission) or admission.has_more_than_its_share()

    with listener:  # closed at the end, so that no client waits in its queue for nothing
        while True:
            await trio.lowlevel.wait_readable(listener)
            # If no other forwarder takes it, since they are gone or hang, it is still there afterwards.
            if _should_wait(admission):
                if trio.current_time() >= turning_away_until and not await _wait_for_room(admission):
                    turning_away_until = trio.current_time() + TURN_AWAY_S
            elif admission.has_more_than_its_share():
                await trio.sleep(GIVE_WAY_S)
            await accept_waiting(listener, take_in, "clients")


def _should_wait(admission: Admission) -> bool:
    return admission.is_busy() or (admission.is_full() and admission.others_have_room())


async def _wait_for_room(admission: Admission) -> bool:
    """Wait for room for up to FULL_MAX_S. Return False if there is none: all in the queue are turned away then."""
    with trio.move_on_after(FULL_MAX_S):
        while _should_wait(admission):  # noqa: ASYNC110 -- others' counters can only be looked at
            await trio.sleep(FULL_LOOK_S)
        return True
    return False
