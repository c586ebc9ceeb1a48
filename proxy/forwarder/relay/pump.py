"""What the pumps of the relay engine have in common: the queue of directions, and the ends of directions and relays.

A pump moves a direction's bytes, one portion at a time: through pipes of the kernel
(proxy.forwarder.relay.splice_pump), or through this process's memory (proxy.forwarder.relay.copy_pump).
"""

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from proxy.common.logs import get_logger
from proxy.forwarder.relay.relay import Direction, Relay
from proxy.forwarder.relay.turns import RunQueue
from proxy.runtime.shared.relay_table import RelayTable

PEER_GONE = frozenset(
    {
        errno.ECONNRESET,
        errno.ECONNABORTED,
        errno.EPIPE,
        errno.ENOTCONN,
        errno.ETIMEDOUT,
        errno.EHOSTUNREACH,
        errno.EHOSTDOWN,
        errno.ENETUNREACH,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.EPROTO,
    }
)


@dataclass(frozen=True, slots=True)
class PumpHost:
    """What an engine's pumps share.

    ``finish`` ends a relay of which both directions are done, or that met an internal error; ``wake_loop`` has the run
    queue processed although no event arrives. ``run_queue``: directions that are to be pumped again although no edge
    announces it; ``to_recheck``: those of which the source was assumed to be empty; ``half_closed``: relays that are
    ended unless bytes move, each with how many had moved and the deadline for more. ``holding``: directions of which
    this process's memory holds what the sink did not take.
    """

    finish: Callable[[Relay], None]
    wake_loop: Callable[[], None]
    run_queue: RunQueue
    to_recheck: set[Direction] = field(default_factory=set)
    half_closed: dict[Relay, tuple[int, float]] = field(default_factory=dict)
    holding: set[Direction] = field(default_factory=set)


class Pump(ABC):
    """Moves portions of bytes from the source to the sink of a direction."""

    def __init__(self, table: RelayTable, host: PumpHost) -> None:
        self._table = table
        self._cells = table.cells
        self._finish = host.finish
        self._wake_loop = host.wake_loop
        self.run_queue = host.run_queue
        self.enqueue = host.run_queue.enqueue
        self.to_recheck = host.to_recheck
        self.half_closed = host.half_closed

    @abstractmethod
    def pump(self, direction: Direction) -> None:
        """Move at most one portion of a direction, unless it is done or queued; more is left to the next round, or to
        an edge. An internal error ends the direction's relay and no other.
        """

    @abstractmethod
    def drain_only(self, direction: Direction) -> None:
        """Deliver what has left the source, and read nothing more: the pump of a direction of a relay that is being
        ended.
        """

    @abstractmethod
    def discard_in_flight(self, direction: Direction) -> None:
        """Drop what is on its way to a direction's sink."""

    # ---- the queue

    def wake_direction(self, direction: Direction) -> None:
        """Have a direction pumped soon, called from outside of the loop's processing or within it."""
        if not direction.done:
            self.enqueue(direction)
            self._wake_loop()

    def bytes_moved(self, direction: Direction) -> int:
        """Return how many bytes have ever gone to a direction's sink."""
        return self._table.bytes_moved(direction.row)

    # ---- ends

    def on_internal_error(self, direction: Direction, error: Exception) -> None:
        """End the relay of a direction whose pumping raised an unexpected error."""
        direction.relay.broken = True
        self._finish(direction.relay)
        get_logger().error("a relay was ended by an unexpected error", exc_info=error)

    def on_sink_broken(self, direction: Direction) -> None:
        """End a direction of which the sink's peer has gone: nothing that is sent there arrives any more."""
        relay = direction.relay
        relay.broken = True
        relay.note_end(of_broker=direction is relay.to_broker)
        self.discard_in_flight(direction)
        # The same socket is the opposite direction's source: it will find its end there, after what was sent before.
        self.end_direction(direction)
        # Not here: the caller may be in the midst of the opposite direction's portion.
        self.wake_direction(direction.opposite)

    def end_direction(self, direction: Direction) -> None:
        """Shut down the sink's writing side; finish the relay if the opposite direction has ended, too."""
        relay = direction.relay
        relay.note_end(of_broker=direction is relay.to_client)
        direction.done = True
        direction.shut_down_sink()
        if direction.opposite.done:
            self._finish(relay)
        else:
            self.start_idle_timeout(relay)

    def start_idle_timeout(self, relay: Relay) -> None:
        """From now on, end the relay when no byte has moved for its half-close timeout (the engine checks it)."""
        self.half_closed.setdefault(relay, (-1, 0.0))
