"""The report's bill after the real jobs: it is what the usage tables have, and says what they do not have."""

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from analytics.cli import main
from analytics.jobs import rollup, usage
from analytics.report import bill
from analytics.report.bill import Bill, collect_bill
from analytics.tables.errors import TablesError
from analytics.tables.store import Tables
from tests.analytics.counter_model import Sample
from tests.analytics.report_data import span
from tests.analytics.test_analytics_report_page import Parsed
from tests.analytics.test_analytics_usage import BYTES, SESSIONS, add_series, labels
from tests.analytics.transforms_data import DAY, DAY_MS, HOUR_MS, Raw, counter, ingest


def billed(tables: Tables, hours: int, first_hour: int = 0, cluster: str = "c") -> Bill:
    part = span(hours, start=DAY + timedelta(hours=first_hour))
    return collect_bill(tables, tables.read("series"), cluster, part)


def by_name(found: Bill) -> dict[str, tuple[int, int, int]]:
    """Bytes in, sessions, and bytes before."""
    return {one.name: (one.figures[0], one.figures[4], one.before) for one in [*found.principals, found.total]}


def run_jobs(spark: SparkSession, root: Path) -> None:
    rollup.run(spark, str(root))
    usage.run(spark, str(root), usage.UsageOptions(DAY + timedelta(hours=99)))


@pytest.fixture(scope="module")
def root(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Alice, bob (from hour 2 on) and others, up to hour 3; the first hour is closed."""
    root = tmp_path_factory.mktemp("bill")
    add_series(
        spark,
        root,
        (1, BYTES, labels("c", "alice", "to_broker")),
        (2, BYTES, labels("c", "bob", "to_broker")),
        (3, BYTES, labels("c", "other", "to_broker")),
        (4, SESSIONS, labels("c", "alice")),
        (5, BYTES, labels("d", "dora", "to_broker")),
    )
    rows: Raw = [*counter(1, range(4), by=10.0), *counter(2, (2, 3), by=5.0), *counter(3, range(4), by=100.0)]
    ingest(spark, root, [*rows, *counter(4, range(4), by=1.0), *counter(5, range(4), by=7.0)])
    run_jobs(spark, root)
    return root


@pytest.fixture
def tables(spark: SparkSession, root: Path) -> Tables:
    return Tables.open(spark, str(root))


def test_the_bill_beside_the_span_before(tables: Tables) -> None:
    found = billed(tables, 2, 2)
    assert by_name(found) == {
        "alice": (240, 24, 230),
        "bob": (115, 0, 0),
        "other": (2400, 0, 1100 + 1200),
        "all principals": (2755, 24, 110 + 120 + 2300),
    }
    assert (found.before_windows, found.open_windows, found.missing_windows, found.late_samples) == (2, 2, 0, 0)
    first = billed(tables, 2)
    assert (first.before_windows, first.without_start, first.open_windows) == (0, 3, 1)
    assert [one.name for one in billed(tables, 4, cluster="d").principals] == ["dora"]
    by_day = collect_bill(tables, tables.read("series"), "c", span(24, 1))
    assert by_day.total.figures[0] == found.total.figures[0] + first.total.figures[0]


def test_principals_beyond_the_limit_are_one(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bill, "PRINCIPALS_MAX", 2)
    found = by_name(billed(tables, 2, 2))
    assert list(found) == ["alice", "1 further principals", "other", "all principals"]
    assert found["1 further principals"] == (115, 0, 0)


def page_of(root: Path, moment: datetime | None) -> Parsed:
    output = root / "page.html"
    options = [] if moment is None else ["--as-of", f"{moment:%Y-%m-%dT%H:%M:%S}"]
    arguments = ["--tables", str(root), "--start", "2026-11-20", "--end", "2026-11-20T04:00:00", "--cluster", "c"]
    done = CliRunner().invoke(main, ["report", *arguments, *options, "--output", str(output)])
    assert done.exit_code == 0, done.output
    return Parsed(output.read_text())


def test_late_data_changes_the_bill_and_not_the_bill_as_it_was(spark: SparkSession, root: Path, tables: Tables) -> None:
    before = by_name(billed(tables, 4))
    moment = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=1)
    time.sleep((moment - datetime.now(UTC)).total_seconds())  # the option has whole seconds
    late = [(1, Sample(DAY_MS + HOUR_MS - 1000, 125.0)), (2, Sample(DAY_MS + 4 * HOUR_MS - 1000, 1_000_120.0))]
    ingest(spark, root, late)
    run_jobs(spark, root)
    after = billed(tables, 4)
    assert after.total.figures[0] - before["all principals"][0] == 1_000_000
    assert after.late_samples == 1  # of the first hour, which is closed
    then = billed(Tables.open(spark, str(root), create=False, as_of=moment), 4)
    assert by_name(then) == before
    assert then.late_samples == 0
    now, was = page_of(root, None), page_of(root, moment)
    assert f"as they were at {moment:%Y-%m-%d %H:%M:%S}" in was.text
    told = [f"{found.total.figures[0]:,}" for found in (after, then)]
    assert [one in now.texts for one in told] == [True, False]
    assert [one in was.texts for one in told] == [False, True]
    assert "1 sample came after" in now.text


def test_hours_that_are_not_summed_yet_are_told(spark: SparkSession, root: Path, tables: Tables) -> None:
    ingest(spark, root, counter(1, (5,), start=10_000.0))
    rollup.run(spark, str(root))
    assert billed(tables, 6).missing_windows == 1
    others = collect_bill(tables, tables.read("series"), "c", span(6), jobs=("another",))
    assert others.missing_windows == 0  # none of its hours will be in the bill


def test_a_time_before_the_history_is_refused(spark: SparkSession, root: Path) -> None:
    then = Tables.open(spark, str(root), create=False, as_of=datetime(2020, 1, 1, tzinfo=UTC))
    with pytest.raises(TablesError, match="does not go back to 2020-01-01 00:00:00 UTC"):
        then.snapshot("usage")
