"""TCP ports for local processes."""

from __future__ import annotations

import random
import socket

# Below Linux' range for outgoing connections (32768 to 60999): a client that reconnects while a broker
# restarts could otherwise be given the very port that the broker is about to bind again.
_FIRST, _LAST = 12000, 32000
_ATTEMPTS = 200

_ports = range(_FIRST, _LAST + 1)
_given: set[int] = set()


def use_part(index: int, count: int) -> None:
    """Restrict `free_port` to part `index` of `count` equal parts, for processes that look for ports concurrently.

    A port that is free during the check may be bound by another process before it is used.
    """
    global _ports  # noqa: PLW0603 -- it is this process's
    size = (_LAST + 1 - _FIRST) // count
    _ports = range(_FIRST + index * size, _FIRST + (index + 1) * size)


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Return True if no process listens on the port (connections in TIME_WAIT do not count)."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def free_port(preferred: int = 0, *, avoid: tuple[int, ...] = ()) -> int:
    """Return the preferred port if it is free, else a random free one that is not in `avoid`.

    Never returns a random port twice: it may not be bound yet.
    """
    if preferred and preferred not in avoid and is_free(preferred):
        return preferred
    for _ in range(_ATTEMPTS):
        port = random.choice(_ports)
        if port not in avoid and port not in _given and is_free(port):
            _given.add(port)
            return port
    raise OSError(f"no free TCP port from {_ports.start} to {_ports.stop - 1}")
