"""The statement's HTML page: the bill first, then what is missing, what is unusual, each cluster's use and failures.

It is one file without network requests and scripts: its Content-Security-Policy forbids both. Every text from the
tables is bounded and escaped (`html_text`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal
from html import escape
from importlib.resources import files
from typing import Final

from analytics.report.bill import OTHER, Bill, Usage
from analytics.report.costs import SHARED, BudgetState, Line, total
from analytics.report.failures import Failures
from analytics.report.plot import plot_days
from analytics.report.prices import DEFAULT, ITEMS, Prices
from analytics.report.span import Span
from analytics.report.text import amount, count, counted, html_text, share
from analytics.report.unusual import Finding

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_NOT_COUNTED = "none counted"
_RANGES_MAX: Final = 10
_FINDINGS_MAX: Final = 50
_WIDE: Final = 4
"""Columns from which on a table scrolls on a narrow screen, and says so."""
_KINDS: Final = {"above": "far above its own use", "below": "far below its own use", "new": "new", "gone": "gone"}


@dataclass(frozen=True, slots=True)
class Cluster:
    """The collected data of one cluster; `missing`: times without a sample; `days`: those with nearly all hours."""

    name: str
    bill: Bill
    failures: Failures = field(default_factory=Failures)
    missing: Sequence[tuple[datetime, datetime]] = ()
    days: Sequence[date] = ()
    daily: dict[str, dict[date, int]] = field(default_factory=dict)
    findings: Sequence[Finding] = ()


@dataclass(frozen=True, slots=True)
class Statement:
    """Content of the page. `notices` are about all of it; `as_of`: the tables' state, None for the newest.

    `lines` and `prices` None: without costs. `budgets`: of the month in which the span ends.
    """

    span: Span
    made_at: datetime
    clusters: list[Cluster]
    notices: list[str]
    as_of: datetime | None = None
    prices: Prices | None = None
    lines: list[Line] = field(default_factory=list)
    budgets: list[BudgetState] = field(default_factory=list)


def render_page(made: Statement) -> str:
    """Return the page's HTML."""
    title = f"Statement, {_period(made.span)} UTC"
    tables = "the tables" if made.as_of is None else f"the tables as they were at {made.as_of:%Y-%m-%d %H:%M:%S}"
    about = f"Pulsar proxy. All times are UTC. Made {_when(made.made_at)} from {tables}."
    body = [
        f'<header><h1>Statement, {_html_period(made.span)} UTC</h1><p class="soft">{about}</p></header>',
        _costs(made),
        _missing(made),
        _unusual(made),
        *(_cluster(cluster, made) for cluster in made.clusters),
        _prices(made),
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


def _note(text: str) -> str:
    return f'<p class="soft">{_prose(text)}</p>'


def _when(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M}"


def _period(span: Span) -> str:
    return f"{_when(span.start)} to {_when(span.end)}"


def _html_period(span: Span) -> str:
    """Return the period with dates that do not break at their hyphens."""
    return f"<b>{_when(span.start)}</b> to <b>{_when(span.end)}</b>"


def _costs(made: Statement) -> str:
    if not made.clusters:
        return f"<section><h2>Bill</h2>{_note('There is nothing to bill: no cluster is in the tables.')}</section>"
    if made.prices is None:
        return f"<section><h2>Bill</h2>{_note('There are no costs: no prices were given (`--prices`).')}</section>"
    currency = made.prices.currency
    by_tenant = {tenant: [line for line in made.lines if line.tenant == tenant] for tenant in _tenants(made)}
    rows = [[name, *_tenant_cells(lines)] for name, lines in by_tenant.items()]
    rows.append(["all tenants", *_tenant_cells(made.lines)])
    parts = [
        f'<p class="sum"><strong>{total(made.lines):,} {currency}</strong> for {_html_period(made.span)}</p>',
        _table("Costs by tenant", ["tenant", f"cost, {currency}", "principals", "without price"], rows, is_total=True),
    ]
    if unpriced := [line for line in made.lines if line.price is None]:
        items = ", ".join(sorted({ITEMS[line.item].text for line in unpriced}))
        parts.append(_note(f"{counted(len(unpriced), 'line')} of use without a price, which cost nothing: {items}."))
    if made.budgets:
        head = ["tenant", "budget", "spent", "used", "forecast", "state"]
        caption = f"Budgets of {made.budgets[0].month:%Y-%m}, {currency}"
        parts.append(_table(caption, head, map(_budget_cells, made.budgets)))
        until_now = f"Spent until {_when(made.budgets[0].until)}. "
        parts.append(
            _note(until_now + "Forecast: the month's cost if each hour to come costs the average of those before.")
        )
    return f"<section><h2>Bill</h2>{''.join(parts)}</section>"


def _tenants(made: Statement) -> list[str]:
    return sorted({line.tenant for line in made.lines}, key=lambda name: (name == DEFAULT, name))


def _tenant_cells(lines: Sequence[Line]) -> list[str]:
    principals = {(line.use.cluster, line.principal) for line in lines if line.principal is not None}
    unpriced = counted(n, "line") if (n := sum(line.price is None for line in lines)) else ""
    return [f"{total(lines):,}", count(len(principals)), unpriced]


def _budget_cells(one: BudgetState) -> list[str]:
    later = "will be exceeded" if one.forecast > one.budget else "within"
    state = "exceeded" if one.spent > one.budget else later
    used = share(float(one.spent / one.budget)) if one.budget else ""
    return [one.tenant, f"{one.budget:,}", f"{one.spent:,}", used, f"{one.forecast:,}", state]


def _missing(made: Statement) -> str:
    notices = [_prose(text) for text in made.notices]
    for cluster in made.clusters:
        name = f"{html_text(cluster.name)}: " if len(made.clusters) > 1 else ""
        notices += [f"{name}{_prose(text)}" for text in missing(cluster, made.span)]
    items = "".join(f"<li>{text}</li>" for text in notices)
    return f"<section><h2>What is missing</h2><ul>{items}</ul></section>" if notices else ""


def missing(cluster: Cluster, span: Span) -> list[str]:
    """Return sentences about what is missing of a cluster's use."""
    bill, noun = cluster.bill, span.resolution.noun
    told = []
    if cluster.missing:
        windows = sum((end - start) // span.resolution.width for start, end in cluster.missing)
        ranges = [f"{_when(start)} to {_when(end)}" for start, end in cluster.missing[:_RANGES_MAX]]
        more = f", and {len(cluster.missing) - _RANGES_MAX} more times" if len(cluster.missing) > _RANGES_MAX else ""
        told.append(
            f"{counted(windows, noun)} of {span.windows} without any sample: {', '.join(ranges)}{more}. Nothing is "
            "billed for that time by itself; what a counter grew meanwhile is billed where its next sample is."
        )
    if bill.open_windows:
        told.append(f"{counted(bill.open_windows, noun)} of the bill not closed yet: it may grow.")
    if bill.missing_windows:
        told.append(f"{counted(bill.missing_windows, noun)} of usage not in the bill yet: run `usage`.")
    if bill.late_samples:
        told.append(
            f"{counted(bill.late_samples, 'sample')} came after their hours were closed and are not in the bill "
            "(`usage --reopen-from` takes them in)."
        )
    if bill.without_start:
        told.append(
            f"Of {counted(bill.without_start, 'counter')} of principals the start is unknown (series `…_created` are "
            "missing): what they counted before their first scrape is in no bill."
        )
    return told


def _unusual(made: Statement) -> str:
    findings = [(cluster.name, one) for cluster in made.clusters for one in cluster.findings]
    if not findings:
        return ""
    several = len(made.clusters) > 1
    head = ["principal", *(["cluster"] if several else []), "what", "day", "bytes", "usual bytes", "factor"]
    rows = []
    for cluster, one in findings[:_FINDINGS_MAX]:
        days = f"{one.first}" if one.first == one.last else f"{one.first} to {one.last}"
        factor = f"{one.used / one.usual:,.2g}" if one.used and one.usual else ""
        own = [_KINDS[one.kind], days, amount(one.used), amount(one.usual) if one.usual else "", factor]
        rows.append([one.principal, *([cluster] if several else []), *own])
    note = "Each day against the principal's own days of the four weeks before, work days and weekends apart."
    if len(findings) > _FINDINGS_MAX:
        note += f" {_FINDINGS_MAX} of {len(findings)} are shown."
    return f"<section><h2>Unusual use</h2>{_table('Days that stand out', head, rows)}{_note(note)}</section>"


def _cluster(cluster: Cluster, made: Statement) -> str:
    days = [day for day in cluster.days if day >= made.span.start.date()]
    parts = [
        f"<h2>Cluster {html_text(cluster.name)}</h2>",
        plot_days(days, cluster.daily) if len(days) > 1 else "",
        _bill(cluster, made),
    ]
    if cluster.failures.counts:
        rows = [[what, why, count(now), count(before)] for what, why, now, before in cluster.failures.counts]
        parts.append(_table("Failures by cause", ["what", "why", "times", "before"], rows))
    if brokers := cluster.failures.brokers:
        shares = [[name, *("" if up is None else share(1 - up) for up in parts_up)] for name, *parts_up in brokers]
        parts.append(_table("Failures by broker: share of the time not up", ["broker", "not up", "before"], shares))
    return f"<section>{''.join(parts)}</section>"


def _bill(cluster: Cluster, made: Statement) -> str:
    span, bill = made.span, cluster.bill
    caption = f"Use by principal, {_period(span)}"
    if not bill.principals:
        return f'<p class="soft">{caption}: no usage in the tables</p>'
    compared = bool(bill.before_windows)
    costs: dict[str | None, Decimal] = {}
    mine = [line for line in made.lines if line.use.cluster == cluster.name]
    for line in mine:
        costs[line.principal] = costs.get(line.principal, Decimal(0)) + line.cost
    head = ["principal", *([f"cost, {made.prices.currency}", "tenant"] if made.prices else [])]
    head += ["bytes in", "bytes out", "share", "messages in", "messages out", "sessions"]
    head += ["bytes before", "change"] if compared else []
    unlisted = total(mine) - sum(costs.get(name, 0) for name in {None, *(one.name for one in bill.principals)})
    rows = []
    for one in bill.principals:
        cost = costs.get(one.name, Decimal(0)) + (unlisted if one.is_rest else 0)
        own = [f"{cost:,}", "" if one.is_rest else made.prices.tenant(one.name)] if made.prices else []
        rows.append(_usage(one, bill.total, own, compared=compared))
    if None in costs:
        rows.append([SHARED, f"{costs[None]:,}", DEFAULT, *[""] * (len(head) - 3)])
    rows.append(_usage(bill.total, bill.total, [f"{total(mine):,}", ""] if made.prices else [], compared=compared))
    note = "The usage tables have nothing of the time before."
    if compared:
        windows = f"{bill.before_windows} of {span.windows} {span.resolution.noun}s have usage"
        note = f"Before: {_period(span.before)}; {windows}."
    if not bill.total.messages:
        note += " No message was counted: the proxy counts them with `metrics.count_messages`."
    return _table(caption, head, rows, is_total=True) + _note(note)


def _usage(one: Usage, whole: Usage, costs: list[str], *, compared: bool) -> list[str]:
    bytes_in, bytes_out, *messages, sessions = map(count, one.figures)
    rest = [*(messages if whole.messages else [_NOT_COUNTED] * len(messages)), sessions]
    name = f"{OTHER} (all that the proxy does not count by name)" if one.name == OTHER else one.name
    cells = [name, *costs, bytes_in, bytes_out, share(one.bytes / whole.bytes) if whole.bytes else "", *rest]
    if not one.bytes or not one.before:
        change = "new" if one.bytes else "gone" if one.before else ""
    else:
        change = f"{100 * (one.bytes / one.before - 1):+,.1f} %"
    return [*cells, count(one.before), change] if compared else cells


def _prices(made: Statement) -> str:
    used = {(line.price_of, line.item, line.price) for line in made.lines if line.price is not None}
    if made.prices is None or not used:
        return ""
    rows = [
        [ITEMS[item].text, tenant, f"{day}", f"{price:f}", ITEMS[item].pricing_unit]
        for (tenant, item), entries in sorted(made.prices.table.items())
        for day, price in entries
        if (tenant, item, price) in used
    ]
    table = _table("Prices that were used", ["item", "tenant", "from", f"price, {made.prices.currency}", "per"], rows)
    digits = made.prices.decimals
    rule = (
        f"The exact total is rounded once, half to even, to {digits} digits after the point. Lines are rounded down, "
        "and what is missing goes, a unit each, to the lines with the largest remainders: all sums are exact."
    )
    return f"<section><h2>Prices</h2>{table}{_note(rule)}</section>"


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], *, is_total: bool = False) -> str:
    """Return a table; the first cell of a row is its head. `is_total`: the last row is the sum of the others."""
    first = "".join(f'<th scope="col">{html_text(name) if name else ""}</th>' for name in head)
    lines = []
    for row in rows:
        cells = "".join(f"<td>{html_text(cell) if cell else ''}</td>" for cell in row[1:])
        lines.append(f'<tr><th scope="row">{html_text(row[0])}</th>{cells}</tr>')
    kind = ' class="total"' if is_total else ""
    body = f"<thead><tr>{first}</tr></thead><tbody>{''.join(lines)}</tbody>"
    hint = '<p class="hint" aria-hidden="true">more columns: scroll →</p>' if len(head) >= _WIDE else ""
    label = escape(caption, quote=True)
    return (
        f'<h3>{escape(caption)}</h3>{hint}<div class="scroll" tabindex="0" role="region" aria-label="{label}">'
        f"<table{kind}>{body}</table></div>"
    )
