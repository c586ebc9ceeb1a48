"""The generated files of the tree: the protobuf modules and the configuration reference.

`make generate` writes them; `make check` makes them anew elsewhere and compares, so that they
cannot go stale.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from local.environment import Environment, clean_environment

_PROTOS = ("proto/pulsar.proto", "proto/rpc.proto", "analytics/remote_write/remote.proto")
_REFERENCE = Path("docs/configuration.md")


def produce(environment: Environment, out: Path) -> list[Path]:
    """Generate everything below `out`; returns the paths relative to it."""
    python, root = str(environment.python), environment.root
    protoc = [python, "-m", "grpc_tools.protoc", "-I.", f"--python_out={out}", f"--pyi_out={out}", *_PROTOS]
    subprocess.run(protoc, check=True, cwd=root, env=clean_environment())
    reference = [python, "-m", "proxy.config.reference"]
    text = subprocess.run(reference, check=True, cwd=root, env=clean_environment(), stdout=subprocess.PIPE)
    (out / _REFERENCE).parent.mkdir(parents=True, exist_ok=True)
    (out / _REFERENCE).write_bytes(text.stdout)
    return sorted(path.relative_to(out) for path in out.rglob("*") if path.is_file())


def stale(environment: Environment) -> list[Path]:
    """The files of the tree that differ from what is generated now."""
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
