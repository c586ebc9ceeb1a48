"""Links of all pages: each leads to a file of the tree and, where it names one, to a heading there."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT
from tests.docs.test_docs_language import PAGES

ARCHITECTURE_BYTES_MAX = 25_600

_FENCE = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"\]\(\s*([^)\s]+)\s*\)")
_HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
_ID = re.compile(r'<a (?:id|name)="([^"]+)"')


def slug(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-")


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors of a page: its headings and its `<a id>`."""
    text = _FENCE.sub("", page.read_text())
    return frozenset({slug(heading) for heading in _HEADING.findall(text)} | set(_ID.findall(text)))


def dead_links(page: Path, text: str) -> list[str]:
    """Return the links of a page's text that lead nowhere; those to other hosts are not looked at."""
    dead = []
    for link in _LINK.findall(_CODE.sub("", _FENCE.sub("", text))):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        is_page = target.suffix == ".md"
        if ":" not in path and (not target.exists() or (anchor and is_page and anchor not in anchors(target))):
            dead.append(link)
    return dead


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert dead_links(page, page.read_text()) == []


def test_links_to_no_file_and_to_no_heading_are_found() -> None:
    text = "[a](docs/no.md) [b](README.md#no) [c](#none) [d](https://e.org/no) [e](README.md#two-commands) `[f](no)`"
    assert dead_links(ROOT / "ARCHITECTURE.md", text) == ["docs/no.md", "README.md#no", "#none"]


def test_the_map_stays_short_since_decisions_are_in_docs_design() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_bytes()) <= ARCHITECTURE_BYTES_MAX
