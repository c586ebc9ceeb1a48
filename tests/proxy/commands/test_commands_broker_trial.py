"""proxy.commands.broker_trial: the first broker that accepts the proxy is enough; else the reasons are told."""

from __future__ import annotations

import re
import socket
import struct
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import trio
import trio.testing

from lookup.brokers.discovery import CredentialVerdict, Endpoint
from lookup.brokers.login import LoginFactory, LoginResult
from proto.addresses import parse_broker_url
from proto.broker_handshake import HANDSHAKE_FRAME_BYTES_MAX
from proxy.commands import broker_trial
from proxy.commands.broker_trial import try_brokers
from proxy.config.trial import TRIAL_TIMEOUT_S, BrokerTrial
from proxy.config.types import BrokerCredentials, Brokers, BrokerTls, Config
from proxy.config.worker_config import encode_config
from proxy.runtime.process.hardening import DATA_WORKER_OOM_SCORE
from proxy.supervisor.processes.broker_trial import COMMAND

ACCEPTED = LoginResult(CredentialVerdict.ACCEPTED)
REFUSED = LoginResult(CredentialVerdict.REFUSED, "AuthenticationError: no")
Clock = trio.testing.MockClock
ROOT = Path(__file__).resolve().parents[3]
UNKNOWN = "unknown.example"
SILENT = LoginResult(CredentialVerdict.UNKNOWN, "did not finish the handshake")


class Logins:
    """What comes of a login at each port, and after how long."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.results: dict[int, LoginResult] = {}
        self.takes_s: dict[int, float] = {}

        async def log_in(_factory: object, broker: Endpoint, _credentials: object) -> LoginResult:
            await trio.sleep(self.takes_s.get(broker.port, 0))
            return self.results.get(broker.port, REFUSED)

        @asynccontextmanager
        async def discovered(config: Config) -> AsyncIterator[SimpleNamespace]:
            """Without DNS, which reads its files in threads: the test's clock would not wait for them."""
            hosts = parse_broker_url(config.brokers.service_url).hosts
            endpoints = [Endpoint(host.host, host.port, (host.host,)) for host in hosts if host.host != UNKNOWN]
            failures = {str(host): "no such name" for host in hosts if host.host == UNKNOWN}
            await trio.lowlevel.checkpoint()
            yield SimpleNamespace(endpoints=endpoints, failures=failures)

        monkeypatch.setattr(broker_trial, "discovered", discovered)
        monkeypatch.setattr(LoginFactory, "log_in", log_in)


@pytest.fixture
def logins(monkeypatch: pytest.MonkeyPatch) -> Logins:
    return Logins(monkeypatch)


def before(*ports: int) -> Config:
    return Config(brokers=Brokers(service_url=f"pulsar://{','.join(f'127.0.0.1:{port}' for port in ports)}"))


async def test_the_first_broker_that_accepts_ends_the_trial(
    logins: Logins, autojump_clock: trio.testing.MockClock
) -> None:
    logins.results = {7000: SILENT, 7001: ACCEPTED}
    logins.takes_s = {7000: 10, 7001: 1}
    assert await try_brokers(before(7000, 7001, 7002)) == BrokerTrial(accepted=True)
    assert trio.current_time() == pytest.approx(1)


async def test_where_none_accepts_the_first_reasons_are_told(
    logins: Logins, autojump_clock: trio.testing.MockClock
) -> None:
    logins.results = {7001: SILENT}
    trial = await try_brokers(before(7000, 7001))
    assert not trial.accepted
    assert trial.reason.split("; ") == [
        "127.0.0.1:7000 at 127.0.0.1: AuthenticationError: no",
        "127.0.0.1:7001 at 127.0.0.1: did not finish the handshake",
    ]
    trial = await try_brokers(before(*range(7000, 7010)))
    assert trial.reason.endswith("; and 7 more")


async def test_names_that_are_not_resolved(logins: Logins, autojump_clock: Clock) -> None:
    config = Config(brokers=Brokers(service_url=f"pulsar://{UNKNOWN}:7000"))
    assert await try_brokers(config) == BrokerTrial(False, f"{UNKNOWN}:7000: not resolved: no such name")


async def test_a_trial_ends_at_its_timeout(logins: Logins, autojump_clock: Clock) -> None:
    logins.takes_s = {7000: 1000}
    trial = await try_brokers(before(7000))
    assert trio.current_time() == pytest.approx(TRIAL_TIMEOUT_S)
    assert (trial.accepted, "within 20 s" in trial.reason) == (False, True)


async def test_files_that_cannot_be_used(logins: Logins, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("garbage")
    for brokers, key in (
        (Brokers(credentials=BrokerCredentials(method="token", file=str(file))), "brokers.credentials.file"),
        (Brokers(service_url="pulsar+ssl://127.0.0.1", tls=BrokerTls(trust=str(file))), "brokers.tls.trust"),
    ):
        trial = await try_brokers(Config(brokers=brokers))
        assert not trial.accepted
        assert trial.reason.startswith(f"{key}: {file}")
        assert "garbage" not in trial.reason


# ---- its process


@contextmanager
def trial_process(config: Config) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdin is not None
        process.stdin.write(encode_config(config))
        process.stdin.close()
        yield process


def test_a_broker_can_neither_fill_the_memory_nor_have_another_process_ended_for_it() -> None:
    """Many such brokers are one attacker's, who has a name of ``service_url``."""
    own_score = int(Path("/proc/self/oom_score_adj").read_text())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = before(listener.getsockname()[1])
        with trial_process(config) as process:
            connection, _ = listener.accept()
            score = int(Path(f"/proc/{process.pid}/oom_score_adj").read_text())
            with connection:
                connection.sendall(struct.pack(">I", HANDSHAKE_FRAME_BYTES_MAX + 1))
                assert process.stdout is not None
                answer = process.stdout.read()
    assert score == min(own_score + DATA_WORKER_OOM_SCORE, 1000)
    trial = msgspec.json.decode(answer, type=BrokerTrial)
    assert trial.reason.endswith(f"the limit is {HANDSHAKE_FRAME_BYTES_MAX}")


def test_the_trial_process_is_hardened_before_its_slow_imports() -> None:
    """Until then another process of the user could read the configuration, which waits in the pipe."""
    text = (ROOT / "proxy/commands/broker_trial_process.py").read_text()
    imports = re.findall(r"^(?:from|import) .*", text, re.MULTILINE)
    assert imports == ["from proxy.runtime.process import hardening"]
    assert 0 < text.find("    hardening.restrict_process(") < text.find("    from proxy.commands.broker_trial import")
    assert COMMAND[-1] == "proxy.commands.broker_trial_process"
