"""The panels of one cluster, in sections. Panels without data or with zeros only are named but not drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from analytics.report import metrics
from analytics.report.collect import BrokerAvailability
from analytics.report.points import Distribution, Distributions, Line, Points, merge_distributions, sum_lines
from analytics.report.principals import NOT_COUNTED, Principals
from analytics.report.span import Span
from analytics.report.units import BYTES_PER_SECOND, SECONDS

LINES_MAX: Final = 8
"""Limit of lines in a plot; the others are summed as one more, or, if a sum makes no sense, left out with a note."""
QUANTILES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
REST: Final = "all others"
BROKERS: Final = "Brokers"
PRINCIPALS: Final = "Principals"


@dataclass(frozen=True, slots=True)
class Panel:
    """A plot. `unit` is the y axis's; `bars`: counts in a window, not a rate; `stacked`: the lines add up.

    `absent`: what the page says if there are no lines.
    """

    title: str
    about: str
    unit: str
    lines: dict[str, Line]
    bars: bool = False
    stacked: bool = False
    note: str = ""
    absent: str = "no data"

    @property
    def is_empty(self) -> bool:
        """True if the tables have no value of the metric in the span."""
        return not self.lines

    @property
    def is_zero(self) -> bool:
        """True if there are values and all are zero."""
        return bool(self.lines) and not any(value for line in self.lines.values() for value in line.values())

    @property
    def windows(self) -> set[int]:
        """The windows with a value of any line."""
        return {at for line in self.lines.values() for at in line}


@dataclass(frozen=True, slots=True)
class Section:
    """Panels under one heading."""

    title: str
    panels: list[Panel] = field(default_factory=list)

    @property
    def drawn(self) -> list[Panel]:
        """The panels with values other than zero."""
        return [panel for panel in self.panels if not panel.is_empty and not panel.is_zero]

    @property
    def not_drawn(self) -> list[Panel]:
        """The panels without data or with zeros only."""
        return [panel for panel in self.panels if panel.is_empty or panel.is_zero]


@dataclass(frozen=True, slots=True)
class Cluster:
    """The collected data of one cluster."""

    name: str
    points: Points
    brokers: BrokerAvailability
    principals: Principals


def sections(cluster: Cluster, span: Span) -> list[Section]:
    """Return all sections, in the page's order."""
    make = _Panels(cluster.points, span)
    return [
        Section("Throughput", make.throughput(counts_messages=cluster.principals.counts_messages)),
        Section("Connections", make.connections()),
        Section("Handshakes", make.handshakes()),
        Section("Lookups", make.lookups()),
        Section("Authentication", make.authentication()),
        Section("Re-authentication (KIP-368)", make.reauthentication()),
        Section(BROKERS, make.brokers(cluster.brokers)),
        Section("Cluster", make.cluster()),
        Section(PRINCIPALS, [_principals(cluster.principals, span)]),
    ]


class _Panels:
    def __init__(self, points: Points, span: Span) -> None:
        self._points = points
        self._width_s = span.resolution.width_s
        self._noun = span.resolution.noun

    def throughput(self, *, counts_messages: bool) -> list[Panel]:
        messages = self._rate(
            "Messages relayed",
            "By direction, of all principals together; a batch to a client is one. Needs `metrics.count_messages`.",
            "messages per second",
            self._direction(metrics.MESSAGES),
        )
        return [
            self._rate("Bytes relayed", "By direction.", BYTES_PER_SECOND, self._direction(metrics.BYTES)),
            messages if counts_messages else replace(messages, lines={}, absent=NOT_COUNTED),
        ]

    def _direction(self, metric: str) -> dict[str, Line]:
        names = {"to_broker": "to brokers", "to_client": "to clients"}
        return {names.get(name, name): line for name, line in self._points.spread_by(metric, 0).items()}

    def connections(self) -> list[Panel]:
        active = _without_empty({"open": self._points.level_by(metrics.ACTIVE).get("", {})})
        return [
            self._panel("Connections open", "Clients' connections, averaged over each window.", "connections", active),
            self._panel("Connections open, by state", "", "connections", self._points.level_by(metrics.STATES, 0)),
            self._rate("New connections", "Accepted.", "connections per second", self._rates({"new": metrics.OPENED})),
            self._counts("Connections ended, by cause", "The log uses the same words.", metrics.ENDED),
            self._counts("Connections rejected, by reason", "Turned away at a limit.", metrics.REJECTED),
        ]

    def handshakes(self) -> list[Panel]:
        by_stage = self._points.distributions(metrics.HANDSHAKE, 0)
        return [
            self._quantiles("Whole handshake", "From CONNECT to Connected.", by_stage.get("total", {})),
            self._quantile_by("Handshake, p95 by stage", "95 % were faster.", by_stage, 0.95),
        ]

    def lookups(self) -> list[Panel]:
        requests = self._rates(metrics.REQUESTS)
        by_request = self._points.distributions(metrics.LOOKUP, 0)
        errors = {
            name: line for name, line in self._points.increase_by(metrics.ANSWERS, 1).items() if name != "none"
        }  # "none": success
        return [
            self._rate("Requests, by kind", "Received by lookup workers.", "requests per second", requests),
            self._quantiles("Time of a request", "From Envelope to answer.", _merged_by_window(by_request)),
            self._quantile_by("Time of a request, p99 by kind", "99 % were faster.", by_request, 0.99),
            self._bars("Errors answered, by Pulsar's code", "", errors),
            self._bars(
                "Requests rejected at the limit", "TooManyRequests, by kind.", self._sums(metrics.REJECTED_REQUESTS)
            ),
            self._counts("Relay targets denied, by reason", "", metrics.DENIED_TARGETS),
            self._counts("Commands refused by forwarders, by reason", "", metrics.REFUSED_COMMANDS),
        ]

    def authentication(self) -> list[Panel]:
        successes = self._points.spread_by(metrics.AUTH_SUCCESS, 0)
        rounds = self._points.distributions(metrics.AUTH_ROUND).get("", {})
        return [
            self._rate("Successes, by method", "", "authentications per second", successes),
            self._counts("Failures, by reason", "", metrics.AUTH_FAILURES, 1),
            self._counts("Failures, by method", "", metrics.AUTH_FAILURES),
            self._quantiles("Time of a round", "In the auth worker.", rounds),
        ]

    def reauthentication(self) -> list[Panel]:
        seconds = self._points.distributions(metrics.REAUTH_SECONDS).get("", {})
        times = {"average": _each(seconds, lambda one: one.average), "at most": _each(seconds, lambda one: one.maximum)}
        successes = self._points.spread_by(metrics.REAUTH_SUCCESS, 0)
        about = "From challenge to verdict. `At most` is the end of the highest bucket that has any."
        return [
            self._rate("Successes, by method", "", "re-authentications per second", successes),
            self._counts("Failures, by method", "These clients were closed.", metrics.REAUTH_FAILURE),
            self._panel("Time, average and at most", about, SECONDS, _without_empty(times)),
            self._counts("Clients that cannot authenticate again, by method", "", metrics.NO_REAUTH),
            self._bars(
                "Expired connections closed",
                "Used after their session had ended.",
                self._named(metrics.EXPIRED_KILLED, "closed"),
            ),
        ]

    def brokers(self, brokers: BrokerAvailability) -> list[Panel]:
        lines = {"configured": brokers.configured, "up": brokers.up, "ejected": brokers.ejected}
        return [
            self._panel("Brokers", "Averaged over lookup workers and each window.", "brokers", _without_empty(lines)),
            self._counts("Brokers ejected, by reason", "", metrics.EJECTIONS),
            self._counts("Relays not opened, by reason", "", metrics.BROKER_FAILURES),
            self._counts("Names not resolved", "Brokers' or those that clients name.", metrics.DNS_FAILURES),
        ]

    def cluster(self) -> list[Panel]:
        adopted = self._named(metrics.ADOPTED, "adopted")
        return [
            self._counts("Workers restarted, by role", "", metrics.RESTARTS),
            self._bars("Relays adopted", "From a predecessor that crashed or was replaced.", adopted),
        ]

    # ---- helpers

    def _named(self, metric: str, name: str) -> dict[str, Line]:
        return _without_empty({name: self._points.increase_by(metric).get("", {})})

    def _sums(self, metrics: Mapping[str, str]) -> dict[str, Line]:
        found = {name: self._points.increase_by(metric).get("", {}) for name, metric in metrics.items()}
        return _without_empty(found)

    def _rates(self, metrics: Mapping[str, str]) -> dict[str, Line]:
        found = {name: self._points.spread_by(metric).get("", {}) for name, metric in metrics.items()}
        return _without_empty(found)

    def _counts(self, title: str, about: str, metric: str, place: int = 0) -> Panel:
        return self._bars(title, about, self._points.increase_by(metric, place))

    def _bars(self, title: str, about: str, lines: dict[str, Line]) -> Panel:
        top, note = _top(lines)
        return Panel(title, about, f"in each {self._noun}", top, bars=True, stacked=True, note=note)

    def _rate(self, title: str, about: str, unit: str, lines: dict[str, Line]) -> Panel:
        top, note = _top(lines)
        rates = {name: {at: value / self._width_s for at, value in line.items()} for name, line in top.items()}
        return Panel(title, about, unit, rates, note=note)

    @staticmethod
    def _panel(title: str, about: str, unit: str, lines: dict[str, Line]) -> Panel:
        top, note = _top(lines)
        return Panel(title, about, unit, top, note=note)

    @staticmethod
    def _quantiles(title: str, about: str, windows: Distributions) -> Panel:
        lines = {name: _each(windows, partial(_quantile, q)) for name, q in QUANTILES.items()}
        return Panel(title, about, SECONDS, _without_empty(lines))

    @staticmethod
    def _quantile_by(title: str, about: str, named: Mapping[str, Distributions], q: float) -> Panel:
        kept = sorted(named, key=lambda name: (-sum(one.count for one in named[name].values()), name))
        lines = {name: _each(named[name], partial(_quantile, q)) for name in kept[:LINES_MAX]}
        left_out = len(kept) - LINES_MAX
        note = f"{left_out} more are not shown." if left_out > 0 else ""
        return Panel(title, about, SECONDS, _without_empty(lines), note=note)


def _principals(found: Principals, span: Span) -> Panel:
    width_s = span.resolution.width_s
    rates = {name: {at: value / width_s for at, value in line.items()} for name, line in found.lines.items()}
    about = "Bytes in and out of those that moved most; the table has more of them."
    return Panel("Top principals", about, BYTES_PER_SECOND, _without_empty(rates))


def _top(lines: dict[str, Line]) -> tuple[dict[str, Line], str]:
    """Return the LINES_MAX largest lines that are not all zero (largest first), the rest summed, and a note."""
    total = {name: sum(abs(value) for value in line.values()) for name, line in lines.items()}
    order = sorted(total, key=lambda name: (-total[name], name))
    shown = [name for name in order if total[name] > 0] or order[:1]
    kept = {name: lines[name] for name in shown[:LINES_MAX]}
    if rest := shown[LINES_MAX:]:
        kept[REST] = sum_lines(lines[name] for name in rest)
    zero = len(order) - len(shown)
    return kept, f"{zero} more were zero all the time." if zero else ""


def _merged_by_window(named: Mapping[str, Distributions]) -> Distributions:
    windows = sorted({at for one in named.values() for at in one})
    return {at: merge_distributions(one[at] for one in named.values() if at in one) for at in windows}


def _each(windows: Distributions, figure: Callable[[Distribution], float]) -> Line:
    """Return a figure by window; windows without a finite one are left out."""
    figures = {at: figure(one) for at, one in windows.items()}
    return {at: value for at, value in figures.items() if math.isfinite(value)}


def _quantile(q: float, one: Distribution) -> float:
    return one.quantile(q)


def _without_empty(lines: dict[str, Line]) -> dict[str, Line]:
    return {name: line for name, line in lines.items() if line}
