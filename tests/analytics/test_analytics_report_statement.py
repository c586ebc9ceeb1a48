"""From the tables to the page, through the command: the figures are those that went in."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner
from pyspark.sql import DataFrame, SparkSession

from analytics.cli import main
from analytics.jobs import report
from analytics.report.failures import ACTIVE, Failures, collect_connections, collect_failures, list_clusters
from analytics.report.page import render_page
from analytics.report.span import HOURS_MAX, BadSpan, candidates, parse_last
from analytics.tables.schemas import ROLLUP, SERIES, VIEWS
from analytics.tables.store import Tables
from tests.analytics.report_data import HOSTILE, make_tables, span
from tests.analytics.test_analytics_report_page import Parsed
from tests.analytics.transforms_data import DAY, DAY_MS, MINUTE_MS, moment


@pytest.fixture(scope="module")
def tables(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Tables:
    return make_tables(spark, tmp_path_factory.mktemp("report"))


@pytest.fixture
def empty(spark: SparkSession, tmp_path: Path) -> Tables:
    return Tables.open(spark, str(tmp_path / "empty"))


def page_of(spark: SparkSession, tables: Tables, *names: str, hours: int = 3) -> Parsed:
    spans = candidates(DAY, DAY + timedelta(hours=hours), DAY + timedelta(days=3))
    made = report.run(spark, tables.location.spark_url, spans, names, made_at=DAY + timedelta(days=1))
    return Parsed(render_page(made))


# ---- which time


@pytest.mark.parametrize(("hours", "nouns"), [(1, ["hour", "day"]), (HOURS_MAX, ["hour", "day"]), (24 * 90, ["day"])])
def test_the_resolution_follows_from_the_length(hours: int, nouns: list[str]) -> None:
    spans = candidates(DAY, DAY + timedelta(hours=hours), DAY + timedelta(days=4000))
    assert [one.resolution.noun for one in spans] == nouns
    assert spans[0].windows == (hours if nouns[0] == "hour" else hours // 24)


def test_windows_are_whole_and_the_last_is_that_of_now() -> None:
    now = DAY + timedelta(hours=5, minutes=30)
    (hours, days) = candidates(now - timedelta(hours=24), now, now)
    assert (hours.end, hours.windows) == (DAY + timedelta(hours=6), 24)
    assert (days.start, days.end) == (DAY, DAY + timedelta(days=1))
    assert (hours.before.end, hours.before.windows) == (hours.start, 24)
    assert candidates(DAY, DAY + timedelta(days=9), now)[0].end == hours.end


def test_a_time_that_cannot_be_reported_on() -> None:
    with pytest.raises(BadSpan, match="still to come"):
        candidates(DAY, DAY + timedelta(hours=1), DAY)
    with pytest.raises(BadSpan, match="10 years"):
        candidates(DAY - timedelta(days=4000), DAY, DAY)
    with pytest.raises(BadSpan, match="before it ends"):
        candidates(DAY, DAY, DAY)


def test_lengths_of_time() -> None:
    assert [parse_last(text) for text in ("24h", "30d")] == [timedelta(hours=24), timedelta(days=30)]
    for text in ("", "24", "h", "0h", "-1h", "1w", "1.5h", "90m"):
        with pytest.raises(BadSpan):
            parse_last(text)


# ---- what failed, and connections


@pytest.fixture(scope="module")
def east(tables: Tables) -> Failures:
    return collect_failures(tables, tables.read("series"), "east", span(3))


def test_failures_by_cause_and_by_broker(tables: Tables, east: Failures) -> None:
    series = tables.read("series")
    assert list_clusters(series) == ["east", "west"]
    assert east.counts == [("re-authentications failed", HOSTILE, 180, 0)]
    assert east.brokers == [(HOSTILE, 0.0, None), ("b2", 0.0, None), ("b1", 1.0, None)]
    later = collect_failures(tables, series, "east", span(1, start=DAY + timedelta(hours=2)))
    assert later.counts == [("re-authentications failed", HOSTILE, 60, 60)]
    assert collect_failures(tables, series, "west", span(3)) == Failures()


def test_connection_seconds_are_summed_over_workers(tables: Tables) -> None:
    found = collect_connections(tables, tables.read("series"), "east", span(3))
    assert found == {DAY + timedelta(hours=hour): 14 * 3600 for hour in range(3)}


def append(tables: Tables, **frames: DataFrame) -> None:
    for view, frame in frames.items():
        with tables.change(VIEWS[view].table) as change:
            change.append(change.write(view, frame))


def test_a_process_that_was_replaced_does_not_count_twice(spark: SparkSession, tmp_path: Path) -> None:
    tables = Tables.open(spark, str(tmp_path))
    labels = {"cluster": "c", "role": "forwarder", "worker": "0"}
    series = [(number, ACTIVE, labels | {"instance": str(number)}, None, DAY) for number in (1, 2)]
    halves = [(1, 0, 29), (2, 30, 59)]  # the minutes of the first and the last scrape
    rows = [_gauge_hour(number, 5.0, first, last) for number, first, last in halves]
    append(tables, series=spark.createDataFrame(series, SERIES), rollup_1h=spark.createDataFrame(rows, ROLLUP))
    assert collect_connections(tables, tables.read("series"), "c", span(1)) == {DAY: 5 * 3600}


def _gauge_hour(series: int, value: float, first: int, last: int) -> tuple[object, ...]:
    n = last - first + 1
    ends = [(moment(DAY_MS + minute * MINUTE_MS), value, None) for minute in (first, last)]
    growth = (0, 0.0, None, 0.0, 0, 0)
    return (series, DAY, n, n * value, value, value, *ends[0], *ends[1], *growth, "1h", DAY.date(), None)


# ---- the page


def test_the_page_has_the_figures(spark: SparkSession, tables: Tables) -> None:
    page = page_of(spark, tables, "east", HOSTILE)
    assert "Statement, 2026-11-20 00:00 to 2026-11-20 03:00 UTC" in page.texts
    assert "re-authentications failed" in page.texts
    assert f"There is no cluster named '{HOSTILE}'; there are: east, west." in page.text
    place = page.texts.index("alice")
    assert page.texts[place : place + 7] == ["alice", "3,000", "3,000", "98.91 %", "6", "6", "3"]
    assert "The usage tables have nothing of the time before." in page.texts


def test_empty_tables_give_a_page_that_says_so(spark: SparkSession, empty: Tables) -> None:
    assert "The tables have no series of the proxy" in page_of(spark, empty).text
    named = page_of(spark, empty, "east")
    assert "There is no cluster named 'east'; there are none." in named.text


def test_a_coarser_table_where_the_finer_has_expired(spark: SparkSession, tables: Tables, tmp_path: Path) -> None:
    other = Tables.open(spark, str(tmp_path))
    append(other, series=tables.read("series"), rollup_1d=tables.read("rollup_1d"))
    page = page_of(spark, other, "east", hours=24)
    assert "There is nothing by hour of this time" in page.text


@pytest.fixture
def output(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "page.html"
    yield path
    assert not list(tmp_path.glob(".page*"))  # nothing is left beside it


def test_the_command_writes_a_file(spark: SparkSession, tables: Tables, output: Path) -> None:
    arguments = ["report", "--tables", tables.location.spark_url, "--start", "2026-11-20"]
    output.write_text("old")
    done = CliRunner().invoke(
        main, [*arguments, "--end", "2026-11-20T03:00:00", "--cluster", "west", "--output", str(output)]
    )
    assert done.exit_code == 0, done.output
    assert "page.html: " in done.output
    assert output.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_a_page_goes_to_any_hadoop_path(spark: SparkSession, tmp_path: Path) -> None:
    for text in ("old", "new"):
        report.write_file(spark, f"file://{tmp_path}/page.html", text.encode())
    assert (tmp_path / "page.html").read_text() == "new"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--output", "/nowhere/page.html"], "there is no directory /nowhere"),
        (["--output", "x", "--last", "1y"], "'1y' is no length of time"),
        (["--output", "x", "--last", "1h", "--start", "2026-01-01"], "--last is up to now"),
        (["--output", "x", "--end", "2026-01-01"], "--end needs --start"),
        (["--output", "x", "--start", "2026-01-02", "--end", "2026-01-01"], "must begin before it ends"),
        (["--output", "x", "--start", "2001-01-02"], "10 years at most"),
        (["--output", "x", "--lines", "x.csv"], "with --prices"),
        (["--output", "x", "--prices", "/nowhere/prices.toml"], "cannot read /nowhere/prices.toml"),
        ([], "--output"),
    ],
)
def test_bad_options_of_the_report_are_told_before_spark_starts(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(main, ["report", "--tables", "/x", *arguments])
    assert done.exit_code == 2
    assert said in done.output
