"""The files of a worker's values (proxy.common.reloading_file): looked at though nothing uses them, shown as metrics.

Without that, a broken file would be noticed by the first client that needs it, and a mended one as late.
"""

import time
from collections.abc import Callable, Iterator

import trio
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from proxy.common.logs import get_logger
from proxy.common.reloading_file import ReloadingFile, files_in_use, reload_counts
from proxy.runtime.network.certificate_ends import CRL_KEY, crl_warning

CHECK_PAUSE_S = 10.0
CRL_WARNING_PAUSE_S = 86400.0


class FileWatch(Collector):
    """Watches this process's files, and exposes what became of them.

    ``shows_ends``: whether it exposes ends of certificates, and warns of CRLs' ends. One worker of each role does: the
    others have the same files.
    """

    def __init__(self, unix_s: Callable[[], float] = time.time) -> None:
        self.shows_ends = False
        self._unix_s = unix_s
        self._crls: dict[str, tuple[float, str, float]] = {}  # by key: end, what was logged of it, and when

    async def run(self) -> None:
        """Look at all files regularly, until cancelled."""
        while True:
            await self.check()
            await trio.sleep(CHECK_PAUSE_S)

    async def check(self) -> None:
        """Look at all files, and at the ends of CRLs."""
        for file in files_in_use().values():
            if isinstance(file, ReloadingFile):
                await file.current_value()
        self._warn_of_crls()

    def collect(self) -> Iterator[Metric]:
        """Yield the results of reloads, what is in force of each file, and the ends of certificates."""
        files = files_in_use()
        reloads = CounterMetricFamily(
            "pulsar_proxy_file_reloads",
            "Changed files that were taken over (success) or could not be used (failure), by configuration key.",
            labels=["key", "result"],
        )
        successful = GaugeMetricFamily(
            "pulsar_proxy_file_last_reload_successful",
            "Whether the file's content is in force; 0: it cannot be used, and what it held before is in force.",
            labels=["key"],
        )
        ends = GaugeMetricFamily(
            "pulsar_proxy_certificate_expiry_timestamp_seconds",
            "When the first of the certificates or CRLs in force ends, in seconds since 1970, by configuration key.",
            labels=["key"],
        )
        for key, file in sorted(files.items()):
            for result in ("success", "failure"):
                reloads.add_metric([key, result], reload_counts[key, result])
            if isinstance(file, ReloadingFile):
                successful.add_metric([key], float(not file.failure))
        for key, end in self.ends().items():
            ends.add_metric([key], end)
        yield from (reloads, successful, ends)

    def ends(self) -> dict[str, float]:
        """Return when the certificates and CRLs in force end, in seconds since 1970, by configuration key; nothing
        where another worker shows them.
        """
        files = files_in_use().values() if self.shows_ends else ()
        return {key: end for file in files for key, end in file.ends.items()}

    def _warn_of_crls(self) -> None:
        """Log CRLs that end soon or have ended: when it comes to be so, and once a day. What a new file has is
        logged where that is loaded.
        """
        now = self._unix_s()
        for key, end in self.ends().items():
            if not key.endswith(CRL_KEY):
                continue
            event = crl_warning(end, now)
            known_end, logged, logged_at = self._crls.get(key, (0.0, "", 0.0))
            if end != known_end:
                self._crls[key] = (end, event, now)
            elif event and (event != logged or now - logged_at >= CRL_WARNING_PAUSE_S):
                self._crls[key] = (end, event, now)
                get_logger().warning(event, key=key, next_update_unix_s=end)
