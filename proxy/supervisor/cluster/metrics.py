"""The supervisor's own metrics: worker restarts, stored relays, build information, its process."""

from collections.abc import Callable, Iterable

from prometheus_client import Counter, Gauge

from proto.roles import Role
from proxy import __version__
from proxy.runtime.observability.metrics import new_registry
from proxy.runtime.observability.process_metrics import ProcessMetrics


class ClusterMetrics:
    """A registry with the supervisor's metrics. ``stored_relays`` returns the number of relays in the fd store."""

    def __init__(self, roles: Iterable[Role], stored_relays: Callable[[], int]) -> None:
        self.registry = new_registry()
        self.registry.register(ProcessMetrics())
        self._restarts = Counter(
            "pulsar_proxy_worker_restarts", "Workers that ended and were replaced.", ["of"], registry=self.registry
        )
        for role in roles:
            self._restarts.labels(of=role.value)
        stored = Gauge(
            "pulsar_proxy_stored_relays", "Relays whose sockets the supervisor keeps a copy of.", registry=self.registry
        )
        stored.set_function(stored_relays)
        info = Gauge(
            "pulsar_proxy_build_info", "Always 1; the version is the label.", ["version"], registry=self.registry
        )
        info.labels(version=__version__).set(1)

    def count_restart(self, role: Role) -> None:
        """Count a worker that has ended and is replaced."""
        self._restarts.labels(of=role.value).inc()
