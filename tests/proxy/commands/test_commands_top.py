"""proxy.commands.top: rates between two looks, and a view that keeps to its terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import sys
import termios
from typing import Any

import pytest
import trio

from proto.rpc_pb2 import Connection, ConnectionFilter
from proxy.commands import top
from proxy.commands.connections import Row, row_of
from proxy.commands.top import Line, Rates, frame_text, lines_of, run_top
from proxy.common.connection_kinds import SPLICED
from proxy.runtime.rpc.errors import RpcConnectionLost


def row(port: int, to_broker: int, to_client: int = 0, principal: str = "alice", pid: int = 1) -> Row:
    one = Connection(
        client_address=f"192.0.2.7:{port}",
        principal=principal,
        kind=SPLICED,
        started_at_unix_ms=1_000,
        bytes_to_broker=to_broker,
        bytes_to_client=to_client,
    )
    return row_of(one, "forwarder-0", pid, 11_000)


def test_rates_are_between_two_looks_and_of_a_new_connection_since_it_began() -> None:
    rates = Rates()
    assert [one[1:] for one in rates.update([row(1, 1000, 500)], 2.0)] == [(100.0, 50.0)]
    rated = rates.update([row(1, 1200, 500, pid=2), row(2, 50)], 2.0)
    assert [one[1:] for one in rated] == [(100.0, 0.0), (5.0, 0.0)]
    assert [one[1:] for one in rates.update([row(1, 0)], 2.0)] == [(0.0, 0.0)], "never less than nothing"


def test_lines_by_connection_and_by_principal() -> None:
    rated = [(row(1, 0), 1.0, 2.0), (row(2, 0, principal="bob"), 5.0, 0.0), (row(3, 0), 1.0, 2.0)]
    names = [line.name for line in lines_of(rated, by_principal=False)]
    assert names == ["192.0.2.7:2", "192.0.2.7:1", "192.0.2.7:3"]
    assert lines_of(rated, by_principal=True) == [
        Line("alice", 2.0, 4.0, "2 connections"),
        Line("bob", 5.0, 0.0, "1 connections"),
    ]


def test_a_frame_keeps_to_the_terminal_and_shows_nothing_that_moves_its_cursor() -> None:
    """Security: a client's name is no sequence of the terminal's."""
    lines = [Line(f"\x1b[2J\x9b1m\n{number}", 1.0, 1.0, "x" * 200) for number in range(50)]
    text = frame_text(lines, ["forwarder-0\x1b]0;x\a: gone"], columns=40, rows=10)
    body = text.removeprefix("\x1b[H").removesuffix("\x1b[J")
    shown = [line.removesuffix("\x1b[K") for line in body.split("\n")]
    assert len(shown) == 10
    assert all(len(line) < 40 and line.isprintable() for line in shown)


async def test_q_ends_it_and_the_terminal_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    async def one_row(_path: str, _wanted: ConnectionFilter) -> tuple[list[Row], list[str]]:
        await trio.lowlevel.checkpoint()
        return [row(1, 1000)], []

    monkeypatch.setattr(top, "collect", one_row)
    ours, theirs = pty.openpty()
    with open(theirs, "r+b", buffering=0) as raw, open(os.dup(theirs)) as keys, open(os.dup(theirs), "w") as screen:  # noqa: ASYNC230
        before: Any = termios.tcgetattr(raw)
        monkeypatch.setattr(sys, "stdin", keys)
        monkeypatch.setattr(sys, "stdout", screen)
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lambda: run_top("control.sock", ConnectionFilter(), by_principal=False))
                await trio.lowlevel.wait_readable(ours)
                os.write(ours, b"xq")
        assert termios.tcgetattr(raw) == before
        os.set_blocking(ours, False)
        drawn = os.read(ours, 65536).decode()
        assert "192.0.2.7:1" in drawn
    os.close(ours)


async def test_a_cluster_that_ends_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line says so in a line of its own, once the terminal is as before."""

    async def lost(_path: str, _wanted: ConnectionFilter) -> tuple[list[Row], list[str]]:
        await trio.lowlevel.checkpoint()
        raise RpcConnectionLost("gone")

    async def no_key(_scope: trio.CancelScope) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(top, "collect", lost)
    monkeypatch.setattr(top, "_terminal", contextlib.nullcontext)
    monkeypatch.setattr(top, "_cancel_at_q", no_key)
    with pytest.raises(RpcConnectionLost):
        await run_top("control.sock", ConnectionFilter(), by_principal=True)
