"""Metrics of one process, in Prometheus' text format.

Each process has a registry of its own; the admin worker collects and merges them (proxy.admin.exposition). No label may
take a value that a client chooses freely.
"""

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest

LATENCY_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

LABEL_VALUES_MAX = 32
LABEL_CHARACTERS_MAX = 64
OTHER = "other"
"""Value of a label for all that is not named by it."""

disable_created_metrics()  # type: ignore[no-untyped-call]


def new_registry() -> CollectorRegistry:
    """Return a new registry for one process; never the library's global one, which tests would share."""
    return CollectorRegistry()


class BoundedLabel:
    """Bound on the values of a label that another worker names: the first LABEL_VALUES_MAX count under their own name,
    all others as OTHER. A sound worker names a few; a captured one could name any number.
    """

    def __init__(self) -> None:
        self._known: set[str] = set()

    def value_of(self, name: str) -> str:
        """Return the label's value for a name."""
        if name not in self._known:
            if len(self._known) >= LABEL_VALUES_MAX or len(name) > LABEL_CHARACTERS_MAX:
                return OTHER
            self._known.add(name)
        return name


def broker_reauthentication_seconds(registry: CollectorRegistry | None) -> Histogram:
    """Return the histogram of the proxy's answers to brokers' challenges, which two kinds of workers have."""
    return Histogram(
        "pulsar_proxy_broker_reauthentication_seconds",
        "Time from a broker's challenge for fresh credentials of the proxy itself to the proxy's last answer, through "
        "all rounds: in forwarders within relays, in lookup workers on their own connections.",
        buckets=LATENCY_BUCKETS_S,
        registry=registry,
    )


def render_metrics(registry: CollectorRegistry) -> str:
    """Return a process's metrics as text."""
    return generate_latest(registry).decode()
