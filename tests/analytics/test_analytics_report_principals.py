"""The report's principals and totals beside the usage tables, after the real jobs: they agree, or the page says why."""

from datetime import timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from analytics.jobs import report, rollup, usage
from analytics.report import metrics
from analytics.report.collect import collect_points, newest_ms, read_windows
from analytics.report.panels import Cluster
from analytics.report.principals import TOP, Principals, collect_principals
from analytics.report.span import candidates
from analytics.report.totals import Totals, compare_totals
from analytics.tables.store import Tables
from tests.analytics.counter_model import Sample
from tests.analytics.report_data import span
from tests.analytics.test_analytics_report_page import Parsed
from tests.analytics.test_analytics_report_panels import NO_BROKERS
from tests.analytics.test_analytics_usage import BYTES, SESSIONS, add_series, labels
from tests.analytics.transforms_data import DAY, DAY_MS, HOUR_MS, MINUTE_MS, Raw, ingest, moment

CREATED = BYTES.removesuffix("_total") + "_created"
TO_BROKER = {"cluster": "c", "direction": "to_broker", "role": "forwarder", "worker": "0", "instance": "a:8080"}


def each_minute(series: int, first_minute: int, last_minute: int, *, start: float = 0.0, by: float = 60.0) -> Raw:
    """A scrape a minute, 13 s after its begin; the counter is `start` + `by` at the first one."""
    return [
        (series, Sample(DAY_MS + minute * MINUTE_MS + 13_000, start + by * (minute - first_minute + 1)))
        for minute in range(first_minute, last_minute)
    ]


def is_since(series: int, like: Raw, since_ms: int) -> Raw:
    return [(series, Sample(sample.ts, since_ms / 1000)) for _, sample in like]


def collected(tables: Tables, hours: float = 3, start_minute: int = 0) -> tuple[Principals, Totals]:
    part = span(hours, start=DAY + timedelta(minutes=start_minute))
    series = tables.read("series")
    found = collect_principals(tables, series, read_windows(tables, "rollup", part), "c", part)
    compared = compare_totals(Cluster("c", collect_points(tables, series, "c", part), NO_BROKERS, found))
    assert compared is not None
    return found, compared


@pytest.fixture(scope="module")
def tables(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Tables:
    """Alice from before the first scrape on, bob from minute 70 on: 1000 bytes before his first scrape."""
    root = tmp_path_factory.mktemp("principals")
    alice, bob = each_minute(2, 0, 180, by=60.0), each_minute(3, 70, 180, start=1000.0, by=40.0)
    both = [(1, Sample(sample.ts, 60.0 * (number + 1))) for number, (_, sample) in enumerate(alice)]
    both = [
        (1, Sample(one.ts, one.value + (1000.0 + 40.0 * (number - 69) if number >= 70 else 0.0)))
        for number, (_, one) in enumerate(both)
    ]
    add_series(
        spark,
        root,
        (1, metrics.BYTES, TO_BROKER),
        (2, BYTES, labels("c", "alice", "to_broker")),
        (3, BYTES, labels("c", "bob", "to_broker")),
        (13, CREATED, labels("c", "bob", "to_broker")),
        (4, SESSIONS, labels("c", "alice")),
        (5, SESSIONS, labels("c", "alice", worker="9")),  # it tells that all has come, and the first hours close
    )
    _first_seen(spark, root, {3: bob[0][1].ts, 13: bob[0][1].ts})
    sessions = each_minute(4, 0, 180, by=1.0)
    ended = [(5, Sample(DAY_MS + 8 * HOUR_MS, 0.0))]
    rows = [*both, *alice, *bob, *sessions, *ended, *is_since(13, bob, DAY_MS + 70 * MINUTE_MS + 5_000)]
    return ingest(spark, root, rows, {13: 3})


def _first_seen(spark: SparkSession, root: Path, moments_ms: dict[int, int]) -> None:
    """As `ingest` would have it: the first sample's instant."""
    from pyspark.sql import functions as F  # noqa: N812 -- the usual name

    tables = Tables.open(spark, str(root))
    when = F.col("first_seen")
    for number, ms in moments_ms.items():
        when = F.when(F.col("series_id") == number, F.lit(moment(ms))).otherwise(when)
    rows = tables.read("series").withColumn("first_seen", when).localCheckpoint()
    with tables.change("series") as change:
        change.remove(change.snapshot.files)
        change.append(change.write("series", rows))


def test_totals_agree_with_the_usage_tables_and_with_all_connections(spark: SparkSession, tables: Tables) -> None:
    rollup.run(spark, tables.location.delta_url)
    usage.run(spark, tables.location.delta_url, usage.UsageOptions(DAY + timedelta(hours=9)))
    found, compared = collected(tables, hours=2, start_minute=60)
    # Alice's first minute here has the growth since the last one before; bob's has all that he used so far.
    assert {one.name: one.figures[0] for one in found.top} == {"alice": 120 * 60, "bob": 1000 + 110 * 40}
    assert (found.without_start, found.total[4]) == (0, 120)
    assert found.lines["bob"][DAY_MS + 70 * MINUTE_MS] == 1040.0
    assert found.billed is not None
    assert (found.billed.counted, found.billed.open_windows) == (found.billed.billed, 0)
    assert compared.reasons == []
    part, _ = collected(tables, hours=1 / 6, start_minute=75)  # no whole hour
    assert part.billed is None
    assert part.total[:2] == (10 * 100, 0)
    assert len(part.lines["alice"]) == 10  # a point a minute, not one an hour


def test_late_samples_hours_to_come_and_unknown_starts_are_told(spark: SparkSession, tables: Tables) -> None:
    root = Path(tables.location.delta_url)
    late = [(2, Sample(DAY_MS + 30 * MINUTE_MS + 40_000, 31 * 60.0 + 20.0))]
    ingest(spark, root, late)
    rollup.run(spark, str(root))
    usage.run(spark, str(root), usage.UsageOptions(DAY + timedelta(hours=9)))
    _, compared = collected(tables, hours=1)
    assert compared.reasons == []  # within the hour it changes no sum
    last = (2, Sample(DAY_MS + 59 * MINUTE_MS + 50_000, 60 * 60.0 + 30.0))
    ingest(spark, root, [last, *each_minute(2, 180, 200, start=180 * 60.0)])
    rollup.run(spark, str(root))
    _, compared = collected(tables, hours=1)
    assert len(compared.reasons) == 2
    assert compared.reasons[1].startswith("The usage tables differ in bytes to brokers: 2 samples came after")
    _, compared = collected(tables, hours=4)
    assert "1 hour not in the usage tables yet: run `usage`" in compared.reasons[-1]


def test_a_counter_with_an_unknown_start_is_reported(spark: SparkSession, tmp_path: Path) -> None:
    add_series(spark, tmp_path, (1, metrics.BYTES, TO_BROKER), (3, BYTES, labels("c", "bob", "to_broker")))
    rows = each_minute(1, 0, 60, by=100.0)
    tables = ingest(spark, tmp_path, [*rows, *each_minute(3, 10, 60, start=500.0, by=100.0)])
    rollup.run(spark, str(tmp_path))
    found, compared = collected(tables, hours=1)
    assert found.without_start == 1
    assert found.total[0] == 49 * 100
    assert "of 1 counter of principals the start is unknown" in compared.reasons[0]


def test_an_outage_is_drawn_over_its_time_and_changes_no_total(spark: SparkSession, tmp_path: Path) -> None:
    """Nothing was scraped from minute 10 to minute 129: two hours' growth came with one sample."""
    add_series(
        spark,
        tmp_path,
        (1, metrics.BYTES, TO_BROKER),
        (2, BYTES, labels("c", "alice", "to_broker")),
        (3, BYTES.replace("bytes", "messages"), labels("c", "alice", "to_broker")),
    )
    rows = [row for number in (1, 2) for row in each_minute(number, 0, 180)] + each_minute(3, 0, 180, by=0.0)
    outage = range(DAY_MS + 10 * MINUTE_MS, DAY_MS + 130 * MINUTE_MS)
    tables = ingest(spark, tmp_path, [row for row in rows if row[1].ts not in outage])
    rollup.run(spark, str(tmp_path))
    series = tables.read("series")
    for hours, start_minute, since in ((3, 0, 1), (1, 100, 0)):
        part = span(hours, start=DAY + timedelta(minutes=start_minute))
        points = collect_points(tables, series, "c", part)
        found = collect_principals(tables, series, read_windows(tables, "rollup", part), "c", part)
        (drawn,) = points.spread_by(metrics.BYTES).values()
        assert drawn == found.lines["alice"]
        assert [drawn[at] for at in part.windows_ms][since:] == [60.0] * (60 * hours - since)
        total = 60 * (179 if hours == 3 else 150)  # from the last sample before the span on
        assert sum(points.increase_by(metrics.BYTES)[""].values()) == total == found.total[0]
        assert not found.counts_messages
    by_hour = collect_points(tables, series, "c", span(3, 1)).spread_by(metrics.BYTES)[""]
    assert by_hour == {DAY_MS: 540.0, DAY_MS + HOUR_MS: 3630.0, DAY_MS + 2 * HOUR_MS: 6570.0}


def test_the_top_principals_and_the_rest(spark: SparkSession, tmp_path: Path) -> None:
    names = [*(f"p{number:02}" for number in range(TOP + 5)), "other"]
    series = [(number, BYTES, labels("c", name, "to_broker")) for number, name in enumerate(names, start=1)]
    add_series(spark, tmp_path, *series, (99, BYTES, labels("d", "p99", "to_broker")))
    rows = [row for number, _, _ in [*series, (99, "", {})] for row in each_minute(number, 0, 3, by=float(number))]
    tables = ingest(spark, tmp_path, rows)
    rollup.run(spark, str(tmp_path))
    found, _ = collected(tables, hours=1)
    assert [one.name for one in found.top] == [f"p{number:02}" for number in range(TOP + 4, 4, -1)]
    assert found.further is not None
    assert (found.further.name, found.further.figures[0]) == ("5 further principals", 2 * (1 + 2 + 3 + 4 + 5))
    assert found.other is not None
    assert found.other.figures[0] == 2 * (TOP + 6)
    assert found.total[0] == 2 * sum(range(1, TOP + 7))


def test_the_newest_window_is_told(spark: SparkSession, tables: Tables) -> None:
    now = DAY + timedelta(hours=5)
    spans = candidates(now - timedelta(minutes=10), now, now)
    assert newest_ms(tables, spans[0]) == DAY_MS + 3 * HOUR_MS + 19 * MINUTE_MS
    page = Parsed(report.run(spark, tables.location.delta_url, spans, (), made_at=DAY))
    assert "The newest minute in the tables is 2026-11-20 03:19" in page.text
