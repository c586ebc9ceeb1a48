"""`make lock`: the hashes of constraints.txt, and from it the files of deploy/requirements.

constraints.txt pins each package once, with the SHA-256 of all its files, so that the pins hold on every platform that
has a file. Which packages a requirements file holds, pip's resolver says; this module holds no resolver. The files are
complete, so they are installed with `--no-deps`: a resolver takes the newest release of a package wherever another asks
for one of its extras (pip 23.2), which no hash of ours is of.

Code of packages runs at their build, too, so a requirements file takes wheels only, but for SOURCES. What builds these
and this tree is in build.txt, which is installed first: pip's own build environment would hold the newest releases, and
checks no hash of them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import tomllib
import urllib.request
from collections.abc import Collection, Sequence
from pathlib import Path

from local.console import exit_on_error
from local.environment import BUILD, ROOT, Environment, SetupError, clean_environment

CONSTRAINTS = ROOT / "constraints.txt"
REQUIREMENTS = ROOT / "deploy/requirements"
_INDEX = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
_ANSWER_BYTES_MAX = 64 * 1024 * 1024

EXTRAS: dict[str, tuple[str, ...]] = {
    BUILD: ("build",),
    "proxy": (),
    "kerberos": ("kerberos",),
    "analytics": ("analytics",),
    "docs": ("docs",),
    "test": ("test", "analytics", "docs"),
    "test-kerberos": ("test", "analytics", "docs", "kerberos"),
    "bench": ("bench",),
    "bench-analytics": ("analytics", "bench-analytics"),
    "fuzz": ("fuzz",),
    "run": ("run",),
    "release": ("release",),
}
"""Each requirements file, and the extras of pyproject.toml that it is for; all others hold the proxy's dependencies."""

SOURCES = frozenset({"gssapi", "pyspark"})
"""Packages without wheels."""

_PIN = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s\\]+)")
_HEADER = "# {what}; made by `make lock`: do not edit."


def canonical(name: str) -> str:
    """Return a package's name in the form in which names are compared (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(text: str) -> dict[str, tuple[str, str, tuple[str, ...]]]:
    """Return name, version and hashes of each pin of a requirements file, by canonical name."""
    pins = {}
    for line in text.replace("\\\n", " ").splitlines():
        if match := _PIN.match(line):
            hashes = tuple(sorted(re.findall(r"--hash=(sha256:[0-9a-f]{64})", line)))
            pins[canonical(match[1])] = (match[1], match[2], hashes)
    return pins


def render(what: str, pins: dict[str, tuple[str, str, tuple[str, ...]]], options: Sequence[str] = ()) -> str:
    """Return a requirements file's text: pip's options, then the pins, sorted by name."""
    lines = [_HEADER.format(what=what), *options]
    for _, (name, version, hashes) in sorted(pins.items()):
        lines.append(" \\\n".join([f"{name}=={version}", *(f"    --hash={digest}" for digest in hashes)]))
    return "\n".join(lines) + "\n"


def direct_requirements(group: str) -> list[str]:
    """Return what pyproject.toml requires for a requirements file."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    wanted = list(project["build-system"]["requires"] if group == BUILD else project["project"]["dependencies"])
    for extra in EXTRAS[group]:
        wanted += project["project"]["optional-dependencies"][extra]
    return wanted


def wheels_only(names: Collection[str]) -> list[str]:
    """Return pip's options that take no source of these packages, except of SOURCES."""
    return ["--only-binary :all:", *(f"--no-binary {name}" for name in sorted(SOURCES.intersection(names)))]


def is_file_of(filename: str, name: str, version: str) -> bool:
    """Return whether a wheel or an sdist is of exactly this version of a package."""
    if filename.endswith(".whl"):
        found, its_version = filename.split("-")[:2]
    else:
        found, _, its_version = filename.removesuffix(".tar.gz").removesuffix(".zip").rpartition("-")
    return (canonical(found), its_version) == (canonical(name), version)


def _hashes(name: str, version: str) -> tuple[str, ...]:
    """Ask the index (PEP 691) for the SHA-256 of all files of one version."""
    request = urllib.request.Request(
        f"{_INDEX}/{canonical(name)}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        files = json.loads(answer.read(_ANSWER_BYTES_MAX))["files"]
    found = {f"sha256:{file['hashes']['sha256']}" for file in files if is_file_of(file["filename"], name, version)}
    if not found:
        raise SetupError(f"the index has no file of {name} {version}")
    return tuple(sorted(found))


def _closure(environment: Environment, pins: Path, wanted: list[str]) -> dict[str, tuple[str, str]]:
    """Ask pip for name and version of all packages that these requirements need, at the pinned versions."""
    command = [str(environment.python), "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    command += ["--no-build-isolation", "--disable-pip-version-check", "--report", "-", "-c", str(pins), *wanted]
    result = subprocess.run(command, check=False, capture_output=True, text=True, env=clean_environment(), cwd=ROOT)
    if result.returncode:
        raise SetupError(f"pip found no set of packages:\n{result.stderr}")
    found = [item["metadata"] for item in json.loads(result.stdout)["install"]]
    return {canonical(item["name"]): (item["name"], item["version"]) for item in found}


def lock(environment: Environment) -> None:
    """Write constraints.txt with its hashes, then each requirements file; pins that nothing needs are dropped.

    SetupError where the index or pip refuses.
    """
    pins = {key: (name, version) for key, (name, version, _) in read_pins(CONSTRAINTS.read_text()).items()}
    with tempfile.TemporaryDirectory(prefix="ptp-lock-") as directory:
        plain = Path(directory) / "pins.txt"
        lines = [*wheels_only(SOURCES), *(f"{name}=={version}" for name, version in pins.values())]
        plain.write_text("\n".join(lines) + "\n")
        needed = {group: _closure(environment, plain, direct_requirements(group)) for group in EXTRAS}
    for found in needed.values():  # what is new is pinned at the version that pip chose
        pins |= {key: pin for key, pin in found.items() if key not in pins}
    used = set().union(*needed.values())
    locked = {key: (*pin, _hashes(*pin)) for key, pin in pins.items() if key in used}
    CONSTRAINTS.write_text(render("Versions that are known to work together, with the hashes of their files", locked))
    REQUIREMENTS.mkdir(exist_ok=True)
    for group, names in needed.items():
        what = f"Packages of constraints.txt that {group!r} needs"
        text = render(what, {name: locked[name] for name in names}, wheels_only(names))
        (REQUIREMENTS / f"{group}.txt").write_text(text)


@exit_on_error("lock", OSError, ValueError)
def main() -> None:
    """Lock; the pins themselves are edited by hand, or by `pip freeze`."""
    environment = Environment()
    environment.prepare("test")
    lock(environment)


if __name__ == "__main__":
    main()
