"""Waiting for something to become true, always with a deadline and a reason."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")


class NotInTimeError(AssertionError):
    """The deadline passed; the text says what did not happen."""


def eventually(probe: Callable[[], Value], *, what: str, within_s: float = 10.0, every_s: float = 0.05) -> Value:
    """Call `probe` until it returns something true, and return that."""
    deadline = time.monotonic() + within_s
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() > deadline:
            raise NotInTimeError(f"not within {within_s:g} s: {what} (last seen: {value!r})")
        time.sleep(every_s)
