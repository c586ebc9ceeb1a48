"""Words that this project has given up, in code, documentation, metrics' help and logs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

OLD_NAMES = (
    "RelayKeeper",
    "KeptRelay",
    "Mover",
    "stand_in_line",
    "in_line",
    "RelayNotBegun",
    "Framer",
    "FramedStreams",
    "SplicedLine",
    "LookupLine",
    "RelayLine",
    "nobody_judges",
    "ClientWire",
    "BrokerSide",
    "OwnedTasks",
    "ShelfState",
    "AdminLine",
    "set_aside",
    "AddressTableLine",
    "_met_defect",
    "Farewell",
    "say_farewell",
    "budget_owner",
    "current_turn",
    "must_hear",
    "must_hear_error",
    "must_hear_end",
    "hear_nothing",
    "shelf",
    "desk",
    "Doors",
    "doors",
    "Question",
    "Life",
    "StandbyForwarder",
    "_keep_shelf",
    "door_streams",
    "judged_clients",
    "not_judged",
    "nobody_harmed",
    "assert_nobody_says_otherwise",
    "nobody_says_otherwise",
    "NobodysRounds",
)
OLD_PHRASES = (
    r"\banew\b",
    r"\bwhoever\b",
    r"\bsomebody\b",
    r"\b[Ss]tands? in line\b",
    r"\bdef test_\w*(nobod|everybod|judg|shelf|shelves|desk|in_line)",
)
OLD_PHRASES_OUTSIDE_OF_TESTS = ("See the module",)
HISTORY = {"CHANGELOG.md"}
"""What happened is told in the words of its time."""


def files(*endings: str) -> list[Path]:
    """Return the tree's files with these endings, generated and third-party ones left out."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    found = (ROOT / name for name in listed if name.endswith(endings) and "_pb2" not in name and name not in HISTORY)
    return [path for path in found if path.is_file() and path != Path(__file__)]


CODE = [path for path in files(".py", ".toml", ".sh", ".tpl", ".yaml", ".yml") if ROOT / "tests" not in path.parents]
PAGES = files(".md")
TESTS = [path for path in files(".py", ".toml") if ROOT / "tests" in path.parents]


def places(pattern: str, paths: list[Path]) -> list[str]:
    """Return file and line of each match."""
    compiled = re.compile(pattern)
    return [
        f"{path.relative_to(ROOT)}:{number}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if compiled.search(line)
    ]


@pytest.mark.parametrize("name", OLD_NAMES)
def test_no_old_name_is_left(name: str) -> None:
    assert places(rf"\b{name}\b", [*CODE, *PAGES, *TESTS]) == []


@pytest.mark.parametrize("phrase", OLD_PHRASES)
def test_no_riddle_is_left(phrase: str) -> None:
    assert places(phrase, [*CODE, *PAGES, *TESTS]) == []


@pytest.mark.parametrize("phrase", OLD_PHRASES_OUTSIDE_OF_TESTS)
def test_no_riddle_is_left_outside_of_tests(phrase: str) -> None:
    assert places(phrase, [*CODE, *PAGES]) == []
