"""Ejection of outliers: brokers to which relays fail, as forwarders report (proxy.forwarder.workers.relay_outcomes).

Such a broker may answer probes and lookups: so its ejection lasts its time, whatever it answers. Clients can provoke
failures, and a captured forwarder can invent reports: so at most a third of the brokers (of two or more, one at least)
are ejected in this way at a time, and never the last one that is not ejected.
"""

import math
from collections.abc import Callable

import trio

from lookup.brokers.discovery import BrokerDiscovery, BrokerHealth, Endpoint
from lookup.metrics import BrokerMetrics
from proto.rpc_pb2 import ReportOutlierRequest
from proxy.common.logs import get_logger
from proxy.config.types import Brokers
from proxy.runtime.loop.tasks import seconds

SHARE = 3
"""One of so many brokers may be ejected as an outlier."""

ERROR_CHARACTERS_MAX = 200
"""Of an error in a report, which a captured forwarder can make as long as an RPC frame."""


def ejection_s(config: Brokers, ejections: int) -> float:
    """Return how long an ejection lasts, after this number of others, in seconds."""
    longest_s = seconds(config.ejection_time_max_ms)
    return min(seconds(config.ejection_time_ms) * 2.0 ** min(ejections, 32), longest_s)


class OutlierEjection:
    """Ejects reported outliers, within the bound.

    ``label``: the name of a broker, for the log. ``on_ejected``: called after each ejection.
    """

    def __init__(
        self,
        config: Brokers,
        discovery: BrokerDiscovery,
        metrics: BrokerMetrics,
        label: Callable[[Endpoint], str],
        on_ejected: Callable[[], None],
    ) -> None:
        self._config = config
        self._discovery = discovery
        self._metrics = metrics
        self._label = label
        self._on_ejected = on_ejected
        self._spared_logged_until = -math.inf

    def eject_reported(self, report: ReportOutlierRequest) -> None:
        """Eject the broker of a report, unless it is ejected, or the bound is reached."""
        found = self._discovery.endpoints_at(tuple(report.addresses), report.port)
        if not self._config.ejection_by_relays or len(found) != 1 or found[0].health.ejected:
            return
        [endpoint], now, longest_s = found, trio.current_time(), seconds(self._config.ejection_time_max_ms)
        if now - endpoint.health.outlier_until < report.window_ms / 1000:
            return  # what has failed may have failed before its last ejection
        last_error = report.last_error[:ERROR_CHARACTERS_MAX]
        about = {"owners_failing": report.owners_failing, "owners": report.owners, "last_error": last_error}
        if not self._may_eject(endpoint):
            if now >= self._spared_logged_until:
                self._spared_logged_until = now + longest_s
                get_logger().warning("a broker is not ejected: others are", broker=self._label(endpoint), **about)
            return
        health = endpoint.health
        if now - health.outlier_until > longest_s:
            health.outlier_ejections = 0
        pause_s = ejection_s(self._config, health.outlier_ejections)
        health.outlier_ejections += 1
        health.outlier_reason = f"relays of {report.owners_failing} of {report.owners} owners fail: {last_error}"
        health.ejected = True
        health.ejected_until = health.outlier_until = now + pause_s
        self._metrics.count_ejection("relays")
        get_logger().warning(
            "a broker is ejected", broker=self._label(endpoint), reason="relays", **about, pause_s=pause_s
        )
        self._on_ejected()

    def _may_eject(self, endpoint: Endpoint) -> bool:
        endpoints = self._discovery.endpoints
        others: list[BrokerHealth] = [one.health for one in endpoints if one is not endpoint]
        outliers = sum(bool(one.outlier_reason) for one in others)
        return outliers < max(1, len(endpoints) // SHARE) and not all(one.ejected for one in others)
