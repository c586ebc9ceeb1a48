"""A plot of bytes by day as inline SVG: at most eight series, those with the most, in the CSS's colors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from html import escape
from typing import Final

from analytics.report.text import amount, html_text

SERIES_MAX: Final = 8
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 960, 270, 4, 34, 30


def plot_days(days: Sequence[date], use: Mapping[str, Mapping[date, int]]) -> str:
    """Return stacked bars of each day, and a legend; all principals beyond the first seven are one series."""
    sums = {name: sum(own.get(day, 0) for day in days) for name, own in use.items()}
    order = sorted((name for name in sums if sums[name] > 0), key=lambda name: (-sums[name], name))
    shown = order if len(order) <= SERIES_MAX else order[: SERIES_MAX - 1]
    series = [(name, [max(0, use[name].get(day, 0)) for day in days]) for name in shown]
    if rest := order[len(shown) :]:
        label = f"{len(rest):,} further principals"
        series.append((label, [sum(max(0, use[name].get(day, 0)) for name in rest) for day in days]))
    heights = [sum(values[place] for _, values in series) for place in range(len(days))]
    if not any(heights):
        return ""
    scale = (_HEIGHT - _TOP - _BOTTOM) / max(heights)
    step = (_WIDTH - _LEFT) / len(days)
    bars = []
    for place, day in enumerate(days):
        below = float(_HEIGHT - _BOTTOM)
        for number, (name, values) in enumerate(series):
            if height := values[place] * scale:
                below -= height
                title = f"<title>{day} {html_text(name)}: {escape(amount(values[place]))}</title>"
                where = f'x="{_LEFT + place * step:.1f}" y="{below:.1f}" width="{step * 0.8:.1f}"'
                bars.append(f'<rect class="s{number}" {where} height="{height:.1f}">{title}</rect>')
    texts = [f'<text x="{_LEFT}" y="26">{escape(amount(max(heights)))} a day</text>']
    texts += [f'<text x="{_LEFT}" y="{_HEIGHT - 6}">{days[0]}</text>']
    texts += [f'<text x="{_WIDTH}" y="{_HEIGHT - 6}" text-anchor="end">{days[-1]}</text>']
    axis = f'<path d="M{_LEFT} {_TOP}H{_WIDTH}M{_LEFT} {_HEIGHT - _BOTTOM}H{_WIDTH}"/>'
    legend = "".join(f'<li><i class="s{number}"></i>{html_text(name)}</li>' for number, (name, _) in enumerate(series))
    return (
        f'<figure><figcaption>Bytes in and out by day</figcaption><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="Bytes in and out by day">{axis}{"".join(bars)}{"".join(texts)}</svg>'
        f'<ul class="legend">{legend}</ul></figure>'
    )
