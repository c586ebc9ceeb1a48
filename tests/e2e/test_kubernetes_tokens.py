"""Tokens of Kubernetes' service accounts: a real API server issues them by TokenRequest, real clients bring them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from local.standalone import Standalone

from proto.pulsar_pb2 import BaseCommand, ServerError

from .conftest import before, running
from .lab.cluster import ProxyCluster
from .lab.kube_apiserver import KubeApiserver, missing_programs
from .lab.programs import Program
from .lab.waiting import eventually
from .lab.wire import WireClient

pytestmark = pytest.mark.skipif(bool(missing_programs()), reason="needs Kubernetes, which `make e2e-kubernetes` builds")

AUDIENCE = "pulsar"
NAMESPACE, NAME = "apps", "alice"
ROLE = f"system:serviceaccount:{NAMESPACE}:{NAME}"
TOPIC = "persistent://public/default/kubernetes-tokens"
DISCOVERY, KEYS = "/.well-known/openid-configuration", "/openid/v1/jwks"


@pytest.fixture(scope="module")
def apiserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubeApiserver]:
    """The API server, with an account for clients and one for the proxy."""
    with KubeApiserver(tmp_path_factory.mktemp("kubernetes")) as server:
        server.create_account(NAMESPACE, NAME)
        server.create_account("pulsar", "proxy")
        yield server


@pytest.fixture(scope="module")
def pod_token(apiserver: KubeApiserver, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file with the token of the proxy's pod."""
    path = tmp_path_factory.mktemp("serviceaccount") / "token"
    path.write_text(apiserver.token("pulsar", "proxy"))
    return path


def tables_for(apiserver: KubeApiserver, pod_token: Path, **kubernetes: object) -> dict[str, dict[str, object]]:
    """A configuration that takes the tokens of the cluster's service accounts, of one namespace."""
    return {
        "authentication": {"enabled": True},
        "authentication.oidc": {"allowed_audiences": [AUDIENCE], "trust": str(apiserver.trust)},
        "authentication.oidc.kubernetes": {
            "api_server": apiserver.url,
            "token_file": str(pod_token),
            "trust": str(apiserver.trust),
            "allowed_roles": [f"system:serviceaccount:{NAMESPACE}:*"],
            **kubernetes,
        },
    }


@pytest.fixture(scope="module", params=["public_keys", "trusted_issuer"])
def kubernetes_proxy(
    request: pytest.FixtureRequest, apiserver: KubeApiserver, pod_token: Path, broker: Standalone
) -> Iterator[ProxyCluster]:
    """Takes the tokens of the cluster's service accounts, in each mode."""
    if request.param == "trusted_issuer":
        apiserver.open_discovery_to_anyone()
    tables = tables_for(apiserver, pod_token, discovery=request.param)
    with running(ProxyCluster({"brokers": before(broker), **tables})) as cluster:
        yield cluster


def connects(cluster: ProxyCluster, token: str, reason: str = "") -> bool:
    """Whether the proxy takes a token; where it does not, the log has the reason."""
    with WireClient(cluster.port) as client:
        answer = client.connect(token=token)
        if answer.type == BaseCommand.CONNECTED:
            return True
        assert answer.error.error == ServerError.AuthenticationError, answer
        cluster.wait_for_log("authentication denied", client.address, f"reason={reason}")
        return False


def test_who_may_ask_the_api_server(apiserver: KubeApiserver, pod_token: Path) -> None:
    """What the fake API server of tests/auth answers, and what docs/kubernetes.md says of rights. First in this file:
    the proxies below open the discovery to anyone.
    """
    for path in (DISCOVERY, KEYS):
        assert apiserver.status_of(path, pod_token.read_text()) == 200, "as Kubernetes is installed"
        assert apiserver.status_of(path) == 403
        assert apiserver.status_of(path, "not-a-token") == 401
        assert apiserver.status_of(path, apiserver.token("pulsar", "proxy", "vault")) == 401, "of another audience"


def test_a_python_client_with_a_token_of_its_service_account(
    python_client: Program, apiserver: KubeApiserver, kubernetes_proxy: ProxyCluster
) -> None:
    token = apiserver.token(NAMESPACE, NAME, AUDIENCE)
    result = python_client.succeed("produce_consume", kubernetes_proxy.service_url, TOPIC, token=token, count=50)
    assert (result["received"], result["in_order"]) == (50, True)
    log = kubernetes_proxy.log_text()
    assert not any(part in log for part in token.split("."))


@pytest.mark.parametrize("audiences", [(), ("vault",)])
def test_a_token_for_another_audience_is_denied(
    apiserver: KubeApiserver, kubernetes_proxy: ProxyCluster, audiences: tuple[str, ...]
) -> None:
    assert not connects(kubernetes_proxy, apiserver.token(NAMESPACE, NAME, *audiences), "bad_audience")


def test_a_token_counts_until_it_expires(apiserver: KubeApiserver, kubernetes_proxy: ProxyCluster) -> None:
    token, now = apiserver.token(NAMESPACE, NAME, AUDIENCE), int(time.time())
    old = {"iat": now - 700, "nbf": now - 700}
    assert connects(kubernetes_proxy, apiserver.with_claims(token, **old))
    assert not connects(kubernetes_proxy, apiserver.with_claims(token, **old, exp=now - 100), "expired")


def test_an_account_that_is_not_listed_is_denied(apiserver: KubeApiserver, kubernetes_proxy: ProxyCluster) -> None:
    assert not connects(kubernetes_proxy, apiserver.token("pulsar", "proxy", AUDIENCE), "role_not_allowed")


def test_a_deleted_account_stays_until_its_token_expires(
    apiserver: KubeApiserver, kubernetes_proxy: ProxyCluster
) -> None:
    """A signature tells nothing of it: docs/authentication.md says so."""
    apiserver.create_account(NAMESPACE, "leaving")
    token = apiserver.token(NAMESPACE, "leaving", AUDIENCE)
    apiserver.delete_account(NAMESPACE, "leaving")
    assert connects(kubernetes_proxy, token)


def test_the_pods_token_is_in_no_log(kubernetes_proxy: ProxyCluster, apiserver: KubeApiserver, pod_token: Path) -> None:
    assert connects(kubernetes_proxy, apiserver.token(NAMESPACE, NAME, AUDIENCE))
    assert not any(part in kubernetes_proxy.log_text() for part in pod_token.read_text().split("."))


# ---- whom the pod's token reaches


def is_unavailable(cluster: ProxyCluster, token: str, why: str) -> bool:
    """Whether the proxy cannot judge a token, for a reason that is in the log."""
    with WireClient(cluster.port) as client:
        answer = client.connect(token=token)
        cluster.wait_for_log("authentication denied", client.address, "reason=issuer_unavailable", why)
        return bool(answer.error.error == ServerError.ServiceNotReady)


def test_an_api_server_of_another_authority_gets_no_token(
    apiserver: KubeApiserver, pod_token: Path, tmp_path: Path
) -> None:
    """The control is every other test here: only the authority differs."""
    trustme.CA().cert_pem.write_to_path(tmp_path / "other.crt")
    tables = tables_for(apiserver, pod_token, trust=str(tmp_path / "other.crt"))
    with running(ProxyCluster(tables), ready=False) as cluster:
        assert is_unavailable(cluster, apiserver.token(NAMESPACE, NAME, AUDIENCE), "CERTIFICATE_VERIFY_FAILED")


def test_a_pod_whose_token_is_replaced(apiserver: KubeApiserver, tmp_path: Path) -> None:
    """One for another audience is refused by the API server; the next one counts without a restart."""
    token_file = tmp_path / "token"
    token_file.write_text(apiserver.token("pulsar", "proxy", "vault"))
    tables = tables_for(apiserver, token_file)
    tables["authentication.oidc"]["keys_retry_interval_ms"] = 500
    token = apiserver.token(NAMESPACE, NAME, AUDIENCE)
    with running(ProxyCluster(tables), ready=False) as cluster:
        assert is_unavailable(cluster, token, "status 401")
        token_file.write_text(apiserver.token("pulsar", "proxy"))

        def connected() -> bool:
            with WireClient(cluster.port) as client:
                return bool(client.connect(token=token).type == BaseCommand.CONNECTED)

        eventually(connected, what="the new token of the pod counts")
