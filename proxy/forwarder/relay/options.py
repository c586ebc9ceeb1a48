"""What a forwarder's RelayManager is made with, grouped: callbacks, sessions, the rest."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from proto.rpc_pb2 import StoredRelay
from proxy.forwarder.relay.expiring.broker_reauthentication import BrokerReauthenticationFactory
from proxy.forwarder.relay.expiring.enforcement import Enforcement
from proxy.forwarder.relay.expiring.reauthentication_metrics import ReauthenticationMetrics
from proxy.forwarder.relay.expiring.relay_session import ReauthenticatorFactory, reauthentication_unavailable
from proxy.runtime.fairness.owners import owner_of


def _ignore(_value: object) -> None:
    """Do nothing: the default of callbacks."""


@dataclass(frozen=True, slots=True)
class RelayCallbacks:
    """What the owner wants to know of relays.

    ``on_live`` is called with the record of each relay that has started or was adopted, and with what ends it for
    another connection; ``on_end`` with that of each that has ended here; ``on_handed_over`` with that of each that
    has become a successor's; ``on_left_behind_gone`` with the client's IP address of each relay that has ended in a
    predecessor, or that a successor looks after from now on.
    """

    on_end: Callable[[StoredRelay], None]
    on_handed_over: Callable[[StoredRelay], None] = _ignore
    on_left_behind_gone: Callable[[str], None] = _ignore
    on_live: Callable[[StoredRelay, Callable[[], None]], None] = lambda _record, _give_way: None


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """How the sessions of a forwarder's relays are authenticated again.

    ``reauthenticator_factory`` makes what verifies the answers of clients of a predecessor's relays; ``enforcement``
    tells whether sessions' ends close connections, in lookup mode, too; ``broker_factory`` answers brokers that
    challenge the proxy itself; None: with no credentials.
    """

    reauthenticator_factory: ReauthenticatorFactory = reauthentication_unavailable
    enforcement: Enforcement = field(default_factory=Enforcement)
    broker_factory: BrokerReauthenticationFactory | None = None
    metrics: ReauthenticationMetrics = field(default_factory=lambda: ReauthenticationMetrics(None))


@dataclass(frozen=True, slots=True)
class RelayOptions:
    """The limits, clock and sessions of a forwarder's relays.

    ``forwarders``: how many share the kernel's bound on pipes. ``may_linger`` returns True if no other task of this
    process is in a hurry. ``owner_of`` names the owner that a relay's pipes count for. ``principals_max``: how many
    principals are counted by name; ``principal_idle_s``: without a relay, until their place may be another one's.
    ``now``: seconds of a clock that only goes forward and is the same in a successor.
    """

    forwarders: int = 1
    may_linger: Callable[[], bool] = lambda: True
    owner_of: Callable[[StoredRelay], str] = lambda record: owner_of(record.principal, record.client_address)
    principals_max: int = 100
    principal_idle_s: float = 600.0
    now: Callable[[], float] = time.monotonic
    sessions: SessionOptions = field(default_factory=SessionOptions)
