"""What is made from files and made again when they change: keys, users, certificates."""

import os
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import trio

from proxy.common.errors import ConfigError
from proxy.common.logs import get_logger

LOOK_INTERVAL_S = 1.0

ValueT = TypeVar("ValueT")
Stamp = tuple[tuple[int, int, int, int] | None, ...]


class ReloadingFile(Generic[ValueT]):
    """A value made by ``build`` from files; it looks for changes when it is asked for, at most once a second.

    ``key`` is the configuration's, for errors. ``build`` runs in a thread but for the first time; it raises
    ConfigError or OSError. A value that cannot be made anew stays as it was, which is logged, and is tried again.
    """

    def __init__(self, key: str, files: Sequence[str], build: Callable[[], ValueT]) -> None:
        self._key = key
        self._files = tuple(file for file in files if file)
        self._build = build
        self._looked_at = float("-inf")
        self._looking = False
        self._failed: Stamp | None = None
        self._stamp = self._look()
        try:
            self.value = build()
        except OSError as error:
            raise ConfigError(f"{key}: {error.filename or ', '.join(self._files)}: {error.strerror}") from None

    async def current_value(self) -> ValueT:
        """The value, made anew if its files have changed. While one caller makes it, others get the one before."""
        now = trio.current_time()
        if not self._looking and now - self._looked_at >= LOOK_INTERVAL_S:
            self._looking = True
            try:
                await trio.to_thread.run_sync(self._renew)
            finally:
                self._looking = False
                self._looked_at = now
        return self.value

    def _renew(self) -> None:
        stamp = self._look()
        if stamp == self._stamp:
            return
        try:
            self.value = self._build()
        except Exception as error:  # noqa: BLE001 -- whatever a broken file does to a parser: the old value stays
            if stamp != self._failed:  # say it once for each change
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

    def _look(self) -> Stamp:
        return tuple(_stamp_of(file) for file in self._files)


def _stamp_of(file: str) -> tuple[int, int, int, int] | None:
    """What differs as soon as a file does; symbolic links are followed, as Kubernetes changes those."""
    try:
        found = os.stat(file)  # noqa: PTH116 -- no Path needed for it
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
