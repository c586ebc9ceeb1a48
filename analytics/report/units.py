"""Numbers as text for people."""

from __future__ import annotations

from typing import Final

_KIB: Final = 1024
_PREFIXES: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def amount(value: float) -> str:
    """Bytes: `1.5 GiB`."""
    place = 0
    while abs(value) >= _KIB and place < len(_PREFIXES) - 1:
        value, place = value / _KIB, place + 1
    return f"{value:,.0f} B" if place == 0 else f"{value:,.1f} {_PREFIXES[place]}"


def count(value: float) -> str:
    """`12,345`."""
    return f"{value:,.0f}"


def seconds(value: float) -> str:
    """`12.3 ms`, `1.50 s`."""
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


def share(value: float) -> str:
    """`99.95 %`; rounded down, so that only all is 100 %."""
    return f"{int(value * 10_000 + 1e-9) / 100:g} %"


def short(value: float) -> str:
    """Of any size, four digits: `1,234`, `0.01234`."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"  # noqa: PLR2004 -- from here on digits count
