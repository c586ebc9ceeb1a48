"""Waiting for something to become true, always with a deadline and a reason."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")

BUSY_S = 30.0
"""How long to wait for what takes milliseconds on a quiet machine. It costs nothing when all is well, so that no test
depends on how fast the machine is. What must come within a time of its own, as before some other limit ends, is
proved by its cause, by its order among other events, or by another limit that is far longer than this.
"""


class NotInTimeError(AssertionError):
    """The deadline passed; the text says what did not happen."""


def eventually(probe: Callable[[], Value], *, what: str, within_s: float = BUSY_S, every_s: float = 0.05) -> Value:
    """Call `probe` until it returns something true, and return that."""
    deadline = time.monotonic() + within_s
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() > deadline:
            raise NotInTimeError(f"not within {within_s:g} s: {what} (last seen: {value!r})")
        time.sleep(every_s)
