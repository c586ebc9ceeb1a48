"""`spark.read.format("prometheus_spool")`, and `readStream`: the samples that the receiver stored.

An offset is a place between two records: segment number and byte. The driver reads record borders to plan, executors
decode; so the spool's directory must be the same path on all of them (one machine, or a shared volume).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, SupportsTriggerAvailableNow

from analytics.remote_write.decode import Decoder
from analytics.remote_write.errors import DecodeError
from analytics.sources.options import BadOption, Options
from analytics.sources.rows import BATCH_ROWS, SCHEMAS, Rows
from analytics.spool import reader
from analytics.spool.marks import Position
from analytics.spool.records import Damage
from analytics.spool.retention import record_consumed

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

OPTIONS = (
    "path",
    "table",
    "replicaLabels",
    "maxBytesPerBatch",
    "splitBytes",
    "failOnDataLoss",
    "removeConsumedAfterSeconds",
)
MAX_BYTES_PER_BATCH = 64 << 20
SPLIT_BYTES = 4 << 20
NEVER = -1
BUCKETS_PER_ROW = 4  # in memory a sample's row is about as large as these
TOLD_MAX = 20
"""Places of one split that are told one by one."""


class LostSegments(Exception):
    """The spool no longer has what the checkpoint wants to read next."""


@dataclass
class Split(InputPartition):
    """Records of one segment that begin in [start, end)."""

    path: str
    start: int
    end: int

    def __repr__(self) -> str:
        return f"{self.path}[{self.start}:{self.end}]"


class PrometheusSpool(DataSource):
    """The data source's name and options; `docs/analytics.md` lists them."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self._settings = _Settings.of(options)

    @classmethod
    def name(cls) -> str:
        """What `format` is called with."""
        return "prometheus_spool"

    def schema(self) -> StructType:
        """Depends on the option `table`."""
        return SCHEMAS[self._settings.table]

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002
        """All that is committed when the query is planned."""
        return _BatchReader(self._settings)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002, N802
        """From where the checkpoint says; a new one begins at the oldest segment."""
        return _StreamReader(self._settings)


@dataclass(frozen=True)
class _Settings:
    directory: str
    table: str
    replica_labels: tuple[str, ...]
    max_bytes_per_batch: int
    split_bytes: int
    fail_on_data_loss: bool
    remove_consumed_after_s: int

    @classmethod
    def of(cls, given: Any) -> _Settings:
        options = Options("prometheus_spool", given, OPTIONS)
        directory = options.text("path").removeprefix("file://").removeprefix("file:")
        if "://" in directory:
            raise BadOption(f"prometheus_spool: path is {directory!r}, and must be a directory that is mounted here")
        return cls(
            directory=directory,
            table=options.table(),
            replica_labels=options.replica_labels(),
            max_bytes_per_batch=options.integer("maxBytesPerBatch", MAX_BYTES_PER_BATCH, least=1, most=1 << 40),
            split_bytes=options.integer("splitBytes", SPLIT_BYTES, least=1, most=1 << 32),
            fail_on_data_loss=options.flag("failOnDataLoss", default=True),
            remove_consumed_after_s=options.integer("removeConsumedAfterSeconds", NEVER, least=NEVER, most=1 << 32),
        )


class _BatchReader(DataSourceReader):
    def __init__(self, settings: _Settings) -> None:
        self._settings = settings

    def partitions(self) -> list[InputPartition]:
        directory = self._settings.directory
        if not Path(directory).is_dir():
            raise BadOption(f"prometheus_spool: there is no directory {directory}")
        return _splits(self._settings, reader.BEGIN, reader.end_offset(directory))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield from _read(self._settings, partition)


class _StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, settings: _Settings) -> None:
        self._settings = settings
        self._target: Position | None = None

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        segments = reader.segments(self._settings.directory)
        return _offset(Position(segments[0].number, 0) if segments else reader.BEGIN)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxBytes(self._settings.max_bytes_per_batch)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = reader.end_offset(self._settings.directory)

    def reportLatestOffset(self) -> dict[str, int]:  # noqa: N802
        return _offset(reader.end_offset(self._settings.directory))

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        begin = _position(start)
        end = self._target or reader.end_offset(self._settings.directory)
        self._check_nothing_lost(begin, end)
        if end <= begin or isinstance(limit, ReadAllAvailable):
            return _offset(max(begin, end))
        if not isinstance(limit, ReadMaxBytes):
            raise TypeError(f"prometheus_spool knows no limit of the kind {type(limit).__name__}")
        return _offset(_admitted(self._settings.directory, begin, end, limit.max_bytes))

    def _check_nothing_lost(self, begin: Position, end: Position) -> None:
        """A segment is only removed once it is consumed: one that is gone before that was taken by somebody else."""
        numbers = [segment.number for segment in reader.segments(self._settings.directory)]
        gone = begin.offset > 0 and begin.segment not in numbers and begin != end
        if self._settings.fail_on_data_loss and (gone or end < begin):
            have = f"segments {numbers[0]} to {numbers[-1]}" if numbers else "no segment"
            raise LostSegments(
                f"{self._settings.directory}: the checkpoint wants to go on at segment {begin.segment}, byte "
                f"{begin.offset}, and the spool has {have}, ending at {end}. Is it another spool's checkpoint? If "
                "segments were deleted, their samples are lost: start with a new checkpoint directory"
            )

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return _splits(self._settings, _position(start), _position(end))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield from _read(self._settings, partition)

    def commit(self, end: dict[str, int]) -> None:
        """Everything before `end` is in the tables: give the receiver its room back."""
        keep_s = self._settings.remove_consumed_after_s
        if keep_s == NEVER:
            return
        position = _position(end)
        youngest = time.time() - keep_s
        for segment in reader.segments(self._settings.directory):
            if segment.number < position.segment and Path(segment.path).stat().st_mtime > youngest:
                position = Position(segment.number, 0)
                break
        record_consumed(self._settings.directory, position)


def _offset(position: Position) -> dict[str, int]:
    return {"segment": position.segment, "offset": position.offset}


def _position(offset: dict[str, int]) -> Position:
    return Position(offset["segment"], offset["offset"])


def _ranges(directory: str, begin: Position, end: Position) -> Iterator[tuple[int, str, int, int]]:
    """(segment number, path, start, end) of all that lies between two positions."""
    for segment in reader.segments(directory):
        if begin.segment <= segment.number <= end.segment:
            start = begin.offset if segment.number == begin.segment else 0
            stop = min(end.offset, segment.size_bytes) if segment.number == end.segment else segment.size_bytes
            if start < stop:
                yield segment.number, segment.path, start, stop


def _borders(path: str, start: int, stop: int, step_bytes: int) -> Iterator[int]:
    """Ends of records, each at least `step_bytes` after the one before; the last is `stop`."""
    last = start
    for record in reader.records(path, start, stop, _ignored):
        if record.next_offset - last >= step_bytes:
            last = record.next_offset
            yield last
    if last < stop:
        yield stop


def _ignored(damage: Damage) -> None:
    """While planning: the executor that reads it tells."""


def _admitted(directory: str, begin: Position, end: Position, max_bytes: int) -> Position:
    """How far one batch goes: to the end of the record in which the limit lies, so at least one record."""
    left = max_bytes
    for number, path, start, stop in _ranges(directory, begin, end):
        if stop - start > left:
            return Position(number, next(_borders(path, start, stop, left)))
        left -= stop - start
        if left == 0:
            return Position(number, stop)
    return end


def _splits(settings: _Settings, begin: Position, end: Position) -> list[InputPartition]:
    splits: list[InputPartition] = []
    for _, path, start, stop in _ranges(settings.directory, begin, end):
        for border in _borders(path, start, stop, settings.split_bytes):
            splits.append(Split(path, start, border))
            start = border  # noqa: PLW2901
    return splits


def _read(settings: _Settings, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """Decode one split; what is damaged or cannot be decoded is told on standard error, and the rest is read.

    The decoder is held to CEILING, which no receiver's configuration exceeds: so it leaves out only what a receiver
    without these bounds took, and one request's memory is bounded.
    """
    if not isinstance(partition, Split):
        return  # Spark's own placeholder where there are no partitions
    decoder, rows, left_out = Decoder(), Rows(settings.table, settings.replica_labels), _LeftOut(partition)
    gathered = 0
    for record in reader.records(partition.path, partition.start, partition.end, left_out.damage):
        try:
            counts = decoder.add(record.body, record.version)
        except DecodeError as error:
            left_out.damage(Damage(record.offset, record.next_offset, str(error)))
            continue
        left_out.series(record, decoder.faults)
        gathered += counts.samples + counts.histograms + counts.buckets // BUCKETS_PER_ROW
        if gathered >= BATCH_ROWS:
            gathered = 0
            yield from rows.batches(decoder.take())
    yield from rows.batches(decoder.take())
    yield from rows.rest()
    left_out.sum_up()


class _LeftOut:
    """Tells on standard error what a split's rows do not hold: some places with the reason, and how many in all."""

    def __init__(self, split: Split) -> None:
        self._split = split
        self._places = self._faulty = self._lines = 0

    def damage(self, damage: Damage) -> None:
        """Tell of bytes that are no request that can be decoded."""
        self._places += 1
        self._tell(damage.offset, damage.next_offset, f"{damage.reason}; what they held is lost")

    def series(self, record: reader.Record, faults: dict[int, str]) -> None:
        """Tell of the series of a request that cannot be; its others are read."""
        self._faulty += len(faults)
        if faults:
            place, why = min(faults.items())
            text = f"{len(faults)} series of the request are left out; series {place}: {why}"
            self._tell(record.offset, record.next_offset, text)

    def sum_up(self) -> None:
        """Say how much it was, if anything."""
        if self._faulty or self._places:
            text = f"{self._faulty} faulty series left out, {self._places} places skipped"
            print(f"prometheus_spool: {self._split}: {text}", file=sys.stderr)  # noqa: T201

    def _tell(self, begin: int, end: int, text: str) -> None:
        self._lines += 1
        if self._lines <= TOLD_MAX:
            where = f"{self._split.path}, bytes {begin} to {end}"
            print(f"prometheus_spool: {where}: {text}", file=sys.stderr)  # noqa: T201
