"""proxy.forwarder.lifetime.metrics: the label `method` is bounded."""

from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from proxy.forwarder.lifetime.metrics import NoReauthReason, ReauthenticationMetrics
from proxy.runtime.observability.metrics import LABEL_VALUES_MAX

PREFIX = "pulsar_proxy_"


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("reauthentication_success", lambda metrics, method: metrics.record_success(method, 0.1)),
        ("reauthentication_failure", lambda metrics, method: metrics.count_failure(method)),
        (
            "authentication_no_reauth",
            lambda metrics, method: metrics.count_never_asked(method, NoReauthReason.DISABLED),
        ),
        (
            "expired_connections_observed",
            lambda metrics, method: metrics.count_observed_end("0.0.0.0:6650", method, "expired"),
        ),
    ],
)
def test_methods_that_a_captured_auth_worker_invents_are_counted_together(
    name: str, count: Callable[[ReauthenticationMetrics, str], None]
) -> None:
    """Security: an auth worker names the method of each client that it lets in."""
    registry = CollectorRegistry()
    metrics = ReauthenticationMetrics(registry)
    for number in range(LABEL_VALUES_MAX + 5):
        count(metrics, f"invented-{number}")
    samples = [one for family in registry.collect() for one in family.samples if one.name == f"{PREFIX}{name}_total"]
    assert len(samples) == LABEL_VALUES_MAX + 1
    assert [one.value for one in samples if one.labels["method"] == "other"] == [5]
