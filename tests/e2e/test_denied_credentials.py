"""Credentials that leaked: the deny list is replaced while clients are connected, and only those that it names end."""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from local.ports import free_port
from local.tokens import make_token

from proto.pulsar_pb2 import BaseCommand

from .conftest import running
from .lab.certificates import Authority, Pair, replace
from .lab.cluster import HOST, Tables
from .lab.fakes import FakeBroker, LookupBroker
from .lab.listeners import ManyListenersCluster
from .lab.schema import LOOKUP_CONNECT
from .lab.wire import WireClient
from .test_relays_survive import TOOK_OVER, kill_forwarder

KEY = b"a shared secret of thirty-two by"
LIFETIME_S = 3600.0
ENDED = "pulsar_proxy_ended_connections_total"


class Client(WireClient):
    """One connection: with a token, or with a certificate through TLS; to the broker, or in lookup mode."""

    def __init__(self, cluster: ManyListenersCluster, token: str = "", tls: ssl.SSLContext | None = None) -> None:
        super().__init__(cluster.ports[0] if tls else cluster.port)
        self.token = token
        if tls is not None:
            self._socket = tls.wrap_socket(self._socket, server_hostname="localhost")

    def begin(self, target: str = "") -> Any:
        """CONNECT; returns the answer."""
        credentials = {"token": self.token} if self.token else {"auth_method_name": "tls"}
        return self.connect(**credentials, **({"proxy_to_broker_url": target} if target else {}))

    def assert_serves(self) -> None:
        """The broker answers, through the relay."""
        assert self.ping().type == BaseCommand.PONG


@pytest.fixture
def denied(tmp_path: Path) -> Path:
    """The deny list; it names nobody yet."""
    file = tmp_path / "denied"
    file.write_text("# nobody\n")
    return file


def trusting(authority: Authority, pair: Pair) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.file)
    context.load_cert_chain(pair.certificate, pair.key)
    return context


@dataclass(frozen=True)
class Clients:
    """Clients of one cluster, each connected until it ends, or the cluster does. ``target``: their broker."""

    stack: ExitStack
    cluster: ManyListenersCluster
    authority: Authority
    target: str

    def add(self, token: str = "", pair: Pair | None = None, target: str | None = None) -> Client:
        """Connect one by a token, or a certificate through TLS. ``target``: empty for lookup mode."""
        context = trusting(self.authority, pair) if pair else None
        one = self.stack.enter_context(Client(self.cluster, token, context))
        assert one.begin(self.target if target is None else target).type == BaseCommand.CONNECTED
        return one


@contextmanager
def clients_of_a_cluster(folder: Path, forwarders: int, **authentication: Any) -> Iterator[Clients]:
    """Run a cluster that takes tokens, by KEY, and certificates, in front of a fake broker."""
    authority, key, port = Authority(folder, "authority"), folder / "key", free_port()
    key.write_bytes(KEY)
    server, target = authority.server("server"), f"{HOST}:{port}"
    tables: Tables = {
        "cluster": {"forwarders": forwarders},
        "authentication": {"enabled": True, **authentication},
        "authentication.token": {"secret_key": str(key)},
        "authentication.tls": {},
        "brokers": {"service_url": f"pulsar://{target}", "allowed_ports": [port]},
    }
    tls = {"certificate": server.certificate, "key": server.key, "client_ca": authority.file}
    broker = LookupBroker({"response": LOOKUP_CONNECT, "broker_service_url": "pulsar://127.0.0.1:1"})
    with ExitStack() as stack:
        stack.enter_context(FakeBroker(broker, port))
        cluster = ManyListenersCluster(tables, {"tls": tls})
        stack.enter_context(running(cluster))
        yield Clients(stack, cluster, authority, target)


def fingerprint(pair: Pair) -> str:
    data = x509.load_pem_x509_certificate(Path(pair.certificate).read_bytes()).public_bytes(Encoding.DER)
    return hashlib.sha256(data).hexdigest()


def test_live_connections_of_leaked_credentials_end(tmp_path: Path, denied: Path) -> None:
    """Spliced, framed and copied relays and lookup mode; an adopted relay, too; nobody else's."""
    with clients_of_a_cluster(tmp_path, forwarders=1, failure_delay_ms=0, deny_file=str(denied)) as clients:
        cluster, authority, client = clients.cluster, clients.authority, clients.add
        leaked_pair, other_pair = authority.client("bob"), authority.client("eve")
        blind = make_token(KEY, "alice", jti="leaked")
        framed = make_token(KEY, "alice", LIFETIME_S, jti="1")
        kept, late = make_token(KEY, "dora", jti="kept"), make_token(KEY, "alice", LIFETIME_S, jti="late")
        leaked = [client(blind), client(framed), client(pair=leaked_pair), client(blind, target="")]
        others = [client(kept), client(late), client(pair=other_pair)]
        for one in [*leaked[:3], *others]:
            one.assert_serves()
        named = (
            f"token-id leaked\ntoken-sha256 {hashlib.sha256(framed.encode()).hexdigest()}\n"
            f"certificate-sha256 {fingerprint(leaked_pair)}\n"
        )

        replace(denied, named.encode())
        for one in leaked:
            one.wait_for_end()
        cluster.wait_for_total(ENDED, len(leaked), cause="denied")
        for one in others:
            one.assert_serves()
        for token, pair in ((blind, None), (framed, None), ("", leaked_pair)):
            with Client(cluster, token, trusting(authority, pair) if pair else None) as again:
                # Whether or not its auth worker has read the file by now: the forwarder has.
                answer = again.begin(clients.target)
                assert answer.type == BaseCommand.ERROR, answer
                assert answer.error.message == "Failed to authenticate"

        kill_forwarder(cluster)
        cluster.wait_for_log(TOOK_OVER)
        for one in others[:2]:
            one.assert_serves()
        replace(denied, f"{named}token-id late\n".encode())
        others[1].wait_for_end()
        others[0].assert_serves()
        assert "eyJ" not in cluster.log_text()
