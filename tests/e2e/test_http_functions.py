"""HTTP before two real function workers: `pulsar-admin functions`, and redirects from one worker to the other."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import ssl
import zipfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from .conftest import authentication, before, running
from .lab.certificates import Authority
from .lab.cluster import Tables, merged
from .lab.function_workers import FunctionWorkers
from .lab.pulsar_admin import PulsarAdmin
from .lab.waiting import BUSY_S, eventually
from .test_http import HttpCluster

NAME = ("--tenant", "public", "--namespace", "default", "--name")
CLASS = "org.apache.pulsar.functions.api.examples.ExclamationFunction"
FUNCTIONS = "/admin/v3/functions/public/default"


@dataclass(frozen=True)
class Lab:
    """The workers, and the cluster that knows the address of ``follower`` alone."""

    workers: FunctionWorkers
    cluster: HttpCluster
    authority: Authority
    home: Path
    follower: int
    leader: int

    def admin(self) -> PulsarAdmin:
        """`pulsar-admin` with the admin's token."""
        broker, url = self.workers.broker, f"https://localhost:{self.cluster.http_port}"
        token, trust = broker.token("admin"), self.authority.file
        return PulsarAdmin.by_token(self.home, broker.environment(), url, token, trust=trust)

    def asked(self, method: str, path: str, *, token: str = "", certificate: str = "") -> tuple[int, Any]:
        """Status and JSON of a request by a role, with its token or its certificate."""
        context = ssl.create_default_context(cafile=self.authority.file)
        if certificate:
            pair = self.authority.client(certificate)
            context.load_cert_chain(pair.certificate, pair.key)
        headers = {"Authorization": f"Bearer {self.workers.broker.token(token)}"} if token else {}
        port = self.cluster.http_port
        with closing(http.client.HTTPSConnection("localhost", port, timeout=BUSY_S, context=context)) as client:
            client.request(method, path, headers=headers)
            response = client.getresponse()
            text = response.read()
            return response.status, json.loads(text) if text else None

    def wait_for_request(self, path: str, port: int, *more: str) -> None:
        """Wait for the log's line of a request for this path that ended at the worker of this port."""
        self.cluster.wait_for_log("http request", path, f"upstream=localhost:{port}", *more)


@pytest.fixture(scope="module")
def lab(pulsar_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    authority = Authority(tmp_path_factory.mktemp("certificates"), "functions")
    server = authority.server("proxy")
    with FunctionWorkers(pulsar_home, tmp_path_factory.mktemp("functions")) as workers:
        leader = workers.leader(workers.ports[0])
        (follower,) = set(workers.ports) - {leader}
        tables: Tables = merged(
            authentication(workers.broker),
            {
                "brokers": before(workers.broker, leader),  # where the follower may redirect
                "http": {"function_worker_url": f"http://localhost:{follower}"},
                "authentication.tls": {},
            },
        )
        tls = {"certificate": server.certificate, "key": server.key, "client_ca": authority.file}
        cluster = HttpCluster(workers.broker, tables, tls=tls)
        with running(cluster):
            yield Lab(workers, cluster, authority, pulsar_home, follower, leader)


def create(lab: Lab, directory: Path, name: str, parallelism: int) -> None:
    """Have `pulsar-admin` upload a jar that is larger than what is kept for a redirect."""
    jar = directory / "function.jar"
    shutil.copy(lab.home / "examples" / "api-examples.jar", jar)
    with zipfile.ZipFile(jar, "a") as archive:
        archive.writestr("padding", os.urandom(6_000_000))
    topics = ("--inputs", f"public/default/{name}-in", "--output", f"public/default/{name}-out")
    options = ("--jar", str(jar), "--classname", CLASS, *topics, "--parallelism", str(parallelism))
    lab.admin().run("functions", "create", *NAME, name, *options)


@pytest.fixture(scope="module")
def instances(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a function's two instances, of which each worker runs one."""
    create(lab, tmp_path_factory.mktemp("jar"), "spread", 2)

    def running_at() -> set[str]:
        _, found = lab.asked("GET", f"{FUNCTIONS}/spread/status", token="admin")
        return {one["status"]["workerId"] for one in found["instances"] if one["status"]["running"]}

    workers = {f"worker-{port}" for port in lab.workers.ports}
    eventually(lambda: running_at() == workers, what="both instances run", within_s=4 * BUSY_S, every_s=0.5)
    return f"{FUNCTIONS}/spread"


def test_pulsar_admin_with_a_function(lab: Lab, tmp_path: Path) -> None:
    """Created, listed, called, described, deleted, by the function worker and never by the broker."""
    admin = lab.admin()
    create(lab, tmp_path, "called", 1)
    assert "called" in admin.run("functions", "list").split()
    assert admin.run("functions", "trigger", *NAME, "called", "--trigger-value", "hello").strip() == "hello!"
    assert json.loads(admin.run("functions", "status", *NAME, "called"))["numRunning"] == 1
    assert json.loads(admin.run("functions", "get", *NAME, "called"))["className"] == CLASS
    admin.run("functions", "delete", *NAME, "called")
    assert "called" not in lab.asked("GET", FUNCTIONS, token="admin")[1]
    for method in ("POST", "GET", "DELETE"):
        lab.wait_for_request(f"{FUNCTIONS}/called ", lab.follower, f"method={method}")


@pytest.mark.parametrize("shown", ["token", "certificate"])
def test_an_instance_of_the_other_worker(lab: Lab, instances: str, shown: str) -> None:
    """A redirect is followed with the client's token, or with the proxy's for the role of a certificate."""
    answers = [lab.asked("GET", f"{instances}/{instance}/status", **{shown: "admin"}) for instance in (0, 1)]
    assert {(status, found["workerId"]) for status, found in answers} == {
        (200, f"worker-{port}") for port in lab.workers.ports
    }
    for port in lab.workers.ports:
        lab.wait_for_request(f"{instances}/", port)


def test_a_redirect_to_the_leader(lab: Lab, instances: str) -> None:
    """What the leader alone does."""
    del instances
    status, told = lab.asked("PUT", "/admin/v2/worker/rebalance", token="admin")
    assert status == 204, told
    lab.wait_for_request("/admin/v2/worker/rebalance", lab.leader)


@pytest.mark.parametrize("shown", ["token", "certificate"])
def test_who_may_not(lab: Lab, instances: str, shown: str) -> None:
    """The function worker refuses a role without rights, though the proxy may do all."""
    assert lab.asked("DELETE", instances, **{shown: "bob"})[0] in {401, 403}
    lab.wait_for_request(f"{instances} ", lab.follower, "principal=bob", "status=40")
    assert "spread" in lab.asked("GET", FUNCTIONS, token="admin")[1]
