"""What the steps' observations mean: pure functions, so that their own tests need no node."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Usage = Mapping[str, Mapping[str, int]]
"""By principal, what was counted."""

_LOST = re.compile(r"^\[(?P<topic>[^,\]]+), (?P<name>[^,\]]*)\] Schedule reconnection")
_MADE = re.compile(r"^\[(?P<topic>[^,\]]+), (?P<name>[^,\]]*)\] Created producer on broker")


FIRST_STEP = "install"


def chosen(names: Sequence[str], steps: Sequence[str]) -> list[str]:
    """Return the steps of these names in the steps' order, the first step always; all of them if none is named."""
    unknown = sorted(set(names) - set(steps))
    if unknown:
        raise ValueError(f"no such step: {', '.join(unknown)}; there are {', '.join(steps)}")
    return [step for step in steps if not names or step in names or step == FIRST_STEP]


@dataclass
class RelayEnds:
    """When relays ended, by what the C++ client logs of its producers; each producer here has a relay of its own.

    A producer that tries several times to come back has lost its relay once.
    """

    moments_s: list[float] = field(default_factory=list)
    _away: set[str] = field(default_factory=set)

    def receive_line(self, line: str, now_s: float) -> None:
        """Take one line of the client's log, and the Unix time at which it was written."""
        if match := _MADE.match(line):
            self._away.discard(match["topic"])
        elif (match := _LOST.match(line)) and match["topic"] not in self._away:
            self._away.add(match["topic"])
            self.moments_s.append(now_s)

    @property
    def away(self) -> int:
        """How many producers have no relay now."""
        return len(self._away)


def most_in_one_second(moments_s: Iterable[float]) -> int:
    """Return the largest number of moments that lie within any one second, wherever it begins."""
    ordered, most, first = sorted(moments_s), 0, 0
    for last, moment_s in enumerate(ordered):
        while moment_s - ordered[first] >= 1.0:
            first += 1
        most = max(most, last - first + 1)
    return most


def by_second(moments_s: Iterable[float]) -> dict[int, int]:
    """Return how many moments lie in each whole second, in the order of time."""
    return dict(sorted(Counter(math.floor(moment_s) for moment_s in moments_s).items()))


def spread_fault(moments_s: Iterable[float], relays: int, share: float = 0.1) -> str:
    """Return what is wrong if more than this share of the relays ended within one second; empty if nothing is."""
    moments = list(moments_s)
    most, allowed = most_in_one_second(moments), math.floor(relays * share)
    return f"{most} of {relays} relays ended within one second, {allowed} may" if most > allowed else ""


def fleet_faults(result: Mapping[str, int | bool]) -> list[str]:
    """Return what is wrong with a fleet's result: messages lost, out of order, or refused."""
    faults = []
    if not result["sent"]:
        faults.append("nothing was sent")
    if result["missing"]:
        faults.append(f"{result['missing']} of {result['sent']} messages are missing")
    if result["disordered"]:
        faults.append(f"{result['disordered']} clients saw messages out of order")
    if result["send_failures"]:
        faults.append(f"{result['send_failures']} sends failed")
    return faults


def usage_differences(billed: Usage, counted: Usage) -> list[str]:
    """Return where two bills differ, principal by principal and count by count."""
    names = [(principal, what) for principal in {*billed, *counted} for what in _whats(principal, billed, counted)]
    pairs = [(*name, _count(billed, *name), _count(counted, *name)) for name in sorted(names)]
    return [
        f"{principal} {what}: the table has {mine}, the proxy {theirs}"
        for principal, what, mine, theirs in pairs
        if mine != theirs
    ]


def _whats(principal: str, *bills: Usage) -> set[str]:
    return {what for bill in bills for what in bill.get(principal, {})}


def _count(bill: Usage, principal: str, what: str) -> int | None:
    return bill.get(principal, {}).get(what)


def added(parts: Iterable[Usage]) -> dict[str, dict[str, int]]:
    """Return the sum of several bills: one for each pod."""
    total: dict[str, dict[str, int]] = {}
    for part in parts:
        for principal, counts in part.items():
            mine = total.setdefault(principal, {})
            for what, count in counts.items():
                mine[what] = mine.get(what, 0) + count
    return total
