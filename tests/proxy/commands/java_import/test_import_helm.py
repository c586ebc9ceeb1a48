"""import --helm: values of the other charts become values that this chart takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.cli import main
from proxy.commands.java_import.helm import VALUES, HelmResult, import_helm
from proxy.common.errors import ConfigError
from tests.deploy.chart import Manifests, helm_template, needs_tools
from tests.docs.blocks import ROOT

CHART = yaml.safe_load((ROOT / "deploy/helm/pulsar-trio-proxy/values.yaml").read_text())
THEIRS: dict[str, Any] = {
    "tls": {"enabled": True, "proxy": {"enabled": True, "dnsNames": ["p.example"]}, "broker": {"enabled": True}},
    "auth": {
        "authentication": {"enabled": True, "jwt": {"enabled": True, "usingSecretKey": True}},
        "authorization": {"enabled": True},
        "superUsers": {"proxy": "proxy-x"},
    },
    "proxy": {
        "replicaCount": 5,
        "resources": {"requests": {"memory": "128Mi", "cpu": 0.2}},
        "nodeSelector": {"pool": "edge"},
        "tolerations": [{"key": "edge", "operator": "Exists"}],
        "affinity": {"anti_affinity": True, "type": "requiredDuringSchedulingIgnoredDuringExecution"},
        "pdb": {"usePolicy": True, "maxUnavailable": 2},
        "gracePeriod": 30,
        "annotations": {"a.b/c": "d"},
        "extraEnvs": [{"name": "X", "value": "\U0001f600"}],
        "probe": {"liveness": {"enabled": False}},
        "ports": {
            "http": 80,
            "https": 8443,
            "pulsar": 6650,
            "pulsarssl": 443,
            "containerPorts": {"http": 8081, "pulsarssl": 6661},
        },
        "ingress": {
            "enabled": True,
            "annotations": {"backend-protocol": "HTTPS"},
            "ingressClassName": "nginx",
            "tls": {"enabled": True, "secretName": "ingress-tls"},
            "hostname": "pulsar.example.org",
            "path": "/",
        },
        "service": {
            "type": "LoadBalancer",
            "annotations": {"lb": "internal"},
            "loadBalancerSourceRanges": ["10.0.0.0/8"],
            "nodePorts": {"http": "", "https": 30443, "pulsar": 30650, "pulsarssl": 30651},
        },
        "configData": {
            "PULSAR_MEM": "-Xmx1g",
            "PULSAR_PREFIX_clusterName": "theirs",
            "maxConcurrentInboundConnections": "777",
            "httpNumThreads": "8",
            "httpMaxRequestHeaderSize": "16384",
            "httpReverseProxy.ui.path": "/ui",
            "httpReverseProxy.ui.proxyTo": "http://ui:8000",
            "haProxyProtocolEnabled": "true",
            "servicePort": "6650",
        },
    },
}


def imported(values: Any) -> tuple[dict[str, Any], HelmResult]:
    result = import_helm(json.dumps(values).encode(), "4")
    return yaml.safe_load(result.to_yaml("values.json")) or {}, result


def test_values() -> None:
    values, result = imported(THEIRS)
    assert values == {
        "replicaCount": 5,
        "resources": {"requests": {"memory": "128Mi", "cpu": 0.2}},
        "nodeSelector": {"pool": "edge"},
        "tolerations": [{"key": "edge", "operator": "Exists"}],
        "topologySpread": {"hosts": "DoNotSchedule"},
        "pdb": {"enabled": True, "maxUnavailable": 2},
        "podAnnotations": {"a.b/c": "d"},
        "extraEnv": [{"name": "X", "value": "\U0001f600"}],
        "service": {
            "ports": {"http": 8443, "pulsarssl": 443},
            "type": "LoadBalancer",
            "annotations": {"lb": "internal"},
            "loadBalancerSourceRanges": ["10.0.0.0/8"],
            "nodePorts": {"http": 30443, "pulsarssl": 30651},
        },
        "ports": {"admin": 8081, "http": 8080, "pulsarssl": 6661},
        "http": {
            "enabled": True,
            "inClientsService": True,
            "ingress": {
                "enabled": True,
                "annotations": {"backend-protocol": "HTTPS"},
                "className": "nginx",
                "hostname": "pulsar.example.org",
                "tlsSecret": "ingress-tls",
            },
        },
        "config": {
            "cluster": {"name": "theirs"},
            "limits": {"max_connections": 777},
            "brokers": {"proxy_protocol": "within_tls"},
            "http": {"max_head_bytes": 16384, "routes": [{"path": "/ui", "url": "http://ui:8000/"}]},
        },
        "brokers": {"tls": True},
        "tls": {"enabled": True},
        "auth": {
            "token": {"enabled": True, "algorithm": "symmetric"},
            "proxyToken": {"enabled": True, "role": "proxy-x"},
        },
    }
    assert [name for name, _ in result.lost] == [
        "proxy.configData.servicePort",
        "proxy.configData.haProxyProtocolEnabled",
        "tls.broker",
        "tls.proxy.cert_name",
    ]
    assert {name for name, _ in result.needless} >= {
        "proxy.gracePeriod",
        "proxy.probe",
        "proxy.ports.http",
        "proxy.ports.pulsar",
        "proxy.configData.PULSAR_MEM",
        "proxy.configData.httpNumThreads",
    }


@pytest.mark.parametrize("target", sorted({value.target for value in VALUES.values() if value.target}))
def test_each_target_is_a_value_of_this_chart(target: str) -> None:
    node = CHART
    for key in target.split("."):
        assert key in node, target
        node = node[key]


@needs_tools
def test_the_chart_takes_them() -> None:
    values, _ = imported(THEIRS)
    values["tls"]["existingSecret"] = "pulsar-tls-proxy"  # what the command says is missing
    values["extraEnv"][0]["value"] = "x"  # the test's own JSON has halves of characters, which Helm 3 refuses
    values["brokers"]["pulsarRelease"] = "pulsar"
    values["brokerTls"] = {"ca": {"secret": "pulsar-ca-tls"}}
    assert Manifests(helm_template(values)).names("Deployment")


def test_authentication_is_never_left_off_silently() -> None:
    values, result = imported({"auth": {"authentication": {"enabled": True, "openid": {"enabled": True}}}})
    assert values["config"]["authentication"]["enabled"] is True
    assert {"auth.authentication", "auth.authentication.openid"} <= {name for name, _ in result.lost}


def test_no_secret_is_copied() -> None:
    plugin = "org.apache.pulsar.client.impl.auth.AuthenticationToken"
    data = {
        "brokerClientAuthenticationPlugin": plugin,
        "brokerClientAuthenticationParameters": "token:hushhush",
        "tlsKeyStorePassword": "hushhush",
        "unknown": "hushhush",
    }
    _, result = imported({"proxy": {"configData": data}})
    assert "hushhush" not in result.to_yaml("values.json") + str(result.lost + result.notes + result.needless)


def test_without_tls_the_plain_ports_count() -> None:
    values, _ = imported({"proxy": {"ports": {"pulsar": 1, "pulsarssl": 2}, "service": {"nodePorts": {"pulsar": ""}}}})
    assert values == {"service": {"ports": {"pulsar": 1}}}


def test_http_is_enabled_where_the_values_are_about_it() -> None:
    values, result = imported({"proxy": {"replicaCount": 2}})
    assert values == {"replicaCount": 2}
    assert "http.inClientsService" in str(result.notes)
    enabled = {"enabled": True, "inClientsService": True}
    values, _ = imported({"proxy": {"ports": {"http": 80, "containerPorts": {"http": 8080}}}})
    assert values == {"http": enabled, "ports": {"http": 8080, "admin": 8081}, "service": {"ports": {"http": 80}}}
    values, _ = imported({"proxy": {"configData": {"brokerWebServiceURL": "http://b:8080"}}})
    assert values == {"http": enabled, "config": {"brokers": {"web_service_url": "http://b:8080"}}}
    values, result = imported({"proxy": {"configData": {"webServicePort": "8080", "webServicePortTls": "8443"}}})
    assert values == {}
    assert [name for name, _ in result.lost][:2] == [
        "proxy.configData.webServicePort",
        "proxy.configData.webServicePortTls",
    ]


def test_an_ingress_that_is_off_or_without_a_host() -> None:
    values, result = imported({"proxy": {"ingress": {"enabled": False, "hostname": "x"}}})
    assert values == {}
    assert dict(result.needless) == {"proxy.ingress": "it is not enabled"}
    values, result = imported(
        {"proxy": {"ingress": {"enabled": True, "path": "/admin", "typo": 1, "tls": {"enabled": True}}}}
    )
    assert values["http"]["paths"] == ["/admin"]
    assert values["http"]["ingress"] == {"enabled": True}
    assert [name for name, _ in result.lost] == ["proxy.ingress", "proxy.ingress.typo"]


def test_unknown_values_are_named() -> None:
    _, result = imported({"proxy": {"typo": 1, "service": {"x\ny: 1": 2}, "kopProxy": {}}})
    assert [name for name, _ in result.lost] == ["proxy.typo", '"proxy.service.x�y: 1"']


def run(path: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["import", "--helm", str(path), *options])


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "values.json"
    path.write_text(json.dumps({"proxy": {"replicaCount": 2}}))
    result = run(path)
    assert result.exit_code == 0, result.output
    assert yaml.safe_load(result.stdout) == {"replicaCount": 2}
    assert "pulsar-trio-proxy: note: brokers: set brokers.pulsarRelease" in result.stderr
    path.write_text(json.dumps(THEIRS))
    result = run(path, "--output", str(tmp_path / "values.yaml"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert (tmp_path / "values.yaml").read_text().startswith("# Made by")
    assert run(path, "--environment", "current").exit_code == 1
    for wrong in ("a: 1", "[1]", '{"a":"\\ud800"}', "[" * 100_000):
        path.write_text(wrong)
        result = run(path)
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith(f"pulsar-trio-proxy: {path}: ")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
PATHS = sorted({*VALUES, "proxy.gracePeriod", "proxy.affinity", "proxy.configData", "tls", "auth"})


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(PATHS), JSON)
def test_no_values_are_a_defect(path: str, value: Any) -> None:
    tree: Any = value
    for key in reversed(path.split(".")):
        tree = {key: tree}
    try:
        result = import_helm(json.dumps(tree).encode(), "4")
    except ConfigError:
        return
    assert isinstance(yaml.safe_load(result.to_yaml("x")), dict | None)
