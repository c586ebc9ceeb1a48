"""The generated files: the protobuf modules, the configuration reference, the page on conformance, the diagrams of
ARCHITECTURE.md, the manual pages, the Helm chart's schema and copies.

A chart can hold only files of its own, so it has copies of deploy/prometheus and deploy/grafana.

`make generate` writes them; `make check` generates them into another folder and compares, so that they cannot go stale.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from local import conformance, go_tools, import_diagram, man_page
from local.environment import Environment, clean_environment

_PROTOS = ("proto/pulsar.proto", "proto/rpc.proto", "analytics/remote_write/remote.proto")
_REFERENCE = Path("docs/configuration.md")
CHART = Path("deploy/helm/pulsar-trio-proxy")
_CHART_JSON = {"schema": "values.schema.json", "defaults": "files/defaults.json", "values": "files/values.json"}


def produce(environment: Environment, out: Path) -> list[Path]:
    """Generate everything below `out`; returns the paths relative to it."""
    python, root = str(environment.python), environment.root
    protoc = [python, "-m", "grpc_tools.protoc", "-I.", f"--python_out={out}", f"--pyi_out={out}", *_PROTOS]
    subprocess.run(protoc, check=True, cwd=root, env=clean_environment())
    reference = [python, "-m", "proxy.config.reference"]
    text = subprocess.run(reference, check=True, cwd=root, env=clean_environment(), stdout=subprocess.PIPE)
    (out / _REFERENCE).parent.mkdir(parents=True, exist_ok=True)
    (out / _REFERENCE).write_bytes(text.stdout)
    (out / conformance.PAGE).write_text(conformance.page(root), encoding="utf-8")
    (out / import_diagram.PAGE).write_text(_architecture(environment), encoding="utf-8")
    for name, path in man_page.PAGES.items():
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        (out / path).write_bytes(_local_output(environment, "man_page", name))
    _chart(environment, out)
    return sorted(path.relative_to(out) for path in out.rglob("*") if path.is_file())


def _architecture(environment: Environment) -> str:
    """Return ARCHITECTURE.md with the diagrams of the imports as they are now."""
    made = json.loads(_local_output(environment, "import_diagram"))
    return import_diagram.with_diagrams((environment.root / import_diagram.PAGE).read_text(), made)


def _local_output(environment: Environment, module: str, *arguments: str) -> bytes:
    """Run a module of this package in `.venv`, which has more than the standard library; return what it prints."""
    command = [str(environment.python), "-m", f"local.{module}", *arguments]
    variables = {**clean_environment(), "PYTHONPATH": str(environment.root / "deploy")}
    return subprocess.run(command, check=True, cwd=environment.root, env=variables, stdout=subprocess.PIPE).stdout


def chart_copies(root: Path) -> dict[Path, Path]:
    """Return the chart's copies → their originals; both relative to the tree."""
    rules = sorted(path.relative_to(root) for path in (root / "deploy/prometheus").glob("*.yml"))
    found = {CHART / "files/prometheus" / rule.name: rule for rule in rules if rule.name != "prometheus.yml"}
    return {**found, CHART / "files/grafana/pulsar-proxy.json": Path("deploy/grafana/pulsar-proxy.json")}


def _chart(environment: Environment, out: Path) -> None:
    """Generate the chart's schema, the defaults that its templates compute and compare with, and its copies."""
    for what, name in _CHART_JSON.items():
        (out / CHART / name).parent.mkdir(parents=True, exist_ok=True)
        (out / CHART / name).write_bytes(_local_output(environment, "chart_schema", what))
    for copy, source in chart_copies(environment.root).items():
        (out / copy).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(environment.root / source, out / copy)


def stale(environment: Environment) -> list[Path]:
    """Return the tree's files that differ from newly generated ones."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory)
        return [path for path in produce(environment, out) if _differ(out / path, environment.root / path)]


def _differ(fresh: Path, committed: Path) -> bool:
    return not committed.exists() or fresh.read_bytes() != committed.read_bytes()


def main() -> int:
    """Write the generated files into the tree."""
    environment = Environment()
    environment.prepare("test")
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory)
        for path in produce(environment, out):
            target = environment.root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(out / path, target)
            print(path)
    _chart_readme(environment)
    return 0


def _chart_readme(environment: Environment) -> None:
    """Write the chart's README.md, where helm-docs is there; a test compares it in any case."""
    docs = go_tools.tool("helm-docs")
    if not docs.exists():
        print(f"{CHART / 'README.md'} is left as it is: `make test` installs helm-docs")
        return
    subprocess.run([docs, "--chart-search-root", environment.root / CHART, "--log-level", "warning"], check=True)
    print(CHART / "README.md")


if __name__ == "__main__":
    sys.exit(main())
