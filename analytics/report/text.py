"""Names from the tables as text for the page: bounded, and without invisible characters."""

from __future__ import annotations

import unicodedata
from html import escape
from typing import Final

NAME_CHARS_MAX: Final = 80
"""Maximum of characters of a name: principals, brokers and label values have no limit of their own."""
_TAIL_CHARS: Final = 12
_INVISIBLE: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode's categories of control and format characters (which can change a line's direction) and unassigned ones."""


def display_name(value: str) -> str:
    """Return the name for display: `(none)` if empty, control characters escaped, a long one's middle left out."""
    if len(value) > NAME_CHARS_MAX:
        value = f"{value[: NAME_CHARS_MAX - _TAIL_CHARS - 1]}…{value[-_TAIL_CHARS:]}"
    return "".join(map(_visible, value)) or "(none)"


def html_text(value: str) -> str:
    """Return `shown(value)` for HTML, between tags and in attributes."""
    return escape(display_name(value), quote=True)


def _visible(char: str) -> str:
    return ascii(char)[1:-1] if unicodedata.category(char) in _INVISIBLE else char
