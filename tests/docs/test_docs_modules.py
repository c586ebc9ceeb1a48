"""Modules are as CONTRIBUTING.md says; the tree of errors in the docstring of each root is that of the classes."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

import pytest

from tests.docs.blocks import ROOT

ERRORS = {
    "proto": "proto/errors.py",
    "proxy": "proxy/common/errors.py",
    "lookup": "lookup/errors.py",
    "auth": "auth/errors.py",
    "analytics": "analytics/errors.py",
}


BUILTIN = {"Exception", "ValueError", "OSError", "RuntimeError", "LookupError", "TypeError"}


def test_modules_are_below_the_bound() -> None:
    (bound,) = re.findall(r"Modules stay below (\d+) lines", (ROOT / "CONTRIBUTING.md").read_text())
    for package in (*ERRORS, "deploy/local"):
        for path in (ROOT / package).rglob("*.py"):
            assert path.name.endswith("_pb2.py") or path.read_text().count("\n") < int(bound), path


@pytest.mark.parametrize("package", ERRORS)
def test_the_docstring_has_the_tree(package: str) -> None:
    below: defaultdict[str, set[str]] = defaultdict(set)
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.bases and not node.name.startswith("_"):
                below[ast.unparse(node.bases[0])].add(node.name)
    (root,) = set().union(*(below[name] for name in BUILTIN))  # another builtin base comes after the root
    tree, queue = {}, [root]
    while queue:
        name = queue.pop()
        if name in below:
            tree[name] = below[name]
            queue.extend(below[name])
    docstring = ast.get_docstring(ast.parse((ROOT / ERRORS[package]).read_text())) or ""
    told = re.findall(r"^(\w+): ((?:.|\n +)+)", docstring, re.MULTILINE)
    assert {parent: set(re.findall(r"\w+", names)) for parent, names in told} == tree
