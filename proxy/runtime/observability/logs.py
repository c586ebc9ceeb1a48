"""Logs: one entry a line on standard error, with the process's role and number in each.

Entries are written for a tired operator: what happened, to whom, and what to do. Never log a credential: callers pass
roles, addresses and reasons, not data.
"""

import contextlib
import io
import logging
import sys
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, TextIO

import structlog

from proto.roles import Role
from proxy.config.types import Log

ENTRIES_PER_SECOND_MAX = 50
VALUE_CHARACTERS_MAX = 1000

Logger = structlog.typing.FilteringBoundLogger

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_KEY_ORDER = ["timestamp", "level", "role", "worker", "event"]


class Throttle:
    """A structlog processor that bounds how often one kind of entry is written.

    A storm of failing clients must not fill a disk or cost more than serving them. Entries of one event (its text is
    the key; texts are constants) beyond ENTRIES_PER_SECOND_MAX are dropped; the next one written says how many were.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._windows: dict[str, _Window] = {}

    def __call__(self, _logger: Any, _method: str, entry: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """Pass an entry on, or drop it."""
        window = self._windows.setdefault(str(entry["event"]), _Window())
        now = self._clock()
        if now - window.began_at >= 1:
            window.began_at, window.written = now, 0
        if window.written >= ENTRIES_PER_SECOND_MAX:
            window.suppressed += 1
            raise structlog.DropEvent
        window.written += 1
        if window.suppressed:
            entry["suppressed_before"], window.suppressed = window.suppressed, 0
        return entry


def printable(_logger: Any, _method: str, entry: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A structlog processor: what strangers chose (a topic, a method) cannot forge entries or drive a terminal."""
    for key, value in entry.items():
        if isinstance(value, str) and not (value.isprintable() and len(value) <= VALUE_CHARACTERS_MAX):
            entry[key] = value[:VALUE_CHARACTERS_MAX].encode("unicode_escape").decode("ascii")
    return entry


def _printable_traceback(_logger: Any, _method: str, entry: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    text = entry.get("exception")
    if isinstance(text, str):
        entry["exception"] = "".join(one if one.isprintable() or one == "\n" else "?" for one in text)
    return entry


class _Forgiving(io.StringIO):
    """A log that cannot be written (its reader has gone, the disk is full) must not end what it reports on."""

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


@dataclass(frozen=True, slots=True)
class _Origin:
    """A structlog processor: which process writes. (Context variables would only reach the task that set them.)"""

    role: Role
    worker: int

    def __call__(self, _logger: Any, _method: str, entry: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        entry["role"], entry["worker"] = self.role.value, self.worker
        return entry


@dataclass(slots=True)
class _Window:
    began_at: float = float("-inf")
    written: int = 0
    suppressed: int = 0


def configure_logs(config: Log, role: Role, worker: int) -> None:
    """Set up this process's logs. Before this is called structlog's defaults apply."""
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if config.format == "json"
        else structlog.processors.LogfmtRenderer(key_order=_KEY_ORDER, drop_missing=True)
    )
    structlog.configure(
        processors=[
            Throttle(),
            printable,
            _Origin(role, worker),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _printable_traceback,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[config.level]),
        logger_factory=structlog.PrintLoggerFactory(_Forgiving(sys.stderr)),
        cache_logger_on_first_use=False,
    )


def get_logger() -> Logger:
    """A logger; entries take keyword arguments as their fields."""
    logger: Logger = structlog.get_logger()
    return logger
