"""Token authentication at the proxy, authorization at the broker, `proxyRoles` between them."""

from __future__ import annotations

from pathlib import Path

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from local.standalone import Standalone
from local.tokens import make_token

from proto.pulsar_pb2 import BaseCommand, ServerError

from .conftest import authentication, running
from .lab.cluster import ProxyCluster
from .lab.programs import Program
from .lab.schema import NO_REQUEST_ID
from .lab.security import NAMESPACE, bad_tokens
from .lab.waiting import eventually
from .lab.wire import WireClient
from .lab.witness import others_unharmed
from .test_failing_brokers import comparable

GRANTED = f"persistent://{NAMESPACE}/granted"
NOT_GRANTED = "persistent://public/default/not-granted"
FAILURES = "pulsar_authentication_failures_total"


def test_a_granted_user_works(client: Program, secured_broker: Standalone, secured_proxy: ProxyCluster) -> None:
    options = {"token": secured_broker.token("alice"), "count": 1000}
    result = client.succeed("produce_consume", secured_proxy.service_url, f"{GRANTED}-{client.name}", **options)
    assert (result["received"], result["in_order"]) == (1000, True)


REFUSALS = {"python": "AuthorizationError", "java": "not authorized", "go": "AuthorizationError"}


@pytest.mark.conforms("pip-1.32", "pip-1.40")
def test_another_user_is_refused_with_the_brokers_reason(
    client: Program, secured_broker: Standalone, secured_proxy: ProxyCluster
) -> None:
    token = secured_broker.token("bob")
    outcome = client.run("attempt", secured_proxy.service_url, GRANTED, token=token, timeout_s=10)
    assert outcome.result["ok"] is False
    assert REFUSALS[client.name] in f"{outcome.result['error_type']} {outcome.result['error']}"


def test_refusals_are_the_brokers_own_words(secured_broker: Standalone, secured_proxy: ProxyCluster) -> None:
    """bob behind the proxy reads what bob at the broker reads: metadata and lookup, code and text."""
    with WireClient(secured_proxy.port) as through, WireClient(secured_broker.broker_port) as direct:
        for client in (through, direct):
            assert client.connect(token=secured_broker.token("bob")).type == BaseCommand.CONNECTED
        answer = through.partitions(GRANTED)
        assert answer.partition_metadata_response.error == ServerError.AuthorizationError
        assert "not authorized" in answer.partition_metadata_response.message
        assert comparable(answer) == comparable(direct.partitions(GRANTED))
        assert comparable(through.lookup(GRANTED)) == comparable(direct.lookup(GRANTED))


BAD_TOKENS = ["signed with another key", "expired", "not a token", "empty"]


@pytest.mark.conforms("pip-30.44")
def test_a_bad_token_is_refused(secured_broker: Standalone, secured_proxy: ProxyCluster) -> None:
    """In lookup mode and for a relay. The same answer whatever is wrong; the reason is in the log and the metric, the
    token is not.
    """
    tokens = bad_tokens(secured_broker)
    relay = {"proxy_to_broker_url": f"localhost:{secured_broker.broker_port}"}
    alice = secured_broker.token("alice")
    with others_unharmed(secured_proxy, topic=GRANTED, token=alice) as witness:
        for token in (tokens[what] for what in BAD_TOKENS):
            for target in ({}, relay):
                with WireClient(secured_proxy.port) as client:
                    assert_refused(client, token=token, **target)
                    line = witness.logged(client.address, "authentication_failed")
                assert len(token) < 10 or token not in line
        witness.counted(FAILURES, times=2 * len(BAD_TOKENS), auth_method="token")
    said = [tokens[what] for what in BAD_TOKENS if tokens[what].count(".") == 2]
    assert said
    assert not any(token.split(".")[2] in secured_proxy.log_text() for token in said)


@pytest.mark.conforms("pip-30.53")
def test_no_credentials_and_unknown_methods_are_refused(
    secured_broker: Standalone, secured_proxy: ProxyCluster
) -> None:
    methods = ["", "none", "basic", "no-such-method"]
    alice = secured_broker.token("alice")
    with others_unharmed(secured_proxy, topic=GRANTED, token=alice) as witness:
        for method in methods:
            fields = {"auth_method_name": method, "auth_data": b"alice:password"} if method else {}
            with WireClient(secured_proxy.port) as client:
                assert_refused(client, **fields)
                witness.logged(client.address, "authentication_failed")
        witness.counted(FAILURES, times=len(methods))


def assert_refused(client: WireClient, **fields: object) -> None:
    """CONNECT is answered `Failed to authenticate`, then the end."""
    client.send_connect(**fields)
    commands = client.wait_for_end()
    assert [command.type for command in commands] == [BaseCommand.ERROR]
    error = commands[0].error
    assert (error.error, error.message) == (ServerError.AuthenticationError, "Failed to authenticate")
    assert error.request_id == NO_REQUEST_ID


def test_java_says_why_a_bad_token_was_refused(
    java_client: Program, secured_broker: Standalone, secured_proxy: ProxyCluster
) -> None:
    token = bad_tokens(secured_broker)["signed with another key"]
    outcome = java_client.run("attempt", secured_proxy.service_url, GRANTED, token=token, timeout_s=5)
    assert outcome.result["ok"] is False
    assert "AuthenticationException" in outcome.result["error_type"], outcome.result


def test_an_expired_credential_serves_no_further_lookup(
    secured_broker: Standalone, secured_proxy: ProxyCluster
) -> None:
    """The connection was made with a good token; once that has expired, its next use ends it (KIP-368)."""
    token = make_token(
        secured_broker.secret_key.read_bytes(), "alice", 8
    )  # long enough to come in and ask, also on a busy machine
    with WireClient(secured_proxy.port) as client:
        assert client.connect(token=token).type == BaseCommand.CONNECTED
        assert client.lookup(GRANTED).lookup_topic_response.proxy_through_service_url

        def refused() -> bool:
            answer = client.lookup(GRANTED)
            return bool(answer.type == BaseCommand.ERROR and answer.error.error == ServerError.AuthenticationError)

        eventually(refused, what="the session is ended")


# ---- no client becomes another


def test_the_broker_does_trust_original_principal(secured_broker: Standalone) -> None:
    """The control: the proxy's token may name any principal. Without this, the next tests prove nothing."""
    with WireClient(secured_broker.broker_port) as client:
        answer = client.connect(token=secured_broker.token("proxy"), original_principal="admin")
        assert answer.type == BaseCommand.CONNECTED
        assert client.producer(NOT_GRANTED).type == BaseCommand.PRODUCER_SUCCESS


def claims(broker: Standalone) -> dict[str, object]:
    """What alice might add to her CONNECT to pass for the admin."""
    return {
        "token": broker.token("alice"),
        "original_principal": "admin",
        "original_auth_data": "admin",
        "original_auth_method": "token",
    }


@pytest.mark.parametrize("target", [False, True], ids=["lookup mode", "relay"])
def test_alice_cannot_say_that_she_is_admin(
    secured_broker: Standalone, secured_proxy: ProxyCluster, target: bool
) -> None:
    where = {"proxy_to_broker_url": f"localhost:{secured_broker.broker_port}"} if target else {}
    with WireClient(secured_proxy.port) as client:
        answer = client.connect(**where, **claims(secured_broker))
        assert (answer.error.error, answer.error.message) == (ServerError.AuthorizationError, "Invalid roles.")
        client.wait_for_end()


def unnamed_claims(secured_broker: Standalone) -> dict[str, str]:
    """Without an original principal it is only her own credentials that are said twice."""
    return {key: value for key, value in claims(secured_broker).items() if key != "original_principal"}


def test_alice_does_not_become_admin_in_lookup_mode(secured_broker: Standalone, secured_proxy: ProxyCluster) -> None:
    with WireClient(secured_proxy.port) as client:
        assert client.connect(**unnamed_claims(secured_broker)).type == BaseCommand.CONNECTED
        answer = client.partitions(NOT_GRANTED).partition_metadata_response
        assert answer.error == ServerError.AuthorizationError
        lookup = client.lookup(NOT_GRANTED, original_principal="admin").lookup_topic_response
        assert lookup.error == ServerError.AuthorizationError


def test_alice_does_not_become_admin_in_a_relay(secured_broker: Standalone, secured_proxy: ProxyCluster) -> None:
    with WireClient(secured_proxy.port) as client:
        target = f"localhost:{secured_broker.broker_port}"
        said = unnamed_claims(secured_broker)
        assert client.connect(proxy_to_broker_url=target, **said).type == BaseCommand.CONNECTED
        answer = client.producer(NOT_GRANTED)
        assert (answer.type, answer.error.error) == (BaseCommand.ERROR, ServerError.AuthorizationError)
        assert "not authorized" in answer.error.message
        assert client.producer(f"{GRANTED}-relay").type == BaseCommand.PRODUCER_SUCCESS


def test_a_client_with_the_proxys_own_role_gets_the_brokers_refusal(
    secured_broker: Standalone, secured_proxy: ProxyCluster
) -> None:
    """The broker takes no proxy behind a proxy; its reason arrives in a relay and in lookup mode."""
    token = secured_broker.token("proxy")
    alice = secured_broker.token("alice")
    with others_unharmed(secured_proxy, topic=GRANTED, token=alice) as witness:
        with WireClient(secured_proxy.port) as client:
            answer = client.connect(token=token, proxy_to_broker_url=f"localhost:{secured_broker.broker_port}")
            assert (answer.error.error, answer.error.message) == (ServerError.AuthorizationError, "Invalid roles.")
            witness.logged(client.address, "Invalid roles.")
        with WireClient(secured_proxy.port) as client:
            assert client.connect(token=token).type == BaseCommand.CONNECTED
            answer = client.lookup(GRANTED)
            assert answer.lookup_topic_response.error == ServerError.AuthorizationError


# ---- the proxy's own side


def test_tokens_by_public_key(secured_broker: Standalone, tmp_path: Path) -> None:
    """RS256: the proxy knows only the public key; the broker need not know the key at all."""
    private = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    der = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    (tmp_path / "public.key").write_bytes(private.public_key().public_bytes(*der))
    tables = authentication(secured_broker)
    tables["authentication.token"] = {"public_key": str(tmp_path / "public.key")}
    with running(ProxyCluster(tables)) as cluster:
        with WireClient(cluster.port) as client:
            client.connect(token=jwt.encode({"sub": "alice"}, private, "RS256"))
            assert client.lookup(GRANTED).lookup_topic_response.proxy_through_service_url
        with WireClient(cluster.port) as client:
            # The classic confusion: the public key, which is no secret, used as a shared secret.
            assert_refused(client, token=make_token((tmp_path / "public.key").read_bytes(), "admin"))


@pytest.mark.conforms("pip-1.27")
def test_a_proxy_without_good_credentials_says_so(secured_broker: Standalone, tmp_path: Path) -> None:
    """The client did nothing wrong: it must not read that *it* failed to authenticate. The log names the cause."""
    (tmp_path / "bad.jwt").write_text(bad_tokens(secured_broker)["signed with another key"])
    tables = authentication(secured_broker)
    tables["brokers"]["credentials"] = {"method": "token", "file": str(tmp_path / "bad.jwt")}
    with running(ProxyCluster(tables), ready=False) as cluster:
        alice = secured_broker.token("alice")
        with WireClient(cluster.port) as client:
            client.connect(token=alice)
            assert client.lookup(GRANTED).lookup_topic_response.error == ServerError.ServiceNotReady
            cluster.wait_for_log(client.address, "Failed to authenticate")
        with WireClient(cluster.port) as client:
            answer = client.connect(token=alice, proxy_to_broker_url=f"localhost:{secured_broker.broker_port}")
            assert answer.error.error == ServerError.ServiceNotReady
            assert answer.error.message != "Failed to authenticate"
