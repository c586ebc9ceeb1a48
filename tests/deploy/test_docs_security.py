"""docs/security.md: each line of the threat model names tests, and these are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
MODEL = PAGE.partition("## Threat model")[2]


def rows() -> list[str]:
    """The lines of its tables, without their heads."""
    lines = [line for line in MODEL.splitlines() if line.startswith("| ")]
    return [line for line in lines if not line.startswith("| tries |")]


def test_each_line_names_the_tests_that_show_it() -> None:
    assert len(rows()) > 30
    for row in rows():
        assert re.search(r"`test_\w+`", row.rpartition(" | ")[2]), row


def test_each_test_is_there() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    files = (path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    there = {name for text in files for name in re.findall(r"def (test_\w+)\(", text)}
    assert named - there == set()
