"""What the tables of `make bench-analytics` say, and that they are not kind to a missed target."""

import json
from pathlib import Path

import pytest

from tests.bench_analytics import page

RECEIVER = [
    {"what": "receiver", "version": version, "per_core": rate, "p99_ms": p99_ms}
    for version, rate, p99_ms in ((1, 510_000.0, 29.0), (1, 480_000.0, 35.0), (2, 499_999.0, 30.0))
]
ROW = {"1m_s": 12.0, "1h_s": 2.0}
RESULTS = {"sketch": ROW, "this rollup": {"1m_s": 12.0, "1h_s": 2.1}, "DuckDB": {"1m_s": 3.0, "1h_s": 0.1}}
CURVE = {"1": RESULTS, "10": RESULTS}


def test_the_best_round_counts_and_targets_are_told() -> None:
    lines = list(page.receiver_lines(RECEIVER))
    assert lines[2] == "| 1.0 | 510,000 | ≥ 500,000 | met | 29.0 | < 30 | met |"
    assert lines[3] == "| 2.0 | 499,999 | ≥ 500,000 | **MISSED** | 30.0 | < 30 | **MISSED** |"


@pytest.mark.parametrize(("rate", "said"), [(400_000.0, "met"), (399_999.0, "**MISSED**")])
def test_ingest(rate: float, said: str) -> None:
    line = list(page.ingest_lines({"samples": 4_000_000, "ingest": [1.0, rate]}))[-1]
    assert line == f"| 4,000,000 | {rate:,.0f} | ≥ 400,000 | {said} |"


def test_the_rollup_is_measured_by_the_sketch_of_the_same_run() -> None:
    lines = list(page.rollup_lines(RESULTS))
    assert "| DuckDB | 3.0 | 0.1 | 0.25 |" in lines
    assert lines[-2].endswith("| 1.00 | ≤ 1.00 | met |")
    assert lines[-1].endswith("| **MISSED** |")


def test_the_page_is_written_and_names_its_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    # The picture needs matplotlib, which only `make bench-analytics` installs.
    monkeypatch.setattr(page, "draw", lambda _curve, path: drawn.append(path))
    rollup = json.loads(json.dumps({"series": 1736, "results": RESULTS, "curve": CURVE}))
    text = page.markdown(RECEIVER, {"samples": 1, "ingest": [1.0]}, rollup, 10_000_000)
    page.write(text, rollup["curve"], tmp_path / "page.md")
    written = (tmp_path / "page.md").read_text()
    assert "## Rollup of 10,000,000 samples of 1,736 counters" in written
    assert "| 10 M | 14.0 s | 14.1 s | 3.1 s |" in written
    assert "(page.svg)" in written
    assert drawn == [tmp_path / "page.svg"]
