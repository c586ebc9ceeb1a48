"""Repair of the newest segment after a crash, when the receiver starts.

Only the newest segment can have a torn end: the writer never reopens an old one. Valid records stay, committed or not
(they are made durable first, and readers see them from then on). Bytes after the last valid record were never
acknowledged with success, unless the disk lost them: they are copied to a file beside the segment and truncated. Damage
followed by valid records stays where it is; it is reported here and again by every reader.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from analytics.spool.positions import Position, sync_directory, write_synced
from analytics.spool.records import (
    SEGMENT_HEADER_BYTES,
    Damage,
    Record,
    check_segment_header,
    scan_records,
)
from analytics.spool.segments import torn_copy_path


@dataclass
class RepairReport:
    """Findings of a repair: valid records, damage before the last of them, and a torn end with its copy.

    `lost_committed` is true if the torn end had been committed: then the disk lost acknowledged requests.
    """

    segment: Path
    records: int = 0
    damaged: list[Damage] = field(default_factory=list)
    torn: Damage | None = None
    lost_committed: bool = False
    torn_copy: Path | None = None


def repair_segment(segment: Path, number: int, committed: Position | None) -> RepairReport:
    """Repair the newest segment and make it durable. Idempotent; raises OSError.

    A segment with an invalid header and no valid record is copied as a whole and removed.
    """
    found = RepairReport(segment)
    with segment.open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        end = _scan_segment(found, file, number, size)
        if found.torn is not None:
            found.lost_committed = committed is not None and committed.segment == number and committed.offset > end
            found.torn_copy = torn_copy_path(segment)
            file.seek(end)
            write_synced(found.torn_copy, file.read(size - end))
            file.truncate(end)
        os.fsync(file.fileno())
    if end == 0:
        segment.unlink()
    sync_directory(segment.parent)
    return found


def _scan_segment(found: RepairReport, file: BinaryIO, number: int, size: int) -> int:
    """Find valid, damaged and torn bytes; return the offset where the valid part ends, 0 if there is none."""
    file.seek(0)
    wrong = check_segment_header(file.read(SEGMENT_HEADER_BYTES), number)
    damages = [] if wrong is None else [Damage(0, min(size, SEGMENT_HEADER_BYTES), wrong)]
    end = 0 if wrong is not None else SEGMENT_HEADER_BYTES
    for one in scan_records(file, SEGMENT_HEADER_BYTES, size):
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
