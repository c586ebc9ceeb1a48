"""Numbers as text for people, and the unit that a plot's axis and its table share."""

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
    """A unit that suits the values' size; a value in it is the value in the base unit divided by `divisor`."""

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
    """Bytes: `1.5 GiB`."""
    place = _prefix(value)
    return f"{value:,.0f} B" if place == 0 else f"{value / _KIB**place:,.1f} {_PREFIXES[place]}"


def _prefix(value: float) -> int:
    place = 0
    while abs(value) >= _KIB and place < len(_PREFIXES) - 1:
        value, place = value / _KIB, place + 1
    return place


def count(value: float) -> str:
    """`12,345`."""
    return f"{value:,.0f}"


def counted(value: float, noun: str) -> str:
    """`1 connection`, `12,345 connections`."""
    return f"{value:,.0f} {noun}" if round(value) == 1 else f"{value:,.0f} {noun}s"


def seconds(value: float) -> str:
    """`12.3 ms`, `1.50 s`."""
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


def share(value: float) -> str:
    """`99.95 %`; rounded down, so that only all is 100 %, and only nothing is 0 %."""
    if 0 < value < _SHARE_MIN:
        return f"below {_SHARE_MIN * 100:g} %"
    return f"{int(value * 10_000 + 1e-9) / 100:g} %"


def short(value: float) -> str:
    """Of any size, four digits: `1,234`, `0.01234`."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"  # noqa: PLR2004 -- from here on digits count
