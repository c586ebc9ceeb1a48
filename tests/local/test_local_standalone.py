"""The broker's settings, and what is said when it does not start. The real one runs in tests/e2e."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import jwt
import pytest
from local import standalone
from local.standalone import ROLES, BrokerOptions, Standalone, StandaloneError
from local.tokens import make_token


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    (home / "conf").mkdir(parents=True)
    (home / "conf" / "standalone.conf").write_text("brokerServicePort=6650\nbindAddress=0.0.0.0")
    (home / "bin").mkdir()
    script = home / "bin" / "pulsar"
    script.write_text("#!/bin/sh\necho cannot start: $PULSAR_MEM\nexit 7\n")
    script.chmod(0o755)
    return home


def _settings(broker: Standalone) -> dict[str, str]:
    """What the broker reads: the last of equal keys."""
    with pytest.raises(StandaloneError):
        broker.start()
    lines = (broker.data / "broker.conf").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line)


def test_listens_on_loopback_at_its_ports(home: Path, tmp_path: Path) -> None:
    broker = Standalone(home, tmp_path / "data")
    settings = _settings(broker)
    assert settings["bindAddress"] == "127.0.0.1"
    assert settings["brokerServicePort"] == str(broker.broker_port)
    assert broker.service_url == f"pulsar://localhost:{broker.broker_port}"
    assert len({broker.broker_port, broker.web_port, broker.bookie_port}) == 3
    assert "authenticationEnabled" not in settings


def test_overrides_win(home: Path, tmp_path: Path) -> None:
    conf = {"bindAddress": "127.0.0.2", "maxMessageSize": "1000"}
    settings = _settings(Standalone(home, tmp_path / "data", conf=conf))
    assert settings["bindAddress"] == "127.0.0.2"
    assert settings["maxMessageSize"] == "1000"


def test_jvm_options(home: Path, tmp_path: Path) -> None:
    (home / "bin" / "pulsar").write_text("#!/bin/sh\necho options: $PULSAR_EXTRA_OPTS\nexit 7\n")
    data = tmp_path / "data"
    with pytest.raises(StandaloneError, match=rf"options: -Djava\.io\.tmpdir={data}/tmp -Dx=y -Da=b"):
        Standalone(home, data, options=BrokerOptions(jvm_options=["-Dx=y", "-Da=b"])).start()


def test_secured(home: Path, tmp_path: Path) -> None:
    broker = Standalone(home, tmp_path / "data", secured=True)
    settings = _settings(broker)
    assert settings["proxyRoles"] == "proxy"
    key = broker.secret_key.read_bytes()
    assert settings["tokenSecretKey"] == f"file://{broker.secret_key}"
    for role in ROLES:
        assert jwt.decode(broker.token(role), key, algorithms=["HS256"]) == {"sub": role}
    for path in (broker.secret_key, broker.token_file("admin"), broker.data / "broker.conf"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    _settings(broker)
    assert broker.secret_key.read_bytes() == key  # the same from start to start


def test_a_thread_that_wakes_each_millisecond_sleeps_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    slack = Path("/proc/self/timerslack_ns")
    monkeypatch.setattr(standalone, "_WAKING_THREADS", ("another thread",))
    standalone._let_sleep(os.getpid())
    before = int(slack.read_text())
    monkeypatch.setattr(standalone, "_WAKING_THREADS", (Path("/proc/self/comm").read_text().strip(),))
    try:
        standalone._let_sleep(os.getpid())
        assert int(slack.read_text()) == standalone._TIMER_SLACK_NS > before
    finally:
        slack.write_text(str(before))
    assert int(slack.read_text()) == before


def test_broker_that_dies(home: Path, tmp_path: Path) -> None:
    broker = Standalone(home, tmp_path / "data", options=BrokerOptions(memory="-Xmx1m"))
    with pytest.raises(StandaloneError, match=r"ended with code 7:\ncannot start: -Xmx1m"):
        broker.start()
    assert not broker.running
    broker.stop()


def test_broker_that_never_becomes_healthy(home: Path, tmp_path: Path) -> None:
    (home / "bin" / "pulsar").write_text("#!/bin/sh\necho thinking\nexec sleep 1000\n")
    said: list[str] = []
    broker = Standalone(home, tmp_path / "data", options=BrokerOptions(ready_timeout_s=0.3, progress=said.append))
    with pytest.raises(StandaloneError, match=r"not ready after \d s \(log: .*broker\.log\):\nthinking"):
        broker.start()
    assert not broker.running
    assert said


def test_tokens_expire() -> None:
    key = bytes(32)
    assert jwt.decode(make_token(key, "alice", 60), key, algorithms=["HS256"])["sub"] == "alice"
    with pytest.raises(jwt.ExpiredSignatureError):
        jwt.decode(make_token(key, "alice", -60), key, algorithms=["HS256"])
    with pytest.raises(jwt.InvalidSignatureError):
        jwt.decode(make_token(b"x" * 32, "alice"), key, algorithms=["HS256"])
    assert jwt.decode(make_token(key, "a", aud="x"), key, algorithms=["HS256"], audience="x")["aud"] == "x"
