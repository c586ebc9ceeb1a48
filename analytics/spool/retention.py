"""Giving back the room of what was consumed. Called by the job that reads the spool, once its own work is safe."""

import contextlib
import os
from pathlib import Path

from analytics.spool.marks import COMMITTED, CONSUMED, Position, read_mark, sync_directory, write_mark
from analytics.spool.reader import BEGIN
from analytics.spool.records import SpoolError
from analytics.spool.segments import aside_path, segment_numbers, segment_path


def consumed_position(directory: str | os.PathLike[str]) -> Position:
    """Up to where the spool was consumed; (0, 0) if nothing was. Raises SpoolError if it cannot be made out."""
    return read_mark(Path(directory), CONSUMED) or BEGIN


def record_consumed(directory: str | os.PathLike[str], position: Position) -> list[int]:
    """Record that everything before `position` is safe elsewhere, and remove the segments that lie before it.

    Returns the numbers of those removed. A position before the one recorded changes nothing. Raises SpoolError if it
    is behind what is committed (it must be of another spool), and OSError. The segment being written always stays.
    """
    root = Path(directory)
    end = read_mark(root, COMMITTED) or BEGIN
    if position > end:
        raise SpoolError(f"{root}: {position} cannot have been consumed, since only {end} is committed")
    if position > consumed_position(root):
        write_mark(root, CONSUMED, position)
    return _remove_before(root, consumed_position(root).segment)


def unconsumed_segments(directory: str | os.PathLike[str]) -> int:
    """How many segments are there that were not consumed to their end; raises SpoolError and OSError."""
    root = Path(directory)
    consumed = consumed_position(root).segment
    return sum(number >= consumed for number in segment_numbers(root))


def _remove_before(directory: Path, number: int) -> list[int]:
    removed = [one for one in segment_numbers(directory) if one < number]
    for one in removed:
        path = segment_path(directory, one)
        for file in (aside_path(path), path):
            with contextlib.suppress(FileNotFoundError):
                file.unlink()
    if removed:
        sync_directory(directory)
    return removed
