"""Logging: loggers, and what the logs of the proxy and of the analytics are set up with.

One entry a line on standard error. Never log a credential: callers pass roles, addresses and reasons, not data.
"""

import contextlib
import io
import logging
import sys
import time
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import structlog

Logger = structlog.typing.FilteringBoundLogger

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class Throttle:
    """A structlog processor that bounds how often one kind of entry is written.

    A storm of failing clients must not fill a disk or cost more than serving them. Entries of one event (its text is
    the key; texts are constants) beyond ``entries_per_second_max`` are dropped; the next entry written holds their
    number under the name ``dropped_field``.
    """

    def __init__(
        self, entries_per_second_max: int, dropped_field: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._entries_per_second_max = entries_per_second_max
        self._dropped_field = dropped_field
        self._clock = clock
        self._windows: dict[str, _Window] = {}

    def __call__(self, _logger: Any, _method: str, entry: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """Pass an entry on, or raise structlog.DropEvent."""
        event = str(entry["event"])
        if self.drops(event):
            raise structlog.DropEvent
        window = self._windows[event]
        window.written += 1
        if window.dropped:
            entry[self._dropped_field], window.dropped = window.dropped, 0
        return entry

    def drops(self, event: str) -> bool:
        """Return whether an entry of this event is one too many now; it is counted then."""
        window = self._windows.setdefault(event, _Window())
        now = self._clock()
        if now - window.began_at >= 1:
            window.began_at, window.written = now, 0
        if window.written < self._entries_per_second_max:
            return False
        window.dropped += 1
        return True


@dataclass(slots=True)
class _Window:
    """One second of one event's entries. ``dropped`` counts until an entry has told it."""

    began_at: float = float("-inf")
    written: int = 0
    dropped: int = 0


class _BestEffortStream(io.StringIO):
    """A stream that ignores OSError: where a log cannot be written (its reader is gone, the disk is full), the process
    that it reports on must go on.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def configure_structlog(
    level: str,
    throttle: Throttle,
    *,
    before: Sequence[structlog.typing.Processor] = (),
    renderers: Sequence[structlog.typing.Processor] = (structlog.processors.JSONRenderer(),),
) -> None:
    """Set up this process's logs on standard error. Before this is called structlog's defaults apply.

    ``level``: debug, info, warning or error; entries below it are dropped. An entry goes through ``throttle`` and
    ``before``, gets its level, time and traceback, and goes through ``renderers``, of which the last one makes a text.
    """
    _in_force[:] = [throttle]
    structlog.configure(
        processors=[
            throttle,
            *before,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.PrintLoggerFactory(_BestEffortStream(sys.stderr)),
        cache_logger_on_first_use=False,
    )


def set_log_level(level: str) -> None:
    """Drop entries below ``level`` from now on, and no others. Raises KeyError for one that does not exist."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]))


_in_force: list[Throttle] = []


def is_dropped(event: str) -> bool:
    """Return whether the log would drop an entry of this event now, and count it as dropped then.

    Making an entry only for it to be dropped costs ten times as much, which counts for one of every request.
    """
    return bool(_in_force) and _in_force[0].drops(event)


def get_logger() -> Logger:
    """Return a logger; entries take keyword arguments as their fields."""
    logger: Logger = structlog.get_logger()
    return logger
