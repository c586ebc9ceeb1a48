"""proxy.runtime.process.hardening: what is asked of the kernel. Whether that helps: tests/e2e/test_inside.py."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from proxy.runtime.process import hardening
from proxy.runtime.process.hardening import become_subreaper, confine_process, harden_process, raise_oom_score

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


REFER, MAKE_BLOCK, SIGNALS = 1 << 13, 1 << 11, 1 << 1


@pytest.mark.parametrize(
    ("version", "ruleset", "rules"),
    [
        (1, (MAKE_BLOCK, 0, 0, 8), []),
        (2, (REFER, 0, 0, 8), [(1, REFER, 0)]),
        (5, (REFER, 0, 0, 8), [(1, REFER, 0)]),
        (6, (0, 0, SIGNALS, 24), []),
        (7, (0, 0, SIGNALS, 24), []),
    ],
    ids=["1", "2", "5", "6", "7"],
)
def test_a_worker_is_confined(
    kernel: Kernel, version: int, ruleset: tuple[int, ...], rules: list[tuple[int, ...]]
) -> None:
    """Security: with as much of Landlock as the kernel knows."""
    kernel.landlock = version
    assert confine_process()
    assert (kernel.rulesets, kernel.rules) == ([ruleset], rules)
    assert kernel.restricted == 1


_CONFINED = """
import ctypes, os, subprocess, sys
from proxy.runtime.process import hardening

class AsIfOf:
    def __init__(self, libc, version):
        self.libc, self.version, self.prctl = libc, version, libc.prctl

    def syscall(self, number, *arguments):
        asked = number == 444 and arguments[0] is None
        return self.version if asked else self.libc.syscall(number, *arguments)

if int(sys.argv[1]):
    hardening._libc = AsIfOf(hardening._libc, int(sys.argv[1]))
hardening.harden_process()
if not hardening.confine_process():
    sys.exit(77)
os.replace("one/file", "other/file")
os.link("other/file", "one/link")
subprocess.run(["mv", "-f", "other/file", "one/moved"], check=True)
subprocess.run([sys.executable, "-c", "import os; os.rename('one/moved', 'other/back')"], check=True)
# Whoever began it is outside of its domain, and nothing of this one's to look into.
descriptor = hardening._libc.libc if int(sys.argv[1]) else hardening._libc
stranger = os.pidfd_open(int(sys.argv[2]))
print(descriptor.syscall(438, stranger, 0, 0), ctypes.get_errno())
"""


@pytest.mark.parametrize("version", [0, 2, 5], ids=["this kernel's", "2", "5"])
def test_files_may_be_moved_by_a_worker_and_other_processes_are_not_traced(tmp_path: Path, version: int) -> None:
    """Security: plugins replace files, by way of /tmp too. What is as old as version 1 cannot."""
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "one" / "file").write_text("kept")
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
    assert (tmp_path / "other" / "back").read_text() == "kept"
    assert done.stdout.split() == ["-1", str(errno.EPERM)]


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
        "from proxy.runtime.process.hardening import harden_process, restrict_fork;"
        f"open('/proc/self/oom_score_adj', 'w').write('{before}');"
        f"{AS_NOBODY} harden_process(); restrict_fork({more}); print(open('/proc/self/oom_score_adj').read())"
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
