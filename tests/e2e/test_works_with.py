"""The matrix: brokers of two releases, with clients' own credentials checked and not, clients and methods.

Brokers have both ports, and the proxy reaches them by TLS. The proxy is no super-user: it needs grants, as clients do.
"""

from __future__ import annotations

import itertools
import os
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from local.broker_jars import PULSAR_5, source_of
from local.distribution import PULSAR, pulsar_home

from proto.pulsar_pb2 import BaseCommand, ServerError

from .conftest import program, running
from .lab.certificates import replace
from .lab.deployment import ALICES, TEAM, TRANSACTIONS, Deployment, deployment
from .lab.programs import Program, Run, java5_program
from .lab.security import NAMESPACE
from .lab.wire import WireClient

VERSIONS = os.environ.get("WORKS_WITH", f"{PULSAR.version} {PULSAR_5.version}").split()
"""Others by hand: `WORKS_WITH=4.2.4`."""

COUNT = 200
CLIENTS = ("python", "java", "go")
REFUSED_WITHIN_S = 5
TOKEN_LIFETIME_S = 20
RENEWING_S = 45
"""More than two lives of a token."""

COORDINATOR = f"persistent://{TRANSACTIONS}/transaction_coordinator_assign-partition-0"

_ids = itertools.count(1)


@pytest.fixture(
    scope="module",
    params=[(version, checked) for version in VERSIONS for checked in (False, True)],
    ids=lambda cell: f"{cell[0]}-{'checked' if cell[1] else 'unchecked'}",
)
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A broker and the cluster before it; one after the other, as each costs half a gigabyte."""
    version, checked = request.param
    with deployment(version, tmp_path_factory.mktemp("lab"), checked=checked) as made, running(made.cluster):
        yield made


@pytest.fixture(scope="module")
def java5(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """Pulsar 5's Java client."""
    return java5_program(tmp_path_factory.mktemp("java5"), pulsar_home(source=source_of(PULSAR_5.version)))


@pytest.fixture(params=CLIENTS)
def any_client(request: pytest.FixtureRequest, pulsar_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Program:
    """Each client that speaks to all brokers."""
    return program(request.param, pulsar_home, tmp_path_factory)


def new_topic(namespace: str = NAMESPACE) -> str:
    return f"persistent://{namespace}/works-{uuid.uuid4().hex[:12]}"


def passes(client: Program, url: str, topic: str, **options: object) -> None:
    """Everything arrives, once and in order."""
    result = client.succeed("produce_consume", url, topic, count=COUNT, **options)
    assert (result["received"], result["duplicates"], result["in_order"]) == (COUNT, 0, True)


def fails(client: Program, url: str, topic: str, **options: object) -> str:
    """No producer can be had; returns what the client says."""
    outcome = client.run("attempt", url, topic, timeout_s=REFUSED_WITHIN_S, **options)
    assert outcome.result["ok"] is False
    return str(outcome.result["error"])


# ---- tokens that end within relays, behind the other tests of a broker


class Renewals:
    """Pulsar 5's client by each of its APIs, with a token that is renewed in its file at half its life. None where
    brokers do not see clients' tokens.
    """

    def __init__(self, lab: Deployment, java5: Program, directory: Path, stack: ExitStack) -> None:
        self._lab, self._file = lab, directory / "token.jwt"
        self._ended = threading.Event()
        self._renew()
        thread = threading.Thread(target=self._keep_renewing, daemon=True)
        thread.start()
        stack.callback(thread.join)
        stack.callback(self._ended.set)
        apis = ("v4", "v5") if lab.version == PULSAR_5.version else ("v4",)
        self.runs: dict[str, Run] = {
            api: stack.enter_context(
                java5.start(
                    "renewing",
                    lab.tls_url,
                    new_topic(),
                    api=api,
                    token_file=self._file,
                    seconds=RENEWING_S,
                    transactions="false",
                    **lab.trust,
                )
            )
            for api in (apis if lab.checked else ())
        }

    def _renew(self) -> None:
        replace(self._file, self._lab.token("alice", TOKEN_LIFETIME_S).encode())

    def _keep_renewing(self) -> None:
        while not self._ended.wait(TOKEN_LIFETIME_S / 2):
            self._renew()


@pytest.fixture(scope="module", autouse=True)
def renewals(lab: Deployment, java5: Program, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Renewals]:
    """They run while the other tests do."""
    with ExitStack() as stack:
        yield Renewals(lab, java5, tmp_path_factory.mktemp("renewing"), stack)


# ---- token


def test_token(lab: Deployment, any_client: Program) -> None:
    """By either listener; and the broker asks for the client's own grant."""
    passes(any_client, lab.cluster.service_url, new_topic(), token=lab.token("alice"))
    passes(any_client, lab.tls_url, new_topic(), token=lab.token("alice"), **lab.trust)
    fails(any_client, lab.cluster.service_url, new_topic(), token=lab.token("bob"))


# ---- certificate


def test_certificate(lab: Deployment, any_client: Program) -> None:
    """Nothing of it can be forwarded, so brokers that check refuse: the client is told at once, not by a timeout."""
    if lab.checked:
        said = fails(any_client, lab.tls_url, new_topic(), **lab.certificate)
        assert ("a certificate cannot" if any_client.name == "java" else "AuthenticationError") in said
    else:
        passes(any_client, lab.tls_url, new_topic(), **lab.certificate)


# ---- OpenID Connect


def test_oidc_with_several_roles(lab: Deployment, any_client: Program) -> None:
    """Of several roles the second one's grant counts where brokers see the token, else the first one's alone."""
    url = lab.cluster.service_url
    passes(any_client, url, new_topic(TEAM), token=lab.oidc_token("team", "nobody"))
    if lab.checked:
        passes(any_client, url, new_topic(TEAM), token=lab.oidc_token("nobody", "team"))
    else:
        fails(any_client, url, new_topic(TEAM), token=lab.oidc_token("nobody", "team"))
    fails(any_client, url, new_topic(ALICES), token=lab.oidc_token("nobody", "team"))


# ---- Pulsar 5's Java client


def features(lab: Deployment, java5: Program, **options: object) -> dict[str, Any]:
    """What its features say."""
    asked = {
        "admin_url": lab.broker.admin_url,
        "admin_token_file": lab.broker.token_file("admin"),
        "roles": "alice,proxy",
        **lab.trust,
        **options,
    }
    return java5.run("features", lab.tls_url, new_topic(), **asked).result


def test_features_of_pulsar_5(lab: Deployment, java5: Program, tmp_path: Path) -> None:
    """Each of them; by certificate where that is possible, else by token."""
    if lab.version != PULSAR_5.version:
        return no_scalable_topics(lab, java5)
    token = {"token_file": lab.broker.token_file("alice")}
    result = features(lab, java5, **(token if lab.checked else lab.certificate))
    assert result["ok"], result
    assert result["failed"] == {}
    assert len(result["passed"]) == 15
    return None


def no_scalable_topics(lab: Deployment, java5: Program) -> None:
    """Brokers before Pulsar 5 do not serve the V5 API, not even for ordinary topics; they say so through the proxy."""
    token = {"token_file": lab.broker.token_file("alice")}
    result = features(lab, java5, transactions="false", only="topic|v5: ordinary topic", **token)
    assert list(result["passed"]) == ["topic"]
    assert "Broker does not support scalable topics" in result["failed"]["v5: ordinary topic"]


# ---- transactions


def test_transactions(lab: Deployment, pulsar_home: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Of Pulsar 4's Java client: one that aborts, one that commits. Those of Pulsar 5's are among its features."""
    with directly(lab, "admin") as client:
        client.lookup(COORDINATOR)  # makes the broker its owner
    java = program("java", pulsar_home, tmp_path_factory)
    result = java.succeed("transactions", lab.tls_url, new_topic(), token=lab.token("alice"), **lab.trust)
    assert (result["early"], result["value"], result["more"]) == (False, "committed", False)


# ---- brokers' own errors


Way = Callable[[Deployment, str], WireClient]


def directly(lab: Deployment, role: str) -> WireClient:
    """At the broker, as itself."""
    return begun(WireClient(lab.broker.broker_port), token=lab.token(role))


def as_a_proxy_would(lab: Deployment, role: str) -> WireClient:
    """At the broker, as the proxy that names the role and shows its token."""
    claim = {"original_principal": role, "original_auth_data": lab.token(role), "original_auth_method": "token"}
    return begun(WireClient(lab.broker.broker_port), token=lab.token("proxy"), **claim)


def relayed(lab: Deployment, role: str) -> WireClient:
    """In a relay."""
    target = f"localhost:{lab.broker_tls_port}"
    return begun(WireClient(lab.cluster.port), token=lab.token(role), proxy_to_broker_url=target)


def in_lookup_mode(lab: Deployment, role: str) -> WireClient:
    """By the proxy's lookup workers."""
    return begun(WireClient(lab.cluster.port), token=lab.token(role))


def begun(client: WireClient, **connect: object) -> WireClient:
    """After the handshake."""
    assert client.connect(**connect).type == BaseCommand.CONNECTED
    return client


def schema_of(lab: Deployment, way: Way, role: str, topic: str) -> tuple[int, str]:
    """What comes when the topic's schema is asked for: the error and its text, or 0."""
    with way(lab, role) as client:
        request_id = next(_ids)
        client.send(BaseCommand.GET_SCHEMA, get_schema={"request_id": request_id, "topic": topic})
        answer = client.receive().get_schema_response
        assert answer.request_id == request_id
        return answer.error_code, answer.error_message


GRANTS = {"none": (NAMESPACE, "bob"), "the client's alone": (ALICES, "alice"), "both": (NAMESPACE, "alice")}
"""A namespace and a role, by whose grants for it there are: brokers ask for the client's and the proxy's."""


def test_get_schema_gives_the_brokers_own_error(lab: Deployment) -> None:
    """Whatever a broker says, clients of the proxy are told. These brokers do not ask for grants (apache/pulsar#26643);
    one error there is: no such topic.
    """
    for grants, (namespace, role) in GRANTS.items():
        there, missing = new_topic(namespace), new_topic(namespace)
        body = {"type": "STRING", "schema": "", "properties": {}}
        lab.broker.admin().request("POST", f"schemas/{there.removeprefix('persistent://')}/schema", body)
        for topic in (there, missing):
            wanted = schema_of(lab, as_a_proxy_would, role, topic)
            said = [schema_of(lab, way, role, topic) for way in (relayed, in_lookup_mode)]
            assert said == [wanted, wanted], grants
            if grants != "the client's alone":
                assert wanted == schema_of(lab, directly, role, topic), grants
            # a broker that asks for grants fails here: then GRANTS has the errors, and docs/kubernetes.md changes
            assert wanted[0] == (0 if topic == there else ServerError.TopicNotFound), grants


def begin_transaction(client: WireClient) -> dict[str, int]:
    """Its id, as the commands have it."""
    client.send(BaseCommand.TC_CLIENT_CONNECT_REQUEST, tc_client_connect_request={"request_id": 1, "tc_id": 0})
    assert client.receive().tc_client_connect_response.message == ""
    client.send(BaseCommand.NEW_TXN, new_txn={"request_id": 2, "tc_id": 0, "txn_ttl_seconds": 60_000})  # it means ms
    answer = client.receive().new_txn_response
    assert (answer.request_id, answer.message) == (2, "")
    return {"txnid_least_bits": answer.txnid_least_bits, "txnid_most_bits": answer.txnid_most_bits}


def added(client: WireClient, transaction: dict[str, int], topic: str) -> list[tuple[int, str]]:
    """What comes when the topic's partition and a subscription are added to the transaction, without numbers."""
    partition = {"request_id": 3, "partitions": topic, **transaction}
    client.send(BaseCommand.ADD_PARTITION_TO_TXN, add_partition_to_txn=partition)
    first = client.receive().add_partition_to_txn_response
    subscription = {"request_id": 4, "subscription": {"topic": topic, "subscription": "s"}, **transaction}
    client.send(BaseCommand.ADD_SUBSCRIPTION_TO_TXN, add_subscription_to_txn=subscription)
    second = client.receive().add_subscription_to_txn_response
    assert (first.request_id, second.request_id) == (3, 4)
    return [(answer.error, re.sub(r"\d+", "N", answer.message)) for answer in (first, second)]


def test_transactions_give_the_brokers_own_errors(lab: Deployment) -> None:
    """These brokers do not ask for grants for the topics (apache/pulsar#26644); one error there is: another's
    transaction.
    """
    with directly(lab, "admin") as client:
        client.lookup(COORDINATOR)  # makes the broker its owner
    for grants, (namespace, role) in GRANTS.items():
        topic = new_topic(namespace)
        lab.broker.admin().create_topic(topic)
        for owner in (role, "team"):
            said = []
            for way in (as_a_proxy_would, relayed, directly):
                with way(lab, owner) as beginner, way(lab, role) as client:
                    said.append(added(client, begin_transaction(beginner), topic))
            wanted, through_the_proxy, direct = said
            assert through_the_proxy == wanted, grants
            if grants != "the client's alone":
                assert through_the_proxy == direct, grants
            if owner == role:
                assert wanted == [(0, ""), (0, "")], grants
            else:
                assert all("is neither the owner" in text for _, text in wanted), wanted


# ---- (at the end) tokens that end


def test_tokens_end_within_relays(lab: Deployment, renewals: Renewals) -> None:
    """Nothing is lost, no client reconnects: brokers that see the tokens ask for new ones, the proxy passes it on. A
    relay whose token has ended would not go on: test_reauthentication_in_relays.
    """
    assert bool(renewals.runs) == lab.checked
    for api, run in renewals.runs.items():
        outcome = run.wait()
        assert outcome.result["ok"], outcome.result
        assert outcome.result["sent"] == outcome.result["received"] > 0
        assert outcome.reconnect_lines == []
        print(lab.version, api, outcome.result)
