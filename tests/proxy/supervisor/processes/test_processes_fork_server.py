"""proxy.supervisor.processes.fork_server: its requests, and what happens where it dies or does not answer."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing

from proto.roles import Role
from proxy.runtime.process.hardening import FileAccess
from proxy.supervisor.processes import fork_server as module
from proxy.supervisor.processes.fork_server import ForkFailed, ForkServer

_BEHAVE = """
import os, socket, sys, time
starts = open(sys.argv[1], "a+"); starts.write("x"); starts.flush(); starts.seek(0)
start = len(starts.read())
channel = socket.socket(fileno=int(sys.argv[sys.argv.index("--channel") + 1]))
def request():
    data, passed, _, _ = socket.recv_fds(channel, 4096, 16)
    return data.decode(), passed
BEHAVIOUR
"""
READY = 'channel.send(b"ready")\n'
ANSWER = """
while True:
    data, passed = request()
    if not data:
        break
    for number, fd in enumerate(passed):
        os.write(fd, f"{number} {data}".encode())
        os.close(fd)
    channel.send(b'{"pid": %d}' % (4000 + start))
"""

Make = Callable[[str], ForkServer]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Fork servers that behave so; each start leaves a letter in a file."""

    def make(behaviour: str) -> ForkServer:
        code = _BEHAVE.replace("BEHAVIOUR", behaviour)
        return ForkServer((sys.executable, "-c", code, str(tmp_path / "starts")))

    return make


async def test_a_worker_is_requested_with_its_descriptors(make: Make, nursery: trio.Nursery) -> None:
    server = make(READY + ANSWER)
    nursery.start_soon(server.run)
    ours, theirs = zip(*(socket.socketpair() for _ in range(2)), strict=True)
    given = {"liveness": theirs[0].fileno(), "channel": theirs[1].fileno()}
    assert await server.fork(Role.LOOKUP, given, FileAccess(("/r",), ("/w",))) == 4001
    for number, sock in enumerate(ours):
        number_text, _, request = sock.recv(1000).decode().partition(" ")
        assert int(number_text) == number
        assert json.loads(request) == {
            "role": "lookup",
            "names": ["liveness", "channel"],
            "files": {"readable": ["/r"], "writable": ["/w"]},
        }
    for sock in (*ours, *theirs):
        sock.close()
    nursery.cancel_scope.cancel()


async def test_requests_come_one_after_the_other(make: Make, nursery: trio.Nursery) -> None:
    server = make(READY + ANSWER)
    nursery.start_soon(server.run)
    pids: list[int] = []

    async def fork() -> None:
        pids.append(await server.fork(Role.LOOKUP, {"channel": 1}))

    async with trio.open_nursery() as forking:
        for _ in range(20):
            forking.start_soon(fork)
    assert pids == [4001] * 20
    nursery.cancel_scope.cancel()


async def test_a_fork_server_that_dies_is_replaced_before_a_worker_is_needed(make: Make, nursery: trio.Nursery) -> None:
    server = make(f"{READY}if start == 1: os._exit(3)\n{ANSWER}")
    with structlog.testing.capture_logs() as logs:
        nursery.start_soon(server.run)
        await entries(logs, 1)
        assert await server.fork(Role.AUTH, {"channel": 1}) == 4002
    [entry] = logs
    assert (entry["event"], entry["code"]) == ("the fork server ended; starting another", 3)
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("last", ["os._exit(3)", "channel.send(b'nonsense')", "channel.send(b'[]')"])
async def test_a_request_that_gets_no_reply_is_made_again_to_another(make: Make, last: str) -> None:
    server = make(f"{READY}if start == 1:\n request()\n {last}\n request()\n{ANSWER}")
    assert await server.fork(Role.AUTH, {"channel": 1}) == 4002
    await end(server)


async def test_a_fork_server_that_hangs_is_killed_and_replaced(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FORK_TIMEOUT_S", 0.2)
    server = make(f"{READY}if start == 1:\n time.sleep(1000)\n{ANSWER}")
    assert await server.fork(Role.AUTH, {"channel": 1}) == 4002
    await end(server)


async def test_a_request_that_two_fork_servers_do_not_answer_fails(make: Make, tmp_path: Path) -> None:
    server = make(f"{READY}request()")
    with pytest.raises(ForkFailed, match="the fork server ended, or did not answer: its end of the channel is closed"):
        await server.fork(Role.AUTH, {"channel": 1})
    assert len((tmp_path / "starts").read_text()) == 2
    await end(server)


async def test_a_fork_server_that_exits_during_its_imports_fails_the_fork(make: Make) -> None:
    server = make("os._exit(1)")
    reason = r"the fork server does not start \(its end of the channel is closed\); see its log"
    with pytest.raises(ForkFailed, match=reason):
        await server.fork(Role.AUTH, {"channel": 1})


async def test_a_fork_server_that_does_not_start_in_time_fails_the_fork(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IMPORT_TIMEOUT_S", 0.2)
    with pytest.raises(ForkFailed, match="no answer within 0 s"):
        await make("time.sleep(1000)").fork(Role.AUTH, {"channel": 1})


async def test_the_kernels_reason_is_passed_on(make: Make) -> None:
    server = make(f"{READY}request(); channel.send(b'{{\"error\": 11}}'); request()")
    with pytest.raises(ForkFailed, match="Resource temporarily unavailable"):
        await server.fork(Role.AUTH, {"channel": 1})
    await end(server)


async def test_a_request_that_is_given_up_leaves_no_reply_for_the_next(make: Make) -> None:
    server = make(READY + ANSWER.replace("channel.send", "time.sleep(0.3); start += 1; channel.send"))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        async with trio.open_nursery() as requesting:
            requesting.start_soon(server.fork, Role.AUTH, {"channel": theirs.fileno()})
            await trio.lowlevel.wait_readable(ours)  # it has the request
            requesting.cancel_scope.cancel()
    assert await server.fork(Role.AUTH, {"channel": 1}) == 4003
    await end(server)


async def test_without_a_program_it_is_tried_again(nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 0.01)
    with structlog.testing.capture_logs() as logs:
        nursery.start_soon(ForkServer(("/nowhere/python",)).run)
        await entries(logs, 3)
    assert {entry["event"] for entry in logs} == {"no fork server, so no new worker"}
    nursery.cancel_scope.cancel()


async def test_its_end_leaves_no_process_and_no_descriptor(make: Make) -> None:
    before = set(os.listdir("/proc/self/fd"))
    server = make(READY + ANSWER)
    await server.fork(Role.AUTH, {"channel": 1})
    assert server._server is not None
    process = server._server.process
    await end(server)
    assert process.returncode is not None
    assert set(os.listdir("/proc/self/fd")) == before


async def entries(logs: list[Any], count: int) -> None:
    """Wait until so much has been logged."""
    while len(logs) < count:  # noqa: ASYNC110 -- a list
        await trio.sleep(0.01)


async def end(server: ForkServer) -> None:
    """Run it until all else waits, then cancel it, which ends the process."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
