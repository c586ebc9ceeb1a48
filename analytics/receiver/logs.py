"""Logs: JSON lines on standard error, one entry for each thing that an operator might ask about.

Never log a credential or a body. What senders chose is escaped by JSON; one kind of entry is written a few times a
second at most, so that a storm of bad requests costs less than serving it.
"""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, MutableMapping
from typing import Any, TextIO

import structlog

from analytics.receiver.config import Log

ENTRIES_PER_SECOND_MAX = 10

Logger = structlog.typing.FilteringBoundLogger

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class Throttle:
    """A structlog processor: a few entries of one event (its text, a constant) a second; the next tells the rest."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._windows: dict[str, list[float]] = {}

    def __call__(self, _logger: Any, _method: str, entry: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """Pass an entry on, or drop it."""
        now = self._clock()
        window = self._windows.setdefault(str(entry["event"]), [now, 0, 0])  # began at, written, left out
        if now - window[0] >= 1:
            window[0], window[1] = now, 0
        if window[1] >= ENTRIES_PER_SECOND_MAX:
            window[2] += 1
            raise structlog.DropEvent
        window[1] += 1
        if window[2]:
            entry["left_out_before"], window[2] = int(window[2]), 0
        return entry


class _Forgiving:
    """A log that cannot be written (its reader is gone, the disk is full) must not end what it reports on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def configure_logs(config: Log) -> None:
    """Set up this process's logs."""
    structlog.configure(
        processors=[
            Throttle(),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[config.level]),
        logger_factory=structlog.PrintLoggerFactory(_Forgiving(sys.stderr)),  # type: ignore[arg-type]
        cache_logger_on_first_use=False,
    )


def get_logger() -> Logger:
    """The process's logger."""
    logger: Logger = structlog.get_logger()
    return logger
