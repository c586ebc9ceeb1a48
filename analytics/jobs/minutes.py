"""Minutes written once, where they were computed: the change that the job `rollup` makes.

`analytics.transforms.rollup.minutes` gives whole rows of rollup_1m, what these add up to, and, two or three in an hour
and series, states that are to be merged first. All come from one reading of the samples, so one Spark job writes them:
the whole rows where they become part of the table by a rename, the others beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from analytics.tables import commits
from analytics.tables.schemas import PARTITIONS, ROLLUP_1M
from analytics.tables.transaction import WRITING, Transaction, empty
from analytics.transforms.rollup import ADDED_UP, OPEN, PART, WHOLE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from analytics.tables.store import Tables

_TABLE: Final = "rollup_1m"


class RollupChange(Transaction):
    """A transaction that also takes rows and states as `minutes` gives them."""

    def stage_minutes(self, rows: DataFrame) -> tuple[DataFrame, DataFrame]:
        """Write `minutes` where nobody reads them: what the whole rows add up to and the open ones, as written."""
        columns = [rows[field.name].cast(field.dataType) for field in ROLLUP_1M]
        writer = rows.select(PART, *columns).write.mode("overwrite").options(**WRITING)
        writer.partitionBy(PART, *PARTITIONS[_TABLE]).parquet(self._files.url(self._parts))
        return self._part(ADDED_UP), self._part(OPEN)

    def add_minutes(self) -> None:
        """The whole rows become part of rollup_1m."""
        directory = f"{self._parts}/{PART}={WHOLE}"
        for number, name in enumerate(self._files.files_below(directory)):
            final = f"{_TABLE}/{name.rpartition('/')[0]}/{self.identity}-whole-{number:05}.parquet"
            self._record.adds[f"{directory}/{name}"] = final

    @property
    def _parts(self) -> str:
        return f"{self._staging}/minutes"

    def _part(self, part: int) -> DataFrame:
        session, path = self._tables.spark, f"{self._parts}/{PART}={part}"
        if not self._files.exists(path):
            return empty(session, ROLLUP_1M)
        return session.read.schema(ROLLUP_1M).parquet(self._files.url(path))


@contextmanager
def rollup_change(tables: Tables, what: str) -> Iterator[RollupChange]:
    """As `Tables.transaction`."""
    change = RollupChange(tables, commits.new_id(what))
    try:
        yield change
    except BaseException:
        change.abandon()
        raise
    change.commit()
