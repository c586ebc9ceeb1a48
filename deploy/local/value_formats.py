"""The formats of the chart's values, and what Kubernetes' validation demands beyond its OpenAPI description.

The description names fields and types alone. FORMATS has the formats of names, quantities and addresses; FIELDS gives
them, and the values of enumerations, to fields of Kubernetes' definitions; OBJECTS has what holds for an object as a
whole. The keywords are those for which Helm's validator names the value's key in its message. Patterns are for Go's
regular expressions, which have no lookahead.
"""

from typing import Any

from local.kubernetes_definitions import REFERENCE, Schema, load

_LABEL = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_SUBDOMAIN = rf"{_LABEL}(\.{_LABEL})*"
_WORD = "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(\.{_OCTET}){{3}}"
_IPV6 = "[0-9a-fA-F]{0,4}(:[0-9a-fA-F]{0,4}){2,7}"
_CIDR = f"{_IPV4}/(3[0-2]|[12]?[0-9])|{_IPV6}/(12[0-8]|1[01][0-9]|[1-9]?[0-9])"
_NUMBER = r"([0-9]+(\.[0-9]*)?|\.[0-9]+)"
_BYTE_UNITS = "([KMGTPE]i|[kMGTPE])"
_GO_DURATION = "([0-9]+h)?([0-9]+m)?([0-9]+s)?([0-9]+ms)?"
_ACTIONS = (
    "Replace", "Keep", "Drop", "HashMod", "LabelMap", "LabelDrop", "LabelKeep", "Lowercase", "Uppercase", "KeepEqual",
    "DropEqual",
)  # fmt: skip
"""Of Prometheus' relabelings."""
_IMAGE_HOST = r"([A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\])(:[0-9]+)?"
_IMAGE_PART = "[a-z0-9]+([._-]+[a-z0-9]+)*"


def ref(name: str) -> Schema:
    """Return a reference to a definition."""
    return {"$ref": REFERENCE + name}


def one_of(*values: str) -> Schema:
    """Return the schema of a string with one of these values."""
    return {"type": "string", "enum": list(values)}


def _text(pattern: str, length_max: int = 0) -> Schema:
    return {"type": "string", "pattern": f"^({pattern})$", **({"maxLength": length_max} if length_max else {})}


def _number(minimum: int, maximum: int | None = None) -> Schema:
    return {"type": "integer", "minimum": minimum, **({} if maximum is None else {"maximum": maximum})}


def _list(item: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": item, **more}


def _map(keys: Schema, values: Schema) -> Schema:
    return {"type": "object", "propertyNames": keys, "additionalProperties": values}


def _cron() -> Schema:
    """Return the schema of a schedule, as Kubernetes' parser takes it: five fields, or a word. A pattern for each field
    keeps the message short.
    """
    names = (
        "[0-5]?[0-9]",
        "([01]?[0-9]|2[0-3])",
        "(0?[1-9]|[12][0-9]|3[01])",
        "(0?[1-9]|1[0-2]|(?i:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec))",
        "(0?[0-6]|(?i:sun|mon|tue|wed|thu|fri|sat))",
    )
    patterns = [r"^(@(yearly|annually|monthly|weekly|daily|midnight|hourly|every [0-9]+[hm])|[^@ ]+( +[^ ]+){4})$"]
    for position, name in enumerate(names):
        entry = rf"([*?]|{name}(-{name})?)(/[1-9][0-9]?)?"
        patterns.append(rf"^(@.*|([^ ]+ +){{{position}}}{entry}(,{entry})*( .*)?)$")
    return {"type": "string", "allOf": [{"pattern": pattern} for pattern in patterns]}


def _resources(*, fully_qualified: bool) -> Schema:
    """Return the schema of requests or limits: Kubernetes refuses other names without a domain."""
    names = {"cpu": ref("CpuQuantity"), "memory": ref("ByteQuantity"), "ephemeral-storage": ref("ByteQuantity")}
    more = {"^hugepages-[0-9]+[KMG]i$": ref("ByteQuantity"), f"^{_SUBDOMAIN}/{_WORD}$": ref("api.resource.Quantity")}
    tree: Schema = {"type": "object", "properties": names, "additionalProperties": False}
    return (
        {**tree, "patternProperties": more}
        if fully_qualified
        else {**tree, "properties": {"storage": ref("ByteQuantity")}}
    )


FORMATS: dict[str, Schema] = {
    "Annotations": _map(_text(f"((?i:{_SUBDOMAIN})/)?{_WORD}"), {"type": "string"}),
    "ByteQuantity": {
        "type": ["string", "number"],
        "minimum": 1 << 20,
        "pattern": rf"^({_NUMBER}{_BYTE_UNITS}|[0-9]{{7,}}|[0-9]+[eE][0-9]+)$",
    },
    "Cidr": _text(_CIDR),
    "ClusterIp": _text(f"({_IPV4}|{_IPV6}|None)?"),
    "CountOrPercent": {"type": ["integer", "string"], "minimum": 0, "pattern": "^[0-9]+%$"},
    "CountOrPercentMax100": {"type": ["integer", "string"], "minimum": 0, "pattern": "^(100|[1-9]?[0-9])%$"},
    "CpuQuantity": {
        "type": ["string", "number"],
        "minimum": 0,
        "pattern": r"^([0-9]+(\.[0-9]{0,3})?|\.[0-9]{1,3}|[0-9]+m)$",
    },
    "CronSchedule": _cron(),
    "DnsLabel": _text(_LABEL, 63),
    "DnsName": _text(_SUBDOMAIN, 253),
    "Duration": {**_text(_GO_DURATION), "minLength": 1},
    "EnvName": _text("[-._a-zA-Z][-._a-zA-Z0-9]*"),
    "FileMode": _number(0, 0o777),
    "HostName": _text(rf"(\*\.)?{_SUBDOMAIN}", 253),
    "ImageRepository": _text(rf"({_IMAGE_HOST}/)?{_IMAGE_PART}(/{_IMAGE_PART})*(:[\w.-]*)?(@.*)?"),
    "IpAddress": _text(f"{_IPV4}|{_IPV6}"),
    "KeyOfData": _text("[-._a-zA-Z0-9]+", 253),
    "LabelKey": _text(f"({_SUBDOMAIN}/)?{_WORD}", 317),
    "LabelValue": _text(f"({_WORD})?"),
    "Labels": _map(ref("LabelKey"), ref("LabelValue")),
    "NodePort": {"type": "integer", "maximum": 32767, "anyOf": [{"const": 0}, {"minimum": 30000}]},
    "Port": _number(1, 65535),
    "PortName": _text("([a-z0-9]-?)*[a-z]([a-z0-9]|-[a-z0-9])*", 15),
    "PortOrName": {
        "type": ["integer", "string"],
        "minimum": 1,
        "maximum": 65535,
        "maxLength": 15,
        "pattern": "^([a-z0-9]-?)*[a-z]([a-z0-9]|-[a-z0-9])*$",
    },
    "RelabelConfig": {
        "type": "object",
        "properties": {
            "action": one_of(*_ACTIONS, *(name.lower() for name in _ACTIONS)),
            "modulus": _number(1),
            "regex": {"type": "string"},
            "replacement": {"type": "string"},
            "separator": {"type": "string"},
            "sourceLabels": _list(_text("[a-zA-Z_][a-zA-Z0-9_]*")),
            "targetLabel": {"type": "string"},
        },
        "additionalProperties": False,
    },
    "UserId": _number(0, (1 << 31) - 1),
    "ServiceNameOrEmpty": _text("([a-z]([-a-z0-9]*[a-z0-9])?)?"),
    "api.resource.Quantity": {
        "type": ["string", "number"],
        "minimum": 0,
        "pattern": rf"^{_NUMBER}([KMGTPE]i|[numkMGTPE]|[eE][-+]?[0-9]+)?$",
    },
    "meta.v1.ObjectMeta": {
        "type": "object",
        "properties": {"labels": ref("Labels"), "annotations": ref("Annotations")},
        "additionalProperties": False,
    },
    "util.intstr.IntOrString": ref("CountOrPercent"),
}
"""Definitions of our own, by name."""

for _name in ("DnsLabel", "DnsName", "HostName", "IpAddress", "KeyOfData", "LabelKey"):
    FORMATS[f"{_name}OrEmpty"] = {**FORMATS[_name], "pattern": f"^{FORMATS[_name]['pattern'][1:-1]}?$"}

_PULL_POLICIES = one_of("Always", "IfNotPresent", "Never")
_PROTOCOLS = one_of("TCP", "UDP", "SCTP")
_NODE_POLICIES = one_of("Honor", "Ignore")
_WEIGHT = _number(1, 100)
_NAME, _LABEL_NAME, _KEY = ref("DnsName"), ref("DnsLabel"), ref("KeyOfData")
_SECURITY = {"runAsUser": ref("UserId"), "runAsGroup": ref("UserId")}
_PROFILES = one_of("RuntimeDefault", "Localhost", "Unconfined")
_SECONDS, _COUNT = _number(0), _number(1)
_CAPABILITIES = _list(_text("[A-Z][A-Z_]*"))
_RESOURCES = _resources(fully_qualified=True)
_STORAGE = _resources(fully_qualified=False)

FIELDS: dict[str, Schema] = {
    "apps.v1.DeploymentStrategy": {"type": one_of("Recreate", "RollingUpdate")},
    "apps.v1.RollingUpdateDeployment": {"maxUnavailable": ref("CountOrPercentMax100")},
    "autoscaling.v2.ContainerResourceMetricSource": {"name": one_of("cpu", "memory"), "container": _LABEL_NAME},
    "autoscaling.v2.HPAScalingPolicy": {
        "type": one_of("Pods", "Percent"),
        "value": _COUNT,
        "periodSeconds": _number(1, 1800),
    },
    "autoscaling.v2.HPAScalingRules": {
        "selectPolicy": one_of("Max", "Min", "Disabled"),
        "stabilizationWindowSeconds": _number(0, 3600),
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
        "accessModes": _list(one_of("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"), minItems=1),
        "storageClassName": ref("DnsNameOrEmpty"),
        "volumeMode": one_of("Filesystem", "Block"),
    },
    "core.v1.PersistentVolumeClaimVolumeSource": {"claimName": _NAME},
    "core.v1.PodAffinityTerm": {"topologyKey": ref("LabelKey")},
    "core.v1.PodDNSConfig": {
        "nameservers": _list(ref("IpAddress"), maxItems=3),
        "searches": _list(_text(r"\.|[-a-z0-9_]+(\.[-a-z0-9_]+)*\.?", 253), maxItems=32),
    },
    "core.v1.PodSecurityContext": {
        **_SECURITY,
        "fsGroup": ref("UserId"),
        "fsGroupChangePolicy": one_of("OnRootMismatch", "Always"),
        "seLinuxChangePolicy": one_of("MountOption", "Recursive"),
        "supplementalGroups": _list(ref("UserId")),
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
    "core.v1.ServiceAccountTokenProjection": {"expirationSeconds": _number(600, 1 << 32)},
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
        "values": _list(ref("LabelValue")),
    },
    "networking.v1.IPBlock": {"cidr": ref("Cidr"), "except": _list(ref("Cidr"))},
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
    "apps.v1.RollingUpdateDeployment": _if(
        "maxUnavailable", [0, "0%"], {"properties": {"maxSurge": {"minimum": 1, "pattern": "[1-9]"}}}
    ),
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
