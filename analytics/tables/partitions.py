"""Partitions: the values of a table's columns width, date and hour, in which its files lie. All times are UTC."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime, time, timedelta
from typing import Final, NamedTuple
from urllib.parse import unquote

from analytics.tables.schemas import View

_NULL: Final = "__HIVE_DEFAULT_PARTITION__"


class Partition(NamedTuple):
    """A partition; None for a column that the table has not, or that is null."""

    width: str | None = None
    date: date | None = None
    hour: int | None = None

    @property
    def first_hour(self) -> datetime:
        """The partition's first hour. Raises ValueError for a partition without a date."""
        if self.date is None:
            raise ValueError(f"{self} has no date")
        return datetime.combine(self.date, time(self.hour or 0), UTC)


def moment_of(unix_ms: int) -> datetime:
    """Return the moment of milliseconds since 1970."""
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=unix_ms)


def hour_of(moment: datetime) -> datetime:
    """Return the start of the hour that holds a moment. Raises ValueError for a moment without a time zone."""
    if moment.tzinfo is None:
        raise ValueError(f"{moment} has no time zone")
    return moment.astimezone(UTC).replace(minute=0, second=0, microsecond=0)


def partition_of(view: View, hour: datetime) -> Partition:
    """Return the partition of a view that holds this hour."""
    hour = hour_of(hour)
    return Partition(view.width, hour.date() if view.by else None, hour.hour if view.by == "hour" else None)


def partitions_of(view: View, hours: Iterable[datetime]) -> set[Partition]:
    """Return the partitions that hold these hours."""
    return {partition_of(view, hour) for hour in hours}


def values_in_path(path: str) -> dict[str, str | None]:
    """Return the partition's values that a path names (`…/date=2026-11-21/hour=7/…`), as Delta's log has them."""
    pairs = (name.partition("=") for name in path.split("/")[:-1] if "=" in name)
    return {column: None if value == _NULL else unquote(value) for column, _, value in pairs}


def partition_from(values: Mapping[str, str | None]) -> Partition:
    """Return the partition with these values, as Delta's log has them."""
    day, hour = values.get("date"), values.get("hour")
    return Partition(values.get("width"), date.fromisoformat(day) if day else None, int(hour) if hour else None)
