"""The chart's rollup with executors in pods, as Spark's Kubernetes scheduler makes them: pods are processes here.

spark-submit and its files are those that the chart renders, and the API grants what the chart's Role has.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.analytics.spark_settings import FEW_ROWS, SHORT_JOBS
from tests.deploy.chart import NAME, VALUES, Manifests, needs_tools, render

from .lab.cluster import ROOT
from .lab.kubernetes_api import KubernetesApi
from .lab.pipeline import Tables
from .test_analytics_cluster import assert_exact, spool  # noqa: F401 -- a fixture

pytestmark = needs_tools

ROLLUP = f"{NAME}-rollup"
DRIVER = "driver"
JOB_TIMEOUT_S = 600


class Run:
    """The CronJob's pod: its container runs here, its files and folders are below a directory of the test."""

    def __init__(self, directory: Path, tables: Tables) -> None:
        self.directory = directory
        confs = [part for name, value in FEW_ROWS.items() for part in ("--conf", f"{name}={value}")]
        rollup = {
            "enabled": True,
            "tables": tables.url,
            "sparkArguments": ["--driver-memory", "1g", *confs],
            "retention": {"days": dict.fromkeys(VALUES["analytics"]["rollup"]["retention"]["days"], 0)},
            "executors": {"enabled": True, "count": 1, "memory": "512m"},
        }
        self.manifests: Manifests = render(analytics={"receiver": {"enabled": True}, "rollup": rollup})
        for folder in ("job", "scratch"):
            (directory / folder).mkdir()
        for name, text in self.manifests.get("ConfigMap", ROLLUP)["data"].items():
            (directory / "job" / name).write_text(self._local(text))
        spec = self.manifests.get("CronJob", ROLLUP)["spec"]["jobTemplate"]["spec"]["template"]["spec"]
        (self.container,) = spec["containers"]

    @property
    def rules(self) -> list[dict[str, Any]]:
        """The Role's."""
        rules: list[dict[str, Any]] = self.manifests.get("Role", ROLLUP)["rules"]
        return rules

    def api(self, rules: list[dict[str, Any]]) -> KubernetesApi:
        """An API server that grants these rights, and knows the driver's pod."""
        entry_point = ROOT / "deploy/image/spark-entrypoint.sh"
        api = KubernetesApi(self.directory, entry_point, rules, {"/tmp": self.directory / "scratch"})
        api.add(DRIVER)
        return api

    def submit(self, api: KubernetesApi, *options: str) -> subprocess.CompletedProcess[str]:
        """Run the container, with further options."""
        known = {"$(POD_IP)": "127.0.0.1", "$(POD_NAME)": DRIVER, "https://kubernetes.default.svc": api.url}
        arguments = [self._local(one) for one in [*self.container["args"], *options]]
        for name, value in known.items():
            arguments = [one.replace(name, value) for one in arguments]
        return subprocess.run(
            [*self.container["command"], *arguments],
            capture_output=True,
            text=True,
            env=os.environ | {"SPARK_LOCAL_DIRS": str(self.directory / "scratch")},
            timeout=JOB_TIMEOUT_S,
            check=False,
        )

    def _local(self, text: str) -> str:
        return text.replace("/job/", f"{self.directory}/job/").replace("/data/spool", f"{self.directory.parent}/spool")


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    return Tables(tmp_path / "tables")


@pytest.fixture
def run(tmp_path: Path, tables: Tables, spool: Path) -> Iterator[Run]:  # noqa: F811 -- the fixture
    assert spool == tmp_path / "spool"
    (directory := tmp_path / "pod").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        for name, value in SHORT_JOBS.items():  # the driver's and the executors'
            patch.setenv(name, value)
        yield Run(directory, tables)


def test_a_run_with_executors_is_exact_and_uses_each_right_of_the_role(run: Run, tables: Tables) -> None:
    with run.api(run.rules) as api:
        api.intrude = True
        result = run.submit(api)
        assert result.returncode == 0, result.stderr[-5000:]
        assert list(api.pods) == [DRIVER], "executors are left behind"
        assert_exact(tables)
        assert api.refused == set()
        # `delete` is for a single executor that fails, or starts too late; a run that goes well needs the others.
        assert api.used == api.allowed - {("delete", "pods")}, "the Role has rights that nothing needs"
        assert len(api.created) == 1
        again = run.submit(api, "--keep", "samples=1")
        assert again.returncode == 0, again.stderr[-5000:]
        assert tables.rows("samples") == [], "samples that are expired"
        assert len(api.created) == 2, "each run has an executor"
        for pod in api.created:
            assert_of_the_template(pod)
        assert len({secret_of(pod) for pod in api.created}) == len(api.created), "a secret is used twice"
        assert_only_the_secret_admits(api, run.directory)


def secret_of(pod: Any) -> str:
    """What an executor authenticates with."""
    (container,) = pod["spec"]["containers"]
    return {one["name"]: one.get("value") for one in container["env"]}["_SPARK_AUTH_SECRET"] or ""


def assert_of_the_template(pod: Any) -> None:
    """A pod that `restricted` admits, which goes with its driver and has no token; the secret is in no argument."""
    (owner,) = pod["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("Pod", DRIVER, f"uid-{DRIVER}")
    assert pod["metadata"]["labels"]["app.kubernetes.io/component"] == "rollup-executor"
    assert pod["metadata"]["name"].startswith(f"{NAME}-")
    spec = pod["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["restartPolicy"] == "Never"
    assert spec["activeDeadlineSeconds"] > 0
    assert spec["securityContext"]["runAsNonRoot"] is True
    (container,) = spec["containers"]
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["resources"]["limits"]["memory"] == "1280Mi"
    assert container["resources"]["requests"]["cpu"] == "500m"
    assert container["resources"]["limits"]["ephemeral-storage"] == "5Gi"
    assert {one["name"] for one in spec["volumes"]} == {"data", "spark-local-dir-1"}
    assert len(secret_of(pod)) >= 32
    assert secret_of(pod) not in str(container["args"])


def assert_only_the_secret_admits(api: KubernetesApi, directory: Path) -> None:
    """A neighbour that reaches the driver's port, and knows all but the secret, gets nothing from it."""
    registered = "Successfully registered with driver"
    for pod in api.created:
        assert registered in (directory / f"{pod['metadata']['name']}.log").read_text()
    assert api.intruder is not None
    assert api.intruder.wait(JOB_TIMEOUT_S) not in {0, None}
    log = api.intruder.log.read_text()
    assert "org.apache.spark.network.crypto.AuthClientBootstrap" in log, log[-3000:]
    assert registered not in log
