"""TCP congestion control of sockets: ``brokers.congestion_control``, ``listener.congestion_control``.

It must be set before the connection is established: once BBR has run, the connection stays paced under any other.
"""

import functools
import socket

from proxy.common.logs import get_logger

SYSTEM = "system"
UNPACED = "unpaced"

_NAME_BYTES = 16  # TCP_CA_NAME_MAX
_PACES = "bbr"
_NEVER_PACES = "reno"  # in every kernel, and allowed for every process


def set_congestion_control(sock: socket.socket, name: str) -> None:
    """Set the congestion control of a new socket, not connected yet. A refusal by the kernel is logged once."""
    if name != SYSTEM:
        system = _current(sock)
        _set(sock, name, current=system, system=system)


def set_congestion_control_of_accepted(listener: socket.socket, name: str) -> None:
    """Set the congestion control of the connections that a listener will accept, also after a reload changed it."""
    _set(listener, name, current=_current(listener), system=_system_default())


def _set(sock: socket.socket, name: str, *, current: str, system: str) -> None:
    if name == SYSTEM:
        name = system
    elif name == UNPACED:
        name = _NEVER_PACES if system.startswith(_PACES) else system
    if name == current:
        return
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
    except OSError as error:
        _log_refusal_once(name, str(error))


def _system_default() -> str:
    with socket.socket() as fresh:
        return _current(fresh)


def _current(sock: socket.socket) -> str:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES).rstrip(b"\0").decode()


@functools.cache
def _log_refusal_once(name: str, reason: str) -> None:
    """Log a refusal once in a process, since the kernel refuses it for all sockets alike."""
    get_logger().warning(
        "the kernel refuses this congestion control; connections go on with the system's. See sysctl"
        " net.ipv4.tcp_allowed_congestion_control, and load its module",
        congestion_control=name,
        reason=reason,
    )
