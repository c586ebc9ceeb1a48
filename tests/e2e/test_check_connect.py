"""`check --connect` and `/readyz` before a real broker: what it says to the proxy's own credentials."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local.ports import free_port
from local.standalone import Standalone
from local.tokens import make_token

from proto.pulsar_pb2 import BaseCommand

from .conftest import NO_PINGS, authentication, before, running
from .lab.certificates import OTHER_HOST, Authority
from .lab.cluster import HOST, ProxyCluster, Tables, merged
from .lab.fakes import Eavesdropper, FakeBroker
from .lab.security import grant
from .lab.waiting import eventually
from .lab.wire import WireClient

REFUSED = "every broker that can be reached refuses the proxy's own credentials (brokers.credentials)\n"
ACCEPTED = "pulsar_proxy_broker_credentials_accepted"


def with_token(broker: Standalone, file: Path, **brokers: Any) -> Tables:
    """A cluster before the broker, as the role of the token in the file."""
    credentials = {"method": "token", "file": str(file)}
    return merged(authentication(broker), {"brokers": {**before(broker), "credentials": credentials, **brokers}})


def checked(tables: Tables, *arguments: str) -> tuple[int, list[str], str]:
    """What `check --connect` says of a configuration that no cluster runs with: status, lines, errors."""
    cluster = ProxyCluster(tables)
    done = cluster.command("check", "--connect", *arguments)
    assert "Traceback" not in done.stderr
    lines = done.stdout.splitlines()
    assert not cluster.runtime_dir.exists(), "no cluster is needed, and none is prepared"
    return done.returncode, [line for line in lines if line.startswith(("ok ", "FAILED "))], done.stderr


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "proxy.jwt"


def write_token(broker: Standalone, file: Path, role: str, lifetime_s: float | None = None) -> str:
    token = make_token(broker.secret_key.read_bytes(), role, lifetime_s)
    file.write_text(token)
    return token


def test_a_good_broker_of_two_is_enough_where_any_is_asked_for(secured_broker: Standalone, file: Path) -> None:
    write_token(secured_broker, file, "proxy", 3600)
    url = f"pulsar://127.0.0.1:1,127.0.0.1:{secured_broker.broker_port}"
    tables = with_token(secured_broker, file, service_url=url)
    assert checked(tables)[0] == 1, "--connect wants every broker"
    assert ProxyCluster(tables).command("check", "--any-broker").returncode == 0
    file.write_text(make_token(b"a key that is not this broker's, and long enough", "proxy"))
    refused = ProxyCluster(tables).command("check", "--any-broker")
    assert refused.returncode == 1
    assert "no broker accepts the proxy: " in refused.stderr
    assert "AuthenticationError" in refused.stderr


def test_accepted(secured_broker: Standalone, file: Path) -> None:
    token = write_token(secured_broker, file, "proxy", 3600)
    code, lines, errors = checked(with_token(secured_broker, file))
    port = secured_broker.broker_port
    says = "answers; it accepts the proxy's credentials, and their role is in its proxyRoles"
    assert lines == [f"ok      localhost:{port} at {where(lines[0])}: {says}"]
    assert (code, errors) == (0, "")
    assert token not in str(lines)


def where(line: str) -> str:
    """At which addresses ``localhost`` is here."""
    found = re.search(r" at (\S+(?: and \S+)?): ", line)
    assert found is not None, line
    return found[1]


@pytest.mark.parametrize(
    ("role", "lifetime_s", "key", "says", "warns"),
    [
        ("proxy", None, b"x" * 32, "it does NOT accept the proxy's credentials (AuthenticationError: ", False),
        ("proxy", -60, None, "it does NOT accept the proxy's credentials (AuthenticationError: ", True),
        (
            "alice",
            None,
            None,
            "credentials, but their role is NOT in its proxyRoles (AuthorizationError: Invalid roles.)",
            False,
        ),
    ],
)
def test_refused(  # noqa: PLR0917 -- fixtures and cases
    secured_broker: Standalone,
    file: Path,
    role: str,
    lifetime_s: float | None,
    key: bytes | None,
    says: str,
    warns: bool,
) -> None:
    token = make_token(key or secured_broker.secret_key.read_bytes(), role, lifetime_s)
    file.write_text(token)
    code, [line], errors = checked(with_token(secured_broker, file))
    assert line.startswith("FAILED  ")
    assert says in line
    assert code == 1
    warning, _, last = errors.rpartition("pulsar-trio-proxy: not every broker can be used; see above\n")
    assert last == ""
    assert bool(warning) == warns
    if warns:
        expired = r"the proxy's token \(brokers\.credentials\) has expired \d+ s ago: brokers refuse it"
        assert re.fullmatch(rf"pulsar-trio-proxy: warning: {expired}\n", warning)
    assert token not in line + errors


def test_without_credentials(secured_broker: Standalone) -> None:
    tables = merged(authentication(secured_broker))
    tables["brokers"] = before(secured_broker)
    code, [line], _errors = checked(tables)
    assert code == 1
    assert "it refuses the proxy (AuthenticationError: " in line
    assert line.endswith("), which has no brokers.credentials")


@pytest.mark.parametrize("role", ["proxy", "alice"])
def test_where_clients_have_no_names(secured_broker: Standalone, file: Path, role: str) -> None:
    """A proxy without authentication names no principal; a broker with authorization wants one of every proxy."""
    write_token(secured_broker, file, role)
    brokers = {**before(secured_broker), "credentials": {"method": "token", "file": str(file)}}
    code, [line], _errors = checked({"brokers": brokers})
    assert code == 1
    assert "clients of this proxy do not have (authentication.enabled = false): AuthorizationError: " in line


@pytest.mark.parametrize(("role", "code"), [("proxy", 0), ("alice", 1)])
def test_without_forwarded_credentials(secured_broker: Standalone, file: Path, role: str, code: int) -> None:
    write_token(secured_broker, file, role)
    found, [line], _errors = checked(with_token(secured_broker, file, forward_authorization_credentials=False))
    assert found == code
    says = "but their role is NOT in its proxyRoles (" if code else "and their role is in its proxyRoles"
    assert f"it accepts the proxy's credentials, {says}" in line


def test_check_says_that_a_broker_does_not_authenticate(
    broker: Standalone, secured_broker: Standalone, file: Path
) -> None:
    """What is not shown is not claimed."""
    write_token(secured_broker, file, "proxy")
    tables = with_token(secured_broker, file, **before(broker))
    code, [line], _errors = checked(tables)
    assert code == 0
    assert line.endswith("it takes any client, with or without credentials: nothing is shown of the proxy's")
    code, [line], _errors = checked({"brokers": before(broker)})
    assert (code, line.rpartition("; ")[2]) == (
        0,
        "it takes the proxy without credentials (brokers.credentials is not set)",
    )


def test_every_broker_is_tried(secured_broker: Standalone, file: Path) -> None:
    write_token(secured_broker, file, "proxy")
    down = free_port()
    url = f"pulsar://{HOST}:{secured_broker.broker_port},{HOST}:{down},no-such-host.invalid:6650"
    code, lines, _errors = checked(with_token(secured_broker, file, service_url=url))
    assert code == 1
    by_state = sorted(line.partition(":")[0] for line in lines)
    assert by_state == ["FAILED  127.0.0.1", "FAILED  no-such-host.invalid", "ok      127.0.0.1"]
    assert any("Connection refused" in line for line in lines)
    assert any("not resolved: " in line for line in lines)


@pytest.mark.parametrize("fault", ["authority", "host", "expired", "no TLS"])
def test_tls_that_fails(tmp_path: Path, fault: str) -> None:
    """Before a server that is a broker by its certificate alone: nothing is sent to it."""
    ours, strange = Authority(tmp_path, "ours"), Authority(tmp_path, "strange")
    signs = strange if fault == "authority" else ours
    host = OTHER_HOST if fault == "host" else "localhost"
    pair = signs.server("broker", host, expired=fault == "expired")
    context = ssl_server(pair.certificate, pair.key)
    heard = Eavesdropper()
    with FakeBroker(heard, tls=None if fault == "no TLS" else context) as fake:
        url = f"pulsar+ssl://localhost:{fake.port}"
        code, [line], _errors = checked({"brokers": {"service_url": url, "tls": {"trust": ours.file}}})
    assert code == 1
    says = {
        "authority": "certificate",
        "host": "certificate",
        "expired": "expired",
        "no TLS": "does not speak TLS",
    }
    assert says[fault] in line
    if fault != "no TLS":
        assert heard.heard == b""


def ssl_server(certificate: str, key: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


# ---- a cluster that runs


@pytest.fixture
def refused(secured_broker: Standalone, file: Path) -> Iterator[ProxyCluster]:
    """A cluster whose role is not in `proxyRoles`."""
    write_token(secured_broker, file, "alice")
    with running(ProxyCluster(with_token(secured_broker, file)), ready=False) as cluster:
        yield cluster


def test_an_instance_that_brokers_refuse_is_not_ready(
    refused: ProxyCluster, secured_broker: Standalone, file: Path
) -> None:
    eventually(lambda: refused.get("/readyz").text == REFUSED, what="the refusal shows")
    status = refused.status()
    assert status["not_ready_because"] == [REFUSED.strip()]
    [lookup] = [worker for worker in status["workers"] if worker["role"] == "lookup"]
    [known] = lookup["brokers"]
    assert (known["credentials"], known["reachable"]) == ("refused", True)
    assert "REFUSES the proxy's own credentials: AuthorizationError: Invalid roles." in refused.command("status").stdout
    assert refused.metrics().total(ACCEPTED) == 0
    assert refused.log_text().count("refuses the proxy's own credentials") == 1
    write_token(secured_broker, file, "proxy")
    refused.wait_for_readiness(ready=True)
    assert refused.metrics().total(ACCEPTED) == 1
    refused.wait_for_log("a broker accepts the proxy's own credentials again")


def test_clients_that_brokers_refuse_make_no_instance_unready(
    secured_broker: Standalone, secured_proxy: ProxyCluster
) -> None:
    """Security: a client whose role is a proxy's is refused at every broker, in the proxy's name."""
    for _ in range(10):
        with WireClient(secured_proxy.port) as client:
            assert client.connect(token=secured_broker.token("proxy")).type == BaseCommand.CONNECTED
            answer = client.lookup("persistent://public/default/t")
            assert answer.lookup_topic_response.error
    assert secured_proxy.get("/readyz").text == "ok\n"
    assert secured_proxy.metrics().total(ACCEPTED) == 1


# ---- a broker that wants clients' own credentials, as those of Pulsar 5 do by default

WANTS = "the broker wants the client's own credentials (authenticateOriginalAuthData)"
CANNOT = f"{WANTS}, and a certificate cannot be forwarded: set it to false at the brokers"
SHOULD = f"{WANTS}: set brokers.forward_authorization_credentials = true"
CHECKS = "pulsar_proxy_broker_checks_original_credentials"


@pytest.fixture(scope="module")
def checking_broker(pulsar_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    conf = {**NO_PINGS, "authenticateOriginalAuthData": "true"}
    with Standalone(pulsar_home, tmp_path_factory.mktemp("checking"), secured=True, conf=conf) as standalone:
        grant(standalone)
        yield standalone


def with_methods(broker: Standalone, directory: Path, *methods: str, forwards: bool) -> Tables:
    """A cluster that takes clients by these methods."""
    authority = Authority(directory, "clients")
    server = authority.server("server")
    tables = merged(authentication(broker), {"brokers": {"forward_authorization_credentials": forwards}})
    if "tls" in methods:
        tls = {"certificate": server.certificate, "key": server.key, "client_ca": authority.file}
        tables = merged(tables, {"listener": {"tls": tls}, "authentication": {"tls": {}}})
    if "token" not in methods:
        del tables["authentication.token"]
    return tables


@pytest.mark.parametrize(
    ("forwards", "token", "warns"),
    [(True, "their own credentials, too", True), (False, SHOULD, False)],
    ids=["forwarded", "not forwarded"],
)
def test_findings_for_clients_of_each_method(
    checking_broker: Standalone, tmp_path: Path, forwards: bool, token: str, warns: bool
) -> None:
    tables = with_methods(checking_broker, tmp_path, "token", "tls", forwards=forwards)
    code, [of_proxy, of_tls, of_token], errors = sorted_checks(tables)
    assert of_proxy.endswith("it accepts the proxy's credentials, and their role is in its proxyRoles")
    assert of_tls.startswith("FAILED")
    assert of_tls.endswith(f": clients by tls: {CANNOT}")
    assert of_token.startswith("ok " if forwards else "FAILED")
    assert token in of_token
    assert code == 1
    assert ("warning: credentials of clients by tls cannot be forwarded: " in errors) == warns


def sorted_checks(tables: Tables) -> tuple[int, list[str], str]:
    """As ``checked``, lines by method."""
    code, lines, errors = checked(tables)
    return code, sorted(lines, key=lambda line: line.partition("clients by")[2]), errors


def test_all_is_well_where_every_method_can_be_forwarded(checking_broker: Standalone, tmp_path: Path) -> None:
    code, [of_proxy, of_token], errors = sorted_checks(with_methods(checking_broker, tmp_path, "token", forwards=True))
    assert (code, errors) == (0, "")
    assert "their role is in its proxyRoles" in of_proxy
    assert of_token.startswith("ok ")


def test_a_wrong_role_is_told_from_wrong_credentials(checking_broker: Standalone, file: Path) -> None:
    write_token(checking_broker, file, "alice")
    code, [line], _errors = checked(with_token(checking_broker, file))
    assert code == 1
    assert "it accepts the proxy's credentials, but their role is NOT in its proxyRoles (" in line
    file.write_text(make_token(b"x" * 32, "proxy"))
    code, [line], _errors = checked(with_token(checking_broker, file))
    assert code == 1
    assert "it does NOT accept the proxy's credentials (AuthenticationError: " in line


@pytest.mark.parametrize(
    ("methods", "forwards", "status", "body"),
    [
        (["token", "tls"], True, 200, f"ok\nclients by tls: {CANNOT}\n"),
        (["token"], True, 200, "ok\n"),
        (["tls"], True, 503, f"clients by tls: {CANNOT}\n"),
        (["token"], False, 503, f"clients by token: {SHOULD}\n"),
    ],
)
def test_readyz_before_a_broker_that_wants_clients_credentials(  # noqa: PLR0917 -- fixtures and cases
    checking_broker: Standalone, tmp_path: Path, methods: list[str], forwards: bool, status: int, body: str
) -> None:
    tables = with_methods(checking_broker, tmp_path, *methods, forwards=forwards)
    with running(ProxyCluster(tables), ready=False) as cluster:
        eventually(lambda: cluster.get("/readyz").text == body, what=f"/readyz says {body}")
        assert cluster.get("/readyz").status == status
        metrics = cluster.metrics()
        assert (metrics.total(CHECKS), metrics.total(ACCEPTED)) == (1, 1)
        assert "it checks clients' own credentials (authenticateOriginalAuthData)" in cluster.command("status").stdout
        log = cluster.log_text()
        assert "refuses the proxy's own credentials" not in log
        refused = body.removeprefix("ok\n").strip()
        assert log.count("brokers refuse clients") == bool(refused)
        assert refused in log
