"""`make bench-analytics`: prepares the machine, then runs the measurements of the analytics."""

from __future__ import annotations

import sys

from local import machine
from local.environment import Environment
from local.test import ERRORS, become


def prepare() -> Environment:
    """Prepare the machine and the environment; Pulsar is not needed."""
    machine.ensure((machine.VENV, machine.JRE))
    environment = Environment()
    environment.prepare("bench-analytics")
    return environment


def main() -> int:
    """Prepare, then replace this process by the measurements."""
    try:
        environment = prepare()
    except ERRORS as error:
        print(f"\nmake bench-analytics: {error}", file=sys.stderr)
        return 1
    return become(environment, "tests.bench_analytics", *sys.argv[1:], with_local=True)


if __name__ == "__main__":
    sys.exit(main())
