"""proxy.supervisor.operators.journal: entries that journald reads as they were meant; none holds the supervisor up."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import trio
from prometheus_client import CollectorRegistry

from proxy.common.errors import ConfigError
from proxy.config.types import Audit
from proxy.runtime.observability.audit import LINE_BYTES_MAX
from proxy.supervisor.operators import journal
from proxy.supervisor.operators.audit import AuditWriter, close_destination, open_destination
from proxy.supervisor.processes.audit_pipe import create_audit_pipe

JOURNALD = "/lib/systemd/systemd-journald"
AUDIT = Audit(events=("connections",), output="journald")
LOST = "pulsar_proxy_audit_lost_bytes_total"
HOSTILE = "eve\nPULSAR_PROXY_PRINCIPAL=alice\n_UID=0\nMESSAGE=forged"


def line_of(**fields: str | int) -> bytes:
    return f"{json.dumps({'event': 'connection_ended', **fields})}\n".encode()


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the journal's socket is expected."""
    path = str(tmp_path / "socket")
    monkeypatch.setattr(journal, "JOURNAL_SOCKET", path)
    return path


@pytest.fixture
def receiver(address: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(address)
        sock.setblocking(False)
        yield sock


async def write(*lines: bytes) -> float:
    """Have a writer take lines; return how many bytes it has lost."""
    registry = CollectorRegistry()
    reader, pipe = create_audit_pipe()
    writer = AuditWriter(reader, registry)
    writer.set_destination(open_destination(AUDIT))
    with structlog.testing.capture_logs():
        for line in lines:
            os.write(pipe, line)
        while await writer._write_some():
            pass
    writer.set_destination(-1)
    close_destination(reader)
    close_destination(pipe)
    return registry.get_sample_value(LOST) or 0.0


async def test_an_event_is_an_entry_with_fields(receiver: socket.socket) -> None:
    assert await write(line_of(client="192.0.2.1:5", principal="alice", ms=7), b'{"event":"connection_refused"}\n') == 0
    assert receiver.recv(9999).splitlines() == [
        b"MESSAGE=connection_ended client=192.0.2.1:5 principal=alice",
        b"PRIORITY=6",
        b"SYSLOG_IDENTIFIER=pulsar-trio-proxy",
        b"PULSAR_PROXY_EVENT=connection_ended",
        b"PULSAR_PROXY_CLIENT=192.0.2.1:5",
        b"PULSAR_PROXY_PRINCIPAL=alice",
        b"PULSAR_PROXY_MS=7",
    ]
    assert b"PRIORITY=4\n" in receiver.recv(9999)


def test_a_value_with_newlines_is_sent_with_its_length() -> None:
    """Security: else each of its lines were a field."""
    value = HOSTILE.encode()
    entry = journal.journal_entry(line_of(principal=HOSTILE))
    assert b"\nPULSAR_PROXY_PRINCIPAL\n" + len(value).to_bytes(8, "little") + value + b"\n" in entry


@pytest.mark.parametrize(
    "line",
    [
        b"event=connection_ended client=x\n",
        b'{"event": {"deep": 1}}\n',
        b'{"event": "x", "A": "upper"}\n',
        b'{"event": "x", "a=b": "y"}\n',
        b'{"event": "x", "a\\nb": "y"}\n',
        b'{"event": "x", "_uid": "0"}\n',
        line_of(principal="x" * LINE_BYTES_MAX),
        line_of(**{f"field_{number}": number for number in range(journal.FIELDS_MAX)}),
    ],
)
async def test_what_no_worker_of_ours_writes_is_no_entry(receiver: socket.socket, line: bytes) -> None:
    """Security: a captured worker chooses no names of fields but its own events'; others' events are written."""
    assert await write(line_of(client="before"), line, line_of(client="after")) == len(line)
    assert [b"client=before" in receiver.recv(9999), b"client=after" in receiver.recv(9999)] == [True, True]
    with pytest.raises(BlockingIOError):
        receiver.recv(9999)


async def test_a_journal_that_takes_nothing_loses_events_and_delays_no_others(
    receiver: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "SEND_TIMEOUT_S", 0.05)
    line, count = line_of(client="x"), 700
    with trio.fail_after(60):
        lost = await write(*[line] * count)
    taken = 0
    with contextlib.suppress(BlockingIOError):
        while receiver.recv(9999):
            taken += 1
    assert 0 < taken < count
    assert lost == (count - taken) * len(line)


def test_a_restarted_journal(address: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as first:
        first.bind(address)
        descriptor = open_destination(AUDIT)
    line = line_of(client="x")
    assert journal.write_to_journal(os.dup(descriptor), line) == (len(line), "Connection refused")
    Path(address).unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as second:
        second.bind(address)
        assert journal.write_to_journal(os.dup(descriptor), line) == (0, "")
        assert b"client=x" in second.recv(9999)
    close_destination(descriptor)


def test_without_a_journal_the_configuration_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"audit\.output: .*No such file"):
        open_destination(AUDIT)


def test_another_socket_is_no_journal() -> None:
    """Under systemd, standard output is one: lines are written to it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not journal.is_journal(ours.fileno())
    assert not journal.is_journal(-1)


# ---- journald itself


@pytest.fixture
def journald(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[dict[str, Any]]]]:
    """A journald of this test's own; what journalctl finds in its files, by the event's kind."""
    if not os.access(JOURNALD, os.X_OK) or shutil.which("journalctl") is None or os.geteuid():
        pytest.skip("needs systemd-journald, and root")
    folders = {name: str(tmp_path / name) for name in ("run", "log")}
    for folder in folders.values():
        os.mkdir(folder)
    environment = {
        **os.environ,
        "RUNTIME_DIRECTORY": folders["run"],
        "LOGS_DIRECTORY": folders["log"],
        "SYSTEMD_LOG_TARGET": "console",
    }
    process = subprocess.Popen([JOURNALD, "audit-test"], env=environment, stderr=subprocess.DEVNULL)
    monkeypatch.setattr(journal, "JOURNAL_SOCKET", f"{folders['run']}/socket")

    def read(*matches: str) -> list[dict[str, Any]]:
        command = ["journalctl", "--directory", folders["log"], "--output", "json", "--all", *matches]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return [json.loads(line) for line in done.stdout.splitlines()]

    try:
        yield read
    finally:
        process.terminate()
        process.wait(60)


async def test_journalctl_finds_what_was_written(journald: Callable[..., list[dict[str, Any]]]) -> None:
    """Security: a name with newlines forges no field of its entry, and no entry."""
    with trio.fail_after(60):
        while True:
            with contextlib.suppress(ConfigError):
                close_destination(open_destination(AUDIT))
                break
            await trio.sleep(0.05)
        lines = [line_of(client="192.0.2.1:5", principal=HOSTILE), line_of(client="192.0.2.2:5", principal="alice")]
        assert await write(*lines) == 0
        found = []
        while len(found) < len(lines):  # journald has no event for it
            found = journald("SYSLOG_IDENTIFIER=pulsar-trio-proxy")
            await trio.sleep(0.1)
    hostile, alice = found
    assert (hostile["PULSAR_PROXY_PRINCIPAL"], hostile["PULSAR_PROXY_CLIENT"]) == (HOSTILE, "192.0.2.1:5")
    assert (hostile["PRIORITY"], hostile["_PID"], hostile["_UID"]) == ("6", str(os.getpid()), str(os.getuid()))
    assert hostile["MESSAGE"].startswith("connection_ended client=192.0.2.1:5 principal=eve\n")
    assert [one["PULSAR_PROXY_CLIENT"] for one in journald("PULSAR_PROXY_PRINCIPAL=alice")] == ["192.0.2.2:5"]
    assert alice["MESSAGE"] == "connection_ended client=192.0.2.2:5 principal=alice"
