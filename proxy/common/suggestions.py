"""Suggestions for a mistyped name: the known name that it resembles."""

from collections.abc import Iterable
from difflib import get_close_matches

SHOWN_CHARACTERS_MAX = 60
"""Longest part of a mistyped name that an error quotes."""


def quote_name(name: str) -> str:
    """Quote a name for an error: one line of printable characters, cut to SHOWN_CHARACTERS_MAX."""
    cut = name if len(name) <= SHOWN_CHARACTERS_MAX else name[:SHOWN_CHARACTERS_MAX] + "…"
    return '"' + "".join(one if one.isprintable() else "�" for one in cut) + '"'


def closest_name(name: str, known: Iterable[str]) -> str | None:
    """Find the known name that a mistyped one resembles, whatever its capitals; None where none does."""
    by_folded = {one.lower().replace("-", "_"): one for one in known}
    folded = name[: 4 * SHOWN_CHARACTERS_MAX].lower().replace("-", "_")
    found = get_close_matches(folded, by_folded, n=1)
    return by_folded[found[0]] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Say which known name was probably meant, as the end of a sentence; nothing where none resembles it."""
    found = closest_name(name, known)
    return "" if found is None else f'; did you mean "{found}"?'
