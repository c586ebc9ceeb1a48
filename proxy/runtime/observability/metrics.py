"""Metrics of one process, in Prometheus' text format.

Each process has a registry of its own; the admin worker collects and merges them (proxy.admin.exposition). No label may
take a value that a client chooses freely.
"""

from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest

LATENCY_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

disable_created_metrics()  # type: ignore[no-untyped-call]


def new_registry() -> CollectorRegistry:
    """Return a new registry for one process; never the library's global one, which tests would share."""
    return CollectorRegistry()


def render_metrics(registry: CollectorRegistry) -> str:
    """Return a process's metrics as text."""
    return generate_latest(registry).decode()
