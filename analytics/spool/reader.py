"""Reader of a spool, for any process: returns only committed records, which no crash can lose.

Plain functions over plain tuples, so that Spark can send them to its Python workers.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from analytics.spool.positions import COMMITTED, Position, read_position
from analytics.spool.records import (
    SEGMENT_HEADER_BYTES,
    Damage,
    Record,
    SpoolError,
    check_segment_header,
    scan_records,
)
from analytics.spool.segments import NUMBER_MAX, Segment, list_segment_numbers, segment_path

BEGIN = Position(0, 0)


def list_segments(directory: str | os.PathLike[str]) -> list[Segment]:
    """Return the segments with committed records, ascending by number; `size_bytes` counts the committed bytes.

    Raises SpoolError if the file of the committed position is invalid, OSError if the directory cannot be read.
    """
    root, end, found = Path(directory), committed_end(directory), []
    for number in list_segment_numbers(root):
        path = segment_path(root, number)
        if number > end.segment:
            break
        try:
            size = end.offset if number == end.segment else path.stat().st_size
        except FileNotFoundError:  # consumed since it was listed
            continue
        found.append(Segment(number, str(path), size))
    return found


def committed_end(directory: str | os.PathLike[str]) -> Position:
    """Return the committed end; (0, 0) for an empty spool.

    Raises SpoolError if its file is invalid, OSError if the directory cannot be read.
    """
    return read_position(Path(directory), COMMITTED) or BEGIN


def count_bytes_after(directory: str | os.PathLike[str], begin: Position) -> int:
    """Return how many committed bytes follow a position. Raises as `list_segments`."""
    return sum(
        segment.size_bytes - (min(begin.offset, segment.size_bytes) if segment.number == begin.segment else 0)
        for segment in list_segments(directory)
        if segment.number >= begin.segment
    )


def read_records(
    path: str | os.PathLike[str], start: int, end: int, on_damage: Callable[[Damage], None] | None = None
) -> Iterator[Record]:
    """Yield the records of a segment that begin in [start, end); a start of 0 is the segment's first record.

    `end` is a record's end: the segment's `size_bytes`, or a record's `next_offset`. Damaged bytes are passed to
    `on_damage` and skipped; without `on_damage` they raise SpoolError, as does a file that is no segment.
    """
    segment = Path(path)
    with segment.open("rb") as file:
        wrong = check_segment_header(file.read(SEGMENT_HEADER_BYTES), _segment_number(segment))
        if wrong is not None:
            _report_damage(segment, Damage(0, SEGMENT_HEADER_BYTES, wrong), on_damage)
        for found in scan_records(file, max(start, SEGMENT_HEADER_BYTES), end):
            if isinstance(found, Record):
                yield found
            else:
                _report_damage(segment, found, on_damage)


def _report_damage(segment: Path, damage: Damage, on_damage: Callable[[Damage], None] | None) -> None:
    if on_damage is None:
        where = f"bytes {damage.offset} to {damage.next_offset}"
        raise SpoolError(f"{segment}: {where}: {damage.reason}; what they held is lost, the rest can be read")
    on_damage(damage)


def _segment_number(segment: Path) -> int:
    digits = segment.stem.removeprefix("seg-")
    return int(digits) if digits.isdecimal() and len(digits) < len(str(NUMBER_MAX)) else -1
