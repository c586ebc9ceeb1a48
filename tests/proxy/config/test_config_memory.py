"""proxy.config.memory: what fits into a container, and what is said where too little does."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import pytest
from config_files import Files
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.common.errors import ConfigError
from proxy.config import memory
from proxy.config.cgroups import ContainerLimits
from proxy.config.load import load_plan
from proxy.config.memory import CONNECTIONS_MIN, UNAUTHENTICATED_MIN, MemoryPlan, fit_to_container, forwarder_count
from proxy.config.types import MIB, Config

KEYS = ("max_connections", "max_topic_lists_bytes", "max_lookup_bytes", "max_unauthenticated_connections")


@pytest.fixture(autouse=True)
def four_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 3})


def plan_of(
    memory_mib: int | None = None,
    *,
    cpus: Fraction | None = None,
    running: int = 0,
    crash_safe: bool = True,
    **keys: Any,
) -> MemoryPlan:
    """A plan where the operator has set these keys: of `limits`, and of `cluster`."""
    config = msgspec.structs.replace(Config(), relay=msgspec.structs.replace(Config().relay, crash_safe=crash_safe))
    cluster = {key: value for key, value in keys.items() if key in {"forwarders", "lookup_workers", "auth_workers"}}
    limits = {key: value for key, value in keys.items() if key not in cluster}
    config = msgspec.structs.replace(
        config,
        cluster=msgspec.structs.replace(config.cluster, **cluster),
        limits=msgspec.structs.replace(config.limits, **limits),
    )
    memory = None if memory_mib is None else memory_mib * MIB
    return fit_to_container(config, {f"limits.{key}" for key in limits}, ContainerLimits(cpus, memory), running)


def test_without_a_limit_all_is_as_ever() -> None:
    plan = plan_of(None)
    assert plan.config.limits == Config().limits
    assert plan.config.cluster == msgspec.structs.replace(Config().cluster, forwarders=4)
    assert plan.require() is plan
    assert plan.summary()["memory_limit_mib"] == "none"


def test_where_there_is_plenty_all_is_as_ever_too() -> None:
    limits = plan_of(16 * 1024).require().config.limits
    default = Config().limits
    assert [getattr(limits, key) for key in KEYS[:3]] == [getattr(default, key) for key in KEYS[:3]]
    assert limits.max_unauthenticated_connections == default.max_connections // 4


def test_unset_limits_grow_with_the_memory_limit() -> None:
    small, large = (plan_of(mib, forwarders=2).require().config.limits for mib in (512, 768))
    for key in KEYS:
        assert 0 < getattr(small, key) < getattr(large, key), key


def test_a_limit_set_by_the_operator_is_kept() -> None:
    limits = plan_of(512, forwarders=2, max_connections=2000).require().config.limits
    assert limits.max_connections == 2000
    more = plan_of(512, forwarders=2, max_connections=200).require().config.limits
    assert more.max_topic_lists_bytes > limits.max_topic_lists_bytes, "what it does not need, others get"


def test_forwarders_follow_cpus_and_memory() -> None:
    """A pod without a CPU limit on a large machine must not fill its memory with processes."""
    assert plan_of(8192).config.cluster.forwarders == 4
    assert plan_of(8192, cpus=Fraction(3, 2)).config.cluster.forwarders == 2
    assert plan_of(400).config.cluster.forwarders == 2
    assert plan_of(256).config.cluster.forwarders == 1
    assert plan_of(512, forwarders=3).config.cluster.forwarders == 3
    assert plan_of(512, running=3).config.cluster.forwarders == 3


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"max_connections": 100_000}, "limits.max_connections"),
        ({"max_topic_lists_bytes": 512 * MIB}, "limits.max_topic_lists_bytes"),
        ({"max_lookup_bytes": 512 * MIB}, "limits.max_lookup_bytes"),
        ({"max_unauthenticated_connections": 9_000}, "limits.max_unauthenticated_connections"),
        ({"forwarders": 16}, "cluster.forwarders"),
        ({"lookup_workers": 16}, "cluster.lookup_workers"),
        ({"auth_workers": 16}, "cluster.auth_workers"),
    ],
)
def test_a_limit_that_is_too_small_names_the_key_to_lower(keys: dict[str, Any], named: str) -> None:
    plan = plan_of(512, **{"forwarders": 1, **keys})
    with pytest.raises(ConfigError) as caught:
        plan.require()
    text = str(caught.value)
    assert text.startswith(f"{named}: the container's memory limit of 512 MiB is too small")
    assert f"lower {named}" in text
    assert plan_of(-(-plan.needed_bytes // MIB), **{"forwarders": 1, **keys}).require(), "as much as it said is enough"


def test_a_limit_that_is_too_small_for_anything() -> None:
    with pytest.raises(ConfigError, match=r"limit of 64 MiB is too small: this configuration needs \d+ MiB; raise"):
        plan_of(64).require()


def test_tls_costs_memory_for_each_connection() -> None:
    tables = {"listener": [{}, {"tls": {"certificate": "c", "key": "k"}}], "brokers": {"service_url": "pulsar+ssl://b"}}
    found = []
    for names in ((), ("listener",), ("listener", "brokers")):
        config = msgspec.convert({name: tables[name] for name in names}, Config)
        found.append(
            fit_to_container(config, (), ContainerLimits(memory_bytes=512 * MIB)).config.limits.max_connections
        )
    assert found[0] > found[1] > found[2] > 0


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 4096),
    st.integers(0, 8),
    st.fixed_dictionaries(
        {},
        optional={
            "max_connections": st.integers(1, 50_000),
            "max_topic_lists_bytes": st.integers(1024, 512 * MIB),
            "max_lookup_bytes": st.integers(1024, 512 * MIB),
            "max_unauthenticated_connections": st.integers(1, 5_000),
        },
    ),
)
def test_a_plan_fits_or_says_what_would(memory_mib: int, forwarders: int, keys: dict[str, int]) -> None:
    plan = plan_of(memory_mib, forwarders=forwarders, **keys)
    limits = plan.config.limits
    assert all(getattr(limits, key) == value for key, value in keys.items())
    for key in KEYS[:3]:
        assert getattr(limits, key) <= keys.get(key, getattr(Config().limits, key)) or key == KEYS[1]
    if plan.shortage:
        assert plan.needed_bytes > memory_mib * MIB
        again = plan_of(-(-plan.needed_bytes // MIB), **{**keys, "forwarders": plan.config.cluster.forwarders})
        assert not again.shortage
    else:
        assert plan.needed_bytes <= memory_mib * MIB + 16
        assert "max_connections" in keys or limits.max_connections >= CONNECTIONS_MIN
        assert "max_unauthenticated_connections" in keys or limits.max_unauthenticated_connections >= 1
    assert UNAUTHENTICATED_MIN <= CONNECTIONS_MIN


def test_which_keys_were_set_is_known_from_file_and_environment(tmp_path: Path) -> None:
    """Even one that is set to its default."""
    file = tmp_path / "proxy.toml"
    file.write_text("[limits]\nmax_connections = 10000\n")
    environment = {"PULSAR_TRIO_PROXY__LIMITS__MAX_LOOKUP_BYTES": "2097152"}
    limits = load_plan(file, environment, ContainerLimits(memory_bytes=1024 * MIB)).config.limits
    assert (limits.max_connections, limits.max_lookup_bytes) == (10_000, 2 * MIB)
    file.write_text("")
    limits = load_plan(file, {}, ContainerLimits(memory_bytes=512 * MIB)).config.limits
    assert limits.max_connections < 10_000


def test_forwarders(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 5})
    assert forwarder_count(files.load("[cluster]\nforwarders = 7")) == 7
    monkeypatch.setattr(memory, "container_limits", ContainerLimits)
    assert forwarder_count(Config()) == 3
    monkeypatch.setattr(memory, "container_limits", lambda: ContainerLimits(cpus=Fraction(3, 2)))
    assert forwarder_count(Config()) == 2
    assert forwarder_count(files.load("[cluster]\nforwarders = 7")) == 7
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(1000)))
    monkeypatch.setattr(memory, "container_limits", ContainerLimits)
    assert forwarder_count(Config()) == 256
