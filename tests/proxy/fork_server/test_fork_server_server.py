"""proxy.fork_server.server: real forks, in a process of their own that is the subreaper, as the supervisor is."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from importlib import import_module
from typing import Any
from unittest.mock import MagicMock

import pytest

from proto.roles import Role
from proxy.common.errors import ConfigError
from proxy.fork_server import server
from proxy.runtime.network import session_tickets
from proxy.runtime.process.descriptors import Descriptors
from proxy.runtime.process.fork_request import ForkRequest

_SUPERVISE = """
import json, os, sys, ctypes
from proxy.fork_server.server import fork_to_grandparent
from proxy.runtime.process.hardening import become_subreaper
become_subreaper()
reading, writing = os.pipe()
fork_server = os.fork()
if fork_server == 0:
    try:
        SCENE
    finally:
        os._exit(0)
os.close(writing)
os.waitpid(fork_server, 0)
found = [json.loads(line) for line in os.fdopen(reading).read().splitlines()]
codes = []
while True:
    try:
        codes.append(os.waitstatus_to_exitcode(os.wait()[1]))
    except ChildProcessError:
        break
print(json.dumps({"found": found, "codes": codes, "pid": os.getpid()}))
"""
_TELL = "(lambda **what: os.write(writing, (json.dumps(what) + chr(10)).encode()))"


def supervise(scene: str) -> Any:
    """What a fork server and its workers told with `tell`, and the exit codes that the subreaper gets."""
    body = scene.replace("tell(", f"{_TELL}(").strip().replace("\n", "\n        ")
    code = _SUPERVISE.replace("SCENE", body)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return json.loads(done.stdout)


def test_a_forked_worker_is_the_subreapers_child_from_its_first_line_on() -> None:
    seen = supervise("""
pid = fork_to_grandparent()
if pid == 0:
    tell(parent=os.getppid(), worker=os.getpid())
    os._exit(7)
tell(pid=pid)
""")
    worker = next(one for one in seen["found"] if "worker" in one)
    assert worker["parent"] == seen["pid"]
    assert {"pid": worker["worker"]} in seen["found"]
    assert seen["codes"] == [7]


def test_a_fork_leaves_the_fork_server_nothing() -> None:
    seen = supervise("""
before = os.listdir("/proc/self/fd")
if fork_to_grandparent() == 0:
    os._exit(0)
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    tell(children=0, same=os.listdir("/proc/self/fd") == before)
""")
    assert seen["found"] == [{"children": 0, "same": True}]


@pytest.mark.parametrize("failing", [1, 2])
def test_a_fork_that_fails_is_an_error_with_the_kernels_reason(failing: int) -> None:
    """The first of the two forks, or the second, which is in another process."""
    seen = supervise(f"""
fork, left = os.fork, [{failing}]
def refuse():
    left[0] -= 1
    if left[0] == 0:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()
os.fork = refuse
before = os.listdir("/proc/self/fd")
try:
    fork_to_grandparent()
except OSError as error:
    tell(errno=error.errno, same=os.listdir("/proc/self/fd") == before)
""")
    assert seen["found"] == [{"errno": 11, "same": True}]
    assert seen["codes"] == []


def test_random_numbers_of_two_workers_differ() -> None:
    """Security: Python's generator and OpenSSL's, though both were used before the fork."""
    seen = supervise("""
import random, ssl
random.random(), ssl.RAND_bytes(16)
for _ in range(2):
    if fork_to_grandparent() == 0:
        tell(python=random.random(), openssl=ssl.RAND_bytes(16).hex())
        os._exit(0)
""")
    first, second = seen["found"]
    assert first["python"] != second["python"]
    assert first["openssl"] != second["openssl"]


_IMPORT = """
import json, os, signal, threading
signals = {number: signal.getsignal(number) for number in signal.valid_signals()}
before = set(os.listdir("/proc/self/fd"))
from proxy.fork_server.server import import_all
import_all()
import prometheus_client, structlog, sys
print(json.dumps({
    "threads": [threading.active_count(), len(os.listdir("/proc/self/task"))],
    "opened": sorted(set(os.listdir("/proc/self/fd")) - before),
    "signals": [int(n) for n, handler in signals.items() if signal.getsignal(n) is not handler],
    "structlog": structlog.is_configured(),
    "ours": [name for name in prometheus_client.REGISTRY._names_to_collectors if name.startswith("pulsar_")],
    "missing": [name for name in sys.argv[1:] if name not in sys.modules],
}))
"""


def test_imports_leave_nothing_that_workers_would_share() -> None:
    """No thread, no descriptor, no handler of a signal, no logs that are set up, no metrics."""
    modules = [module for module, _, _ in server.SERVICES.values()]
    done = subprocess.run([sys.executable, "-c", _IMPORT, *modules], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {
        "threads": [1, 1],
        "opened": [],
        "signals": [],
        "structlog": False,
        "ours": [],
        "missing": [],
    }


_VERIFY = """
import codecs, sys, jwt
from proxy.fork_server.server import import_all
import_all()
loaded = set(sys.modules)
for beginning in (b"\\0\\0\\0a", b"a\\0\\0\\0", b"\\0a", b"a\\0", b"a", codecs.BOM_UTF8,
                  codecs.BOM_UTF16_BE, codecs.BOM_UTF16_LE, codecs.BOM_UTF32_BE, codecs.BOM_UTF32_LE):
    secret = beginning + b"z" * 40
    jwt.decode(jwt.encode({"sub": "alice"}, secret, "HS256"), secret, ["HS256"])
print(sorted(set(sys.modules) - loaded))
"""


def test_a_shared_secret_of_any_bytes_needs_no_further_import() -> None:
    """A worker could not read the module's file, and would refuse all tokens: with one random secret in a hundred."""
    done = subprocess.run([sys.executable, "-c", _VERIFY], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_role_has_its_service() -> None:
    assert set(server.SERVICES) == {Role.ADMIN, Role.AUTH, Role.LOOKUP, Role.HTTP, Role.FORWARDER}
    for module, name, oom_score in server.SERVICES.values():
        assert hasattr(import_module(module), name)
        assert oom_score > 0


def test_every_provider_can_be_imported() -> None:
    for module in server.PROVIDERS:
        try:
            import_module(module)
        except ConfigError:
            assert "sasl" in module


@pytest.mark.parametrize("role", server.SERVICES)
def test_only_forwarders_keep_the_keys_of_session_tickets(role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    """Security: they are there before the fork, which the others drop before they run."""
    kept: list[bool] = []

    def fork(_channel: object) -> tuple[ForkRequest, Descriptors]:
        assert len(session_tickets._shared_fronts) == session_tickets.SHARED_FRONTS_MAX
        return ForkRequest(role, ()), Descriptors(channel=-1, liveness=-1)

    def run_worker(*_arguments: object) -> None:
        kept.append(bool(session_tickets._shared_fronts))

    ours, theirs = socket.socketpair()
    monkeypatch.setattr(sys, "argv", ["fork_server", "--channel", str(theirs.detach())])
    for name in ("set_title", "import_all", "gc", "os", "hardening", "limits", "seccomp", "Confinement", "signal"):
        monkeypatch.setattr(server, name, MagicMock())
    monkeypatch.setattr(server, "serve", fork)
    monkeypatch.setattr(server, "run_worker", run_worker)
    with ours:
        server.main()
    session_tickets.drop_shared_fronts()
    assert kept == [role is Role.FORWARDER]
