"""Each value that values.yaml names does something: another value there makes another manifest, and is refused by its
name where it would not."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.deploy.chart import VALUES, Refused, deep_merge, helm_template, needs_tools

pytestmark = needs_tools

_CERT_MANAGER = {"tls": {"enabled": True, "certManager": {"enabled": True, "issuerRef": {"name": "ca"}}}}
_TLS = {"tls": {"enabled": True, "existingSecret": "tls"}}
_BOTH = {"tls": {"enabled": True, "existingSecret": "tls", "keepPlain": True}}
_SNI = {"sni": {"enabled": True}}
_HTTP = {"http": {"enabled": True}}
_ROUTES = {
    kind: {
        port: {"parentRefs": [{"name": "edge"}], **({} if kind == "tcpRoutes" else {"hostnames": ["a.example.org"]})}
    }
    for kind, port in {"httpRoutes": "http", "tcpRoutes": "pulsarssl", "tlsRoutes": "pulsarssl"}.items()
}
_ROUTED = {**_TLS, "http": {"enabled": True, "plain": True}, "gateway": _ROUTES}
_BROKER_TLS = {"config": {"brokers": {"service_url": "pulsar+ssl://b"}}}
_ANNOUNCED = {"proxyProtocol": {"mode": "required", "sources": ["198.51.100.0/24"]}}
_RECEIVER = {"analytics": {"receiver": {"enabled": True, "serviceMonitor": True}}}

CONTEXTS: dict[str, dict[str, Any]] = {
    "ports.pulsarssl": _TLS,
    "ports.names.pulsarssl": _TLS,
    "ports.pulsarsni": _SNI,
    "ports.names.pulsarsni": _SNI,
    **dict.fromkeys(("ports.http", "ports.names.http", "http", "networkPolicy.http"), _HTTP),
    "http.plain": {**_TLS, **_HTTP},
    "http.paths": deep_merge(_HTTP, {"http": {"ingress": {"enabled": True, "hostname": "a.example.org"}}}),
    "http.ingress": deep_merge(_HTTP, {"http": {"ingress": {"enabled": True, "hostname": "a.example.org"}}}),
    "gateway": _ROUTED,
    "proxyProtocol": _ANNOUNCED,
    "tls.keepPlain": _TLS,
    "tls.existingSecret": _TLS,
    "tls.clientCa": deep_merge(_TLS, {"tls": {"clientCa": {"secret": "ca"}}}),
    "tls.clientCrl": deep_merge(_TLS, {"tls": {"clientCa": {"secret": "ca"}, "clientCrl": {"secret": "crl"}}}),
    **dict.fromkeys(("tls.certificates", "tls.minimumVersion", "tls.ciphers", "tls.groups"), _TLS),
    "tls.sessionTickets": deep_merge(_TLS, {"tls": {"minimumVersion": "1.3"}}),
    "tls.requireClientCertificate": deep_merge(_TLS, {"tls": {"clientCa": {"secret": "ca"}}}),
    "tls.certManager": _CERT_MANAGER,
    "workload.daemonSet": {"workload": {"kind": "DaemonSet"}},
    "workload.daemonSet.hostNetwork": {"workload": {"kind": "DaemonSet"}, "adminToken": {"secret": "admin"}},
    "workload.daemonSet.openAdminPort": {
        "workload": {"kind": "DaemonSet", "daemonSet": {"hostPorts": {"admin": 8080}}}
    },
    "tls.certManager.serviceNames": deep_merge(
        _CERT_MANAGER, {"tls": {"certManager": {"dnsNames": ["p.example.org"]}}}
    ),
    "brokerTls": _BROKER_TLS,
    "brokerTls.ca": deep_merge(_BROKER_TLS, {"brokerTls": {"ca": {"secret": "ca"}}}),
    "auth": {"auth": {"pulsarRelease": "pulsar", "token": {"enabled": True}, "proxyToken": {"enabled": True}}},
    "auth.denyList": {
        "auth": {"pulsarRelease": "pulsar", "token": {"enabled": True}, "denyList": {"secret": "denied"}}
    },
    "auth.proxyToken.withoutClientAuthentication": {"auth": {"proxyToken": {"enabled": True, "secret": {"name": "t"}}}},
    "adminToken": {"adminToken": {"secret": "admin"}},
    "service.nodePorts": {
        "service": {"type": "NodePort"},
        "http": {"enabled": True, "inClientsService": True},
        **_BOTH,
        **_SNI,
    },
    "service.ports": {**_BOTH, **_SNI, **_HTTP},
    "service.loadBalancer": {"service": {"type": "LoadBalancer"}},
    "service.allocateLoadBalancerNodePorts": {"service": {"type": "LoadBalancer"}},
    "service.externalTrafficPolicy": {"service": {"type": "LoadBalancer"}},
    "service.healthCheck": {"service": {"type": "LoadBalancer"}, "terminationGracePeriodSeconds": 80},
    "service.ipFamil": {"bindAddress": "[::]"},
    "autoscaling": {"autoscaling": {"enabled": True, "connections": {"targetAverage": 1000}}},
    "keda": {"keda": {"enabled": True, "serverAddress": "http://p:9090"}},
    "clusterDomain": _CERT_MANAGER,
    "pdb.minAvailable": {"pdb": {"maxUnavailable": "", "minAvailable": 1}},
    "ingress": {
        "adminToken": {"secret": "admin"},
        "ingress": {"enabled": True, "paths": ["/status"], "tlsSecret": "tls"},
    },
    "serviceMonitor": {"serviceMonitor": {"enabled": True}},
    "podMonitor": {"podMonitor": {"enabled": True}},
    "prometheusRule": {"prometheusRule": {"enabled": True}},
    "grafanaDashboard": {"grafanaDashboard": {"enabled": True}},
    "test.tokenKey": {"test": {"tokenSecret": "client"}},
    "test.ca": _TLS,
    "test.clientCertificateSecret": _TLS,
    "test.http": _HTTP,
    "extraVolumeMounts": {"extraVolumes": [{"name": "v", "emptyDir": {}}]},
    "analytics": _RECEIVER,
    "analytics.receiver.tokenKey": deep_merge(_RECEIVER, {"analytics": {"receiver": {"tokenSecret": "t"}}}),
    "analytics.rollup": deep_merge(_RECEIVER, {"analytics": {"rollup": {"enabled": True}}}),
    "analytics.rollup.executors": deep_merge(
        _RECEIVER, {"analytics": {"rollup": {"enabled": True, "executors": {"enabled": True}}}}
    ),
}
"""What else must be said for a value to count; the longest beginning of its path decides."""

_TOLERATIONS = [{"key": "edge", "operator": "Exists"}]
_PEERS = [{"podSelector": {"matchLabels": {"app": "client"}}}]
_ENV = [{"name": "A", "value": "b"}]

CHANGED: dict[str, Any] = {
    "image.digest": f"sha256:{'1' * 64}",
    "image.pullPolicy": "Always",
    "analytics.image.digest": f"sha256:{'1' * 64}",
    "analytics.image.pullPolicy": "Always",
    "bindAddress": "[::]",
    "auth.token.algorithm": "symmetric",
    "tls.minimumVersion": "1.3",
    "tls.groups": ["P-384"],
    "tls.certManager.duration": "2161h",
    "tls.certManager.renewBefore": "1h",
    "proxyProtocol.mode": "optional",
    "proxyProtocol.sources": ["192.0.2.0/24"],
    "rolloutOnConfigChange": "never",
    "terminationGracePeriodSeconds": 600,
    "analytics.receiver.terminationGracePeriodSeconds": 600,
    "workload.kind": "DaemonSet",
    "workload.daemonSet.hostPorts": {"pulsar": 6650},
    "workload.daemonSet.updateStrategy": {"type": "OnDelete"},
    "lifecycle": {"postStart": {"sleep": {"seconds": 1}}},
    "hostAliases": [{"ip": "192.0.2.1", "hostnames": ["broker-0"]}],
    "resources.requests.ephemeral-storage": "32Mi",
    "resources.limits.ephemeral-storage": "6Gi",
    "updateStrategy.type": "Recreate",
    "service.type": "NodePort",
    "service.externalTrafficPolicy": "Cluster",
    "service.ipFamilyPolicy": "SingleStack",
    "service.ipFamilies": ["IPv6"],
    "service.healthCheckNodePort": 32000,
    "service.internalTrafficPolicy": "Local",
    "service.trafficDistribution": "PreferClose",
    "extraObjects": [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}}],
    "service.ports.pulsar": 6649,
    "service.ports.pulsarssl": 6649,
    "service.nodePorts.pulsar": 30650,
    "service.nodePorts.pulsarssl": 30651,
    "service.nodePorts.pulsarsni": 30652,
    "service.nodePorts.http": 30653,
    "ports.http": 8082,
    "http.paths": ["/admin"],
    "gateway.httpRoutes": {"http": {"parentRefs": [{"name": "other"}]}},
    "gateway.tcpRoutes": {"pulsarssl": {"parentRefs": [{"name": "other"}]}},
    "gateway.tlsRoutes": {"pulsarssl": {"parentRefs": [{"name": "other"}], "hostnames": ["b.example.org"]}},
    **{f"gateway.versions.{kind}": "v1alpha2" for kind in ("tcpRoute", "tlsRoute")},
    "pdb.unhealthyPodEvictionPolicy": "IfHealthyBudget",
    "pdb.minAvailable": 2,
    "topologySpread.zones": "DoNotSchedule",
    "topologySpread.hosts": "DoNotSchedule",
    "dnsPolicy": "Default",
    "networkPolicy.egressMode": "open",
    "ingress.paths": ["/metrics"],
    "serviceMonitor.interval": "1m",
    "serviceMonitor.scrapeTimeout": "1s",
    "podMonitor.interval": "1m",
    "podMonitor.scrapeTimeout": "1s",
    "analytics.receiver.resources.requests.ephemeral-storage": "32Mi",
    "analytics.receiver.resources.limits.ephemeral-storage": "6Gi",
    "analytics.receiver.affinity": {"nodeAffinity": {}},
    "analytics.receiver.extraEnv": [{"name": "A", "value": "b"}],
    "analytics.rollup.resources.requests.ephemeral-storage": "32Mi",
    "analytics.rollup.resources.limits.ephemeral-storage": "6Gi",
    "analytics.rollup.executors.apiServer": "https://192.0.2.1:6443",
    "analytics.rollup.executors.memory": "2g",
    "analytics.rollup.executors.memoryOverhead": "2g",
    "analytics.rollup.executors.resources.requests.cpu": 1,
    "analytics.rollup.executors.resources.requests.ephemeral-storage": "32Mi",
    "analytics.rollup.executors.resources.limits.ephemeral-storage": "6Gi",
    "analytics.receiver.config": {"log": {"level": "debug"}},
    "analytics.receiver.persistence.accessModes": ["ReadWriteMany"],
    "tls.certManager.ipAddresses": ["192.0.2.1"],
    "service.clusterIP": "10.0.0.7",
    "service.loadBalancerIP": "192.0.2.7",
    "service.loadBalancerSourceRanges": ["198.51.100.0/24"],
    "volumes.sizeLimit": "1Gi",
    "analytics.receiver.persistence.size": "50Gi",
    "analytics.rollup.scratchSize": "5Gi",
    "analytics.rollup.schedule": "@hourly",
    **{f"{owner}resources.requests.cpu": 1 for owner in ("", "analytics.receiver.", "analytics.rollup.")},
    **{
        f"{owner}resources.{kind}.memory": size
        for owner in ("", "analytics.receiver.", "analytics.rollup.")
        for kind, size in {"requests": "768Mi", "limits": "3Gi"}.items()
    },
    "podSecurityContext.fsGroupChangePolicy": "Always",
    "podSecurityContext.seccompProfile.type": "Unconfined",
    "securityContext.capabilities.drop": ["NET_RAW"],
    "autoscaling.metrics": [
        {
            "type": "Resource",
            "resource": {"name": "memory", "target": {"type": "Utilization", "averageUtilization": 80}},
        }
    ],
    **{
        f"autoscaling.behavior.{way}.policies": [{"type": "Pods", "value": 3, "periodSeconds": 30}]
        for way in ("scaleUp", "scaleDown")
    },
    "keda.triggers": [{"type": "cpu", "metricType": "Utilization", "metadata": {"value": "70"}}],
    "imagePullSecrets": [{"name": "registry"}],
    "topologySpreadConstraints": [{"maxSkew": 2, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule"}],
    "affinity": {"podAffinity": {}},
    "dnsConfig": {"nameservers": ["192.0.2.53"]},
    **{f"{owner}tolerations": _TOLERATIONS for owner in ("", "analytics.receiver.", "analytics.rollup.")},
    **dict.fromkeys(
        ("networkPolicy.clients", "networkPolicy.http", "networkPolicy.admin", "analytics.receiver.peers"), _PEERS
    ),
    "networkPolicy.egress": [{"to": _PEERS}],
    **{
        f"{monitor}.{kind}": [{"action": "drop"}]
        for monitor in ("serviceMonitor", "podMonitor")
        for kind in ("relabelings", "metricRelabelings")
    },
    "extraEnv": _ENV,
    "analytics.rollup.extraEnv": _ENV,
    "extraEnvFrom": [{"secretRef": {"name": "s"}}],
    "extraVolumes": [{"name": "v", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "v", "mountPath": "/v"}],
    "extraContainers": [{"name": "c", "image": "i"}],
    "initContainers": [{"name": "c", "image": "i"}],
}
"""Values that cannot be made up by their type alone."""


def leaves(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Each value that values.yaml has, with its path; an empty map is one."""
    for key, value in node.items():
        at = f"{path}.{key}" if path else key
        if isinstance(value, dict) and value:
            yield from leaves(value, at)
        else:
            yield at, value


def changed(path: str, value: Any) -> Any:
    """Another value of this kind."""
    if path in CHANGED:
        return CHANGED[path]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str):
        return f"{value}x" if value else "x"
    if isinstance(value, dict):
        return {"changed": "x"}
    return ["x"]


def nested(path: str, value: Any) -> dict[str, Any]:
    """The values that say this and nothing else. Label names have dots, which a path cannot tell from its own."""
    for key in ("app.kubernetes.io/name",):
        path = path.replace(key, key.replace(".", "\0"))
    for part in reversed(path.split(".")):
        value = {part.replace("\0", "."): value}
    assert isinstance(value, dict)
    return value


def context(path: str) -> dict[str, Any]:
    """What else has to be said."""
    fitting = [prefix for prefix in CONTEXTS if path.startswith(prefix)]
    return CONTEXTS[max(fitting, key=len)] if fitting else {}


LEAVES = dict(leaves(VALUES))


def value_at(path: str, values: dict[str, Any]) -> Any:
    """What these values say, or else values.yaml."""
    node: Any = values
    for part in path.split("."):
        if not isinstance(node, dict) or part not in node:
            return LEAVES[path]
        node = node[part]
    return node


def outcome(values: dict[str, Any]) -> str:
    """What is rendered, or why nothing is; that a value is of a wrong type is a mistake of this test."""
    try:
        return helm_template(values)
    except Refused as refused:
        if "specifications of the schema" in str(refused):
            raise
        return str(refused)


@pytest.mark.parametrize("path", [path for path in LEAVES if not path.endswith(".enabled")])
def test_a_value_changes_what_is_rendered(path: str) -> None:
    before = context(path)
    values = deep_merge(before, nested(path, changed(path, value_at(path, before))))
    differs = helm_template(values) != outcome(before)
    assert differs, f"{values} renders what {before} does"


@pytest.mark.parametrize("path", LEAVES)
def test_a_value_alone_changes_what_is_rendered_or_is_refused_by_name(path: str) -> None:
    values = nested(path, changed(path, LEAVES[path]))
    after = outcome(values)
    is_refused = f": {path}: " in after and after.startswith("Error: ")
    assert is_refused or (after != outcome({}) and not after.startswith("Error: ")), f"{values}: {after[:300]}"


def test_no_context_or_value_is_left_over() -> None:
    """A key that was renamed must not leave its row behind."""
    assert [path for path in CHANGED if path not in LEAVES] == []
    assert [prefix for prefix in CONTEXTS if not any(path.startswith(prefix) for path in LEAVES)] == []
