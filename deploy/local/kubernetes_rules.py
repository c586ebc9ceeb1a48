"""What Kubernetes' validation demands of the objects in the chart's values beyond its OpenAPI description.

The description names fields and types alone. FIELDS gives the formats of local.value_formats, ranges, and the values of
enumerations to fields; OBJECTS has what holds for an object as a whole. The keywords are those for which Helm's
validator names the value's key in its message.
"""

from typing import Any

from local.kubernetes_definitions import Schema, load
from local.value_formats import FORMATS, array, number, one_of, ref, text

_PULL_POLICIES = one_of("Always", "IfNotPresent", "Never")
_PROTOCOLS = one_of("TCP", "UDP", "SCTP")
_NODE_POLICIES = one_of("Honor", "Ignore")
_WEIGHT = number(1, 100)
_NAME, _LABEL_NAME, _KEY = ref("DnsName"), ref("DnsLabel"), ref("KeyOfData")
_SECURITY = {"runAsUser": ref("UserId"), "runAsGroup": ref("UserId")}
_PROFILES = one_of("RuntimeDefault", "Localhost", "Unconfined")
_SECONDS, _COUNT = number(0), number(1)
_CAPABILITIES = array(text("capability_as_NET_ADMIN", "[A-Z][A-Z_]*"))
_RESOURCES: Schema = {
    "type": "object",
    "properties": {"cpu": ref("CpuQuantity"), "memory": ref("ByteQuantity"), "ephemeral-storage": ref("ByteQuantity")},
    "patternProperties": {
        "^hugepages-[0-9]+[KMG]i$": ref("ByteQuantity"),
        "^[a-z0-9.-]+/[-A-Za-z0-9_.]+$": ref("api.resource.Quantity"),
    },
    "additionalProperties": False,
}
"""Of a container: all other resources have a domain."""
_STORAGE = {"type": "object", "properties": {"storage": ref("ByteQuantity")}, "additionalProperties": False}

FIELDS: dict[str, Schema] = {
    "apps.v1.DeploymentStrategy": {"type": one_of("Recreate", "RollingUpdate")},
    "apps.v1.RollingUpdateDeployment": {"maxUnavailable": ref("CountOrPercentMax100")},
    "autoscaling.v2.ContainerResourceMetricSource": {"name": one_of("cpu", "memory"), "container": _LABEL_NAME},
    "autoscaling.v2.HPAScalingPolicy": {
        "type": one_of("Pods", "Percent"),
        "value": _COUNT,
        "periodSeconds": number(1, 1800),
    },
    "autoscaling.v2.HPAScalingRules": {
        "selectPolicy": one_of("Max", "Min", "Disabled"),
        "stabilizationWindowSeconds": number(0, 3600),
    },
    "autoscaling.v2.MetricSpec": {"type": one_of("ContainerResource", "External", "Object", "Pods", "Resource")},
    "autoscaling.v2.MetricTarget": {
        "type": one_of("AverageValue", "Utilization", "Value"),
        "averageUtilization": _COUNT,
    },
    "autoscaling.v2.ResourceMetricSource": {"name": one_of("cpu", "memory")},
    "core.v1.AppArmorProfile": {"type": _PROFILES},
    "core.v1.CSIVolumeSource": {"driver": ref("HostName")},
    "core.v1.Capabilities": {"add": _CAPABILITIES, "drop": _CAPABILITIES},
    "core.v1.ConfigMapEnvSource": {"name": _NAME},
    "core.v1.ConfigMapKeySelector": {"name": _NAME, "key": _KEY},
    "core.v1.ConfigMapProjection": {"name": _NAME},
    "core.v1.ConfigMapVolumeSource": {"name": _NAME, "defaultMode": ref("FileMode")},
    "core.v1.Container": {
        "name": _LABEL_NAME,
        "image": {"type": "string", "minLength": 1},
        "imagePullPolicy": _PULL_POLICIES,
        "restartPolicy": one_of("Always", "OnFailure", "Never"),
        "terminationMessagePolicy": one_of("File", "FallbackToLogsOnError"),
    },
    "core.v1.ContainerPort": {
        "containerPort": ref("Port"),
        "hostPort": ref("Port"),
        "hostIP": ref("IpAddress"),
        "name": ref("PortName"),
        "protocol": _PROTOCOLS,
    },
    "core.v1.DownwardAPIVolumeFile": {"mode": ref("FileMode")},
    "core.v1.DownwardAPIVolumeSource": {"defaultMode": ref("FileMode")},
    "core.v1.EmptyDirVolumeSource": {
        "medium": {"type": "string", "pattern": "^(Memory|HugePages(-[0-9]+[KMG]i)?)?$"},
        "sizeLimit": ref("ByteQuantity"),
    },
    "core.v1.EnvVar": {"name": ref("EnvName")},
    "core.v1.GRPCAction": {"port": ref("Port")},
    "core.v1.HTTPGetAction": {"port": ref("PortOrName"), "scheme": one_of("HTTP", "HTTPS")},
    "core.v1.HostPathVolumeSource": {
        "type": one_of(
            "", "BlockDevice", "CharDevice", "Directory", "DirectoryOrCreate", "File", "FileOrCreate", "Socket"
        )
    },
    "core.v1.ImageVolumeSource": {"pullPolicy": _PULL_POLICIES},
    "core.v1.KeyToPath": {"key": _KEY, "mode": ref("FileMode")},
    "core.v1.LocalObjectReference": {"name": _NAME},
    "core.v1.NodeSelectorRequirement": {
        "key": ref("LabelKey"),
        "operator": one_of("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"),
    },
    "core.v1.PersistentVolumeClaimSpec": {
        "accessModes": array(one_of("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"), minItems=1),
        "storageClassName": ref("DnsNameOrEmpty"),
        "volumeMode": one_of("Filesystem", "Block"),
    },
    "core.v1.PersistentVolumeClaimVolumeSource": {"claimName": _NAME},
    "core.v1.PodAffinityTerm": {"topologyKey": ref("LabelKey")},
    "core.v1.PodDNSConfig": {
        "nameservers": array(ref("IpAddress"), maxItems=3),
        "searches": array(text("domain", r"\.|[-a-z0-9_]+(\.[-a-z0-9_]+)*\.?", 253), maxItems=32),
    },
    "core.v1.PodSecurityContext": {
        **_SECURITY,
        "fsGroup": ref("UserId"),
        "fsGroupChangePolicy": one_of("OnRootMismatch", "Always"),
        "seLinuxChangePolicy": one_of("MountOption", "Recursive"),
        "supplementalGroups": array(ref("UserId")),
        "supplementalGroupsPolicy": one_of("Merge", "Strict"),
    },
    "core.v1.PreferredSchedulingTerm": {"weight": _WEIGHT},
    "core.v1.Probe": {
        "initialDelaySeconds": _SECONDS,
        "periodSeconds": _COUNT,
        "timeoutSeconds": _COUNT,
        "failureThreshold": _COUNT,
        "successThreshold": _COUNT,
        "terminationGracePeriodSeconds": _COUNT,
    },
    "core.v1.ProjectedVolumeSource": {"defaultMode": ref("FileMode")},
    "core.v1.ResourceRequirements": {"limits": _RESOURCES, "requests": _RESOURCES},
    "core.v1.SeccompProfile": {"type": _PROFILES},
    "core.v1.SecretEnvSource": {"name": _NAME},
    "core.v1.SecretKeySelector": {"name": _NAME, "key": _KEY},
    "core.v1.SecretProjection": {"name": _NAME},
    "core.v1.SecretVolumeSource": {"secretName": _NAME, "defaultMode": ref("FileMode")},
    "core.v1.SecurityContext": {**_SECURITY, "procMount": one_of("Default", "Unmasked")},
    "core.v1.ServiceAccountTokenProjection": {"expirationSeconds": number(600, 1 << 32)},
    "core.v1.SleepAction": {"seconds": _SECONDS},
    "core.v1.TCPSocketAction": {"port": ref("PortOrName")},
    "core.v1.Toleration": {
        "key": ref("LabelKeyOrEmpty"),
        "operator": one_of("Exists", "Equal", "Lt", "Gt"),
        "value": ref("LabelValue"),
        "effect": one_of("", "NoSchedule", "PreferNoSchedule", "NoExecute"),
    },
    "core.v1.TopologySpreadConstraint": {
        "maxSkew": _COUNT,
        "minDomains": _COUNT,
        "topologyKey": ref("LabelKey"),
        "whenUnsatisfiable": one_of("DoNotSchedule", "ScheduleAnyway"),
        "nodeAffinityPolicy": _NODE_POLICIES,
        "nodeTaintsPolicy": _NODE_POLICIES,
    },
    "core.v1.Volume": {"name": _LABEL_NAME},
    "core.v1.VolumeMount": {
        "name": _LABEL_NAME,
        "mountPath": {"type": "string", "pattern": "^[^:]+$"},
        "mountPropagation": one_of("None", "HostToContainer", "Bidirectional"),
        "recursiveReadOnly": one_of("Disabled", "IfPossible", "Enabled"),
    },
    "core.v1.VolumeResourceRequirements": {"limits": _STORAGE, "requests": _STORAGE},
    "core.v1.WeightedPodAffinityTerm": {"weight": _WEIGHT},
    "meta.v1.LabelSelector": {"matchLabels": ref("Labels")},
    "meta.v1.LabelSelectorRequirement": {
        "key": ref("LabelKey"),
        "operator": one_of("In", "NotIn", "Exists", "DoesNotExist"),
        "values": array(ref("LabelValue")),
    },
    "networking.v1.IPBlock": {"cidr": ref("Cidr"), "except": array(ref("Cidr"))},
    "networking.v1.NetworkPolicyPort": {"port": ref("PortOrName"), "endPort": ref("Port"), "protocol": _PROTOCOLS},
}
"""Fields of Kubernetes' definitions whose values have a format, a range or an enumeration."""


def _required(*names: str) -> Schema:
    return {"required": list(names)}


def _any_one(*names: str) -> Schema:
    return {"oneOf": [_required(name) for name in names]}


def _if(field: str, values: list[Any], then: Schema, otherwise: Schema | None = None) -> Schema:
    """Return what holds for an object whose field has one of these values, and what for others."""
    condition = {**_required(field), "properties": {field: {"enum": values}}}
    return {"if": condition, "then": then, **({"else": otherwise} if otherwise else {})}


def _by_type(fields: dict[str, str]) -> Schema:
    """Return what holds for an object whose `type` says which of its fields there must be."""
    return {"allOf": [_if("type", [value], _required(field)) for value, field in fields.items()]}


_LISTED = _if("operator", ["In", "NotIn"], {**_required("values"), "properties": {"values": {"minItems": 1}}})
_LOCALHOST = _if("type", ["Localhost"], _required("localhostProfile"))
_ONE_MEMBER = {"minProperties": 1, "maxProperties": 1}

OBJECTS: dict[str, Schema] = {
    "autoscaling.v2.MetricSpec": {
        "maxProperties": 2,
        **_by_type(
            {
                name[0].upper() + name[1:]: name
                for name in ("containerResource", "external", "object", "pods", "resource")
            }
        ),
    },
    "autoscaling.v2.MetricTarget": {
        "maxProperties": 2,
        **_by_type({"AverageValue": "averageValue", "Utilization": "averageUtilization", "Value": "value"}),
    },
    "core.v1.AppArmorProfile": _LOCALHOST,
    "core.v1.ConfigMapEnvSource": _required("name"),
    "core.v1.ConfigMapKeySelector": _required("name", "key"),
    "core.v1.ConfigMapProjection": _required("name"),
    "core.v1.ConfigMapVolumeSource": _required("name"),
    "core.v1.Container": _required("name", "image"),
    "core.v1.EnvFromSource": _any_one("configMapRef", "secretRef"),
    "core.v1.EnvVar": {"maxProperties": 2},
    "core.v1.EnvVarSource": _ONE_MEMBER,
    "core.v1.EphemeralVolumeSource": _required("volumeClaimTemplate"),
    "core.v1.LifecycleHandler": _ONE_MEMBER,
    "core.v1.LocalObjectReference": _required("name"),
    "core.v1.NodeSelectorRequirement": _LISTED,
    "core.v1.PersistentVolumeClaimSpec": _required("accessModes", "resources"),
    "core.v1.PodDNSConfigOption": _required("name"),
    "core.v1.Probe": _any_one("exec", "grpc", "httpGet", "tcpSocket"),
    "core.v1.ProjectedVolumeSource": _required("sources"),
    "core.v1.SeccompProfile": _LOCALHOST,
    "core.v1.SecretEnvSource": _required("name"),
    "core.v1.SecretKeySelector": _required("name", "key"),
    "core.v1.SecretProjection": _required("name"),
    "core.v1.SecretVolumeSource": _required("secretName"),
    "core.v1.Toleration": {
        **_if("operator", ["Exists"], {"properties": {"value": {"maxLength": 0}}}, _required("key")),
        "dependentSchemas": {"tolerationSeconds": {"properties": {"effect": {"const": "NoExecute"}}}},
    },
    "core.v1.Volume": {"minProperties": 2, "maxProperties": 2},
    "core.v1.VolumeProjection": _ONE_MEMBER,
    "meta.v1.LabelSelectorRequirement": _LISTED,
    "networking.v1.NetworkPolicyPeer": {"minProperties": 1, "dependentSchemas": {"ipBlock": {"maxProperties": 1}}},
    "networking.v1.NetworkPolicyPort": {"dependentRequired": {"endPort": ["port"]}},
}
"""What must hold for an object as a whole."""


def definitions() -> dict[str, Schema]:
    """Return Kubernetes' definitions with these formats, and the formats themselves."""
    found = load()
    for name, fields in FIELDS.items():
        unknown = set(fields) - set(found[name]["properties"])
        assert not unknown, f"{name} has no {unknown}"
        found[name]["properties"].update(fields)
    for name, rules in OBJECTS.items():
        found[name].update(rules)
    return {**found, **FORMATS}
