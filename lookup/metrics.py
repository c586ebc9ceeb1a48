"""The lookup worker's metrics, under the Java proxy's names where it has them."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from proto.commands import error_name
from proxy.runtime.metrics import LATENCY_BUCKETS_S

_REQUESTS = {
    "lookup": ("lookup_requests", "Topic lookups received."),
    "partitions_metadata": ("partitions_metadata_requests", "Requests for a topic's partitions received."),
    "get_topics_of_namespace": ("get_topics_of_namespace_requests", "Requests for a namespace's topics received."),
    "get_schema": ("get_schema_requests", "Requests for a topic's schema received."),
}


class LookupMetrics:
    """Counts and times by kind of request; ``kind`` is a LookupKind's name."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = {
            kind: Counter(f"pulsar_proxy_{name}", text, registry=registry) for kind, (name, text) in _REQUESTS.items()
        }
        self._rejected = {
            kind: Counter(
                f"pulsar_proxy_rejected_{name}", f"Answered TooManyRequests at the limit. {text}", registry=registry
            )
            for kind, (name, text) in _REQUESTS.items()
        }
        self._answers = Counter(
            "pulsar_proxy_lookup_answers",
            "Answers to requests of lookup mode, by Pulsar's error code; none: success.",
            ["request", "error"],
            registry=registry,
        )
        self._seconds = Histogram(
            "pulsar_proxy_lookup_seconds",
            "Time from a request's Envelope to its answer, redirects included.",
            ["request"],
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self._children: dict[tuple[str, int | None], tuple[Counter, Histogram]] = {}
        self._envelope_errors = Counter(
            "pulsar_proxy_envelope_errors", "Envelopes that were not accepted.", ["error"], registry=registry
        )
        self._denied = Counter(
            "pulsar_proxy_denied_targets",
            "Relay targets (proxy_to_broker_url) that were denied, by reason.",
            ["reason"],
            registry=registry,
        )

    def received(self, kind: str) -> None:
        """Count a request."""
        self._requests[kind].inc()

    def rejected(self, kind: str) -> None:
        """Count a request above the limit."""
        self._rejected[kind].inc()

    def answered(self, kind: str, error: int | None, duration_s: float) -> None:
        """Count an answer and its time."""
        children = self._children.get((kind, error))
        if children is None:  # to find them by their labels costs more than to count
            name = "none" if error is None else error_name(error)
            children = self._answers.labels(request=kind, error=name), self._seconds.labels(request=kind)
            if name != "other":
                self._children[kind, error] = children
        counter, histogram = children
        counter.inc()
        histogram.observe(duration_s)

    def envelope_error(self, error: str) -> None:
        """Count an Envelope that was not accepted."""
        self._envelope_errors.labels(error=error).inc()

    def target_denied(self, reason: str) -> None:
        """Count a denied target."""
        self._denied.labels(reason=reason).inc()


class BrokerMetrics:
    """How the brokers of ``brokers.service_url`` are; those that are no longer there are forgotten."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._up = Gauge(
            "pulsar_proxy_broker_up",
            "Whether a broker of brokers.service_url answered when last looked at (1) or not (0).",
            ["broker"],
            registry=registry,
        )
        self._set_aside = Gauge(
            "pulsar_proxy_broker_set_aside",
            "Whether a broker of brokers.service_url is set aside as it failed (1) or not (0).",
            ["broker"],
            registry=registry,
        )
        self._ejections = Counter(
            "pulsar_proxy_broker_ejections", "Brokers that were set aside, by reason.", ["reason"], registry=registry
        )
        self._dns_failures = Counter(
            "pulsar_proxy_dns_failures",
            "Names not resolved: brokers' (of brokers.service_url) or targets' (that clients or brokers name).",
            ["names"],
            registry=registry,
        )

    def brokers(self, up: Mapping[str, bool], set_aside: Mapping[str, bool]) -> None:
        """Show these brokers, and no others."""
        for gauge, values in ((self._up, up), (self._set_aside, set_aside)):
            gauge.clear()
            for broker, value in values.items():
                gauge.labels(broker=broker).set(int(value))

    def forget_brokers(self) -> None:
        """Show none."""
        self.brokers({}, {})

    def ejected(self, reason: str) -> None:
        """Count a broker that is set aside."""
        self._ejections.labels(reason=reason).inc()

    def dns_failed(self, names: str) -> None:
        """Count a name that was not resolved."""
        self._dns_failures.labels(names=names).inc()
