"""local.ports: ports that no other process is about to bind."""

from __future__ import annotations

import socket

import pytest
from local import ports


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_given", set())
    monkeypatch.setattr(ports, "_ports", ports._ports)


def test_no_port_is_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process needs to have bound it yet."""
    ports.use_part(0, 2000)  # of ten ports
    monkeypatch.setattr(ports, "is_free", lambda _port: True)
    given = [ports.free_port() for _ in range(5)]
    assert len(set(given)) == 5


def test_parts_have_no_port_in_common() -> None:
    parts = []
    for index in range(3):
        ports.use_part(index, 3)
        parts.append(set(ports._ports))
    assert not parts[0] & parts[1] | parts[0] & parts[2] | parts[1] & parts[2]
    assert min(map(min, parts)) >= ports._FIRST
    assert max(map(max, parts)) <= ports._LAST


def test_a_port_where_somebody_listens_is_not_given() -> None:
    port = ports.free_port()
    with socket.create_server(("127.0.0.1", port)):
        assert not ports.is_free(port)
        assert ports.free_port(port) != port
    assert ports.free_port(port) == port
