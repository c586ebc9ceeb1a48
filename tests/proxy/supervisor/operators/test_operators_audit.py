"""The destination of audit events: whole lines in a file that nobody has prepared, and nothing that stops the rest."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from prometheus_client import CollectorRegistry

from proxy.common.errors import ConfigError
from proxy.config.types import Audit
from proxy.supervisor.operators.audit import AuditWriter, close_destination, open_destination
from proxy.supervisor.processes.audit_pipe import create_audit_pipe, open_for_worker

LOST = "pulsar_proxy_audit_lost_bytes_total"


class Setup:
    """A writer between a pipe and a file."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "audit"
        self.registry = CollectorRegistry()
        self.reader, self.pipe = create_audit_pipe()
        self.writer = AuditWriter(self.reader, self.registry)
        self.reopen()

    def audit(self, **keys: Any) -> Audit:
        return Audit(**{"events": ("connections",), "output": "file", "file": str(self.file), **keys})

    def reopen(self) -> None:
        self.writer.set_destination(open_destination(self.audit()))

    async def run(self, *pieces: bytes) -> None:
        """Write these pieces, as a worker does, and end."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.writer.run)
            for piece in pieces:
                os.write(self.pipe, piece)
                await trio.testing.wait_all_tasks_blocked()
                async with self.writer._limiter:  # its thread has written
                    pass
                await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    made = Setup(tmp_path)
    yield made
    made.writer.set_destination(-1)
    os.close(made.reader)
    os.close(made.pipe)


async def test_lines_are_written_whole(setup: Setup) -> None:
    await setup.run(b"one\ntw", b"o\nthree\n", b"four")
    assert setup.file.read_bytes() == b"one\ntwo\nthree\n"
    assert stat.S_IMODE(setup.file.stat().st_mode) == 0o640


async def test_what_is_there_stays_and_a_renamed_file_gets_no_more(setup: Setup) -> None:
    await setup.run(b"one\n")
    setup.file.rename(setup.file.parent / "audit.1")
    await setup.run(b"two\n")
    setup.reopen()
    await setup.run(b"three\n")
    setup.reopen()
    await setup.run(b"four\n")
    assert (setup.file.parent / "audit.1").read_bytes() == b"one\ntwo\n"
    assert setup.file.read_bytes() == b"three\nfour\n"


async def test_a_destination_that_fails_loses_lines_and_is_counted(setup: Setup) -> None:
    setup.writer.set_destination(os.open("/dev/full", os.O_WRONLY))
    await setup.run(b"one\n", b"two\n")
    assert setup.registry.get_sample_value(LOST) == 8
    setup.reopen()
    await setup.run(b"three\n")
    assert setup.file.read_bytes() == b"three\n"


async def test_nonsense_without_an_end_is_bounded(setup: Setup) -> None:
    """Bounds: of what the supervisor keeps for a worker that was taken over."""
    await setup.run(b"x" * 3000, b"x" * 3000, b"one\n")
    assert setup.file.read_bytes() == b"one\n"


def test_no_link_and_no_other_kind_of_file_is_written_to(setup: Setup, tmp_path: Path) -> None:
    """Security: another user who may write in the folder must not lead lines elsewhere."""
    link, fifo = tmp_path / "link", tmp_path / "fifo"
    link.symlink_to(setup.file)
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    for file, text in ((link, "cannot be written"), (fifo, "no regular file"), (tmp_path, "cannot be written")):
        with pytest.raises(ConfigError, match=text):
            open_destination(setup.audit(file=str(file)))
    os.close(reader)


def test_nothing_is_opened_where_nothing_is_wanted(setup: Setup, tmp_path: Path) -> None:
    assert open_destination(setup.audit(events=(), file=str(tmp_path / "none"))) == -1
    close_destination(-1)
    assert not (tmp_path / "none").exists()


def test_a_worker_changes_only_its_own_end(setup: Setup) -> None:
    """Security: one that was taken over and makes its end blocking stops nobody else."""
    worker = open_for_worker(setup.pipe)
    assert not os.get_blocking(worker)
    os.set_blocking(worker, True)
    assert not os.get_blocking(setup.pipe)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.read(worker, 1)
    os.close(worker)
