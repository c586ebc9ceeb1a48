"""Values that are built from files and rebuilt when the files change: keys, users, tokens, certificates.

Files are checked when the value is read, at most once a second, in a thread. No file system events: a mounted
Kubernetes secret changes by a symbolic link some levels up.

Those by which brokers are reached are held instead (``HeldFile``): a wrong one would fail every client, so a change
counts only after the supervisor has found a broker that accepts it.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import trio

from proxy.common.errors import ConfigError
from proxy.common.logs import get_logger

CHECK_INTERVAL_S = 1.0

ValueT = TypeVar("ValueT")
Stamp = tuple[tuple[int, int, int, int] | None, ...]


class ReloadingFile(Generic[ValueT]):
    """A value that ``build`` makes from files, rebuilt when they have changed.

    ``key``: the configuration key, for errors. Empty names in ``files`` are ignored. ``build`` runs in a thread, except
    for the first time; it raises ConfigError or OSError, and the constructor raises ConfigError for both. If a rebuild
    fails, the value stays, the error is logged once for each change, and the next check tries again.
    """

    def __init__(self, key: str, files: Sequence[str], build: Callable[[], ValueT]) -> None:
        self._key = key
        self._files = tuple(file for file in files if file)
        self._build = build
        self._checked_at = float("-inf")
        self._checking = False
        self._failed: Stamp | None = None
        self._stamp = self._read_stamp()
        self.value = _built(key, self._files, build)

    @property
    def is_check_due(self) -> bool:
        """Whether ``current_value`` would look at the files; where it would not, ``value`` is the same."""
        if self._checking or not self._files:
            return False
        return trio.current_time() - self._checked_at >= CHECK_INTERVAL_S

    async def current_value(self) -> ValueT:
        """Return the value, rebuilt if its files have changed. While one caller rebuilds it, others get the old one."""
        if self.is_check_due:
            now = trio.current_time()
            self._checking = True
            try:
                await trio.to_thread.run_sync(self._rebuild_if_changed)
            finally:
                self._checking = False
                self._checked_at = now
        return self.value

    def _rebuild_if_changed(self) -> None:
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return
        try:
            self.value = self._build()
        except Exception as error:  # noqa: BLE001 -- a broken file may make a parser raise anything: the old value stays
            if stamp != self._failed:  # log it once for each change
                self._failed = stamp
                get_logger().error(
                    "a changed file cannot be used; going on with what it was before",
                    key=self._key,
                    files=", ".join(self._files),
                    reason=str(error),
                )
            return
        self._stamp, self._failed = stamp, None
        get_logger().info("took over a changed file", key=self._key, files=", ".join(self._files))

    def _read_stamp(self) -> Stamp:
        return tuple(_stamp_of(file) for file in self._files)


class HeldFile(Generic[ValueT]):
    """A value that ``build`` makes from files, rebuilt when it is told to, not when they change.

    ``key``, ``files`` and ``build`` as for ReloadingFile; ``build`` also raises ConfigError for what it cannot use.
    """

    def __init__(self, key: str, files: Sequence[str], build: Callable[[], ValueT]) -> None:
        self._key = key
        self.files = tuple(file for file in files if file)
        self._build = build
        self.value = _built(key, self.files, build)
        _held_files.add(self)

    def read_again(self) -> None:
        """Rebuild the value from the files as they are now, as a new one would be. Raises ConfigError."""
        self.value = _built(self._key, self.files, self._build)

    async def take_over(self, stamps: Mapping[str, str]) -> None:
        """Rebuild the value from the files if they are those with these stamps. Raises ConfigError."""
        self.value = await trio.to_thread.run_sync(self._rebuilt, stamps)

    def _rebuilt(self, stamps: Mapping[str, str]) -> ValueT:
        wanted = {file: stamps[file] for file in self.files}
        before = file_stamps(self.files)
        value = _built(self._key, self.files, self._build)
        if not before == file_stamps(self.files) == wanted:
            raise ConfigError(f"{self._key}: {', '.join(self.files)}: changed once more")
        return value


_held_files: WeakSet[HeldFile[Any]] = WeakSet()
"""Of this process."""


async def take_over_held_files(stamps: Mapping[str, str]) -> None:
    """Rebuild this process's held values from files with these stamps. Raises ConfigError for those that stay.

    Values of other files stay, too: they belong to the configuration before, which lookups under way still use.
    """
    failures = []
    for held in [one for one in _held_files if one.files and stamps.keys() >= set(one.files)]:
        try:
            await held.take_over(stamps)
        except ConfigError as error:
            failures.append(str(error))
    if failures:
        raise ConfigError("; ".join(sorted(failures)))


def file_stamps(files: Iterable[str]) -> dict[str, str]:
    """Return what differs for each file once it has changed, as text; "" for one that cannot be read."""
    return {file: ":".join(map(str, _stamp_of(file) or ())) for file in files if file}


def _built(key: str, files: Sequence[str], build: Callable[[], ValueT]) -> ValueT:
    """Build a value; raise ConfigError for OSError, too."""
    try:
        return build()
    except OSError as error:
        raise ConfigError(f"{key}: {error.filename or ', '.join(files)}: {error.strerror}") from None


def _stamp_of(file: str) -> tuple[int, int, int, int] | None:
    """Return what differs once a file has changed. Symbolic links are followed, since Kubernetes changes those."""
    try:
        found = os.stat(file)  # noqa: PTH116 -- needs no Path
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
