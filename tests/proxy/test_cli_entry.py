"""proxy.__main__: the command is hardened before it has imported or read anything."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import trio
from click.testing import CliRunner

from proxy import __main__ as module
from proxy import cli
from proxy.commands import connect
from proxy.config import load
from proxy.config.cgroups import ContainerLimits

ROOT = Path(module.__file__).parents[1]
COMMAND = [sys.executable, "-m", "proxy"]


def is_hardened(pid: int) -> bool:
    """Whether a process is, as far as root can see it in another."""
    process = Path(f"/proc/{pid}")
    [core] = [line for line in (process / "limits").read_text().splitlines() if line.startswith("Max core file size")]
    return "NoNewPrivs:\t1\n" in (process / "status").read_text() and core.split()[4:6] == ["0", "0"]


def test_the_installed_command_is_the_hardening_entry_point() -> None:
    """Security: not the commands themselves, which would harden each process that imports them."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts["pulsar-trio-proxy"] == f"proxy.__main__:{module.run.__name__}"


def test_the_process_is_hardened_before_the_command_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Security."""
    story: list[str] = []
    monkeypatch.setattr(module, "harden_process", lambda: story.append("harden"))
    monkeypatch.setattr("proxy.cli.main", lambda *, prog_name: story.append(prog_name))
    module.run()
    assert story == ["harden", "pulsar-trio-proxy"]


def test_nothing_much_is_imported_before() -> None:
    """Security: until then, other processes of the user could get hold of it."""
    code = "import sys, proxy.__main__; print([name for name in ('proxy.cli', 'click', 'trio') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("command", ["check", "serve", "status"])
def test_the_process_is_hardened_before_it_reads_the_configuration(tmp_path: Path, command: str) -> None:
    """Security: `check` in a running pod reads all secrets, beside the workers."""
    config = tmp_path / "proxy.toml"
    os.mkfifo(config)
    with subprocess.Popen([*COMMAND, command, "--config", str(config)], cwd=ROOT, stderr=subprocess.PIPE) as process:
        with config.open("w") as file:  # it has opened it as well by now, and reads
            assert is_hardened(process.pid)
            file.write("[cluster]\nno_such_key = 1\n")
        assert process.stderr is not None
        assert b"no_such_key" in process.stderr.read()
    assert process.returncode == 1


def test_a_password_is_still_asked_for() -> None:
    ours, theirs = pty.openpty()
    command = [*COMMAND, "scram-credential", "--user", "alice", "--iterations", "4096"]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=theirs, stdout=subprocess.PIPE, stderr=theirs, start_new_session=True
    ) as process:
        os.close(theirs)
        shown = b""
        for question in (b"Password: ", b"Repeat for confirmation: "):
            while question not in shown:
                shown += os.read(ours, 1000)
            os.write(ours, b"a-secret\n")
        assert process.stdout is not None
        assert process.stdout.read().startswith(b"alice:")
    os.close(ours)
    assert process.returncode == 0
    assert b"a-secret" not in shown


def test_check_says_what_the_container_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "proxy.toml"
    config.write_text("[cluster]\nforwarders = 1\n")
    monkeypatch.setattr(load, "container_limits", lambda: ContainerLimits(memory_bytes=512 << 20))
    done = CliRunner().invoke(cli.main, ["check", "--config", str(config)])
    assert done.exit_code == 0, done.output
    in_order, container = done.output.splitlines()
    assert in_order == f"{config}: in order"
    assert "memory_limit_mib=512" in container
    monkeypatch.setattr(load, "container_limits", lambda: ContainerLimits(memory_bytes=64 << 20))
    done = CliRunner().invoke(cli.main, ["check", "--config", str(config)])
    assert done.exit_code == 1
    assert "limit of 64 MiB is too small: this configuration needs" in done.output


def test_check_tries_no_broker_from_a_container_that_is_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Minutes of waiting for what each broker says would be for nothing."""

    tries = 0

    async def check_brokers(*_arguments: object) -> list[connect.Finding]:
        nonlocal tries
        await trio.lowlevel.checkpoint()
        tries += 1
        return []

    monkeypatch.setattr(connect, "check_brokers", check_brokers)
    config = tmp_path / "proxy.toml"
    config.write_text("[cluster]\nforwarders = 1\n")
    for mebibytes, status in ((512, 0), (64, 1)):
        limits = ContainerLimits(memory_bytes=mebibytes << 20)
        monkeypatch.setattr(load, "container_limits", lambda limits=limits: limits)
        done = CliRunner().invoke(cli.main, ["check", "--config", str(config), "--connect"])
        assert (done.exit_code, tries) == (status, 1)
    assert "limit of 64 MiB is too small" in done.output
