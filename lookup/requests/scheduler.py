"""Scheduler of lookups: bounded, fair between principals, and with one request to the broker for equal lookups.

Most answers need no task of their own (the fast path): the request goes out over a connection that is open already, and
what comes back is the answer. Everything else (a connection to be opened, a redirect, a broker that fails) takes the
slow path, a task.
"""

import trio

from lookup.connections.broker_connection import BrokerConnection
from lookup.connections.losses import LossHistory
from lookup.connections.principals import LookupPrincipal
from lookup.metrics import LookupMetrics
from lookup.requests.envelope_reply import EnvelopeReply
from lookup.requests.executor import LookupExecutor
from proto.lookup_answers import BrokerAnswer, ClientAnswer
from proto.lookup_kinds import LookupKind, failure_answer
from proto.lookup_requests import LookupRequest
from proto.pulsar_pb2 import BaseCommand, ServerError
from proxy.common.logs import get_logger
from proxy.config.types import Config
from proxy.runtime.fairness.byte_budget import REQUEST_OVERHEAD_BYTES, ByteBudget
from proxy.runtime.fairness.fair_capacity import FairCapacity, Reservation
from proxy.runtime.fairness.owners import owner_of
from proxy.runtime.loop.tasks import InFlightCounter, run_every, seconds
from proxy.runtime.loop.tick import current_tick

OVERDUE_CHECK_S = 0.25

NO_ROOM_TEXT = "The proxy has too many large answers under way"

LookupKey = tuple[LookupExecutor, LookupPrincipal, bytes, bytes]
"""What is asked of whom, on whose behalf: with a LookupRequest's prefix and body."""


def _budgeted_bytes(prefix: bytes, body: bytes) -> int:
    """Return how many bytes of the budget a request under way takes."""
    return len(prefix) + len(body) + REQUEST_OVERHEAD_BYTES


class RequestBatch:
    """Requests of one Envelope: the client, when they were received (Trio's time), and where the answers go."""

    __slots__ = ("client_address", "owner", "principal", "received_at", "reply")

    def __init__(self, asker: LookupPrincipal, client: str, answers: EnvelopeReply) -> None:
        self.principal = asker
        self.client_address = client
        self.owner = ""
        """As whose its requests count, once the desk has said so."""
        self.reply = answers
        self.received_at = trio.current_time()


Waiter = tuple[RequestBatch, int, bytes]
"""Whose request it is, its number among those sent in one go, and the request id that the client wants to see."""


class PendingLookup:
    """A lookup under way, and the waiters for its answer: nearly always one.

    There may be very many, and the garbage collector visits each waiting object again and again: so a lookup is one
    object with slots.
    """

    __slots__ = (
        "batch",
        "connection",
        "deadline",
        "index",
        "is_shared",
        "key",
        "kind",
        "other_waiters",
        "proxy_id",
        "request_id",
        "scheduler",
    )

    def __init__(
        self, desk: "LookupScheduler", kind: LookupKind, key: LookupKey, waiter: Waiter, timeout_s: float
    ) -> None:
        self.scheduler = desk
        self.kind = kind
        self.key = key
        self.batch, self.index, self.request_id = waiter
        self.other_waiters: list[Waiter] | None = None
        self.deadline = self.batch.received_at + timeout_s
        self.is_shared = False
        """Whether others find it that ask the same."""
        self.connection: BrokerConnection | None = None
        """While it is on the short way."""
        self.proxy_id = b""

    @property
    def executor(self) -> LookupExecutor:
        """The executor that took the lookup: after a reload, the one of the configuration before."""
        return self.key[0]

    @property
    def request(self) -> LookupRequest:
        """What is asked."""
        return LookupRequest(self.kind, *self.key[2:])

    def on_broker_answer(self, answer: BrokerAnswer | None) -> None:
        """Pass a broker's answer on the fast path to the scheduler."""
        self.scheduler.on_broker_answer(self, answer)


class LookupScheduler:
    """Admission, deduplication and completion of lookups. ``submit_request`` never waits."""

    def __init__(self, config: Config, executor: LookupExecutor, metrics: LookupMetrics, nursery: trio.Nursery) -> None:
        self.under_way = InFlightCounter()
        self._metrics = metrics
        self._tick = current_tick()
        self._nursery = nursery
        self._pending: dict[LookupKey, PendingLookup] = {}
        self._count_by_principal: dict[str, int] = {}
        self._large_answer_room = FairCapacity(0, 0)
        self._budget = ByteBudget(0)
        self.apply_config(config, executor)

    def apply_config(self, config: Config, executor: LookupExecutor) -> None:
        """Use these settings from now on; lookups under way finish under those before."""
        self._lookups_max = config.limits.max_concurrent_lookups
        self._first_come_max = self._lookups_max // 2
        self._timeout_s = seconds(config.limits.lookup_timeout_ms)
        self._anonymous_role = config.authentication.anonymous_role
        self._large_answer_room.resize(config.limits.max_topic_lists_bytes, config.limits.max_broker_frame_bytes)
        self._budget.resize(config.limits.max_lookup_bytes)
        self._executor = executor

    async def run(self) -> None:
        """Fail lookups whose time is over, until cancelled."""
        await run_every(OVERDUE_CHECK_S, self._fail_overdue_lookups)

    def submit_request(self, request: LookupRequest, request_id: bytes, index: int, batch: RequestBatch) -> None:
        """Submit the ``index``-th request of a batch.

        Its answer, which may be an error, goes to the batch's reply, now or later, under ``request_id`` (a varint).
        """
        kind, prefix, body = request
        asker = batch.principal
        principal = asker.name
        self._metrics.count_request(kind.name)
        if self.under_way.count >= self._first_come_max and not self._may_admit(principal):
            self._reject_request(kind, request_id, index, batch)
            return
        if not batch.owner:
            batch.owner = owner_of(principal, batch.client_address, self._anonymous_role)
        if not self._budget.reserve_bytes(batch.owner, _budgeted_bytes(prefix, body)):
            self._reject_request(kind, request_id, index, batch)
            return
        self.under_way.increment()
        self._count_by_principal[principal] = self._count_by_principal.get(principal, 0) + 1
        lookups = self._executor
        key = lookups, asker, prefix, body
        waiter = batch, index, request_id
        if kind.may_be_large:  # each is asked by itself: the answer may be too large to keep it for several
            self._nursery.start_soon(self._run_large_lookup, PendingLookup(self, kind, key, waiter, self._timeout_s))
            return
        known = self._pending.get(key)
        if known is not None:
            if known.other_waiters is None:
                known.other_waiters = []
            known.other_waiters.append(waiter)
            return
        question = PendingLookup(self, kind, key, waiter, self._timeout_s)
        question.is_shared = True
        self._pending[key] = question
        connection = question.connection = lookups.send_on_open_connection(request, asker, question, batch.received_at)
        if connection is None:
            self._nursery.start_soon(self._run_slow_path, question)

    def _reject_request(self, kind: LookupKind, request_id: bytes, index: int, batch: RequestBatch) -> None:
        self._metrics.count_rejected_request(kind.name)
        text = "The proxy has too many lookups under way"
        refusal = ClientAnswer(failure_answer(kind, 0, ServerError.TooManyRequests, text))
        batch.reply.add_answer(index, refusal.frame_for(request_id))

    def _may_admit(self, principal: str) -> bool:
        """Return True if a principal may have one more lookup.

        Half of the capacity is first come, first served; of the rest no principal has more than an equal share, with
        one share kept for a newcomer.
        """
        # Without authentication there is nobody to share with.
        if not principal or self.under_way.count < self._first_come_max:
            return self.under_way.count < self._lookups_max
        mine = self._count_by_principal.get(principal, 0)
        others = len(self._count_by_principal) - (1 if mine else 0)
        newcomer = 1
        return self.under_way.count < self._lookups_max and mine < max(1, self._lookups_max // (1 + others + newcomer))

    # ---- the short way

    def on_broker_answer(self, lookup: PendingLookup, answer: BrokerAnswer | None) -> None:
        """Handle a broker's answer on the fast path, or None where the connection was lost."""
        connection = lookup.connection
        if connection is None:
            return  # it has ended already
        lookups, asker, _, _ = lookup.key
        lookups.record_fast_path_outcome(connection, answer)
        ready = None
        if answer is not None:
            ready = answer.client_answer or lookups.prepare_answer(
                answer, lookup.kind, asker, lookup.batch.client_address
            )
        lookup.connection = None  # not before: where an answer meets a defect, time ends the question
        if ready is not None:
            self._complete_lookup(lookup, ready, connection.last_received_at)
        elif answer is None:
            trial = LossHistory()
            trial.record_loss(connection.broker, connection.loss)
            self._nursery.start_soon(self._run_slow_path, lookup, None, trial)
        else:
            self._nursery.start_soon(self._run_slow_path, lookup, answer.command)

    # ---- the long way

    async def _run_slow_path(
        self, lookup: PendingLookup, answer: BaseCommand | None = None, losses: LossHistory | None = None
    ) -> int:
        """Execute a lookup in this task; return how many bytes its answer has."""
        lookups, asker, _, _ = lookup.key
        kind, client, deadline = lookup.kind, lookup.batch.client_address, lookup.deadline
        try:
            command = lookup.request.to_command()
            answer = await lookups.execute_lookup(
                command, kind, asker, client, answer, deadline=deadline, losses=losses
            )
        except Exception as error:  # noqa: BLE001 -- a defect that one request meets must not end all the others
            get_logger().error("a lookup met a defect", client=client, exc_info=error)
            answer = failure_answer(kind, 0, ServerError.UnknownError, "The proxy met a defect")
        with self._tick:
            return self._complete_lookup(lookup, ClientAnswer(answer), trio.current_time())

    async def _run_large_lookup(self, lookup: PendingLookup) -> None:
        """Execute a lookup whose answer may be large: it waits for capacity, and holds it until the answer has left."""
        sender, timeout_s = lookup.batch, self._timeout_s
        loan: Reservation | None = None
        with trio.move_on_at(lookup.deadline):
            loan = await self._large_answer_room.reserve(sender.owner)
        if loan is None:
            self._fail_without_room(lookup)
            return
        try:
            loan.shrink_to(await self._run_slow_path(lookup))
            await sender.reply.wait_until_sent(timeout_s)
        finally:
            loan.release()

    def _fail_without_room(self, lookup: PendingLookup) -> None:
        sender, kind = lookup.batch, lookup.kind
        get_logger().warning(
            "a lookup waited in vain for room for its answer",
            client=sender.client_address,
            principal=sender.principal.name,
            request=kind.name,
            limit="limits.max_topic_lists_bytes",
        )
        with self._tick:
            answer = ClientAnswer(failure_answer(kind, 0, ServerError.TooManyRequests, NO_ROOM_TEXT))
            self._complete_lookup(lookup, answer, trio.current_time())

    # ---- the end

    async def _fail_overdue_lookups(self) -> None:
        now = trio.current_time()
        overdue = []
        for question in self._pending.values():
            if question.deadline > now:
                if question.executor is self._executor:  # the oldest come first, but a reload may have cut their time
                    break
            elif question.connection is not None:  # on the long way it keeps its time itself
                overdue.append((question, question.connection))
        with self._tick:
            for question, connection in overdue:
                question.connection = None
                question.executor.abandon_request(connection, question)
                self._fail_with_timeout(question)

    def _fail_with_timeout(self, lookup: PendingLookup) -> None:
        lookups, asker, _, _ = lookup.key
        answer = lookups.timeout_answer(lookup.request.to_command(), lookup.kind, asker, lookup.batch.client_address)
        with self._tick:
            self._complete_lookup(lookup, ClientAnswer(answer), trio.current_time())

    def _complete_lookup(self, lookup: PendingLookup, answer: ClientAnswer, now: float) -> int:
        """Give the answer to all waiters; return how many bytes it has."""
        if lookup.is_shared:
            del self._pending[lookup.key]
        sender, kind, others = lookup.batch, lookup.kind.name, lookup.other_waiters
        frame = answer.frame_for(lookup.request_id)
        sender.reply.add_answer(lookup.index, frame)
        self._metrics.observe_answer(kind, answer.error, now - sender.received_at)
        _, _, prefix, body = lookup.key
        size = _budgeted_bytes(prefix, body)
        self._budget.release_bytes(sender.owner, size)
        count = 1
        if others is not None:
            count += len(others)
            for other, index, request_id in others:
                self._budget.release_bytes(other.owner, size)
                other.reply.add_answer(index, answer.frame_for(request_id))
                self._metrics.observe_answer(kind, answer.error, now - other.received_at)
        self.under_way.decrement(count)
        principal = sender.principal.name
        left = self._count_by_principal[principal] - count
        if left:
            self._count_by_principal[principal] = left
        else:
            del self._count_by_principal[principal]
        return len(frame)
