"""Where requests are taken in: bounded and shared fairly between principals; what several ask at once is asked once.

Most answers need no task of their own: the request goes out over a connection that is open already, and what comes
back is the answer. Everything else (a connection to be opened, a redirect, a broker that fails) goes the long way.
"""

from collections.abc import Callable
from dataclasses import dataclass

import trio

from lookup.broker_pool import Asker
from lookup.discovery import Endpoint
from lookup.lookups import Lookups
from lookup.metrics import LookupMetrics
from lookup.turn import Turn
from proto.lookups import LookupKind, error_of, failure, forget_asker, set_response_request_id
from proto.pulsar_pb2 import BaseCommand, ServerError
from proxy.config.load import topic_lists_max
from proxy.config.types import Config
from proxy.runtime.logs import get_logger
from proxy.runtime.tasks import FairSlots, InFlight, repeat, seconds

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
        self._by_principal: dict[str, int] = {}
        self.use(config, lookups)

    def use(self, config: Config, lookups: Lookups) -> None:
        """Settings for requests from now on; those under way go on under the old ones."""
        self._most = config.limits.max_concurrent_lookups
        self._timeout_s = seconds(config.limits.lookup_timeout_ms)
        self._lists = FairSlots(topic_lists_max(config))
        self._lookups = lookups

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
        """Half of the room is whoever's comes; of the rest nobody gets more than an equal share, newcomers counted."""
        # Without authentication there is nobody to share with.
        if not principal or self.under_way.count < self._most // 2:
            return self.under_way.count < self._most
        mine = self._by_principal.get(principal, 0)
        others = len(self._by_principal) - (1 if mine else 0)
        newcomer = 1
        return self.under_way.count < self._most and mine < max(1, self._most // (1 + others + newcomer))

    # ---- the short way

    def _begin(self, question: Question) -> None:
        lookups = question.lookups

        def answered(answer: BaseCommand | None, broker: Endpoint) -> None:
            question.forget = None
            if answer is not None and lookups.is_final(answer, question.kind):
                self._end(question, lookups.finished(answer, question.kind, question.asker, question.client))
            else:
                lost = broker if answer is None else None
                self._nursery.start_soon(self._go_the_long_way, question, answer, lost)

        question.forget = lookups.ask_now(question.command, question.kind, question.asker, answered)
        if question.forget is None:
            self._nursery.start_soon(self._go_the_long_way, question)

    # ---- the long way

    async def _go_the_long_way(
        self, question: Question, answer: BaseCommand | None = None, lost: Endpoint | None = None
    ) -> None:
        try:
            answer = await question.lookups.answer(
                question.command,
                question.kind,
                question.asker,
                question.client,
                answer,
                deadline=question.deadline,
                lost=lost,
            )
        except Exception as error:  # noqa: BLE001 -- a defect that one request meets must not end all the others
            get_logger().error("a lookup met a defect", client=question.client, exc_info=error)
            answer = failure(question.kind, 0, ServerError.UnknownError, "The proxy met a defect")
        self._end(question, answer)
        self._turn.end()

    async def _list_topics(self, question: Question) -> None:
        """The long way, for an answer that may be large: only so many at a time."""
        lists = self._lists
        with trio.move_on_at(question.deadline) as waiting:
            await lists.take(question.asker.principal)
        if waiting.cancelled_caught:
            self._end_too_slow(question)
            self._turn.end()
            return
        try:
            await self._go_the_long_way(question)
        finally:
            lists.give(question.asker.principal)

    # ---- the end

    async def _end_overdue(self) -> None:
        now = trio.current_time()
        overdue = []
        for question in self._questions.values():
            if question.deadline > now:
                if question.lookups is self._lookups:  # the oldest come first, but a reload may have cut their time
                    break
            elif question.forget is not None:  # on the long way it keeps its time itself
                overdue.append(question)
        for question in overdue:
            if question.forget is not None:
                question.forget()
            self._end_too_slow(question)
        self._turn.end()

    def _end_too_slow(self, question: Question) -> None:
        answer = question.lookups.too_slow(question.command, question.kind, question.asker, question.client)
        self._end(question, answer)

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
