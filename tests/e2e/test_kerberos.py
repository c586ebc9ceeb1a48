"""Kerberos on both legs: clients at the proxy, the proxy at the broker (SASL GSSAPI, RFC 4752), before a real KDC."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local.standalone import BrokerOptions, Standalone
from local.tokens import make_token

from proto import commands
from proto.pulsar_pb2 import BaseCommand, ServerError

from .conftest import before, program, running
from .lab.cluster import ProxyCluster
from .lab.kerberos import ALICE, BOB, BROKER, PROXY, Initiator, Realm
from .lab.programs import NotAvailableError, Program
from .lab.schema import NO_REQUEST_ID
from .lab.wire import Ended, WireClient
from .lab.witness import assert_serves

NAMESPACE = "kerberos/shared"
TOPIC = f"persistent://{NAMESPACE}/granted"
HANDSHAKE_TIMEOUT_MS = 4000


@pytest.fixture(scope="module")
def realm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Realm]:
    """A KDC, which this process, and so every worker of a cluster that it starts, finds by KRB5_CONFIG."""
    try:
        made = Realm(tmp_path_factory.mktemp("realm"))
    except NotAvailableError as reason:
        pytest.skip(f"Kerberos: {reason}")
    with made, pytest.MonkeyPatch.context() as patch:
        for name, value in made.environment.items():
            patch.setenv(name, value)
        patch.setenv("KRB5RCACHEDIR", str(made.directory))
        yield made


@pytest.fixture(scope="module")
def kerberos_broker(realm: Realm, pulsar_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    """A broker that takes Kerberos, and tokens for its own administration; the proxy's role is its principal."""
    data = tmp_path_factory.mktemp("kerberos-broker")
    signer = data / "role.key"
    signer.write_bytes(os.urandom(32))
    providers = "org.apache.pulsar.broker.authentication.AuthenticationProvider"
    conf = {
        "authenticationProviders": f"{providers}Token,{providers}Sasl",
        "saslJaasServerSectionName": "PulsarBroker",
        "saslJaasClientAllowedIds": "proxy/localhost@PULSAR\\\\.TEST",
        "saslJaasServerRoleTokenSignerSecretPath": f"file://{signer}",
        "proxyRoles": PROXY,
        "superUserRoles": f"admin,{PROXY}",
    }
    broker = Standalone(
        pulsar_home, data, secured=True, conf=conf, options=BrokerOptions(jvm_options=realm.jvm_options)
    )
    with broker:
        admin = broker.admin()
        admin.create_tenant("kerberos")
        admin.create_namespace(NAMESPACE)
        admin.grant_namespace(NAMESPACE, ALICE)
        yield broker


@pytest.fixture(scope="module")
def kerberos_proxy(realm: Realm, kerberos_broker: Standalone) -> Iterator[ProxyCluster]:
    """A cluster that speaks Kerberos to both sides; two auth workers, so that a replay may meet either."""
    keytab = str(realm.keytab(PROXY))
    tables: dict[str, dict[str, object]] = {
        "cluster": {"forwarders": 1, "auth_workers": 2},
        "brokers": before(kerberos_broker, credentials={"method": "sasl", "file": keytab, "principal": PROXY}),
        "authentication": {"enabled": True},
        "authentication.token": {"secret_key": str(kerberos_broker.secret_key)},
        "authentication.sasl": {
            "principal": PROXY,
            "keytab": keytab,
            "allowed_principals": r"(alice|carol)@PULSAR\.TEST",
        },
        "limits": {"handshake_timeout_ms": HANDSHAKE_TIMEOUT_MS},
    }
    with running(ProxyCluster(tables)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def kerberos_client(realm: Realm, pulsar_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Program:
    """The Java client with AuthenticationSasl."""
    java = program("java", pulsar_home, tmp_path_factory)
    command, *options = java.command
    assert options.pop() == "E2eClient"
    return dataclasses.replace(java, command=(command, *realm.jvm_options, *options, "KerberosClient"))


@pytest.fixture
def client(kerberos_proxy: ProxyCluster) -> Iterator[WireClient]:
    """A client of raw frames."""
    with WireClient(kerberos_proxy.port) as wire:
        yield wire


# ---- the real client


@pytest.mark.conforms("pip-30.1")
def test_java_produces_and_consumes_through_both_legs(
    kerberos_client: Program, kerberos_proxy: ProxyCluster, kerberos_broker: Standalone
) -> None:
    result = kerberos_client.succeed("produce_consume", kerberos_proxy.service_url, TOPIC, section="Alice", count=1000)
    assert (result["received"], result["in_order"]) == (1000, True)
    publishers = kerberos_broker.admin().request("GET", f"persistent/{NAMESPACE}/granted/subscriptions")
    assert "s" in publishers


def test_java_is_told_at_once_that_its_principal_is_not_allowed(
    kerberos_client: Program, kerberos_proxy: ProxyCluster
) -> None:
    outcome = kerberos_client.run("produce_consume", kerberos_proxy.service_url, TOPIC, section="Bob", timeout_s=10)
    assert outcome.result["ok"] is False
    assert "Authentication" in outcome.result["error_type"], outcome.result
    kerberos_proxy.wait_for_log("authentication denied", "reason=not_allowed", BOB)


# ---- rounds


@pytest.mark.conforms("pip-30.1")
@pytest.mark.parametrize("mutual", [False, True], ids=["plain", "mutual"])
def test_rounds_of_a_python_initiator(realm: Realm, client: WireClient, *, mutual: bool) -> None:
    """The server's proof, where it is asked for, costs a round more; then lookups are served."""
    initiator = Initiator(realm, mutual=mutual)
    connect(client, initiator.step())
    if mutual:
        empty = initiator.step(challenge(client.receive()))
        assert empty == b""
        respond(client, empty)
    respond(client, initiator.step(challenge(client.receive())))
    assert client.receive().type == BaseCommand.CONNECTED
    assert_serves(client, TOPIC)


def test_relays_of_one_moment(kerberos_broker: Standalone, kerberos_proxy: ProxyCluster) -> None:
    """A task opens the first one's broker side, callbacks the others', with all rounds of the proxy's own exchange."""
    for _ in range(4):
        with WireClient(kerberos_proxy.port) as wire:
            wire.send_connect(
                auth_method_name="token",
                auth_data=make_token(kerberos_broker.secret_key.read_bytes(), ALICE).encode(),
                proxy_to_broker_url=f"localhost:{kerberos_broker.broker_port}",
            )
            assert wire.receive().type == BaseCommand.CONNECTED
            assert_serves(wire, TOPIC)


def test_authorization_is_by_the_clients_principal(realm: Realm, client: WireClient) -> None:
    authenticate(client, Initiator(realm))
    answer = client.partitions("persistent://public/default/not-granted")
    assert answer.partition_metadata_response.error == ServerError.AuthorizationError
    assert not client.partitions(TOPIC).partition_metadata_response.HasField("error")


# ---- refused clients


@pytest.mark.parametrize(
    ("data", "reason"), [(b"", "missing"), (b"\x00garbage", "malformed")], ids=["empty", "garbage"]
)
def test_first_data_that_is_no_ticket(
    kerberos_proxy: ProxyCluster, client: WireClient, data: bytes, reason: str
) -> None:
    connect(client, data)
    refused(kerberos_proxy, client, reason)


def test_a_ticket_for_another_service(realm: Realm, kerberos_proxy: ProxyCluster, client: WireClient) -> None:
    connect(client, Initiator(realm, service=BROKER).step())
    refused(kerberos_proxy, client, "bad_ticket")


def test_a_principal_that_is_not_allowed(realm: Realm, kerberos_proxy: ProxyCluster, client: WireClient) -> None:
    connect(client, Initiator(realm, BOB).step())
    refused(kerberos_proxy, client, "not_allowed")


def test_a_replayed_ticket_whichever_worker_it_meets(realm: Realm, kerberos_proxy: ProxyCluster) -> None:
    ticket = Initiator(realm).step()
    with WireClient(kerberos_proxy.port) as first:
        connect(first, ticket)
        challenge(first.receive())
        for _ in range(4):
            with WireClient(kerberos_proxy.port) as again:
                connect(again, ticket)
                refused(kerberos_proxy, again, "replayed")
    denials = [line for line in kerberos_proxy.log_text().splitlines() if "reason=replayed" in line]
    assert {f"worker={number}" for number in (0, 1)} <= {word for line in denials for word in line.split()}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"choice": b"\x02\x00\x00\x00"}, "bad_layer"),
        ({"choice": b"\x01\x00"}, "bad_layer"),
        ({"authorization_identity": BOB}, "bad_authzid"),
        ({"authorization_identity": "alice"}, "bad_authzid"),
    ],
    ids=["integrity", "short", "another", "without its realm"],
)
def test_choices_that_were_not_offered(
    realm: Realm, kerberos_proxy: ProxyCluster, client: WireClient, options: dict[str, Any], reason: str
) -> None:
    initiator = Initiator(realm, **options)
    connect(client, initiator.step())
    respond(client, initiator.step(challenge(client.receive())))
    refused(kerberos_proxy, client, reason)


def test_a_choice_of_garbage(realm: Realm, kerberos_proxy: ProxyCluster, client: WireClient) -> None:
    connect(client, Initiator(realm).step())
    challenge(client.receive())
    respond(client, b"garbage" * 6)
    refused(kerberos_proxy, client, "malformed")


def test_the_servers_own_words_sent_back(realm: Realm, kerberos_proxy: ProxyCluster, client: WireClient) -> None:
    connect(client, Initiator(realm).step())
    respond(client, challenge(client.receive()))
    refused(kerberos_proxy, client, "bad_layer")


def test_another_method_in_the_response(realm: Realm, kerberos_proxy: ProxyCluster, client: WireClient) -> None:
    initiator = Initiator(realm)
    connect(client, initiator.step())
    respond(client, initiator.step(challenge(client.receive())), method="token")
    refused(kerberos_proxy, client, "method_changed")


# ---- clients that break the order of rounds


def test_an_answer_after_completion(realm: Realm, client: WireClient) -> None:
    authenticate(client, Initiator(realm))
    respond(client, b"anything")
    ended_by_an_error(client)


@pytest.mark.parametrize("what", ["second CONNECT", "lookup"])
def test_another_command_in_the_middle(realm: Realm, client: WireClient, what: str) -> None:
    connect(client, Initiator(realm).step())
    challenge(client.receive())
    if what == "lookup":
        client.send(BaseCommand.LOOKUP, lookup_topic={"topic": TOPIC, "request_id": 1})
    else:
        connect(client, Initiator(realm).step())
    ended_by_an_error(client)


def test_a_client_that_stalls(realm: Realm, client: WireClient) -> None:
    """It is waited for as long as handshakes may take, and no longer."""
    started_at = time.monotonic()
    connect(client, Initiator(realm).step())
    challenge(client.receive())
    ended_by_an_error(client)
    assert time.monotonic() - started_at > HANDSHAKE_TIMEOUT_MS / 1000 - 0.5


def test_no_key_and_no_ticket_in_the_log(realm: Realm, kerberos_proxy: ProxyCluster) -> None:
    """The last one of the module: nothing of the library's has complained, and no worker has died."""
    assert realm.port
    log = kerberos_proxy.log_text()
    assert "Traceback" not in log
    assert all("restart" not in line for line in log.splitlines())


# ---- a little dialogue


def connect(client: WireClient, data: bytes) -> None:
    client.send_connect(auth_method_name="sasl", auth_data=data)


def respond(client: WireClient, data: bytes, method: str = "sasl") -> None:
    client.send_bytes(commands.auth_response("wire", 19, method, data))


def challenge(command: Any) -> bytes:
    """The data of a challenge, which must be one of `sasl`."""
    received = BaseCommand.FromString(command.SerializeToString())
    assert received.type == BaseCommand.AUTH_CHALLENGE, received
    assert received.auth_challenge.challenge.auth_method_name == "sasl"
    return received.auth_challenge.challenge.auth_data


def authenticate(client: WireClient, initiator: Initiator) -> None:
    connect(client, initiator.step())
    respond(client, initiator.step(challenge(client.receive())))
    assert client.receive().type == BaseCommand.CONNECTED


def refused(cluster: ProxyCluster, client: WireClient, reason: str) -> None:
    """The same words whatever is wrong; the reason is in the log."""
    answers = client.wait_for_end()
    assert [answer.type for answer in answers] == [BaseCommand.ERROR]
    error = answers[0].error
    assert (error.error, error.message) == (ServerError.AuthenticationError, "Failed to authenticate")
    assert error.request_id == NO_REQUEST_ID
    cluster.wait_for_log("authentication denied", client.address, f"reason={reason}")


def ended_by_an_error(client: WireClient) -> None:
    answer = client.receive()
    assert answer.type == BaseCommand.ERROR
    with pytest.raises(Ended):
        client.receive()
