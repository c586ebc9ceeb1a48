"""The results as a picture: what an operation costs, relative to Pulsar's own proxy. Only here is matplotlib needed."""

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Patch

from tests.bench.contenders import CONTENDERS, Java
from tests.bench.figures import Figure, figure, number, ratio
from tests.bench.latency import PERCENTILES, Produced
from tests.bench.report import Report
from tests.bench.rows import Metric, Row

_LATENCY_COLOURS = ("#ced4da", "#0b6e4f", "#c77d3c")
_COLOURS = {"ours": "#0b6e4f", "haproxy": "#8d99ae"}
_TITLES: dict[Metric, str] = {
    "cost": "CPU time of the proxy per operation (less is better)",
    "rate": "Throughput (more is better)",
}
_BAR = 0.36


def draw(report: Report, path: Path) -> None:
    """Write the picture; nothing is drawn where Pulsar's proxy, the measure, was not measured."""
    mpl.rcParams["svg.hashsalt"] = "bench"  # the same results give the same file
    mpl.rcParams["font.size"] = 9
    names = [name for name in report.contenders if name != Java.name]
    canvas = Canvas(figsize=(11, 0.45 * len(report.rows) + 1.4), layout="constrained")
    panels = canvas.subplots(1, 2, sharey=True)
    for axes, metric in zip(panels, _TITLES, strict=True):
        _draw_metric(axes, report, names, metric)
    panels[0].invert_yaxis()  # both: they share it
    handles = [Patch(color=_COLOURS[name]) for name in names]
    labels = [CONTENDERS[name].label for name in names]
    canvas.legend(handles, labels, loc="outside lower center", ncols=len(names), frameon=False)
    canvas.savefig(path, metadata={"Date": None})


def draw_latency(found: dict[str, list[Produced]], path: Path) -> None:
    """Write the picture of a producer's waits: a group of bars for each percentile, on a logarithmic scale."""
    mpl.rcParams["svg.hashsalt"] = "bench"
    mpl.rcParams["font.size"] = 9
    canvas = Canvas(figsize=(8, 3.6), layout="constrained")
    axes = canvas.subplots()
    width = 0.8 / len(found)
    for group, (label, several) in enumerate(found.items()):
        waits = [figure([one.waits_ms[place] for one in several]) for place in range(len(PERCENTILES))]
        medians = [wait.median for wait in waits if wait]
        places = [place + (group - (len(found) - 1) / 2) * width for place in range(len(medians))]
        bars = axes.bar(places, medians, width * 0.9, label=label, color=_LATENCY_COLOURS[group])
        axes.bar_label(bars, [number(median) for median in medians], fontsize=7, padding=2)
    axes.set_yscale("log")
    axes.set_ylabel("ms until the acknowledgement (less is better)")
    axes.set_xticks(range(len(PERCENTILES)), ["p50", "p99", "p99.9"])
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    canvas.savefig(path, metadata={"Date": None})


def _draw_metric(axes: Axes, report: Report, names: list[str], metric: Metric) -> None:
    for place, row in enumerate(report.rows):
        for bar, name in enumerate(names):
            relative = _relative(report, row, name, metric)
            if relative is not None:
                _draw_bar(axes, place + (bar - (len(names) - 1) / 2) * _BAR, relative, _COLOURS[name])
    axes.axvline(1, color="#333", linewidth=0.8)
    axes.set_title(_TITLES[metric], fontsize=10)
    axes.set_xlabel(f"times that of {Java.label}")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}" if value >= 1 else f"1/{1 / value:g}")
    axes.set_yticks(range(len(report.rows)), [row.title for row in report.rows])
    axes.margins(x=0.15)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_bar(axes: Axes, height: float, relative: Figure, colour: str) -> None:
    """From 1, where Pulsar's proxy stands, to the median; the range as a line."""
    low, high = min(relative.values), max(relative.values)
    error = [[relative.median - low], [high - relative.median]]
    axes.barh(height, relative.median - 1, _BAR * 0.9, left=1, xerr=error, color=colour, ecolor="#333", capsize=1.5)
    right = relative.median >= 1
    axes.annotate(
        f"{relative.median:.2f}",
        (max(high, 1) if right else min(low, 1), height),
        xytext=(4 if right else -4, 0),
        textcoords="offset points",
        ha="left" if right else "right",
        va="center",
        fontsize=7,
    )


def _relative(report: Report, row: Row, contender: str, metric: Metric) -> Figure | None:
    return ratio(report.metric(row, contender, metric), report.metric(row, Java.name, metric))
