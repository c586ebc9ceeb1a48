"""What a job tells of its work on standard error: what is done, what is left and about how long that takes.

While nothing is done there are signs of life: on a terminal a line that is written over each second, else a line every
HEARTBEAT_S seconds.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HEARTBEAT_S: Final = 30.0
TERMINAL_S: Final = 1.0
_MINUTE_S: Final = 60
_HOUR_S: Final = 3600
_ROUND_S: Final = 90
"""Up to here seconds are told."""
_CLEAR: Final = "\r\x1b[K"


class Console:
    """Standard error: whole lines, and on a terminal one below them that is written over."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._is_status_shown = False

    @property
    def stream(self) -> IO[str]:
        """Where it goes; standard error as it is now."""
        return self._stream or sys.stderr

    def line(self, text: str) -> None:
        """Write a line that stays."""
        self._write(f"{text}\n", is_status=False)

    def status(self, text: str) -> None:
        """On a terminal: write it in place of the last status. Empty: none."""
        self._write(text, is_status=bool(text))

    def _write(self, text: str, *, is_status: bool) -> None:
        with self._lock:
            clear = _CLEAR if self._is_status_shown else ""
            self._is_status_shown = is_status
            if text or clear:
                self.stream.write(clear + text)
                self.stream.flush()


CONSOLE: Final = Console()


class Progress:
    """Lines about long work: what was done, how fast, and what is left."""

    def __init__(self, console: Console = CONSOLE) -> None:
        self._console = console
        self._started = self._last = time.monotonic()

    def tell(self, text: str, *, samples: int | None = None, left: str = "") -> None:
        """One line; with `samples` also how long it took since the last line, and samples per second."""
        now = time.monotonic()
        took_s, self._last = now - self._last, now
        if samples is not None:
            text += f" in {took_s:.1f} s ({samples / max(took_s, 1e-9):,.0f} samples/s)"
        self._console.line(f"{text}; {left}" if left else text)

    def left(self, done: float, total: float, text: str) -> str:
        """`text` says what is left; add about how long it takes, if all goes on as it has from the beginning.

        Empty where nothing is left.
        """
        if done >= total:
            return ""
        if done <= 0:
            return text
        return f"{text}, about {duration((time.monotonic() - self._started) / done * (total - done))}"

    def end(self, text: str) -> None:
        """The last line."""
        self._console.line(f"{text}, {time.monotonic() - self._started:.1f} s altogether")


def duration(seconds: float) -> str:
    """`40 s`, `3 min`, `2.5 h`."""
    if seconds < _ROUND_S:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / _MINUTE_S:.0f} min" if seconds < _ROUND_S * _MINUTE_S else f"{seconds / _HOUR_S:.1f} h"


@contextmanager
def heartbeats(spark: SparkSession, console: Console = CONSOLE, every_s: float | None = None) -> Iterator[None]:
    """Show signs of life until the end of the block: how far Spark is with the step that it is at."""
    is_terminal = console.stream.isatty()
    every_s = every_s or (TERMINAL_S if is_terminal else HEARTBEAT_S)
    ended = threading.Event()
    started = time.monotonic()

    def beat() -> None:
        while not ended.wait(every_s):
            step = step_of(spark)
            if not step:
                continue
            text = f"at work for {duration(time.monotonic() - started)}: {step}"
            console.status(text) if is_terminal else console.line(text)

    thread = threading.Thread(target=beat, daemon=True, name="heartbeats")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=5)
        console.status("")


def step_of(spark: SparkSession) -> str:
    """What Spark does now: `5 of 16 tasks of this step are left`; empty where it does nothing, or has ended."""
    from py4j.protocol import Py4JError

    try:
        tracker = spark.sparkContext.statusTracker()
        stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
    except (Py4JError, OSError, AttributeError):  # it is being stopped
        return ""
    tasks = sum(stage.numTasks for stage in stages if stage)
    done = sum(stage.numCompletedTasks for stage in stages if stage)
    return f"{tasks - done:,} of {tasks:,} tasks of this step are left" if tasks else ""
