"""Comparison of a report's totals: the same quantity from each source, and the reasons for differences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from analytics.report import metrics
from analytics.report.panels import Cluster
from analytics.report.principals import COLUMNS, MESSAGES, NOTHING, Billed
from analytics.report.units import counted

QUANTITIES: Final = ("Bytes to brokers", "Bytes to clients", "Messages to brokers", "Messages to clients", "Sessions")
"""In the order of `principals.COLUMNS`."""
_BYTES: Final = 2
"""The first ones of QUANTITIES are bytes, which are also counted for all connections."""


@dataclass(frozen=True, slots=True)
class TotalsRow:
    """One quantity. `relayed`: of all connections; `principals`: summed over principals; `counted` and `billed`: of the
    whole hours inside the span, from the rollups and from the usage tables. None: the source does not have it.
    `is_counted`: false for messages that the proxy does not count.
    """

    name: str
    relayed: int | None
    principals: int
    counted: int | None
    billed: int | None
    is_counted: bool = True

    @property
    def agrees(self) -> bool:
        """True if the sources agree."""
        return self.relayed in {None, self.principals} and self.counted == self.billed


@dataclass(frozen=True, slots=True)
class Totals:
    """All rows, and a sentence for each difference; `reasons` is empty if all agree."""

    rows: list[TotalsRow]
    reasons: list[str]
    billed: Billed | None


def compare_totals(cluster: Cluster) -> Totals | None:
    """Compare the cluster's totals; return None if no source counted anything."""
    found, relayed = cluster.principals, _relayed(cluster)
    billed = found.billed
    if found.total == NOTHING and not any(relayed) and (billed is None or billed.billed == NOTHING):
        return None
    rows = [
        TotalsRow(
            name,
            relayed[place],
            found.total[place],
            billed.counted[place] if billed else None,
            billed.billed[place] if billed else None,
            is_counted=found.counts_messages or COLUMNS[place] not in MESSAGES,
        )
        for place, name in enumerate(QUANTITIES)
    ]
    return Totals(rows, [*_explain_relayed(cluster, rows), *_explain_usage(billed, rows)], billed)


def _relayed(cluster: Cluster) -> tuple[int | None, ...]:
    moved = cluster.points.increase_by(metrics.BYTES, 0)
    ways = (moved.get("to_broker"), moved.get("to_client"))
    return (*(round(sum(line.values())) if line else None for line in ways), *(None,) * (len(QUANTITIES) - _BYTES))


def _explain_relayed(cluster: Cluster, rows: list[TotalsRow]) -> list[str]:
    """Return the reasons why all connections and all principals differ."""
    differing = [row for row in rows[:_BYTES] if row.relayed not in {None, row.principals}]
    if not differing:
        return []
    names = " and ".join(row.name.lower() for row in differing)
    if not any(row.principals for row in rows):
        return [f"No principal's use is counted ({names}): the tables have no pulsar_proxy_principal_… of this time."]
    reasons = []
    if any(row.principals > (row.relayed or 0) for row in differing):
        reasons.append(
            f"Principals used more than all connections together ({names}): what was used before a process's first "
            "scrape is known of principals only, whose counters have a creation time."
        )
    if any(row.principals < (row.relayed or 0) for row in differing):
        unknown = cluster.principals.without_start
        reasons.append(
            f"All connections moved more than all principals together ({names}): "
            + (
                f"of {counted(unknown, 'counter')} of principals the start is unknown (series `…_created` are "
                "missing), so what they counted before their first scrape is in no principal's figure."
                if unknown
                else "some samples of the principals' counters are missing, or came in another scrape."
            )
        )
    return reasons


def _explain_usage(billed: Billed | None, rows: list[TotalsRow]) -> list[str]:
    """Return the reasons why the usage tables differ for the same hours."""
    differing = [row.name.lower() for row in rows if row.counted != row.billed]
    if billed is None or not differing:
        return []
    reasons = []
    if billed.missing_windows:
        reasons.append(f"{counted(billed.missing_windows, billed.noun)} not in the usage tables yet: run `usage`")
    if billed.late_samples:
        reasons.append(
            f"{counted(billed.late_samples, 'sample')} came after their hours were closed: the usage tables keep them "
            "out of these hours (`usage --reopen-from` takes them in)"
        )
    if billed.open_windows:
        reasons.append(
            f"{counted(billed.open_windows, billed.noun)} still open: rolled up since `usage` ran last, or not yet"
        )
    if not reasons:
        reasons.append(
            "growth across the first or the last hour's boundary, or a counter's start that only one of them knows"
        )
    return [f"The usage tables differ in {', '.join(differing)}: {'; '.join(reasons)}."]
