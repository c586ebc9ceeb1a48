"""The configuration that `make run` writes, and the cluster that does not start."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from local.cluster import Cluster, ClusterConfig, ClusterError


def test_cluster_that_dies(tmp_path: Path) -> None:
    command = tmp_path / "proxy"
    command.write_text('#!/bin/sh\necho "$@"\nexit 2\n')
    command.chmod(0o755)
    cluster = Cluster(command, tmp_path, ClusterConfig(service_url='pulsar://"odd', port=1, admin_port=2))
    with pytest.raises(ClusterError, match=r"ended with code 2:\nserve --config .*config\.toml"):
        cluster.start()
    cluster.stop()
    config = tomllib.loads(cluster.config_path.read_text())
    assert config["brokers"] == {"service_url": 'pulsar://"odd'}, "whom a relay may go to is left as it comes"
    assert config["listener"] == [{"bind": "127.0.0.1:1"}]
    assert config["admin"] == {"bind": "127.0.0.1:2"}
    assert "http_listener" not in config


def test_a_listener_for_http(tmp_path: Path) -> None:
    with_http = ClusterConfig(service_url="pulsar://b", port=1, admin_port=2, web_service_url="http://b:3", http_port=4)
    cluster = Cluster(Path("/bin/false"), tmp_path, with_http)
    with pytest.raises(ClusterError):
        cluster.start()
    cluster.stop()
    config = tomllib.loads(cluster.config_path.read_text())
    assert config["brokers"]["web_service_url"] == "http://b:3"
    assert config["http_listener"] == [{"bind": "127.0.0.1:4"}]
    assert cluster.http_url == "http://127.0.0.1:4"
