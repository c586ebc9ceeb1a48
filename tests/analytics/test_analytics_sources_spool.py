"""A spool as the jobs read it: what the receiver stored, as rows; in portions, from where one was, and never twice."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSourceReader
from pyspark.sql.types import StructType

from analytics.commands.command_line import spark_reason
from analytics.remote_write.remote_pb2 import BucketSpan, Histogram, WriteRequest
from analytics.remote_write.snappy import compress
from analytics.series import series_id
from analytics.sources.options import BadOption
from analytics.sources.prometheus import Prometheus
from analytics.sources.spool import LostSegments, Split, batch_end, check_segments_present
from analytics.spool import reader
from tests.analytics.spool_files import T0_MS, SpoolFiles, body_v2, labels

UP, DOWN = labels("up", job="x"), labels("down", job="x")


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[SpoolFiles]:
    files = SpoolFiles(tmp_path / "spool", segment_bytes_max=1000)
    yield files
    files.close()


def load(spark: SparkSession, spool: SpoolFiles, **options: str) -> DataFrame:
    spark.dataSource.register(Prometheus)
    options = {"table": "samples", "path": str(spool.directory)} | options
    return spark.read.format("prometheus").options(**options).load()


def reader_of(spool: SpoolFiles, **options: str) -> DataSourceReader:
    return Prometheus({"table": "all", "path": str(spool.directory)} | options).reader(StructType())


def test_samples_series_and_histograms_come_as_rows(spark: SparkSession, spool: SpoolFiles) -> None:
    spool.v1((UP, 0, 1.0), ({**UP, "__replica__": "b"}, 5, 2.0))
    histogram = Histogram(
        count_int=5, sum=2.5, schema=0, zero_count_int=1, positive_spans=[BucketSpan(offset=2, length=2)],
        positive_deltas=[1, 2],
    )  # fmt: skip
    spool.add(body_v2([(UP, 15_000, 3.0)], start_ms=-7, kind=1, histograms=[(labels("h"), 9, histogram)]), 2)
    samples = load(spark, spool).selectExpr("series_id", "unix_millis(ts)", "unix_millis(start_ts)", "value").collect()
    up = series_id(UP.items())
    assert [tuple(row) for row in samples] == [
        (up, T0_MS, None, 1.0), (up, T0_MS + 5, None, 2.0), (up, T0_MS + 15_000, T0_MS - 7, 3.0)
    ]  # fmt: skip
    [row] = load(spark, spool, table="histograms").collect()
    assert (row["series_id"], row["count"], row["sum"], row["schema"]) == (series_id(labels("h").items()), 5.0, 2.5, 0)
    assert (row["positive_offsets"], row["positive_counts"], row["custom_bounds"]) == ([2, 3], [1.0, 3.0], [])
    series = load(spark, spool, table="series").collect()
    assert sorted((row.metric, tuple(row.labels.items()), row.kind or "", row.ordered) for row in series) == [
        ("h", (), "", True), ("up", (("job", "x"),), "", True), ("up", (("job", "x"),), "counter", True)
    ]  # fmt: skip
    everything = load(spark, spool, table="all")
    assert everything.where("value is not null").count() == 3
    assert everything.where("histogram is not null").selectExpr("histogram.count").collect()[0][0] == 5.0
    assert everything.where("series is not null").count() == len(series)


def test_spans_tell_where_a_row_can_be_there_twice(spark: SparkSession, spool: SpoolFiles) -> None:
    spool.v1((UP, 0, 1.0), (DOWN, 10, 1.0), (labels("back"), 9, 1.0))
    spool.v1((UP, 15, 2.0), (DOWN, 10, 1.0), (labels("back"), 8, 1.0))
    rows = load(spark, spool, table="series").collect()
    spans = {row.metric: (row.first_ts.timestamp() * 1000, row.last_ts.timestamp() * 1000, row.ordered) for row in rows}
    assert spans == {
        "up": (T0_MS, T0_MS + 15, True),
        "down": (T0_MS + 10, T0_MS + 10, False),
        "back": (T0_MS + 8, T0_MS + 9, False),
    }


def test_splits_are_read_apart_and_hold_everything_once(spark: SparkSession, spool: SpoolFiles) -> None:
    for number in range(40):
        spool.v1((UP, number, float(number)))
    rows = load(spark, spool, splitBytes="200")
    assert rows.rdd.getNumPartitions() > 5
    assert sorted(row.value for row in rows.collect()) == [float(number) for number in range(40)]


def test_records_of_an_older_receiver_beyond_the_bounds_are_left_out_and_the_rest_is_read(
    spool: SpoolFiles, capfd: pytest.CaptureFixture[str]
) -> None:
    """A histogram of a million buckets beside good series, and a request of too many histograms."""
    count = 1_000_000
    large = Histogram(sum=0, positive_spans=[BucketSpan(offset=0, length=count)], positive_deltas=[0] * count)
    small = Histogram(count_int=1, sum=0, positive_spans=[BucketSpan(offset=0, length=1)], positive_deltas=[1])
    spool.v1((UP, 0, 1.0))
    spool.add(body_v2([(UP, 1, 2.0)], histograms=[(labels("large"), 1, large), (labels("small"), 1, small)]), 2)
    request = WriteRequest()
    empty = Histogram(timestamp=T0_MS)
    for number in range(11):
        one = request.timeseries.add(histograms=[empty] * 10_000)
        one.labels.add(name="__name__", value=f"many{number}")
    spool.add(compress(request.SerializeToString()), 1)
    spool.v1((UP, 2, 3.0))
    source = reader_of(spool)
    splits = [Split(segment.path, 0, segment.size_bytes) for segment in reader.list_segments(spool.directory)]
    batches = [batch for split in splits for batch in source.read(split)]
    values = [value for batch in batches for value in batch.column("value").to_pylist() if value is not None]
    kept = [one for batch in batches for one in batch.column("histogram").to_pylist() if one is not None]
    assert sorted(values) == [1.0, 2.0, 3.0]
    assert [one["positive_counts"] for one in kept] == [[1.0]]
    told = capfd.readouterr().err
    assert "1 series of the request are left out; series 1: a histogram: more than 20000 buckets" in told
    assert "more than 100000 histograms in a request (limits.max_histograms); what they held is lost" in told
    assert "1 faulty series left out" in told
    assert "1 places skipped" in told


def test_not_every_place_is_told_alone(spool: SpoolFiles, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(25):
        spool.add(b"no", 1)
    [segment] = reader.list_segments(spool.directory)
    list(reader_of(spool).read(Split(segment.path, 0, segment.size_bytes)))
    told = capfd.readouterr().err
    assert told.count("what they held is lost") == 20
    assert "25 places skipped" in told


def test_damage_is_stepped_over(spark: SparkSession, spool: SpoolFiles, capfd: pytest.CaptureFixture[str]) -> None:
    spool.v1((UP, 0, 1.0))
    spool.add(b"no snappy at all", 1)
    spool.v1((UP, 2, 3.0))
    [segment] = reader.list_segments(spool.directory)
    from analytics.sources.spool import decode_split

    batches = list(decode_split(Split(segment.path, 0, segment.size_bytes)))
    assert [value for batch in batches for value in batch.sample_value] == [1.0, 3.0]
    assert "what they held is lost" in capfd.readouterr().err


def test_an_empty_spool_has_no_rows(spark: SparkSession, spool: SpoolFiles) -> None:
    assert load(spark, spool).count() == 0


def test_a_batch_is_bounded_by_bytes_and_ends_between_records(spark: SparkSession, spool: SpoolFiles) -> None:
    for number in range(40):
        spool.v1((UP, number, float(number)))
    begin, end, values, rounds = reader.BEGIN, reader.committed_end(spool.directory), [], 0
    while begin < end:
        until = batch_end(str(spool.directory), begin, end, 300)
        options = {"fromPosition": str(begin.number), "toPosition": str(until.number)}
        splits = reader_of(spool, **options).partitions()
        assert sum(split.end - split.start for split in splits if isinstance(split, Split)) < 300 + 200
        values += [row.value for row in load(spark, spool, **options).collect()] if rounds % 4 == 0 else []
        begin, rounds = until, rounds + 1
    assert rounds > 8
    assert len(set(values)) == len(values) > 4
    assert load(spark, spool, toPosition=str(end.number)).count() == 40


def test_a_spool_that_lost_segments_is_told(spool: SpoolFiles) -> None:
    for number in range(40):
        spool.v1((UP, number, 1.0))
    segments = reader.list_segments(spool.directory)
    Path(segments[0].path).unlink()
    directory = str(spool.directory)
    with pytest.raises(LostSegments, match="segments were deleted, their samples are lost"):
        check_segments_present(directory, reader.Position(segments[0].number, 100))
    with pytest.raises(LostSegments, match=f"segment {segments[-1].number + 5}, byte 100"):
        check_segments_present(directory, reader.Position(segments[-1].number + 5, 100))
    check_segments_present(directory, reader.Position(segments[1].number, 100))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "needs either the option 'path'"),
        ({"path": "/x", "tabel": "all"}, "has no option 'tabel'"),
        ({"path": "/x", "table": "some"}, "must be one of samples, histograms, series, all"),
        ({"path": "/x", "splitBytes": "1k"}, "must be a whole number from 1"),
        ({"path": "/x", "fromPosition": "0:5"}, "fromPosition is '0:5', and must be a whole number"),
        ({"path": "s3a://b/x"}, "must be a directory that is mounted here"),
    ],
)
def test_bad_options_are_told(options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadOption, match=said):
        Prometheus(options)


def test_spark_passes_our_words_on(spark: SparkSession, tmp_path: Path) -> None:
    spark.dataSource.register(Prometheus)
    with pytest.raises(PySparkException) as caught:
        spark.read.format("prometheus").option("path", str(tmp_path / "nowhere")).load().count()
    assert "there is no directory" in spark_reason(str(caught.value))
