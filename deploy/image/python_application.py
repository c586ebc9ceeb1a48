"""Install this tree's wheel and its dependencies below ROOT/opt/NAME, for any architecture, without running any of it.

`python3 -m image.python_application NAME REQUIREMENTS ARCHITECTURE ROOT PYTHON`, in a build stage. PYTHON is the path
of the image's Python, of the same minor version as the stage's. Wheels only, so that no compiler is needed; PySpark has
none, is only Python and jars, and is built with the listed tools, which stay outside. Equal input gives equal files.

The bill of materials has the Python packages and, where the root was made of Debian's packages, these.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from email.parser import HeaderParser
from pathlib import Path
from typing import Any
from urllib.parse import quote

from image.debian_root import PYTHON, libraries_missing

WORK = Path("/build")
TOOLS = WORK / "tools/bin"
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
_GLIBC_MINORS = (17, 28, 34)
"""Versions of glibc that wheels are made for and that Debian's is at least as new as."""


def platform_options(architecture: str) -> list[str]:
    """Return pip's options that choose the wheels of an architecture instead of this machine's."""
    machine = _MACHINES[architecture]
    names = [f"manylinux_2_{minor}_{machine}" for minor in _GLIBC_MINORS] + [f"manylinux2014_{machine}"]
    return ["--implementation", "cp", "--python-version", PYTHON, *(f"--platform={name}" for name in names)]


def collect_wheels(requirements: str, architecture: str) -> Path:
    """Download what a requirements file lists, by hash, and build what has no wheels; return the folder."""
    wheels = WORK / f"wheels-{requirements}"
    listed = ["--no-deps", "--require-hashes", "--no-build-isolation", "-r", f"{WORK}/requirements/{requirements}.txt"]
    _pip("download", *platform_options(architecture), *listed, "--dest", str(wheels))
    for source in wheels.glob("*.tar.gz"):
        _pip("wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(wheels), str(source))
        source.unlink()
    return wheels


def install(name: str, requirements: str, architecture: str, root: Path, python: str) -> Path:
    """Install this tree's wheel with its dependencies; return the folder of packages.

    pip resolves the dependencies among the wheels, so it fails where the list is not complete.
    """
    wheels = collect_wheels(requirements, architecture)
    extra = "" if requirements == "proxy" else f"[{requirements}]"
    (wheel,) = (WORK / "dist").glob("*.whl")
    home = root / "opt" / name
    packages = home / f"lib/python{PYTHON}/site-packages"
    options = [*platform_options(architecture), "--only-binary=:all:", "--no-index", f"--find-links={wheels}"]
    _pip("install", "--no-compile", *options, "--target", str(packages), f"{wheel}{extra}")
    for folder in ("bin", "share"):
        (packages / folder).rename(home / folder)
    for script in (home / "bin").iterdir():
        script.write_text(script.read_text().replace(f"#!{TOOLS}/", f"#!/opt/{name}/bin/", 1))
    (home / "bin/python3").symlink_to(python)
    (home / "pyvenv.cfg").write_text(f"home = {Path(python).parent}\ninclude-system-site-packages = false\n")
    return packages


def compile_bytecode(root: Path) -> None:
    """Compile all of the root's Python.

    With a hash of the source instead of its time, never checked at run time: the file system is read-only. One process
    compiles in the order of names.
    """
    options = ["-q", "-j", "1", "--invalidation-mode", "unchecked-hash", "-s", str(root), "-p", "/"]
    folders = [str(path) for path in (root / f"usr/lib/python{PYTHON}", root / "opt") if path.exists()]
    subprocess.run([sys.executable, "-m", "compileall", *options, *folders], check=True)


def debian_components(root: Path) -> list[dict[str, Any]]:
    """Return the Debian packages of a root as components of a bill of materials."""
    found = re.search(r'^VERSION_ID="?(\w+)', (root / "usr/lib/os-release").read_text(), re.MULTILINE)
    release = f"debian-{found[1]}" if found else "debian"
    components: list[dict[str, Any]] = []
    for note in _package_notes(root / "var/lib/dpkg"):
        control = HeaderParser().parsestr(note)
        name, version, architecture = control["Package"], control["Version"], control["Architecture"]
        purl = f"pkg:deb/debian/{name}@{quote(version, safe='~')}?arch={architecture}&distro={release}"
        component: dict[str, Any] = {"bom-ref": purl, "type": "library", "name": name, "version": version, "purl": purl}
        if digest := control["SHA256"]:
            component["hashes"] = [{"alg": "SHA-256", "content": digest}]
        components.append(component)
    return components


def _package_notes(dpkg: Path) -> list[str]:
    """Return the control data of each package, in the order of names: dpkg's own list, or one file each."""
    if (dpkg / "status.d").exists():
        return [path.read_text() for path in sorted((dpkg / "status.d").iterdir())]
    blocks = (dpkg / "status").read_text().strip().split("\n\n")
    return sorted(block for block in blocks if "\nStatus: install ok installed\n" in block)


def add_debian(bill: dict[str, Any], root: Path) -> None:
    """Add the Debian packages of a root to a bill of materials."""
    debian = debian_components(root)
    bill["components"] += debian
    bill["dependencies"] += [{"ref": component["bom-ref"]} for component in debian]


def write_bill_of_materials(name: str, packages: Path, root: Path) -> None:
    """Write /usr/share/sbom/NAME.cdx.json into the root."""
    view = WORK / f"view-{name}"  # an environment of this machine's that sees the target's packages
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(view)], check=True)
    seen = view / f"lib/python{PYTHON}/site-packages"
    seen.rmdir()
    seen.symlink_to(packages)
    target = root / f"usr/share/sbom/{name}.cdx.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    options = ["--output-reproducible", "--output-format", "JSON", "--pyproject", f"{WORK}/tree/pyproject.toml"]
    command = [f"{TOOLS}/cyclonedx-py", "environment", *options, "--output-file", str(target), f"{view}/bin/python3"]
    subprocess.run(command, check=True)
    if (root / "var/lib/dpkg/status.d").exists():
        bill = json.loads(target.read_text())
        add_debian(bill, root)
        target.write_text(f"{json.dumps(bill, indent=2)}\n")


def _pip(*arguments: str) -> None:
    subprocess.run([str(TOOLS / "pip"), arguments[0], "--quiet", *arguments[1:]], check=True)


def main() -> None:
    """Install one application."""
    name, requirements, architecture, target, python = sys.argv[1:]
    if (running := ".".join(map(str, sys.version_info[:2]))) != PYTHON:
        sys.exit(f"BASE: it has Python {running}, but the image {PYTHON}; choose a base with that, or change PYTHON")
    root = Path(target)
    packages = install(name, requirements, architecture, root, python)
    compile_bytecode(root)
    write_bill_of_materials(name, packages, root)
    if missing := list(libraries_missing(root)) if (root / "usr/lib/os-release").exists() else []:
        sys.exit(
            "\n".join([*missing, "debian_root.py: add a library's package to PACKAGES, or what needs it to REMOVED"])
        )


if __name__ == "__main__":
    main()
