"""`make test`: everything the tests need, then the tests, the end-to-end ones included.

`make test-quick`: the tests that need neither a broker nor a JVM.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import NoReturn

from local import go_tools, machine
from local.broker_jars import PULSAR_5
from local.console import Progress, exit_on_error
from local.distribution import PULSAR, pulsar_home
from local.environment import Environment, clean_environment
from local.object_store import s3a_jars
from local.process import side_by_side

SIDE_BY_SIDE = ("-n", "3")
"""End-to-end tests wait a lot: three processes keep two CPUs busy (five need as long). Which runs what:
tests/conftest.py.
"""
QUICK = ("-n", "2", "--dist", "loadfile", "-m", "not e2e and not jvm")
"""These tests compute and share nothing that is dear."""


def prepare_quick() -> Environment:
    """Make the machine and the environment ready for tests without a broker."""
    machine.ensure(machine.TEST_QUICK)
    machine.note_go()
    environment = Environment()
    side_by_side(partial(environment.prepare, "test"), go_tools.install)
    return environment


def prepare() -> Environment:
    """Prepare the machine, the environment and both Pulsar releases for the tests."""
    machine.ensure(machine.TEST)
    machine.ensure_user_mode_linux()
    machine.note_go()
    environment = Environment()
    packages = "test-kerberos" if machine.ensure_kerberos() else "test"
    side_by_side(partial(environment.prepare, packages), _install_releases, _install_tools)
    return environment


def _install_releases(progress: Progress) -> None:
    """Fetch what Maven has, from one repository: one after the other."""
    for source in (PULSAR, PULSAR_5):
        pulsar_home(progress, source)
    if go_tools.available():
        s3a_jars(progress)


def _install_tools(progress: Progress) -> None:
    """Build what Go builds."""
    go_tools.install(progress)
    if go_tools.available():
        go_tools.install_tools(["minio"], progress)


def become(environment: Environment, module: str, *arguments: str, with_local: bool = False) -> NoReturn:
    """Become `python -m module` in the tree: its last line is the last one, its status is ours.

    `with_local` is for modules that import this package; pytest finds it by itself.
    """
    sys.stdout.flush()
    os.chdir(environment.root)
    command = [str(environment.python), "-m", module, *arguments]
    variables = clean_environment()
    if with_local:
        variables["PYTHONPATH"] = str(environment.root / "deploy")
    os.execve(environment.python, command, variables)


def main() -> int:
    """Prepare, then become pytest."""
    arguments = sys.argv[1:]
    quick = arguments[:1] == ["--quick"]
    with exit_on_error("test-quick" if quick else "test"):
        environment = prepare_quick() if quick else prepare()
    if quick:
        return become(environment, "pytest", *QUICK, *arguments[1:])
    return become(environment, "pytest", *SIDE_BY_SIDE, *arguments)


if __name__ == "__main__":
    sys.exit(main())
