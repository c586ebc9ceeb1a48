"""proxy.config.cgroups: both versions, nested, hybrid, and files that say odd things."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from proxy.config.cgroups import (
    ContainerLimits,
    Mount,
    container_limits,
    parse_bytes,
    parse_cpu_max,
    parse_mounts,
    parse_own_cgroups,
    read_file,
    usable_cpus,
)

V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "36 31 0:33 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n"
)
UNIFIED = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
V1_NONE = "9223372036854771712\n"


class Machine:
    """A tree of files below a folder, read as if it were the root."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def write(self, files: dict[str, str]) -> Machine:
        for name, text in files.items():
            path = self._root / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return self

    def limits(self) -> ContainerLimits:
        return container_limits(lambda path: read_file(f"{self._root}{path}"))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def v2(own: str, files: dict[str, str]) -> dict[str, str]:
    below = {f"/sys/fs/cgroup{name}": text for name, text in files.items()}
    return {"/proc/self/mountinfo": V2, "/proc/self/cgroup": f"0::{own}\n", **below}


def v1(own: str, files: dict[str, str]) -> dict[str, str]:
    cgroups = f"4:memory:{own}\n3:pids:{own}\n2:cpu,cpuacct:{own}\n1:name=systemd:{own}\n"
    below = {f"/sys/fs/cgroup{name}": text for name, text in files.items()}
    return {"/proc/self/mountinfo": V1, "/proc/self/cgroup": cgroups, **below}


def test_version_2_with_a_namespace_of_its_own(machine: Machine) -> None:
    """As in a container of Kubernetes: the process's cgroup is the root that it sees."""
    machine.write(v2("/", {"/cpu.max": "150000 100000\n", "/memory.max": "536870912\n"}))
    assert machine.limits() == (Fraction(3, 2), 512 << 20)


@pytest.mark.parametrize(
    "smallest", ["/kubepods/pod1/c1", "/kubepods/pod1", "/kubepods", ""], ids=["own", "pod", "pods", "root"]
)
def test_version_2_the_smallest_on_the_way_up_counts(machine: Machine, smallest: str) -> None:
    files = {}
    for folder in ("/kubepods/pod1/c1", "/kubepods/pod1", "/kubepods", ""):
        files[f"{folder}/cpu.max"] = "50000 100000\n" if folder == smallest else "400000 100000\n"
        files[f"{folder}/memory.max"] = "1048576\n" if folder == smallest else "max\n"
    files["/kubepods/pod2/cpu.max"] = "1000 100000\n"  # a neighbour's
    machine.write(v2("/kubepods/pod1/c1", files))
    assert machine.limits() == (Fraction(1, 2), 1 << 20)


@pytest.mark.parametrize("smallest", ["/docker/c1", "/docker", ""], ids=["own", "parent", "root"])
def test_version_1_the_smallest_on_the_way_up_counts(machine: Machine, smallest: str) -> None:
    files = {}
    for folder in ("/docker/c1", "/docker", ""):
        is_it = folder == smallest
        files[f"/cpu,cpuacct{folder}/cpu.cfs_quota_us"] = "250000\n" if is_it else "-1\n"
        files[f"/cpu,cpuacct{folder}/cpu.cfs_period_us"] = "100000\n"
        files[f"/memory{folder}/memory.limit_in_bytes"] = "268435456\n" if is_it else V1_NONE
    machine.write(v1("/docker/c1", files))
    assert machine.limits() == (Fraction(5, 2), 256 << 20)


def test_version_1_in_a_container_without_a_namespace(machine: Machine) -> None:
    """The mount shows the container's own cgroup alone, by the host's path."""
    shown = V1.replace("0:29 / ", "0:29 /docker/c1 ").replace("0:32 / ", "0:32 /docker/c1 ")
    files = v1("/docker/c1", {"/memory/memory.limit_in_bytes": "7000000\n"}) | {"/proc/self/mountinfo": shown}
    assert machine.write(files).limits() == (None, 7_000_000)
    nested = files | {"/proc/self/cgroup": "4:memory:/docker/c1/inner\n"}
    nested["/sys/fs/cgroup/memory/inner/memory.limit_in_bytes"] = "6000000\n"
    assert machine.write(nested).limits() == (None, 6_000_000)


@pytest.mark.parametrize("own", ["/../../elsewhere", "/docker/c2"])
def test_a_cgroup_outside_of_what_is_mounted(machine: Machine, own: str) -> None:
    """Never a folder of another one's: what the mount itself says is said of all below it."""
    mounts = {"/proc/self/mountinfo": V2.replace("0:26 / ", "0:26 /docker/c1 ")}
    files = v2(own, {"/memory.max": "5000000\n", "/docker/c2/memory.max": "1\n", "/elsewhere/memory.max": "2\n"})
    assert machine.write(files | mounts).limits() == (None, 5_000_000)


def test_hybrid(machine: Machine) -> None:
    """Version 2 is there for systemd alone; the controllers are version 1's."""
    files = v1("/a", {"/memory/a/memory.limit_in_bytes": "4000000\n", "/unified/a/cgroup.procs": "1\n"})
    files["/proc/self/mountinfo"] += UNIFIED
    files["/proc/self/cgroup"] += "0::/a\n"
    assert machine.write(files).limits() == (None, 4_000_000)


def test_controllers_of_which_each_version_has_one(machine: Machine) -> None:
    files = v1("/a", {"/memory/a/memory.limit_in_bytes": "4000000\n", "/unified/b/cpu.max": "200000 100000\n"})
    files["/proc/self/mountinfo"] += UNIFIED
    files["/proc/self/cgroup"] += "0::/b\n"
    assert machine.write(files).limits() == (2, 4_000_000)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"/proc/self/mountinfo": V2},
        {"/proc/self/cgroup": "0::/\n"},
        v2("/", {}),
        v2("/", {"/cpu.max": "max 100000\n", "/memory.max": "max\n"}),
        v2("/", {"/cpu.max": "", "/memory.max": ""}),
        v1("/", {"/cpu,cpuacct/cpu.cfs_quota_us": "-1\n", "/cpu,cpuacct/cpu.cfs_period_us": "100000\n"}),
        v1("/", {"/cpu,cpuacct/cpu.cfs_quota_us": "", "/cpu,cpuacct/cpu.cfs_period_us": "100000\n"}),
        v1("/", {"/memory/memory.limit_in_bytes": V1_NONE}),
        {"/proc/self/mountinfo": "nonsense\n - \n1 2 3 - cgroup2\n", "/proc/self/cgroup": "nonsense\n::\n0::no path\n"},
    ],
)
def test_no_limit(machine: Machine, files: dict[str, str]) -> None:
    assert machine.write(files).limits() == (None, None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("100000 100000", 1),
        ("150000 100000\n", Fraction(3, 2)),
        ("1000 1000000", Fraction(1, 1000)),
        ("50000", Fraction(1, 2)),
        ("max 100000", None),
        ("max", None),
        ("-1 100000", None),
        ("0 100000", None),
        ("100000 0", None),
        ("100000 ", 1),
        ("", None),
        ("1e5 100000", None),
        ("\uff11 1", None),
        ("9" * 30 + " 100000", None),
    ],
)
def test_cpu_quotas(text: str, expected: Fraction | None) -> None:
    assert parse_cpu_max(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("4096\n", 4096), ("max\n", None), ("", None), ("0", None), ("-1", None), (V1_NONE, None), ("12 34", None)],
)
def test_bytes(text: str, expected: int | None) -> None:
    assert parse_bytes(text) == expected


def test_mounts_with_odd_names() -> None:
    text = r"30 23 0:26 /a\040b /mnt/with\040space rw shared:4 master:1 - cgroup2 none rw"
    assert parse_mounts(text) == [Mount("/a b", "/mnt/with space")]


def test_own_cgroups_with_colons() -> None:
    assert parse_own_cgroups("0::/a:b\n4:memory:/c:d\n") == {frozenset(): "/a:b", frozenset({"memory"}): "/c:d"}


@pytest.mark.parametrize(
    ("affinity", "cpus", "expected"),
    [
        (8, None, 8),
        (8, Fraction(3, 2), 2),
        (8, Fraction(1, 10), 1),
        (8, Fraction(4), 4),
        (2, Fraction(16), 2),
        (0, None, 1),
    ],
)
def test_usable_cpus(affinity: int, cpus: Fraction | None, expected: int) -> None:
    assert usable_cpus(affinity, ContainerLimits(cpus)) == expected


def test_a_file_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    assert read_file(str(tmp_path / "missing")) == read_file(str(tmp_path)) == ""
