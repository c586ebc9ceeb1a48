"""The diagrams of ARCHITECTURE.md: which room imports which, made from the imports.

An arrow that follows from others is left out (a → c where a → b → c), unless the rooms import each other.
`make generate` writes the diagrams between their markers, `make check` compares them.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

PAGE = Path("ARCHITECTURE.md")
PACKAGES = ("proto", "proxy", "lookup", "auth", "analytics")

Edges = Mapping[str, frozenset[str]]

OVERVIEW = "overview"
INSIDE = ("proxy.forwarder", "proxy.runtime", "proxy.supervisor", "lookup")
"""Packages with a diagram of their own, in which a room is a folder or a file."""


def overview_room(module: str) -> str | None:
    """Return the room of a module in the overview: a package, or a part of `proxy`; None for a package's own file."""
    parts = module.split(".")
    if parts[0] != "proxy":
        return parts[0]
    return ".".join(parts[:2]) if len(parts) > 1 else None


def inner_room(package: str, folders: frozenset[str], module: str) -> str | None:
    """Return the room of a module inside a package: its deepest folder below it, else its file; None outside of it."""
    if not module.startswith(package + "."):
        return None
    parts = module.split(".")
    for length in range(len(parts), package.count(".") + 1, -1):
        name = ".".join(parts[:length])
        if name in folders:
            return name.removeprefix(package + ".")
    return module.removeprefix(package + ".")


def edges_between(imports: Iterable[tuple[str, str]], rooms: Mapping[str, str | None]) -> Edges:
    """Return for each room the rooms that it imports."""
    found: dict[str, set[str]] = {room: set() for room in rooms.values() if room is not None}
    for importer, imported in imports:
        here, there = rooms.get(importer), rooms.get(imported)
        if here is not None and there is not None and here != there:
            found[here].add(there)
    return {room: frozenset(others) for room, others in found.items()}


def reachable(edges: Edges, start: str) -> set[str]:
    """Return all rooms that a room imports, directly or through others."""
    seen: set[str] = set()
    todo = list(edges[start])
    while todo:
        room = todo.pop()
        if room not in seen:
            seen.add(room)
            todo += edges[room]
    return seen


def reduced(edges: Edges) -> Edges:
    """Leave out each arrow that follows from others; rooms on a cycle keep theirs."""
    after = {room: reachable(edges, room) for room in edges}
    return {
        room: frozenset(
            other
            for other in others
            if room in after[other]
            or not any(other in after[between] for between in others - {other} if room not in after[between])
        )
        for room, others in edges.items()
    }


def mermaid(edges: Edges) -> str:
    """Return the diagram as Mermaid's flow chart, in an order that depends on the names alone."""
    lines = ["```mermaid", "flowchart TD"]
    for room, others in sorted(edges.items()):
        lines += [f"    {room} --> {other}" for other in sorted(others)]
        if not others and not any(room in them for them in edges.values()):
            lines.append(f"    {room}")
    return "\n".join([*lines, "```"])


def diagrams() -> dict[str, str]:
    """Return each diagram's text by the name of its markers. Imports nothing: grimp reads the sources."""
    import grimp

    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    modules = {module for module in graph.modules if not module.endswith("_pb2")}
    imports = [(one, other) for one in modules for other in graph.find_modules_directly_imported_by(one)]
    folders = frozenset(module for module in modules if graph.find_children(module))
    made = {OVERVIEW: mermaid(reduced(edges_between(imports, {module: overview_room(module) for module in modules})))}
    for package in INSIDE:
        rooms = {module: inner_room(package, folders, module) for module in modules}
        made[package] = mermaid(reduced(edges_between(imports, rooms)))
    return made


def with_diagrams(text: str, made: Mapping[str, str]) -> str:
    """Put the diagrams between their markers. ValueError where a marker is missing."""
    for name, diagram in made.items():
        marker = re.compile(rf"(<!-- imports of {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
        text, count = marker.subn(lambda match, diagram=diagram: f"{match[1]}{diagram}\n{match[2]}", text)  # type: ignore[misc]
        if count != 1:
            raise ValueError(f"{PAGE}: the markers of the imports of {name} are there {count} times")
    return text


def main() -> int:
    """Write the diagrams to standard output, as JSON: grimp is in `.venv`, and `make generate` is not."""
    json.dump(diagrams(), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
