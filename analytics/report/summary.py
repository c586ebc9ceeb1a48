"""The page's summary tables with each cluster's figures, and the notices of missing data."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from analytics.report import metrics
from analytics.report.panels import Cluster
from analytics.report.points import Line, merge_distributions, sum_lines
from analytics.report.principals import NOT_COUNTED
from analytics.report.span import Span
from analytics.report.totals import compare_totals
from analytics.report.units import amount, count, seconds, share, short

NO_DATA: Final = "no data"


def summary_groups(cluster: Cluster, span: Span) -> dict[str, list[tuple[str, str]]]:
    """Return one cluster's (name, figure) under each heading; the same names in the same order for each cluster."""
    return {
        "Traffic": _traffic(cluster, span),
        "Requests": _requests(cluster),
        "Authentication": _identity(cluster),
        "Brokers and workers": _health(cluster),
    }


def missing_notices(cluster: Cluster, span: Span) -> list[str]:
    """Return sentences about a cluster's missing data and differing totals."""
    notices = []
    gaps = len(span.windows_ms) - len(covered_windows(cluster))
    if gaps and cluster.points.metrics():
        noun = span.resolution.noun
        notices.append(
            f"{gaps} of {len(span.windows_ms)} {noun}s have no sample at all: the proxy did not run, was not scraped, "
            "or the samples are not ingested and rolled up yet."
        )
    if cluster.points.cut:
        notices.append(f"Too many label values, the smallest are left out: {', '.join(sorted(cluster.points.cut))}.")
    if cluster.points.exponential:
        notices.append(
            f"{cluster.points.exponential} rows of native histograms with exponential buckets are left out; the proxy "
            "sends none."
        )
    if (compared := compare_totals(cluster)) is not None:
        notices += compared.reasons
    return notices


def covered_windows(cluster: Cluster) -> set[int]:
    """Return the windows with samples of the cluster."""
    plain = {at for line in cluster.points.increase.values() for at in line}
    return plain.union(*cluster.points.native.values())


def _traffic(cluster: Cluster, span: Span) -> list[tuple[str, str]]:
    points = cluster.points
    moved = points.increase_by(metrics.BYTES, 0)
    _, _, *messages, _ = (
        cluster.principals.total
    )  # as in the table of principals: with counters that began within the span
    has_messages = bool(points.increase_by(metrics.MESSAGES))
    absent = NO_DATA if cluster.principals.counts_messages else NOT_COUNTED
    is_told = has_messages and cluster.principals.counts_messages
    active = points.level_by(metrics.ACTIVE).get("", {})
    ended = points.increase_by(metrics.ENDED, 0)
    sampled = f"{len(covered_windows(cluster)):,} of {len(span.windows_ms):,}"
    return [
        (f"{span.resolution.noun.capitalize()}s with samples", sampled),
        ("Bytes to brokers", _total(moved.get("to_broker"), amount)),
        ("Bytes to clients", _total(moved.get("to_client"), amount)),
        *(
            (f"Messages to {peers}", count(total) if is_told else absent)
            for peers, total in zip(("brokers", "clients"), messages, strict=True)
        ),
        ("Connections accepted", _total(points.increase_by(metrics.OPENED).get(""))),
        ("Connections open, on average", _plain(_mean(active))),
        (f"Connections open, busiest {span.resolution.noun}", _plain(max(active.values(), default=math.nan))),
        ("Connections rejected", _total(_all(points.increase_by(metrics.REJECTED)), absent="0" if ended else NO_DATA)),
        ("Connections ended by a defect of the proxy", _total(ended.get("defect"))),
    ]


def _requests(cluster: Cluster) -> list[tuple[str, str]]:
    points = cluster.points
    received = [line for metric in metrics.REQUESTS.values() for line in points.increase_by(metric).values()]
    answers = points.increase_by(metrics.ANSWERS, 1)
    total = sum(sum(line.values()) for line in answers.values())
    errors = sum(sum(line.values()) for name, line in answers.items() if name != "none")
    times = merge_distributions(
        one for windows in points.distributions(metrics.LOOKUP).values() for one in windows.values()
    )
    return [
        ("Lookups and other requests", _total(sum_lines(received))),
        ("Requests answered with an error", f"{count(errors)} ({share(errors / total)})" if total else NO_DATA),
        ("Time of a request, p50", _time(times.quantile(0.5))),
        ("Time of a request, p99", _time(times.quantile(0.99))),
    ]


def _identity(cluster: Cluster) -> list[tuple[str, str]]:
    points = cluster.points
    succeeded = _all(points.increase_by(metrics.AUTH_SUCCESS))
    again = _all(points.increase_by(metrics.REAUTH_SUCCESS))
    # Labelled counters exist only after their first increment: an absent one beside an existing sibling is zero.
    took = merge_distributions(
        one for windows in points.distributions(metrics.REAUTH_SECONDS).values() for one in windows.values()
    )
    killed = points.increase_by(metrics.EXPIRED_KILLED).get("")
    absent = "0" if killed is not None else NO_DATA
    failed = _all(points.increase_by(metrics.AUTH_FAILURES))
    return [
        ("Authentications that succeeded", _total(succeeded)),
        ("Authentications that failed", _total(failed, absent="0" if succeeded is not None else NO_DATA)),
        ("Re-authentications that succeeded", _total(again, absent=absent)),
        ("Re-authentications that failed", _total(_all(points.increase_by(metrics.REAUTH_FAILURE)), absent=absent)),
        ("Time of a re-authentication, average", _time(took.average)),
        ("Expired connections closed", _total(killed)),
    ]


def _health(cluster: Cluster) -> list[tuple[str, str]]:
    points = cluster.points
    up, configured = (sum(line.values()) for line in (cluster.brokers.up, cluster.brokers.configured))
    return [
        ("Brokers up, share of the time", share(up / configured) if configured else NO_DATA),
        (
            "Brokers ejected",
            _total(_all(points.increase_by(metrics.EJECTIONS)), absent="0" if configured else NO_DATA),
        ),
        ("Workers restarted", _total(_all(points.increase_by(metrics.RESTARTS)))),
        ("Relays adopted", _total(points.increase_by(metrics.ADOPTED).get(""))),
    ]


def _all(lines: dict[str, Line]) -> Line | None:
    return sum_lines(lines.values()) if lines else None


def _total(line: Line | None, text: Callable[[float], str] = count, *, absent: str = NO_DATA) -> str:
    if not line:
        return absent
    return text(sum(line.values()))


def _mean(line: Line) -> float:
    return sum(line.values()) / len(line) if line else math.nan


def _plain(value: float) -> str:
    return NO_DATA if math.isnan(value) else short(value)


def _time(value: float) -> str:
    return NO_DATA if math.isnan(value) else seconds(value)
