"""The segment files of a spool: their names, numbers and sizes."""

import os
import re
from pathlib import Path
from typing import NamedTuple

NUMBER_MAX = 10**15

_NAME = re.compile(r"seg-(\d{15})\.spool")


class Segment(NamedTuple):
    """A segment and the number of its bytes that may be read."""

    number: int
    path: str
    size_bytes: int


def segment_path(directory: Path, number: int) -> Path:
    """Return the path of segment `number`."""
    return directory / f"seg-{number:015d}.spool"


def torn_copy_path(segment: Path) -> Path:
    """Return the path of the copy of a segment's torn end, kept for inspection."""
    return segment.with_suffix(".torn")


def list_segment_numbers(directory: Path) -> list[int]:
    """Return the numbers of the existing segments, ascending. Raises OSError."""
    matches = (_NAME.fullmatch(path.name) for path in directory.iterdir())
    return sorted(int(match.group(1)) for match in matches if match)


def total_segment_bytes(directory: Path) -> int:
    """Return the size of all segments and of the copies of torn ends. Raises OSError."""
    with os.scandir(directory) as entries:
        return sum(_size(entry) for entry in entries if entry.name.startswith("seg-"))


def _size(entry: "os.DirEntry[str]") -> int:
    try:
        return entry.stat().st_size
    except FileNotFoundError:  # consumed since it was listed
        return 0
