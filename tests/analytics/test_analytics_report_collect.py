"""From the tables to the page, through the command: the figures are those that went in."""

import re
from collections.abc import Iterator
from datetime import timedelta
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from analytics.cli import main
from analytics.jobs import report
from analytics.report import collect, wanted
from analytics.report.collect import brokers, clusters, points
from analytics.report.points import Points
from analytics.report.principals import TOP, principals
from analytics.report.span import candidates
from analytics.tables.schemas import ROLLUP_1H, SERIES, USAGE_HOURLY
from analytics.tables.store import Tables
from tests.analytics.report_data import HOSTILE, make_tables, span
from tests.analytics.transforms_data import DAY, DAY_MS, MINUTE_MS, moment


@pytest.fixture(scope="module")
def tables(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Tables:
    return make_tables(spark, tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def east(tables: Tables) -> Points:
    """By minute, the first hour."""
    return points(tables, tables.read("series"), "east", span(1))


@pytest.fixture
def empty(spark: SparkSession, tmp_path: Path) -> Tables:
    return Tables.open(spark, str(tmp_path / "empty"))


@pytest.fixture(scope="module")
def whole(spark: SparkSession, tables: Tables) -> str:
    """The page about a cluster, and about one that is not there."""
    return page_of(spark, tables, "east", HOSTILE)


class Page(HTMLParser):
    """What a browser would make of the page, as far as it matters here."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self._in_script = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in_script = tag == "script"

    def handle_data(self, data: str) -> None:
        (self.scripts if self._in_script else self.texts).append(data)

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    @property
    def text(self) -> str:
        return "\n".join(self.texts)


def page_of(spark: SparkSession, tables: Tables, *names: str, hours: float = 3) -> str:
    spans = candidates(DAY, DAY + timedelta(hours=hours), DAY + timedelta(days=3))
    return report.run(spark, tables.files.root, spans, names, made_at=DAY)


def test_growth_is_summed_over_workers_and_principals(tables: Tables, east: Points) -> None:
    series = tables.read("series")
    assert clusters(series) == ["east", "west"]
    moved = east.grown(wanted.BYTES, 0)
    assert set(moved) == {"to_broker", "to_client"}
    assert list(moved["to_broker"].values()) == [12000.0] * 60
    assert sum(east.grown(wanted.MESSAGES, 0)["to_client"].values()) == 2 * 2 * 3 * 60
    assert min(moved["to_broker"]) == DAY_MS
    west = points(tables, series, "west", span(1))
    assert list(west.grown(wanted.BYTES).values()) == [dict.fromkeys(moved["to_client"], 60.0)]
    assert west.metrics() == {wanted.BYTES}


@pytest.mark.parametrize(("resolution", "hours"), [(1, 3), (2, 24)])
def test_coarser_tables_give_the_same_totals(tables: Tables, resolution: int, hours: int) -> None:
    found = points(tables, tables.read("series"), "east", span(hours, resolution))
    assert sum(found.grown(wanted.BYTES)[""].values()) == 180 * 12120.0
    assert set(found.at(wanted.ACTIVE)[""].values()) == {14.0}


def test_only_the_windows_asked_for(tables: Tables) -> None:
    part = span(0.5, start=DAY + timedelta(minutes=45))
    line = points(tables, tables.read("series"), "east", part).grown(wanted.BYTES)[""]
    assert sorted(line) == list(part.windows_ms)


def test_a_gauge_is_summed_over_workers(east: Points) -> None:
    assert set(east.at(wanted.ACTIVE)[""].values()) == {14.0}


def test_a_process_that_was_replaced_does_not_count_twice(spark: SparkSession, tmp_path: Path) -> None:
    tables = Tables.open(spark, str(tmp_path))
    labels = {"cluster": "c", "role": "forwarder", "worker": "0"}
    series = [(number, wanted.ACTIVE, labels | {"instance": str(number)}, None, DAY) for number in (1, 2)]
    halves = [(1, 0, 29), (2, 30, 59)]  # the minutes of the first and the last scrape
    rows = [_gauge_hour(number, 5.0, first, last) for number, first, last in halves]
    with tables.transaction("test") as change:
        change.append("series", spark.createDataFrame(series, SERIES))
        change.append("rollup_1h", spark.createDataFrame(rows, ROLLUP_1H))
    found = points(tables, tables.read("series"), "c", span(1, 1)).at(wanted.ACTIVE)[""]
    assert found == {DAY_MS: 5.0}


def _gauge_hour(series: int, value: float, first: int, last: int) -> tuple[object, ...]:
    n = last - first + 1
    ends = [(moment(DAY_MS + minute * MINUTE_MS), value, None) for minute in (first, last)]
    return (series, DAY, n, n * value, 0.0, value, value, *ends[0], *ends[1], 0.0, 0.0, 0.0, 0, 0, DAY.date())


def test_quantiles_of_classic_and_native_histograms(east: Points) -> None:
    (lookups,) = east.distributions(wanted.LOOKUP, 0).values()
    assert lookups[DAY_MS].quantile(0.5) == pytest.approx(0.01 + 0.09 * 50 / 90)
    assert lookups[DAY_MS].quantile(0.95) == pytest.approx(0.1 + 0.9 * 0.5)
    assert lookups[DAY_MS].average == pytest.approx(0.1)
    handshakes = east.distributions(wanted.HANDSHAKE, 0)["total"]
    assert sorted(handshakes) == [DAY_MS, DAY_MS + MINUTE_MS]
    assert handshakes[DAY_MS].count == 20  # both workers'
    assert handshakes[DAY_MS].buckets == {0.1: 8.0, float("inf"): 12.0}
    assert handshakes[DAY_MS].quantile(0.2) == pytest.approx(0.05)


def test_brokers_up_by_window_and_the_worst(tables: Tables) -> None:
    found = brokers(tables, tables.read("series"), "east", span(1))
    assert set(found.configured.values()) == {3.0}
    assert set(found.up.values()) == {1.0}
    assert found.set_aside == {}
    assert found.worst == [(HOSTILE, 0.0), ("b2", 0.0)]


def test_labels_beyond_the_limit_are_left_out_and_told(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "KEYS_MAX", 1)
    found = points(tables, tables.read("series"), "east", span(1))
    assert set(found.grown(wanted.BYTES, 0)) == {"to_broker"}  # which moved more
    assert wanted.BYTES in found.cut
    assert wanted.ACTIVE not in found.cut


def test_the_top_principals_and_the_rest(spark: SparkSession, tmp_path: Path) -> None:
    tables = Tables.open(spark, str(tmp_path))
    rows = [
        ("c", f"p{number:02}", DAY + timedelta(hours=hour), number, 1, 1, 2, 3, hour == 0, DAY.date())
        for number in range(TOP + 5)
        for hour in (0, 1)
    ]
    rows.append(("c", "other", DAY, 10**9, 1, 1, 2, 3, True, DAY.date()))
    rows.append(("d", "p99", DAY, 10**9, 1, 1, 2, 3, True, DAY.date()))
    with tables.transaction("test") as change:
        change.append("usage_hourly", spark.createDataFrame(rows, USAGE_HOURLY))
    part = span(1, start=DAY + timedelta(minutes=30))  # touches both hours
    found = principals(tables, "c", part)
    assert [usage.name for usage in found.top] == [f"p{number:02}" for number in range(TOP + 4, 4, -1)]
    assert found.top[0].figures == (2 * (TOP + 4), 2, 2, 4, 6)
    assert found.further is not None
    assert found.further.figures == (2 * (0 + 1 + 2 + 3 + 4), 10, 10, 20, 30)
    assert found.other is not None
    assert found.other.figures[0] == 10**9
    assert found.open_windows == 1
    assert found.lines["p24"] == {DAY_MS: 25.0, DAY_MS + 60 * MINUTE_MS: 25.0}
    first = principals(tables, "c", span(1))
    assert first.top[0].figures[0] == TOP + 4


def test_the_page_has_the_figures(whole: str) -> None:
    page = Page(whole)
    assert "Pulsar proxy, 2026-11-20 00:00 to 2026-11-20 03:00 UTC" in page.texts
    assert "2.1 MiB" in page.texts  # east's bytes to brokers: 180 · 12000
    assert f"{HOSTILE}: No data for" in page.text
    assert "alice" in page.texts
    assert "other (all that the proxy does not count by name)" in page.texts
    assert {"cluster-0", "cluster-1"} <= {attributes.get("id") for _, attributes in page.tags}


def test_the_page_asks_the_network_for_nothing(whole: str) -> None:
    page = Page(whole)
    assert [tag for tag, _ in page.tags].count("head") == 1
    for tag, attributes in page.tags:
        assert tag not in {"link", "img", "iframe", "object", "embed", "base", "form"}, tag
        assert "src" not in attributes
        assert (attributes.get("href") or "#")[0] == "#"
    (policy,) = (own["content"] for tag, own in page.tags if tag == "meta" and "http-equiv" in own)
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    assert "http" not in policy
    assert sum("plotly.js v" in script[:200] for script in page.scripts) == 1
    assert len(whole) < 8e6


def test_names_of_strangers_are_harmless(whole: str) -> None:
    page = Page(whole)
    assert HOSTILE in page.texts  # shown, as text
    assert not any("alert(1)" in script and "Plotly.newPlot" not in script for script in page.scripts)
    plots = [script for script in page.scripts if "Plotly.newPlot" in script]
    assert any("alert(1)" in plot for plot in plots)
    for plot in plots:
        assert "<script" not in plot
        assert not re.search(r'"name":"[^"]*(<|\\u003c)', plot)  # Plotly would read it as HTML
    assert f"There is no cluster named '{HOSTILE}'" in page.text


def test_empty_tables_give_a_page_that_says_so(spark: SparkSession, empty: Tables) -> None:
    page = Page(page_of(spark, empty))
    assert "The tables have no series of the proxy" in page.text
    assert "no data" in page.texts
    named = Page(page_of(spark, empty, "east"))
    assert "There is no cluster named 'east'; there are none." in named.text
    assert named.texts.count("no data") > 30  # every panel, and the summary's figures
    assert not any("Plotly.newPlot" in script for script in named.scripts)


def test_a_coarser_table_where_the_finer_has_expired(spark: SparkSession, tables: Tables, tmp_path: Path) -> None:
    other = Tables.open(spark, str(tmp_path))
    with other.transaction("test") as change:
        change.append("series", tables.read("series"))
        change.append("rollup_1h", tables.read("rollup_1h"))
    page = Page(page_of(spark, other, "east"))
    assert "There is nothing by minute of this time" in page.text
    assert "One point a hour" not in page.text
    assert "Points: one an hour." in page.text


@pytest.fixture
def output(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "page.html"
    yield path
    assert not list(tmp_path.glob(".page*"))  # nothing is left beside it


def test_the_command_writes_a_file(spark: SparkSession, tables: Tables, output: Path) -> None:
    arguments = ["report", "--tables", tables.files.root, "--start", "2026-11-20", "--end", "2026-11-20T03:00:00"]
    output.write_text("old")
    done = CliRunner().invoke(main, [*arguments, "--cluster", "west", "--output", str(output)])
    assert done.exit_code == 0, done.output
    assert "page.html: " in done.output
    assert output.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_a_page_goes_to_any_hadoop_path(spark: SparkSession, tmp_path: Path) -> None:
    for text in ("old", "new"):
        report.write(spark, f"file://{tmp_path}/page.html", text)
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
