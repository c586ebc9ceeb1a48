"""The job `pipeline`: from the spool to a bill in one session; a step that fails is named, and tried again."""

import io
import math
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import cast

import click
import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from analytics.cli import main
from analytics.commands import pipeline
from analytics.commands.pipeline import Pipeline
from analytics.jobs import report, rollup, usage
from analytics.jobs.defaults import KEEP_DAYS, KEEP_FOREVER
from analytics.jobs.progress import Console, starting
from analytics.report import page
from analytics.report.failures import ACTIVE, BROKER_UP, COUNTERS
from analytics.tables.errors import TablesError
from analytics.tables.store import Tables
from analytics.transforms.usage import TOTAL_MAX
from tests.analytics.spool_files import T0_MS, SpoolFiles, body_v2, labels
from tests.analytics.test_analytics_progress import Terminal

BYTES = labels(
    "pulsar_proxy_principal_bytes_total",
    job="proxy",
    cluster="c",
    principal="alice",
    direction="to_broker",
    instance="a",
)
TURN = ["ingest", "rollup", "usage", "report", "compact", "expire"]


@pytest.fixture
def made(tmp_path: Path) -> Pipeline:
    files = SpoolFiles(tmp_path / "spool")
    for minute in range(3):
        files.add(body_v2([(BYTES, minute * 60_000, 100.0 * (minute + 1))], start_ms=-1000), 2)
    files.close()
    keep = dict.fromkeys(KEEP_DAYS, KEEP_FOREVER)
    return Pipeline(str(files.directory), str(tmp_path / "tables"), keep, report=str(tmp_path / "page.html"))


def billed(spark: SparkSession, made: Pipeline) -> list[tuple[str, int]]:
    rows = Tables.open(spark, made.root).read("usage_hourly").select("principal", "bytes_in").collect()
    return [tuple(row) for row in rows]


def steps_told(text: str) -> list[str]:
    """The lines of beginning steps; others tell how long a step has been at work."""
    return re.findall(r"^step \d+ of \d+, (\w+):$", text, re.MULTILINE)


def test_a_run_makes_a_bill_a_page_and_the_upkeep_whatever_a_sender_sends(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Values that no counter has, and more counters than a long can sum, stop no step and enter no bill."""
    now_ms = int(time.time() * 1000) - T0_MS - 3_600_000  # the report is of the last day
    no_counts = (1e300, -1.0, math.nan, math.inf, -math.inf, 0.5)
    series = [(BYTES | {"principal": f"p{number}"}, (0.0, value, 300.0)) for number, value in enumerate(no_counts)]
    mallory = [f"mallory-{number}" for number in range(9)]
    workers = map(str, range(130))
    series += [(BYTES | {"principal": name, "worker": one}, (2.0**53 - 1,)) for one in workers for name in mallory]
    for value in (1.7e308, math.inf, -math.inf, math.nan):
        for worker in ("0", "1"):
            more = {"job": "proxy", "cluster": "c", "worker": f"{worker}{value}", "le": "1.0"}
            series += [(labels(metric, **more), (0.0, value)) for metric in (*COUNTERS, ACTIVE, BROKER_UP)]
    series.append((BYTES, (100.0, 200.0, 300.0)))
    points = [(names, now_ms + at * 60_000, value) for names, values in series for at, value in enumerate(values)]
    files = SpoolFiles(tmp_path / "spool")
    files.add(body_v2(points, start_ms=now_ms - 1000), 2)
    files.close()
    forever = dict.fromkeys(KEEP_DAYS, KEEP_FOREVER)
    made = Pipeline(str(files.directory), str(tmp_path / "tables"), forever, report=str(tmp_path / "page.html"))
    pipeline.run(made, None)
    told = capsys.readouterr().err
    assert told.startswith("[------------] step 0 of 6, Spark starts\nstep 1 of 6, ingest:\n")
    assert steps_told(told) == TURN
    for why in ("too large", "negative", "a fraction"):
        assert f"that is no count ({why})" in told
    sums = Tables.open(spark, made.root).read("usage_hourly").groupBy("principal").sum("bytes_in")
    bill = dict(map(tuple, sums.collect()))
    assert bill["alice"] == bill["p2"] == 300  # NaN is no sample
    assert {bill[name] for name in mallory} == {TOTAL_MAX}
    # The others' samples may be in two hours, one of which is set aside.
    assert all(0 <= bill.get(f"p{number}", 0) <= 300 for number in range(len(no_counts)))
    text = Path(tmp_path / "page.html").read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert "alice" in text


def test_the_scrape_jobs_named_are_those_of_bill_and_report(made: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[tuple[str, ...]] = []
    monkeypatch.setattr(usage, "run", lambda _spark, _root, options: named.append(options.jobs))
    monkeypatch.setattr(report, "run", lambda *_arguments, jobs, **_options: named.append(jobs))
    monkeypatch.setattr(page, "render_page", lambda _made: "")
    monkeypatch.setattr(report, "write_file", lambda *_arguments: None)
    steps = replace(made, jobs=("mine",)).steps(with_upkeep=False)
    for name in ("usage", "report"):
        steps[name](cast("SparkSession", None))
    assert named == [("mine",), ("mine",)]


def test_a_failed_step_is_named_and_ends_a_single_run(
    made: Pipeline, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_arguments: object) -> None:
        raise TablesError("the disk is full")

    monkeypatch.setattr(rollup, "run", fail)
    with pytest.raises(click.ClickException, match="rollup: the disk is full"):
        pipeline.run(made, None)
    assert steps_told(capsys.readouterr().err) == TURN[:2]


def test_following_a_failed_turn_is_tried_again_and_upkeep_comes_once_an_hour(
    spark: SparkSession, made: Pipeline, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, failures = rollup.run, [1]

    def fail_once(session: SparkSession, root: str) -> rollup.RollupReport:
        if failures.pop() if failures else 0:
            raise TablesError("the disk is full")
        return real(session, root)

    monkeypatch.setattr(rollup, "run", fail_once)
    pipeline.run(made, 0.1, turns=3)
    assert billed(spark, made) == [("alice", 300)]
    told = capsys.readouterr().err
    assert "FAILED: rollup: the disk is full; tried again in 0.1 s" in told
    assert steps_told(told) == [*TURN[:2], *TURN, *TURN[:4]]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--once", "--follow", "1"], "give one of them"),
        (["--report", "/nowhere/page.html"], "there is no directory /nowhere"),
        (["--keep", "nonsense=3"], "no table that can expire"),
    ],
)
def test_bad_options_are_told_before_spark_starts(tmp_path: Path, options: list[str], said: str) -> None:
    done = CliRunner().invoke(main, ["pipeline", "--tables", "x", "--spool", str(tmp_path), *options])
    assert done.exit_code == 2
    assert said in done.output


def test_a_wait_is_said_at_once() -> None:
    lines, terminal = io.StringIO(), Terminal()
    with starting("Spark starts", Console(lines)):
        assert lines.getvalue() == "Spark starts\n"
    with starting("Spark starts", Console(terminal)):
        assert terminal.getvalue() == "Spark starts"
    assert terminal.getvalue().endswith("\r\x1b[K")
