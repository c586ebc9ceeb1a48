"""`top`: a live view of the connections of a running cluster in the terminal, the busiest first."""

import contextlib
import os
import shutil
import sys
import termios
import tty
from collections.abc import Iterator
from dataclasses import dataclass

import trio

from proto.rpc_pb2 import ConnectionFilter
from proxy.commands.connections import Row, collect, duration_text, size_text
from proxy.runtime.rpc.errors import RpcError
from proxy.status_text import printable

REFRESH_S = 2.0

_ENTER = "\x1b[?1049h\x1b[?25l"
_LEAVE = "\x1b[?25h\x1b[?1049l"
_HOME, _TO_END_OF_LINE, _TO_END = "\x1b[H", "\x1b[K", "\x1b[J"

Key = tuple[str, int]
Moved = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the view: a connection, or all of a principal. Rates in bytes a second."""

    name: str
    rate_to_broker: float
    rate_to_client: float
    rest: str

    @property
    def rate(self) -> float:
        """Bytes a second of both directions."""
        return self.rate_to_broker + self.rate_to_client


class Rates:
    """Bytes a second of each connection between two samples; of a new one, since it began."""

    def __init__(self) -> None:
        self._before: dict[Key, Moved] = {}

    def update(self, rows: list[Row], elapsed_s: float) -> list[tuple[Row, float, float]]:
        """Return each row with its rates, to the broker and to the client."""
        before, self._before = self._before, {_key(row): (row.bytes_to_broker, row.bytes_to_client) for row in rows}
        rated = []
        for row in rows:
            known = before.get(_key(row))
            to_broker, to_client = known or (0, 0)
            over_s = elapsed_s if known else max(1.0, row.age_s)
            rates = (row.bytes_to_broker - to_broker, row.bytes_to_client - to_client)
            rated.append((row, max(0.0, rates[0] / over_s), max(0.0, rates[1] / over_s)))
        return rated


def _key(row: Row) -> Key:
    return row.address, row.started_at_unix_ms  # not the process: a relay goes on in a successor


def lines_of(rated: list[tuple[Row, float, float]], *, by_principal: bool) -> list[Line]:
    """Return the lines of the view, the busiest first."""
    if by_principal:
        sums: dict[str, tuple[float, float, int]] = {}
        for row, to_broker, to_client in rated:
            had = sums.get(row.principal, (0.0, 0.0, 0))
            sums[row.principal] = had[0] + to_broker, had[1] + to_client, had[2] + 1
        lines = [Line(name or "-", one[0], one[1], f"{one[2]} connections") for name, one in sums.items()]
    else:
        lines = []
        for row, to_broker, to_client in rated:
            about = f"{row.principal or '-'}  {row.broker or '-'}  {row.kind}  {duration_text(row.age_s)}"
            lines.append(Line(row.address, to_broker, to_client, about))
    return sorted(lines, key=lambda line: line.rate, reverse=True)


def frame_text(lines: list[Line], failures: list[str], *, columns: int, rows: int) -> str:
    """Return what is drawn: as many lines as there is room for, none wider than the terminal."""
    total = sum(line.rate for line in lines)
    title = f"{len(lines)} lines, {size_text(total)}/s; q ends"
    shown = [title, *(f"not asked: {one}" for one in failures[:1])]
    shown.append(f"{'TO BROKER':>11}  {'TO CLIENT':>11}  WHO")
    for line in lines[: max(0, rows - len(shown))]:
        to_broker, to_client = size_text(line.rate_to_broker) + "/s", size_text(line.rate_to_client) + "/s"
        shown.append(f"{to_broker:>11}  {to_client:>11}  {line.name}  {line.rest}")
    cut = [printable(line)[: columns - 1] + _TO_END_OF_LINE for line in shown[:rows]]  # behind the last column: no more
    return _HOME + "\n".join(cut) + _TO_END


async def run_top(path: str, wanted: ConnectionFilter, *, by_principal: bool) -> None:
    """Draw until `q` is typed, or until cancelled. Raises RpcError, OSError."""
    failure: RpcError | OSError | None = None
    with _terminal():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_at_q, nursery.cancel_scope)
            try:
                await _draw_regularly(path, wanted, by_principal=by_principal)
            except (RpcError, OSError) as error:
                failure = error
                nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _draw_regularly(path: str, wanted: ConnectionFilter, *, by_principal: bool) -> None:
    rates, sampled_at = Rates(), trio.current_time()
    while True:
        rows, failures = await collect(path, wanted)
        before, sampled_at = sampled_at, trio.current_time()
        lines = lines_of(rates.update(rows, max(0.001, sampled_at - before)), by_principal=by_principal)
        size = shutil.get_terminal_size()
        sys.stdout.write(frame_text(lines, failures, columns=size.columns, rows=size.lines))
        sys.stdout.flush()
        await trio.sleep(REFRESH_S)


async def _cancel_at_q(scope: trio.CancelScope) -> None:
    while True:
        await trio.lowlevel.wait_readable(sys.stdin)
        if os.read(sys.stdin.fileno(), 1) in {b"q", b"Q", b""}:
            scope.cancel()
            return


@contextlib.contextmanager
def _terminal() -> Iterator[None]:
    """Take the terminal: a screen of its own, keys without a line's end; and give it back."""
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        sys.stdout.write(_ENTER)
        yield
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
