"""Pods as a DaemonSet: ports of the node, its network, updates, and what cannot be had with them."""

from typing import Any

import pytest
import yaml

from tests.deploy.chart import NAME, Manifests, Refused, needs_tools, render
from tests.deploy.metric_names import ROOT

pytestmark = needs_tools

TOKEN = {"adminToken": {"secret": "admin"}}


def daemon_set(**values: Any) -> dict[str, Any]:
    return {"workload": {"kind": "DaemonSet", "daemonSet": values}}


def host_ports(manifests: Manifests) -> dict[str, int | None]:
    return {port["name"]: port.get("hostPort") for port in manifests.container["ports"]}


def test_a_daemon_set_has_a_pod_on_each_node_and_nothing_that_counts_pods() -> None:
    manifests = render(**daemon_set())
    assert manifests.names("Deployment") == []
    spec = manifests.get("DaemonSet")["spec"]
    assert not {"replicas", "strategy", "progressDeadlineSeconds"} & spec.keys()
    assert "topologySpreadConstraints" not in spec["template"]["spec"]
    assert spec["selector"] == render().get("Deployment")["spec"]["selector"]
    assert spec["selector"]["matchLabels"] == manifests.get("Service")["spec"]["selector"]
    assert manifests.names("HorizontalPodAutoscaler") == []


def test_its_pods_are_those_of_a_deployment() -> None:
    pods = render(**daemon_set()).pod, render(topologySpread={"zones": "", "hosts": ""}).pod
    assert pods[0] == pods[1]


@pytest.mark.parametrize(
    ("values", "rolling"),
    [
        ({}, {"maxUnavailable": 0, "maxSurge": 1}),
        ({"hostPorts": {"pulsar": 6650}}, {"maxUnavailable": 1, "maxSurge": 0}),
        ({"hostNetwork": True}, {"maxUnavailable": 1, "maxSurge": 0}),
    ],
)
def test_an_update_needs_no_port_of_a_node_twice(values: dict[str, Any], rolling: dict[str, int]) -> None:
    spec = render(**daemon_set(**values), **TOKEN).get("DaemonSet")["spec"]
    assert spec["updateStrategy"] == {"type": "RollingUpdate", "rollingUpdate": rolling}


@pytest.mark.parametrize(
    "strategy",
    [
        {"type": "OnDelete"},
        {"type": "RollingUpdate"},
        {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "25%"}},
        {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 2, "maxSurge": 0}},
    ],
)
def test_a_strategy_of_ones_own_is_taken_as_it_is(strategy: dict[str, Any]) -> None:
    values = daemon_set(updateStrategy=strategy, hostPorts={"pulsar": 6650})
    assert render(**values).get("DaemonSet")["spec"]["updateStrategy"] == strategy


def test_a_surge_without_ports_of_the_node_is_taken() -> None:
    strategy = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": "10%"}}
    assert render(**daemon_set(updateStrategy=strategy)).get("DaemonSet")["spec"]["updateStrategy"] == strategy


def test_ports_of_the_node_lead_to_listeners_by_the_names_of_the_service() -> None:
    tls = {"certificate": "/c", "key": "/k"}
    listeners = [{"bind": "0.0.0.0:7000"}, {"bind": "0.0.0.0:7001"}, {"bind": "0.0.0.0:7002", "tls": tls}]
    ports = {"pulsar": 6650, "pulsar-2": 6660, "pulsarssl": 6651}
    manifests = render(
        **daemon_set(hostPorts=ports),
        config={"listener": listeners},
        ports={"names": {"pulsar": "sts-pulsar"}},
    )
    assert host_ports(manifests) == {"sts-pulsar": 6650, "sts-pulsar-2": 6660, "pulsarssl": 6651, "admin": None}
    assert "hostNetwork" not in manifests.pod["spec"]
    assert manifests.names("NetworkPolicy") == [NAME]


@pytest.mark.parametrize(
    ("policy", "wanted"), [("ClusterFirst", "ClusterFirstWithHostNet"), ("Default", "Default"), ("None", "None")]
)
def test_pods_in_the_nodes_network_find_the_clusters_names(policy: str, wanted: str) -> None:
    dns = {"dnsPolicy": policy, "dnsConfig": {"nameservers": ["10.96.0.10"]}}
    spec = render(**daemon_set(hostNetwork=True), **TOKEN, **dns).pod["spec"]
    assert (spec["hostNetwork"], spec["dnsPolicy"]) == (True, wanted)
    assert render(**dns).pod["spec"]["dnsPolicy"] == policy


def test_the_values_of_the_documentation_are_taken() -> None:
    page = (ROOT / "docs/kubernetes.md").read_text()
    block = page.partition("## One pod on each node")[2].partition("```yaml\n")[2].partition("```")[0]
    manifests = render(**yaml.safe_load(block))
    assert host_ports(manifests) == {"pulsarssl": 6651, "admin": 8080}


def test_no_network_policy_is_made_that_would_not_hold() -> None:
    receiver = {"analytics": {"receiver": {"enabled": True}}}
    assert render(**daemon_set(hostNetwork=True), **TOKEN, **receiver).names("NetworkPolicy") == [f"{NAME}-receiver"]


@pytest.mark.parametrize("values", [{"hostNetwork": True}, {"hostPorts": {"admin": 8080}}])
def test_an_admin_port_on_the_node_needs_a_token(values: dict[str, Any]) -> None:
    with pytest.raises(Refused, match=r"adminToken\.secret, or openAdminPort"):
        render(**daemon_set(**values))
    assert render(**daemon_set(**values), **TOKEN).configuration["admin"]["token_file"]
    assert "token_file" not in render(**daemon_set(**values, openAdminPort=True)).configuration["admin"]


def test_a_budget_is_made_only_of_what_kubernetes_counts() -> None:
    """https://kubernetes.io/docs/tasks/run-application/configure-pdb/: of other pods, a number that stays."""
    assert render(**daemon_set()).names("PodDisruptionBudget") == []
    manifests = render(**daemon_set(), pdb={"maxUnavailable": "", "minAvailable": 2})
    assert manifests.get("PodDisruptionBudget")["spec"]["minAvailable"] == 2


_ROLLING = {"type": "RollingUpdate"}
_HOST_PORT = {"hostPorts": {"pulsar": 6650}}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"workload": {"daemonSet": {"hostNetwork": True}}}, "workload.daemonSet.hostNetwork: has no effect"),
    ({"workload": {"daemonSet": _HOST_PORT}}, "workload.daemonSet.hostPorts: has no effect"),
    ({"workload": {"daemonSet": {"updateStrategy": _ROLLING}}}, "workload.daemonSet.updateStrategy: has no effect"),
    ({"workload": {"daemonSet": {"openAdminPort": True}}}, "workload.daemonSet.openAdminPort: has no effect"),
    (daemon_set() | {"autoscaling": {"enabled": True}}, "autoscaling.enabled: a DaemonSet"),
    (daemon_set() | {"topologySpread": {"zones": "DoNotSchedule"}}, "topologySpread.zones: has no effect"),
    (daemon_set() | {"topologySpread": {"hosts": "DoNotSchedule"}}, "topologySpread.hosts: has no effect"),
    (daemon_set() | {"keda": {"enabled": True, "serverAddress": "http://p:9090"}}, "keda.enabled: a DaemonSet"),
    (
        daemon_set()
        | {"topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "rack", "whenUnsatisfiable": "ScheduleAnyway"}]},
        "topologySpreadConstraints: has no effect",
    ),
    (daemon_set(hostPorts={"pulsarssl": 6651}), "hostPorts.pulsarssl: there is no such port; there are pulsar, admin"),
    (daemon_set(hostPorts={"pulsar": 8080, "admin": 8080}) | TOKEN, "8080 is the port of admin already"),
    (daemon_set(hostNetwork=True, **_HOST_PORT) | TOKEN, "workload.daemonSet.hostPorts: with hostNetwork"),
    (daemon_set(openAdminPort=True), "workload.daemonSet.openAdminPort: has no effect"),
    (daemon_set(hostNetwork=True, openAdminPort=True) | TOKEN, "workload.daemonSet.openAdminPort: has no effect"),
    (
        daemon_set(hostNetwork=True) | TOKEN | {"networkPolicy": {"clients": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}},
        "networkPolicy.clients: has no effect",
    ),
    (
        daemon_set(hostNetwork=True) | TOKEN | {"networkPolicy": {"egress": [{"ports": [{"port": 6650}]}]}},
        "networkPolicy.egress: has no effect",
    ),
    (
        daemon_set(hostNetwork=True) | TOKEN | {"networkPolicy": {"egressMode": "open"}},
        "networkPolicy.egressMode: has no effect",
    ),
    (
        daemon_set(updateStrategy=_ROLLING | {"rollingUpdate": {"maxSurge": 1}}),
        "updateStrategy.rollingUpdate: Kubernetes takes either",
    ),
    (
        daemon_set(updateStrategy=_ROLLING | {"rollingUpdate": {"maxSurge": "0%", "maxUnavailable": 0}}),
        "updateStrategy.rollingUpdate: Kubernetes takes either",
    ),
    (
        daemon_set(updateStrategy=_ROLLING | {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}, **_HOST_PORT),
        "updateStrategy.rollingUpdate.maxSurge: a port of a node",
    ),
    (
        daemon_set(updateStrategy=_ROLLING | {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}, hostNetwork=True)
        | TOKEN,
        "updateStrategy.rollingUpdate.maxSurge: a port of a node",
    ),
    (daemon_set() | {"pdb": {"maxUnavailable": 2}}, "pdb.maxUnavailable: Kubernetes cannot count"),
    (
        daemon_set() | {"pdb": {"maxUnavailable": "", "minAvailable": "50%"}},
        "pdb.minAvailable: Kubernetes cannot count",
    ),
]


@pytest.mark.parametrize(("values", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_values_that_a_daemon_set_cannot_follow_are_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(Refused) as refused:
        render(**values)
    assert says in str(refused.value)
