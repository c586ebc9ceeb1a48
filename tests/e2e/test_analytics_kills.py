"""All jobs at once, killed again and again, while another process reads: nothing twice, nothing half done, exact sums.

Two processes run the jobs on the same tables, each with a spool of its own that has the same samples, as two receivers
have. They are killed at moments that the tables show: when files of a change are there that no version names, or when
a version appears; at last both, in the middle of a rollup. PULSAR_PROXY_TEST_KILLS is the number of kills, and
PULSAR_PROXY_TEST_SEED chooses others.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import duckdb
import pytest
from local.process import OwnedProcess

from tests.analytics import recomputed
from tests.analytics.recomputed import HOUR_MS
from tests.analytics.sent_samples import Sent, created_gauge, fill, named_table, principal, samples_table
from tests.analytics.spool_files import SpoolFiles

from .lab.counts import count_of
from .lab.pipeline import Tables, run_jobs, start_jobs
from .lab.waiting import eventually

KILLS = count_of("KILLS", in_ci=2)
SEED = int(os.environ.get("PULSAR_PROXY_TEST_SEED", "34"))
BEGIN_MS = int((datetime.now(UTC) - timedelta(days=25)).timestamp() * 1000) // HOUR_MS * HOUR_MS
"""Samples expire after 30 days."""
SCRAPE_MS = HOUR_MS // 12
SCRAPES_AT_ONCE = 5
LOOKBACK_DAYS = 7
TURNS = 60
WITHIN_S = 600.0
READ_EVERY_S = 0.25
TIMEOUT_S = 1800 + 300 * KILLS

READS = {
    "a sample is there twice": "select 1 from all_samples group by series_id, replica, ts having count(*) > 1",
    "a row of a rollup is there twice": """
        select 1 from all_rollup group by series_id, width, "window" having count(*) > 1""",
    "a row of a bill is there twice": """
        select 1 from all_usage group by cluster, principal, width, "window" having count(*) > 1""",
    "a rollup is half done": """
        select sum(n) filter (where width = '1m') as m, sum(n) filter (where width = '1h') as h,
          sum(n) filter (where width = '1d') as d
        from all_rollup group by series_id, "window"::date having m is distinct from h or h is distinct from d""",
    "a bill is half done": """
        select sum(bytes_in + 3 * bytes_out + 7 * sessions) filter (where width = '1h') as h,
          sum(bytes_in + 3 * bytes_out + 7 * sessions) filter (where width = '1d') as d
        from all_usage group by cluster, principal, "window"::date having h is distinct from d""",
    "a closed row of a bill changed": "from closed_before except from all_closed",
}
CLOSED = 'select cluster, principal, width, "window", bytes_in, bytes_out, sessions from all_usage where closed'


class Traffic:
    """Scrapes of what three principals use, in two spools; Bob's counters say when they began again, Carol's do not."""

    def __init__(self, directory: Path) -> None:
        self.sent: list[Sent] = []
        self.spools = [SpoolFiles(directory / name, segment_bytes_max=20_000) for name in ("first", "second")]
        self._chance = random.Random(SEED)
        self._scrapes = 0
        self._totals: dict[str, float] = {}

    def grow(self) -> None:
        """Add some scrapes to both spools, and some of the old ones again."""
        new = [one for _ in range(SCRAPES_AT_ONCE) for one in self._scrape()]
        again = self._chance.sample(self.sent, min(len(self.sent), 10))
        self.sent += new
        for spool in self.spools:
            fill(spool, new)
            if again:
                fill(spool, again)

    def _scrape(self) -> Iterator[Sent]:
        ts = BEGIN_MS + self._scrapes * SCRAPE_MS
        for name in ("alice", "bob", "carol"):
            begins = self._scrapes % 19 == 0 and name != "alice"
            for labels in (principal(name), principal(name, direction="to_client"), principal(name, "sessions")):
                key = str(labels)
                self._totals[key] = self._chance.randrange(1000) + (0 if begins else self._totals.get(key, 0))
                yield Sent(labels, ts, self._totals[key], 0)
                if name == "bob":
                    began = BEGIN_MS + self._scrapes // 19 * 19 * SCRAPE_MS - 1000
                    yield Sent(created_gauge(labels), ts, began / 1000, 0)
        self._scrapes += 1


class Reader(threading.Thread):
    """Reads each newest version until `stop`; the first thing that is wrong is in `wrong`."""

    def __init__(self, tables: Tables) -> None:
        super().__init__(daemon=True)
        self._tables = tables
        self._stop_event = threading.Event()
        self.versions: set[tuple[int, ...]] = set()
        self.wrong: list[str] = []

    def run(self) -> None:
        """Read again and again."""
        with duckdb.connect() as connection:
            connection.execute("set threads = 1")
            while not self._stop_event.is_set() and not self.wrong:
                try:
                    self._read(connection)
                except Exception as error:  # noqa: BLE001 -- the test fails with it
                    self.wrong.append(f"cannot read: {error!r}")

    def _read(self, connection: duckdb.DuckDBPyConnection) -> None:
        versions = recomputed.register(connection, self._tables.table, "samples", "rollup", "usage")
        if tuple(versions) in self.versions:  # they have been read
            self._stop_event.wait(READ_EVERY_S)
            return
        connection.execute(f"create or replace temp table all_closed as {CLOSED}")
        connection.execute("create table if not exists closed_before as from all_closed limit 0")
        for what, query in READS.items():
            if connection.execute(f"select count(*) from ({query})").fetchall() != [(0,)]:
                self.wrong.append(f"{what} at versions {versions}")
        connection.execute("create or replace table closed_before as from all_closed")
        self.versions.add(tuple(versions))

    def stop(self) -> None:
        """Stop, and wait for the read that is under way."""
        self._stop_event.set()
        self.join()


class Workers:
    """The two processes. One runs the pipeline, the other the single jobs in a random order."""

    def __init__(self, tables: Tables, spools: list[Path], directory: Path) -> None:
        self._log, self._env = directory / "jobs.log", tables.env
        self._running: list[OwnedProcess | None] = [None, None]
        chance, where = random.Random(SEED), ["--tables", tables.url]
        self._pipeline = [*pipeline(tables, spools[0]), "--follow", "0.1", "--compact-limit", "5"]
        single = [["ingest", "--spool", str(spools[1]), *where], ["compact", *where, "--limit", "5"]]
        single += [["rollup", *where], ["usage", *where], ["expire", *where]]
        self._single = [job for _ in range(TURNS) for job in chance.sample(single, len(single))]

    def start(self, *places: int) -> None:
        """Start what does not run of these processes."""
        for place in places:
            if self._running[place] is None:
                jobs = [[self._pipeline], self._single][place]
                self._running[place] = start_jobs(self._log, *jobs, env=self._env)

    def kill(self, *places: int) -> None:
        """Kill Python and JVM of these processes at once."""
        self.check()
        for place in places:
            if (process := self._running[place]) is not None:
                process.kill()
                self._running[place] = None

    def stop(self) -> None:
        """Kill both, whatever they do."""
        for process in self._running:
            if process is not None:
                process.kill()

    def check(self) -> None:
        """Fail if a job has ended with an error, or the pipeline says that a step did."""
        text = self._log.read_text() if self._log.exists() else ""
        assert all(one is None or one.exit_code() is None for one in self._running), text[-4000:]
        assert "FAILED" not in text, text[-4000:]


def pipeline(tables: Tables, spool: Path) -> list[str]:
    return ["pipeline", "--spool", str(spool), "--tables", tables.url]


def wait_for(look: Callable[[], set[str]], tables: Tables, traffic: Traffic, ahead: int = 1) -> None:
    """Wait until so many more changes or versions are there. Each ingest gets more to do."""
    known, ingested = look(), -1

    def are_there() -> bool:
        nonlocal ingested
        if (newest := len(tables.versions("samples"))) != ingested:
            ingested = newest
            traffic.grow()
        return len(look() - known) >= ahead

    eventually(are_there, what=f"{ahead} more", within_s=WITHIN_S, every_s=0.02)


def assert_exact(tables: Tables, sent: list[Sent]) -> None:
    """The tables have each sample once, and DuckDB computes the same rollups and bills of them."""
    ours = "select series_id, replica, epoch_ms(ts) as ts, value from all_samples"
    with duckdb.connect() as connection:
        recomputed.register(connection, tables.table, "samples", "rollup", "usage")
        connection.register("named", named_table(sent))
        connection.register("samples", samples_table(sent))
        differing = recomputed.differing
        assert differing(connection, ours, "select series_id, replica, ts, value from samples") == []
        assert differing(connection, recomputed.OURS_SQL, recomputed.rollups(connection, LOOKBACK_DAYS)) == []
        assert differing(connection, recomputed.OUR_USAGE_SQL, recomputed.usage(connection, 0, LOOKBACK_DAYS)) == []


@pytest.mark.timeout(TIMEOUT_S)
def test_jobs_that_are_killed_again_and_again_leave_exact_tables(tmp_path: Path) -> None:
    kill_jobs(Tables(tmp_path / "tables"), tmp_path)


def kill_jobs(tables: Tables, tmp_path: Path, at_least: int = KILLS) -> None:
    """Kill jobs that work on these tables until one was in the middle of a rollup, then compare with DuckDB."""
    traffic, chance = Traffic(tmp_path), random.Random(SEED)
    spools = [spool.directory for spool in traffic.spools]
    traffic.grow()
    workers, reader = Workers(tables, spools, tmp_path), Reader(tables)
    kills, cut_off = 0, set[str]()
    try:
        workers.start(0)
        eventually(lambda: tables.versions("usage"), what="all tables", within_s=WITHIN_S)
        workers.start(1)
        eventually(lambda: len(tables.versions("usage")) > 1, what="a bill", within_s=WITHIN_S)
        reader.start()
        while not cut_off:
            workers.start(0, 1)
            kills += 1
            if kills < at_least:
                look = tables.changes if chance.random() < 0.6 else tables.versions
                wait_for(look, tables, traffic, chance.randint(1, 5))
                workers.kill(*chance.choice([[0], [1], [0, 1]]))
            else:
                wait_for(lambda: tables.changes("rollup"), tables, traffic)
                workers.kill(0, 1)
                cut_off = {change for change in tables.unfinished_changes() if change.startswith("rollup/")}
            assert not reader.wrong
        run_jobs(*([*pipeline(tables, spool), "--once"] for spool in spools), env=tables.env)
    finally:
        workers.stop()
        if reader.ident is not None:
            reader.stop()
    assert not reader.wrong
    assert len(reader.versions) > 1
    assert_exact(tables, traffic.sent)
    print(f"seed {SEED}: {kills} kills, {len(cut_off)} changes cut off, {len(reader.versions)} versions read")
