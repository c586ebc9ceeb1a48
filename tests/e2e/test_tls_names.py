"""Several certificates on a listener, which its workers read through the supervisor."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from local.ports import free_port

from .conftest import running
from .lab.certificates import Authority, Pair
from .lab.cluster import HOST
from .lab.listeners import ManyListenersCluster
from .lab.waiting import eventually

NAME = "pulsar.example"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "ours")


@pytest.fixture(scope="module")
def cluster(authority: Authority) -> Iterator[ManyListenersCluster]:
    first, other = authority.server("first"), authority.server("other", NAME)
    tls = {
        "certificate": first.certificate,
        "key": first.key,
        "certificates": [{"certificate": other.certificate, "key": other.key}],
        "groups": ["P-384"],
    }
    tables = {"brokers": {"service_url": f"pulsar://{HOST}:{free_port()}"}}
    with running(ManyListenersCluster(tables, {"tls": tls}), ready=False) as cluster:
        assert isinstance(cluster, ManyListenersCluster)
        cluster.wait_for_log("ready for clients")  # at its other listener, too
        yield cluster


def shown(cluster: ManyListenersCluster, authority: Authority, host: str, group: str = "secp384r1") -> int:
    """The serial number of the certificate that a client of this name gets."""
    context = ssl.create_default_context(cafile=authority.file)
    context.set_ecdh_curve(group)
    [port] = cluster.ports
    with (
        socket.create_connection((HOST, port), timeout=30) as plain,
        context.wrap_socket(plain, server_hostname=host) as stream,
    ):
        return x509.load_der_x509_certificate(stream.getpeercert(binary_form=True) or b"").serial_number


def serial_of(file: str) -> int:
    return x509.load_pem_x509_certificate(Path(file).read_bytes()).serial_number


def test_each_name_has_its_certificate_also_a_renewed_one(cluster: ManyListenersCluster, authority: Authority) -> None:
    files = Path(authority.file).parent
    first, other = str(files / "first.pem"), str(files / "other.pem")
    assert shown(cluster, authority, "localhost") == serial_of(first)
    assert shown(cluster, authority, NAME) == serial_of(other)
    renewed: Pair = authority.server("other", NAME)
    eventually(lambda: shown(cluster, authority, NAME) == serial_of(renewed.certificate), what="the renewed one")
    with pytest.raises(ssl.SSLError):
        shown(cluster, authority, NAME, "prime256v1")


def test_a_name_that_is_no_text_leaves_one_line(cluster: ManyListenersCluster, authority: Authority) -> None:
    """Security: no traceback, of which a stranger could fill the log."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    session = ssl.create_default_context(cafile=authority.file).wrap_bio(incoming, outgoing, server_hostname=NAME)
    with pytest.raises(ssl.SSLWantReadError):
        session.do_handshake()
    since = len(cluster.log_text())
    [port] = cluster.ports
    with socket.create_connection((HOST, port), timeout=30) as stream:
        stream.sendall(outgoing.read().replace(NAME.encode(), b"\xff" * len(NAME)))
        assert stream.recv(1)[0] == 21, "an alert"
    cluster.wait_for_log("no TLS with a client", "not ASCII", since=since)
    assert "Traceback" not in cluster.log_text()[since:]
    assert "Exception ignored" not in cluster.log_text()[since:]
