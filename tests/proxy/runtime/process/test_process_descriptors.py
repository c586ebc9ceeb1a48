"""proxy.runtime.process.descriptors: what a worker inherits."""

from __future__ import annotations

import os
import socket
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from proxy.runtime.process.descriptors import Descriptors, adopt_listener, adopt_stream


@given(
    st.builds(
        Descriptors,
        channel=st.integers(0, 99),
        liveness=st.integers(0, 99),
        service=st.integers(-1, 99),
        connections=st.integers(-1, 99),
        store=st.integers(-1, 99),
    )
)
def test_descriptors_round_trip(descriptors: Descriptors) -> None:
    assert Descriptors.decode(descriptors.encode()) == descriptors


def test_all_descriptors() -> None:
    assert set(Descriptors(channel=3, liveness=4).inheritable()) == {3, 4}
    assert set(Descriptors(channel=3, liveness=4, service=5, connections=8, store=9).inheritable()) == {3, 4, 5, 8, 9}


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
