"""OpenSSL's own client and server, with the commands of their standard input, and a tap on a TCP connection."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
from types import TracebackType
from typing import IO, Self

from .waiting import eventually

_READ_BYTES = 1 << 16
_REPORT = b"SSL_do_handshake -> 1\n"
"""Of s_server, amid what it has received."""


class OpenSsl:
    """``openssl`` with these arguments: what it receives, and what it reports.

    Its standard input is what it sends; but a chunk that it reads there and that begins with a letter may be a command.
    So wait for an effect of what was sent before ``order``, and send digits.
    """

    def __init__(self, *arguments: str) -> None:
        self.output, self.report = bytearray(), bytearray()
        self._process = subprocess.Popen(
            ["openssl", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        pairs = (self._process.stdout, self.output), (self._process.stderr, self.report)
        self._readers = [threading.Thread(target=_keep, args=pair, daemon=True) for pair in pairs]

    def __enter__(self) -> Self:
        for reader in self._readers:
            reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        for reader in self._readers:
            reader.join()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def send(self, data: bytes) -> None:
        """Have it send these bytes."""
        assert self._process.stdin is not None
        rest = memoryview(data)
        while rest:
            rest = rest[self._process.stdin.write(rest) :]

    def order(self, letter: str, sent: bytearray) -> None:
        """Give it a command, and wait until something has come of it: ``sent``, of a tap, is what it sends."""
        before = len(sent)
        self.send(f"{letter}\n".encode())
        eventually(lambda: len(sent) > before, what=f"{letter} has an effect: {self}")

    def wait_for_output(self, data: bytes) -> None:
        """Wait until it has received these bytes, one behind the other."""
        eventually(lambda: data in self.output.replace(_REPORT, b""), what=f"{len(data)} bytes have come: {self}")

    def wait_for_end(self) -> None:
        """Wait until it ends by itself."""
        eventually(lambda: self._process.poll() is not None, what=f"openssl ends: {self}")

    def __str__(self) -> str:
        return f"{bytes(self.report[-500:])!r}, {bytes(self.output[-200:])!r}"


def _keep(stream: IO[bytes], kept: bytearray) -> None:
    while data := stream.read(_READ_BYTES):
        kept += data


class Tap:
    """Listens, connects each client to ``port``, and keeps every byte of both ways.

    ``held``: what clients send is kept back until ``release``, and goes on in one piece then.
    """

    def __init__(self, port: int, own_port: int = 0) -> None:
        self.from_client, self.from_server = bytearray(), bytearray()
        self.held = bytearray()
        self._port = port
        self._holds = False
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", own_port))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def hold(self) -> None:
        """Keep back what the client sends from now on. Only with one client."""
        with self._lock:
            self._holds = True

    def release(self) -> None:
        """Send what was kept back, all at once."""
        with self._lock:
            self._holds = False
            self._sockets[1].sendall(self.held)
            self.held.clear()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                self._sockets += (client, server)
                for source, sink in ((client, server), (server, client)):
                    heard = self.from_client if source is client else self.from_server
                    threading.Thread(target=self._pass_on, args=(source, sink, heard), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, heard: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_READ_BYTES):
                with self._lock:
                    heard += data
                    is_held = self._holds and heard is self.from_client
                    if is_held:
                        self.held += data
                if not is_held:
                    sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
