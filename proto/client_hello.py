"""The ClientHello: the name that a TLS client asks for, read without taking part in the handshake (RFC 8446, RFC 6066).

A hello may be split over TCP segments, and over several TLS records. Nothing is decided but at the end of a record's
header or of a whole record, so the outcome depends on the bytes alone, never on how they were split. Of an Encrypted
ClientHello the outer name counts, which is what its client shows to anyone on the way.
"""

import re
from dataclasses import dataclass

from proto.errors import ProtoError

HELLO_BYTES_MAX = 16 * 1024
"""Bound of the records up to the end of the hello, their headers included."""

DECODE_ERROR = 50
PROTOCOL_VERSION = 70
INTERNAL_ERROR = 80
UNRECOGNIZED_NAME = 112
"""Alerts (RFC 8446, 6; RFC 6066, 3)."""

_HANDSHAKE_RECORD = 22
_CLIENT_HELLO = 1
_RECORD_HEADER_BYTES = 5
_HANDSHAKE_HEADER_BYTES = 4
_RANDOM_BYTES = 32
_SERVER_NAME = 0
_RECORD_SIZE_LIMITS = frozenset({1, 28})
"""max_fragment_length (RFC 6066, 4), record_size_limit (RFC 8449)."""
_HOST_NAME = 0
_NAME_BYTES_MAX = 253  # DNS: RFC 1035, section 2.3.4
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?\Z")
_NUMBER = re.compile(r"([0-9]+|0[xX][0-9A-Fa-f]*)\Z")
"""A last label by which resolvers read a whole name as an IPv4 address: ``127.1``, ``0x7f000001``."""


@dataclass(frozen=True, slots=True)
class HelloRefused:
    """A hello that is not taken. ``reason``: a short stable name; ``alert``: what its client is told; ``name``: the one
    asked for, where it was read, as it came.
    """

    reason: str
    alert: int
    detail: str
    name: str = ""


class ClientHelloParser:
    """Parser of the start of one connection. ``received`` has all bytes, exactly as they came."""

    __slots__ = ("_handshake", "_outcome", "_position", "received")

    def __init__(self) -> None:
        self.received = bytearray()
        self._position = 0
        self._handshake = bytearray()
        self._outcome: str | HelloRefused | None = None

    def receive_data(self, data: bytes | bytearray) -> str | HelloRefused | None:
        """Take what was received; return the host name in lower case, or why there is none; None: more is needed."""
        self.received += data
        if self._outcome is None:
            try:
                self._outcome = self._parse_records()
            except _Refusal as refusal:
                self._outcome = refusal.refused
        return self._outcome

    @property
    def hello(self) -> bytes:
        """The ClientHello's message, once its name has been returned: the same however it was split over records."""
        return bytes(self._handshake)

    def _parse_records(self) -> str | None:
        received = self.received
        while len(received) >= (start := self._position + _RECORD_HEADER_BYTES):
            kind, major = received[self._position], received[self._position + 1]
            end = start + int.from_bytes(received[start - 2 : start])
            if kind != _HANDSHAKE_RECORD:
                raise _malformed(f"a record of type {kind}")
            _check_version(major)
            if end == start:
                raise _malformed("an empty record")
            if end > HELLO_BYTES_MAX:
                raise _too_large()
            if len(received) < end:
                return None
            self._handshake += received[start:end]
            self._position = end
            if (name := self._parse_handshake()) is not None:
                return name
        return None

    def _parse_handshake(self) -> str | None:
        message = self._handshake
        if message[0] != _CLIENT_HELLO:
            raise _malformed(f"a handshake message of type {message[0]}")
        if len(message) < _HANDSHAKE_HEADER_BYTES:
            return None
        end = _HANDSHAKE_HEADER_BYTES + int.from_bytes(message[1:_HANDSHAKE_HEADER_BYTES])
        if end > HELLO_BYTES_MAX:
            raise _too_large()
        if len(message) > end:
            raise _malformed("bytes behind the ClientHello in its record")
        return _name_in_hello(bytes(message[_HANDSHAKE_HEADER_BYTES:])) if len(message) == end else None


def alert_record(alert: int) -> bytes:
    """Return a fatal alert as an unencrypted record."""
    return bytes((21, 3, 3, 0, 2, 2, alert))


class _Refusal(ProtoError):
    def __init__(self, refused: HelloRefused) -> None:
        super().__init__(refused.detail)
        self.refused = refused


def _malformed(detail: str) -> _Refusal:
    return _Refusal(HelloRefused("malformed", DECODE_ERROR, detail))


def _too_large() -> _Refusal:
    return _Refusal(HelloRefused("too_large", DECODE_ERROR, f"a ClientHello of more than {HELLO_BYTES_MAX} bytes"))


def _check_version(major: int) -> None:
    if major != 3:  # noqa: PLR2004 -- SSL 3.0 and all of TLS
        raise _Refusal(HelloRefused("version", PROTOCOL_VERSION, f"a version {major}.x, which is no TLS"))


class _Fields:
    """Reader of a message's fields; each must fit."""

    __slots__ = ("_data", "_position")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def __bool__(self) -> bool:
        return self._position < len(self._data)

    def take(self, size: int) -> bytes:
        end = self._position + size
        if end > len(self._data):
            raise _malformed("a field that is longer than what it is in")
        taken, self._position = self._data[self._position : end], end
        return taken

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size))

    def vector(self, size_bytes: int, *, shortest: int = 0) -> bytes:
        value = self.take(self.number(size_bytes))
        if len(value) < shortest:
            raise _malformed("a field that is too short")
        return value

    def end(self) -> None:
        if self:
            raise _malformed("bytes behind the last field")


def limits_record_size(handshake: bytes) -> bool:
    """Return whether a ClientHello asks for smaller records than usual; False for the beginning of one."""
    try:
        extensions = _extensions_of(handshake[_HANDSHAKE_HEADER_BYTES:])
    except _Refusal:
        return False
    return any(kind in _RECORD_SIZE_LIMITS for kind, _value in extensions)


def _extensions_of(hello: bytes) -> list[tuple[int, bytes]]:
    """Return the extensions of a ClientHello, by their types (RFC 8446, 4.1.2). Raises _Refusal."""
    fields = _Fields(hello)
    _check_version(fields.number(2) >> 8)
    fields.take(_RANDOM_BYTES)
    if len(fields.vector(1)) > 32:  # noqa: PLR2004
        raise _malformed("a session id of more than 32 bytes")
    if len(fields.vector(2, shortest=2)) % 2:
        raise _malformed("half a cipher suite")
    fields.vector(1, shortest=1)
    extensions = _Fields(fields.vector(2) if fields else b"")
    fields.end()
    found = []
    while extensions:
        kind = extensions.number(2)
        found.append((kind, extensions.vector(2)))
    return found


def _name_in_hello(hello: bytes) -> str:
    """Return the host name that a ClientHello asks for (RFC 6066). Raises _Refusal."""
    names = [value for kind, value in _extensions_of(hello) if kind == _SERVER_NAME]
    if not names:
        raise _Refusal(HelloRefused("no_name", UNRECOGNIZED_NAME, "the ClientHello names no server"))
    if len(names) > 1:
        raise _malformed("two extensions with a server's name")
    return _host_name(names[0])


def _host_name(extension: bytes) -> str:
    """Return the one name of a server_name extension (RFC 6066, 3), in lower case. Raises _Refusal."""
    entries = _Fields(extension)
    listed = _Fields(entries.vector(2, shortest=1))
    entries.end()
    if (kind := listed.number(1)) != _HOST_NAME:
        raise _malformed(f"a server's name of type {kind}")
    raw = listed.vector(2, shortest=1)
    listed.end()
    name = raw.decode("latin-1")
    labels = name.split(".")
    if len(name) > _NAME_BYTES_MAX or not all(map(_LABEL.match, labels)):
        raise _bad_name(name, "no valid host name")
    if _NUMBER.match(labels[-1]):
        raise _bad_name(name, "an IP address")
    return name.lower()


def _bad_name(name: str, what: str) -> _Refusal:
    shown = name[:_NAME_BYTES_MAX]
    return _Refusal(HelloRefused("bad_name", UNRECOGNIZED_NAME, f"the server's name is {what}", shown))
