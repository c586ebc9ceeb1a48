"""The only writer of a spool: appends groups of records, one fdatasync for each group. It blocks: call it in a thread.

When `append_records` returns, the records are on the disk and visible to readers. When it raises, they are neither: the
writer truncates them before it writes anything else, and continues in a new segment, since after a failed sync the page
cache's content is unknown. It never appends to a segment of an earlier writer.
"""

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from analytics.spool.positions import COMMITTED, Position, PositionFile, read_position, sync_directory
from analytics.spool.records import SEGMENT_HEADER_BYTES, SpoolError, pack_segment_header
from analytics.spool.repair import RepairReport, repair_segment
from analytics.spool.segments import NUMBER_MAX, list_segment_numbers, segment_path, total_segment_bytes

LOCK = "lock"

_FULL = {errno.ENOSPC, errno.EDQUOT}


class SpoolFullError(SpoolError):
    """The disk or the spool is full; the text says which."""


@dataclass(frozen=True)
class SpoolLimits:
    """Size at which the next segment is started, size of all segments, and bytes that must stay free on the disk."""

    segment_bytes_max: int
    total_bytes_max: int
    free_bytes_min: int


class Disk:
    """The writer's system calls; tests replace them with failing ones. All raise OSError."""

    def write(self, file: int, data: bytes) -> None:
        """Write all of it at the file's end."""
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]

    def sync(self, file: int) -> None:
        """Make the file's data durable."""
        os.fdatasync(file)

    def free_bytes(self, directory: Path) -> int:
        """Return the bytes that this user may still write to the directory's file system."""
        found = os.statvfs(directory)
        return found.f_bavail * found.f_frsize


class SpoolWriter:
    """Writer of a spool; a file lock allows one at a time. The constructor repairs the newest segment.

    It raises SpoolError if another writer has the spool, and OSError. `repair_report` is None for an empty spool.
    """

    def __init__(self, directory: Path, limits: SpoolLimits, disk: Disk | None = None) -> None:
        self.directory = directory
        self._limits = limits
        self._disk = disk or Disk()
        self._mutex = threading.Lock()
        self._file = -1
        self._end = Position(0, 0)
        self._failed = False
        _make_directory(directory)
        self._lock = _lock(directory)
        try:
            self.repair_report, number = _repair_newest(directory)
            self._total_bytes = total_segment_bytes(directory)
            self._start_segment(number)
            self._committed_file = PositionFile(directory, COMMITTED, self._end)
        except BaseException:
            self._close_file()
            os.close(self._lock)
            raise

    @property
    def committed_end(self) -> Position:
        """The committed end."""
        return self._end

    @property
    def total_bytes(self) -> int:
        """Size of all segments. Removals by other processes are counted only when the limit is reached."""
        return self._total_bytes

    def free_bytes(self) -> int:
        """Return the free bytes of the spool's file system. Raises SpoolError."""
        with self._as_spool_errors():
            return self._disk.free_bytes(self.directory)

    def append_records(self, records: Sequence[bytes]) -> None:
        """Commit packed records, all or none. Raises SpoolFullError or another SpoolError."""
        data = b"".join(records)
        with self._mutex, self._as_spool_errors():
            self._prepare_append(len(data))
            self._failed = True  # until every step has succeeded
            self._disk.write(self._file, data)
            self._disk.sync(self._file)
            end = Position(self._end.segment, self._end.offset + len(data))
            self._committed_file.overwrite_position(end)
            self._end, self._failed = end, False
            self._total_bytes += len(data)

    def check_writable(self) -> None:
        """Return if an append would be attempted now. Raises SpoolFullError or another SpoolError."""
        with self._mutex, self._as_spool_errors():
            self._prepare_append(0)

    def close(self) -> None:
        """Close all files and release the spool's lock."""
        with self._mutex:
            self._close_file()
            self._committed_file.close()
            os.close(self._lock)

    @contextlib.contextmanager
    def _as_spool_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            kind = SpoolFullError if error.errno in _FULL else SpoolError
            raise kind(f"{self.directory}: {error.strerror}") from error

    def _prepare_append(self, size: int) -> None:
        self._check_room(size)
        if self._failed:
            self._truncate_failed_append()
            self._next_segment()
            self._failed = False
        elif self._end.offset >= self._limits.segment_bytes_max:
            self._next_segment()

    def _check_room(self, size: int) -> None:
        free = self._disk.free_bytes(self.directory)
        if free - size < self._limits.free_bytes_min:
            raise SpoolFullError(f"{self.directory}: only {free} bytes are free on its file system; make room there")
        if self._total_bytes + size <= self._limits.total_bytes_max:
            return
        self._total_bytes = total_segment_bytes(self.directory)
        if self._total_bytes + size > self._limits.total_bytes_max:
            raise SpoolFullError(
                f"{self.directory}: holds {self._total_bytes} bytes, and spool.total_bytes_max is "
                f"{self._limits.total_bytes_max}; does the ingest job run?"
            )

    def _truncate_failed_append(self) -> None:
        """Truncate bytes that a failed append may have left after the committed end."""
        path = segment_path(self.directory, self._end.segment)
        with path.open("r+b") as file:
            file.truncate(self._end.offset)
            os.fsync(file.fileno())

    def _next_segment(self) -> None:
        self._start_segment(self._end.segment + 1)
        self._committed_file.overwrite_position(self._end)

    def _start_segment(self, number: int) -> None:
        """Start a segment; the previous one stays open until the new one is durable."""
        if number >= NUMBER_MAX:
            raise SpoolError(f"{self.directory}: its segment numbers are used up")
        # O_TRUNC: an existing file of this number is a failed attempt, which no reader has seen.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        file = os.open(segment_path(self.directory, number), flags, 0o640)
        try:
            self._disk.write(file, pack_segment_header(number))
            self._disk.sync(file)
            sync_directory(self.directory)
        except BaseException:
            os.close(file)
            raise
        self._close_file()
        self._file = file
        self._end = Position(number, SEGMENT_HEADER_BYTES)
        self._total_bytes += SEGMENT_HEADER_BYTES

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _make_directory(directory: Path) -> None:
    if not directory.is_dir():
        directory.mkdir(mode=0o750, parents=True)
        sync_directory(directory.parent)


def _lock(directory: Path) -> int:
    lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise SpoolError(f"{directory}: another receiver writes to this spool; give each one a directory") from None
    return lock


def _repair_newest(directory: Path) -> tuple[RepairReport | None, int]:
    """Repair the newest segment; return the findings, and the number of the segment to start.

    A number that a reader may have seen is never reused: its position in the old segment would hide new records.
    """
    try:
        committed = read_position(directory, COMMITTED)
    except SpoolError:  # a power failure tore it; it is written again
        committed = None
    newest = max(list_segment_numbers(directory), default=0)
    highest = max(newest, committed.segment if committed else 0)
    if newest == 0:
        return None, highest + 1
    found = repair_segment(segment_path(directory, newest), newest, committed)
    empty = not (found.records or found.damaged or found.torn)
    return found, highest if empty and newest == highest else highest + 1
