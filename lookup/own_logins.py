"""Whether brokers take the proxy's own credentials: found out by logins of the lookup worker's own, at a calm rate.

Readiness depends on it, so no client may have a say: a client's handshake that a broker refuses (for its principal, or
its forwarded credentials) proves nothing, and only brings the next login forward. One that a broker takes, with no
credentials but the proxy's, shows that these are taken, and saves a login.
"""

from collections.abc import Awaitable, Callable, Iterable

import trio

from lookup.discovery import Endpoint, Verdict
from lookup.login import Login
from proto.addresses import HostPort
from proxy.runtime.logs import get_logger
from proxy.runtime.tasks import repeat

LOGINS_MAX = 8
"""Logins at a time."""

LOOK_S = 1.0
AGAIN_S = 15.0
"""After a login that was refused, or came to nothing."""

DOUBTED_AGAIN_S = 5.0
"""Shortest time between two logins at a broker, whatever clients do."""

LogIn = Callable[[Endpoint], Awaitable[Login]]


class OwnLogins:
    """Logs in at the brokers whose turn it is. ``interval_s``: after a login that was accepted."""

    def __init__(
        self,
        log_in: LogIn,
        endpoints: Callable[[], Iterable[Endpoint]],
        interval_s: float,
        on_change: Callable[[], None],
    ) -> None:
        self._log_in = log_in
        self._endpoints = endpoints
        self._interval_s = max(interval_s, LOOK_S)
        self._on_change = on_change
        self._room = trio.CapacityLimiter(LOGINS_MAX)
        self._under_way: set[Endpoint] = set()
        for endpoint in endpoints():
            endpoint.standing.login_due_at = float("-inf")  # the credentials may be others than before a reload

    async def run(self) -> None:
        """Log in where it is due, until cancelled."""
        async with trio.open_nursery() as nursery:

            async def look() -> None:
                await trio.lowlevel.checkpoint()
                for endpoint in self._endpoints():
                    standing = endpoint.standing
                    if standing.reachable and standing.login_due_at <= trio.current_time():
                        nursery.start_soon(self.log_in, endpoint)

            await repeat(LOOK_S, look)

    async def log_in(self, endpoint: Endpoint) -> None:
        """Log in at a broker now, unless that is under way."""
        if endpoint in self._under_way:
            return
        self._under_way.add(endpoint)
        try:
            async with self._room:
                login = await self._log_in(endpoint)
        finally:
            self._under_way.discard(endpoint)
        standing = endpoint.standing
        standing.logged_in_at = trio.current_time()
        if login.verdict is Verdict.ACCEPTED:
            self.accepted(endpoint)
            return
        standing.login_due_at = standing.logged_in_at + AGAIN_S
        standing.login_detail = login.detail
        if login.verdict is Verdict.REFUSED and standing.credentials is not Verdict.REFUSED:
            standing.credentials = Verdict.REFUSED
            get_logger().error(
                "a broker refuses the proxy's own credentials, so it serves no client; "
                "`pulsar-trio-proxy check --connect` says more",
                broker=str(HostPort(endpoint.host, endpoint.port)),
                addresses=",".join(endpoint.addresses),
                reason=login.detail,
            )
            self._on_change()

    def accepted(self, broker: HostPort) -> None:
        """A broker took the proxy in, with the proxy's own credentials alone."""
        if not isinstance(broker, Endpoint):  # another broker named it
            return
        standing = broker.standing
        standing.login_due_at = trio.current_time() + self._interval_s
        standing.login_detail = ""
        before, standing.credentials = standing.credentials, Verdict.ACCEPTED
        if before is Verdict.REFUSED:
            where = str(HostPort(broker.host, broker.port))
            get_logger().info("a broker accepts the proxy's own credentials again", broker=where)
        if before is not Verdict.ACCEPTED:
            self._on_change()

    def doubted(self, broker: HostPort) -> None:
        """A broker refused a connection that a client is the reason for: see soon whether it is the proxy's fault."""
        if isinstance(broker, Endpoint):
            standing = broker.standing
            soon = max(trio.current_time(), standing.logged_in_at + DOUBTED_AGAIN_S)
            standing.login_due_at = min(standing.login_due_at, soon)
