"""The start of a worker process."""

import subprocess
import sys

_START = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
from proxy.runtime.process import hardening, start, worker
hardening.restrict_process = lambda _score: None
worker.worker_main = lambda *_: print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
start.start_worker("lookup", "proxy.runtime.process.start:start_worker", 0)
"""


def test_a_worker_can_be_ended_whatever_its_starter_blocks() -> None:
    """A mask of signals outlives fork and exec: `kill` would do nothing."""
    result = subprocess.run([sys.executable, "-c", _START], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
