"""Samples of five days over a month's end, from the spool to bills, and the same in DuckDB: not one row differs.

They come in three batches, each followed by `rollup` and `usage`. The first one comes twice: two ingests of two spools
run at once.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import duckdb
from pyspark.sql import SparkSession

from analytics.jobs import ingest, rollup, usage
from tests.analytics import recomputed
from tests.analytics.recomputed import HOUR_MS
from tests.analytics.sent_samples import Labels, Sent, created_gauge, fill, named_table, principal, samples_table
from tests.analytics.spool_files import SpoolFiles

BEGIN = datetime(2025, 11, 27, tzinfo=UTC)
BEGIN_MS = int(BEGIN.timestamp() * 1000)
LOOKBACK_DAYS = 2
BATCH_ENDS = (48, 84, 120)
"""Hours after BEGIN."""
Line = list[tuple[int, float]]


def hour(hours: float) -> int:
    return BEGIN_MS + int(hours * HOUR_MS)


def times(first: float, last: float, step_s: int = 600) -> list[int]:
    """Only two of six hours have scrapes: each hour costs files."""
    every = range(hour(first) + 13_000, hour(last), step_s * 1000)
    return [ts for ts in every if (ts - BEGIN_MS) // HOUR_MS % 6 < 2]


def grown(ts: Iterable[int], by: float = 7.0, start: float = 0.0) -> Line:
    return [(at, start + by * (number + 1)) for number, at in enumerate(ts)]


def sent(labels: Labels, line: Line, *, start: int = 0, batch: int | None = None) -> list[Sent]:
    """`batch`: by default that of the sample's time."""
    by_time = [sum(ts >= hour(end) for end in BATCH_ENDS) for ts, _ in line]
    return [
        Sent(labels, ts, value, own if batch is None else batch, start)
        for (ts, value), own in zip(line, by_time, strict=True)
    ]


def created(labels: Labels, samples: Sequence[Sent], *starts: tuple[float, float]) -> list[Sent]:
    """The counter's samples, and those of its gauge `_created`; `starts`: (from this hour on, hour that it tells)."""
    gauge = created_gauge(labels)
    told = [
        one._replace(labels=gauge, value=hour(max(pair for pair in starts if hour(pair[0]) <= one.ts)[1]) / 1000)
        for one in samples
    ]
    return [*samples, *told]


def plain_counters() -> list[Sent]:
    whole = times(0, 120)
    kinds = [("bytes", "to_broker"), ("bytes", "to_client"), ("messages", "to_broker"), ("sessions", "")]
    found = [
        one for place, kind in enumerate(kinds) for one in sent(principal("alice", *kind), grown(whole, place + 2))
    ]
    again = sent(principal("resent"), grown(whole))
    found += [*again, *again[::2], *(one._replace(batch=one.batch + 1) for one in again[::3] if one.batch < 2)]
    gauge = {"__name__": "pulsar_proxy_active_connections", "cluster": "c", "instance": "a:8080", "job": "proxy"}
    for worker in ("0", "1"):
        found += sent(gauge | {"worker": worker}, [(ts, ts // 600_000 % 9 / 4) for ts in whole])
    for where in ({"instance": "b:8080"}, {"cluster": "left", "instance": "l:8080"}):
        found += sent(principal("gone", **where), grown(times(0, 20)))
    return found


def restarts() -> list[Sent]:
    """Without a start; with one, below and above the old value; with the first one that is known; a fall within an
    hour whose start is unchanged.
    """
    found = sent(principal("fell"), grown(times(0, 30)) + grown(times(30, 120)))
    for name, level in (("below", 0.0), ("above", 1e6)):
        labels, line = principal(name), grown(times(0, 54)) + grown(times(54, 120), start=level)
        found += created(labels, sent(labels, line), (-1, -0.01), (54, 53.99))
        own = principal(f"own start, {name}")
        found += sent(own, grown(times(0, 54)), start=hour(-1))
        found += sent(own, grown(times(54, 120), start=level), start=hour(53.99))
    told_later = sent(principal("told later"), grown(times(0, 54)) + grown(times(54, 120), start=1e6))
    found += created(told_later[0].labels, [one for one in told_later if one.ts >= hour(54)], (54, 53.99))
    found += [one for one in told_later if one.ts < hour(54)]
    labels = principal("same start")
    return found + created(labels, sent(labels, grown(times(0, 18.5)) + grown(times(18.5, 120), start=99)), (-1, -0.01))


def outages() -> list[Sent]:
    """Of an hour, a day, and longer than the lookback; with a restart in it, and without."""
    found: list[Sent] = []
    for first, last in ((7, 8), (24, 48), (30, 110)):
        before, after = grown(times(0, first)), grown(times(last, 120), start=5000.0)
        found += sent(principal(f"outage at {first}"), before + after)
        for began in (-0.01, last - 0.5):
            labels = principal(f"outage at {first}, began {began}")
            found += created(labels, sent(labels, before + after), (-1, -0.01), (last, began))
    return found


def late() -> list[Sent]:
    """Samples for closed hours and for open ones; an unknown counter; a restart among the late ones."""
    found: list[Sent] = []
    for restart in (200, 37):
        line = grown(times(0, min(120, restart))) + grown(times(restart, 120))
        for with_created in (False, True):
            labels = principal(f"late, restart {restart}, {with_created}")
            own = [
                one._replace(batch=1) if hour(36) <= one.ts < hour(38) or hour(43) <= one.ts < hour(43.5) else one
                for one in sent(labels, line)
            ]
            found += created(labels, own, (-1, -0.01), (restart, restart)) if with_created else own
    unknown = principal("unknown")
    return found + created(unknown, sent(unknown, grown(times(30, 83)), batch=2), (-1, 29.9))


def replicas() -> list[Sent]:
    """The second reads 10 bytes less 100 ms later, and fills an outage of the first, in which the proxy restarts."""
    found: list[Sent] = []
    for name, shift_ms in (("replicas", 0), ("replicas at a minute's end", 46_950)):
        labels = principal(name)
        often, seldom = times(12, 14, 20), [*times(0, 12), *times(14, 120)]
        ts = sorted({at + shift_ms for at in [*often, *seldom]})
        began = next(place for place, at in enumerate(ts) if at >= hour(13.2))
        line = grown(ts[:began], start=100.0) + grown(ts[began:], start=100.0)
        for replica, delay_ms, less in (("a", 0, 0.0), ("b", 100, 10.0)):
            own = [(at + delay_ms, value - less) for at, value in line]
            if replica == "a":
                own = [pair for pair in own if not hour(13) <= pair[0] < hour(13.5) + 45_000]
            found += sent(labels | {"__replica__": replica}, own)
    return found


def late_cluster() -> list[Sent]:
    """Its first hours are older than the others' closed ones."""
    labels = principal("alice", cluster="new", instance="n:8080")
    return created(labels, sent(labels, grown([*times(60, 62), *times(100, 120)]), batch=2), (-1, 59.99))


def test_not_one_row_differs_from_duckdb_s(spark: SparkSession, tmp_path: Path) -> None:
    everything = [*plain_counters(), *restarts(), *outages(), *late(), *replicas(), *late_cluster()]
    root, spools = tmp_path / "tables", [SpoolFiles(tmp_path / name) for name in ("first", "second")]
    with duckdb.connect() as connection, ThreadPoolExecutor(len(spools)) as threads:
        connection.register("named", named_table(everything))
        for batch in range(len(BATCH_ENDS)):
            new = [one for one in everything if one.batch == batch]
            used = spools if batch == 0 else spools[:1]
            for spool in used:
                fill(spool, new)
            list(threads.map(lambda spool: ingest.run(spark, str(root), str(spool.directory)), used))
            rollup.run(spark, str(root), lookback_days=LOOKBACK_DAYS)
            options = usage.UsageOptions(BEGIN + timedelta(days=30), lookback_days=LOOKBACK_DAYS)
            usage.run(spark, str(root), options)
            connection.register("samples", samples_table([one for one in everything if one.batch <= batch]))
            recomputed.register(connection, root, "rollup", "usage")
            rollups = recomputed.rollups(connection, LOOKBACK_DAYS)
            assert recomputed.differing(connection, recomputed.OURS_SQL, rollups) == []
            bills = recomputed.usage(connection, batch, LOOKBACK_DAYS)
            assert recomputed.differing(connection, recomputed.OUR_USAGE_SQL, bills) == []
    for spool in spools:
        spool.close()
