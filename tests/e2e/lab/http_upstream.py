"""A plain HTTP server in this process, for what no broker can be made to do."""

from __future__ import annotations

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

PORTION_BYTES = 1 << 16
MIB = 1 << 20


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Say nothing of connections that have gone."""


class HttpUpstream:
    """GET `/tools/held` is answered only when told; GET `/tools/large/N` with N MiB; PUT with the body's digest; any
    other GET at once. Connections are kept alive.
    """

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self._held: list[str] = []
        upstream = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                upstream._get(self)

            def do_PUT(self) -> None:
                upstream._put(self)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.port: int = self._server.server_address[1]

    @property
    def held(self) -> int:
        """How many are waiting for `may_answer`, or have waited."""
        return len(self._held)

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.may_answer.set()
        self._server.shutdown()
        self._server.server_close()

    def _get(self, handler: BaseHTTPRequestHandler) -> None:
        what, _, number = handler.path.removeprefix("/tools/").partition("/")
        size = int(number) * MIB if what == "large" else 0
        if what == "held":
            self._held.append(handler.path)
            self.may_answer.wait()
        self._answer(handler, size or len(handler.path))
        if not size:
            handler.wfile.write(handler.path.encode())
        for _ in range(size // PORTION_BYTES):
            handler.wfile.write(bytes(PORTION_BYTES))

    def _put(self, handler: BaseHTTPRequestHandler) -> None:
        left, digest = int(handler.headers["Content-Length"]), hashlib.sha256()
        while left and (data := handler.rfile.read1(min(left, PORTION_BYTES))):  # type: ignore[attr-defined]
            digest.update(data)
            left -= len(data)
        self._answer(handler, digest.digest_size)
        handler.wfile.write(digest.digest())

    @staticmethod
    def _answer(handler: BaseHTTPRequestHandler, size: int) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(size))
        handler.end_headers()
