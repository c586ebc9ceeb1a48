"""Whether brokers check clients' own credentials (``authenticateOriginalAuthData``), by the logins at them.

Forwarders rely on it: where brokers check, these ask clients for fresh credentials, and otherwise the proxy does. So
what is not certain is unknown.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import trio

from proto.rpc_pb2 import OriginalData

UNKNOWN = OriginalData.ORIGINAL_DATA_UNKNOWN
IGNORED = OriginalData.ORIGINAL_DATA_IGNORED
CHECKED = OriginalData.ORIGINAL_DATA_CHECKED
SEEMS_CHECKED = OriginalData.ORIGINAL_DATA_SEEMS_CHECKED

RETRY_INTERVAL_S = 15.0
"""After a login that was refused, or came to nothing."""

ORIGINAL_DATA_INTERVAL_S = 600.0
"""Longest time until it is found out again whether a broker checks clients' own credentials."""

AGREEING_MIN = 3
"""Logins in succession with the same result, after results that differed, until it counts whether a broker checks
clients' own credentials: behind one address there may be several brokers, as during a rolling restart. So many, too,
until sessions rely on it that the broker checks.
"""


@dataclass(slots=True)
class OriginalDataStatus:
    """Whether one broker checks clients' own credentials, by the logins so far. Times are Trio's."""

    last: OriginalData = UNKNOWN
    """The last result."""
    agreeing: int = 0
    """Results in succession that are the same; the very first counts as enough."""
    repeated: int = 0
    """The same, but the very first counts once."""
    found_at: float = -math.inf
    due_at: float = -math.inf
    down_at: float = -math.inf
    """When the broker was last seen down; it may come back with another configuration."""
    logged: OriginalData = UNKNOWN

    @property
    def is_current(self) -> bool:
        """Return True if the broker was not seen down since the last result."""
        return self.found_at >= self.down_at

    @property
    def verdict(self) -> OriginalData:
        """The result that counts for what is told; unknown where the last ones differ."""
        return self.last if self.agreeing >= AGREEING_MIN else UNKNOWN

    @property
    def graded(self) -> OriginalData:
        """The verdict; one on which sessions may not rely as such: one failed authentication may have another reason
        (no keys, say).
        """
        return SEEMS_CHECKED if self.verdict == CHECKED and self.repeated < AGREEING_MIN else self.verdict

    def record(self, found: OriginalData, interval_s: float) -> None:
        """Record the result of a login that the broker accepted."""
        if found == self.last:
            self.agreeing += 1
            self.repeated += 1
        else:
            self.agreeing = AGREEING_MIN if self.last == UNKNOWN else 1
            self.repeated = 1
        self.last = found
        self.found_at = trio.current_time()
        agreeing = self.repeated if found == CHECKED else self.agreeing
        is_settled = agreeing >= AGREEING_MIN or found == UNKNOWN
        self.due_at = self.found_at + (max(ORIGINAL_DATA_INTERVAL_S, interval_s) if is_settled else RETRY_INTERVAL_S)


def agreed(verdicts: Iterable[OriginalData]) -> OriginalData:
    """Return the verdict that all of these are; unknown where they differ or there is none."""
    distinct = set(verdicts)
    return distinct.pop() if len(distinct) == 1 else UNKNOWN


def verdict_name(verdict: OriginalData) -> str:
    """Return a verdict as /status has it."""
    return OriginalData.Name(verdict).removeprefix("ORIGINAL_DATA_").lower()
