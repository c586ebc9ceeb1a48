"""The node's tools, as an operator uses them: kubectl and helm."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from typing import Any

import httpx

from tests.e2e.lab.metrics import Scrape
from tests.e2e.lab.waiting import eventually

COMMAND_TIMEOUT_S = 600.0
SOON_S = 240.0
"""Within it everything that the node shall do has happened, however busy the machine is."""

Object = dict[str, Any]


class CommandError(AssertionError):
    """A command failed; the text has what it said."""


def run(command: Sequence[str], text: str | None = None, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
    """Run a command; returns its standard output."""
    result = subprocess.run(command, input=text, capture_output=True, text=True, timeout=timeout_s, check=False)
    if result.returncode:
        raise CommandError(
            f"{' '.join(command)[:300]}: {result.stderr.strip()[-2000:]} {result.stdout.strip()[-1000:]}"
        )
    return result.stdout


class Namespace:
    """One namespace of the node, and a release of the chart in it."""

    def __init__(self, name: str, release: str) -> None:
        self.name = name
        self.release = release
        self.selector = f"app.kubernetes.io/instance={release},component=proxy"

    def kubectl(self, *arguments: str, text: str | None = None) -> str:
        """Run kubectl in the namespace."""
        return run(["kubectl", "--namespace", self.name, *arguments], text)

    def helm(self, *arguments: str) -> str:
        """Run helm in the namespace; the variable HELM names another one, such as Helm 3."""
        return run([os.environ.get("HELM", "helm"), "--namespace", self.name, *arguments])

    def apply(self, *objects: Object) -> None:
        """Create or change objects."""
        self.kubectl("apply", "-f", "-", text=json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)}))

    def get(self, kind: str, name: str) -> Object:
        """Return one object."""
        found: Object = json.loads(self.kubectl("get", kind, name, "-o", "json"))
        return found

    def pods(self, selector: str = "") -> list[Object]:
        """Return the pods of the proxy (or of another selector) that are not about to go."""
        answer = json.loads(self.kubectl("get", "pods", "-l", selector or self.selector, "-o", "json"))
        return [pod for pod in answer["items"] if "deletionTimestamp" not in pod["metadata"]]

    def ready_pods(self) -> list[Object]:
        """Return those of the proxy's pods that are ready, and stay."""
        return [pod for pod in self.pods() if is_ready(pod)]

    def wait_until_settled(self, replicas: int) -> list[Object]:
        """Wait until there are exactly so many pods, all ready, and none that is about to go; returns them."""

        def settled() -> list[Object]:
            everything = json.loads(self.kubectl("get", "pods", "-l", self.selector, "-o", "json"))["items"]
            ready = self.ready_pods()
            return ready if len(everything) == len(ready) == replicas else []

        return eventually(settled, what=f"{replicas} pods are ready, and no others there", within_s=SOON_S, every_s=1)

    def execute(self, pod: Object | str, *command: str) -> str:
        """Run a command in the pod's first container."""
        return self.kubectl("exec", pod if isinstance(pod, str) else name_of(pod), "--", *command)

    def status(self, pod: Object) -> Object:
        """Return what the cluster in this pod says of itself."""
        status: Object = httpx.get(f"{admin_url(pod)}/status", timeout=30, trust_env=False).raise_for_status().json()
        return status

    def metrics(self, pod: Object) -> Scrape:
        """Return one scrape of this pod."""
        answer = httpx.get(f"{admin_url(pod)}/metrics", timeout=30, trust_env=False).raise_for_status()
        return Scrape.parse(answer.text)

    def diagnosis(self) -> str:
        """Return what helps to understand a failed step."""
        commands = (
            ("get", "pods", "-o", "wide"),
            ("get", "events", "--sort-by=.lastTimestamp"),
            ("logs", "-l", self.selector, "--tail=15", "--prefix"),
        )
        texts = []
        for command in commands:
            try:
                texts.append(self.kubectl(*command)[-5000:])
            except (AssertionError, subprocess.SubprocessError) as error:
                texts.append(str(error))
        return "\n".join(texts)


def name_of(found: Object) -> str:
    """Return an object's name."""
    return str(found["metadata"]["name"])


def is_ready(pod: Object) -> bool:
    """Return whether the pod's condition Ready is true."""
    conditions = pod["status"].get("conditions", [])
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def admin_url(pod: Object) -> str:
    """Return the URL of a pod's admin port."""
    return f"http://{pod['status']['podIP']}:8080"


def restarts(pod: Object) -> int:
    """Return how often the pod's containers were started again."""
    return sum(int(one["restartCount"]) for one in pod["status"].get("containerStatuses", []))
