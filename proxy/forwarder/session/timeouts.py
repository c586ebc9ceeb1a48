"""How long a client is waited for: until its handshake must be done; then, in lookup mode, for an answer to a PING."""

from collections.abc import Callable

import trio

from proto import commands
from proxy.config.types import Limits
from proxy.forwarder.session.transport import ClientTransport
from proxy.runtime.loop.deadlines import Deadlines
from proxy.runtime.loop.tasks import seconds


class ClientTimeouts:
    """One client's. ``begin`` when it has come, ``keep_alive`` once it is in lookup mode, ``end``.

    ``give_up`` is called when it has been waited for long enough. While ``is_unheard`` says that nothing is read from
    it, it may well have answered.
    """

    def __init__(
        self,
        deadlines: Deadlines,
        wire: ClientTransport,
        limits: Limits,
        *,
        give_up: Callable[[], None],
        is_unheard: Callable[[], bool],
    ) -> None:
        self._deadline = deadlines.new_deadline(self._on_deadline)
        self._transport = wire
        self._handshake_s = seconds(limits.handshake_timeout_ms)
        self._keep_alive_s = seconds(limits.keep_alive_interval_ms)
        self._give_up = give_up
        self._is_unheard = is_unheard
        self._keeps_alive = False
        self._pinged_at = float("-inf")

    def start_handshake_deadline(self, accepted_at: float) -> None:
        """It has so much time for its handshake."""
        self._deadline.set(accepted_at + self._handshake_s)

    def start_keep_alive(self) -> None:
        """From now on it is pinged where it says nothing by itself."""
        self._keeps_alive = True
        self._deadline.set(trio.current_time() + self._keep_alive_s)

    def clear_deadline(self) -> None:
        """Nothing is waited for any more."""
        self._deadline.clear()

    def _on_deadline(self) -> None:
        now, heard_at = trio.current_time(), self._transport.received_at
        if not self._keeps_alive:
            self._give_up()
        elif self._is_unheard():
            self._deadline.set(now + self._keep_alive_s)
        elif now < heard_at + self._keep_alive_s:
            self._deadline.set(heard_at + self._keep_alive_s)
        elif self._pinged_at > heard_at:
            self._give_up()
        else:
            self._pinged_at = now
            self._deadline.set(now + self._keep_alive_s)
            self._transport.send(commands.ping())
