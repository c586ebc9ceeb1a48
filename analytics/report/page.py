"""The page: a summary, what is missing, and the panels of each cluster. One file; it asks the network for nothing.

Every text that comes from the tables is escaped (`_text`); a policy in the page forbids the browser to load anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from typing import Final

from plotly.offline import get_plotlyjs

from analytics.report import summary
from analytics.report.panels import Cluster, Panel, Section, sections
from analytics.report.plots import figure_html
from analytics.report.principals import OTHER, Principals, Usage
from analytics.report.span import Span
from analytics.report.units import amount, count, share, short

_POLICY: Final = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
_STYLE: Final = """
body { font-family: sans-serif; color: #222; background: #fff; max-width: 75rem; margin: 0 auto; padding: 0 1rem 3rem }
table { border-collapse: collapse; margin: .5rem 0 } caption { text-align: left; font-weight: bold; padding: .3rem 0 }
th, td { border-bottom: 1px solid #ccc; padding: .25rem .8rem .25rem 0; text-align: right; vertical-align: top }
th:first-child, td:first-child { text-align: left; overflow-wrap: anywhere }
h2 { border-top: 2px solid #222; padding-top: 1rem; overflow-wrap: anywhere }
figure { margin: 0 0 2rem } figcaption { margin-bottom: .3rem } summary { cursor: pointer }
.nothing { color: #555; border: 1px dashed #999; padding: 1rem }
"""


@dataclass(frozen=True, slots=True)
class Report:
    """What the page is made of. `notices` are about the whole report."""

    span: Span
    made_at: datetime
    clusters: list[Cluster]
    notices: list[str]


def page(report: Report) -> str:
    """The whole file."""
    shown = [(cluster, sections(cluster, report.span)) for cluster in report.clusters]
    title = f"Pulsar proxy, {_when(report.span.start)} to {_when(report.span.end)} UTC"
    body = [
        f"<h1>{title}</h1>",
        f"<p>Points: one {report.span.resolution.each}. Made {_when(report.made_at)} UTC from the tables.</p>",
        _missing(report, shown),
        _summary(report),
        _contents(report),
        *(_cluster(place, cluster, own, report.span) for place, (cluster, own) in enumerate(shown)),
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><title>{title}</title>'
        f"<style>{_STYLE}</style><script>{get_plotlyjs()}</script>"
    )
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>{"".join(body)}</body></html>\n'


def _when(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M}"


def _text(value: str) -> str:
    return escape(value) or "(none)"


def _missing(report: Report, shown: Sequence[tuple[Cluster, list[Section]]]) -> str:
    told = list(report.notices)
    for cluster, own in shown:
        told += [f"{cluster.name or '(none)'}: {text}" for text in summary.missing(cluster, own, report.span)]
    if not told:
        return ""
    return f"<h2>What is missing</h2><ul>{''.join(f'<li>{_text(text)}</li>' for text in told)}</ul>"


def _summary(report: Report) -> str:
    columns = [dict(summary.rows(cluster, report.span)) for cluster in report.clusters]
    if not columns:
        return '<p class="nothing">no data</p>'
    names = [cluster.name for cluster in report.clusters]
    body = [[name, *(column[name] for column in columns)] for name in columns[0]]
    return "<h2>Summary</h2>" + _table("Of the whole time", ["", *names], body)


def _contents(report: Report) -> str:
    links = (
        f'<li><a href="#cluster-{place}">{_text(cluster.name)}</a></li>'
        for place, cluster in enumerate(report.clusters)
    )
    return f'<nav aria-label="Clusters"><ul>{"".join(links)}</ul></nav>' if len(report.clusters) > 1 else ""


def _cluster(place: int, cluster: Cluster, own: Iterable[Section], span: Span) -> str:
    parts = [f'<h2 id="cluster-{place}">Cluster {_text(cluster.name)}</h2>']
    for number, section in enumerate(own):
        parts.append(f"<h3>{_text(section.title)}</h3>")
        for within, panel in enumerate(section.panels):
            parts.append(_panel(panel, span, f"plot-{place}-{number}-{within}"))
        if section.title == "Brokers":
            parts.append(_brokers(cluster))
    parts.append(_principals(cluster.principals))
    return "".join(parts)


def _panel(panel: Panel, span: Span, identity: str) -> str:
    about = " ".join(text for text in (panel.about, panel.note) if text)
    caption = f"<figcaption><strong>{_text(panel.title)}</strong>{'. ' + _text(about) if about else ''}</figcaption>"
    if not panel.lines:
        return f'<figure>{caption}<p class="nothing">no data</p></figure>'
    label = escape(f"{panel.title}, {panel.unit}; the figures are in the table below", quote=True)
    drawn = f'<div role="img" aria-label="{label}">{figure_html(panel, span, identity)}</div>'
    return f"<figure>{caption}{drawn}{_figures(panel)}</figure>"


def _figures(panel: Panel) -> str:
    """The same as text: for those who cannot see the plot."""
    rows = []
    for name, line in panel.lines.items():
        values = list(line.values())
        figures = (sum(values) / len(values), min(values), max(values))
        rows.append([name, *map(short, figures), short(sum(values)) if panel.bars else ""])
    head = ["", "average", "lowest", "highest", "total" if panel.bars else ""]
    return f"<details><summary>Figures</summary>{_table(f'{panel.title}, {panel.unit}', head, rows)}</details>"


def _brokers(cluster: Cluster) -> str:
    if not cluster.brokers.worst:
        return ""
    rows = [[name, share(value)] for name, value in cluster.brokers.worst]
    return _table("Brokers that were not up all the time", ["broker", "up"], rows)


def _principals(found: Principals) -> str:
    listed = [*found.top, *(usage for usage in (found.further, found.other) if usage is not None)]
    caption = f"Top principals, {_when(found.start)} to {_when(found.end)} UTC"
    if not listed:
        return f'<p><strong>{caption}</strong></p><p class="nothing">no data</p>'
    total = sum(usage.bytes for usage in listed)
    head = ["principal", "bytes in", "bytes out", "share", "messages in", "messages out", "sessions"]
    return _table(caption, head, [_principal(usage, total) for usage in listed])


def _principal(usage: Usage, total: int) -> list[str]:
    bytes_in, bytes_out, *rest = usage.figures
    name = f"{OTHER} (all that the proxy does not count by name)" if usage.name == OTHER else usage.name
    part = share(usage.bytes / total) if total else ""
    return [name, amount(bytes_in), amount(bytes_out), part, *map(count, rest)]


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    first = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    lines = (
        f'<tr><th scope="row">{_text(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    body = f"<thead><tr>{first}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f"<table><caption>{_text(caption)}</caption>{body}</table>"
