"""The base image: named once, by a digest that `make base` asks a registry for (one on loopback)."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from local import base_image, go_tools
from local.base_image import BaseError, is_pinned, pin, read, require_pinned, without_tag
from local.environment import ROOT

from tests.local.publish_scene import serve_registry, write_archive

DIGEST = f"sha256:{'a' * 64}"
TEXT = "# ARG BASE=x\nARG BASE={}\nFROM ${{BASE}} AS build\n"


def write_dockerfile(directory: Path, base: str) -> Path:
    path = directory / "Dockerfile"
    path.write_text(TEXT.format(base))
    return path


def test_the_dockerfile_is_the_only_place_that_names_the_base() -> None:
    base = read()
    assert base.startswith("docker.io/library/python:3.13-slim-trixie")
    assert "@" not in base or is_pinned(base)
    files = [path for path in (ROOT / "deploy").rglob("*") if path.suffix in {"", ".py", ".sh"} and path.is_file()]
    assert [path for path in files if "python:3.13" in path.read_text()] == [base_image.DOCKERFILE]
    assert set(re.findall(r"^FROM (?:--\S+ )?(\S+)", base_image.DOCKERFILE.read_text(), re.MULTILINE)) == {
        "${BASE}",
        "build",
        "scratch",
    }


@pytest.mark.skipif(not go_tools.available(), reason="Go builds crane: missing or too old")
@pytest.mark.parametrize("before", ["", f"@{DIGEST}"])
def test_the_digest_of_the_tag_is_written_into_the_dockerfile(tmp_path: Path, before: str) -> None:
    with serve_registry(tmp_path) as host:
        write_archive(tmp_path / "base.tar", ("amd64", "arm64"), b"base")
        tagged = f"{host}/library/base:1"
        push = [go_tools.tool("crane"), "push", tmp_path / "base.layout", tagged]
        subprocess.run(push, check=True, capture_output=True)
        dockerfile = write_dockerfile(tmp_path, tagged + before)
        pinned = pin(dockerfile)
        wanted = [go_tools.tool("crane"), "digest", tagged]
        digest = subprocess.run(wanted, check=True, capture_output=True, text=True).stdout.strip()
    assert pinned == f"{tagged}@{digest}"
    assert dockerfile.read_text() == TEXT.format(pinned)
    require_pinned(pinned, "here")


@pytest.mark.skipif(not go_tools.available(), reason="Go builds crane: missing or too old")
def test_an_unknown_tag_leaves_the_dockerfile_as_it_is(tmp_path: Path) -> None:
    with serve_registry(tmp_path) as host:
        dockerfile = write_dockerfile(tmp_path, f"{host}/library/base:1")
        with pytest.raises(BaseError, match="the registry gave no digest of"):
            pin(dockerfile)
    assert dockerfile.read_text() == TEXT.format(f"{host}/library/base:1")


@pytest.mark.parametrize("reference", ["", "base", "host:5000/base:1", f"base@{DIGEST[:-1]}", f"base@{DIGEST}0"])
def test_a_reference_without_a_whole_digest_is_refused(reference: str) -> None:
    with pytest.raises(BaseError, match=r"here: the base image .* has no digest.*`make base`.*ARGS=--any-base"):
        require_pinned(reference, "here")
    assert without_tag(reference) == reference


def test_buildah_gets_a_pinned_reference_without_its_tag() -> None:
    assert without_tag(f"host:5000/path/base:1@{DIGEST}") == f"host:5000/path/base@{DIGEST}"
    assert without_tag(f"base@{DIGEST}") == f"base@{DIGEST}"


def test_a_dockerfile_without_the_line_is_refused(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM scratch\n")
    with pytest.raises(BaseError, match="has no line ARG BASE=NAME:TAG@DIGEST"):
        read(tmp_path / "Dockerfile")
