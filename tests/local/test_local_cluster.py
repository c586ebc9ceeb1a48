"""The configuration that `make run` writes, and the cluster that does not start."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from local.cluster import Cluster, ClusterError, broker_ports


@pytest.mark.parametrize(
    ("url", "ports"),
    [
        ("pulsar://localhost:6660", [6650, 6651, 6660]),
        ("pulsar://a:7000,b:7001/", [6650, 6651, 7000, 7001]),
        ("pulsar+ssl://[::1]:7002", [6650, 6651, 7002]),
        ("pulsar://broker", [6650, 6651]),
    ],
)
def test_broker_ports(url: str, ports: list[int]) -> None:
    assert broker_ports(url) == ports


def test_cluster_that_dies(tmp_path: Path) -> None:
    command = tmp_path / "proxy"
    command.write_text('#!/bin/sh\necho "$@"\nexit 2\n')
    command.chmod(0o755)
    cluster = Cluster(command, tmp_path, 'pulsar://"odd', port=1, admin_port=2)
    with pytest.raises(ClusterError, match=r"ended with code 2:\nserve --config .*config\.toml"):
        cluster.start()
    cluster.stop()
    config = tomllib.loads(cluster.config_path.read_text())
    assert config["brokers"]["service_url"] == 'pulsar://"odd'
    assert config["listener"] == [{"bind": "127.0.0.1:1"}]
    assert config["admin"] == {"bind": "127.0.0.1:2"}
