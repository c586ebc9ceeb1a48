"""proxy.commands.connections: what an operator is shown of connections, whatever their clients are called."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import trio
from google.protobuf.message import Message

from proto.rpc_pb2 import Connection, ConnectionFilter, ConnectionsPage, ForwarderProcess, Method, Status
from proxy.commands import connections as module
from proxy.commands.connections import (
    FilterRefused,
    Row,
    collect,
    duration_text,
    filter_of,
    json_text,
    pick,
    row_of,
    size_text,
    summary_text,
    table_text,
)
from proxy.common.connection_kinds import LOOKUP, SPLICED
from proxy.runtime.rpc.errors import RpcCallRefused, RpcConnectionLost

NOW_MS = 1_000_000.0


def row(**fields: Any) -> Row:
    known = {"client_address": "192.0.2.7:4000", "principal": "alice", "kind": SPLICED, "started_at_unix_ms": 900_000}
    return row_of(Connection(**(known | fields)), "forwarder-0", 4711, NOW_MS)


def test_no_text_of_a_client_reaches_the_terminal_as_it_is() -> None:
    """Security: escape sequences, also of a captured forwarder, and the C1 control characters."""
    evil = "\x1b[2J\x9b31m\r\n\u202ex"
    rows = [row(client_address=evil, principal=evil, method=evil, proxy=evil, broker=evil)]
    for text in (table_text(rows), summary_text(rows)):
        assert all(character.isprintable() for character in text.replace("\n", ""))
    assert len(table_text(rows).splitlines()) == 2
    text = json_text(rows)
    assert text.isascii()
    assert all(character.isprintable() for character in text.replace("\n", ""))
    assert json.loads(text)[0]["principal"] == evil


def test_a_table() -> None:
    rows = [
        row(method="token", proxy="edge", broker="b0:6650", bytes_to_broker=1_234_567, ends_at_unix_ms=1_090_000),
        row(principal="", kind=LOOKUP, ends_at_unix_ms=999_000),
    ]
    heading, first, second = table_text(rows).splitlines()
    assert heading.split() == [
        *("ADDRESS", "PRINCIPAL", "METHOD", "BROKER", "KIND", "AGE", "TO", "BROKER", "TO", "CLIENT", "ENDS", "IN"),
        "FORWARDER",
    ]
    assert first.split() == [
        *("192.0.2.7:4000", "alice", "(by", "edge)", "token", "b0:6650", "spliced", "1m40s", "1.2", "MB", "0", "B"),
        *("1m30s", "forwarder-0", "(4711)"),
    ]
    assert second.split() == [
        *("192.0.2.7:4000", "-", "-", "-", "lookup", "1m40s", "0", "B", "0", "B", "over", "forwarder-0", "(4711)"),
    ]


def test_sizes_and_durations() -> None:
    assert [size_text(size) for size in (0, 999, 1000, 123_456, 10**9)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "123 kB",
        "1.0 GB",
    ]
    assert size_text(2**64) == "18.4 EB"
    assert [duration_text(one) for one in (0, 61, 3700, 90_000)] == ["0s", "1m01s", "1h01m", "1d01h"]


def test_sorts_and_limits() -> None:
    old, busy, fast = (
        row(started_at_unix_ms=1),
        row(bytes_to_client=500),
        row(started_at_unix_ms=999_000, bytes_to_broker=9),
    )
    rows = [old, busy, fast]
    assert pick(rows, None, 2) == [old, busy]
    assert pick(rows, "age", 1) == [old]
    assert pick(rows, "bytes", None) == [busy, fast, old]
    assert pick(rows, "rate", 1) == [fast]


def test_filters() -> None:
    assert filter_of(None, None, None, ()) == ConnectionFilter()
    assert filter_of("", "[2001:db8::1]", "b0", [LOOKUP]) == ConnectionFilter(
        principal="", network="2001:db8::1/128", broker="b0", kinds=[LOOKUP]
    )
    assert filter_of(None, "192.0.2.7/24", None, ()).network == "192.0.2.0/24"
    for arguments in ((None, "all", None, ()), (None, None, "", ())):
        with pytest.raises(FilterRefused):
            filter_of(*arguments)


Answer = Callable[[int, Any], ConnectionsPage]


class FakeClient:
    answer: Answer

    def __init__(self, *_arguments: object, **_options: object) -> None:
        pass

    async def run(self) -> None:
        await trio.sleep_forever()

    async def call(self, method: int, request: Message, _type: object, *, timeout_s: float) -> ConnectionsPage:
        await trio.lowlevel.checkpoint()
        return FakeClient.answer(method, request)


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], None]:
    monkeypatch.setattr(module, "RpcClient", FakeClient)

    def set_answer(one: Answer) -> None:
        monkeypatch.setattr(FakeClient, "answer", staticmethod(one), raising=False)

    return set_answer


async def test_all_pages_of_all_forwarders_also_of_one_that_comes_meanwhile(answer: Callable[[Answer], None]) -> None:
    asked: list[tuple[int, int, int]] = []

    def pages(method: int, request: Any) -> ConnectionsPage:
        assert method == Method.CLUSTER_DISCONNECT
        assert (request.pid == 0) or request.started_until_unix_ms == 7
        if not request.pid:
            pids = [1, 2] if not asked else [2, 3]
            return ConnectionsPage(forwarders=[ForwarderProcess(pid=pid, index=pid) for pid in pids])
        asked.append((request.pid, request.after, len(asked)))
        if request.pid == 2:
            raise RpcCallRefused(Status.REQUEST_TIMED_OUT, "the forwarder\x1b[2J " + "x" * 2000)
        return ConnectionsPage(connections=[Connection(kind=LOOKUP)], next=5 if request.after == 0 else 0)

    answer(pages)
    rows, failures = await collect("control.sock", ConnectionFilter(principal="a"), until_unix_ms=7, ends=True)
    assert [(pid, after) for pid, after, _ in asked] == [(1, 0), (1, 5), (2, 0), (3, 0), (3, 5)]
    assert [one.forwarder for one in rows] == ["forwarder-1"] * 2 + ["forwarder-3"] * 2
    [failure] = failures
    assert failure.startswith("forwarder-2 (process 2): the forwarder?[2J xxx")
    assert len(failure) < 600


async def test_a_cluster_that_ends_meanwhile(answer: Callable[[Answer], None]) -> None:
    def lost(_method: int, _request: Any) -> ConnectionsPage:
        raise RpcConnectionLost("gone")

    answer(lost)
    with pytest.raises(RpcConnectionLost):
        await collect("control.sock", ConnectionFilter())
