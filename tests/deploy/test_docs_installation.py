"""docs/installation.md: its figures are those that the code plans with."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec
import pytest
import yaml

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

PAGE_PATH = Path(__file__).resolve().parents[2] / "docs" / "installation.md"
PAGE = PAGE_PATH.read_text()
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
        assert 1.15 * at_rest * MIB <= plan(4096, forwarders).processes_bytes < 1.5 * at_rest * MIB
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


# ---- the chart's defaults

VALUES = yaml.safe_load((PAGE_PATH.parents[1] / "deploy/helm/pulsar-trio-proxy/values.yaml").read_text())
RESOURCES = VALUES["resources"]
CPU_OF = {
    "keep relays": "to keep 1,000 relays with TLS towards clients that do nothing",
    "keep lookups": "to keep 1,000 connections in lookup mode that do nothing",
    "open relays": "to open 1,000 relays with TLS towards clients",
    "open lookups": "to open 1,000 connections in lookup mode, with a lookup each",
}


def measured_cpu() -> dict[str, float]:
    """Percent of a CPU, or seconds, that the page's table has."""
    rows = dict(re.findall(r"^\| ([^|]+) \| ([\d.]+)(?: s| % of a CPU) \|$", PAGE, re.MULTILINE))
    return {name: float(rows[row]) for name, row in CPU_OF.items()}


def sums() -> dict[str, tuple[float, float]]:
    """MiB and percent of a CPU of each row of the page's sum."""
    table = PAGE.partition("| part | memory | CPU |")[2].partition("| **requested**")[0]
    rows = re.findall(r"^\| (.+?) \| (?:(\d+) MiB)? ?\| ([\d.]+) % \|$", table, re.MULTILINE)
    return {part.strip("*"): (float(memory or 0), float(cpu)) for part, memory, cpu in rows}


def test_the_charts_sums_are_of_measured_values() -> None:
    memory = dict(re.findall(r"^\| ([^|]+) \| ([\d.]+) MiB \|$", PAGE, re.MULTILINE))
    cpu = measured_cpu()
    at_rest = re.search(r"at rest, 1 forwarder \| [\d.]+ to ([\d.]+) % of a CPU", PAGE)
    message = re.search(r"(\d+) to (\d+) µs for a small message", PAGE)
    assert at_rest
    assert message
    assert VALUES["config"]["cluster"]["forwarders"] == 2
    parts = {
        "at rest": (float(memory["at rest, 2 forwarders"]), 2 * float(at_rest[1])),
        "3,000 relays": (3 * float(memory["1,000 relays with TLS towards clients"]), 3 * cpu["keep relays"]),
        "1,000 connections": (float(memory["1,000 connections in lookup mode"]), cpu["keep lookups"]),
        "3,000 messages": (0.0, 3000 * int(message[2]) / 1e6 * 100),
    }
    said = sums()
    for beginning, wanted in parts.items():
        (found,) = (value for part, value in said.items() if part.startswith(beginning))
        assert found == pytest.approx(wanted, abs=0.05), beginning
    added = [sum(column) for column in zip(*(said[part] for part in said if part != "together"), strict=True)]
    assert said["together"] == pytest.approx(added)
    reconnecting = 3 * cpu["open relays"] + cpu["open lookups"]
    assert f"that is {reconnecting:.1f} s of CPU time" in WORDS


def test_the_chart_requests_what_the_sums_say() -> None:
    memory_mib, cpu_percent = sums()["together"]
    requests = RESOURCES["requests"]
    assert f"| **requested** | {requests['memory']} | {requests['cpu']} |" in PAGE
    assert memory_mib <= int(requests["memory"].removesuffix("Mi")) < 1.2 * memory_mib
    assert cpu_percent * 10 <= int(requests["cpu"].removesuffix("m")) < 1.2 * cpu_percent * 10
    assert "cpu" not in RESOURCES["limits"]


def test_the_charts_memory_limit_allows_the_connections_that_the_page_names() -> None:
    assert f"the memory limit of {RESOURCES['limits']['memory']} allows each pod 10,000 connections" in WORDS
    forwarders = VALUES["config"]["cluster"]["forwarders"]
    limit_mib = int(RESOURCES["limits"]["memory"].removesuffix("Gi")) * 1024
    assert plan(limit_mib, forwarders).config.limits.max_connections == 10_000
    listener = {"bind": "0.0.0.0:6651", "tls": {"certificate": "c", "key": "k"}}
    config = msgspec.convert({"cluster": {"forwarders": forwarders}, "listener": [listener]}, Config)
    fitted = fit_to_container(config, set(), ContainerLimits(memory_bytes=limit_mib * MIB))
    said = re.search(r"or ([\d,]+) if the listener uses TLS", WORDS)
    assert said
    assert fitted.config.limits.max_connections // 100 * 100 == int(said[1].replace(",", ""))
