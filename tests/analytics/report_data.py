"""Tables for the tests of the report: a proxy's metrics over three hours, rolled up as the definition says.

The jobs `rollup` and `usage` would make the same tables (their own tests show that), in many times the time.
"""

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from analytics.report.span import RESOLUTIONS, Span
from analytics.tables.schemas import HISTOGRAM_ROLLUP, ROLLUP, SERIES, USAGE
from analytics.tables.store import Tables
from tests.analytics.counter_model import Sample, Window, windows
from tests.analytics.transforms_data import DAY, DAY_MS, HOUR_MS, MINUTE_MS, moment

HOSTILE = "<script>alert(1)</script>"
STEPS = 180
BOUNDS = ("0.01", "0.1", "1.0", "+Inf")
# Lookups of `west` as a native histogram with custom bounds, of two workers, in the first two hours.
NATIVE_SERIES = [
    (number, "pulsar_proxy_lookup_seconds", {"cluster": "west", "request": "lookup"}, None, DAY)
    for number in (1001, 1002)
]
Metric = tuple[str, dict[str, str], float]


def span(hours: int = 3, resolution: int = 0, start: datetime = DAY) -> Span:
    return Span(start, start + timedelta(hours=hours), RESOLUTIONS[resolution])


def _metrics(cluster: str) -> list[Metric]:
    """(metric, labels, growth a minute); a gauge's is its value."""
    forwarders = [{"cluster": cluster, "role": "forwarder", "worker": number, "instance": "a"} for number in "01"]
    lookup = {"cluster": cluster, "role": "lookup", "worker": "0", "instance": "a"}
    rows: list[Metric] = []
    for forwarder in forwarders:
        for direction, by in (("to_broker", 6000.0), ("to_client", 60.0)):
            rows.append(("pulsar_proxy_binary_bytes_total", forwarder | {"direction": direction}, by))
            for principal in ("alice", HOSTILE, "other"):
                own = forwarder | {"direction": direction, "principal": principal}
                rows.append(("pulsar_proxy_principal_bytes_total", own, by / len(principal)))
                rows.append(("pulsar_proxy_principal_messages_total", own, 2.0))
        rows.append(("pulsar_proxy_active_connections", forwarder, 7.0))
        rows.append(("pulsar_proxy_ended_connections_total", forwarder | {"cause": HOSTILE}, 1.0))
        rows.append(("pulsar_proxy_reauthentication_failure_total", forwarder | {"method": HOSTILE}, 0.5))
    answers = lookup | {"request": "lookup"}
    for bound, by in zip(BOUNDS, (0.0, 90.0, 100.0, 100.0), strict=True):
        rows.append(("pulsar_proxy_lookup_seconds_bucket", answers | {"le": bound}, by))
    rows.append(("pulsar_proxy_lookup_seconds_sum", answers, 10.0))
    rows.append(("pulsar_proxy_lookup_seconds_count", answers, 100.0))
    for broker, is_up in (("b1", 1.0), ("b2", 0.0), (HOSTILE, 0.0)):
        rows.append(("pulsar_proxy_broker_up", lookup | {"broker": broker}, is_up))
    return rows


def make_tables(spark: SparkSession, root: Path) -> Tables:
    """Clusters `east` (everything) and `west` (bytes only), three hours from DAY."""
    west = [("pulsar_proxy_binary_bytes_total", {"cluster": "west", "direction": "to_client"}, 60.0)]
    rows: list[tuple[Any, ...]] = []
    series = []
    for number, (metric, labels, by) in enumerate([*_metrics("east"), *west], start=1):
        series.append((number, metric, labels | {"job": "proxy"}, None, DAY))
        samples = _samples(by, is_gauge=metric.endswith(("connections", "broker_up")))
        for width, width_ms in (("1h", HOUR_MS), ("1d", 24 * HOUR_MS)):
            rows += [_row(number, window, width) for window in windows(samples, width_ms, 2)]
    tables = Tables.open(spark, str(root))
    frames = {
        "series": spark.createDataFrame([*series, *NATIVE_SERIES], SERIES),
        "histogram_rollup": spark.createDataFrame(_native_rows(), HISTOGRAM_ROLLUP),
        "usage": spark.createDataFrame(_usage("east"), USAGE),
        "rollup": spark.createDataFrame(rows, ROLLUP).coalesce(1),
    }
    views = {"series": ["series"], "histogram_rollup": ["histograms_1h"], "usage": ["usage_hourly"]}
    for table, frame in frames.items():
        with tables.change(table) as change:
            for written in change.write_widths(views.get(table, ["rollup_1h", "rollup_1d"]), frame):
                change.append(written)
    return tables


def _samples(by: float, *, is_gauge: bool) -> list[Sample]:
    """A counter that began just before DAY, or a gauge."""
    if is_gauge:
        return [Sample(DAY_MS + step * MINUTE_MS + 1000, by) for step in range(STEPS)]
    return [Sample(DAY_MS + step * MINUTE_MS + 1000, by * (step + 1), DAY_MS - 1) for step in range(STEPS)]


def _row(series: int, window: Window, width: str) -> tuple[Any, ...]:
    start = moment(window.start)
    ends = [
        value
        for sample in (window.first, window.last)
        for value in (moment(sample.ts), sample.value, moment(sample.start_ts) if sample.start_ts else None)
    ]
    growth = (0, window.entry, None, window.increase, window.resets, window.overlaps)
    place = (width, start.date(), None)
    return (series, start, window.n, window.sum, window.min, window.max, *ends, *growth, *place)


def _usage(cluster: str) -> list[tuple[Any, ...]]:
    names = {"alice": 1000, HOSTILE: 10, "other": 1}
    return [
        (cluster, name, DAY + timedelta(hours=hour), by, by, 2, 2, 1, True, "1h", DAY.date())
        for name, by in names.items()
        for hour in range(3)
    ]


def _native_rows() -> list[tuple[Any, ...]]:
    return [_native(number, hour) for number in (1001, 1002) for hour in (0, 1)]


def _native(series: int, hour: int) -> tuple[Any, ...]:
    window = DAY + timedelta(hours=hour)
    one = (10.0, 3.0, -53, 0.0, 0.0, [0, 2], [4.0, 6.0], [], [], [0.1, 0.5])  # 4 below 0.1 s, 6 above 0.5 s
    return (series, window, 4, window, window, None, one, one, 0, 0, "1h", window.date(), None)
