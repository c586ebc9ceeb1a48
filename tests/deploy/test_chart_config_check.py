"""The Job that checks the configuration before an upgrade."""

import tomllib
from typing import Any

import pytest

from tests.deploy.chart import CHART, NAME, OPTIONS, RELEASE, Manifests, assert_equal, helms, needs_tools, render

pytestmark = needs_tools

CHECK = f"{NAME}-config-check"
CERT_MANAGER = {"enabled": True, "certManager": {"enabled": True, "issuerRef": {"name": "ca"}}}
SECRETS = {"pulsarRelease": "pulsar", "token": {"enabled": True}, "proxyToken": {"enabled": True}}


def pod_of(manifests: Manifests) -> Any:
    """The pod of the Job."""
    return manifests.get("Job", CHECK)["spec"]["template"]["spec"]


def checked(manifests: Manifests) -> dict[str, Any]:
    """The configuration that is checked."""
    return tomllib.loads(manifests.get("ConfigMap", CHECK)["data"]["proxy.toml"])


def test_the_check_runs_before_an_upgrade_and_stays_when_it_fails() -> None:
    manifests = render()
    for kind in ("ConfigMap", "Job"):
        annotations = manifests.get(kind, CHECK)["metadata"]["annotations"]
        assert annotations["helm.sh/hook"] == "pre-upgrade"
        assert "hook-failed" not in annotations["helm.sh/hook-delete-policy"]
    (container,) = pod_of(manifests)["containers"]
    assert container["args"] == ["check", "--any-broker", "--config", "/etc/pulsar-trio-proxy/proxy.toml"]
    assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_the_check_sees_what_the_proxy_will_see() -> None:
    """The same program, memory limit, environment, configuration and files: all else would check something else."""
    manifests = render(auth=SECRETS, extraEnv=[{"name": "PULSAR_TRIO_PROXY__LOG__LEVEL", "value": "debug"}])
    (container,) = pod_of(manifests)["containers"]
    for key in ("image", "command", "env", "resources", "securityContext", "volumeMounts"):
        assert container[key] == manifests.container[key], key
    volumes = {volume["name"]: volume for volume in pod_of(manifests)["volumes"]}
    assert volumes.pop("config") == {"name": "config", "configMap": {"name": CHECK}}
    assert volumes == {
        volume["name"]: volume for volume in manifests.pod["spec"]["volumes"] if volume["name"] in volumes
    }
    assert checked(manifests) == manifests.configuration
    brought = {"initContainers": [{"name": "c", "image": "i"}], "podAnnotations": {"example.org/inject": "files"}}
    manifests = render(**brought, podLabels={"app": "pulsar"})
    assert pod_of(manifests)["initContainers"] == brought["initContainers"]
    metadata = manifests.get("Job", CHECK)["spec"]["template"]["metadata"]
    assert metadata["annotations"] == brought["podAnnotations"]
    assert "app" not in metadata["labels"], "a Service that selects the proxy's pods would lead to it"


def test_a_certificate_that_cert_manager_has_yet_to_make_is_not_waited_for() -> None:
    manifests = render(tls={**CERT_MANAGER, "clientCa": {"secret": "ca"}})
    assert all("tls" not in listener for listener in checked(manifests)["listener"])
    assert "secret-tls" not in {volume["name"] for volume in pod_of(manifests)["volumes"]}
    existing = render(tls={"enabled": True, "existingSecret": "tls"})
    assert checked(existing) == existing.configuration
    assert "secret-tls" in {volume["name"] for volume in pod_of(existing)["volumes"]}


@pytest.mark.parametrize("value", [True, False])
def test_brokers_are_left_out_on_demand(value: bool) -> None:
    (container,) = pod_of(render(configCheck={"connect": value}))["containers"]
    assert ("--any-broker" in container["args"]) is value


def test_the_check_can_be_left_out() -> None:
    assert CHECK not in render(configCheck={"enabled": False}).names("Job")


def test_the_check_is_an_object_of_the_chart_as_all_others() -> None:
    """Labels, security contexts and the place of its pod; beside the labels by which the proxy's pods are found."""
    own = {"nodeSelector": {"pool": "edge"}, "priorityClassName": "high", "runtimeClassName": "gvisor"}
    manifests = render(commonLabels={"team": "a"}, podSecurityContext={"fsGroup": 2000}, **own)
    job = manifests.get("Job", CHECK)
    for one in (job, job["spec"]["template"], manifests.get("ConfigMap", CHECK)):
        labels = one["metadata"]["labels"]
        assert labels["team"] == "a"
        assert labels["app.kubernetes.io/component"] == "config-check"
    pod = pod_of(manifests)
    assert pod["securityContext"] == manifests.pod["spec"]["securityContext"]
    assert pod["securityContext"]["fsGroup"] == 2000
    assert own.items() <= pod.items()
    assert pod["automountServiceAccountToken"] is False


def test_tools_can_leave_the_hooks_out() -> None:
    """`--no-hooks` leaves out the Job and its ConfigMap, and nothing that the proxy needs."""
    outcomes = helms("template", RELEASE, CHART, *OPTIONS, "--no-hooks")
    assert_equal(outcomes)
    without = Manifests(outcomes["helm"].stdout)
    assert NAME in without.names("ConfigMap")
    assert CHECK not in without.names("Job") + without.names("ConfigMap")
