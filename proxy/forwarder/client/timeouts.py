"""How long a client may take for its handshake, and in lookup mode to answer a PING; how old its connection may get."""

import random
from collections.abc import Callable

import trio

from proto import commands
from proto.client_machine import Event
from proxy.config.types import Limits
from proxy.forwarder.client.transport import ClientTransport
from proxy.runtime.loop.deadlines import Deadlines
from proxy.runtime.loop.tasks import ignore, seconds

SPREAD = 0.1
"""The share of the age that is added or taken away at random: clients that came together must not leave together."""

fraction: Callable[[], float] = random.random  # no secret


class ClientTimeouts:
    """The timeouts of one client: the handshake's deadline, then the keep-alive of lookup mode.

    ``on_timeout`` is called with Event.HANDSHAKE_TIMEOUT or Event.KEEP_ALIVE_TIMEOUT. While ``is_unread`` returns True,
    nothing is read from the client, so it may well have answered, and does not time out.
    """

    def __init__(
        self,
        deadlines: Deadlines,
        transport: ClientTransport,
        limits: Limits,
        *,
        on_timeout: Callable[[Event], None],
        is_unread: Callable[[], bool],
    ) -> None:
        self._deadline = deadlines.new_deadline(self._on_deadline)
        self._transport = transport
        self._handshake_s = seconds(limits.handshake_timeout_ms)
        self._keep_alive_s = seconds(limits.keep_alive_interval_ms)
        self._on_timeout = on_timeout
        self._is_unread = is_unread
        self._keeps_alive = False
        self._pinged_at = float("-inf")

    def start_handshake_deadline(self, accepted_at: float) -> None:
        """Start the handshake's deadline; ``accepted_at`` is in Trio's time."""
        self._deadline.set(accepted_at + self._handshake_s)

    def start_keep_alive(self) -> None:
        """From now on send a PING whenever the client has sent nothing for an interval."""
        self._keeps_alive = True
        self._deadline.set(trio.current_time() + self._keep_alive_s)

    def clear_deadline(self) -> None:
        """Time the client out no more."""
        self._deadline.close()
        self._on_timeout = ignore

    def _on_deadline(self) -> None:
        now, received_at = trio.current_time(), self._transport.received_at
        if not self._keeps_alive:
            self._on_timeout(Event.HANDSHAKE_TIMEOUT)
        elif self._is_unread():
            self._deadline.set(now + self._keep_alive_s)
        elif now < received_at + self._keep_alive_s:
            self._deadline.set(received_at + self._keep_alive_s)
        elif self._pinged_at > received_at:
            self._on_timeout(Event.KEEP_ALIVE_TIMEOUT)
        else:
            self._pinged_at = now
            self._deadline.set(now + self._keep_alive_s)
            self._transport.send(commands.ping())


class ConnectionAge:
    """The age limit of one connection: a deadline in lookup mode, which calls ``on_reached``; a time for a relay."""

    def __init__(
        self, deadlines: Deadlines, limits: Limits, accepted_at: float, on_reached: Callable[[], None]
    ) -> None:
        self._deadline = deadlines.new_deadline(on_reached)
        age_s = seconds(limits.max_connection_age_ms)
        self._leave_at = accepted_at + age_s * (1 - SPREAD + 2 * SPREAD * fraction()) if age_s else 0.0

    def start_deadline(self) -> None:
        """Start the deadline: the connection is in lookup mode."""
        if self._leave_at:
            self._deadline.set(self._leave_at)

    def clear_deadline(self) -> None:
        """Call ``on_reached`` no more."""
        self._deadline.close()

    def leave_at_ms(self, now_s: float) -> int:
        """Return when a relay is to be ended, in milliseconds; 0: never.

        ``now_s``: the time now, by the clock that the result is of, and that all processes share.
        """
        return max(1, round((now_s + self._leave_at - trio.current_time()) * 1000)) if self._leave_at else 0
