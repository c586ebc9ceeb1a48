"""What is read from pulsar-perf, and the table that is made of it."""

import sys
from pathlib import Path

import pytest
from local.process import OwnedProcess

from tests.bench import latency
from tests.bench.contenders import Contender, Straight
from tests.bench.generator import BenchError, Broker
from tests.bench.latency import Moved, Produced, parse_produced, table

_LOG = "2026-11-29T07:53:10 INFO PerfClientUtils - Aggregated"
OUTPUT = (
    f"{_LOG} throughput stats --- 489000 records sent --- 16300.378 msg/s --- 127.347 Mbit/s\n"
    f"{_LOG} latency stats --- Latency: mean:   2.151 ms - med:   1.868 - 95pct:   4.210 - 99pct:  10.780 - "
    "99.9pct:  57.855 - 99.99pct:  80.100 - 99.999pct:  90.000 - Max:  91.000\n"
)


def test_rate_and_percentiles_are_read_from_the_tools_last_lines() -> None:
    assert parse_produced(OUTPUT) == Produced(16300.378, (1.868, 10.78, 57.855))


def test_a_tool_that_prints_no_figures_is_an_error_with_what_it_printed() -> None:
    with pytest.raises(BenchError, match="connection refused"):
        parse_produced("connection refused")


def test_the_table_has_medians_and_ranges() -> None:
    lines = table(1000, {"none": [Produced(1000, (1, 2, 3)), Produced(1000, (3, 2, 3))]}).splitlines()
    assert "| none | 2.00 (1.00-3.00) | 2.00 | 3.00 | - |" in lines
    lines = table(1000, {"one": [Produced(1000, (1, 2, 3), 0.1), Produced(1000, (3, 2, 3), 0.3)]}).splitlines()
    assert "| | p50, ms | p99, ms | p99.9, ms | CPUs for 100 MB/s |" in lines
    assert "| one | 2.00 (1.00-3.00) | 2.00 | 3.00 | 0.20 (0.10-0.30) |" in lines


def start_tool(program: str, directory: Path) -> tuple[OwnedProcess, Contender]:
    tool = OwnedProcess([sys.executable, "-c", program], log=directory / "tool.log")
    return tool, Straight(Broker(6650, 0), directory)


@pytest.mark.parametrize(("pid", "cpu_s"), [(4711, 2.5), (None, None)])
def test_what_is_moved_between_two_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pid: int | None, cpu_s: float | None
) -> None:
    """Not what came before: another connection's bytes, the beginning, the warm-up."""
    for name in ("WARM_UP_S", "WINDOW_S", "_MARGIN_S"):
        monkeypatch.setattr(latency, name, 0.0)
    received = iter([7_000, 8_000, 7_000 + latency._STARTED_BYTES, 5_000_000, 9_000_000])
    cpu_seconds = iter([10.0, 12.5])
    monkeypatch.setattr(latency, "received_bytes", lambda _port: next(received))
    monkeypatch.setattr(latency, "cpu_seconds", lambda _pid: next(cpu_seconds))
    monkeypatch.setattr(Straight, "pid", pid)
    tool, contender = start_tool("import time; time.sleep(600)", tmp_path)
    try:
        moved = latency._measure_moved(tool, contender)
    finally:
        tool.kill()
    assert (moved.received_bytes, moved.cpu_s) == (4_000_000, cpu_s)


def test_a_tool_that_ends_too_early_is_an_error(tmp_path: Path) -> None:
    tool, contender = start_tool("print('connection refused')", tmp_path)
    try:
        with pytest.raises(BenchError, match="connection refused"):
            latency._measure_moved(tool, contender)
    finally:
        tool.kill()


def test_cpus_are_those_between_the_two_points() -> None:
    """3 CPU seconds for 50 MB/s in 20 s, whatever came before."""
    assert Moved(20, 1_000_000_000, 3).cpus == pytest.approx(0.3)
    assert Moved(20, 1_000_000_000, None).cpus is None
