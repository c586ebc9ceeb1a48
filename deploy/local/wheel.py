"""The wheel, built and tried in an environment of its own, outside the tree.

Tests run against the tree; only this shows that the package holds all it needs.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from local.environment import Environment, clean_environment, install_list, pip_check, pip_install

_CONFIG = """\
[cluster]
runtime_dir = "{directory}/run"

[[listener]]
bind = "127.0.0.1:6650"

[brokers]
service_url = "pulsar://localhost:6651"
"""


def try_wheel(environment: Environment) -> None:
    """Build the wheel, install it elsewhere, call its commands. CalledProcessError if any of it fails."""
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
