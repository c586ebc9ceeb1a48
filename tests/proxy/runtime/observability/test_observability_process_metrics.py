"""proxy.runtime.observability.process_metrics: what a process says of itself is what the kernel says of it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from proxy.runtime.observability.metrics import render_metrics
from proxy.runtime.observability.process_metrics import ProcessMetrics

NAMES = {
    "process_cpu_seconds_total",
    "process_max_fds",
    "process_open_fds",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
    "process_virtual_memory_bytes",
}


ROOT = Path(__file__).resolve().parents[4]

OPENS_FILES = """
import os
from prometheus_client import CollectorRegistry
from proxy.runtime.observability.process_metrics import ProcessMetrics

registry = CollectorRegistry()
registry.register(ProcessMetrics())
print(registry.get_sample_value("process_open_fds"))
files = [os.open("/dev/null", os.O_RDONLY) for _ in range(50)]
print(registry.get_sample_value("process_open_fds"))
"""


def values(registry: CollectorRegistry) -> dict[str, float]:
    lines = [line.split() for line in render_metrics(registry).splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def test_this_process() -> None:
    registry = CollectorRegistry()
    registry.register(ProcessMetrics())
    found = values(registry)
    assert set(found) == NAMES
    assert found["process_max_fds"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert 0 < found["process_resident_memory_bytes"] < found["process_virtual_memory_bytes"]
    assert 0 < found["process_cpu_seconds_total"] <= time.process_time()
    assert 0 < found["process_start_time_seconds"] < time.time()


def test_files_of_a_process() -> None:
    """In one of its own: in this one, those that other tests have left may be closed at any time."""
    done = subprocess.run([sys.executable, "-c", OPENS_FILES], capture_output=True, text=True, check=True, cwd=ROOT)
    before, after = map(float, done.stdout.split())
    assert 3 <= before < 50
    assert after == before + 50


def test_files_that_are_counted_by_listing_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As before Linux 6.2, where the folder has no size."""
    registry = CollectorRegistry()
    registry.register(ProcessMetrics())

    class NoSize:
        st_size = 0

    monkeypatch.setattr(os, "fstat", lambda _: NoSize())
    assert values(registry)["process_open_fds"] > 0


@pytest.mark.parametrize("text", [None, "", "nonsense", "x (a) b) S 1"])
def test_metrics_of_unreadable_proc_files_are_left_out(tmp_path: Path, text: str | None) -> None:
    (tmp_path / "self").mkdir()
    if text is not None:
        for name in ("self/statm", "self/stat", "stat"):
            (tmp_path / name).write_text(text)
    registry = CollectorRegistry()
    registry.register(ProcessMetrics(str(tmp_path)))
    assert set(values(registry)) == {"process_cpu_seconds_total", "process_max_fds"}


def test_a_command_with_odd_characters(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    fields = " ".join(["S", *("0" for _ in range(18)), "200"])
    (tmp_path / "self/stat").write_text(f"7 (a ) b) {fields} 0")
    (tmp_path / "stat").write_text("cpu 1 2\nbtime 1700000000\n")
    registry = CollectorRegistry()
    registry.register(ProcessMetrics(str(tmp_path)))
    assert values(registry)["process_start_time_seconds"] == 1700000000 + 200 / os.sysconf("SC_CLK_TCK")
