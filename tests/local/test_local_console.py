"""Progress replaces itself on a terminal and is thinned out in a log."""

from __future__ import annotations

import io

from local.console import Console, tail


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_shows_one_line_a_stage() -> None:
    out = Terminal()
    console = Console(out)
    for text in ("Fetching: 1 MB", "Fetching: 2 MB", "Unpacking"):
        console(text)
    console.line("done")
    assert out.getvalue() == "Fetching: 1 MB\r\x1b[KFetching: 2 MB\nUnpacking\ndone\n"


def test_log_gets_a_line_every_few_seconds() -> None:
    out = io.StringIO()
    console = Console(out, interval_s=1000)
    for text in ("Fetching: 1 MB", "Fetching: 2 MB", "Unpacking", "Fetching: 3 MB"):
        console(text)
    assert out.getvalue() == "Fetching: 1 MB\nUnpacking\nFetching: 3 MB\n"
    console = Console(out, interval_s=0)
    for text in ("a: 1", "a: 2"):
        console(text)
    assert out.getvalue().endswith("a: 1\na: 2\n")


def test_progress_of_several_tasks_replaces_no_line_on_a_terminal() -> None:
    out = Terminal()
    console = Console(out, interval_s=1000, replaces=False)
    for text in ("Fetching: 1 MB", "Fetching: 2 MB", "Unpacking"):
        console(text)
    assert out.getvalue() == "Fetching: 1 MB\nUnpacking\n"


def test_tail() -> None:
    assert tail("a\nb\nc\n", 2) == "b\nc"
