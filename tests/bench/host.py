"""What the figures were measured on."""

import datetime as dt
import os
import platform
import re
import ssl
import subprocess
from importlib.metadata import version
from pathlib import Path

from local.distribution import PULSAR, pulsar_home
from local.environment import ROOT

from tests.bench.contenders import haproxy_path


def description() -> list[tuple[str, str]]:
    """Each thing with what it is."""
    haproxy = _first(r"(?<=Running on OpenSSL version : ).+", haproxy_path(), "-vv")
    return [
        ("Date", dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC")),
        ("CPU", f"{_cpu_model()}, {len(os.sched_getaffinity(0))} CPUs for everything"),
        ("Load average of the minute before", f"{os.getloadavg()[0]:.1f}"),
        ("Memory", f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"),
        ("Kernel", f"{platform.system()} {platform.release()}"),
        ("pulsar-trio-proxy", f"{_commit()}, Python {platform.python_version()}, Trio {version('trio')}"),
        ("Pulsar proxy", f"{PULSAR.version}, Java {_first(r'(?<=version .)[0-9.]+', 'java', '-version')}"),
        ("HAProxy", _first(r"(?<=version )\S+", haproxy_path(), "-v")),
        ("TLS of each", f"{_open_ssl(ssl.OPENSSL_VERSION)}; {_boring_ssl()}; {_open_ssl(haproxy)}"),
        ("Go", _first(r"(?<=go)\d\S+", "go", "version")),
    ]


def _open_ssl(text: str) -> str:
    return " ".join(text.split()[:2])  # without its date


def _boring_ssl() -> str:
    """The Java proxy's TLS, which has no version but that of its package."""
    packages = (pulsar_home() / "lib").glob("*netty-tcnative-boringssl-static-*-linux-x86_64.jar")
    found = next((re.search(r"[0-9][0-9.]+[0-9]", path.name) for path in packages), None)
    return f"BoringSSL of netty-tcnative {found[0] if found else _UNKNOWN}"


def _cpu_model() -> str:
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()


def _commit() -> str:
    commit = _first(r"\w+", "git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")
    changed = _first(r".+", "git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no", "--", "*.py")
    return f"{commit}{' with changes' if changed != _UNKNOWN else ''}"


_UNKNOWN = "-"


def _first(pattern: str, *command: str) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return _UNKNOWN
    found = re.search(pattern, result.stdout + result.stderr)
    return found[0] if found and result.returncode == 0 else _UNKNOWN
