"""The view of sessions that end soon (KIP-368), for /status: of one forwarder, and of all together.

An operator sees in it who is about to come back, and, where `ending_within_60_s` stands high for long, that clients are
not asked for fresh credentials or do not answer. Those that have expired are idle, for use would have ended them, or
their end is only observed (`session.enforcement`).
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
    """A session that ends soon, as one forwarder tells it."""

    client: str
    principal: str
    seconds_left: float


class NearExpiry(Struct, frozen=True):
    """What one forwarder tells of its sessions; a captured one may tell anything, so it is checked against this."""

    expired_and_idle: Count
    ending_within_60_s: Count
    soonest: Annotated[list[SoonestSession], Meta(max_length=SHOWN_MAX)]


class SessionEnd(NamedTuple):
    """When a session ends, and whose it is; ``seconds_left``: 0 or less once it has expired."""

    seconds_left: float
    client: str
    principal: str


def summarize_near_expiry(sessions: Iterable[SessionEnd]) -> dict[str, Any]:
    """How many have expired, how many will within a minute, and the soonest of these."""
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
    """The same of several forwarders together."""
    all_parts = list(parts)
    soonest = [session for part in all_parts for session in part.soonest]
    return {
        "expired_and_idle": sum(part.expired_and_idle for part in all_parts),
        "ending_within_60_s": sum(part.ending_within_60_s for part in all_parts),
        "soonest": to_builtins(heapq.nsmallest(SHOWN_MAX, soonest, key=attrgetter("seconds_left"))),
    }
