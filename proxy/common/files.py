"""Reading of files: directly, or in a worker, which the kernel lets open none, by descriptors from the supervisor."""

import contextlib
import os
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

from proxy.common.errors import ConfigError

SYSTEM_AUTHORITIES = "the system's authorities"
"""In place of a path: the certificates that the system trusts, as PEM."""

_BLOCK_BYTES = 1024 * 1024

Opener = Callable[[str], int]


def open_directly(path: str) -> int:
    """Open a file, or SYSTEM_AUTHORITIES, for reading, and return its descriptor. Raises OSError, ValueError.

    A pipe or a device that has no data is not waited for (O_NONBLOCK).
    """
    if path == SYSTEM_AUTHORITIES:
        return _open_system_authorities()
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)


_opener: Opener = open_directly


def set_opener(opener: Opener) -> None:
    """Have this process open all files by a function."""
    global _opener  # noqa: PLW0603 -- a property of the process, as what the kernel lets it open is
    _opener = opener


def read_file(path: str, max_bytes: int = -1) -> bytes:
    """Return a file's content, the first ``max_bytes`` of it where that is not negative. Raises OSError."""
    with os.fdopen(_opener(path), "rb") as file:
        return file.read(max_bytes)


def read_bounded_file(path: Path, max_bytes: int, kind: str) -> bytes:
    """Read a file that an operator names, of at most ``max_bytes``. Raises ConfigError, which names it.

    ``kind``: what it should be, for one that is longer.
    """
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > max_bytes:
        raise ConfigError(f"{path}: is longer than {max_bytes} bytes: is it {kind}?")
    return data


@contextlib.contextmanager
def path_of_copy(path: str) -> Iterator[str]:
    """Copy a file into memory, and yield a path by which a C library of this process can open the copy.

    Landlock refuses a descriptor's path if it refuses the file's; memory (memfd_create(2)) belongs to no directory.
    """
    with os.fdopen(copy_into_memory(path), "rb") as copy:
        yield f"/proc/self/fd/{copy.fileno()}"


def copy_into_memory(path: str) -> int:
    """Copy a file into memory, and return the descriptor of the copy. Raises OSError."""
    with contextlib.ExitStack() as undo:
        copy = os.memfd_create("copy", os.MFD_CLOEXEC)
        undo.callback(os.close, copy)
        with os.fdopen(_opener(path), "rb") as file:
            while data := file.read(_BLOCK_BYTES):
                os.write(copy, data)
        undo.pop_all()
    return copy


def _open_system_authorities() -> int:
    """Open the file of all authorities; where there are only a file for each, a copy of these. Raises OSError."""
    paths = ssl.get_default_verify_paths()
    if paths.cafile is not None:
        return os.open(paths.cafile, os.O_RDONLY | os.O_CLOEXEC)
    memory = os.memfd_create("authorities", os.MFD_CLOEXEC)
    if paths.capath is not None:
        for file in sorted(Path(paths.capath).glob("[0-9a-f]*.[0-9]")):  # the names that OpenSSL looks for
            with contextlib.suppress(OSError):
                os.write(memory, file.read_bytes() + b"\n")
    os.lseek(memory, 0, os.SEEK_SET)
    return memory
