"""proxy.runtime.network.congestion: which name is asked for, and a refusal that ends nothing."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest
import structlog.testing

from proxy.runtime.network import congestion
from proxy.runtime.network.congestion import set_congestion_control, set_congestion_control_of_accepted


@pytest.fixture(autouse=True)
def _nothing_was_said() -> Iterator[None]:
    congestion._log_refusal_once.cache_clear()
    yield
    congestion._log_refusal_once.cache_clear()


class FakeSocket:
    """One with a congestion control of its own, a listener after a reload, say."""

    def __init__(self, current: str, *, refuses: bool = False) -> None:
        self.chosen: list[bytes] = []
        self._current = current.encode().ljust(16, b"\0")
        self._refuses = refuses

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_CONGESTION)
        return self._current[:size]

    def setsockopt(self, level: int, option: int, name: bytes) -> None:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_CONGESTION)
        if self._refuses:
            raise PermissionError(1, "Operation not permitted")
        self.chosen.append(name)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[bytes]]:
    """What is chosen for a socket on a machine with such a congestion control."""

    def choose(name: str, *, system: str = "cubic", current: str = "", refuses: bool = False) -> list[bytes]:
        monkeypatch.setattr(congestion, "_system_default", lambda: system)
        sock = FakeSocket(current or system, refuses=refuses)
        use = set_congestion_control_of_accepted if current else set_congestion_control
        use(sock, name)  # type: ignore[arg-type]
        return sock.chosen

    return choose


Chosen = Callable[..., list[bytes]]


@pytest.mark.parametrize("system", ["bbr", "cubic"])
def test_the_systems(chosen: Chosen, system: str) -> None:
    assert chosen("system", system=system) == []


@pytest.mark.parametrize("system", ["bbr", "bbr2", "bbr1"])
def test_unpaced_is_not_bbr(chosen: Chosen, system: str) -> None:
    assert chosen("unpaced", system=system) == [b"reno"]


@pytest.mark.parametrize("system", ["cubic", "reno", "htcp"])
def test_unpaced_leaves_what_does_not_pace(chosen: Chosen, system: str) -> None:
    assert chosen("unpaced", system=system) == []


def test_a_listener_goes_back_to_the_systems_after_a_reload(chosen: Chosen) -> None:
    assert chosen("system", system="bbr", current="reno") == [b"bbr"]
    assert chosen("unpaced", system="cubic", current="reno") == [b"cubic"]


def test_a_congestion_control_configured_by_name_is_set(chosen: Chosen) -> None:
    assert chosen("cubic", system="bbr") == [b"cubic"]


def test_a_refusal_is_said_once_and_no_more(chosen: Chosen) -> None:
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
        set_congestion_control(sock, "reno")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).startswith(b"reno\0")
    with structlog.testing.capture_logs() as logs, socket.socket() as sock:
        set_congestion_control(sock, "no-such-one")
    assert [entry["congestion_control"] for entry in logs] == ["no-such-one"]
