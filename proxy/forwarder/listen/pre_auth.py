"""Pre-auth connections: how many have not authenticated, of which address, and which of them may be closed.

A connection that waits for its client (its TLS handshake, its CONNECT, its answer to a challenge) is *silent*. One that
the proxy works for (an auth worker judges it, a broker is dialled) is *busy*: to close it would waste that work, and
a client that comes again would only begin it once more. So only silent ones are ever evicted for a newcomer: of the
address that has most of them, the one that has been silent for longest. A client that goes through its handshake is
silent for some round trips and is never that one; a thousand that send nothing are, whatever address they share.
"""

from collections import Counter
from collections.abc import Callable

from proxy.runtime.fairness.members_by_owner import MembersByOwner


def _ignore() -> None:
    """Do nothing: it is not known yet how the connection can be closed."""


class PreAuthConnection:
    """One connection that has not authenticated; silent at first. ``evict`` closes it: set by its owner.

    ``all_``: where it is counted; None: nowhere.
    """

    __slots__ = ("_all", "_is_silent", "address", "evict")

    def __init__(self, all_: "PreAuthConnections | None" = None, address: str = "") -> None:
        self.address = address
        self.evict: Callable[[], None] = _ignore
        self._all = all_
        self._is_silent = True

    def take_place(self, _owner: str, _give_way: Callable[[], None]) -> bool:
        """Count the connection for its owner, which is known now; return False if it has to close."""
        return True

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
        self.evict = _ignore  # never called again; it would keep the connection in memory


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
