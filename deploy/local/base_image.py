"""`make base`: write the digest that the base image's tag has now into deploy/image/Dockerfile.

The Dockerfile's line `ARG BASE=…` is the one place that names the base. A registry can move a tag at any time, so
`make release` and `make publish` refuse a base without a digest. `crane` asks the registry; commit what changed, and
renew it for Debian's and Python's security updates.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from local import go_tools
from local.console import MakeError, exit_on_error
from local.environment import ROOT, clean_environment

DOCKERFILE = ROOT / "deploy/image/Dockerfile"
ANY_BASE = "--any-base"
"""The option that takes a base without a digest."""

_LINE = re.compile(r"^(ARG BASE=)(\S+)$", re.MULTILINE)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class BaseError(MakeError):
    """The base image is unknown or not pinned; the text says what to do."""


def read(dockerfile: Path = DOCKERFILE) -> str:
    """Return the base image's name, with tag and, where it is pinned, digest."""
    if not (found := _LINE.search(dockerfile.read_text())):
        raise BaseError(f"{dockerfile.name} has no line ARG BASE=NAME:TAG@DIGEST")
    return found[2]


def is_pinned(reference: str) -> bool:
    """Return whether a reference to an image ends in a digest."""
    return bool(_DIGEST.fullmatch(reference.rpartition("@")[2]))


def without_tag(reference: str) -> str:
    """Return a pinned reference without its tag, since not all of buildah's commands take both."""
    if not is_pinned(reference):
        return reference
    name, _, digest = reference.rpartition("@")
    folder, slash, last = name.rpartition("/")
    return f"{folder}{slash}{last.partition(':')[0]}@{digest}"


def require_pinned(reference: str, where: str) -> None:
    """Raise BaseError unless a base image is named by its digest."""
    if not is_pinned(reference):
        raise BaseError(
            f"{where}: the base image {reference or '(none)'} has no digest, so it may be any image; run `make base`, "
            f"or take it as it is by ARGS={ANY_BASE}"
        )


def pin(dockerfile: Path = DOCKERFILE) -> str:
    """Ask the registry for the digest of the base's tag, and write both into the Dockerfile; return the reference."""
    tagged = read(dockerfile).partition("@")[0]
    command = [str(go_tools.tool("crane")), "digest", tagged]
    result = subprocess.run(
        command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=clean_environment()
    )
    digest = result.stdout.strip()
    if result.returncode or not _DIGEST.fullmatch(digest):
        raise BaseError(f"the registry gave no digest of {tagged}: {result.stderr.strip() or repr(digest)}")
    pinned = f"{tagged}@{digest}"
    dockerfile.write_text(_LINE.sub(lambda line: f"{line[1]}{pinned}", dockerfile.read_text()))
    return pinned


@exit_on_error("base", OSError)
def main() -> None:
    """Pin the base image."""
    go_tools.install_tools(("crane",))
    print(pin(), flush=True)


if __name__ == "__main__":
    main()
