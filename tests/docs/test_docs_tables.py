"""Tables of README.md and docs/: each row belongs to a table that has a head."""

from __future__ import annotations

import re

import pytest

from tests.docs.blocks import ROOT, pages

_FENCE = re.compile(r"^ *```")
_RULE = re.compile(r"^ *\|[-:| ]+\|$")


def rows_without_head(text: str) -> list[int]:
    """Return the numbers of the lines that begin a table but have no line of dashes below: a blank line tore it."""
    found = []
    is_code = False
    previous = ""
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if _FENCE.match(line):
            is_code = not is_code
        elif not is_code and line.lstrip().startswith("|") and not previous.lstrip().startswith("|"):
            below = lines[number] if number < len(lines) else ""
            if not _RULE.match(below):
                found.append(number)
        previous = line
    return found


def test_a_torn_table_is_found() -> None:
    head = "| a | b |\n|---|---|\n"
    assert rows_without_head(f"text\n\n{head}| 1 | 2 |\n\n| 3 | 4 |\n| 5 | 6 |\n") == [7]
    assert rows_without_head(f"{head}| 1 | 2 |\n\n```\n| no table\n```\n\n{head}") == []
    assert rows_without_head("| the last line |") == [1]


@pytest.mark.parametrize("page", pages())
def test_no_table_is_torn(page: str) -> None:
    assert rows_without_head((ROOT / page).read_text()) == []
