"""README.md and docs/ by the letter: what a newcomer copies from them works, with a real broker and a real client.

Everything is typed as the pages say, in their order, from an empty folder; `tests/docs/plan.py` names what is left out
and why. Only what REPLACED says is different here.
"""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from local.admin import Admin
from local.ports import free_port
from local.process import OwnedProcess
from local.standalone import BrokerOptions, Standalone

from proto.pulsar_pb2 import BaseCommand, ServerError
from tests.analytics.spark_settings import SHORT_JOBS
from tests.docs.blocks import ROOT, Block, blocks
from tests.docs.plan import EXECUTED_SECTIONS
from tests.docs.reader import Reader

from .lab.cluster import NOBODY
from .lab.pipeline import Tables
from .lab.prometheus import Prometheus
from .lab.waiting import eventually
from .lab.wire import WireClient

START = "docs/getting-started.md"
PROXY = "/opt/pulsar-trio-proxy/bin/pulsar-trio-proxy"
SERVE = f"{PROXY} serve --config /etc/pulsar-trio-proxy/proxy.toml"
RECEIVE = "pulsar-proxy-analytics receive --config receiver.toml &"
SCRAM = "pulsar-trio-proxy scram-credential --user alice >> users.scram"
READY_S = 180.0
GROUP_ID = NOBODY if os.geteuid() == 0 else os.getegid()
"""Of a group that is on every machine and that we may give files to: it stands for those of the services' users."""

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class DocumentedBroker(Standalone):
    """A broker with the lines of the page; its secrets are the reader's own, not made by us."""

    def __init__(self, home: Path, data: Path, *, token_file: Path, options: BrokerOptions) -> None:
        super().__init__(home, data, options=options)
        self._admin_token = token_file

    def configure(self, lines: str) -> None:
        """Take over `key=value` lines, as an operator writes them into broker.conf."""
        settings = (line.partition("=") for line in lines.splitlines() if line.strip() and not line.startswith("#"))
        self._conf.update({key: value for key, _, value in settings})

    def admin(self, timeout_s: float = 30.0) -> Admin:
        return Admin(f"http://127.0.0.1:{self.web_port}", self._admin_token.read_text().strip(), timeout_s)


class DocumentedPrometheus(Prometheus):
    """A Prometheus with the configuration of the page."""

    def __init__(self, directory: Path, config: Path) -> None:
        directory.mkdir()
        super().__init__(directory, target="", write_url="", token_file=directory)
        shutil.copyfile(config, directory / "prometheus.yml")


class World:
    """The machines of the pages on one: their hosts are localhost, their folders are below one directory."""

    def __init__(self, directory: Path, pulsar_home: Path) -> None:
        self.directory = directory
        self._run = Path(tempfile.mkdtemp(prefix="ptp-"))  # of Unix sockets, whose paths are short
        names = ("proxy", "admin", "broker", "broker_web", "broker_web_tls", "receiver", "receiver_admin")
        self.ports = {name: free_port() for name in names}
        path = [pulsar_home / "bin", Path(sys.executable).parent, os.environ["PATH"]]
        self.reader = Reader(
            directory,
            self.replaced(),
            path=":".join(map(str, path)),
            background={SERVE: self._wait_for_the_proxy, RECEIVE: self._wait_for_the_receiver},
            answers={SCRAM: ("correct horse", "correct horse")},
        )
        self.reader.environment.update(SHORT_JOBS | {"PULSAR_GC": "-XX:+UseSerialGC"})
        self.broker = DocumentedBroker(
            pulsar_home,
            directory / "broker",
            token_file=self.reader.home / "pulsar-secrets" / "admin.jwt",
            options=BrokerOptions(broker_port=free_port(), web_port=self.ports["broker_web"]),
        )

    def replaced(self) -> Mapping[str, str]:
        """What of the pages is something else here, and what: hosts, ports, folders, and how often is scraped."""
        ports, below = self.ports, str(self.directory)
        return {
            "pulsar.example.com:6651": f"localhost:{ports['proxy']}",
            "0.0.0.0:6651": f"127.0.0.1:{ports['proxy']}",
            "127.0.0.1:8080": f"127.0.0.1:{ports['admin']}",
            "pulsar.example.com:8080": f"localhost:{ports['admin']}",
            "broker-1.example.com:6651": f"localhost:{ports['broker']}",
            "broker-2.example.com:6651": f"localhost:{ports['broker']}",
            "brokerServicePortTls=6651": f"brokerServicePortTls={ports['broker']}",
            "webServicePortTls=8443": f"webServicePortTls={ports['broker_web_tls']}",
            "http://localhost:8080": f"http://localhost:{ports['broker_web']}",
            "metrics.example.com:9291": f"localhost:{ports['receiver']}",
            "0.0.0.0:9291": f"127.0.0.1:{ports['receiver']}",
            "127.0.0.1:9292": f"127.0.0.1:{ports['receiver_admin']}",
            "pulsar.example.com": "localhost",
            "broker-1.example.com": "localhost",
            "broker-2.example.com": "localhost",
            "metrics.example.com": "localhost",
            "/usr/local/src/pulsar-trio-proxy": str(ROOT),
            "/opt/pulsar-trio-proxy": f"{below}/opt/pulsar-trio-proxy",
            "/run/pulsar-trio-proxy": str(self._run / "run"),
            "/etc/": f"{below}/etc/",
            "/var/lib/metrics": f"{below}/metrics",
            "scrape_interval: 15s": "scrape_interval: 1s",
            "-g pulsar-trio-proxy": f"-g {GROUP_ID}",
            "chgrp pulsar-trio-proxy": f"chgrp {GROUP_ID}",
            "-g prometheus": f"-g {GROUP_ID}",
        }

    def read(self, page: str, *sections: str) -> None:
        """Do what these sections of a page say; none: all of it, in the page's order."""
        found = [block for block in blocks(page) if not sections or block.section in sections]
        assert found, (page, sections)
        for block in found:
            self.reader.read(block)
            if block.language == "properties":
                self._start_the_broker(block)

    def _start_the_broker(self, block: Block) -> None:
        self.broker.configure(self.reader.here(block.text))
        self.broker.start()

    def get(self, port: str, path: str) -> int:
        """The HTTP status of an admin port; 0: no answer."""
        try:
            with _opener.open(f"http://127.0.0.1:{self.ports[port]}{path}", timeout=30.0) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        except OSError:
            return 0

    def _wait_for_the_proxy(self, process: OwnedProcess) -> None:
        self._wait_until_ready("admin", process)

    def _wait_for_the_receiver(self, process: OwnedProcess) -> None:
        self._wait_until_ready("receiver_admin", process)

    def _wait_until_ready(self, port: str, process: OwnedProcess) -> None:
        def is_ready() -> bool:
            assert process.exit_code() is None, process.log_tail()
            return self.get(port, "/readyz") == 200

        eventually(is_ready, what=f"ready\n{process.log_tail()}", within_s=READY_S)

    def close(self) -> None:
        """End all that was started, and remove what is not below the tests' own directory."""
        self.reader.close()
        self.broker.stop()
        shutil.rmtree(self._run, ignore_errors=True)


@pytest.fixture(scope="module")
def started(pulsar_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A world in which a reader has gone through the steps 1 to 7 of the first page."""
    world = World(tmp_path_factory.mktemp("newcomer"), pulsar_home)
    try:
        sections = dict.fromkeys(block.section for block in blocks(START))
        world.read(START, *(section for section in sections if section[0] in "1234567"))
        yield world
    finally:
        world.close()


def test_getting_started(started: World) -> None:
    """From an empty folder to a message that a client has got: what it prints was compared with the page."""
    assert "~/first-client/bin/python first_client.py" in started.reader.done
    topics = started.broker.admin().topics("public/default")
    assert "persistent://public/default/first" in topics, "the message was this broker's"


def assert_group_reads(folder: Path, *secrets: str) -> None:
    """Assert that a user who is only in the folder's group can read these files, and all other users none of them."""
    assert folder.stat().st_gid == GROUP_ID
    found = {name: folder.joinpath(name).stat() for name in secrets}
    assert {name: (state.st_mode & 0o777, state.st_gid) for name, state in found.items()} == dict.fromkeys(
        secrets, (0o640, GROUP_ID)
    )
    if os.geteuid() == 0:  # else the files' owner reads them
        # From inside of the folder, since that of the tests is closed to others.
        reads = ["setpriv", f"--reuid={NOBODY}", f"--regid={GROUP_ID}", "--clear-groups", "cat", *secrets]
        done = subprocess.run(reads, cwd=folder, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()


CONFIGURED = ("ca.crt", "proxy.crt", "proxy.key", "proxy.jwt", "token-public.der", "admin-token", "proxy.toml")


def test_only_the_proxys_user_can_read_its_secrets(started: World) -> None:
    """The unit of systemd runs it as a user of its own, which is in the files' group."""
    program = started.directory / "opt/pulsar-trio-proxy/bin/pulsar-trio-proxy"
    assert program.stat().st_mode & 0o005 == 0o005
    for folder in (program.parent.parent, program.parent):
        assert folder.stat().st_mode & 0o005 == 0o005, folder
    configured = started.directory / "etc/pulsar-trio-proxy"
    assert configured.stat().st_mode & 0o777 == 0o750
    assert sorted(path.name for path in configured.iterdir()) == sorted(CONFIGURED)
    assert_group_reads(configured, *CONFIGURED)
    secrets = started.reader.home / "pulsar-secrets"
    assert secrets.stat().st_mode & 0o777 == 0o700


def test_credentials_for_scram(started: World) -> None:
    """docs/authentication.md: a password that is asked for twice at the terminal makes a line for the file."""
    started.read("docs/authentication.md", "Clients")
    (line,) = (started.reader.folder / "users.scram").read_text().splitlines()
    assert line.startswith("alice")
    assert "correct horse" not in line


def test_analytics(started: World) -> None:
    """The receiver, Prometheus, the tables and the report; alice, who has sent three messages, is in the bill."""
    pages = [(page, section) for page, section in EXECUTED_SECTIONS if page != "docs/authentication.md"]
    (receiver, first_run, report) = pages
    started.read(*receiver)
    (jobs,) = (block for block in blocks(first_run[0]) if block.section == first_run[1] and block.language == "sh")
    receive, _, rest = jobs.text.partition("\n")
    started.reader.read(_part(jobs, receive))
    config = started.directory / "etc/prometheus/prometheus.yml"
    prometheus = DocumentedPrometheus(started.directory / "prometheus", config)
    prometheus.start()
    try:
        # A scrape may take longer than its time on a busy machine, and has no series of the proxy's then.
        alice = 'pulsar_proxy_principal_sessions_total{principal="alice"}'
        eventually(lambda: prometheus.query(alice, round(time.time() * 1000)), what=alice, within_s=READY_S)
        prometheus.wait_until_sent(time.time(), within_s=READY_S)
    finally:
        prometheus.kill()
    started.reader.read(_part(jobs, rest))
    for_prometheus = started.directory / "etc/prometheus"
    assert for_prometheus.joinpath("ca.crt").stat().st_mode & 0o777 == 0o644
    for token in ("admin-token", "receiver-token"):
        state = for_prometheus.joinpath(token).stat()
        assert (state.st_mode & 0o777, state.st_gid) == (0o640, GROUP_ID), token
    tables = Tables(started.directory / "metrics" / "tables")
    assert tables.usage()["alice"]["sessions"] > 0
    started.read(*report)
    assert "alice" in (started.reader.folder / "report.html").read_text()


def _part(block: Block, text: str) -> Block:
    """Some lines of a block: between two of them something else has to happen."""
    fields: dict[str, Any] = {"page": block.page, "line": block.line, "section": block.section}
    return Block(**fields, language=block.language, text=text)


def test_a_token_of_another_key_is_denied(started: World) -> None:
    """The page's other way to keys and tokens makes what brokers take, but not those that know another key."""
    started.read(START, "Without Pulsar's tools")
    validate = 'pulsar tokens validate --public-key "file://$PWD/token-public.der" --token-file "$PWD/alice.jwt"'
    assert "alice" in started.reader.type(validate)
    secrets = started.reader.home / "pulsar-secrets"
    context = ssl.create_default_context(cafile=secrets / "ca.crt")
    answers = {}
    for folder in (secrets, started.reader.folder):
        with WireClient(started.ports["proxy"]) as client:
            client._socket = context.wrap_socket(client._socket, server_hostname="localhost")
            answers[folder] = client.connect(token=(folder / "alice.jwt").read_text().strip())
    accepted, denied = answers.values()
    assert accepted.type == BaseCommand.CONNECTED
    assert denied.error.error == ServerError.AuthenticationError


def test_afterwards(started: World) -> None:
    """A new certificate, a reload, an upgrade, a drain: the cluster has ended then, so this is the last test."""
    configured = started.directory / "etc/pulsar-trio-proxy"
    before = configured.joinpath("proxy.crt").read_bytes()
    started.read(START, "8. Afterwards")
    assert configured.joinpath("proxy.crt").read_bytes() != before
    assert_group_reads(configured, *CONFIGURED)
    assert started.get("admin", "/healthz") == 0
