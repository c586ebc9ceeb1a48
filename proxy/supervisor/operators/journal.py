"""Audit events to systemd-journald, by its native protocol (systemd.io/JOURNAL_NATIVE_PROTOCOL): a datagram an entry.

The lines come from workers, of which one may be captured: it chooses neither the names of an entry's own fields, nor
where a field ends, since a value with a newline is sent with its length.
"""

import errno
import os
import re
import socket
import struct

import msgspec

from proxy.common.errors import ConfigError
from proxy.runtime.observability.audit import LINE_BYTES_MAX

JOURNAL_SOCKET = "/run/systemd/journal/socket"
IDENTIFIER = "pulsar-trio-proxy"
PREFIX = "PULSAR_PROXY_"
SEND_TIMEOUT_S = 1.0
"""How long one entry waits for room in the journal's queue, before it and those that were read with it are lost."""

FIELDS_MAX = 32
_NAME = re.compile(r"[a-z][a-z0-9_]{0,40}")
_IN_MESSAGE = ("client", "principal", "target", "cause", "reason")
_NOBODY_THERE = frozenset({errno.ECONNREFUSED, errno.ECONNRESET, errno.ENOTCONN, errno.EPIPE})
_INFO, _WARNING = 6, 4
_WARNINGS = frozenset({"authentication_failure", "authentication_refresh_failure", "connection_refused"})


def open_journal() -> int:
    """Return the descriptor of a socket connected to the journal. Raises ConfigError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    try:
        sock.connect(JOURNAL_SOCKET)
    except OSError as error:
        sock.close()
        raise ConfigError(f'audit.output: "journald" cannot be used: {JOURNAL_SOCKET}: {error.strerror}') from None
    return sock.detach()


def is_journal(descriptor: int) -> bool:
    """Return whether a descriptor is of ``open_journal``; standard output may be another kind of socket."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as sock:
            return sock.family == socket.AF_UNIX and sock.type == socket.SOCK_DGRAM
    except OSError:
        return False


def journal_entry(line: bytes) -> bytes:
    """Return the datagram for an event, a line of JSON. Raises ValueError for one that no worker of ours writes."""
    if len(line) > LINE_BYTES_MAX:
        raise ValueError("the line is too long")
    event = msgspec.json.decode(line, type=dict[str, str | int])
    if len(event) > FIELDS_MAX or not all(map(_NAME.fullmatch, event)):
        raise ValueError("these are no names of fields")
    name = str(event.get("event", ""))
    shown = [name, *(f"{key}={event[key]}" for key in _IN_MESSAGE if key in event)]
    fields = {
        "MESSAGE": " ".join(shown),
        "PRIORITY": str(_WARNING if name in _WARNINGS else _INFO),
        "SYSLOG_IDENTIFIER": IDENTIFIER,
        **{f"{PREFIX}{key.upper()}": str(value) for key, value in event.items()},
    }
    return b"".join(_encoded(key, value.encode()) for key, value in fields.items())


def _encoded(name: str, value: bytes) -> bytes:
    if b"\n" in value:
        return b"%b\n%b%b\n" % (name.encode(), struct.pack("<Q", len(value)), value)
    return b"%b=%b\n" % (name.encode(), value)


def write_to_journal(descriptor: int, lines: bytes) -> tuple[int, str]:
    """Send lines, each as an entry, and close the descriptor; return how many bytes of them were lost, and why.

    An entry that finds no room within SEND_TIMEOUT_S ends it. Connects again to a restarted journal.
    """
    lost, why = 0, ""
    with socket.socket(fileno=descriptor) as sock:
        sock.settimeout(SEND_TIMEOUT_S)
        left = lines.splitlines(keepends=True)
        for index, line in enumerate(left):
            try:
                entry = journal_entry(line)
            except ValueError:
                lost, why = lost + len(line), "an event is malformed"
                continue
            try:
                _send(sock, entry)
            except OSError as error:
                return lost + sum(map(len, left[index:])), error.strerror or "the journal takes no entries"
    return lost, why


def _send(sock: socket.socket, entry: bytes) -> None:
    try:
        sock.send(entry)
    except OSError as error:
        if error.errno not in _NOBODY_THERE:
            raise
        sock.connect(JOURNAL_SOCKET)
        sock.send(entry)
