"""Where requests are taken in: bounded and shared fairly between principals; what several ask at once is asked once.

Most answers need no task of their own: the request goes out over a connection that is open already, and what comes
back is the answer. Everything else (a connection to be opened, a redirect, a broker that fails) goes the long way.
"""

from collections.abc import Callable
from dataclasses import dataclass

import trio

from lookup.broker_pool import Asker
from lookup.lookups import Lookups
from lookup.metrics import LookupMetrics
from lookup.turn import Turn
from proto.lookups import LookupKind, error_of, failure, forget_asker, set_response_request_id
from proto.pulsar_pb2 import BaseCommand, ServerError
from proxy.config.types import Config
from proxy.runtime.tasks import ByteBudget, InFlight, repeat, seconds

OVERDUE_LOOK_S = 0.25

Key = tuple[Lookups, Asker, bytes]

Deliver = Callable[[bytes], None]
"""Takes the serialized answer."""


@dataclass(slots=True, eq=False)
class Question:
    """What is being asked of a broker, and who waits for the answer: each with the request id it wants to see."""

    command: BaseCommand
    kind: LookupKind
    asker: Asker
    client: str
    deadline: float
    lookups: Lookups
    waiters: list[tuple[int, float, Deliver]]
    key: Key | None = None
    forget: Callable[[], None] | None = None


class Desk:
    """See the module. ``ask`` never waits."""

    def __init__(
        self, config: Config, lookups: Lookups, metrics: LookupMetrics, turn: Turn, nursery: trio.Nursery
    ) -> None:
        self.under_way = InFlight()
        self._metrics = metrics
        self._turn = turn
        self._nursery = nursery
        self._questions: dict[Key, Question] = {}
        self.use(config, lookups)

    def use(self, config: Config, lookups: Lookups) -> None:
        """Settings for requests from now on; those under way go on under the old ones."""
        self._most = config.limits.max_concurrent_lookups
        self._timeout_s = seconds(config.limits.lookup_timeout_ms)
        self._list_bytes = config.limits.max_broker_frame_bytes
        self._lists = ByteBudget(config.limits.max_topic_lists_bytes)
        self._lookups = lookups
        self._by_principal: dict[str, int] = {}

    async def run(self) -> None:
        """End questions whose time is over, until cancelled."""
        await repeat(OVERDUE_LOOK_S, self._end_overdue)

    def ask(  # noqa: PLR0917 -- the parts of one request
        self, command: BaseCommand, kind: LookupKind, request_id: int, asker: Asker, client: str, deliver: Deliver
    ) -> None:
        """Take a request in; ``deliver`` gets the answer, now or later. An error is one, too. Ends no turn."""
        self._metrics.received(kind.name)
        now = trio.current_time()
        if not self._has_room_for(asker.principal):
            self._metrics.rejected(kind.name)
            text = "The proxy has too many lookups under way"
            deliver(failure(kind, request_id, ServerError.TooManyRequests, text).SerializeToString())
            return
        self.under_way.begin()
        self._by_principal[asker.principal] = self._by_principal.get(asker.principal, 0) + 1
        what = forget_asker(command, kind)
        waiter = (request_id, now, deliver)
        if command.type == BaseCommand.GET_TOPICS_OF_NAMESPACE:  # the answer may be too large to keep one for each
            question = Question(command, kind, asker, client, now + self._timeout_s, self._lookups, [waiter])
            self._nursery.start_soon(self._list_topics, question)
            return
        key = (self._lookups, asker, what)
        known = self._questions.get(key)
        if known is not None:
            known.waiters.append(waiter)
            return
        question = Question(command, kind, asker, client, now + self._timeout_s, self._lookups, [waiter], key)
        self._questions[key] = question
        self._begin(question)

    def _has_room_for(self, principal: str) -> bool:
        """Half of the room is whoever's comes; of the rest nobody gets more than an equal share."""
        if self.under_way.count < self._most // 2:
            return True
        mine = self._by_principal.get(principal, 0)
        others = len(self._by_principal) - (1 if mine else 0)
        return self.under_way.count < self._most and mine < self._most // (others + 1)

    # ---- the short way

    def _begin(self, question: Question) -> None:
        lookups = question.lookups

        def answered(answer: BaseCommand | None) -> None:
            question.forget = None
            if answer is not None and lookups.is_final(answer, question.kind):
                self._end(question, lookups.finished(answer, question.kind, question.asker, question.client))
            else:
                self._nursery.start_soon(self._go_the_long_way, question, answer)

        question.forget = lookups.ask_now(question.command, question.kind, question.asker, answered)
        if question.forget is None:
            self._nursery.start_soon(self._go_the_long_way, question, None)

    # ---- the long way

    async def _go_the_long_way(self, question: Question, answer: BaseCommand | None) -> None:
        answer = await question.lookups.answer(
            question.command, question.kind, question.asker, question.client, answer, deadline=question.deadline
        )
        self._end(question, answer)
        self._turn.end()

    async def _list_topics(self, question: Question) -> None:
        """The long way, for an answer that may be large: only so many at a time."""
        lists, size = self._lists, self._list_bytes
        with trio.move_on_at(question.deadline) as waiting:
            await lists.take(size)
        if waiting.cancelled_caught:
            self._end(
                question, question.lookups.too_slow(question.command, question.kind, question.asker, question.client)
            )
            self._turn.end()
            return
        try:
            await self._go_the_long_way(question, None)
        finally:
            lists.give(size)

    # ---- the end

    async def _end_overdue(self) -> None:
        now = trio.current_time()
        overdue = []
        for question in self._questions.values():  # the oldest first
            if question.deadline > now:
                break
            if question.forget is not None:  # on the long way it keeps its time itself
                overdue.append(question)
        for question in overdue:
            if question.forget is not None:
                question.forget()
            answer = question.lookups.too_slow(question.command, question.kind, question.asker, question.client)
            self._end(question, answer)
        self._turn.end()

    def _end(self, question: Question, answer: BaseCommand) -> None:
        if question.key is not None and self._questions.pop(question.key, None) is None:
            return  # it has ended already
        now, error = trio.current_time(), error_of(answer)
        principal = question.asker.principal
        for request_id, since, deliver in question.waiters:
            set_response_request_id(answer, request_id)
            deliver(answer.SerializeToString())
            self._metrics.answered(question.kind.name, error, now - since)
            self.under_way.end()
        left = self._by_principal[principal] - len(question.waiters)
        if left:
            self._by_principal[principal] = left
        else:
            del self._by_principal[principal]
