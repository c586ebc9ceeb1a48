"""Dirty hours: what a queue's job has to recompute because rows of these hours were added.

A mark is a file, `_dirty/<queue>/<change>.json`, made with the change that added the rows. A job takes all marks, reads
the tables *after* that, writes what it computed, and clears the marks that it took in the same change. A change that
comes in between has a mark of its own, which stays.
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
class Dirty:
    """Hours to recompute, sorted, and the marks (paths) that ask for it."""

    hours: tuple[datetime, ...]
    marks: tuple[str, ...]


def take(files: Filesystem, queue: str) -> Dirty:
    """The dirty hours of a queue, of its MARKS_MAX first marks; clears nothing."""
    marks = [f"{DIRTY}/{queue}/{name}" for name in files.names(f"{DIRTY}/{queue}") if name[0] != "."][:MARKS_MAX]
    hours: set[datetime] = set()
    for mark in marks:
        hours.update(map(hour_from_text, json.loads(files.read_text(mark) or "[]")))
    return Dirty(tuple(sorted(hours)), tuple(marks))
