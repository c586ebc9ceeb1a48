"""Slots of the pool of connections to brokers: what is open for one broker and principal, or is being opened."""

from dataclasses import dataclass, field

import trio

from lookup.connections.broker_connection import BrokerConnection
from lookup.connections.principals import LookupPrincipal
from lookup.targets.rules import LocateBroker
from proto.addresses import HostPort
from proxy.runtime.loop.single_flight import SingleFlight

PoolKey = tuple[HostPort, LookupPrincipal]


@dataclass(slots=True)
class PoolSlot:
    """Slot of one broker and principal: the connection, and the attempt under way to open one."""

    locate: LocateBroker
    attempt: SingleFlight[BrokerConnection] = field(init=False)
    """Opens a connection: in a task of its own, since the first caller may give up before the others."""
    connection: BrokerConnection | None = None
    retiring: BrokerConnection | None = None
    """The connection before, which may still answer what is under way; of more of them only the last one."""
    waiting: int = 0
    """Callers that are about to send a request."""

    @property
    def is_unused(self) -> bool:
        """Whether it may be closed without a loss to any request."""
        return not self.waiting and not self.attempt.is_under_way and (self.connection is None or self.connection.idle)

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
