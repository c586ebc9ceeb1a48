"""The spool as a whole: commits, crashes, full and failing disks, readers beside the writer, removal."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from analytics.spool import reader, retention
from analytics.spool.positions import COMMITTED, Position, read_position, write_position
from analytics.spool.records import SEGMENT_HEADER_BYTES, Damage, Record, SpoolError, pack_record
from analytics.spool.segments import list_segment_numbers, segment_path
from analytics.spool.writer import Disk, SpoolFullError, SpoolLimits, SpoolWriter

LIMITS = SpoolLimits(segment_bytes_max=300, total_bytes_max=1_000_000, free_bytes_min=0)


class BadDisk(Disk):
    """Fails where it is told to, after doing a part of it."""

    def __init__(self) -> None:
        self.fail_write: int | None = None  # how much is written before it fails
        self.fail_sync = False
        self.error = errno.EIO
        self.free = 10**12
        self.synced: list[int] = []

    def write(self, file: int, data: bytes) -> None:
        if self.fail_write is not None:
            os.write(file, data[: self.fail_write])
            raise OSError(self.error, os.strerror(self.error))
        super().write(file, data)

    def sync(self, file: int) -> None:
        if self.fail_sync:
            raise OSError(self.error, os.strerror(self.error))
        super().sync(file)
        self.synced.append(os.fstat(file).st_size)

    def free_bytes(self, directory: Path) -> int:
        return self.free


def rec(text: str) -> bytes:
    return pack_record(1, 1000, text.encode())


def all_records(directory: Path, on_damage: Callable[[Damage], None] | None = None) -> list[Record]:
    return [
        record
        for segment in reader.list_segments(directory)
        for record in reader.read_records(segment.path, 0, segment.size_bytes, on_damage)
    ]


def texts(directory: Path) -> list[str]:
    return [record.body.decode() for record in all_records(directory)]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "a" / "spool"


def test_appended_records_are_read_in_order_over_segments(directory: Path) -> None:
    writer = SpoolWriter(directory, LIMITS)
    assert texts(directory) == []
    for group in range(10):
        writer.append_records([rec(f"{group}-{number}") for number in range(3)])
    assert texts(directory) == [f"{group}-{number}" for group in range(10) for number in range(3)]
    assert len(reader.list_segments(directory)) > 2
    assert reader.committed_end(directory) == writer.committed_end
    assert all(one.size_bytes < 300 + 3 * len(rec("0-0")) for one in reader.list_segments(directory))
    assert pickle.loads(pickle.dumps(reader.list_segments(directory))) == reader.list_segments(directory)
    writer.close()


def test_reading_goes_on_where_it_stopped(directory: Path) -> None:
    writer = SpoolWriter(directory, LIMITS)
    writer.append_records([rec("a"), rec("b")])
    segment = reader.list_segments(directory)[0]
    first = list(reader.read_records(segment.path, 0, segment.size_bytes))
    assert first[0].offset == SEGMENT_HEADER_BYTES
    writer.append_records([rec("c")])
    end = reader.committed_end(directory)
    later = list(reader.read_records(segment.path, first[-1].next_offset, end.offset))
    assert [one.body for one in later] == [b"c"]
    assert list(reader.read_records(segment.path, end.offset, end.offset)) == []
    writer.close()


def test_a_reader_sees_nothing_before_it_is_synced(directory: Path) -> None:
    seen: list[list[str]] = []

    class Watching(Disk):
        def sync(self, file: int) -> None:
            seen.append(texts(directory))
            super().sync(file)

    writer = SpoolWriter(directory, LIMITS, Watching())
    writer.append_records([rec("a")])
    writer.append_records([rec("b")])
    assert seen == [[], [], ["a"]]
    assert texts(directory) == ["a", "b"]
    writer.close()


def test_no_reader_sees_records_before_there_is_a_spool(tmp_path: Path) -> None:
    assert reader.list_segments(tmp_path) == []
    assert reader.committed_end(tmp_path) == (0, 0)


def test_a_second_writer_is_turned_away_and_the_next_one_is_not(directory: Path) -> None:
    writer = SpoolWriter(directory, LIMITS)
    with pytest.raises(SpoolError, match="another receiver"):
        SpoolWriter(directory, LIMITS)
    writer.append_records([rec("kept")])
    writer.close()
    SpoolWriter(directory, LIMITS).close()
    assert texts(directory) == ["kept"]


# ---- crashes


def crashed(directory: Path, tail: bytes) -> tuple[Path, int]:
    """A spool whose writer was killed while it wrote `tail`: two records committed before."""
    writer = SpoolWriter(directory, LIMITS)
    writer.append_records([rec("a"), rec("b")])
    end = writer.committed_end
    writer.close()
    path = segment_path(directory, end.segment)
    with path.open("ab") as file:
        file.write(tail)
    return path, end.offset


def test_a_tail_cut_at_every_byte_is_copied_and_whole_records_stay(tmp_path: Path) -> None:
    tail = rec("c") + rec("d")
    for length in range(len(tail) + 1):
        directory = tmp_path / str(length)
        path, end = crashed(directory, tail[:length])
        assert texts(directory) == ["a", "b"]  # nothing of it was committed yet
        writer = SpoolWriter(directory, LIMITS)
        whole = length // len(rec("c"))
        assert texts(directory) == ["a", "b", "c", "d"][: 2 + whole]
        torn = length - whole * len(rec("c"))
        assert writer.repair_report is not None
        assert (writer.repair_report.torn is not None) == bool(torn)
        assert not writer.repair_report.lost_committed
        assert path.with_suffix(".torn").exists() == bool(torn)
        if torn:
            assert path.with_suffix(".torn").read_bytes() == tail[length - torn : length]
        assert path.stat().st_size == end + whole * len(rec("c"))
        writer.append_records([rec("new")])
        assert texts(directory)[-1] == "new"
        assert writer.committed_end.segment > int(path.stem[4:])  # never behind what a reader may have seen
        writer.close()


def test_every_flipped_byte_of_the_newest_segment_is_told_and_costs_one_record(tmp_path: Path) -> None:
    good = tmp_path / "good"
    path, end = crashed(good, b"")
    data = path.read_bytes()
    for position in range(end):
        directory = tmp_path / str(position)
        directory.mkdir()
        write_position(directory, COMMITTED, Position(1, end))
        flipped = bytearray(data)
        flipped[position] ^= 0x10
        segment_path(directory, 1).write_bytes(flipped)
        writer = SpoolWriter(directory, LIMITS)
        damages: list[Damage] = []
        found = [one.body.decode() for one in all_records(directory, damages.append)]
        second = position >= SEGMENT_HEADER_BYTES + len(rec("a"))
        expected = ["a", "b"] if position < SEGMENT_HEADER_BYTES else ["a"] if second else ["b"]
        assert found == expected
        assert writer.repair_report is not None
        assert writer.repair_report.lost_committed == second  # the last record is not a torn end: it was committed
        assert bool(writer.repair_report.damaged) != second
        assert len(damages) == (0 if second else 1)  # its torn end is put aside, the rest stays to be told
        writer.append_records([rec("new")])
        assert [one.body for one in all_records(directory, damages.append)][-1] == b"new"
        writer.close()


def test_damage_in_the_middle_raises_unless_somebody_hears_of_it(directory: Path) -> None:
    path, end = crashed(directory, b"")
    data = bytearray(path.read_bytes())
    data[SEGMENT_HEADER_BYTES + len(rec("a")) - 1] ^= 1
    path.write_bytes(data)
    with pytest.raises(SpoolError, match=f"bytes {SEGMENT_HEADER_BYTES} to .* the body does not match its CRC"):
        all_records(directory)
    damages: list[Damage] = []
    assert [one.body for one in all_records(directory, damages.append)] == [b"b"]
    assert [one.offset for one in damages] == [SEGMENT_HEADER_BYTES]
    assert end == reader.list_segments(directory)[0].size_bytes


@pytest.mark.parametrize("length", range(SEGMENT_HEADER_BYTES))
def test_a_crash_while_a_segment_is_begun(directory: Path, length: int) -> None:
    path, _ = crashed(directory, b"")
    begun = segment_path(directory, 2)
    begun.write_bytes((b"PRWSPOOL" + bytes(SEGMENT_HEADER_BYTES))[:length])
    writer = SpoolWriter(directory, LIMITS)
    assert writer.committed_end.segment == 3
    assert texts(directory) == ["a", "b"]
    assert list_segment_numbers(directory) == [1, 3]
    writer.close()
    assert path.exists()


def test_starting_again_and_again_makes_no_segments(directory: Path) -> None:
    for _ in range(5):
        SpoolWriter(directory, LIMITS).close()
    assert list_segment_numbers(directory) == [1]


def test_a_segment_number_is_never_used_again(directory: Path) -> None:
    """Not even if the files are gone: a reader's position in the old one would hide what is in the new one."""
    path, _ = crashed(directory, b"")
    path.unlink()
    writer = SpoolWriter(directory, LIMITS)
    assert writer.committed_end.segment == 2
    writer.close()


def test_a_torn_position_is_written_again_and_readers_raise_until_then(directory: Path) -> None:
    crashed(directory, b"")
    (directory / COMMITTED).write_bytes(b"")
    with pytest.raises(SpoolError, match="is invalid"):
        reader.list_segments(directory)
    SpoolWriter(directory, LIMITS).close()
    assert texts(directory) == ["a", "b"]


def test_every_flipped_byte_of_a_position_is_noticed(directory: Path) -> None:
    crashed(directory, b"")
    data = (directory / COMMITTED).read_bytes()
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1
        (directory / COMMITTED).write_bytes(flipped)
        with pytest.raises(SpoolError):
            read_position(directory, COMMITTED)


def test_a_process_killed_while_it_appends_loses_nothing_that_it_said(directory: Path) -> None:
    """The real thing, at record level: SIGKILL at some moment, many times."""
    program = (
        "import sys; from pathlib import Path\n"
        "from analytics.spool.writer import SpoolLimits, SpoolWriter\n"
        "from analytics.spool.records import pack_record\n"
        "writer = SpoolWriter(Path(sys.argv[1]), SpoolLimits(5000, 10**9, 0))\n"
        "for number in range(10**6):\n"
        "    writer.append_records([pack_record(1, 1, f'{sys.argv[2]}-{number}'.encode() * 20)])\n"
        "    print(number, flush=True)\n"
    )
    said: list[str] = []
    for life in range(4):
        with subprocess.Popen(
            [sys.executable, "-c", program, directory, str(life)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for _ in range(20 + 7 * life):
                process.stdout.readline()
            process.kill()
            heard = process.stdout.read().splitlines()
        total = 20 + 7 * life + len([line for line in heard if line])
        said += [f"{life}-{number}" * 20 for number in range(total)]
    writer = SpoolWriter(directory, LIMITS)
    found = texts(directory)
    assert len(set(found)) == len(found)
    assert set(said) <= set(found)
    assert len(set(found) - set(said)) <= 4  # of each life at most the one that it had no time to tell
    writer.close()


# ---- disks


@pytest.mark.parametrize("partial", [0, 1, 30, 60])
@pytest.mark.parametrize(("code", "kind"), [(errno.ENOSPC, SpoolFullError), (errno.EIO, SpoolError)])
def test_a_write_that_fails_leaves_nothing_behind(
    directory: Path, partial: int, code: int, kind: type[SpoolError]
) -> None:
    disk = BadDisk()
    writer = SpoolWriter(directory, LIMITS, disk)
    writer.append_records([rec("a")])
    disk.fail_write, disk.error = partial, code
    for _ in range(3):
        with pytest.raises(SpoolError) as caught:
            writer.append_records([rec("refused"), rec("refused")])
        assert type(caught.value) is kind
        assert texts(directory) == ["a"]
    with pytest.raises(kind):
        writer.check_writable()
    disk.fail_write = None
    writer.check_writable()
    writer.append_records([rec("b")])
    assert texts(directory) == ["a", "b"]
    writer.close()


def test_after_a_failed_sync_nothing_is_appended_to_that_segment(directory: Path) -> None:
    disk = BadDisk()
    writer = SpoolWriter(directory, LIMITS, disk)
    writer.append_records([rec("a")])
    before = writer.committed_end
    disk.fail_sync = True
    with pytest.raises(SpoolError):
        writer.append_records([rec("unknown")])
    assert texts(directory) == ["a"]
    disk.fail_sync = False
    writer.append_records([rec("b")])
    assert writer.committed_end.segment == before.segment + 1
    assert segment_path(directory, before.segment).stat().st_size == before.offset
    assert texts(directory) == ["a", "b"]
    writer.close()


def test_free_space_below_the_bound_refuses_before_anything_is_touched(directory: Path) -> None:
    disk = BadDisk()
    writer = SpoolWriter(directory, SpoolLimits(300, 10**6, free_bytes_min=1000), disk)
    disk.free = 1000 + len(rec("a")) - 1
    with pytest.raises(SpoolFullError, match="bytes are free"):
        writer.append_records([rec("a")])
    disk.free += 1
    writer.append_records([rec("a")])
    disk.free = 999
    with pytest.raises(SpoolFullError):
        writer.check_writable()
    writer.close()


def fill(writer: SpoolWriter) -> str:
    """Append until there is no room; returns what was said."""
    try:
        for number in range(100):
            writer.append_records([rec(f"{number:03}")])
    except SpoolFullError as error:
        return str(error)
    raise AssertionError("it never became full")


def test_the_total_is_bounded_until_something_is_consumed(directory: Path) -> None:
    writer = SpoolWriter(directory, SpoolLimits(100, 1000, 0))
    assert "does the ingest job run" in fill(writer)
    kept = texts(directory)
    assert sum(one.size_bytes for one in reader.list_segments(directory)) <= 1000
    assert retention.remove_consumed(directory, writer.committed_end)
    writer.append_records([rec("again")])
    assert texts(directory)[-1] == "again"
    assert len(kept) > 5
    writer.close()


def test_the_total_holds_over_a_restart(directory: Path) -> None:
    limits = SpoolLimits(10_000, 1000, 0)
    writer = SpoolWriter(directory, limits)
    fill(writer)
    writer.close()
    writer = SpoolWriter(directory, limits)
    with pytest.raises(SpoolFullError):
        writer.append_records([rec("x" * 60)])
    writer.close()


# ---- consumption


def test_consumed_records_are_removed_by_segments(directory: Path) -> None:
    writer = SpoolWriter(directory, SpoolLimits(100, 10**6, 0))
    for number in range(6):
        writer.append_records([rec(f"{number:03}")])
    numbers = list_segment_numbers(directory)
    segment = reader.list_segments(directory)[1]
    position = Position(segment.number, segment.size_bytes)
    assert retention.remove_consumed(directory, position) == numbers[:1]
    assert retention.remove_consumed(directory, Position(0, 5)) == []
    assert retention.remove_consumed(directory, writer.committed_end) == numbers[1:-1]
    assert list_segment_numbers(directory) == numbers[-1:]
    with pytest.raises(SpoolError, match="cannot have been consumed"):
        retention.remove_consumed(directory, Position(writer.committed_end.segment, writer.committed_end.offset + 1))
    writer.close()


def test_the_torn_end_goes_with_its_segment(directory: Path) -> None:
    path, _ = crashed(directory, b"torn")
    writer = SpoolWriter(directory, LIMITS)
    assert path.with_suffix(".torn").exists()
    retention.remove_consumed(directory, writer.committed_end)
    assert not path.exists()
    assert not path.with_suffix(".torn").exists()
    writer.close()


def test_a_file_that_is_no_segment_is_told(tmp_path: Path) -> None:
    for name in ("seg-000000000000001.spool", "other.bin"):
        (tmp_path / name).write_bytes(b"not a segment at all, but long enough")
        with pytest.raises(SpoolError, match="header"):
            list(reader.read_records(tmp_path / name, 0, 30))
