"""`make bench-analytics`: prepares the machine, then runs the measurements of the analytics."""

from __future__ import annotations

import sys

from local import machine
from local.environment import Environment
from local.test import prepare_and_become


def prepare(_arguments: list[str]) -> Environment:
    """Prepare the machine and the environment; Pulsar is not needed."""
    machine.ensure((machine.VENV, machine.JRE))
    environment = Environment()
    environment.prepare("bench-analytics")
    return environment


def main() -> int:
    """Prepare, then replace this process by the measurements."""
    return prepare_and_become("bench-analytics", prepare, "tests.bench_analytics")


if __name__ == "__main__":
    sys.exit(main())
