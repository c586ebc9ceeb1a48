"""Every command of README.md and docs/ is run, or stands in a list with the reason why not."""

from __future__ import annotations

import pytest

from tests.docs.blocks import SHELLS, Block, blocks, commands, pages, parse
from tests.docs.plan import EXECUTED_PAGES, EXECUTED_SECTIONS, NOT_HERE, SAME_AS, reason

PAGE = """\
# Title
text
```console
$ first --one \\
      --two           # continued
output 1

output 2
$ second
```
## Below
   ```sh
   # a comment
   third   # its comment
   fourth
   ```
```toml
# /etc/some/file.toml
a = 1
```
```toml
# a comment
```
```
$ no language, no command
```
"""


def test_blocks_of_a_page() -> None:
    found = parse("a.md", PAGE)
    assert [(one.line, one.section, one.language, one.file) for one in found] == [
        (3, "Title", "console", ""),
        (12, "Below", "sh", ""),
        (17, "Below", "toml", "/etc/some/file.toml"),
        (21, "Below", "toml", ""),
        (24, "Below", "", ""),
    ]
    assert found[1].text == "# a comment\nthird   # its comment\nfourth\n", "without the indentation of its fence"


def test_commands_of_a_block() -> None:
    console, shell, toml, *_, bare = parse("a.md", PAGE)
    first, second = commands(console)
    assert first.text == "first --one \\\n      --two           # continued"
    assert (first.where, first.head) == ("a.md:4", "first --one")
    assert first.output == ("output 1", "", "output 2")
    assert (second.where, second.head, second.output) == ("a.md:9", "second", ())
    assert [(one.where, one.head) for one in commands(shell)] == [("a.md:14", "third"), ("a.md:15", "fourth")]
    assert commands(toml) == commands(bare) == []


def test_a_block_without_an_end_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"a\.md:2: this block does not end"):
        parse("a.md", "text\n```sh\nls\n")


def _executed(block: Block) -> bool:
    return block.page in EXECUTED_PAGES or (block.page, block.section) in EXECUTED_SECTIONS


def _run_elsewhere(page: str) -> set[str]:
    """The commands of the pages that this page repeats, as far as these are run."""
    others = [block for other in SAME_AS.get(page, ()) for block in blocks(other) if _executed(block)]
    return {command.head for block in others for command in commands(block) if not reason(block.page, command.head)}


@pytest.mark.parametrize("page", pages())
def test_each_command_is_run_or_has_a_reason(page: str) -> None:
    elsewhere = _run_elsewhere(page)
    unknown = [
        f"{command.where}: {command.head}"
        for block in blocks(page)
        for command in commands(block)
        if not _executed(block) and not reason(page, command.head) and command.head not in elsewhere
    ]
    assert not unknown, "neither run nor in NOT_HERE of tests/docs/plan.py"


@pytest.mark.parametrize("page", sorted(NOT_HERE))
def test_each_reason_is_for_a_command_that_is_shown(page: str) -> None:
    shown = {command.head for block in blocks(page) for command in commands(block)}
    assert set(NOT_HERE[page]) - shown == set()


def test_executed_sections_are_there() -> None:
    for page, section in EXECUTED_SECTIONS:
        found = [block for block in blocks(page) if block.section == section]
        assert any(commands(block) for block in found), f"{page}, {section}"
    assert set(EXECUTED_PAGES) <= set(pages())


TRIED_BY = {
    "toml": "test_docs_configurations.py",
    "yaml": "test_docs_configurations.py",
    "properties": "tests/e2e/test_docs_commands.py, which gives these lines to a broker",
    "ini": "test_docs_getting_started.py",
    "": "no test: a picture, or what a program wrote",
}
"""Languages of blocks that are no commands; a Python program that is a file (`# name.py`) is run by its command."""

QUERIES = "tests/analytics/test_analytics_docs_queries.py"
CODE_TRIED_BY = {
    ("docs/targets.md", "java"): "tests/e2e/test_sni.py",
    ("docs/http.md", "java"): "tests/e2e/test_sni.py",
    ("docs/authentication.md", "python"): "tests/auth/test_docs_providers.py",
    ("docs/analytics.md", "python"): QUERIES,
    ("docs/analytics.md", "sql"): QUERIES,
    ("docs/analytics-source.md", "python"): "tests/e2e/test_analytics_source.py",
    ("docs/analytics-tables.md", "python"): QUERIES,
    ("docs/analytics-tables.md", "sql"): QUERIES,
}


@pytest.mark.parametrize("page", pages())
def test_each_other_block_is_tried_by_somebody(page: str) -> None:
    for block in blocks(page):
        tried = block.language in (*SHELLS, *TRIED_BY) or (block.file and _executed(block))
        assert tried or (block.page, block.language) in CODE_TRIED_BY, f"{block.where}: which test tries this?"


def test_a_command_prompt_stands_only_in_a_console_block() -> None:
    """Else the command would not be found: neither by a reader that copies it nor by these tests."""
    for page in pages():
        for block in blocks(page):
            if block.language not in SHELLS:
                assert not any(line.startswith("$ ") for line in block.text.splitlines()), block.where
