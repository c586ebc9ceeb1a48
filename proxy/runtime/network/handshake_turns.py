"""Turns of TLS handshakes by callback, clients' and those with brokers.

The private key's operation of a server costs up to a millisecond, and to verify a broker's certificate as much. So a
handshake that can go on waits for its turn, in a queue that is fair between owners. After each turn relays get theirs;
after a few, everything else of this process.
"""

import sys
from collections.abc import Callable
from typing import Protocol

import trio

from proxy.common.logs import get_logger
from proxy.runtime.fairness.fair_queue import FairQueue
from proxy.runtime.loop.tick import current_tick

TURNS_PER_WAKE_UP_MAX = 4
"""Handshakes that are moved forward at the end of a tick, or in one round of Trio.

The reactor may run several ticks in a wake-up, of which it begins none after epoll_loop.LINGER_S. So what else this
process has to do waits for that time and so many turns at most.
"""


class Opening(Protocol):
    """A connection in its TLS handshake."""

    def take_turn(self) -> None:
        """Continue the handshake. It may be over meanwhile, which it must tell by itself."""
        ...


class HandshakeTurns:
    """The handshakes that can go on. Each is a connection's, so their number is bounded by ``limits``.

    ``run_relays`` is called after each turn: it moves what has arrived in relays meanwhile.
    """

    def __init__(self, run_relays: Callable[[], None] = lambda: None) -> None:
        self._run_relays = run_relays
        self._waiting: FairQueue[str, Opening] = FairQueue(slots=1, waiting_max=sys.maxsize)
        self._is_going_on = False

    @property
    def are_waiting(self) -> bool:
        """Whether a handshake waits for its turn: nobody should poll for events meanwhile."""
        return self._waiting.waiting_count > 0

    def add(self, owner: str, opening: Opening) -> None:
        """Give a handshake its turn, at the end of this tick or later."""
        self._waiting.enqueue(owner, opening)
        current_tick().schedule_flush(self)

    def remove(self, owner: str, opening: Opening) -> None:
        """Give a handshake that is over no turn."""
        self._waiting.remove_waiting(owner, opening)

    def flush(self) -> None:
        """Take some turns, unless others wait for theirs already."""
        if not self._is_going_on:
            self._take_turns()

    def _take_turns(self) -> None:
        for _ in range(TURNS_PER_WAKE_UP_MAX):
            following = self._waiting.start_next()
            if following is None:
                return
            owner, opening = following
            self._waiting.release_slot(owner)
            try:
                opening.take_turn()
            except Exception as error:  # noqa: BLE001 -- the other handshakes go on
                get_logger().error("a TLS handshake met a defect", exc_info=error)
            self._run_relays()
        if self._waiting.waiting_count:
            self._is_going_on = True
            trio.lowlevel.current_trio_token().run_sync_soon(self._go_on)

    def _go_on(self) -> None:
        self._is_going_on = False
        with current_tick():
            self._take_turns()
