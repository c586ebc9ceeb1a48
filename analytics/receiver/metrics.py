"""The receiver's own metrics. No label can grow without bound."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

_PREFIX = "pulsar_proxy_analytics_receiver_"
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_GROUP = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)


class Metrics:
    """One process's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.requests = self._counter("requests", "Answered requests.", "version", "code")
        self.request_seconds = self._histogram(
            "request_seconds", "From the end of a write request's body to its response.", _SECONDS
        )
        self.samples = self._counter("samples", "Samples committed, stale markers among them.", "version")
        self.histograms = self._counter("histograms", "Native histograms committed.", "version")
        self.exemplars = self._counter("exemplars", "Exemplars committed; the ingest job leaves them out.", "version")
        self.faulty_series = self._counter("faulty_series", "Series left out because they can never be accepted.")
        self.compressed_bytes = self._counter("compressed_bytes", "Bytes of bodies as they were sent.", "version")
        self.decompressed_bytes = self._counter("decompressed_bytes", "Bytes of bodies, decompressed.", "version")
        self.rejected = self._counter("rejected_requests", "Write requests that were not committed.", "reason")
        self.beyond_bounds = self._counter(
            "beyond_bounds", "Requests, or series of otherwise good requests, that exceeded a bound.", "bound"
        )
        self.large_requests = self._counter("large_requests", "Requests decoded in the thread for large ones.")
        self.held_bytes = self._gauge("held_request_bytes", "Bytes of requests without a response yet.")
        self.connections = self._gauge("connections", "Open connections of senders.")
        self.connections_refused = self._counter("connections_refused", "Connections closed at once: too many.")
        self.connections_displaced = self._counter(
            "connections_displaced", "Connections closed in favour of newer ones."
        )
        self.tls_failures = self._counter("tls_handshake_failures", "TLS handshakes that did not succeed.")
        self.commit_seconds = self._histogram("commit_seconds", "Write and fdatasync of one group.", _SECONDS)
        self.group_requests = self._histogram("commit_group_requests", "Requests in one group.", _GROUP)
        self.spool_bytes = self._gauge("spool_bytes", "Size of the spool's segments.")
        self.spool_unconsumed_segments = self._gauge(
            "spool_unconsumed_segments", "Segments that the ingest job has not removed."
        )
        self.spool_free_bytes = self._gauge("spool_disk_free_bytes", "Free bytes on the spool's file system.")
        self.spool_damages = self._gauge("spool_damages", "Damaged places found in the newest segment at the start.")
        self.ready = self._gauge("ready", "1 if the spool was writable at the last check, else 0.")

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{_PREFIX}{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"{_PREFIX}{name}", text, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"{_PREFIX}{name}", text, buckets=buckets, registry=self.registry)
