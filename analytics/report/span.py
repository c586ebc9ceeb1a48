"""The period of a report and its resolution: a point a minute, an hour or a day.

The finest table with at most POINTS_MAX points (or the one by day) is read; if it has no rows of the period (it expires
first), the next coarser one. Windows are whole, so no rate at either end is computed from half a window.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

POINTS_MAX: Final = 1500
YEARS_MAX: Final = 10
_UNITS: Final = {"m": timedelta(minutes=1), "h": timedelta(hours=1), "d": timedelta(days=1)}


class BadSpan(ValueError):
    """An invalid period; the text says why."""


@dataclass(frozen=True, slots=True)
class Resolution:
    """Resolution of tables: `suffix` of their names, width of their windows, and a window's `noun`."""

    suffix: str
    width_s: int
    noun: str

    @property
    def each(self) -> str:
        """The noun with its article: `a minute`, `an hour`."""
        return f"an {self.noun}" if self.noun == "hour" else f"a {self.noun}"


RESOLUTIONS: Final = (Resolution("1m", 60, "minute"), Resolution("1h", 3600, "hour"), Resolution("1d", 86_400, "day"))


@dataclass(frozen=True, slots=True)
class Span:
    """Period of whole windows from `start` to before `end` (UTC)."""

    start: datetime
    end: datetime
    resolution: Resolution

    @property
    def windows_ms(self) -> range:
        """The start of each window, Unix milliseconds."""
        start, end = (int(moment.timestamp()) * 1000 for moment in (self.start, self.end))
        return range(start, end, self.resolution.width_s * 1000)


def fitted(span: Span, windows: set[int]) -> Span:
    """Return the part of the span from the first of these windows to the last; the span itself without any."""
    inside = [at for at in windows if at in span.windows_ms]
    if not inside:
        return span
    start, last = (datetime.fromtimestamp(at // 1000, UTC) for at in (min(inside), max(inside)))
    return Span(start, last + timedelta(seconds=span.resolution.width_s), span.resolution)


def parse_last(text: str) -> timedelta:
    """Parse `90m`, `24h` or `30d`. Raises BadSpan."""
    match = re.fullmatch(r"(\d{1,6})([mhd])", text.strip())
    if match is None or not int(match[1]):
        raise BadSpan(f"{text!r} is no length of time: say 90m, 24h or 30d")
    return int(match[1]) * _UNITS[match[2]]


def candidates(start: datetime, end: datetime, now: datetime) -> list[Span]:
    """Return the span in each resolution that is coarse enough, finest first, without windows that end after `now`.

    Raises BadSpan.
    """
    if start >= end:
        raise BadSpan(f"the time must begin before it ends: {start:%Y-%m-%d %H:%M} is not before {end:%Y-%m-%d %H:%M}")
    if end - start > timedelta(days=366 * YEARS_MAX):
        raise BadSpan(f"a report covers {YEARS_MAX} years at most")
    spans = [_whole(start, end, now, resolution) for resolution in RESOLUTIONS]
    fitting = [span for span in spans if 0 < len(span.windows_ms) <= POINTS_MAX or span is spans[-1]]
    if not any(span.windows_ms for span in fitting):
        raise BadSpan("no whole minute of that time has ended yet")
    return [span for span in fitting if span.windows_ms]


def _whole(start: datetime, end: datetime, now: datetime, resolution: Resolution) -> Span:
    width_s = resolution.width_s
    first = int(start.timestamp()) // width_s * width_s
    last = min(-(-int(end.timestamp()) // width_s), int(now.timestamp()) // width_s) * width_s
    return Span(datetime.fromtimestamp(first, UTC), datetime.fromtimestamp(max(first, last), UTC), resolution)
