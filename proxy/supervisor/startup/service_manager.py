"""The protocol of systemd's service manager: sd_notify(3), the watchdog, descriptors passed at the start
(sd_listen_fds(3)) and the unit's descriptor store.

Its variables are taken out of the environment, so that no other process of the cluster can speak for the unit. An exec
gets them back, for the next program.
"""

import array
import contextlib
import os
import socket
import stat
import time
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field

import trio

from proto.addresses import parse_host_port
from proxy.common.logs import get_logger
from proxy.supervisor.startup.sockets import StartFailed, find_address

FIRST_PASSED_FD = 3
_STAYING = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "FDSTORE")
"""Variables that hold for as long as the process, so also for the program after an exec."""
_OF_A_START = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")

WATCHDOG_PARTS = 3
"""Signs of life within the watchdog's time: one may be late without a restart."""

SEND_TIMEOUT_S = 5.0
"""How long a message may wait for a manager that does not read."""

IMPATIENT_S = 60.0
IMPATIENT_TIMEOUT_S = 0.01
"""For how long after that other messages wait only for a moment: forwarders wait for what is kept of their relays."""


@dataclass(slots=True)
class ServiceManager:
    """The service manager of this unit; without one, every method does nothing.

    ``environment``: its variables, for an exec. ``passed``: name and descriptor of each file that it has passed.
    """

    environment: dict[str, str] = field(default_factory=dict)
    passed: list[tuple[str, int]] = field(default_factory=list)
    _logged: bool = field(default=False, init=False)
    _impatient_until: float = field(default=float("-inf"), init=False)

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str]) -> "ServiceManager":
        """Take the manager's variables out of an environment, and the files that it has passed to this process.

        Raises StartFailed for variables that no manager sets.
        """
        taken = {name: environment.pop(name) for name in (*_STAYING, *_OF_A_START) if name in environment}
        staying = {name: taken[name] for name in _STAYING if name in taken}
        try:
            return cls(staying, _passed_files(taken))
        except ValueError:
            raise StartFailed("LISTEN_PID, LISTEN_FDS: not what a service manager sets") from None

    @property
    def is_there(self) -> bool:
        """Whether there is a manager to notify."""
        return "NOTIFY_SOCKET" in self.environment

    @property
    def watchdog_s(self) -> float:
        """Seconds after which the manager ends a unit that gives no sign of life; 0 if it does not."""
        if self.environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
            return 0.0
        text = self.environment.get("WATCHDOG_USEC", "")
        return int(text) / 1e6 if text.isdecimal() else 0.0

    async def notify(self, *assignments: str, descriptors: Sequence[int] = ()) -> bool:
        """Send assignments in one message, and descriptors; return whether they were sent. Logs the first failure."""
        if not self.is_there:
            return False
        path = self.environment["NOTIFY_SOCKET"]
        address = "\0" + path[1:] if path.startswith("@") else path
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        try:
            with trio.socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock, self._patience():
                await sock.connect(address)
                await sock.sendmsg(["\n".join(assignments).encode()], rights)
        except (OSError, ValueError, trio.TooSlowError) as error:
            if not self._logged:
                self._logged = True
                get_logger().error("the service manager is not told of the cluster's state", reason=str(error))
            return False
        return True

    async def wait_until_read(self) -> bool:
        """Wait until the manager has read all messages so far; return False where it does not, or there is none."""
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        try:
            try:
                is_sent = await self.notify("BARRIER=1", descriptors=[theirs])
            finally:
                os.close(theirs)
            if not is_sent:
                return False
            with self._patience():
                await trio.lowlevel.wait_readable(ours)  # the manager has closed its copy
        except trio.TooSlowError:
            return False
        else:
            return True
        finally:
            os.close(ours)

    @contextlib.contextmanager
    def _patience(self) -> Iterator[None]:
        """Bound a wait for the manager. Raises TooSlowError."""
        now = trio.current_time()
        timeout_s = SEND_TIMEOUT_S if now >= self._impatient_until else IMPATIENT_TIMEOUT_S
        try:
            with trio.fail_after(timeout_s):
                yield
        except trio.TooSlowError:
            if timeout_s == SEND_TIMEOUT_S:
                self._impatient_until = now + SEND_TIMEOUT_S + IMPATIENT_S
            raise

    async def notify_reloading(self) -> None:
        """Announce a reload; READY=1 is its end. The time lets the manager match it with the reload it asked for."""
        await self.notify("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    async def feed_watchdog(self) -> None:
        """Give signs of life for as long as this process's event loop runs tasks."""
        while self.watchdog_s:
            await self.notify("WATCHDOG=1")
            await trio.sleep(self.watchdog_s / WATCHDOG_PARTS)

    def take_listeners(self, key: str, binds: Sequence[str]) -> dict[str, socket.socket]:
        """Take the passed listeners that are meant for configured addresses, and return them by address.

        One is meant for an address if it is bound to it, else if it is named after its key, as "listener-0": all ports
        of a unit have the same name. Raises StartFailed for one with such a name that is no listener for TCP.
        """
        found: dict[str, socket.socket] = {}
        for by_name in (False, True):
            for index, bind in enumerate(binds):
                names = {f"{key}-{index}", key}
                meant = (one for one in self.passed if (one[0] in names if by_name else _is_bound_to(one[1], bind)))
                if bind not in found and (one := next(meant, None)) is not None:
                    self.passed.remove(one)
                    found[bind] = _as_listener(*one)
        return found

    def refuse_others(self) -> None:
        """Refuse a passed file that was not taken: clients of a listener would wait for ever. Raises StartFailed."""
        if self.passed:
            name, number = self.passed[0]
            raise StartFailed(
                f"the service manager has passed {name or 'a file'} ({_describe(number)}), for which the configuration "
                "has no address; correct ListenStream= or the configuration's bind"
            )


def _passed_files(variables: MutableMapping[str, str]) -> list[tuple[str, int]]:
    """Return name and descriptor of each passed file. Raises ValueError."""
    if not variables.get("LISTEN_PID") or int(variables["LISTEN_PID"]) != os.getpid():
        return []  # another process's: they were inherited by mistake
    count = int(variables.get("LISTEN_FDS", "0"))
    names = variables.get("LISTEN_FDNAMES", "").split(":")
    files = []
    for place in range(count):
        number = FIRST_PASSED_FD + place
        try:
            os.set_inheritable(number, False)
        except OSError:
            raise ValueError(number) from None
        files.append((names[place] if place < len(names) else "", number))
    return files


def _tcp_listener(number: int) -> socket.socket | None:
    """Return a listening socket for TCP; None, and the descriptor is as before, where it is none."""
    if not stat.S_ISSOCK(os.fstat(number).st_mode):
        return None
    sock = socket.socket(fileno=number)
    is_tcp = sock.family in {socket.AF_INET, socket.AF_INET6} and sock.type == socket.SOCK_STREAM
    if is_tcp and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return sock
    sock.detach()
    return None


def _is_bound_to(number: int, bind: str) -> bool:
    sock = _tcp_listener(number)
    if sock is None:
        return False
    try:
        family, address = find_address(parse_host_port(bind))
    except OSError:
        return False  # binding it says so
    finally:
        own_family, own_address = sock.family, sock.getsockname()
        sock.detach()
    return own_family == family and own_address[:2] == address[:2]


def _as_listener(name: str, number: int) -> socket.socket:
    sock = _tcp_listener(number)
    if sock is None:
        raise StartFailed(f"the service manager has passed {name}, which is no listener for TCP")
    sock.setblocking(False)
    return sock


def _describe(number: int) -> str:
    sock = _tcp_listener(number)
    if sock is None:
        return "no listener for TCP"
    try:
        host, port = sock.getsockname()[:2]
        return f"{host} port {port}"
    finally:
        sock.detach()
