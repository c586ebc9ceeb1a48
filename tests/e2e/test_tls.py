"""TLS towards clients and towards brokers, with certificates of both sides; and what is read where there is none."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from local.ports import free_port
from local.standalone import Standalone

from proto.pulsar_pb2 import BaseCommand, ServerError

from .conftest import running
from .lab.certificates import OTHER_HOST, Authority, Pair, replace
from .lab.cluster import ProxyCluster, Tables
from .lab.fakes import FakeBroker, connected, read_to_end, receive_command
from .lab.listeners import ManyListenersCluster
from .lab.programs import Program
from .lab.security import NAMESPACE, grant
from .lab.waiting import eventually
from .lab.wire import Ended, WireClient
from .lab.witness import Witness

PROVIDERS = "org.apache.pulsar.broker.authentication.AuthenticationProvider"
MEGABYTE = 1_000_000
ENDED = "pulsar_proxy_ended_connections_total"
BROKER_FAILURES = "pulsar_proxy_broker_connection_failures_total"


class TlsCluster(ManyListenersCluster):
    """A cluster with listeners of three kinds: plain, with TLS, and with TLS for those with a certificate."""

    def __init__(self, tables: Tables, server: Pair, client_ca: str) -> None:
        self.server = server
        tls = {"certificate": server.certificate, "key": server.key, "client_ca": client_ca}
        super().__init__(tables, {"tls": tls}, {"tls": {**tls, "require_client_certificate": True}})
        self.tls_port, self.strict_port = self.ports

    def url(self, *, tls: bool) -> str:
        """Where clients connect."""
        return f"pulsar+ssl://localhost:{self.tls_port}" if tls else self.service_url


class TlsClient(WireClient):
    """Raw frames, through TLS."""

    def __init__(self, port: int, context: ssl.SSLContext) -> None:
        super().__init__(port)
        try:
            self._socket = context.wrap_socket(self._socket, server_hostname="localhost")
        except OSError:
            self.close()
            raise

    @property
    def certificate(self) -> bytes:
        """What the proxy showed."""
        assert isinstance(self._socket, ssl.SSLSocket)
        return self._socket.getpeercert(binary_form=True) or b""

    def say_close_notify(self) -> None:
        """End our direction in TLS, and not in TCP. The other side must say nothing meanwhile."""
        assert isinstance(self._socket, ssl.SSLSocket)
        self._socket.settimeout(0)
        with pytest.raises(ssl.SSLWantReadError):  # the other side's own is not there
            self._socket.unwrap()

    def _read(self, deadline: float) -> bytes:
        try:
            return super()._read(deadline)
        except ssl.SSLZeroReturnError:  # where ours has ended, too
            raise Ended("end of stream") from None


# ---- identities by certificate


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """All clients and servers trust it."""
    return Authority(tmp_path_factory.mktemp("certificates"), "ours")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """No client trusts it."""
    return Authority(tmp_path_factory.mktemp("certificates"), "strange")


@pytest.fixture(scope="module")
def broker_tls_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def tls_broker(
    pulsar_home: Path, tmp_path_factory: pytest.TempPathFactory, authority: Authority, broker_tls_port: int
) -> Iterator[Standalone]:
    """A broker with both ports. The one with TLS accepts no client without a certificate; `proxyRoles=proxy`."""
    server = authority.server("broker")
    conf = {
        "brokerServicePortTls": str(broker_tls_port),
        "tlsCertificateFilePath": server.certificate,
        "tlsKeyFilePath": server.key,
        "tlsTrustCertsFilePath": authority.file,
        "tlsRequireTrustedClientCertOnConnect": "true",
        "authenticationProviders": f"{PROVIDERS}Token,{PROVIDERS}Tls",
    }
    with Standalone(pulsar_home, tmp_path_factory.mktemp("tls-broker"), secured=True, conf=conf) as standalone:
        grant(standalone)
        yield standalone


@pytest.fixture(scope="module")
def bad_ports() -> dict[str, int]:
    """Where the brokers are that the proxy should not accept."""
    return {what: free_port() for what in ("wrong authority", "expired", "wrong host", "no TLS", "wants another")}


@pytest.fixture(scope="module")
def clusters(
    tls_broker: Standalone, authority: Authority, broker_tls_port: int, bad_ports: dict[str, int]
) -> Iterator[dict[bool, TlsCluster]]:
    """One before the broker's plain port, with a token; one before its TLS port, with a certificate."""
    proxy = authority.client("proxy")
    authentication = {
        "cluster": {"forwarders": 1},
        "authentication": {"enabled": True, "failure_delay_ms": 0},
        "authentication.tls": {},
        "authentication.token": {"secret_key": str(tls_broker.secret_key)},
    }
    brokers: dict[bool, dict[str, Any]] = {
        False: {
            "service_url": tls_broker.service_url,
            "allowed_ports": [tls_broker.broker_port],
            "credentials": {"method": "token", "file": str(tls_broker.token_file("proxy"))},
        },
        True: {
            "service_url": f"pulsar+ssl://localhost:{broker_tls_port}",
            "allowed_ports": [broker_tls_port, *bad_ports.values()],
            "tls": {"trust": authority.file, "certificate": proxy.certificate, "key": proxy.key},
            "credentials": {"method": "tls"},
        },
    }
    with ExitStack() as stack:
        yield {
            tls: stack.enter_context(
                running(
                    TlsCluster({**authentication, "brokers": table}, authority.server(f"proxy-{tls}"), authority.file)
                )
            )
            for tls, table in brokers.items()
        }  # type: ignore[misc]


@pytest.fixture
def cluster(clusters: dict[bool, TlsCluster]) -> TlsCluster:
    """The one that speaks TLS on both sides."""
    return clusters[True]


@pytest.fixture
def granted() -> str:
    """A topic that alice may use."""
    return f"persistent://{NAMESPACE}/tls-{uuid.uuid4().hex[:12]}"


def trusting(authority: Authority, pair: Pair | None = None) -> ssl.SSLContext:
    """A client's context."""
    context = ssl.create_default_context(cafile=authority.file)
    if pair is not None:
        context.load_cert_chain(pair.certificate, pair.key)
    return context


def lookup_answer(client: WireClient, topic: str) -> Any:
    return client.lookup(topic).lookup_topic_response


# ---- real clients


@pytest.mark.conforms("pip-1.21", "pip-1.24", "pip-1.25", "pip-1.26")
@pytest.mark.parametrize("to_broker", [False, True], ids=["plain broker", "TLS broker"])
@pytest.mark.parametrize("to_client", [False, True], ids=["plain client", "TLS client"])
def test_real_clients(
    every_client: list[Program],
    clusters: dict[bool, TlsCluster],
    tls_broker: Standalone,
    authority: Authority,
    *,
    granted: str,
    to_client: bool,
    to_broker: bool,
) -> None:
    """All at the same time: with and without TLS, a megabyte in each message, on either side."""
    url = clusters[to_broker].url(tls=to_client)
    options: dict[str, object] = {"token": tls_broker.token("alice"), "count": 10, "size": MEGABYTE}
    if to_client:
        options["trust"] = authority.file
    with ExitStack() as stack:
        runs = [
            stack.enter_context(program.start("produce_consume", url, f"{granted}-{program.name}", **options))
            for program in every_client
        ]
        for run in runs:
            result = run.wait().result
            assert result["ok"], f"{result}\n{run.tail()}"
            assert (result["received"], result["in_order"]) == (10, True)


@pytest.mark.conforms("pip-1.22")
def test_a_certificate_is_an_identity(
    python_client: Program, java_client: Program, cluster: TlsCluster, authority: Authority, granted: str
) -> None:
    """alice's common name has a grant at the broker, bob's has none; neither has a token."""
    url = f"pulsar+ssl://localhost:{cluster.strict_port}"
    with ExitStack() as stack:
        runs = {}
        for program in (java_client, python_client):
            for name in ("alice", "bob"):
                pair = authority.client(f"{name}")
                options = {"trust": authority.file, "certificate": pair.certificate, "key": pair.key, "timeout_s": 10}
                topic = f"{granted}-{program.name}"
                runs[program.name, name] = stack.enter_context(program.start("attempt", url, topic, **options))
        results = {who: run.wait().result for who, run in runs.items()}
    assert [results[library, "alice"]["ok"] for library in ("java", "python")] == [True, True], results
    for library, words in (("java", "not authorized"), ("python", "AuthorizationError")):
        refusal = results[library, "bob"]
        assert refusal["ok"] is False
        assert words in f"{refusal['error_type']} {refusal['error']}"


def test_a_spiffe_id_is_an_identity(
    python_client: Program, tls_broker: Standalone, authority: Authority, granted: str
) -> None:
    """No certificate has a common name. By the rule, one is alice, who has a grant, one bob, one of another domain."""
    tables: Tables = {
        "cluster": {"forwarders": 1},
        "authentication": {"enabled": True, "failure_delay_ms": 0},
        "authentication.tls": {
            "identity_source": "SAN:URI",
            "principal_mapping_rules": [r"RULE:spiffe:\/\/example\.test\/ns\/payments\/sa\/([^\/]+)/$1/"],
        },
        "brokers": {
            "service_url": tls_broker.service_url,
            "allowed_ports": [tls_broker.broker_port],
            "credentials": {"method": "token", "file": str(tls_broker.token_file("proxy"))},
        },
    }
    ids = {
        "alice": "spiffe://example.test/ns/payments/sa/alice",
        "bob": "spiffe://example.test/ns/payments/sa/bob",
        "stranger": "spiffe://elsewhere.test/ns/payments/sa/alice",
    }
    results = {}
    with running(TlsCluster(tables, authority.server("spiffe"), authority.file)) as cluster:
        assert isinstance(cluster, TlsCluster)
        url = f"pulsar+ssl://localhost:{cluster.strict_port}"
        for name, spiffe_id in ids.items():
            pair = authority.workload(f"workload-{name}", spiffe_id)
            options = {"trust": authority.file, "certificate": pair.certificate, "key": pair.key, "timeout_s": 10}
            with python_client.start("attempt", url, granted, **options) as run:
                results[name] = run.wait().result
        refused = cluster.metrics().total("pulsar_authentication_failures_total", reason="no_mapping_rule")
    assert results["alice"]["ok"], results
    assert "AuthorizationError" in f"{results['bob']['error_type']} {results['bob']['error']}"
    assert (results["stranger"]["ok"], refused > 0) == (False, True), results


# ---- certificates of clients


@pytest.mark.conforms("pip-1.28")
def test_the_role_behind_the_proxy_is_the_clients(
    cluster: TlsCluster, authority: Authority, broker_tls_port: int, granted: str
) -> None:
    """And not the proxy's own, which may do everything: neither for lookups nor in a relay."""
    for name, answer in (("alice", BaseCommand.PRODUCER_SUCCESS), ("bob", BaseCommand.ERROR)):
        context = trusting(authority, authority.client(f"{name}"))
        with TlsClient(cluster.tls_port, context) as client:
            assert client.connect(auth_method_name="tls").type == BaseCommand.CONNECTED
            assert bool(lookup_answer(client, granted).error) is (name == "bob")
        with TlsClient(cluster.tls_port, context) as client:
            target = f"localhost:{broker_tls_port}"
            assert client.connect(auth_method_name="tls", proxy_to_broker_url=target).type == BaseCommand.CONNECTED
            assert client.producer(granted).type == answer


@pytest.mark.parametrize("to_broker", [False, True], ids=["plain broker", "TLS broker"])
def test_the_other_port_of_a_broker(
    clusters: dict[bool, TlsCluster],
    tls_broker: Standalone,
    authority: Authority,
    broker_tls_port: int,
    granted: str,
    *,
    to_broker: bool,
) -> None:
    """A client of Pulsar 5 has it from a broker, and chooses by TLS on its own side. A lookup's answer says both."""
    port, token = clusters[to_broker].tls_port, tls_broker.token("alice")
    with TlsClient(port, trusting(authority)) as client:
        assert client.connect(token=token).type == BaseCommand.CONNECTED
        assert not lookup_answer(client, granted).error
    for target_port in (tls_broker.broker_port, broker_tls_port):
        with TlsClient(port, trusting(authority)) as client:
            answer = client.connect(token=token, proxy_to_broker_url=f"localhost:{target_port}")
            assert answer.type == BaseCommand.CONNECTED
            assert client.producer(granted).type == BaseCommand.PRODUCER_SUCCESS


def test_an_optional_certificate(
    cluster: TlsCluster, authority: Authority, tls_broker: Standalone, granted: str
) -> None:
    """Without one a token will do; the method `tls` will not."""
    with TlsClient(cluster.tls_port, trusting(authority)) as client:
        assert client.connect(token=tls_broker.token("alice")).type == BaseCommand.CONNECTED
        assert lookup_answer(client, granted).proxy_through_service_url
    for port, connect in ((cluster.tls_port, tls_client(authority)), (cluster.port, WireClient)):
        witness = Witness(cluster)
        with connect(port) as client:
            answer = client.connect(auth_method_name="tls", auth_data=b"alice")
            assert (answer.error.error, answer.error.message) == (
                ServerError.AuthenticationError,
                "Failed to authenticate",
            )
            witness.logged("authentication denied", client.address, "no client certificate")


def tls_client(authority: Authority, pair: Pair | None = None) -> Any:
    """What takes a port, as WireClient does."""
    return lambda port: TlsClient(port, trusting(authority, pair))


UNWANTED = {
    "none": "peer did not return a certificate",
    "wrong authority": "the peer's certificate is not accepted: unable to get local issuer certificate",
    "expired": "the peer's certificate is not accepted: certificate has expired",
}


@pytest.mark.parametrize("what", UNWANTED)
def test_an_unwanted_certificate(cluster: TlsCluster, authority: Authority, stranger: Authority, what: str) -> None:
    """The client learns why by TLS's own alert, the operator by the log."""
    pair = {
        "none": lambda: None,
        "wrong authority": lambda: stranger.client("alice"),
        "expired": lambda: authority.client("alice-of-old", expired=True),
    }[what]()
    alert = {"none": "CERTIFICATE_REQUIRED", "wrong authority": "UNKNOWN_CA", "expired": "CERTIFICATE_EXPIRED"}[what]
    witness = Witness(cluster)
    with TlsClient(cluster.strict_port, trusting(authority, pair)) as client:
        with pytest.raises(ssl.SSLError, match=alert):  # with TLS 1.3 a client knows only at its first read
            client.connect(auth_method_name="tls")
        witness.logged("no TLS with a client", client.address, UNWANTED[what])
    witness.counted(ENDED, cause="tls_failed")


@pytest.mark.conforms("pip-1.23")
def test_a_plain_client_at_the_port_for_tls(cluster: TlsCluster) -> None:
    witness = Witness(cluster)
    with WireClient(cluster.tls_port) as client:
        client.send_connect()
        client.read_to_end()
        witness.logged("no TLS with a client", client.address, "the peer does not speak TLS")


def test_a_tls_client_at_the_plain_port(cluster: TlsCluster, authority: Authority) -> None:
    witness = Witness(cluster)
    with pytest.raises(ssl.SSLError):
        TlsClient(cluster.port, trusting(authority))
    witness.logged("a client's connection failed", "TLS")


# ---- certificates of servers


def test_a_client_that_does_not_accept_the_proxy(
    python_client: Program, cluster: TlsCluster, stranger: Authority, tls_broker: Standalone, granted: str
) -> None:
    witness = Witness(cluster)
    options = {"token": tls_broker.token("alice"), "trust": stranger.file, "timeout_s": 3}
    outcome = python_client.run("attempt", cluster.url(tls=True), granted, **options)
    assert outcome.result["ok"] is False
    assert "certificate verify failed" in outcome.log
    witness.logged("no TLS with a client", "unknown ca")


class TlsFake:
    """A broker's side of TLS with a bad certificate, or none; it never gets as far as Pulsar."""

    def __init__(self, pair: Pair | None, client_ca: str = "") -> None:
        self._context: ssl.SSLContext | None = None
        if pair is not None:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._context.load_cert_chain(pair.certificate, pair.key)
            if client_ca:
                self._context.load_verify_locations(client_ca)
                self._context.verify_mode = ssl.CERT_REQUIRED

    def __call__(self, connection: socket.socket) -> None:
        """Serve one connection."""
        if self._context is None:
            connection.sendall(b"\x00\x00\x00\x10\x00\x00\x00\x0c\x08\x0e no TLS ")
            connection.recv(1000)
            return
        with self._context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False) as tls:
            try:
                tls.do_handshake()
                tls.recv(1000)
            except ssl.SSLError:
                tls.shutdown(socket.SHUT_WR)  # so that the alert is read; what comes from now on is not TLS
                while tls.recv(1000):
                    pass


BAD_BROKERS = {
    "wrong authority": "the peer's certificate is not accepted: unable to get local issuer certificate",
    "expired": "the peer's certificate is not accepted: certificate has expired",
    "wrong host": "the peer's certificate is not accepted: Hostname mismatch",
    "no TLS": "the peer does not speak TLS",
    "wants another": "unknown ca",
}


@pytest.mark.parametrize("what", BAD_BROKERS)
def test_a_broker_that_the_proxy_does_not_accept(
    cluster: TlsCluster,
    authority: Authority,
    stranger: Authority,
    tls_broker: Standalone,
    bad_ports: dict[str, int],
    *,
    what: str,
) -> None:
    """The client reads that there is no connection, and that is not its fault; the log says why."""
    fake = {
        "wrong authority": lambda: TlsFake(stranger.server("broker")),
        "expired": lambda: TlsFake(authority.server("old-broker", expired=True)),
        "wrong host": lambda: TlsFake(authority.server("other-broker", OTHER_HOST)),
        "no TLS": lambda: TlsFake(None),
        "wants another": lambda: TlsFake(authority.server("strict-broker"), stranger.file),
    }[what]()
    witness = Witness(cluster)
    with FakeBroker(fake, bad_ports[what]), TlsClient(cluster.tls_port, trusting(authority)) as client:
        target = f"localhost:{bad_ports[what]}"
        answer = client.connect(token=tls_broker.token("alice"), proxy_to_broker_url=target)
        assert (answer.error.error, answer.error.message) == (
            ServerError.ServiceNotReady,
            "The proxy cannot connect to the broker",
        )
        witness.logged("a client's connection failed", client.address, target, BAD_BROKERS[what])
    witness.counted(BROKER_FAILURES, reason="handshake" if what == "wants another" else "tls")


def test_a_proxy_whose_certificate_the_brokers_do_not_know_is_not_ready(
    tls_broker: Standalone, authority: Authority, stranger: Authority, broker_tls_port: int
) -> None:
    """`/readyz` and the log say so before any client comes."""
    wrong = stranger.client("proxy")
    tables = {
        "cluster": {"forwarders": 1},
        "brokers": {
            "service_url": f"pulsar+ssl://localhost:{broker_tls_port}",
            "tls": {"trust": authority.file, "certificate": wrong.certificate, "key": wrong.key},
        },
    }
    with running(ProxyCluster(tables), ready=False) as cluster:
        cluster.wait_for_log("a broker is not reachable", f"localhost:{broker_tls_port}")
        assert cluster.get("/readyz").status == 503


# ---- changes


def test_a_certificate_replaced_on_disk_is_for_the_next_client(
    cluster: TlsCluster, authority: Authority, tls_broker: Standalone, granted: str
) -> None:
    """Without any command, and without harm to who is there."""
    with TlsClient(cluster.tls_port, trusting(authority)) as client:
        client.connect(token=tls_broker.token("alice"))
        before = client.certificate
        new = authority.server(Path(cluster.server.certificate).stem)
        assert new == cluster.server

        def shown() -> bytes:
            with TlsClient(cluster.tls_port, trusting(authority)) as another:
                return another.certificate

        eventually(lambda: shown() != before, what="the new certificate is shown")
        assert lookup_answer(client, granted).proxy_through_service_url
    assert cluster.wait_for_log("took over a changed file", cluster.server.certificate)


def test_the_proxys_own_certificate_is_replaced_under_load(
    every_client: list[Program],
    cluster: TlsCluster,
    authority: Authority,
    stranger: Authority,
    *,
    tls_broker: Standalone,
    broker_tls_port: int,
    bad_ports: dict[str, int],
    granted: str,
) -> None:
    """One that no broker accepts is for no connection; one that a broker accepts is for all from then on. No relay is
    cut, and real clients lose nothing.
    """
    shown: list[int] = []
    port, files = bad_ports["wants another"], cluster.tables["brokers"]["tls"]
    token = {"token": tls_broker.token("alice")}

    def shows(connection: ssl.SSLSocket) -> None:
        shown.append(serial_number(connection.getpeercert(binary_form=True) or b""))
        receive_command(connection)
        connection.sendall(connected())
        read_to_end(connection)

    def shown_now() -> int:
        with TlsClient(cluster.tls_port, trusting(authority)) as client:
            answer = client.connect(**token, proxy_to_broker_url=f"localhost:{port}")
            assert answer.type == BaseCommand.CONNECTED
        return shown[-1]

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    fake = authority.server("fake-broker")
    context.load_cert_chain(fake.certificate, fake.key)
    context.load_verify_locations(authority.file)
    context.verify_mode = ssl.CERT_REQUIRED
    with ExitStack() as stack:
        stack.enter_context(FakeBroker(shows, port, tls=context))
        bystander = stack.enter_context(TlsClient(cluster.tls_port, trusting(authority)))
        answer = bystander.connect(**token, proxy_to_broker_url=f"localhost:{broker_tls_port}")
        assert answer.type == BaseCommand.CONNECTED
        start = partial(Program.start, url=cluster.url(tls=True), trust=authority.file, **token)
        streams = [
            stack.enter_context(start(program, "stream", topic=f"{granted}-{program.name}")) for program in every_client
        ]
        for stream in streams:
            stream.wait_for_progress(200)
        reconnects = [stream.reconnects() for stream in streams]  # a client may log its settings, which name them
        since = len(cluster.log_text())
        old = shown_now()
        wrong = stranger.client("another-proxy")
        for source, file in ((wrong.key, files["key"]), (wrong.certificate, files["certificate"])):
            replace(Path(file), Path(source).read_bytes())
        cluster.wait_for_log("a changed file is not in force", "brokers", files["certificate"], since=since)
        assert shown_now() == old
        renewed = authority.client("proxy")
        assert (renewed.certificate, renewed.key) == (files["certificate"], files["key"])
        cluster.wait_for_log("took over a changed file", "brokers", renewed.certificate, since=since)
        new = serial_number(ssl.PEM_cert_to_DER_cert(first_certificate(renewed.certificate)))
        assert (shown_now(), new != old) == (new, True)
        with start(every_client[0], "produce_consume", topic=f"{granted}-new", count=100) as run:
            assert run.wait().result["received"] == 100, "the broker accepts the new one"
        for stream in streams:
            stream.wait_for_progress(200)
        assert bystander.ping().type == BaseCommand.PONG
        assert [stream.reconnects() for stream in streams] == reconnects
        for stream in streams:
            result = stream.stop().result
            assert (result["ok"], result["missing"], result["duplicates"]) == (True, 0, 0), result


def first_certificate(file: str) -> str:
    """Of a PEM file."""
    return Path(file).read_text().partition(ssl.PEM_FOOTER)[0] + ssl.PEM_FOOTER + "\n"


def serial_number(certificate: bytes) -> int:
    """Of a certificate in DER form."""
    return x509.load_der_x509_certificate(certificate).serial_number


def test_a_reload_with_tls(
    cluster: TlsCluster,
    authority: Authority,
    stranger: Authority,
    tls_broker: Standalone,
    bad_ports: dict[str, int],
) -> None:
    """Whom the proxy accepts is another after a reload; what cannot be read changes nothing."""
    port = bad_ports["wrong host"]
    brokers = cluster.tables["brokers"]
    lax = {"brokers": {**brokers, "tls": {**brokers["tls"], "verify_hostname": False}}}
    fake = TlsFake(authority.server("lax-broker", OTHER_HOST))
    with TlsClient(cluster.tls_port, trusting(authority)) as bystander, FakeBroker(fake, port):
        assert bystander.connect(token=tls_broker.token("alice")).type == BaseCommand.CONNECTED
        since = len(cluster.log_text())
        cluster.write_config({**cluster.tables, **lax})
        assert cluster.command("reload").returncode == 0
        with TlsClient(cluster.tls_port, trusting(authority)) as client:
            client.send_connect(token=tls_broker.token("alice"), proxy_to_broker_url=f"localhost:{port}")
            line = cluster.wait_for_log("a client's connection failed", client.address, since=since)
            assert "Hostname" not in line
        wrong = {"brokers": {**brokers, "tls": {**brokers["tls"], "trust": brokers["tls"]["key"]}}}
        cluster.write_config({**cluster.tables, **wrong})
        answer = cluster.command("reload")
        assert answer.returncode != 0
        assert "brokers.tls" in answer.stderr
        assert brokers["tls"]["key"] in answer.stderr
        cluster.write_config(cluster.tables)
        assert cluster.command("reload").returncode == 0
        assert bystander.ping().type == BaseCommand.PONG


def test_nothing_is_replaced_by_what_could_not_start(cluster: TlsCluster) -> None:
    """`check` looks into the files, so that an upgrade, or a reload that needs new processes, is refused in time."""
    brokers = cluster.tables["brokers"]
    wrong = {"brokers": {**brokers, "tls": {**brokers["tls"], "trust": brokers["tls"]["key"]}}}
    log = {"log": {"level": "debug"}}
    pids = cluster.worker_pids()
    try:
        cluster.write_config({**cluster.tables, **wrong, **log})
        for command in ("check", "upgrade", "reload"):
            answer = cluster.command(command)
            assert answer.returncode != 0, command
            assert brokers["tls"]["key"] in answer.stderr, command
        assert cluster.worker_pids() == pids
    finally:
        cluster.write_config(cluster.tables)
    assert cluster.command("check").returncode == 0


# ---- forwarders come and go


def relay(client: WireClient, broker: Standalone) -> WireClient:
    """A relay of alice's to the plain broker."""
    answer = client.connect(token=broker.token("alice"), proxy_to_broker_url=f"localhost:{broker.broker_port}")
    assert answer.type == BaseCommand.CONNECTED
    assert client.ping().type == BaseCommand.PONG
    return client


def has_ended(client: WireClient) -> bool:
    """Whether the connection ends."""
    try:
        client.wait_for_end()
    except TimeoutError:
        return False
    return True


def test_a_killed_forwarder_takes_its_tls_relays_with_it(
    python_client: Program, clusters: dict[bool, TlsCluster], tls_broker: Standalone, authority: Authority, granted: str
) -> None:
    """TLS's keys are in the memory of the process. Plain relays go on; real clients come again, and lose nothing."""
    cluster = clusters[False]
    options = {"token": tls_broker.token("alice"), "trust": authority.file}
    with (
        WireClient(cluster.port) as plain,
        TlsClient(cluster.tls_port, trusting(authority)) as tls,
        python_client.start("stream", cluster.url(tls=True), granted, **options) as stream,
    ):
        relay(plain, tls_broker)
        relay(tls, tls_broker)
        stream.wait_for_progress(200)
        os.kill(cluster.worker_pids()["forwarder-0"], signal.SIGKILL)
        assert has_ended(tls)
        stream.wait_for_progress(500)
        assert plain.ping().type == BaseCommand.PONG
        result = stream.stop().result
        assert (result["ok"], result["missing"]) == (True, 0), result


def test_an_upgrade_takes_tls_relays_with_it_when_the_drain_is_over(
    python_client: Program, clusters: dict[bool, TlsCluster], tls_broker: Standalone, authority: Authority, granted: str
) -> None:
    """They are served until then; who comes meanwhile is the successor's."""
    cluster = clusters[False]
    cluster.write_config({**cluster.tables, "limits": {**cluster.tables["limits"], "drain_timeout_ms": 1500}})
    assert cluster.command("reload").returncode == 0
    options = {"token": tls_broker.token("alice"), "trust": authority.file}
    with (
        WireClient(cluster.port) as plain,
        TlsClient(cluster.tls_port, trusting(authority)) as tls,
        python_client.start("stream", cluster.url(tls=True), granted, **options) as stream,
    ):
        relay(plain, tls_broker)
        relay(tls, tls_broker)
        stream.wait_for_progress(200)
        answer = cluster.command("upgrade")
        assert answer.returncode == 0, answer.stderr
        assert has_ended(tls)
        stream.wait_for_progress(500)
        assert plain.ping().type == BaseCommand.PONG
        result = stream.stop().result
        assert (result["ok"], result["missing"]) == (True, 0), result
