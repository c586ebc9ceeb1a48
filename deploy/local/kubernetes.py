"""A real Kubernetes node on this machine, in namespaces of its own: a wrapper of deploy/kubernetes-lab."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from local.console import MakeError, Progress, print_status
from local.environment import ROOT
from local.process import run_reporting

SCRIPTS = ROOT / "deploy/kubernetes-lab"
PROGRAMS = (
    *("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl", "kube-proxy"),
    *("etcd", "helm"),
)
PAUSE_IMAGE = "pause.image.tar"


class LabError(MakeError):
    """The node could not be built or started; the text holds the end of the output."""


class Lab:
    """A Kubernetes node. Its programs, images and state are below one directory outside the tree."""

    def __init__(self, directory: Path | None = None, progress: Progress = print_status) -> None:
        configured = os.environ.get("K8S_LAB")
        self.directory = directory or Path(configured or Path.home() / ".cache/kubernetes-lab")
        self.images = self.directory / "images"
        self._progress = progress

    def missing(self) -> list[str]:
        """Return the names of the files that `build` has yet to make."""
        files = [self.directory / "bin" / name for name in PROGRAMS] + [self.images / PAUSE_IMAGE]
        return [file.name for file in files if not file.exists()]

    def build(self) -> None:
        """Build what is missing; about ten minutes on two idle cores for all of it."""
        if self.missing():
            self._run([str(SCRIPTS / "setup.sh")], "Building Kubernetes")

    def start_node(self) -> None:
        """Start the node, with all images in `images`, after stopping one that an earlier run has left."""
        self.stop_node()
        self._run([str(SCRIPTS / "cluster.sh"), "up"], "Starting the node")

    def stop_node(self) -> None:
        """Stop the node and everything in it; harmless if it does not run."""
        self._run([str(SCRIPTS / "cluster.sh"), "down"], "Ending the node")

    def command(self, *command: str) -> list[str]:
        """Return the command that runs `command` on the node, in its namespaces and in the tree's directory."""
        return [str(SCRIPTS / "cluster.sh"), "exec", "env", f"--chdir={ROOT}", *command]

    def run_on_node(self, command: Sequence[str], environment: dict[str, str]) -> int:
        """Run a command on the node with this process's terminal; return its exit code."""
        return subprocess.run(
            self.command(*command), check=False, cwd=ROOT, env=environment | self._variables()
        ).returncode

    def _variables(self) -> dict[str, str]:
        return {"K8S_LAB": str(self.directory)}

    def _run(self, command: list[str], doing: str) -> None:
        environment = os.environ | self._variables()
        failure = run_reporting(command, lambda s: f"{doing}: {s:.0f} s", self._progress, env=environment, cwd=ROOT)
        if failure:
            raise LabError(f"{doing} failed:\n{failure}")
