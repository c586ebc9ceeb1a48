"""What is older than its retention goes, by whole days; so does what killed jobs left."""

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click
import pytest
from pyspark.sql import SparkSession

from analytics.jobs import expire
from analytics.tables import commits
from analytics.tables.store import Tables
from tests.analytics.test_analytics_tables_commits import content, samples

ROW = (1, 8, 1.0)


def test_days_go_when_their_last_instant_is_too_old(spark: SparkSession, tmp_path: Path) -> None:
    tables = Tables.open(spark, str(tmp_path))
    with tables.transaction("batch") as change:
        change.append_rows("samples", samples(spark, ROW))
    last_day = datetime(2026, 11, 28, 23, 59, tzinfo=UTC)
    assert expire.run(spark, str(tmp_path), {"samples": 0}, now=last_day + timedelta(days=900)) != ["samples"]
    assert expire.run(spark, str(tmp_path), {"samples": 7}, now=last_day) == []
    assert content(tables) == [ROW]
    deleted = expire.run(spark, str(tmp_path), {"samples": 7}, now=last_day + timedelta(minutes=1))
    assert deleted == ["samples/date=2026-11-21"]
    assert content(tables) == []


def test_rubbish_of_killed_jobs_goes_and_the_last_batch_is_remembered(spark: SparkSession, tmp_path: Path) -> None:
    tables = Tables.open(spark, str(tmp_path))
    names = [f"{commits.STAGING}/old/x", f"{commits.STAGING}/young/x"]
    names += [f"{commits.DONE}/compact-1.json", f"{commits.DONE}/{commits.batch_id('s', 1)}.json"]
    for name in names:
        tables.files.create_text(name, "{}")
    for name in (f"{commits.STAGING}/old", *names[2:]):
        os.utime(tmp_path / name, (1_700_000_000, 1_700_000_000))
    deleted = expire.run(spark, str(tmp_path), {}, now=datetime.now(UTC))
    assert deleted == [f"{commits.STAGING}/old", f"{commits.DONE}/compact-1.json"]
    assert tables.files.exists(names[1])
    assert tables.is_done(commits.batch_id("s", 1))


def test_the_option_is_checked() -> None:
    assert expire._parse_retention(("samples=7",)) == expire.DEFAULT_DAYS | {"samples": 7}
    for text, said in (("sample=7", "no table that can expire"), ("series=7", "no table"), ("samples=x", "TABLE=DAYS")):
        with pytest.raises(click.BadParameter, match=said):
            expire._parse_retention((text,))
