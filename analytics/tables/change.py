"""One change of one table: files that Spark wrote, committed by delta-rs only at the version they were computed from.

Delta's own rules let two appends pass, and a replacement that began before a compaction; with sums computed from a
version that doubles rows. So every change refuses to be committed behind another one (`max_commit_retries=0`), and is
computed again. A killed job or a refused commit leaves files that no version names, which `expire` deletes: after an
error in a commit it is unknown whether it is there.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Final

from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction, CommitProperties, RemoveAction, Transaction
from pyarrow import fs as arrow_fs
from pyarrow.parquet import FileMetaData, read_metadata

from analytics.tables.errors import change_errors
from analytics.tables.partitions import partition_from, partitions_of, values_in_path
from analytics.tables.schemas import PARTITIONS, SCHEMAS, VIEWS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from analytics.tables.store import DataFile, Snapshot, Tables

_VALUES: Final = ("value", "sum", "min", "max", "first_v", "last_v", "entry", "increase")
PARQUET_OPTIONS: Final = {
    # Values rarely repeat: a dictionary of them costs time, and makes the files no smaller.
    **{f"parquet.enable.dictionary#{name}": "false" for name in _VALUES},
    # Level 3, the default, makes them no smaller either.
    "parquet.compression.codec.zstd.level": "1",
}
"""Options of Parquet's writer, independent of the session's settings."""
_FOOTERS_AT_ONCE: Final = 16


@dataclass(frozen=True, slots=True)
class Written:
    """Rows that Spark wrote for a view, in files that no version names yet. `rows`: their number."""

    view: str
    actions: tuple[AddAction, ...]
    frame: DataFrame
    rows: int

    @property
    def hours(self) -> list[datetime]:
        """The first hours of the partitions that have rows."""
        return sorted({partition_from(action.partition_values).first_hour for action in self.actions})


class TableChange:
    """Change in progress, made by `Tables.change`. `write` runs Spark; nothing is visible before the commit."""

    def __init__(self, tables: Tables, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self._tables = tables
        self._identity = uuid.uuid4().hex
        self._writes = 0
        self._actions: list[AddAction | RemoveAction] = []
        self._recorded: list[Transaction] = []

    def write(self, view: str, frame: DataFrame) -> Written:
        """Write rows of a view to files, and return them as written; `append` or `replace` adds them to the table."""
        return self.write_widths([view], frame)[0]

    def write_widths(self, views: Sequence[str], frame: DataFrame) -> list[Written]:
        """Write rows of several widths in one pass; `views`, in their order: the views that have these widths."""
        table = self.snapshot.table
        self._writes += 1
        directory = f"{self._identity}/{self._writes}"
        columns = [frame[field.name].cast(field.dataType) for field in SCHEMAS[table]]
        writer = frame.select(*columns).write.options(**PARQUET_OPTIONS)
        writer.partitionBy(*PARTITIONS[table]).parquet(f"{self.snapshot.url}/{directory}")
        files = self._tables.filesystem(table)
        found = files.get_file_info(arrow_fs.FileSelector(directory, recursive=True))
        paths = sorted((info.path, info.size) for info in found if info.path.endswith(".parquet"))
        with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as threads:
            footers = list(threads.map(lambda path: read_metadata(path[0], filesystem=files), paths))
        written = [(add_action(*path, footer), footer.num_rows) for path, footer in zip(paths, footers, strict=True)]
        return [self._written(view, written) for view in views]

    def _written(self, view: str, written: list[tuple[AddAction, int]]) -> Written:
        own = [(add, rows) for add, rows in written if VIEWS[view].width == add.partition_values.get("width")]
        frame = self.snapshot.read_paths(view, [add.path for add, _ in own])
        return Written(view, tuple(add for add, _ in own), frame, sum(rows for _, rows in own))

    def append(self, written: Written) -> None:
        """Add the written rows to the table."""
        self._actions.extend(written.actions)

    def replace(self, written: Written, *, hours: Iterable[datetime]) -> None:
        """Replace the partitions that hold `hours` by the written rows, which must all lie in these partitions.

        Raises ValueError for rows of other partitions.
        """
        hours = list(hours)
        wanted = partitions_of(VIEWS[written.view], hours)
        others = {partition_from(action.partition_values) for action in written.actions} - wanted
        if others:
            raise ValueError(f"{written.view}: rows outside of the partitions to replace: {sorted(others)[:5]}")
        self.remove(self.snapshot.files_of(written.view, hours))
        self.append(written)

    def rearrange(self, files: Iterable[DataFile], written: Written) -> None:
        """Replace files by the written ones, which have the same rows: no hour counts as changed."""
        self.remove(files, data_change=False)
        self._actions.extend(replace(action, data_change=False) for action in written.actions)

    def remove(self, files: Iterable[DataFile], *, data_change: bool = True) -> None:
        """Take files out of the table."""
        now_ms = int(time.time() * 1000)
        for file in files:
            values = {name: value for name, value in file.partition._asdict().items() if name in self._partition_by}
            texts = {name: None if value is None else str(value) for name, value in values.items()}
            self._actions.append(
                RemoveAction(
                    path=file.path,
                    deletion_timestamp=now_ms,
                    data_change=data_change,
                    partition_values=texts,
                    size=file.size_bytes,
                )
            )

    def record(self, app: str, number: int) -> None:
        """Record a number under a name with the commit: what the change was made from."""
        self._recorded.append(Transaction(app, number))

    def commit(self) -> None:
        """Commit the change at the version after the snapshot's. Raises ChangedMeanwhile, TablesError."""
        if not self._actions and not self._recorded:
            return
        delta, table = self.snapshot.delta, self.snapshot.table
        properties = CommitProperties(max_commit_retries=0, app_transactions=self._recorded)
        with change_errors(table):
            delta.create_write_transaction(
                self._actions, "append", delta.schema(), self._partition_by, commit_properties=properties
            )

    def discard(self) -> None:
        """Delete the written files, before a commit; if the storage fails, they stay until `expire` deletes them."""
        with suppress(OSError, DeltaError):
            self._tables.filesystem(self.snapshot.table).delete_dir(self._identity)

    @property
    def _partition_by(self) -> list[str]:
        return list(PARTITIONS[self.snapshot.table])


def add_action(path: str, size_bytes: int, footer: FileMetaData) -> AddAction:
    """Return the action that adds a file to its table; `path` is relative to the table, and names the partition.

    Of Delta's statistics it has the number of rows only: with the bounds of some columns, delta-rs (1.6.6) tells
    pyarrow and DuckDB that all others are null, and a filter on these finds nothing.
    """
    statistics = json.dumps({"numRecords": footer.num_rows})
    now_ms = int(time.time() * 1000)
    return AddAction(path, size_bytes, values_in_path(path), now_ms, data_change=True, stats=statistics)
