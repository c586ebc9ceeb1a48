"""The auth worker's counts: Java's names, and labels that no stranger can multiply."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from auth.metrics import AuthMetrics


class TokensOnly:
    """One provider serves method `token`, and none any other."""

    methods = ("token",)

    def provider_name(self, method: str) -> str:
        return "TokenProvider" if method in self.methods else "none"


@pytest.fixture
def registry() -> CollectorRegistry:
    """The registry of one worker."""
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> AuthMetrics:
    """The counts of a worker that verifies tokens."""
    made = AuthMetrics(registry)
    made.providers = TokensOnly()
    return made


def samples(registry: CollectorRegistry, family: str) -> list[tuple[dict[str, str], float]]:
    return [
        (sample.labels, sample.value)
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == family
    ]


def test_successes(registry: CollectorRegistry, metrics: AuthMetrics) -> None:
    metrics.count_success("token")
    metrics.count_success("token")
    labels = {"provider_name": "TokenProvider", "auth_method": "token"}
    assert samples(registry, "pulsar_authentication_success_total") == [(labels, 2.0)]


def test_failures_by_reason(registry: CollectorRegistry, metrics: AuthMetrics) -> None:
    for reason in ("bad_signature", "bad_signature", "malformed"):
        metrics.count_failure("token", reason)
    metrics.count_failure("none", "unknown_method")
    token = {"provider_name": "TokenProvider", "auth_method": "token"}
    none = {"provider_name": "none", "auth_method": "none"}
    assert samples(registry, "pulsar_authentication_failures_total") == [
        ({**token, "reason": "bad_signature"}, 2.0),
        ({**token, "reason": "malformed"}, 1.0),
        ({**none, "reason": "unknown_method"}, 1.0),
    ]


def test_unknown_methods_share_one_label(registry: CollectorRegistry, metrics: AuthMetrics) -> None:
    for method in ("", "sasl", "Token", *(f"method-{number}" for number in range(100))):
        metrics.count_failure(method, "unknown_method")
        metrics.count_success(method)
    labels = {"provider_name": "none", "auth_method": "other"}
    assert samples(registry, "pulsar_authentication_failures_total") == [
        ({**labels, "reason": "unknown_method"}, 103.0)
    ]
    assert samples(registry, "pulsar_authentication_success_total") == [(labels, 103.0)]


def test_expired_tokens_are_counted_apart(registry: CollectorRegistry, metrics: AuthMetrics) -> None:
    metrics.count_failure("token", "malformed")
    metrics.count_failure("other", "expired")
    assert samples(registry, "pulsar_expired_token_total") == [({}, 0.0)]
    metrics.count_failure("token", "expired")
    assert samples(registry, "pulsar_expired_token_total") == [({}, 1.0)]


def test_rounds_are_measured(registry: CollectorRegistry, metrics: AuthMetrics) -> None:
    metrics.observe_round(0.003)
    assert samples(registry, "pulsar_proxy_authentication_round_seconds_count") == [({}, 1.0)]
    assert samples(registry, "pulsar_proxy_authentication_round_seconds_sum") == [({}, 0.003)]


def test_the_exposition_has_no_created_series(registry: CollectorRegistry, metrics: AuthMetrics) -> None:
    metrics.count_success("token")
    assert b"_created" not in generate_latest(registry)


def test_the_provider_may_change_with_a_reload(registry: CollectorRegistry, metrics: AuthMetrics) -> None:
    class NoProviders:
        methods = ()

        def provider_name(self, method: str) -> str:
            del method
            return "none"

    metrics.providers = NoProviders()
    metrics.count_failure("token", "unknown_method")
    labels = {"provider_name": "none", "auth_method": "other", "reason": "unknown_method"}
    assert samples(registry, "pulsar_authentication_failures_total") == [(labels, 1.0)]
