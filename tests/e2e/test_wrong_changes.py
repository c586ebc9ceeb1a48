"""Wrong changes of what leads to brokers: none takes a running cluster out. The last that a broker accepted stays in
force, under clients with relays and newcomers, until there is a right one.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import pytest
from local.ports import free_port
from local.standalone import Standalone
from local.tokens import make_token

from proto.pulsar_pb2 import BaseCommand

from .conftest import NO_PINGS, running
from .lab.certificates import Authority, replace
from .lab.cluster import ProxyCluster, Tables, merged
from .lab.programs import Program
from .lab.security import NAMESPACE, grant
from .lab.waiting import eventually
from .lab.wire import WireClient

PROVIDERS = "org.apache.pulsar.broker.authentication.AuthenticationProvider"
RELAYS = 30
NEWCOMER_INTERVAL_S = 0.5
NEWCOMERS_MIN = 4
HELD = "pulsar_proxy_broker_files_held"
RELOADED = "pulsar_proxy_config_last_reload_successful"
FILES_NOTE = "changed files of brokers.tls or brokers.credentials are not in force"
CONFIG_NOTE = "the changed configuration is not in force"


class Lab:
    """A broker with TLS, which wants a certificate and a token of the proxy; and the files that the proxy has."""

    def __init__(self, broker: Standalone, tls_port: int, authority: Authority, directory: Path) -> None:
        self.broker = broker
        self.tls_port = tls_port
        self.authority = authority
        self.stranger = Authority(directory, "strange")
        self.trust, self.token = directory / "trust.pem", directory / "proxy.jwt"
        self.certificate, self.key = directory / "proxy.pem", directory / "proxy.key"
        self.write_right_files()

    def write_right_files(self) -> None:
        """What a broker accepts; new each time."""
        replace(self.trust, Path(self.authority.file).read_bytes())
        self.write_pair(self.authority)
        replace(self.token, make_token(self.broker.secret_key.read_bytes(), "proxy").encode())

    def write_pair(self, authority: Authority) -> None:
        pair = authority.client("proxy")
        replace(self.certificate, Path(pair.certificate).read_bytes())
        replace(self.key, Path(pair.key).read_bytes())

    def tables(self) -> Tables:
        return {
            "cluster": {"forwarders": 2},
            "brokers": {
                "service_url": f"pulsar+ssl://localhost:{self.tls_port}",
                "allowed_ports": [self.tls_port],
                "tls": {"trust": str(self.trust), "certificate": str(self.certificate), "key": str(self.key)},
                "credentials": {"method": "token", "file": str(self.token)},
            },
            "authentication": {"enabled": True, "failure_delay_ms": 0},
            "authentication.token": {"secret_key": str(self.broker.secret_key)},
            "reload": {"watch_interval_ms": 200},
        }


@pytest.fixture(scope="module")
def lab(pulsar_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    directory = tmp_path_factory.mktemp("files")
    authority = Authority(directory, "ours")
    server, tls_port = authority.server("broker"), free_port()
    conf = {
        **NO_PINGS,
        "brokerServicePortTls": str(tls_port),
        "tlsCertificateFilePath": server.certificate,
        "tlsKeyFilePath": server.key,
        "tlsTrustCertsFilePath": authority.file,
        "tlsRequireTrustedClientCertOnConnect": "true",
        "authenticationProviders": f"{PROVIDERS}Token",
    }
    with Standalone(pulsar_home, tmp_path_factory.mktemp("broker"), secured=True, conf=conf) as broker:
        grant(broker)
        yield Lab(broker, tls_port, authority, directory)


@pytest.fixture(scope="module")
def cluster(lab: Lab) -> Iterator[ProxyCluster]:
    with running(ProxyCluster(lab.tables())) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def all_is_right_afterwards(cluster: ProxyCluster, lab: Lab) -> Iterator[None]:
    """What one test leaves is no other's."""
    yield
    cluster.write_config(cluster.tables)
    lab.write_right_files()
    assert cluster.command("reload").stdout == "reloaded\n"
    cluster.wait_for_readiness(ready=True)


def open_relay(cluster: ProxyCluster, lab: Lab) -> WireClient:
    client = WireClient(cluster.port)
    answer = client.connect(token=lab.broker.token("alice"), proxy_to_broker_url=f"localhost:{lab.tls_port}")
    assert answer.type == BaseCommand.CONNECTED, answer
    assert client.ping().type == BaseCommand.PONG
    return client


class Newcomers:
    """Two a second: one asks for a topic's broker, one wants a relay. ``refused``: what was not as it should be."""

    def __init__(self, cluster: ProxyCluster, lab: Lab) -> None:
        self._cluster, self._lab = cluster, lab
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.served = 0
        self.refused: list[str] = []

    def _run(self) -> None:
        while not self._over.is_set():
            for come in (self._look_up, self._relay):
                try:
                    come()
                except (AssertionError, OSError, TimeoutError) as error:
                    self.refused.append(repr(error))
                else:
                    self.served += 1
                self._over.wait(NEWCOMER_INTERVAL_S)

    def _look_up(self) -> None:
        with WireClient(self._cluster.port) as client:
            assert client.connect(token=self._lab.broker.token("alice")).type == BaseCommand.CONNECTED
            answer = client.lookup(f"persistent://{NAMESPACE}/new-{uuid.uuid4().hex[:12]}")
            assert answer.lookup_topic_response.proxy_through_service_url, answer

    def _relay(self) -> None:
        open_relay(self._cluster, self._lab).close()

    def wait_for_more(self) -> None:
        """Until more have come, since now."""
        before = self.served + len(self.refused)
        eventually(lambda: self.served + len(self.refused) >= before + NEWCOMERS_MIN, what="newcomers")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@contextmanager
def unharmed_clients(cluster: ProxyCluster, lab: Lab) -> Iterator[Newcomers]:
    """Relays that go on, and newcomers of whom none is refused."""
    with ExitStack() as stack:
        relays = [stack.enter_context(open_relay(cluster, lab)) for _ in range(RELAYS)]
        with Newcomers(cluster, lab) as newcomers:
            newcomers.wait_for_more()
            yield newcomers
            newcomers.wait_for_more()
        for relay in relays:
            assert relay.ping().type == BaseCommand.PONG
        assert newcomers.refused == []


# ---- the configuration file

WRONG_SETTINGS: dict[str, Callable[[Lab], dict[str, Any]]] = {
    "a name that does not exist": lambda _lab: {"service_url": "pulsar+ssl://no-such-host.invalid:6651"},
    "a port where no program listens": lambda _lab: {"service_url": f"pulsar+ssl://localhost:{free_port()}"},
    "a port of another protocol": lambda lab: {"service_url": f"pulsar+ssl://localhost:{lab.broker.broker_port}"},
    "another token": lambda _lab: {"credentials": {"method": "token", "token": make_token(b"x" * 32, "proxy")}},
    "the token of no proxy": lambda lab: {
        "credentials": {"method": "token", "file": str(lab.broker.token_file("alice"))}
    },
    "another authority": lambda lab: {
        "tls": {"trust": lab.stranger.file, "certificate": str(lab.certificate), "key": str(lab.key)}
    },
    "no certificate": lambda lab: {"tls": {"trust": str(lab.trust)}},
}


@pytest.mark.parametrize("wrong", WRONG_SETTINGS.values(), ids=WRONG_SETTINGS)
def test_a_wrong_setting(cluster: ProxyCluster, lab: Lab, wrong: Callable[[Lab], dict[str, Any]]) -> None:
    brokers = {"brokers": wrong(lab)}
    since = len(cluster.log_text())
    with unharmed_clients(cluster, lab) as newcomers:
        cluster.write_config(merged(cluster.tables, brokers))
        line = cluster.wait_for_log("the configuration was not reloaded", since=since)
        assert "no broker accepts the proxy with the changed settings or files (" in line
        assert "reload --force" in line
        newcomers.wait_for_more()
        assert cluster.metrics().total(RELOADED) == 0
        answer = cluster.get("/readyz")
        assert (answer.status, answer.text.startswith("ok\n")) == (200, True)
        assert CONFIG_NOTE in answer.text
        assert CONFIG_NOTE in cluster.command("status").stdout
        newcomers.wait_for_more()
        cluster.write_config(cluster.tables)
        cluster.wait_for_total(RELOADED, 1)
    assert cluster.get("/readyz").text == "ok\n"


def test_a_command_says_why_and_a_reload_by_force_applies_it(cluster: ProxyCluster, lab: Lab) -> None:
    port = free_port()
    wrong = {"brokers": {"service_url": f"pulsar+ssl://localhost:{port}"}, "reload": {"watch_interval_ms": 0}}
    cluster.write_config(merged(cluster.tables, wrong))
    for command in ("reload", "upgrade"):
        answer = cluster.command(command)
        assert answer.returncode == 1
        assert f"localhost:{port} at " in answer.stderr
        assert "Connection refused" in answer.stderr
    assert cluster.status()["service_url"] == cluster.tables["brokers"]["service_url"]
    assert cluster.command("reload", "--force").stdout == "reloaded\n"
    assert cluster.status()["service_url"] == wrong["brokers"]["service_url"]
    cluster.wait_for_readiness(ready=False)
    cluster.write_config(cluster.tables)
    assert cluster.command("reload").stdout == "reloaded\n"
    cluster.wait_for_readiness(ready=True)


def test_a_change_where_nothing_works_is_applied(cluster: ProxyCluster) -> None:
    """What is in force does not work either, as after brokers have moved: the new may be right in a moment."""
    wrong = {"brokers": {"service_url": f"pulsar+ssl://localhost:{free_port()}"}}
    cluster.write_config(merged(cluster.tables, wrong))
    assert cluster.command("reload", "--force").stdout == "reloaded\n"
    cluster.wait_for_readiness(ready=False)
    other = {"brokers": {"service_url": f"pulsar+ssl://localhost:{free_port()}"}}
    cluster.write_config(merged(cluster.tables, other))
    assert cluster.command("reload").stdout == "reloaded\n"
    assert cluster.status()["service_url"] == other["brokers"]["service_url"]
    cluster.write_config(cluster.tables)
    assert cluster.command("reload").stdout == "reloaded\n"
    cluster.wait_for_readiness(ready=True)


# ---- files


def remove_token(lab: Lab) -> None:
    lab.token.unlink()


WRONG_FILES: dict[str, Callable[[Lab], None]] = {
    "another token": lambda lab: replace(lab.token, make_token(b"x" * 32, "proxy").encode()),
    "the token of no proxy": lambda lab: replace(lab.token, lab.broker.token("alice").encode()),
    "an expired token": lambda lab: replace(
        lab.token, make_token(lab.broker.secret_key.read_bytes(), "proxy", -60).encode()
    ),
    "no token": remove_token,
    "another authority": lambda lab: replace(lab.trust, Path(lab.stranger.file).read_bytes()),
    "no authority": lambda lab: replace(lab.trust, b"garbage"),
    "another authority's certificate": lambda lab: lab.write_pair(lab.stranger),
    "a key of another certificate": lambda lab: replace(lab.key, Path(lab.stranger.client("other").key).read_bytes()),
}


NOT_IN_FORCE = "a changed file is not in force"


@pytest.mark.parametrize("wrong", WRONG_FILES.values(), ids=WRONG_FILES)
def test_a_wrong_file(cluster: ProxyCluster, lab: Lab, wrong: Callable[[Lab], None]) -> None:
    since = len(cluster.log_text())
    with unharmed_clients(cluster, lab) as newcomers:
        wrong(lab)
        cluster.wait_for_log(NOT_IN_FORCE, since=since)
        newcomers.wait_for_more()
        assert cluster.metrics().total(HELD) == 1
        answer = cluster.get("/readyz")
        assert (answer.status, answer.text.startswith("ok\n")) == (200, True)
        assert FILES_NOTE in answer.text
        # An unrelated change is not applied with them: new processes would have nothing else.
        refused = cluster.command("reload")
        assert refused.returncode == 1
        why = "cannot be read" if wrong is remove_token else "no broker accepts the proxy with the changed settings or"
        assert why in refused.stderr
        newcomers.wait_for_more()
        lab.write_right_files()
        cluster.wait_for_log("took over a changed file", str(lab.token), since=since)
        cluster.wait_for_total(HELD, 0)
    assert cluster.log_text()[since:].count(NOT_IN_FORCE) == 1
    assert cluster.get("/readyz").text == "ok\n"


def test_a_right_file_is_taken_over_by_every_process(cluster: ProxyCluster, lab: Lab) -> None:
    """A new authority beside the old one, then without it: what is no longer trusted is trusted by no process."""
    since = len(cluster.log_text())
    with unharmed_clients(cluster, lab):
        both = Path(lab.stranger.file).read_bytes() + Path(lab.authority.file).read_bytes()
        replace(lab.trust, both)
        cluster.wait_for_log("took over a changed file", str(lab.trust), since=since)
        since = len(cluster.log_text())
        lab.write_right_files()
        cluster.wait_for_log("took over a changed file", str(lab.trust), since=since)


def test_real_clients_notice_nothing(cluster: ProxyCluster, lab: Lab, python_client: Program) -> None:
    topic = f"persistent://{NAMESPACE}/wrong-{uuid.uuid4().hex[:12]}"
    since = len(cluster.log_text())
    with python_client.start("stream", cluster.service_url, topic, token=lab.broker.token("alice")) as stream:
        stream.wait_for_progress(200)
        replace(lab.token, make_token(b"x" * 32, "proxy").encode())
        cluster.wait_for_log(NOT_IN_FORCE, since=since)
        stream.wait_for_progress(400)
        lab.write_right_files()
        cluster.wait_for_log("took over a changed file", str(lab.token), since=since)
        stream.wait_for_progress(600)
        result = stream.stop().result
        assert (result["ok"], result["missing"]) == (True, 0), result
