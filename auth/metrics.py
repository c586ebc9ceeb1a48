"""Metrics of the auth worker, under the Java proxy's names where it has them."""

from collections.abc import Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from auth.registry import ProviderRegistry
from proxy.runtime.observability.metrics import LATENCY_BUCKETS_S, OTHER


class BrokerCredentialsEnd(Collector):
    """Expose when the proxy's own token for brokers ends; nothing where it does not."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.unix_ms = 0
        registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Prometheus: the end, in seconds since 1970."""
        family = GaugeMetricFamily(
            "pulsar_proxy_broker_credentials_expire_timestamp_seconds",
            "When the token of brokers.credentials ends, in seconds since 1970; absent where it does not.",
        )
        if self.unix_ms:
            family.add_metric([], self.unix_ms / 1000)
        yield family


class AuthMetrics:
    """Counts by method and reason. Methods are the client's to name, so unknown ones share one label."""

    providers: ProviderRegistry

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        self._success = counter(
            "pulsar_authentication_success", "Authentications that succeeded.", ["provider_name", "auth_method"]
        )
        self._failures = counter(
            "pulsar_authentication_failures",
            "Authentications that failed, by reason.",
            ["provider_name", "auth_method", "reason"],
        )
        self.broker_credentials_end = BrokerCredentialsEnd(registry)
        self._expired = counter("pulsar_expired_token", "Tokens that had expired.")
        self._rounds = Histogram(
            "pulsar_proxy_authentication_round_seconds",
            "Time that one round of authentication took in the auth worker.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )

    def count_success(self, method: str) -> None:
        """Count a success."""
        self._success.labels(**self._labels(method)).inc()

    def count_failure(self, method: str, reason: str) -> None:
        """Count a failure."""
        self._failures.labels(**self._labels(method), reason=reason).inc()
        if reason == "expired" and method == "token":
            self._expired.inc()

    def observe_round(self, duration_s: float) -> None:
        """Measure a round."""
        self._rounds.observe(duration_s)

    def _labels(self, method: str) -> dict[str, str]:
        known = method in self.providers.methods or method == "none"
        return {
            "provider_name": self.providers.provider_name(method),
            "auth_method": method if known else OTHER,
        }
