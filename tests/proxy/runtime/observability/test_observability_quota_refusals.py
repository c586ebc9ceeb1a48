"""proxy.runtime.observability.quota_refusals: what quotas refuse is counted, and logged as far as the log takes it."""

from __future__ import annotations

import pytest
import structlog.testing
from prometheus_client import CollectorRegistry

from proxy.config.types import Quota
from proxy.runtime.fairness.quotas import AppliedQuota
from proxy.runtime.observability import quota_refusals
from proxy.runtime.observability.quota_refusals import QuotaRefusals


def test_an_entry_that_the_log_would_drop_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Security: to be refused, over and over, costs less than to be served."""
    registry, taken = CollectorRegistry(), iter([False, True, True])
    monkeypatch.setattr(quota_refusals, "is_dropped", lambda _event: next(taken))
    refusals = QuotaRefusals(registry)
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            applied = AppliedQuota(1, Quota(lookups_per_second=1), "principal alice")
            refusals.count_refusal(applied, "lookups_per_second", "principal alice")
    assert [(entry["event"], entry["key"]) for entry in logs] == [
        ("a quota has refused a client", "quota[1].lookups_per_second")
    ]
    labels = {"limit": "lookups_per_second", "by": "principal", "dry_run": "false"}
    assert registry.get_sample_value("pulsar_proxy_quota_refusals_total", labels) == 3
