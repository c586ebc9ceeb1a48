"""Proxies before proxies (`authentication.proxy_roles`), and clients' own credentials behind the proxy's.

Cluster `a` is where clients come in. Its way to the broker is cluster `b` (`brokers.through_proxy`): the broker takes
`a` for no client.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local.standalone import Standalone
from local.tokens import make_token

from proto.pulsar_pb2 import BaseCommand, ServerError

from .conftest import authentication, running
from .lab.cluster import ProxyCluster, Tables, merged
from .lab.programs import Program
from .lab.schema import LOOKUP_FAILED, NO_REQUEST_ID
from .lab.security import NAMESPACE, grant
from .lab.waiting import eventually
from .lab.wire import WireClient
from .lab.witness import others_unharmed

GRANTED = f"persistent://{NAMESPACE}/granted"
NOT_GRANTED = "persistent://public/default/not-granted"
LOOKUPS = "pulsar_proxy_lookup_requests_total"
RELAYED = "pulsar_proxy_binary_bytes_total"
INVALID_ROLES = (ServerError.AuthorizationError, "Invalid roles.")
ONE_FORWARDER = {"cluster": {"forwarders": 1}}


def token_of(broker: Standalone, role: str) -> str:
    """A token that this broker, and clusters before it, take."""
    return make_token(broker.secret_key.read_bytes(), role)


# ---- a chain


@pytest.fixture(scope="module")
def b(secured_broker: Standalone) -> Iterator[ProxyCluster]:
    """Takes `proxy` and `proxy-a` for proxies."""
    chain = {"authentication": {"proxy_roles": ["proxy", "proxy-a"]}}
    with running(ProxyCluster(merged(authentication(secured_broker), chain, ONE_FORWARDER))) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def a(secured_broker: Standalone, b: ProxyCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyCluster]:
    """Reaches the broker through `b`, as `proxy-a`."""
    file = tmp_path_factory.mktemp("a") / "proxy-a.jwt"
    file.write_text(token_of(secured_broker, "proxy-a"))
    to_b = {"service_url": b.service_url, "through_proxy": True, "credentials": {"method": "token", "file": str(file)}}
    with running(ProxyCluster(merged(authentication(secured_broker), {"brokers": to_b}, ONE_FORWARDER))) as cluster:
        yield cluster


@pytest.mark.conforms("pip-1.2")
@pytest.mark.parametrize("name", ["python", "java"])
def test_a_granted_user_works_through_two_clusters(
    name: str, request: pytest.FixtureRequest, secured_broker: Standalone, a: ProxyCluster, b: ProxyCluster
) -> None:
    client: Program = request.getfixturevalue(f"{name}_client")
    before = b.metrics()
    options = {"token": secured_broker.token("alice"), "count": 100}
    result = client.succeed("produce_consume", a.service_url, f"{GRANTED}-chain-{name}", **options)
    assert (result["received"], result["in_order"]) == (100, True)
    moved = b.metrics().moved_since(before)
    assert {LOOKUPS, RELAYED} <= set(moved), "both went through b"


@pytest.mark.parametrize(("name", "refusal"), [("python", "AuthorizationError"), ("java", "not authorized")])
def test_another_user_is_refused_through_two_clusters(
    name: str, refusal: str, request: pytest.FixtureRequest, secured_broker: Standalone, a: ProxyCluster
) -> None:
    client: Program = request.getfixturevalue(f"{name}_client")
    outcome = client.run("attempt", a.service_url, GRANTED, token=secured_broker.token("bob"), timeout_s=10)
    assert outcome.result["ok"] is False
    assert refusal in f"{outcome.result['error_type']} {outcome.result['error']}"


def test_the_broker_refuses_clients_that_come_through_proxy_a_only(secured_broker: Standalone) -> None:
    """The control: without `b`, nothing of what follows would work."""
    fields = {"token": token_of(secured_broker, "proxy-a"), "original_principal": "alice", "proxy_version": "a"}
    assert denied(secured_broker.broker_port, **fields) == INVALID_ROLES


def test_the_principal_is_kept_in_lookups(secured_broker: Standalone, a: ProxyCluster, b: ProxyCluster) -> None:
    """alice's and bob's requests reach the broker as theirs, by way of both clusters."""
    asked = b.metrics().total(LOOKUPS)
    for role, refused in (("alice", False), ("bob", True)):
        with WireClient(a.port) as client:
            assert client.connect(token=secured_broker.token(role)).type == BaseCommand.CONNECTED
            answer = client.partitions(GRANTED).partition_metadata_response
            assert (answer.error == ServerError.AuthorizationError) is refused, role
            assert ("not authorized" in answer.message) is refused
            assert client.lookup(GRANTED).lookup_topic_response.proxy_through_service_url is not refused
    b.wait_for_total(LOOKUPS, asked + 2)  # a has asked b


class ProxyA(WireClient):
    """A proxy of role `proxy-a` that is `b`'s client."""

    def come(self, broker: Standalone, original: str, *, relay: bool, **fields: Any) -> Any:
        """CONNECT on behalf of another; the answer."""
        if relay:
            fields |= {"proxy_to_broker_url": f"localhost:{broker.broker_port}"}
        token = token_of(broker, "proxy-a")
        return self.connect(token=token, proxy_version="a", original_principal=original, **fields)


@pytest.mark.conforms("pip-1.32")
def test_the_principal_is_kept_in_relays(secured_broker: Standalone, b: ProxyCluster) -> None:
    with ProxyA(b.port) as proxy:
        assert proxy.come(secured_broker, "alice", relay=False).type == BaseCommand.CONNECTED
        assert proxy.lookup(f"{GRANTED}-chain-relay").lookup_topic_response.proxy_through_service_url
    for role, answer_type in (("alice", BaseCommand.PRODUCER_SUCCESS), ("bob", BaseCommand.ERROR)):
        with ProxyA(b.port) as proxy:
            assert proxy.come(secured_broker, role, relay=True).type == BaseCommand.CONNECTED
            answer = proxy.producer(f"{GRANTED}-chain-relay")
            assert answer.type == answer_type, role
            if answer_type == BaseCommand.ERROR:
                assert (answer.error.error, "not authorized" in answer.error.message) == (
                    ServerError.AuthorizationError,
                    True,
                )
    with ProxyA(b.port) as proxy:
        assert proxy.come(secured_broker, "alice", relay=True).type == BaseCommand.CONNECTED
        answer = proxy.producer(NOT_GRANTED)
        assert answer.error.error == ServerError.AuthorizationError, "no client has the proxy's own rights"


def test_the_principal_is_kept_in_relays_through_two_clusters(secured_broker: Standalone, a: ProxyCluster) -> None:
    topic, target = f"{GRANTED}-chain-relay-2", f"localhost:{secured_broker.broker_port}"
    with WireClient(a.port) as client:
        assert client.connect(token=secured_broker.token("alice")).type == BaseCommand.CONNECTED
        assert client.lookup(topic).lookup_topic_response.proxy_through_service_url
    for role, answer_type in (("alice", BaseCommand.PRODUCER_SUCCESS), ("bob", BaseCommand.ERROR)):
        with WireClient(a.port) as client:
            answer = client.connect(token=secured_broker.token(role), proxy_to_broker_url=target)
            assert answer.type == BaseCommand.CONNECTED
            assert client.producer(topic).type == answer_type, role


def test_a_target_that_only_b_refuses(secured_broker: Standalone, a: ProxyCluster, b: ProxyCluster) -> None:
    """`a` looks at host and port; what a name leads to is for `b` to see, and its refusal is told."""
    with WireClient(a.port) as client:
        target = f"no-such-host.invalid:{secured_broker.broker_port}"
        answer = client.connect(token=secured_broker.token("alice"), proxy_to_broker_url=target)
        assert (answer.type, answer.error.message) == (BaseCommand.ERROR, "Target broker cannot be validated.")
    b.wait_for_log("no-such-host.invalid", "target_denied")


def test_the_log_says_whose_connection_it_is(secured_broker: Standalone, b: ProxyCluster) -> None:
    with ProxyA(b.port) as proxy:
        assert proxy.come(secured_broker, "carol-behind-a", relay=False).type == BaseCommand.CONNECTED
        assert proxy.partitions(GRANTED).partition_metadata_response.error == ServerError.AuthorizationError
        assert "carol-behind-a" in b.wait_for_log(proxy.address, "carol-behind-a")


# ---- clients that may not be proxies


def denied(port: int, **fields: Any) -> tuple[int, str]:
    """CONNECT must be answered by an error, then the end; the error."""
    with WireClient(port) as client:
        client.send_connect(**fields)
        commands = client.wait_for_end()
    assert [command.type for command in commands] == [BaseCommand.ERROR]
    error = commands[0].error
    assert error.request_id == NO_REQUEST_ID
    return error.error, error.message


@pytest.mark.conforms("pip-1.31")
@pytest.mark.parametrize("relay", [False, True], ids=["lookup", "relay"])
@pytest.mark.parametrize(
    ("role", "claim"),
    [
        ("alice", {"original_principal": "bob"}),
        ("alice", {"original_principal": "admin"}),
        ("alice", {"original_principal": "alice"}),
        ("alice", {"original_principal": "proxy"}),
        ("proxy", {}),
        ("proxy", {"original_principal": ""}),
        ("proxy", {"original_principal": " "}),
        ("proxy", {"original_principal": "proxy"}),
        ("proxy", {"original_principal": "proxy", "proxy_version": "a"}),
    ],
    ids=str,
)
def test_roles_that_do_not_go_together_are_refused_as_by_the_broker(
    secured_broker: Standalone, b: ProxyCluster, role: str, claim: dict[str, str], *, relay: bool
) -> None:
    """The same frame to the cluster and to the broker: the same code and text."""
    fields = {"token": secured_broker.token(role), **claim}
    target = {"proxy_to_broker_url": f"localhost:{secured_broker.broker_port}"} if relay else {}
    assert denied(b.port, **fields, **target) == INVALID_ROLES
    assert denied(secured_broker.broker_port, **fields) == INVALID_ROLES


def test_a_false_original_principal_refuses_no_other_client(secured_broker: Standalone, b: ProxyCluster) -> None:
    alice = secured_broker.token("alice")
    with others_unharmed(b, topic=GRANTED, token=alice) as witness:
        with WireClient(b.port) as client:
            client.connect(token=secured_broker.token("bob"), original_principal="admin")
            line = witness.logged(client.address, "authentication_failed")
        assert "invalid_roles" in line
        witness.counted("pulsar_authentication_failures_total", reason="invalid_roles")


def test_a_client_that_says_that_it_is_a_proxy(secured_broker: Standalone, a: ProxyCluster, b: ProxyCluster) -> None:
    """As the Java proxy has it; where no proxy may come, before any client is asked for credentials."""
    refusal = (ServerError.NotAllowedError, "Must not provide proxyVersion")
    for claim in ({}, {"original_principal": "bob"}):
        assert denied(b.port, token=secured_broker.token("alice"), proxy_version="a", **claim) == refusal
        assert denied(a.port, token=secured_broker.token("proxy"), proxy_version="a", **claim) == refusal


def test_a_bad_token_is_a_bad_token_whatever_is_claimed(b: ProxyCluster) -> None:
    forged = make_token(b"x" * 32, "proxy-a")
    refusal = (ServerError.AuthenticationError, "Failed to authenticate")
    assert denied(b.port, token=forged, proxy_version="a", original_principal="alice") == refusal


# ---- clients' own credentials


@pytest.fixture(scope="module")
def strict_broker(pulsar_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    """A broker that looks at the clients' own credentials behind a proxy's."""
    conf = {"authenticateOriginalAuthData": "true"}
    with Standalone(pulsar_home, tmp_path_factory.mktemp("strict"), secured=True, conf=conf) as standalone:
        grant(standalone)
        yield standalone


OTHER_KEY = b"not the broker's key, but one of the cluster's"


def tables_of(broker: Standalone, directory: Path, *, forwards: bool) -> dict[str, dict[str, Any]]:
    """A cluster that takes tokens by the broker's key, and by another one."""
    (directory / "other.key").write_bytes(OTHER_KEY)
    more = {
        "brokers": {"forward_authorization_credentials": forwards},
        "authentication": {"proxy_roles": ["proxy-a"]},
        "authentication.token": {"further_secret_keys": [str(directory / "other.key")]},
    }
    return merged(authentication(broker), more, ONE_FORWARDER)


@pytest.fixture(scope="module")
def forwarding(strict_broker: Standalone, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyCluster]:
    """Passes clients' credentials on."""
    tables = tables_of(strict_broker, tmp_path_factory.mktemp("forwarding"), forwards=True)
    with running(ProxyCluster(tables)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def keeping(strict_broker: Standalone, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyCluster]:
    """Keeps them to itself, so that the broker takes no client and it is not ready."""
    tables = tables_of(strict_broker, tmp_path_factory.mktemp("keeping"), forwards=False)
    with running(ProxyCluster(tables), ready=False) as cluster:
        yield cluster


@pytest.mark.parametrize("name", ["python", "java"])
def test_a_client_with_its_own_token(
    name: str, request: pytest.FixtureRequest, strict_broker: Standalone, forwarding: ProxyCluster
) -> None:
    client: Program = request.getfixturevalue(f"{name}_client")
    options = {"token": strict_broker.token("alice"), "count": 100}
    result = client.succeed("produce_consume", forwarding.service_url, f"{GRANTED}-own-{name}", **options)
    assert (result["received"], result["in_order"]) == (100, True)
    assert strict_broker.token("alice").split(".")[2] not in forwarding.log_text()


def relayed(cluster: ProxyCluster, broker: Standalone, token: str) -> Any:
    """The answer to a CONNECT for a relay."""
    with WireClient(cluster.port) as client:
        return client.connect(token=token, proxy_to_broker_url=f"localhost:{broker.broker_port}")


def looked_up(cluster: ProxyCluster, token: str) -> Any:
    """The answer to a LOOKUP."""
    with WireClient(cluster.port) as client:
        assert client.connect(token=token).type == BaseCommand.CONNECTED
        return client.lookup(GRANTED).lookup_topic_response


def test_the_brokers_word_on_a_clients_token_counts(strict_broker: Standalone, forwarding: ProxyCluster) -> None:
    """alice twice, the second time by a token that only the cluster takes: no connection is shared between the two."""
    good, bad = strict_broker.token("alice"), make_token(OTHER_KEY, "alice")
    for token, taken in ((good, True), (bad, False), (good, True)):
        assert (relayed(forwarding, strict_broker, token).type == BaseCommand.CONNECTED) is taken
        assert bool(looked_up(forwarding, token).proxy_through_service_url) is taken
    for token in (good, bad):
        assert token.split(".")[2] not in forwarding.log_text()


def test_without_forwarded_credentials_clients_are_denied(strict_broker: Standalone, keeping: ProxyCluster) -> None:
    """The control: this broker does look, and after the proxy's own login every client is told so."""
    token = strict_broker.token("alice")
    eventually(lambda: keeping.get("/readyz").text.startswith("clients by token"), what="it is known")
    answer = relayed(keeping, strict_broker, token)
    assert (answer.type, answer.error.error) == (BaseCommand.ERROR, ServerError.AuthenticationError)
    assert "set brokers.forward_authorization_credentials = true" in answer.error.message
    assert looked_up(keeping, token).error == ServerError.AuthenticationError


def test_check_says_what_the_broker_wants(
    strict_broker: Standalone, keeping: ProxyCluster, forwarding: ProxyCluster
) -> None:
    """An AuthenticationError that is not about the proxy's credentials."""
    done = keeping.command("check", "--connect")
    assert done.returncode == 1
    refusal = "clients by token: the broker wants the client's own credentials (authenticateOriginalAuthData): set "
    assert refusal in done.stdout
    eventually(lambda: keeping.get("/readyz").text.startswith(refusal), what="no client would be served")
    done = forwarding.command("check", "--connect")
    assert done.returncode == 0
    assert "it accepts the proxy's credentials, and their role is in its proxyRoles" in done.stdout
    assert forwarding.get("/readyz").text == "ok\n"


def test_credentials_that_a_proxy_forwards_go_on(strict_broker: Standalone, forwarding: ProxyCluster) -> None:
    """Never the proxy's own credentials in their place."""
    alice = {"original_auth_method": "token", "original_auth_data": strict_broker.token("alice")}
    bad = {"original_auth_method": "token", "original_auth_data": make_token(OTHER_KEY, "alice")}
    for relay in (True, False):
        for fields, taken in ((alice, True), (bad, False), ({}, False)):
            with ProxyA(forwarding.port) as proxy:
                answer = proxy.come(strict_broker, "alice", relay=relay, **fields)
                if not relay:
                    assert answer.type == BaseCommand.CONNECTED
                    assert bool(proxy.lookup(GRANTED).lookup_topic_response.proxy_through_service_url) is taken
                else:
                    assert (answer.type == BaseCommand.CONNECTED) is taken


# ---- a circle


@pytest.fixture(scope="module")
def circle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ProxyCluster, str]]:
    """Two clusters that take each other for the brokers, and a client's token."""
    directory = tmp_path_factory.mktemp("circle")
    (key := directory / "secret.key").write_bytes(b"k" * 32)
    (own := directory / "proxy.jwt").write_text(make_token(key.read_bytes(), "proxy"))
    tables: Tables = {
        "cluster": {"forwarders": 1},
        "authentication": {"enabled": True, "proxy_roles": ["proxy"]},
        "authentication.token": {"secret_key": str(key)},
    }
    one, other = ProxyCluster(tables), ProxyCluster(tables)
    for cluster, brokers in ((one, other), (other, one)):
        to_brokers = {"service_url": brokers.service_url, "through_proxy": True}
        credentials = {"credentials": {"method": "token", "file": str(own)}}
        cluster.write_config(merged(cluster.tables, {"brokers": {**to_brokers, **credentials}}))
    with running(one, ready=False), running(other, ready=False):
        yield one, make_token(key.read_bytes(), "alice")


def test_a_relay_in_a_circle_ends_at_the_fifth_proxy(circle: tuple[ProxyCluster, str]) -> None:
    """It was 97 connections, until the time of a handshake was over."""
    cluster, token = circle
    with WireClient(cluster.port) as client:
        refused = client.connect(token=token, proxy_to_broker_url="broker.example:6650")
        assert (refused.type, refused.error.error) == (BaseCommand.ERROR, ServerError.NotAllowedError)
        assert refused.error.message.startswith("The connection has passed 5 proxies")


def test_a_lookup_in_a_circle_fails_at_the_fifth_proxy(circle: tuple[ProxyCluster, str]) -> None:
    cluster, token = circle
    with WireClient(cluster.port) as client:
        assert client.connect(token=token).type == BaseCommand.CONNECTED
        answer = client.lookup(GRANTED).lookup_topic_response
        assert answer.response == LOOKUP_FAILED
        assert "has passed 5 proxies" in answer.message
