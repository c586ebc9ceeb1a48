"""Each format and each rule beyond Kubernetes' description refuses what it is for; definitions are Kubernetes' own."""

from typing import Any

import pytest
from local import kubernetes_definitions
from local.kubernetes_rules import FIELDS, OBJECTS, definitions
from local.value_formats import FORMATS

from tests.deploy.chart import needs_tools
from tests.deploy.chart_schema import refusals

pytestmark = needs_tools

VALUES: dict[str, tuple[list[Any], list[Any]]] = {
    "Annotations": ([{}, {"a": "any: text"}, {"Example.org/a": ""}], [{"a": 1}, {"a b": ""}, {"a/b/c": ""}]),
    "ByteQuantity": (["512Mi", "1.5Gi", "2G", 1073741824, "1073741824"], ["512MB", "512m", "1", 1, "-1Gi"]),
    "Cidr": (["10.0.0.0/8", "::/0", "fd00:a::/64"], ["10.0.0.1", "10.0.0.0/33", "256.0.0.0/8", "fd00::/129"]),
    "ClusterIp": (["", "None", "10.0.0.1", "fd00::1"], ["none", "10.0.0", "a.example.org"]),
    "CountOrPercent": ([0, 1, "0%", "200%"], [-1, 1.5, "1", "50 %", ""]),
    "CountOrPercentMax100": ([0, "100%"], [-1, "101%", "1", ""]),
    "CountOrPercentMax100OrEmpty": (["", 1, "1%"], ["101%", -1]),
    "CpuQuantity": ([1, 0.5, "1", "0.25", "500m", ".5"], [-1, "1 core", "0.0001", "1k", ""]),
    "CronSchedule": (
        ["*/10 * * * *", "0,30 0-23/2 1-31 jan-DEC 0-6", "5  4 ? * SUN", "@daily", "@every 10m", "00 08 01 01 *"],
        ["* * * *", "* * * * * *", "60 * * * *", "* 24 * * *", "* * 0 * *", "* * 32 * *", "* * * 13 *", "* * * 0 *",
         "* * * * 7", "*/0 * * * *", "a * * * *", "@never", "", "TZ=UTC 0 0 * * *"],
    ),
    "DnsLabel": (["a", "a-1", "1a", "a" * 63], ["A", "a_b", "-a", "a-", "a.b", "a" * 64, ""]),
    "DnsLabelOrEmpty": (["", "a"], ["A"]),
    "DnsName": (["a", "a.b-c.1"], ["A", "a_b", "a..b", ".a", "a" * 64, ".".join(["a" * 60] * 5), ""]),
    "DnsNameOrEmpty": (["", "a.b"], ["a_b"]),
    "Duration": (["15s", "1h30m", "500ms", "1m"], ["", "1d", "15", "1m1h", "1.5h", "s"]),
    "EnvName": (["A", "_a", "a.b-C1"], ["1A", "A B", "A=B", ""]),
    "FileMode": ([0, 0o440, 0o777], [-1, 640, "0440"]),
    "HostName": (["a", "a.example.org", "*.example.org"], ["http://a", "a:1", "a.*.b", "A", ""]),
    "HostNameOrEmpty": (["", "a.b"], ["a/b"]),
    "ImageRepository": (
        ["proxy", "a/b-c/d_e", "registry.example.org:5000/a", "[fd00::1]:5000/a", "a:1", "a@sha256:0"],
        ["https://a", "A", "a/B", "a b", "/a", "a/", ""],
    ),
    "IpAddress": (["10.0.0.1", "::1", "2001:db8::a"], ["10.0.0", "10.0.0.256", "01.2.3.4", "a.b", "10.0.0.1/32", ""]),
    "IpAddressOrEmpty": (["", "10.0.0.1"], ["a"]),
    "KeyOfData": (["ca.crt", "TOKEN", "_a-b"], ["a/b", "a b", ""]),
    "KeyOfDataOrEmpty": (["", "TOKEN"], ["a/b"]),
    "LabelKey": (["a", "example.org/a", "A_b.c-d"], ["a b", "/a", "a/", "a/b/c", "Example_org/a", "a" * 64, ""]),
    "LabelKeyOrEmpty": (["", "a"], ["a b"]),
    "LabelValue": (["", "a", "A_b.c-1", "a" * 63], ["a b", "-a", "a-", "a/b", "a" * 64, 1, True]),
    "Labels": ([{}, {"a": ""}, {"example.org/a": "b"}], [{"a b": "c"}, {"a": "b c"}, {"a": 1}, {"/a": ""}]),
    "NodePort": ([0, 30000, 32767], [1, 6650, 29999, 32768, "30000"]),
    "PathPrefix": (["/", "/admin", "/admin/v2/", "/a.b~c_d-1"], ["", "admin", "/..", "/a/./b", "/a//b", "/%2e", "/*"]),
    "Port": ([1, 65535], [0, 65536, "80"]),
    "PortName": (["http", "a-1", "1a", "p2p"], ["80", "a--b", "-a", "a-", "A", "a" * 16, ""]),
    "PortOrName": ([1, 65535, "http"], [0, 65536, "80", "HTTP", "a" * 16]),
    "RelabelConfig": (
        [{}, {"action": "keep", "sourceLabels": ["a"], "regex": "a|b"}, {"action": "HashMod", "modulus": 2}],
        [{"action": "remove"}, {"source_labels": ["a"]}, {"sourceLabels": ["a-b"]}, {"modulus": 0}],
    ),
    "RouteHostName": (["a", "a.1.example.org", "*.example.org"], ["", "192.0.2.1", "::1", "*", "a.*.b", "A", "a:1"]),
    "ServiceNameOrEmpty": (["", "a", "a-1"], ["1a", "A", "a.b", "a-"]),
    "UserId": ([0, 10001, 2147483647], [-1, 2147483648, "root"]),
    "api.resource.Quantity": ([1, 0.5, "1", "500m", "1k", "10Mi", "1e3", "2E"], [-1, "-1", "1 k", "1kB", "1KB", ""]),
    "meta.v1.ObjectMeta": ([{"labels": {"a": "b"}}], [{"label": {}}, {"labels": {"a": 1}}]),
    "util.intstr.IntOrString": ([1, "25%"], ["1", -1]),
}  # fmt: skip
"""Of each format: right values, and wrong ones."""

WRONG_FIELDS: dict[str, dict[str, Any]] = {
    "apps.v1.DeploymentStrategy": {"type": "Rolling"},
    "apps.v1.RollingUpdateDeployment": {"maxUnavailable": "101%"},
    "autoscaling.v2.ContainerResourceMetricSource": {"name": "disk", "container": "A_b"},
    "autoscaling.v2.HPAScalingPolicy": {"type": "Pod", "value": 0, "periodSeconds": 1801},
    "autoscaling.v2.HPAScalingRules": {"selectPolicy": "max", "stabilizationWindowSeconds": 3601},
    "autoscaling.v2.MetricSpec": {"type": "Pod"},
    "autoscaling.v2.MetricTarget": {"type": "Average", "averageUtilization": 0},
    "autoscaling.v2.ResourceMetricSource": {"name": "disk"},
    "core.v1.AppArmorProfile": {"type": "runtime/default"},
    "core.v1.CSIVolumeSource": {"driver": "my driver"},
    "core.v1.Capabilities": {"add": ["net_admin"], "drop": ["all"]},
    "core.v1.ConfigMapEnvSource": {"name": "A_b"},
    "core.v1.ConfigMapKeySelector": {"name": "A_b", "key": "a/b"},
    "core.v1.ConfigMapProjection": {"name": "A_b"},
    "core.v1.ConfigMapVolumeSource": {"name": "A_b", "defaultMode": 640},
    "core.v1.Container": {
        "name": "A_b",
        "image": "",
        "imagePullPolicy": "always",
        "restartPolicy": "always",
        "terminationMessagePolicy": "Log",
    },
    "core.v1.ContainerPort": {
        "containerPort": 0,
        "hostPort": 65536,
        "hostIP": "host",
        "name": "A_b",
        "protocol": "tcp",
    },
    "core.v1.DownwardAPIVolumeFile": {"mode": 640},
    "core.v1.DownwardAPIVolumeSource": {"defaultMode": 640},
    "core.v1.EmptyDirVolumeSource": {"medium": "memory", "sizeLimit": "64m"},
    "core.v1.EnvVar": {"name": "A B"},
    "core.v1.GRPCAction": {"port": 0},
    "core.v1.HTTPGetAction": {"port": 0, "scheme": "https"},
    "core.v1.HostPathVolumeSource": {"type": "Dir"},
    "core.v1.ImageVolumeSource": {"pullPolicy": "always"},
    "core.v1.KeyToPath": {"key": "a/b", "mode": 640},
    "core.v1.LocalObjectReference": {"name": "A_b"},
    "core.v1.NodeSelectorRequirement": {"key": "a b", "operator": "in"},
    "core.v1.PersistentVolumeClaimSpec": {"accessModes": ["RWO"], "storageClassName": "A b", "volumeMode": "File"},
    "core.v1.PersistentVolumeClaimVolumeSource": {"claimName": "A_b"},
    "core.v1.PodAffinityTerm": {"topologyKey": "a b"},
    "core.v1.PodDNSConfig": {"nameservers": ["a.b"], "searches": ["a b"]},
    "core.v1.PodSecurityContext": {
        "runAsUser": -1,
        "runAsGroup": -1,
        "fsGroup": -1,
        "fsGroupChangePolicy": "Never",
        "seLinuxChangePolicy": "Never",
        "supplementalGroups": [-1],
        "supplementalGroupsPolicy": "Never",
    },
    "core.v1.PreferredSchedulingTerm": {"weight": 0},
    "core.v1.Probe": {
        "initialDelaySeconds": -1,
        "periodSeconds": 0,
        "timeoutSeconds": 0,
        "failureThreshold": 0,
        "successThreshold": 0,
        "terminationGracePeriodSeconds": 0,
    },
    "core.v1.ProjectedVolumeSource": {"defaultMode": 640},
    "core.v1.ResourceRequirements": {"limits": {"memory": "1m"}, "requests": {"disk": 1}},
    "core.v1.SeccompProfile": {"type": "runtime/default"},
    "core.v1.SecretEnvSource": {"name": "A_b"},
    "core.v1.SecretKeySelector": {"name": "A_b", "key": "a/b"},
    "core.v1.SecretProjection": {"name": "A_b"},
    "core.v1.SecretVolumeSource": {"secretName": "A_b", "defaultMode": 640},
    "core.v1.SecurityContext": {"runAsUser": -1, "runAsGroup": -1, "procMount": "Masked"},
    "core.v1.ServiceAccountTokenProjection": {"expirationSeconds": 599},
    "core.v1.SleepAction": {"seconds": -1},
    "core.v1.TCPSocketAction": {"port": 0},
    "core.v1.Toleration": {"key": "a b", "operator": "exists", "value": "a b", "effect": "NoExec"},
    "core.v1.TopologySpreadConstraint": {
        "maxSkew": 0,
        "minDomains": 0,
        "topologyKey": "a b",
        "whenUnsatisfiable": "Schedule",
        "nodeAffinityPolicy": "honor",
        "nodeTaintsPolicy": "honor",
    },
    "core.v1.Volume": {"name": "A_b"},
    "core.v1.VolumeMount": {"name": "A_b", "mountPath": "a:b", "mountPropagation": "Both", "recursiveReadOnly": "Yes"},
    "core.v1.VolumeResourceRequirements": {"limits": {"storage": "1m"}, "requests": {"memory": "1Gi"}},
    "core.v1.WeightedPodAffinityTerm": {"weight": 101},
    "meta.v1.LabelSelector": {"matchLabels": {"a": "b c"}},
    "meta.v1.LabelSelectorRequirement": {"key": "a b", "operator": "Gt", "values": ["a b"]},
    "networking.v1.IPBlock": {"cidr": "10.0.0.1", "except": ["10.0.0.1"]},
    "networking.v1.NetworkPolicyPort": {"port": 0, "endPort": 65536, "protocol": "tcp"},
}
"""A wrong value of each field in FIELDS."""

WRONG_OBJECTS: dict[str, list[tuple[Any, str]]] = {
    "autoscaling.v2.MetricSpec": [
        ({"type": "Pods"}, "pods"),
        ({"type": "ContainerResource"}, "containerResource"),
        ({"type": "External"}, "external"),
        ({"type": "Object"}, "object"),
        ({"type": "Resource"}, "resource"),
        ({"type": "Pods", "pods": {"metric": {"name": "a"}, "target": {"type": "Value"}}, "object": {}}, ""),
    ],
    "autoscaling.v2.MetricTarget": [
        ({"type": "Value"}, "value"),
        ({"type": "AverageValue"}, "averageValue"),
        ({"type": "Utilization"}, "averageUtilization"),
        ({"type": "Value", "value": 1, "averageValue": 1}, ""),
    ],
    "core.v1.AppArmorProfile": [({"type": "Localhost"}, "localhostProfile")],
    "core.v1.ConfigMapEnvSource": [({}, "name")],
    "core.v1.ConfigMapKeySelector": [({"key": "a"}, "name")],
    "core.v1.ConfigMapProjection": [({}, "name")],
    "core.v1.ConfigMapVolumeSource": [({}, "name")],
    "core.v1.Container": [({"name": "a"}, "image")],
    "core.v1.EnvFromSource": [
        ({"prefix": "A"}, ""),
        ({"configMapRef": {"name": "a"}, "secretRef": {"name": "a"}}, ""),
    ],
    "core.v1.EnvVar": [({"name": "A", "value": "b", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}, "")],
    "core.v1.EnvVarSource": [
        ({}, ""),
        ({"fieldRef": {"fieldPath": "a"}, "resourceFieldRef": {"resource": "limits.cpu"}}, ""),
    ],
    "core.v1.EphemeralVolumeSource": [({}, "volumeClaimTemplate")],
    "core.v1.LifecycleHandler": [({}, ""), ({"exec": {}, "sleep": {"seconds": 1}}, "")],
    "core.v1.LocalObjectReference": [({}, "name")],
    "core.v1.NodeSelectorRequirement": [
        ({"key": "a", "operator": "In"}, "values"),
        ({"key": "a", "operator": "NotIn", "values": []}, "values"),
    ],
    "core.v1.PersistentVolumeClaimSpec": [({"accessModes": ["ReadWriteOnce"]}, "resources"), ({}, "accessModes")],
    "core.v1.PodDNSConfigOption": [({"value": "2"}, "name")],
    "core.v1.Probe": [({"periodSeconds": 5}, ""), ({"exec": {}, "tcpSocket": {"port": 1}}, "")],
    "core.v1.ProjectedVolumeSource": [({}, "sources")],
    "core.v1.SeccompProfile": [({"type": "Localhost"}, "localhostProfile")],
    "core.v1.SecretEnvSource": [({}, "name")],
    "core.v1.SecretKeySelector": [({"key": "a"}, "name")],
    "core.v1.SecretProjection": [({}, "name")],
    "core.v1.SecretVolumeSource": [({}, "secretName")],
    "core.v1.Toleration": [
        ({}, "key"),
        ({"effect": "NoSchedule"}, "key"),
        ({"key": "a", "operator": "Exists", "value": "b"}, "value"),
        ({"key": "a", "effect": "NoSchedule", "tolerationSeconds": 1}, "effect"),
    ],
    "core.v1.Volume": [({"name": "a"}, ""), ({"name": "a", "emptyDir": {}, "hostPath": {"path": "/"}}, "")],
    "core.v1.VolumeProjection": [({}, ""), ({"configMap": {"name": "a"}, "secret": {"name": "a"}}, "")],
    "meta.v1.LabelSelectorRequirement": [
        ({"key": "a", "operator": "In"}, "values"),
        ({"key": "a", "operator": "NotIn", "values": []}, "values"),
    ],
    "networking.v1.NetworkPolicyPeer": [({}, ""), ({"ipBlock": {"cidr": "10.0.0.0/8"}, "podSelector": {}}, "")],
    "networking.v1.NetworkPolicyPort": [({"endPort": 1}, "port")],
}
"""Objects that OBJECTS is against, and the key that the message names; empty: the object's own."""

CASES = [
    *((name, {field: value}, field) for name, fields in WRONG_FIELDS.items() for field, value in fields.items()),
    *((name, value, key) for name, rows in WRONG_OBJECTS.items() for value, key in rows),
]


def unnamed(schemas: dict[str, Any], directory: Any) -> list[Any]:
    """The cases that are not refused with their key."""
    found = refusals([(name, value) for name, value, _ in CASES], schemas, directory)
    return [
        (*case, refusal)
        for case, refusal in zip(CASES, found, strict=True)
        if not any(key == case[2] or key.startswith(f"{case[2]}.") for key in refusal)
    ]


def test_formats_take_what_is_right_and_refuse_what_is_wrong(tmp_path: Any) -> None:
    cases = [(name, value, ok) for name, both in VALUES.items() for ok in (True, False) for value in both[not ok]]
    found = refusals([(name, value) for name, value, _ in cases], definitions(), tmp_path)
    wrong = [(*case, refusal) for case, refusal in zip(cases, found, strict=True) if case[2] == bool(refusal)]
    assert wrong == []


def test_rules_refuse_with_their_key(tmp_path: Any) -> None:
    assert unnamed(definitions(), tmp_path) == []


def test_values_refused_by_the_rules_pass_the_schema_of_kubernetes_alone(tmp_path: Any) -> None:
    """So no rule repeats what the description of Kubernetes refuses."""
    described = {**kubernetes_definitions.load(), **FORMATS}
    taken = [row[:3] for row in unnamed(described, tmp_path)]
    assert [case for case in CASES if case not in taken] == []


def test_each_format_and_rule_has_values() -> None:
    assert set(VALUES) == set(FORMATS)
    assert {name: set(fields) for name, fields in WRONG_FIELDS.items()} == {
        name: set(of) for name, of in FIELDS.items()
    }
    assert set(WRONG_OBJECTS) == set(OBJECTS)


def test_a_rule_for_a_field_that_kubernetes_does_not_have_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FIELDS, "core.v1.Toleration", {"efect": {}})
    with pytest.raises(AssertionError, match="efect"):
        definitions()


def test_the_definitions_are_those_of_kubernetes() -> None:
    made = kubernetes_definitions.text(kubernetes_definitions.extract())
    assert made == kubernetes_definitions.FILE.read_text(), (
        "run: PYTHONPATH=deploy python -m local.kubernetes_definitions"
    )
