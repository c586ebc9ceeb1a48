"""Runs inside an auth worker (see captured.py): tries what a worker that was taken over would try, and writes down how
that went. Standard library and the cluster's own wire format only.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from proto.rpc_frames import Call, encode_call
from proto.rpc_pb2 import Method
from proxy.common.files import read_file
from proxy.runtime.process import worker

PTRACE_SEIZE = 0x4206
SYS_PIDFD_GETFD = 438

_libc = ctypes.CDLL(None, use_errno=True)


class Provider:
    """A provider whose making sets the attack off; it never authenticates a client."""

    method = "captured"

    def __init__(self, options: dict[str, Any]) -> None:
        threading.Thread(target=_attack, args=(options,), daemon=True).start()


def _attack(options: dict[str, Any]) -> None:
    _write_nonsense()
    supervisor = os.getppid()
    report: dict[str, Any] = {"drains": {}, "memory": {}}
    for name, ask in _WAYS.items():
        report["drains"][name] = _outcome(ask, _path(options["control"]))
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(_path(options["report"]))
        told, [trap], _, _ = socket.recv_fds(sock, 1000, 1)
        siblings = json.loads(told)
        _attack_others(report, supervisor, siblings)
        report["files"] = {name: _outcome(attempt, _path(options["directory"])) for name, attempt in _FILES.items()}
        report["requests"] = {path: _outcome(_request, _path(path)) for path in options["requested"]}
        report["socket"] = _outcome(_replace_socket, _path(options["socket"]))
        sock.sendall(json.dumps(report).encode() + b"\n")
        _accept_calls(trap, sock)


def _attack_others(report: dict[str, Any], supervisor: int, siblings: list[int]) -> None:
    report["signal"] = _outcome(_end, supervisor)
    for pid in (supervisor, *siblings):
        report["memory"][str(pid)] = looks(pid)
    report["calls"] = {name: _outcome(call, supervisor) for name, call in _CALLS.items()}


def _path(told: str) -> str:
    """A path of the options, which are without the first slash: a worker may read what its options name by path."""
    return f"/{told}"


def _outcome(attempt: Callable[[Any], str], what: Any) -> str:
    try:
        return attempt(what)
    except OSError as error:
        return type(error).__name__


def _parent(pid: int) -> int:
    """A process's parent; 0 where it has gone, or has ended and waits to be reaped."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return 0
    return 0 if state == "Z" else int(parent)


# ---- metrics

NONSENSE = [
    "captured 1 2 3",
    'captured{a="1",a="2"} 1',
    "captured 1e999",
    "{{{",
    'captured{role="supervisor"} 1',
    'captured{__name__="another"} 1',
]


def _write_nonsense() -> None:
    """Put lines among this worker's metrics for which Prometheus would refuse everything."""
    written = worker.render_metrics
    head = "# HELP captured Captured.\n# TYPE captured gauge\ncaptured 7\n"
    worker.render_metrics = lambda registry: written(registry) + head + "\n".join(NONSENSE) + "\n"


# ---- control.sock


def drain(control: str) -> str:
    """Ask for a drain; "" where the line is closed without a word."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(30)
        sock.connect(control)
        try:
            sock.sendall(encode_call(Call(1, Method.CLUSTER_DRAIN, 5000, b"")))
            return sock.recv(1000).hex()
        except (BrokenPipeError, ConnectionResetError):
            return ""


_SCRIPT = "import sys; sys.path[:0] = sys.argv[2].split(':'); import captured_plugin as it; "


def _program(script: str, control: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT + script, control, ":".join(sys.path)], capture_output=True, check=False
    )
    return done.stdout.decode().strip() + done.stderr.decode().strip()


def _child(control: str) -> str:
    return _program("print(it.drain(sys.argv[1]))", control)


def _orphan(control: str) -> str:
    """A grandchild in a session of its own, whose parent has ended before it asks."""
    return _program("it.orphaned(sys.argv[1])", control)


def orphaned(control: str) -> None:
    """Ask for a drain from a process that has lost its parent; print what came of it."""
    reading, writing = os.pipe()
    here = os.getpid()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            while os.getppid() == here or _parent(os.getppid()) == here:  # until the one between has gone
                pass
            os.write(writing, drain(control).encode() or b"closed")
        os._exit(0)
    os.wait()
    os.close(writing)
    with os.fdopen(reading) as answer:
        print(answer.read().replace("closed", ""))


_WAYS: dict[str, Callable[[Any], str]] = {"itself": drain, "a child": _child, "an orphan": _orphan}


# ---- system calls that no worker needs

CLONE_NEWUSER = 0x10000000


def _execute(_pid: int) -> str:
    os.execv("/bin/true", ["true"])  # it would end the worker


def _fork(_pid: int) -> str:
    if os.fork() == 0:
        os._exit(0)
    return "forked"


def _unshare(_pid: int) -> str:
    if _libc.unshare(CLONE_NEWUSER):
        raise OSError(ctypes.get_errno(), "unshare")
    return "unshared"


def _open_netlink(_pid: int) -> str:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW):
        return "opened"


def _slow_down(pid: int) -> str:
    os.sched_setaffinity(pid, {0})
    return "moved"


def _take_its_files(pid: int) -> str:
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (10, 10))
    return "limited"


_CALLS: dict[str, Callable[[int], str]] = {
    "execute": _execute,
    "fork": _fork,
    "unshare": _unshare,
    "netlink": _open_netlink,
    "affinity": _slow_down,
    "prlimit": _take_its_files,
}


# ---- files


def _read(directory: str) -> str:
    return Path(directory, "secret").read_text()


def _list(directory: str) -> str:
    return str(os.listdir(directory))


def _write(directory: str) -> str:
    return str(Path(directory, "secret").write_text("forged"))


def _make(directory: str) -> str:
    return str(Path(directory, "new").touch())


def _remove(directory: str) -> str:
    return str(Path(directory, "secret").unlink())


def _rename(directory: str) -> str:
    return str(Path(directory, "secret").rename(Path(directory, "elsewhere")))


_FILES: dict[str, Callable[[str], str]] = {
    "read": _read,
    "list": _list,
    "write": _write,
    "make": _make,
    "remove": _remove,
    "rename": _rename,
}


def _request(path: str) -> str:
    """Request a file of the supervisor."""
    return read_file(path).decode()


def _replace_socket(path: str) -> str:
    """Put a socket of this worker's in the place of another worker's."""
    trap = socket.socket(socket.AF_UNIX)
    trap.bind(f"{path}.trap")
    Path(f"{path}.trap").rename(path)
    return "replaced"


def _accept_calls(descriptor: int, told: socket.socket) -> None:
    """Listen at a socket, and tell how many bytes each process sends that connects."""
    with socket.socket(fileno=descriptor) as trap:
        trap.listen()
        while True:
            connection, _ = trap.accept()
            with connection:
                told.sendall(b"%d\n" % len(connection.recv(1000)))


# ---- other processes


def _end(pid: int) -> str:
    os.kill(pid, signal.SIGTERM)
    return "sent"


def looks(pid: int) -> dict[str, str]:
    """What comes of looking into a process, way by way."""
    return {name: _outcome(look, pid) for name, look in _LOOKS.items()}


def _memory(pid: int) -> str:
    first = Path(f"/proc/{pid}/maps").read_text().split("-", 1)[0]
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        memory.seek(int(first, 16))
        return f"{len(memory.read(100))} bytes"


def _environment(pid: int) -> str:
    return f"{len(Path(f'/proc/{pid}/environ').read_bytes())} bytes"


def _descriptors(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/fd/2")


def _trace(pid: int) -> str:
    """Attached as this thread; the kernel lets go of it when the thread ends."""
    if _libc.ptrace(PTRACE_SEIZE, pid, None, None):
        raise OSError(ctypes.get_errno(), "ptrace")
    return "traced"


def _take_descriptor(pid: int) -> str:
    pidfd = os.pidfd_open(pid)
    try:
        taken = _libc.syscall(SYS_PIDFD_GETFD, pidfd, 2, 0)
        if taken < 0:
            raise OSError(ctypes.get_errno(), "pidfd_getfd")
        os.close(taken)
        return "taken"
    finally:
        os.close(pidfd)


_LOOKS: dict[str, Callable[[Any], str]] = {
    "mem": _memory,
    "environ": _environment,
    "fd": _descriptors,
    "pidfd_getfd": _take_descriptor,
    "ptrace": _trace,
}
