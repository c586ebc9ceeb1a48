"""The supervisor's metrics."""

from collections.abc import Callable, Iterable

from prometheus_client import Counter, Gauge

from proto.roles import Role
from proxy import __version__
from proxy.common.libraries import OPENSSL_VERSION, PYTHON_VERSION
from proxy.runtime.observability.metrics import new_registry
from proxy.runtime.observability.process_metrics import ProcessMetrics


class ClusterMetrics:
    """A registry with the supervisor's metrics.

    ``stored_relays`` returns the number of relays in the fd store, ``unit_store_lost`` that of those that the service
    manager should keep and does not.
    """

    def __init__(
        self, roles: Iterable[Role], stored_relays: Callable[[], int], unit_store_lost: Callable[[], int]
    ) -> None:
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
        self.unready = Gauge(
            "pulsar_proxy_unready",
            "1 where an operator has load balancers send no clients here (`unready`), else 0.",
            registry=self.registry,
        )
        lost = Gauge(
            "pulsar_proxy_unit_store_lost_relays",
            "Relays for which the service manager's descriptor store had no room: they end with the supervisor.",
            registry=self.registry,
        )
        lost.set_function(unit_store_lost)
        info = Gauge(
            "pulsar_proxy_build_info",
            "Always 1; the labels are the versions of the proxy, of Python, and of the library for TLS.",
            ["version", "python", "openssl"],
            registry=self.registry,
        )
        info.labels(version=__version__, python=PYTHON_VERSION, openssl=OPENSSL_VERSION).set(1)

    def count_restart(self, role: Role) -> None:
        """Count a worker that has ended and is replaced."""
        self._restarts.labels(of=role.value).inc()
