"""Whether brokers take the proxy's own credentials: found out by logins of the lookup worker's own, at a calm rate.

Readiness depends on it, so no client may have a say: a client's handshake that a broker refuses (for its principal, or
its forwarded credentials) proves nothing, and only brings the next login forward. One that a broker takes, with no
credentials but the proxy's, shows that these are taken, and saves a login.

Nothing waits for a login, since a broker may answer a PING and hang at CONNECT.
"""

import math
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace

import trio

from lookup.brokers.discovery import ENDPOINTS_MAX, Endpoint, Verdict, Where
from lookup.brokers.login import Login
from proto.addresses import HostPort
from proxy.common.logs import get_logger
from proxy.runtime.loop.tasks import run_every

LOGINS_MAX = 32
"""Logins at a time."""

LOOK_S = 0.25
LOGINS_PER_LOOK = 8
"""Logins begun at a time, so 32 a second, however many brokers there are or DNS names."""

INTERVAL_MIN_S = 1.0
AGAIN_S = 15.0
"""After a login that was refused, or came to nothing."""

DOUBTED_AGAIN_S = 5.0
"""Shortest time between two logins at a broker, whatever clients do; and until a first refusal is confirmed."""

REFUSALS_MIN = 3
"""Refusals, with no acceptance in between, after which a broker that took the credentials counts as one that refuses
them: behind one address there may be several brokers, of which one is broken.
"""

FAILURES_MAX = 5
"""Logins in succession without a result, after which the last one's counts no more."""

FIRST_LOGIN_S = 2.0
"""For how long a broker does not yet count as one that makes the worker ready, as its first login is under way."""

KEPT_S = 600.0
"""For how long it is known of a broker that is no longer found: DNS may answer with other addresses each time."""

KEPT_MAX = 2 * ENDPOINTS_MAX

LogIn = Callable[[Endpoint], Awaitable[Login]]


@dataclass(slots=True)
class LoginState:
    """What is known of a broker from logins. Times are Trio's."""

    seen_at: float
    """Among those found."""
    verdict: Verdict = Verdict.UNKNOWN
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

    @property
    def detail(self) -> str:
        """What is wrong, in words for an operator; empty where nothing is."""
        told = []
        if self.verdict is Verdict.REFUSED:
            told.append(f"it REFUSES the proxy's own credentials: {self.refusal}")
        elif self.refusal:
            told.append(f"it refused a login with the proxy's own credentials: {self.refusal}")
        if self.failure:
            told.append(f"the proxy could not log in: {self.failure}")
        return "; ".join(told)


class OwnLogins:
    """Logs in at the brokers whose turn it is. ``interval_s``: after a login that was accepted. ``before``: of the
    configuration before this one, whose verdicts count until there are others. They are copied, since lookups under
    way may still be told of there, with credentials that are no longer these.
    """

    def __init__(
        self,
        log_in: LogIn,
        endpoints: Callable[[], Iterable[Endpoint]],
        interval_s: float,
        on_change: Callable[[], None],
        before: "OwnLogins | None" = None,
    ) -> None:
        self._log_in = log_in
        self._endpoints = endpoints
        self._interval_s = max(interval_s, INTERVAL_MIN_S)
        self._on_change = on_change
        self._under_way: set[Where] = set()
        self._over = False
        self._states: dict[Where, LoginState] = {}
        if before is not None:
            for where, state in before._states.items():  # noqa: SLF001 -- of another one of these
                self._states[where] = replace(state, due_at=-math.inf)

    async def run(self) -> None:
        """Log in where it is due, until cancelled. What others say of brokers later counts no more."""
        try:
            async with trio.open_nursery() as nursery:

                async def look() -> None:
                    await trio.lowlevel.checkpoint()
                    for endpoint in self._due():
                        self._under_way.add(_where(endpoint))
                        nursery.start_soon(self._log_in_at, endpoint)

                await run_every(LOOK_S, look)
        finally:
            self._over = True

    def _due(self) -> list[Endpoint]:
        """Where to log in now: where it has been due for longest."""
        now = trio.current_time()
        due = []
        for endpoint in self._endpoints():
            state = self.state(endpoint)
            state.seen_at = now
            if endpoint.standing.reachable and state.due_at <= now and _where(endpoint) not in self._under_way:
                due.append((state.due_at, endpoint))
        self._forget(now)
        due.sort(key=lambda entry: entry[0])
        return [endpoint for _, endpoint in due[: min(LOGINS_PER_LOOK, LOGINS_MAX - len(self._under_way))]]

    def _forget(self, now: float) -> None:
        """Drop what is known of brokers that are no longer found: after a time, or of those gone for longest."""
        gone = [where for where, state in self._states.items() if state.seen_at <= now - KEPT_S]
        if len(self._states) - len(gone) > KEPT_MAX:
            gone = sorted(self._states, key=lambda where: self._states[where].seen_at)[:-KEPT_MAX]
        for where in gone:
            del self._states[where]

    async def _log_in_at(self, endpoint: Endpoint) -> None:
        try:
            login = await self._log_in(endpoint)
        finally:
            self._under_way.discard(_where(endpoint))
        state = self.state(endpoint)
        state.logged_in_at = trio.current_time()
        state.due_at = state.logged_in_at + AGAIN_S
        if login.verdict is Verdict.ACCEPTED:
            self.accepted(endpoint)
        elif login.verdict is Verdict.REFUSED:
            self._refused(endpoint, state, login)
        else:
            self._came_to_nothing(endpoint, state, login)

    def _refused(self, endpoint: Endpoint, state: LoginState, login: Login) -> None:
        state.refusals += 1
        state.refusal = login.detail
        state.failures, state.failure = 0, ""
        if state.verdict is Verdict.REFUSED:
            return
        if state.verdict is Verdict.ACCEPTED and state.refusals < REFUSALS_MIN:
            state.due_at = state.logged_in_at + DOUBTED_AGAIN_S
            return
        state.verdict = Verdict.REFUSED
        get_logger().error(
            "a broker refuses the proxy's own credentials, so it serves no client; "
            "`pulsar-trio-proxy check --connect` says more",
            broker=_shown(endpoint),
            addresses=",".join(endpoint.addresses),
            reason=login.detail,
        )
        self._on_change()

    def _came_to_nothing(self, endpoint: Endpoint, state: LoginState, login: Login) -> None:
        state.failures += 1
        state.failure = login.detail
        if state.failures < FAILURES_MAX or state.verdict is Verdict.UNKNOWN:
            return
        get_logger().warning(
            "it is no longer known whether a broker accepts the proxy's own credentials",
            broker=_shown(endpoint),
            addresses=",".join(endpoint.addresses),
            before=state.verdict.value,
            reason=login.detail,
        )
        state.verdict, state.refusals, state.refusal = Verdict.UNKNOWN, 0, ""
        self._on_change()

    # ---- what is known

    def state(self, endpoint: Endpoint) -> LoginState:
        """What is known of a broker; of one that was not found for long, nothing."""
        where = _where(endpoint)
        state = self._states.get(where)
        if state is None:
            state = self._states[where] = LoginState(seen_at=trio.current_time())
        return state

    def verdict(self, endpoint: Endpoint) -> Verdict:
        """Whether a broker takes the proxy's own credentials, as far as is known."""
        return self.state(endpoint).verdict

    def pending(self, endpoint: Endpoint) -> bool:
        """Whether the first login at a reachable broker is still to be waited for, which is so for a bounded time."""
        state = self.state(endpoint)
        is_first = state.verdict is Verdict.UNKNOWN and state.logged_in_at == -math.inf
        return is_first and trio.current_time() < endpoint.standing.reachable_since + FIRST_LOGIN_S

    # ---- what clients' handshakes bring about

    def accepted(self, broker: HostPort) -> None:
        """A broker took the proxy in, with the proxy's own credentials alone."""
        if not isinstance(broker, Endpoint) or self._over:  # not an Endpoint: another broker named it
            return
        state = self.state(broker)
        state.due_at = trio.current_time() + self._interval_s
        state.refusals, state.refusal = 0, ""
        state.failures, state.failure = 0, ""
        before, state.verdict = state.verdict, Verdict.ACCEPTED
        if before is Verdict.REFUSED:
            get_logger().info("a broker accepts the proxy's own credentials again", broker=_shown(broker))
        if before is not Verdict.ACCEPTED:
            self._on_change()

    def doubted(self, broker: HostPort) -> None:
        """A broker refused a connection that a client is the reason for: see soon whether it is the proxy's fault."""
        if not isinstance(broker, Endpoint) or self._over:
            return
        state = self.state(broker)
        if not state.failures:  # else the next is due soon; and clients might bring about that none has a result
            soon = max(trio.current_time(), state.logged_in_at + DOUBTED_AGAIN_S)
            state.due_at = min(state.due_at, soon)


def _where(endpoint: Endpoint) -> Where:
    return HostPort(endpoint.host, endpoint.port), endpoint.addresses


def _shown(endpoint: Endpoint) -> str:
    return str(HostPort(endpoint.host, endpoint.port))
