"""Audit events of a whole cluster: authentications and ends of connections, with bytes, also after a kill,
a rename and an upgrade;
a destination that takes nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from local.tokens import make_token

from proto.pulsar_pb2 import BaseCommand

from .conftest import running
from .lab.cluster import HOST, ProxyCluster, Tables
from .lab.fakes import FakeBroker, LookupBroker, connected
from .lab.waiting import eventually
from .lab.wire import WireClient, frame
from .test_relays_survive import TOOK_OVER, kill_forwarder, scene

KEY = b"a shared secret of thirty-two by"
WRONG = make_token(b"another secret of thirty-two byt", "eve")
DROPPED = "pulsar_proxy_audit_dropped_events_total"


def audited(tmp_path: Path, **audit: Any) -> Tables:
    (tmp_path / "key").write_bytes(KEY)
    return {
        "authentication": {"enabled": True, "failure_delay_ms": 0},
        "authentication.token": {"secret_key": str(tmp_path / "key")},
        "audit": {"events": ["connections", "authentications"], **audit},
    }


def wait_for(file: Path, event: str, **fields: str) -> dict[str, Any]:
    """An event of the file, of which each line is one."""

    def find() -> dict[str, Any]:
        lines = file.read_text().splitlines() if file.exists() else []
        found = [one for one in map(json.loads, lines) if {"event": event, **fields}.items() <= one.items()]
        return found[0] if found else {}

    return eventually(find, what=f"{event} in the audit file")


def test_a_relay_that_outlives_its_forwarder_and_its_cluster_has_its_event(tmp_path: Path) -> None:
    """Its bytes are exact, and no token is anywhere; after a rename and a reload there is a new file."""
    file = tmp_path / "audit"
    with (
        scene(audited(tmp_path, output="file", file=str(file)), forwarders=1) as at,
        FakeBroker(LookupBroker({}), at.broker_port),
        WireClient(at.cluster.port) as alice,
    ):
        with WireClient(at.cluster.port) as eve:
            assert eve.connect(token=WRONG).type == BaseCommand.ERROR
        failure = wait_for(file, "authentication_failure")
        assert failure["method"] == "token"
        refused = wait_for(file, "connection_ended", cause="authentication_failed")
        assert refused["connection"] == failure["connection"]

        target, token = f"{HOST}:{at.broker_port}", make_token(KEY, "alice")
        assert alice.connect(token=token, proxy_to_broker_url=target).type == BaseCommand.CONNECTED
        success = wait_for(file, "authentication_success")
        assert (success["principal"], success["method"], success["target"]) == ("alice", "token", target)
        assert alice.ping().type == BaseCommand.PONG
        os.rename(file, tmp_path / "audit.1")
        at.cluster.command("reload")
        kill_forwarder(at.cluster)
        at.cluster.wait_for_log(TOOK_OVER)
        assert alice.ping().type == BaseCommand.PONG
        assert at.cluster.command("upgrade", timeout_s=300).returncode == 0
        assert alice.ping().type == BaseCommand.PONG
        alice.close()

        ended = wait_for(file, "connection_ended", principal="alice")
        assert ended["connection"] == success["connection"]
        assert (ended["kind"], ended["cause"], ended["worker"]) == ("relay", "relay_ended", "forwarder-0")
        assert ended["bytes_to_broker"] == 3 * len(frame(BaseCommand.PING, ping={}))
        assert ended["bytes_to_client"] == len(connected()) + 3 * len(frame(BaseCommand.PONG, pong={}))
        assert stat.S_IMODE(file.stat().st_mode) == 0o640
        everything = file.read_text() + (tmp_path / "audit.1").read_text()
        assert token not in everything
        assert WRONG not in everything


def test_a_reader_that_has_stopped_stops_no_relay(tmp_path: Path) -> None:
    """What nobody reads is dropped and counted; once there is a reader, new events come."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)
    to_fifo = ["sh", "-c", f'exec "$@" >{fifo}', "sh"]
    with ExitStack() as stack:
        stack.callback(os.close, reader)
        broker = stack.enter_context(FakeBroker(LookupBroker({})))
        target = f"{HOST}:{broker.port}"
        own = {"brokers": {"service_url": f"pulsar://{target}", "allowed_ports": [broker.port]}}
        cluster = stack.enter_context(running(ProxyCluster({**audited(tmp_path), **own}, prefix=to_fifo)))
        alice = stack.enter_context(WireClient(cluster.port))
        connect = {"token": make_token(KEY, "alice"), "proxy_to_broker_url": target}
        assert alice.connect(**connect).type == BaseCommand.CONNECTED

        def be_refused(source: str) -> None:
            with WireClient(cluster.port, source=source) as eve:
                assert eve.connect(token=WRONG, proxy_to_broker_url="x" * 250).type == BaseCommand.ERROR

        def drops() -> bool:
            for number in range(2, 52):
                be_refused(f"127.0.0.{number}")
            return cluster.metrics().total(DROPPED, event="authentication_failure", reason="full") > 0

        eventually(drops, what="dropped events", within_s=90)
        assert alice.ping().type == BaseCommand.PONG
        assert cluster.get("/healthz").status == 200
        heard = b""

        def hears(words: bytes) -> bool:
            nonlocal heard
            with suppress(BlockingIOError):
                while data := os.read(reader, 65536):
                    heard += data
            return words in heard

        def hears_of_another() -> bool:
            be_refused("127.0.0.99")
            return hears(b'"127.0.0.99:')

        eventually(hears_of_another, what="a new event: the pipe has room")
        alice.close()
        eventually(lambda: hears(b'"kind": "relay"'), what="the end of her relay")
        assert all(json.loads(line) for line in heard[: heard.rindex(b"\n")].splitlines())
