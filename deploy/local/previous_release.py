"""The release before this one, out of the repository's history: its chart and its image, for the test of an upgrade."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from local import images
from local.console import Progress, print_status
from local.environment import ROOT
from local.process import run_reporting

VERSION = "0.1.0"
CHART = "deploy/helm/pulsar-trio-proxy"
IMAGE = images.Image("previous", f"{images.PROXY.name.rpartition(':')[0]}:{VERSION}", (images.NATIVE,))


def commit(root: Path = ROOT) -> str:
    """Return the commit that dated the release's section in the changelog. ImageError where the history lacks it."""
    command = ["git", "-C", str(root), "log", f"-S## {VERSION} (", "--format=%H", "--", "CHANGELOG.md"]
    found = subprocess.run(command, check=False, capture_output=True, text=True).stdout.split()
    if not found:
        raise images.ImageError(f"The history has no release {VERSION}: the clone is shallow (git fetch --unshallow)")
    return found[-1]


def extract(path: str, target: Path) -> None:
    """Write a folder of the release ('' for all of it) into `target`, which must not exist."""
    with tempfile.TemporaryDirectory() as directory:
        archive, tree = Path(directory) / "tree.tar", Path(directory) / "tree"
        command = ["git", "-C", str(ROOT), "archive", f"--output={archive}", commit(), *([path] if path else [])]
        subprocess.run(command, check=True)
        with tarfile.open(archive) as file:
            file.extractall(tree, filter="data")
        shutil.move(tree / path, target)


def build_image(progress: Progress = print_status) -> None:
    """Build the release's image with its own build; takes its name away from this tree's image, so this comes first."""
    with tempfile.TemporaryDirectory(prefix="ptp-previous-") as directory:
        tree = Path(directory) / "tree"
        extract("", tree)
        failure = run_reporting(
            ["python3", "-m", "local.images", images.PROXY.target],
            lambda s: f"Building the image of {VERSION}: {s:.0f} s",
            progress,
            env=os.environ | {"PYTHONPATH": "deploy"},
            cwd=tree,
        )
    if failure:
        raise images.ImageError(f"The image of {VERSION} could not be built:\n{failure}")
    subprocess.run(["buildah", "tag", images.PROXY.name, IMAGE.name], check=True)
