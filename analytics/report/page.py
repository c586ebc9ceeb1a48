"""The report's HTML page: a headline, notices, a summary, and the panels of each cluster.

It is one file without network requests: its Content-Security-Policy forbids the browser to load anything, and to run
any script but the two with the digests that it names. Every text from the tables is bounded and escaped (`html_text`).
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from typing import Final

from plotly.offline import get_plotlyjs

from analytics.report import summary
from analytics.report.headline import headline
from analytics.report.panels import BROKERS, PRINCIPALS, Cluster, Panel, Section, sections
from analytics.report.plots import COLOURS, dash_of, figure_json, scale_of
from analytics.report.principals import NOT_COUNTED, OTHER, Principals, Usage
from analytics.report.span import Span, fitted
from analytics.report.text import html_text
from analytics.report.totals import Totals, TotalsRow, compare_totals
from analytics.report.units import amount, count, counted, share, short

PLOTTED_WINDOWS_MIN: Final = 2
"""Minimum of windows for a plot; of fewer the figures are shown instead."""
_SVG_DASHES: Final = {"solid": "", "dash": "6 3", "dot": "2 3", "dashdot": "6 3 2 3"}
_SVG_DASHES_LONG: Final = "9 3"
_PARTS: Final = files("analytics.report")


@dataclass(frozen=True, slots=True)
class Report:
    """Content of the page. `notices` are about the whole report."""

    span: Span
    made_at: datetime
    clusters: list[Cluster]
    notices: list[str]


def render_page(report: Report) -> str:
    """Return the page's HTML."""
    title = f"Pulsar proxy, {_when(report.span.start)} to {_when(report.span.end)} UTC"
    plotted = fitted(report.span, set().union(*(summary.covered_windows(cluster) for cluster in report.clusters)))
    shown = [(cluster, sections(cluster, report.span)) for cluster in report.clusters]
    main = [
        _summary(report),
        *(_cluster(place, cluster, own, plotted) for place, (cluster, own) in enumerate(shown)),
    ]
    heading = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d", r"<time>\g<0></time>", title)
    about = f"One point {report.span.resolution.each}; all times are UTC. Made {_when(report.made_at)} from the tables."
    body = [
        f'<header><h1>{heading}</h1><p class="soft">{about}</p></header>',
        _happened(report),
        _missing(report),
        f'<div class="layout">{_contents(shown)}<main>{"".join(main)}</main></div>',
    ]
    plotly, own = get_plotlyjs(), _page_part("page.js")
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(plotly, own)}"><title>{title}</title>'
        f"<style>{_page_part('page.css')}</style><script>{plotly}</script>"
    )
    scripts = f"<script>{own}</script>"
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>{"".join(body)}{scripts}</body></html>\n'


def _page_part(name: str) -> str:
    return _PARTS.joinpath(name).read_text(encoding="utf-8")


def _policy(*scripts: str) -> str:
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
        "form-action 'none'"
    )


def _prose(text: str) -> str:
    """Return a sentence of this program as HTML; text between backticks is code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _when(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M}"


# ---- above the clusters


def _happened(report: Report) -> str:
    lines = []
    for cluster in report.clusters:
        found = headline(cluster, report.span)
        name = f"<strong>{html_text(cluster.name)}</strong>: " if len(report.clusters) > 1 else ""
        if found.troubles:
            kind, verdict = "bad", f'<span class="trouble">To look at: {escape("; ".join(found.troubles))}.</span>'
        elif found.is_failure_data_present:
            kind, verdict = "good", '<span class="fine">Nothing failed.</span>'
        else:
            kind, verdict = "unknown", "The tables do not show if anything failed."
        lines.append(f'<li class="{kind}"><p>{name}{escape(found.text)} {verdict}</p></li>')
    if not lines:
        lines.append('<li class="unknown"><p>There is nothing to report: no cluster is in the tables.</p></li>')
    return f'<ul class="happened" aria-label="What happened">{"".join(lines)}</ul>'


def _missing(report: Report) -> str:
    notices = [_prose(text) for text in report.notices]
    for cluster in report.clusters:
        name = f"{html_text(cluster.name)}: " if len(report.clusters) > 1 else ""
        notices += [f"{name}{_prose(text)}" for text in summary.missing_notices(cluster, report.span)]
    if not notices:
        return ""
    items = "".join(f"<li>{text}</li>" for text in notices)
    return f'<details class="missing" open><summary>What is missing or differs</summary><ul>{items}</ul></details>'


def _contents(shown: Sequence[tuple[Cluster, list[Section]]]) -> str:
    entries = ['<li><a href="#summary">Summary</a></li>']
    for place, (cluster, own) in enumerate(shown):
        links = "".join(
            f'<li><a href="#{_anchor(place, number)}">{escape(section.title)}</a></li>'
            for number, section in enumerate(own)
            if _has_content(section, cluster)
        )
        entries.append(f'<li><a href="#cluster-{place}">{html_text(cluster.name)}</a><ul>{links}</ul></li>')
    return f'<nav aria-label="Contents"><ul>{"".join(entries)}</ul></nav>'


def _has_content(section: Section, cluster: Cluster) -> bool:
    """Return True if the section has content. The principals' always has: at least that none was counted."""
    return (
        bool(section.drawn) or section.title == PRINCIPALS or (section.title == BROKERS and bool(cluster.brokers.worst))
    )


def _anchor(cluster: int, section: int) -> str:
    return f"cluster-{cluster}-{section}"


def _summary(report: Report) -> str:
    columns = [summary.summary_groups(cluster, report.span) for cluster in report.clusters]
    if not columns:
        return '<section id="summary"><h2>Summary</h2><p class="nothing">no data</p></section>'
    names = [cluster.name for cluster in report.clusters]
    head = ["", *names] if len(names) > 1 else []
    tables = []
    for title, first in columns[0].items():
        others = [dict(column[title]) for column in columns]
        tables.append(_table(title, head, [[name, *(own[name] for own in others)] for name, _ in first]))
    return f'<section id="summary"><h2>Summary</h2><div class="cards">{"".join(tables)}</div></section>'


# ---- a cluster


def _cluster(place: int, cluster: Cluster, own: Iterable[Section], span: Span) -> str:
    parts, empty = [f'<h2 id="cluster-{place}">Cluster {html_text(cluster.name)}</h2>'], []
    for number, section in enumerate(own):
        if not _has_content(section, cluster):
            empty.append(section)
            continue
        figures = "".join(
            _panel(panel, span, f"plot-{place}-{number}-{within}") for within, panel in enumerate(section.drawn)
        )
        parts.append(f'<section><h3 id="{_anchor(place, number)}">{escape(section.title)}</h3>')
        parts.append(f'<div class="panels">{figures}</div>' if figures else "")
        parts.append(_not_drawn([(panel.title, panel) for panel in section.not_drawn]))
        if section.title == BROKERS:
            parts.append(_brokers(cluster))
        if section.title == PRINCIPALS:
            parts.append(_principals(cluster.principals, span))
            parts.append(_totals(compare_totals(cluster), span))
        parts.append("</section>")
    parts.append(
        _not_drawn([(f"{section.title}: {panel.title}", panel) for section in empty for panel in section.not_drawn])
    )
    return "".join(parts)


def _not_drawn(panels: Sequence[tuple[str, Panel]]) -> str:
    """Return the panels without plots, as one line that unfolds."""
    if not panels:
        return ""
    without = sum(panel.is_empty for _, panel in panels)
    kinds = ((without, "without data"), (len(panels) - without, "zero all the time"))
    summary_text = " and ".join(f"{counted(number, 'plot')} {what}" for number, what in kinds if number)
    items = "".join(
        f"<li>{escape(title)}: {panel.absent if panel.is_empty else 'zero all the time'}</li>"
        for title, panel in panels
    )
    return f'<details class="quiet"><summary>Not drawn: {summary_text}</summary><ul>{items}</ul></details>'


def _panel(panel: Panel, span: Span, identity: str) -> str:
    about = " ".join(text for text in (panel.about, panel.note) if text)
    explained = f'<span class="about">{_prose(about)}</span>' if about else ""
    unit = scale_of(panel).unit
    caption = f"<figcaption><strong>{escape(panel.title)}</strong>, {escape(unit)}{explained}</figcaption>"
    if len(panel.windows) < PLOTTED_WINDOWS_MIN:
        return f"<figure>{caption}{_one_window(panel)}</figure>"
    label = escape(f"{panel.title}, {unit}; the figures are in the table below", quote=True)
    plot = (
        f'<div class="plot" id="{identity}" role="img" aria-label="{label}"></div>'
        f'<script type="application/json">{figure_json(panel, span)}</script>'
    )
    table = f"<details><summary>Figures</summary>{_figures(panel)}</details>"
    return f"<figure>{caption}{plot}{_legend(panel)}{table}</figure>"


def _one_window(panel: Panel) -> str:
    """Return the figures of a panel with one window as a table."""
    divisor = scale_of(panel).divisor
    rows = [[name, *(short(value / divisor) for value in line.values())] for name, line in panel.lines.items()]
    (window_ms,) = panel.windows
    return _table("", ["", _when(datetime.fromtimestamp(window_ms / 1000, UTC))], rows)


def _legend(panel: Panel) -> str:
    entries = []
    for place, name in enumerate(panel.lines):
        dash = "" if panel.bars else _SVG_DASHES.get(dash_of(place), _SVG_DASHES_LONG)
        width = 10 if panel.bars else 2.5
        line = (
            f'<svg width="26" height="12" aria-hidden="true"><line x1="0" y1="6" x2="26" y2="6" '
            f'stroke="var(--c{place % COLOURS})" stroke-width="{width}" stroke-dasharray="{dash}"/></svg>'
        )
        entries.append(f'<li><button type="button" aria-pressed="true">{line}{html_text(name)}</button></li>')
    return f'<ul class="legend">{"".join(entries)}</ul>'


def _figures(panel: Panel) -> str:
    """Return the plot's figures as a table, in the axis's unit, for readers who cannot see the plot."""
    unit, rows = scale_of(panel), []
    for name, line in panel.lines.items():
        values = [value / unit.divisor for value in line.values()]
        figures = [sum(values) / len(values), min(values), max(values)]
        rows.append([name, *map(short, [*figures, sum(values)] if panel.bars else figures)])
    head = ["", "average", "lowest", "highest", *(["total"] if panel.bars else [])]
    return _table(f"{panel.title}, {unit.unit}", head, rows)


def _brokers(cluster: Cluster) -> str:
    if not cluster.brokers.worst:
        return ""
    rows = [[name, share(value)] for name, value in cluster.brokers.worst]
    return _table("Brokers that were not up all the time", ["broker", "up"], rows)


def _principals(found: Principals, span: Span) -> str:
    caption = f"Top principals, {_when(span.start)} to {_when(span.end)}"
    if not found.top and found.other is None:
        return f'<p class="nothing">{caption}: no data</p>'
    listed = [*found.top, *(one for one in (found.further, found.other) if one is not None)]
    total = Usage("all principals", found.total)
    head = ["principal", "bytes in", "bytes out", "share", "messages in", "messages out", "sessions"]
    rows = [_principal(one, total.bytes, counts_messages=found.counts_messages) for one in [*listed, total]]
    return _table(caption, head, rows, ["" for _ in listed] + ["total"])


def _principal(one: Usage, total: int, *, counts_messages: bool) -> list[str]:
    bytes_in, bytes_out, *messages, sessions = one.figures
    name = f"{OTHER} (all that the proxy does not count by name)" if one.name == OTHER else one.name
    part = share(one.bytes / total) if total else ""
    told = map(count, messages) if counts_messages else [NOT_COUNTED] * len(messages)
    return [name, amount(bytes_in), amount(bytes_out), part, *told, count(sessions)]


def _totals(found: Totals | None, span: Span) -> str:
    """Return the totals from each source side by side, with the reasons for differences."""
    if found is None:
        return ""
    head = ["", "all connections", "all principals"]
    if found.billed is not None:
        hours = f"{_when(found.billed.start)} to {_when(found.billed.end)}"
        head += [f"all principals, whole {found.billed.noun}s", "usage tables, the same"]
    rows = [_total(row, with_usage=found.billed is not None) for row in found.rows]
    kinds = ["" if row.agrees else "differs" for row in found.rows]
    table = _table(f"Totals compared, {_when(span.start)} to {_when(span.end)}", head, rows, kinds)
    notes = found.reasons or ["All totals agree."]
    if found.billed is not None:
        open_windows, noun = found.billed.open_windows, found.billed.noun
        state = f"{open_windows} of them are not closed yet, and may grow" if open_windows else "all of them closed"
        notes = [*notes, f"Whole {noun}s: {hours}; {state}."]
    else:
        notes = [*notes, "The usage tables are by whole hours, of which this time has none."]
    return table + "".join(f'<p class="note">{_prose(text)}</p>' for text in notes)


def _total(row: TotalsRow, *, with_usage: bool) -> list[str]:
    figures = (row.relayed, row.principals, *((row.counted, row.billed) if with_usage else ()))
    return [
        row.name,
        *("" if figure is None else count(figure) if row.is_counted else NOT_COUNTED for figure in figures),
    ]


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], kinds: Sequence[str] = ()) -> str:
    """Return a table; the first cell of a row is its head. `kinds`: a CSS class for each row."""
    first = "".join(f'<th scope="col">{html_text(name) if name else ""}</th>' for name in head)
    lines = []
    for place, row in enumerate(rows):
        kind = f' class="{kinds[place]}"' if kinds and kinds[place] else ""
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        lines.append(f'<tr{kind}><th scope="row">{html_text(row[0])}</th>{cells}</tr>')
    top = f"<thead><tr>{first}</tr></thead>" if head else ""
    body = f"{top}<tbody>{''.join(lines)}</tbody>"
    heading = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f'<div class="scroll"><table>{heading}{body}</table></div>'
