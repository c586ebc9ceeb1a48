"""Generator of docs/conformance.md: the specifications' statements, deviations first, with their tests.

The statements are in tests/conformance/*.toml. A test names by a marker which of them it verifies:

    @pytest.mark.conforms("kip-368.20")

Markers are found in the tests' syntax trees, without imports. `make generate` writes the page; `problems` finds
inconsistencies, and a test (tests/conformance) fails upon any.
"""

from __future__ import annotations

import ast
import re
import textwrap
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SPECIFICATIONS = ("pip-1", "pip-30", "kip-590", "kip-368")
"""Specifications in the order of the page; each has a file of this name."""

PAGE = Path("docs/conformance.md")
STATEMENTS = Path("tests/conformance")
MARKER = "conforms"

HOLDS, DEVIATES, NOT_APPLICABLE = "yes", "deviates", "not applicable"
_WORDS = {HOLDS: "holds", DEVIATES: "deviates", NOT_APPLICABLE: "not applicable"}
_KEYS = {"id", "section", "says", "paraphrase", "holds", "deviation", "note", "effect", "where"}
_WIDTH = 120


class StatementsInvalid(Exception):
    """A malformed file of statements; the text says where."""


@dataclass(frozen=True)
class Statement:
    """One statement of a specification.

    ``says``: quoted, or said closely where ``is_paraphrase``. ``deviation``: its subject, in some words. ``note``: how
    the proxy does it; of a deviation what it does instead, and why. ``effect``: what a deviation means for operators
    and clients. ``where``: `file`, or `file:symbol`; the page leaves it out.
    """

    id: str
    section: str
    says: str
    is_paraphrase: bool
    holds: str
    deviation: str
    note: str
    effect: str
    where: tuple[str, ...]


@dataclass(frozen=True)
class Specification:
    """One specification, with its statements in their order."""

    name: str
    title: str
    source: str
    statements: tuple[Statement, ...]


@dataclass(frozen=True)
class Mark:
    """A test's marker for a statement."""

    statement: str
    file: Path
    test: str


def load(root: Path) -> tuple[Specification, ...]:
    """Read the statements; raises StatementsInvalid."""
    return tuple(_specification(root / STATEMENTS / f"{name}.toml", name) for name in SPECIFICATIONS)


def _specification(file: Path, name: str) -> Specification:
    tables = tomllib.loads(file.read_text(encoding="utf-8"))
    statements = tuple(_statement(file, entry) for entry in tables["statement"])
    # In any order: one that is added gets the next number, wherever it stands, so that none changes its id.
    wanted = [f"{name}.{number}" for number in range(1, len(statements) + 1)]
    if sorted(statement.id for statement in statements) != sorted(wanted):
        raise StatementsInvalid(f"{file}: its ids are not {wanted[0]} to {wanted[-1]}, each once")
    return Specification(name, tables["title"], tables["source"], statements)


def _statement(file: Path, entry: dict[str, object]) -> Statement:
    def text(key: str) -> str:
        return " ".join(str(entry.get(key, "")).split())

    unknown = entry.keys() - _KEYS
    if unknown:
        raise StatementsInvalid(f"{file}: {entry.get('id')} has {', '.join(sorted(unknown))}")
    where = entry.get("where", [])
    assert isinstance(where, list)
    found = Statement(
        id=text("id"),
        section=text("section"),
        says=text("says"),
        is_paraphrase=bool(entry.get("paraphrase")),
        holds=text("holds"),
        deviation=text("deviation"),
        note=text("note"),
        effect=text("effect"),
        where=tuple(map(str, where)),
    )
    if found.holds not in _WORDS:
        raise StatementsInvalid(f"{file}: {found.id} holds {found.holds!r}: one of {', '.join(_WORDS)}")
    if not found.section or not found.says:
        raise StatementsInvalid(f"{file}: {found.id} says nothing, or not in which section")
    if bool(found.deviation) != (found.holds == DEVIATES):
        raise StatementsInvalid(f"{file}: {found.id} holds {found.holds!r}, and its deviation is {found.deviation!r}")
    if bool(found.effect) != (found.holds == DEVIATES):
        raise StatementsInvalid(f"{file}: {found.id} holds {found.holds!r}, and its effect is {found.effect!r}")
    if not found.note and found.holds != HOLDS:
        raise StatementsInvalid(f"{file}: {found.id} gives no reason (note)")
    if bool(found.where) == (found.holds == NOT_APPLICABLE):
        raise StatementsInvalid(f"{file}: {found.id} says {'' if found.where else 'not '}where, but is {found.holds!r}")
    return found


# ---- the tests' markers


def marks(root: Path) -> list[Mark]:
    """Find all markers of all tests; raises StatementsInvalid for one that cannot be read without running it."""
    files = sorted((root / "tests").rglob("test_*.py"))
    return [mark for file in files for mark in _marks_in(file, file.relative_to(root))]


def _marks_in(file: Path, shown: Path) -> Iterator[Mark]:
    text = file.read_text(encoding="utf-8")
    if f"mark.{MARKER}" not in text:
        return
    tree = ast.parse(text)
    read = 0
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) or not function.name.startswith("test_"):
            continue
        for decorator in function.decorator_list:
            if isinstance(decorator, ast.Call) and _is_marker(decorator.func):
                read += 1
                for argument in decorator.args:
                    if not isinstance(argument, ast.Constant) or not isinstance(argument.value, str):
                        raise StatementsInvalid(f"{shown}:{argument.lineno}: {MARKER} takes ids as they stand")
                    yield Mark(argument.value, shown, function.name)
    if read != sum(_is_marker(node) for node in ast.walk(tree)):
        raise StatementsInvalid(f"{shown}: {MARKER} stands where it decorates no test")


def _is_marker(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == MARKER and ast.unparse(node.value).endswith("mark")


# ---- what does not fit together


def problems(root: Path) -> list[str]:
    """Return the inconsistencies, in one sentence each."""
    specifications, found = load(root), marks(root)
    statements = {statement.id: statement for one in specifications for statement in one.statements}
    shown = {mark.statement for mark in found}
    wrong = [
        f"{mark.file}: {mark.test} shows {mark.statement}, which no specification has"
        for mark in found
        if mark.statement not in statements
    ]
    for statement in statements.values():
        applies = statement.holds != NOT_APPLICABLE
        if applies and statement.id not in shown:
            wrong.append(f"{statement.id} {_WORDS[statement.holds]}, but no test shows it")
        if not applies and statement.id in shown:
            wrong.append(f"{statement.id} is not applicable, but a test shows it")
        wrong += [f"{statement.id}: {place} does not exist" for place in statement.where if not exists(root, place)]
    return wrong


def exists(root: Path, place: str) -> bool:
    """Return True if a file, and a symbol in it, exists: in Python a definition, elsewhere a word."""
    name, _, symbol = place.partition(":")
    file = root / name
    if not file.is_file():
        return False
    if not symbol:
        return True
    if file.suffix == ".py":
        return symbol in _symbols(file)
    return re.search(rf"\b{re.escape(symbol)}\b", file.read_text(encoding="utf-8")) is not None


@cache
def _symbols(file: Path) -> frozenset[str]:
    return frozenset(_defined(ast.parse(file.read_text(encoding="utf-8")).body, ""))


def _defined(body: list[ast.stmt], prefix: str) -> Iterator[str]:
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield prefix + name
            case ast.ClassDef(name=name):
                yield prefix + name
                yield from _defined(node.body, f"{prefix}{name}.")
            case ast.Assign(targets=targets):
                yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield prefix + name


# ---- the page

_HEAD = """\
<!-- Made by `make generate` from tests/conformance/*.toml and the tests' markers. Do not edit. -->
# Conformance

Every statement of the four specifications: deviations with their reasons, then what holds, then what does not apply.

| specification | statements | hold | deviate | not applicable |
|---|---|---|---|---|
{counts}

“…” quotes a statement as it stands, errors of spelling included. Without quotation marks, in short, are those that a
specification says over several lines, and the cases that its own implementation tests.

Names in brackets lead to files of tests, a number says how many tests there (if several) show the statement: those that
have its id in their marker, as `@pytest.mark.conforms("{example}")`. The tests of `tests/e2e` run real brokers and
clients. The code that fulfils a statement is its `where` in `tests/conformance/*.toml`. CI fails where a statement that
applies has no test, where such code is gone, and where this page is not what the tests say.
"""
_CHAPTERS = {
    DEVIATES: "Deviations",
    HOLDS: "Statements that hold",
    NOT_APPLICABLE: "Statements that do not apply",
}


def page(root: Path) -> str:
    """Write the page."""
    specifications, found = load(root), list(dict.fromkeys(marks(root)))
    files = {_short(mark.file): mark.file for mark in found}
    if len(files) != len({mark.file for mark in found}):
        raise StatementsInvalid("two files of tests have one name: their links would lead to the same file")
    counts = "\n".join(map(_counts, specifications))
    lines = [_HEAD.format(example=specifications[-1].statements[0].id, counts=counts).rstrip()]
    for holds, chapter in _CHAPTERS.items():
        lines += ["", f"## {chapter}"]
        for one in specifications:
            chosen = [statement for statement in one.statements if statement.holds == holds]
            lines += ["", f"### {one.title}"] if chosen else []
            for section in dict.fromkeys(statement.section for statement in chosen):
                lines += ["", f"#### {section}", ""]
                for statement in chosen:
                    if statement.section == section:
                        lines += _entry(statement, [mark for mark in found if mark.statement == statement.id])
    return "\n".join([*lines, "", *(f"[{name}]: ../{file}" for name, file in sorted(files.items()))]) + "\n"


def _counts(one: Specification) -> str:
    counted = [sum(statement.holds == word for statement in one.statements) for word in _WORDS]
    return f"| [{one.title}]({one.source}) | {len(one.statements)} | {' | '.join(map(str, counted))} |"


def _entry(statement: Statement, shown_by: list[Mark]) -> Iterator[str]:
    """Yield a statement's lines: one item of a list, of a deviation with its parts below it."""
    says = statement.says.replace("<", "&lt;").replace("[", "\\[")
    says = says if statement.is_paraphrase else f"“{says}”"
    files = Counter(_short(mark.file) for mark in shown_by).items()
    tests = ", ".join(f"[{name}]" if count == 1 else f"[{name}] {count}" for name, count in files)
    if statement.holds == DEVIATES:
        yield from _item(f"* **{statement.id}: {statement.deviation}.** {says}")
        yield from _item(f"  * {statement.note}")
        yield from _item(f"  * *For operators and clients:* {statement.effect}")
        yield from _item(f"  * {tests}")
    else:
        yield from _item(
            " ".join(filter(None, (f"* **{statement.id}**", says, statement.note, tests and f"({tests})")))
        )


def _short(file: Path) -> str:
    return file.stem.removeprefix("test_")


def _item(text: str) -> list[str]:
    indent = " " * (text.index("*") + 2)
    return textwrap.wrap(text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
