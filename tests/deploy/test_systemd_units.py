"""deploy/systemd: systemd takes the units, they are hardened, and they fit the proxy and the pages."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from proxy.config.types import Config, Limits

UNITS = Path(__file__).resolve().parents[2] / "deploy" / "systemd"
SERVICE = UNITS / "pulsar-trio-proxy.service"
EXPOSURE_MAX = 2.0

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")


def settings() -> dict[str, str]:
    """The last value of each key of the service."""
    return dict(re.findall(r"^(\w+)=(.*)$", SERVICE.read_text(), re.MULTILINE))


def analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, check=False)


@needs_systemd
@pytest.mark.parametrize("unit", ["pulsar-trio-proxy.service", "pulsar-trio-proxy.socket"])
def test_systemd_takes_the_units(tmp_path: Path, unit: str) -> None:
    """But for what an older one does not know, and says that it ignores."""
    shutil.copytree(UNITS, tmp_path / "units")
    service = tmp_path / "units" / SERVICE.name
    service.write_text(re.sub("^ExecStart=.*", "ExecStart=/bin/true", SERVICE.read_text(), flags=re.MULTILINE))
    complaints = analyze("verify", tmp_path / "units" / unit).stderr.splitlines()
    assert [line for line in complaints if "tmp" in line and not re.search(r"notify-reload|StorePreserve", line)] == []


@needs_systemd
def test_the_service_is_hardened() -> None:
    report = analyze("security", "--offline=true", SERVICE).stdout
    (exposure,) = re.findall(r"Overall exposure level for \S+: ([\d.]+)", report)
    assert float(exposure) <= EXPOSURE_MAX, report


def test_the_service_leaves_time_for_a_drain() -> None:
    drained_s = (Config().shutdown.delay_ms + Limits().drain_timeout_ms) / 1000 + 10
    assert int(settings()["TimeoutStopSec"]) >= drained_s
    assert settings()["KillMode"] == "mixed", "only the supervisor is told to drain"


def test_open_files_are_enough_for_the_default_of_connections() -> None:
    assert int(settings()["LimitNOFILE"]) == Limits().max_connections * 4 + 4096


def test_only_the_supervisor_speaks_for_the_unit() -> None:
    assert settings()["NotifyAccess"] == "main"


def test_an_older_systemd_gets_as_large_a_store() -> None:
    drop_in = (UNITS / "pulsar-trio-proxy.service.d" / "older-systemd.conf").read_text()
    assert f"FDSTORE={settings()['FileDescriptorStoreMax']}\n" in drop_in
