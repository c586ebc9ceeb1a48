"""What operators set for pods: hooks, classes, labels, ephemeral storage; why a container ended."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.chart import (
    CHART,
    NAME,
    OPTIONS,
    Refused,
    deep_merge,
    helm_template,
    helms_as_they_are,
    needs_tools,
    render,
)
from tests.deploy.test_chart_templates import pod_specs

pytestmark = needs_tools

ANALYTICS: dict[str, Any] = {"receiver": {"enabled": True}, "rollup": {"enabled": True}}
UNITS = {"Mi": 2**20, "Gi": 2**30}
LOGS_BYTES = 50 * UNITS["Mi"]
"""What the kubelet keeps of a container's logs: five files of 10 MiB by default."""


def size(quantity: str) -> int:
    return int(quantity[:-2]) * UNITS[quantity[-2:]]


def pods(**values: Any) -> dict[str, Any]:
    """The pod templates of proxy, receiver and rollup."""
    manifests = render(**values)
    return {
        "proxy": manifests.pod,
        "receiver": manifests.get("StatefulSet", f"{NAME}-receiver")["spec"]["template"],
        "rollup": manifests.get("CronJob", f"{NAME}-rollup")["spec"]["jobTemplate"]["spec"]["template"],
    }


def test_why_a_container_ended_is_shown() -> None:
    for name, spec in pod_specs(render(analytics=ANALYTICS)).items():
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            assert container["terminationMessagePolicy"] == "FallbackToLogsOnError", name


def test_ephemeral_storage_holds_the_folders_and_the_logs() -> None:
    for name, spec in pod_specs(render(analytics=ANALYTICS)).items():
        folders = sum(size(volume["emptyDir"]["sizeLimit"]) for volume in spec["volumes"] if "emptyDir" in volume)
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            resources = container["resources"]
            if not folders:
                continue
            requested, limit = (size(resources[kind]["ephemeral-storage"]) for kind in ("requests", "limits"))
            assert requested <= limit, name
            assert folders + LOGS_BYTES <= limit, name


def test_nodes_that_do_not_account_for_ephemeral_storage_can_do_without() -> None:
    none = {"requests": {"ephemeral-storage": None}, "limits": {"ephemeral-storage": None}}
    values = {"resources": none, "analytics": deep_merge(ANALYTICS, {one: {"resources": none} for one in ANALYTICS})}
    for spec in pod_specs(render(**values)).values():
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            assert "ephemeral-storage" not in str(container["resources"])


def test_the_grace_period_holds_a_hooks_sleep() -> None:
    hook = {"preStop": {"sleep": {"seconds": 6}}}
    with pytest.raises(Refused, match=r"terminationGracePeriodSeconds: 60 is too short; .* need 61"):
        render(lifecycle=hook, terminationGracePeriodSeconds=60)
    assert render(lifecycle=hook, terminationGracePeriodSeconds=61).container["lifecycle"] == hook
    assert "lifecycle" not in render(terminationGracePeriodSeconds=55).container


def test_a_hooks_sleep_is_refused_where_kubernetes_has_none() -> None:
    values = {"lifecycle": {"preStop": {"sleep": {"seconds": 5}}}}
    with pytest.raises(Refused, match=r"lifecycle\.preStop\.sleep: needs Kubernetes 1\.30"):
        helm_template(values, "1.29.14")
    assert "sleep:" in helm_template(values, "1.30.0")


@pytest.mark.parametrize("key", ["priorityClassName", "runtimeClassName"])
def test_each_kind_of_pod_has_classes_of_its_own(key: str) -> None:
    analytics = deep_merge(ANALYTICS, {"receiver": {key: "b"}, "rollup": {key: "c"}})
    found = pods(analytics=analytics, **{key: "a"})
    assert {name: pod["spec"][key] for name, pod in found.items()} == {"proxy": "a", "receiver": "b", "rollup": "c"}
    assert all(key not in pod["spec"] for pod in pods(analytics=ANALYTICS).values())


def test_all_pods_share_scheduler_and_aliases() -> None:
    shared = {"schedulerName": "batch", "hostAliases": [{"ip": "192.0.2.1", "hostnames": ["broker-0"]}]}
    for pod in pods(analytics=ANALYTICS, **shared).values():
        assert shared.items() <= pod["spec"].items()


def test_labels_and_annotations_of_the_analytics_pods_are_added_to_the_charts() -> None:
    before = pods(analytics=ANALYTICS)
    own = {"podLabels": {"team": "data"}, "podAnnotations": {"sidecar.istio.io/inject": "false"}}
    for name, pod in pods(analytics=deep_merge(ANALYTICS, {"receiver": own, "rollup": own})).items():
        if name != "proxy":
            old, new = before[name]["metadata"], pod["metadata"]
            assert new["labels"] == old["labels"] | own["podLabels"]
            assert new["annotations"] == old.get("annotations", {}) | own["podAnnotations"]


@pytest.mark.parametrize(
    ("component", "label"),
    [
        ("receiver", "app.kubernetes.io/component"),
        ("receiver", "component"),
        ("rollup", "app.kubernetes.io/name"),
    ],
)
def test_labels_by_which_pods_are_found_stay(component: str, label: str) -> None:
    analytics = deep_merge(ANALYTICS, {component: {"podLabels": {label: "x"}}})
    with pytest.raises(Refused, match=rf"analytics\.{component}\.podLabels: {label}"):
        render(analytics=analytics)


def test_a_receivers_token_is_random(tmp_path: Path) -> None:
    """Another one in each rendering, of 40 letters and digits; none is made beside one that is named."""
    values = tmp_path / "values.json"
    values.write_text(json.dumps({"analytics": ANALYTICS}))
    texts = [one.stdout for one in helms_as_they_are("template", "r", CHART, *OPTIONS, "--values", values).values()]
    (first,), (second,) = (
        [one["data"] for one in yaml.safe_load_all(text) if one and one["kind"] == "Secret" and one["type"] == "Opaque"]
        for text in texts
    )
    assert list(first) == ["tokens"]
    assert first != second
    assert re.fullmatch(r"[A-Za-z0-9]{40}", base64.b64decode(first["tokens"]).decode())
    named = render(analytics=deep_merge(ANALYTICS, {"receiver": {"tokenSecret": "mine"}}))
    assert f"{NAME}-receiver-token" not in named.names("Secret")
    mounted = {
        "made": pods(analytics=ANALYTICS)["receiver"]["spec"]["volumes"],
        "named": named.get("StatefulSet", f"{NAME}-receiver")["spec"]["template"]["spec"]["volumes"],
    }
    found = {
        which: [one["secret"]["secretName"] for one in volumes if "secret" in one] for which, volumes in mounted.items()
    }
    assert found == {"made": [f"{NAME}-receiver-token"], "named": ["mine"]}


def test_a_receivers_new_configuration_makes_a_new_pod_whatever_its_annotations_say() -> None:
    receiver = {"podAnnotations": {"checksum/config": "mine"}}
    assert (
        pods(analytics=deep_merge(ANALYTICS, {"receiver": receiver}))["receiver"]["metadata"]["annotations"]
        == (pods(analytics=ANALYTICS)["receiver"]["metadata"]["annotations"])
    )


def test_the_receivers_environment_and_affinity() -> None:
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    receiver = {"affinity": affinity, "extraEnv": [{"name": "A", "value": "b"}]}
    spec = pods(analytics=deep_merge(ANALYTICS, {"receiver": receiver}))["receiver"]["spec"]
    assert spec["affinity"] == affinity
    assert spec["containers"][0]["env"] == receiver["extraEnv"]
