"""proxy.runtime.process.hardening: what is asked of the kernel. Whether that helps: tests/e2e/test_inside.py."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from proxy.runtime.process import hardening
from proxy.runtime.process.hardening import (
    FileAccess,
    become_subreaper,
    confine_process,
    harden_process,
    raise_oom_score,
)

ROOT = Path(hardening.__file__).parents[3]


class Kernel:
    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []
        self.error = 0
        self.landlock = -1
        self.rulesets: list[tuple[int, ...]] = []
        self.rules: list[tuple[int, ...]] = []
        self.restricted = 0

    def syscall(self, number: int, *arguments: Any) -> int:
        if number == 445:
            _ruleset, kind, rule, flags = arguments
            access, root = struct.unpack("=Qi", rule)
            assert os.path.samestat(os.fstat(root), os.stat("/"))
            self.rules.append((kind, access, flags))
            return 0
        if number == 446:
            self.restricted += 1
            return 0
        if arguments[0] is None:
            return self.landlock
        ruleset = arguments[0]._obj
        self.rulesets.append((ruleset.handled_fs, ruleset.handled_net, ruleset.scoped, arguments[1].value))
        ctypes.set_errno(self.error)
        return -1 if self.error else os.open("/dev/null", os.O_RDONLY)

    def prctl(self, option: int, *arguments: ctypes.c_ulong) -> int:
        self.asked.append((option, *(argument.value for argument in arguments)))
        ctypes.set_errno(self.error)
        return -1 if self.error else 0


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel()
    monkeypatch.setattr(hardening, "_libc", kernel)
    return kernel


def test_a_process_is_hardened(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Security."""
    limits: list[Any] = []
    monkeypatch.setattr(resource, "setrlimit", lambda *what: limits.append(what))
    harden_process()
    assert limits == [(resource.RLIMIT_CORE, (0, 0))]
    assert kernel.asked == [(4, 0, 0, 0, 0), (38, 1, 0, 0, 0)], "PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS"


MAKE_BLOCK, SIGNALS = 1 << 11, 1 << 1
FILES_OF_VERSION = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 5: (1 << 15) - 1, 6: (1 << 15) - 1, 7: (1 << 15) - 1}


@pytest.mark.parametrize(
    ("version", "ruleset"),
    [(1, (MAKE_BLOCK, 0, 0, 8)), (5, (MAKE_BLOCK, 0, 0, 8)), (6, (0, 0, SIGNALS, 24)), (7, (0, 0, SIGNALS, 24))],
    ids=["1", "5", "6", "7"],
)
def test_a_process_that_opens_files_is_confined(kernel: Kernel, version: int, ruleset: tuple[int, ...]) -> None:
    """Security: with as much of Landlock as the kernel knows."""
    kernel.landlock = version
    assert confine_process()
    assert (kernel.rulesets, kernel.rules) == ([ruleset], [])
    assert kernel.restricted == 1


@pytest.mark.parametrize("version", FILES_OF_VERSION, ids=str)
def test_a_worker_that_opens_no_files_is_confined(kernel: Kernel, version: int) -> None:
    """Security: everything about files is denied that the kernel can deny."""
    kernel.landlock = version
    assert confine_process(FileAccess())
    scoped, size = (SIGNALS, 24) if version >= 6 else (0, 8)
    assert (kernel.rulesets, kernel.rules) == ([(FILES_OF_VERSION[version], 0, scoped, size)], [])
    assert kernel.restricted == 1


_CONFINED = """
import ctypes, json, os, socket, sys
from proxy.runtime.process import hardening

class AsIfOf:
    def __init__(self, libc, version):
        self.libc, self.version, self.prctl = libc, version, libc.prctl

    def syscall(self, number, *arguments):
        asked = number == 444 and arguments[0] is None
        return self.version if asked else self.libc.syscall(number, *arguments)

def outcome(attempt, *arguments):
    try:
        attempt(*arguments)
    except OSError as error:
        return os.strerror(error.errno)
    return "done"

def trace(pid):
    if libc.syscall(438, os.pidfd_open(pid), 0, 0) < 0:
        raise OSError(ctypes.get_errno(), "")

libc = hardening._libc
if int(sys.argv[1]):
    hardening._libc = AsIfOf(libc, int(sys.argv[1]))
hardening.harden_process()
files = hardening.FileAccess(("one", "two/named", "missing"), ("cache",))
if not hardening.confine_process(files):
    sys.exit(77)
print(json.dumps({
    "read below one": outcome(open, "one/file"),
    "list one": outcome(os.listdir, "one"),
    "write below one": outcome(open, "one/file", "w"),
    "make below one": outcome(open, "one/new", "x"),
    "remove below one": outcome(os.remove, "one/file"),
    "read named": outcome(open, "two/named"),
    "read beside it": outcome(open, "two/other"),
    "list two": outcome(os.listdir, "two"),
    "make in cache": outcome(open, "cache/new", "w"),
    "rename in cache": outcome(os.rename, "cache/new", "cache/other"),
    "bind": outcome(socket.socket(socket.AF_UNIX).bind, "two/socket"),
    "status": outcome(os.stat, "two/other"),
    # Whoever began it is outside of its domain.
    "trace": outcome(trace, int(sys.argv[2])),
}))
"""

REFUSED = "Permission denied"


@pytest.mark.parametrize("version", [0, 1, 2, 3, 5], ids=["this kernel's", "1", "2", "3", "5"])
def test_a_worker_opens_only_its_own_files(tmp_path: Path, version: int) -> None:
    """Security: it reads what it may, writes a cache, and neither removes, renames nor binds anything."""
    for name in ("one", "two", "cache"):
        (tmp_path / name).mkdir()
    for name in ("one/file", "two/named", "two/other"):
        (tmp_path / name).write_text("kept")
    with subprocess.Popen(["/bin/sleep", "300"]) as stranger:
        try:
            command = [sys.executable, "-c", _CONFINED, str(version), str(stranger.pid)]
            environment = {"PYTHONPATH": str(Path(hardening.__file__).parents[3]), "PATH": os.environ["PATH"]}
            done = subprocess.run(
                command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
            )
        finally:
            stranger.kill()
    if done.returncode == 77:
        pytest.skip("this kernel has no Landlock")
    assert (done.returncode, done.stderr) == (0, "")
    outcomes = json.loads(done.stdout)
    allowed = {"read below one", "list one", "read named", "make in cache", "status"}
    assert {what for what, outcome in outcomes.items() if outcome == "done"} == allowed
    refusals = {REFUSED, os.strerror(errno.EPERM)}
    assert {outcome for what, outcome in outcomes.items() if what not in allowed} == refusals
    assert (tmp_path / "one" / "file").read_text() == "kept"


def test_a_kernel_without_landlock(kernel: Kernel) -> None:
    assert not confine_process()
    assert kernel.restricted == 0


def test_a_ruleset_that_is_refused_is_an_error(kernel: Kernel) -> None:
    kernel.landlock, kernel.error = 7, 22
    with pytest.raises(OSError, match="landlock: Invalid argument"):
        confine_process()


def test_orphans_are_adopted(kernel: Kernel) -> None:
    become_subreaper()
    assert kernel.asked == [(36, 1, 0, 0, 0)], "PR_SET_CHILD_SUBREAPER"


def test_a_kernel_that_refuses_is_an_error(kernel: Kernel) -> None:
    kernel.error = 22
    with pytest.raises(OSError, match=r"prctl\(36, 1\): Invalid argument"):
        become_subreaper()


# ---- where memory runs out


AS_NOBODY = "import os, encodings.ascii; os.getuid() or os.setuid(65534);"
"""Files of a process that may not be dumped belong to root, which can write them all the same."""


@pytest.mark.parametrize(
    ("before", "more", "after"), [(0, 200, 200), (300, 200, 500), (900, 200, 1000), (1000, 100, 1000)]
)
def test_a_worker_is_ended_before_what_started_it(before: int, more: int, after: int) -> None:
    """``before``: what the container's class gives; to raise it needs no privilege."""
    code = (
        "from proxy.runtime.process.hardening import FileAccess, harden_process, restrict_fork;"
        f"open('/proc/self/oom_score_adj', 'w').write('{before}');"
        f"{AS_NOBODY} harden_process(); restrict_fork({more}, FileAccess(('/proc',)));"
        "print(open('/proc/self/oom_score_adj').read())"
    )
    inherited = int(Path("/proc/self/oom_score_adj").read_text())
    if before < inherited:
        before, after = inherited, min(inherited + more, 1000)
        code = code.replace("open('/proc/self/oom_score_adj', 'w')", "open('/dev/null', 'w')")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stdout) == after


def test_a_score_that_cannot_be_written_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object, **_keywords: object) -> None:
        raise PermissionError

    monkeypatch.setattr("builtins.open", refuse)
    raise_oom_score(200)
