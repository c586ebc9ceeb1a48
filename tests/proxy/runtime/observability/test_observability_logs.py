"""proxy.runtime.observability.logs: one entry a line, with who writes it, and no secret."""

from __future__ import annotations

import contextvars
import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
import trio

from proto.roles import Role
from proxy.common.logs import Throttle, get_logger, is_dropped
from proxy.config.types import Config, Log
from proxy.runtime.observability.logs import DROPPED_FIELD, ENTRIES_PER_SECOND_MAX, configure_logs
from proxy.runtime.observability.metrics import new_registry
from proxy.runtime.process.descriptors import Descriptors
from proxy.runtime.process.worker import WorkerContext


@pytest.fixture(autouse=True)
def _structlog_as_it_was() -> Iterator[None]:
    structlog.contextvars.clear_contextvars()
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def entries(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs(Log(format="json"), Role.LOOKUP, 3)
    get_logger().warning("it happened", client="192.0.2.1:4000", number=5)
    [entry] = entries(capsys)
    assert entry.pop("timestamp").endswith("Z")
    assert entry == {
        "event": "it happened",
        "level": "warning",
        "role": "lookup",
        "worker": 3,
        "client": "192.0.2.1:4000",
        "number": 5,
    }


def test_logfmt(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs(Log(), Role.FORWARDER, 0)
    get_logger().info("it happened", client="x y")
    [line] = capsys.readouterr().err.splitlines()
    assert ' level=info role=forwarder worker=0 event="it happened" client="x y"' in line


@pytest.mark.parametrize(
    ("level", "written"),
    [
        ("debug", ["debug", "info", "warning", "error"]),
        ("info", ["info", "warning", "error"]),
        ("warning", ["warning", "error"]),
        ("error", ["error"]),
    ],
)
def test_levels(capsys: pytest.CaptureFixture[str], level: Any, written: list[str]) -> None:
    configure_logs(Log(level=level, format="json"), Role.AUTH, 0)
    for name in ("debug", "info", "warning", "error"):
        getattr(get_logger(), name)(f"at {name}")
    assert [entry["level"] for entry in entries(capsys)] == written


@pytest.mark.parametrize("style", ["logfmt", "json"])
def test_a_client_cannot_write_a_line_of_its_own(capsys: pytest.CaptureFixture[str], style: Any) -> None:
    """Security: a target or a role is a stranger's text."""
    configure_logs(Log(format=style), Role.FORWARDER, 0)
    get_logger().warning("refused", target='x\nlevel=error event="all is lost"\r\x1b[2J')
    output = capsys.readouterr().err
    assert output.count("\n") == 1
    assert "\r" not in output
    assert "\x1b" not in output


def test_exceptions_are_one_entry_too(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs(Log(format="json"), Role.FORWARDER, 0)
    try:
        raise ZeroDivisionError("why")
    except ZeroDivisionError as error:
        get_logger().error("a defect", exc_info=error)
    [entry] = entries(capsys)
    assert "ZeroDivisionError: why" in entry["exception"]


async def test_the_role_is_in_entries_of_every_task(capsys: pytest.CaptureFixture[str], nursery: trio.Nursery) -> None:
    """A worker sets its logs up in the task of one call (START); what it logs later comes from others."""

    async def start() -> None:
        await trio.lowlevel.checkpoint()
        configure_logs(Log(format="json"), Role.LOOKUP, 2)

    async def later() -> None:
        await trio.lowlevel.checkpoint()
        get_logger().warning("later")

    context = contextvars.copy_context()
    async with trio.open_nursery() as calls:
        context.run(calls.start_soon, start)
    async with trio.open_nursery() as calls:
        calls.start_soon(later)
    [entry] = entries(capsys)
    assert (entry.get("role"), entry.get("worker")) == ("lookup", 2)


def test_a_storm_is_bounded_and_counted() -> None:
    now = [0.0]
    throttle = Throttle(ENTRIES_PER_SECOND_MAX, DROPPED_FIELD, lambda: now[0])

    def write(event: str) -> dict[str, Any] | None:
        try:
            return dict(throttle(None, "warning", {"event": event}))
        except structlog.DropEvent:
            return None

    written = [write("storm") for _ in range(ENTRIES_PER_SECOND_MAX + 30)]
    assert sum(1 for entry in written if entry) == ENTRIES_PER_SECOND_MAX
    assert write("something else") == {"event": "something else"}
    now[0] = 1.0
    assert write("storm") == {"event": "storm", "suppressed_before": 30}
    assert write("storm") == {"event": "storm"}


def test_an_entry_that_would_be_dropped_is_counted_without_being_made(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs(Log(format="json"), Role.HTTP, 0)
    made = 0
    for _ in range(ENTRIES_PER_SECOND_MAX + 30):
        if not is_dropped("storm"):
            made += 1
            get_logger().info("storm")
    assert made == ENTRIES_PER_SECOND_MAX == len(entries(capsys))
    assert not is_dropped("something else")


def test_the_seal_key_is_in_no_representation() -> None:
    """Security."""
    key = b"very secret seal key of 32 bytes"
    descriptors = Descriptors(channel=0, liveness=1)
    context = WorkerContext(Role.AUTH, 0, Config(), key, descriptors, new_registry(), None, None)  # type: ignore[arg-type]
    assert repr(key)[2:-1] not in repr(context)
    assert repr(key)[2:-1] not in str(context)


def test_a_reader_that_has_gone_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def write(self, _text: str) -> int:
            raise BrokenPipeError

        def flush(self) -> None:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Gone())
    configure_logs(Log(), Role.FORWARDER, 0)
    get_logger().info("to no output")


def test_a_traceback_drives_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs(Log(format="json"), Role.FORWARDER, 0)
    try:
        raise ValueError("\x1b[31mred")
    except ValueError as error:
        get_logger().error("a defect", exc_info=error)
    [entry] = entries(capsys)
    assert "\x1b" not in entry["exception"]
    assert "?[31mred" in entry["exception"]
    assert "\n" in entry["exception"]
