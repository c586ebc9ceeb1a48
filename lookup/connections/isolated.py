"""Connections for suspect requests, to find the request upon which a broker closed a connection.

A request that no rule of proto.request_rules knows, and that a broker cannot bear, costs all requests on its connection
their answers. So when a connection is lost, each request that was under way on it is a suspect, and is not sent over a
shared connection again: one half of the suspects is sent over a connection of its own, and so is the other half. Where
one of these is lost too, its requests are halved again. A request that was alone on such a connection when that was
lost is to blame: it is answered with an error, and no loss on the way there counts against a broker. Where no request
is to blame in the end, the broker is (lookup.connections.losses).

That takes twice as many connections for each request to blame as a bisection has steps; and where a broker just went
away with thousands of requests under way, it takes two for each principal.
"""

from collections.abc import Awaitable, Callable

import trio

from lookup.connections.broker_connection import BrokerConnection, BrokerConnectionLost
from lookup.connections.losses import SuspectGroup
from lookup.targets.rules import LocateBroker, Target
from proto.addresses import HostPort
from proxy.runtime.fairness.fair_capacity import FairCapacity

UNUSED_TIMEOUT_S = 1.0
"""A connection that carries no request in this time was opened for nothing."""

OpenConnection = Callable[[HostPort, Target], Awaitable[BrokerConnection]]


class IsolatedConnections:
    """Connections to brokers for one suspect group each: bounded in number, and shared fairly between principals."""

    def __init__(self, nursery: trio.Nursery, connections_max: int) -> None:
        self._nursery = nursery
        self._room = FairCapacity(connections_max, 1)  # a connection is one unit of it
        self._attempts: dict[tuple[HostPort, SuspectGroup], _IsolatedAttempt] = {}

    def __len__(self) -> int:
        return len(self._attempts)

    async def get_connection(
        self,
        broker: HostPort,
        locate: LocateBroker,
        open_connection: OpenConnection,
        principal: str,
        suspect_group: SuspectGroup,
    ) -> BrokerConnection:
        """Return the connection to a broker for one suspect group, opened if need be.

        Raises what ``open_connection`` and ``locate`` raise.
        """
        key = broker, suspect_group
        while True:
            attempt = self._attempts.get(key)
            if attempt is None:
                attempt = self._attempts[key] = _IsolatedAttempt()
                self._nursery.start_soon(self._run_attempt, key, attempt, locate, open_connection, principal)
            attempt.waiting += 1
            try:
                await attempt.done.wait()
            finally:
                attempt.waiting -= 1
            if attempt.connection is None:
                raise attempt.failure or BrokerConnectionLost(f"{broker} was not asked")
            if not attempt.connection.closed:
                return attempt.connection
            await attempt.ended.wait()  # one that came late: what ended before it was asked says nothing of it

    async def _run_attempt(
        self,
        key: tuple[HostPort, SuspectGroup],
        attempt: "_IsolatedAttempt",
        locate: LocateBroker,
        open_connection: OpenConnection,
        principal: str,
    ) -> None:
        """Open a connection and run it to its end; it counts against the bound until then."""
        try:
            reservation = await self._room.reserve(principal)
            try:
                if attempt.waiting:  # or their time was over before it was their turn
                    attempt.connection = await open_connection(key[0], await locate())
                    attempt.done.set()
                    await self._run_until_answered(attempt.connection)
            finally:
                reservation.release()
        except Exception as failure:  # noqa: BLE001 -- whatever it is, it belongs to those who wait for it
            attempt.failure = failure
        finally:
            del self._attempts[key]
            attempt.done.set()
            attempt.ended.set()

    @staticmethod
    async def _run_until_answered(connection: BrokerConnection) -> None:
        """Run a connection until all requests on it are answered, or the broker ends it."""
        connection.retire_after_use()
        async with trio.open_nursery() as nursery:

            async def run() -> None:
                await connection.run()
                nursery.cancel_scope.cancel()

            nursery.start_soon(run)
            await trio.sleep(UNUSED_TIMEOUT_S)
            connection.retire_when_idle()


class _IsolatedAttempt:
    """One attempt to open an isolated connection, shared by all requests of a suspect group."""

    __slots__ = ("connection", "done", "ended", "failure", "waiting")

    def __init__(self) -> None:
        self.done = trio.Event()
        self.ended = trio.Event()
        self.waiting = 0
        self.connection: BrokerConnection | None = None
        self.failure: Exception | None = None
