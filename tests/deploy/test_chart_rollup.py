"""The rollup's CronJob: the pipeline and its options, retention, and executors that Spark makes as pods."""

import itertools
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from analytics.cli import main
from analytics.tables.schemas import VIEWS
from tests.deploy.chart import NAME, VALUES, Manifests, Refused, deep_merge, needs_tools, render
from tests.deploy.kubernetes_schemas import LOCATION
from tests.deploy.test_chart_manifests import complaints, schemas, schemas_by_version  # noqa: F401 -- fixtures
from tests.deploy.test_chart_pods import LOGS_BYTES, size

pytestmark = needs_tools

ROLLUP = f"{NAME}-rollup"
ANALYTICS: dict[str, Any] = {"analytics": {"receiver": {"enabled": True}, "rollup": {"enabled": True}}}
EXECUTORS = deep_merge(ANALYTICS, {"analytics": {"rollup": {"executors": {"enabled": True}}}})


def rendered(base: dict[str, Any] = EXECUTORS, **analytics: Any) -> Manifests:
    return render(**deep_merge(base, {"analytics": analytics}))


def pod_of(manifests: Manifests) -> Any:
    return manifests.get("CronJob", ROLLUP)["spec"]["jobTemplate"]["spec"]["template"]["spec"]


def pipeline(manifests: Manifests) -> Any:
    """The only container."""
    (container,) = pod_of(manifests)["containers"]
    return container


def executor_pod(manifests: Manifests) -> Any:
    return yaml.safe_load(manifests.get("ConfigMap", ROLLUP)["data"]["executor.yaml"])


def settings(manifests: Manifests) -> dict[str, str]:
    lines = manifests.get("ConfigMap", ROLLUP)["data"]["executors.conf"].splitlines()
    pairs = (line.split(maxsplit=1) for line in lines if line and not line.startswith("#"))
    return dict(pairs)  # type: ignore[arg-type]


# ---- the pipeline


@pytest.mark.parametrize("base", [ANALYTICS, EXECUTORS], ids=["local", "executors"])
def test_the_pipeline_takes_its_options(base: dict[str, Any]) -> None:
    """It fails only for the lack of a spool."""
    arguments = pipeline(rendered(base))["args"]
    result = CliRunner().invoke(main, arguments[arguments.index("/job/analytics_job.py") + 1 :])
    assert "Invalid value for '--spool': Directory '/data/spool' does not exist" in result.output
    assert rendered(base).names("CronJob") == [ROLLUP]


def test_values_of_the_pipeline() -> None:
    retention = {"spoolHours": 7, "days": {"samples": 3}}
    arguments = pipeline(
        rendered(ANALYTICS, rollup={"retention": retention, "compactedPartitionsMax": 9, "jobs": ["a", "b"]})
    )["args"]
    pairs = list(itertools.pairwise(arguments))
    for pair in (
        ("--keep-spool-hours", "7"),
        ("--compact-limit", "9"),
        ("--keep", "samples=3"),
        ("--job", "a"),
        ("--job", "b"),
    ):
        assert pair in pairs


def test_every_table_with_days_has_a_retention() -> None:
    """Nothing grows for ever; bills are kept longest, samples shortest."""
    days = VALUES["analytics"]["rollup"]["retention"]["days"]
    assert set(days) == {name for name, view in VIEWS.items() if view.by}
    assert all(days.values())
    assert min(days.values()) == days["samples"] == days["histograms"]
    assert max(days.values()) == days["usage_hourly"] == days["usage_daily"]
    arguments = pipeline(rendered(ANALYTICS))["args"]
    kept = dict(one.split("=") for option, one in itertools.pairwise(arguments) if option == "--keep")
    assert kept == {table: str(number) for table, number in days.items()}


def test_a_retention_is_refused_for_a_table_that_is_none() -> None:
    with pytest.raises(Refused, match="specifications of the schema"):
        rendered(ANALYTICS, rollup={"retention": {"days": {"series": 1}}})


@pytest.mark.parametrize(("total", "gibibytes", "fits"), [(1 << 30, 2, True), (1 << 30, 1, False), (2 << 30, 2, False)])
def test_the_volume_has_room_beside_the_spool(total: int, gibibytes: int, fits: bool) -> None:
    receiver = {"config": {"spool": {"total_bytes_max": total}}, "persistence": {"size": f"{gibibytes}Gi"}}
    if fits:
        rendered(ANALYTICS, receiver=receiver)
        return
    with pytest.raises(Refused, match=r"analytics\.receiver\.persistence\.size: .* raise it, or lower"):
        rendered(ANALYTICS, receiver=receiver)


# ---- executors


def test_without_executors_the_pod_has_no_token_and_accepts_no_connection() -> None:
    manifests = rendered(ANALYTICS)
    spec = pod_of(manifests)
    assert spec["automountServiceAccountToken"] is False
    assert "serviceAccountName" not in spec
    for kind in ("Role", "RoleBinding"):
        assert manifests.names(kind) == []
    policy = manifests.get("NetworkPolicy", ROLLUP)["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    assert "ingress" not in policy
    assert "k8s://" not in str(pipeline(manifests)["args"])


def test_the_drivers_account_may_handle_pods_in_its_namespace_and_nothing_else() -> None:
    """test_analytics_executors shows which a run needs; `delete` is for executors that fail."""
    manifests = rendered()
    (rule,) = manifests.get("Role", ROLLUP)["rules"]
    assert rule["apiGroups"] == [""]
    assert rule["resources"] == ["pods"]
    assert sorted(rule["verbs"]) == ["create", "delete", "deletecollection", "get", "list", "watch"]
    assert manifests.names("ClusterRole") == manifests.names("ClusterRoleBinding") == []
    binding = manifests.get("RoleBinding", ROLLUP)
    assert binding["roleRef"] == {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": ROLLUP}
    (subject,) = binding["subjects"]
    account = manifests.get("ServiceAccount", ROLLUP)
    assert subject == {"kind": "ServiceAccount", "name": ROLLUP, "namespace": account["metadata"]["namespace"]}


def test_only_the_drivers_pod_has_the_accounts_token() -> None:
    manifests = rendered()
    assert manifests.get("ServiceAccount", ROLLUP)["automountServiceAccountToken"] is False
    spec = pod_of(manifests)
    assert (spec["serviceAccountName"], spec["automountServiceAccountToken"]) == (ROLLUP, True)
    executor = executor_pod(manifests)["spec"]
    assert executor["automountServiceAccountToken"] is False
    assert "serviceAccountName" not in executor
    for pod in (manifests.pod["spec"], manifests.get("StatefulSet", f"{NAME}-receiver")["spec"]["template"]["spec"]):
        assert pod.get("serviceAccountName") != ROLLUP


def test_peers_authenticate_and_encrypt_as_installed() -> None:
    """The secret is Spark's own, new for each job: it is in no argument, no file and no environment of the driver."""
    manifests = rendered()
    found = settings(manifests)
    for name in ("spark.authenticate", "spark.network.crypto.enabled", "spark.io.encryption.enabled"):
        assert found[name] == "true", name
    assert found["spark.network.crypto.cipher"] == "AES/GCM/NoPadding"
    for name in ("spark.network.crypto.saslFallback", "spark.ui.enabled"):
        assert found[name] == "false", name
    assert not [name for name in found if "secret" in name.lower()]
    assert "secret" not in str(pipeline(manifests)["args"]).lower()
    assert "secret" not in str(pipeline(manifests)["env"]).lower()


def test_only_executors_reach_the_driver() -> None:
    manifests = rendered()
    ports = {settings(manifests)[f"spark.{name}.port"] for name in ("driver", "blockManager")}
    labels = executor_pod(manifests)["metadata"]["labels"]
    driver = manifests.get("CronJob", ROLLUP)["spec"]["jobTemplate"]["spec"]["template"]["metadata"]["labels"]
    policies = {
        "driver": (manifests.get("NetworkPolicy", ROLLUP)["spec"], driver, [labels], ports),
        "executor": (
            manifests.get("NetworkPolicy", f"{ROLLUP}-executor")["spec"],
            labels,
            [driver, labels],
            {settings(manifests)["spark.blockManager.port"]},
        ),
    }
    for name, (policy, mine, peers, allowed) in policies.items():
        assert policy["podSelector"]["matchLabels"].items() <= mine.items(), name
        (rule,) = policy["ingress"]
        assert {str(one["port"]) for one in rule["ports"]} == allowed, name
        selected = [one["podSelector"]["matchLabels"].items() for one in rule["from"]]
        assert len(selected) == len(peers)
        assert all(wanted <= peer.items() for wanted, peer in zip(selected, peers, strict=True)), name
        assert all("namespaceSelector" not in one for one in rule["from"]), name
    assert (
        manifests.get("NetworkPolicy", ROLLUP)["spec"]["podSelector"]
        != (manifests.get("NetworkPolicy", f"{ROLLUP}-executor")["spec"]["podSelector"])
    )


def test_executors_go_with_their_driver_and_never_stay_longer() -> None:
    manifests = rendered(rollup={"activeDeadlineSeconds": 1234})
    assert executor_pod(manifests)["spec"]["activeDeadlineSeconds"] == 1234
    container = pipeline(manifests)
    assert "spark.kubernetes.driver.pod.name=$(POD_NAME)" in container["args"]
    fields = {one["name"]: one["valueFrom"]["fieldRef"]["fieldPath"] for one in container["env"] if "valueFrom" in one}
    assert fields == {"POD_NAME": "metadata.name", "POD_IP": "status.podIP"}


def test_an_executors_pod_is_restricted_and_sees_the_volume() -> None:
    shared = {"nodeSelector": {"pool": "batch"}, "tolerations": [{"operator": "Exists"}], "priorityClassName": "low"}
    manifests = rendered(rollup={**shared, "podLabels": {"team": "data"}, "extraEnv": [{"name": "A", "value": "b"}]})
    pod, driver = executor_pod(manifests), pod_of(manifests)
    spec = pod["spec"]
    (container,) = spec["containers"]
    assert settings(manifests)["spark.kubernetes.executor.podTemplateContainerName"] == container["name"]
    assert spec["securityContext"] == driver["securityContext"]
    assert container["securityContext"] == driver["containers"][0]["securityContext"]
    for key in (*shared, "affinity"):
        assert spec[key] == driver[key], key
    assert pod["metadata"]["labels"]["team"] == "data"
    assert {"name": "A", "value": "b"} in container["env"]
    claims = [one for one in driver["volumes"] if "persistentVolumeClaim" in one]
    assert claims[0] in spec["volumes"]
    assert {"name": "data", "mountPath": "/data"} in container["volumeMounts"]
    (folder,) = (one["emptyDir"]["sizeLimit"] for one in spec["volumes"] if "emptyDir" in one)
    assert size(folder) + LOGS_BYTES <= size(container["resources"]["limits"]["ephemeral-storage"])


def test_pods_may_be_anywhere_with_a_volume_that_many_nodes_can_mount() -> None:
    many = {"persistence": {"accessModes": ["ReadWriteMany"]}}
    for manifests in (
        rendered(receiver=many),
        rendered(receiver=deep_merge(many, {"persistence": {"existingClaim": "c"}})),
    ):
        assert "affinity" not in executor_pod(manifests)["spec"]
        assert "affinity" not in pod_of(manifests)


def test_the_template_is_a_pod_that_kubernetes_takes(schemas: Any) -> None:  # noqa: F811 -- the fixture
    manifests = rendered(rollup={"podAnnotations": {"a": "b"}, "runtimeClassName": "gvisor"})
    assert LOCATION
    assert complaints(manifests.get("ConfigMap", ROLLUP)["data"]["executor.yaml"], schemas) == []


def test_values_of_executors_are_sparks_settings() -> None:
    values = {
        "count": 3, "cores": 2, "memory": "2g", "memoryOverhead": "1g", "apiServer": "https://192.0.2.1:6443",
        "resources": {"requests": {"cpu": "1500m"}, "limits": {"cpu": "3"}},
    }  # fmt: skip
    manifests = rendered(rollup={"executors": values})
    found = settings(manifests)
    assert [found[f"spark.executor.{name}"] for name in ("instances", "cores", "memory", "memoryOverhead")] == [
        "3", "2", "2g", "1g",
    ]  # fmt: skip
    assert found["spark.kubernetes.executor.request.cores"] == "1500m"
    assert found["spark.kubernetes.executor.limit.cores"] == "3"
    assert "k8s://https://192.0.2.1:6443" in pipeline(manifests)["args"]


def test_names_of_two_releases_do_not_collide() -> None:
    """Pods of executors are named after the release, and by Spark with a number of its own for each run."""
    named = pipeline(rendered())["args"]
    assert named[named.index("--name") + 1] == f"{NAME}-pipeline"


@pytest.mark.parametrize(
    ("rollup", "message"),
    [
        ({"sparkArguments": ["--master", "local"]}, r"analytics\.rollup\.sparkArguments: --master would replace"),
        ({"sparkArguments": ["--properties-file=x"]}, r"analytics\.rollup\.sparkArguments: --properties-file would"),
        (
            {"executors": {"resources": {"limits": {"memory": "1Gi"}}}},
            r"analytics\.rollup\.executors\.resources\.limits\.memory: Spark sets it; use",
        ),
        ({"executors": {"memory": "1Gi"}}, "specifications of the schema"),
        ({"executors": {"apiServer": "kubernetes"}}, "specifications of the schema"),
    ],
)
def test_contradictions_are_refused(rollup: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=message):
        rendered(rollup=rollup)
