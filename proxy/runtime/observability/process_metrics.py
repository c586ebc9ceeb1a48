"""Resource use of a process of the cluster, under the standard names of Prometheus' client libraries.

Not the library's collector: it lists all open files to count them, of which a supervisor has tens of thousands.
"""

import os
import resource
import time
import weakref
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from proxy.common.files import read_file

_START_FIELD = 19
"""Index in /proc/PID/stat, after the command's name, of the process's start in clock ticks since boot."""

_STATM_BYTES_MAX = 256
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ProcessMetrics(Collector):
    """A collector that measures this process at each scrape. Where a file cannot be read, its metric is left out.

    The files are opened once: a worker can open none later.
    """

    def __init__(self, proc: str = "/proc") -> None:
        self._statm = _open(f"{proc}/self/statm")
        self._files = _open(f"{proc}/self/fd")
        for descriptor in {self._statm, self._files} - {-1}:
            weakref.finalize(self, os.close, descriptor)
        try:
            self._started_unix_s: float | None = _started_unix_s(proc)
        except (OSError, ValueError, IndexError):
            self._started_unix_s = None

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

    def _virtual_bytes(self) -> float:
        return self._pages(0) * _PAGE_BYTES

    def _resident_bytes(self) -> float:
        return self._pages(1) * _PAGE_BYTES

    def _pages(self, index: int) -> int:
        return int(os.pread(self._statm, _STATM_BYTES_MAX, 0).split()[index])

    def _started_s(self) -> float:
        if self._started_unix_s is None:
            raise ValueError("not known")
        return self._started_unix_s

    def _open_files(self) -> float:
        return os.fstat(self._files).st_size or len(os.listdir(self._files))  # noqa: PTH208 -- Linux 6.2 tells it


def _open(path: str) -> int:
    """Open a file or directory; return -1, which no read accepts, where that cannot be done."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def _started_unix_s(proc: str) -> float:
    """Return when this process began. Raises OSError, ValueError, IndexError."""
    ticks = int(read_file(f"{proc}/self/stat").rpartition(b")")[2].split()[_START_FIELD])
    booted = next(line for line in [*read_file(f"{proc}/stat").splitlines(), b"btime"] if line.startswith(b"btime"))
    return int(booted.split()[1]) + ticks / _TICKS_PER_S
