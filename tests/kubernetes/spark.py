"""The step with executors in pods of their own: the same bill, only the rights that are needed, nothing left behind."""

from __future__ import annotations

import json
import re

from tests.e2e.lab.waiting import eventually
from tests.kubernetes.accounting import account, start_job
from tests.kubernetes.node import SOON_S, CommandError, Object, run
from tests.kubernetes.scene import NO_STORAGE, RELEASE, Scene, Values, merged

EXECUTORS: Values = {
    "executors": {
        "enabled": True,
        "count": 1,
        "memory": "512m",
        "memoryOverhead": "512m",
        "resources": merged(NO_STORAGE, {"requests": {"cpu": "50m"}}),
    }
}
SELECTOR = f"app.kubernetes.io/instance={RELEASE},app.kubernetes.io/component=rollup-executor"
ACCOUNT = f"{RELEASE}-rollup"
_NAME = re.compile(rf"{RELEASE}-pipeline-[0-9a-f]+-exec-\d+")


def spark_executors(scene: Scene) -> list[str]:
    """The CronJob's run with executors in pods; then a run whose driver is deleted in the middle."""
    address = json.loads(run(["kubectl", "-n", "default", "get", "service", "kubernetes", "-o", "json"]))
    scene.names.add("kubernetes.default.svc.cluster.local", "A", address["spec"]["clusterIP"])
    lines = account(scene, "executors", EXECUTORS)
    assert (started := _count_started(scene)) == 1, started
    eventually(lambda: not _executors(scene), what="no executor is left", within_s=SOON_S, every_s=1)
    lines.append("one executor started, and none is left")
    lines += [_check_rights(scene), _delete_driver(scene)]
    return lines


def _executors(scene: Scene) -> list[Object]:
    answer = json.loads(scene.namespace.kubectl("get", "pods", "-l", SELECTOR, "-o", "json"))
    found: list[Object] = answer["items"]
    return found


def _count_started(scene: Scene) -> int:
    """Return how many executors there were, by the kubelet's events: the pods are gone when the pipeline ends."""
    events = json.loads(scene.namespace.kubectl("get", "events", "--field-selector=reason=Started", "-o", "json"))
    return len({name for event in events["items"] if _NAME.fullmatch(name := event["involvedObject"]["name"])})


def _check_rights(scene: Scene) -> str:
    """The account may handle pods, and neither read Secrets nor reach another namespace."""
    assert _may(scene, "create", "pods")
    for verb, what in (("get", "secrets"), ("create", "configmaps"), ("patch", "pods")):
        assert not _may(scene, verb, what), f"the driver's account may {verb} {what}"
    assert not _may(scene, "create", "pods", "--subresource=exec")
    assert not _may(scene, "list", "pods", "--namespace=default")
    return "the driver's account may make and delete pods, and nothing else of what was asked"


def _may(scene: Scene, verb: str, what: str, *options: str) -> bool:
    impersonated = f"--as=system:serviceaccount:{scene.namespace.name}:{ACCOUNT}"
    try:
        return scene.namespace.kubectl("auth", "can-i", verb, what, impersonated, *options).strip() == "yes"
    except CommandError:  # its exit code for "no"
        return False


def _delete_driver(scene: Scene) -> str:
    """A run that is ended in the middle leaves no executor: they belong to its pod."""
    namespace = scene.namespace
    start_job(scene, "deleted")
    executor = eventually(lambda: _executors(scene), what="an executor of the next run", within_s=SOON_S, every_s=0.5)[
        0
    ]
    (owner,) = executor["metadata"]["ownerReferences"]
    driver = namespace.get("pod", owner["name"])
    assert driver["metadata"]["uid"] == owner["uid"], owner
    namespace.kubectl("delete", "job", "deleted", "--wait=false")
    eventually(lambda: not _executors(scene), what="no executor outlives its driver", within_s=SOON_S, every_s=1)
    return f"a run's pod deleted with {owner['kind']} as owner of its executors: none is left"
