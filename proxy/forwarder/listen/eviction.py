"""Which connection is closed for a newcomer: one before authentication, or one of the owner that has most.

A connection that waits for its client (its TLS handshake, its CONNECT, its answer to a challenge) is *silent*. One that
the proxy works for (an auth worker judges it, a broker is dialled) is *busy*: to close it would waste that work, and
a client that comes again would only begin it once more. So only silent ones are ever evicted for a newcomer: of the
address that has most of them, the one that has been silent for longest. A client that goes through its handshake is
silent for some round trips and is never that one; a thousand that send nothing are, whatever address they share.

Of connections whose owner is known, an owner alone may take all places, as long as no other wants in. A newcomer whose
owner has fewer then gets in by a connection of the owner with most: the one that came last. An owner that holds no more
than 1 / KEPT_PARTS of the places loses none, however many others come: many addresses, or many principals of one
issuer, cannot drive it out. So it takes KEPT_PARTS owners together to keep all others out.
"""

from collections import Counter
from collections.abc import Callable

from proxy.common.logs import get_logger
from proxy.runtime.fairness.members_by_owner import MembersByOwner
from proxy.runtime.loop.tasks import ignore

KEPT_PARTS = 8


class PreAuthConnection:
    """One connection that has not authenticated; silent at first. ``evict`` closes it: set by its owner.

    ``all_``: where it is counted; None: nowhere.
    """

    __slots__ = ("_all", "_is_silent", "address", "evict")

    def __init__(self, all_: "PreAuthConnections | None" = None, address: str = "") -> None:
        self.address = address
        self.evict: Callable[[], None] = ignore  # how it can be closed is not known yet
        self._all = all_
        self._is_silent = True

    def take_place(self, _owner: str, _give_way: Callable[[], None]) -> str | None:
        """Count the connection for its owner, which is known now; return the limit for which it has to close, or None.

        The limit's name is that of the configuration, without its table for those of `[limits]`.
        """
        return None

    def mark_busy(self) -> None:
        """Protect the connection from eviction: the proxy works for it."""
        if self._is_silent:
            self._is_silent = False
            if self._all is not None:
                self._all.remove_silent(self)

    def mark_silent(self) -> None:
        """Let the connection be evicted for a newcomer: it waits for its client, or for the close itself."""
        if not self._is_silent:
            self._is_silent = True
            if self._all is not None:
                self._all.add_silent(self)

    def stop_counting(self) -> None:
        """Count the connection no longer: its client has authenticated, or it is closed."""
        if self._all is not None:
            if self._is_silent:
                self._all.remove_silent(self)
            self._all.remove_connection(self)
            self._all = None
        self.evict = ignore  # never called again; it would keep the connection in memory


class PreAuthConnections:
    """The pre-auth connections of one forwarder, by address and by how long they have been silent."""

    def __init__(self) -> None:
        self.count = 0
        self._by_address: Counter[str] = Counter()
        self._silent: MembersByOwner[PreAuthConnection] = MembersByOwner()

    def add_connection(self, connection: PreAuthConnection) -> None:
        """Count a connection, which is silent."""
        self.count += 1
        self._by_address[connection.address] += 1
        self.add_silent(connection)

    def count_of_address(self, address: str) -> int:
        """Return how many connections an address has."""
        return self._by_address[address]

    @property
    def has_silent(self) -> bool:
        """Return whether a connection could be evicted."""
        return self._silent.count > 0

    def find_longest_silent(self, address: str = "") -> PreAuthConnection | None:
        """Return the connection to evict, or None: of an address; by default of the one with most silent ones."""
        return self._silent.oldest(address or self._silent.owner_with_most())

    # ---- for PreAuthConnection only

    def remove_connection(self, connection: PreAuthConnection) -> None:
        """Count a connection no longer. It must not be counted as silent."""
        address = connection.address
        self.count -= 1
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]

    def add_silent(self, connection: PreAuthConnection) -> None:
        """Count a connection as silent from now on."""
        self._silent.add(connection.address, connection)

    def remove_silent(self, connection: PreAuthConnection) -> None:
        """Count a connection as silent no longer."""
        self._silent.remove(connection.address, connection)


class Place:
    """A place that an owner holds, "" once it is left; ``give_way`` closes the connection for another owner's."""

    __slots__ = ("give_way", "owner")

    def __init__(self, owner: str, give_way: Callable[[], None]) -> None:
        self.owner = owner
        self.give_way = give_way


class ConnectionShares:
    """The places of one forwarder, for connections of which the owner is known.

    ``on_change`` is called with an owner, and by how much the number of its places has changed.
    """

    def __init__(self, places: int, on_change: Callable[[str, int], None] = ignore) -> None:
        self._on_change = on_change
        self._held: MembersByOwner[Place] = MembersByOwner()
        self.resize(places)

    def resize(self, places: int) -> None:
        """Change the number of places; those that are held stay."""
        self._places = places
        self._kept = max(1, places // KEPT_PARTS)

    def can_make_room(self, owner: str = "") -> bool:
        """Return whether some connection would give way to one of ``owner``; "": of any owner but the one with most."""
        held = self._held
        return held.most > self._kept and held.most > held.count_of(owner) + 1

    def take_place(self, owner: str, give_way: Callable[[], None]) -> Place | None:
        """Take a place for an owner, another's if none is free; return None if none gives way."""
        if self._held.count >= self._places:
            if not self.can_make_room(owner):
                return None
            largest = self._held.newest(self._held.owner_with_most())
            assert largest is not None  # the owner with most has some
            self.leave_place(largest)  # first: to close it may take its time
            largest.give_way()
        return self.adopt_place(owner, give_way)

    def adopt_place(self, owner: str, give_way: Callable[[], None]) -> Place:
        """Take a place for a connection that has been let in before, whatever is free."""
        place = Place(owner, give_way)
        self._held.add(owner, place)
        self._on_change(owner, 1)
        return place

    def leave_place(self, place: Place) -> None:
        """Leave a place, if it has not been taken away."""
        if place.owner:
            self._held.remove(place.owner, place)
            self._on_change(place.owner, -1)
            place.owner = ""

    def counts(self) -> dict[str, int]:
        """Return how many places each owner holds."""
        return self._held.counts()


def log_eviction(client: str) -> None:
    """Log that a client gave way before its authentication."""
    get_logger().warning(
        "a client that had not authenticated was silent for longest and gave way to another; if it was no attack, "
        "raise limits.max_unauthenticated_connections",
        client=client,
    )


def log_over_share(client: str, principal: str) -> None:
    """Log that a connection gave way since its principal, or address, had most of all."""
    get_logger().warning(
        "a connection was closed for another client's: its principal (or address) had most of all; if both need "
        "theirs, raise limits.max_connections",
        client=client,
        principal=principal,
    )
