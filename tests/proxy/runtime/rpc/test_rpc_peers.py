"""proxy.runtime.rpc.peers: the kernel's word on who called, held against the supervisor's table."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest
import structlog.testing
import trio
import trio.testing

from proto.roles import Role
from proto.rpc_frames import Call, encode_call
from proto.rpc_pb2 import Method, Peer
from proxy.runtime.process.descriptors import adopt_listener
from proxy.runtime.rpc import peers
from proxy.runtime.rpc.client import WrongListener, unix_connector
from proxy.runtime.rpc.peers import Caller, PeerTable, peer_credentials
from proxy.runtime.rpc.server import CONNECTIONS_PER_CALLER_MAX, RpcServer

_ACCEPT = "import os, socket; c = socket.socket(fileno=9).accept()[0]; c.send(str(os.getpid()).encode()); c.recv(1)"


class FakeSocket:
    """A socket whose peer is any process."""

    def __init__(self, pid: int, uid: int) -> None:
        self._credentials = peers._UCRED.pack(pid, uid, 0)

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option, size) == (socket.SOL_SOCKET, socket.SO_PEERCRED, peers._UCRED.size)
        return self._credentials


def peer(pid: int, uid: int | None = None) -> trio.socket.SocketType:
    return FakeSocket(pid, os.geteuid() if uid is None else uid)  # type: ignore[return-value]


def test_the_kernel_says_who_is_there() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert peer_credentials(ours) == (os.getpid(), os.geteuid())  # type: ignore[arg-type]


def test_a_child_of_the_supervisor() -> None:
    table = PeerTable([Peer(pid=10, role="forwarder"), Peer(pid=11, role="auth")])
    assert table.identify_caller(peer(10)) == Caller(Role.FORWARDER, 10)
    assert table.identify_caller(peer(11)) == Caller(Role.AUTH, 11)


def test_a_process_outside_the_cluster() -> None:
    """Security."""
    assert PeerTable().identify_caller(peer(10)) is None
    assert PeerTable([Peer(pid=10, role="forwarder")]).identify_caller(peer(12)) is None


def test_another_user_with_a_known_pid_is_outside_the_cluster() -> None:
    """Security: process ids are used again."""
    table = PeerTable([Peer(pid=10, role="forwarder")])
    assert table.identify_caller(peer(10, uid=os.geteuid() + 1)) is None


def test_a_new_table_replaces_the_old_one_as_a_whole() -> None:
    table = PeerTable([Peer(pid=10, role="forwarder")])
    table.replace_peers([Peer(pid=11, role="forwarder")])
    assert table.identify_caller(peer(10)) is None
    assert table.identify_caller(peer(11)) == Caller(Role.FORWARDER, 11)


async def test_a_process_outside_the_cluster_is_closed_without_a_reply_and_a_worker_is_served(
    tmp_path: Path, nursery: trio.Nursery
) -> None:
    """Security: KIP-590, a peer that is not on the privileged socket. SO_PEERCRED needs a real one."""
    path = str(tmp_path / "service.sock")
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    bound.bind(path)
    bound.listen()
    calls: list[Caller] = []

    async def handler(data: bytes, caller: Caller) -> bytes:
        await trio.lowlevel.checkpoint()
        calls.append(caller)
        return data

    table = PeerTable()
    server = RpcServer({Method.ENVELOPE: handler}, max_frame_bytes=1000)
    nursery.start_soon(server.serve_listener, adopt_listener(bound.detach()), table.identify_caller)
    call = encode_call(Call(1, Method.ENVELOPE, 1000, b""))

    with structlog.testing.capture_logs() as logs:
        stranger = await unix_connector(path)()
        try:
            await stranger.send_all(call)
            assert await stranger.receive_some(100) == b""
        except trio.BrokenResourceError:
            pass  # closed with our call unread: the kernel says so with a reset
    assert calls == []
    assert [entry["event"] for entry in logs] == ["refused a process that is not part of this cluster"]
    await stranger.aclose()

    table.replace_peers([Peer(pid=os.getpid(), role="forwarder")])
    worker = await unix_connector(path)()
    await worker.send_all(call)
    assert await worker.receive_some(100)
    assert calls == [Caller(Role.FORWARDER, os.getpid())]
    await worker.aclose()
    nursery.cancel_scope.cancel()


async def test_a_caller_has_a_bounded_number_of_connections(tmp_path: Path, nursery: trio.Nursery) -> None:
    """Security: a captured worker could fill another one by connections; one that has ended makes room."""
    path = str(tmp_path / "auth-0.sock")
    bound = socket.socket(socket.AF_UNIX)
    bound.bind(path)
    bound.listen()

    async def echo(data: bytes, _caller: Caller) -> bytes:
        await trio.lowlevel.checkpoint()
        return data

    server = RpcServer({Method.ENVELOPE: echo}, max_frame_bytes=1000)
    table = PeerTable([Peer(pid=os.getpid(), role="forwarder")])
    nursery.start_soon(server.serve_listener, adopt_listener(bound.detach()), table.identify_caller)
    call = encode_call(Call(1, Method.ENVELOPE, 1000, b""))

    async def is_served(stream: trio.abc.Stream) -> bool:
        try:
            await stream.send_all(call)
            return bool(await stream.receive_some(100))
        except trio.BrokenResourceError:
            return False

    first, *others = [await unix_connector(path)() for _ in range(CONNECTIONS_PER_CALLER_MAX)]
    assert [await is_served(one) for one in (first, *others)] == [True] * CONNECTIONS_PER_CALLER_MAX
    with structlog.testing.capture_logs() as logs:
        more = await unix_connector(path)()
        assert not await is_served(more)
    assert [entry["event"] for entry in logs] == ["a worker opens more connections than it needs; refused"]
    await first.aclose()
    await trio.testing.wait_all_tasks_blocked()
    another = await unix_connector(path)()
    assert await is_served(another)
    for stream in (*others, more, another):
        await stream.aclose()
    await trio.testing.wait_all_tasks_blocked()
    assert not server._connections_by_pid
    nursery.cancel_scope.cancel()


async def test_a_socket_at_which_another_process_listens_gets_no_call(tmp_path: Path) -> None:
    """Security: a captured worker may put a socket of its own in the place of another worker's."""
    path = str(tmp_path / "auth-0.sock")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(path)
        bound.listen()
        bound.setblocking(False)
        stream = await unix_connector(path, listener_pid=os.getpid())()
        await stream.aclose()
        bound.accept()[0].close()
        with structlog.testing.capture_logs() as logs, pytest.raises(WrongListener, match=r"auth-0\.sock, not 1"):
            await unix_connector(path, listener_pid=1)()
        with bound.accept()[0] as accepted:
            assert accepted.recv(100) == b""
    assert [(entry["path"], entry["pid"]) for entry in logs] == [(path, os.getpid())]


async def test_another_workers_socket_in_the_place_of_a_workers_gets_no_call(tmp_path: Path) -> None:
    """Security: the supervisor listens for both; a captured lookup worker would get the clients' credentials."""
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "lookup-0.sock"))
        bound.listen()
        bound.setblocking(False)
        (tmp_path / "lookup-0.sock").rename(tmp_path / "auth-0.sock")
        with pytest.raises(WrongListener, match=r"listens at .*/lookup-0\.sock"):
            await unix_connector(str(tmp_path / "auth-0.sock"), listener_pid=os.getpid())()
        with bound.accept()[0] as accepted:
            assert accepted.recv(100) == b""


async def test_the_process_that_listens_counts_not_the_one_that_accepts(tmp_path: Path) -> None:
    """As the supervisor listens, and a worker accepts."""
    path = str(tmp_path / "auth-0.sock")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(path)
        bound.listen()
        accepting = os.posix_spawn(  # noqa: ASYNC221 -- at once
            sys.executable,
            [sys.executable, "-c", _ACCEPT],
            {},
            file_actions=[(os.POSIX_SPAWN_DUP2, bound.fileno(), 9)],
        )
        stream = await unix_connector(path, listener_pid=os.getpid())()
        assert int(await stream.receive_some(20)) == accepting
        await stream.aclose()
    os.waitpid(accepting, 0)  # noqa: ASYNC222 -- it ends with the connection
