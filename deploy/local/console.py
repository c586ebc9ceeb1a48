"""Console progress: a status line that changes on a terminal, a line every few seconds in a log.

A progress text is `stage: detail`. Texts of one stage replace each other on a terminal and are rate-limited elsewhere,
so that callers can report at any rate.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

Progress = Callable[[str], None]

LOG_INTERVAL_S = 5.0


class MakeError(Exception):
    """A target of make cannot go on; the text says what its user is to do."""


@contextmanager
def exit_on_error(target: str, *others: type[Exception]) -> Iterator[None]:
    """End this program with the text of a MakeError, or of one of `others`, and without a traceback."""
    errors: tuple[type[Exception], ...] = (MakeError, *others)
    try:
        yield
    except errors as error:
        print(f"\nmake {target}: {error}", file=sys.stderr)
        sys.exit(1)


class Console:
    """A `Progress` that writes to a stream. Without `replaces` it writes to a terminal as to a log: of several at once
    none may replace another's line.
    """

    def __init__(
        self, stream: TextIO | None = None, *, interval_s: float = LOG_INTERVAL_S, replaces: bool = True
    ) -> None:
        self._stream = stream
        self._interval_s = interval_s
        self._replaces = replaces
        self._stage = ""
        self._written_at = 0.0
        self._open = False  # a terminal line that may still be replaced

    @property
    def _out(self) -> TextIO:
        # Looked up late: pytest exchanges sys.stdout for each test.
        return self._stream if self._stream is not None else sys.stdout

    def __call__(self, text: str) -> None:
        """Show `stage: detail`, replacing the same stage's previous text."""
        stage = text.partition(":")[0]
        now = time.monotonic()
        if self._replaces and self._out.isatty():
            self._out.write("\r\x1b[K" if stage == self._stage and self._open else self._line_end())
            self._out.write(text)
            self._open = True
        elif stage == self._stage and now - self._written_at < self._interval_s:
            return
        else:
            self._out.write(f"{text}\n")
        self._out.flush()
        self._stage, self._written_at = stage, now

    def line(self, text: str = "") -> None:
        """Write a line that is not replaced."""
        self._out.write(f"{self._line_end()}{text}\n")
        self._out.flush()
        self._open, self._stage = False, ""

    def _line_end(self) -> str:
        return "\n" if self._open else ""


print_status = Console()


def silent(_text: str) -> None:
    """Discard a progress text."""


def tail(text: str, lines: int = 25) -> str:
    """Return the last lines of a log, for an error message."""
    return "\n".join(text.splitlines()[-lines:])
