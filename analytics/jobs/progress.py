"""A job's progress on standard error: what is done, what remains and about how long that takes.

Between two lines there are heartbeats: on a terminal a status line that is rewritten each second, else a line every
HEARTBEAT_S seconds.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HEARTBEAT_S: Final = 30.0
STATUS_INTERVAL_S: Final = 1.0
BAR_CHARACTERS: Final = 12
_MINUTE_S: Final = 60
_HOUR_S: Final = 3600
_SECONDS_SHOWN_MAX: Final = 90
"""Longest time that is shown in seconds."""
_CLEAR: Final = "\r\x1b[K"


class Console:
    """Standard error: lines that stay, and on a terminal a status line below them that is rewritten."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._is_status_shown = False

    @property
    def stream(self) -> IO[str]:
        """The stream given to the constructor, else the current standard error."""
        return self._stream or sys.stderr

    def print_line(self, text: str) -> None:
        """Write a line that stays."""
        self._write(f"{text}\n", is_status=False)

    def show_status(self, text: str) -> None:
        """Replace the status line; an empty text removes it. It is cut to one line, since only that can be removed."""
        columns = shutil.get_terminal_size().columns
        self._write(text[: columns - 1], is_status=bool(text))

    def _write(self, text: str, *, is_status: bool) -> None:
        with self._lock:
            clear = _CLEAR if self._is_status_shown else ""
            self._is_status_shown = is_status
            if text or clear:
                self.stream.write(clear + text)
                self.stream.flush()


CONSOLE: Final = Console()


class Progress:
    """Reporter of a job's progress: what was done, how fast, and what remains."""

    def __init__(self, console: Console = CONSOLE) -> None:
        self._console = console
        self._started = self._last = time.monotonic()

    def print_line(self, text: str, *, samples: int | None = None, left: str = "") -> None:
        """Print a line; with `samples` also the time since the last line, and samples per second."""
        now = time.monotonic()
        took_s, self._last = now - self._last, now
        if samples is not None:
            text += f" in {took_s:.1f} s ({samples / max(took_s, 1e-9):,.0f} samples/s)"
        self._console.print_line(f"{text}; {left}" if left else text)

    def remaining_text(self, done: float, total: float, text: str) -> str:
        """Return `text`, which says what remains, with an estimate of the time at the average speed so far.

        Returns an empty text if nothing remains.
        """
        if done >= total:
            return ""
        if done <= 0:
            return text
        return f"{text}, about {duration((time.monotonic() - self._started) / done * (total - done))}"

    def print_summary(self, text: str) -> None:
        """Print the last line, with the total time."""
        self._console.print_line(f"{text}, {time.monotonic() - self._started:.1f} s altogether")


def duration(seconds: float) -> str:
    """Format a time as `40 s`, `3 min` or `2.5 h`."""
    if seconds < _SECONDS_SHOWN_MAX:
        return f"{max(1, round(seconds))} s"
    return (
        f"{seconds / _MINUTE_S:.0f} min" if seconds < _SECONDS_SHOWN_MAX * _MINUTE_S else f"{seconds / _HOUR_S:.1f} h"
    )


@contextmanager
def starting(text: str, console: Console = CONSOLE) -> Iterator[None]:
    """Say at once what the block waits for; on a terminal also for how long, each second."""
    if not console.stream.isatty():
        console.print_line(text)
        yield
        return
    console.show_status(text)
    with _beating(lambda seconds: f"{text}: {duration(seconds)}", STATUS_INTERVAL_S, console.show_status):
        yield
    console.show_status("")


class Step(NamedTuple):
    """A step under way, and its place among those of a turn. There is no turn if `total` is 1."""

    name: str = "at work"
    number: int = 1
    total: int = 1

    @property
    def text(self) -> str:
        """Place and name, as `step 2 of 6, rollup`; without a turn the name alone."""
        return self.name if self.total == 1 else f"step {self.number} of {self.total}, {self.name}"


class Tasks(NamedTuple):
    """Tasks of the stages that Spark works at."""

    done: int
    total: int


def bar(done: float) -> str:
    """Draw a bar of which the fraction `done` is filled."""
    return f"[{'#' * int(done * BAR_CHARACTERS):-<{BAR_CHARACTERS}}]"


class Heartbeat:
    """Text of a heartbeat: a bar, the step, the time since it began, Spark's tasks, the time left for the turn.

    The bar counts the steps of a turn, or, if there is one only, Spark's tasks. The time left is what the rest takes at
    the speed so far, and as rough as the steps are unequal.
    """

    def __init__(self, step: Callable[[], Step], tasks: Callable[[], Tasks | None]) -> None:
        self._step, self._tasks = step, tasks
        self._current = step()
        self._step_began = self._turn_began = 0.0

    def text(self, seconds: float) -> str:
        """Return the text for a number of seconds since the first step began; empty if Spark is idle between turns."""
        step = self._step()
        if step != self._current:
            if step.number <= self._current.number:
                self._turn_began = seconds
            self._current, self._step_began = step, seconds
        tasks = self._tasks()
        if tasks is None and step.total == 1:
            return ""
        done = (step.number - 1 + (tasks.done / tasks.total if tasks else 0)) / step.total
        text = f"{bar(done)} {step.text} for {duration(seconds - self._step_began)}"
        if tasks:
            text += f": {tasks.done:,} of {tasks.total:,} tasks"
        if step.number > 1:
            text += f", about {duration((seconds - self._turn_began) / done * (1 - done))} left"
        return text


@contextmanager
def heartbeats(
    spark: SparkSession,
    console: Console = CONSOLE,
    every_s: float | None = None,
    step: Callable[[], Step] = Step,
) -> Iterator[None]:
    """Print heartbeats until the end of the block."""
    is_terminal = console.stream.isatty()
    every_s = every_s or (STATUS_INTERVAL_S if is_terminal else HEARTBEAT_S)
    heartbeat = Heartbeat(step, lambda: current_tasks(spark))
    with _beating(heartbeat.text, every_s, console.show_status if is_terminal else console.print_line):
        yield
    console.show_status("")


@contextmanager
def _beating(text: Callable[[float], str], every_s: float, show: Callable[[str], None]) -> Iterator[None]:
    """Show a text of the seconds since the start, repeatedly until the end of the block; not an empty one."""
    ended = threading.Event()
    started = time.monotonic()

    def beat() -> None:
        while not ended.wait(every_s):
            if found := text(time.monotonic() - started):
                show(found)

    thread = threading.Thread(target=beat, daemon=True, name="heartbeats")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=5)


def current_tasks(spark: SparkSession) -> Tasks | None:
    """Return the tasks that Spark works at; None if it is idle or has stopped."""
    from py4j.protocol import Py4JError

    try:
        tracker = spark.sparkContext.statusTracker()
        stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
    except (Py4JError, OSError, AttributeError):  # it is being stopped
        return None
    total = sum(stage.numTasks for stage in stages if stage)
    done = sum(stage.numCompletedTasks for stage in stages if stage)
    return Tasks(done, total) if total else None
