"""What a crash may leave at the end of the newest segment, and how it is mended when the receiver starts.

Only the newest segment can have a torn end: the writer never goes back to an old one. Whole records stay, committed or
not (a reader may see them from then on, and they are made durable first). Bytes after the last whole record were never
answered with success, unless the disk lost them: they are put aside beside the segment and cut off. Damage with whole
records after it stays where it is; it is reported here and again by every reader.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

from analytics.spool.marks import Position, sync_directory
from analytics.spool.records import (
    SEGMENT_HEADER_BYTES,
    Damage,
    Readable,
    Record,
    check_segment_header,
    scan,
)
from analytics.spool.segments import aside_path


@dataclass
class Repair:
    """What was found in a segment: whole records, damage before the last of them, and a torn end that was put aside.

    `lost` says whether what is torn had been committed: then the disk lost what a sender believes to be safe.
    """

    segment: Path
    records: int = 0
    damaged: list[Damage] = field(default_factory=list)
    torn: Damage | None = None
    lost: bool = False
    aside: Path | None = None


def repair(segment: Path, number: int, committed: Position | None) -> Repair:
    """Mend the newest segment and make it durable; raises OSError. Doing it twice changes nothing more.

    A segment with no whole record and anything else in it is put aside as a whole.
    """
    found = Repair(segment)
    with segment.open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        end = _survey(found, file, number, size)
        if found.torn is not None:
            found.lost = committed is not None and committed.segment == number and committed.offset > end
            found.aside = aside_path(segment)
            file.seek(end)
            _put_aside(found.aside, file.read(size - end))
            file.truncate(end)
        os.fsync(file.fileno())
    if end == 0:
        segment.unlink()
    sync_directory(segment.parent)
    return found


def _survey(found: Repair, file: Readable, number: int, size: int) -> int:
    """Sort out what is whole, damaged and torn; returns where the whole part ends, 0 if nothing is worth keeping."""
    file.seek(0)
    wrong = check_segment_header(file.read(SEGMENT_HEADER_BYTES), number)
    damages = [] if wrong is None else [Damage(0, min(size, SEGMENT_HEADER_BYTES), wrong)]
    end = 0 if wrong is not None else SEGMENT_HEADER_BYTES
    for one in scan(file, SEGMENT_HEADER_BYTES, size):
        if isinstance(one, Record):
            found.records += 1
            end = one.next_offset
        else:
            damages.append(one)
    found.damaged = [damage for damage in damages if damage.offset < end]
    torn = [damage for damage in damages if damage.offset >= end]
    if torn:
        found.torn = Damage(end, size, torn[0].reason)
    return end


def _put_aside(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
