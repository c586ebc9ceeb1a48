"""Metrics of the lookup worker, under the Java proxy's names where it has them."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from proto.commands import error_name
from proxy.runtime.observability.metrics import LATENCY_BUCKETS_S, broker_reauthentication_seconds

_REQUESTS = {
    "lookup": ("lookup_requests", "Topic lookups received."),
    "partitions_metadata": ("partitions_metadata_requests", "Requests for a topic's partitions received."),
    "get_topics_of_namespace": ("get_topics_of_namespace_requests", "Requests for a namespace's topics received."),
    "get_schema": ("get_schema_requests", "Requests for a topic's schema received."),
}


class LookupMetrics(Collector):
    """Counts and times by kind of request; ``kind`` is a LookupKind's name.

    Every request is counted, so these are plain numbers, which become metrics at a scrape: the library's own counters
    cost more than the rest of a request's way through this worker.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = dict.fromkeys(_REQUESTS, 0)
        self._rejected = dict.fromkeys(_REQUESTS, 0)
        self._times = {kind: _Times() for kind in _REQUESTS}
        self._errors: dict[tuple[str, str], int] = {}
        registry.register(self)
        counter = partial(Counter, registry=registry)
        self._invalid = counter(
            "pulsar_proxy_invalid_lookup_requests",
            "Requests of lookup mode that no broker was shown, as it would close the connection upon them, by reason.",
            ["request", "reason"],
        )
        self._envelope_errors = counter("pulsar_proxy_envelope_errors", "Envelopes that were not accepted.", ["error"])
        self._denied = counter(
            "pulsar_proxy_denied_targets",
            "Relay targets (proxy_to_broker_url) that were denied, by reason.",
            ["reason"],
        )

    def count_request(self, kind: str) -> None:
        """Count a request."""
        self._requests[kind] += 1

    def count_rejected_request(self, kind: str) -> None:
        """Count a request above the limit."""
        self._rejected[kind] += 1

    def observe_answer(self, kind: str, error: int | None, duration_s: float) -> None:
        """Count an answer and its time."""
        times = self._times[kind]
        times.sum_s += duration_s
        times.counts[bisect_left(LATENCY_BUCKETS_S, duration_s)] += 1  # a bucket's upper bound is in it
        if error is None:
            times.successes += 1
        else:
            labels = kind, error_name(error)
            self._errors[labels] = self._errors.get(labels, 0) + 1

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics with their values at this moment."""
        for kind, (name, text) in _REQUESTS.items():
            yield CounterMetricFamily(f"pulsar_proxy_{name}", text, value=self._requests[kind])
            rejected = f"Answered TooManyRequests at the limit. {text}"
            yield CounterMetricFamily(f"pulsar_proxy_rejected_{name}", rejected, value=self._rejected[kind])
        answers = CounterMetricFamily(
            "pulsar_proxy_lookup_answers",
            "Answers to requests of lookup mode, by Pulsar's error code; none: success.",
            labels=["request", "error"],
        )
        seconds = HistogramMetricFamily(
            "pulsar_proxy_lookup_seconds",
            "Time from a request's Envelope to its answer, redirects included.",
            labels=["request"],
        )
        for kind, times in self._times.items():
            if times.successes:
                answers.add_metric([kind, "none"], times.successes)
            if any(times.counts):
                seconds.add_metric([kind], times.buckets(), times.sum_s)
        for labels, count in self._errors.items():
            answers.add_metric(labels, count)
        yield answers
        yield seconds

    def count_invalid_request(self, kind: str, reason: str) -> None:
        """Count a request that is not sent on."""
        self._invalid.labels(request=kind, reason=reason).inc()

    def count_envelope_error(self, error: str) -> None:
        """Count an Envelope that was not accepted."""
        self._envelope_errors.labels(error=error).inc()

    def count_denied_target(self, reason: str) -> None:
        """Count a denied target."""
        self._denied.labels(reason=reason).inc()


class _Times:
    """The answers to one kind of request: how many were a success, and a histogram over LATENCY_BUCKETS_S of all."""

    __slots__ = ("counts", "successes", "sum_s")

    def __init__(self) -> None:
        self.successes = 0
        self.sum_s = 0.0
        self.counts = [0] * (len(LATENCY_BUCKETS_S) + 1)

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bounds, and how many values are not above them."""
        bounds = [*map(floatToGoString, LATENCY_BUCKETS_S), "+Inf"]
        return list(zip(bounds, accumulate(self.counts), strict=True))


class BrokerMetrics:
    """State of the brokers of ``brokers.service_url``; brokers that are no longer found are forgotten."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        gauge = partial(Gauge, labelnames=["broker"], registry=registry)
        self._up = gauge(
            "pulsar_proxy_broker_up",
            "Whether a broker of brokers.service_url answered when last looked at (1) or not (0).",
        )
        self._ejected = gauge(
            "pulsar_proxy_broker_set_aside",
            "Whether a broker of brokers.service_url is ejected as it failed (1) or not (0).",
        )
        self._credentials_accepted = gauge(
            "pulsar_proxy_broker_credentials_accepted",
            "Whether a broker of brokers.service_url takes the proxy's own credentials (1) or not (0).",
        )
        self._checks_original_credentials = gauge(
            "pulsar_proxy_broker_checks_original_credentials",
            "Whether a broker of brokers.service_url checks clients' own credentials (1) or not (0).",
        )
        self._ejections = counter("pulsar_proxy_broker_ejections", "Brokers that were ejected, by reason.", ["reason"])
        self._fatal_requests = counter(
            "pulsar_proxy_fatal_lookup_requests",
            "Requests of lookup mode upon which a broker closed a connection that carried nothing else.",
            ["request"],
        )
        self._dns_failures = counter(
            "pulsar_proxy_dns_failures",
            "Names not resolved: brokers' (of brokers.service_url) or targets' (that clients or brokers name).",
            ["names"],
        )
        self.reauthentication_seconds = broker_reauthentication_seconds(registry)

    def show_brokers(
        self,
        up: Mapping[str, bool],
        ejected: Mapping[str, bool],
        accepted: Mapping[str, bool],
        checks_clients: Mapping[str, bool],
    ) -> None:
        """Show these brokers and no others."""
        gauges = (self._up, self._ejected, self._credentials_accepted, self._checks_original_credentials)
        for gauge, values in zip(gauges, (up, ejected, accepted, checks_clients), strict=True):
            gauge.clear()
            for broker, value in values.items():
                gauge.labels(broker=broker).set(int(value))

    def forget_brokers(self) -> None:
        """Show none."""
        self.show_brokers({}, {}, {}, {})

    def count_ejection(self, reason: str) -> None:
        """Count an ejected broker."""
        self._ejections.labels(reason=reason).inc()

    def count_fatal_request(self, kind: str) -> None:
        """Count a request upon which a broker closed a connection that carried nothing else."""
        self._fatal_requests.labels(request=kind).inc()

    def count_dns_failure(self, names: str) -> None:
        """Count a name that was not resolved."""
        self._dns_failures.labels(names=names).inc()
