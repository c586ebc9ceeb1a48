"""proxy.supervisor.handover.exec_handover: what one supervisor leaves to the next, with real descriptors, children
and an exec."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest
import trio
import trio.testing
from supervisor_fakes import same_file

from proto.roles import Role
from proto.rpc_pb2 import StoredPipe, StoredRelay
from proto.sealed_principal import SEAL_KEY_BYTES
from proxy.runtime.shared.connection_count import ConnectionCounters, create_shared_counters
from proxy.runtime.shared.fd_store_channel import create_store_sockets
from proxy.runtime.shared.relay_request_channel import create_relay_request_sockets
from proxy.supervisor.handover import exec_handover as module
from proxy.supervisor.handover.exec_handover import (
    SIGNALS,
    HandoverState,
    SerializedHandover,
    check_command_line,
    exec_next_program,
    serialize_slot,
    slot_key,
)
from proxy.supervisor.handover.fd_store import FdStoreSlot, StoredFds
from proxy.supervisor.processes.worker_process import SerializedWorker, WorkerProcess

KEY = bytes(range(100, 100 + SEAL_KEY_BYTES))


class Exec(BaseException):
    """Instead of an exec."""

    def __init__(self, path: str, command: list[str]) -> None:
        super().__init__()
        self.path = path
        self.command = command
        self.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self.memory = int(command[command.index("--legacy") + 1])
        self.handover = os.dup(self.memory)
        self.inheritable = {int(number) for number in os.listdir("/proc/self/fd") if is_inheritable(int(number))}


class Estate:
    """What a supervisor has: sockets, an fd store's slot with a relay and a pipe, and a worker that is a real child."""

    def __init__(self, folder: Path) -> None:
        self.lock = os.open(folder / "supervisor.lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC)
        self.control = socket.socket(socket.AF_UNIX)
        self.control.bind(str(folder / "control.sock"))
        self.admin, self.listener, self.service = socket.socket(), socket.socket(), socket.socket()
        self.http_listener = socket.socket()
        self.relay_requests = create_relay_request_sockets()
        self.audit_pipe = os.pipe()
        self.listener.bind(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        self.connections = create_shared_counters(1)
        self.client, self.broker = socket.socketpair()
        self.pipe = os.pipe()
        self.store_slot = FdStoreSlot()
        relay = StoredRelay(id=3, target="b:6650", principal="me").SerializeToString()
        ends = [os.dup(end) for end in (self.client.fileno(), self.broker.fileno(), *self.pipe)]
        self.store_slot.relays[3] = StoredFds(relay, *ends[:2])
        self.store_slot.pipes[9] = StoredFds(StoredPipe(id=9).SerializeToString(), *ends[2:])
        self.channel, self.channel_theirs = socket.socketpair()
        self.store, self.store_theirs = create_store_sockets()
        self.liveness_theirs, self.liveness = os.pipe()
        self.pid = os.posix_spawn("/bin/sleep", ["sleep", "300"], {})
        self.folder = folder

    def state(self, **changes: Any) -> SerializedHandover:
        state = SerializedHandover(
            generation=2,
            runtime_dir=str(self.folder),
            seal_key=KEY,
            runtime_lock=self.lock,
            control=self.control.fileno(),
            admin={"127.0.0.1:1": self.admin.fileno()},
            listeners={"127.0.0.1:2": self.listener.fileno()},
            http_listeners={"127.0.0.1:3": self.http_listener.fileno()},
            relay_requests=(self.relay_requests[0].fileno(), self.relay_requests[1].fileno()),
            audit_pipe=self.audit_pipe,
            services={slot_key(Role.LOOKUP, 0): self.service.fileno()},
            connections=self.connections,
            fd_store_slots=[serialize_slot(self.store_slot)],
            workers=[self.worker()],
        )
        return msgspec.structs.replace(state, **changes)

    def worker(self, **changes: Any) -> SerializedWorker:
        store, channel = self.store.fileno(), self.channel.fileno()
        worker = SerializedWorker("forwarder", 0, self.pid, 12.5, channel, self.liveness, store)
        return msgspec.structs.replace(worker, **changes)

    def let_go(self) -> None:
        """These are numbers now, as in another program."""
        ours = (self.control, self.admin, self.listener, self.http_listener, self.service, self.channel, self.store)
        for sock in (*ours, *self.relay_requests):
            sock.detach()

    def close(self) -> None:
        for sock in (self.control, self.admin, self.listener, self.http_listener, self.service, self.channel):
            sock.close()
        self.store.close()
        for sock in (self.client, self.broker, self.channel_theirs, self.store_theirs, *self.relay_requests):
            sock.close()
        for end in (*self.pipe, *self.audit_pipe, self.liveness_theirs):
            os.close(end)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


@pytest.fixture
async def estate(tmp_path: Path) -> AsyncIterator[Estate]:
    await trio.lowlevel.checkpoint()
    estate = Estate(tmp_path)
    yield estate
    estate.close()


def is_inheritable(number: int) -> bool:
    try:
        return os.get_inheritable(number)
    except OSError:  # the one with which the folder was read
        return False


def leave(state: SerializedHandover, monkeypatch: pytest.MonkeyPatch, config_file: Path) -> Exec:
    """What would be executed; this program goes on, as after an exec that failed."""

    def execv(path: str, command: list[str]) -> NoReturn:
        raise Exec(path, command)

    monkeypatch.setattr(os, "execv", execv)
    with pytest.raises(Exec) as caught:
        exec_next_program(state, config_file)
    return caught.value


async def test_the_handover_state_is_restored_as_it_was_serialized(
    estate: Estate, monkeypatch: pytest.MonkeyPatch
) -> None:
    ConnectionCounters(estate.connections).set_connections(0, 77)
    state = estate.state(
        unready_because="a new kernel",
        log_levels={"auth": ("debug", 5.0), "lookup": ("error", None)},
        unit_store=["table-0-1"],
    )
    exec_ = leave(state, monkeypatch, Path("proxy.toml"))
    assert exec_.inheritable >= {*state.descriptors(), exec_.memory}
    for number in state.descriptors():
        os.set_inheritable(number, True)
    estate.let_go()
    handover = HandoverState.from_memfd(exec_.handover)
    assert not any(map(is_inheritable, state.descriptors())), "no worker may get them by chance"
    assert (handover.generation, handover.runtime_dir, handover.seal_key) == (2, str(estate.folder), KEY)
    assert (handover.runtime_lock_fd, handover.connections_fd, handover.drain_requested) == (
        estate.lock,
        estate.connections,
        False,
    )
    assert (handover.unready_because, handover.log_levels) == (state.unready_because, state.log_levels)
    assert handover.unit_store_names == ["table-0-1"], "what is not named cannot be dropped"
    assert ConnectionCounters(handover.connections_fd).total_connections() == 77
    assert handover.control_socket is not None
    assert handover.control_socket.getsockname() == str(estate.folder / "control.sock")
    assert not handover.control_socket.getblocking()
    listener = handover.listeners.pop("127.0.0.1:2")
    assert listener.getsockname() == estate.address
    admin, service = handover.admin_listeners.pop("127.0.0.1:1"), handover.service_sockets.pop((Role.LOOKUP, 0))
    http_listener = handover.http_listeners.pop("127.0.0.1:3")
    assert handover.listeners == handover.http_listeners == handover.admin_listeners == handover.service_sockets == {}
    [store_slot] = handover.fd_store_slots
    assert store_slot.table_fd == estate.store_slot.table_fd
    assert StoredRelay.FromString(store_slot.relays[3].record).principal == "me"
    assert same_file(store_slot.relays[3].second, estate.broker.fileno())
    assert same_file(store_slot.pipes[9].first, estate.pipe[0])
    [(place, worker)] = handover.workers.items()
    assert place == (Role.FORWARDER, 0)
    assert (worker.pid, worker.is_inherited) == (estate.pid, True)
    assert worker.store_channel is not None
    worker.kill()
    assert await worker.wait() == -9
    store_slot.close_stored()
    worker.store_channel.close()
    assert handover.relay_requests is not None
    receiving, sending = handover.relay_requests
    sending.send(b"x")
    assert receiving.recv(2) == b"x", "the two ends of one channel, in this order"
    assert handover.audit_pipe == estate.audit_pipe
    os.write(handover.audit_pipe[1], b"x")
    assert os.read(handover.audit_pipe[0], 2) == b"x", "events that were not written yet are not lost"
    for sock in (handover.control_socket, listener, http_listener, admin, service, receiving, sending):
        sock.close()
    for number in (handover.runtime_lock_fd, handover.connections_fd, store_slot.table_fd):
        os.close(number)


async def test_nothing_else_stays_open(estate: Estate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a library or a careless line has made inheritable, the next program would have for ever."""
    leaked = [os.open("/dev/null", os.O_RDONLY) for _ in range(3)]
    for number in leaked:
        os.set_inheritable(number, True)
    state = estate.state()
    exec_ = leave(state, monkeypatch, Path("x"))
    assert exec_.inheritable - {0, 1, 2} == {*state.descriptors(), exec_.memory}
    for number in (*leaked, exec_.handover):
        os.close(number)


async def test_the_standard_descriptors_are_left_alone(estate: Estate, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {number: is_inheritable(number) for number in range(3)}
    exec_ = leave(estate.state(), monkeypatch, Path("x"))
    assert {number: number in exec_.inheritable for number in range(3)} == before
    os.close(exec_.handover)


async def test_the_memory_is_not_left_open(estate: Estate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Security: the seal key is in it."""
    memory = leave(estate.state(workers=[]), monkeypatch, Path("proxy.toml")).handover
    assert KEY in os.pread(memory, 100_000, 0)
    estate.let_go()
    handover = HandoverState.from_memfd(memory)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(memory)
    assert repr(KEY) not in repr(handover)
    await handover.close_unused()
    assert handover.control_socket is not None
    assert handover.relay_requests is not None
    for sock in (handover.control_socket, *handover.relay_requests):
        sock.close()
    handover.fd_store_slots[0].close_stored()


async def test_the_seal_key_is_in_no_argument_and_not_in_the_environment(
    estate: Estate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Security: both are to be seen in /proc, and the first even by other users."""
    key = b"not a secret for the eyes of all"
    assert len(key) == SEAL_KEY_BYTES
    environment = dict(os.environb)
    exec_ = leave(estate.state(seal_key=key), monkeypatch, Path("/etc/proxy.toml"))
    assert exec_.path == sys.executable
    serve = [sys.executable, "-P", "-m", "proxy", "serve", "--config", "/etc/proxy.toml"]
    assert exec_.command == [*serve, "--legacy", str(exec_.memory)]
    assert dict(os.environb) == environment
    os.close(exec_.handover)


async def test_signals_wait_for_the_next_program(estate: Estate, monkeypatch: pytest.MonkeyPatch) -> None:
    """No handler takes them; their default would be the end."""
    exec_ = leave(estate.state(), monkeypatch, Path("x"))
    assert exec_.blocked >= SIGNALS
    os.close(exec_.handover)


async def test_an_exec_that_fails_changes_nothing(estate: Estate, monkeypatch: pytest.MonkeyPatch) -> None:
    def execv(*_: Any) -> NoReturn:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(os, "execv", execv)
    state = estate.state()
    before = os.listdir("/proc/self/fd")
    inheritable = set(filter(is_inheritable, range(3)))
    with pytest.raises(FileNotFoundError):
        exec_next_program(state, Path("x"))
    assert os.listdir("/proc/self/fd") == before
    assert set(filter(is_inheritable, map(int, before))) == inheritable
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & SIGNALS


async def test_much_is_left(estate: Estate, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than one write takes."""
    monkeypatch.setattr(module, "_WRITE_BYTES", 1000)
    about = StoredRelay(id=1, principal="p" * 3000).SerializeToString()
    ends = estate.client.fileno(), estate.broker.fileno()
    store_slot = FdStoreSlot(estate.store_slot.table_fd, {number: StoredFds(about, *ends) for number in range(50)})
    state = estate.state(fd_store_slots=[serialize_slot(store_slot)], drain=True)
    assert state.relay_count == 50
    memory = leave(state, monkeypatch, Path("x")).handover
    with os.fdopen(memory, "rb") as file:
        file.seek(0)
        assert msgspec.msgpack.decode(file.read(), type=SerializedHandover) == state


async def test_every_descriptor_stays_open(estate: Estate) -> None:
    """One that is forgotten here is closed by the exec."""

    def numbers(thing: Any) -> set[int]:
        if isinstance(thing, dict):
            return set().union(*map(numbers, thing.values()))
        if isinstance(thing, list | tuple):
            return set().union(*map(numbers, thing))
        return {thing} if isinstance(thing, int) and thing > 2 else set()

    state = estate.state(generation=0)
    told = msgspec.to_builtins(state, builtin_types=(bytes,))
    [worker] = told["workers"]
    del worker["pid"], worker["index"]
    del told["shelves"][0]["table"]
    assert set(state.descriptors()) == numbers(told) | {estate.store_slot.table_fd}
    assert len(state.descriptors()) == len(set(state.descriptors())) == 19


async def test_a_worker_without_a_line_to_the_store(estate: Estate) -> None:
    assert -1 not in estate.state(workers=[estate.worker(role="lookup", store=-1)]).descriptors()


async def test_a_worker_that_has_gone_in_the_meantime(estate: Estate, monkeypatch: pytest.MonkeyPatch) -> None:
    os.kill(estate.pid, signal.SIGKILL)
    os.waitpid(estate.pid, 0)  # noqa: ASYNC222 -- it has been killed
    state = estate.state(
        workers=[estate.worker(store=-1)], listeners={}, http_listeners={}, admin={}, services={}, relay_requests=None
    )
    memory = leave(state, monkeypatch, Path("x")).handover
    estate.control.detach()
    channel = socket.socket(fileno=os.dup(estate.channel.detach()))
    with pytest.warns(ResourceWarning):
        handover = HandoverState.from_memfd(memory)
    assert handover.workers == {}
    assert handover.control_socket is not None
    handover.control_socket.close()
    channel.close()


def test_fields_of_another_version() -> None:
    """An older or a newer program may read what this one left."""
    state = SerializedHandover(
        generation=2,
        runtime_dir="x",
        seal_key=KEY,
        runtime_lock=1,
        control=2,
        admin={},
        listeners={},
        services={},
        connections=3,
        fd_store_slots=[],
        workers=[],
    )
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(state))
    told["of_a_newer_one"] = {"x": [1]}
    del told["drain"]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=SerializedHandover) == state


def test_the_very_first_has_nothing_but_a_key() -> None:
    """Security: another one with each start."""
    first, second = HandoverState(), HandoverState()
    assert first.seal_key != second.seal_key
    assert len(first.seal_key) == SEAL_KEY_BYTES
    assert (first.generation, first.control_socket, first.runtime_lock_fd, first.fd_store_slots) == (1, None, -1, [])


@pytest.mark.parametrize("role", [Role.AUTH, Role.LOOKUP, Role.FORWARDER])
def test_places_have_names(role: Role) -> None:
    assert module._parse_slot_key(slot_key(role, 12)) == (role, 12)


async def test_discard(estate: Estate, autojump_clock: trio.testing.MockClock) -> None:
    """What the configuration of the next cluster has no place for."""
    handover = HandoverState(
        admin_listeners={"a": estate.admin},
        listeners={"l": estate.listener},
        http_listeners={"h": estate.http_listener},
        service_sockets={(Role.LOOKUP, 0): estate.service},
    )
    worker = WorkerProcess.from_serialized(estate.worker(role="auth", store=-1))
    estate.channel.detach()
    handover.workers[Role.AUTH, 1] = worker
    await handover.close_unused()
    with pytest.raises(ChildProcessError):  # a zombie would keep adopted children from being reaped
        os.waitpid(estate.pid, os.WNOHANG)  # noqa: ASYNC222 -- this does not wait
    sockets = (estate.admin, estate.listener, estate.http_listener, estate.service)
    assert {sock.fileno() for sock in sockets} == {-1}
    assert await worker.wait() == -9, "it does not even end when it is asked to"
    assert os.read(estate.liveness_theirs, 1) == b""


def test_the_check_is_the_next_programs() -> None:
    assert check_command_line(Path("a b.toml")) == [
        sys.executable,
        "-P",
        "-m",
        "proxy",
        "check",
        "--config",
        "a b.toml",
    ]


# ---- another program, really

_FIRST = """
import os, signal, socket, sys
from pathlib import Path
from proto.rpc_pb2 import StoredRelay
from proxy.runtime.shared.connection_count import create_shared_counters
from proxy.supervisor.handover import exec_handover as module
from proxy.supervisor.handover.fd_store import StoredFds, FdStoreSlot
from proxy.supervisor.handover.exec_handover import SerializedHandover, exec_next_program, serialize_slot
from proxy.supervisor.processes.worker_process import SerializedWorker, WorkerProcess

module._PROGRAM = (sys.executable, sys.argv[1])
client, broker = socket.socketpair()
listener = socket.create_server(("127.0.0.1", 0))
control, admin = socket.socket(), socket.socket()
channel, theirs = socket.socketpair()
reading, liveness = os.pipe()
pid = os.posix_spawn("/bin/sleep", ["sleep", "300"], {})
store_slot = FdStoreSlot()
relay = StoredRelay(id=1, target="b").SerializeToString()
store_slot.relays[1] = StoredFds(relay, os.dup(client.fileno()), broker.fileno())
lock = os.open("/dev/null", os.O_RDONLY)
for number in range(3):
    os.set_inheritable(os.open(sys.argv[2], os.O_RDONLY), True)
state = SerializedHandover(generation=2, runtime_dir="x", seal_key=b"this is a key of exactly 32 byte",
              runtime_lock=lock, control=control.fileno(), admin={"a": admin.fileno()},
              listeners={"l": listener.fileno()}, services={},
              connections=create_shared_counters(1), fd_store_slots=[serialize_slot(store_slot)],
              workers=[SerializedWorker("lookup", 0, pid, 1.0, channel.fileno(), liveness)])
os.write(client.fileno(), b"on its way")
exec_next_program(state, Path("proxy.toml"))
"""

_NEXT = """
import json, os, signal, sys
import trio
from proto.roles import Role
from proxy.supervisor.handover.exec_handover import HandoverState

assert sys.argv[1:5] == ["serve", "--config", "proxy.toml", "--legacy"], sys.argv
blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
handover = HandoverState.from_memfd(int(sys.argv[5]))
[kept] = handover.fd_store_slots[0].relays.values()
worker = handover.workers[Role.LOOKUP, 0]
worker.kill()

async def wait():
    return await worker.wait()

print(json.dumps({
    "blocked": sorted(blocked),
    "secret in sight": any(handover.seal_key in open(f"/proc/self/{name}", "rb").read()
                           for name in ("cmdline", "environ")),
    "key": handover.seal_key.decode(),
    "code": trio.run(wait),
    "bytes": os.read(kept.second, 100).decode(),
    "listens": handover.listeners["l"].getsockopt(1, 30),
    "leaked": [number for number in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{number}")
               and os.readlink(f"/proc/self/fd/{number}").endswith("leaked")],
    "inheritable": [number for number in range(3, 64) if os.path.exists(f"/proc/self/fd/{number}")
                    and os.get_inheritable(number)],
}))
"""


def test_an_exec(tmp_path: Path) -> None:
    """Sockets, relays, children and the key are the next program's."""
    (tmp_path / "first.py").write_text(_FIRST)
    (tmp_path / "next.py").write_text(_NEXT)
    (tmp_path / "leaked").touch()
    command = [sys.executable, "-W", "ignore", *(str(tmp_path / name) for name in ("first.py", "next.py", "leaked"))]
    environment = {**os.environ, "PYTHONPATH": str(Path(module.__file__).parents[3])}
    done = subprocess.run(command, capture_output=True, env=environment, check=False, timeout=200)
    assert done.returncode == 0, done.stderr.decode()
    told = json.loads(done.stdout)
    assert told == {
        "blocked": sorted(SIGNALS),
        "secret in sight": False,
        "key": "this is a key of exactly 32 byte",
        "code": -9,
        "bytes": "on its way",
        "listens": 1,
        "leaked": [],
        "inheritable": [],
    }
