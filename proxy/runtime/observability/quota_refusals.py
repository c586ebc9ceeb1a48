"""What quotas (`[[quota]]`) refuse in a process, or would: counted by limit, and logged by name."""

from prometheus_client import CollectorRegistry, Counter

from proxy.common.logs import get_logger, is_dropped
from proxy.runtime.fairness.quotas import AppliedQuota, Limit


class QuotaRefusals:
    """Counts and logs what quotas refuse. The counter has no label that clients can choose."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._refusals = Counter(
            "pulsar_proxy_quota_refusals",
            "Connections and lookups that a quota refused, by limit, whose it is, and whether it was only counted.",
            ["limit", "by", "dry_run"],
            registry=registry,
        )

    def count_refusal(self, applied: AppliedQuota, limit: Limit, owner: str) -> None:
        """Count and log that a quota refuses something to an owner, or would."""
        quota = applied.quota
        self._refusals.labels(limit=limit, by=quota.by, dry_run=str(quota.dry_run).lower()).inc()
        event = "a quota would have refused a client" if quota.dry_run else "a quota has refused a client"
        if not is_dropped(event):  # a refusal must not cost more than what it refuses
            get_logger().warning(event, client=owner, key=applied.key(limit), subject=applied.subject)
