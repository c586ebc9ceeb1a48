"""What the page says of a cluster: a headline with the failures, the summary's figures, and what is missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from analytics.report import figures
from analytics.report.bill import Bill
from analytics.report.figures import Figures
from analytics.report.span import Span
from analytics.report.text import amount, count, counted, seconds, share

NO_DATA: Final = "no data"
_ERRORS_SHARE_TOLD: Final = 0.01


@dataclass(frozen=True, slots=True)
class Cluster:
    """The collected data of one cluster."""

    name: str
    figures: Figures
    bill: Bill

    @property
    def request_errors(self) -> tuple[float, float] | None:
        """The number of requests that were answered with an error, and its share; None without any answer."""
        answers = self.figures.total(figures.ANSWERS)
        if not answers:
            return None
        errors = answers - (self.figures.total(figures.ANSWERS, "none") or 0)
        return errors, errors / answers


def headline(cluster: Cluster, span: Span) -> str:
    """Summarize the cluster's traffic in one sentence."""
    found, length = cluster.figures, counted(span.windows, span.resolution.noun)
    if not found.windows:
        return f"No sample of this cluster in {length}."
    done = []
    if found.total(figures.BYTES) is not None:
        ways = (amount(found.total(figures.BYTES, way) or 0) for way in ("to_broker", "to_client"))
        done.append("{} to brokers and {} to clients".format(*ways))
    if found.open_busiest:
        done.append(f"{counted(found.open_busiest, 'connection')} open in the busiest {span.resolution.noun}")
    if requests := found.total(figures.ANSWERS):
        within = found.request_seconds(0.99)
        done.append(f"{counted(requests, 'request')}{'' if within is None else f', 99 % within {seconds(within)}'}")
    return f"In {length}: {'; '.join(done)}." if done else f"In {length} nothing was relayed."


def troubles(cluster: Cluster) -> list[str] | None:
    """Return the failures that need attention, as phrases; None if the tables lack the metrics that count them."""
    found = cluster.figures
    if found.total(figures.ENDED) is None and found.total(figures.ANSWERS) is None:
        return None
    known = [
        (found.total(figures.ENDED, "defect"), "connection", "ended by a defect of the proxy"),
        (found.total(figures.REJECTED), "connection", "rejected"),
        (found.total(figures.AUTH_FAILURES), "authentication", "failed"),
        (found.total(figures.REAUTH_FAILURE), "re-authentication", "failed"),
        (found.total(figures.RESTARTS), "worker", "restarted"),
        (found.total(figures.BROKER_FAILURES), "relay", "not opened"),
        (len(found.worst_brokers), "broker", "not up all the time"),
    ]
    phrases = [f"{counted(total, noun)} {what}" for total, noun, what in known if total and round(total)]
    if (errors := cluster.request_errors) and errors[1] >= _ERRORS_SHARE_TOLD:
        phrases.append(f"{share(errors[1])} of requests answered with an error")
    return phrases


def summary(cluster: Cluster, span: Span) -> dict[str, str]:
    """Return the figures by their names: the same names in the same order for each cluster."""
    found, noun, errors = cluster.figures, span.resolution.noun, cluster.request_errors
    return {
        f"{noun.capitalize()}s with samples": f"{found.windows:,} of {span.windows:,}",
        "Bytes to brokers, all connections": _text(
            found.total(figures.BYTES, "to_broker", beside=figures.BYTES), amount
        ),
        "Bytes to clients, all connections": _text(
            found.total(figures.BYTES, "to_client", beside=figures.BYTES), amount
        ),
        "Connections accepted": _text(found.total(figures.OPENED)),
        "Connections open, on average": _text(found.open_average),
        f"Connections open, busiest {noun}": _text(found.open_busiest),
        "Connections rejected": _text(found.total(figures.REJECTED, beside=figures.ENDED)),
        "Requests answered": _text(found.total(figures.ANSWERS)),
        "… with an error": f"{count(errors[0])} ({share(errors[1])})" if errors else NO_DATA,
        "Time of a request, 50 % within": _text(found.request_seconds(0.5), seconds),
        "Time of a request, 99 % within": _text(found.request_seconds(0.99), seconds),
        "Authentications that failed": _text(found.total(figures.AUTH_FAILURES, beside=figures.AUTH_SUCCESS)),
        "Re-authentications that failed": _text(found.total(figures.REAUTH_FAILURE, beside=figures.EXPIRED_KILLED)),
        "Expired connections closed": _text(found.total(figures.EXPIRED_KILLED)),
        "Brokers up, share of the time": _text(found.brokers_up, share),
        "Workers restarted": _text(found.total(figures.RESTARTS)),
    }


def missing(cluster: Cluster, span: Span) -> list[str]:
    """Return sentences about what is missing of a cluster's figures and of its bill."""
    found, bill, noun = cluster.figures, cluster.bill, span.resolution.noun
    told = []
    if found.newest is not None and found.windows < span.windows:
        told.append(
            f"{span.windows - found.windows} of {span.windows} {noun}s have no sample at all (the newest with samples: "
            f"{found.newest:%Y-%m-%d %H:%M}): the proxy did not run, was not scraped, or the samples are not ingested "
            "and rolled up yet."
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


def _text(value: float | None, text: Callable[[float], str] = count) -> str:
    return NO_DATA if value is None else text(value)
