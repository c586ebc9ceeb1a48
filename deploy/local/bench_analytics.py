"""`make bench-analytics`: everything the measurements of the analytics need, then the measurements."""

from __future__ import annotations

import sys

from local import machine
from local.environment import Environment
from local.test import ERRORS, become


def prepare() -> Environment:
    """The machine and the environment; no Pulsar, for only the analytics are measured."""
    machine.ensure((machine.VENV, machine.JRE))
    environment = Environment()
    environment.prepare("bench-analytics")
    return environment


def main() -> int:
    """Prepare, then become the measurements."""
    try:
        environment = prepare()
    except ERRORS as error:
        print(f"\nmake bench-analytics: {error}", file=sys.stderr)
        return 1
    return become(environment, "tests.bench_analytics", *sys.argv[1:], with_local=True)


if __name__ == "__main__":
    sys.exit(main())
