"""The measurements of the analytics as tables with targets and verdicts, as a page and as a picture."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "analytics-benchmarks.md"
PICTURE = PAGE.with_suffix(".svg")
HEAD = """# Benchmarks of the analytics

Written by `make bench-analytics ARGS=--write`. The sketch is the program with which the design was measured
(`tests/bench_analytics/rollup_sketch.py`). It, DuckDB and Polars compute less than the rollup: no start timestamps, no
exact sums, no last sample of the hour before, one directory. "whole job" is `pulsar-proxy-analytics rollup`: minutes,
hours, days, checks and the commit. All programs take turns in one run; the best round of each counts.
"""
RECEIVER_PER_CORE_MIN, RECEIVER_P99_MS_MAX = 500_000, 30.0
INGEST_PER_SECOND_MIN = 400_000
ROLLUP_RATIO_MAX = 1.0
HOURS_RATIO_MAX = 2 / 12
"""On to hours, in 2 s where the sketch takes 12 s to minutes."""
Figures = dict[str, Any]


def verdict(*, is_met: bool) -> str:
    """A word for a table."""
    return "met" if is_met else "**MISSED**"


def markdown(receiver: list[Figures], ingest: Figures, rollup: Figures, samples: int) -> str:
    """All tables."""
    parts = [["## Receiver", "", *receiver_lines(receiver)], ["## Ingest, 2 cores", "", *ingest_lines(ingest)]]
    title = f"## Rollup of {samples:,} samples of {rollup['series']:,} counters, 2 cores"
    parts.append([title, "", *rollup_lines(rollup["results"])])
    if rollup["curve"]:
        parts.append(["### By size", "", "Minutes and hours together, one round:", "", *curve_lines(rollup["curve"])])
    return "\n\n".join("\n".join(part) for part in parts)


def receiver_lines(runs: list[Figures]) -> Iterator[str]:
    """The best round of each version of remote write."""
    yield "| remote write | samples/s per core | target | | p99 (ms) | target | |"
    yield "|---|---|---|---|---|---|---|"
    for version in sorted({run["version"] for run in runs}):
        own = [run for run in runs if run["version"] == version and run["what"] == "receiver"]
        rate, p99_ms = max(run["per_core"] for run in own), min(run["p99_ms"] for run in own)
        rates = f"{rate:,.0f} | ≥ {RECEIVER_PER_CORE_MIN:,} | {verdict(is_met=rate >= RECEIVER_PER_CORE_MIN)}"
        latencies = f"{p99_ms:.1f} | < {RECEIVER_P99_MS_MAX:g} | {verdict(is_met=p99_ms < RECEIVER_P99_MS_MAX)}"
        yield f"| {version}.0 | {rates} | {latencies} |"


def ingest_lines(figures: Figures) -> Iterator[str]:
    """The best round."""
    rate = max(figures["ingest"])
    yield "| samples | samples/s | target | |"
    yield "|---|---|---|---|"
    is_met = rate >= INGEST_PER_SECOND_MIN
    yield f"| {figures['samples']:,} | {rate:,.0f} | ≥ {INGEST_PER_SECOND_MIN:,} | {verdict(is_met=is_met)} |"


def rollup_lines(results: dict[str, Figures]) -> Iterator[str]:
    """Every contender, then the targets, which are ratios to the sketch in the same run."""
    sketch_s, own = results["sketch"]["1m_s"], results["this rollup"]
    yield "| | to 1 minute (s) | on to 1 hour (s) | to 1 minute, ratio to the sketch |"
    yield "|---|---|---|---|"
    for name, row in results.items():
        yield f"| {name} | {row['1m_s']:.1f} | {row['1h_s']:.1f} | {row['1m_s'] / sketch_s:.2f} |"
    yield ""
    yield "| target | | | |"
    yield "|---|---|---|---|"
    targets = (
        ("to 1 minute / sketch to 1 minute", own["1m_s"] / sketch_s, ROLLUP_RATIO_MAX),
        ("on to 1 hour / sketch to 1 minute", own["1h_s"] / sketch_s, HOURS_RATIO_MAX),
    )
    for what, ratio, most in targets:
        yield f"| {what} | {ratio:.2f} | ≤ {most:.2f} | {verdict(is_met=ratio <= most)} |"


def curve_lines(curve: dict[str, dict[str, Figures]]) -> Iterator[str]:
    """Seconds by millions of samples."""
    names = list(next(iter(curve.values())))
    yield "| samples | " + " | ".join(names) + " |"
    yield "|---" * (len(names) + 1) + "|"
    for millions, rows in curve.items():
        yield f"| {millions} M | " + " | ".join(f"{_both_s(rows[name]):.1f} s" for name in names) + " |"


def draw(curve: dict[str, dict[str, Figures]], path: Path) -> None:
    """Seconds against millions of samples, both logarithmic."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "bench"
    canvas = Figure(figsize=(7, 4.5), layout="constrained")
    axes = canvas.subplots()
    for name in next(iter(curve.values())):
        axes.plot([float(size) for size in curve], [_both_s(rows[name]) for rows in curve.values()], "o-", label=name)
    axes.set(xscale="log", yscale="log", xlabel="samples (millions)", ylabel="seconds, to minutes and on to hours")
    axes.legend(frameon=False)
    axes.grid(visible=True, alpha=0.3)
    canvas.savefig(path, metadata={"Date": None})


def write(text: str, curve: dict[str, dict[str, Figures]], to: Path = PAGE) -> None:
    """The page and its picture, anew."""
    picture = to.with_suffix(".svg")
    draw(curve, picture)
    to.write_text(f"{HEAD}\n{text}\n\n![seconds against samples, both logarithmic]({picture.name})\n")


def _both_s(row: Figures) -> float:
    return float(row["1m_s"]) + float(row["1h_s"])
