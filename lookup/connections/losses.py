"""A connection that was lost under requests: who goes on with whom, and whether the broker is to blame.

See lookup.connections.isolated for what it is good for.
"""

from collections.abc import Iterable

from proto.addresses import HostPort


class Company:
    """Requests that are asked over one connection, and nobody else's are."""

    __slots__ = ()


class Loss:
    """A connection to a broker that was lost while it carried ``count`` requests."""

    __slots__ = ("__weakref__", "_halves", "_joined", "_open", "_request_to_blame", "broker", "count")

    def __init__(self, broker: HostPort, count: int) -> None:
        self.broker = broker
        self.count = count
        self._halves = Company(), Company()
        self._joined = 0
        self._open = count
        self._request_to_blame = False

    def join(self) -> Company:
        """With whom one of the requests goes on: each asks once."""
        half = self._halves[2 * self._joined >= self.count]
        self._joined += 1
        return half

    def settle(self, *, to_blame: bool) -> bool:
        """Say what became of one of the requests, in the end. Whether this was the last one, and the broker is to blame
        as no request is.
        """
        self._open -= 1
        self._request_to_blame = self._request_to_blame or to_blame
        return not self._open and not self._request_to_blame


class Trial:
    """What one request has been through: the connections that were lost under it."""

    __slots__ = ("company", "losses", "lost_at", "to_blame")

    def __init__(self) -> None:
        self.losses: list[Loss] = []
        self.company: Company | None = None
        """None: it is asked over a shared connection."""
        self.lost_at: HostPort | None = None
        """The broker to which the last one was."""
        self.to_blame = False

    def lost(self, broker: HostPort, loss: Loss | None) -> bool:
        """A connection was lost under it; ``loss`` is None where that says nothing of the request. Whether it is to
        blame: nothing else was on a connection that was its company's alone.
        """
        self.lost_at = broker
        if loss is not None:
            self.to_blame = self.company is not None and loss.count == 1
            self.company = loss.join()
            self.losses.append(loss)
        return self.to_blame

    def settled(self) -> Iterable[Loss]:
        """The request has its answer. Gives the losses that are to be blamed on their brokers."""
        losses, self.losses = self.losses, []
        return [loss for loss in losses if loss.settle(to_blame=self.to_blame)]
