"""The job `rollup`'s transaction, which writes minutes once, in the tasks that computed them.

`analytics.transforms.rollup.minutes` returns whole rows of rollup_1m, their sums by hour, and, two or three in an hour
and series, states that have to be merged first. All come from one pass over the samples, so one Spark job writes them:
the whole rows as files that a rename adds to the table, the others beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from analytics.tables import commits
from analytics.tables.schemas import PARTITIONS, ROLLUP_1M
from analytics.tables.transaction import PARQUET_OPTIONS, Transaction, empty_frame
from analytics.transforms.rollup import ADDED_UP, OPEN, PART, WHOLE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from analytics.tables.store import Tables

_TABLE: Final = "rollup_1m"


class RollupChange(Transaction):
    """Transaction that also stages the rows and states of `minutes`."""

    def stage_minutes(self, rows: DataFrame) -> tuple[DataFrame, DataFrame]:
        """Stage `minutes`; return the sums of the whole rows and the open states, as written."""
        columns = [rows[field.name].cast(field.dataType) for field in ROLLUP_1M]
        writer = rows.select(PART, *columns).write.mode("overwrite").options(**PARQUET_OPTIONS)
        writer.partitionBy(PART, *PARTITIONS[_TABLE]).parquet(self._files.url(self._parts))
        return self._read_part(ADDED_UP), self._read_part(OPEN)

    def add_minutes(self) -> None:
        """Add the staged whole rows to rollup_1m."""
        directory = f"{self._parts}/{PART}={WHOLE}"
        for number, name in enumerate(self._files.files_below(directory)):
            final = f"{_TABLE}/{name.rpartition('/')[0]}/{self.identity}-whole-{number:05}.parquet"
            self._record.adds[f"{directory}/{name}"] = final

    @property
    def _parts(self) -> str:
        return f"{self._staging}/minutes"

    def _read_part(self, part: int) -> DataFrame:
        session, path = self._tables.spark, f"{self._parts}/{PART}={part}"
        if not self._files.exists(path):
            return empty_frame(session, ROLLUP_1M)
        return session.read.schema(ROLLUP_1M).parquet(self._files.url(path))


@contextmanager
def rollup_change(tables: Tables, what: str) -> Iterator[RollupChange]:
    """Run the block as one RollupChange, as `Tables.transaction` does."""
    change = RollupChange(tables, commits.new_id(what))
    try:
        yield change
    except BaseException:
        change.discard_staged()
        raise
    change.commit_change()
