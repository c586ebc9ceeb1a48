"""Metrics of clients' re-authentication (KIP-368), for lookup mode and relays together."""

import enum
import time
from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from proxy.runtime.observability.metrics import LATENCY_BUCKETS_S, BoundedLabel
from proxy.runtime.observability.windowed_maximum import WINDOW_S, WindowedMaximum


class NoReauthReason(enum.Enum):
    """Reason why an authenticated client is never challenged. The values are the metric's labels."""

    CLIENT_CANNOT = "client_cannot"
    HAS_PRODUCER = "has_producer"
    DISABLED = "disabled"


class ReauthenticationMetrics:
    """Counters, histogram and gauges of re-authentication; the label `method` is an authentication method's name.

    ``now``: seconds of a monotonic clock.
    """

    def __init__(self, registry: CollectorRegistry | None, now: Callable[[], float] = time.monotonic) -> None:
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self._now = now
        self._maximum = WindowedMaximum()
        self._methods = BoundedLabel()
        self.success = counter(
            "pulsar_proxy_reauthentication_success",
            "Clients that have authenticated themselves again on their connection, by method.",
            ["method"],
        )
        self.failure = counter(
            "pulsar_proxy_reauthentication_failure",
            "Clients that failed to authenticate themselves again, and were closed, by the method of their session.",
            ["method"],
        )
        self.seconds = Histogram(
            "pulsar_proxy_reauthentication_seconds",
            "Time from the challenge to the verdict, the client's own time included, of those that succeeded.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        maximum = gauge(
            "pulsar_proxy_reauthentication_max_seconds",
            f"The longest time from challenge to verdict in the last {WINDOW_S} seconds; 0: there was none.",
        )
        maximum.set_function(lambda: self._maximum.value(self._now()))
        self._no_reauth = counter(
            "pulsar_proxy_authentication_no_reauth",
            "Authenticated clients that are not challenged again on their connection, by method and "
            "reason: client_cannot, has_producer, disabled.",
            ["method", "reason"],
        )
        self.expired_killed = counter(
            "pulsar_proxy_expired_connections_killed",
            "Clients' connections closed because they were used, or still served, after their session had expired.",
        )
        self.expired_observed = counter(
            "pulsar_proxy_expired_connections_observed",
            "Session lifetimes that enforcement would have closed, but session.enforcement is observe, by listener, "
            "method and reason: expired, still_served, failed.",
            ["listener", "method", "reason"],
        )
        self.expired_sessions = gauge(
            "pulsar_proxy_expired_sessions",
            "Open sessions past their end: idle ones, and those with an end that is only observed.",
        )

    def count_never_asked(self, method: str, reason: NoReauthReason) -> None:
        """Count a client that is never challenged to authenticate itself again."""
        self._no_reauth.labels(method=self._methods.value_of(method), reason=reason.value).inc()

    def count_failure(self, method: str) -> None:
        """Count a client that has failed to authenticate itself again."""
        self.failure.labels(method=self._methods.value_of(method)).inc()

    def count_observed_end(self, listener: str, method: str, reason: str) -> None:
        """Count a session's lifetime that enforcement would have closed."""
        labels = {"listener": listener, "method": self._methods.value_of(method), "reason": reason}
        self.expired_observed.labels(**labels).inc()

    def record_success(self, method: str, took_s: float) -> None:
        """Count a client that has authenticated itself again, ``took_s`` after the challenge."""
        self.success.labels(method=self._methods.value_of(method)).inc()
        self.seconds.observe(took_s)
        self._maximum.observe(took_s, self._now())
