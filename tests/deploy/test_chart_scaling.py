"""What sets the number and the size of pods: KEDA in place of the HorizontalPodAutoscaler, recommendations of sizes."""

import re
from typing import Any

import pytest

from tests.deploy.chart import NAME, NAMESPACE, Refused, deep_merge, needs_tools, render

pytestmark = needs_tools

KEDA: dict[str, Any] = {"keda": {"enabled": True, "serverAddress": "http://prometheus:9090"}}


def test_keda_scales_on_connections_in_place_of_the_autoscaler() -> None:
    manifests = render(**KEDA, autoscaling={"minReplicas": 3, "maxReplicas": 9})
    assert "replicas" not in manifests.get("Deployment")["spec"]
    assert manifests.names("HorizontalPodAutoscaler") == []
    spec = manifests.get("ScaledObject")["spec"]
    assert spec["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": NAME}
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (3, 9)
    own = render(autoscaling={"enabled": True}).get("HorizontalPodAutoscaler")["spec"]["behavior"]
    assert spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == own
    (trigger,) = spec["triggers"]
    assert (trigger["type"], trigger["metricType"], trigger["metadata"]["threshold"]) == (
        "prometheus",
        "AverageValue",
        "2000",
    )


def test_the_query_is_for_the_pods_of_this_release() -> None:
    """By the labels of the chart's own monitors; pods of another release or of the analytics are not counted."""
    metadata = render(**KEDA).get("ScaledObject")["spec"]["triggers"][0]["metadata"]
    found = re.fullmatch(
        r'sum\(pulsar_proxy_active_connections\{namespace="(.+)",kubernetes_pod_name=~"(.+)"\}\)', metadata["query"]
    )
    assert found is not None
    namespace, pods = found.groups()
    assert namespace == NAMESPACE
    assert re.fullmatch(pods, f"{NAME}-7d4b9c6f5-x2x7z")
    assert not re.fullmatch(pods, f"{NAME}-receiver-0")
    assert not re.fullmatch(pods, f"other-{NAME}-7d4b9c6f5-x2x7z")
    for monitor, endpoints in (("serviceMonitor", "endpoints"), ("podMonitor", "podMetricsEndpoints")):
        manifest = render(**{monitor: {"enabled": True}}).get(f"{monitor[0].upper()}{monitor[1:]}")
        assert "kubernetes_pod_name" in {one["targetLabel"] for one in manifest["spec"][endpoints][0]["relabelings"]}


def test_a_prometheus_without_an_answer_removes_no_pods() -> None:
    """KEDA's default takes no samples for no connections."""
    metadata = render(**KEDA).get("ScaledObject")["spec"]["triggers"][0]["metadata"]
    assert metadata["ignoreNullValues"] == "false"


def test_keda_can_have_a_query_credentials_and_triggers_of_ones_own() -> None:
    own = {
        "query": "sum(x)",
        "metadata": {"authModes": "bearer"},
        "authenticationRef": {"name": "prometheus"},
        "triggers": [{"type": "cpu", "metricType": "Utilization", "metadata": {"value": "70"}}],
    }
    triggers = render(**deep_merge(KEDA, {"keda": own})).get("ScaledObject")["spec"]["triggers"]
    assert triggers[1:] == own["triggers"]
    assert triggers[0]["authenticationRef"] == own["authenticationRef"]
    assert triggers[0]["metadata"].items() >= {"query": "sum(x)", "authModes": "bearer"}.items()


def test_sizes_are_recommended_and_never_changed() -> None:
    """A changed size is another pod, whose relays end."""
    spec = render(vpa={"enabled": True}).get("VerticalPodAutoscaler")["spec"]
    assert spec["updatePolicy"] == {"updateMode": "Off"}
    assert spec["targetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": NAME}
    assert render().names("VerticalPodAutoscaler") == []


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({**KEDA, "autoscaling": {"enabled": True}}, "keda.enabled and autoscaling.enabled"),
        ({**KEDA, "autoscaling": {"minReplicas": 9}}, "autoscaling.minReplicas"),
        ({"keda": {"enabled": True}}, "keda.enabled: KEDA would have no Prometheus"),
    ],
)
def test_values_that_keda_cannot_follow_are_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(Refused) as refused:
        render(**values)
    assert says in str(refused.value)
