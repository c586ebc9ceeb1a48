"""Rollups and usage computed again in DuckDB, by docs/analytics-tables.md and with no code of `analytics`.

A table of samples has (series_id, replica, ts, start, value, counter_id, batch): times in milliseconds since 1970,
start and counter_id null if there are none, `batch` the number of the run with which the sample came. `named` tells of
each series (series_id, cluster, instance, principal, what); `what` is the column of the usage tables, or null.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
from deltalake import DeltaTable
from pyarrow import fs

HOUR_MS, DAY_MS = 3_600_000, 86_400_000
WIDTHS_MS = {"1m": 60_000, "1h": HOUR_MS, "1d": DAY_MS}
WHAT = ("bytes_in", "bytes_out", "messages_in", "messages_out", "sessions")
LATENESS_MS, SILENT_MS = 2 * HOUR_MS, 6 * HOUR_MS

GROWTH_SQL = """
create or replace table {into} as with
once as (
  select distinct on (series_id, replica, ts) * from {samples} where not isnan(value)
  order by value desc, start desc nulls last),
created as (
  select counter_id, replica, ts, round(value * 1000)::bigint as start from once
  where counter_id is not null and value > 0),
started as (
  select s.* replace (coalesce(s.start, own.start, other.start) as start),
    lag(s.value) over (partition by s.series_id, s.replica order by s.ts) as own_before
  from once s
  asof left join created own on s.series_id = own.counter_id and s.replica = own.replica and s.ts >= own.ts
  asof left join created other on s.series_id = other.counter_id and s.ts >= other.ts),
counts as (
  select *, max(n) over (partition by series_id, minute) as most
  from (select series_id, ts // 60000 as minute, replica, count(*) as n from started group by all)),
choice as (
  select series_id, minute, case when 2 * arg_min(n, replica) < max(most) then min(replica) filter (where n = most)
    else min(replica) end as replica
  from counts group by all),
chosen as (
  select s.* from started s
  join choice c on s.series_id = c.series_id and s.ts // 60000 = c.minute and s.replica = c.replica),
pairs as (
  select *, lag(ts) over w as ts_before, lag(value) over w as before, lag(replica) over w as replica_before,
    max(start) over (partition by series_id order by ts rows between unbounded preceding and 1 preceding) as newest,
    ts // 86400000 * 86400000 - {lookback_days} * 86400000 as since
  from chosen window w as (partition by series_id order by ts)),
falls as (
  select *, counter_id is null and coalesce(ts_before >= since, false) as follows,
    value < before and (replica = replica_before or coalesce(value < own_before, false)) as fell
  from pairs),
resets as (
  select *, follows and case when start is null then fell when newest is not null then start > newest
    else start >= ts_before or fell end as reset
  from falls)
select series_id, replica, ts, start, value, reset, follows and value < before and not reset as overlap,
  case when follows then ts_before end as since_ts,
  case when reset then value when follows then value - before when start >= since then value else 0 end as growth
from resets
"""
WINDOWS_SQL = """
select series_id, '{width}' as width, ts // {ms} * {ms} as window_ms, count(*) as n, sum(value) as sum,
  min(value) as min, max(value) as max, min(ts) as first_ts, arg_min(value, ts) as first_v,
  arg_min_null(start, ts) as first_start_ts,
  max(ts) as last_ts, arg_max(value, ts) as last_v, arg_max_null(start, ts) as last_start_ts,
  arg_max(replica, ts) as last_replica, arg_min(growth, ts) as entry, arg_min_null(since_ts, ts) as entry_ts,
  sum(growth) as increase, count(*) filter (where reset) as resets, count(*) filter (where overlap) as "overlaps"
from growth group by all
"""
OURS_SQL = """
select series_id, width, epoch_ms("window") as window_ms, n, sum, min, max, epoch_ms(first_ts) as first_ts, first_v,
  epoch_ms(first_start_ts) as first_start_ts, epoch_ms(last_ts) as last_ts, last_v,
  epoch_ms(last_start_ts) as last_start_ts, last_replica, entry, epoch_ms(entry_ts) as entry_ts,
  increase, resets, "overlaps"
from all_rollup
"""
ENDS_SQL = f"""
insert into ends with
last as (
  select cluster, instance, max(ts) as ts from samples join named using (series_id)
  where what is not null and batch <= $batch group by all),
newest as (select *, max(ts) over (partition by cluster) as of_cluster, max(ts) over () as of_all from last),
marks as (
  select cluster, case when max(of_cluster) < max(of_all) - {SILENT_MS} then max(of_all)
    else min(ts) filter (where ts >= of_cluster - {SILENT_MS}) end as until
  from newest group by cluster)
select $batch, m.cluster, greatest((until - {LATENESS_MS}) // {HOUR_MS} * {HOUR_MS}, before.closed_end)
from marks m left join ends before on before.batch = $batch - 1 and before.cluster = m.cluster
"""
COUNTED_SQL = f"""
create or replace table counted as select s.* from samples s
join named using (series_id) left join ends on ends.batch = s.batch - 1 and ends.cluster = named.cluster
where ts // {HOUR_MS} * {HOUR_MS} >= coalesce(closed_end, 0)
"""
USAGE_SQL = """
select cluster, principal, '{width}' as width, ts // {ms} * {ms} as window_ms, {sums},
  window_ms + {ms} <= any_value(closed_end) as closed
from usage_growth join named using (series_id) join ends using (cluster)
where what is not null and batch = $batch group by cluster, principal, window_ms
"""
OUR_USAGE_SQL = f"""
select cluster, principal, width, epoch_ms("window") as window_ms, {", ".join(WHAT)}, closed from all_usage
"""


def rollups(connection: duckdb.DuckDBPyConnection, lookback_days: int) -> str:
    """Compute the growth of `samples`, and return the query of all rollups' rows."""
    connection.execute(GROWTH_SQL.format(into="growth", samples="samples", lookback_days=lookback_days))
    return " union all ".join(WINDOWS_SQL.format(width=width, ms=ms) for width, ms in WIDTHS_MS.items())


def usage(connection: duckdb.DuckDBPyConnection, batch: int, lookback_days: int) -> str:
    """Compute what is billed after this run, the one after the last, and return the query of all rows of usage.

    A sample counts unless its hour was closed before it came: growth goes from one that counts to the next.
    """
    connection.execute("create table if not exists ends (batch bigint, cluster text, closed_end bigint)")
    connection.execute(ENDS_SQL, {"batch": batch})
    connection.execute(COUNTED_SQL)
    connection.execute(GROWTH_SQL.format(into="usage_growth", samples="counted", lookback_days=lookback_days))
    sums = ", ".join(f"coalesce(sum(growth) filter (where what = '{name}'), 0)::bigint as {name}" for name in WHAT)
    widths = (USAGE_SQL.format(width=width, ms=WIDTHS_MS[width], sums=sums) for width in ("1h", "1d"))
    return " union all ".join(widths).replace("$batch", str(batch))


def arrows_own(delta: DeltaTable) -> fs.FileSystem | None:
    """Return Arrow's file system for a local table; None for another one.

    Through deltalake's, which calls Python, a thread of Arrow's that waits for the GIL and a reader that waits for
    Arrow's lock with the GIL held have once waited for each other for ever.
    """
    folder = delta.table_uri.removeprefix("file://")
    return fs.SubTreeFileSystem(folder, fs.LocalFileSystem()) if folder.startswith("/") else None


def register(
    connection: duckdb.DuckDBPyConnection, root: Path | Callable[[str], DeltaTable], *tables: str
) -> list[int]:
    """Make the newest version of these Delta tables known as `all_…`, and return their versions. `root` is their
    directory, or opens a table.
    """
    connection.execute("set TimeZone = 'UTC'")
    found = [root(table) if callable(root) else DeltaTable(root / table) for table in tables]
    for table, delta in zip(tables, found, strict=True):
        connection.register(f"all_{table}", delta.to_pyarrow_dataset(filesystem=arrows_own(delta)))
    return [delta.version() for delta in found]


def differing(connection: duckdb.DuckDBPyConnection, ours: str, recomputed: str, limit: int = 10) -> list[Any]:
    """The first rows that only one of two queries has; doubled rows differ, too."""
    for name, query in (("ours", ours), ("recomputed", recomputed)):
        connection.execute(f"create or replace temp table {name} as {query}")
    ways = (("ours", "recomputed"), ("recomputed", "ours"))
    both = " union all ".join(f"select '{a}' as of, * from (from {a} except all from {b})" for a, b in ways)
    return connection.execute(f"from ({both}) order by all limit {limit}").fetchall()
