"""Counts that a run by hand may raise: CI has the smallest that meets every state."""

from __future__ import annotations

import os


def count_of(name: str, in_ci: int) -> int:
    """Return the number that PULSAR_PROXY_TEST_<name> says, ``in_ci`` where it is not set."""
    return int(os.environ.get(f"PULSAR_PROXY_TEST_{name}", in_ci))
