"""`make check`, which is also all that CI runs: the static checks, the wheel, then the tests.

`make coverage` measures the tests' coverage on the way, which takes 2.4 times the CPU time of a unit test (4,073 tests
of tests/proto and tests/lookup: 197 s, not 82): for a release, not for each commit.

The tests come last, so that their closing line is the last one. A static check that fails does not hide the next one;
only after all of them does the run end.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from local import go_tools
from local.console import exit_on_error
from local.environment import ROOT, Environment, clean_environment, install_list, pip_check, pip_install
from local.generate import stale
from local.test import SIDE_BY_SIDE, become, prepare

_TOOLS = {
    "format": ("ruff", "format", "--check", "."),
    "lint": ("ruff", "check", "."),
    "types": ("mypy",),
    "import contract": ("lint-imports",),
}
_COVERAGE = ("--cov", "--cov-report=term:skip-covered", "-p", "tests.coverage_gate")
_COVERAGE_DIRECTORY = ROOT / "build" / "coverage"
_SLOWEST = ("--durations=30", "--durations-min=8")
"""The slowest tests, reported at the end."""

_CONFIG = """\
[cluster]
runtime_dir = "{directory}/run"

[[listener]]
bind = "127.0.0.1:6650"

[brokers]
service_url = "pulsar://localhost:6651"
"""


def try_wheel(environment: Environment) -> None:
    """Build the wheel, install it elsewhere, call its commands. CalledProcessError if any of it fails.

    Tests run against the tree; only this shows that the package holds all it needs.
    """
    with tempfile.TemporaryDirectory(prefix="ptp-wheel-") as name:
        directory = Path(name)
        build = [str(environment.python), "-m", "pip", "--disable-pip-version-check", "wheel", "-q"]
        _run([*build, "--no-deps", "--no-build-isolation", "-w", name, str(environment.root)], directory)
        _run([sys.executable, "-m", "venv", "venv"], directory)
        (wheel,) = directory.glob("*.whl")
        python = directory / "venv/bin/python"
        _run(install_list(python, "proxy"), environment.root)
        _run([*pip_install(python), str(wheel)], directory)
        _run(pip_check(python), directory)
        command = str(directory / "venv/bin/pulsar-trio-proxy")
        config = directory / "config.toml"
        config.write_text(_CONFIG.format(directory=directory))
        _run([command, "--help"], directory)
        _run([command, "check", "--config", str(config)], directory)
        _run([str(directory / "venv/bin/pulsar-proxy-analytics"), "--help"], directory)


def _run(command: list[str], directory: Path) -> None:
    subprocess.run(command, check=True, cwd=directory, env=clean_environment(), stdin=subprocess.DEVNULL)


def _tool(environment: Environment, command: tuple[str, ...]) -> None:
    path, *arguments = command
    subprocess.run([environment.tool(path), *arguments], check=True, cwd=environment.root, env=clean_environment())


def _generated(environment: Environment) -> None:
    files = stale(environment)
    if files:
        raise RuntimeError(f"out of date, run `make generate`: {', '.join(map(str, files))}")


def _steps(environment: Environment) -> dict[str, Callable[[], None]]:
    steps: dict[str, Callable[[], None]] = {
        name: lambda command=command: _tool(environment, command)  # type: ignore[misc]
        for name, command in _TOOLS.items()
    }
    steps["generated files"] = lambda: _generated(environment)
    steps["wheel"] = lambda: try_wheel(environment)
    return steps


def static_checks(environment: Environment) -> list[str]:
    """Run them all; returns the names of those that failed."""
    failed = []
    for name, step in _steps(environment).items():
        print(f"== {name}", flush=True)
        started_at = time.monotonic()
        try:
            step()
        except (subprocess.CalledProcessError, RuntimeError, OSError) as error:
            print(f"== {name} FAILED: {error}", flush=True)
            failed.append(name)
        else:
            print(f"== {name} ok, {time.monotonic() - started_at:.1f} s", flush=True)
    return failed


def _collect_coverage() -> None:
    """Have every process write its data to one directory, wherever it runs and as whichever user."""
    shutil.rmtree(_COVERAGE_DIRECTORY, ignore_errors=True)
    _COVERAGE_DIRECTORY.mkdir(parents=True)
    _COVERAGE_DIRECTORY.chmod(0o1777)  # clusters of the tests run as the user nobody
    os.environ["COVERAGE_FILE"] = str(_COVERAGE_DIRECTORY / "data")


def main() -> int:
    """Prepare, run the static checks, then become pytest."""
    arguments = sys.argv[1:]
    with_coverage = arguments[:1] == ["--coverage"]
    with exit_on_error("check"):
        environment = prepare()
    failed = static_checks(environment)
    if failed:
        print(f"\nmake check: failed before the tests: {', '.join(failed)}", flush=True)
        return 1
    print("== left out: make e2e-kubernetes (a real node; to build Kubernetes takes too long here)", flush=True)
    if not go_tools.tool("cosign").exists():
        print("== left out: signatures by cosign itself (`make publish` builds it, in minutes)", flush=True)
    print("== tests", flush=True)
    if with_coverage:
        _collect_coverage()
        arguments[:1] = _COVERAGE
    return become(environment, "pytest", *SIDE_BY_SIDE, *_SLOWEST, *arguments)


if __name__ == "__main__":
    sys.exit(main())
