"""The report's bill after the real jobs: it is what the usage tables have, and says what they do not have."""

import csv
import io
import time
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from analytics.cli import main
from analytics.jobs import rollup, usage
from analytics.report import bill
from analytics.report.bill import Bill, BilledTwice, collect_bill, collect_days, collect_use, missing_windows
from analytics.tables.errors import TablesError
from analytics.tables.schemas import USAGE
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


def test_use_by_charge_period_and_a_row_that_is_there_twice(spark: SparkSession, tmp_path: Path) -> None:
    tables = Tables.open(spark, str(tmp_path))
    rows = [("c", "alice", DAY + timedelta(hours=hour), 10, 1, 3, 4, 1, True, "1h", DAY.date()) for hour in range(4)]
    append_usage(spark, tables, rows)
    middle, end = DAY + timedelta(hours=3), DAY + timedelta(hours=4)
    periods = [(DAY, middle), (middle, end)]
    found = sorted(collect_use(tables, "c", periods, span(4)), key=lambda one: one.start)
    assert [one.quantities for one in found] == [
        {"gib_in": 10 * n, "gib_out": n, "million_messages": 7 * n} for n in (3, 1)
    ]
    append_usage(spark, tables, rows[:1])
    with pytest.raises(BilledTwice, match="1 rows twice"):
        collect_use(tables, "c", periods, span(4))


def append_usage(
    spark: SparkSession, tables: Tables, rows: list[tuple[object, ...]], view: str = "usage_hourly"
) -> None:
    with tables.change("usage") as change:
        change.append(change.write(view, spark.createDataFrame(rows, USAGE)))


def test_days_without_most_of_their_hours_are_left_out(spark: SparkSession, tmp_path: Path) -> None:
    tables = Tables.open(spark, str(tmp_path))
    days = [DAY + timedelta(days=place) for place in range(3)]
    whole = [("c", "a", day, 10, 1, 0, 0, 1, True, "1d", day.date()) for day in days]
    hours = [("c", "a", days[1] + timedelta(hours=n), 1, 0, 0, 0, 0, True, "1h", days[1].date()) for n in range(20)]
    hours += [("c", "a", days[2] + timedelta(hours=n), 1, 0, 0, 0, 0, True, "1h", days[2].date()) for n in range(19)]
    append_usage(spark, tables, whole, "usage_daily")
    append_usage(spark, tables, hours)
    found, use = collect_days(tables, "c", span(72))
    assert found == [day.date() for day in days[:2]]  # of the first the hours have expired
    assert use["a"][DAY.date()] == 11


def test_missing_hours_are_ranges_and_only_of_the_past() -> None:
    known = {DAY + timedelta(hours=hour) for hour in (0, 3)}
    found = missing_windows(known, span(6), DAY + timedelta(hours=5, minutes=30))
    assert found == [(DAY + timedelta(hours=start), DAY + timedelta(hours=end)) for start, end in ((1, 3), (4, 5))]


def test_the_files_are_the_same_each_time_and_add_up(spark: SparkSession, root: Path, tmp_path: Path) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text(
        'currency = "EUR"\ndecimals = 6\n[[price]]\nfrom = 2026-11-01\ngib_in = 1000\n[budgets]\ndefault = 1\n'
    )
    arguments = ["--tables", str(root), "--start", "2026-11-20", "--end", "2026-11-20T04:00:00", "--cluster", "c"]
    made = []
    for name in ("one", "two"):
        paths = [tmp_path / f"{name}.html", tmp_path / f"{name}.csv", tmp_path / f"{name}.parquet"]
        options = [
            part for pair in zip(("--output", "--lines", "--focus"), map(str, paths), strict=True) for part in pair
        ]
        done = CliRunner().invoke(main, ["report", *arguments, "--prices", str(prices), *options])
        assert done.exit_code == 0, done.output
        made.append([path.read_bytes() for path in paths])
    assert made[0][1:] == made[1][1:]
    rows = list(csv.DictReader(io.StringIO(made[0][1].decode())))
    found = billed(Tables.open(spark, str(root)), 4)
    assert sum(int(row["quantity"]) for row in rows) == sum(found.total.figures[:4])
    cost = sum(Decimal(row["cost"]) for row in rows)
    assert cost == round(Decimal(found.total.figures[0]) * 1000 / (1 << 30), 6)
    assert f"{cost} EUR" in Parsed(made[0][0].decode()).texts


def test_a_time_before_the_history_is_refused(spark: SparkSession, root: Path) -> None:
    then = Tables.open(spark, str(root), create=False, as_of=datetime(2020, 1, 1, tzinfo=UTC))
    with pytest.raises(TablesError, match="does not go back to 2020-01-01 00:00:00 UTC"):
        then.snapshot("usage")
