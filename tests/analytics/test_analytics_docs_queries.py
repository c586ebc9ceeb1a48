"""Every query of docs/analytics*.md runs, in the engine that its fence names, on tables that the real jobs made.

The engines that are asked the same question give the same answer.
"""

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import pytest
from pyspark.sql import SparkSession

from analytics.tables.store import Tables
from tests.analytics.test_analytics_usage import BYTES, CLOCKS, SESSIONS, add_series, run, started, tick
from tests.analytics.test_analytics_usage import labels as usage_labels
from tests.analytics.transforms_data import counter, ingest

DOCS = Path(__file__).parents[2] / "docs"
ENGINES = {
    "sql spark",
    "sql duckdb",
    "python spark-views",
    "python duckdb",
    "python polars",
    "python deltalake",
}
FENCE = re.compile(r"^```((?:sql|python)\b[^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RELAYED = "pulsar_proxy_binary_bytes_total"
BUCKET = "pulsar_proxy_lookup_seconds_bucket"
REAUTHENTICATION = "pulsar_proxy_reauthentication"


def blocks() -> list[tuple[str, str, str]]:
    """(page, the fence's words, code) of each block of SQL or Python."""
    found = []
    for page in sorted(DOCS.glob("analytics*.md")):
        for words, code in FENCE.findall(page.read_text()):
            found.append((page.name, words.strip(), code))
    return found


def of(engine: str) -> list[str]:
    return [code for _, words, code in blocks() if words == engine]


def statements(code: str) -> list[str]:
    bare = "\n".join(line.partition("--")[0] for line in code.splitlines())
    return [one.strip() for one in bare.split(";") if one.strip()]


@pytest.fixture(scope="module")
def tables(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Tables:
    """A day and some hours: alice's use, relayed bytes, connections, lookups, re-authentications."""
    root = tmp_path_factory.mktemp("docs")
    forwarder = usage_labels("east", "", None) | {"role": "forwarder"}
    metrics: dict[int, tuple[str, dict[str, str], float]] = {
        1: (BYTES, usage_labels("east", "alice", "to_broker"), 3.0),
        2: (BYTES, usage_labels("west", "alice", "to_client"), 5.0),
        3: (RELAYED, forwarder | {"direction": "to_broker"}, 60.0),
        4: ("pulsar_proxy_active_connections", forwarder, 0.0),
        42: (f"{REAUTHENTICATION}_success_total", forwarder | {"method": "token"}, 2.0),
        51: (f"{REAUTHENTICATION}_seconds_sum", forwarder, 0.5),
        52: (f"{REAUTHENTICATION}_seconds_count", forwarder, 2.0),
        61: (BUCKET, forwarder | {"request": "lookup", "le": "0.01"}, 50.0),
        62: (BUCKET, forwarder | {"request": "lookup", "le": "0.1"}, 97.0),
        63: (BUCKET, forwarder | {"request": "lookup", "le": "+Inf"}, 100.0),
    }
    add_series(spark, root, *((CLOCKS[name], SESSIONS, usage_labels(name, "clock")) for name in ("east", "west")))
    add_series(spark, root, *((number, metric, own) for number, (metric, own, _) in metrics.items()))
    rows = [
        row
        for number, (_, _, by) in metrics.items()
        for row in started(counter(number, [1, 2, 26], by=by, start=7.0 if number == 4 else 0.0))
    ]
    made = ingest(spark, root, rows + tick(30, "east", "west"))
    run(spark, root)
    return made


def placed(code: str, tables: Tables) -> str:
    return code.replace("/var/lib/metrics/tables", tables.location.delta_url)


def plain(rows: list[Any]) -> list[tuple[Any, ...]]:
    """Rows of any engine; times in UTC, floats that differ in the last digit only are equal."""
    return [tuple(map(_plain, tuple(row))) for row in rows]


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return (value if value.tzinfo is None else value.astimezone(UTC)).replace(tzinfo=None)
    return float(f"{value:.12g}") if isinstance(value, float | int) and not isinstance(value, bool) else value


@pytest.fixture(scope="module")
def in_spark(spark: SparkSession, tables: Tables) -> list[list[tuple[Any, ...]]]:
    (views,) = of("python spark-views")
    exec(compile(placed(views, tables), "docs/analytics-tables.md", "exec"), {"spark": spark})
    (code,) = of("sql spark")
    return [plain(spark.sql(one).collect()) for one in statements(code)]


@pytest.fixture(scope="module")
def in_duckdb(tables: Tables) -> list[list[tuple[Any, ...]]]:
    (registered,), (code,) = of("python duckdb"), of("sql duckdb")
    names: dict[str, Any] = {}
    exec(compile(placed(registered, tables), "docs/analytics-tables.md", "exec"), names)
    connection: duckdb.DuckDBPyConnection = names["connection"]
    with connection:
        found = [(one, connection.execute(one).fetchall()) for one in statements(code)]
    return [plain(rows) for one, rows in found if one.startswith(("select", "with"))]


@pytest.fixture(scope="module")
def in_polars(tables: Tables) -> dict[str, Any]:
    (code,) = of("python polars")
    names: dict[str, Any] = {}
    exec(compile(placed(code, tables), "docs/analytics-tables.md", "exec"), names)
    return names


def test_every_block_says_which_engine_it_is_for() -> None:
    found = [one for one in blocks() if one[1] != "python notebook"]  # tests/e2e/test_analytics_source.py
    assert {words for _, words, _ in found} == ENGINES  # so each of them is run by a test below
    assert not [page for page, words, _ in found if words not in ENGINES]


def test_the_queries_for_spark_answer(in_spark: list[list[tuple[Any, ...]]]) -> None:
    assert all(in_spark), "a query found nothing"
    by_minute, open_ones, p95, rates, top, growth = in_spark
    assert round(sum(row[1] for row in by_minute) * 60) == 60 * 24
    assert {row[1:] for row in open_ones} == {("east", 7.0, 7.0)}
    assert {row[1] for row in p95} == {0.1}
    assert {round(row[1] * 3600) for row in rates if row[1]} == {24}
    assert {row[2] for row in rates if row[1]} == {0.25}
    assert top == [("west", "alice", 24 * 5), ("east", "alice", 24 * 3)]
    assert growth == [(36 * 2,)]


def test_duckdb_gives_the_same_answers(
    in_spark: list[list[tuple[Any, ...]]], in_duckdb: list[list[tuple[Any, ...]]]
) -> None:
    by_minute, open_ones, p95, _, top, _ = in_spark
    assert in_duckdb == [by_minute, sorted(open_ones), p95, top]


def test_polars_gives_the_same_answers(in_spark: list[list[tuple[Any, ...]]], in_polars: dict[str, Any]) -> None:
    by_minute, open_ones, _, _, top, _ = in_spark
    assert plain(in_polars["bytes_per_second"].rows()) == by_minute
    assert plain(in_polars["connections"].rows()) == sorted(open_ones)
    assert plain(in_polars["top"].rows()) == top


def test_delta_rs_gives_the_same_answer(in_spark: list[list[tuple[Any, ...]]], tables: Tables) -> None:
    (code,) = of("python deltalake")
    names: dict[str, Any] = {}
    exec(compile(placed(code, tables), "docs/analytics-tables.md", "exec"), names)
    assert {(*key, value) for key, value in names["top"].items() if value} == set(in_spark[4])
    assert names["before"].num_rows == 0
