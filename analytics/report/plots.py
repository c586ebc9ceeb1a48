"""Panels as Plotly figures, drawn by `page.js`. Colours come from `page.css`, which has dark and light ones.

Plotly reads names as a kind of HTML (`<b>`, `<a href>`), so every name is escaped; the JSON cannot end a <script>.
"""

from __future__ import annotations

from typing import Any, Final

import plotly.graph_objects as go

from analytics.report.panels import Panel
from analytics.report.points import Line
from analytics.report.span import Span
from analytics.report.text import html_text
from analytics.report.units import Scale, scale

COLOURS: Final = 9
"""Number of colours in `page.css`: `--c0` and so on."""
DASHES: Final = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
HEIGHT_PX: Final = 280
MARKED_MAX: Final = 40
"""Maximum of points with markers."""
HOURS_TOLD_MAX: Final = 72
"""Maximum of hours with times as ticks; longer spans have dates."""
TICKED_MAX: Final = 12
TICKS: Final = 5
NUMBER: Final = ",.4~r"
"""d3's format for `analytics.report.units.short`: no `k` or `µ`, which the tables do not use."""


def scale_of(panel: Panel) -> Scale:
    """Return the scale of the panel's axis and table."""
    return scale(panel.unit, max((abs(value) for line in panel.lines.values() for value in line.values()), default=0.0))


def figure_json(panel: Panel, span: Span) -> str:
    """Return the figure as JSON that may stand in a <script> of any page."""
    text: str = figure(panel, span).to_json(engine="json")
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def figure(panel: Panel, span: Span) -> Any:
    """Make a figure with a line or a stack of bars for each of the panel's lines; windows without a value are gaps."""
    unit = scale_of(panel)
    drawn = go.Figure(layout=_layout(panel, span, unit))
    for place, (name, line) in enumerate(panel.lines.items()):
        common: dict[str, Any] = {"name": html_text(name), "y": _values(line, span, unit), "meta": place % COLOURS}
        common |= {"x0": span.windows_ms.start, "dx": span.windows_ms.step, "hovertemplate": f"%{{y:{NUMBER}}}"}
        if panel.bars:
            drawn.add_trace(go.Bar(**common, offset=0, width=span.windows_ms.step))
        else:
            dash = {"dash": dash_of(place), "width": 1.75}
            mode = "lines+markers" if len(line) <= MARKED_MAX or _stands_alone(line, span) else "lines"
            drawn.add_trace(
                go.Scatter(**common, mode=mode, line=dash, marker={"size": 5}, connectgaps=False, cliponaxis=False)
            )
    return drawn


def dash_of(place: int) -> str:
    """Return a line's dash, so that lines differ not only in colour."""
    return DASHES[place % len(DASHES)]


def _stands_alone(line: Line, span: Span) -> bool:
    """Return True if a point has no neighbour, so that a line without markers would not show it."""
    step = span.windows_ms.step
    return any(at - step not in line and at + step not in line for at in line)


def _layout(panel: Panel, span: Span, unit: Scale) -> dict[str, Any]:
    windows = span.windows_ms
    last = windows.stop if panel.bars else windows[-1]
    return {
        "template": {},
        "height": HEIGHT_PX,
        "margin": {"l": 50, "r": 16, "t": 8, "b": 32},
        "font": {"family": "system-ui, sans-serif", "size": 12},
        "hovermode": "x unified",
        "hoverlabel": {"namelength": 40},
        "barmode": "stack",
        "bargap": 0,
        "showlegend": False,
        "xaxis": _time_axis(span) | {"range": [windows.start, last]},
        "yaxis": {
            "title": {"text": html_text(unit.unit), "standoff": 8},
            "rangemode": "tozero",
            "tickformat": NUMBER,
            "automargin": True,
            "nticks": 6,
        },
    }


def _time_axis(span: Span) -> dict[str, Any]:
    """Return the x axis, with dates in the page's format; with few windows ticks are only at windows."""
    windows = span.windows_ms
    short = windows.stop - windows.start <= HOURS_TOLD_MAX * 3_600_000 and span.resolution.suffix != "1d"
    axis = {
        "type": "date",
        "automargin": True,
        "tickformat": "%H:%M\n%Y-%m-%d" if short else "%m-%d\n%Y",
        "hoverformat": "%Y-%m-%d" if span.resolution.suffix == "1d" else "%Y-%m-%d %H:%M",
    }
    if len(windows) <= TICKED_MAX:
        axis |= {"tick0": windows.start, "dtick": windows.step * -(-len(windows) // TICKS)}
    return axis


def _values(line: Line, span: Span, unit: Scale) -> list[float | None]:
    """Return a value for each window with six digits, which makes the page ten times smaller."""
    return [float(f"{line[at] / unit.divisor:.6g}") if at in line else None for at in span.windows_ms]
