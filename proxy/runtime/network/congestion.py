"""Who decides how fast a TCP connection sends: ``brokers.congestion_control``, ``listener.congestion_control``.

To be chosen before a connection is there: BBR, once it has begun, leaves the connection paced under any other.
"""

import functools
import socket

import trio

from proxy.common.logs import get_logger

SYSTEM = "system"
UNPACED = "unpaced"

_NAME_BYTES = 16  # TCP_CA_NAME_MAX
_PACES = "bbr"
_NEVER_PACES = "reno"  # in every kernel, and allowed to every process


def set_congestion_control(sock: socket.socket | trio.socket.SocketType, name: str) -> None:
    """Choose for a new socket, which has the system's and is not connected yet. A refusal is logged once."""
    _use(sock, name, system=_of(sock))


def set_congestion_control_of_accepted(listener: socket.socket, name: str) -> None:
    """Choose for what a listener will accept; it may have had another one, before a reload."""
    _use(listener, name, system=_systems())


def _use(sock: socket.socket | trio.socket.SocketType, name: str, *, system: str) -> None:
    if name == SYSTEM:
        name = system
    elif name == UNPACED:
        name = _NEVER_PACES if system.startswith(_PACES) else system
    if name == _of(sock):
        return
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
    except OSError as error:
        _tell_of_refusal(name, str(error))


def _systems() -> str:
    with socket.socket() as fresh:
        return _of(fresh)


def _of(sock: socket.socket | trio.socket.SocketType) -> str:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES).rstrip(b"\0").decode()


@functools.cache
def _tell_of_refusal(name: str, reason: str) -> None:
    """Once a process: what one socket is refused, all are."""
    get_logger().warning(
        "the kernel refuses this congestion control; connections go on with the system's. See sysctl"
        " net.ipv4.tcp_allowed_congestion_control, and load its module",
        congestion_control=name,
        reason=reason,
    )
