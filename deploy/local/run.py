"""`make run`: a broker and a proxy cluster in front of it, on this machine, until Ctrl-C.

With `BROKER=pulsar://host:6650` it uses that cluster instead of a broker of its own, and needs no Java. With
`BROKER_VERSION=5.0.0-M1` its own broker is of that release.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from local import machine
from local.broker_jars import source_of
from local.cluster import Cluster, ClusterConfig, ClusterError
from local.console import MakeError, print_status
from local.distribution import PULSAR, pulsar_home
from local.environment import Environment
from local.first_bill import PRINCIPALS, FirstBill
from local.ports import free_port
from local.standalone import BrokerOptions, Standalone, StandaloneError

_POLL_S = 0.5
_TMPDIR_MAX = 40  # the paths of Unix sockets hold 107 bytes, and some systems' TMPDIR is long
_EXAMPLE = (
    "import pulsar; c = pulsar.Client('{url}'{more}); s = c.subscribe('hello', 'me'); "
    "c.create_producer('hello').send(b'through the proxy'); m = s.receive(5000); s.acknowledge(m); print(m.data()); "
    "c.close()"
)
_BY_TOKEN = ", authentication=pulsar.AuthenticationToken(open('{file}').read())"


class _Session:
    """The started processes, which are stopped in order after the first signal, and killed after the second."""

    def __init__(self) -> None:
        self.stack = ExitStack()
        self.signals = 0
        self.failed = False

    def on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.signals += 1
        raise KeyboardInterrupt

    def stop_process(self, process: Cluster | Standalone) -> None:
        if self.signals > 1:
            process.kill()
        else:
            process.stop()

    def directory(self) -> Path:
        """Make a directory for this run, outside the tree; it is kept for its logs if the run fails."""
        base = "/tmp" if len(tempfile.gettempdir()) > _TMPDIR_MAX else None
        directory = Path(tempfile.mkdtemp(prefix="ptp-", dir=base))

        def remove() -> None:
            if self.failed:
                print_status.line(f"Logs and data are kept in {directory}")
            else:
                shutil.rmtree(directory, ignore_errors=True)

        self.stack.callback(remove)
        return directory


def main() -> int:
    """Run until a signal; return 0 unless something failed."""
    parser = argparse.ArgumentParser(prog="make run", description=__doc__)
    parser.add_argument("--broker", default=os.environ.get("BROKER"), help="an existing cluster's service URL")
    version = os.environ.get("BROKER_VERSION") or PULSAR.version
    parser.add_argument("--broker-version", default=version, help="the release of a broker of its own")
    arguments = parser.parse_args()
    broker_url: str | None = arguments.broker or None
    session = _Session()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, session.on_signal)
    try:
        with session.stack:
            try:
                _run(session, broker_url, arguments.broker_version)
            except KeyboardInterrupt:
                print_status.line("Stopping what was started (Ctrl-C once more: at once)")
            except (MakeError, OSError) as error:
                session.failed = True
                print_status.line(f"\nmake run: {error}")
    except KeyboardInterrupt:  # the second one, while stopping
        print_status.line("Stopped at once")
    return 1 if session.failed else 0


def _run(session: _Session, broker_url: str | None, version: str) -> None:
    source = source_of(version)
    machine.ensure(machine.PROXY_ONLY if broker_url else machine.RUN)
    environment = Environment()
    environment.prepare("run")
    home = None if broker_url else pulsar_home(source=source)
    directory = session.directory()
    broker = _start_broker(session, home, directory) if home else None
    bill = FirstBill(directory)
    cluster = Cluster(
        environment.tool("pulsar-trio-proxy"),
        directory,
        ClusterConfig(
            service_url=broker.service_url if broker else str(broker_url),
            port=_port(6650, "The proxy's port"),
            admin_port=_port(8080, "The admin port"),
            web_service_url=broker.admin_url if broker else "",
            http_port=_port(8081, "The port for HTTP") if broker else 0,
            # Another's brokers may ask for credentials of their own, which the proxy then hands on.
            more_config=bill.write_tokens() if broker else "",
        ),
        progress=print_status,
    )
    session.stack.callback(session.stop_process, cluster)  # before the start, which a signal may interrupt
    cluster.start()
    _print_summary(environment, cluster, broker, bill, broker_url)
    _watch(cluster, broker)


def _start_broker(session: _Session, home: Path, directory: Path) -> Standalone:
    broker = Standalone(
        home,
        directory / "broker",
        options=BrokerOptions(
            broker_port=free_port(6660),
            web_port=free_port(8082, avoid=(6660,)),
            bookie_port=free_port(3181, avoid=(6660, 8082)),
            memory="-Xms256m -Xmx1g -XX:MaxDirectMemorySize=1g",
            progress=print_status,
        ),
    )
    session.stack.callback(session.stop_process, broker)
    broker.start()
    return broker


def _port(preferred: int, what: str) -> int:
    port = free_port(preferred)
    if port != preferred:
        print_status.line(f"{what} {preferred} is taken on this machine: using {port}")
    return port


def _watch(cluster: Cluster, broker: Standalone | None) -> None:
    while True:
        time.sleep(_POLL_S)
        if not cluster.running:
            raise ClusterError(f"the cluster ended by itself:\n{cluster.log_tail()}")
        if broker and not broker.running:
            raise StandaloneError(f"the broker ended by itself:\n{broker.log_tail()}")


def _print_summary(
    environment: Environment, cluster: Cluster, broker: Standalone | None, bill: FirstBill, broker_url: str | None
) -> None:
    line = print_status.line
    line(f"\nThe cluster is ready.\n\n  service URL   {cluster.service_url}")
    if cluster.http_url:
        line(f"  web URL       {cluster.http_url}   (the brokers' /admin /lookup, for pulsar-admin)")
    line(f"  proxy admin   {cluster.admin_url}   (/status /metrics /readyz)")
    line(f"  broker admin  {broker.admin_url}" if broker else f"  broker        {broker_url}")
    line(f"  log           {cluster.log_path}")
    line("\nThings to try, in another terminal:\n")
    example = f'{environment.python} -c "{_EXAMPLE}"'
    if broker:
        more = _BY_TOKEN.format(file=bill.token_file("$p"))
        line(f"  1. Produce and consume a message as each of {' and '.join(PRINCIPALS)}:")
        line(f"     for p in {' '.join(PRINCIPALS)}; do {example.format(url=cluster.service_url, more=more)}; done")
    else:
        line("  1. Produce and consume a message:")
        line(f"     {example.format(url=cluster.service_url, more='')}")
    perf = broker.home / "bin" / "pulsar-perf" if broker else None
    if perf and perf.exists():  # releases without a distribution have none
        line("  2. 1,000 messages a second for 10 seconds, with latencies:")
        line(f"     {perf} produce -u {cluster.service_url} -r 1000 -time 10 hello")
    else:
        line("  2. Its metrics:")
        line(f"     curl -s {cluster.admin_url}/metrics")
    line("  3. What the cluster is doing:")
    line(f"     {environment.tool('pulsar-trio-proxy')} status --config {cluster.config_path}")
    line("  4. A bill of what went through, by principal (the first line installs Spark and Prometheus):")
    for one in bill.write_configurations(cluster.admin_url):
        line(f"     {one}")
    line(f"     The last line goes on until Ctrl-C, and writes {bill.page} again after each turn.")
    line("\nCtrl-C ends everything that runs here.")


if __name__ == "__main__":
    sys.exit(main())
