"""Contexts whose session tickets all forwarders accept (`tls.session_tickets` of a listener).

OpenSSL makes up the keys of a context's tickets as it makes the context, and uses those of the context with which a
connection started: a listener's front context (proxy.runtime.network.tls). The fork server makes some fronts before it
forks, so each forwarder has fronts with the same keys, without anyone having to handle a key. Workers of other roles
drop them at once, with which OpenSSL overwrites the keys. Another fork server, as after an upgrade, has other keys.
"""

import ssl

SHARED_FRONTS_MAX = 16
"""A listener with a higher index has a front of each forwarder's own: sessions are resumed at the same one alone."""

_shared_fronts: list["TicketFront"] = []


class TicketFront:
    """A front context that stays, with its keys, when files or the configuration change.

    It is set up for one NamedContexts at a time. ``generation`` grows with each configuration.
    """

    def __init__(self) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._generation = 0
        self._groups: tuple[str, ...] = ()

    def context_for(self, generation: int, groups: tuple[str, ...]) -> tuple[ssl.SSLContext, bool]:
        """Return the context, and whether it is to be set up: not for a configuration that was replaced.

        Groups cannot be taken back from a context: those that differ from earlier ones get one with keys of its own.
        """
        if generation < self._generation:
            return self._context, False
        if self._groups not in ((), groups):
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._generation, self._groups = generation, groups
        return self._context, True


def make_shared_fronts() -> None:
    """Make the fronts that this process shares with those that it forks."""
    _shared_fronts[:] = [TicketFront() for _ in range(SHARED_FRONTS_MAX)]


def drop_shared_fronts() -> None:
    """Drop this process's copies, and the keys in them."""
    _shared_fronts.clear()


def ticket_front(listener: int) -> TicketFront:
    """Return the front for a listener's index."""
    return _shared_fronts[listener] if listener < len(_shared_fronts) else TicketFront()
