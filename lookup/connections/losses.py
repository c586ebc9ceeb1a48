"""Losses of connections under requests: how suspects are split, and whether the broker or a request is to blame.

lookup.connections.isolated describes the search.
"""

from collections.abc import Iterable

from proto.addresses import HostPort


class SuspectGroup:
    """Group of suspect requests that share one isolated connection; identified by the object itself."""

    __slots__ = ()


class ConnectionLoss:
    """Loss of a connection to a broker while it carried ``request_count`` requests."""

    __slots__ = ("__weakref__", "_halves", "_joined", "_open", "_request_to_blame", "broker", "request_count")

    def __init__(self, broker: HostPort, count: int) -> None:
        self.broker = broker
        self.request_count = count
        self._halves = SuspectGroup(), SuspectGroup()
        self._joined = 0
        self._open = count
        self._request_to_blame = False

    def assign_group(self) -> SuspectGroup:
        """Return the group in which the next of the lost requests is sent again; called once for each."""
        half = self._halves[2 * self._joined >= self.request_count]
        self._joined += 1
        return half

    def record_outcome(self, *, to_blame: bool) -> bool:
        """Record what became of one of the lost requests.

        Returns True where it was the last one and none was to blame: then the broker is.
        """
        self._open -= 1
        self._request_to_blame = self._request_to_blame or to_blame
        return not self._open and not self._request_to_blame


class LossHistory:
    """History of one request: the connections that were lost under it."""

    __slots__ = ("is_to_blame", "last_lost_at", "losses", "suspect_group")

    def __init__(self) -> None:
        self.losses: list[ConnectionLoss] = []
        self.suspect_group: SuspectGroup | None = None
        """None: it is asked over a shared connection."""
        self.last_lost_at: HostPort | None = None
        """The broker to which the last one was."""
        self.is_to_blame = False

    def record_loss(self, broker: HostPort, loss: ConnectionLoss | None) -> bool:
        """Record that a connection was lost under the request; return True if the request is to blame.

        It is to blame if it was alone on an isolated connection. ``loss``: None where the loss says nothing of the
        request.
        """
        self.last_lost_at = broker
        if loss is not None:
            self.is_to_blame = self.suspect_group is not None and loss.request_count == 1
            self.suspect_group = loss.assign_group()
            self.losses.append(loss)
        return self.is_to_blame

    def settle_losses(self) -> Iterable[ConnectionLoss]:
        """End the history, as the request has its answer; return the losses that count against their brokers."""
        losses, self.losses = self.losses, []
        return [loss for loss in losses if loss.record_outcome(to_blame=self.is_to_blame)]
