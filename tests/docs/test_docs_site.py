"""`make docs`: the site is built of the pages, strictly, and a browser loads nothing from elsewhere."""

from __future__ import annotations

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from local.documentation import SiteError, build
from local.environment import Environment

from tests.docs.blocks import ROOT, pages

_LOADED = {
    ("script", "src"),
    ("img", "src"),
    ("img", "srcset"),
    ("source", "src"),
    ("source", "srcset"),
    ("iframe", "src"),
    ("embed", "src"),
    ("object", "data"),
    ("video", "src"),
    ("audio", "src"),
    ("form", "action"),
    ("use", "href"),
    ("use", "xlink:href"),
    ("link", "href"),
}
_ELSEWHERE = re.compile(r"^\s*(?:[a-z][a-z0-9+.-]*:)?//", re.IGNORECASE)
_IN_STYLE = re.compile(r"""(?:url\(\s*|@import\s+)["']?\s*((?:https?:)?//[^"')\s;]*)""", re.IGNORECASE)


class _Page(HTMLParser):
    """What a page has a browser load from elsewhere, and where its links lead."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded = list(_IN_STYLE.findall(text))
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if (tag, name) in _LOADED and _ELSEWHERE.match(value or ""):
                self.loaded.append(str(value))
            if (tag, name) == ("a", "href"):
                self.links.append(str(value))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site of this tree."""
    directory = tmp_path_factory.mktemp("site")
    build(Environment(), ROOT, directory / "site", directory / "work")
    return directory / "site"


def test_each_page_is_in_the_site_and_in_its_menu(site: Path) -> None:
    menu = {site.joinpath(link.partition("#")[0]).resolve() for link in _Page((site / "README.html").read_text()).links}
    for page in [*pages()[1:], "ARCHITECTURE.md", "CHANGELOG.md", "docs/design/relay.md"]:
        assert (site / page).with_suffix(".html") in menu
    assert "url=README.html" in (site / "index.html").read_text()


def test_a_link_to_a_file_of_the_tree_leads_to_a_copy(site: Path) -> None:
    links = _Page((site / "docs/conformance.html").read_text()).links
    (copy,) = {link for link in links if link.endswith("/test_client_machine.py")}
    assert (site / "docs" / copy).read_bytes() == (ROOT / "tests/proto/test_client_machine.py").read_bytes()


def test_a_browser_loads_nothing_from_elsewhere(site: Path) -> None:
    found = {path: _Page(path.read_text()).loaded for path in site.rglob("*.html")}
    assert {path.name: loaded for path, loaded in found.items() if loaded} == {}
    assert len(found) > len(pages())
    styles = {path.name: _IN_STYLE.findall(path.read_text()) for path in site.rglob("*.css")}
    assert {name: loaded for name, loaded in styles.items() if loaded} == {}
    assert styles


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://cdn.example.org/a.js">',
        '<link rel="stylesheet" href="//fonts.example.org/a.css">',
        "<img src=HTTP://e.org/a.png>",
        "<style>@import 'https://e.org/a.css'</style>",
        "<p style='background: url( //e.org/a.png)'>",
    ],
)
def test_what_is_loaded_from_elsewhere_is_found(text: str) -> None:
    assert len(_Page(text).loaded) == 1


def test_a_page_without_a_menu_entry_and_a_broken_link_or_anchor_end_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs/conf.py", tmp_path / "docs")
    (tmp_path / "README.md").write_text("# Title\n[a](docs/missing.md) [b](docs/new.md#no-heading) [c](#title)\n")
    (tmp_path / "docs/new.md").write_text("# New\n[d](missing.py) [e](../README.md#title)\n")
    with pytest.raises(SiteError) as refused:
        build(Environment(), tmp_path, tmp_path / "site", tmp_path / "work")
    for mistake in ("docs/missing.md", "no-heading", "missing.py", "new.md: WARNING: document isn't included"):
        assert mistake in str(refused.value)
    assert not re.search(r"'#?title'", str(refused.value))
