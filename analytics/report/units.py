"""Formatting of numbers, and the scale that a plot's axis and table share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_KIB: Final = 1024
_PREFIXES: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
BYTES_PER_SECOND: Final = "bytes per second"
SECONDS: Final = "seconds"
_SHARE_MIN: Final = 0.0001


@dataclass(frozen=True, slots=True)
class Scale:
    """A unit chosen by the values' size; divide a value in the base unit by `divisor` to convert it."""

    unit: str
    divisor: float


def scale(unit: str, largest: float) -> Scale:
    """Return the scale for values in `unit` up to `largest`: bytes get a binary prefix, short times are in ms."""
    if unit == BYTES_PER_SECOND:
        place = _prefix(largest)
        return Scale(f"{_PREFIXES[place]}/s", float(_KIB**place))
    if unit == SECONDS:
        return Scale("ms", 0.001) if largest < 1 else Scale("s", 1.0)
    return Scale(unit, 1.0)


def amount(value: float) -> str:
    """Format bytes as `1.5 GiB`."""
    place = _prefix(value)
    return f"{value:,.0f} B" if place == 0 else f"{value / _KIB**place:,.1f} {_PREFIXES[place]}"


def _prefix(value: float) -> int:
    place = 0
    while abs(value) >= _KIB and place < len(_PREFIXES) - 1:
        value, place = value / _KIB, place + 1
    return place


def count(value: float) -> str:
    """Format a number as `12,345`."""
    return f"{value:,.0f}"


def counted(value: float, noun: str) -> str:
    """Format a number of things as `1 connection` or `12,345 connections`."""
    return f"{value:,.0f} {noun}" if round(value) == 1 else f"{value:,.0f} {noun}s"


def seconds(value: float) -> str:
    """Format seconds as `12.3 ms` or `1.50 s`."""
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


def share(value: float) -> str:
    """Format a share as `99.95 %`, rounded down, so that only 1 is 100 %, and only 0 is 0 %."""
    if 0 < value < _SHARE_MIN:
        return f"below {_SHARE_MIN * 100:g} %"
    return f"{int(value * 10_000 + 1e-9) / 100:g} %"


def short(value: float) -> str:
    """Format a number of any size with four digits: `1,234`, `0.01234`."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"  # noqa: PLR2004 -- from here on digits count
