"""proxy.supervisor.processes.file_server with proxy.runtime.process.file_requests: what a worker is given."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from proxy.common.files import SYSTEM_AUTHORITIES
from proxy.runtime.process.file_requests import FileClient, FileReply, FileRequest
from proxy.supervisor.processes import file_server
from proxy.supervisor.processes.file_server import serve_files


class Served:
    """A worker's end of a channel that is served. ``allowed``: what its role may read."""

    def __init__(self, nursery: trio.Nursery, allowed: set[str]) -> None:
        self.allowed = allowed
        self.theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self.ended = trio.Event()
        nursery.start_soon(self._serve, ours)
        self.client = FileClient(self.theirs.detach(), timeout_s=30)

    async def _serve(self, ours: socket.socket) -> None:
        await serve_files(ours, lambda: frozenset(self.allowed))
        self.ended.set()

    async def read(self, path: str) -> bytes:
        descriptor = await trio.to_thread.run_sync(self.client.open_file, path)
        with os.fdopen(descriptor, "rb") as file:
            return file.read()


@pytest.fixture
def served(nursery: trio.Nursery) -> Iterator[Served]:
    one = Served(nursery, set())
    yield one
    one.client.close()
    nursery.cancel_scope.cancel()


async def test_a_file_that_the_role_needs_is_opened(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"secret")
    served.allowed.add(str(file))
    assert await served.read(str(file)) == b"secret"


async def test_a_file_that_another_role_needs_is_refused(served: Served, tmp_path: Path) -> None:
    """Security: however its path is written; and also once the configuration no longer names it."""
    file = tmp_path / "key"
    file.write_bytes(b"secret")
    served.allowed.add(str(tmp_path / "other"))
    for path in (str(file), f"{tmp_path}/other/../key", f"{tmp_path}/./other/../key", "", "\0", SYSTEM_AUTHORITIES):
        with pytest.raises(PermissionError):
            await served.read(path)
    served.allowed.add(str(file))
    assert await served.read(str(file)) == b"secret"
    served.allowed.clear()
    with pytest.raises(PermissionError):
        await served.read(str(file))


async def test_a_file_is_opened_for_reading_only(served: Served, tmp_path: Path) -> None:
    """Security."""
    file = tmp_path / "key"
    file.write_bytes(b"secret")
    served.allowed.add(str(file))
    descriptor = await trio.to_thread.run_sync(served.client.open_file, str(file))
    with os.fdopen(descriptor, "rb"), pytest.raises(OSError, match="Bad file descriptor"):
        os.write(descriptor, b"forged")


async def test_a_file_that_cannot_be_opened_has_the_systems_reason(served: Served, tmp_path: Path) -> None:
    missing, invalid = str(tmp_path / "missing"), "/a\0b"
    served.allowed |= {missing, invalid}
    with pytest.raises(FileNotFoundError) as caught:
        await served.read(missing)
    assert caught.value.filename == missing
    with pytest.raises(OSError, match="Invalid argument"):
        await served.read(invalid)


async def test_a_pipe_without_a_writer_is_not_waited_for(served: Served, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    served.allowed.add(str(pipe))
    with trio.fail_after(30):
        assert await served.read(str(pipe)) == b""


async def test_nonsense_ends_the_channel_of_its_worker(nursery: trio.Nursery) -> None:
    """Security."""
    for nonsense in (b"nonsense", b"[]", b"{}", b'{"number":1,"path":7}'):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs, trio.fail_after(30):
            theirs.send(nonsense)
            await serve_files(ours, frozenset)
            assert theirs.recv(100) == b""


async def test_a_worker_that_has_gone_ends_its_channel(served: Served) -> None:
    served.client.close()
    with trio.fail_after(30):
        await served.ended.wait()


async def test_requests_beyond_the_rate_wait(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Security: a captured worker does not keep the supervisor busy."""
    monkeypatch.setattr(file_server, "REQUESTS_PER_S_MAX", 3)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for sock in (ours, theirs):
        sock.setblocking(False)
    with trio.socket.from_stdlib_socket(theirs) as channel:
        nursery.start_soon(serve_files, ours, frozenset)
        answered_at_s = []
        for number in range(10):
            await channel.send(FileRequest(number, "/etc/passwd").encode())
            await channel.recv(100)
            answered_at_s.append(int(trio.current_time()))
    assert answered_at_s == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]


@contextmanager
def supervisor_that_sends(*messages: tuple[bytes, str]) -> Iterator[FileClient]:
    """A client whose supervisor has sent these replies already, each with the file of that name if it is not empty."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client = FileClient(theirs.detach(), timeout_s=0.05)
    for reply, file in messages:
        descriptors = [os.open(file, os.O_RDONLY)] if file else []
        socket.send_fds(ours, [reply], descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
    with ours:
        yield client
    client.close()


def test_a_reply_that_came_too_late_is_not_taken_for_the_next(tmp_path: Path) -> None:
    """A file system hung for longer than the worker waited."""
    for name in ("late", "right"):
        (tmp_path / name).write_text(name)
    late, right = (str(tmp_path / name) for name in ("late", "right"))
    before = len(os.listdir("/proc/self/fd"))
    replies = [(FileReply(0).encode(), late), (FileReply(1).encode(), right)]
    with supervisor_that_sends(*replies) as client, os.fdopen(client.open_file("/any"), "rb") as file:
        assert file.read() == b"right"
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_supervisor_that_does_not_answer_is_an_error() -> None:
    with supervisor_that_sends() as client:
        with pytest.raises(TimeoutError):
            client.open_file("/any")
        with pytest.raises(OSError, match="File name too long"):
            client.open_file("/" + "x" * 10_000)


def test_a_supervisor_that_has_gone_is_an_error() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client = FileClient(theirs.detach())
    ours.close()
    with pytest.raises(BrokenPipeError):
        client.open_file("/any")
    client.close()


async def test_threads_of_a_worker_get_their_own_files(served: Served, tmp_path: Path) -> None:
    paths = []
    for number in range(20):
        (tmp_path / str(number)).write_text(str(number))
        paths.append(str(tmp_path / str(number)))
    served.allowed |= set(paths)
    found: dict[str, Any] = {}

    async def read(path: str) -> None:
        found[path] = await served.read(path)

    async with trio.open_nursery() as reading:
        for path in paths:
            reading.start_soon(partial(read, path))
    assert found == {path: Path(path).name.encode() for path in paths}
