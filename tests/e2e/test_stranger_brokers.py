"""Whoever asks for a host of their own as the broker is sent none of the proxy's credentials, with TLS or without.

The strangers have host names, and certificates that the proxy trusts, as publicly signed ones are; the clusters are as
they come: nothing but `brokers.service_url` says who the brokers are, and clients need no authentication.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest
from local.ports import free_port
from local.tokens import make_token

from proto.pulsar_pb2 import BaseCommand, ServerError

from .conftest import running
from .lab.certificates import Authority
from .lab.cluster import ProxyCluster, Tables
from .lab.dns import NameServer
from .lab.fakes import Eavesdropper, FakeBroker, LookupBroker
from .lab.schema import LOOKUP_CONNECT, LOOKUP_FAILED, LOOKUP_REDIRECT
from .lab.waiting import eventually
from .lab.wire import WireClient

TOPIC = "persistent://public/default/strangers"
BROKER, BELOW = "broker.lab.example", "b0.broker.lab.example"
STRANGER, NEIGHBOUR, SHARING = "stranger.example", "evil.lab.example", "sharing.example"
STRANGERS_ADDRESS = "127.0.0.66"
DENIED = "Target broker cannot be validated."


@dataclass
class Lab:
    """A cluster, its broker, another broker below its name, and a stranger; all at one port, each at its address."""

    cluster: ProxyCluster
    port: int
    token: bytes
    scheme: str
    broker: LookupBroker
    below: Eavesdropper
    stranger: FakeBroker
    heard: Eavesdropper

    @contextmanager
    def no_client_comes_to_the_stranger(self) -> Iterator[None]:
        """Neither a connection nor a byte; and those who asked were answered by then."""
        yield
        assert (self.stranger.visitors, self.heard.heard) == (0, b"")
        assert self.token.decode() not in self.cluster.log_text()


@pytest.fixture(scope="module", params=["pulsar", "pulsar+ssl"])
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """See Lab; without and with TLS to brokers."""
    directory, port, scheme = tmp_path_factory.mktemp("strangers"), free_port(), str(request.param)
    token = make_token(b"the brokers' key" * 2, "proxy")
    (directory / "proxy.jwt").write_text(token)
    authority = Authority(directory, "public")
    answers, below, heard = LookupBroker({}), Eavesdropper(), Eavesdropper()

    def context(host: str) -> ssl.SSLContext | None:
        if scheme == "pulsar":
            return None
        pair = authority.server(host, host)
        made = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        made.load_cert_chain(pair.certificate, pair.key)
        return made

    with ExitStack() as stack:
        stack.enter_context(FakeBroker(answers, port, tls=context(BROKER)))
        stack.enter_context(FakeBroker(below, port, host="127.0.0.2", tls=context(BELOW)))
        stranger = stack.enter_context(FakeBroker(heard, port, host=STRANGERS_ADDRESS, tls=context(STRANGER)))
        names = stack.enter_context(NameServer())
        for name, *addresses in (
            (BROKER, "127.0.0.1"),
            (BELOW, "127.0.0.2"),
            (STRANGER, STRANGERS_ADDRESS),
            (NEIGHBOUR, STRANGERS_ADDRESS),
            (SHARING, STRANGERS_ADDRESS, "127.0.0.1"),
        ):
            names.add(name, "A", *addresses)
        tables: Tables = {
            "cluster": {"forwarders": 1},
            "brokers": {
                "service_url": f"{scheme}://{BROKER}:{port}",
                "allowed_ports": [port],  # as 6650 and 6651 are, on which a stranger may listen, too
                "credentials": {"method": "token", "file": str(directory / "proxy.jwt")},
                **({"tls": {"trust": authority.file}} if scheme == "pulsar+ssl" else {}),
            },
            "limits": {"lookup_timeout_ms": 5000},
        }
        cluster = stack.enter_context(running(ProxyCluster(tables, environment=names.environment(directory))))
        yield Lab(cluster, port, token.encode(), scheme, answers, below, stranger, heard)


def test_a_broker_is_shown_the_credentials(lab: Lab) -> None:
    """The control: below the operator's name, with the operator's certificates, what follows would have been heard."""
    with WireClient(lab.cluster.port) as client:
        assert client.connect(proxy_to_broker_url=f"{BELOW}:{lab.port}").type == BaseCommand.CONNECTED
    eventually(lambda: lab.token in lab.below.heard, what="the broker has the token")


@pytest.mark.parametrize(
    "host", [STRANGER, STRANGER.upper(), f"{STRANGER}.", STRANGERS_ADDRESS, f"[::ffff:{STRANGERS_ADDRESS}]", NEIGHBOUR]
)
def test_a_clients_own_host_gets_nothing(lab: Lab, host: str) -> None:
    with lab.no_client_comes_to_the_stranger(), WireClient(lab.cluster.port) as client:
        answer = client.connect(proxy_to_broker_url=f"{host}:{lab.port}")
        assert (answer.type, answer.error.error, answer.error.message) == (
            BaseCommand.ERROR,
            ServerError.ServiceNotReady,
            DENIED,
        )
        assert client.wait_for_end() == []
        key = "allowed_addresses" if STRANGERS_ADDRESS in host else "allowed_hosts"
        lab.cluster.wait_for_log(client.address, f"brokers.{key} = ")


def test_of_a_name_with_addresses_of_both_only_the_brokers_is_dialled(lab: Lab) -> None:
    """And the certificate must be for the name by which the operator knows it, not for the stranger's."""
    with lab.no_client_comes_to_the_stranger():
        for _ in range(4):
            with WireClient(lab.cluster.port) as client:
                assert client.connect(proxy_to_broker_url=f"{SHARING}:{lab.port}").type == BaseCommand.CONNECTED


@pytest.mark.parametrize("host", [STRANGER, STRANGERS_ADDRESS, NEIGHBOUR])
def test_a_captured_broker_cannot_redirect_clients_to_a_stranger(lab: Lab, host: str) -> None:
    """Neither the proxy by a redirect, nor a client by its answer."""
    url = f"{lab.scheme}://{host}:{lab.port}"
    said = {"authoritative": True, "broker_service_url": url, "broker_service_url_tls": url}
    with lab.no_client_comes_to_the_stranger(), WireClient(lab.cluster.port) as client:
        assert client.connect().type == BaseCommand.CONNECTED
        lab.broker.answer = {"response": LOOKUP_REDIRECT, **said}
        answer = client.lookup(TOPIC).lookup_topic_response
        assert (answer.response, answer.error) == (LOOKUP_FAILED, ServerError.ServiceNotReady)
        lab.broker.answer = {"response": LOOKUP_CONNECT, **said}
        answer = client.lookup(TOPIC).lookup_topic_response
        assert (answer.response, answer.broker_service_url) == (LOOKUP_CONNECT, url)
        with WireClient(lab.cluster.port) as relay:
            assert relay.connect(proxy_to_broker_url=f"{host}:{lab.port}").error.message == DENIED


@pytest.mark.parametrize("lab", ["pulsar"], indirect=True)
def test_rules_that_allow_every_target_are_refused(lab: Lab) -> None:
    """`check` and `serve` say why, and what to set instead; a cluster that runs goes on as it was."""
    cluster = lab.cluster
    wide = {**cluster.tables, "brokers": {**cluster.tables["brokers"], "allowed_hosts": ["*"]}}
    cluster.write_config(wide)
    try:
        for command in ("check", "serve", "reload", "upgrade"):
            answer = cluster.command(command)
            assert answer.returncode != 0
            assert 'brokers.allowed_hosts: with "*"' in answer.stderr
            assert "credentials" in answer.stderr
            assert len(answer.stderr.strip().splitlines()) == 1
    finally:
        cluster.write_config(cluster.tables)
    with lab.no_client_comes_to_the_stranger(), WireClient(cluster.port) as client:
        assert client.connect(proxy_to_broker_url=f"{STRANGER}:{lab.port}").error.message == DENIED
