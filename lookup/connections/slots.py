"""Slots of the pool of connections to brokers: what is open for one broker and principal, or is being opened."""

from dataclasses import dataclass, field

import trio

from lookup.connections.broker_connection import BrokerConnection
from lookup.connections.principals import LookupPrincipal
from lookup.targets.rules import LocateBroker
from proto.addresses import HostPort

PoolKey = tuple[HostPort, LookupPrincipal]


@dataclass(slots=True)
class ConnectAttempt:
    """One attempt to open a connection; all tasks that wait for it share the outcome."""

    done: trio.Event = field(default_factory=trio.Event)
    connection: BrokerConnection | None = None
    failure: Exception | None = None

    def connection_or_raise(self) -> BrokerConnection:
        """Return the connection; raise the attempt's failure where there is none."""
        if self.connection is None:
            raise self.failure or RuntimeError("an attempt without an outcome")
        return self.connection


@dataclass(slots=True)
class PoolSlot:
    """Slot of one broker and principal: the connection, and the attempt under way to open one."""

    locate: LocateBroker
    connection: BrokerConnection | None = None
    retiring: BrokerConnection | None = None
    """The connection before, which may still answer what is under way; of more of them only the last one."""
    attempt: ConnectAttempt | None = None
    waiting: int = 0
    """Callers that are about to send a request."""

    @property
    def is_unused(self) -> bool:
        """Whether it may be closed without a loss to any request."""
        return not self.waiting and self.attempt is None and (self.connection is None or self.connection.idle)

    @property
    def last_used_at(self) -> float:
        """When a request was last sent, in Trio's time."""
        return float("-inf") if self.connection is None else self.connection.last_used_at


class PoolShare:
    """The slots of one principal at one broker: one for each of its clients' credentials.

    ``retiring``: connections without a slot, which still answer what is under way.
    """

    __slots__ = ("callers", "keys", "lock", "retiring")

    def __init__(self) -> None:
        self.lock = trio.Lock()  # fair: first come, first served
        self.callers = 0
        self.keys: set[PoolKey] = set()
        self.retiring: list[BrokerConnection] = []
