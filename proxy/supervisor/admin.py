"""The HTTP port for operators, Prometheus and Kubernetes: an ASGI application, served by Hypercorn."""

import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import hypercorn.trio
import msgspec
from hypercorn.config import Config as HypercornConfig
from prometheus_client import CONTENT_TYPE_LATEST

from proxy.supervisor.report import Report

JSON = "application/json"
TEXT = "text/plain; charset=utf-8"

Answer = tuple[int, str, bytes]


class AdminApplication:
    """GET /metrics, /healthz, /readyz, /status."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._paths: dict[str, Callable[[], Awaitable[Answer]]] = {
            "/metrics": self._metrics,
            "/healthz": self._healthz,
            "/readyz": self._readyz,
            "/status": self._status,
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """ASGI's entry."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            return
        status, content_type, body = await self._answer(scope["method"], scope["path"])
        headers = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    async def _answer(self, method: str, path: str) -> Answer:
        handler = self._paths.get(path)
        if handler is None:
            return 404, TEXT, f"there is no such path; try {', '.join(self._paths)}\n".encode()
        if method not in {"GET", "HEAD"}:
            return 405, TEXT, b"only GET\n"
        return await handler()

    async def _metrics(self) -> Answer:
        return 200, CONTENT_TYPE_LATEST, await self._report.metrics()

    async def _healthz(self) -> Answer:
        return 200, TEXT, b"ok\n"

    async def _readyz(self) -> Answer:
        reasons = await self._report.not_ready_reasons()
        return (503, TEXT, "".join(f"{reason}\n" for reason in reasons).encode()) if reasons else (200, TEXT, b"ok\n")

    async def _status(self) -> Answer:
        status = await self._report.status()
        return 200, JSON, msgspec.json.format(msgspec.json.encode(status), indent=2) + b"\n"


async def _lifespan(receive: Any, send: Any) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


async def serve_admin(sock: socket.socket, report: Report) -> None:
    """Serve on a bound socket until cancelled."""
    config = HypercornConfig()
    config.bind = [f"fd://{os.dup(sock.fileno())}"]  # Hypercorn closes what it is given
    config.accesslog = None
    config.errorlog = None
    config.include_server_header = False
    config.graceful_timeout = 1
    await hypercorn.trio.serve(AdminApplication(report), config)
