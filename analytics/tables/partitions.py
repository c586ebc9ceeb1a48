"""Names of partitions: `date=2026-11-21/hour=7` below a table, for an hour; `date=2026-11-21`, for a day. All UTC."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, date, datetime

from analytics.tables.schemas import PARTITIONS

_DAY = re.compile(r"date=(\d{4})-(\d\d)-(\d\d)")
HOUR_FORMAT = "%Y-%m-%dT%H"


def hour_of(moment: datetime) -> datetime:
    """Return the start of the hour that holds a moment. Raises ValueError for a moment without a time zone."""
    if moment.tzinfo is None:
        raise ValueError(f"{moment} has no time zone")
    return moment.astimezone(UTC).replace(minute=0, second=0, microsecond=0)


def hour_text(hour: datetime) -> str:
    """Return an hour as `2026-11-21T07`, the form in marks and messages."""
    return hour_of(hour).strftime(HOUR_FORMAT)


def hour_from_text(text: str) -> datetime:
    """Parse the form of `hour_text`. Raises ValueError."""
    return datetime.strptime(text, HOUR_FORMAT).replace(tzinfo=UTC)


def partition_of(table: str, hour: datetime) -> str:
    """Return the partition of `table` with this hour, relative to the table; "" for a table without partitions."""
    hour = hour_of(hour)
    names = {"date": f"date={hour:%Y-%m-%d}", "hour": f"hour={hour.hour}"}
    return "/".join(names[column] for column in PARTITIONS[table])


def partitions_of(table: str, hours: Iterable[datetime]) -> list[str]:
    """Return the partitions that hold these hours, each once, sorted."""
    return sorted({partition_of(table, hour) for hour in hours})


def day_of(partition: str) -> date | None:
    """Return the day of a partition's first directory; None for other names."""
    match = _DAY.match(partition)
    return date(*map(int, match.groups())) if match else None


def hour_of_partition(partition: str) -> datetime:
    """Return the first hour of a partition. Raises ValueError for other names."""
    day, _, hour = partition.partition("/")
    if (parsed := day_of(day)) is None or (hour and not re.fullmatch(r"hour=\d{1,2}", hour)):
        raise ValueError(f"{partition!r} is not a partition")
    return datetime(parsed.year, parsed.month, parsed.day, int(hour.removeprefix("hour=") or 0), tzinfo=UTC)
