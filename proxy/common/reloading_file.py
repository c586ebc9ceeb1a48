"""Values that are built from files and rebuilt when the files change: keys, users, tokens, certificates.

Files are checked when the value is read, at most once a second, in a thread. No file system events: a mounted
Kubernetes secret changes by a symbolic link some levels up.

Those by which brokers are reached are held instead (``HeldFile``): a wrong one would fail every client, so a change
counts only after the supervisor has found a broker that accepts it.
"""

import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import trio

from proxy.common.eager import enter_task
from proxy.common.errors import ConfigError
from proxy.common.logs import get_logger

CHECK_INTERVAL_S = 1.0

ValueT = TypeVar("ValueT")
Stamp = tuple[tuple[int, int, int, int] | None, ...]
Ends = Mapping[str, float]

reload_counts: Counter[tuple[str, str]] = Counter()
"""Of this process: how many changes were taken over or could not be used, by configuration key and result (success,
failure). What a broker refuses is not among them, since workers are not told of it.
"""

_serials = itertools.count()


def _no_ends() -> Ends:
    return {}


class _FileValue(Generic[ValueT]):
    """A value that ``build`` makes from files.

    ``key``: the configuration key, for errors. Empty names in ``files`` are ignored. ``build`` raises ConfigError or
    OSError, and the constructor raises ConfigError for both.

    ``read_ends`` returns when certificates in the files end, in seconds since 1970, by configuration key; it raises
    nothing, and is called after ``build``, so that ``ends`` are those of the value.
    """

    def __init__(
        self,
        key: str,
        files: Sequence[str],
        build: Callable[[], ValueT],
        read_ends: Callable[[], Ends] = _no_ends,
    ) -> None:
        self.key = key
        self.files = tuple(file for file in files if file)
        self._build = build
        self._read_ends = read_ends
        self.read_at_unix_s = time.time()
        """When ``value`` was read from the files, unless it is held."""
        self._stamp = self._read_stamp()
        self.value = self._built()
        self.ends = read_ends()
        self.serial = next(_serials)
        _files.add(self)

    def _read_stamp(self) -> Stamp:
        return tuple(_stamp_of(file) for file in self.files)

    def _built(self) -> ValueT:
        """Build the value; raise ConfigError for OSError, too."""
        try:
            return self._build()
        except OSError as error:
            raise ConfigError(f"{self.key}: {error.filename or ', '.join(self.files)}: {error.strerror}") from None


class ReloadingFile(_FileValue[ValueT]):
    """A value that ``build`` makes from files, rebuilt when they have changed.

    ``build`` runs in a thread, except for the first time. If a rebuild fails, the value stays, the error is logged once
    for each change, and the next check tries again.
    """

    failure = ""
    """Why the files' content cannot be used; empty: ``value`` is what they held when last looked at."""
    _checked_at = float("-inf")
    _checking = False
    _failed: Stamp | None = None

    @property
    def is_check_due(self) -> bool:
        """Whether ``current_value`` would look at the files; where it would not, ``value`` is the same."""
        if self._checking or not self.files:
            return False
        return trio.current_time() - self._checked_at >= CHECK_INTERVAL_S

    async def current_value(self) -> ValueT:
        """Return the value, rebuilt if its files have changed. While one caller rebuilds it, others get the old one."""
        if self.is_check_due:
            await enter_task()
        if self.is_check_due:  # nobody else has begun meanwhile
            now = trio.current_time()
            self._checking = True
            try:
                result = await trio.to_thread.run_sync(self._rebuild_if_changed)
                if result:
                    reload_counts[self.key, result] += 1
            finally:
                self._checking = False
                self._checked_at = now
        return self.value

    def _rebuild_if_changed(self) -> str:
        """Return the result to be counted; empty: there is no new one."""
        stamp = self._read_stamp()
        if stamp == self._stamp:
            self._failed, self.failure = None, ""  # what is in force may be there once more
            return ""
        try:
            self.value = self._build()
        except Exception as error:  # noqa: BLE001 -- a broken file may make a parser raise anything: the old value stays
            if stamp == self._failed:  # log it once for each change
                return ""
            self._failed, self.failure = stamp, str(error) or type(error).__name__
            get_logger().error(
                "a changed file cannot be used; going on with what it was before",
                key=self.key,
                files=", ".join(self.files),
                reason=self.failure,
            )
            return "failure"
        self.ends = self._read_ends()
        self._stamp, self._failed, self.failure = stamp, None, ""
        self.read_at_unix_s = time.time()
        get_logger().info("took over a changed file", key=self.key, files=", ".join(self.files))
        return "success"


class HeldFile(_FileValue[ValueT]):
    """A value that ``build`` makes from files, rebuilt when it is told to, not when they change."""

    def read_again(self) -> None:
        """Rebuild the value from the files as they are now, as a new one would be. Raises ConfigError."""
        self.value = self._built()
        self.ends = self._read_ends()

    async def take_over(self, stamps: Mapping[str, str]) -> None:
        """Rebuild the value from the files if they are those with these stamps. Raises ConfigError."""
        try:
            self.value, self.ends = await trio.to_thread.run_sync(self._rebuilt, stamps)
        except ConfigError:
            reload_counts[self.key, "failure"] += 1
            raise
        reload_counts[self.key, "success"] += 1

    def _rebuilt(self, stamps: Mapping[str, str]) -> tuple[ValueT, Ends]:
        wanted = {file: stamps[file] for file in self.files}
        before = file_stamps(self.files)
        value, ends = self._built(), self._read_ends()
        if not before == file_stamps(self.files) == wanted:
            raise ConfigError(f"{self.key}: {', '.join(self.files)}: changed once more")
        return value, ends


_files: WeakSet[_FileValue[Any]] = WeakSet()
"""Of this process."""


def files_in_use() -> dict[str, _FileValue[Any]]:
    """Return this process's values that have files by their keys: of those with the same key the newest one, since a
    reload replaces them.
    """
    newest = {file.key: file for file in sorted(_files, key=lambda file: file.serial)}
    return {key: file for key, file in newest.items() if file.files}


async def take_over_held_files(stamps: Mapping[str, str]) -> None:
    """Rebuild this process's held values from files with these stamps. Raises ConfigError for those that stay.

    Values of other files stay, too: they belong to the configuration before, which lookups under way still use.
    """
    failures = []
    held_files = [one for one in _files if isinstance(one, HeldFile)]
    for held in [one for one in held_files if one.files and stamps.keys() >= set(one.files)]:
        try:
            await held.take_over(stamps)
        except ConfigError as error:
            failures.append(str(error))
    if failures:
        raise ConfigError("; ".join(sorted(failures)))


def file_stamps(files: Iterable[str]) -> dict[str, str]:
    """Return what differs for each file once it has changed, as text; "" for one that cannot be read."""
    return {file: ":".join(map(str, _stamp_of(file) or ())) for file in files if file}


def _stamp_of(file: str) -> tuple[int, int, int, int] | None:
    """Return what differs once a file has changed. Symbolic links are followed, since Kubernetes changes those."""
    try:
        found = os.stat(file)  # noqa: PTH116 -- needs no Path
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
