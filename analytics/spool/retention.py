"""Removal of consumed segments. Called by the job that reads the spool, once its own work is durable."""

import os
from pathlib import Path

from analytics.spool.positions import Position, sync_directory
from analytics.spool.reader import committed_end
from analytics.spool.records import SpoolError
from analytics.spool.segments import list_segment_numbers, segment_path, torn_copy_path


def remove_consumed(directory: str | os.PathLike[str], position: Position) -> list[int]:
    """Remove the segments before `position`, up to which everything is stored elsewhere; return their numbers.

    Raises SpoolError if it lies beyond the committed end (it must be of another spool), and OSError. The segment being
    written stays.
    """
    root = Path(directory)
    if position > (end := committed_end(root)):
        raise SpoolError(f"{root}: {position} cannot have been consumed, since only {end} is committed")
    removed = [number for number in list_segment_numbers(root) if number < position.segment]
    for number in removed:
        path = segment_path(root, number)
        torn_copy_path(path).unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    if removed:
        sync_directory(root)
    return removed
