"""docs/conformance.md: every statement has its test, every marker its statement, and the page is what they say."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from local import conformance

ROOT = Path(__file__).resolve().parents[2]


def test_statements_places_and_markers_fit_together() -> None:
    assert conformance.problems(ROOT) == []


def test_the_page_is_what_is_generated() -> None:
    assert (ROOT / conformance.PAGE).read_text() == conformance.page(ROOT), "run `make generate`"


def test_no_specification_is_left_out() -> None:
    assert [one.name for one in conformance.load(ROOT)] == ["pip-1", "pip-30", "kip-590", "kip-368"]
    assert all(len(one.statements) > 25 for one in conformance.load(ROOT))


# ---- each rule, in a tree made for it

STATEMENT = """
[[statement]]
id = "{name}.1"
section = "Design"
says = "It works."
holds = "yes"
where = ["code.py:Thing.works"]
"""
CODE = """
LIMIT: int = 1
OTHER = 2


class Thing:
    field: int

    async def works(self) -> None: ...
"""
TEST = """
import pytest


@pytest.mark.conforms({ids})
async def test_it() -> None: ...
"""


class Tree:
    """A tree of its own in which all fits together, until something is changed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / conformance.STATEMENTS).mkdir(parents=True)
        for name in conformance.SPECIFICATIONS:
            self.write(name, STATEMENT.format(name=name))
        (root / "code.py").write_text(CODE)
        (root / "page.md").write_text("The word stands here.")
        self.test(", ".join(f'"{name}.1"' for name in conformance.SPECIFICATIONS))

    def write(self, name: str, statements: str) -> None:
        head = f'title = "{name.title()}"\nsource = "https://example.org/{name}"\n'
        (self.root / conformance.STATEMENTS / f"{name}.toml").write_text(head + statements)

    def change(self, old: str, new: str) -> None:
        statement = STATEMENT.format(name="pip-1")
        assert old in statement
        self.write("pip-1", statement.replace(old, new, 1))

    def test(self, ids: str) -> None:
        (self.root / "tests" / "test_it.py").write_text(TEST.format(ids=ids))

    def problems(self) -> list[str]:
        return conformance.problems(self.root)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_where_all_fits_together_nothing_is_wrong(tree: Tree) -> None:
    assert tree.problems() == []
    page = conformance.page(tree.root)
    assert "| [Kip-590](https://example.org/kip-590) | 1 | 1 | 0 | 0 |" in page
    assert "\n### Kip-590\n\n#### Design\n\n* **kip-590.1** “It works.” ([it])\n" in page
    assert page.endswith("\n[it]: ../tests/test_it.py\n")


def test_the_page_counts_the_tests_of_a_file_that_show_a_statement(tree: Tree) -> None:
    test = (tree.root / "tests" / "test_it.py").read_text()
    (tree.root / "tests" / "test_it.py").write_text(test + test.replace("test_it", "test_more") + test)
    assert "* **kip-590.1** “It works.” ([it] 2)\n" in conformance.page(tree.root)


def test_two_files_of_one_name_would_have_one_link(tree: Tree) -> None:
    (tree.root / "tests" / "more").mkdir()
    (tree.root / "tests" / "more" / "test_it.py").write_text(TEST.format(ids='"pip-1.1"'))
    with pytest.raises(conformance.StatementsInvalid, match="two files of tests have one name"):
        conformance.page(tree.root)


def test_a_statement_without_a_test(tree: Tree) -> None:
    tree.test('"pip-30.1", "kip-590.1", "kip-368.1"')
    assert tree.problems() == ["pip-1.1 holds, but no test shows it"]


def test_a_deviation_needs_a_test_too_and_stands_first_with_reason_and_effect(tree: Tree) -> None:
    tree.change('holds = "yes"', 'holds = "deviates"\ndeviation = "It stands"\nnote = "Because."\neffect = "Wait."')
    assert tree.problems() == []
    page = conformance.page(tree.root)
    parts = ("“It works.”", "  * Because.", "  * *For operators and clients:* Wait.", "  * [it]\n")
    assert "\n* **pip-1.1: It stands.** " + "\n".join(parts) in page
    assert page.index("**pip-1.1: ") < page.index("**pip-30.1**")
    tree.test('"pip-30.1", "kip-590.1", "kip-368.1"')
    assert tree.problems() == ["pip-1.1 deviates, but no test shows it"]


def test_a_statement_that_is_not_applicable_must_have_no_test(tree: Tree) -> None:
    tree.change('holds = "yes"\nwhere = ["code.py:Thing.works"]', 'holds = "not applicable"\nnote = "Why."')
    assert tree.problems() == ["pip-1.1 is not applicable, but a test shows it"]


def test_a_marker_of_no_statement(tree: Tree) -> None:
    tree.test(", ".join(f'"{name}.1"' for name in conformance.SPECIFICATIONS) + ', "pip-1.2"')
    assert tree.problems() == ["tests/test_it.py: test_it shows pip-1.2, which no specification has"]


def test_a_statement_that_is_added_gets_the_next_number_wherever_it_stands(tree: Tree) -> None:
    first = STATEMENT.format(name="pip-1")
    second = first.replace("pip-1.1", "pip-1.2")
    third = first.replace("pip-1.1", "pip-1.3").replace("Design", "Motivation")
    tree.write("pip-1", second + third + first)
    assert tree.problems() == [f"pip-1.{number} holds, but no test shows it" for number in (2, 3)]
    page = conformance.page(tree.root)
    assert page.count("### Design") == len(conformance.SPECIFICATIONS)
    assert page.index("**pip-1.2**") < page.index("**pip-1.1**") < page.index("### Motivation")


@pytest.mark.parametrize("place", ["code.py", "code.py:LIMIT", "code.py:OTHER", "code.py:Thing.field", "page.md:word"])
def test_a_place_that_is_there(tree: Tree, place: str) -> None:
    tree.change("code.py:Thing.works", place)
    assert tree.problems() == []


@pytest.mark.parametrize(
    "place", ["gone.py", "code.py:works", "code.py:Thing.gone", "page.md:wor", "tests", "page.md:W"]
)
def test_a_place_that_is_not(tree: Tree, place: str) -> None:
    tree.change("code.py:Thing.works", place)
    assert tree.problems() == [f"pip-1.1: {place} does not exist"]


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ('"yes"', '"maybe"', "pip-1.1 holds 'maybe'"),
        ('"yes"', '"deviates"\ndeviation = "It stands"\neffect = "Wait."', "pip-1.1 gives no reason"),
        ('"yes"', '"deviates"\ndeviation = "It stands"\nnote = "Because."', "its effect is ''"),
        ('"yes"', '"yes"\neffect = "Wait."', "its effect is 'Wait.'"),
        ('"yes"', '"deviates"\nnote = "Because."', "its deviation is ''"),
        ('"yes"', '"yes"\ndeviation = "It stands"', "its deviation is 'It stands'"),
        ('"yes"', '"not applicable"\nnote = "Why."', "pip-1.1 says where"),
        ('where = ["code.py:Thing.works"]', "", "pip-1.1 says not where"),
        ("It works.", " ", "pip-1.1 says nothing"),
        ('"Design"', '""', "not in which section"),
        ("pip-1.1", "pip-1.2", "ids are not pip-1.1 to pip-1.1, each once"),
        ("pip-1.1", "pip-30.1", "ids are not pip-1.1 to pip-1.1, each once"),
        ("\n", "\n" + STATEMENT.format(name="pip-1"), "ids are not pip-1.1 to pip-1.2, each once"),
        ("where", "were", "pip-1.1 has were"),
    ],
)
def test_a_statement_that_has_not_the_form(tree: Tree, old: str, new: str, text: str) -> None:
    tree.change(old, new)
    with pytest.raises(conformance.StatementsInvalid, match=text):
        tree.problems()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (TEST.format(ids="*IDS"), "takes ids as they stand"),
        (TEST.format(ids="ID"), "takes ids as they stand"),
        ('import pytest\npytestmark = pytest.mark.conforms("pip-1.1")\n', "decorates no test"),
        (TEST.format(ids='"pip-1.1"').replace("test_it", "helper"), "decorates no test"),
        (TEST.format(ids='"pip-1.1"').replace("async def test_it() -> None", "class TestIt"), "decorates no test"),
        ("from pytest import mark\nconforms = mark.conforms\n", "decorates no test"),
    ],
)
def test_a_marker_that_cannot_be_read_without_running_it(tree: Tree, text: str, error: str) -> None:
    (tree.root / "tests" / "test_other.py").write_text(text)
    with pytest.raises(conformance.StatementsInvalid, match=rf"tests/test_other.py.*{error}"):
        tree.problems()


# ---- PIP-30's clean interface

MECHANISMS = ("sasl", "scram", "gssapi", "jwt", "kerberos", "bcrypt")


def _imports(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Import(names=names):
                found |= {alias.name for alias in names}
            case ast.ImportFrom(module=str(module), names=names):
                found |= {module, *(f"{module}.{alias.name}" for alias in names)}
    return found


def _knows_a_mechanism(module: str) -> bool:
    return module.partition(".")[0] == "auth" or any(mechanism in module.lower() for mechanism in MECHANISMS)


@pytest.mark.conforms("pip-30.40")
def test_forwarder_modules_import_no_authentication_mechanism() -> None:
    """No module of the forwarder, nor of what it is built on, imports a provider or a mechanism's library."""
    files = [file for room in ("proxy/forwarder", "proxy/runtime", "proto") for file in (ROOT / room).rglob("*.py")]
    assert len(files) > 60
    knowing = {file.name: found for file in files if (found := set(filter(_knows_a_mechanism, _imports(file))))}
    assert knowing == {}
