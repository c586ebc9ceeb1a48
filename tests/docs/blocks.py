"""The fenced blocks of a Markdown page, and the commands in them.

* ``console``: a line that begins with ``$ `` is a command, what follows up to the next one is its output.
* ``sh``, ``bash``: every line is a command; a line that begins with ``#`` is a comment.
* A command goes on in the next line where its line ends with a backslash.
* A block of another language whose first line is ``# NAME``, a file's name or absolute path, is that file's content.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHELLS = ("console", "sh", "bash")

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[a-z]*)(?: [a-z]+)?\s*$")
_HEADING = re.compile(r"^#+ (?P<title>.+)$")
_FILE = re.compile(r"^# (?P<name>/?[\w./-]+\.\w+)$")
_COMMENT = re.compile(r"\s+#\s.*$")


@dataclass(frozen=True)
class Block:
    """One fenced block: the page by its path in the tree, the line of its fence, the heading above it."""

    page: str
    line: int
    section: str
    language: str
    text: str

    @property
    def where(self) -> str:
        """Page and line, as compilers say it."""
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str:
        """The name of the file that the block is the content of; empty where it is none."""
        if self.language in SHELLS:
            return ""
        named = _FILE.match(self.text.partition("\n")[0])
        return named["name"] if named else ""


@dataclass(frozen=True)
class Command:
    """One command with the output that the page shows."""

    where: str
    text: str
    output: tuple[str, ...] = ()

    @property
    def head(self) -> str:
        """Its first line without comment and backslash: its name in the lists of plan.py."""
        return _COMMENT.sub("", self.text.partition("\n")[0]).removesuffix("\\").rstrip()


def pages() -> list[str]:
    """README.md and the pages of docs/, by their paths in the tree."""
    return ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]


def blocks(page: str) -> list[Block]:
    """The blocks of one page of the tree, from top to bottom."""
    return parse(page, (ROOT / page).read_text())


def parse(page: str, text: str) -> list[Block]:
    """The blocks of a text. Raises ValueError where one does not end."""
    found: list[Block] = []
    section = ""
    opened: tuple[int, str, str] | None = None
    inside: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        fence = _FENCE.match(line)
        if opened is not None:
            begun, indent, language = opened
            if fence and not fence["language"] and fence["indent"] == indent:
                found.append(Block(page, begun, section, language, "".join(f"{one}\n" for one in inside)))
                opened, inside = None, []
            else:
                inside.append(line.removeprefix(indent))
        elif fence:
            opened = number, fence["indent"], fence["language"]
        elif heading := _HEADING.match(line):
            section = heading["title"]
    if opened is not None:
        raise ValueError(f"{page}:{opened[0]}: this block does not end")
    return found


def commands(block: Block) -> list[Command]:
    """The commands of a block; none where its language is no shell's."""
    if block.language not in SHELLS:
        return []
    found: list[tuple[str, str, list[str]]] = []
    goes_on = False
    for number, line in enumerate(block.text.splitlines(), block.line + 1):
        text, is_command = _command_line(line, block.language)
        if goes_on:
            where, command, output = found[-1]
            found[-1] = where, f"{command}\n{line}", output
        elif is_command:
            found.append((f"{block.page}:{number}", text, []))
        elif found and block.language == "console":
            found[-1][2].append(line)
        goes_on = (goes_on or is_command) and line.endswith("\\")
    return [Command(where, text, tuple(output)) for where, text, output in found]


def _command_line(line: str, language: str) -> tuple[str, bool]:
    if language == "console":
        return line.removeprefix("$ "), line.startswith("$ ")
    return line, bool(line.strip()) and not line.lstrip().startswith("#")
