"""The step with the analytics: Prometheus scrapes the pods, the receiver fills, the CronJob's totals are exact."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from local.distribution import pulsar_home

from tests.e2e.lab.metrics import Scrape, per_principal
from tests.e2e.lab.pipeline import Tables
from tests.e2e.lab.programs import python_program
from tests.e2e.lab.prometheus import JOB, REPLICA, Prometheus
from tests.e2e.lab.waiting import eventually
from tests.kubernetes.node import SOON_S, Object, admin_url, name_of, run
from tests.kubernetes.results import added, usage_differences
from tests.kubernetes.scene import NODE_ADDRESS, PORT, RELEASE, REPLICAS, Scene, Values, merged

USER = 10001
MESSAGES = 2000
INTERVAL = "2s"
WRITE_PORT = 9291
ROLLUP: Values = {
    "enabled": True,
    "schedule": "0 0 1 1 *",
    "master": "local[1]",
    "sparkArguments": ["--driver-memory", "768m"],
    "resources": {"requests": {"cpu": "50m", "memory": "512Mi"}, "limits": {"memory": "2Gi"}},
}


class PodsPrometheus(Prometheus):
    """A Prometheus on the node that scrapes these pods; Debian's has no discovery by the API server."""

    def __init__(self, directory: Path, *, pods: list[Object], write_url: str, token_file: Path) -> None:
        super().__init__(directory, target="", write_url=write_url, token_file=token_file)
        path = directory / "prometheus.yml"
        settings = json.loads(path.read_text())
        settings["global"] = {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL, "external_labels": REPLICA}
        targets = [
            {
                "targets": [admin_url(pod).removeprefix("http://")],
                "labels": {"namespace": pod["metadata"]["namespace"], "kubernetes_pod_name": name_of(pod)},
            }
            for pod in pods
        ]
        settings["scrape_configs"] = [{"job_name": JOB, "static_configs": targets}]
        path.write_text(json.dumps(settings))

    def up(self) -> int:
        """Return how many targets answer."""
        answer: dict[str, Any] = json.loads(
            self._get(f"/api/v1/query?query=sum(up{{job='{JOB}'}})".replace("'", "%22"))
        )
        result = answer["data"]["result"]
        return int(float(result[0]["value"][1])) if result else 0


def accounting(scene: Scene) -> list[str]:
    """From the pods' counters to the table of what each principal used, all in the cluster."""
    return account(scene, "accounting", {})


def account(scene: Scene, name: str, rollup: Values) -> list[str]:
    """Install receiver and rollup with these values, use the proxies, run the CronJob's job; the bill must be exact."""
    data, token = _volume(scene), scene.directory / "receiver-token"
    pods = scene.install(
        podAnnotations={"lab/accounting": str(time.time())},  # new pods, whose counters begin now
        analytics={
            "receiver": {
                "enabled": True,
                "tokenSecret": "receiver-token",
                "config": {"spool": {"total_bytes_max": 1 << 30}},
                "persistence": {"size": "5Gi"},
            },
            "rollup": merged(ROLLUP, rollup),
        },
    )
    tables = Tables(data / "tables")
    before = tables.usage() if tables.root.exists() else {}
    directory = scene.directory / f"prometheus-{name}"
    directory.mkdir()
    url = f"http://{_receiver_address(scene)}:{WRITE_PORT}/api/v1/write"
    prometheus = PodsPrometheus(directory, pods=pods, write_url=url, token_file=token)
    prometheus.start()
    try:
        eventually(lambda: prometheus.up() == REPLICAS, what="all pods are scraped", within_s=SOON_S, every_s=1)
        _spend(scene)
        bill = _settle(scene, prometheus)
    finally:
        prometheus.kill()
    start_job(scene, name)
    _wait_for_end(scene, name)
    billed = tables.usage()
    differences = usage_differences(billed, added([before, bill]))
    assert not differences, "; ".join(differences)
    assert bill["alice"]["messages_in"] == MESSAGES, bill
    return [
        f"{REPLICAS} pods scraped, {len(tables.rows('series', 'series_id'))} series in the tables",
        f"usage_hourly is what the pods counted: alice {bill['alice']}",
    ]


def _volume(scene: Scene) -> Path:
    """Make a directory of the node the volume that the receiver's claim gets, once for all steps; and the token."""
    data = scene.directory / "volume"
    if data.exists():
        return data
    token = scene.directory / "receiver-token"
    token.write_text("a-token-of-the-lab's-own")
    scene.secret("receiver-token", tokens=token)
    data.mkdir()
    os.chown(data, USER, USER)
    data.chmod(0o770)
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": "metrics"},
        "spec": {
            "capacity": {"storage": "10Gi"},
            "accessModes": ["ReadWriteOnce"],
            "hostPath": {"path": str(data)},
        },
    }
    run(["kubectl", "apply", "-f", "-"], json.dumps(volume))
    return data


def _receiver_address(scene: Scene) -> str:
    return str(scene.namespace.get("service", f"{RELEASE}-receiver")["spec"]["clusterIP"])


def _spend(scene: Scene) -> None:
    program = python_program(scene.directory, pulsar_home())
    options = {"token": scene.token(), "count": MESSAGES, "timeout_s": 90}
    result = program.succeed("key_shared", f"pulsar://{NODE_ADDRESS}:{PORT}", scene.topic("accounting"), **options)
    assert result["received"] == MESSAGES, result


def _settle(scene: Scene, prometheus: PodsPrometheus) -> dict[str, dict[str, int]]:
    """Wait until nothing moves and all of it has arrived at the receiver; returns what the pods counted."""

    def scrapes() -> list[Scrape]:
        return [scene.namespace.metrics(pod) for pod in scene.namespace.ready_pods()]

    eventually(
        lambda: sum(scrape.total("pulsar_proxy_active_connections") for scrape in scrapes()) == 0,
        what="no client is left",
        within_s=SOON_S,
        every_s=1,
    )
    prometheus.wait_until_sent(time.time() + 10, within_s=SOON_S)
    return added(per_principal(scrape) for scrape in scrapes())


def start_job(scene: Scene, name: str) -> None:
    """Start the CronJob's job now."""
    (cron_job,) = json.loads(scene.namespace.kubectl("get", "cronjobs", "-o", "json"))["items"]
    scene.namespace.kubectl("create", "job", name, f"--from=cronjob/{name_of(cron_job)}")


def _wait_for_end(scene: Scene, name: str) -> None:
    namespace = scene.namespace

    def ended() -> dict[str, Any]:
        conditions = namespace.get("job", name)["status"].get("conditions", [])
        return {one["type"]: one for one in conditions if one["status"] == "True"}

    conditions = eventually(ended, what=f"the job {name} has ended", within_s=900, every_s=2)
    assert "Complete" in conditions or "SuccessCriteriaMet" in conditions, namespace.kubectl(
        "logs", f"job/{name}", "--all-containers", "--tail=40"
    )
