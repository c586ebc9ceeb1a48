"""Checks and installs the programs that this machine must have.

As root on Debian or Ubuntu, missing packages are installed. Otherwise an error names the command to run.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from local.console import MakeError, Progress, print_status
from local.process import run_reporting

PYTHON_MINIMUM = (3, 11)
JAVA_MINIMUM = 17
BENCH_GO_MINIMUM = (1, 19)  # Debian 12's: the benchmark's generator needs no module, only the standard library
GO_MINIMUM = (1, 21)  # from here on Go fetches the toolchain that a module asks for by itself

_POLICY = Path("/usr/sbin/policy-rc.d")


class MachineError(MakeError):
    """A missing program that could not be installed; the text says what to do."""


@dataclass(frozen=True)
class Need:
    """A requirement of the machine; of `packages` (Debian's names) the first one available provides it."""

    what: str
    present: Callable[[], bool]
    packages: tuple[str, ...]


def has_venv() -> bool:
    """Return True if Python has venv and ensurepip, which Debian ships in a package of its own."""
    importlib.invalidate_caches()
    return importlib.util.find_spec("venv") is not None and importlib.util.find_spec("ensurepip") is not None


def java_major(command: str = "java") -> int:
    """Return the major version of `java` or `javac`, found as Pulsar and Maven find it; 0 if there is none."""
    home = os.environ.get("JAVA_HOME")
    text = _output([f"{home}/bin/{command}" if home else command, "-version"])
    # `openjdk version "17.0.15"` and `javac 17.0.15`; Java 8 called itself 1.8.
    match = re.search(r'(?:version "|javac )(?:1\.)?(\d+)', text)
    return int(match.group(1)) if match else 0


def _has_server(name: str) -> bool:
    """Return True if a program exists, in /usr/sbin too, which is not in every user's PATH."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin") is not None


def go_version() -> tuple[int, int]:
    """Return Go's version; (0, 0) if there is none."""
    match = re.search(r"go(\d+)\.(\d+)", _output(["go", "version"]))
    return (int(match.group(1)), int(match.group(2))) if match else (0, 0)


def _output(command: list[str]) -> str:
    try:
        result = subprocess.run(command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except OSError:
        return ""
    return result.stdout + result.stderr if result.returncode == 0 else ""


VENV = Need("Python's venv module", has_venv, ("python3-venv",))
JRE = Need(
    f"Java {JAVA_MINIMUM} or newer",
    lambda: java_major() >= JAVA_MINIMUM,
    ("openjdk-17-jre-headless", "openjdk-21-jre-headless", "openjdk-25-jre-headless"),
)
JDK = Need(
    f"a Java compiler, {JAVA_MINIMUM} or newer",
    lambda: java_major() >= JAVA_MINIMUM and java_major("javac") >= JAVA_MINIMUM,
    ("openjdk-17-jdk-headless", "openjdk-21-jdk-headless", "openjdk-25-jdk-headless"),
)
MAVEN = Need("Maven (mvn)", lambda: shutil.which("mvn") is not None, ("maven",))
PROMETHEUS = Need(
    "Prometheus and promtool",
    lambda: shutil.which("prometheus") is not None and shutil.which("promtool") is not None,
    ("prometheus",),
)
OPENSSL = Need("OpenSSL (openssl)", lambda: shutil.which("openssl") is not None, ("openssl",))
CURL = Need("curl", lambda: shutil.which("curl") is not None, ("curl",))
SYSTEMD = Need("systemd-analyze", lambda: shutil.which("systemd-analyze") is not None, ("systemd",))
GO = Need(
    f"Go {'.'.join(map(str, BENCH_GO_MINIMUM))} or newer", lambda: go_version() >= BENCH_GO_MINIMUM, ("golang-go",)
)
HAPROXY = Need("HAProxy", lambda: _has_server("haproxy"), ("haproxy",))
KDC = Need("a Kerberos KDC (krb5kdc)", lambda: _has_server("krb5kdc"), ("krb5-kdc",))
KADMIN = Need("kadmin.local", lambda: _has_server("kadmin.local"), ("krb5-admin-server",))
KRB5_HEADERS = Need(
    "Kerberos' headers (krb5-config)", lambda: shutil.which("krb5-config") is not None, ("libkrb5-dev",)
)
GCC = Need("a C compiler (gcc)", lambda: shutil.which("gcc") is not None, ("gcc",))
PYTHON_HEADERS = Need(
    "Python's headers", lambda: Path(sysconfig.get_path("include"), "Python.h").exists(), ("python3-dev",)
)

BUILDAH = Need("buildah", lambda: shutil.which("buildah") is not None, ("buildah",))
MMDEBSTRAP = Need("mmdebstrap", lambda: shutil.which("mmdebstrap") is not None, ("mmdebstrap",))

UML_KERNEL = "linux.uml"
USER_MODE_LINUX = Need("User-Mode Linux", lambda: shutil.which(UML_KERNEL) is not None, ("user-mode-linux",))

PROXY_ONLY = (VENV,)
RUN = (VENV, JRE, MAVEN)
TEST = (VENV, JDK, MAVEN, PROMETHEUS, OPENSSL, CURL, SYSTEMD)
"""The last three: what docs/getting-started.md has its readers type, which tests/e2e/test_docs_commands.py does."""
TEST_QUICK = (VENV, PROMETHEUS)
BENCH = (VENV, JRE, MAVEN, GO)
IMAGES = (BUILDAH, MMDEBSTRAP)
KERBEROS = (KDC, KADMIN, KRB5_HEADERS, GCC, PYTHON_HEADERS)
"""For the tests with Kerberos: a KDC, and what the package `gssapi` is built with, since there is only its source."""


def ensure(needs: Sequence[Need], progress: Progress = print_status) -> None:
    """Install what is missing of `needs`. Raises MachineError if that is not possible."""
    if sys.version_info < PYTHON_MINIMUM:
        wanted, found = (".".join(map(str, version[:2])) for version in (PYTHON_MINIMUM, sys.version_info))
        raise MachineError(f"Python {wanted} or newer is needed; {sys.executable} is {found}.")
    missing = [need for need in needs if not need.present()]
    if not missing:
        return
    names = ", ".join(need.what for need in missing)
    if shutil.which("apt-get") is None:
        raise MachineError(f"This machine lacks {names}. Install that, then run this again.")
    if os.geteuid() != 0:
        command = " ".join(["sudo apt-get install -y --no-install-recommends", *_packages(missing)])
        raise MachineError(f"This machine lacks {names}. Run this, then try again:\n\n    {command}\n")
    progress(f"This machine lacks {names}: installing")
    _install(missing, progress)
    still = [need.what for need in missing if not need.present()]
    if still:
        hint = f" JAVA_HOME is {os.environ['JAVA_HOME']}." if os.environ.get("JAVA_HOME") else ""
        raise MachineError(f"Installed, but still not found: {', '.join(still)}.{hint} Look at PATH.")


def ensure_kerberos(progress: Progress = print_status) -> bool:
    """Install what the tests with Kerberos need; return False if that is not possible."""
    return _ensure_for("with Kerberos", KERBEROS, progress)


def ensure_user_mode_linux(progress: Progress = print_status) -> bool:
    """Install a kernel for the tests with cgroups of version 2 and kernel TLS; return False if that is not possible."""
    return _ensure_for("with cgroups of version 2 and kernel TLS", (USER_MODE_LINUX,), progress)


def _ensure_for(tests: str, needs: Sequence[Need], progress: Progress) -> bool:
    """Install what some tests need; if that is not possible, say that they are skipped, and return False."""
    try:
        ensure(needs, progress)
    except MachineError as error:
        progress(f"The tests {tests} will be skipped. {error}")
        return False
    return True


def note_go(progress: Progress = print_status) -> None:
    """Report that the Go tests will be skipped if Go is missing or too old, as Debian's is."""
    if go_version() < GO_MINIMUM:
        wanted = ".".join(map(str, GO_MINIMUM))
        progress(f"Go {wanted} or newer is missing: the tests with the Go client will be skipped")


def _packages(needs: Sequence[Need]) -> list[str]:
    return [next(filter(_offered, need.packages), need.packages[0]) for need in needs]


def _offered(package: str) -> bool:
    candidate = re.search(r"Candidate: (\S+)", _output(["apt-cache", "policy", package]))
    return candidate is not None and candidate.group(1) != "(none)"


def _install(needs: Sequence[Need], progress: Progress) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    # Waits for programs like unattended-upgrades, which hold dpkg's lock on a fresh machine.
    apt = ["apt-get", "-o", "DPkg::Lock::Timeout=300"]

    def run(command: list[str], doing: str) -> None:
        failure = run_reporting(command, lambda s: f"{doing}: {s:.0f} s", progress, env=environment)
        if failure:
            raise MachineError(f"{' '.join(command)} failed:\n{failure}")

    run([*apt, "update"], "Updating the package lists")
    packages = _packages(needs)
    with _services_held():
        run(
            [*apt, "install", "-y", "--no-install-recommends", *packages],
            f"Installing {' '.join(packages)}",
        )


@contextmanager
def _services_held() -> Iterator[None]:
    """Prevent packages from starting services: of `prometheus` only the programs are needed, not its server."""
    if _POLICY.exists():  # the system, for example a container image, has its own policy
        yield
        return
    _POLICY.write_text("#!/bin/sh\nexit 101\n")
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        _POLICY.unlink(missing_ok=True)
