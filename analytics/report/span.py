"""The period of a report: whole hours, or, if it is long or its hours have expired, whole days."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from analytics.errors import AnalyticsError

HOURS_MAX: Final = 1500
YEARS_MAX: Final = 10


class BadSpan(AnalyticsError, ValueError):
    """An invalid period; the text says why."""


@dataclass(frozen=True, slots=True)
class Resolution:
    """A window's `noun` and `width`, and the views of the tables that have such windows."""

    noun: str
    width: timedelta
    rollup: str
    usage: str


RESOLUTIONS: Final = (
    Resolution("hour", timedelta(hours=1), "rollup_1h", "usage_hourly"),
    Resolution("day", timedelta(days=1), "rollup_1d", "usage_daily"),
)


@dataclass(frozen=True, slots=True)
class Span:
    """Period of whole windows from `start` to before `end` (UTC)."""

    start: datetime
    end: datetime
    resolution: Resolution

    @property
    def windows(self) -> int:
        """The number of windows."""
        return (self.end - self.start) // self.resolution.width

    @property
    def before(self) -> Span:
        """The span of the same length that ends where this one starts."""
        return Span(self.start - (self.end - self.start), self.start, self.resolution)

    @property
    def with_before(self) -> Span:
        """The span and the one before, as one."""
        return Span(self.before.start, self.end, self.resolution)


def parse_last(text: str) -> timedelta:
    """Parse `24h` or `30d`. Raises BadSpan."""
    match = re.fullmatch(r"(\d{1,6})([hd])", text.strip())
    if match is None or not int(match[1]):
        raise BadSpan(f"{text!r} is no length of time: say 24h or 30d")
    return int(match[1]) * (timedelta(hours=1) if match[2] == "h" else timedelta(days=1))


def candidates(start: datetime, end: datetime, now: datetime) -> list[Span]:
    """Return the span in hours, unless it has too many, then in days. Raises BadSpan.

    Both ends are rounded up, so the length stays and the window at `now` is included, which has not ended yet.
    """
    if start >= end:
        raise BadSpan(f"the time must begin before it ends: {start:%Y-%m-%d %H:%M} is not before {end:%Y-%m-%d %H:%M}")
    if end - start > timedelta(days=366 * YEARS_MAX):
        raise BadSpan(f"a report covers {YEARS_MAX} years at most")
    hours, days = (
        Span(_rounded_up(start, one.width), _rounded_up(min(end, now), one.width), one) for one in RESOLUTIONS
    )
    if hours.windows <= 0:
        raise BadSpan("no hour ends in that time, or it is still to come")
    return [span for span in (hours, days) if span.windows > 0 and (span is days or span.windows <= HOURS_MAX)]


def _rounded_up(moment: datetime, width: timedelta) -> datetime:
    width_s = int(width.total_seconds())
    return datetime.fromtimestamp(-(-moment.timestamp() // width_s) * width_s, UTC)
