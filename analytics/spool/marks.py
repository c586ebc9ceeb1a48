"""Positions in a spool, and the small files that keep them: how far is committed, and how far was consumed.

The mark `committed` is moved after each fdatasync of a segment, so a reader that goes no further never sees what a
crash could still take away. It is overwritten in place (one small write, checked by a CRC) and not synced: after a
power failure it may be old, never ahead; the writer puts it right when it starts.
"""

import os
import struct
import time
import zlib
from pathlib import Path
from typing import NamedTuple

from analytics.spool.records import SpoolError

COMMITTED = "committed"
CONSUMED = "consumed"

_MARK = struct.Struct("<8sQQ")
_CRC = struct.Struct("<I")
_MAGIC = b"PRWMARK1"
_TRIES = 5
_TRY_AGAIN_S = 0.002


class Position(NamedTuple):
    """A place in a spool: offset bytes into a segment. Positions are ordered."""

    segment: int
    offset: int


def read_mark(directory: Path, name: str) -> Position | None:
    """A mark of a spool; None if there is none yet; raises SpoolError if it cannot be made out."""
    for _ in range(_TRIES):
        try:
            data = (directory / name).read_bytes()
        except FileNotFoundError:
            return None
        position = _parse(data)
        if position is not None:
            return position
        time.sleep(_TRY_AGAIN_S)  # while it is being overwritten it may be half new
    raise SpoolError(f"{directory / name}: cannot be made out; the receiver makes it anew when it is started")


def write_mark(directory: Path, name: str, position: Position) -> None:
    """Put a mark in place of the one before, durably and at once; raises OSError."""
    temporary = directory / f"{name}.new"
    with temporary.open("wb") as file:
        file.write(_pack(position))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(directory / name)
    sync_directory(directory)


class MovingMark:
    """A mark that is moved often, over one open descriptor."""

    def __init__(self, directory: Path, name: str, position: Position) -> None:
        write_mark(directory, name, position)
        self._file = os.open(directory / name, os.O_WRONLY | os.O_CLOEXEC)

    def move(self, position: Position) -> None:
        """Overwrite it; raises OSError."""
        os.pwrite(self._file, _pack(position), 0)

    def close(self) -> None:
        """Let the descriptor go; the mark stays."""
        os.close(self._file)


def sync_directory(directory: Path) -> None:
    """Make the directory's entries durable; raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _pack(position: Position) -> bytes:
    data = _MARK.pack(_MAGIC, position.segment, position.offset)
    return data + _CRC.pack(zlib.crc32(data))


def _parse(data: bytes) -> Position | None:
    if len(data) != _MARK.size + _CRC.size:
        return None
    magic, segment, offset = _MARK.unpack_from(data)
    if magic != _MAGIC or _CRC.unpack_from(data, _MARK.size)[0] != zlib.crc32(data[: _MARK.size]):
        return None
    return Position(segment, offset)
