"""Scheduler of lookups: bounded, fair between principals, and with one request to the broker for equal lookups.

Most answers need no task of their own (the fast path): the request goes out over a connection that is open already, and
what comes back is the answer. Everything else (a connection to be opened, a redirect, a broker that fails) takes the
slow path, a task.
"""

from typing import Final

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
from proto.tenants import tenant_of
from proxy.common.logs import get_logger
from proxy.config.types import Config
from proxy.runtime.fairness.byte_budget import REQUEST_OVERHEAD_BYTES, ByteBudget
from proxy.runtime.fairness.fair_capacity import FairCapacity, Reservation
from proxy.runtime.fairness.owners import owner_of
from proxy.runtime.fairness.quotas import OnExceeded, RateQuotas
from proxy.runtime.loop.tasks import InFlightCounter, ignore, run_every, seconds
from proxy.runtime.loop.tick import current_tick

OVERDUE_CHECK_S = 0.25

TOO_MANY_TEXT = "The proxy has too many lookups under way"
NO_ROOM_TEXT = "The proxy has too many large answers under way"

_RATE: Final = "lookups_per_second"

LookupKey = tuple[LookupExecutor, LookupPrincipal, bytes, bytes]
"""What makes two lookups equal: executor, principal, and a LookupRequest's prefix and body."""


def _budgeted_bytes(prefix: bytes, body: bytes) -> int:
    """Return how many bytes of the budget a request under way takes."""
    return len(prefix) + len(body) + REQUEST_OVERHEAD_BYTES


class RequestBatch:
    """Requests of one Envelope: the client, when they were received (Trio's time), and where the answers go."""

    __slots__ = ("client_address", "owner", "principal", "received_at", "reply")

    def __init__(self, principal: LookupPrincipal, client_address: str, reply: EnvelopeReply) -> None:
        self.principal = principal
        self.client_address = client_address
        self.owner = ""
        """Owner of what its requests take; empty until the scheduler has set it."""
        self.reply = reply
        self.received_at = trio.current_time()


Waiter = tuple[RequestBatch, int, bytes]
"""A request: its batch, its index there, and the request id of the client (a varint)."""


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
        self, scheduler: "LookupScheduler", kind: LookupKind, key: LookupKey, waiter: Waiter, timeout_s: float
    ) -> None:
        self.scheduler = scheduler
        self.kind = kind
        self.key = key
        self.batch, self.index, self.request_id = waiter
        self.other_waiters: list[Waiter] | None = None
        self.deadline = self.batch.received_at + timeout_s
        self.is_shared = False
        """Equal lookups join it."""
        self.connection: BrokerConnection | None = None
        """The connection while it is on the fast path, else None."""
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

    def __init__(
        self,
        config: Config,
        executor: LookupExecutor,
        metrics: LookupMetrics,
        nursery: trio.Nursery,
        on_quota_exceeded: OnExceeded = ignore,
    ) -> None:
        self._on_quota_exceeded = on_quota_exceeded
        self._quotas = RateQuotas((), _RATE, 1, on_quota_exceeded)
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
        if config.quota != self._quotas.rules.quotas:  # a reload that changes none fills no bucket
            self._quotas = RateQuotas(config.quota, _RATE, config.cluster.lookup_workers, self._on_quota_exceeded)

    async def run(self) -> None:
        """Fail lookups whose time is over, until cancelled."""
        await run_every(OVERDUE_CHECK_S, self._fail_overdue_lookups)

    def submit_request(self, request: LookupRequest, request_id: bytes, index: int, batch: RequestBatch) -> None:
        """Submit the ``index``-th request of a batch.

        Its answer, which may be an error, goes to the batch's reply, now or later, under ``request_id`` (a varint).
        """
        kind, prefix, body = request
        principal = batch.principal
        principal_name = principal.name
        self._metrics.count_request(kind.name)
        if self.under_way.count >= self._first_come_max and not self._may_admit(principal_name):
            self._reject_request(kind, request_id, index, batch)
            return
        if not batch.owner:
            batch.owner = owner_of(principal_name, batch.client_address, self._anonymous_role)
        if not self._quotas.rules.are_empty:
            limit = self._take_quota(request, batch)
            if limit is not None:
                self._reject_request(kind, request_id, index, batch, f"The proxy has reached its limit ({limit})")
                return
        if not self._budget.reserve_bytes(batch.owner, _budgeted_bytes(prefix, body)):
            self._reject_request(kind, request_id, index, batch)
            return
        self.under_way.increment()
        self._count_by_principal[principal_name] = self._count_by_principal.get(principal_name, 0) + 1
        executor = self._executor
        key = executor, principal, prefix, body
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
        lookup = PendingLookup(self, kind, key, waiter, self._timeout_s)
        lookup.is_shared = True
        self._pending[key] = lookup
        connection = lookup.connection = executor.send_on_open_connection(request, principal, lookup, batch.received_at)
        if connection is None:
            self._nursery.start_soon(self._run_slow_path, lookup)

    def refuse_request(self, request: LookupRequest, request_id: bytes, index: int, batch: RequestBatch) -> None:
        """Answer a request of a batch with TooManyRequests: there is no memory for its principal's credentials."""
        self._metrics.count_request(request.kind.name)
        self._reject_request(request.kind, request_id, index, batch)

    def _take_quota(self, request: LookupRequest, batch: RequestBatch) -> str | None:
        """Count a request for its principal and its topic's tenant; return the key of the limit that refuses it."""
        rules = self._quotas.rules
        applied = rules.for_owner(batch.owner)
        if rules.know_tenants:
            applied += rules.for_tenant(tenant_of(request.subject))
        return self._quotas.take(applied, trio.current_time(), batch.owner)

    def _reject_request(
        self, kind: LookupKind, request_id: bytes, index: int, batch: RequestBatch, text: str = TOO_MANY_TEXT
    ) -> None:
        self._metrics.count_rejected_request(kind.name)
        refusal = ClientAnswer(failure_answer(kind, 0, ServerError.TooManyRequests, text))
        batch.reply.add_answer(index, refusal.frame_for(request_id))

    def _may_admit(self, principal_name: str) -> bool:
        """Return True if a principal may have one more lookup.

        Half of the capacity is first come, first served; of the rest no principal has more than an equal share, with
        one share kept for a newcomer.
        """
        # Without authentication there are no principals to share between.
        if not principal_name or self.under_way.count < self._first_come_max:
            return self.under_way.count < self._lookups_max
        mine = self._count_by_principal.get(principal_name, 0)
        others = len(self._count_by_principal) - (1 if mine else 0)
        newcomer = 1
        return self.under_way.count < self._lookups_max and mine < max(1, self._lookups_max // (1 + others + newcomer))

    # ---- the fast path

    def on_broker_answer(self, lookup: PendingLookup, answer: BrokerAnswer | None) -> None:
        """Handle a broker's answer on the fast path, or None where the connection was lost."""
        connection = lookup.connection
        if connection is None:
            return  # it has ended already
        executor, principal, _, _ = lookup.key
        executor.record_fast_path_outcome(connection, answer)
        ready = None
        if answer is not None:
            ready = answer.client_answer or executor.prepare_answer(
                answer, lookup.kind, principal, lookup.batch.client_address
            )
        lookup.connection = None  # not before: where an answer meets a defect, time ends the lookup
        if ready is not None:
            self._complete_lookup(lookup, ready, connection.last_received_at)
        elif answer is None:
            losses = LossHistory()
            losses.record_loss(connection.broker, connection.loss)
            self._nursery.start_soon(self._run_slow_path, lookup, None, losses)
        else:
            self._nursery.start_soon(self._run_slow_path, lookup, answer.command)

    # ---- the slow path

    async def _run_slow_path(
        self, lookup: PendingLookup, answer: BaseCommand | None = None, losses: LossHistory | None = None
    ) -> int:
        """Execute a lookup in this task; return how many bytes its answer has."""
        executor, principal, _, _ = lookup.key
        kind, client_address, deadline = lookup.kind, lookup.batch.client_address, lookup.deadline
        try:
            command = lookup.request.to_command()
            answer = await executor.execute_lookup(
                command, kind, principal, client_address, answer, deadline=deadline, losses=losses
            )
        except Exception as error:  # noqa: BLE001 -- a defect that one request meets must not end all the others
            get_logger().error("a lookup met a defect", client=client_address, exc_info=error)
            answer = failure_answer(kind, 0, ServerError.UnknownError, "The proxy met a defect")
        with self._tick:
            return self._complete_lookup(lookup, ClientAnswer(answer), trio.current_time())

    async def _run_large_lookup(self, lookup: PendingLookup) -> None:
        """Execute a lookup whose answer may be large: it waits for capacity, and holds it until the answer has left."""
        batch, timeout_s = lookup.batch, self._timeout_s
        reservation: Reservation | None = None
        with trio.move_on_at(lookup.deadline):
            reservation = await self._large_answer_room.reserve(batch.owner)
        if reservation is None:
            self._fail_without_room(lookup)
            return
        try:
            reservation.shrink_to(await self._run_slow_path(lookup))
            await batch.reply.wait_until_sent(timeout_s)
        finally:
            reservation.release()

    def _fail_without_room(self, lookup: PendingLookup) -> None:
        batch, kind = lookup.batch, lookup.kind
        get_logger().warning(
            "a lookup waited in vain for room for its answer",
            client=batch.client_address,
            principal=batch.principal.name,
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
        for lookup in self._pending.values():
            if lookup.deadline > now:
                if lookup.executor is self._executor:  # the oldest come first, but a reload may have cut their time
                    break
            elif lookup.connection is not None:  # on the slow path it keeps its time itself
                overdue.append((lookup, lookup.connection))
        with self._tick:
            for lookup, connection in overdue:
                lookup.connection = None
                lookup.executor.abandon_request(connection, lookup)
                self._fail_with_timeout(lookup)

    def _fail_with_timeout(self, lookup: PendingLookup) -> None:
        executor, principal, _, _ = lookup.key
        answer = executor.timeout_answer(
            lookup.request.to_command(), lookup.kind, principal, lookup.batch.client_address
        )
        with self._tick:
            self._complete_lookup(lookup, ClientAnswer(answer), trio.current_time())

    def _complete_lookup(self, lookup: PendingLookup, answer: ClientAnswer, now: float) -> int:
        """Give the answer to all waiters; return how many bytes it has."""
        if lookup.is_shared:
            del self._pending[lookup.key]
        batch, kind, other_waiters = lookup.batch, lookup.kind.name, lookup.other_waiters
        frame = answer.frame_for(lookup.request_id)
        batch.reply.add_answer(lookup.index, frame)
        self._metrics.observe_answer(kind, answer.error, now - batch.received_at)
        _, _, prefix, body = lookup.key
        size = _budgeted_bytes(prefix, body)
        self._budget.release_bytes(batch.owner, size)
        count = 1
        if other_waiters is not None:
            count += len(other_waiters)
            for other, index, request_id in other_waiters:
                self._budget.release_bytes(other.owner, size)
                other.reply.add_answer(index, answer.frame_for(request_id))
                self._metrics.observe_answer(kind, answer.error, now - other.received_at)
        self.under_way.decrement(count)
        principal_name = batch.principal.name
        left = self._count_by_principal[principal_name] - count
        if left:
            self._count_by_principal[principal_name] = left
        else:
            del self._count_by_principal[principal_name]
        return len(frame)
