"""Audit events of a worker: what a line holds, what no client can put into it, and what is dropped and counted."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from proto.roles import Role
from proxy.common.errors import ConfigError
from proxy.config.types import Config
from proxy.runtime.observability.audit import (
    EVENTS_PER_NETWORK_S_MAX,
    EVENTS_PER_PRINCIPAL_S_MAX,
    LINE_BYTES_MAX,
    OWNERS_MAX,
    AuditLog,
    connection_id,
)

CLIENT = "192.0.2.1:4711"


class Setup:
    """A log that writes into a pipe."""

    def __init__(self, **audit: Any) -> None:
        self.reader, self.writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.registry = CollectorRegistry()
        self.now = 0.0
        self.log = AuditLog(self.registry, Role.FORWARDER, 3, self.writer, lambda: self.now)
        self.configure(**audit)

    def configure(self, **audit: Any) -> None:
        tables = {"cluster": {"name": "here"}, "audit": {"events": ["connections"], **audit}}
        self.log.configure(msgspec.convert(tables, Config))

    def refuse(self, client: str = CLIENT, **fields: Any) -> None:
        self.log.write("connection_refused", client=client, **fields)

    def text(self) -> str:
        try:
            return os.read(self.reader, 1 << 20).decode()
        except BlockingIOError:
            return ""

    def dropped(self, reason: str) -> float:
        labels = {"event": "connection_refused", "reason": reason}
        return self.registry.get_sample_value("pulsar_proxy_audit_dropped_events_total", labels) or 0

    def close(self) -> None:
        os.close(self.reader)
        os.close(self.writer)


@pytest.fixture
def setup() -> Iterator[Setup]:
    made = Setup()
    yield made
    made.close()


def test_an_event_is_a_line(setup: Setup) -> None:
    setup.log.write("connection_ended", client=CLIENT, started_at_unix_ms=7, principal="alice", target="", ms=5)
    event = json.loads(setup.text())
    assert event.pop("time").endswith("+00:00")
    assert event == {
        "event": "connection_ended",
        "cluster": "here",
        "worker": "forwarder-3",
        "connection": connection_id(CLIENT, 7),
        "client": CLIENT,
        "principal": "alice",
        "ms": 5,
    }


def test_only_wanted_events_are_written(setup: Setup) -> None:
    setup.log.write("authentication_success", client=CLIENT)
    assert not setup.text()
    setup.configure(events=["authentications"])
    setup.log.write("authentication_success", client=CLIENT)
    assert "authentication_success" in setup.text()
    setup.configure(events=[])
    setup.log.write("authentication_success", client=CLIENT)
    assert not setup.text()


@pytest.mark.parametrize("kind", ["json", "logfmt"])
def test_clients_can_forge_no_line(setup: Setup, kind: str) -> None:
    """Security: neither a line nor a field, nor what a terminal obeys."""
    setup.configure(format=kind)
    setup.refuse(principal='a\nevent=authentication_success "principal": "root" \x1b[2J \u202e')
    text = setup.text()
    assert text.count("\n") == 1
    assert text.isascii()
    assert "\x1b" not in text
    if kind == "json":
        assert json.loads(text)["event"] == "connection_refused"
    else:
        assert " event=authentication_success" not in text.partition('principal="')[0]
        assert r"\"principal\"" in text


def test_no_value_makes_a_line_too_long(setup: Setup) -> None:
    """Bounds: with values of the worst kind each line is still written at once."""
    for value in ("\\" * 10_000, '"' * 10_000, "\x00" * 10_000, "\U0001f600" * 10_000, "x" * 10_000):
        for kind in ("json", "logfmt"):
            setup.configure(format=kind, roles="plain")
            fields = {f"field{number}": value for number in range(5)}
            setup.refuse(value, principal=value, proxy=value, target=value, **fields)
            assert 200 < len(setup.text()) <= LINE_BYTES_MAX, (value[0], kind)


def test_a_line_that_is_too_long_after_all_is_dropped(setup: Setup) -> None:
    """Bounds: otherwise parts of it could mix with another worker's."""
    setup.refuse(**{f"field{number}": "x" * 256 for number in range(20)})
    assert (setup.text(), setup.dropped("too_long")) == ("", 1)


def test_what_the_pipe_has_no_room_for_is_dropped_and_counted(setup: Setup) -> None:
    sent = 0
    while not setup.dropped("full"):
        setup.now += 1
        setup.refuse()
        sent += 1
    assert setup.text().count("\n") == sent - 1
    setup.refuse()
    assert setup.text().count("\n") == 1


def test_a_supervisor_that_has_gone_is_counted(setup: Setup) -> None:
    other, end = os.pipe()
    os.dup2(other, setup.reader)
    os.close(other)
    os.close(end)
    setup.refuse()
    assert setup.dropped("unwritable") == 1


def test_one_network_does_not_take_all_room(setup: Setup) -> None:
    """Fairness: what it causes beyond its bound is counted, and others' events are written."""
    for port in range(EVENTS_PER_NETWORK_S_MAX + 10):
        setup.refuse(f"192.0.2.1:{port}")
    setup.refuse("192.0.2.2:1")
    text = setup.text()
    assert text.count("192.0.2.1:") == EVENTS_PER_NETWORK_S_MAX
    assert text.count("192.0.2.2:") == 1
    assert setup.dropped("rate") == 10
    setup.now += 1
    setup.refuse()
    assert setup.text()


def test_the_connections_of_one_principal_may_all_end_at_once(setup: Setup) -> None:
    """Those behind one address, too; but there is a bound."""
    written = 0
    for _ in range(EVENTS_PER_PRINCIPAL_S_MAX + 1):
        setup.refuse(principal="alice")
        written += setup.text().count("\n")
    assert (written, setup.dropped("rate")) == (EVENTS_PER_PRINCIPAL_S_MAX, 1)
    setup.refuse()
    assert setup.text()


def test_many_networks_share_one_count(setup: Setup) -> None:
    """Bounds: of memory, and of events of a client with many addresses."""
    for number in range(OWNERS_MAX + EVENTS_PER_NETWORK_S_MAX + 5):
        setup.refuse(f"10.0.{number // 256}.{number % 256}:1")
        setup.text()
    assert setup.dropped("rate") == 5


def test_roles_are_hashed_or_redacted(setup: Setup, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("0123456789abcdef\n")
    shown = []
    for audit in ({"roles": "redacted"}, {"roles": "hashed"}, {"roles": "hashed", "role_key_file": str(key)}):
        setup.configure(**audit)
        setup.refuse(principal="alice", proxy="edge")
        text = setup.text()
        assert "alice" not in text
        assert "edge" not in text
        shown.append(json.loads(text)["principal"])
    assert shown[0] == "redacted"
    assert shown[1] == "sha256:2bd806c97f0e00af1a1fc3328fa763a9"
    assert shown[2].startswith("hmac:")


def test_a_key_that_is_too_short_changes_nothing(setup: Setup, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("short")
    with pytest.raises(ConfigError, match="16 to 4096 bytes"):
        setup.configure(events=[], role_key_file=str(key))
    with pytest.raises(ConfigError, match="cannot be read"):
        setup.configure(events=[], role_key_file=f"{key}.none")
    setup.refuse()
    assert setup.text()
