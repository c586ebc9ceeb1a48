"""A cache of DNS queries: concurrent requests for one name share one query, and answers are kept until they expire.

Queries are sent round robin by *owner*: a client's principal or address, none of which gets all queries that may run at
a time. A query that several owners wait for is sent when any of them is next, and runs in the background: none of them
can cancel it for the others. A query that was never sent, since others were served first, says nothing about the name,
and its failure is not kept.

An answer that has just expired may be returned while the query is repeated, where the caller allows that (as in RFC
8767, but a failure is never covered up): for as long again as its TTL, and at most ``STALE_MAX_S`` past its expiry.
"""

import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import trio

from proxy.common.eager import enter_task
from proxy.runtime.dns.answers import Answer, ResolutionFailed
from proxy.runtime.fairness.fair_queue import FairQueue

QUERIES_MAX = 64
"""Queries that run at a time; more of them wait, within their timeout."""
QUERIES_PER_OWNER_MAX = 16
"""Of these, for one owner, and never more than are free: the more owners are busy, the fewer each may have."""
WAITING_MAX = 1024
"""Queries that wait to be sent; beyond that the newest of the owner with the most is dropped."""
WAITING_PER_OWNER_MAX = 512
ANSWERS_KEPT_MAX = 4096
"""Answers that are kept."""
FAILURES_KEPT_MAX = 1024
"""Failures that are kept: bounded apart from answers, which queries for invented names must not evict."""

FAILED_TTL_S = 2.0
"""How long a failure is kept."""
STALE_MAX_S = 10.0

Key = tuple[str, str]
"""Kind of query ("addresses" or "services") and name in lower case."""


@dataclass(slots=True, eq=False)
class _Query:
    """A query, and its outcome once it is done."""

    key: Key
    scope: trio.CancelScope
    done: trio.Event = field(default_factory=trio.Event)
    admitted: trio.Event = field(default_factory=trio.Event)
    answer: Answer | None = None
    failure: str = ""
    answered_at: float = 0.0
    expires_at: float = math.inf
    owners: set[str] = field(default_factory=set)
    """Owners in whose queues it waits to be sent; empty once it is sent."""
    holder: str | None = None
    """Owner whose slot it holds."""
    waiters: int = 0
    stale: Answer | None = None
    """The answer before this query; usable until ``stale_until``."""
    stale_until: float = -math.inf

    def is_waiting(self) -> bool:
        """Return True while it waits to be sent."""
        return not self.admitted.is_set() and not self.done.is_set()

    def stale_answer(self) -> Answer | None:
        """Return the answer before this query, if it is still usable and this query is not done; else None."""
        return self.stale if not self.done.is_set() and trio.current_time() < self.stale_until else None

    def stale_limit(self) -> float:
        """Return until when the answer may be used while the query is repeated."""
        return self.expires_at + min(self.expires_at - self.answered_at, STALE_MAX_S)


def _may_query(owner: str, held: int, free: int) -> bool:
    """Return True if an owner's query may be sent. Queries without an owner are the operator's, and not bounded."""
    return not owner or held < min(QUERIES_PER_OWNER_MAX, free)


class QueryCache:
    """A cache and scheduler of queries. ``query(kind, name)`` returns an answer or raises ResolutionFailed.

    ``on_failure`` is called for each query that fails. ``timeout_s``: for one query, from an owner's first request on.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        query: Callable[[str, str], Awaitable[Answer]],
        *,
        timeout_s: float,
        on_failure: Callable[[], None],
    ) -> None:
        self._nursery = nursery
        self._send_query = query
        self._timeout_s = timeout_s
        self._on_failure = on_failure
        self._answers: OrderedDict[Key, _Query] = OrderedDict()
        self._failures: OrderedDict[Key, _Query] = OrderedDict()
        self._under_way: dict[Key, _Query] = {}
        self._queue: FairQueue[str, _Query] = FairQueue(
            slots=QUERIES_MAX,
            waiting_max=WAITING_MAX,
            waiting_per_owner_max=WAITING_PER_OWNER_MAX,
            may_hold=_may_query,
        )

    async def get_answer(self, kind: str, name: str, owner: str, *, may_be_stale: bool) -> Answer:
        """Return the answer from the cache or from a query. Raises ResolutionFailed."""
        key = (kind, name.lower())
        query = self._find(key) or self._start_query(key, owner)
        if query.is_waiting():
            self._join_query(query, owner)
        if may_be_stale and (stale := query.stale_answer()) is not None:
            return stale
        query.waiters += 1
        try:
            if not query.done.is_set():
                await enter_task()
                await query.done.wait()
        finally:
            query.waiters -= 1
            if not query.waiters and query.is_waiting():  # no task waits for it any more
                query.scope.cancel()
        if query.answer is None:
            raise ResolutionFailed(query.failure)
        return query.answer

    def _find(self, key: Key) -> _Query | None:
        """Return the query if it is pending, or its outcome is still valid; else None."""
        found = self._under_way.get(key) or self._answers.get(key) or self._failures.get(key)
        return found if found is not None and found.expires_at > trio.current_time() else None

    # ---- scheduling

    def _start_query(self, key: Key, owner: str) -> _Query:
        """Start a query in its own task, since its first caller may give up before others. Raises ResolutionFailed."""
        query = _Query(key, trio.CancelScope(deadline=trio.current_time() + self._timeout_s))
        self._enqueue(query, owner)
        if not query.owners:
            self._on_failure()
            raise ResolutionFailed(query.failure)
        before = self._answers.pop(key, None)
        if before is not None:
            query.stale, query.stale_until = before.answer, before.stale_limit()
        self._failures.pop(key, None)
        self._under_way[key] = query
        self._nursery.start_soon(self._run, query)
        self._send_admitted()
        return query

    def _join_query(self, query: _Query, owner: str) -> None:
        """Queue a waiting query for this owner, too, with this owner's timeout."""
        if owner not in query.owners:
            query.scope.deadline = trio.current_time() + self._timeout_s
            self._enqueue(query, owner)
            self._send_admitted()

    def _enqueue(self, query: _Query, owner: str) -> None:
        query.owners.add(owner)
        dropped = self._queue.enqueue(owner, query)
        if dropped is not None:
            dropped_owner, dropped_query = dropped
            dropped_query.owners.discard(dropped_owner)
            if not dropped_query.owners:
                dropped_query.failure = f"{dropped_query.key[1]}: too many names are being asked for"
                dropped_query.scope.cancel()

    def _send_admitted(self) -> None:
        while (started := self._queue.start_next()) is not None:
            query = started[1]
            query.holder = started[0]
            self._dequeue(query)
            query.admitted.set()

    def _dequeue(self, query: _Query) -> None:
        for owner in query.owners:
            self._queue.remove_waiting(owner, query)
        query.owners.clear()

    async def _run(self, query: _Query) -> None:
        kind, name = query.key
        try:
            with query.scope:
                await query.admitted.wait()
                query.answer = await self._send_query(kind, name)
        except ResolutionFailed as error:
            query.failure = f"{name}: {error}"
        finally:
            self._dequeue(query)
            if query.holder is not None:
                self._queue.release_slot(query.holder)
            self._keep_outcome(query)
            self._send_admitted()

    # ---- the cache

    def _keep_outcome(self, query: _Query) -> None:
        key, query.answered_at = query.key, trio.current_time()
        del self._under_way[key]
        if query.answer is not None:
            query.expires_at = query.answer.expires_at
            self._answers[key] = query
            if len(self._answers) > ANSWERS_KEPT_MAX:
                self._answers.popitem(last=False)
        else:
            query.failure = query.failure or f"{key[1]}: no answer within {self._timeout_s} s"
            query.expires_at = query.answered_at + FAILED_TTL_S
            self._on_failure()
            if query.admitted.is_set():
                self._failures[key] = query
                if len(self._failures) > FAILURES_KEPT_MAX:
                    self._failures.popitem(last=False)
        query.done.set()
