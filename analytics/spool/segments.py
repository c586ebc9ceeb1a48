"""The segment files of a spool: their names, and which are there."""

import os
import re
from pathlib import Path
from typing import NamedTuple

NUMBER_MAX = 10**15

_NAME = re.compile(r"seg-(\d{15})\.spool")


class Segment(NamedTuple):
    """A segment, and how many of its bytes may be read."""

    number: int
    path: str
    size_bytes: int


def segment_path(directory: Path, number: int) -> Path:
    """Where segment `number` is."""
    return directory / f"seg-{number:015d}.spool"


def aside_path(segment: Path) -> Path:
    """Where the torn end of a segment is kept, for somebody to look at."""
    return segment.with_suffix(".torn")


def segment_numbers(directory: Path) -> list[int]:
    """The numbers of the segments that are there, ascending; raises OSError."""
    matches = (_NAME.fullmatch(path.name) for path in directory.iterdir())
    return sorted(int(match.group(1)) for match in matches if match)


def total_bytes(directory: Path) -> int:
    """What all segments, and the torn ends kept beside them, take up; raises OSError."""
    with os.scandir(directory) as entries:
        return sum(_size(entry) for entry in entries if entry.name.startswith("seg-"))


def _size(entry: "os.DirEntry[str]") -> int:
    try:
        return entry.stat().st_size
    except FileNotFoundError:  # consumed in this moment
        return 0
