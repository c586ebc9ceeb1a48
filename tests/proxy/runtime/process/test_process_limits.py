"""proxy.runtime.process.limits: open files by role, in processes of their own, since a limit is for good."""

from __future__ import annotations

import errno
import json
import resource
import subprocess
import sys
from typing import Any

import pytest

from proto.roles import Role
from proxy.admin.http import CONNECTIONS_MAX
from proxy.config.types import Brokers
from proxy.runtime.dns.queries import QUERIES_MAX
from proxy.runtime.process.limits import OPEN_FILES_MAX
from proxy.runtime.rpc.server import CONNECTIONS_PER_CALLER_MAX

WORKERS_MAX = 256
"""Of each role (proxy.config)."""

_TRY = """
import json, os, resource, sys
from proto.roles import Role
from proxy.runtime.process import limits
role, inherited, most = Role[sys.argv[1]], int(sys.argv[2]), int(sys.argv[3])
if inherited:
    resource.setrlimit(resource.RLIMIT_NOFILE, (inherited, inherited))
if most and role in limits.OPEN_FILES_MAX:
    limits.OPEN_FILES_MAX[role] = most
before = resource.getrlimit(resource.RLIMIT_NOFILE)
limits.limit_open_files(role)
failed = 0
try:
    while most:
        os.dup(0)
except OSError as error:
    failed = error.errno
print(json.dumps({"before": before, "after": resource.getrlimit(resource.RLIMIT_NOFILE), "failed": failed}))
"""


def limited(role: Role, *, inherited: int = 0, most: int = 0) -> Any:
    """The limits of a process before and after it got its role's, and what the kernel says of one more file."""
    command = [sys.executable, "-c", _TRY, role.name, str(inherited), str(most)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("role", OPEN_FILES_MAX)
def test_a_role_has_its_number_of_files(role: Role) -> None:
    seen = limited(role)
    assert seen["after"] == [min(OPEN_FILES_MAX[role], resource.getrlimit(resource.RLIMIT_NOFILE)[1])] * 2


def test_the_kernel_keeps_a_captured_worker_to_it() -> None:
    """Security."""
    assert limited(Role.ADMIN, most=50) | {"before": None} == {
        "before": None,
        "after": [50, 50],
        "failed": errno.EMFILE,
    }


def test_a_lower_limit_stays() -> None:
    assert limited(Role.LOOKUP, inherited=300)["after"] == [300, 300]


def test_a_forwarder_keeps_the_supervisors() -> None:
    """The number of its connections is a setting (proxy.supervisor.startup.open_files)."""
    seen = limited(Role.FORWARDER)
    assert seen["after"] == seen["before"]


def test_the_numbers_hold_what_the_roles_bounds_allow() -> None:
    callers = 2 * 2 * WORKERS_MAX  # forwarders and lookup workers, and their successors
    pooled_max = Brokers.__annotations__["pooled_connections_max"].__metadata__[0].le
    assert OPEN_FILES_MAX[Role.ADMIN] >= 2 * CONNECTIONS_MAX + 100
    assert OPEN_FILES_MAX[Role.AUTH] >= callers * CONNECTIONS_PER_CALLER_MAX + QUERIES_MAX + 1000
    assert OPEN_FILES_MAX[Role.LOOKUP] >= 2.5 * pooled_max + callers * CONNECTIONS_PER_CALLER_MAX + QUERIES_MAX + 1000
