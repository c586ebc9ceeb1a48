"""What is read from pulsar-perf, and the table that is made of it."""

import pytest

from tests.bench.generator import BenchError
from tests.bench.latency import Produced, parse_produced, table

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
    lines = table(1000, {"none": [Produced(1000, (1, 2, 3)), Produced(1000, (3, 2, 3))]})
    assert "| none | 2.00 (1.00-3.00) | 2.00 | 3.00 |" in lines
