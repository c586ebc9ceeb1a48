"""Handover of the supervisor's state across an exec: an upgrade is the same process with another program.

Descriptors stay open across an exec, children stay children. All else that the next program needs is serialized into a
memfd, whose descriptor is an argument: numbers of descriptors and processes, the fd store's records of each relay, and
the key of sealed principals, which therefore never appears in an argument or a file.
"""

import contextlib
import os
import signal
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import msgspec
import trio

from proto.roles import Role
from proto.sealed_principal import SEAL_KEY_BYTES
from proxy.runtime.process.descriptors import adopt_socket
from proxy.supervisor.handover.fd_store import FdStoreSlot, StoredFds
from proxy.supervisor.processes.children import child_reaper
from proxy.supervisor.processes.signals import SIGNALS
from proxy.supervisor.processes.worker_process import SerializedWorker, WorkerProcess

_STANDARD_DESCRIPTOR_MAX = 2
_WRITE_BYTES = 1 << 20
_PROGRAM = (sys.executable, "-P", "-m", "proxy")

CHECK_TIMEOUT_S = 30.0


class SerializedFdStoreSlot(msgspec.Struct, frozen=True):
    """A slot of the fd store: its table, and each relay's and pipe's record and two descriptors."""

    table: int
    relays: dict[int, tuple[bytes, int, int]]
    pipes: dict[int, tuple[bytes, int, int]]
    left_behind: dict[int, dict[int, str]] = {}


class SerializedHandover(msgspec.Struct, frozen=True):
    """Content of the memfd. Programs of two versions share it: add fields with defaults, never change one."""

    generation: int
    runtime_dir: str
    seal_key: bytes
    runtime_lock: int
    control: int
    admin: dict[str, int]
    listeners: dict[str, int]
    services: dict[str, int]
    connections: int
    fd_store_slots: list[SerializedFdStoreSlot] = msgspec.field(name="shelves")
    workers: list[SerializedWorker]
    drain: bool = False
    http_listeners: dict[str, int] = {}
    relay_requests: tuple[int, int] | None = None
    """The forwarders' end, and that of the HTTP workers."""
    audit_pipe: tuple[int, int] | None = None
    unready_because: str | None = None
    log_levels: dict[str, tuple[str, float | None]] = {}
    """See proxy.supervisor.cluster.log_levels."""
    unit_store: list[str] = []
    """Names of what the service manager keeps (proxy.supervisor.handover.unit_store)."""

    @property
    def relay_count(self) -> int:
        """Number of relays that continue in the next program."""
        return sum(len(slot.relays) for slot in self.fd_store_slots)

    def descriptors(self) -> list[int]:
        """Return every descriptor that has to stay open across the exec."""
        single = [self.runtime_lock, self.control, self.connections]
        single += [*self.admin.values(), *self.listeners.values(), *self.http_listeners.values()]
        single += self.services.values()
        single += self.relay_requests or ()
        single += self.audit_pipe or ()
        for slot in self.fd_store_slots:
            single.append(slot.table)
            single += [end for stored in (*slot.relays.values(), *slot.pipes.values()) for end in stored[1:]]
        for worker in self.workers:
            single += [end for end in (worker.channel, worker.liveness, worker.store, worker.files) if end >= 0]
        return single


@dataclass(slots=True)
class HandoverState:
    """State inherited across exec, as live objects; on a first start only a new seal key."""

    generation: int = 1
    runtime_dir: str = ""
    seal_key: bytes = field(default_factory=lambda: os.urandom(SEAL_KEY_BYTES), repr=False)
    runtime_lock_fd: int = -1
    control_socket: socket.socket | None = None
    admin_listeners: dict[str, socket.socket] = field(default_factory=dict)
    listeners: dict[str, socket.socket] = field(default_factory=dict)
    http_listeners: dict[str, socket.socket] = field(default_factory=dict)
    service_sockets: dict[tuple[Role, int], socket.socket] = field(default_factory=dict)
    connections_fd: int = -1
    relay_requests: tuple[socket.socket, socket.socket] | None = None
    audit_pipe: tuple[int, int] | None = None
    fd_store_slots: list[FdStoreSlot] = field(default_factory=list)
    workers: dict[tuple[Role, int], WorkerProcess] = field(default_factory=dict)
    unready_because: str | None = None
    log_levels: dict[str, tuple[str, float | None]] = field(default_factory=dict)
    unit_store_names: list[str] = field(default_factory=list)
    drain_requested: bool = False
    """Whether an operator asked for a drain during the exec."""

    @classmethod
    def from_memfd(cls, descriptor: int) -> "HandoverState":
        """Read what the program before the exec has serialized, and adopt its descriptors and workers."""
        with os.fdopen(descriptor, "rb") as memory:
            memory.seek(0)
            state = msgspec.msgpack.decode(memory.read(), type=SerializedHandover)
        for number in state.descriptors():
            with contextlib.suppress(OSError):  # of a worker that died during the exec
                os.set_inheritable(number, False)
        workers = {}
        for one in state.workers:
            with contextlib.suppress(OSError):
                workers[Role(one.role), one.index] = WorkerProcess.from_serialized(one)
        return cls(
            generation=state.generation,
            runtime_dir=state.runtime_dir,
            seal_key=state.seal_key,
            runtime_lock_fd=state.runtime_lock,
            control_socket=adopt_socket(state.control),
            admin_listeners={bind: adopt_socket(number) for bind, number in state.admin.items()},
            listeners={bind: adopt_socket(number) for bind, number in state.listeners.items()},
            http_listeners={bind: adopt_socket(number) for bind, number in state.http_listeners.items()},
            service_sockets={_parse_slot_key(name): adopt_socket(number) for name, number in state.services.items()},
            connections_fd=state.connections,
            relay_requests=_adopt_pair(state.relay_requests),
            audit_pipe=state.audit_pipe,
            fd_store_slots=[_deserialize_slot(slot) for slot in state.fd_store_slots],
            workers=workers,
            unready_because=state.unready_because,
            log_levels=state.log_levels,
            unit_store_names=state.unit_store,
            drain_requested=state.drain,
        )

    async def close_unused(self) -> None:
        """Close the sockets and end the workers that the new cluster has not taken."""
        for sockets in (self.admin_listeners, self.listeners, self.http_listeners, self.service_sockets):
            for sock in sockets.values():
                sock.close()
        async with trio.open_nursery() as nursery:
            for worker in self.workers.values():
                nursery.start_soon(_end, worker)


def _adopt_pair(numbers: tuple[int, int] | None) -> tuple[socket.socket, socket.socket] | None:
    return None if numbers is None else (adopt_socket(numbers[0]), adopt_socket(numbers[1]))


async def _end(worker: WorkerProcess) -> None:
    """Stop a worker and fetch its exit code: until then, it blocks the reaping of adopted children."""
    await worker.stop()
    await worker.wait()


def serialize_slot(slot: FdStoreSlot) -> SerializedFdStoreSlot:
    """Describe a slot by numbers and records."""
    return SerializedFdStoreSlot(
        table=slot.table_fd,
        relays={number: (stored.record, stored.first, stored.second) for number, stored in slot.relays.items()},
        pipes={number: (stored.record, stored.first, stored.second) for number, stored in slot.pipes.items()},
        left_behind=slot.left_behind,
    )


def _deserialize_slot(state: SerializedFdStoreSlot) -> FdStoreSlot:
    return FdStoreSlot(
        state.table,
        {number: StoredFds(*stored) for number, stored in state.relays.items()},
        {number: StoredFds(*stored) for number, stored in state.pipes.items()},
        state.left_behind,
    )


def slot_key(role: Role, index: int) -> str:
    """Return the key of a worker slot in SerializedHandover."""
    return f"{role.value}-{index}"


def _parse_slot_key(name: str) -> tuple[Role, int]:
    role, _, index = name.rpartition("-")
    return Role(role), int(index)


def check_command_line(config_file: Path) -> list[str]:
    """Return the command by which the installed program checks whether it can read the configuration."""
    return [*_PROGRAM, "check", "--config", str(config_file)]


def _keep_open(numbers: set[int]) -> None:
    """Make these descriptors survive an exec and all others but the standard ones not, whatever libraries have set."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 -- numbers, not paths
        number = int(name)
        if number > _STANDARD_DESCRIPTOR_MAX:
            with contextlib.suppress(OSError):  # the listing's own
                os.set_inheritable(number, number in numbers)


def exec_next_program(state: SerializedHandover, config_file: Path) -> NoReturn:
    """Replace this program by the installed one, with the state in a memfd. Does not return.

    Raises OSError where the installed program cannot be executed; then all is as before. The option ``--legacy`` is a
    format between versions: it keeps its name.
    """
    memory = os.memfd_create("handover", 0)  # without CLOEXEC
    remaining = memoryview(msgspec.msgpack.encode(state))
    while remaining:
        remaining = remaining[os.write(memory, remaining[:_WRITE_BYTES]) :]
    _keep_open({memory, *state.descriptors()})
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    command = [*_PROGRAM, "serve", "--config", str(config_file), "--legacy", str(memory)]
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execv(command[0], command)  # noqa: S606 -- no shell is the point
    finally:  # it failed
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        os.close(memory)
        for number in state.descriptors():
            os.set_inheritable(number, False)


async def installed_program_fault(config_file: Path) -> str:
    """Run the installed program's ``check``; return what is wrong with it, or with the configuration; "" if nothing."""
    with trio.move_on_after(CHECK_TIMEOUT_S):
        try:
            with child_reaper.pause_while_spawning():  # its process id is not known here
                command = check_command_line(config_file)
                done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
        except OSError as error:
            return f"the program that is installed now cannot be run: {error}"
        if done.returncode:
            return f"the program that is installed now fails: {done.stderr.decode().strip()[-500:]}"
        return ""
    return "the program that is installed now does not answer"
