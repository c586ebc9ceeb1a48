"""`connections` and `disconnect`: an operator sees who is connected, and ends exactly whom they name."""

from __future__ import annotations

import json
import subprocess
import uuid
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pulsar
import pytest
from local.standalone import Standalone
from local.tokens import make_token

from proto.pulsar_pb2 import BaseCommand, ServerError
from proxy.forwarder.lifetime.reauthentication import DISCONNECTED

from .lab.cluster import HOST, ProxyCluster
from .lab.security import NAMESPACE
from .lab.waiting import eventually
from .test_denied_credentials import ENDED, KEY, LIFETIME_S, clients_of_a_cluster
from .test_relays_survive import TOOK_OVER, kill_forwarder


def listed(cluster: ProxyCluster, *options: str) -> list[dict[str, Any]]:
    done = cluster.command("connections", "--json", *options)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def disconnect(cluster: ProxyCluster, *options: str) -> subprocess.CompletedProcess[str]:
    done = cluster.command("disconnect", "--yes", *options)
    assert done.returncode == 0, done.stderr
    return done


def kinds(rows: list[dict[str, Any]]) -> list[str]:
    return sorted(row["kind"] for row in rows)


@pytest.mark.parametrize("adopted", [False, True])
def test_all_kinds_of_one_principal_end_and_no_others(tmp_path: Path, adopted: bool) -> None:
    """Spliced, framed and copied relays and lookup mode; adopted relays, too. A client is told where frames are
    followed."""
    with clients_of_a_cluster(tmp_path, forwarders=2 - adopted) as clients:
        cluster, broker, client = clients.cluster, clients.target, clients.add
        pair = clients.authority.client("alice")
        blind, framed = make_token(KEY, "alice"), make_token(KEY, "alice", LIFETIME_S)
        told = [client(framed)] if adopted else [client(framed), client(blind, target="")]
        hers = [*told, client(blind)] if adopted else [*told, client(blind), client(pair=pair)]
        others = [client(make_token(KEY, "bob")), client(make_token(KEY, "bob", LIFETIME_S))]
        if adopted:
            kill_forwarder(cluster)
            cluster.wait_for_log(TOOK_OVER)
        for one in [hers[0], *others]:
            one.assert_serves()

        rows = listed(cluster, "--principal", "alice")
        assert kinds(rows) == (["spliced"] * 2 if adopted else ["copied", "lookup", "spliced", "spliced"])
        assert {row["method"] for row in rows} <= {"token", "tls"}
        [followed] = [row for row in rows if row["session_ends_in_seconds"] and row["kind"] == "spliced"]
        assert followed["broker"] == broker
        assert followed["bytes_to_broker"] > 0
        assert LIFETIME_S - 600 < followed["session_ends_in_seconds"] <= LIFETIME_S
        assert kinds(listed(cluster)) == sorted([*kinds(rows), "spliced", "spliced"])
        assert len(listed(cluster, "--broker", HOST, "--address", "127.0.0.0/8", "--kind", "spliced")) == 4
        assert listed(cluster, "--address", "192.0.2.1") == []
        assert "eyJ" not in cluster.command("connections").stdout

        dry = cluster.command("disconnect", "--principal", "alice", "--dry-run")
        assert followed["address"] in dry.stdout
        refused = cluster.command("disconnect", "--yes")
        assert (refused.returncode, "name the connections" in refused.stderr) == (1, True)
        assert len(listed(cluster)) == len(hers) + len(others)

        done = disconnect(cluster, "--principal", "alice")
        assert f"ended {len(hers)} connections, of principals alice ({len(hers)})" in done.stdout
        assert all(row["address"] in done.stdout for row in rows)
        for one in told:
            [error] = [command.error for command in one.wait_for_end() if command.type == BaseCommand.ERROR]
            assert (error.error, error.message) == (ServerError.ServiceNotReady, DISCONNECTED)
        for one in hers[len(told) :]:
            one.wait_for_end()
        cluster.wait_for_total(ENDED, len(hers), cause="disconnected")
        for one in others:
            one.assert_serves()
        assert [row["principal"] for row in listed(cluster)] == ["bob", "bob"]


def test_the_python_client_comes_back_and_anothers_stays(
    secured_broker: Standalone, secured_proxy: ProxyCluster
) -> None:
    """With a real broker: alice's connections end, and she goes on to send; the superuser's are the same as before."""
    topic = f"persistent://{NAMESPACE}/disconnect-{uuid.uuid4().hex[:8]}"
    with ExitStack() as stack:

        def producer(role: str) -> pulsar.Producer:
            token = secured_broker.token_file(role).read_text().strip()
            made = pulsar.Client(secured_proxy.service_url, authentication=pulsar.AuthenticationToken(token))
            return stack.enter_context(closing(stack.enter_context(closing(made)).create_producer(topic)))

        alice, admin = producer("alice"), producer("admin")
        alice.send(b"1")
        admin.send(b"1")

        def addresses(role: str) -> set[str]:
            return {row["address"] for row in listed(secured_proxy, "--principal", role)}

        hers, admins = addresses("alice"), addresses("admin")
        assert hers
        assert admins
        disconnect(secured_proxy, "--principal", "alice")
        alice.send(b"2")  # as soon as its client has connected again

        def has_come_back() -> bool:
            return bool(addresses("alice")) and not addresses("alice") & hers

        eventually(has_come_back, what="alice's client has connected again")
        admin.send(b"2")
        assert addresses("admin") == admins
