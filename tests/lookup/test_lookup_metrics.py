"""lookup.metrics: what is counted as plain numbers reads as the library's own counters and histogram would."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from lookup.metrics import LookupMetrics
from proto.pulsar_pb2 import ServerError
from proxy.runtime.observability.metrics import LATENCY_BUCKETS_S, render_metrics

KINDS = ("lookup", "partitions_metadata", "get_topics_of_namespace", "get_schema")


def by_the_library(answers: list[tuple[str, str, float]]) -> dict[str, list[str]]:
    registry = CollectorRegistry()
    counter = Counter(
        "pulsar_proxy_lookup_answers",
        "Answers to requests of lookup mode, by Pulsar's error code; none: success.",
        ["request", "error"],
        registry=registry,
    )
    histogram = Histogram(
        "pulsar_proxy_lookup_seconds",
        "Time from a request's Envelope to its answer, redirects included.",
        ["request"],
        buckets=LATENCY_BUCKETS_S,
        registry=registry,
    )
    for kind, error, duration_s in answers:
        counter.labels(request=kind, error=error).inc()
        histogram.labels(request=kind).observe(duration_s)
    return families(registry)


def families(registry: CollectorRegistry) -> dict[str, list[str]]:
    """The lines of the two families that are counted by hand, without regard to their order."""
    lines = generate_latest(registry).decode().splitlines()
    names = ("pulsar_proxy_lookup_answers", "pulsar_proxy_lookup_seconds")
    return {name: sorted(line for line in lines if name in line) for name in names}


durations = st.one_of(st.sampled_from([0.0, *LATENCY_BUCKETS_S]), st.floats(0, 100))
outcomes = st.sampled_from(
    [(None, "none"), (ServerError.TopicNotFound, "TopicNotFound"), (4711, "other"), (4712, "other")]
)


@settings(deadline=None)
@given(answers=st.lists(st.tuples(st.sampled_from(KINDS), outcomes, durations), max_size=20))
def test_answers_and_their_times_read_as_the_librarys_own(
    answers: list[tuple[str, tuple[int | None, str], float]],
) -> None:
    registry = CollectorRegistry()
    metrics = LookupMetrics(registry)
    for kind, (error, _), duration_s in answers:
        metrics.observe_answer(kind, error, duration_s)
    assert families(registry) == by_the_library([(kind, name, duration) for kind, (_, name), duration in answers])


def test_requests_are_there_before_the_first_one() -> None:
    registry = CollectorRegistry()
    metrics = LookupMetrics(registry)
    names = [f"pulsar_proxy_{prefix}{kind}_requests_total" for prefix in ("", "rejected_") for kind in KINDS]
    assert [registry.get_sample_value(name) for name in names] == [0] * 8
    for kind in KINDS:
        metrics.count_request(kind)
        metrics.count_request(kind)
        metrics.count_rejected_request(kind)
    assert [registry.get_sample_value(name) for name in names] == [2] * 4 + [1] * 4


def test_unknown_error_codes_of_brokers_share_one_label() -> None:
    registry = CollectorRegistry()
    metrics = LookupMetrics(registry)
    for code in range(1000, 3000):
        metrics.observe_answer("lookup", code, 0.1)
    assert (
        registry.get_sample_value("pulsar_proxy_lookup_answers_total", {"request": "lookup", "error": "other"}) == 2000
    )


def test_lookup_metrics_are_rendered_in_the_format_of_prometheus() -> None:
    registry = CollectorRegistry()
    LookupMetrics(registry).observe_answer("lookup", None, 0.003)
    text = render_metrics(registry)
    assert 'pulsar_proxy_lookup_answers_total{error="none",request="lookup"} 1.0' in text
    assert 'pulsar_proxy_lookup_seconds_bucket{le="0.005",request="lookup"} 1.0' in text
    assert 'pulsar_proxy_lookup_seconds_sum{request="lookup"} 0.003' in text


def test_a_kind_that_is_none() -> None:
    with pytest.raises(KeyError):
        LookupMetrics(CollectorRegistry()).count_request("produce")
