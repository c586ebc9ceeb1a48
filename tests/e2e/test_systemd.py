"""The cluster as a unit of a real systemd, by the files of deploy/systemd: start, reload, watchdog, ports, restarts."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
from local.ports import free_port

from .lab.cluster import HOST, Tables
from .lab.fakes import FakeBroker, LookupBroker
from .lab.processes import children
from .lab.schema import LOOKUP_CONNECT
from .lab.streams import Streams
from .lab.systemd import SystemdCluster, obstacle
from .lab.waiting import eventually

MIB = 1 << 20

pytestmark = pytest.mark.skipif(bool(obstacle()), reason=f"no systemd: {obstacle()}")


def tables(lookups: FakeBroker, **more: object) -> Tables:
    """A broker that answers."""
    return {"brokers": {"service_url": f"pulsar://{HOST}:{lookups.port}", **more}}


def lookup_broker() -> FakeBroker:
    """For lookups, of which none comes."""
    return FakeBroker(LookupBroker({"response": LOOKUP_CONNECT, "broker_service_url": "pulsar://127.0.0.1:1"}))


def test_the_unit_is_active_once_clients_are_served_and_a_reload_ends_when_it_is_done() -> None:
    """No process but the supervisor may speak for the unit, or knows how."""
    with lookup_broker() as broker, SystemdCluster(tables(broker)) as cluster:
        assert cluster.get("/readyz").status == 200
        assert cluster.show("StatusText") == "ready for clients"
        supervisor = cluster.pid
        for pid in children(supervisor):
            assert b"NOTIFY_SOCKET" not in Path(f"/proc/{pid}/environ").read_bytes()
        since = len(cluster.log_text())
        cluster.systemctl("reload", "pulsar-trio-proxy.service")
        cluster.wait_for_log("the configuration was reloaded", since=since)
        cluster.config_path.write_text("nonsense")
        cluster.systemctl("reload", "pulsar-trio-proxy.service")
        eventually(lambda: "was not reloaded" in cluster.show("StatusText"), what="the failure in the status")
        assert cluster.pid == supervisor


def test_a_supervisor_that_stands_still_is_replaced() -> None:
    with lookup_broker() as broker, SystemdCluster(tables(broker), service=["WatchdogSec=3"]) as cluster:
        before = cluster.pid
        os.kill(before, signal.SIGSTOP)
        eventually(lambda: cluster.show("NRestarts") == "1" and cluster.is_active(), what="another supervisor")
        assert cluster.show("MainPID") not in {"", "0"}


def test_the_watchdog_is_fed_by_the_program_after_an_upgrade() -> None:
    with lookup_broker() as broker, SystemdCluster(tables(broker), service=["WatchdogSec=10"]) as cluster:
        before = cluster.pid
        assert cluster.command("upgrade", timeout_s=300).returncode == 0
        stamp = cluster.show("WatchdogTimestampMonotonic")
        eventually(lambda: cluster.show("WatchdogTimestampMonotonic") != stamp, what="a further sign of life")
        assert (cluster.pid, cluster.show("NRestarts")) == (before, "0")


def test_ports_that_systemd_has_bound_stay_open_while_the_service_restarts() -> None:
    with lookup_broker() as broker:
        cluster = SystemdCluster(tables(broker))
        cluster.listen_by_systemd()
        with closing_cluster(cluster):
            cluster.start(ready=False)
            eventually(lambda: sends_nonsense(cluster.port), what="systemd listens")
            eventually(cluster.is_active, what="the first client has started the service")
            assert cluster.get("/readyz").status == 200
            cluster.systemctl("stop", "pulsar-trio-proxy.service")
            assert not cluster.is_active()
            assert sends_nonsense(cluster.port)
            eventually(cluster.is_active, what="a client has started it again")


def sends_nonsense(port: int) -> bool:
    """Whether a client was accepted, and answered."""
    try:
        with socket.create_connection((HOST, port), timeout=60) as client:
            client.sendall(b"\xff\xff\xff\xff nonsense")
            client.recv(100)  # an error, or the end
            return True
    except ConnectionResetError:
        return True
    except ConnectionRefusedError:
        return False


@contextmanager
def closing_cluster(cluster: SystemdCluster) -> Iterator[None]:
    """Stop it at the end, however it was started."""
    try:
        yield
    finally:
        cluster.__exit__(None, None, None)


def test_relays_outlive_a_sigkill_of_the_supervisor() -> None:
    """100 relays under load; three supervisors are killed, one of them after an upgrade. Not a byte is lost."""
    broker_port = free_port()
    with lookup_broker() as broker:
        settings = tables(broker, allowed_ports=[broker_port])
        with SystemdCluster(settings, service=["FileDescriptorStoreMax=512"]) as cluster:
            streams = Streams(cluster.port, 100, portion_bytes_max=20_000, pause_s_max=0.1, broker_port=broker_port)

            async def chaos() -> None:
                for number in range(3):
                    if number == 1:
                        upgrade = partial(cluster.command, "upgrade", timeout_s=300)
                        assert (await trio.to_thread.run_sync(upgrade)).returncode == 0
                    moved = streams.moved_bytes
                    await trio.to_thread.run_sync(cluster.kill_supervisor)
                    while streams.moved_bytes < moved + 10 * MIB:  # noqa: ASYNC110 -- all move again
                        await trio.sleep(0.1)

            trio.run(streams.run, chaos)
            print(f"{streams.moved_bytes / MIB:.0f} MiB, longest silence {streams.longest_silence_s:.2f} s")
            assert (streams.errors, streams.not_whole, len(streams.ways)) == ([], [], 200)
            assert cluster.log_text().count("an earlier supervisor has ended; its relays go on") == 3
            assert cluster.show("NRestarts") == "3"
            eventually(lambda: int(cluster.show("NFileDescriptorStore")) < 20, what="what is kept is bounded")
            cluster.systemctl("stop", "pulsar-trio-proxy.service")


def test_relays_outlive_supervisors_that_are_killed_while_they_start() -> None:
    """The second is killed as soon as it has read what the first has left, and the third as soon as it is there."""
    broker_port = free_port()
    service = ["FileDescriptorStoreMax=512", "StartLimitIntervalSec=0"]
    settings = {"allowed_ports": [broker_port]}
    with lookup_broker() as broker, SystemdCluster(tables(broker, **settings), service=service) as cluster:
        streams = Streams(cluster.port, 20, portion_bytes_max=20_000, pause_s_max=0.1, broker_port=broker_port)

        def kill_three() -> None:
            cluster.kill_supervisor(is_awaited=False)
            cluster.wait_for_log("its relays go on")
            cluster.kill_supervisor(is_awaited=False)
            cluster.kill_supervisor()

        async def chaos() -> None:
            await trio.to_thread.run_sync(kill_three)
            moved = streams.moved_bytes
            while streams.moved_bytes < moved + 10 * MIB:  # noqa: ASYNC110 -- all move again
                await trio.sleep(0.1)

        trio.run(streams.run, chaos)
        assert (streams.errors, streams.not_whole, len(streams.ways)) == ([], [], 40)
        cluster.wait_for_total("pulsar_proxy_principal_sessions_total", 20)
        answers = cluster.metrics().total("pulsar_proxy_principal_bytes_total") - streams.moved_bytes
        assert 0 <= answers < 20 * 100, "use is neither lost nor counted twice, beside an answer to each client"
        assert cluster.show("NRestarts") == "3"
