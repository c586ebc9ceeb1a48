"""Store of authentication exchanges between their rounds: bounded in time, number and rounds, and shared fairly by the
processes that call.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

import trio

from auth.state import AuthenticationDenied
from proto.connect_rules import LOST_EXCHANGE, OVERLOADED

EXCHANGES_MAX = 20_000
ROUNDS_MAX = 10

StateT = TypeVar("StateT")
ExchangeKey = tuple[int, int]


@dataclass(frozen=True, slots=True)
class StoredExchange(Generic[StateT]):
    """An exchange between two rounds: its method, its state, and how many rounds are done."""

    method: str
    state: StateT
    rounds_done: int
    expires_at: float


class ExchangeStore(Generic[StateT]):
    """Exchanges by key: the caller's process, and its name for the exchange. Where the store is full, the process that
    has most exchanges loses its oldest one to a process that has fewer: none can keep others out.

    A state is removed for each round and stored again for the next, so no two rounds of one exchange run at the same
    time, and an exchange that was finished or denied is gone.
    """

    def __init__(self, *, lifetime_s: float, rounds_max: int = ROUNDS_MAX) -> None:
        self._lifetime_s = lifetime_s
        self._rounds_max = rounds_max
        self._by_caller: dict[int, OrderedDict[int, StoredExchange[StateT]]] = {}
        """Exchanges of each process, by its name for them, in the order of their expiry."""

    def __len__(self) -> int:
        self._drop_expired()
        return self._count()

    def _count(self) -> int:
        return sum(map(len, self._by_caller.values()))

    def store_exchange(
        self, key: ExchangeKey, method: str, state: StateT, *, number: int, replaces_oldest: bool = False
    ) -> None:
        """Store a state after a round. Raises AuthenticationDenied: too many rounds, or exchanges.

        ``replaces_oldest``: where the caller itself has most of all exchanges, its oldest one makes room.
        """
        self._drop_expired()
        if number >= self._rounds_max:
            raise AuthenticationDenied("too_many_rounds", f"not finished after {self._rounds_max} rounds")
        if self._count() >= EXCHANGES_MAX:
            self._make_room(key[0], replaces_oldest=replaces_oldest)
        self._pop(key)  # so that the order of entries stays that of their expiry
        stored = StoredExchange(method, state, number, trio.current_time() + self._lifetime_s)
        self._by_caller.setdefault(key[0], OrderedDict())[key[1]] = stored

    def _make_room(self, caller: int, *, replaces_oldest: bool) -> None:
        """Drop the oldest exchange of the process that has most; of the caller where it has as many, give or take one.
        Raises AuthenticationDenied where the caller's own would be dropped, unless ``replaces_oldest``.
        """
        own = len(self._by_caller.get(caller, ()))
        largest = max(self._by_caller, key=lambda pid: len(self._by_caller[pid]))
        if own and len(self._by_caller[largest]) <= own + 1:  # two equal ones must not take turns at each other's
            largest = caller
        if largest == caller and not replaces_oldest:
            raise AuthenticationDenied(OVERLOADED, "too many authentications under way")
        self._pop((largest, next(iter(self._by_caller[largest]))))

    def pop_exchange(self, key: ExchangeKey, method: str) -> StoredExchange[StateT]:
        """Remove and return an exchange; raise AuthenticationDenied where there is none for this method."""
        self._drop_expired()
        found = self._pop(key)
        if found is None:
            raise AuthenticationDenied(LOST_EXCHANGE, "a round of an exchange that is not under way")
        if found.method != method:
            raise AuthenticationDenied("method_changed", "another method than in the first round")
        return found

    def drop_exchange(self, key: ExchangeKey) -> None:
        """Drop an exchange that its client has given up."""
        self._pop(key)

    def _pop(self, key: ExchangeKey) -> StoredExchange[StateT] | None:
        caller, name = key
        exchanges = self._by_caller.get(caller, OrderedDict())
        found = exchanges.pop(name, None)
        if not exchanges:
            self._by_caller.pop(caller, None)
        return found

    def _drop_expired(self) -> None:
        now = trio.current_time()
        for caller, exchanges in list(self._by_caller.items()):
            while exchanges:
                name, oldest = next(iter(exchanges.items()))
                if oldest.expires_at > now:
                    break
                self._pop((caller, name))
