"""What operators change at run time: the level of the log, and readiness; both survive an upgrade."""

from __future__ import annotations

import json
from typing import Any

from .lab.cluster import ProxyCluster
from .lab.waiting import eventually
from .lab.wire import WireClient
from .test_relays_survive import kill_forwarder, scene


def status_of(cluster: ProxyCluster) -> dict[str, Any]:
    done = cluster.command("status", "--json")
    assert done.returncode == 0, done.stderr
    status: dict[str, Any] = json.loads(done.stdout)
    return status


def test_the_level_of_the_log_and_readiness_survive_an_upgrade() -> None:
    """The supervisor's entries at level info go, and come back; a killed forwarder's successor has its level, too."""
    with scene({}, forwarders=1) as at:
        cluster = at.cluster
        assert cluster.command("log-level").stdout == "info, as configured\n"
        assert cluster.command("log-level", "error").returncode == 0
        assert cluster.command("log-level", "debug", "--for", "100h", "--role", "forwarder").returncode == 0
        assert cluster.get("/readyz").status == 200
        assert cluster.command("unready", "--reason", "a new kernel").returncode == 0
        with WireClient(cluster.port) as client:
            kill_forwarder(cluster)
            assert cluster.command("upgrade", timeout_s=300).returncode == 0
            assert client is not None
        refused = cluster.get("/readyz")
        assert refused.status == 503
        assert "made unready by an operator: a new kernel" in refused.text
        text = cluster.command("status").stdout
        assert "not ready: made unready by an operator: a new kernel" in text
        assert "supervisor: CHANGED to error until it is changed (configured: info)" in text
        levels = {one["role"]: one["level"] for one in status_of(cluster)["log_levels"]["changed"]}
        assert (levels["forwarder"], levels["supervisor"], levels["auth"]) == ("debug", "error", "error")
        assert "becoming the program" not in cluster.log_text()
        assert cluster.command("log-level", "configured").returncode == 0
        assert cluster.command("reload").returncode == 0
        cluster.wait_for_log("the configuration was reloaded")
        assert cluster.command("ready").returncode == 0
        eventually(lambda: cluster.get("/readyz").status == 200, what="ready again")
