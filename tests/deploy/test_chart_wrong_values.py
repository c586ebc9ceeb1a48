"""Values that the schema refuses, with the key that the message names; realistic values next to them pass."""

from pathlib import Path
from typing import Any

import pytest

from tests.deploy.chart import NEWEST, VALUES, Refused, deep_merge, helm_template, needs_tools
from tests.deploy.chart_schema import SCHEMA, Refusal, refusals
from tests.deploy.kubernetes_schemas import write_schemas
from tests.deploy.test_chart_manifests import complaints

pytestmark = needs_tools

Wrong = tuple[dict[str, Any], str]


def metric(**fields: Any) -> dict[str, Any]:
    return {"autoscaling": {"metrics": [fields]}}


def peer(**fields: Any) -> dict[str, Any]:
    return {"networkPolicy": {"clients": [fields]}}


def rollup(**fields: Any) -> dict[str, Any]:
    return {"analytics": {"rollup": fields}}


def container(**fields: Any) -> dict[str, Any]:
    return {"extraContainers": [{"name": "sidecar", "image": "sidecar:1", **fields}]}


def volume(**fields: Any) -> dict[str, Any]:
    return {"extraVolumes": [{"name": "data", **fields}]}


def preferred(weight: int, **term: Any) -> dict[str, Any]:
    """A preference for nodes."""
    return {
        "affinity": {
            "nodeAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [
                    {"weight": weight, "preference": {"matchExpressions": [term]}}
                ]
            }
        }
    }


_UTILIZATION = {"type": "Utilization", "averageUtilization": 80}
_ZONE = "topology.kubernetes.io/zone"

WRONG: dict[str, Wrong] = {
    # HTTP and routes
    "a path with dots": ({"http": {"paths": ["/admin/../x"]}}, "http.paths.0"),
    "a path without its slash": ({"http": {"paths": ["admin"]}}, "http.paths.0"),
    "no path": ({"http": {"paths": []}}, "http.paths"),
    "a route's Gateway without a name": (
        {"gateway": {"tcpRoutes": {"pulsar": {"parentRefs": [{"sectionName": "a"}]}}}},
        "gateway.tcpRoutes.pulsar.parentRefs.0.name",
    ),
    "a route without a Gateway": (
        {"gateway": {"tcpRoutes": {"pulsar": {"parentRefs": []}}}},
        "gateway.tcpRoutes.pulsar.parentRefs",
    ),
    "a TLSRoute without a host": (
        {"gateway": {"tlsRoutes": {"pulsarssl": {"parentRefs": [{"name": "a"}]}}}},
        "gateway.tlsRoutes.pulsarssl.hostnames",
    ),
    "a route to an address": (
        {"gateway": {"httpRoutes": {"http": {"parentRefs": [{"name": "a"}], "hostnames": ["192.0.2.1"]}}}},
        "gateway.httpRoutes.http.hostnames.0",
    ),
    # schedules
    "four fields": (rollup(schedule="*/10 * * *"), "analytics.rollup.schedule"),
    "minute 60": (rollup(schedule="60 * * * *"), "analytics.rollup.schedule"),
    "hour 24": (rollup(schedule="0 24 * * *"), "analytics.rollup.schedule"),
    "day of month 0": (rollup(schedule="0 0 0 * *"), "analytics.rollup.schedule"),
    "month 13": (rollup(schedule="0 0 1 13 *"), "analytics.rollup.schedule"),
    "Sunday as 7": (rollup(schedule="0 0 * * 7"), "analytics.rollup.schedule"),
    "a step of 0": (rollup(schedule="*/0 * * * *"), "analytics.rollup.schedule"),
    "an unknown word as schedule": (rollup(schedule="@hourl"), "analytics.rollup.schedule"),
    # networks and addresses
    "an address as network": (
        {"service": {"loadBalancerSourceRanges": ["10.0.0.1"]}},
        "service.loadBalancerSourceRanges.0",
    ),
    "a prefix of 33": (
        {"service": {"loadBalancerSourceRanges": ["10.0.0.0/33"]}},
        "service.loadBalancerSourceRanges.0",
    ),
    "an octet of 256": (peer(ipBlock={"cidr": "10.256.0.0/16"}), "networkPolicy.clients.0.ipBlock.cidr"),
    "an exception that is none": (
        peer(ipBlock={"cidr": "10.0.0.0/8", "except": ["10.1.0.0"]}),
        "networkPolicy.clients.0.ipBlock.except.0",
    ),
    "an IPv6 prefix of 129": (peer(ipBlock={"cidr": "2001:db8::/129"}), "networkPolicy.clients.0.ipBlock.cidr"),
    "a name as cluster address": ({"service": {"clusterIP": "pulsar"}}, "service.clusterIP"),
    "a name as the balancer's address": ({"service": {"loadBalancerIP": "lb.example.org"}}, "service.loadBalancerIP"),
    "an address with a name": ({"tls": {"certManager": {"ipAddresses": ["10.0.0"]}}}, "tls.certManager.ipAddresses.0"),
    # quantities
    "MB": ({"resources": {"limits": {"memory": "512MB"}}}, "resources.limits.memory"),
    "milli bytes": ({"resources": {"limits": {"memory": "512m"}}}, "resources.limits.memory"),
    "bytes without a unit": ({"resources": {"limits": {"memory": 512}}}, "resources.limits.memory"),
    "Mi in lower case": ({"volumes": {"sizeLimit": "64mi"}}, "volumes.sizeLimit"),
    "a size without a unit": (
        {"analytics": {"receiver": {"persistence": {"size": 40}}}},
        "analytics.receiver.persistence.size",
    ),
    "GB of scratch": (rollup(scratchSize="4GB"), "analytics.rollup.scratchSize"),
    "cores in words": ({"resources": {"requests": {"cpu": "one"}}}, "resources.requests.cpu"),
    "less than nothing": ({"resources": {"requests": {"cpu": -1}}}, "resources.requests.cpu"),
    "a tenth of a milli core": (
        rollup(resources={"requests": {"cpu": "0.0001"}}),
        "analytics.rollup.resources.requests.cpu",
    ),
    "a resource misspelt": ({"resources": {"limits": {"memmory": "1Gi"}}}, "resources.limits.memmory"),
    "limits misspelt": ({"resources": {"limit": {"memory": "1Gi"}}}, "resources.limit"),
    "resources as a list": (
        {"analytics": {"receiver": {"resources": [{"cpu": 1}]}}},
        "analytics.receiver.resources",
    ),
    # labels and annotations
    "a label with a blank": ({"commonLabels": {"team": "data platform"}}, "commonLabels.team"),
    "a label's key with a blank": ({"podLabels": {"my team": "data"}}, "podLabels.my team"),
    "a label of 64 characters": ({"service": {"labels": {"a": "x" * 64}}}, "service.labels.a"),
    "a key with two slashes": ({"podAnnotations": {"a/b/c": ""}}, "podAnnotations.a/b/c"),
    "an annotation that is a boolean": (
        {"service": {"annotations": {"internal": True}}},
        "service.annotations.internal",
    ),
    "a number as node label": ({"nodeSelector": {"pool": 1}}, "nodeSelector.pool"),
    "a monitor's label": (
        {"serviceMonitor": {"labels": {"release": "my prometheus"}}},
        "serviceMonitor.labels.release",
    ),
    # scheduling
    "a toleration's field misspelt": (
        {"tolerations": [{"key": "a", "opperator": "Exists"}]},
        "tolerations.0.opperator",
    ),
    "an unknown operator": ({"tolerations": [{"key": "a", "operator": "exists"}]}, "tolerations.0.operator"),
    "an unknown effect": ({"tolerations": [{"key": "a", "effect": "NoExec"}]}, "tolerations.0.effect"),
    "a toleration of nothing": ({"tolerations": [{"effect": "NoSchedule"}]}, "tolerations.0.key"),
    "Exists with a value": (
        {"tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]},
        "tolerations.0.value",
    ),
    "seconds without NoExecute": (
        {"tolerations": [{"key": "a", "effect": "NoSchedule", "tolerationSeconds": 60}]},
        "tolerations.0.effect",
    ),
    "tolerations as a map": ({"tolerations": {"key": "a"}}, "tolerations"),
    "the receiver's toleration": (
        {"analytics": {"receiver": {"tolerations": [{"key": "a", "operator": "Equals"}]}}},
        "analytics.receiver.tolerations.0.operator",
    ),
    "affinity as in a term": ({"affinity": {"podAntiAfinity": {}}}, "affinity.podAntiAfinity"),
    "a weight of 0": (
        preferred(0, key="a", operator="Exists"),
        "affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution.0.weight",
    ),
    "In without values": (
        preferred(1, key="a", operator="In"),
        "affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution.0.preference.matchExpressions.0.values",
    ),
    "a term without topologyKey": (
        {"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"labelSelector": {}}]}}},
        "affinity.podAntiAffinity.requiredDuringSchedulingIgnoredDuringExecution.0.topologyKey",
    ),
    "maxSkew 0": (
        {"topologySpreadConstraints": [{"maxSkew": 0, "topologyKey": _ZONE, "whenUnsatisfiable": "DoNotSchedule"}]},
        "topologySpreadConstraints.0.maxSkew",
    ),
    "an unknown rule of spread": (
        {"topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": _ZONE, "whenUnsatisfiable": "Schedule"}]},
        "topologySpreadConstraints.0.whenUnsatisfiable",
    ),
    "a constraint without a key": (
        {"topologySpreadConstraints": [{"maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"}]},
        "topologySpreadConstraints.0.topologyKey",
    ),
    "a class in capitals": ({"priorityClassName": "High Priority"}, "priorityClassName"),
    # rollouts and scaling
    "a strategy's type": ({"updateStrategy": {"type": "Rolling"}}, "updateStrategy.type"),
    "a strategy's field": (
        {"updateStrategy": {"rollingUpdate": {"maxSurges": 1}}},
        "updateStrategy.rollingUpdate.maxSurges",
    ),
    "a surge in words": (
        {"updateStrategy": {"rollingUpdate": {"maxSurge": "half"}}},
        "updateStrategy.rollingUpdate.maxSurge",
    ),
    "more than all unavailable": (
        {"updateStrategy": {"rollingUpdate": {"maxUnavailable": "150%"}}},
        "updateStrategy.rollingUpdate.maxUnavailable",
    ),
    "a budget in words": ({"pdb": {"maxUnavailable": "one"}}, "pdb.maxUnavailable"),
    "a budget above 100 %": ({"pdb": {"maxUnavailable": "", "minAvailable": "101%"}}, "pdb.minAvailable"),
    "a budget below 0": ({"pdb": {"maxUnavailable": -1}}, "pdb.maxUnavailable"),
    "a window above an hour": (
        {"autoscaling": {"behavior": {"scaleDown": {"stabilizationWindowSeconds": 7200}}}},
        "autoscaling.behavior.scaleDown.stabilizationWindowSeconds",
    ),
    "behavior misspelt": ({"autoscaling": {"behavior": {"scaledown": {}}}}, "autoscaling.behavior.scaledown"),
    "a policy's type": (
        {"autoscaling": {"behavior": {"scaleUp": {"policies": [{"type": "Pod", "value": 1, "periodSeconds": 60}]}}}},
        "autoscaling.behavior.scaleUp.policies.0.type",
    ),
    "a policy without a period": (
        {"autoscaling": {"behavior": {"scaleUp": {"policies": [{"type": "Pods", "value": 1}]}}}},
        "autoscaling.behavior.scaleUp.policies.0.periodSeconds",
    ),
    "a metric of autoscaling/v1": (
        metric(type="Resource", resource={"name": "memory", "targetAverageUtilization": 80}),
        "autoscaling.metrics.0.resource.targetAverageUtilization",
    ),
    "a metric of another type": (
        metric(type="Pods", resource={"name": "memory", "target": _UTILIZATION}),
        "autoscaling.metrics.0.pods",
    ),
    "a target of another type": (
        metric(type="Resource", resource={"name": "memory", "target": {"type": "Utilization", "averageValue": "1Gi"}}),
        "autoscaling.metrics.0.resource.target.averageUtilization",
    ),
    # volumes
    "a volume without a source": (volume(), "extraVolumes.0"),
    "a volume with two sources": (volume(emptyDir={}, secret={"secretName": "a"}), "extraVolumes.0"),
    "a source misspelt": (volume(configmap={"name": "a"}), "extraVolumes.0.configmap"),
    "name for secretName": (volume(secret={"name": "a"}), "extraVolumes.0.secret.name"),
    "a Secret's name": (volume(secret={"secretName": "My_Secret"}), "extraVolumes.0.secret.secretName"),
    "an octal mode as decimal": (
        volume(secret={"secretName": "a", "defaultMode": 640}),
        "extraVolumes.0.secret.defaultMode",
    ),
    "a medium": (volume(emptyDir={"medium": "memory"}), "extraVolumes.0.emptyDir.medium"),
    "a size": (volume(emptyDir={"sizeLimit": "1GB"}), "extraVolumes.0.emptyDir.sizeLimit"),
    "a token for a minute": (
        volume(projected={"sources": [{"serviceAccountToken": {"path": "token", "expirationSeconds": 60}}]}),
        "extraVolumes.0.projected.sources.0.serviceAccountToken.expirationSeconds",
    ),
    "a volume's name": ({"extraVolumes": [{"name": "My Data", "emptyDir": {}}]}, "extraVolumes.0.name"),
    "a mount without a path": ({"extraVolumeMounts": [{"name": "data"}]}, "extraVolumeMounts.0.mountPath"),
    "a mount's field": (
        {"extraVolumeMounts": [{"name": "data", "mountPath": "/data", "readonly": True}]},
        "extraVolumeMounts.0.readonly",
    ),
    "a claim's access mode": (
        {"analytics": {"receiver": {"persistence": {"accessModes": ["RWO"]}}}},
        "analytics.receiver.persistence.accessModes.0",
    ),
    "a storage class": (
        {"analytics": {"receiver": {"persistence": {"storageClassName": "Fast SSD"}}}},
        "analytics.receiver.persistence.storageClassName",
    ),
    # containers
    "a number as environment": ({"extraEnv": [{"name": "PORT", "value": 8080}]}, "extraEnv.0.value"),
    "environment as a map": ({"extraEnv": {"A": "b"}}, "extraEnv"),
    "a value twice": (
        {"extraEnv": [{"name": "A", "value": "b", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]},
        "extraEnv.0",
    ),
    "a name with a blank": ({"extraEnv": [{"name": "A B", "value": "c"}]}, "extraEnv.0.name"),
    "a key without its Secret": (
        rollup(extraEnv=[{"name": "A", "valueFrom": {"secretKeyRef": {"key": "a"}}}]),
        "analytics.rollup.extraEnv.0.valueFrom.secretKeyRef.name",
    ),
    "envFrom with a name alone": ({"extraEnvFrom": [{"name": "a"}]}, "extraEnvFrom.0.name"),
    "envFrom without a source": ({"extraEnvFrom": [{"prefix": "A_"}]}, "extraEnvFrom.0"),
    "a container without an image": ({"initContainers": [{"name": "a"}]}, "initContainers.0.image"),
    "a container's name": (container(name="Side_Car"), "extraContainers.0.name"),
    "a container's field": (container(volumeMount=[]), "extraContainers.0.volumeMount"),
    "a port as text": (container(ports=[{"containerPort": "8080"}]), "extraContainers.0.ports.0.containerPort"),
    "a port's name": (
        container(ports=[{"containerPort": 80, "name": "a-name-that-is-too-long"}]),
        "extraContainers.0.ports.0.name",
    ),
    "a command as text": (container(command="sleep 1"), "extraContainers.0.command"),
    "a probe without a handler": (container(readinessProbe={"periodSeconds": 5}), "extraContainers.0.readinessProbe"),
    "a probe's port": (
        container(livenessProbe={"httpGet": {"path": "/", "port": 70000}}),
        "extraContainers.0.livenessProbe.httpGet.port",
    ),
    "a probe's period": ({"probes": {"readiness": {"periodSeconds": 0}}}, "probes.readiness.periodSeconds"),
    "a probe's field": ({"probes": {"liveness": {"period": 5}}}, "probes.liveness.period"),
    "a hook of two kinds": (
        container(lifecycle={"preStop": {"sleep": {"seconds": 1}, "exec": {"command": ["a"]}}}),
        "extraContainers.0.lifecycle.preStop",
    ),
    "a pod's security context for a container": ({"securityContext": {"fsGroup": 1}}, "securityContext.fsGroup"),
    "a profile's type": (
        {"podSecurityContext": {"seccompProfile": {"type": "runtime/default"}}},
        "podSecurityContext.seccompProfile.type",
    ),
    "a profile without its file": (
        {"podSecurityContext": {"seccompProfile": {"type": "Localhost"}}},
        "podSecurityContext.seccompProfile.localhostProfile",
    ),
    "a user's name": ({"podSecurityContext": {"runAsUser": "pulsar"}}, "podSecurityContext.runAsUser"),
    "a capability": ({"securityContext": {"capabilities": {"drop": ["all"]}}}, "securityContext.capabilities.drop.0"),
    "a registry's Secret as text": ({"imagePullSecrets": ["registry"]}, "imagePullSecrets.0"),
    "a DNS policy": ({"dnsPolicy": "Cluster"}, "dnsPolicy"),
    "a server's name": ({"dnsConfig": {"nameservers": ["dns.example.org"]}}, "dnsConfig.nameservers.0"),
    "options of DNS as text": ({"dnsConfig": {"options": ["ndots:2"]}}, "dnsConfig.options.0"),
    "an option as a number": ({"dnsConfig": {"options": [{"name": "ndots", "value": 2}]}}, "dnsConfig.options.0.value"),
    # network policy
    "a peer of nothing": (peer(), "networkPolicy.clients.0"),
    "a peer's field": (peer(podLabels={"a": "b"}), "networkPolicy.clients.0.podLabels"),
    "a network and pods": (
        peer(ipBlock={"cidr": "10.0.0.0/8"}, podSelector={}),
        "networkPolicy.clients.0",
    ),
    "a selector without matchLabels": (
        {"networkPolicy": {"admin": [{"podSelector": {"app": "prometheus"}}]}},
        "networkPolicy.admin.0.podSelector.app",
    ),
    "egress as a peer": (
        {"networkPolicy": {"egress": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}},
        "networkPolicy.egress.0.ipBlock",
    ),
    "an unknown protocol": (
        {"networkPolicy": {"egress": [{"ports": [{"port": 53, "protocol": "udp"}]}]}},
        "networkPolicy.egress.0.ports.0.protocol",
    ),
    "a range of ports without a beginning": (
        {"networkPolicy": {"egress": [{"ports": [{"endPort": 7000}]}]}},
        "networkPolicy.egress.0.ports.0.port",
    ),
    # services, names, times
    "a node port outside the range": ({"service": {"nodePorts": {"pulsar": 6650}}}, "service.nodePorts.pulsar"),
    "a port of 0": ({"ports": {"admin": 0}}, "ports.admin"),
    "a port above 65535": ({"service": {"ports": {"pulsar": 66500}}}, "service.ports.pulsar"),
    "a type of Service": ({"service": {"type": "ExternalName"}}, "service.type"),
    "a Secret in capitals": ({"tls": {"existingSecret": "TLS"}}, "tls.existingSecret"),
    "a Secret with its namespace": ({"adminToken": {"secret": "pulsar/token"}}, "adminToken.secret"),
    "a key with a slash": ({"brokerTls": {"ca": {"key": "certs/ca.crt"}}}, "brokerTls.ca.key"),
    "a digest without its algorithm": ({"image": {"digest": "0" * 64}}, "image.digest"),
    "a short digest": ({"analytics": {"image": {"digest": "sha256:0123"}}}, "analytics.image.digest"),
    "a repository with a scheme": ({"image": {"repository": "https://registry.example.org/proxy"}}, "image.repository"),
    "a repository in capitals": ({"image": {"repository": "registry.example.org/Proxy"}}, "image.repository"),
    "a tag with a slash": ({"image": {"tag": "v1/2"}}, "image.tag"),
    "a tag that is a number": ({"image": {"tag": 1.10}}, "image.tag"),
    "a host with its scheme": ({"ingress": {"hostname": "https://proxy.example.org"}}, "ingress.hostname"),
    "a DNS name with a port": (
        {"tls": {"certManager": {"dnsNames": ["a.example.org:6651"]}}},
        "tls.certManager.dnsNames.0",
    ),
    "days": ({"tls": {"certManager": {"duration": "90d"}}}, "tls.certManager.duration"),
    "an interval in seconds": ({"serviceMonitor": {"interval": 15}}, "serviceMonitor.interval"),
    "a time that goes back": ({"podMonitor": {"scrapeTimeout": "1s1m"}}, "podMonitor.scrapeTimeout"),
    "no time": ({"serviceMonitor": {"interval": ""}}, "serviceMonitor.interval"),
    "a relabeling's action": (
        {"serviceMonitor": {"relabelings": [{"action": "remove"}]}},
        "serviceMonitor.relabelings.0.action",
    ),
    "a relabeling as Prometheus writes it": (
        {"podMonitor": {"metricRelabelings": [{"source_labels": ["a"]}]}},
        "podMonitor.metricRelabelings.0.source_labels",
    ),
    "a name that no Service may have": ({"fullnameOverride": "1-proxy"}, "fullnameOverride"),
    "a name with a dot": ({"nameOverride": "pulsar.proxy"}, "nameOverride"),
}

_KUBERNETES_CONTROL = {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}

REALISTIC: dict[str, dict[str, Any]] = {
    "tolerations of every kind": {
        "tolerations": [
            {"key": "node-role.kubernetes.io/edge", "operator": "Exists", "effect": "NoSchedule"},
            {
                "key": "dedicated",
                "operator": "Equal",
                "value": "pulsar",
                "effect": "NoExecute",
                "tolerationSeconds": 300,
            },
            {"key": "dedicated", "value": "pulsar"},
            {"operator": "Exists"},
        ],
        "nodeSelector": {"kubernetes.io/arch": "amd64", "karpenter.sh/capacity-type": "on-demand"},
    },
    "affinity": {
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {"matchExpressions": [{"key": "kubernetes.io/arch", "operator": "In", "values": ["amd64"]}]},
                        {"matchExpressions": [{"key": "cpus", "operator": "Gt", "values": ["4"]}]},
                    ]
                },
                "preferredDuringSchedulingIgnoredDuringExecution": [
                    {"weight": 50, "preference": {"matchExpressions": [{"key": "spot", "operator": "DoesNotExist"}]}}
                ],
            },
            "podAntiAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [
                    {
                        "weight": 100,
                        "podAffinityTerm": {
                            "topologyKey": "kubernetes.io/hostname",
                            "labelSelector": {
                                "matchExpressions": [
                                    {"key": "app.kubernetes.io/name", "operator": "In", "values": ["pulsar-trio-proxy"]}
                                ]
                            },
                            "namespaceSelector": {},
                        },
                    }
                ]
            },
        }
    },
    "spread": {
        "topologySpread": {"zones": "", "hosts": ""},
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "minDomains": 3,
                "topologyKey": _ZONE,
                "whenUnsatisfiable": "DoNotSchedule",
                "labelSelector": {"matchLabels": {"app.kubernetes.io/name": "pulsar-trio-proxy"}},
                "matchLabelKeys": ["pod-template-hash"],
                "nodeTaintsPolicy": "Honor",
            }
        ],
    },
    "volumes by CSI": {
        "extraVolumes": [
            {
                "name": "secrets-store",
                "csi": {
                    "driver": "secrets-store.csi.k8s.io",
                    "readOnly": True,
                    "volumeAttributes": {"secretProviderClass": "vault"},
                },
            },
            {
                "name": "issued",
                "csi": {"driver": "csi.cert-manager.io", "volumeAttributes": {"csi.cert-manager.io/x": "1"}},
            },
        ],
        "extraVolumeMounts": [{"name": "secrets-store", "mountPath": "/mnt/secrets", "readOnly": True}],
    },
    "projected tokens and files": {
        "extraVolumes": [
            {
                "name": "identity",
                "projected": {
                    "defaultMode": 0o440,
                    "sources": [
                        {"serviceAccountToken": {"audience": "pulsar", "expirationSeconds": 3600, "path": "token"}},
                        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
                        {"secret": {"name": "s", "optional": True}},
                        {"downwardAPI": {"items": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]}},
                    ],
                },
            }
        ]
    },
    "other volumes": {
        "extraVolumes": [
            {"name": "cache", "emptyDir": {"medium": "Memory", "sizeLimit": "64Mi"}},
            {"name": "logs", "hostPath": {"path": "/var/log/proxy", "type": "DirectoryOrCreate"}},
            {"name": "claim", "persistentVolumeClaim": {"claimName": "shared", "readOnly": True}},
            {"name": "nfs", "nfs": {"server": "nfs.example.org", "path": "/export"}},
            {"name": "image", "image": {"reference": "registry.example.org/ca:1", "pullPolicy": "IfNotPresent"}},
            {
                "name": "scratch",
                "ephemeral": {
                    "volumeClaimTemplate": {
                        "metadata": {"labels": {"app": "proxy"}},
                        "spec": {
                            "accessModes": ["ReadWriteOnce"],
                            "storageClassName": "fast",
                            "resources": {"requests": {"storage": "10Gi"}},
                        },
                    }
                },
            },
        ],
        "extraVolumeMounts": [
            {"name": "cache", "mountPath": "/cache"},
            {"name": "logs", "mountPath": "/var/log/proxy", "subPathExpr": "$(POD_NAME)", "mountPropagation": "None"},
        ],
    },
    "a sidecar": container(
        ports=[{"name": "metrics", "containerPort": 9090}],
        env=[{"name": "A", "value": ""}],
        resources={"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "64Mi"}},
        readinessProbe={"httpGet": {"path": "/ready", "port": "metrics"}, "periodSeconds": 5},
        livenessProbe={"grpc": {"port": 9090}},
        startupProbe={"exec": {"command": ["true"]}, "failureThreshold": 30},
        lifecycle={"preStop": {"sleep": {"seconds": 5}}},
        securityContext={"runAsNonRoot": True, "capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}},
    ),
    "a sidecar that starts first": {
        "initContainers": [
            {
                "name": "fluent-bit",
                "image": "fluent/fluent-bit:3.0",
                "restartPolicy": "Always",
                "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
            },
            {"name": "wait", "image": "busybox", "command": ["sh", "-c", "nc -z broker 6650"]},
        ]
    },
    "environment": {
        "extraEnv": [
            {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            {"name": "CPUS", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu", "divisor": "1m"}}},
            {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "TOKEN", "optional": True}}},
            {"name": "PULSAR_TRIO_PROXY__LOG__LEVEL", "value": "debug"},
            {"name": "EMPTY"},
        ],
        "extraEnvFrom": [
            {"prefix": "A_", "configMapRef": {"name": "c", "optional": True}},
            {"secretRef": {"name": "s"}},
        ],
    },
    "autoscaling with all metrics and behaviours": {
        "autoscaling": {
            "enabled": True,
            "metrics": [
                {"type": "Resource", "resource": {"name": "memory", "target": _UTILIZATION}},
                {
                    "type": "External",
                    "external": {
                        "metric": {"name": "queue", "selector": {"matchLabels": {"topic": "a"}}},
                        "target": {"type": "AverageValue", "averageValue": "500m"},
                    },
                },
                {
                    "type": "Object",
                    "object": {
                        "metric": {"name": "rps"},
                        "describedObject": {"apiVersion": "v1", "kind": "Service", "name": "proxy"},
                        "target": {"type": "Value", "value": 1000},
                    },
                },
                {
                    "type": "ContainerResource",
                    "containerResource": {"name": "cpu", "container": "proxy", "target": _UTILIZATION},
                },
                {
                    "type": "Pods",
                    "pods": {"metric": {"name": "c"}, "target": {"type": "AverageValue", "averageValue": "1k"}},
                },
            ],
            "behavior": {
                "scaleUp": {"selectPolicy": "Max", "policies": [{"type": "Pods", "value": 4, "periodSeconds": 15}]},
                "scaleDown": {"selectPolicy": "Disabled", "stabilizationWindowSeconds": 3600},
            },
        }
    },
    "a budget in percent": {"pdb": {"maxUnavailable": "25%"}},
    "a budget the other way": {"pdb": {"maxUnavailable": "", "minAvailable": "50%"}},
    "a strategy in percent": {
        "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "0%", "maxSurge": "200%"}}
    },
    "a strategy without a surge": {"updateStrategy": {"rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0}}},
    "Recreate": {"updateStrategy": {"type": "Recreate"}},
    "resources in every notation": {
        "resources": {
            "requests": {"cpu": 0.5, "memory": 536870912, "ephemeral-storage": "1Gi"},
            "limits": {
                "cpu": "2",
                "memory": "1.5Gi",
                "ephemeral-storage": "2e9",
                "hugepages-2Mi": "64Mi",
                "example.org/nic": 1,
            },
        },
        "analytics": {
            "receiver": {"enabled": True},
            "rollup": {"enabled": True, "resources": {"requests": {"cpu": "1500m"}, "limits": {"memory": "2G"}}},
        },
    },
    "security contexts": {
        "podSecurityContext": {
            "fsGroup": 2000,
            "supplementalGroups": [3000],
            "supplementalGroupsPolicy": "Strict",
            "sysctls": [{"name": "net.ipv4.ip_local_port_range", "value": "1024 65535"}],
            "seLinuxOptions": {"level": "s0:c123,c456"},
            "seccompProfile": {"type": "Localhost", "localhostProfile": "profiles/proxy.json"},
        },
        "securityContext": {"runAsUser": 10001, "appArmorProfile": {"type": "RuntimeDefault"}, "privileged": False},
    },
    "DNS of one's own": {
        "dnsPolicy": "None",
        "dnsConfig": {
            "nameservers": ["169.254.20.10", "fd00::a"],
            "searches": ["pulsar.svc.cluster.local", "example.org."],
            "options": [{"name": "ndots", "value": "2"}, {"name": "edns0"}],
        },
    },
    "network policy with egress": {
        "networkPolicy": {
            "clients": [
                {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.96.0.0/12"]}},
                {"ipBlock": {"cidr": "2001:db8::/32"}},
                {"ipBlock": {"cidr": "::/0"}},
                {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "client"}}},
            ],
            "egress": [
                {
                    "to": [{"namespaceSelector": _KUBERNETES_CONTROL}],
                    "ports": [{"port": 53, "protocol": "UDP"}, {"port": "dns-tcp", "protocol": "TCP"}],
                },
                {"to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}], "ports": [{"port": 6650, "endPort": 6651}]},
            ],
        }
    },
    "a balancer at a cloud": {
        "service": {
            "type": "LoadBalancer",
            "loadBalancerClass": "service.k8s.aws/nlb",
            "loadBalancerSourceRanges": ["0.0.0.0/0", "203.0.113.7/32", "2001:db8::/64"],
            "annotations": {
                "service.beta.kubernetes.io/aws-load-balancer-scheme": "internal",
                "service.beta.kubernetes.io/aws-load-balancer-attributes": "load_balancing.cross_zone.enabled=true",
                "external-dns.alpha.kubernetes.io/hostname": "pulsar.example.org",
            },
            "labels": {"team": "data_platform.eu"},
            "ipFamilyPolicy": "PreferDualStack",
        },
        "bindAddress": "[::]",
    },
    "node ports at the ends of the range": {
        "service": {"type": "NodePort", "nodePorts": {"pulsar": 30000, "pulsarssl": 32767}},
        "tls": {"enabled": True, "existingSecret": "tls.example.org", "keepPlain": True},
    },
    "a fixed IPv6 address": {"service": {"clusterIP": "fd00:10:96::a"}},
    "monitoring with relabelings": {
        "serviceMonitor": {
            "enabled": True,
            "interval": "1m30s",
            "scrapeTimeout": "500ms",
            "labels": {"release": "kube-prometheus-stack"},
            "relabelings": [{"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node"}],
            "metricRelabelings": [{"action": "labeldrop", "regex": "pod|service"}],
        }
    },
    "a certificate with a wildcard": {
        "tls": {
            "enabled": True,
            "certManager": {
                "enabled": True,
                "issuerRef": {"name": "letsencrypt.prod", "kind": "ClusterIssuer"},
                "dnsNames": ["*.pulsar.example.org", "pulsar.example.org"],
                "ipAddresses": ["192.0.2.1", "2001:db8::1"],
            },
        }
    },
    "an image at a registry with a port": {
        "image": {
            "repository": "registry.example.org:5000/team_a/pulsar-trio-proxy",
            "tag": "1.2.3-rc.1_amd64",
        },
        "imagePullSecrets": [{"name": "registry.example.org"}],
    },
    "an image by its digest": {
        "image": {"repository": "registry.example.org:5000/team_a/proxy", "digest": f"sha256:{'a1' * 32}"},
    },
    "rollups at night, by names": {
        "analytics": {
            "receiver": {"enabled": True, "persistence": {"size": "1.5Ti", "storageClassName": "gp3"}},
            "rollup": {"enabled": True, "schedule": "0,30 1-5/2 * JAN-Mar mon-fri", "scratchSize": "8G"},
        }
    },
    "rollups by a word": {
        "analytics": {"receiver": {"enabled": True}, "rollup": {"enabled": True, "schedule": "@hourly"}}
    },
    "labels, names, accounts": {
        "commonLabels": {"app.kubernetes.io/part-of": "pulsar", "cost-center": "4711"},
        "podAnnotations": {"vault.hashicorp.com/agent-inject": "true", "Example.org/Note": "any text: it is free"},
        "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/proxy"}},
        "fullnameOverride": "pulsar-edge",
        "priorityClassName": "system-cluster-critical",
    },
    "probes": {
        "probes": {
            "startup": {"enabled": False},
            "readiness": {"initialDelaySeconds": 0, "successThreshold": 2},
            "liveness": {"terminationGracePeriodSeconds": 5},
        }
    },
}
"""What platform teams set."""


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Refusal]:
    cases = [("ChartValues", deep_merge(VALUES, values)) for values, _ in WRONG.values()]
    return dict(zip(WRONG, refusals(cases, SCHEMA["$defs"], tmp_path_factory.mktemp("chart")), strict=True))


@pytest.mark.parametrize("case", WRONG)
def test_the_schema_refuses_and_names_the_key(case: str, refused: dict[str, Refusal]) -> None:
    assert WRONG[case][1] in refused[case], refused[case]


def test_the_chart_refuses_as_the_schema_does() -> None:
    with pytest.raises(Refused, match=r"at '/tolerations/0': additional properties 'opperator' not allowed"):
        helm_template(WRONG["a toleration's field misspelt"][0])


@pytest.fixture(scope="module")
def schemas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("schemas")
    write_schemas(directory, NEWEST)
    return directory


@pytest.mark.parametrize("case", REALISTIC)
def test_realistic_values_are_what_kubernetes_takes(case: str, schemas: Path) -> None:
    assert complaints(helm_template(REALISTIC[case]), schemas) == []
