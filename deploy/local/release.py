"""`make release`: all files of a release in dist/, with their SHA-256 sums, bills of materials and provenance.

These are the wheel and the sdist, an archive of each image (OCI layout, all architectures) and the chart's package,
which names the images by the digests of these archives. Nothing is made of a tree with changes that no commit holds,
since the provenance names the commit.

Equal source gives equal files: times are those of the commit (or `SOURCE_DATE_EPOCH`), and wheel and sdist are built
twice, in two folders, and compared. The images are part of a release, so a machine that cannot build them (it takes
root and Debian's buildah) ends with an error, as does one that cannot pull the base image by its digest (`make base`),
unless `ARGS=--any-base` takes any. `ARGS=--no-images` makes the Python packages alone: without the images'
digests there is no chart of the release either.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from local import base_image, go_tools, images, machine, provenance, release_chart
from local.console import exit_on_error
from local.environment import ROOT, Environment, clean_environment
from local.images import source_date_epoch_s
from local.oci_archive import OciArchive, read_archive
from local.release_chart import ReleaseError

DIST = ROOT / "dist"
CHART = ROOT / "deploy/helm/pulsar-trio-proxy/Chart.yaml"
CHANGELOG = ROOT / "CHANGELOG.md"
NAME = "pulsar-trio-proxy"
SUMS = "SHA256SUMS"


def version(root: Path = ROOT) -> str:
    """Return the version, from the one place that holds it."""
    (found,) = re.findall(r'^__version__ = "(.+)"$', (root / "proxy/__init__.py").read_text(), re.MULTILINE)
    return str(found)


def check_release(number: str, changelog: str, chart: str) -> None:
    """Raise ReleaseError unless the changelog has a dated section of this version and the chart is of it."""
    if not re.search(rf"^## {re.escape(number)} \(\d{{4}}-\d\d-\d\d\)$", changelog, re.MULTILINE):
        raise ReleaseError(f"CHANGELOG.md has no section '## {number} (YYYY-MM-DD)'")
    for key in ("version", "appVersion"):
        if f"\n{key}: {number}\n" not in chart:
            raise ReleaseError(f"{key} in {CHART.name} is not {number}")


def clean_commit(root: Path = ROOT) -> str:
    """Return the commit of a tree. Raises ReleaseError where the tree has anything that its commit has not."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        result = subprocess.run(command, check=False, capture_output=True, text=True)
        if result.returncode:
            raise ReleaseError(f"a release needs the source's commit: {result.stderr.strip()}")
        return result.stdout.strip()

    if changed := git("status", "--porcelain"):
        raise ReleaseError(f"the tree is not that of a commit; commit or remove these:\n{changed}")
    return git("rev-parse", "HEAD")


def provenance_name(number: str) -> str:
    """Return the name of the file with the provenance."""
    return f"{NAME}-{number}.intoto.json"


def chart_bill_name(number: str) -> str:
    """Return the name of the chart's bill of materials."""
    return f"{NAME}-{number}.chart.cdx.json"


def _environment_variables() -> dict[str, str]:
    return {**clean_environment(), "SOURCE_DATE_EPOCH": str(source_date_epoch_s()), "PYTHONHASHSEED": "0"}


def build(environment: Environment, out: Path) -> dict[str, str]:
    """Build the wheel and the sdist into a folder; returns their SHA-256 by name."""
    command = [str(environment.python), "-m", "build", "--no-isolation", "--outdir", str(out), str(environment.root)]
    result = subprocess.run(command, check=False, capture_output=True, text=True, env=_environment_variables())
    if result.returncode:
        raise ReleaseError(f"the build failed:\n{result.stdout}{result.stderr}")
    return sums(out)


def sums(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a folder, by name."""
    return {path.name: provenance.file_sha256(path) for path in sorted(directory.iterdir())}


def _write_bill_of_materials(environment: Environment, target: Path) -> None:
    command = [
        str(environment.tool("cyclonedx-py")),
        "requirements",
        "--output-reproducible",
        "--output-format",
        "JSON",
    ]
    command += ["--pyproject", str(environment.root / "pyproject.toml"), "--output-file", str(target)]
    command.append(str(environment.root / "deploy/requirements/proxy.txt"))
    result = subprocess.run(command, check=False, capture_output=True, text=True, env=_environment_variables())
    if result.returncode:
        raise ReleaseError(f"no bill of materials:\n{result.stderr}")


def _write_images(out: Path) -> list[OciArchive]:
    """Write the archive and the bills of materials of each image."""
    archives = []
    for image in images.IMAGES:
        archives.append(read_archive(images.write_archive(image, out)))
        for architecture in image.architectures:
            images.write_bill_of_materials(image, out, architecture)
    return archives


def write_chart(out: Path, number: str, digests: dict[str, str]) -> None:
    """Write the chart's package and its bill of materials."""
    made_of = release_chart.ChartRelease(number, CHANGELOG.read_text(), digests, source_date_epoch_s())
    package = release_chart.package(go_tools.tool("helm"), CHART.parent, out, made_of)
    provenance.write_json(out / chart_bill_name(number), provenance.chart_bill(package, NAME, number, digests))


def write_provenance(out: Path, number: str, commit: str, images_: dict[str, str], base: list[provenance.Json]) -> None:
    """Write the statement on all files of a folder and on the images (digests by repository), then the sums."""
    subjects = {**sums(out), **{name: digest.removeprefix("sha256:") for name, digest in images_.items()}}
    debian = provenance.debian_packages(sorted(out.glob("*.image-*.cdx.json")))
    materials = [*provenance.locked_lists(ROOT), *base, *debian]
    made = provenance.statement(subjects, number, commit, materials)
    provenance.write_json(out / provenance_name(number), made)
    (out / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in sums(out).items()))


def release(environment: Environment, *, with_images: bool) -> None:
    """Write dist/. ReleaseError where two builds differ, or the version is not told everywhere."""
    number = version()
    check_release(number, CHANGELOG.read_text(), CHART.read_text())
    commit = clean_commit()
    with tempfile.TemporaryDirectory(prefix="ptp-release-") as first, tempfile.TemporaryDirectory() as second:
        out = Path(first)
        made, again = build(environment, out), build(environment, Path(second))
        if made != again:
            raise ReleaseError(f"two builds differ: {made} and {again}")
        _write_bill_of_materials(environment, out / f"{NAME}-{number}.cdx.json")
        digests: dict[str, str] = {}
        base: list[provenance.Json] = []
        if with_images:
            digests = {archive.repository: archive.digest for archive in _write_images(out)}
            write_chart(out, number, digests)
            base = [images.base_material()]
        write_provenance(out, number, commit, digests, base)
        shutil.rmtree(DIST, ignore_errors=True)
        shutil.copytree(first, DIST)
    for path in sorted(DIST.iterdir()):
        print(f"dist/{path.name}", flush=True)


@exit_on_error("release", ValueError, OSError)
def main() -> None:
    """Make the release's files; publishing them is a step of its own."""
    parser = argparse.ArgumentParser(prog="make release")
    parser.add_argument("--no-images", action="store_true", help="wheel and sdist alone: neither images nor chart")
    parser.add_argument(base_image.ANY_BASE, action="store_true", help="take a base image without a digest")
    options = parser.parse_args()
    with_images = not options.no_images
    environment = Environment()
    if with_images:
        _ensure_images_can_be_built()
        if not options.any_base:
            images.ensure_pinned_base()
    environment.prepare("release")
    release(environment, with_images=with_images)


def _ensure_images_can_be_built() -> None:
    """Raise ReleaseError unless this machine can build images and package the chart."""
    try:
        if os.geteuid() != 0:
            raise machine.MachineError("Images are built by root.")
        machine.ensure((*machine.IMAGES, machine.GO))
        if not go_tools.available():
            raise machine.MachineError(f"Helm is built by Go {'.'.join(map(str, machine.GO_MINIMUM))} or newer.")
    except machine.MachineError as error:
        raise ReleaseError(f"{error}\nWheel and sdist alone, without images and chart: ARGS=--no-images") from None
    go_tools.install_tools(("helm",))


if __name__ == "__main__":
    main()
