"""Text for the page: numbers, and names from the tables, which are bounded and without invisible characters."""

from __future__ import annotations

import unicodedata
from html import escape
from typing import Final

NAME_CHARS_MAX: Final = 80
"""Maximum of characters of a name: principals, brokers and label values have no limit of their own."""
_TAIL_CHARS: Final = 12
_INVISIBLE: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode's categories of control and format characters (which can change a line's direction) and unassigned ones."""
_KIB: Final = 1024
_PREFIXES: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SHARE_MIN: Final = 0.0001


def display_name(value: str) -> str:
    """Return the name for display: `(none)` if empty, control characters escaped, a long one's middle left out."""
    if len(value) > NAME_CHARS_MAX:
        value = f"{value[: NAME_CHARS_MAX - _TAIL_CHARS - 1]}…{value[-_TAIL_CHARS:]}"
    return "".join(map(_visible, value)) or "(none)"


def html_text(value: str) -> str:
    """Return `display_name(value)` for HTML, between tags and in attributes."""
    return escape(display_name(value), quote=True)


def _visible(char: str) -> str:
    return ascii(char)[1:-1] if unicodedata.category(char) in _INVISIBLE else char


def amount(value: float) -> str:
    """Format bytes as `1.5 GiB`."""
    place = 0
    while abs(value) >= _KIB and place < len(_PREFIXES) - 1:
        value, place = value / _KIB, place + 1
    return f"{value:,.0f} B" if place == 0 else f"{value:,.1f} {_PREFIXES[place]}"


def count(value: float) -> str:
    """Format a number as `12,345`."""
    return f"{value:,.0f}"


def counted(value: float, noun: str) -> str:
    """Format a number of things as `1 connection` or `12,345 connections`."""
    return f"{value:,.0f} {noun}" if round(value) == 1 else f"{value:,.0f} {noun}s"


def share(value: float) -> str:
    """Format a share as `99.95 %`, rounded down, so that only 1 is 100 %, and only 0 is 0 %."""
    if 0 < value < _SHARE_MIN:
        return f"below {_SHARE_MIN * 100:g} %"
    return f"{int(value * 10_000 + 1e-9) / 100:g} %"
