"""What is unusual in the daily use of principals: days far above or below their own, new ones and gone ones.

A day is compared with the principal's days before it, by robust statistics: the median of the logarithms, and their
median absolute deviation (MAD), which a single earlier outlier moves little. Work days are compared with work days and
weekends with weekends, as soon as there are enough of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from itertools import pairwise
from math import exp, log
from statistics import median
from typing import Final

HISTORY_DAYS: Final = 28
"""Days before a day that it is compared with."""
_HISTORY_DAYS_MIN: Final = 7
_SAME_KIND_MIN: Final = 4
_FLOOR_BYTES: Final = float(1 << 20)
"""Less than this a day counts as this: a factor between two small numbers is no news."""
_MAD_TO_SIGMA: Final = 1.4826
_SPREADS: Final = 3.5
_FACTOR_MIN: Final = 3.5
"""A principal with the same use each day is not unusual at some percent more."""
_GONE_DAYS_MIN: Final = 2
_SATURDAY: Final = 5


@dataclass(frozen=True, slots=True)
class Finding:
    """What is unusual of a principal from `first` to `last`: `kind` is `above`, `below`, `new` or `gone`.

    `used` and `usual`: bytes of the most unusual day, and of a usual one (the median; 0 of a new principal).
    """

    principal: str
    kind: str
    first: date
    last: date
    used: int
    usual: int


def find_unusual(days: Sequence[date], use: Mapping[str, Mapping[date, int]], since: date) -> list[Finding]:
    """Return the findings from `since` on, by their day.

    `days`: in order, the days of which the tables have (nearly) all hours: others are no day to compare with; `use`:
    the bytes of each principal and day, where an absent day is no use.
    """
    found = [finding for name in use for finding in _of_one(name, days, use[name], since)]
    return sorted(found, key=lambda one: (one.first, one.principal, one.kind))


def _of_one(name: str, days: Sequence[date], use: Mapping[date, int], since: date) -> list[Finding]:
    used = [day for day in days if use.get(day, 0)]
    if not used:
        return []
    found: list[Finding] = []
    begun = used[0]
    if begun >= since and days.index(begun) >= _HISTORY_DAYS_MIN and use[begun] >= _FLOOR_BYTES:
        found.append(Finding(name, "new", begun, begun, use[begun], 0))
    last = _last_day_before_gone(days, used)
    for place, day in enumerate(days):
        if day < since or day > last:
            continue
        history = [past for past in days[:place] if begun <= past and past >= day - timedelta(days=HISTORY_DAYS)]
        if kind := _compare(day, history, use):
            _add(found, Finding(name, kind[0], day, day, use.get(day, 0), round(kind[1])), days)
    if last < days[-1] and days[-1] >= since:
        first_gone = days[days.index(last) + 1]
        usual = median(use.get(day, 0) for day in used[-HISTORY_DAYS:])
        if first_gone >= since and usual >= _FLOOR_BYTES:
            found.append(Finding(name, "gone", first_gone, days[-1], 0, round(usual)))
    return found


def _compare(day: date, history: Sequence[date], use: Mapping[date, int]) -> tuple[str, float] | None:
    """Return the kind of an unusual day, and the usual bytes; None if it is usual, or nothing to compare with.

    The usual is that of days of the same kind; the spread that of all days around the usual of their kind.
    """
    if use.get(day, 0) and 2 * sum(use.get(past, 0) == 0 for past in history) > len(history):  # idle days are usual
        history = [past for past in history if use.get(past, 0)]
    kinds = [[_log(use, past) for past in history if _is_weekend(past) is weekend] for weekend in (False, True)]
    alike = kinds[_is_weekend(day)]
    if len(history) < _HISTORY_DAYS_MIN or len(alike) < _SAME_KIND_MIN:
        return None
    middle = median(alike)
    rests = [abs(one - median(kind)) for kind in kinds if len(kind) >= _SAME_KIND_MIN for one in kind]
    spread = _MAD_TO_SIGMA * median(rests)
    distance = _log(use, day) - middle
    if abs(distance) < max(_SPREADS * spread, log(_FACTOR_MIN)):
        return None
    return ("above" if distance > 0 else "below"), exp(middle)


def _log(use: Mapping[date, int], day: date) -> float:
    return log(max(use.get(day, 0), _FLOOR_BYTES))


def _add(found: list[Finding], one: Finding, days: Sequence[date]) -> None:
    """Add a day's finding; days of one kind in a row are one."""
    before = found[-1] if found else None
    if before is None or before.kind != one.kind or days[days.index(before.last) + 1] != one.first:
        found.append(one)
        return
    is_further = (one.used > before.used) == (one.kind == "above")
    worst = one if is_further else before
    found[-1] = Finding(one.principal, one.kind, before.first, one.last, worst.used, worst.usual)


def _last_day_before_gone(days: Sequence[date], used: Sequence[date]) -> date:
    """Return the last used day if the principal is gone since: idle for longer than ever before; else the last day."""
    places = [days.index(day) for day in used]
    longest = max((later - earlier - 1 for earlier, later in pairwise(places)), default=0)
    idle = len(days) - 1 - places[-1]
    return used[-1] if idle >= max(_GONE_DAYS_MIN, longest + 1) and len(used) >= _HISTORY_DAYS_MIN else days[-1]


def _is_weekend(day: date) -> bool:
    return day.weekday() >= _SATURDAY
