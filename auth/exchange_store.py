"""Store of authentication exchanges between their rounds: bounded in time, number and rounds."""

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
    """Exchanges by key: the caller's process, and its name for the exchange.

    A state is removed for each round and stored again for the next, so no two rounds of one exchange run at the same
    time, and an exchange that was finished or denied is gone.
    """

    def __init__(self, *, lifetime_s: float, rounds_max: int = ROUNDS_MAX) -> None:
        self._lifetime_s = lifetime_s
        self._rounds_max = rounds_max
        self._exchanges: OrderedDict[ExchangeKey, StoredExchange[StateT]] = OrderedDict()

    def __len__(self) -> int:
        self._drop_expired()
        return len(self._exchanges)

    def store_exchange(self, key: ExchangeKey, method: str, state: StateT, *, number: int) -> None:
        """Store a state after a round. Raises AuthenticationDenied: too many rounds, or exchanges."""
        self._drop_expired()
        if number >= self._rounds_max:
            raise AuthenticationDenied("too_many_rounds", f"not finished after {self._rounds_max} rounds")
        if len(self._exchanges) >= EXCHANGES_MAX:
            raise AuthenticationDenied(OVERLOADED, "too many authentications under way")
        self._exchanges.pop(key, None)  # so that the order of entries stays that of their expiry
        self._exchanges[key] = StoredExchange(method, state, number, trio.current_time() + self._lifetime_s)

    def pop_exchange(self, key: ExchangeKey, method: str) -> StoredExchange[StateT]:
        """Remove and return an exchange; raise AuthenticationDenied where there is none for this method."""
        self._drop_expired()
        found = self._exchanges.pop(key, None)
        if found is None:
            raise AuthenticationDenied(LOST_EXCHANGE, "a round of an exchange that is not under way")
        if found.method != method:
            raise AuthenticationDenied("method_changed", "another method than in the first round")
        return found

    def drop_exchange(self, key: ExchangeKey) -> None:
        """Drop an exchange that its client has given up."""
        self._exchanges.pop(key, None)

    def evict_oldest_if_full(self) -> None:
        """Drop the oldest exchange where there is no room for another."""
        if len(self._exchanges) >= EXCHANGES_MAX:
            self._exchanges.popitem(last=False)

    def _drop_expired(self) -> None:
        now = trio.current_time()
        while self._exchanges:
            key, oldest = next(iter(self._exchanges.items()))
            if oldest.expires_at > now:
                return
            del self._exchanges[key]
