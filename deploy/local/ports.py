"""TCP ports for local processes."""

from __future__ import annotations

import random
import socket

# Below Linux' range for outgoing connections (32768 to 60999): a client that reconnects while a broker
# restarts could otherwise be given the very port that the broker is about to bind again.
_FIRST, _LAST = 12000, 32000
_ATTEMPTS = 200


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether nothing listens on the port (connections in TIME_WAIT do not count)."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def free_port(preferred: int = 0, *, avoid: tuple[int, ...] = ()) -> int:
    """The preferred port if it is free, else some free one that is not in `avoid`."""
    if preferred and preferred not in avoid and is_free(preferred):
        return preferred
    for _ in range(_ATTEMPTS):
        port = random.randint(_FIRST, _LAST)
        if port not in avoid and is_free(port):
            return port
    raise OSError(f"no free TCP port between {_FIRST} and {_LAST}")
