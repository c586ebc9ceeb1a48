"""A connection that was lost under requests: who goes on with whom, and whether the broker is to blame.

See lookup.connections.isolated for what it is good for.
"""

from collections.abc import Iterable

from proto.addresses import HostPort


class SuspectGroup:
    """Requests that are asked over one connection, and nobody else's are."""

    __slots__ = ()


class ConnectionLoss:
    """A connection to a broker that was lost while it carried ``count`` requests."""

    __slots__ = ("__weakref__", "_halves", "_joined", "_open", "_request_to_blame", "broker", "request_count")

    def __init__(self, broker: HostPort, count: int) -> None:
        self.broker = broker
        self.request_count = count
        self._halves = SuspectGroup(), SuspectGroup()
        self._joined = 0
        self._open = count
        self._request_to_blame = False

    def assign_group(self) -> SuspectGroup:
        """With whom one of the requests goes on: each asks once."""
        half = self._halves[2 * self._joined >= self.request_count]
        self._joined += 1
        return half

    def record_outcome(self, *, to_blame: bool) -> bool:
        """Say what became of one of the requests, in the end. Whether this was the last one, and the broker is to blame
        as no request is.
        """
        self._open -= 1
        self._request_to_blame = self._request_to_blame or to_blame
        return not self._open and not self._request_to_blame


class LossHistory:
    """What one request has been through: the connections that were lost under it."""

    __slots__ = ("is_to_blame", "last_lost_at", "losses", "suspect_group")

    def __init__(self) -> None:
        self.losses: list[ConnectionLoss] = []
        self.suspect_group: SuspectGroup | None = None
        """None: it is asked over a shared connection."""
        self.last_lost_at: HostPort | None = None
        """The broker to which the last one was."""
        self.is_to_blame = False

    def record_loss(self, broker: HostPort, loss: ConnectionLoss | None) -> bool:
        """A connection was lost under it; ``loss`` is None where that says nothing of the request. Whether it is to
        blame: nothing else was on a connection that was its company's alone.
        """
        self.last_lost_at = broker
        if loss is not None:
            self.is_to_blame = self.suspect_group is not None and loss.request_count == 1
            self.suspect_group = loss.assign_group()
            self.losses.append(loss)
        return self.is_to_blame

    def settle_losses(self) -> Iterable[ConnectionLoss]:
        """The request has its answer. Gives the losses that are to be blamed on their brokers."""
        losses, self.losses = self.losses, []
        return [loss for loss in losses if loss.record_outcome(to_blame=self.is_to_blame)]
