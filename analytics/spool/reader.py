"""Reading a spool, in any process: only what is committed, which no crash can take away again.

Plain functions over plain tuples, so that Spark can send them to its Python workers.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from analytics.spool.marks import COMMITTED, Position, read_mark
from analytics.spool.records import (
    SEGMENT_HEADER_BYTES,
    Damage,
    Record,
    SpoolError,
    check_segment_header,
    scan,
)
from analytics.spool.segments import NUMBER_MAX, Segment, segment_numbers, segment_path

__all__ = ["Damage", "Position", "Record", "Segment", "SpoolError", "bytes_after", "end_offset", "records", "segments"]

BEGIN = Position(0, 0)


def segments(directory: str | os.PathLike[str]) -> list[Segment]:
    """The segments with something to read, ascending by number; `size_bytes` counts what is committed.

    Raises SpoolError if the mark of what is committed cannot be made out, OSError if the directory cannot be read.
    """
    root = Path(directory)
    end = read_mark(root, COMMITTED)
    if end is None:
        return []
    found = []
    for number in segment_numbers(root):
        path = segment_path(root, number)
        if number > end.segment:
            break
        try:
            size = end.offset if number == end.segment else path.stat().st_size
        except FileNotFoundError:  # consumed in this moment
            continue
        found.append(Segment(number, str(path), size))
    return found


def end_offset(directory: str | os.PathLike[str]) -> Position:
    """The end of what is committed: (segment, offset). (0, 0) for a spool that nobody has written to yet.

    Raises SpoolError if it cannot be made out, OSError if the directory cannot be read.
    """
    return read_mark(Path(directory), COMMITTED) or BEGIN


def bytes_after(directory: str | os.PathLike[str], begin: Position) -> int:
    """How many committed bytes lie behind a position. Raises as `segments`."""
    return sum(
        segment.size_bytes - (min(begin.offset, segment.size_bytes) if segment.number == begin.segment else 0)
        for segment in segments(directory)
        if segment.number >= begin.segment
    )


def records(
    path: str | os.PathLike[str], start: int, end: int, on_damage: Callable[[Damage], None] | None = None
) -> Iterator[Record]:
    """The records of a segment that begin in [start, end); a start of 0 is the segment's first record.

    `end` is a record's end: the segment's `size_bytes`, or a record's `next_offset`. What is damaged is told to
    `on_damage` and stepped over; without `on_damage` it raises SpoolError, as does a file that is no segment.
    """
    segment = Path(path)
    with segment.open("rb") as file:
        wrong = check_segment_header(file.read(SEGMENT_HEADER_BYTES), _number(segment))
        if wrong is not None:
            _report(segment, Damage(0, SEGMENT_HEADER_BYTES, wrong), on_damage)
        for found in scan(file, max(start, SEGMENT_HEADER_BYTES), end):
            if isinstance(found, Record):
                yield found
            else:
                _report(segment, found, on_damage)


def _report(segment: Path, damage: Damage, on_damage: Callable[[Damage], None] | None) -> None:
    if on_damage is None:
        where = f"bytes {damage.offset} to {damage.next_offset}"
        raise SpoolError(f"{segment}: {where}: {damage.reason}; what they held is lost, the rest can be read")
    on_damage(damage)


def _number(segment: Path) -> int:
    digits = segment.stem.removeprefix("seg-")
    return int(digits) if digits.isdecimal() and len(digits) < len(str(NUMBER_MAX)) else -1
