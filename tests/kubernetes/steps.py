"""The steps on the node, in their order. Each returns lines about what it saw, and raises when that may not be."""

from __future__ import annotations

import contextlib
import json
import re
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import httpx
from local.distribution import pulsar_home

from proto.pulsar_pb2 import BaseCommand
from tests.e2e.lab import hog
from tests.e2e.lab.programs import java_program, python_program
from tests.e2e.lab.waiting import eventually
from tests.e2e.lab.wire import WireClient
from tests.kubernetes.node import SOON_S, CommandError, Object, name_of, restarts, run
from tests.kubernetes.scene import (
    HELM_PATIENCE,
    HTTP_HOST,
    HTTP_SERVICE,
    NODE_ADDRESS,
    PORT,
    RELEASE,
    REPLICAS,
    TLS_PORT,
    Scene,
    Values,
)

CLIENTS = 200
SOME_CLIENTS = 40
DEPLOYMENT = f"deployment/{RELEASE}"
MAX_AGE_MS = 20_000
_DEBUG = '\n[log]\nlevel = "debug"\n'
_HOG = Path(hog.__file__).read_text()

# The image has no shell.
_IDENTITY = """
import os
print(os.getuid())
try:
    open("/file", "w")
except OSError as error:
    print(error)
"""

# ---- installation


def install(scene: Scene) -> list[str]:
    """The chart in a namespace that enforces `restricted`; the root file system is read-only, the user is not root."""
    scene.create_namespace()
    pods = scene.install()
    pod = pods[0]
    refused = _attempt_privileged_pod(scene)
    identity = scene.namespace.execute(pod, "python3", "-c", _IDENTITY).split("\n", 1)
    assert identity[0] == "10001", identity
    assert "Read-only file system" in identity[1], identity
    openssl = scene.namespace.execute(pod, "python3", "-c", "import ssl; print(ssl.OPENSSL_VERSION)").strip()
    version = re.match(r"OpenSSL (\d+)\.(\d+)", openssl)
    assert version, openssl
    assert (int(version[1]), int(version[2])) >= (3, 5), openssl
    return [f"{len(pods)} pods are ready; user 10001, root file system read-only, {openssl}", refused]


def _attempt_privileged_pod(scene: Scene) -> str:
    """A pod that is not restricted must be refused, or the namespace enforces nothing."""
    container = {"name": "c", "image": "lab.local/pause:1", "securityContext": {"privileged": True}}
    pod: Object = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "bad"}, "spec": {"containers": [container]}}
    refusal = _refusal(lambda: scene.namespace.apply(pod))
    assert "violates PodSecurity" in refusal, refusal or "the namespace lets a privileged pod in"
    return "a privileged pod is refused there"


def _refusal(attempt: Callable[[], object]) -> str:
    """Return why the API server refuses something; empty if it does not."""
    try:
        attempt()
    except CommandError as error:
        return str(error)
    return ""


def helm_test(scene: Scene) -> list[str]:
    """`helm test`: a pod of the proxy's image connects, looks up, produces and consumes."""
    text = scene.namespace.helm("test", RELEASE, HELM_PATIENCE)
    assert re.search(r"Phase:\s+Succeeded", text), text
    return ["Phase: Succeeded"]


def clients(scene: Scene) -> list[str]:
    """Real clients, through the node's ports, plain and with TLS."""
    home = pulsar_home()
    lines = []
    for make in (python_program, java_program):
        program = make(scene.directory, home)
        urls = [f"pulsar://{NODE_ADDRESS}:{PORT}"]
        options = {"token": scene.token(), "count": 2000, "timeout_s": 90}
        if program.name == "python":
            urls.append(f"pulsar+ssl://{NODE_ADDRESS}:{TLS_PORT}")
            options["trust"] = scene.authority.file
        for url in urls:
            result = program.succeed("produce_consume", url, scene.topic("clients"), **options)
            assert (result["missing"], result["in_order"]) == (0, True), result
            lines.append(f"{program.name} {url}: {result['received']} messages, in order")
    return lines


def http(scene: Scene) -> list[str]:
    """The Service for HTTP answers for the brokers' web port, by TLS and for tokens; `helm test` asks there, too."""
    broker: Values = {"brokers": {"web_service_url": f"http://{NODE_ADDRESS}:{scene.broker.web_port}"}}
    scene.install(http={"enabled": True}, config=broker, test={"caSecret": "lab-authority"})
    url = f"https://{scene.address_of(HTTP_SERVICE)}:8081/admin/v2/clusters"

    def answer(headers: dict[str, str]) -> httpx.Response:
        trusted = ssl.create_default_context(cafile=scene.authority.file)
        with httpx.Client(verify=trusted, timeout=30, trust_env=False) as client:
            return client.get(url, headers=headers, extensions={"sni_hostname": HTTP_HOST})

    found = answer({"Authorization": f"Bearer {scene.token()}"}).raise_for_status().json()
    assert found == ["standalone"], found
    assert answer({}).status_code == 401
    (phase,) = helm_test(scene)
    served = sum(
        scene.namespace.metrics(pod).total("pulsar_proxy_http_requests_total", route="brokers", status="2xx")
        for pod in scene.namespace.ready_pods()
    )
    assert served == 2, f"{served:.0f} requests were answered, not the one here and that of helm test"
    scene.install()
    return [f"GET /admin/v2/clusters: {found}, without a token 401; helm test asks there, too: {phase}"]


# ---- pods come and go


def rollout(scene: Scene) -> list[str]:
    """`rollout restart`, `helm upgrade` and `helm rollback` under 200 clients with relays, and newcomers."""
    namespace, lines = scene.namespace, []
    with scene.observed("rollout", CLIENTS) as observation:

        def restart() -> None:
            namespace.kubectl("rollout", "restart", DEPLOYMENT)
            namespace.kubectl("rollout", "status", DEPLOYMENT, "--timeout=10m")

        def rollback() -> None:
            namespace.helm("rollback", RELEASE, "--wait", HELM_PATIENCE)

        events: dict[str, Callable[[], object]] = {
            "rollout restart": restart,
            "helm upgrade": lambda: scene.install(podAnnotations={"lab/upgraded": "yes"}),
            "helm rollback": rollback,
        }
        for what, happen in events.items():
            before = {pod["metadata"]["uid"] for pod in namespace.pods()}
            observation.mark()
            began_s = time.monotonic()
            happen()
            after = {pod["metadata"]["uid"] for pod in namespace.wait_until_settled(REPLICAS)}
            assert not before & after, f"{what} left pods as they were"
            observation.fleet.wait_for_messages()
            lines.append(f"{observation.event(what)}; all new pods after {time.monotonic() - began_s:.0f} s")
        lines.append(observation.check_result())
    return lines


def eviction(scene: Scene) -> list[str]:
    """A pod is evicted; the next eviction is against the disruption budget until the first pod is replaced."""
    namespace = scene.namespace
    with scene.observed("eviction", SOME_CLIENTS) as observation:
        first, second, _ = namespace.wait_until_settled(REPLICAS)
        observation.mark()
        _evict(scene, first)
        refusal = _refusal(lambda: _evict(scene, second))
        assert "disruption budget" in refusal, refusal or "a second pod could be evicted at once"
        namespace.wait_until_settled(REPLICAS)
        observation.fleet.wait_for_messages()
        ended = len(observation.fleet.progress()["ends_s"])
        return [f"the second eviction is refused; {ended} relays of the evicted pod ended", observation.check_result()]


def _evict(scene: Scene, pod: Object) -> None:
    about = {"name": name_of(pod), "namespace": scene.namespace.name}
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": about}
    path = f"/api/v1/namespaces/{scene.namespace.name}/pods/{name_of(pod)}/eviction"
    run(["kubectl", "create", "--raw", path, "-f", "-"], json.dumps(body))


def scale_out(scene: Scene) -> list[str]:
    """With a maximum age, relays move to pods that came later."""
    # In new pods, so before the clients come: it counts for connections from then on, and a ConfigMap takes its time.
    limits = {"limits": {"max_connection_age_ms": MAX_AGE_MS}}
    aged: Values = {"config": limits, "podAnnotations": {"lab/aged": "yes"}}
    scene.install(**aged)
    with scene.observed("scale", SOME_CLIENTS) as observation:
        pods = scene.install(**aged, replicaCount=REPLICAS + 1)
        youngest = max(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))
        wanted = SOME_CLIENTS // (REPLICAS + 1) // 2

        def moved() -> float:
            count = scene.namespace.metrics(youngest).total("pulsar_proxy_active_connections")
            return count if count >= wanted else 0

        count = eventually(moved, what="connections move to the new pod", within_s=SOON_S, every_s=1)
        lines = [f"{count:.0f} connections on the new pod of {len(pods)}"]
        lines.append(observation.check_result())
    scene.install()
    return lines


# ---- processes end


def forwarder_kill(scene: Scene) -> list[str]:
    """SIGKILL of the only forwarder of a pod: its plain relays go on."""
    namespace = scene.namespace
    with scene.observed("kill", SOME_CLIENTS) as observation:
        observation.mark()
        for pod in namespace.wait_until_settled(REPLICAS):
            old = _pids(namespace.status(pod), "forwarder")
            namespace.execute(pod, "python3", "-c", f"import os; os.kill({old[0]}, 9)")
            eventually(
                lambda pod=pod, old=old: (new := _pids(namespace.status(pod), "forwarder")) and new != old,
                what="a new forwarder",
                within_s=SOON_S,
                every_s=0.5,
            )
        observation.fleet.wait_for_messages(10)
        ended = len(observation.fleet.progress()["ends_s"])
        assert ended == 0, f"{ended} relays ended with their forwarders"
        assert [restarts(pod) for pod in namespace.pods()] == [0] * REPLICAS
        return [f"{REPLICAS} forwarders killed, no relay ended, no container restarted", observation.check_result()]


def _pids(status: Object, role: str) -> list[int]:
    return [worker["pid"] for worker in status["workers"] if worker["role"] == role and worker.get("pid")]


def oom(scene: Scene) -> list[str]:
    """The kernel runs out of the pod's memory: once it kills a worker, once the whole container."""
    namespace, lines = scene.namespace, []
    with scene.observed("oom", SOME_CLIENTS) as observation:
        pod = namespace.wait_until_settled(REPLICAS)[0]
        before = set(_all_pids(namespace.status(pod)))
        written, kills = map(int, namespace.execute(pod, "python3", "-c", _HOG, "once").split())
        assert kills >= 1, f"no kill after {written} MiB"
        status = eventually(
            lambda: _replaced(namespace.status(pod), before), what="a new worker", within_s=SOON_S, every_s=0.5
        )
        gone = len(before - set(_all_pids(status)))
        observation.fleet.wait_for_messages()
        again = namespace.get("pod", name_of(pod))
        assert restarts(again) == restarts(pod), "the container was restarted"
        ended = len(observation.fleet.progress()["ends_s"])
        lines.append(
            f"{kills} kill(s) after {written} MiB: {gone} worker(s) replaced, {ended} relays ended, no restart"
        )
        lines.append(observation.check_newcomers())
        with contextlib.suppress(CommandError):  # it ends with its container
            namespace.execute(pod, "python3", "-c", _HOG, "for-ever")
        restarted = eventually(
            lambda: (found := namespace.get("pod", name_of(pod))) and restarts(found) > restarts(pod) and found,
            what="the container is restarted",
            within_s=SOON_S,
            every_s=1,
        )
        (about,) = restarted["status"]["containerStatuses"]
        reason = about["lastState"]["terminated"]["reason"]
        namespace.wait_until_settled(REPLICAS)
        observation.fleet.wait_for_messages()
        # Until the kubelet has seen it, a pod that is dead still gets clients, and its kernel refuses them.
        refused = len(observation.newcomers.failures)
        lines += [f"then the container: {reason}, restarted, {refused} newcomers refused", observation.check_messages()]
    return lines


def _all_pids(status: Object) -> list[int]:
    return [worker["pid"] for worker in status["workers"] if worker.get("pid")]


def _replaced(status: Object, before: set[int]) -> Object | None:
    now = set(_all_pids(status))
    return status if len(now) >= len(before) and now != before else None


# ---- configuration


def configmap(scene: Scene) -> list[str]:
    """A changed ConfigMap counts without a restart; a bad one changes nothing and can be seen."""
    namespace = scene.namespace
    good = namespace.get("configmap", RELEASE)["data"]["proxy.toml"]
    pods = namespace.wait_until_settled(REPLICAS)
    assert "[log]" not in good, good

    def successful(value: float) -> bool:
        name = "pulsar_proxy_config_last_reload_successful"
        return all(namespace.metrics(pod).total(name) == value for pod in pods)

    def reloaded_after(moment_s: float) -> bool:
        name = "pulsar_proxy_config_last_reload_success_timestamp_seconds"
        return all(namespace.metrics(pod).total(name) > moment_s for pod in pods)

    lines = []
    began_s = time.time()
    _patch(scene, good + _DEBUG)
    eventually(lambda: reloaded_after(began_s), what="all pods have reloaded", within_s=SOON_S, every_s=1)
    lines.append(f"all pods have taken the change over after {time.time() - began_s:.0f} s")
    began_s = time.time()
    _patch(scene, good.replace("service_url", "no_such_key"))
    eventually(lambda: successful(0), what="all pods have refused the bad file", within_s=SOON_S, every_s=1)
    lines.append(f"all pods have refused a bad one after {time.time() - began_s:.0f} s")
    with WireClient(PORT, NODE_ADDRESS, timeout_s=60) as client:
        client.send_connect(token=scene.token())
        assert client.receive(60).type == BaseCommand.CONNECTED
        assert client.partitions(scene.topic("configmap")).type == BaseCommand.PARTITIONED_METADATA_RESPONSE
    _patch(scene, good)
    eventually(lambda: successful(1), what="all pods are content again", within_s=SOON_S, every_s=1)
    after = namespace.wait_until_settled(REPLICAS)
    assert {pod["metadata"]["uid"] for pod in pods} == {pod["metadata"]["uid"] for pod in after}
    assert sum(map(restarts, after)) == sum(map(restarts, pods))
    return [*lines, "no pod was restarted, clients were served all the time"]


def _patch(scene: Scene, text: str) -> None:
    patch = json.dumps({"data": {"proxy.toml": text}})
    scene.namespace.kubectl("patch", "configmap", RELEASE, "--type=merge", "-p", patch)
