"""Panels as Plotly figures. Colours are Okabe and Ito's, told apart by all kinds of eyes, and lines differ in dashes.

Plotly reads names as a kind of HTML (`<b>`, `<a href>`), so every name is escaped; its JSON cannot end a <script>.
"""

from __future__ import annotations

from html import escape
from typing import Any, Final

import plotly.graph_objects as go

from analytics.report.panels import Panel
from analytics.report.points import Line
from analytics.report.span import Span

# Without their yellow, which nobody sees on white.
COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#7F7F7F", "#8C6D31")
DASHES: Final = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
HEIGHT_PX: Final = 320
_CONFIG: Final = {"displaylogo": False, "responsive": True}


def figure_html(panel: Panel, span: Span, identity: str) -> str:
    """A <div> and the script that draws in it; plotly.js itself must be on the page already."""
    # The width of Plotly's own <div> is the page's; the height is given, so that nothing jumps.
    drawn: str = figure(panel, span).to_html(
        full_html=False,
        include_plotlyjs=False,
        div_id=identity,
        config=_CONFIG,
        default_height=f"{HEIGHT_PX}px",
    )
    return drawn


def figure(panel: Panel, span: Span) -> Any:
    """A line or a stack of bars for each of the panel's lines; a window without a value is a gap."""
    drawn = go.Figure(layout=_layout(panel, span))
    for place, (name, line) in enumerate(panel.lines.items()):
        colour = COLOURS[place % len(COLOURS)]
        common: dict[str, Any] = {"name": escape(name) or "(none)", "y": _values(line, span), "showlegend": True}
        common |= {"x0": span.windows_ms.start, "dx": span.windows_ms.step, "hovertemplate": "%{y:.4~s}"}
        if panel.bars:
            drawn.add_trace(go.Bar(**common, marker={"color": colour}, offset=0, width=span.windows_ms.step))
        else:
            dash = {"color": colour, "dash": DASHES[place % len(DASHES)], "width": 1.5}
            mode = "lines+markers" if len(line) == 1 else "lines"  # one point alone would draw nothing
            drawn.add_trace(go.Scatter(**common, mode=mode, line=dash, connectgaps=False))
    return drawn


def _layout(panel: Panel, span: Span) -> dict[str, Any]:
    windows = span.windows_ms
    axis = {"gridcolor": "#DDDDDD", "linecolor": "#444444", "automargin": True}
    return {
        "template": {},
        "height": HEIGHT_PX,
        "margin": {"l": 60, "r": 20, "t": 10, "b": 40},
        "font": {"family": "sans-serif", "size": 13, "color": "#222222"},
        "plot_bgcolor": "#FFFFFF",
        "hovermode": "x unified",
        "barmode": "stack",
        "legend": {"orientation": "h", "yanchor": "top", "y": -0.25},
        "xaxis": axis | {"type": "date", "title": {"text": "time (UTC)"}, "range": [windows.start, windows.stop]},
        "yaxis": axis | {"title": {"text": escape(panel.unit)}, "rangemode": "tozero"},
    }


def _values(line: Line, span: Span) -> list[float | None]:
    """A value for each window, six digits of it: the page is read by people, and ten times as small."""
    return [float(f"{line[at]:.6g}") if at in line else None for at in span.windows_ms]
