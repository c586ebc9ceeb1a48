"""proxy.runtime.process.limits: open files by role, in processes of their own, since a limit is for good."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from typing import Any

import pytest

from proto.roles import Role
from proxy.common.http_server import CONNECTIONS_MAX
from proxy.config.types import Brokers
from proxy.runtime.dns.queries import QUERIES_MAX
from proxy.runtime.process.limits import IN_FLIGHT_DESCRIPTORS, OPEN_FILES_MAX
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
    assert seen["after"] == [min(OPEN_FILES_MAX[role], seen["before"][1] - IN_FLIGHT_DESCRIPTORS)] * 2


def test_the_kernel_keeps_a_captured_worker_to_it() -> None:
    """Security."""
    assert limited(Role.ADMIN, most=50) | {"before": None} == {
        "before": None,
        "after": [50, 50],
        "failed": errno.EMFILE,
    }


def test_a_lower_limit_stays() -> None:
    """Three quarters of it: see IN_FLIGHT_DESCRIPTORS."""
    assert limited(Role.LOOKUP, inherited=400)["after"] == [300, 300]


def test_a_forwarder_keeps_almost_the_supervisors() -> None:
    """The number of its connections is a setting (proxy.supervisor.startup.open_files)."""
    assert limited(Role.FORWARDER, inherited=10_000)["after"] == [10_000 - IN_FLIGHT_DESCRIPTORS] * 2


_FLOOD = """
import array, json, os, resource, socket, sys
from proto.roles import Role
from proxy.runtime.process import limits
if os.geteuid() == 0:
    os.setgroups([])
    os.setuid(100_000 + os.getpid() % 10_000)  # a user whose descriptors on their way no other process adds to
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
def send(sock, count):
    sock.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * count))])
def outcome(attempt):
    try:
        attempt()
    except OSError as error:
        return error.errno
    return 0
def flood():
    while True:
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pair[0].setblocking(False)
        kept.append(pair)
        try:
            while True:
                send(pair[0], 250)
        except BlockingIOError:
            pass
kept = []
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
done, end = socket.socketpair()
if os.fork() == 0:
    limits.limit_open_files(Role[sys.argv[1]])
    done.send(str(outcome(flood)).encode())
    done.recv(1)
    os._exit(0)
captured = int(end.recv(10))
print(json.dumps({"captured": captured, "supervisor": outcome(lambda: send(ours, 6))}))
end.send(b"x")
"""


@pytest.mark.parametrize("role", ["AUTH", "FORWARDER"])
def test_a_captured_worker_does_not_keep_the_supervisor_from_passing_descriptors(role: str) -> None:
    """Security: or no worker could be forked."""
    done = subprocess.run([sys.executable, "-c", _FLOOD, role], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"captured": errno.ETOOMANYREFS, "supervisor": 0}


def test_the_numbers_hold_what_the_roles_bounds_allow() -> None:
    callers = 2 * 2 * WORKERS_MAX  # forwarders and lookup workers, and their successors
    pooled_max = Brokers.__annotations__["pooled_connections_max"].__metadata__[0].le
    assert OPEN_FILES_MAX[Role.ADMIN] >= 2 * CONNECTIONS_MAX + 100
    assert OPEN_FILES_MAX[Role.AUTH] >= callers * CONNECTIONS_PER_CALLER_MAX + QUERIES_MAX + 1000
    assert OPEN_FILES_MAX[Role.LOOKUP] >= 2.5 * pooled_max + callers * CONNECTIONS_PER_CALLER_MAX + QUERIES_MAX + 1000
