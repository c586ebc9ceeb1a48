"""`pipx install` of the wheel, by the command of docs/installation.md: all dependencies by hash, and manual pages."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from local.environment import ROOT, Environment, clean_environment
from local.lock import canonical, read_pins
from local.man_page import PAGES
from local.release import sums

from tests.docs.blocks import blocks, commands

_CONFIG = """\
[cluster]
runtime_dir = "{}"
[[listener]]
bind = "127.0.0.1:6650"
[brokers]
service_url = "pulsar://localhost:6651"
"""


class _Workstation:
    """A folder with `dist/` as `make release` makes it, and pipx that leaves the user's own installations alone."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.dist = folder, folder / "dist"
        environment = Environment()
        build = [environment.python, "-m", "pip", "--disable-pip-version-check", "wheel", "-q", "--no-deps"]
        subprocess.run(
            [*build, "--no-build-isolation", "-w", self.dist, ROOT], check=True, cwd=folder, env=clean_environment()
        )
        shutil.copy(ROOT / "constraints.txt", folder)
        folders = {"PIPX_HOME": "home", "PIPX_BIN_DIR": "bin", "PIPX_MAN_DIR": "man", "PIPX_COMPLETION_DIR": "share"}
        kept = {key: value for key, value in clean_environment().items() if not key.startswith("PIPX_")}
        self._variables = kept | {key: str(folder / name) for key, name in folders.items()}
        self._variables |= {
            "MANPATH": str(folder / "man"),
            "PATH": f"{folder / 'bin'}:{environment.tool('pipx').parent}:{os.environ['PATH']}",
            "PIPX_DEFAULT_PYTHON": str(environment.python),
        }

    def write_sums(self, found: dict[str, str]) -> None:
        (self.dist / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name, digest in found.items()))

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", command],
            check=False,
            capture_output=True,
            text=True,
            cwd=self.folder,
            env=self._variables,
            stdin=subprocess.DEVNULL,
        )

    def output(self, command: str) -> str:
        done = self.run(command)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def workstation(tmp_path: Path) -> _Workstation:
    return _Workstation(tmp_path)


def test_the_wheel_by_pipx(workstation: _Workstation) -> None:
    shown = [command.text for block in blocks("docs/installation.md") for command in commands(block)]
    (install,) = (text for text in shown if text.startswith("pipx install "))
    (wheel,) = sums(workstation.dist)

    workstation.write_sums({wheel: "0" * 64})
    refused = workstation.run(install)
    assert refused.returncode != 0, "a wheel that is not the one of the sums"
    assert not (workstation.folder / "bin/pulsar-trio-proxy").exists()

    workstation.write_sums(sums(workstation.dist))
    workstation.output(install)
    assert workstation.output("pulsar-trio-proxy --version").startswith("pulsar-trio-proxy, version ")
    config = workstation.folder / "proxy.toml"
    config.write_text(_CONFIG.format(workstation.folder / "run"))
    assert f"{config}: in order" in workstation.output(f"pulsar-trio-proxy check --config {config}")
    assert "complete -o " in workstation.output("source <(pulsar-trio-proxy completion bash) && complete -p")

    listed = json.loads(workstation.output("pipx runpip pulsar-trio-proxy list --format=json"))
    pins = read_pins((ROOT / "constraints.txt").read_text())
    installed = {canonical(one["name"]): one["version"] for one in listed}
    del installed["pulsar-trio-proxy"], installed["pip"]  # pip is pipx's
    assert installed == {name: pins[name][1] for name in installed}

    for name, page in PAGES.items():
        linked = workstation.folder / "man/man1" / page.name
        assert linked.read_bytes() == (ROOT / page).read_bytes()
        if shutil.which("man"):  # a minimal Debian has none
            assert workstation.output(f"man -w {name}").strip() == str(linked.resolve())
