"""The endpoint of the operators' listener: /metrics, /healthz, /readyz."""

import trio

from analytics.receiver.http_server import RequestHead, Response
from analytics.receiver.metrics import Metrics
from analytics.spool.records import SpoolError
from analytics.spool.retention import count_unconsumed_segments
from analytics.spool.writer import SpoolWriter

INSPECT_INTERVAL_S = 1.0


class AdminEndpoint:
    """Endpoint for operators. Ready means that the spool is writable and the receiver is not shutting down."""

    def __init__(self, writer: SpoolWriter, metrics: Metrics) -> None:
        self.body_bytes_max = 0
        self.authenticates = False
        self.draining = False
        self._writer = writer
        self._metrics = metrics
        self._inspected_at = float("-inf")
        self._trouble: str | None = None

    async def check_head(self, head: RequestHead) -> Response | None:
        """Return 404 or 405 for other pages and methods."""
        if head.path not in {"/metrics", "/healthz", "/readyz"}:
            return Response(404, "there are /metrics, /healthz and /readyz")
        return None if head.method == "GET" else Response(405, "only GET", [("Allow", "GET")])

    async def respond(self, head: RequestHead, body: bytes) -> Response:  # noqa: ARG002 -- there is none
        """Return the page."""
        if head.path == "/healthz":
            return Response(200, "ok\n")
        trouble = await self._current_trouble()
        if head.path == "/metrics":
            return Response(200, self._metrics.text())
        return Response(200, "ready\n") if trouble is None else Response(503, f"{trouble}\n")

    def on_refusal(self, head: RequestHead | None, response: Response) -> Response:  # noqa: ARG002
        """Return the response unchanged."""
        return response

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
        self._metrics.spool_unconsumed_segments.set(count_unconsumed_segments(self._writer.directory))
        return trouble
