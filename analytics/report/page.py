"""The report's HTML page: a headline, what is missing, a summary, and the bill of each cluster.

It is one file without network requests and scripts: its Content-Security-Policy forbids both. Every text from the
tables is bounded and escaped (`html_text`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from importlib.resources import files

from analytics.report.bill import OTHER, Bill, Usage
from analytics.report.span import Span
from analytics.report.summary import Cluster, headline, missing, summary, troubles
from analytics.report.text import count, html_text, share

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_NOT_COUNTED = "none counted"
_COUNTED_FROM = "The summary counts from the first scrape of each counter on, the bill from the first byte on."


@dataclass(frozen=True, slots=True)
class Report:
    """Content of the page. `notices` are about the whole report; `as_of`: the tables' state, None for the newest."""

    span: Span
    made_at: datetime
    clusters: list[Cluster]
    notices: list[str]
    as_of: datetime | None = None


def render_page(report: Report) -> str:
    """Return the page's HTML."""
    title = f"Pulsar proxy, {_period(report.span)} UTC"
    tables = "the tables" if report.as_of is None else f"the tables as they were at {report.as_of:%Y-%m-%d %H:%M:%S}"
    about = f"All times are UTC. Made {_when(report.made_at)} from {tables}."
    body = [
        f'<header><h1>{title}</h1><p class="soft">{about}</p></header>',
        _happened(report),
        _missing(report),
        *(_cluster(cluster, report.span) for cluster in report.clusters),
        _summary(report),
    ]
    style = files("analytics.report").joinpath("page.css").read_text(encoding="utf-8")
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><title>{title}</title><style>{style}</style>'
    )
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>{"".join(body)}</body></html>\n'


def _prose(text: str) -> str:
    """Return a sentence of this program as HTML; text between backticks is code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _when(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M}"


def _period(span: Span) -> str:
    return f"{_when(span.start)} to {_when(span.end)}"


def _happened(report: Report) -> str:
    lines = []
    for cluster in report.clusters:
        found = troubles(cluster)
        if found is None:
            kind, verdict = "unknown", "The tables do not show if anything failed."
        elif found:
            kind, verdict = "bad", f"To look at: {'; '.join(found)}."
        else:
            kind, verdict = "good", "Nothing failed."
        name = f"<strong>{html_text(cluster.name)}</strong>: " if len(report.clusters) > 1 else ""
        lines.append(
            f'<li class="{kind}">{name}{escape(headline(cluster, report.span))} <em>{escape(verdict)}</em></li>'
        )
    if not lines:
        lines.append('<li class="unknown">There is nothing to report: no cluster is in the tables.</li>')
    return f'<ul class="happened" aria-label="What happened">{"".join(lines)}</ul>'


def _missing(report: Report) -> str:
    notices = [_prose(text) for text in report.notices]
    for cluster in report.clusters:
        name = f"{html_text(cluster.name)}: " if len(report.clusters) > 1 else ""
        notices += [f"{name}{_prose(text)}" for text in missing(cluster, report.span)]
    items = "".join(f"<li>{text}</li>" for text in notices)
    return f"<section><h2>What is missing</h2><ul>{items}</ul></section>" if notices else ""


def _summary(report: Report) -> str:
    if not report.clusters:
        return ""
    columns = [summary(cluster, report.span) for cluster in report.clusters]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    table = _table("Summary", ["", *(cluster.name for cluster in report.clusters)], rows)
    return f'<section>{table}<p class="soft">{_COUNTED_FROM}</p></section>'


def _cluster(cluster: Cluster, span: Span) -> str:
    parts = [f"<h2>Cluster {html_text(cluster.name)}</h2>", _bill(cluster.bill, span)]
    if worst := cluster.figures.worst_brokers:
        rows = [[name, share(up)] for name, up in worst]
        parts.append(_table("Brokers that were not up all the time", ["broker", "up"], rows))
    return f"<section>{''.join(parts)}</section>"


def _bill(bill: Bill, span: Span) -> str:
    caption = f"Bill, {_period(span)}"
    if not bill.principals:
        return f'<p class="soft">{caption}: no usage in the tables</p>'
    compared = bool(bill.before_windows)
    head = ["principal", "bytes in", "bytes out", "share", "messages in", "messages out", "sessions"]
    head += ["bytes before", "change"] if compared else []
    total = bill.total
    rows = [_usage(one, total, compared=compared) for one in [*bill.principals, total]]
    note = "The usage tables have nothing of the time before."
    if compared:
        windows = f"{bill.before_windows} of {span.windows} {span.resolution.noun}s have usage"
        note = f"Before: {_period(span.before)}; {windows}."
    if not total.messages:
        note += " No message was counted: the proxy counts them with `metrics.count_messages`."
    return f'{_table(caption, head, rows, last_is_total=True)}<p class="soft">{_prose(note)}</p>'


def _usage(one: Usage, total: Usage, *, compared: bool) -> list[str]:
    bytes_in, bytes_out, *messages, sessions = map(count, one.figures)
    rest = [*(messages if total.messages else [_NOT_COUNTED] * len(messages)), sessions]
    name = f"{OTHER} (all that the proxy does not count by name)" if one.name == OTHER else one.name
    cells = [name, bytes_in, bytes_out, share(one.bytes / total.bytes) if total.bytes else "", *rest]
    change = f"{100 * (one.bytes / one.before - 1):+,.1f} %" if one.before else "new"
    return [*cells, count(one.before), change] if compared else cells


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], *, last_is_total: bool = False) -> str:
    """Return a table; the first cell of a row is its head."""
    first = "".join(f'<th scope="col">{html_text(name) if name else ""}</th>' for name in head)
    lines = []
    for row in rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        lines.append(f'<tr><th scope="row">{html_text(row[0])}</th>{cells}</tr>')
    kind = ' class="total"' if last_is_total else ""
    body = f"<thead><tr>{first}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f'<div class="scroll"><table{kind}><caption>{escape(caption)}</caption>{body}</table></div>'
