"""Native histograms: a real Prometheus has the same samples, and the same counts, sums and quantiles as we.

Custom bounds (schema -53) are not among them: Debian's Prometheus, 2.42, does not know any.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce

import pytest

from analytics.remote_write import remote_pb2 as pb
from analytics.remote_write.histograms import decode_histogram
from analytics.remote_write.snappy import compress
from analytics.transforms.histograms import Histogram, HistogramSample, _end, add, from_row, growth
from tests.analytics.spool_files import T0_MS

from .lab.prometheus import Server

STEP_MS, STEPS = 15_000, 4
SPAN_MS = (STEPS - 1) * STEP_MS
# The range is a millisecond longer than the span, so that the first sample is in it whether ranges include their start
# (Prometheus 2) or not (3). increase() extrapolates to that millisecond: counts and sums grow by just this factor.
RANGE, FACTOR = f"[{SPAN_MS + 1}ms]", (SPAN_MS + 1) / SPAN_MS
TOLERANCE = 1e-9  # Nothing else is approximate: both add the same doubles, in some other order.

QUANTILES = (0.0, 0.0103, 0.1003, 0.2503, 0.4503, 0.5003, 0.5503, 0.7503, 0.9003, 0.9903, 1.0)
"""But for the ends none is the end of a bucket, where FACTOR's rounding decides which bucket it is: four digits, and
fewer than 10,000 observations.
"""
NARROW, WIDE = 2.0**-16, 2.0**-2
"""Zero thresholds; the narrow one is the end of a bucket in each schema."""

_random = random.Random(53)
VALUES = [0.0 if number % 9 == 0 else _random.gauss(0.0, 1.5) ** 3 for number in range(400)]


def observed(count: int, schema: int, zero_threshold: float = NARROW, own: Sequence[float] = VALUES) -> pb.Histogram:
    """The histogram of so many of these values, as a client library has it."""
    values = own[:count]
    made = pb.Histogram(count_int=count, sum=sum(values), schema=schema, zero_threshold=zero_threshold)
    made.zero_count_int = sum(abs(value) <= zero_threshold for value in values)
    for sign, spans, deltas in (
        (1, made.positive_spans, made.positive_deltas),
        (-1, made.negative_spans, made.negative_deltas),
    ):
        logs = (math.log2(sign * value) for value in values if sign * value > zero_threshold)
        buckets = sorted(Counter(math.ceil(log * 2.0**schema) for log in logs).items())
        for (before, below), (index, number) in itertools.pairwise([(-1, 0), *buckets]):
            spans.add(offset=index - before - 1, length=1)
            deltas.append(number - below)
    return made


SERIES = {
    "schema 0": [observed(count, 0) for count in (50, 60, 200, 400)],
    "schema 8": [observed(count, 8) for count in (50, 60, 200, 400)],
    "schema -4": [observed(count, -4) for count in (50, 60, 200, 400)],
    "positive": [observed(count, 1, own=[max(value, 0.0) for value in VALUES]) for count in (50, 60, 200, 400)],
    "negative": [observed(count, 1, own=[min(value, 0.0) for value in VALUES]) for count in (50, 60, 200, 400)],
    "restarts": [observed(count, 2) for count in (100, 150, 30, 90)],
    "restarts, then has more": [
        observed(100, 2),
        observed(150, 2),
        observed(200, 2, own=VALUES[200:]),
        observed(220, 2, own=VALUES[180:]),
    ],
    "becomes coarser": [observed(50, 4), observed(70, 3), observed(200, 1), observed(300, -1)],
    "zero bucket widens": [observed(50, 1), observed(70, 1, WIDE), observed(200, 1, WIDE), observed(300, 1, 1.0)],
}
"""By the label `job`. Each begins with observations that are no growth."""
RESETS_BY_LAYOUT = {
    "becomes finer": [observed(50, 1), observed(70, 2), observed(100, 2), observed(120, 2)],
    "zero bucket narrows": [observed(50, 1, WIDE), observed(70, 1), observed(100, 1), observed(120, 1)],
    "zero bucket cuts": [observed(50, 1), observed(70, 1, 0.3), observed(100, 1, 0.3), observed(120, 1, 0.3)],
}


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One that has all series."""
    options = ("--enable-feature=native-histograms", "--web.enable-remote-write-receiver")
    server = Server(tmp_path_factory.mktemp("prometheus"), {}, *options)
    try:
        server.start()
        write(server)
        yield server
    finally:
        server.kill()


def write(server: Server) -> None:
    """All series in one request of remote write 1.0."""
    request = pb.WriteRequest()
    metrics = [("x", job, own) for job, own in SERIES.items()] + [
        ("y", job, own) for job, own in RESETS_BY_LAYOUT.items()
    ]
    for metric, job, histograms in metrics:
        labels = [pb.Label(name="__name__", value=metric), pb.Label(name="job", value=job)]
        series = request.timeseries.add(labels=labels)
        for step, histogram in enumerate(histograms):
            series.histograms.add().CopyFrom(histogram)
            series.histograms[-1].timestamp = T0_MS + step * STEP_MS
    server.write(compress(request.SerializeToString()))


def asked(server: Server, query: str) -> dict[str, float]:
    """A query's values at the last sample, by `job`."""
    answers = server.query(query, T0_MS + SPAN_MS)
    return {answer["metric"].get("job", ""): float(answer["value"][1]) for answer in answers}


def increase(messages: Iterable[pb.Histogram]) -> Histogram:
    """Ours, from the messages that Prometheus gets."""
    own = [from_row(decode_histogram(message.SerializeToString(), 0)._asdict()) for message in messages]
    samples = [HistogramSample(step, histogram) for step, histogram in enumerate(own)]
    return total(growth(*pair)[0] for pair in itertools.pairwise(samples))


def total(histograms: Iterable[Histogram]) -> Histogram:
    """Their sum."""
    return reduce(lambda one, other: add(one, other)[0], histograms)


def quantile(histogram: Histogram, q: float) -> float:
    """The value below which a share q of the observations lies, as Prometheus 3 has it for exponential buckets."""
    rank, below = q * (histogram.zero_count + sum(histogram.positive.values()) + sum(histogram.negative.values())), 0.0
    for lower, upper, count in spans(histogram):
        if below + count >= rank and count > 0:
            part = (rank - below) / count
            return lower * math.pow(upper / lower, part) if lower * upper > 0 else lower + (upper - lower) * part
        below += count
    return math.nan


def spans(histogram: Histogram) -> Iterator[tuple[float, float, float]]:
    """Lower bound, upper bound and count of each bucket, in the order of values."""
    schema = histogram.schema
    for index, count in sorted(histogram.negative.items(), reverse=True):
        yield -_end(index, schema), -_end(index - 1, schema), count
    lowest = -histogram.zero_threshold if histogram.negative else 0.0
    yield lowest, histogram.zero_threshold if histogram.positive else 0.0, histogram.zero_count
    for index, count in sorted(histogram.positive.items()):
        yield _end(index - 1, schema), _end(index, schema), count


def exponential(value: float, histogram: Histogram) -> float:
    """A quantile of Prometheus 2, which interpolates linearly in every bucket, as 3 has it: at the same share of the
    bucket on a logarithmic scale, but for the zero bucket.
    """
    if abs(value) <= histogram.zero_threshold:
        return value
    width = 2.0**-histogram.schema
    lower = 2.0 ** (width * (math.ceil(math.log2(abs(value)) / width) - 1))
    return math.copysign(lower * 2.0 ** (width * (abs(value) / lower - 1) / (2.0**width - 1)), value)


def assert_same(server: Server, query: str, own: dict[str, Histogram]) -> None:
    """Prometheus' count, sum and quantiles of what this query tells are those of ours, by `job`."""
    assert asked(server, f"histogram_count({query})") == pytest.approx(
        {job: one.count * FACTOR for job, one in own.items()}, rel=TOLERANCE
    )
    assert asked(server, f"histogram_sum({query})") == pytest.approx(
        {job: one.sum * FACTOR for job, one in own.items()}, rel=TOLERANCE
    )
    is_linear = server.version().startswith("2.")
    for q in QUANTILES:
        found = asked(server, f"histogram_quantile({q}, {query})")
        if is_linear:
            found = {job: exponential(value, own[job]) for job, value in found.items()}
        assert found == pytest.approx({job: quantile(one, q) for job, one in own.items()}, rel=TOLERANCE), q


def test_each_series_has_prometheus_s_growth(prometheus: Server) -> None:
    assert_same(prometheus, f"increase(x{RANGE})", {job: increase(own) for job, own in SERIES.items()})


@pytest.mark.parametrize(
    "jobs", [("schema 0", "restarts"), ("schema 8", "becomes coarser"), ("schema 0", "zero bucket widens"), (*SERIES,)]
)
def test_the_sum_over_series_of_different_bounds_is_prometheus_s(prometheus: Server, jobs: tuple[str, ...]) -> None:
    query = f'sum(increase(x{{job=~"{"|".join(jobs)}"}}{RANGE}))'
    assert_same(prometheus, query, {"": total(increase(SERIES[job]) for job in jobs)})


def test_a_change_of_layout_alone_is_a_reset_for_prometheus_only(prometheus: Server) -> None:
    """It counts the 50 observations of the first sample once more; docs/analytics-tables.md has the reason."""
    found = asked(prometheus, f"histogram_count(increase(y{RANGE}))")
    own = {job: increase(histograms).count for job, histograms in RESETS_BY_LAYOUT.items()}
    assert own == dict.fromkeys(RESETS_BY_LAYOUT, 70)
    assert found == pytest.approx({job: (count + 50) * FACTOR for job, count in own.items()}, rel=TOLERANCE)
