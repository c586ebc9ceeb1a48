"""Make the root file system of the proxy's image out of Debian's packages, for any architecture.

`python3 -m image.debian_root ARCHITECTURE ROOT`, in a build stage on Debian. Packages are downloaded, checked by apt,
and unpacked. None is installed: no program of the target runs, and neither a shell nor a package manager gets in.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

PYTHON = "3.13"
USER_ID = 10001

PACKAGES = (
    "base-files",  # the release's name, the licences that others refer to
    "ca-certificates",
    "gcc-14-base",  # the licence of libgcc and libstdc++
    "libc6",
    "libexpat1",
    "libffi8",
    "libgcc-s1",
    f"libpython{PYTHON}-minimal",
    f"libpython{PYTHON}-stdlib",
    "libssl3t64",
    "libstdc++6",
    "libzstd1",
    f"python{PYTHON}-minimal",
    "zlib1g",
)

KEPT = (
    *("bin", "lib", "lib64", "var/run"),  # links
    *("etc/debian_version", "etc/os-release"),
    f"usr/bin/python{PYTHON}",
    *("usr/lib/*", "usr/lib64/*"),
    *("usr/share/ca-certificates/*", "usr/share/common-licenses/*"),
    *(
        "usr/share/doc/*/copyright",
        "usr/share/doc/libgcc-s1",
        "usr/share/doc/libstdc++6",
        f"usr/share/doc/libpython{PYTHON}-stdlib",
    ),
)
_STDLIB = f"usr/lib/python{PYTHON}"
REMOVED = (
    *("usr/lib/*/gconv/*", "usr/lib/*/engines-3/*", "usr/lib/binfmt.d/*"),
    # Modules whose libraries are not in the image (where the standard library can do without, it does).
    *(
        f"{_STDLIB}/lib-dynload/_{name}.*"
        for name in ("bz2", "curses", "curses_panel", "dbm", "lzma", "sqlite3", "uuid")
    ),
    *(f"{_STDLIB}/lib-dynload/{pattern}" for pattern in ("readline.*", "_test*", "_ctypes_test.*", "_xxtest*", "xx*")),
    *(f"{_STDLIB}/{name}/*" for name in ("curses", "ensurepip", "idlelib", "pydoc_data", "sqlite3", "tkinter")),
    *(f"{_STDLIB}/{name}" for name in ("turtle.py", "turtledemo/*", "sitecustomize.py")),
)
DIRECTORIES = {"dev": 0o755, "proc": 0o755, "run": 0o755, "sys": 0o755, "tmp": 0o1777, "var/tmp": 0o1777}

_AUTHORITIES = "etc/ssl/certs/ca-certificates.crt"
_FILES = {
    "etc/passwd": f"root:x:0:0:root:/:/usr/sbin/nologin\nproxy:x:{USER_ID}:{USER_ID}::/nonexistent:/usr/sbin/nologin\n",
    "etc/group": f"root:x:0:\nproxy:x:{USER_ID}:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
_LINKS = {
    "usr/bin/python3": f"python{PYTHON}",
    # What Debian's package openssl links, which has the command line tool, too: where OpenSSL looks for authorities.
    "usr/lib/ssl/cert.pem": f"/{_AUTHORITIES}",
    "usr/lib/ssl/certs": "/etc/ssl/certs",
}


def is_kept(path: str) -> bool:
    """Return whether a file of a package, named relative to the root, belongs in the image."""
    return any(fnmatchcase(path, one) for one in KEPT) and not any(fnmatchcase(path, one) for one in REMOVED)


def download(architecture: str, directory: Path) -> list[Path]:
    """Download the packages for an architecture; return their files, in the order of names."""
    directory.mkdir(parents=True)
    _run("dpkg", "--add-architecture", architecture)
    _run("apt-get", "update", "-qq")
    # Of a package for all architectures apt knows only the one of the machine.
    names = [name if name == "ca-certificates" else f"{name}:{architecture}" for name in PACKAGES]
    _run("apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", *names, cwd=directory)
    return sorted(directory.iterdir())


def unpack(packages: list[Path], root: Path) -> None:
    """Unpack packages, keep what belongs in the image, and note each package where scanners look without a dpkg."""
    root.mkdir(parents=True)
    for package in packages:
        _run("dpkg-deb", "--extract", str(package), str(root))
    for path in sorted(root.rglob("*"), reverse=True):  # a directory comes after what is in it
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                path.rmdir()
        elif not is_kept(str(path.relative_to(root))):
            path.unlink()
    notes = root / "var/lib/dpkg/status.d"
    notes.mkdir(parents=True)
    for package in packages:
        control = _run("dpkg-deb", "--field", str(package))
        digest = hashlib.sha256(package.read_bytes()).hexdigest()  # as in Debian's index of packages
        (notes / package.name.split("_")[0]).write_text(f"{control.strip()}\nSHA256: {digest}\n")


def finish(root: Path) -> None:
    """Add what Debian's maintainer scripts would: authorities in one file, users, links, empty directories."""
    certificates = sorted((root / "usr/share/ca-certificates").rglob("*.crt"))
    authorities = root / _AUTHORITIES
    authorities.parent.mkdir(parents=True)
    authorities.write_text("".join(path.read_text() for path in certificates))
    for path in certificates:
        path.unlink()
    for name, text in _FILES.items():
        (root / name).write_text(text)
    for name, target in _LINKS.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(target)
    for name, mode in DIRECTORIES.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name).chmod(mode)


def libraries_missing(root: Path) -> Iterator[str]:
    """Name each shared library that a program or library below the root needs and that is not there."""
    files = [path for path in root.rglob("*") if path.is_file() and not path.is_symlink() and _is_elf(path)]
    there = {path.name for path in root.rglob("*.so*")}
    for path in sorted(files):
        needed = re.findall(r"\(NEEDED\).*\[(.+)\]", _run("readelf", "--dynamic", "--wide", str(path)))
        yield from (f"/{path.relative_to(root)} needs {name}" for name in needed if name not in there)


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _run(*command: str, cwd: Path | None = None) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=cwd).stdout


def main() -> None:
    """Make the root."""
    architecture, root = sys.argv[1], Path(sys.argv[2])
    unpack(download(architecture, root.with_name(f"{root.name}-packages")), root)
    finish(root)


if __name__ == "__main__":
    main()
