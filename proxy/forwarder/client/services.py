"""What all client connections of a forwarder share."""

from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from proto.roles import Role
from proxy.common.deny_list import DenyList
from proxy.forwarder.audit import ForwarderAudit
from proxy.forwarder.client.seen_hellos import SeenHellos
from proxy.forwarder.metrics import ForwarderMetrics
from proxy.forwarder.relay.manager import RelayManager
from proxy.forwarder.workers.clients import WorkerClients
from proxy.runtime.loop.deadlines import Deadlines
from proxy.runtime.loop.tasks import InFlightCounter
from proxy.runtime.network.handshake_turns import HandshakeTurns


@dataclass(frozen=True, slots=True)
class ConnectionServices:
    """The services of one forwarder for its clients; a reload makes another value, for connections that begin later.

    ``handshakes`` counts the connections of which it is not decided whether they serve lookups or become relays.
    ``nursery`` is for the connections' tasks, ``deadlines`` for their timeouts, which need no task,
    and ``turns`` are those of TLS handshakes with brokers.
    ``denied`` returns the deny list in force.
    """

    workers: WorkerClients
    relays: RelayManager
    metrics: ForwarderMetrics
    handshakes: InFlightCounter
    nursery: trio.Nursery
    deadlines: Deadlines
    denied: Callable[[], DenyList] = DenyList
    seen_hellos: SeenHellos = field(default_factory=SeenHellos)
    turns: HandshakeTurns = field(default_factory=HandshakeTurns)
    audit: ForwarderAudit = field(default_factory=lambda: ForwarderAudit(None, Role.FORWARDER, 0, -1))
