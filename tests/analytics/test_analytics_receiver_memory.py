"""Freed memory stays with the process, in a process of its own: the setting holds for all of one."""

from __future__ import annotations

import subprocess
import sys

import pytest

ROUNDS = 50
PAGES = 256
PROGRAM = f"""
import resource
import numpy as np
from analytics.receiver import command

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def once():
    return [np.ones({PAGES} * 512) for _ in range(4)]  # {PAGES} pages of 4 KiB each

KEEP
once()
before = faults()
for _ in range({ROUNDS}):
    once()
print(faults() - before)
"""


@pytest.mark.parametrize(("keep", "least", "most"), [(True, 0, PAGES), (False, ROUNDS * PAGES // 4, 10**9)])
def test_memory_of_a_request_serves_the_next(keep: bool, least: int, most: int) -> None:
    program = PROGRAM.replace("KEEP", "command.retain_freed_memory()" if keep else "")
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    assert least <= int(found.stdout) <= most
