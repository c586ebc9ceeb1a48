"""The operators' listener: /metrics, /healthz, /readyz."""

import trio

from analytics.receiver.http import Head, Response
from analytics.receiver.metrics import Metrics
from analytics.spool.records import SpoolError
from analytics.spool.retention import unconsumed_segments
from analytics.spool.writer import SpoolWriter

LOOK_INTERVAL_S = 1.0


class Probes:
    """Endpoint of the operators' listener. Ready means: the spool takes writes, and nobody told the receiver to end."""

    def __init__(self, writer: SpoolWriter, metrics: Metrics) -> None:
        self.body_bytes_max = 0
        self.draining = False
        self._writer = writer
        self._metrics = metrics
        self._looked_at = float("-inf")
        self._trouble: str | None = None

    async def admit(self, head: Head) -> Response | None:
        """Whether there is such a page."""
        if head.path not in {"/metrics", "/healthz", "/readyz"}:
            return Response(404, "there are /metrics, /healthz and /readyz")
        return None if head.method == "GET" else Response(405, "only GET", [("Allow", "GET")])

    async def answer(self, head: Head, body: bytes) -> Response:  # noqa: ARG002 -- there is none
        """The page."""
        if head.path == "/healthz":
            return Response(200, "ok\n")
        trouble = await self._current_trouble()
        if head.path == "/metrics":
            return Response(200, self._metrics.text())
        return Response(200, "ready\n") if trouble is None else Response(503, f"{trouble}\n")

    def refuse(self, head: Head | None, response: Response) -> Response:  # noqa: ARG002
        """As it is."""
        return response

    async def _current_trouble(self) -> str | None:
        """Why the receiver is not ready; the disk is asked once a second at most."""
        now = trio.current_time()
        if now - self._looked_at >= LOOK_INTERVAL_S:
            self._looked_at = now
            self._trouble = await trio.to_thread.run_sync(self._look)
        trouble = "the receiver is about to end" if self.draining else self._trouble
        self._metrics.ready.set(trouble is None)
        return trouble

    def _look(self) -> str | None:
        try:
            self._writer.check()
            trouble = None
        except SpoolError as error:
            trouble = str(error)
        self._metrics.spool_bytes.set(self._writer.total_bytes)
        self._metrics.spool_free_bytes.set(self._writer.free_bytes())
        self._metrics.spool_unconsumed_segments.set(unconsumed_segments(self._writer.directory))
        return trouble
