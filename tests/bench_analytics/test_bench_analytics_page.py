"""What the tables of `make bench-analytics` say, and that they are not kind to a missed target."""

from pathlib import Path

import pytest

from tests.bench_analytics import page

RECEIVER = [
    {"version": version, "per_core": rate, "p99_ms": p99_ms}
    for version, rate, p99_ms in ((1, 510_000.0, 29.0), (1, 480_000.0, 35.0), (2, 499_999.0, 30.0))
]
RESULTS = {
    "1,736 series, a file an hour": {"rollup": 9.0, "DuckDB": 3.0},
    "20,000 series, a file a minute": {"rollup": 9.1, "DuckDB": 3.0},
    "200,000 series, a file a minute": {"rollup": 12.0, "DuckDB": 3.0},
}


def test_the_best_round_counts_and_targets_are_told() -> None:
    lines = list(page.receiver_lines(RECEIVER))
    assert lines[2] == "| 1.0 | 510,000 | ≥ 500,000 | met | 29.0 | < 30 | met |"
    assert lines[3] == "| 2.0 | 499,999 | ≥ 500,000 | **MISSED** | 30.0 | < 30 | **MISSED** |"


@pytest.mark.parametrize(("rate", "few_s", "said"), [(300_000.0, 1.5, "met"), (299_999.0, 1.51, "**MISSED**")])
def test_ingest(rate: float, few_s: float, said: str) -> None:
    cold, few = list(page.ingest_lines({"samples": 4_000_000, "ingest": [1.0, rate], "few_s": [9.0, few_s]}))[2:]
    assert cold == f"| 4,000,000 samples into new tables | {rate:,.0f} samples/s | ≥ 300,000 | {said} |"
    assert few.endswith(f"| 1.5 s | ≤ 1.5 | {said} |")


def test_the_rollup_is_measured_by_duckdb_in_the_same_run() -> None:
    lines = list(page.rollup_lines(RESULTS))[2:]
    assert [line.split(" | ")[-3:] for line in lines] == [
        ["3.0", "≤ 3", "met |"],
        ["3.0", "≤ 3", "**MISSED** |"],
        ["4.0", "≤ 4", "met |"],
    ]


def test_the_page_is_written(tmp_path: Path) -> None:
    page.write(
        page.markdown(RECEIVER, {"samples": 1, "ingest": [1.0], "few_s": [1.0]}, RESULTS, 10_000_000),
        tmp_path / "page.md",
    )
    written = (tmp_path / "page.md").read_text()
    assert "## Rollup of 10,000,000 samples, 2 cores" in written
    assert written.startswith(page.HEAD)
