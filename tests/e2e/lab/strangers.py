"""Thousands of connections that say nothing, or only the first word of TLS."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import time
from types import TracebackType
from typing import Self

TIMEOUT_S = 60.0
AT_ONCE = 500


def client_hello() -> bytes:
    """The first word of a TLS handshake, after which a client can keep all others waiting."""
    sent = ssl.MemoryBIO()
    context = ssl.create_default_context()
    tls = context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return sent.read()


class Strangers:
    """Connections from one address of the loopback network, which stay for as long as the proxy lets them."""

    def __init__(self, port: int, source: str, first_word: bytes = b"") -> None:
        self.opened = 0
        self._peer = ("127.0.0.1", port)
        self._source = source
        self._first_word = first_word
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in self._sockets:
            one.close()

    def open(self, count: int) -> None:
        """So many more; returns when the kernel has connected them all and they have said their first word."""
        deadline = time.monotonic() + TIMEOUT_S
        while count > 0:
            batch = min(count, AT_ONCE)
            self._open(batch, deadline)
            count -= batch

    def _open(self, count: int, deadline: float) -> None:
        waiting = {}
        poll = select.poll()
        for _ in range(count):
            one = socket.socket()
            one.setblocking(False)
            one.bind((self._source, 0))
            with contextlib.suppress(BlockingIOError):
                one.connect(self._peer)
            self._sockets.append(one)
            waiting[one.fileno()] = one
            poll.register(one, select.POLLOUT)
        while waiting:
            assert time.monotonic() < deadline, f"{len(waiting)} strangers are not connected"
            for number, _ in poll.poll(1000):
                poll.unregister(number)
                one = waiting.pop(number)
                with contextlib.suppress(OSError):
                    one.send(self._first_word)
                self.opened += 1

    def left(self) -> int:
        """How many the proxy has not closed."""
        poll = select.poll()
        for one in self._sockets:
            poll.register(one, select.POLLIN | select.POLLRDHUP)
        closed = {
            number for number, events in poll.poll(0) if events & (select.POLLRDHUP | select.POLLHUP | select.POLLERR)
        }
        return len(self._sockets) - len(closed)
