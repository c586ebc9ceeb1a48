"""proxy.supervisor.startup.service_manager: what is sent to a manager's socket, and what is taken from it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog.testing
import trio
import trio.testing
from supervisor_fakes import same_file

from proxy.supervisor.startup import service_manager
from proxy.supervisor.startup.service_manager import WATCHDOG_PARTS, ServiceManager
from proxy.supervisor.startup.sockets import StartFailed


@pytest.fixture
def manager_socket(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(0)
        yield sock


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    sock = socket.create_server(("127.0.0.1", 0))
    yield sock
    if sock.fileno() >= 0:
        sock.close()


def manager_of(environment: dict[str, str]) -> ServiceManager:
    return ServiceManager.from_environment(environment)


def passed(monkeypatch: pytest.MonkeyPatch, number: int, name: str = "", **more: str) -> ServiceManager:
    """A manager that has passed this one descriptor."""
    monkeypatch.setattr(service_manager, "FIRST_PASSED_FD", number)
    return manager_of({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": name, **more})


def test_no_other_process_gets_its_variables() -> None:
    environment = {"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "5", "LISTEN_PID": "1", "LISTEN_FDS": "1", "PATH": "/bin"}
    manager = manager_of(environment)
    assert environment == {"PATH": "/bin"}
    assert manager.environment == {"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "5"}, "for the program after an exec"
    assert manager.passed == [], "the files of another process"


async def test_without_a_manager_nothing_is_sent() -> None:
    manager = manager_of({})
    assert not await manager.notify("READY=1")
    await manager.feed_watchdog()  # and it is over


@pytest.mark.parametrize("abstract", [False, True])
async def test_assignments_and_descriptors_are_one_message(
    manager_socket: socket.socket, listener: socket.socket, abstract: bool
) -> None:
    if abstract:
        manager_socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        manager_socket.bind(b"\0" + os.urandom(8).hex().encode())
        path = "@" + manager_socket.getsockname()[1:].decode()
    else:
        path = manager_socket.getsockname()
    manager = manager_of({"NOTIFY_SOCKET": path})
    assert await manager.notify("FDSTORE=1", "FDNAME=one", descriptors=[listener.fileno()])
    data, numbers, _, _ = socket.recv_fds(manager_socket, 100, 5)
    assert data == b"FDSTORE=1\nFDNAME=one"
    assert same_file(numbers[0], listener.fileno())
    os.close(numbers[0])
    if abstract:
        manager_socket.close()


async def test_a_reload_has_its_time(manager_socket: socket.socket) -> None:
    await manager_of({"NOTIFY_SOCKET": manager_socket.getsockname()}).notify_reloading()
    first, second = manager_socket.recv(100).decode().splitlines()
    assert first == "RELOADING=1"
    assert second.removeprefix("MONOTONIC_USEC=").isdecimal()


async def test_a_manager_that_is_gone_is_logged_once() -> None:
    manager = manager_of({"NOTIFY_SOCKET": "/nowhere"})
    with structlog.testing.capture_logs() as logs:
        assert not await manager.notify("READY=1")
        assert not await manager.notify("READY=1")
    assert len(logs) == 1


async def test_a_manager_that_does_not_read_is_waited_for_once_in_a_while(
    manager_socket: socket.socket, autojump_clock: trio.testing.MockClock
) -> None:
    """Each relay may want a message; none may wait for as long as the first."""
    manager = manager_of({"NOTIFY_SOCKET": manager_socket.getsockname()})
    while await manager.notify("STATUS=x" * 1000):
        pass
    began = trio.current_time()
    for _ in range(100):
        assert not await manager.notify("FDSTORE=1")
        assert not await manager.wait_until_read()
    assert trio.current_time() - began < 3
    await trio.sleep(service_manager.IMPATIENT_S)
    began = trio.current_time()
    assert not await manager.notify("FDSTORE=1")
    assert trio.current_time() - began == service_manager.SEND_TIMEOUT_S, "it may read again"
    while True:
        try:
            manager_socket.recv(10_000)
        except BlockingIOError:
            break
    assert await manager.notify("READY=1"), "what has room is sent"


async def test_signs_of_life_come_several_times_in_the_watchdogs_time(
    manager_socket: socket.socket, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    manager = manager_of({"NOTIFY_SOCKET": manager_socket.getsockname(), "WATCHDOG_USEC": "30000000"})
    nursery.start_soon(manager.feed_watchdog)
    for _ in range(3):
        await trio.testing.wait_all_tasks_blocked()
        assert manager_socket.recv(100) == b"WATCHDOG=1"
        with pytest.raises(BlockingIOError):
            manager_socket.recv(100)
        await trio.sleep(30 / WATCHDOG_PARTS)
    nursery.cancel_scope.cancel()


async def test_the_watchdog_of_another_process_is_not_fed() -> None:
    assert manager_of({"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}).watchdog_s == 0


@pytest.mark.parametrize("name", ["", "unknown", "listener-1", "listener"])
def test_a_listener_is_found_by_its_address_or_its_name(
    monkeypatch: pytest.MonkeyPatch, listener: socket.socket, name: str
) -> None:
    manager = passed(monkeypatch, listener.fileno(), name)
    host, port = listener.getsockname()
    binds = ["127.0.0.1:1", f"{host}:{port}" if name in {"", "unknown"} else "127.0.0.1:2"]
    found = manager.take_listeners("listener", binds)
    manager.refuse_others()
    assert list(found) == [binds[0] if name == "listener" else binds[1]]
    (sock,) = found.values()
    assert (sock.fileno(), sock.getblocking(), sock.get_inheritable()) == (listener.fileno(), False, False)
    listener.detach()
    sock.close()


@pytest.mark.parametrize("name", ["listener", "listener-0"])
def test_ports_of_one_name_are_told_apart_by_their_addresses(listener: socket.socket, name: str) -> None:
    """Security: a unit's ports have one name, and a plain port must not be served as the one with TLS."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        binds = ["{}:{}".format(*sock.getsockname()) for sock in (listener, other)]
        manager = ServiceManager(passed=[(name, os.dup(sock.fileno())) for sock in (other, listener)])
        found = manager.take_listeners("listener", binds)
    manager.refuse_others()
    assert {bind: "{}:{}".format(*sock.getsockname()) for bind, sock in found.items()} == {bind: bind for bind in binds}
    for sock in found.values():
        sock.close()


def test_a_listener_without_an_address_in_the_configuration_is_refused(
    monkeypatch: pytest.MonkeyPatch, listener: socket.socket
) -> None:
    manager = passed(monkeypatch, listener.fileno())
    assert manager.take_listeners("listener", ["127.0.0.1:1"]) == {}
    with pytest.raises(StartFailed, match=str(listener.getsockname()[1])):
        manager.refuse_others()


def test_what_is_no_listener_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as sock, pytest.raises(StartFailed, match="no listener for TCP"):
        passed(monkeypatch, sock.fileno(), "listener").take_listeners("listener", ["127.0.0.1:1"])


@pytest.mark.parametrize("variables", [{"LISTEN_PID": "x"}, {"LISTEN_FDS": "x"}, {"LISTEN_FDS": "1"}])
def test_variables_that_no_manager_sets(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    monkeypatch.setattr(service_manager, "FIRST_PASSED_FD", 1 << 20)
    with pytest.raises(StartFailed, match="LISTEN_FDS"):
        manager_of({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", **variables})
