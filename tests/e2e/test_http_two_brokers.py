"""HTTP before two real brokers: `pulsar-admin`, redirects between brokers, certificates, an upload of a package."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import ssl
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from local.ports import free_port

from .conftest import running
from .lab.certificates import Authority
from .lab.cluster import HOST, Tables, to_toml
from .lab.pulsar_admin import PulsarAdmin
from .lab.security import NAMESPACE, grant
from .lab.two_brokers import TwoBrokers
from .lab.waiting import BUSY_S
from .test_http import HttpCluster

UPLOAD_MB, UPLOAD_S = (int(part) for part in os.environ.get("HTTP_UPLOAD", "20 4").split())
"""By hand: `HTTP_UPLOAD="100 60"`."""

PORTION_BYTES = 1 << 18
BROKER_SLOW_S = 120
_STORAGE = "org.apache.pulsar.packages.management.storage.filesystem.FileSystemPackagesStorageProvider"
_INVALID_TOKEN = "e30.e30.x"


@pytest.fixture(scope="module")
def pair(pulsar_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoBrokers]:
    """Both take tokens, and know `proxy` as a proxy."""
    directory = tmp_path_factory.mktemp("pair")
    packages = {
        "enablePackagesManagement": "true",
        "packagesManagementStorageProvider": _STORAGE,
        "STORAGE_PATH": str(directory / "packages"),
    }
    with TwoBrokers(pulsar_home, directory, secured=True, conf=packages) as brokers:
        grant(brokers.lasting)
        yield brokers


class PairCluster(HttpCluster):
    """Two listeners for HTTP: one without TLS, and one with it, which takes certificates. It knows the web port of
    one broker only, so that requests for topics of the other are redirected.
    """

    def __init__(self, pair: TwoBrokers, authority: Authority) -> None:
        self.https_port = free_port()
        server = authority.server("proxy")
        tls = {"certificate": server.certificate, "key": server.key, "client_ca": authority.file}
        https: Tables = {"http_listener": {"bind": f"{HOST}:{self.https_port}", "tls": tls}}
        self._https = to_toml(https)
        ports = [pair.lasting.broker_port, pair.mortal.broker_port, pair.mortal.web_port]
        tables: Tables = {
            "brokers": {
                "service_url": f"{pair.lasting.service_url},localhost:{pair.mortal.broker_port}",
                "allowed_ports": ports,
                "credentials": {"method": "token", "file": str(pair.lasting.token_file("proxy"))},
            },
            "authentication": {"enabled": True, "failure_delay_ms": 0},
            "authentication.token": {"secret_key": str(pair.lasting.secret_key)},
            "authentication.tls": {},
        }
        super().__init__(pair.lasting, tables)

    def write_config(self, tables: Tables) -> None:
        """With both listeners."""
        self.config_path.write_text(f"{to_toml(tables)}\n{self._https}")

    @property
    def url(self) -> str:
        """Of the listener without TLS."""
        return f"http://localhost:{self.http_port}"

    @property
    def https_url(self) -> str:
        """Of the other."""
        return f"https://localhost:{self.https_port}"


@dataclass(frozen=True)
class Lab:
    """All that a test needs."""

    pair: TwoBrokers
    cluster: PairCluster
    authority: Authority
    home: Path

    def admin(self, role: str) -> PulsarAdmin:
        """`pulsar-admin` with a role's token."""
        broker = self.pair.lasting
        token, trust = broker.token(role), self.authority.file
        return PulsarAdmin.by_token(self.home, broker.environment(), self.cluster.https_url, token, trust=trust)

    def admin_by_certificate(self, role: str) -> PulsarAdmin:
        """`pulsar-admin` with a role's certificate."""
        pair = self.authority.client(role)
        environment = self.pair.lasting.environment()
        files = {"certificate": pair.certificate, "key": pair.key, "trust": self.authority.file}
        return PulsarAdmin.by_certificate(self.home, environment, self.cluster.https_url, **files)

    def asked(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, Any]:
        """Status and JSON of a request with the admin's token, if the headers have no other."""
        named = {"Authorization": f"Bearer {self.pair.lasting.token('admin')}", **headers}
        sent = None if body is None else json.dumps(body).encode()
        return self.cluster.request(method, path, sent, Content_Type="application/json", **named)

    def status(self, method: str, path: str, body: object = None, **headers: str) -> int:
        """Its status alone."""
        return self.asked(method, path, body, **headers)[0]

    def status_by_certificate(self, role: str, method: str, path: str, **headers: str) -> int:
        """Of a request with a role's certificate."""
        context = ssl.create_default_context(cafile=self.authority.file)
        pair = self.authority.client(role)
        context.load_cert_chain(pair.certificate, pair.key)
        port = self.cluster.https_port
        with closing(http.client.HTTPSConnection("localhost", port, timeout=BUSY_S, context=context)) as client:
            client.request(method, path, headers=headers)
            response = client.getresponse()
            response.read()
            return response.status

    def passed_on_to_mortal(self, path: str) -> str:
        """The log's line of a request for this path that ended at the broker whose web port the proxy was not told."""
        return self.cluster.wait_for_log("http request", path, f"localhost:{self.pair.mortal.web_port}")


@pytest.fixture(scope="module")
def lab(pair: TwoBrokers, pulsar_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """The cluster before the pair."""
    authority = Authority(tmp_path_factory.mktemp("certificates"), "http")
    cluster = PairCluster(pair, authority)
    with running(cluster):
        yield Lab(pair, cluster, authority, pulsar_home)


@pytest.fixture(scope="module")
def redirected(pair: TwoBrokers) -> str:
    """A topic of which the broker is the owner that the proxy is not told of."""
    admin = pair.lasting.admin()
    for number in range(64):
        topic = f"persistent://{NAMESPACE}/redirected-{number}"
        if admin.owner(topic) == pair.mortal.service_url:
            pair.mortal.admin().create_topic(topic)
            return topic
    raise AssertionError("one broker owns all")


def path_of(topic: str) -> str:
    """Below which the admin API has a topic."""
    return f"/admin/v2/{topic.replace('://', '/')}"


def test_pulsar_admin_with_a_certificate(lab: Lab, redirected: str) -> None:
    """The proxy shows its own token and names the role, at the other broker too."""
    assert json.loads(lab.admin_by_certificate("alice").run("topics", "stats", redirected))["msgInCounter"] == 0
    lab.passed_on_to_mortal(f"{path_of(redirected)}/stats")


def test_what_pulsar_admin_asks_for(lab: Lab, redirected: str) -> None:
    """By its REST calls: tenants, namespaces and topics, those of the other broker too."""
    tenant, namespace = "/admin/v2/tenants/by-http", "/admin/v2/namespaces/by-http/one"
    assert lab.status("PUT", tenant, {"allowedClusters": ["standalone"]}) == 204
    assert lab.status("PUT", namespace) == 204
    assert lab.status("PUT", "/admin/v2/persistent/by-http/one/topic") == 204
    assert lab.asked("GET", "/admin/v2/persistent/by-http/one") == (200, ["persistent://by-http/one/topic"])
    assert lab.status("PUT", f"{path_of(redirected)}/unload") == 204
    lab.passed_on_to_mortal(f"{path_of(redirected)}/unload")


def test_who_may_not(lab: Lab) -> None:
    """The proxy refuses a wrong token, the broker a role without rights."""
    status, told = lab.asked("GET", "/admin/v2/tenants", Authorization=f"Bearer {_INVALID_TOKEN}")
    assert (status, told["reason"]) == (401, "Failed to authenticate")
    lab.cluster.wait_for_log("http request", "/admin/v2/tenants ", "status=401", "upstream= ")
    bobs = f"Bearer {lab.pair.lasting.token('bob')}"
    assert lab.status("GET", f"/admin/v2/persistent/{NAMESPACE}", Authorization=bobs) in {401, 403}
    lab.cluster.wait_for_log("http request", "principal=bob", "status=40", "upstream=localhost:")


def test_pulsar_admin_with_a_token(lab: Lab, tmp_path: Path) -> None:
    """It uploads a package."""
    content = os.urandom(6_000_000)  # more than is kept for a redirect
    (tmp_path / "package.jar").write_bytes(content)
    package = ("function://public/default/by-pulsar-admin@v1", "--path", str(tmp_path / "package.jar"))
    lab.admin("admin").run("packages", "upload", *package, "--description", "an upload")
    assert package_of(lab, "by-pulsar-admin") == hashlib.sha256(content).digest()


def package_of(lab: Lab, name: str) -> bytes:
    """The digest of a package that is downloaded through the proxy."""
    with closing(http.client.HTTPConnection(HOST, lab.cluster.http_port, timeout=BROKER_SLOW_S)) as client:
        authorization = f"Bearer {lab.pair.lasting.token('admin')}"
        client.request("GET", package_path(name), headers={"Authorization": authorization})
        response = client.getresponse()
        assert response.status == 200
        digest = hashlib.sha256()
        while data := response.read(PORTION_BYTES):
            digest.update(data)
        return digest.digest()


def package_path(name: str) -> str:
    return f"/admin/v3/packages/function/public/default/{name}/v1"


def subscriptions(lab: Lab, topic: str) -> dict[str, Any]:
    """As the brokers have them."""
    found = lab.pair.lasting.admin().stats(topic)["subscriptions"]  # its GET follows the redirect
    assert isinstance(found, dict)
    return found


def test_a_certificates_role_may_do_what_is_granted_to_it(lab: Lab, redirected: str) -> None:
    """And no more, though the proxy may do all; a broker to which a request is redirected judges the same."""
    topics = f"/admin/v2/persistent/{NAMESPACE}"
    assert lab.status_by_certificate("alice", "GET", topics) == 200
    assert lab.status_by_certificate("alice", "GET", f"{path_of(redirected)}/stats") == 200
    assert lab.status_by_certificate("bob", "GET", topics) in {401, 403}
    assert lab.status_by_certificate("bob", "GET", f"{path_of(redirected)}/stats") in {401, 403}
    assert lab.status_by_certificate("alice", "GET", "/admin/v2/tenants") in {401, 403}
    assert lab.status_by_certificate("alice", "PUT", "/admin/v2/tenants/stolen") in {401, 403}
    lab.cluster.wait_for_log(
        "http request", "principal=alice", "/admin/v2/tenants/stolen ", "status=40", "upstream=localhost:"
    )
    assert lab.status_by_certificate("admin", "GET", "/admin/v2/tenants") == 200


@pytest.mark.parametrize("claimed", ["admin", "proxy", " admin"])
def test_who_names_another_original_principal_gains_nothing(lab: Lab, claimed: str) -> None:
    spoofed = {"X-Original-Principal": claimed}
    assert lab.status_by_certificate("alice", "GET", "/admin/v2/tenants", **spoofed) in {400, 401, 403}
    bobs = {"Authorization": f"Bearer {lab.pair.lasting.token('bob')}", **spoofed}
    assert lab.status("GET", "/admin/v2/tenants", **bobs) in {400, 401, 403}


def test_a_body_goes_to_the_broker_to_which_the_request_is_redirected(lab: Lab, redirected: str) -> None:
    there = {"ledgerId": 2**63 - 1, "entryId": 2**63 - 1, "partitionIndex": -1}  # the latest message
    path = f"{path_of(redirected)}/subscription/by-body"
    assert lab.status("PUT", path, there) == 204
    lab.passed_on_to_mortal(path)
    assert "by-body" in subscriptions(lab, redirected)
    assert lab.status("PUT", path, there) == 409
    assert lab.status("POST", f"{path}/resetcursor", {**there, "entryId": -1, "ledgerId": -1}) == 204
    lab.passed_on_to_mortal(f"{path}/resetcursor")


def test_lookups_by_http_find_the_owner(lab: Lab, redirected: str) -> None:
    """A broker redirects such lookups, or answers for the other; the client learns the owner, never the proxy."""
    for number in range(8):
        name = f"persistent/{NAMESPACE}/looked-up-{number}"
        found = looked_up(lab, name)
        assert found["brokerUrl"] == lab.pair.lasting.admin().owner(name.replace("persistent/", "persistent://"))
    assert looked_up(lab, redirected.replace("://", "/"))["brokerUrl"] == lab.pair.mortal.service_url


def looked_up(lab: Lab, name: str) -> dict[str, str]:
    """What a lookup by alice says."""
    token = f"Bearer {lab.pair.lasting.token('alice')}"
    status, found = lab.cluster.request("GET", f"/lookup/v2/topic/{name}", Authorization=token)
    assert status == 200
    assert isinstance(found, dict)
    return found


def test_a_slow_upload_of_a_package(lab: Lab) -> None:
    """Longer than any portion may take, larger than what is kept for a redirect; what comes back is the same."""
    content = os.urandom(PORTION_BYTES)
    portions = UPLOAD_MB * 1_000_000 // PORTION_BYTES
    digest = hashlib.sha256(content * portions).digest()
    edge = "edge-of-the-parts"
    metadata = json.dumps({"description": "an upload", "contact": "", "properties": {}})
    first = multipart_head(edge, "metadata", "application/json") + metadata.encode() + b"\r\n"
    first += multipart_head(edge, "file", "application/octet-stream", filename="uploaded.jar")
    last = f"\r\n--{edge}--\r\n".encode()
    authorization = f"Bearer {lab.pair.lasting.token('admin')}"
    with closing(http.client.HTTPConnection(HOST, lab.cluster.http_port, timeout=BROKER_SLOW_S)) as client:
        client.putrequest("POST", package_path("uploaded"))
        client.putheader("Authorization", authorization)
        client.putheader("Content-Type", f"multipart/form-data; boundary={edge}")
        client.putheader("Content-Length", str(len(first) + portions * PORTION_BYTES + len(last)))
        client.endheaders(first)
        for _ in range(portions):
            client.send(content)
            time.sleep(UPLOAD_S / portions)
        client.send(last)
        response = client.getresponse()
        assert response.status in {200, 204}, response.read()
    assert package_of(lab, "uploaded") == digest


def multipart_head(edge: str, name: str, content_type: str, *, filename: str = "") -> bytes:
    """Of one part of a form."""
    file = f'; filename="{urllib.parse.quote(filename)}"' if filename else ""
    disposition = f'Content-Disposition: form-data; name="{name}"{file}'
    return f"--{edge}\r\n{disposition}\r\nContent-Type: {content_type}\r\n\r\n".encode()
