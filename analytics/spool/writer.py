"""The one writer of a spool: appends groups of records, one fdatasync for each group. It blocks: call it in a thread.

What `append` returned from is on the disk and visible to readers. What it raised for is neither: the writer cuts it off
again before it writes anything else, and goes on in a new segment, since after a failed sync nobody knows what the page
cache holds. It never appends to a segment that was there before it.
"""

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from analytics.spool.marks import COMMITTED, MovingMark, Position, read_mark, sync_directory
from analytics.spool.records import SEGMENT_HEADER_BYTES, SpoolError, segment_header
from analytics.spool.repair import Repair, repair
from analytics.spool.segments import NUMBER_MAX, segment_numbers, segment_path, total_bytes

LOCK = "lock"

_FULL = {errno.ENOSPC, errno.EDQUOT}


class SpoolFullError(SpoolError):
    """There is no room for more; its text says what is full."""


@dataclass(frozen=True)
class SpoolLimits:
    """How large a segment becomes before the next is begun, how large all may be, what must stay free on the disk."""

    segment_bytes_max: int
    total_bytes_max: int
    free_bytes_min: int


class Disk:
    """What the writer asks of the operating system; tests put a worse one in its place. All raise OSError."""

    def write(self, file: int, data: bytes) -> None:
        """Write all of it at the file's end."""
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]

    def sync(self, file: int) -> None:
        """Make the file's data durable."""
        os.fdatasync(file)

    def free_bytes(self, directory: Path) -> int:
        """What is free for this user on the directory's file system."""
        found = os.statvfs(directory)
        return found.f_bavail * found.f_frsize


class SpoolWriter:
    """Opens a spool and mends what a crash left in it; one at a time, which a lock enforces.

    The constructor raises SpoolError if another writer has the spool, and OSError. `repaired` is what it mended.
    """

    def __init__(self, directory: Path, limits: SpoolLimits, disk: Disk | None = None) -> None:
        self.directory = directory
        self._limits = limits
        self._disk = disk or Disk()
        self._one_at_a_time = threading.Lock()
        self._file = -1
        self._end = Position(0, 0)
        self._failed = False
        _make_directory(directory)
        self._lock = _lock(directory)
        try:
            self.repaired, number = _mend(directory)
            self._total_bytes = total_bytes(directory)
            self._start_segment(number)
            self._mark = MovingMark(directory, COMMITTED, self._end)
        except BaseException:
            self._close_file()
            os.close(self._lock)
            raise

    @property
    def end(self) -> Position:
        """Up to where everything is committed."""
        return self._end

    @property
    def total_bytes(self) -> int:
        """What all segments take up, as far as the writer knows: it notices removals when room gets scarce."""
        return self._total_bytes

    def free_bytes(self) -> int:
        """What is free on its file system; raises SpoolError."""
        with self._failing():
            return self._disk.free_bytes(self.directory)

    def append(self, records: Sequence[bytes]) -> None:
        """Commit packed records, all or none; raises SpoolFullError or another SpoolError."""
        data = b"".join(records)
        with self._one_at_a_time, self._failing():
            self._prepare(len(data))
            self._failed = True  # until all of it is done
            self._disk.write(self._file, data)
            self._disk.sync(self._file)
            end = Position(self._end.segment, self._end.offset + len(data))
            self._mark.move(end)
            self._end, self._failed = end, False
            self._total_bytes += len(data)

    def check(self) -> None:
        """Return if an append would be tried now; raises SpoolFullError or another SpoolError."""
        with self._one_at_a_time, self._failing():
            self._prepare(0)

    def close(self) -> None:
        """Let the spool go; another writer may have it."""
        with self._one_at_a_time:
            self._close_file()
            self._mark.close()
            os.close(self._lock)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            kind = SpoolFullError if error.errno in _FULL else SpoolError
            raise kind(f"{self.directory}: {error.strerror}") from error

    def _prepare(self, size: int) -> None:
        self._check_room(size)
        if self._failed:
            self._cut_off()
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
        self._total_bytes = total_bytes(self.directory)
        if self._total_bytes + size > self._limits.total_bytes_max:
            raise SpoolFullError(
                f"{self.directory}: holds {self._total_bytes} bytes, and spool.total_bytes_max is "
                f"{self._limits.total_bytes_max}; does the ingest job run?"
            )

    def _cut_off(self) -> None:
        """Take away what a failed append may have left behind the end."""
        path = segment_path(self.directory, self._end.segment)
        with path.open("r+b") as file:
            file.truncate(self._end.offset)
            os.fsync(file.fileno())

    def _next_segment(self) -> None:
        self._start_segment(self._end.segment + 1)
        self._mark.move(self._end)

    def _start_segment(self, number: int) -> None:
        """Begin a segment; the one before stays the writer's until the new one is durable."""
        if number >= NUMBER_MAX:
            raise SpoolError(f"{self.directory}: its segment numbers are used up")
        # O_TRUNC: what is there under this number is an attempt that failed, and no reader was told of it.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        file = os.open(segment_path(self.directory, number), flags, 0o640)
        try:
            self._disk.write(file, segment_header(number))
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


def _mend(directory: Path) -> tuple[Repair | None, int]:
    """Repair the newest segment; returns what was found, and the number of the segment to begin.

    A number that a reader may have seen is never used again: its position in the old one would hide what is new.
    """
    try:
        committed = read_mark(directory, COMMITTED)
    except SpoolError:  # a power failure tore it; it is made anew
        committed = None
    newest = max(segment_numbers(directory), default=0)
    highest = max(newest, committed.segment if committed else 0)
    if newest == 0:
        return None, highest + 1
    found = repair(segment_path(directory, newest), newest, committed)
    empty = not (found.records or found.damaged or found.torn)
    return found, highest if empty and newest == highest else highest + 1
