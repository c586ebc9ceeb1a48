"""Brokers and clusters that the end-to-end tests share, and their logs in the report of a test that fails."""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from local.distribution import pulsar_home as fetched_pulsar_home
from local.machine import UML_KERNEL
from local.ports import free_port
from local.standalone import Standalone

from .lab.cluster import NO_PINGS_S, ProxyCluster, Tables
from .lab.programs import PROGRAMS, NotAvailableError, Program
from .lab.security import grant

HERE = Path(__file__).parent
TIMEOUT_S = 1800
"""Of one test and what it is the first to need, as brokers and client programs to be built, on a busy machine."""

NO_PINGS = {"keepAliveIntervalSeconds": str(NO_PINGS_S)}
"""Of a broker that raw clients are connected to."""

MEASURED = ("test_admin", "test_check_connect", "test_docs_commands", "test_inside", "test_leaving", "test_operations")
"""Files of which the coverage of processes counts: they start each command and each role. Measured processes use almost
twice the CPU time, which floods and soaks need for themselves.
"""
COVERAGE = ("COVERAGE_PROCESS_CONFIG", "COVERAGE_PROCESS_START")

_HAS_AMX = "amx_tile" in Path("/proc/cpuinfo").read_text().split()
NEEDS_USER_MODE_LINUX = [
    pytest.mark.skipif(shutil.which(UML_KERNEL) is None, reason=f"User-Mode Linux ({UML_KERNEL}) is not installed"),
    # Its buffer for a process's registers is too small there: put_fp_registers fails, and init gets SIGSEGV.
    pytest.mark.xfail(_HAS_AMX, reason="User-Mode Linux 6.1 does not start on processors with AMX", strict=False),
]
"""Marks of a test that boots a guest."""

_clusters: list[ProxyCluster] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here is `e2e`, and is given time."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach the end of the logs of the clusters that run to the report of a failure."""
    report = yield
    if report.failed and HERE in item.path.parents:
        for cluster in _clusters:
            report.sections.append((f"log of the cluster at {cluster.service_url}", cluster.log_tail()))
    return report


@pytest.fixture(scope="module", autouse=True)
def measured(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep the coverage of processes to the files of MEASURED."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.stem not in MEASURED:
            for name in COVERAGE:
                patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="session")
def pulsar_home() -> Path:
    """The Pulsar distribution."""
    return fetched_pulsar_home()


@pytest.fixture(scope="session")
def broker(pulsar_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    """A broker without authentication."""
    with Standalone(pulsar_home, tmp_path_factory.mktemp("broker"), conf=NO_PINGS) as standalone:
        yield standalone


@pytest.fixture(scope="session")
def secured_broker(pulsar_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    """A broker with token authentication, authorization, and `proxyRoles=proxy`."""
    with Standalone(pulsar_home, tmp_path_factory.mktemp("secured"), secured=True, conf=NO_PINGS) as standalone:
        grant(standalone)
        yield standalone


@contextlib.contextmanager
def running(cluster: ProxyCluster, *, ready: bool = True) -> Iterator[ProxyCluster]:
    """Start a cluster, lend it, stop it."""
    _clusters.append(cluster)
    try:
        cluster.start(ready=ready)
        yield cluster
    finally:
        cluster.__exit__(None, None, None)
        _clusters.remove(cluster)


def before(broker: Standalone, *more_ports: int, **keys: object) -> dict[str, object]:
    """The table `[brokers]` of a cluster before this broker."""
    return {"service_url": broker.service_url, "allowed_ports": [broker.broker_port, *more_ports], **keys}


@pytest.fixture(scope="session")
def proxy(broker: Standalone) -> Iterator[ProxyCluster]:
    """The cluster that the real clients use: two forwarders, settings as they come."""
    with running(ProxyCluster({"brokers": before(broker)})) as cluster:
        yield cluster


def authentication(broker: Standalone) -> dict[str, dict[str, object]]:
    """The tables that make a cluster take the tokens that this broker takes."""
    credentials = {"method": "token", "file": str(broker.token_file("proxy"))}
    return {
        "brokers": before(broker, credentials=credentials),
        "authentication": {"enabled": True},
        "authentication.token": {"secret_key": str(broker.secret_key)},
    }


@pytest.fixture(scope="session")
def secured_proxy(secured_broker: Standalone) -> Iterator[ProxyCluster]:
    """A cluster that authenticates clients, and itself as `proxy` to the broker."""
    with running(ProxyCluster(authentication(secured_broker))) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def fake_port() -> int:
    """A port that relays may go to, and where nothing listens unless a test puts a FakeBroker there."""
    return free_port()


@pytest.fixture(scope="session")
def edge_proxy(broker: Standalone, fake_port: int) -> Iterator[ProxyCluster]:
    """One forwarder with short time limits, for those who misbehave."""
    tables: Tables = {
        "cluster": {"forwarders": 1},
        "brokers": before(broker, fake_port, connect_timeout_ms=1000, handshake_timeout_ms=1500),
        "limits": {"handshake_timeout_ms": 2500, "lookup_timeout_ms": 3000},
    }
    with running(ProxyCluster(tables)) as cluster:
        yield cluster


@pytest.fixture(scope="session", params=sorted(PROGRAMS))
def client(request: pytest.FixtureRequest, pulsar_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Program:
    """Each client library's program in turn."""
    return program(request.param, pulsar_home, tmp_path_factory)


def program(name: str, pulsar_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Program:
    """A client library's program, or a skip that says what this machine lacks."""
    try:
        return PROGRAMS[name](tmp_path_factory.mktemp(name), pulsar_home)
    except NotAvailableError as reason:
        pytest.skip(f"{name} client: {reason}")


@pytest.fixture(scope="session")
def python_client(pulsar_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Program:
    """The Python client's program."""
    return program("python", pulsar_home, tmp_path_factory)


@pytest.fixture(scope="session")
def java_client(pulsar_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Program:
    """The Java client's program."""
    return program("java", pulsar_home, tmp_path_factory)


@pytest.fixture(scope="session")
def every_client(pulsar_home: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Program]:
    """The programs of all client libraries that this machine can build; the tests of `client` name a missing one."""
    programs = []
    for name, make in PROGRAMS.items():
        with contextlib.suppress(NotAvailableError):
            programs.append(make(tmp_path_factory.mktemp(f"{name}-streams"), pulsar_home))
    return programs


@pytest.fixture
def topic() -> str:
    """A topic that no other test uses."""
    return f"persistent://public/default/e2e-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def url(proxy: ProxyCluster) -> str:
    """Where the real clients connect."""
    return proxy.service_url
