"""The chart's package of a release: it names the images by their digests, and has the changes of CHANGELOG.md.

Equal source and equal images give an equal package. The chart in the tree stays as it is: its images are those that
someone built and tagged.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from local.console import MakeError

KINDS = ("added", "changed", "deprecated", "removed", "fixed", "security")
"""Artifact Hub's kinds of changes, which are those of keepachangelog.com."""


class ReleaseError(MakeError):
    """The release cannot be made; the text says what is to be mended."""


DEFAULTS = "files/values.json"
"""values.yaml once more, for the templates."""

_LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")


def with_digests(values: str, digests: Mapping[str, str]) -> str:
    """Return the text of values.yaml with the digest of each image, given by repository."""
    for repository, digest in digests.items():
        block = re.compile(rf'^( *)(repository: {re.escape(repository)}\n(?:\1.*\n)*?\1digest: )""$', re.MULTILINE)
        values, count = block.subn(rf'\1\2"{digest}"', values)
        if count != 1:
            raise ReleaseError(f"values.yaml: {count} empty digests beside `repository: {repository}`; one is needed")
    return values


def set_digests(values: Any, digests: Mapping[str, str]) -> None:
    """Do the same in the values as the templates read them, which compare what a user sets with them."""
    if isinstance(values, dict):
        if values.get("repository") in digests:
            values["digest"] = digests[values["repository"]]
        for value in values.values():
            set_digests(value, digests)


def changes(changelog: str, number: str) -> Iterator[tuple[str, str]]:
    """Yield kind and text of each change in the changelog's section of a version."""
    found = re.search(rf"^## {re.escape(number)} .*?$(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    kind = "added"
    for block in re.split(r"^(?=### |\* )", found[1] if found else "", flags=re.MULTILINE):
        if block.startswith("### "):
            heading = block[4:].strip().lower()
            kind = heading if heading in KINDS else "changed"
        elif block.startswith("* "):
            yield kind, _LINK.sub(r"\1", " ".join(block[2:].split()))


@dataclass(frozen=True)
class ChartRelease:
    """What a package has beside the chart in the tree: the digests are by the images' repositories."""

    number: str
    changelog: str
    digests: Mapping[str, str]
    epoch_s: int


def with_release(chart: str, release: ChartRelease) -> str:
    """Return the text of Chart.yaml with the images' digests and the changes, below `annotations`, its last key."""
    for repository, digest in release.digests.items():
        if (tagged := f"image: {repository}:{release.number}\n") not in chart:
            raise ReleaseError(f"Chart.yaml: artifacthub.io/images has no `{tagged.strip()}`")
        chart = chart.replace(tagged, f"image: {repository}@{digest}\n")
    made = list(changes(release.changelog, release.number))
    if made:
        chart += "  artifacthub.io/changes: |\n"
    for kind, text in made:
        chart += f"    - kind: {kind}\n      description: {json.dumps(text, ensure_ascii=False)}\n"
    has_fixes = any(kind == "security" for kind, _ in made)
    return f'{chart}  artifacthub.io/containsSecurityUpdates: "{str(has_fixes).lower()}"\n'


def package(helm: Path, chart: Path, out: Path, release: ChartRelease) -> Path:
    """Write the chart's package into a folder; return its path. Helm 4 keeps the files' times, Helm 3 does not."""
    with tempfile.TemporaryDirectory(prefix="ptp-chart-") as directory:
        staged = Path(directory) / chart.name
        shutil.copytree(chart, staged)
        values, description = staged / "values.yaml", staged / "Chart.yaml"
        values.write_text(with_digests(values.read_text(), release.digests))
        defaults = json.loads((staged / DEFAULTS).read_text())
        set_digests(defaults, release.digests)
        (staged / DEFAULTS).write_text(json.dumps(defaults))
        description.write_text(with_release(description.read_text(), release))
        for path in staged.rglob("*"):
            os.utime(path, (release.epoch_s, release.epoch_s))
        command = [str(helm), "package", str(staged), "--destination", str(out)]
        result = subprocess.run(command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if result.returncode:
        raise ReleaseError(f"the chart cannot be packaged:\n{result.stderr}")
    return out / f"{chart.name}-{release.number}.tgz"
