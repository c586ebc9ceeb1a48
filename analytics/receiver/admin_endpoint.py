"""The operators' pages: /metrics, /healthz, /readyz."""

import trio

from analytics.receiver.metrics import Metrics
from analytics.spool.records import SpoolError
from analytics.spool.segments import list_segment_numbers
from analytics.spool.writer import SpoolWriter
from proxy.common.http_server import HttpRequest, HttpResponse

INSPECT_INTERVAL_S = 1.0


class AdminEndpoint:
    """Endpoint for operators. Ready means that the spool is writable and the receiver is not shutting down."""

    def __init__(self, writer: SpoolWriter, metrics: Metrics) -> None:
        self.draining = False
        self._writer = writer
        self._metrics = metrics
        self._inspected_at = float("-inf")
        self._trouble: str | None = None

    async def respond(self, request: HttpRequest) -> HttpResponse:
        """Return the page; 404 or 405 for other pages and methods."""
        if request.path not in {"/metrics", "/healthz", "/readyz"}:
            return HttpResponse(404, b"there are /metrics, /healthz and /readyz\n")
        if request.method != "GET":
            return HttpResponse(405, b"only GET\n", headers=(("Allow", "GET"),))
        if request.path == "/healthz":
            return HttpResponse(200, b"ok\n")
        trouble = await self._current_trouble()
        if request.path == "/metrics":
            return HttpResponse(200, self._metrics.text())
        return HttpResponse(200, b"ready\n") if trouble is None else HttpResponse(503, f"{trouble}\n".encode())

    async def _current_trouble(self) -> str | None:
        """Return why the receiver is not ready, or None; inspects the disk at most once a second."""
        now = trio.current_time()
        if now - self._inspected_at >= INSPECT_INTERVAL_S:
            self._inspected_at = now
            self._trouble = await trio.to_thread.run_sync(self._inspect_spool)
        trouble = "the receiver is shutting down" if self.draining else self._trouble
        self._metrics.ready.set(trouble is None)
        return trouble

    def _inspect_spool(self) -> str | None:
        try:
            self._writer.check_writable()
            trouble = None
        except SpoolError as error:
            trouble = str(error)
        self._metrics.spool_bytes.set(self._writer.total_bytes)
        self._metrics.spool_free_bytes.set(self._writer.free_bytes())
        self._metrics.spool_unconsumed_segments.set(len(list_segment_numbers(self._writer.directory)))
        return trouble
