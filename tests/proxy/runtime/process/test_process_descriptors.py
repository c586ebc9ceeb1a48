"""proxy.runtime.process.descriptors: what a worker inherits."""

from __future__ import annotations

import os
import socket
from typing import Any

from proxy.runtime.process.descriptors import adopt_listener, adopt_stream


async def test_adopted_sockets_are_ours_alone() -> None:
    ours, theirs = socket.socketpair()
    ours.set_inheritable(True)
    with theirs:
        stream = adopt_stream(ours.detach())
        assert not os.get_inheritable(stream.socket.fileno())
        await stream.send_all(b"x")
        assert theirs.recv(1) == b"x"
        await stream.aclose()


async def test_adopted_listener(tmp_path: Any) -> None:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(tmp_path / "s"))
    sock.listen()
    listener = adopt_listener(sock.detach())
    assert not os.get_inheritable(listener.socket.fileno())
    await listener.aclose()
