"""Summary of sessions that end soon (KIP-368), for /status: of one forwarder, and of all together.

It shows an operator which clients are about to reconnect, and, where `ending_within_60_s` stays high for long, that
clients get no challenge for fresh credentials or do not answer it. Expired sessions are idle, since use would have
ended them, or their end is only observed (`session.enforcement`).
"""

import heapq
from collections.abc import Iterable
from operator import attrgetter
from typing import Annotated, Any, NamedTuple

from msgspec import Meta, Struct, to_builtins

NEAR_S = 60.0
SHOWN_MAX = 20


Count = Annotated[int, Meta(ge=0, le=2**32 - 1)]


class SoonestSession(Struct, frozen=True):
    """A session that ends soon, as one forwarder reports it."""

    client: str
    principal: str
    seconds_left: float


class NearExpiry(Struct, frozen=True):
    """One forwarder's report of its sessions; validated, since a compromised forwarder may send anything."""

    expired_and_idle: Count
    ending_within_60_s: Count
    soonest: Annotated[list[SoonestSession], Meta(max_length=SHOWN_MAX)]


class SessionEnd(NamedTuple):
    """A session's end, client and principal; ``seconds_left``: 0 or less once it has expired."""

    seconds_left: float
    client: str
    principal: str


def summarize_near_expiry(sessions: Iterable[SessionEnd]) -> dict[str, Any]:
    """Count the sessions that have expired and those that will within a minute; list the soonest of these."""
    expired, ending = 0, []
    for session in sessions:
        if session.seconds_left <= 0:
            expired += 1
        elif session.seconds_left <= NEAR_S:
            ending.append(session)
    soonest = [
        {"client": session.client, "principal": session.principal, "seconds_left": round(session.seconds_left, 1)}
        for session in heapq.nsmallest(SHOWN_MAX, ending)
    ]
    return {"expired_and_idle": expired, "ending_within_60_s": len(ending), "soonest": soonest}


def merge_near_expiry(parts: Iterable[NearExpiry]) -> dict[str, Any]:
    """Merge the summaries of several forwarders."""
    all_parts = list(parts)
    soonest = [session for part in all_parts for session in part.soonest]
    return {
        "expired_and_idle": sum(part.expired_and_idle for part in all_parts),
        "ending_within_60_s": sum(part.ending_within_60_s for part in all_parts),
        "soonest": to_builtins(heapq.nsmallest(SHOWN_MAX, soonest, key=attrgetter("seconds_left"))),
    }
