"""The jobs by spark-submit on a standalone Spark cluster: executors decode and sum, with the code of `--py-files`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.analytics.spool_files import T0_MS, SpoolFiles, body_v2, labels

from .lab.pipeline import Tables
from .lab.prometheus import packed
from .lab.spark_cluster import SparkCluster

PRINCIPALS = ("alice", "bob")
DIRECTIONS = {"to_broker": "bytes_in", "to_client": "bytes_out"}
WORKERS = ("0", "1")
SCRAPE_MS = 20 * 60_000
SCRAPES = 7
HOUR_MS = 3_600_000


def counters() -> dict[frozenset[tuple[str, str]], int]:
    """Each counter's labels, and what it grows by from scrape to scrape, from zero on."""
    names = (
        labels(
            "pulsar_proxy_principal_bytes_total",
            job="proxy",
            cluster="c",
            principal=principal,
            direction=direction,
            worker=worker,
        )
        for principal, direction, worker in itertools.product(PRINCIPALS, DIRECTIONS, WORKERS)
    )
    return {frozenset(one.items()): number for number, one in enumerate(names, 1)}


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    """A spool of several segments: two hours and a bit, each scrape a request."""
    files = SpoolFiles(tmp_path / "spool", segment_bytes_max=1000)
    for scrape in range(SCRAPES):
        points = [(dict(names), scrape * SCRAPE_MS, float((scrape + 1) * by)) for names, by in counters().items()]
        files.add(body_v2(points, start_ms=-1000), 2)
    files.close()
    return files.directory


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SparkCluster]:
    """Master and worker, running."""
    (directory := tmp_path / "cluster").mkdir()
    with SparkCluster(directory) as running:
        yield running


def test_executors_do_the_work_with_the_code_that_was_submitted(
    cluster: SparkCluster, spool: Path, tmp_path: Path
) -> None:
    assert not cluster.can_import("analytics")
    assert cluster.can_import("pyarrow")
    tables = Tables(tmp_path / "tables")
    where = ["--tables", tables.url]
    assert cluster.submit(["ingest", "--spool", spool, *where], ["rollup", *where], ["usage", *where]) == {"0"}
    assert_exact(tables)


def assert_exact(tables: Tables) -> None:
    """The tables have every sample, what each counter grew in each hour, and what each principal used."""
    end_ms = T0_MS + SCRAPES * SCRAPE_MS
    assert tables.samples(0, end_ms) == {
        (names, T0_MS + scrape * SCRAPE_MS): packed(float((scrape + 1) * by))
        for names, by in counters().items()
        for scrape in range(SCRAPES)
    }
    grown = [(int(row["window"].timestamp() * 1000), row["increase"]) for row in tables.rows("rollup_1h")]
    scrapes_by_hour = (3, 3, 1)
    assert sorted(grown) == sorted(
        (T0_MS + hour * HOUR_MS, float(scrapes * by))
        for hour, scrapes in enumerate(scrapes_by_hour)
        for by in counters().values()
    )
    used = {principal: dict.fromkeys(("bytes_in", "bytes_out"), 0) for principal in PRINCIPALS}
    for names, by in counters().items():
        used[dict(names)["principal"]][DIRECTIONS[dict(names)["direction"]]] += SCRAPES * by
    others = {"messages_in": 0, "messages_out": 0, "sessions": 0}
    expected = {principal: sums | others for principal, sums in used.items()}
    assert tables.usage() == tables.usage("usage_daily") == expected
