"""Helm's linter and Kubernetes' own schemas over a matrix of values; README and copies are what is generated."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from local import go_tools
from local.generate import chart_copies
from local.kubernetes_definitions import closed

from analytics.receiver.config import Config as ReceiverConfig
from proxy.config.types import Config
from tests.deploy.chart import (
    CHART,
    NEWEST,
    OLDEST,
    OPTIONS,
    VALUES,
    Manifests,
    Refused,
    deep_merge,
    helm_template,
    helms,
    needs_tools,
    write,
)
from tests.deploy.kubernetes_schemas import LOCATION, write_schemas
from tests.deploy.metric_names import ROOT

pytestmark = needs_tools

CERTIFICATE = {"enabled": True, "issuerRef": {"name": "ca", "kind": "ClusterIssuer"}, "dnsNames": ["proxy.example.org"]}
PULSAR_SECRETS = {"pulsarRelease": "pulsar", "token": {"enabled": True}, "proxyToken": {"enabled": True}}
PEERS = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
EDGE = [{"name": "edge", "namespace": "gateways", "sectionName": "a", "port": 443, "kind": "Gateway"}]
GATEWAY = {
    "annotations": {"a": "b"},
    "httpRoutes": {"http": {"parentRefs": EDGE, "hostnames": ["pulsar.example.org", "*.example.net"]}},
    "tcpRoutes": {"pulsar": {"parentRefs": EDGE}, "http": {"parentRefs": EDGE}},
    "tlsRoutes": {name: {"parentRefs": EDGE, "hostnames": [f"{name}.example"]} for name in ("pulsarssl", "pulsarsni")},
}
ANALYTICS = {"analytics": {"receiver": {"enabled": True, "serviceMonitor": True}, "rollup": {"enabled": True}}}

MATRIX: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "tls of a secret": {"tls": {"enabled": True, "existingSecret": "tls", "keepPlain": True}},
    "tls by cert-manager, clients' certificates": {
        "tls": {
            "enabled": True,
            "certManager": CERTIFICATE,
            "clientCa": {"secret": "ca"},
            "clientCrl": {"secret": "crl"},
            "certificates": ["internal-names"],
            "requireClientCertificate": True,
        }
    },
    "tls towards brokers": {
        "brokerTls": {"ca": {"secret": "ca"}, "certificateSecret": "proxy"},
        "config": {"brokers": {"service_url": "pulsar+ssl://b:6651", "credentials": {"method": "tls"}}},
    },
    "secrets of the Pulsar chart": {"auth": PULSAR_SECRETS},
    "brokers of a Pulsar chart elsewhere, by TLS": {
        "brokers": {"pulsarRelease": "prod", "namespace": "other", "tls": True},
        "brokerTls": {"ca": {"secret": "prod-ca-tls"}},
        "clusterDomain": "example.org",
    },
    "shared secret": {"auth": deep_merge(PULSAR_SECRETS, {"token": {"algorithm": "symmetric"}})},
    "node ports": {
        "service": {"type": "NodePort", "nodePorts": {"pulsar": 30650, "pulsarssl": 30651}},
        "tls": {"enabled": True, "existingSecret": "tls", "keepPlain": True},
    },
    "load balancer": {
        "service": {
            "type": "LoadBalancer",
            "loadBalancerClass": "example.org/lb",
            "loadBalancerIP": "192.0.2.7",
            "loadBalancerSourceRanges": ["198.51.100.0/24"],
            "annotations": {"example.org/internal": "true"},
            "ipFamilyPolicy": "PreferDualStack",
            "ipFamilies": ["IPv6", "IPv4"],
            "healthCheckNodePort": 32000,
            "allocateLoadBalancerNodePorts": False,
            "internalTrafficPolicy": "Local",
        },
        "bindAddress": "[::]",
    },
    "autoscaling": {
        "autoscaling": {"enabled": True, "connections": {"targetAverage": 2000}},
        "pdb": {"maxUnavailable": "25%"},
    },
    "scaled by KEDA, sizes recommended": {
        "keda": {
            "enabled": True,
            "serverAddress": "http://prometheus.monitoring:9090",
            "authenticationRef": {"name": "prometheus"},
            "metadata": {"authModes": "bearer"},
            "triggers": [{"type": "cpu", "metricType": "Utilization", "metadata": {"value": "70"}}],
        },
        "vpa": {"enabled": True},
    },
    "objects of one's own": {
        "extraObjects": [
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": {"of": "{{ .Release.Name }}"}},
            "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: b\n",
        ]
    },
    "monitored by its service": {
        "adminToken": {"secret": "admin"},
        "serviceMonitor": {
            "enabled": True,
            "labels": {"release": "prometheus"},
            "metricRelabelings": [{"action": "keep"}],
        },
        "prometheusRule": {"enabled": True},
        "grafanaDashboard": {"enabled": True, "annotations": {"folder": "Pulsar"}},
        "networkPolicy": {"admin": PEERS, "egress": [{"to": PEERS}]},
    },
    "monitored by its pods": {
        "podMonitor": {"enabled": True, "relabelings": [{"targetLabel": "a", "replacement": "b"}]}
    },
    "ingress": {
        "adminToken": {"secret": "admin"},
        "ingress": {
            "enabled": True,
            "className": "nginx",
            "hostname": "proxy.example.org",
            "tlsSecret": "ingress",
            "paths": ["/metrics", "/status"],
        },
    },
    "HTTP in the cluster": {"http": {"enabled": True}},
    "HTTPS of a secret of its own by the load balancer, upstreams of one's own": {
        "http": {"enabled": True, "existingSecret": "web", "inClientsService": True},
        "service": {"type": "LoadBalancer", "ports": {"http": 443}},
        "config": {
            "brokers": {"service_url": "pulsar://b:6650", "web_service_url": "https://b:8443,c:8443"},
            "http": {"function_worker_url": "http://f:6750", "routes": [{"path": "/tools", "url": "http://t:8000"}]},
        },
        "brokerTls": {"ca": {"secret": "ca"}},
        "networkPolicy": {"http": PEERS},
    },
    "HTTP by an Ingress, all else by cert-manager's certificate": {
        "tls": {"enabled": True, "certManager": CERTIFICATE},
        "http": {
            "enabled": True,
            "plain": True,
            "paths": ["/admin", "/"],
            "ingress": {
                "enabled": True,
                "className": "nginx",
                "hostname": "pulsar.example.org",
                "tlsSecret": "web",
                "annotations": {"a": "b"},
            },
        },
    },
    "all by routes of a Gateway": {
        "tls": {"enabled": True, "existingSecret": "tls", "keepPlain": True},
        "sni": {"enabled": True},
        "http": {"enabled": True, "plain": True},
        "gateway": GATEWAY,
    },
    "all by routes of an older Gateway API": {
        "tls": {"enabled": True, "existingSecret": "tls", "keepPlain": True},
        "sni": {"enabled": True},
        "http": {"enabled": True, "plain": True},
        "gateway": {**GATEWAY, "versions": {"tcpRoute": "v1alpha2", "tlsRoute": "v1alpha2"}},
    },
    "everything else of pods": {
        "imagePullSecrets": [{"name": "registry"}],
        "image": {"digest": f"sha256:{'0' * 64}"},
        "nodeSelector": {"pool": "edge"},
        "tolerations": [{"key": "edge", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        "priorityClassName": "high",
        "extraEnv": [{"name": "A", "value": "b"}],
        "extraEnvFrom": [{"secretRef": {"name": "s"}}],
        "extraVolumes": [{"name": "v", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "v", "mountPath": "/v"}],
        "extraContainers": [{"name": "c", "image": "i"}],
        "initContainers": [{"name": "d", "image": "i"}],
        "dnsConfig": {"options": [{"name": "ndots", "value": "2"}]},
        "topologySpread": {"zones": "", "hosts": "DoNotSchedule"},
        "podAnnotations": {"a": "b"},
        "podLabels": {"app": "pulsar"},
    },
    "hooks and classes of pods": {
        "lifecycle": {"preStop": {"sleep": {"seconds": 5}}},
        "hostAliases": [{"ip": "192.0.2.1", "hostnames": ["broker-0"]}],
        "runtimeClassName": "gvisor",
        "schedulerName": "batch",
    },
    "a pod on each node, by ports of the node": {
        "workload": {"kind": "DaemonSet", "daemonSet": {"hostPorts": {"pulsar": 6650, "pulsarssl": 6651}}},
        "tls": {"enabled": True, "existingSecret": "tls", "keepPlain": True},
        "tolerations": [{"operator": "Exists"}],
        "pdb": {"maxUnavailable": "", "minAvailable": 2},
    },
    "a pod on each node, in its network": {
        "workload": {
            "kind": "DaemonSet",
            "daemonSet": {
                "hostNetwork": True,
                "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "10%"}},
            },
        },
        "adminToken": {"secret": "admin"},
    },
    "a listener with routing by SNI, and one with TLS": {
        "sni": {"enabled": True},
        "tls": {"enabled": True, "existingSecret": "tls"},
        "service": {"type": "NodePort", "nodePorts": {"pulsarsni": 30652}},
    },
    "listeners of one's own, IPv6": {
        "bindAddress": "[::]",
        "config": {"listener": [{"bind": "[::]:6650"}, {"bind": "[::]:6660"}]},
        "test": {"tokenSecret": "client"},
    },
    "analytics": ANALYTICS,
    "analytics with all secrets, on a claim": deep_merge(
        ANALYTICS,
        {
            "analytics": {
                "receiver": {
                    "tokenSecret": "tokens",
                    "tlsSecret": "tls",
                    "persistence": {"existingClaim": "mine"},
                    "config": {"spool": {"total_bytes_max": 1_000_000_000}, "limits": {"max_connections": 10}},
                    "podAnnotations": {"a": "b"},
                    "podLabels": {"team": "data"},
                    "extraEnv": [{"name": "A", "value": "b"}],
                    "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
                    "priorityClassName": "high",
                    "runtimeClassName": "gvisor",
                },
                "rollup": {
                    "tables": "s3a://bucket/tables",
                    "extraEnv": [{"name": "A", "value": "b"}],
                    "podAnnotations": {"sidecar.istio.io/inject": "false"},
                    "podLabels": {"team": "data"},
                    "priorityClassName": "low",
                    "runtimeClassName": "gvisor",
                },
            }
        },
    ),
    "rollups with executors, on a volume of many nodes": deep_merge(
        ANALYTICS,
        {
            "analytics": {
                "receiver": {"persistence": {"accessModes": ["ReadWriteMany"], "size": "100Gi"}},
                "rollup": {
                    "executors": {
                        "enabled": True,
                        "apiServer": "https://192.0.2.1:6443",
                        "count": 4,
                        "cores": 2,
                        "memory": "4g",
                        "memoryOverhead": "2g",
                        "resources": {"limits": {"cpu": 2}},
                    },
                    "compactedPartitionsMax": 200,
                    "retention": {"spoolHours": 6, "days": {"samples": 7, "usage_daily": 0}},
                    "nodeSelector": {"pool": "batch"},
                },
            }
        },
    ),
    "service accounts as clients": {
        "config": {
            "authentication": {
                "enabled": True,
                "oidc": {"allowed_audiences": ["pulsar"], "kubernetes": {"discovery": "trusted_issuer"}},
            }
        },
        "serviceAccount": {"bindIssuerDiscovery": True},
    },
    "little": {
        "networkPolicy": {"enabled": False},
        "pdb": {"enabled": False},
        "serviceAccount": {"create": False},
        "test": {"enabled": False},
        "topologySpread": {"zones": "", "hosts": ""},
        "rolloutOnConfigChange": "never",
    },
}


@pytest.fixture(scope="module")
def schemas_by_version(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directories = {version: tmp_path_factory.mktemp(version) for version in go_tools.KUBERNETES}
    for version, directory in directories.items():
        write_schemas(directory, version)
    return directories


@pytest.fixture(scope="module")
def schemas(schemas_by_version: dict[str, Path]) -> Path:
    return schemas_by_version[NEWEST]


def complaints(text: str, schemas: Path) -> list[str]:
    """What kubeconform has against manifests; an object without a schema is an error, too."""
    command = [
        go_tools.tool("kubeconform"),
        "-strict",
        "-output",
        "json",
        "-schema-location",
        f"{schemas}/{LOCATION}",
    ]
    result = subprocess.run(command, input=text, check=False, capture_output=True, text=True)
    found = json.loads(result.stdout)["resources"]
    assert bool(found) == (result.returncode != 0), result.stderr
    return [f"{one['kind']} {one['name']}: {one['msg']}" for one in found]


@pytest.mark.parametrize("case", MATRIX)
def test_manifests_are_what_kubernetes_takes(case: str, schemas: Path) -> None:
    assert complaints(helm_template(MATRIX[case]), schemas) == []


@pytest.mark.parametrize("version", [version for version in go_tools.KUBERNETES if version != NEWEST])
def test_manifests_are_what_each_kubernetes_takes(version: str, schemas_by_version: dict[str, Path]) -> None:
    texts = {case: as_rendered_for(version, case) for case in MATRIX}
    schemas = schemas_by_version[version]
    found = complaints("---\n".join(texts.values()), schemas)  # one process for all
    assert found == [], [case for case, text in texts.items() if complaints(text, schemas)]


def as_rendered_for(version: str, case: str) -> str:
    """A template that asks for Kubernetes' version shows it at the ends: what is equal there is equal between."""
    newest = helm_template(MATRIX[case])
    return newest if newest == rendered_if_taken(OLDEST, case) else rendered_if_taken(version, case)


def rendered_if_taken(version: str, case: str) -> str:
    """Nothing, if the chart says that a value needs a newer version than this."""
    try:
        return helm_template(MATRIX[case], version)
    except Refused as refused:
        if not needs_newer(str(refused), version):
            raise
        return ""


def needs_newer(text: str, version: str) -> bool:
    """Whether the chart refuses a value because this version of Kubernetes is too old for it."""
    found = re.search(r"needs Kubernetes 1\.(\d+)", text)
    return found is not None and int(found[1]) > int(version.removeprefix("1."))


def test_only_a_version_that_is_too_old_may_refuse() -> None:
    refusal = "service.trafficDistribution: PreferClose needs Kubernetes 1.31"
    assert [version for version in go_tools.KUBERNETES if needs_newer(refusal, version)] == ["1.27", "1.30"]
    assert not needs_newer("service.type: unknown", OLDEST)


@pytest.mark.parametrize("case", MATRIX)
def test_configurations_are_what_the_programs_take(case: str) -> None:
    """Every key and type; what only files and addresses can show, `pulsar-trio-proxy check` looks at."""
    manifests = Manifests(helm_template(MATRIX[case]))
    msgspec.convert(manifests.configuration, Config)
    if "receiver" in str(MATRIX[case]):
        text = manifests.get("ConfigMap", "r-pulsar-trio-proxy-receiver")["data"]["receiver.toml"]
        assert msgspec.toml.decode(text, type=ReceiverConfig).spool.directory == "/data/spool"


def test_kubeconform_refuses_a_field_that_is_none_and_a_wrong_type(schemas: Path) -> None:
    """The net itself: without closed schemas a misspelt field would pass."""
    wrong: Any = yaml.safe_load(
        "{apiVersion: apps/v1, kind: Deployment, metadata: {name: x}, spec: {selector: {}, replica: 1, template: {}}}"
    )
    assert complaints(yaml.safe_dump(wrong), schemas)
    wrong["spec"] = {"selector": {}, "replicas": "one", "template": {}}
    assert complaints(yaml.safe_dump(wrong), schemas)
    wrong["spec"] = {"selector": {}, "replicas": 1, "template": {}}
    assert complaints(yaml.safe_dump(wrong), schemas) == []
    unknown = {"apiVersion": "example.org/v1", "kind": "Thing", "metadata": {"name": "x"}}
    assert complaints(yaml.safe_dump(unknown), schemas)


def test_kubeconform_refuses_a_field_that_this_version_does_not_have(schemas_by_version: dict[str, Path]) -> None:
    spec = {"trafficDistribution": "PreferClose"}
    service = yaml.safe_dump({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}, "spec": spec})
    taken = [version for version, schemas in schemas_by_version.items() if not complaints(service, schemas)]
    assert taken == ["1.30", "1.33", "1.37"]


def test_closed_leaves_maps_open() -> None:
    assert closed({"type": "object", "properties": {"a": {}}})["additionalProperties"] is False
    labels = {"type": "object", "additionalProperties": {"type": "string"}}
    assert closed(labels) == labels
    free = {"type": "object", "properties": {}, "x-kubernetes-preserve-unknown-fields": True}
    assert closed(free) == free


def test_helm_lints_every_case_strictly(tmp_path: Path) -> None:
    for number, (case, values) in enumerate(MATRIX.items()):
        file = write(tmp_path / f"{number}.yaml", yaml.safe_dump(values))
        for helm, result in helms("lint", "--strict", "--quiet", *OPTIONS, "--values", file, CHART).items():
            assert result.returncode == 0, f"{helm}, {case}: {result.stdout}{result.stderr}"


def test_the_readme_is_what_helm_docs_makes_of_the_values() -> None:
    command = [go_tools.tool("helm-docs"), "--dry-run", "--chart-search-root", CHART, "--log-level", "warning"]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    assert result.stdout.strip() == (CHART / "README.md").read_text().strip(), "run `make generate`"


def test_the_copies_are_those_and_no_others() -> None:
    """`make check` compares their bytes; a copy whose source is gone it would not see."""
    there = {
        path.relative_to(ROOT) for name in ("prometheus", "grafana") for path in (CHART / "files" / name).iterdir()
    }
    assert there == set(chart_copies(ROOT))


def test_values_are_all_told() -> None:
    """helm-docs leaves a key without its comment empty."""
    rows = [line for line in (CHART / "README.md").read_text().splitlines() if line.startswith("| ")][1:]
    assert rows
    empty = [row for row in rows if not row.strip("| ").rpartition(" | ")[2].strip()]
    untold = [row for row in empty if not row.startswith(("| probes.", "| updateStrategy.", "| autoscaling.behavior."))]
    assert untold == []
    assert VALUES


WRONG: dict[str, dict[str, Any]] = {
    "a key of the chart": {"replicas": 3},
    "a key inside a table": {"service": {"kind": "ClusterIP"}},
    "a type": {"replicaCount": "three"},
    "a table of the configuration": {"config": {"broker": {}}},
    "a key of the configuration": {"config": {"brokers": {"service_uri": "pulsar://b:6650"}}},
    "a value's type": {"config": {"limits": {"max_connections": "many"}}},
    "a value's bounds": {"config": {"limits": {"max_connections": 0}}},
    "a value out of a set": {"config": {"log": {"format": "xml"}}},
    "a fraction": {"config": {"limits": {"max_connections": 1.5}}},
    "a required key": {"config": {"brokers": {"credentials": {"file": "/x"}}}},
    "the receiver's key": {"analytics": {"receiver": {"config": {"spool": {"dir": "/x"}}}}},
    "a digest": {"image": {"digest": "0123"}},
    "a traffic policy": {"service": {"externalTrafficPolicy": "local"}},
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_values_are_refused_by_the_schema(case: str) -> None:
    with pytest.raises(Refused, match="specifications of the schema"):
        helm_template(WRONG[case])
