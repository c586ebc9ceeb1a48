"""`make release`: the wheel and the sdist in dist/, with SHA-256 sums and a bill of materials of the dependencies.

Equal source gives equal files: times are those of the commit (or `SOURCE_DATE_EPOCH`), and both are built twice, in two
folders, and compared. The bill of materials (CycloneDX) names each package of deploy/requirements/proxy.txt with the
hashes of its files.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from local.environment import ROOT, Environment, SetupError, clean_environment
from local.images import source_date_epoch_s

DIST = ROOT / "dist"
CHART = ROOT / "deploy/helm/pulsar-trio-proxy/Chart.yaml"
CHANGELOG = ROOT / "CHANGELOG.md"
_SBOM = "pulsar-trio-proxy-{version}.cdx.json"


class ReleaseError(Exception):
    """The release cannot be made; the text says what is to be mended."""


def version(root: Path = ROOT) -> str:
    """Return the version, from the one place that holds it."""
    (found,) = re.findall(r'^__version__ = "(.+)"$', (root / "proxy/__init__.py").read_text(), re.MULTILINE)
    return str(found)


def check_release(number: str, changelog: str, chart: str) -> None:
    """Raise ReleaseError unless the changelog has a dated section of this version and the chart is of it."""
    if not re.search(rf"^## {re.escape(number)} \(\d{{4}}-\d\d-\d\d\)$", changelog, re.MULTILINE):
        raise ReleaseError(f"CHANGELOG.md has no section '## {number} (YYYY-MM-DD)'")
    if f"\nappVersion: {number}\n" not in chart:
        raise ReleaseError(f"appVersion in {CHART.name} is not {number}")


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
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


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


def release(environment: Environment) -> None:
    """Write dist/. ReleaseError where two builds differ, or the version is not told everywhere."""
    number = version()
    check_release(number, CHANGELOG.read_text(), CHART.read_text())
    with tempfile.TemporaryDirectory(prefix="ptp-release-") as first, tempfile.TemporaryDirectory() as second:
        made, again = build(environment, Path(first)), build(environment, Path(second))
        if made != again:
            raise ReleaseError(f"two builds differ: {made} and {again}")
        _write_bill_of_materials(environment, Path(first) / _SBOM.format(version=number))
        shutil.rmtree(DIST, ignore_errors=True)
        shutil.copytree(first, DIST)
    found = sums(DIST)
    (DIST / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name, digest in found.items()))
    for name in [*found, "SHA256SUMS"]:
        print(f"dist/{name}", flush=True)


def main() -> int:
    """Make the release's files; publishing them is a step of its own."""
    environment = Environment()
    try:
        environment.prepare("release")
        release(environment)
    except (SetupError, ReleaseError, OSError) as error:
        print(f"\nmake release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
