"""`connections` and `disconnect`: which clients are connected to a running cluster, and the end of those named."""

import heapq
import ipaddress
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from proto.rpc_pb2 import Connection, ConnectionFilter, ConnectionsPage, ConnectionsRequest, Method
from proxy.commands.asking import ask_while
from proxy.common.errors import ProxyError
from proxy.runtime.process.worker import CONTROL_FRAME_BYTES_MAX
from proxy.runtime.rpc.client import RpcClient
from proxy.runtime.rpc.errors import RpcCallRefused
from proxy.status_text import printable
from proxy.supervisor.operators.ancestry import supervisor_connector

CALL_TIMEOUT_S = 30.0

PAGES_MAX = 1_000
"""Pages of one forwarder: it keeps fewer connections than these hold."""

ROUNDS_MAX = 5
"""How often the forwarders are asked for: some may be replaced meanwhile, and their connections be in others."""

REASON_CHARACTERS_MAX = 500
"""What is shown of the reason why a forwarder cannot be asked: a captured one may say anything."""

_MS = 1000


class FilterRefused(ProxyError):
    """A filter that cannot be used. The text says why."""


@dataclass(frozen=True, slots=True)
class Row:
    """A connection as an operator sees it. ``ends_in_s``: None where its session does not end."""

    address: str
    principal: str
    method: str
    proxy: str
    broker: str
    kind: str
    forwarder: str
    pid: int
    age_s: float
    bytes_to_broker: int
    bytes_to_client: int
    ends_in_s: float | None
    started_at_unix_ms: int

    @property
    def bytes(self) -> int:
        """Bytes of both directions."""
        return self.bytes_to_broker + self.bytes_to_client

    @property
    def rate(self) -> float:
        """Bytes a second of both directions, on average since the connection began."""
        return self.bytes / max(self.age_s, 1.0)

    def to_json(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return {
            "address": self.address,
            "principal": self.principal,
            "method": self.method,
            "proxy": self.proxy,
            "broker": self.broker,
            "kind": self.kind,
            "forwarder": self.forwarder,
            "pid": self.pid,
            "age_seconds": round(self.age_s, 3),
            "bytes_to_broker": self.bytes_to_broker,
            "bytes_to_client": self.bytes_to_client,
            "session_ends_in_seconds": None if self.ends_in_s is None else round(self.ends_in_s, 3),
        }


SORTS: dict[str, Callable[[Row], float]] = {
    "bytes": lambda row: row.bytes,
    "age": lambda row: row.age_s,
    "rate": lambda row: row.rate,
}


def filter_of(principal: str | None, network: str | None, broker: str | None, kinds: Iterable[str]) -> ConnectionFilter:
    """Return a filter of what was given. Raises FilterRefused."""
    if network is not None:
        try:
            network = str(ipaddress.ip_network(network.strip("[]"), strict=False))
        except ValueError:
            raise FilterRefused(f"--address: {network[:100]!r} is neither an IP address nor a network") from None
    if broker is not None and not broker:
        raise FilterRefused("--broker: it is empty")
    return ConnectionFilter(principal=principal, network=network, broker=broker, kinds=list(kinds))


class ConnectionsClient:
    """Asks a running cluster, over control.sock. ``failures``: forwarders that could not be asked, and why."""

    def __init__(self, path: str) -> None:
        self._client = RpcClient(supervisor_connector(path), max_frame_bytes=CONTROL_FRAME_BYTES_MAX)
        self.failures: list[str] = []

    async def run(self) -> None:
        """Keep the connection until cancelled."""
        await self._client.run()

    async def rows(self, wanted: ConnectionFilter, *, until_unix_ms: int = 0, ends: bool = False) -> AsyncIterator[Row]:
        """Yield the connections that match; ``ends``: end them, and yield those that are ended by it. Raises RpcError.

        ``until_unix_ms``: none that came later; 0: any.
        """
        method = Method.CLUSTER_DISCONNECT if ends else Method.CLUSTER_CONNECTIONS
        request = ConnectionsRequest(filter=wanted, started_until_unix_ms=until_unix_ms)
        asked: set[int] = set()
        for _ in range(ROUNDS_MAX):
            page = await self._page(method, ConnectionsRequest(filter=wanted))
            new = {one.pid: f"forwarder-{one.index}" for one in page.forwarders if one.pid not in asked}
            if not new:
                return
            asked |= new.keys()
            for pid, name in new.items():
                request.pid, request.after = pid, 0
                async for row in self._rows_of(method, request, name):
                    yield row

    async def _rows_of(self, method: int, request: ConnectionsRequest, name: str) -> AsyncIterator[Row]:
        for _ in range(PAGES_MAX):
            try:
                page = await self._page(method, request)
            except RpcCallRefused as refused:
                self.failures.append(
                    f"{name} (process {request.pid}): {printable(refused.reason[:REASON_CHARACTERS_MAX])}"
                )
                return
            now_ms = time.time() * _MS
            for one in page.connections:
                yield row_of(one, name, request.pid, now_ms)
            request.after = page.next
            if not page.next:
                return

    async def _page(self, method: int, request: ConnectionsRequest) -> ConnectionsPage:
        return await self._client.call(method, request, ConnectionsPage, timeout_s=CALL_TIMEOUT_S)


def row_of(one: Connection, forwarder: str, pid: int, now_ms: float) -> Row:
    """Return an answer's connection as a row."""
    ends_in_s = (one.ends_at_unix_ms - now_ms) / _MS if one.ends_at_unix_ms else None
    return Row(
        one.client_address,
        one.principal,
        one.method,
        one.proxy,
        one.broker,
        one.kind,
        forwarder,
        pid,
        max(0.0, (now_ms - one.started_at_unix_ms) / _MS),
        one.bytes_to_broker,
        one.bytes_to_client,
        ends_in_s,
        one.started_at_unix_ms,
    )


async def collect(
    path: str, wanted: ConnectionFilter, *, until_unix_ms: int = 0, ends: bool = False
) -> tuple[list[Row], list[str]]:
    """Return all rows, and which forwarders could not be asked, and why. Raises RpcError, OSError."""
    client = ConnectionsClient(path)

    async def rows() -> list[Row]:
        return [row async for row in client.rows(wanted, until_unix_ms=until_unix_ms, ends=ends)]

    return await ask_while(client.run, rows), client.failures


def pick(rows: list[Row], sort: str | None, limit: int | None) -> list[Row]:
    """Return the rows in an order, the largest first, and only so many."""
    if sort is None:
        return rows[:limit]
    key = SORTS[sort]
    return sorted(rows, key=key, reverse=True) if limit is None else heapq.nlargest(limit, rows, key=key)


# ---- text

_HEADINGS = (
    "ADDRESS",
    "PRINCIPAL",
    "METHOD",
    "BROKER",
    "KIND",
    "AGE",
    "TO BROKER",
    "TO CLIENT",
    "ENDS IN",
    "FORWARDER",
)
_RIGHT = frozenset({5, 6, 7, 8})
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")


def json_text(rows: Iterable[Row]) -> str:
    """Return rows as JSON in ASCII, a line each: no character of a client's reaches the terminal as it is."""
    return "[" + ",\n".join(json.dumps(row.to_json()) for row in rows) + "]"


def table_text(rows: list[Row]) -> str:
    """Return rows as a table, a line each."""
    cells = [_HEADINGS, *map(_cells, rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEADINGS))]
    return "\n".join(
        "  ".join(
            text.rjust(width) if column in _RIGHT else text.ljust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )


def _cells(row: Row) -> tuple[str, ...]:
    return (
        printable(row.address),
        printable(row.principal or "-") + (f" (by {printable(row.proxy)})" if row.proxy else ""),
        printable(row.method or "-"),
        printable(row.broker or "-"),
        row.kind,
        duration_text(row.age_s),
        size_text(row.bytes_to_broker),
        size_text(row.bytes_to_client),
        "-" if row.ends_in_s is None else duration_text(row.ends_in_s) if row.ends_in_s > 0 else "over",
        f"{row.forwarder} ({row.pid})",
    )


def size_text(size: float) -> str:
    """Return a number of bytes in three digits or so, in powers of 1,000."""
    for unit in _UNITS:
        if size < 1000 or unit == _UNITS[-1]:  # noqa: PLR2004
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"  # noqa: PLR2004
        size /= 1000
    raise AssertionError


def duration_text(seconds: float) -> str:
    """Return a duration in its two largest units."""
    total = int(seconds)
    days, hours, minutes = total // 86_400, total // 3_600 % 24, total // 60 % 60
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{total % 60:02}s" if minutes else f"{total}s"


def summary_text(rows: list[Row]) -> str:
    """Say how many connections of which principals there are."""
    by_principal = Counter(row.principal for row in rows)
    names = ", ".join(f"{printable(name) or 'none'} ({count})" for name, count in by_principal.most_common(5))
    more = f", and {len(by_principal) - 5} more" if len(by_principal) > 5 else ""  # noqa: PLR2004
    return f"{len(rows)} connection{'' if len(rows) == 1 else 's'}" + (f", of principals {names}{more}" if rows else "")
