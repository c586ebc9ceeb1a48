"""Resource use of a process of the cluster, under the standard names of Prometheus' client libraries.

Not the library's collector: it lists all open files to count them, of which a supervisor has tens of thousands.
"""

import os
import resource
import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_START_FIELD = 19
"""Index in /proc/PID/stat, after the command's name, of the process's start in clock ticks since boot."""

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ProcessMetrics(Collector):
    """A collector that measures this process at each scrape. Where a file cannot be read, its metric is left out."""

    def __init__(self, proc: str = "/proc") -> None:
        self._proc = proc

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that can be measured."""
        cpu_s = time.process_time()
        yield CounterMetricFamily("process_cpu_seconds", "CPU time of the process, in seconds.", value=cpu_s)
        soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        yield GaugeMetricFamily("process_max_fds", "Files that the process may have open.", value=soft)
        measures = (
            ("process_virtual_memory_bytes", "Address space of the process, in bytes.", self._virtual_bytes),
            ("process_resident_memory_bytes", "Memory of the process, shared pages included.", self._resident_bytes),
            ("process_start_time_seconds", "When the process began, in seconds since 1970.", self._started_s),
            ("process_open_fds", "Files that the process has open.", self._open_files),
        )
        for name, text, measure in measures:
            try:
                yield GaugeMetricFamily(name, text, value=measure())
            except (OSError, ValueError, IndexError):
                continue

    def _read(self, name: str) -> str:
        with open(f"{self._proc}/{name}", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            return file.read()

    def _virtual_bytes(self) -> float:
        return int(self._read("self/statm").split()[0]) * _PAGE_BYTES

    def _resident_bytes(self) -> float:
        return int(self._read("self/statm").split()[1]) * _PAGE_BYTES

    def _started_s(self) -> float:
        ticks = int(self._read("self/stat").rpartition(")")[2].split()[_START_FIELD])
        booted = next(line for line in [*self._read("stat").splitlines(), "btime"] if line.startswith("btime"))
        return int(booted.split()[1]) + ticks / _TICKS_PER_S

    def _open_files(self) -> float:
        folder = f"{self._proc}/self/fd"
        return os.stat(folder).st_size or len(os.listdir(folder))  # noqa: PTH116, PTH208 -- Linux 6.2 tells the number


def register_process_metrics(registry: CollectorRegistry) -> None:
    """Register the metrics of this process's resource use."""
    registry.register(ProcessMetrics())
