"""Removal of consumed segments. Called by the job that reads the spool, once its own work is durable."""

import contextlib
import os
from pathlib import Path

from analytics.spool.positions import COMMITTED, CONSUMED, Position, read_position, sync_directory, write_position
from analytics.spool.reader import BEGIN
from analytics.spool.records import SpoolError
from analytics.spool.segments import list_segment_numbers, segment_path, torn_copy_path


def read_consumed_position(directory: str | os.PathLike[str]) -> Position:
    """Return the consumed end; (0, 0) if nothing was consumed. Raises SpoolError if its file is invalid."""
    return read_position(Path(directory), CONSUMED) or BEGIN


def record_consumed(directory: str | os.PathLike[str], position: Position) -> list[int]:
    """Record that everything before `position` is stored elsewhere, and remove the segments before it.

    Returns the numbers of the removed segments. A position before the recorded one changes nothing. Raises SpoolError
    if it lies beyond the committed end (it must be of another spool), and OSError. The segment being written stays.
    """
    root = Path(directory)
    end = read_position(root, COMMITTED) or BEGIN
    if position > end:
        raise SpoolError(f"{root}: {position} cannot have been consumed, since only {end} is committed")
    if position > read_consumed_position(root):
        write_position(root, CONSUMED, position)
    return _remove_segments_before(root, read_consumed_position(root).segment)


def count_unconsumed_segments(directory: str | os.PathLike[str]) -> int:
    """Return how many segments were not consumed to their end. Raises SpoolError and OSError."""
    root = Path(directory)
    consumed = read_consumed_position(root).segment
    return sum(number >= consumed for number in list_segment_numbers(root))


def _remove_segments_before(directory: Path, number: int) -> list[int]:
    removed = [one for one in list_segment_numbers(directory) if one < number]
    for one in removed:
        path = segment_path(directory, one)
        for file in (torn_copy_path(path), path):
            with contextlib.suppress(FileNotFoundError):
                file.unlink()
    if removed:
        sync_directory(directory)
    return removed
