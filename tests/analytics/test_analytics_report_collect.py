"""From the tables to the page, through the command: the figures are those that went in."""

import math
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner
from pyspark.sql import DataFrame, SparkSession

from analytics.cli import main
from analytics.jobs import report
from analytics.report import collect, metrics
from analytics.report.collect import collect_brokers, collect_points, list_clusters
from analytics.report.points import Points, classic_distribution
from analytics.report.span import candidates
from analytics.tables.schemas import ROLLUP, SERIES, VIEWS
from analytics.tables.store import Tables
from tests.analytics.report_data import HOSTILE, make_tables, span
from tests.analytics.test_analytics_report_page import Parsed
from tests.analytics.transforms_data import DAY, DAY_MS, MINUTE_MS, moment


@pytest.fixture(scope="module")
def tables(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Tables:
    return make_tables(spark, tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def east(tables: Tables) -> Points:
    """By minute, the first hour."""
    return collect_points(tables, tables.read("series"), "east", span(1))


@pytest.fixture
def empty(spark: SparkSession, tmp_path: Path) -> Tables:
    return Tables.open(spark, str(tmp_path / "empty"))


@pytest.fixture(scope="module")
def whole(spark: SparkSession, tables: Tables) -> str:
    """The page about a cluster, and about one that is not there."""
    return page_of(spark, tables, "east", HOSTILE)


def page_of(spark: SparkSession, tables: Tables, *names: str, hours: float = 3) -> str:
    spans = candidates(DAY, DAY + timedelta(hours=hours), DAY + timedelta(days=3))
    return report.run(spark, tables.location.spark_url, spans, names, made_at=DAY)


def test_growth_is_summed_over_workers_and_principals(tables: Tables, east: Points) -> None:
    series = tables.read("series")
    assert list_clusters(series) == ["east", "west"]
    moved = east.increase_by(metrics.BYTES, 0)
    assert set(moved) == {"to_broker", "to_client"}
    assert list(moved["to_broker"].values()) == [12000.0] * 60
    assert sum(east.increase_by(metrics.MESSAGES, 0)["to_client"].values()) == 2 * 2 * 3 * 60
    assert min(moved["to_broker"]) == DAY_MS
    west = collect_points(tables, series, "west", span(1))
    assert list(west.increase_by(metrics.BYTES).values()) == [dict.fromkeys(moved["to_client"], 60.0)]
    assert west.metrics() == {metrics.BYTES}


@pytest.mark.parametrize(("resolution", "hours"), [(1, 3), (2, 24)])
def test_coarser_tables_give_the_same_totals(tables: Tables, resolution: int, hours: int) -> None:
    found = collect_points(tables, tables.read("series"), "east", span(hours, resolution))
    assert sum(found.increase_by(metrics.BYTES)[""].values()) == 180 * 12120.0
    assert set(found.level_by(metrics.ACTIVE)[""].values()) == {14.0}


def test_only_the_windows_asked_for(tables: Tables) -> None:
    part = span(0.5, start=DAY + timedelta(minutes=45))
    line = collect_points(tables, tables.read("series"), "east", part).increase_by(metrics.BYTES)[""]
    assert sorted(line) == list(part.windows_ms)


def test_a_gauge_is_summed_over_workers(east: Points) -> None:
    assert set(east.level_by(metrics.ACTIVE)[""].values()) == {14.0}


def test_a_process_that_was_replaced_does_not_count_twice(spark: SparkSession, tmp_path: Path) -> None:
    tables = Tables.open(spark, str(tmp_path))
    labels = {"cluster": "c", "role": "forwarder", "worker": "0"}
    series = [(number, metrics.ACTIVE, labels | {"instance": str(number)}, None, DAY) for number in (1, 2)]
    halves = [(1, 0, 29), (2, 30, 59)]  # the minutes of the first and the last scrape
    rows = [_gauge_hour(number, 5.0, first, last) for number, first, last in halves]
    append(tables, series=spark.createDataFrame(series, SERIES), rollup_1h=spark.createDataFrame(rows, ROLLUP))
    found = collect_points(tables, tables.read("series"), "c", span(1, 1)).level_by(metrics.ACTIVE)[""]
    assert found == {DAY_MS: 5.0}


def append(tables: Tables, **frames: DataFrame) -> None:
    for view, frame in frames.items():
        with tables.change(VIEWS[view].table) as change:
            change.append(change.write(view, frame))


def _gauge_hour(series: int, value: float, first: int, last: int) -> tuple[object, ...]:
    n = last - first + 1
    ends = [(moment(DAY_MS + minute * MINUTE_MS), value, None) for minute in (first, last)]
    return (
        series,
        DAY,
        n,
        n * value,
        value,
        value,
        *ends[0],
        *ends[1],
        0,
        0.0,
        None,
        0.0,
        0,
        0,
        "1h",
        DAY.date(),
        None,
    )


def test_quantiles_of_classic_and_native_histograms(east: Points) -> None:
    (lookups,) = east.distributions(metrics.LOOKUP, 0).values()
    assert lookups[DAY_MS].quantile(0.5) == pytest.approx(0.01 + 0.09 * 50 / 90)
    assert lookups[DAY_MS].quantile(0.95) == pytest.approx(0.1 + 0.9 * 0.5)
    assert lookups[DAY_MS].average == pytest.approx(0.1)
    handshakes = east.distributions(metrics.HANDSHAKE, 0)["total"]
    assert sorted(handshakes) == [DAY_MS, DAY_MS + MINUTE_MS]
    assert handshakes[DAY_MS].count == 20  # both workers'
    assert handshakes[DAY_MS].buckets == {0.1: 8.0, float("inf"): 12.0}
    assert handshakes[DAY_MS].quantile(0.2) == pytest.approx(0.05)


def test_quantiles_over_instances_with_different_bounds() -> None:
    """A rolling upgrade: all observations are below 0.1 s, and only some instances have the bounds 1 and 5."""
    found = classic_distribution({0.1: 2000.0, 1.0: 1000.0, 5.0: 1000.0, math.inf: 2000.0}, 1.0, 2000.0)
    assert found.quantile(0.99) == pytest.approx(0.099)
    assert sum(found.buckets.values()) == 2000


def test_brokers_up_by_window_and_the_worst(tables: Tables) -> None:
    found = collect_brokers(tables, tables.read("series"), "east", span(1))
    assert set(found.configured.values()) == {3.0}
    assert set(found.up.values()) == {1.0}
    assert found.ejected == {}
    assert found.worst == [(HOSTILE, 0.0), ("b2", 0.0)]


def test_labels_beyond_the_limit_are_left_out_and_told(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "KEYS_MAX", 1)
    found = collect_points(tables, tables.read("series"), "east", span(1))
    assert set(found.increase_by(metrics.BYTES, 0)) == {"to_broker"}  # which moved more
    assert metrics.BYTES in found.cut
    assert metrics.ACTIVE not in found.cut


def test_the_page_has_the_figures(whole: str) -> None:
    page = Parsed(whole)
    assert "Pulsar proxy, 2026-11-20 00:00 to 2026-11-20 03:00 UTC" in page.texts
    assert "In 3 hours: 2.1 MiB to brokers and 21.1 KiB to clients for 2 principals" in page.text
    assert "2.1 MiB" in page.texts  # east's bytes to brokers: 180 · 12000
    assert HOSTILE in page.texts  # the cluster that is not there
    assert f"There is no cluster named '{HOSTILE}'; there are: east, west." in page.text
    assert "alice" in page.texts
    assert "other (all that the proxy does not count by name)" in page.texts
    assert {"cluster-0", "cluster-1"} <= {attributes.get("id") for _, attributes in page.tags}


def test_empty_tables_give_a_page_that_says_so(spark: SparkSession, empty: Tables) -> None:
    page = Parsed(page_of(spark, empty))
    assert "The tables have no series of the proxy" in page.text
    assert "no data" in page.texts
    named = Parsed(page_of(spark, empty, "east"))
    assert "There is no cluster named 'east'; there are none." in named.text
    assert named.texts.count("no data") > 15  # the summary's figures
    assert not any(own.get("class") == "plot" for _, own in named.tags)


def test_a_coarser_table_where_the_finer_has_expired(spark: SparkSession, tables: Tables, tmp_path: Path) -> None:
    other = Tables.open(spark, str(tmp_path))
    append(other, series=tables.read("series"), rollup_1h=tables.read("rollup_1h"))
    page = Parsed(page_of(spark, other, "east"))
    assert "There is nothing by minute of this time" in page.text
    assert "One point an hour;" in page.text


@pytest.fixture
def output(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "page.html"
    yield path
    assert not list(tmp_path.glob(".page*"))  # nothing is left beside it


def test_the_command_writes_a_file(spark: SparkSession, tables: Tables, output: Path) -> None:
    arguments = [
        "report",
        "--tables",
        tables.location.spark_url,
        "--start",
        "2026-11-20",
        "--end",
        "2026-11-20T03:00:00",
    ]
    output.write_text("old")
    done = CliRunner().invoke(main, [*arguments, "--cluster", "west", "--output", str(output)])
    assert done.exit_code == 0, done.output
    assert "page.html: " in done.output
    assert output.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_a_page_goes_to_any_hadoop_path(spark: SparkSession, tmp_path: Path) -> None:
    for text in ("old", "new"):
        report.write_page(spark, f"file://{tmp_path}/page.html", text)
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
        ([], "--output"),
    ],
)
def test_bad_options_of_the_report_are_told_before_spark_starts(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(main, ["report", "--tables", "/x", *arguments])
    assert done.exit_code == 2
    assert said in done.output
