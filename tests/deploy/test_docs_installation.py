"""docs/installation.md: its figures are those that the code plans with."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec
import pytest

from proxy.config.cgroups import ContainerLimits
from proxy.config.memory import (
    CONNECTION_BYTES,
    SUPERVISION_BYTES,
    TLS_BYTES,
    WORKER_BYTES,
    MemoryPlan,
    fit_to_container,
)
from proxy.config.types import MIB, Config
from proxy.runtime.process.hardening import DATA_WORKER_OOM_SCORE, WORKER_OOM_SCORE

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "installation.md").read_text()
WORDS = " ".join(PAGE.split())


@pytest.fixture(autouse=True)
def two_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})


def plan(memory_mib: int, forwarders: int, **limits: int) -> MemoryPlan:
    config = msgspec.convert({"cluster": {"forwarders": forwarders}, "limits": limits}, Config)
    return fit_to_container(config, {f"limits.{key}" for key in limits}, ContainerLimits(memory_bytes=memory_mib * MIB))


def test_the_estimates() -> None:
    assert (
        f"{SUPERVISION_BYTES // MIB} MiB for supervisor and admin worker, {WORKER_BYTES // MIB} MiB for each" in WORDS
    )
    assert f"{CONNECTION_BYTES // 1024} KiB for a connection and {TLS_BYTES // 1024} KiB more for TLS" in WORDS
    assert f"by {DATA_WORKER_OOM_SCORE}, auth and admin workers by {WORKER_OOM_SCORE}" in WORDS


def test_they_are_above_what_was_measured() -> None:
    measured = dict(re.findall(r"^\| ([^|]+) \| ([\d.]+) MiB \|$", PAGE, re.MULTILINE))
    for forwarders in (1, 2, 4):
        plural = "s" if forwarders > 1 else ""
        at_rest = float(measured[f"at rest, {forwarders} forwarder{plural}"])
        assert at_rest * MIB < plan(4096, forwarders).processes_bytes < 1.5 * at_rest * MIB
    for name in ("forwarder", "lookup worker", "auth worker"):
        assert float(measured[f"a further {name}"]) * MIB < WORKER_BYTES
    assert float(measured["1,000 plain relays"]) * MIB < 1000 * CONNECTION_BYTES
    assert float(measured["1,000 connections in lookup mode"]) * MIB < 1000 * CONNECTION_BYTES
    assert float(measured["1,000 relays with TLS towards clients"]) * MIB < 1000 * (CONNECTION_BYTES + TLS_BYTES)


@pytest.mark.parametrize(("forwarders", "words"), [(1, "one forwarder needs a limit of"), (2, "two need")])
def test_the_smallest_limits(forwarders: int, words: str) -> None:
    found = re.search(rf"{words} (\d+) MiB", WORDS)
    assert found is not None
    smallest = int(found[1])
    assert plan(smallest - 1, forwarders).shortage
    assert not plan(smallest, forwarders).shortage


def test_the_example_of_an_error() -> None:
    assert " ".join(plan(512, 1, max_connections=100_000).shortage.split()) in WORDS
