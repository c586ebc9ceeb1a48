"""Checks whether brokers accept the proxy's own credentials, by logins of the lookup worker's own, at a limited rate.

Readiness depends on the result, so no client may influence it: a client's handshake that a broker refuses (for its
principal, or its forwarded credentials) proves nothing, and only brings the next login forward. One that a broker
accepts, with no credentials but the proxy's, shows that these are accepted, and saves a login.

The logins also show whether a broker checks clients' own credentials (lookup.brokers.login), on which the forwarders
rely: no client's connection has a say in that at all. At a broker that checks them it takes an authentication that
fails, so that is repeated only after ORIGINAL_DATA_INTERVAL_S, or when the broker was down in between.

No request waits for a login, since a broker may answer a PING and hang at CONNECT.
"""

import math
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace

import trio

from lookup.brokers.discovery import ENDPOINTS_MAX, CredentialVerdict, Endpoint, EndpointKey
from lookup.brokers.login import LoginResult
from lookup.brokers.original_data import CHECKED, RETRY_INTERVAL_S, UNKNOWN, OriginalDataStatus
from proto.addresses import HostPort
from proto.rpc_pb2 import OriginalData
from proxy.common.logs import get_logger
from proxy.runtime.loop.tasks import run_every

LOGINS_MAX = 32
"""Logins at a time."""

CHECK_INTERVAL_S = 0.25
LOGINS_PER_CHECK = 8
"""Logins begun at a time, so 32 a second, however many brokers there are or DNS names."""

INTERVAL_MIN_S = 1.0
RECHECK_INTERVAL_S = 5.0
"""Shortest time between two logins at a broker, whatever clients do; and until a first refusal is confirmed."""

REFUSALS_MIN = 3
"""Refusals, with no acceptance in between, after which a broker that took the credentials counts as one that refuses
them: behind one address there may be several brokers, of which one is broken.
"""

FAILURES_MAX = 5
"""Logins in succession without a result, after which the last one's counts no more."""

FIRST_LOGIN_TIMEOUT_S = 4.0
"""For how long a broker does not yet count as one that makes the worker ready, as its first login is under way."""

REMEMBERED_S = 600.0
"""For how long it is known of a broker that is no longer found: DNS may answer with other addresses each time."""

REMEMBERED_MAX = 2 * ENDPOINTS_MAX

LogIn = Callable[[Endpoint, bool], Awaitable[LoginResult]]
"""Logs in; True: also finds out whether the broker checks clients' own credentials."""


@dataclass(slots=True)
class CredentialStatus:
    """Result of the logins at one broker so far. Times are Trio's."""

    seen_at: float
    """Among those found."""
    verdict: CredentialVerdict = CredentialVerdict.UNKNOWN
    refusals: int = 0
    """Since the last acceptance."""
    refusal: str = ""
    """The broker's words at the last of these."""
    failures: int = 0
    """Logins without a result, since the last with one."""
    failure: str = ""
    """Why the last of these came to nothing."""
    due_at: float = -math.inf
    logged_in_at: float = -math.inf
    original_data: OriginalDataStatus = field(default_factory=OriginalDataStatus)

    @property
    def detail(self) -> str:
        """What is wrong, or worth knowing, in words for an operator."""
        told = []
        if self.verdict is CredentialVerdict.REFUSED:
            told.append(f"it REFUSES the proxy's own credentials: {self.refusal}")
        elif self.refusal:
            told.append(f"it refused a login with the proxy's own credentials: {self.refusal}")
        if self.failure:
            told.append(f"the proxy could not log in: {self.failure}")
        if self.original_data.verdict == CHECKED:
            told.append("it checks clients' own credentials (authenticateOriginalAuthData)")
        return "; ".join(told)


class CredentialChecks:
    """Periodic logins at the brokers that are due.

    ``interval_s``: after a login that was accepted. ``before``: the checks of the configuration before, whose verdicts
    count until there are others. They are copied, since lookups under way may still report to the old checks, with
    credentials that are no longer these.
    """

    def __init__(
        self,
        log_in: LogIn,
        endpoints: Callable[[], Iterable[Endpoint]],
        interval_s: float,
        on_change: Callable[[], None],
        before: "CredentialChecks | None" = None,
    ) -> None:
        self._log_in = log_in
        self._endpoints = endpoints
        self._interval_s = max(interval_s, INTERVAL_MIN_S)
        self._on_change = on_change
        self._under_way: set[EndpointKey] = set()
        self._is_stopped = False
        self._statuses: dict[EndpointKey, CredentialStatus] = {}
        if before is not None:
            for where, state in before._statuses.items():  # noqa: SLF001 -- of another one of these
                copied = replace(state.original_data)
                self._statuses[where] = replace(state, due_at=-math.inf, original_data=copied)

    async def run(self) -> None:
        """Log in where it is due, until cancelled; later reports about brokers are ignored."""
        try:
            async with trio.open_nursery() as nursery:

                async def look() -> None:
                    await trio.lowlevel.checkpoint()
                    for endpoint in self._due_endpoints():
                        self._under_way.add(endpoint.key)
                        nursery.start_soon(self._check_credentials, endpoint)

                await run_every(CHECK_INTERVAL_S, look)
        finally:
            self._is_stopped = True

    def _due_endpoints(self) -> list[Endpoint]:
        """Return the brokers to log in at now: those that have been due for longest."""
        now = trio.current_time()
        due = []
        for endpoint in self._endpoints():
            state = self.status_of(endpoint)
            state.seen_at = now
            if endpoint.health.reachable is False:
                before = self.original_data_of(endpoint)
                state.original_data.down_at = now
                if before != UNKNOWN:
                    self._on_change()
            due_at = min(state.due_at, _original_data_due_at(state))
            if endpoint.health.reachable and due_at <= now and endpoint.key not in self._under_way:
                due.append((due_at, endpoint))
        self._forget_lost_brokers(now)
        due.sort(key=lambda entry: entry[0])
        return [endpoint for _, endpoint in due[: min(LOGINS_PER_CHECK, LOGINS_MAX - len(self._under_way))]]

    def _forget_lost_brokers(self, now: float) -> None:
        """Drop what is known of brokers that are no longer found: after a time, or of those gone for longest."""
        gone = [where for where, state in self._statuses.items() if state.seen_at <= now - REMEMBERED_S]
        if len(self._statuses) - len(gone) > REMEMBERED_MAX:
            gone = sorted(self._statuses, key=lambda where: self._statuses[where].seen_at)[:-REMEMBERED_MAX]
        for where in gone:
            del self._statuses[where]

    async def _check_credentials(self, endpoint: Endpoint) -> None:
        state = self.status_of(endpoint)
        finds_original_data = (
            state.original_data.verdict != CHECKED or _original_data_due_at(state) <= trio.current_time()
        )
        try:
            login = await self._log_in(endpoint, finds_original_data)
        finally:
            self._under_way.discard(endpoint.key)
        state = self.status_of(endpoint)
        state.logged_in_at = trio.current_time()
        state.due_at = state.logged_in_at + RETRY_INTERVAL_S
        if login.verdict is CredentialVerdict.ACCEPTED:
            if finds_original_data:
                self._record_original_data(endpoint, state.original_data, login.original_data)
            self.record_acceptance(endpoint)
        elif login.verdict is CredentialVerdict.REFUSED:
            self._record_refusal(endpoint, state, login)
        else:
            self._record_failure(endpoint, state, login)

    def _record_original_data(self, endpoint: Endpoint, known: OriginalDataStatus, found: OriginalData) -> None:
        before = self.original_data_of(endpoint)
        known.record(found, self._interval_s)
        now = known.verdict
        if now == before:
            return
        self._on_change()
        if now not in {UNKNOWN, known.logged}:
            if now == CHECKED:
                event = "a broker checks clients' own credentials (authenticateOriginalAuthData)"
                get_logger().info(event, broker=str(endpoint))
            elif known.logged == CHECKED:
                get_logger().info("a broker no longer checks clients' own credentials", broker=str(endpoint))
            known.logged = now

    def _record_refusal(self, endpoint: Endpoint, state: CredentialStatus, login: LoginResult) -> None:
        state.refusals += 1
        state.refusal = login.detail
        state.failures, state.failure = 0, ""
        if state.verdict is CredentialVerdict.REFUSED:
            return
        if state.verdict is CredentialVerdict.ACCEPTED and state.refusals < REFUSALS_MIN:
            state.due_at = state.logged_in_at + RECHECK_INTERVAL_S
            return
        state.verdict = CredentialVerdict.REFUSED
        get_logger().error(
            "a broker refuses the proxy's own credentials, so it serves no client; "
            "`pulsar-trio-proxy check --connect` says more",
            broker=str(endpoint),
            addresses=",".join(endpoint.addresses),
            reason=login.detail,
        )
        self._on_change()

    def _record_failure(self, endpoint: Endpoint, state: CredentialStatus, login: LoginResult) -> None:
        state.failures += 1
        state.failure = login.detail
        if state.failures < FAILURES_MAX or state.verdict is CredentialVerdict.UNKNOWN:
            return
        get_logger().warning(
            "it is no longer known whether a broker accepts the proxy's own credentials",
            broker=str(endpoint),
            addresses=",".join(endpoint.addresses),
            before=state.verdict.value,
            reason=login.detail,
        )
        state.verdict, state.refusals, state.refusal = CredentialVerdict.UNKNOWN, 0, ""
        state.original_data = OriginalDataStatus(logged=state.original_data.logged)
        self._on_change()

    # ---- what is known

    def status_of(self, endpoint: Endpoint) -> CredentialStatus:
        """Return the status of a broker; a new one where it was not found for long."""
        where = endpoint.key
        state = self._statuses.get(where)
        if state is None:
            state = self._statuses[where] = CredentialStatus(seen_at=trio.current_time())
        return state

    def verdict_of(self, endpoint: Endpoint) -> CredentialVerdict:
        """Return whether a broker accepts the proxy's own credentials, as far as is known."""
        return self.status_of(endpoint).verdict

    def original_data_of(self, endpoint: Endpoint) -> OriginalData:
        """Return whether a broker checks clients' own credentials; unknown where it was down since it was found."""
        known = self.status_of(endpoint).original_data
        return known.verdict if known.is_current else UNKNOWN

    def graded_original_data_of(self, endpoint: Endpoint) -> OriginalData:
        """Return the same, or that the broker only seems to check them."""
        known = self.status_of(endpoint).original_data
        return known.graded if known.is_current else UNKNOWN

    def is_first_login_pending(self, endpoint: Endpoint) -> bool:
        """Return True while the first login at a reachable broker is to be waited for, which is a bounded time."""
        state = self.status_of(endpoint)
        is_first = state.verdict is CredentialVerdict.UNKNOWN and state.logged_in_at == -math.inf
        return is_first and trio.current_time() < endpoint.health.reachable_since + FIRST_LOGIN_TIMEOUT_S

    # ---- what clients' handshakes bring about

    def record_acceptance(self, broker: HostPort) -> None:
        """Record that a broker accepted a connection with the proxy's own credentials alone."""
        if not isinstance(broker, Endpoint) or self._is_stopped:  # not an Endpoint: another broker named it
            return
        state = self.status_of(broker)
        state.due_at = trio.current_time() + self._interval_s
        state.refusals, state.refusal = 0, ""
        state.failures, state.failure = 0, ""
        before, state.verdict = state.verdict, CredentialVerdict.ACCEPTED
        if before is CredentialVerdict.REFUSED:
            get_logger().info("a broker accepts the proxy's own credentials again", broker=str(broker))
        if before is not CredentialVerdict.ACCEPTED:
            self._on_change()

    def request_recheck(self, broker: HostPort) -> None:
        """Log in soon at a broker that refused a client's connection: the proxy's credentials may be the reason."""
        if not isinstance(broker, Endpoint) or self._is_stopped:
            return
        state = self.status_of(broker)
        if not state.failures:  # else the next is due soon; and clients might bring about that none has a result
            soon = max(trio.current_time(), state.logged_in_at + RECHECK_INTERVAL_S)
            state.due_at = min(state.due_at, soon)


def _original_data_due_at(state: CredentialStatus) -> float:
    """Return when to find out whether a broker checks clients' own credentials; never before it takes the proxy's.

    A broker that has come back since may have another configuration.
    """
    if state.verdict is not CredentialVerdict.ACCEPTED or state.failures or state.refusals:
        return math.inf  # the next login shows more
    known = state.original_data
    return known.due_at if known.is_current else state.logged_in_at + RECHECK_INTERVAL_S
