"""`make bench`: prepares the machine, then runs the measurements."""

from __future__ import annotations

import sys

from local import machine
from local.console import print_status
from local.distribution import pulsar_home
from local.environment import Environment
from local.test import prepare_and_become

_WRITE = "--write"


def prepare(arguments: list[str]) -> Environment:
    """Prepare the machine, the environment and the Pulsar distribution, whose proxy is one of the contenders."""
    machine.ensure(machine.BENCH)
    try:
        machine.ensure((machine.HAPROXY,))
    except machine.MachineError:
        print_status("HAProxy is missing and cannot be installed: it will be left out")
    environment = Environment()
    # Only `--write` needs matplotlib, which is larger than all the rest.
    environment.prepare("bench" if _WRITE in arguments else "run")
    pulsar_home()
    return environment


def main() -> int:
    """Prepare, then replace this process by the measurements."""
    return prepare_and_become("bench", prepare, "tests.bench")


if __name__ == "__main__":
    sys.exit(main())
