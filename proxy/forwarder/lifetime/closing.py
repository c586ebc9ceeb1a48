"""Why the proxy itself closes a relay, and the wait for the last answers before it does."""

import enum
from collections.abc import Callable

import trio


class CloseReason(enum.IntEnum):
    """Why the proxy closes a relay. The numbers are what a successor reads from the relay table."""

    NOT_CLOSING = 0
    ERROR_SENT = 1
    """The client has been sent the error that explains the close."""
    EXPIRED = 2
    FAILED = 3
    """The client was to authenticate itself again, and did not."""
    CORRUPT = 4
    """No frame boundary can be found any more, or none that the broker would find, too."""
    STILL_SERVED = 5
    """It has expired and is not used, but past its grace the broker still sends more than PING and PONG."""
    MAX_AGE = 6
    """Its connection has reached `limits.max_connection_age_ms`."""
    SHUT_DOWN = 7
    """The cluster is draining."""
    OUT_OF_TURN = 8
    """The broker asks the proxy itself for credentials as no broker does."""
    OVER_SHARE = 9
    """It gives way to another owner's connection (proxy.forwarder.listen.eviction)."""
    DENIED = 10
    """The deny list names its client's credentials."""
    DISCONNECTED = 11
    """An operator ends it."""


PLANNED_CLOSE_REASONS = frozenset({CloseReason.MAX_AGE, CloseReason.SHUT_DOWN, CloseReason.DISCONNECTED})
"""Why a relay is closed although nothing is wrong with it."""


QUIET_S = 0.1
QUIET_S_MAX = 1.0
"""A broker that is silent for QUIET_S has answered what it was sent; none is waited for longer than QUIET_S_MAX."""


async def until_quiet(position: Callable[[], object], *, quiet_s: float = QUIET_S, most_s: float = QUIET_S_MAX) -> None:
    """Wait until ``position`` is the same after ``quiet_s``, at most ``most_s``."""
    deadline = trio.current_time() + most_s
    before: object = None
    while (now := position()) != before and trio.current_time() < deadline:
        before = now
        await trio.sleep(quiet_s)
