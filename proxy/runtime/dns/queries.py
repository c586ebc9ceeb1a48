"""Questions about names: each is asked once at a time, whoever wants to know, and answers are kept until they expire.

Questions are asked in turn by *owner*: a client's principal or address, of which none gets all that may be asked at a
time. A question that several owners wait for is asked when it is the turn of any of them, and ends in the background of
all: none of them can cancel it for the others. What was not asked, since others had their turns before, says nothing
about the name, and is not remembered.

An answer that has just expired may be given while the question is asked again, where the caller wants that (as RFC 8767
does, but a failure is never covered up). So an answer counts for no longer than its life and as long again, and no
longer than ``STALE_MAX_S`` past its end.
"""

import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import trio

from proxy.runtime.dns.answers import Answer, ResolutionFailed
from proxy.runtime.fairness.fair_queue import FairQueue

QUERIES_MAX = 64
"""Questions that are asked at a time; more of them wait for their turn, within their time."""
QUERIES_PER_OWNER_MAX = 16
"""Of these, one owner's; and never more than are free: the more owners have many, the fewer each may have."""
WAITING_MAX = 1024
"""Questions that wait for their turn; for more, the newest of the owner with most is given up."""
WAITING_PER_OWNER_MAX = 512
KEPT_MAX = 4096
"""Answers that are kept."""
FAILURES_KEPT_MAX = 1024
"""Failures that are kept: bounded apart from answers, which names that somebody invents must not push out."""

FAILED_TTL_S = 2.0
"""How long it is believed that there is no answer."""
STALE_MAX_S = 10.0

Key = tuple[str, str]
"""What is asked, and of which name."""


@dataclass(slots=True, eq=False)
class _Query:
    """A question, and what came of it once it is done."""

    key: Key
    scope: trio.CancelScope
    done: trio.Event = field(default_factory=trio.Event)
    turn: trio.Event = field(default_factory=trio.Event)
    answer: Answer | None = None
    failure: str = ""
    answered_at: float = 0.0
    expires_at: float = math.inf
    owners: set[str] = field(default_factory=set)
    """In whose lines it stands, as long as its turn has not come."""
    holder: str | None = None
    """Whose turn it was."""
    waiters: int = 0
    stale: Answer | None = None
    """What was known before; counts until ``stale_until``."""
    stale_until: float = -math.inf

    def waits_for_its_turn(self) -> bool:
        """Whether it is not asked yet, but may be."""
        return not self.turn.is_set() and not self.done.is_set()

    def stale_answer(self) -> Answer | None:
        """What was known before, if it still counts, and only while nothing newer is known, a failure included."""
        return self.stale if not self.done.is_set() and trio.current_time() < self.stale_until else None

    def may_be_stale_until(self) -> float:
        """How long the answer may be given while the question is asked again."""
        return self.expires_at + min(self.expires_at - self.answered_at, STALE_MAX_S)


def _may_ask(owner: str, held: int, free: int) -> bool:
    """Whether an owner's question may be asked. Without an owner it is the operator's, and has no such bound."""
    return not owner or held < min(QUERIES_PER_OWNER_MAX, free)


class QueryCache:
    """See the module. ``ask`` finds an answer or raises ResolutionFailed; ``on_failure`` is told of each failure.

    ``timeout_s`` is for one question, from the moment when an owner first wants its answer.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        ask: Callable[[str, str], Awaitable[Answer]],
        *,
        timeout_s: float,
        on_failure: Callable[[], None],
    ) -> None:
        self._nursery = nursery
        self._ask = ask
        self._timeout_s = timeout_s
        self._on_failure = on_failure
        self._kept: OrderedDict[Key, _Query] = OrderedDict()
        self._failures: OrderedDict[Key, _Query] = OrderedDict()
        self._under_way: dict[Key, _Query] = {}
        self._line: FairQueue[str, _Query] = FairQueue(
            slots=QUERIES_MAX,
            waiting_max=WAITING_MAX,
            waiting_per_owner_max=WAITING_PER_OWNER_MAX,
            may_hold=_may_ask,
        )

    async def get_answer(self, what: str, name: str, owner: str, *, may_be_stale: bool) -> Answer:
        """The answer, known or asked for. Raises ResolutionFailed."""
        key = (what, name.lower())
        question = self._find(key) or self._begin(key, owner)
        if question.waits_for_its_turn():
            self._join(question, owner)
        if may_be_stale and (stale := question.stale_answer()) is not None:
            return stale
        question.waiters += 1
        try:
            await question.done.wait()
        finally:
            question.waiters -= 1
            if not question.waiters and question.waits_for_its_turn():  # nobody wants it any more
                question.scope.cancel()
        if question.answer is None:
            raise ResolutionFailed(question.failure)
        return question.answer

    def _find(self, key: Key) -> _Query | None:
        """The question if it is being asked, or was lately."""
        found = self._under_way.get(key) or self._kept.get(key) or self._failures.get(key)
        return found if found is not None and found.expires_at > trio.current_time() else None

    # ---- turns

    def _begin(self, key: Key, owner: str) -> _Query:
        """Ask, in a task of its own: whoever asked first may give up before the others do. Raises ResolutionFailed."""
        question = _Query(key, trio.CancelScope(deadline=trio.current_time() + self._timeout_s))
        self._stand_in_line(question, owner)
        if not question.owners:
            self._on_failure()
            raise ResolutionFailed(question.failure)
        before = self._kept.pop(key, None)
        if before is not None:
            question.stale, question.stale_until = before.answer, before.may_be_stale_until()
        self._failures.pop(key, None)
        self._under_way[key] = question
        self._nursery.start_soon(self._run, question)
        self._start()
        return question

    def _join(self, question: _Query, owner: str) -> None:
        """Have a question that waits asked at this owner's turn, too, and within this owner's time."""
        if owner not in question.owners:
            question.scope.deadline = trio.current_time() + self._timeout_s
            self._stand_in_line(question, owner)
            self._start()

    def _stand_in_line(self, question: _Query, owner: str) -> None:
        question.owners.add(owner)
        dropped = self._line.enqueue(owner, question)
        if dropped is not None:
            its_owner, loser = dropped
            loser.owners.discard(its_owner)
            if not loser.owners:
                loser.failure = f"{loser.key[1]}: too many names are being asked for"
                loser.scope.cancel()

    def _start(self) -> None:
        while (taken := self._line.start_next()) is not None:
            question = taken[1]
            question.holder = taken[0]
            self._leave_lines(question)
            question.turn.set()

    def _leave_lines(self, question: _Query) -> None:
        for owner in question.owners:
            self._line.remove_waiting(owner, question)
        question.owners.clear()

    async def _run(self, question: _Query) -> None:
        what, name = question.key
        try:
            with question.scope:
                await question.turn.wait()
                question.answer = await self._ask(what, name)
        except ResolutionFailed as error:
            question.failure = f"{name}: {error}"
        finally:
            self._leave_lines(question)
            if question.holder is not None:
                self._line.release_slot(question.holder)
            self._end(question)
            self._start()

    # ---- what is kept

    def _end(self, question: _Query) -> None:
        key, question.answered_at = question.key, trio.current_time()
        del self._under_way[key]
        if question.answer is not None:
            question.expires_at = question.answer.expires_at
            self._kept[key] = question
            if len(self._kept) > KEPT_MAX:
                self._kept.popitem(last=False)
        else:
            question.failure = question.failure or f"{key[1]}: no answer within {self._timeout_s} s"
            question.expires_at = question.answered_at + FAILED_TTL_S
            self._on_failure()
            if question.turn.is_set():
                self._failures[key] = question
                if len(self._failures) > FAILURES_KEPT_MAX:
                    self._failures.popitem(last=False)
        question.done.set()
