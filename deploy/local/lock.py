"""`make lock`: the hashes of constraints.txt, and from it the files of deploy/requirements.

constraints.txt pins each package once, with the SHA-256 of all its files, so that the pins hold on every platform that
has a file. pip refuses hashes for a directory such as this tree, so the tree is installed in two steps: a requirements
file with `--require-hashes`, then the tree itself with `--no-deps`. Which packages a requirements file holds, pip's
resolver says; this module holds no resolver.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from pathlib import Path

from local.environment import ROOT, Environment, SetupError, clean_environment

CONSTRAINTS = ROOT / "constraints.txt"
REQUIREMENTS = ROOT / "deploy/requirements"
_INDEX = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
_ANSWER_BYTES_MAX = 64 * 1024 * 1024

EXTRAS: dict[str, tuple[str, ...]] = {
    "proxy": (),
    "kerberos": ("kerberos",),
    "analytics": ("analytics",),
    "test": ("test", "analytics"),
    "test-kerberos": ("test", "analytics", "kerberos"),
    "bench": ("bench",),
    "bench-analytics": ("analytics", "bench-analytics"),
    "run": ("run",),
    "release": ("release",),
}
"""Each requirements file, and the extras of pyproject.toml that it is for; each holds the proxy's dependencies."""

FOR_WHEELS = frozenset({"proxy", "kerberos", "analytics"})
"""What is installed in production, beside a wheel: these files do not hold the build backend."""

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


def render(what: str, pins: dict[str, tuple[str, str, tuple[str, ...]]]) -> str:
    """Return a requirements file's text, sorted by name."""
    lines = [_HEADER.format(what=what)]
    for _, (name, version, hashes) in sorted(pins.items()):
        lines.append(" \\\n".join([f"{name}=={version}", *(f"    --hash={digest}" for digest in hashes)]))
    return "\n".join(lines) + "\n"


def direct_requirements(group: str) -> list[str]:
    """Return what pyproject.toml requires for a requirements file."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    wanted = list(project["project"]["dependencies"])
    if group not in FOR_WHEELS:
        wanted += project["build-system"]["requires"]
    for extra in EXTRAS[group]:
        wanted += project["project"]["optional-dependencies"][extra]
    return wanted


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
    command += ["--disable-pip-version-check", "--report", "-", "-c", str(pins), *wanted]
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
        plain.write_text("".join(f"{name}=={version}\n" for name, version in pins.values()))
        needed = {group: _closure(environment, plain, direct_requirements(group)) for group in EXTRAS}
    for found in needed.values():  # what is new is pinned at the version that pip chose
        pins |= {key: pin for key, pin in found.items() if key not in pins}
    used = set().union(*needed.values())
    locked = {key: (*pin, _hashes(*pin)) for key, pin in pins.items() if key in used}
    CONSTRAINTS.write_text(render("Versions that are known to work together, with the hashes of their files", locked))
    REQUIREMENTS.mkdir(exist_ok=True)
    for group, names in needed.items():
        what = f"Packages of constraints.txt that {group!r} needs"
        (REQUIREMENTS / f"{group}.txt").write_text(render(what, {name: locked[name] for name in names}))


def main() -> int:
    """Lock; the pins themselves are edited by hand, or by `pip freeze`."""
    environment = Environment()
    try:
        environment.prepare("test")
        lock(environment)
    except (SetupError, OSError, ValueError) as error:
        print(f"\nmake lock: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
