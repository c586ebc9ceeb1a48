"""What docs/analytics.md shows of `compact`, `expire` and `backfill` is what these jobs say, but for figures."""

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from analytics.jobs import backfill, compact, expire
from analytics.jobs.defaults import KEEP_DAYS
from analytics.tables.store import Tables
from tests.analytics.test_analytics_sources_http import T0_MS, FakePrometheus, prometheus
from tests.analytics.test_analytics_tables import NOW, ROWS
from tests.analytics.transforms_data import ingest

__all__ = ["prometheus"]
PAGE = Path(__file__).parents[2] / "docs" / "analytics.md"


def form(line: str) -> str:
    """A line without what differs from run to run: numbers, table names, how long the rest takes."""
    line = re.sub(r", about [\d.]+ (s|min|h)$", "", line)
    line = re.sub(
        r"^(expired: )?[a-z]+(_[a-z0-9]+)?( 1[mhd])? \d{4}-\d\d-\d\d( \d+)?(:|$)", r"\1TABLE PARTITION\5", line
    )
    return re.sub(r"\d[\d,]*(\.\d+)?", "N", line)


def shown(command: str) -> set[str]:
    """The forms of all lines that the page shows below `$ pulsar-proxy-analytics <command> …`."""
    blocks = re.findall(r"^```console\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    found: set[str] = set()
    for block in blocks:
        if block.startswith(f"$ pulsar-proxy-analytics {command} "):
            text = re.sub(r"\\\n", "", block)
            found |= {form(line) for line in text.splitlines() if not line.startswith("$ ")}
    return found


def lines_of(capsys: pytest.CaptureFixture[str]) -> set[str]:
    return {form(line) for line in capsys.readouterr().err.splitlines()}


def test_compact_says_what_the_page_shows(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for row in ROWS:
        ingest(spark, tmp_path, [row])
    capsys.readouterr()
    assert compact.run(spark, str(tmp_path), now=NOW, closed_after_hours=0) == 2
    compact.run(spark, str(tmp_path), now=NOW, closed_after_hours=0)
    assert lines_of(capsys) <= shown("compact")
    assert shown("compact") >= {
        "TABLE PARTITION: N files became N; N partitions left",
        "N of N partitions with several files compacted, N s altogether",
    }


def test_expire_says_what_the_page_shows(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for row in ROWS:
        ingest(spark, tmp_path, [row])
    capsys.readouterr()
    assert expire.run(spark, str(tmp_path), KEEP_DAYS, now=NOW + timedelta(days=40))
    expire.run(spark, str(tmp_path), KEEP_DAYS, now=NOW)
    assert lines_of(capsys) <= shown("expire")
    assert "expired: TABLE PARTITION" in shown("expire")


def test_backfill_says_what_the_page_shows(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str], prometheus: FakePrometheus
) -> None:
    Tables.open(spark, str(tmp_path))
    start = datetime.fromtimestamp(T0_MS / 1000, UTC)
    options = {"url": prometheus.url, "match": "up", "stepSeconds": "3600"}
    for _ in range(2):
        backfill.run(spark, str(tmp_path), options, start=start, end=start + timedelta(hours=2), batch_hours=1)
    said = lines_of(capsys)
    assert len(said) == 3  # with what is left, the last batch, the end
    assert said <= shown("backfill")
