"""Audit events of a worker: who connected, from where, by which method, to what, and why it ended or was refused.

Each event is a line of at most LINE_BYTES_MAX, written at once into a pipe to the supervisor
(proxy.supervisor.operators.audit), which has the file: a worker that was taken over can add lines, and neither read nor
change those that are there. A write waits for nothing. What the pipe has no room for is dropped and counted by kind; so
is what one network causes without a principal beyond EVENTS_PER_NETWORK_S_MAX in a second, and one principal beyond
EVENTS_PER_PRINCIPAL_S_MAX.
"""

import hashlib
import hmac
import os
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import prometheus_client
import structlog
from prometheus_client import CollectorRegistry

from proto.roles import Role
from proxy.common.audit_key import read_role_key
from proxy.config.types import Config
from proxy.runtime.fairness.owners import owner_of

LINE_BYTES_MAX = 4096
"""PIPE_BUF: the kernel writes so much into a pipe whole or not at all, so that lines of two workers never mix."""

VALUE_CHARACTERS_MAX = 200
"""Of a text, after it was escaped: any nine, each with twice as many bytes in JSON, fit into a line with the rest."""

EVENTS_PER_NETWORK_S_MAX = 100
EVENTS_PER_PRINCIPAL_S_MAX = 2000
"""More, since the relays of one principal may all end with a broker."""
OWNERS_MAX = 1024
"""Networks and principals that are counted apart within one second; all others are counted together."""

REDACTED = "redacted"
HASH_DIGITS = 32

_OTHERS = ""
_ROLES = frozenset({"principal", "proxy"})
_KINDS = {
    "connection_opened": "openings",
    "connection_ended": "connections",
    "connection_refused": "connections",
    "authentication_success": "authentications",
    "authentication_failure": "authentications",
    "authentication_refresh": "authentications",
    "authentication_refresh_failure": "authentications",
    "http_request": "http",
}

Value = str | int


class AuditLog:
    """The audit events of one worker. ``descriptor``: of the pipe, non-blocking; -1: there is none.

    ``now``: seconds of a clock that only goes forward.
    """

    def __init__(
        self,
        registry: CollectorRegistry | None,
        role: Role,
        index: int,
        descriptor: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker = f"{role.value}-{index}"
        self._descriptor = descriptor
        self._now = now
        self._window_ends_at = 0.0
        self._of_owner: Counter[str] = Counter()
        self._cluster = ""
        self._kinds: frozenset[str] = frozenset()
        self._role_of: Callable[[str], str] = str
        self._render: Any = structlog.processors.JSONRenderer()
        self._dropped = prometheus_client.Counter(
            "pulsar_proxy_audit_dropped_events",
            "Audit events that were not written, by event and reason: full, rate, too_long, unwritable.",
            ["event", "reason"],
            registry=registry,
        )

    def configure(self, config: Config) -> None:
        """Use new settings. Raises ConfigError, and then keeps the old ones."""
        audit = config.audit
        key = read_role_key(audit.role_key_file) if audit.role_key_file else b""
        match audit.roles:
            case "plain":
                self._role_of = str
            case "redacted":
                self._role_of = _redact
            case "hashed":
                self._role_of = _hasher(key)
        self._render = (
            structlog.processors.JSONRenderer()
            if audit.format == "json"
            else structlog.processors.LogfmtRenderer(key_order=["time", "event"])
        )
        self._kinds = frozenset(audit.events)
        self._cluster = config.cluster.name

    def writes(self, event: str) -> bool:
        """Return whether events of this name are written."""
        return self._descriptor >= 0 and _KINDS[event] in self._kinds

    def write(self, event: str, *, client: str, started_at_unix_ms: int = 0, **fields: Value) -> None:
        """Write an event of a client's connection, if it is wanted. Never waits, and raises nothing.

        ``started_at_unix_ms``: with the client's address it identifies the connection, in a successor, too; 0: now.
        """
        if not self.writes(event):
            return
        now_ns = time.time_ns()
        reason = "rate" if self._is_over_rate(client, str(fields.get("principal", ""))) else ""
        if not reason:
            line = self._line(event, client, now_ns, started_at_unix_ms or now_ns // 1_000_000, fields)
            reason = self._write_line(line)
        if reason:
            self._dropped.labels(event=event, reason=reason).inc()

    def _is_over_rate(self, client: str, principal: str) -> bool:
        now = self._now()
        if now >= self._window_ends_at:
            self._window_ends_at = now + 1
            self._of_owner.clear()
        owner = owner_of(principal, client)
        if owner not in self._of_owner and len(self._of_owner) >= OWNERS_MAX:
            owner = _OTHERS
        self._of_owner[owner] += 1
        return self._of_owner[owner] > (EVENTS_PER_PRINCIPAL_S_MAX if principal else EVENTS_PER_NETWORK_S_MAX)

    def _line(self, event: str, client: str, now_ns: int, started_ms: int, fields: dict[str, Value]) -> bytes:
        entry: dict[str, Value] = {
            "time": datetime.fromtimestamp(now_ns / 1e9, UTC).isoformat(timespec="milliseconds"),
            "event": event,
            "cluster": self._cluster,
            "worker": self._worker,
            "connection": connection_id(client, started_ms),
            "client": client,
        }
        entry |= {
            name: self._role_of(value) if name in _ROLES and isinstance(value, str) and value else value
            for name, value in fields.items()
            if value != ""
        }
        shown = {name: _escaped(value) if isinstance(value, str) else value for name, value in entry.items()}
        return f"{self._render(None, '', shown)}\n".encode()

    def _write_line(self, line: bytes) -> str:
        """Write a line; return why it was dropped, "" where it was not."""
        if len(line) > LINE_BYTES_MAX:
            return "too_long"
        try:
            os.write(self._descriptor, line)
        except BlockingIOError:
            return "full"
        except OSError:
            return "unwritable"
        return ""


def connection_id(client: str, started_at_unix_ms: int) -> str:
    """Return the identity of a connection in all its events."""
    return hashlib.sha256(f"{client} {started_at_unix_ms}".encode()).hexdigest()[:16]


def _escaped(text: str) -> str:
    """Escape and cut a text that a client may have chosen: it can forge no line, and drive no terminal."""
    if not (text.isascii() and text.isprintable()):
        text = text[:VALUE_CHARACTERS_MAX].encode("unicode_escape").decode("ascii")
    return text[:VALUE_CHARACTERS_MAX]


def _redact(_role: str) -> str:
    return REDACTED


def _hasher(key: bytes) -> Callable[[str], str]:
    def hashed(role: str) -> str:
        data = role.encode(errors="surrogatepass")
        digest = hmac.new(key, data, hashlib.sha256) if key else hashlib.sha256(data)
        return f"{'hmac' if key else 'sha256'}:{digest.hexdigest()[:HASH_DIGITS]}"

    return hashed
