"""Tokens of an OpenID Connect issuer: clients bring them, and the proxy has its own from there. Real issuer (HTTP and
TLS), real broker that knows the issuer's key, real clients.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme
from local.standalone import ROLES, Standalone
from local.tokens import make_token

from proto.pulsar_pb2 import BaseCommand, ServerError

from .conftest import before, running
from .lab.cluster import ProxyCluster
from .lab.issuer import DISCOVERY, Issuer
from .lab.programs import Program
from .lab.security import NAMESPACE, grant
from .lab.sessions import auth_response
from .lab.waiting import eventually
from .lab.wire import WireClient
from .lab.witness import others_unharmed

GRANTED = f"persistent://{NAMESPACE}/oidc"
NOT_GRANTED = "persistent://public/default/oidc-not-granted"
AUDIENCE = "urn:pulsar:clients"
BROKER_AUDIENCE = "urn:pulsar:brokers"
SECRET = "the-proxys-secret-at-the-issuer"
FAILURES = "pulsar_authentication_failures_total"


@pytest.fixture(scope="module")
def issuer() -> Iterator[Issuer]:
    """The issuer, where the proxy has an account."""
    with Issuer() as running_issuer:
        running_issuer.accounts["proxy"] = SECRET
        yield running_issuer


@pytest.fixture(scope="module")
def oidc_broker(issuer: Issuer, pulsar_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    """A secured broker that takes the tokens of the issuer's accounts, and no others."""
    data = tmp_path_factory.mktemp("oidc-broker")
    key = data / "issuer.key"
    key.write_bytes(issuer.account_public_key)
    conf = {"tokenSecretKey": "", "tokenPublicKey": f"file://{key}"}
    broker = Standalone(pulsar_home, data, secured=True, conf=conf)
    for role in ROLES:  # in place of those that it would sign itself
        broker.token_file(role).parent.mkdir(exist_ok=True)
        broker.token_file(role).write_text(issuer.account_token(role))
    with broker:
        grant(broker)
        yield broker


@pytest.fixture(scope="module")
def account_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The proxy's account, in Pulsar's form."""
    path = tmp_path_factory.mktemp("account") / "proxy.json"
    path.write_text(json.dumps({"type": "client_credentials", "client_id": "proxy", "client_secret": SECRET}))
    return path


@pytest.fixture(scope="module")
def oidc_proxy(issuer: Issuer, oidc_broker: Standalone, account_file: Path) -> Iterator[ProxyCluster]:
    """Takes the issuer's tokens and those of a secret; authenticates itself by a token of the issuer."""
    credentials = {
        "method": "oauth2",
        "file": str(account_file),
        "issuer_url": issuer.url,
        "audience": BROKER_AUDIENCE,
        "scope": "produce consume",
    }
    tables = {
        "brokers": before(oidc_broker, credentials=credentials),
        "authentication": {"enabled": True},
        "authentication.token": {"secret_key": str(oidc_broker.secret_key)},
        "authentication.oidc": {
            "allowed_issuers": [issuer.url],
            "allowed_audiences": [AUDIENCE],
            "require_https": False,
            "keys_retry_interval_ms": 500,
        },
    }
    with running(ProxyCluster(tables)) as cluster:
        yield cluster


REFUSALS = {
    (ServerError.AuthenticationError, "Failed to authenticate"),
    # where the issuer cannot be reached, a token cannot be verified: clients retry
    (ServerError.ServiceNotReady, "The proxy cannot authenticate clients at the moment"),
}


def connects(cluster: ProxyCluster, token: str) -> bool:
    """Whether the proxy takes this token."""
    with WireClient(cluster.port) as client:
        answer = client.connect(token=token)
        if answer.type == BaseCommand.CONNECTED:
            return True
        assert (answer.error.error, answer.error.message) in REFUSALS
        return False


# ---- clients


@pytest.mark.parametrize("name", ["python", "java"])
def test_a_granted_user_with_a_token_of_the_issuer(
    request: pytest.FixtureRequest, issuer: Issuer, oidc_proxy: ProxyCluster, name: str
) -> None:
    client: Program = request.getfixturevalue(f"{name}_client")
    token = issuer.token("alice", AUDIENCE)
    result = client.succeed("produce_consume", oidc_proxy.service_url, f"{GRANTED}-{name}", token=token, count=500)
    assert (result["received"], result["in_order"]) == (500, True)
    refused = client.run("attempt", oidc_proxy.service_url, NOT_GRANTED, token=token, timeout_s=5)
    assert refused.result["ok"] is False


def test_a_token_of_our_own_secret_beside_it(
    python_client: Program, oidc_broker: Standalone, oidc_proxy: ProxyCluster
) -> None:
    token = make_token(oidc_broker.secret_key.read_bytes(), "alice")
    result = python_client.succeed("produce_consume", oidc_proxy.service_url, f"{GRANTED}-own", token=token, count=50)
    assert result["received"] == 50


def test_java_is_told_of_a_wrong_audience(java_client: Program, issuer: Issuer, oidc_proxy: ProxyCluster) -> None:
    token = issuer.token("alice", BROKER_AUDIENCE)
    outcome = java_client.run("attempt", oidc_proxy.service_url, GRANTED, token=token, timeout_s=5)
    assert "AuthenticationException" in outcome.result["error_type"], outcome.result


def of_another_key(issuer: Issuer) -> str:
    """A token that says it is the issuer's."""
    other = Issuer()
    other.url = issuer.url
    return other.token("alice", AUDIENCE)


BAD_TOKENS: dict[str, Callable[[Issuer], str]] = {
    "bad_audience": lambda issuer: issuer.token("alice", "urn:another"),
    "expired": lambda issuer: issuer.token("alice", AUDIENCE, -60),
    "bad_signature": of_another_key,
    "bad_algorithm": lambda _: Issuer().token("alice", AUDIENCE),  # of another issuer: so says authentication.token
}
"""By the reason in the log."""


@pytest.mark.parametrize("reason", BAD_TOKENS)
def test_a_bad_token_is_refused(issuer: Issuer, oidc_proxy: ProxyCluster, reason: str) -> None:
    """One answer whatever is wrong; the log has a line for it, without the token."""
    token = BAD_TOKENS[reason](issuer)
    with others_unharmed(oidc_proxy, topic=GRANTED, token=issuer.token("alice", AUDIENCE)) as witness:
        with WireClient(oidc_proxy.port) as client:
            assert client.connect(token=token).error.error == ServerError.AuthenticationError
            witness.logged("authentication denied", client.address, f"reason={reason}")
        witness.counted(FAILURES, auth_method="token", reason=reason)
    log = oidc_proxy.log_text()
    assert not any(part in log for part in token.split("."))


# ---- keys


def test_keys_are_asked_for_once(issuer: Issuer, oidc_proxy: ProxyCluster) -> None:
    token = issuer.token("alice", AUDIENCE)
    assert connects(oidc_proxy, token)
    before_all = issuer.requests.copy()
    assert all(connects(oidc_proxy, token) for _ in range(20))
    assert issuer.requests["/keys"] == before_all["/keys"]


def test_a_rotated_key(issuer: Issuer, oidc_proxy: ProxyCluster) -> None:
    """The cluster runs on: a token that names the new key makes it ask; the old key is gone with that."""
    old = issuer.token("alice", AUDIENCE)
    assert connects(oidc_proxy, old)
    issuer.rotate()
    new = issuer.token("alice", AUDIENCE)
    eventually(lambda: connects(oidc_proxy, new), what="the new key is found")
    assert not connects(oidc_proxy, old)


def test_an_issuer_that_is_down(issuer: Issuer, oidc_proxy: ProxyCluster) -> None:
    """Known keys go on, and the proxy's own token; what is not known must wait."""
    token = issuer.token("alice", AUDIENCE)
    assert connects(oidc_proxy, token)
    issuer.stop()
    try:
        with WireClient(oidc_proxy.port) as client:
            assert client.connect(token=token).type == BaseCommand.CONNECTED
            assert client.lookup(GRANTED).lookup_topic_response.proxy_through_service_url
        issuer.rotate()
        unknown = issuer.token("alice", AUDIENCE)

        def asked_in_vain() -> bool:
            assert not connects(oidc_proxy, unknown)
            return "an issuer does not give what is needed" in oidc_proxy.log_text()

        eventually(asked_in_vain, what="it is logged that the issuer is down")
        assert connects(oidc_proxy, token)
    finally:
        issuer.start()
    eventually(lambda: connects(oidc_proxy, unknown), what="the new key is found")


# ---- two issuers


@pytest.fixture(scope="module")
def partner() -> Iterator[Issuer]:
    """A second issuer, for roles of its own."""
    with Issuer() as running_issuer:
        yield running_issuer


@pytest.fixture(scope="module")
def shared_proxy(issuer: Issuer, partner: Issuer, oidc_broker: Standalone) -> Iterator[ProxyCluster]:
    """Takes the tokens of two issuers; `front` is a proxy by a token of the first. Sessions are short."""
    tables = {
        "brokers": before(oidc_broker),
        "authentication": {"enabled": True, "proxy_roles": ["token:front"]},
        "authentication.oidc": {
            "allowed_issuers": [issuer.url, partner.url],
            "allowed_audiences": [AUDIENCE],
            "allowed_roles": {issuer.url: ["admin", "alice", "app-*", "front"], partner.url: ["partner-*"]},
            "require_https": False,
        },
        "session": {"connections_max_reauth_ms": 2_000},
    }
    with running(ProxyCluster(tables), ready=False) as cluster:
        yield cluster


FRONT = {"proxy_version": "a", "original_principal": "alice"}


@pytest.mark.parametrize(
    ("role", "fields"), [("admin", {}), ("app-1", {}), ("front", FRONT)], ids=["admin", "app", "proxy"]
)
def test_an_issuer_that_signs_a_role_of_another_one_is_denied(
    issuer: Issuer, partner: Issuer, shared_proxy: ProxyCluster, role: str, fields: dict[str, str]
) -> None:
    for signer, own_role, expected in (
        (issuer, role, BaseCommand.CONNECTED),
        (partner, role, BaseCommand.ERROR),
        (partner, "partner-1", BaseCommand.CONNECTED),
    ):
        with WireClient(shared_proxy.port) as client:
            own_fields = fields if own_role == role else {}
            assert client.connect(token=signer.token(own_role, AUDIENCE), **own_fields).type == expected
            if expected == BaseCommand.ERROR:
                shared_proxy.wait_for_log("authentication denied", client.address, "reason=role_not_allowed")


def test_a_session_is_not_renewed_by_another_issuer(
    issuer: Issuer, partner: Issuer, shared_proxy: ProxyCluster
) -> None:
    with WireClient(shared_proxy.port) as client:
        assert client.connect(token=issuer.token("alice", AUDIENCE)).type == BaseCommand.CONNECTED
        for _ in range(2):  # the control: its own issuer renews it
            assert client.receive().type == BaseCommand.AUTH_CHALLENGE
            client.send_bytes(auth_response(issuer.token("alice", AUDIENCE).encode()))
        assert client.receive().type == BaseCommand.AUTH_CHALLENGE
        client.send_bytes(auth_response(partner.token("alice", AUDIENCE).encode()))
        assert client.receive().error.message == "Failed to authenticate"


# ---- the proxy's own token


def test_the_broker_takes_the_issuers_tokens_only(issuer: Issuer, oidc_broker: Standalone) -> None:
    """The control: without this, the proxy's token would prove nothing."""
    for token, answer in (
        (issuer.account_token("alice"), BaseCommand.CONNECTED),
        (make_token(oidc_broker.secret_key.read_bytes(), "alice"), BaseCommand.ERROR),
        (issuer.token("alice", AUDIENCE), BaseCommand.ERROR),
    ):
        with WireClient(oidc_broker.broker_port) as client:
            assert client.connect(token=token).type == answer


def test_the_proxys_own_token(issuer: Issuer, oidc_proxy: ProxyCluster) -> None:
    """One request served all tests before; and no log has the secret."""
    assert connects(oidc_proxy, issuer.token("alice", AUDIENCE))
    [form] = [form for form in issuer.forms if form["client_secret"] == SECRET]
    assert form == {
        "grant_type": "client_credentials",
        "client_id": "proxy",
        "client_secret": SECRET,
        "audience": BROKER_AUDIENCE,
        "scope": "produce consume",
    }
    assert SECRET not in oidc_proxy.log_text()


def test_a_proxy_whom_the_issuer_does_not_know(issuer: Issuer, oidc_broker: Standalone, tmp_path: Path) -> None:
    """The client did nothing wrong. The log says what the issuer said, without the secret."""
    account = tmp_path / "account.json"
    account.write_text(json.dumps({"client_id": "proxy", "client_secret": "wrong-secret"}))
    credentials = {"method": "oauth2", "file": str(account), "issuer_url": issuer.url}
    tables = {
        "brokers": before(oidc_broker, credentials=credentials),
        "authentication": {"enabled": True},
        "authentication.token": {"secret_key": str(oidc_broker.secret_key)},
    }
    with running(ProxyCluster(tables), ready=False) as cluster, WireClient(cluster.port) as client:
        client.connect(token=make_token(oidc_broker.secret_key.read_bytes(), "alice"))
        assert client.lookup(GRANTED).lookup_topic_response.error == ServerError.ServiceNotReady
        cluster.wait_for_log("the proxy has no credentials", "invalid_client")
        assert "wrong-secret" not in cluster.log_text()


# ---- TLS to issuers


def tls_issuer(authority: trustme.CA) -> Issuer:
    """An issuer with a certificate of this authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    return Issuer(context)


def test_issuers_with_tls(oidc_broker: Standalone, tmp_path: Path) -> None:
    """One has a certificate that counts, the other has not; `https` is needed as it comes."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "trust.pem")
    with tls_issuer(authority) as good, tls_issuer(trustme.CA()) as bad:
        tables = {
            "brokers": before(oidc_broker),
            "authentication": {"enabled": True},
            "authentication.oidc": {
                "allowed_issuers": [good.url, bad.url],
                "allowed_audiences": [AUDIENCE],
                "allowed_roles": {good.url: ["alice"], bad.url: ["bob"]},
                "trust": str(tmp_path / "trust.pem"),
            },
        }
        with running(ProxyCluster(tables), ready=False) as cluster:
            assert connects(cluster, good.token("alice", AUDIENCE))
            with WireClient(cluster.port) as client:
                answer = client.connect(token=bad.token("alice", AUDIENCE))
                assert answer.error.error == ServerError.ServiceNotReady
            cluster.wait_for_log("an issuer does not give what is needed", bad.url, "CERTIFICATE_VERIFY_FAILED")
            assert (good.requests[DISCOVERY], good.requests["/keys"], bad.requests.total()) == (1, 1, 0)
