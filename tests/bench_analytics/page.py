"""The measurements of the analytics as tables with targets and verdicts, and as a page."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "analytics-benchmarks.md"
HEAD = """# Benchmarks of the analytics

Written by `make bench-analytics ARGS=--write`. The rollup is the whole job `pulsar-proxy-analytics rollup` in a running
Spark session: minutes, hours, days, checks and the commit. DuckDB computes less: no starts, no lookback, no commit.
Both choose between replicas by minute. They take turns in one run; the best round of each counts, and every row of both
is compared.
"""
RECEIVER_PER_CORE_MIN, RECEIVER_P99_MS_MAX = 500_000, 30.0
INGEST_PER_SECOND_MIN = 300_000
FEW_S_MAX = 1.5
ROLLUP_RATIO_MAX = 3.0
ROLLUP_RATIO_MAX_OF = {"200,000 series, a file a minute": 4.0}
"""Where another limit holds."""
Figures = dict[str, Any]


def verdict(*, is_met: bool) -> str:
    """A word for a table."""
    return "met" if is_met else "**MISSED**"


def markdown(receiver: list[Figures], ingest: Figures, rollup: Figures, samples: int) -> str:
    """All tables."""
    parts = [["## Receiver", "", *receiver_lines(receiver)], ["## Ingest, 2 cores", "", *ingest_lines(ingest)]]
    parts.append([f"## Rollup of {samples:,} samples, 2 cores", "", *rollup_lines(rollup)])
    return "\n\n".join("\n".join(part) for part in parts)


def receiver_lines(runs: list[Figures]) -> Iterator[str]:
    """The best round of each version of remote write."""
    yield "| remote write | samples/s per core | target | | p99 (ms) | target | |"
    yield "|---|---|---|---|---|---|---|"
    for version in sorted({run["version"] for run in runs}):
        own = [run for run in runs if run["version"] == version]
        rate, p99_ms = max(run["per_core"] for run in own), min(run["p99_ms"] for run in own)
        rates = f"{rate:,.0f} | ≥ {RECEIVER_PER_CORE_MIN:,} | {verdict(is_met=rate >= RECEIVER_PER_CORE_MIN)}"
        latencies = f"{p99_ms:.1f} | < {RECEIVER_P99_MS_MAX:g} | {verdict(is_met=p99_ms < RECEIVER_P99_MS_MAX)}"
        yield f"| {version}.0 | {rates} | {latencies} |"


def ingest_lines(figures: Figures) -> Iterator[str]:
    """The best round of each."""
    rate, few_s = max(figures["ingest"]), min(figures["few_s"])
    yield "| | | target | |"
    yield "|---|---|---|---|"
    is_met = rate >= INGEST_PER_SECOND_MIN
    rates = f"{rate:,.0f} samples/s | ≥ {INGEST_PER_SECOND_MIN:,} | {verdict(is_met=is_met)}"
    yield f"| {figures['samples']:,} samples into new tables | {rates} |"
    seconds = f"{few_s:.1f} s | ≤ {FEW_S_MAX} | {verdict(is_met=few_s <= FEW_S_MAX)}"
    yield f"| 10,000 samples more, to their commit, in a running session | {seconds} |"


def rollup_lines(results: dict[str, Figures]) -> Iterator[str]:
    """Every layout, with its ratio to DuckDB in the same run."""
    yield "| samples of | rollup (s) | DuckDB (s) | ratio | target | |"
    yield "|---|---|---|---|---|---|"
    for layout, row in results.items():
        ratio, most = row["rollup"] / row["DuckDB"], ROLLUP_RATIO_MAX_OF.get(layout, ROLLUP_RATIO_MAX)
        seconds = f"{row['rollup']:.1f} | {row['DuckDB']:.1f} | {ratio:.1f}"
        yield f"| {layout} | {seconds} | ≤ {most:g} | {verdict(is_met=ratio <= most)} |"


def write(text: str, to: Path = PAGE) -> None:
    """Write the page."""
    to.write_text(f"{HEAD}\n{text}\n")
