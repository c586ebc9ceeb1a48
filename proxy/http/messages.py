"""HTTP/1.1 messages on a stream: heads and chunked bodies are h11's, bodies of a known length are counted here.

A head is cut from the stream at its blank line before h11 sees it, so its bound is exact, and no byte after it is
looked at before the message's framing is known. What goes out is composed here from headers that h11 has parsed.
"""

import re
import select
import socket
from collections.abc import Callable, Iterable
from typing import Final

import h11
import trio

from proto.http_rules import Headers
from proxy.common.eager import Readable
from proxy.common.errors import ProxyError
from proxy.runtime.loop.reactor import Reactor
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.network.tls import TlsStream

PORTION_BYTES: Final = 65_536
"""Most bytes of a body that are received, and held, at once."""

CHUNKS_BYTES: Final = 16_384
"""The same of a chunked body."""

CHUNKS_MAX: Final = 256
"""Most chunks that are parsed at once: one takes as long as some KiB of a large one."""

_BLANK_LINE = b"\r\n\r\n"
_FINAL_STATUS = re.compile(rb"HTTP/1\.1 [2-5]")
_LINE_END = re.compile(rb"[\r\n\0]")


class MessageMalformed(ProxyError):
    """The peer violates HTTP. ``status``: for a client that does."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


class MessageCut(ProxyError):
    """The peer has closed the connection within a message, or the connection has broken."""


HttpStream = TcpStream | TlsStream


class MessageStream(Readable):
    """A stream with what was received of it and not used yet. ``transport``: below TLS, where there is TLS."""

    def __init__(self, stream: HttpStream, *, head_bytes_max: int) -> None:
        self.stream = stream
        self.transport = stream.transport if isinstance(stream, TlsStream) else stream
        self.unread = b""
        self.on_readable: Callable[[], None] | None = None
        self._reactor: Reactor | None = None
        self.head_bytes_max = head_bytes_max

    @property
    def is_silent(self) -> bool:
        """Whether the peer has sent nothing that is unread, not even the connection's end."""
        if not self.is_plain:  # cheaper than isinstance of an abstract class
            stream = self.stream
            assert isinstance(stream, TlsStream)
            self.unread += stream.take_read_ahead()
            if stream.session.unread:
                return False
        if self.unread:
            return False
        try:
            self.transport.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    @property
    def is_plain(self) -> bool:
        """Whether there is no TLS."""
        return self.stream is self.transport

    async def receive(self, size_bytes: int = PORTION_BYTES) -> bytes:
        """Receive what is there; empty at the end. Raises MessageCut where the connection has broken."""
        try:
            return bytes(await self.stream.receive_some(size_bytes))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise MessageCut(str(error)) from None

    async def receive_awaited(self, size_bytes: int) -> bytes:
        """Do the same where nothing can be there yet: wait first, without a system call that would find nothing."""
        if self.stream is not self.transport:
            return await self.receive(size_bytes)
        sock = self.transport.socket
        try:
            while True:
                await trio.lowlevel.wait_readable(sock)
                try:
                    return sock.recv(size_bytes)
                except BlockingIOError:
                    pass  # there was no reason to wake up
        except (OSError, trio.ClosedResourceError) as error:
            raise MessageCut(str(error)) from None

    async def send(self, data: bytes | memoryview) -> None:
        """Send all. Raises MessageCut."""
        try:
            await self.stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise MessageCut(str(error)) from None

    def send_now(self, data: bytes) -> bytes:
        """Send what there is room for, without waiting; return the rest, which is all of it with TLS.

        Most messages are sent whole so, for which a scope with a deadline and a checkpoint would cost more than the
        system call. Raises MessageCut.
        """
        if self.stream is not self.transport:
            return data
        try:
            sent = self.transport.socket.send(data)
        except BlockingIOError:
            return data
        except OSError as error:
            raise MessageCut(str(error)) from None
        return b"" if sent == len(data) else data[sent:]

    async def fill(self, size_bytes: int = PORTION_BYTES) -> bool:
        """Receive more into ``unread``; return False at the end of the stream."""
        data = await self.receive_awaited(size_bytes)
        self.unread = self.unread + data if self.unread else data
        return bool(data)

    def receive_final_head_now(self) -> bool:
        """Receive what is there into ``unread``, where there is no TLS; return whether ``receive_head`` now has the
        whole head of a response that is none of 1xx. An end, or an error, is found again by ``receive``.
        """
        try:
            self.unread += self.transport.socket.recv(PORTION_BYTES)
        except OSError:
            return False
        return _BLANK_LINE in self.unread and _FINAL_STATUS.match(self.unread) is not None

    async def receive_head(self) -> bytes:
        """Receive a head with its blank line; empty where the peer has closed before any byte of it.

        Raises MessageMalformed for one that is too large, or has lines that do not end in CRLF; MessageCut.
        """
        while (head := self.take_head()) is None:
            if not await self.fill(self.head_bytes_max - len(self.unread)):
                if self.unread:
                    raise MessageCut("closed within a head")
                return b""
        return head

    def take_head(self) -> bytes | None:
        """Return a head that has been received already; None where its end is missing. Raises MessageMalformed."""
        end = self.unread.find(_BLANK_LINE, 0, self.head_bytes_max)
        if end < 0:
            if len(self.unread) >= self.head_bytes_max:
                raise MessageMalformed("the head is too large", 431)
            return None
        end += len(_BLANK_LINE)
        head, self.unread = self.unread[:end], self.unread[end:]
        lines = head.count(b"\r\n")
        if head.count(b"\n") != lines or head.count(b"\r") != lines:
            raise MessageMalformed("a line of the head does not end in CRLF")
        return head

    def call_when_readable(self, reactor: Reactor, on_readable: Callable[[], None]) -> None:
        """Call a function once the peer has sent more, until ``on_readable`` is unset. May be called for nothing.

        The socket stays with the reactor until ``close``: this is for one from which many messages are awaited. Raises
        OSError where the kernel has no room for that.
        """
        if self._reactor is None:
            reactor.watch(self.transport.socket.fileno(), select.EPOLLIN | select.EPOLLET, self._call_back)
            self._reactor = reactor
        self.on_readable = on_readable

    def _call_back(self) -> None:
        if self.on_readable is not None:
            self.on_readable()

    def close(self) -> None:
        """Close the connection at once, without waiting; may be repeated."""
        if self._reactor is not None:
            self._reactor.forget(self.transport.socket.fileno())
            self._reactor = None
        self.transport.close_now()

    def skip_empty_line(self) -> None:
        """Drop one CRLF before a request (RFC 9112, 2.2)."""
        if self.unread.startswith(b"\r\n"):
            self.unread = self.unread[2:]


class Body:
    """A body that has ended: an empty one. ``size_bytes``: what of it was received."""

    length: int | None = 0

    def __init__(self) -> None:
        self.size_bytes = 0
        self.ended = True

    @property
    def is_received(self) -> bool:
        """Whether ``take_received`` is known to return all that is left."""
        return self.ended

    async def receive(self) -> bytes:
        """Return the next portion; empty at the end. Raises MessageCut, MessageMalformed."""
        return b""

    def take_received(self) -> bytes:
        """Return what has been received of it already; without waiting, so maybe nothing."""
        return b""


class SizedBody(Body):
    """A body of a known length. Not a byte behind it is received."""

    def __init__(self, source: MessageStream, length: int) -> None:
        super().__init__()
        self._source = source
        self.length = length
        self._left = length
        self.ended = not length

    @property
    def is_received(self) -> bool:
        """Whether ``take_received`` returns all that is left."""
        return len(self._source.unread) >= self._left

    def take_received(self) -> bytes:
        """Take it without waiting."""
        source = self._source
        if not source.unread or not self._left:
            return b""
        data = source.unread if len(source.unread) <= self._left else source.unread[: self._left]
        source.unread = source.unread[len(data) :]
        self._count(data)
        return data

    async def receive(self) -> bytes:
        """Receive a portion."""
        if not self._left:
            return b""
        if self._source.unread:
            return self.take_received()
        data = await self._source.receive(min(self._left, PORTION_BYTES))
        if not data:
            raise MessageCut("closed within a body")
        self._count(data)
        return data

    def _count(self, data: bytes) -> None:
        self._left -= len(data)
        self.size_bytes += len(data)
        self.ended = not self._left


class ChunkedBody(Body):
    """A chunked body, by the h11 connection that has parsed its head. Extensions and trailers are dropped."""

    length = None

    def __init__(self, source: MessageStream, http: h11.Connection) -> None:
        super().__init__()
        self._source = source
        self._http = http
        self._has_more = False
        self.ended = False

    def take_received(self) -> bytes:
        """Take it without waiting."""
        source = self._source
        if self.ended or not (source.unread or self._has_more):
            return b""
        if source.unread:
            self._http.receive_data(source.unread)
            source.unread = b""
        return self._next_portion()

    async def receive(self) -> bytes:
        """Receive the data of the chunks that have come, up to CHUNKS_MAX."""
        if self._has_more:
            await trio.lowlevel.checkpoint()  # not after they are taken: a cancellation would lose them
        portion = self.take_received()
        while not portion and not self.ended:
            data = await self._source.receive(CHUNKS_BYTES)
            if not data:
                raise MessageCut("closed within a body")
            self._http.receive_data(data)
            portion = self._next_portion()
        return portion

    def _next_portion(self) -> bytes:
        parts: list[bytes] = []
        try:
            while type(event := self._http.next_event()) is h11.Data:
                parts.append(bytes(event.data))
                if len(parts) == CHUNKS_MAX:
                    break
        except h11.RemoteProtocolError as error:
            raise MessageMalformed(f"the body's chunks are malformed: {error}") from None
        self._has_more = type(event) is h11.Data
        if type(event) is h11.EndOfMessage:
            self.ended = True
            self._source.unread = self._http.trailing_data[0]
        portion = parts[0] if len(parts) == 1 else b"".join(parts)
        self.size_bytes += len(portion)
        return portion


class BodyUntilClose(Body):
    """A response's body that ends where the connection does."""

    length = None

    def __init__(self, source: MessageStream) -> None:
        super().__init__()
        self._source = source
        self.ended = False

    def take_received(self) -> bytes:
        """Take it without waiting."""
        data, self._source.unread = self._source.unread, b""
        self.size_bytes += len(data)
        return data

    async def receive(self) -> bytes:
        """Receive a portion."""
        if self._source.unread:
            return self.take_received()
        data = b"" if self.ended else await self._source.receive()
        stream = self._source.stream
        if not data and isinstance(stream, TlsStream) and stream.was_cut:
            raise MessageCut("the end of TLS is missing, so part of the body may be")  # RFC 9112, 9.8
        self.ended = not data
        self.size_bytes += len(data)
        return data


def request_line(method: bytes, target: bytes) -> bytes:
    """Return the first line of a request."""
    return b"%b %b HTTP/1.1" % (method, target)


def compose_head(first_line: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return a head. Raises ValueError where a value would end its line: its maker has not checked it."""
    return join_head(first_line, compose_headers(headers))


def compose_headers(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return a head's lines behind the first one. Raises ValueError as ``compose_head``."""
    lines = [*(b"%b: %b" % header for header in headers), b"", b""]
    block = b"\r\n".join(lines)
    if block.count(b"\n") != len(lines) - 1 or block.count(b"\r") != len(lines) - 1 or b"\0" in block:
        raise ValueError("a header holds a line's end or NUL")
    return block


def join_head(first_line: bytes, block: bytes) -> bytes:
    """Return a head of its first line and what ``compose_headers`` returned. Raises ValueError as ``compose_head``."""
    if _LINE_END.search(first_line):
        raise ValueError("a first line holds a line's end or NUL")
    return b"%b\r\n%b" % (first_line, block)


def chunk_of(data: bytes) -> bytes:
    """Return a chunk that holds the data, which is not empty."""
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_CHUNK: Final = b"0\r\n\r\n"


def without(headers: Headers, names: frozenset[bytes]) -> Headers:
    """Return the headers but those of these names."""
    return [one for one in headers if one[0] not in names]


def parse_head(http: h11.Connection, head: bytes) -> h11.Event:
    """Parse a whole head. Raises MessageMalformed."""
    try:
        http.receive_data(head)
        event = http.next_event()
    except h11.RemoteProtocolError as error:
        raise MessageMalformed(str(error), error.error_status_hint) from None
    if not isinstance(event, h11.Event):
        raise MessageMalformed("this is no head")
    return event
