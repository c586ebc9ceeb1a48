"""What becomes of each command that the pages show: run by tests/e2e/test_docs_commands.py, or not run, and why not.

A command is named by its page and its first line (Command.head). One that is neither run nor in not_here.toml fails
test_docs_plan.py, and so does an entry for a command that no page shows any more.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

EXECUTED_PAGES = ("docs/getting-started.md",)
"""Run as a whole, in the order of the page."""

EXECUTED_SECTIONS = (
    ("docs/authentication.md", "Clients"),
    ("docs/analytics-receiver.md", "A first configuration"),
    ("docs/analytics.md", "A first run on one machine"),
    ("docs/monitoring.md", "The report"),
)
"""Sections of other pages that are run in their order."""

SAME_AS = {"README.md": ("docs/getting-started.md", "docs/analytics.md")}
"""Pages that repeat commands of others, letter by letter."""


def _read() -> dict[str, dict[str, str]]:
    """By page and command: why it is not run."""
    tables = tomllib.loads(Path(__file__).with_name("not_here.toml").read_text())
    return {
        page: {head: entry["reason"] for entry in entries for head in entry["commands"].splitlines()}
        for page, entries in tables.items()
    }


NOT_HERE = _read()


def reason(page: str, head: str) -> str:
    """Why a command is not run; empty where it is."""
    return NOT_HERE.get(page, {}).get(head, "")
