"""`make bench`, `make bench-analytics`, `make fuzz`, `make test-kernel-tls`: prepare the machine, then become a program
of tests/, or pytest.
"""

from __future__ import annotations

import sys

from local import machine
from local.console import exit_on_error, print_status
from local.distribution import pulsar_home
from local.environment import Environment
from local.test import become


def prepare_bench(arguments: list[str]) -> Environment:
    """Prepare the machine, the environment and the Pulsar distribution, whose proxy is one of the contenders."""
    machine.ensure(machine.BENCH)
    try:
        machine.ensure((machine.HAPROXY,))
    except machine.MachineError:
        print_status("HAProxy is missing and cannot be installed: it will be left out")
    # Only `--write` needs matplotlib, which is larger than all the rest.
    environment = _environment("bench" if "--write" in arguments else "run")
    pulsar_home()
    return environment


def prepare_bench_analytics(_arguments: list[str]) -> Environment:
    """Prepare the machine and the environment; Pulsar is not needed."""
    machine.ensure((machine.VENV, machine.JRE))
    return _environment("bench-analytics")


def prepare_fuzz(arguments: list[str]) -> Environment:
    """Prepare the machine and the environment; a replay needs no Atheris, which has wheels of few platforms."""
    machine.ensure((machine.VENV,))
    return _environment("test" if "--replay" in arguments else "fuzz")


def prepare_kernel_tls(_arguments: list[str]) -> Environment:
    """Prepare the environment, and User-Mode Linux, a kernel that has TLS."""
    machine.ensure((machine.VENV, machine.USER_MODE_LINUX))
    return _environment("test")


PROGRAMS = {
    "bench": (prepare_bench, "tests.bench"),
    "bench-analytics": (prepare_bench_analytics, "tests.bench_analytics"),
    "fuzz": (prepare_fuzz, "tests.fuzz"),
    "test-kernel-tls": (prepare_kernel_tls, "pytest"),
}
"""Target of make → what prepares for it, and the module that this process becomes, with the other arguments."""


def _environment(extra: str) -> Environment:
    environment = Environment()
    environment.prepare(extra)
    return environment


def main() -> int:
    """Prepare for the target that the first argument names, then replace this process."""
    target, *arguments = sys.argv[1:]
    prepare, module = PROGRAMS[target]
    with exit_on_error(target):
        environment = prepare(arguments)
    return become(environment, module, *arguments, with_local=True)


if __name__ == "__main__":
    sys.exit(main())
