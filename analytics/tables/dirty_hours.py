"""Dirty hours: the hours that a queue's job has to recompute because rows were added to them.

A mark is a file, `_dirty/<queue>/<change>.json`, created by the change that added the rows. A job reads all marks, then
the tables, writes its results, and clears the marks that it read in the same change. A change in between has a mark of
its own, which stays.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime

from analytics.tables.commits import DIRTY
from analytics.tables.filesystem import Filesystem
from analytics.tables.partitions import hour_from_text

MARKS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class DirtyHours:
    """Hours to recompute, sorted, and the marks (paths) that name them."""

    hours: tuple[datetime, ...]
    marks: tuple[str, ...]


def read_dirty_hours(files: Filesystem, queue: str) -> DirtyHours:
    """Return the dirty hours of a queue, from its first MARKS_MAX marks. Clears nothing."""
    marks = [f"{DIRTY}/{queue}/{name}" for name in files.names(f"{DIRTY}/{queue}") if name[0] != "."][:MARKS_MAX]
    hours: set[datetime] = set()
    for mark in marks:
        hours.update(map(hour_from_text, json.loads(files.read_text(mark) or "[]")))
    return DirtyHours(tuple(sorted(hours)), tuple(marks))
