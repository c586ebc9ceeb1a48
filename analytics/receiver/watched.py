"""What is made from files and made anew when they change: tokens, certificates.

Files are looked at when the value is asked for, at most once a second, in a thread. No file system events: a mounted
Kubernetes secret changes by a symbolic link some levels up.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import trio

from analytics.receiver.config import ConfigError
from analytics.receiver.logs import get_logger

LOOK_INTERVAL_S = 1.0

ValueT = TypeVar("ValueT")
Stamp = tuple[tuple[int, int, int, int] | None, ...]


class Watched(Generic[ValueT]):
    """A value made by `build` from files. `key` is the configuration's, for errors.

    `build` runs in a thread but for the first time; it raises ConfigError or OSError. A value that cannot be made anew
    stays as it was; that is logged once for each change.
    """

    def __init__(self, key: str, files: Sequence[str], build: Callable[[], ValueT]) -> None:
        self._key = key
        self._files = tuple(files)
        self._build = build
        self._looked_at = float("-inf")
        self._looking = False
        self._failed: Stamp | None = None
        self._stamp = self._look()
        try:
            self.value = build()
        except OSError as error:
            raise ConfigError(f"{key}: {error.filename or ', '.join(self._files)}: {error.strerror}") from None

    async def current(self) -> ValueT:
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
        except (ConfigError, OSError) as error:
            if stamp != self._failed:
                self._failed = stamp
                get_logger().error(
                    "a changed file cannot be used; going on with what it was before", key=self._key, reason=str(error)
                )
            return
        self._stamp, self._failed = stamp, None
        get_logger().info("took over a changed file", key=self._key)

    def _look(self) -> Stamp:
        return tuple(_stamp_of(file) for file in self._files)


def _stamp_of(file: str) -> tuple[int, int, int, int] | None:
    """What differs as soon as a file does; symbolic links are followed."""
    try:
        found = Path(file).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
