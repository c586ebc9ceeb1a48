"""What publishing, the tests of the Helm chart and those on an object store need and no package has.

Go builds helm, kubeconform, helm-docs and crane at pinned versions, and fetches the modules that hold Kubernetes'
OpenAPI descriptions and the custom resources' definitions. The chart's tests render with servers that Go builds from
each Helm's changed sources (helm_server), with that Helm's own go.mod and go.sum. All of it comes through the Go module
proxy, checked against Go's checksum database: the user's own GOPROXY applies, and no address has to be named here. A
tool is built elsewhere and renamed into its place, so an interrupted run leaves none that is half there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from local import helm_server, machine
from local.cache import cache_directory, locked
from local.console import MakeError, Progress, print_status
from local.process import run_reporting


class ToolError(MakeError):
    """A tool that cannot be built; the text has Go's reason."""


@dataclass(frozen=True)
class Tool:
    """The name of a tool here, the Go package that it is built from, the version, and what is changed in its module."""

    name: str
    package: str
    version: str
    changes: tuple[helm_server.Change, ...] = ()

    @property
    def path(self) -> Path:
        """Path of the built command; Go names it after its package."""
        changed = f"-{zlib.crc32(repr(self.changes).encode()):08x}" if self.changes else ""
        return cache_directory() / "tools" / f"{self.name}-{self.version}{changed}" / self.package.rpartition("/")[2]


HELM_4, HELM_3 = ("helm.sh/helm/v4/cmd/helm", "v4.3.1"), ("helm.sh/helm/v3/cmd/helm", "v3.22.0")

TOOLS = (
    Tool("helm", *HELM_4),
    Tool("helm3", *HELM_3),
    Tool("kubeconform", "github.com/yannh/kubeconform/cmd/kubeconform", "v0.8.0"),
    Tool("helm-docs", "github.com/norwoodj/helm-docs/cmd/helm-docs", "v1.14.2"),
    Tool("crane", "github.com/google/go-containerregistry/cmd/crane", "v0.22.1"),
    Tool("helm-server", *HELM_4, helm_server.changes_of_helm("pkg/chart/common/util/jsonschema.go")),
    Tool("helm3-server", *HELM_3, helm_server.changes_of_helm("pkg/chartutil/jsonschema.go")),
)
COSIGN = Tool("cosign", "github.com/sigstore/cosign/v3/cmd/cosign", "v3.1.3")
"""Signs what `make publish` pushes. It takes minutes to build, so `make test` does without."""
MINIO = Tool("minio", "github.com/minio/minio", "v0.0.0-20260212201848-7aac2a2c5b7c")
"""An object store. It takes minutes to build, so `make test-quick` does without."""

HELMS = ("helm", "helm3")
"""The chart is for both; each has a server."""

KUBERNETES = {
    "1.27": "k8s.io/kubernetes@v1.27.16",
    "1.30": "k8s.io/kubernetes@v1.30.14",
    "1.33": "k8s.io/kubernetes@v1.33.13",
    "1.37": "k8s.io/kubernetes@v1.37.2",
}
"""From the chart's oldest minor version to the newest; 16 to 22 MB each, and 115 in Go's cache."""

MODULES = (
    *KUBERNETES.values(),
    "github.com/prometheus-operator/prometheus-operator@v0.85.0",
    "github.com/cert-manager/cert-manager@v1.21.2",
    "github.com/kedacore/keda/v2@v2.21.0",
    "k8s.io/autoscaler/vertical-pod-autoscaler@v1.8.1",
    "sigs.k8s.io/gateway-api@v1.6.3",
)
"""Only their JSON and YAML is read."""

PAUSES_S = (2.0, 10.0)
"""Pauses between attempts: a module proxy may be out of reach for moments; Go caches what it has fetched."""


def tool(name: str) -> Path:
    """Return the path of a tool, which may not be built yet."""
    return next(one for one in (*TOOLS, COSIGN, MINIO) if one.name == name).path


def available() -> bool:
    """Return True if the machine's Go can build the tools."""
    return machine.go_version() >= machine.GO_MINIMUM


def install(progress: Progress = print_status) -> None:
    """Build and fetch what is missing. Does nothing without Go: the tests that need the tools are then skipped."""
    if not available():
        return
    for module in MODULES:
        module_directory(module)
    install_tools([one.name for one in TOOLS], progress)


def install_tools(names: Sequence[str], progress: Progress = print_status) -> None:
    """Build those of the named tools that are missing."""
    missing = [one for one in (*TOOLS, COSIGN, MINIO) if one.name in names and not one.path.exists()]
    if not missing:
        return
    with locked(cache_directory() / "tools.lock", progress):
        for one in missing:
            if not one.path.exists():  # another run may have built it meanwhile
                _build(one, progress)


def _build(one: Tool, progress: Progress) -> None:
    directory = one.path.parent
    directory.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{one.name}.", dir=directory.parent))
    try:
        source, package = _changed(one, work) if one.changes else (work, f"{one.package}@{one.version}")
        for pause_s in (*PAUSES_S, None):
            failure = run_reporting(
                ["go", "install", "-trimpath", "-ldflags=-s -w", package],
                lambda s: f"Building {one.name} {one.version}: {s:.0f} s",
                progress,
                env={**os.environ, "GOBIN": str(work), "CGO_ENABLED": "0", "GOFLAGS": "", "GOWORK": "off"},
                cwd=source,
            )
            if not failure or pause_s is None:
                break
            time.sleep(pause_s)
        if failure:
            raise ToolError(f"{one.package}@{one.version} cannot be built:\n{failure}")
        shutil.rmtree(work / "source", ignore_errors=True)
        shutil.rmtree(directory, ignore_errors=True)
        work.rename(directory)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _changed(one: Tool, work: Path) -> tuple[Path, str]:
    """Return a changed copy of a tool's module, with the module's own go.mod and go.sum, and the package in it."""
    module, _, name = one.package.rpartition("/cmd/")
    copy = work / "source"
    shutil.copytree(module_directory(f"{module}@{one.version}"), copy, copy_function=shutil.copyfile)
    for directory in (copy, *(path for path in copy.rglob("*") if path.is_dir())):
        directory.chmod(0o755)  # Go's cache is read-only
    helm_server.apply(one.changes, copy)
    return copy, f"./cmd/{name}"


def module_directory(module: str) -> Path:
    """Return the directory with a module's files, after fetching it if necessary."""
    command = ["go", "mod", "download", "-json", module]
    environment = {**os.environ, "GOFLAGS": "", "GOWORK": "off"}
    with tempfile.TemporaryDirectory() as directory:  # a go.mod where we stand would have a say
        for pause_s in (*PAUSES_S, None):
            result = subprocess.run(
                command,
                check=False,
                capture_output=True,
                text=True,
                env=environment,
                cwd=directory,
                stdin=subprocess.DEVNULL,
            )
            if result.returncode == 0 or pause_s is None:
                break
            time.sleep(pause_s)
    if result.returncode != 0:
        raise ToolError(f"{module} cannot be fetched:\n{result.stdout}{result.stderr}")
    return Path(json.loads(result.stdout)["Dir"])
