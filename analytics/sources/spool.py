"""The samples that the receiver stored, all or between two positions.

A position is a record boundary: segment number and byte. The driver reads record boundaries to plan, executors decode;
so the spool's directory must be the same path on all of them (one machine, or a shared volume).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql.datasource import InputPartition

from analytics.errors import AnalyticsError
from analytics.remote_write.decode import Columns, Decoder
from analytics.remote_write.errors import DecodeError
from analytics.sources.options import BadOption, Options
from analytics.sources.rows import BATCH_ROWS
from analytics.spool import reader
from analytics.spool.positions import Position
from analytics.spool.records import Damage, Record

SPLIT_BYTES = 4 << 20
BUCKETS_PER_ROW = 4  # in memory a sample's row is about as large as these
REPORTED_MAX = 20
"""Skipped places of one split that are reported one by one."""


class LostSegments(AnalyticsError):
    """The spool no longer has the position at which ingest goes on."""


@dataclass
class Split(InputPartition):
    """Partition of the records of one segment that begin in [start, end)."""

    path: str
    start: int
    end: int

    def __repr__(self) -> str:
        return f"{self.path}[{self.start}:{self.end}]"


def parse_directory(options: Options) -> str:
    """Parse the option `path`. Raises BadOption."""
    directory = options.text("path").removeprefix("file://").removeprefix("file:")
    if "://" in directory:
        raise BadOption(f"path is {directory!r}, and must be a directory that is mounted here")
    return directory


def check_segments_present(directory: str, begin: Position) -> None:
    """Raise LostSegments if the segment to read next is gone (ingest removes what is in the tables), or BadOption."""
    if not Path(directory).is_dir():
        raise BadOption(f"prometheus: there is no directory {directory}")
    segments, end = reader.list_segments(directory), reader.committed_end(directory)
    gone = begin.offset > 0 and begin != end and begin.segment not in {segment.number for segment in segments}
    if gone or end < begin:
        have = f"segments {segments[0].number} to {segments[-1].number}" if segments else "no segment"
        raise LostSegments(
            f"{directory}: ingest wants to go on at segment {begin.segment}, byte {begin.offset}, and the spool has "
            f"{have}, ending at {end}. If segments were deleted, their samples are lost: delete the file `id` of the "
            "spool, and ingest begins at what there is"
        )


def _segment_ranges(directory: str, begin: Position, end: Position) -> Iterator[tuple[int, str, int, int]]:
    """Yield (segment number, path, start, end) of all segments' parts between two positions."""
    for segment in reader.list_segments(directory):
        if begin.segment <= segment.number <= end.segment:
            start = begin.offset if segment.number == begin.segment else 0
            stop = min(end.offset, segment.size_bytes) if segment.number == end.segment else segment.size_bytes
            if start < stop:
                yield segment.number, segment.path, start, stop


def _record_boundaries(path: str, start: int, stop: int, step_bytes: int) -> Iterator[int]:
    """Yield ends of records, each at least `step_bytes` after the one before; the last is `stop`."""
    last = start
    for record in reader.read_records(path, start, stop, _ignore_damage):
        if record.next_offset - last >= step_bytes:
            last = record.next_offset
            yield last
    if last < stop:
        yield stop


def _ignore_damage(damage: Damage) -> None:
    """Ignore damage while planning: the executor that reads the split reports it."""


def batch_end(directory: str, begin: Position, end: Position, max_bytes: int) -> Position:
    """Return the end of one batch: the end of the record in which the limit lies, so at least one record."""
    left = max_bytes
    for number, path, start, stop in _segment_ranges(directory, begin, end):
        if stop - start > left:
            return Position(number, next(_record_boundaries(path, start, stop, left)))
        left -= stop - start
        if left == 0:
            return Position(number, stop)
    return end


def plan_splits(directory: str, begin: Position, end: Position, split_bytes: int) -> list[InputPartition]:
    """Return the splits between two positions, each of about so many bytes."""
    splits: list[InputPartition] = []
    for _, path, start, stop in _segment_ranges(directory, begin, end):
        for border in _record_boundaries(path, start, stop, split_bytes):
            splits.append(Split(path, start, border))
            start = border  # noqa: PLW2901
    return splits


def decode_split(partition: InputPartition) -> Iterator[Columns]:
    """Decode one split, in portions; damaged or invalid records are reported on standard error and skipped.

    The decoder is bounded by CEILING, which no receiver's configuration exceeds: so it skips only what a receiver
    without these bounds accepted, and one request's memory is bounded.
    """
    if not isinstance(partition, Split):
        return  # Spark's own placeholder where there are no partitions
    decoder, left_out = Decoder(), _SkipReport(partition)
    gathered = 0
    for record in reader.read_records(partition.path, partition.start, partition.end, left_out.report_damage):
        try:
            counts = decoder.add_body(record.body, record.version)
        except DecodeError as error:
            left_out.report_damage(Damage(record.offset, record.next_offset, str(error)))
            continue
        left_out.report_faulty_series(record, decoder.faults)
        gathered += counts.samples + counts.histograms + counts.buckets // BUCKETS_PER_ROW
        if gathered >= BATCH_ROWS:
            gathered = 0
            yield decoder.take_columns()
    yield decoder.take_columns()
    left_out.report_totals()


class _SkipReport:
    """Report on standard error of what a split's rows lack: the first places with the reason, and the totals."""

    def __init__(self, split: Split) -> None:
        self._split = split
        self._places = self._faulty = self._reported = 0

    def report_damage(self, damage: Damage) -> None:
        """Report bytes that cannot be decoded."""
        self._places += 1
        self._print_place(damage.offset, damage.next_offset, f"{damage.reason}; what they held is lost")

    def report_faulty_series(self, record: Record, faults: dict[int, str]) -> None:
        """Report the invalid series of a request; its others are read."""
        self._faulty += len(faults)
        if faults:
            place, why = min(faults.items())
            text = f"{len(faults)} series of the request are left out; series {place}: {why}"
            self._print_place(record.offset, record.next_offset, text)

    def report_totals(self) -> None:
        """Report the totals, if anything was skipped."""
        if self._faulty or self._places:
            text = f"{self._faulty} faulty series left out, {self._places} places skipped"
            print(f"prometheus: {self._split}: {text}", file=sys.stderr)  # noqa: T201

    def _print_place(self, begin: int, end: int, text: str) -> None:
        self._reported += 1
        if self._reported <= REPORTED_MAX:
            where = f"{self._split.path}, bytes {begin} to {end}"
            print(f"prometheus: {where}: {text}", file=sys.stderr)  # noqa: T201
