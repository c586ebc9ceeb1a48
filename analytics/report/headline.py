"""The page's headline: one sentence for each cluster, and the failures that need attention."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from analytics.report import metrics
from analytics.report.panels import Cluster
from analytics.report.points import Line, merge_distributions
from analytics.report.span import Span
from analytics.report.units import amount, counted, seconds, share

_ERRORS_SHARE_TOLD: Final = 0.01


@dataclass(frozen=True, slots=True)
class Headline:
    """A cluster's headline: `text` is a sentence, `troubles` are phrases.

    `is_failure_data_present`: the tables have the metrics that count failures.
    """

    text: str
    troubles: list[str]
    is_failure_data_present: bool


def headline(cluster: Cluster, span: Span) -> Headline:
    """Summarize the cluster's traffic and failures."""
    points = cluster.points
    moved = points.increase_by(metrics.BYTES, 0)
    if not points.metrics():
        return Headline(f"No sample of this cluster in {length_text(span)}.", [], is_failure_data_present=False)
    done = []
    if moved:
        to_brokers, to_clients = (amount(sum(moved.get(way, {}).values())) for way in ("to_broker", "to_client"))
        for_principals = f" for {_principals(cluster)}" if cluster.principals.top else ""
        done.append(f"{to_brokers} to brokers and {to_clients} to clients{for_principals}")
    if active := points.level_by(metrics.ACTIVE).get("", {}):
        done.append(f"{counted(max(active.values()), 'connection')} open at the busiest {span.resolution.noun}")
    if requests := _sum(
        *(line for metric in metrics.REQUESTS.values() for line in points.increase_by(metric).values())
    ):
        times = merge_distributions(
            one for windows in points.distributions(metrics.LOOKUP).values() for one in windows.values()
        )
        within = times.quantile(0.99)
        done.append(f"{counted(requests, 'request')}{'' if math.isnan(within) else f', 99 % within {seconds(within)}'}")
    text = f"In {length_text(span)}: {'; '.join(done)}." if done else f"In {length_text(span)} nothing was relayed."
    watched = bool(points.increase_by(metrics.ENDED) or points.increase_by(metrics.ANSWERS))
    return Headline(text, _troubles(cluster), is_failure_data_present=watched)


def _principals(cluster: Cluster) -> str:
    found = cluster.principals
    if found.further is not None:
        return f"more than {counted(len(found.top), 'principal')}"
    return counted(len(found.top), "principal")


def length_text(span: Span) -> str:
    """Format a span's length as `3 hours`, `10 minutes` or `30 days`."""
    total_s = int((span.end - span.start).total_seconds())
    for width_s, noun in ((86_400, "day"), (3600, "hour"), (60, "minute")):
        if total_s >= width_s and total_s % width_s == 0:
            return counted(total_s // width_s, noun)
    return counted(total_s // 60, "minute")


def _troubles(cluster: Cluster) -> list[str]:
    points = cluster.points
    ended, answers = points.increase_by(metrics.ENDED, 0), points.increase_by(metrics.ANSWERS, 1)
    found = [
        (_sum(ended.get("defect")), "connection", "ended by a defect of the proxy"),
        (_sum(*points.increase_by(metrics.REJECTED).values()), "connection", "rejected"),
        (_sum(*points.increase_by(metrics.AUTH_FAILURES).values()), "authentication", "failed"),
        (_sum(*points.increase_by(metrics.REAUTH_FAILURE).values()), "re-authentication", "failed"),
        (_sum(*points.increase_by(metrics.RESTARTS).values()), "worker", "restarted"),
        (_sum(*points.increase_by(metrics.BROKER_FAILURES).values()), "relay", "not opened"),
        (len(cluster.brokers.worst), "broker", "not up all the time"),
    ]
    phrases = [f"{counted(total, noun)} {what}" for total, noun, what in found if total]
    total, errors = _sum(*answers.values()), _sum(*(line for name, line in answers.items() if name != "none"))
    if total and errors / total >= _ERRORS_SHARE_TOLD:
        phrases.append(f"{share(errors / total)} of requests answered with an error")
    return phrases


def _sum(*lines: Line | None) -> float:
    return round(sum(sum(line.values()) for line in lines if line))
