"""The Service for clients: its fields, the ports of each listener, and pods that outlast a load balancer's checks."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from local import go_tools

from tests.deploy.chart import (
    CHART,
    NAME,
    NAMESPACE,
    NEWEST,
    RELEASE,
    VALUES,
    Manifests,
    Refused,
    helm_template,
    needs_tools,
    render,
)
from tests.deploy.kubernetes_schemas import write_schemas
from tests.deploy.test_chart_manifests import complaints

pytestmark = needs_tools

LISTENERS = [
    {"bind": "[::]:6650"},
    {"bind": "[::]:6660"},
    {"bind": "[::]:6651", "tls": {"certificate": "/c", "key": "/k"}},
    {"bind": "[::]:6661", "tls": {"certificate": "/c", "key": "/k"}},
]


def service(**values: Any) -> Any:
    """The spec of the Service for clients, with these values below `service`."""
    return render(service=values).get("Service")["spec"]


# ---- fields


def test_fields_for_load_balancers() -> None:
    spec = service(type="LoadBalancer", healthCheckNodePort=32000, allocateLoadBalancerNodePorts=False)
    assert (spec["healthCheckNodePort"], spec["allocateLoadBalancerNodePorts"]) == (32000, False)
    plain = service(type="LoadBalancer")
    assert not {"healthCheckNodePort", "allocateLoadBalancerNodePorts"} & plain.keys()


def test_families_and_policies() -> None:
    values = {"ipFamilyPolicy": "RequireDualStack", "ipFamilies": ["IPv6", "IPv4"], "internalTrafficPolicy": "Local"}
    spec = render(bindAddress="[::]", service=values).get("Service")["spec"]
    assert values.items() <= spec.items()
    assert not {*values, "trafficDistribution"} & service().keys(), "without values, Kubernetes' defaults hold"


@pytest.mark.parametrize(
    ("value", "since", "before"), [("PreferClose", "1.31", "1.30"), ("PreferSameNode", "1.34", "1.33")]
)
def test_traffic_distribution_where_kubernetes_has_it(value: str, since: str, before: str, tmp_path: Path) -> None:
    values = {"service": {"trafficDistribution": value}}
    assert Manifests(helm_template(values, since)).get("Service")["spec"]["trafficDistribution"] == value
    with pytest.raises(Refused, match=rf"service\.trafficDistribution: {value} needs Kubernetes {since}"):
        helm_template(values, before)
    write_schemas(tmp_path, NEWEST)
    assert complaints(helm_template(values), tmp_path) == []


# ---- ports


@pytest.mark.parametrize("by", ["name", "port"])
def test_every_listener_can_have_fixed_ports(by: str) -> None:
    ports, node_ports = {"pulsar": 1, "pulsarssl": 3}, {"pulsar": 30001, "pulsarssl": 30003}
    second, fourth = ("pulsar-2", "pulsarssl-2") if by == "name" else ("6660", "6661")
    values = {
        "type": "NodePort",
        "ports": {**ports, second: 2, fourth: 4},
        "nodePorts": {**node_ports, second: 30002, fourth: 30004},
    }
    manifests = render(config={"listener": LISTENERS}, service=values)
    found = {port["name"]: (port["port"], port["nodePort"]) for port in manifests.get("Service")["spec"]["ports"]}
    assert found == {
        "pulsar": (1, 30001),
        "pulsar-2": (2, 30002),
        "pulsarssl": (3, 30003),
        "pulsarssl-2": (4, 30004),
    }


def test_further_listeners_without_numbers_have_that_of_the_pod() -> None:
    ports = render(config={"listener": LISTENERS}, service={"type": "NodePort"}).get("Service")["spec"]["ports"]
    assert [port["port"] for port in ports] == [6650, 6660, 6651, 6661]
    assert not any("nodePort" in port for port in ports)


def test_the_listeners_own_port_says_more_than_its_name() -> None:
    manifests = render(service={"ports": {"6650": 443}})
    assert [port["port"] for port in manifests.get("Service")["spec"]["ports"]] == [443]
    (url,) = [one["value"] for one in smoke_environment(manifests) if one["name"] == "SERVICE_URL"]
    assert url == f"pulsar://{NAME}.{NAMESPACE}:443"


def smoke_environment(manifests: Manifests) -> list[dict[str, str]]:
    """Environment of the pod of `helm test`."""
    return manifests.get("Pod", f"{NAME}-test")["spec"]["containers"][0]["env"]  # type: ignore[no-any-return]


# ---- the cluster's domain


def notes(**values: Any) -> str:
    """What an installation prints. Helm 4 alone makes it without a cluster."""
    command = [go_tools.tool("helm"), "install", RELEASE, CHART, "--namespace", NAMESPACE, "--dry-run=client"]
    result = subprocess.run([*command, "--values", "-"], input=json.dumps(values), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.partition("\nNOTES:\n")[2]


def test_the_notes_say_where_clients_connect_and_what_a_load_balancer_needs() -> None:
    text = notes(clusterDomain="example.org", service={"type": "LoadBalancer", "ports": {"6650": 443}})
    assert f"pulsar://{NAME}.{NAMESPACE}.svc.example.org:443" in text
    assert "accepts clients for 25 s" in text
    assert "accepts clients for" not in notes()


def test_the_notes_say_what_a_listener_with_routing_by_sni_is_for() -> None:
    [line] = [line for line in notes(sni={"enabled": True}).splitlines() if "6652" in line]
    assert line.strip().startswith(f"pulsar+ssl://{NAME}.{NAMESPACE}.svc.cluster.local:6652  (proxyServiceUrl, ")
    only = {"listener": [{"bind": "[::]:6652", "routing": "sni"}]}
    assert f" test {RELEASE}" in notes()
    assert f" test {RELEASE}" not in notes(config=only)


def test_the_clusters_domain_is_in_certificates() -> None:
    certificate = {"enabled": True, "issuerRef": {"name": "ca"}}
    tls = {"enabled": True, "certManager": certificate}
    names = render(tls=tls, clusterDomain="example.org").get("Certificate")["spec"]["dnsNames"]
    assert f"{NAME}.{NAMESPACE}.svc.example.org" in names
    assert f"{NAME}.{NAMESPACE}.svc.cluster.local" in render(tls=tls).get("Certificate")["spec"]["dnsNames"]


# ---- load balancers that check nodes


def delay_s(**values: Any) -> float:
    """Seconds for which a pod that ends still accepts clients."""
    return render(**values).configuration["shutdown"]["delay_ms"] / 1000  # type: ignore[no-any-return]


def test_a_pod_that_ends_outlasts_the_checks_of_its_node() -> None:
    assert delay_s() == 10
    assert delay_s(service={"type": "LoadBalancer", "externalTrafficPolicy": "Cluster"}) == 10
    assert delay_s(service={"type": "LoadBalancer"}) == 10 * 2 + 5
    check = {"intervalSeconds": 3, "failureThreshold": 2}
    assert delay_s(service={"type": "LoadBalancer", "healthCheck": check}) == 3 * 2 + 5
    unchecked = {"type": "LoadBalancer", "healthCheck": {"intervalSeconds": 0}}
    probe = VALUES["probes"]["readiness"]
    assert delay_s(service=unchecked) == probe["periodSeconds"] * probe["failureThreshold"] + 5


@pytest.mark.parametrize(("delay_ms", "accepted"), [(25_000, True), (24_999, False), (0, False)])
def test_a_delay_that_is_shorter_than_the_checks_is_refused(delay_ms: int, accepted: bool) -> None:
    config = {"shutdown": {"delay_ms": delay_ms}}
    if accepted:
        assert delay_s(config=config, service={"type": "LoadBalancer"}) == delay_ms / 1000
    else:
        with pytest.raises(Refused, match=r"config\.shutdown\.delay_ms: .* 25 s .*raise it to 25000"):
            render(config=config, service={"type": "LoadBalancer"})
    for unchecked in ({"type": "NodePort"}, {"type": "LoadBalancer", "externalTrafficPolicy": "Cluster"}, {}):
        assert delay_s(config=config, service=unchecked) == delay_ms / 1000


def test_slow_checks_need_a_longer_grace_period() -> None:
    slow = {"type": "LoadBalancer", "healthCheck": {"intervalSeconds": 30, "failureThreshold": 3}}
    with pytest.raises(Refused, match=r"terminationGracePeriodSeconds: 75 is too short.*need 140"):
        render(service=slow)
    assert render(service=slow, terminationGracePeriodSeconds=140).configuration["shutdown"]["delay_ms"] == 95_000


@pytest.mark.parametrize(
    ("values", "path"),
    [
        ({}, "/readyz"),
        ({"type": "LoadBalancer", "externalTrafficPolicy": "Cluster"}, "/readyz"),
        ({"type": "LoadBalancer"}, "/readyz?leaving=ready"),
        ({"type": "LoadBalancer", "healthCheck": {"intervalSeconds": 0}}, "/readyz"),
        ({"type": "NodePort"}, "/readyz?leaving=ready"),
    ],
)
def test_a_node_sends_clients_to_its_last_pod_while_that_leaves(values: dict[str, Any], path: str) -> None:
    """kube-proxy drops what comes for a node whose last pod ends and does not pass its readiness probe.

    MetalLB announces such a node as long as the probe succeeds.
    """
    assert render(service=values).container["readinessProbe"]["httpGet"]["path"] == path


# ---- refused values


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"service": {"ports": {"pulsar-2": 6660}}}, "service.ports.pulsar-2: no listener"),
        ({"service": {"ports": {"6651": 443}}}, "service.ports.6651: no listener"),
        ({"service": {"type": "NodePort", "nodePorts": {"plain": 30650}}}, "service.nodePorts.plain: no listener"),
        ({"service": {"ports": {"6660": 6650}}, "config": {"listener": LISTENERS}}, "service.ports: 6650"),
        (
            {
                "service": {"type": "NodePort", "nodePorts": {"6650": 30001, "6660": 30001}},
                "config": {"listener": LISTENERS},
            },
            "service.nodePorts: 30001",
        ),
        ({"service": {"allocateLoadBalancerNodePorts": False}}, "service.allocateLoadBalancerNodePorts: has no effect"),
        ({"service": {"type": "NodePort", "healthCheckNodePort": 32000}}, "service.healthCheckNodePort"),
        (
            {"service": {"type": "LoadBalancer", "externalTrafficPolicy": "Cluster", "healthCheckNodePort": 32000}},
            "service.healthCheckNodePort",
        ),
        ({"service": {"internalTrafficPolicy": "Local", "trafficDistribution": "PreferClose"}}, "has no effect"),
        (
            {"service": {"ipFamilyPolicy": "SingleStack", "ipFamilies": ["IPv6", "IPv4"]}, "bindAddress": "[::]"},
            "service.ipFamilies: two",
        ),
        ({"service": {"ipFamilies": ["IPv6"]}}, 'bindAddress: "[::]"'),
        ({"service": {"ipFamilyPolicy": "PreferDualStack"}}, 'bindAddress: "[::]"'),
        ({"service": {"ipFamilies": ["IPv6"]}, "config": {"listener": [{"bind": "0.0.0.0:7000"}]}}, "0.0.0.0:7000"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(Refused) as refused:
        helm_template(values)
    assert says in str(refused.value)
