"""Where requests are taken in: bounded and shared fairly between principals; what several ask at once is asked once.

Most answers need no task of their own: the request goes out over a connection that is open already, and what comes
back is the answer. Everything else (a connection to be opened, a redirect, a broker that fails) goes the long way.
"""

import trio

from lookup.connections.broker_connection import BrokerConnection
from lookup.connections.losses import Trial
from lookup.connections.principals import LookupPrincipal
from lookup.metrics import LookupMetrics
from lookup.requests.envelope_reply import Answers
from lookup.requests.executor import Lookups
from proto.lookup_answers import BrokerAnswer, ClientAnswer
from proto.lookup_kinds import LookupKind, failure
from proto.lookup_requests import Request
from proto.pulsar_pb2 import BaseCommand, ServerError
from proxy.common.logs import get_logger
from proxy.config.types import Config
from proxy.runtime.fairness.byte_budget import REQUEST_OVERHEAD_BYTES, ByteBudget, owner_by_address
from proxy.runtime.fairness.fair_capacity import FairCapacity, Reservation
from proxy.runtime.loop.tasks import InFlightCounter, run_every, seconds
from proxy.runtime.loop.tick import current_tick

OVERDUE_LOOK_S = 0.25

NO_ROOM = "The proxy has too many large answers under way"

Key = tuple[Lookups, LookupPrincipal, bytes, bytes]
"""What is asked of whom, on whose behalf: with a Request's prefix and body."""


def _size(prefix: bytes, body: bytes) -> int:
    """What a request under way counts."""
    return len(prefix) + len(body) + REQUEST_OVERHEAD_BYTES


class RequestBatch:
    """Who sent some requests in one go, and when, in Trio's time; and where the answers go."""

    __slots__ = ("answers", "asker", "client", "owner", "since")

    def __init__(self, asker: LookupPrincipal, client: str, answers: Answers) -> None:
        self.asker = asker
        self.client = client
        self.owner = ""
        """As whose its requests count, once the desk has said so."""
        self.answers = answers
        self.since = trio.current_time()


Waiter = tuple[RequestBatch, int, bytes]
"""Whose request it is, its number among those sent in one go, and the request id that the client wants to see."""


class PendingLookup:
    """What is being asked of a broker, and who waits for the answer: nearly always one.

    There may be very many, and the garbage collector looks at each object that waits again and again: so they are few.
    """

    __slots__ = (
        "connection",
        "deadline",
        "desk",
        "index",
        "key",
        "kind",
        "number",
        "others",
        "request_id",
        "sender",
        "shared",
    )

    def __init__(self, desk: "LookupScheduler", kind: LookupKind, key: Key, waiter: Waiter, timeout_s: float) -> None:
        self.desk = desk
        self.kind = kind
        self.key = key
        self.sender, self.index, self.request_id = waiter
        self.others: list[Waiter] | None = None
        self.deadline = self.sender.since + timeout_s
        self.shared = False
        """Whether others find it that ask the same."""
        self.connection: BrokerConnection | None = None
        """While it is on the short way."""
        self.number = b""

    @property
    def lookups(self) -> Lookups:
        """By whom it is asked."""
        return self.key[0]

    @property
    def request(self) -> Request:
        """What it is."""
        return Request(self.kind, *self.key[2:])

    def answered(self, answer: BrokerAnswer | None) -> None:
        """Take what a broker said, the short way."""
        self.desk.answered(self, answer)


class LookupScheduler:
    """See the module. ``ask`` never waits."""

    def __init__(self, config: Config, lookups: Lookups, metrics: LookupMetrics, nursery: trio.Nursery) -> None:
        self.under_way = InFlightCounter()
        self._metrics = metrics
        self._turn = current_tick()
        self._nursery = nursery
        self._questions: dict[Key, PendingLookup] = {}
        self._by_principal: dict[str, int] = {}
        self._room = FairCapacity(0, 0)
        self._budget = ByteBudget(0)
        self.use(config, lookups)

    def use(self, config: Config, lookups: Lookups) -> None:
        """Settings for requests from now on; those under way go on under the old ones."""
        self._most = config.limits.max_concurrent_lookups
        self._free_for_all = self._most // 2
        self._timeout_s = seconds(config.limits.lookup_timeout_ms)
        self._anonymous_role = config.authentication.anonymous_role
        self._room.resize(config.limits.max_topic_lists_bytes, config.limits.max_broker_frame_bytes)
        self._budget.resize(config.limits.max_lookup_bytes)
        self._lookups = lookups

    async def run(self) -> None:
        """End questions whose time is over, until cancelled."""
        await run_every(OVERDUE_LOOK_S, self._end_overdue)

    def ask(self, request: Request, request_id: bytes, index: int, sender: RequestBatch) -> None:
        """Take a request in: the ``index``-th of its sender's, which gets the answer, now or later, under this id (a
        varint). An error is one, too.
        """
        kind, prefix, body = request
        asker = sender.asker
        principal = asker.principal
        self._metrics.received(kind.name)
        if self.under_way.count >= self._free_for_all and not self._has_room_for(principal):
            self._refuse(kind, request_id, index, sender)
            return
        if not sender.owner:
            sender.owner = self._owner(sender)
        if not self._budget.reserve_bytes(sender.owner, _size(prefix, body)):
            self._refuse(kind, request_id, index, sender)
            return
        self.under_way.increment()
        self._by_principal[principal] = self._by_principal.get(principal, 0) + 1
        lookups = self._lookups
        key = lookups, asker, prefix, body
        waiter = sender, index, request_id
        if kind.may_be_large:  # each is asked by itself: the answer may be too large to keep it for several
            self._nursery.start_soon(self._ask_large, PendingLookup(self, kind, key, waiter, self._timeout_s))
            return
        known = self._questions.get(key)
        if known is not None:
            if known.others is None:
                known.others = []
            known.others.append(waiter)
            return
        question = PendingLookup(self, kind, key, waiter, self._timeout_s)
        question.shared = True
        self._questions[key] = question
        connection = question.connection = lookups.ask_now(request, asker, question, sender.since)
        if connection is None:
            self._nursery.start_soon(self._go_the_long_way, question)

    def _owner(self, sender: RequestBatch) -> str:
        principal = sender.asker.principal
        if principal and principal != self._anonymous_role:
            return principal
        return owner_by_address("", sender.client)

    def _refuse(self, kind: LookupKind, request_id: bytes, index: int, sender: RequestBatch) -> None:
        self._metrics.rejected(kind.name)
        text = "The proxy has too many lookups under way"
        refusal = ClientAnswer(failure(kind, 0, ServerError.TooManyRequests, text))
        sender.answers.put(index, refusal.frame(request_id))

    def _has_room_for(self, principal: str) -> bool:
        """Half of the room is whoever's comes; of the rest nobody gets more than an equal share, newcomers counted."""
        # Without authentication there is nobody to share with.
        if not principal or self.under_way.count < self._free_for_all:
            return self.under_way.count < self._most
        mine = self._by_principal.get(principal, 0)
        others = len(self._by_principal) - (1 if mine else 0)
        newcomer = 1
        return self.under_way.count < self._most and mine < max(1, self._most // (1 + others + newcomer))

    # ---- the short way

    def answered(self, question: PendingLookup, answer: BrokerAnswer | None) -> None:
        """What a broker said to a question, or None where the connection was lost."""
        connection = question.connection
        if connection is None:
            return  # it has ended already
        lookups, asker, _, _ = question.key
        lookups.heard(connection, answer)
        ready = None
        if answer is not None:
            ready = answer.ready or lookups.ready(answer, question.kind, asker, question.sender.client)
        question.connection = None  # not before: where an answer meets a defect, time ends the question
        if ready is not None:
            self._end(question, ready, connection.heard_at)
        elif answer is None:
            trial = Trial()
            trial.lost(connection.broker, connection.loss)
            self._nursery.start_soon(self._go_the_long_way, question, None, trial)
        else:
            self._nursery.start_soon(self._go_the_long_way, question, answer.command)

    # ---- the long way

    async def _go_the_long_way(
        self, question: PendingLookup, answer: BaseCommand | None = None, trial: Trial | None = None
    ) -> int:
        """Answer it; how many bytes the answer has."""
        lookups, asker, _, _ = question.key
        kind, client, deadline = question.kind, question.sender.client, question.deadline
        try:
            command = question.request.command()
            answer = await lookups.answer(command, kind, asker, client, answer, deadline=deadline, trial=trial)
        except Exception as error:  # noqa: BLE001 -- a defect that one request meets must not end all the others
            get_logger().error("a lookup met a defect", client=client, exc_info=error)
            answer = failure(kind, 0, ServerError.UnknownError, "The proxy met a defect")
        with self._turn:
            return self._end(question, ClientAnswer(answer), trio.current_time())

    async def _ask_large(self, question: PendingLookup) -> None:
        """The long way, for an answer that may be large: once there is room for it, which is its until it has left."""
        sender, timeout_s = question.sender, self._timeout_s
        loan: Reservation | None = None
        with trio.move_on_at(question.deadline):
            loan = await self._room.reserve(sender.owner)
        if loan is None:
            self._end_without_room(question)
            return
        try:
            loan.shrink_to(await self._go_the_long_way(question))
            await sender.answers.until_sent(timeout_s)
        finally:
            loan.release()

    def _end_without_room(self, question: PendingLookup) -> None:
        sender, kind = question.sender, question.kind
        get_logger().warning(
            "a lookup waited in vain for room for its answer",
            client=sender.client,
            principal=sender.asker.principal,
            request=kind.name,
            limit="limits.max_topic_lists_bytes",
        )
        with self._turn:
            answer = ClientAnswer(failure(kind, 0, ServerError.TooManyRequests, NO_ROOM))
            self._end(question, answer, trio.current_time())

    # ---- the end

    async def _end_overdue(self) -> None:
        now = trio.current_time()
        overdue = []
        for question in self._questions.values():
            if question.deadline > now:
                if question.lookups is self._lookups:  # the oldest come first, but a reload may have cut their time
                    break
            elif question.connection is not None:  # on the long way it keeps its time itself
                overdue.append((question, question.connection))
        with self._turn:
            for question, connection in overdue:
                question.connection = None
                question.lookups.forget(connection, question)
                self._end_too_slow(question)

    def _end_too_slow(self, question: PendingLookup) -> None:
        lookups, asker, _, _ = question.key
        answer = lookups.too_slow(question.request.command(), question.kind, asker, question.sender.client)
        with self._turn:
            self._end(question, ClientAnswer(answer), trio.current_time())

    def _end(self, question: PendingLookup, answer: ClientAnswer, now: float) -> int:
        """Hand the answer out; how many bytes it has."""
        if question.shared:
            del self._questions[question.key]
        sender, kind, others = question.sender, question.kind.name, question.others
        frame = answer.frame(question.request_id)
        sender.answers.put(question.index, frame)
        self._metrics.answered(kind, answer.error, now - sender.since)
        _, _, prefix, body = question.key
        size = _size(prefix, body)
        self._budget.release_bytes(sender.owner, size)
        count = 1
        if others is not None:
            count += len(others)
            for other, index, request_id in others:
                self._budget.release_bytes(other.owner, size)
                other.answers.put(index, answer.frame(request_id))
                self._metrics.answered(kind, answer.error, now - other.since)
        self.under_way.decrement(count)
        principal = sender.asker.principal
        left = self._by_principal[principal] - count
        if left:
            self._by_principal[principal] = left
        else:
            del self._by_principal[principal]
        return len(frame)
