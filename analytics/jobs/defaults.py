"""Defaults and bounds of the jobs' options. Commands show them in `--help`, which needs no Spark."""

from typing import Final

LOOKBACK_DAYS: Final = 7
HOURS_PER_CHANGE: Final = 168

LATENESS_HOURS: Final = 2.0
SILENT_HOURS: Final = 6.0

MAX_BYTES_PER_BATCH: Final = 64 << 20
KEEP_SPOOL_HOURS: Final = 24
KEEP_SPOOL_FOREVER: Final = -1

CLOSED_AFTER_HOURS: Final = 2
PARTITIONS_MAX: Final = 10_000

KEEP_FOREVER: Final = 0
KEEP_DAYS: Final = {
    "samples": 30,
    "histograms": 30,
    "rollup_1m": 90,
    "histograms_1m": 90,
    "rollup_1h": 730,
    "histograms_1h": 730,
    "usage_ledger": 90,
}
"""Retention by table, in days; other tables are kept forever."""

HISTORY_DAYS: Final = 7
HISTORY_DAYS_MIN: Final = 2
"""Files that no version names yet are a running job's, unless they are older: no job runs longer."""

BACKFILL_BATCH_HOURS: Final = 6
REPORT_LAST: Final = "24h"
