"""When certificates and CRLs in force end, for /status: of one worker, and of all together."""

import heapq
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Annotated, Any

from msgspec import Meta

ENDS_MAX = 100
"""How many ends a worker reports: those that come first."""
SOON_DAYS = 30

_DAY_S = 86_400
_UnixS = Annotated[
    float, Meta(ge=-62_135_596_800, le=253_402_300_799)
]  # the years 1 to 9999, as certificates have them
_Key = Annotated[str, Meta(max_length=256)]
CertificateEnds = Annotated[dict[_Key, _UnixS], Meta(max_length=ENDS_MAX)]
"""One worker's report, in seconds since 1970 by configuration key; validated, since a captured one may send anything.
"""


def first_ends(ends: Mapping[str, float]) -> dict[str, float]:
    """Return those of a worker's ends that it reports."""
    return dict(heapq.nsmallest(ENDS_MAX, ends.items(), key=itemgetter(1)))


def merge_ends(parts: Iterable[Mapping[str, float]], now_unix_s: float) -> list[dict[str, Any]]:
    """Merge the reports of several workers, the first end first.

    Of a key the first end counts, since workers take over a file one after the other; so none can hide another's.
    """
    merged: dict[str, float] = {}
    for part in parts:
        for key, end in part.items():
            merged[key] = min(end, merged.get(key, end))
    return [
        {
            "key": key,
            "ends_at_unix_s": end,
            "days_left": round((end - now_unix_s) / _DAY_S, 1),
            "has_ended": end <= now_unix_s,
            f"within_{SOON_DAYS}_days": end - now_unix_s <= SOON_DAYS * _DAY_S,
        }
        for key, end in sorted(merged.items(), key=lambda item: (item[1], item[0]))
    ]
