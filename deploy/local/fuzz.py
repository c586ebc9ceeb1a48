"""`make fuzz`: installs Atheris, then fuzzes the parsers of strangers' bytes (tests/fuzz)."""

from __future__ import annotations

import sys

from local import machine
from local.environment import Environment
from local.test import prepare_and_become

_REPLAY = "--replay"


def prepare(arguments: list[str]) -> Environment:
    """Prepare the machine and the environment; a replay needs no Atheris, which has wheels of few platforms."""
    machine.ensure((machine.VENV,))
    environment = Environment()
    environment.prepare("test" if _REPLAY in arguments else "fuzz")
    return environment


def main() -> int:
    """Prepare, then replace this process by the runner."""
    return prepare_and_become("fuzz", prepare, "tests.fuzz")


if __name__ == "__main__":
    sys.exit(main())
