"""Both ends of the load generator with each other, without a proxy."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench import generator
from tests.bench.generator import Broker
from tests.e2e.lab.certificates import Authority

pytestmark = pytest.mark.skipif(
    not (shutil.which("go") or Path("/usr/local/go/bin/go").exists()), reason="the generator is built with Go"
)


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Broker]:
    authority = Authority(tmp_path, "bench")
    certificate = authority.server("server") if request.param else None
    trust = authority.file if certificate else ""
    with generator.broker(generator.build(), tmp_path / "broker.log", certificate, trust) as broker:
        yield broker


@pytest.mark.parametrize("program", ["echo", "bulk", "bulk-down", "connect"])
def test_a_window_has_operations(program: str, broker: Broker) -> None:
    window = _window(broker, program, "full")
    assert window.operations > 0
    assert window.resumed == 0
    assert bool(window.cipher) == bool(broker.trust)


def test_clients_come_back_with_the_ticket_that_they_were_given(broker: Broker) -> None:
    window = _window(broker, "connect", "resumed")
    assert window.resumed == (window.operations if broker.trust else 0)


@pytest.mark.parametrize(("program", "size_bytes"), [("http-get", 300), ("http-down", 1 << 20), ("http-up", 1 << 20)])
def test_a_window_of_http_has_whole_bodies(program: str, size_bytes: int, tmp_path: Path) -> None:
    with generator.broker(generator.build(), tmp_path / "web.log", what="http-server") as web:
        options = {"port": web.port, "warm_up": "1ms", "window": "10ms", "connections": 2, "frame": size_bytes}
        with generator.load(generator.build(), program, **options) as load:
            window = load.measure()
    assert window.operations >= 2
    assert window.bytes == window.operations * size_bytes


def _window(broker: Broker, program: str, handshake: str) -> generator.Window:
    options = {"port": broker.port, "target": broker.address, "warm_up": "1ms", "window": "10ms"}
    options |= {"connections": 2, "tls": handshake if broker.trust else ""}
    with generator.load(generator.build(), program, **options) as load:
        return load.measure()
