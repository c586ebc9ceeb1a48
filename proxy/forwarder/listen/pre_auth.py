"""Connections that have not authenticated: how many there are, of which address, and which of them may be closed.

A connection that waits for its client (its TLS handshake, its CONNECT, its answer to a challenge) is *silent*. One that
the proxy works for (an auth worker judges it, a broker is dialled) is not: to close it would waste that work, and
clients that come again would only begin it once more. So only silent ones ever give way to a newcomer: of the address
that has most of them, the one that has been silent for longest. A client that goes through its handshake is silent for
some round trips and is never that one; a thousand that say nothing are, whatever address they share with others.
"""

from collections import Counter
from collections.abc import Callable


def _nobody() -> None:
    """What is done to a connection before it is known how it can be closed."""


class PreAuthConnection:
    """One connection. It is silent from the beginning. ``evict`` closes it, once somebody has set it.

    ``all_``: where it is counted; None: nowhere.
    """

    __slots__ = ("_all", "_is_silent", "address", "evict")

    def __init__(self, all_: "PreAuthConnections | None" = None, address: str = "") -> None:
        self.address = address
        self.evict: Callable[[], None] = _nobody
        self._all = all_
        self._is_silent = True

    def mark_busy(self) -> None:
        """Keep it: the proxy works for it."""
        if self._is_silent:
            self._is_silent = False
            if self._all is not None:
                self._all.remove_silent(self)

    def mark_silent(self) -> None:
        """Let it be closed for a newcomer: it waits for its client, or for the close itself."""
        if not self._is_silent:
            self._is_silent = True
            if self._all is not None:
                self._all.add_silent(self)

    def stop_counting(self) -> None:
        """Count it no more: its client has authenticated, or it is over."""
        if self._all is not None:
            if self._is_silent:
                self._all.remove_silent(self)
            self._all.remove(self)
            self._all = None
        self.evict = _nobody  # nobody asks for it any more, and it holds on to its session


class PreAuthConnections:
    """All of one forwarder."""

    def __init__(self) -> None:
        self.count = 0
        self._by_address: Counter[str] = Counter()
        self._silent: dict[str, dict[PreAuthConnection, None]] = {}
        self._addresses_with: dict[int, dict[str, None]] = {}
        self._most = 0

    def add(self, stranger: PreAuthConnection) -> None:
        """Count one more."""
        self.count += 1
        self._by_address[stranger.address] += 1
        self.add_silent(stranger)

    def count_of_address(self, address: str) -> int:
        """How many an address has."""
        return self._by_address[address]

    @property
    def any_silent(self) -> bool:
        """Whether one could give way."""
        return self._most > 0

    def find_longest_silent(self, address: str = "") -> PreAuthConnection | None:
        """The one that may be closed: of an address, or else of the one that has most silent ones."""
        if not address and self._most:
            address = next(iter(self._addresses_with[self._most]))
        return next(iter(self._silent.get(address, ())), None)

    # ---- for Stranger only

    def remove(self, stranger: PreAuthConnection) -> None:
        """Count one less."""
        address = stranger.address
        self.count -= 1
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]

    def add_silent(self, stranger: PreAuthConnection) -> None:
        """Note that one is silent from now on."""
        address = stranger.address
        silent = self._silent.setdefault(address, {})
        silent[stranger] = None
        self._moves(address, len(silent) - 1, len(silent))

    def remove_silent(self, stranger: PreAuthConnection) -> None:
        """Note that one is silent no more."""
        address = stranger.address
        silent = self._silent[address]
        del silent[stranger]
        if not silent:
            del self._silent[address]
        self._moves(address, len(silent) + 1, len(silent))

    def _moves(self, address: str, old: int, new: int) -> None:
        """Keep addresses by how many silent ones they have; those that have been there for longest come first."""
        if old:
            addresses = self._addresses_with[old]
            del addresses[address]
            if not addresses:
                del self._addresses_with[old]
        if new:
            self._addresses_with.setdefault(new, {})[address] = None
        if new > self._most or self._most not in self._addresses_with:
            self._most = new
