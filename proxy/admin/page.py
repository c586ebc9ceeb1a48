"""The page at the admin port: three files without any data, and a stream of snapshots for those who may see it.

The stream has the form of server-sent events, but the page reads it with fetch(), since an EventSource cannot send a
token. A snapshot is made once for all viewers, and only while there are any.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

from proxy.common.http_server import HttpRequest, HttpResponse, Send
from proxy.runtime.rpc.errors import RpcError

EVENTS_PATH = "/events"

VIEWERS_MAX = 8
"""Streams at the same time."""

INTERVAL_S = 2.0
"""Between two snapshots."""

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS = (
    ("Content-Security-Policy", _POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
)


def _file(name: str, content_type: str) -> HttpResponse:
    return HttpResponse(200, (Path(__file__).parent / name).read_bytes(), f"{content_type}; charset=utf-8", HEADERS)


PAGE_FILES = {  # read when this is imported: a confined worker opens no files of its own
    "/": _file("page.html", "text/html"),
    "/page.css": _file("page.css", "text/css"),
    "/page.js": _file("page.js", "text/javascript"),
}


class LivePage:
    """The streams of all viewers. ``is_allowed`` checks the ``Authorization`` of each again before each snapshot."""

    def __init__(
        self, overview: Callable[[], Awaitable[str]], is_allowed: Callable[[list[bytes]], Awaitable[bool]]
    ) -> None:
        self._overview = overview
        self._is_allowed = is_allowed
        self.viewers = 0

    async def response(self, request: HttpRequest) -> HttpResponse:
        """Return the stream for one more viewer, where there is room for one."""
        await trio.lowlevel.checkpoint()
        if request.fetch_site not in {b"", b"none", b"same-origin"}:
            return HttpResponse(403, b"only this port's own page may ask for this\n", headers=HEADERS)
        if self.viewers >= VIEWERS_MAX:
            return HttpResponse(503, b"too many viewers\n", headers=(*HEADERS, ("Retry-After", "10")))

        async def stream(send: Send) -> None:
            if self.viewers < VIEWERS_MAX:  # others may have begun since
                self.viewers += 1
                try:
                    await self._send_snapshots(send, request.authorization)
                finally:
                    self.viewers -= 1

        return HttpResponse(200, b"", "text/event-stream", HEADERS, stream)

    async def _send_snapshots(self, send: Send, authorization: list[bytes]) -> None:
        while await self._is_allowed(authorization):
            try:
                event = f"event: snapshot\ndata: {await self._overview()}\n\n"
            except RpcError:
                event = "event: failure\ndata: the supervisor does not answer\n\n"
            await send(event.encode())
            await trio.sleep(INTERVAL_S - trio.current_time() % INTERVAL_S)  # the same moments for all
