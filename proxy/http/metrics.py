"""The HTTP worker's metrics. No label takes a value that a client chooses."""

import trio
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from proxy.http.client import RequestRecord
from proxy.runtime.observability.metrics import LATENCY_BUCKETS_S, OTHER, BoundedLabel

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
STATUS_MIN, STATUS_MAX = 100, 599
DURATION_BUCKETS_S = (*LATENCY_BUCKETS_S, 30.0, 60.0, 300.0)
"""The longer ones for uploads of functions, and for what brokers take their time for."""


class HttpMetrics:
    """The metrics of one HTTP worker."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.active_connections = Gauge(
            "pulsar_proxy_http_active_connections", "Clients' HTTP connections open now.", registry=registry
        )
        self.requests_under_way = Gauge(
            "pulsar_proxy_http_requests_under_way", "HTTP requests under way now.", registry=registry
        )
        self.new_connections = Counter(
            "pulsar_proxy_http_new_connections", "Clients' HTTP connections accepted.", registry=registry
        )
        self.closed_connections = Counter(
            "pulsar_proxy_http_closed_connections",
            "Clients' HTTP connections that the proxy closed without a response: from a network that may not connect "
            "(network), without room (max_connections), for another client's (displaced), or without a valid PROXY "
            "header where the listener needs one (proxy_protocol).",
            ["reason"],
            registry=registry,
        )
        self.tls_handshakes = Counter(
            "pulsar_proxy_http_tls_handshakes",
            "TLS handshakes with clients, by the index of the http_listener, result (success, failure) and reason.",
            ["listener", "result", "reason"],
            registry=registry,
        )
        self._requests = Counter(
            "pulsar_proxy_http_requests",
            "HTTP requests that have ended, by route, method and class of their status (2xx).",
            ["route", "method", "status"],
            registry=registry,
        )
        self._failed_requests = Counter(
            "pulsar_proxy_http_failed_requests",
            "HTTP requests without a proper response of an upstream, by reason.",
            ["reason"],
            registry=registry,
        )
        self._request_seconds = Histogram(
            "pulsar_proxy_http_request_seconds",
            "Time from a request's head to the end of its response, by route.",
            ["route"],
            buckets=DURATION_BUCKETS_S,
            registry=registry,
        )
        self._body_bytes = Counter(
            "pulsar_proxy_http_body_bytes",
            "Bytes of bodies, by direction (request, response).",
            ["direction"],
            registry=registry,
        )
        self._reasons = BoundedLabel()
        # Children are looked up once: labels() costs as much as all the rest of a request's counting.
        self._requests_by: dict[tuple[str, str, str], Counter] = {}
        self._seconds_by: dict[str, Histogram] = {}
        self._request_bytes = self._body_bytes.labels(direction="request")
        self._response_bytes = self._body_bytes.labels(direction="response")

    def count_request(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        route = record.route or "none"
        method = record.method if record.method in METHODS else OTHER
        known = STATUS_MIN <= record.status <= STATUS_MAX
        status = f"{record.status // 100}xx" if known else "none"
        key = route, method, status
        if (requests := self._requests_by.get(key)) is None:
            requests = self._requests_by[key] = self._requests.labels(route=route, method=method, status=status)
        requests.inc()
        if record.cause:
            self._failed_requests.labels(reason=self._reasons.value_of(record.cause)).inc()
        if record.route:
            if (duration := self._seconds_by.get(route)) is None:
                duration = self._seconds_by[route] = self._request_seconds.labels(route=route)
            duration.observe(trio.current_time() - record.started)
        if record.request_bytes:
            self._request_bytes.inc(record.request_bytes)
        if record.response_bytes:
            self._response_bytes.inc(record.response_bytes)
