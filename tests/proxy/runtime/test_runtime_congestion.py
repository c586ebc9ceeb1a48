"""proxy.runtime.congestion: which name is asked for, and a refusal that ends nothing."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import structlog.testing

from proxy.runtime import congestion
from proxy.runtime.congestion import use_congestion_control


@pytest.fixture(autouse=True)
def _nothing_was_said() -> Iterator[None]:
    congestion._tell_of_refusal.cache_clear()
    yield
    congestion._tell_of_refusal.cache_clear()


class FakeSocket:
    """One whose kernel has BBR as its own, or something else."""

    def __init__(self, system: bytes = b"cubic", *, refuses: bool = False) -> None:
        self.chosen: list[bytes] = []
        self._system = system.ljust(16, b"\0")
        self._refuses = refuses

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_CONGESTION)
        return self._system[:size]

    def setsockopt(self, level: int, option: int, name: bytes) -> None:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_CONGESTION)
        if self._refuses:
            raise PermissionError(1, "Operation not permitted")
        self.chosen.append(name)


def chosen(name: str, **how: object) -> list[bytes]:
    sock = FakeSocket(**how)  # type: ignore[arg-type]
    use_congestion_control(sock, name)  # type: ignore[arg-type]
    return sock.chosen


@pytest.mark.parametrize("system", [b"bbr", b"cubic"])
def test_the_systems(system: bytes) -> None:
    assert chosen("system", system=system) == []


@pytest.mark.parametrize("system", [b"bbr", b"bbr2", b"bbr1"])
def test_unpaced_is_not_bbr(system: bytes) -> None:
    assert chosen("unpaced", system=system) == [b"reno"]


@pytest.mark.parametrize("system", [b"cubic", b"reno", b"htcp"])
def test_unpaced_leaves_what_does_not_pace(system: bytes) -> None:
    assert chosen("unpaced", system=system) == []


def test_one_by_its_name() -> None:
    assert chosen("cubic", system=b"bbr") == [b"cubic"]


def test_a_refusal_is_said_once_and_no_more() -> None:
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            assert chosen("bbr", refuses=True) == []
        chosen("hybla", refuses=True)
    assert [entry["congestion_control"] for entry in logs] == ["bbr", "hybla"]
    assert "not permitted" in logs[0]["reason"]
    assert logs[0]["log_level"] == "warning"


def test_with_a_real_socket() -> None:
    """reno is in every kernel, and allowed to every process."""
    with socket.socket() as sock:
        use_congestion_control(sock, "reno")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).startswith(b"reno\0")
    with structlog.testing.capture_logs() as logs, socket.socket() as sock:
        use_congestion_control(sock, "no-such-one")
    assert [entry["congestion_control"] for entry in logs] == ["no-such-one"]
