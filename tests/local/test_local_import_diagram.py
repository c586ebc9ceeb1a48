"""deploy/local/import_diagram.py: rooms, arrows that follow from others, markers; and that the page is up to date."""

from __future__ import annotations

import pytest
from local.environment import ROOT
from local.import_diagram import (
    PAGE,
    diagrams,
    edges_between,
    inner_room,
    mermaid,
    overview_room,
    reduced,
    with_diagrams,
)


@pytest.mark.parametrize(
    ("module", "room"),
    [("proto.frames", "proto"), ("proxy.runtime.rpc.client", "proxy.runtime"), ("proxy", None), ("lookup", "lookup")],
)
def test_rooms_of_the_overview(module: str, room: str | None) -> None:
    assert overview_room(module) == room


@pytest.mark.parametrize(
    ("module", "room"),
    [("p.a.b.c", "a.b"), ("p.a.d", "a"), ("p.e", "e"), ("p.a.b", "a.b"), ("q.a", None), ("p", None)],
)
def test_rooms_inside_a_package(module: str, room: str | None) -> None:
    assert inner_room("p", frozenset({"p", "p.a", "p.a.b"}), module) == room


def test_arrows_that_follow_from_others_are_left_out_but_not_those_of_a_cycle() -> None:
    rooms: dict[str, str | None] = {name: name for name in "abcd"}
    edges = edges_between([("a", "b"), ("b", "c"), ("a", "c"), ("c", "d"), ("d", "c"), ("x", "a"), ("a", "a")], rooms)
    assert reduced(edges) == {
        "a": frozenset("b"),
        "b": frozenset("c"),
        "c": frozenset("d"),
        "d": frozenset("c"),
    }


def test_the_text_of_a_diagram() -> None:
    edges = {"b": frozenset("a"), "a": frozenset[str](), "c": frozenset[str]()}
    assert mermaid(edges) == "```mermaid\nflowchart TD\n    b --> a\n    c\n```"


def test_markers() -> None:
    text = "x\n<!-- imports of p -->\nold\n<!-- end -->\ny\n"
    assert with_diagrams(text, {"p": "new"}) == "x\n<!-- imports of p -->\nnew\n<!-- end -->\ny\n"
    with pytest.raises(ValueError, match="0 times"):
        with_diagrams(text, {"q": "new"})


def test_the_page_shows_the_imports_as_they_are() -> None:
    text = (ROOT / PAGE).read_text()
    assert with_diagrams(text, diagrams()) == text
