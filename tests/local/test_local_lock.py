"""deploy/local/lock.py: pins with hashes, and requirements files that agree with constraints.txt and pyproject.toml."""

from __future__ import annotations

import re

import pytest
from local.lock import CONSTRAINTS, EXTRAS, REQUIREMENTS, canonical, direct_requirements, is_file_of, read_pins, render

PINS = read_pins(CONSTRAINTS.read_text())


def test_rendered_pins_are_read_back_unchanged() -> None:
    pins = {"a-b": ("A_b", "1.0", ("sha256:" + "0" * 64, "sha256:" + "1" * 64)), "c": ("c", "2", ())}
    text = render("Some packages", pins)
    assert text.startswith("# Some packages; made by `make lock`: do not edit.\nA_b==1.0 \\\n    --hash=sha256:000")
    assert read_pins(text) == pins


@pytest.mark.parametrize(("name", "expected"), [("PyJWT", "pyjwt"), ("a_b.c--d", "a-b-c-d")])
def test_names_as_indexes_compare_them(name: str, expected: str) -> None:
    assert canonical(name) == expected


@pytest.mark.parametrize(
    ("filename", "is_of_it"),
    [
        ("idna-3.20-py3-none-any.whl", True),
        ("idna-3.20.tar.gz", True),
        ("Idna-3.20.zip", True),
        ("idna-3.20.1-py3-none-any.whl", False),
        ("idna-3.20.1.tar.gz", False),
        ("idna-3.20.post1.tar.gz", False),
        ("idna_ssl-3.20.tar.gz", False),
    ],
)
def test_files_of_one_version(filename: str, is_of_it: bool) -> None:
    assert is_file_of(filename, "idna", "3.20") == is_of_it


def test_every_pin_has_hashes() -> None:
    assert [name for name, (_, _, hashes) in PINS.items() if not hashes] == []


def test_each_group_has_its_file_and_no_other_is_there() -> None:
    assert {path.stem for path in REQUIREMENTS.iterdir()} == set(EXTRAS)


@pytest.mark.parametrize("group", EXTRAS)
def test_a_file_holds_the_pins_of_constraints(group: str) -> None:
    pins = read_pins((REQUIREMENTS / f"{group}.txt").read_text())
    assert pins == {name: PINS[name] for name in pins}


@pytest.mark.parametrize("group", EXTRAS)
def test_a_file_holds_what_pyproject_asks_for(group: str) -> None:
    pins = read_pins((REQUIREMENTS / f"{group}.txt").read_text())
    names = {canonical(re.split(r"[<>=!~;\[ ]", wanted)[0]) for wanted in direct_requirements(group)}
    assert names <= pins.keys()
