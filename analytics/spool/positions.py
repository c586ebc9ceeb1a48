"""Positions in a spool, and the small file that stores the committed end.

The file `committed` is updated after each fdatasync of a segment, so a reader that stops there never sees data that a
crash could still lose. It is overwritten in place (one small write, checked by a CRC) and not synced: after a power
failure it may be old, never ahead; the writer corrects it at its start.
"""

import contextlib
import os
import struct
import time
import uuid
import zlib
from pathlib import Path
from typing import NamedTuple, Self

from analytics.spool.records import SpoolError

COMMITTED = "committed"

_POSITION = struct.Struct("<8sQQ")
_CRC = struct.Struct("<I")
_MAGIC = b"PRWMARK1"
_OFFSET_BITS = 40
_READ_ATTEMPTS_MAX = 5
_READ_PAUSE_S = 0.002
IDENTITY = "id"


class Position(NamedTuple):
    """Position in a spool: a byte offset in a segment. Positions are ordered."""

    segment: int
    offset: int

    @property
    def number(self) -> int:
        """The position as one number, which tables record."""
        return self.segment << _OFFSET_BITS | self.offset

    @classmethod
    def from_number(cls, number: int) -> Self:
        """Return the position of this number."""
        return cls(number >> _OFFSET_BITS, number & ((1 << _OFFSET_BITS) - 1))


def read_position(directory: Path, name: str) -> Position | None:
    """Read a position file of a spool; None if there is none yet. Raises SpoolError if the file is invalid."""
    for _ in range(_READ_ATTEMPTS_MAX):
        try:
            data = (directory / name).read_bytes()
        except FileNotFoundError:
            return None
        position = _parse(data)
        if position is not None:
            return position
        time.sleep(_READ_PAUSE_S)  # while it is being overwritten, a read may see half of it
    raise SpoolError(f"{directory / name}: is invalid; the receiver writes it again at its start")


def write_position(directory: Path, name: str, position: Position) -> None:
    """Replace a position file atomically and durably. Raises OSError."""
    temporary = directory / f"{name}.new"
    write_synced(temporary, _pack(position))
    temporary.replace(directory / name)
    sync_directory(directory)


class PositionFile:
    """Position file that is overwritten often, through one open descriptor."""

    def __init__(self, directory: Path, name: str, position: Position) -> None:
        write_position(directory, name, position)
        self._file = os.open(directory / name, os.O_WRONLY | os.O_CLOEXEC)

    def overwrite_position(self, position: Position) -> None:
        """Overwrite the position, without a sync. Raises OSError."""
        os.pwrite(self._file, _pack(position), 0)

    def close(self) -> None:
        """Close the descriptor; the file stays."""
        os.close(self._file)


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and make its data durable; raises OSError."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Make the directory's entries durable; raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _pack(position: Position) -> bytes:
    data = _POSITION.pack(_MAGIC, position.segment, position.offset)
    return data + _CRC.pack(zlib.crc32(data))


def _parse(data: bytes) -> Position | None:
    if len(data) != _POSITION.size + _CRC.size:
        return None
    magic, segment, offset = _POSITION.unpack_from(data)
    if magic != _MAGIC or _CRC.unpack_from(data, _POSITION.size)[0] != zlib.crc32(data[: _POSITION.size]):
        return None
    return Position(segment, offset)


def spool_id(directory: str | os.PathLike[str]) -> str:
    """Return the spool's identity; made once: an emptied, reused directory is another. Raises OSError."""
    root = Path(directory)
    target = root / IDENTITY
    if not target.exists():
        temporary = root / f"{IDENTITY}.{uuid.uuid4().hex}"
        temporary.write_text(uuid.uuid4().hex)
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.link(temporary, target)
        temporary.unlink()
        sync_directory(root)
    return target.read_text().strip()
