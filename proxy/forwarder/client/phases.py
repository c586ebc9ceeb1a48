"""Phases of a client's connection: who has it, and in which order."""

import enum


class Phase(enum.Enum):
    """Who has the client's connection. What may happen while it is served is proto.client_machine's to decide."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hashes the name, in Python

    SERVING = "serving"
    DRAINING = "draining"
    """The client is served until no request is under way, or its relay starts."""
    STARTING_RELAY = "starting relay"
    """The client is served no more, and the connection cannot be ended from outside. The start may still fail."""
    RELAYED = "relayed"
    ENDING = "ending"
    """The client is served no more: a final frame is sent, if there is one, and the connection is closed."""


NEXT_PHASES = {
    Phase.SERVING: frozenset({Phase.DRAINING, Phase.STARTING_RELAY, Phase.ENDING}),
    Phase.DRAINING: frozenset({Phase.DRAINING, Phase.STARTING_RELAY, Phase.ENDING}),  # a second drain may follow
    Phase.STARTING_RELAY: frozenset({Phase.RELAYED, Phase.ENDING}),
    Phase.RELAYED: frozenset(),
    Phase.ENDING: frozenset(),
}

SERVED = frozenset({Phase.SERVING, Phase.DRAINING})  # a set, since access to an enum's member costs a look-up
