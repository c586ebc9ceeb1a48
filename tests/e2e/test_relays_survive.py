"""Relays outlive their processes: forwarders are killed, the whole cluster becomes another program, and no connection
is lost and no byte.

All goes on between sockets of our own, where every byte can be checked; real clients are in test_clients_do_not_notice.
What is measured stands in the output of the tests (`pytest -rP`). By hand PULSAR_PROXY_TEST_KILLS, _UPGRADES and
_RELAYS make more of it, as 50, 10 and 10000.
"""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import trio
from local.ports import free_port
from local.tokens import make_token

from proto.pulsar_pb2 import BaseCommand

from .conftest import running
from .lab.cluster import ProxyCluster, Tables, merged
from .lab.counts import count_of
from .lab.crowd import AT_ONCE, Crowd, Ends, many_open_files
from .lab.fakes import FakeBroker, LookupBroker, receive_command
from .lab.framed_streams import FramedCopyLoop
from .lab.processes import Use, children, memory_kib
from .lab.schema import LOOKUP_CONNECT
from .lab.streams import OneWay, Streams
from .lab.waiting import BUSY_S, NotInTimeError, eventually
from .lab.wire import Ended, WireClient

ADOPTED = "pulsar_proxy_adopted_relays_total"
STORED = "pulsar_proxy_stored_relays"
TOOK_OVER = "took over the relays of a predecessor"
TOPIC = "persistent://public/default/relays-survive"
MIB = 1 << 20


@dataclass
class Scene:
    """A cluster; a port where its relays may go, and ours is the broker there; the broker of its lookups."""

    cluster: ProxyCluster
    broker_port: int
    lookups: LookupBroker

    def crowd(self, **credentials: Any) -> Crowd:
        """No client yet."""
        return Crowd(self.cluster.port, self.broker_port, **credentials)

    def streams(self, count: int, **options: Any) -> Streams:
        """Not yet running."""
        return Streams(self.cluster.port, count, broker_port=self.broker_port, **options)


@contextmanager
def scene(tables: Tables | None = None, *, forwarders: int = 2, unprivileged: bool = False) -> Iterator[Scene]:
    """A cluster of which all workers run."""
    broker_port = free_port()
    lookups = LookupBroker({"response": LOOKUP_CONNECT, "broker_service_url": "pulsar://127.0.0.1:1"})
    with FakeBroker(lookups) as lookup_broker:
        url = f"pulsar://127.0.0.1:{lookup_broker.port}"
        own: Tables = {
            "cluster": {"forwarders": forwarders},
            "brokers": {"service_url": url, "allowed_ports": [broker_port]},
            "limits": {"max_connections": 20_000, "lookup_timeout_ms": 300_000, "drain_timeout_ms": 60_000},
        }
        with running(ProxyCluster(merged(own, tables or {}), unprivileged=unprivileged)) as cluster:
            yield Scene(cluster, broker_port, lookups)


# ---- looking at it, and killing


def forwarders_running(cluster: ProxyCluster) -> dict[str, int]:
    """Name to process id."""
    return {
        f"forwarder-{worker['worker']}": worker["pid"]
        for worker in cluster.status()["workers"]
        if worker["role"] == "forwarder" and worker["state"] == "running"
    }


def connections(cluster: ProxyCluster) -> list[int]:
    """Of each forwarder that answers."""
    return [worker["connections"] for worker in cluster.status()["workers"] if "connections" in worker]


def wait_for_connections(cluster: ProxyCluster, count: int) -> None:
    """Until its only forwarder has so many, no more and no less: a status may be a moment old."""
    eventually(lambda: connections(cluster) == [count], what=f"one forwarder with {count} connections")


def wait_until_at_rest(cluster: ProxyCluster) -> None:
    """Until its only forwarder starts no more: its memory is at rest."""
    seen: list[tuple[list[int], int]] = []

    def at_rest() -> bool:
        pids = children(cluster.pid, "forwarder")
        seen.append((pids, sum(map(memory_kib, pids))))
        return len(pids) == 1 and len(seen) > 1 and seen[-1][0] == seen[-2][0] and seen[-1][1] - seen[-2][1] < 100

    eventually(at_rest, what="the forwarder is at rest", every_s=0.7)


def kill(pid: int) -> bool:
    """SIGKILL; whether there was one to kill."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def kill_forwarder(cluster: ProxyCluster, number: int = 0) -> float:
    """Kill one, and wait until another is in its place; when (`time.time`) it was killed."""

    def running_pid() -> int:
        return forwarders_running(cluster).get(f"forwarder-{number}", 0)

    old = eventually(running_pid, what=f"forwarder {number} runs")
    killed_at = time.time()
    assert kill(old)
    eventually(lambda: running_pid() not in {0, old}, what=f"another forwarder {number} than {old} runs")
    return killed_at


def pause_after_kill(cluster: ProxyCluster) -> float:
    """Kill the one forwarder; the seconds until another said in the log that it has the relays."""
    since = len(cluster.log_text())
    killed_at = kill_forwarder(cluster)
    line = cluster.wait_for_log(TOOK_OVER, since=since)
    return datetime.fromisoformat(line.split()[0].removeprefix("timestamp=")).timestamp() - killed_at


def wait_until_empty(cluster: ProxyCluster) -> None:
    """Until no relay is left anywhere, and every worker runs."""

    def empty() -> bool:
        scrape = cluster.metrics()
        states = {worker["state"] for worker in cluster.status()["workers"]}
        left = scrape.total(STORED) + scrape.total("pulsar_proxy_active_connections")
        return left == 0 and states == {"running"}

    eventually(empty, what="no relay is left")


def sockets_and_files(pid: int) -> int:
    """Open descriptors that are no pipe's."""
    return Use.of(pid).files


def assert_no_more_open(cluster: ProxyCluster, earlier: int) -> None:
    """The supervisor has no more open than before, beside pipes."""
    eventually(lambda: sockets_and_files(cluster.pid) <= earlier, what=f"no more than {earlier} descriptors are open")


def use_of_all(cluster: ProxyCluster) -> dict[int, Use]:
    """Of each process."""
    return {pid: Use.of(pid) for pid in (cluster.pid, *children(cluster.pid))}


def cluster_memory_kib(cluster: ProxyCluster) -> int:
    """Of all processes."""
    return sum(memory_kib(pid) for pid in (cluster.pid, *children(cluster.pid)))


def assert_whole(streams: Streams | FramedCopyLoop) -> None:
    """No connection was lost, and every byte came."""
    assert streams.errors == []
    assert len(streams.ways) == 2 * streams.count
    assert [(way.sent_bytes, way.got_bytes) for way in streams.not_whole] == []
    assert min(way.got_bytes for way in streams.ways) > 0


# ---- forwarders are killed

KILLS = count_of("KILLS", in_ci=16)
WHATEVER_IS_THERE_EACH = 8
LIFE_S = 1.2
"""For so long a forwarder is mostly left alone. Whoever dies within a second of its start is replaced after a pause."""


class Killer:
    """Kills forwarders at random."""

    def __init__(self, cluster: ProxyCluster) -> None:
        self.kills = 0
        self._cluster = cluster
        self._random = random.Random(7)
        self._killed_at: dict[str, float] = {}

    def kill_one(self) -> None:
        """Mostly one that runs; now and then any that is there, also in the middle of its start."""
        if self.kills % WHATEVER_IS_THERE_EACH == WHATEVER_IS_THERE_EACH - 1:
            pids = children(self._cluster.pid, "forwarder")
            if pids:
                self.kills += kill(self._random.choice(pids))
            return
        now = time.monotonic()
        ripe = {
            name: pid
            for name, pid in forwarders_running(self._cluster).items()
            if now - self._killed_at.get(name, 0.0) > LIFE_S
        }
        if ripe:
            name = self._random.choice(sorted(ripe))
            self._killed_at[name] = now
            self.kills += kill(ripe[name])

    async def run(self, kills: int) -> None:
        """So many."""
        while self.kills < kills:
            await trio.to_thread.run_sync(self.kill_one)
            await trio.sleep(self._random.random() * 0.3)


def test_streams_of_random_sizes_are_whole_after_many_kills_of_their_forwarders() -> None:
    """All streams are whole, none was reset; when they have ended, the supervisor keeps nothing of them."""
    with scene(forwarders=4) as on:
        wait_until_empty(on.cluster)
        had_open = sockets_and_files(on.cluster.pid)
        streams, killer = on.streams(40), Killer(on.cluster)
        trio.run(streams.run, partial(killer.run, KILLS))
        assert_whole(streams)
        assert killer.kills >= KILLS
        assert on.cluster.metrics().total(ADOPTED) > 0
        wait_until_empty(on.cluster)
        assert_no_more_open(on.cluster, had_open)
    print(f"{streams.moved_bytes / MIB:.0f} MiB, longest silence {streams.longest_silence_s:.2f} s")


def test_without_crash_safety_relays_end_with_their_forwarder() -> None:
    """relay.crash_safe = false: the supervisor keeps nothing, and no forwarder takes anything over."""
    with scene({"relay": {"crash_safe": False}}, forwarders=1) as on, on.crowd() as crowd:
        had_open = sockets_and_files(on.cluster.pid)
        crowd.open(50)
        crowd.exchange()
        assert on.cluster.metrics().total(STORED) == 0
        assert sockets_and_files(on.cluster.pid) < had_open + 50
        assert crowd.ended() == 0
        (old,) = forwarders_running(on.cluster).values()
        assert kill(old)
        eventually(lambda: crowd.ended() == 50, what="every client has been told")
        eventually(lambda: set(forwarders_running(on.cluster).values()) - {old}, what="another forwarder runs")
        assert on.cluster.metrics().total(ADOPTED) == 0
        wait_for_connections(on.cluster, 0)
        crowd.close_all()
        crowd.open(10)
        crowd.exchange()


RELAYS_OF_ONE = 1000
PAUSE_MAX_S = BUSY_S
"""Milliseconds, in fact, which the test prints."""


def test_a_thousand_relays_stand_still_for_a_moment_only() -> None:
    """From the kill of their forwarder until its successor has them. Three times; the middle one counts."""
    with scene(forwarders=1) as on, on.crowd() as crowd, many_open_files(8 * RELAYS_OF_ONE):
        crowd.open(RELAYS_OF_ONE)
        crowd.exchange()
        pauses, until_all_moved = [], []
        for _ in range(3):
            wait_until_at_rest(on.cluster)
            began_at = time.monotonic()
            pauses.append(pause_after_kill(on.cluster))
            crowd.exchange()
            until_all_moved.append(time.monotonic() - began_at)
            wait_for_connections(on.cluster, RELAYS_OF_ONE)
        on.cluster.wait_for_total(ADOPTED, RELAYS_OF_ONE)
    print("taken over after", *(f"{pause:.3f}" for pause in pauses), "s;", end=" ")
    print("bytes had moved through all after", *(f"{moved:.3f}" for moved in until_all_moved), "s")
    assert median(pauses) <= PAUSE_MAX_S


# ---- the whole cluster becomes another program

UPGRADES = count_of("UPGRADES", in_ci=3)
"""The first one, the one of an upgraded cluster, and the one whose predecessor has been one."""


class Upgrader:
    """Upgrades a cluster, with a client in lookup mode before each time."""

    def __init__(self, on: Scene) -> None:
        self._on = on
        self._seen: set[int] = set()
        self.seconds: list[float] = []

    async def run(self) -> None:
        """All upgrades, one after another."""
        for _ in range(UPGRADES):
            await trio.to_thread.run_sync(self._upgrade)

    def _upgrade(self) -> None:
        cluster = self._on.cluster
        generation = cluster.status()["generation"]
        self._seen |= set(cluster.worker_pids().values())
        with WireClient(cluster.port) as client:
            assert client.connect().type == BaseCommand.CONNECTED
            with self._on.lookups.pausing():
                asked = len(self._on.lookups.lookups)
                client.send(BaseCommand.LOOKUP, lookup_topic={"topic": TOPIC, "request_id": 17})
                eventually(lambda: len(self._on.lookups.lookups) > asked, what="the broker was asked")
                began_at = time.monotonic()
                answer = cluster.command("upgrade", timeout_s=300)
                self.seconds.append(time.monotonic() - began_at)
                assert answer.returncode == 0, answer.stderr
            response = client.receive()
            assert response.type == BaseCommand.LOOKUP_RESPONSE
            assert response.lookup_topic_response.request_id == 17
            assert response.lookup_topic_response.proxy_through_service_url
            with pytest.raises(Ended, match="end of stream"):  # and not by a reset
                client.receive()
        assert cluster.wait(timeout_s=0.001) is None  # it is the same process
        assert cluster.status()["generation"] == generation + 1
        pids = set(cluster.worker_pids().values())
        assert len(pids) == 4
        assert not pids & self._seen


def test_upgrades_in_a_row_are_noticed_by_no_stream() -> None:
    """The supervisor stays the same process, every other is another one each time; no stream notices. A client in
    lookup mode gets its answer first, and then an end.
    """
    with scene(forwarders=1) as on:  # each worker more would cost ten seconds; two are upgraded under real clients
        wait_until_empty(on.cluster)
        had_open = sockets_and_files(on.cluster.pid)
        streams, upgrader = on.streams(16, portion_bytes_max=100_000, pause_s_max=0.3), Upgrader(on)
        trio.run(streams.run, upgrader.run)
        assert_whole(streams)
        assert "--legacy" in Path(f"/proc/{on.cluster.pid}/cmdline").read_text()
        assert len(upgrader.seconds) == UPGRADES
        wait_until_empty(on.cluster)
        assert_no_more_open(on.cluster, had_open)
        assert "Traceback" not in on.cluster.log_text()
    print(f"an upgrade took {median(upgrader.seconds):.1f} s; longest silence {streams.longest_silence_s:.2f} s")


# ---- a receiver that does not read

UNREAD_RELAYS = 3
FLAT_KIB = 6 * 1024
MORE_BYTES = 3_000_000
QUIET_S = 1.5


@dataclass
class Stuck:
    """One direction of a relay: sends as much as is taken, and receives when told to."""

    sender: socket.socket
    receiver: socket.socket
    way: OneWay = field(default_factory=OneWay)
    _random: random.Random = field(default_factory=lambda: random.Random(3))
    _rest: bytes = b""

    def push(self, bytes_max: int) -> int:
        """Send until nothing more is taken at this moment, or so many bytes are; how many went."""
        pushed = 0
        while pushed < bytes_max:
            self._rest = self._rest or self._random.randbytes(50_000)
            try:
                size = self.sender.send(self._rest)
            except BlockingIOError:
                break
            self.way.sent.update(self._rest[:size])
            self.way.sent_bytes += size
            pushed += size
            self._rest = self._rest[size:]
        return pushed

    def pull(self) -> int:
        """Receive what is there at this moment; how many bytes."""
        try:
            data = self.receiver.recv(MIB)
        except BlockingIOError:
            return 0
        self.way.got.update(data)
        self.way.got_bytes += len(data)
        return len(data)


def fill_up(ways: list[Stuck], bytes_max: int) -> None:
    """Send until nothing has been taken for a while."""
    quiet_since = time.monotonic()
    while time.monotonic() - quiet_since < QUIET_S:
        if sum(way.push(bytes_max) for way in ways):
            quiet_since = time.monotonic()
        assert max(way.way.sent_bytes for way in ways) <= bytes_max, "who does not read must stop the sender"
        time.sleep(0.02)


def socket_buffers_max() -> int:
    """What the kernel may keep of one direction of a relay: a send and a receive buffer on each side of the proxy."""
    words = [Path(f"/proc/sys/net/ipv4/tcp_{name}").read_text().split()[2] for name in ("rmem", "wmem")]
    return 2 * sum(map(int, words)) + MIB


def both_ways(ends: Ends) -> list[Stuck]:
    """A relay's two directions."""
    for end in (ends.client, ends.broker):
        end.setblocking(False)
    return [Stuck(ends.client, ends.broker), Stuck(ends.broker, ends.client)]


def test_a_receiver_that_stops_reading_stops_the_sender_and_costs_no_memory() -> None:
    """Its forwarder is killed in this state, and nothing changes; then it reads on, and everything is there."""
    with scene(forwarders=1) as on, on.crowd() as crowd:
        crowd.open(UNREAD_RELAYS)
        crowd.exchange()
        wait_until_at_rest(on.cluster)
        memory = [cluster_memory_kib(on.cluster)]
        ways = [way for ends in crowd.relays for way in both_ways(ends)]
        fill_up(ways, socket_buffers_max())
        memory.append(cluster_memory_kib(on.cluster))
        stuck = [way.way.sent_bytes for way in ways]
        kill_forwarder(on.cluster)
        fill_up(ways, socket_buffers_max())
        wait_until_at_rest(on.cluster)
        memory.append(cluster_memory_kib(on.cluster))
        print(f"sent before it stopped: {min(stuck)} to {max(stuck)} bytes; memory of the cluster, KiB: {memory}")
        assert sum(stuck) > 2 * FLAT_KIB * 1024  # otherwise the memory would prove nothing
        assert max(memory) - memory[0] < FLAT_KIB
        read_on(ways)
        assert [way.way for way in ways if not way.way.is_whole] == []


def read_on(ways: list[Stuck]) -> None:
    """All clients read again, while a little more is sent."""
    left = dict.fromkeys(range(len(ways)), MORE_BYTES)
    deadline = time.monotonic() + 2 * BUSY_S

    def done(number: int) -> bool:
        return left[number] <= 0 and ways[number].way.got_bytes >= ways[number].way.sent_bytes

    while not all(map(done, left)) and time.monotonic() < deadline:
        for number, way in enumerate(ways):
            if left[number] > 0:
                left[number] -= way.push(left[number])
            while way.pull():
                pass


# ---- killed before the relay starts

BEYOND_THE_CHANNEL = 800
"""More relays than the channel to the fd store has room for, while the supervisor reads none of it."""


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process stands still."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def readable(clients: list[socket.socket]) -> list[socket.socket]:
    """Those that were sent something, or are closed."""
    poll = select.poll()
    by_descriptor = {client.fileno(): client for client in clients}
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLIN)
    return [by_descriptor[descriptor] for descriptor, _ in poll.poll(0)]


def told_of(clients: list[socket.socket]) -> list[socket.socket]:
    """Return those that were sent something. Others may be closed by now: their process is being ended."""

    def peek(client: socket.socket) -> bytes:
        with suppress(ConnectionResetError):
            return client.recv(1, socket.MSG_PEEK)
        return b""

    return [client for client in readable(clients) if peek(client)]


def secured(directory: Path) -> tuple[Tables, dict[str, Any]]:
    """Tables for a cluster that authenticates clients, and itself to brokers; and what its crowd needs to know."""
    key, own_token = b"k" * 32, make_token(b"k" * 32, "proxy")
    (directory / "key").write_bytes(key)
    (directory / "token").write_text(own_token)
    tables: Tables = {
        "brokers": {"credentials": {"method": "token", "file": str(directory / "token")}},
        "authentication": {"enabled": True},
        "authentication.token": {"secret_key": str(directory / "key")},
    }
    return tables, {"token": make_token(key, "alice"), "told": ("alice", own_token)}


@pytest.mark.parametrize("is_secured", [False, True], ids=["open", "secured"])
def test_a_forwarder_killed_between_connected_and_the_start_of_relays_tells_no_client_that_it_has_one(
    tmp_path: Path, is_secured: bool
) -> None:
    """Those that the store holds go on in the successor; the others' clients were sent nothing, and come again."""
    tables, known = secured(tmp_path) if is_secured else ({}, {})
    with (
        scene(tables, forwarders=1) as on,
        on.crowd(**known) as crowd,
        many_open_files(8000),
        ExitStack() as opened,
    ):
        crowd.open(1)
        (forwarder,) = forwarders_running(on.cluster).values()
        with stopped(on.cluster.pid):
            clients, brokers = crowd.shake_hands(BEYOND_THE_CHANNEL, opened)
            eventually(lambda: readable(clients), what="a relay has started", every_s=0.01)
            assert kill(forwarder)
            told = readable(clients)  # a killed process sends nothing more
            waiting = [client for client in clients if client not in told]
        print(f"{len(told)} clients were told something, {len(waiting)} nothing")
        assert told
        assert waiting
        for client in waiting:
            with suppress(ConnectionResetError):
                assert client.recv(1) == b"", "it was sent nothing, and is closed"
        answers = [(client, receive_command(client).type) for client in told]
        # On a slow machine some have waited so long for their relay that they were told to come again.
        assert {answer for _, answer in answers} <= {BaseCommand.CONNECTED, BaseCommand.ERROR}
        started = [client for client, answer in answers if answer == BaseCommand.CONNECTED]
        for number, client in enumerate(started):
            client.sendall(number.to_bytes(4, "big"))
        found = set()
        for broker in brokers:
            with suppress(ConnectionResetError):
                found.add(broker.recv(4))
        assert found - {b""} == {number.to_bytes(4, "big") for number in range(len(started))}
        crowd.open(len(waiting))
        crowd.exchange()


# ---- many

COME_AND_GO = 6000
WARM_UP = 1000
LEAK_KIB = 5120
"""In one process, after all of them: 0.85 KiB for each relay would be too much."""


def come_and_go(crowd: Crowd, count: int) -> None:
    """So many relays are opened, used and closed."""
    for _ in range(count // AT_ONCE):
        crowd.open(AT_ONCE)
        crowd.exchange()
        crowd.close_all()


def test_thousands_of_relays_come_and_go_and_leave_nothing_behind() -> None:
    """Descriptors, pipes and memory of every process are where they were after the first of them."""
    with scene(forwarders=1) as on, on.crowd() as crowd:
        come_and_go(crowd, WARM_UP)
        wait_until_empty(on.cluster)
        wait_until_at_rest(on.cluster)
        early = use_of_all(on.cluster)
        come_and_go(crowd, COME_AND_GO)
        wait_until_empty(on.cluster)

        late = early

        def are_closed() -> bool:
            nonlocal late
            late = use_of_all(on.cluster)
            return late.keys() == early.keys() and all(late[pid].files <= early[pid].files for pid in late)

        with suppress(NotInTimeError):  # connections of our own looks end a bit later; what is wrong is told below
            eventually(are_closed, what="no process has more open than before")
    print("before", *early.values(), "after", *late.values(), sep="\n  ")
    assert late.keys() == early.keys()
    for pid, use in late.items():
        # The pool of pipes grows to what relays needed at the same time, which is chance.
        assert use.pipe_ends <= early[pid].pipe_ends + 4 * AT_ONCE
        assert use.files <= early[pid].files
        assert use.memory_kib <= early[pid].memory_kib + LEAK_KIB


@pytest.mark.parametrize("forwarders", [2, 4])
def test_a_thousand_clients_are_shared_out_evenly(forwarders: int) -> None:
    """A slow trickle makes it easy; here half of them come at the same time."""
    with scene(forwarders=forwarders) as on, on.crowd() as crowd, many_open_files(8000):
        crowd.open(500)
        crowd.open(500, at_once=500)
        shares = connections(on.cluster)
    print(f"{forwarders} forwarders: {shares}")
    assert sum(shares) == 1000
    assert max(shares) <= 1.3 * 1000 / forwarders


RELAYS_WANTED = count_of("RELAYS", in_ci=2000)
"""Their pipes are more than a user without privileges may have in full size (1,024, pipe-user-pages-soft)."""
DESCRIPTORS_SPARE = 2000
"""The supervisor's reserve, by how much a forwarder's limit is lower than the supervisor's, pipes, and all else."""


def test_thousands_of_relays_without_privileges_are_taken_over() -> None:
    """The kernel bounds what a user without privileges may keep in pipes and send between processes; this is below.

    The number is lower where this machine allows fewer open files: the supervisor needs two for each relay, and so
    does this test.
    """
    with many_open_files(3 * RELAYS_WANTED) as limit, scene(forwarders=1, unprivileged=True) as on:
        assert all(capabilities(pid) == 0 for pid in (on.cluster.pid, *children(on.cluster.pid)))
        relays = min(RELAYS_WANTED, (limit - DESCRIPTORS_SPARE - open_files()) // 2)
        with on.crowd() as crowd:
            crowd.open(relays, at_once=200)
            crowd.exchange()
            on.cluster.wait_for_total(STORED, relays)
            pause_s = pause_after_kill(on.cluster)
            crowd.exchange()
            wait_for_connections(on.cluster, relays)
            assert crowd.ended() == 0
        wait_until_empty(on.cluster)
    print(f"{relays} relays, taken over after {pause_s:.2f} s")


def open_files() -> int:
    """How many files this process has open, those of other tests among them."""
    return len(os.listdir("/proc/self/fd"))


def capabilities(pid: int) -> int:
    """What the kernel lets a process do beyond its user's rights."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))
