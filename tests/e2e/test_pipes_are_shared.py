"""Pipes are shared fairly: clients that read nothing leave large ones for others."""

from __future__ import annotations

import hashlib
import os
import socket
from contextlib import suppress
from pathlib import Path
from threading import Thread

from proxy.forwarder.relay.pipes import HUGE_PIPES_MAX, LARGE_PIPES_MAX, SMALL_PIPE_BYTES
from proxy.forwarder.relay.sockets import NOT_SENT_BYTES_MAX

from .lab.cluster import ProxyCluster
from .lab.crowd import Crowd, many_open_files, read_exactly
from .lab.processes import Use
from .lab.waiting import eventually
from .test_relays_survive import MIB, forwarders_running, kill_forwarder, scene

STUCK = HUGE_PIPES_MAX + LARGE_PIPES_MAX + 100
FLOOD = os.urandom(1 << 16)
BULK = os.urandom(MIB) * 64
CHECKED = 32
"""Relays of which the bytes are compared at the end; the first ones hold the largest pipes."""


def stop_reading(crowd: Crowd, cluster: ProxyCluster) -> list[list[int]]:
    """Send to all clients of a crowd, which read nothing, until each of them holds a pipe; return the portions."""
    (pid,) = forwarders_running(cluster).values()
    sent: list[list[int]] = [[] for _ in crowd.relays]
    for ends in crowd.relays:
        ends.broker.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, len(FLOOD))
        ends.broker.setblocking(False)

    def all_hold_a_pipe() -> bool:
        # Few bytes at a time: what the kernel keeps of each direction until its receiver reads may grow to megabytes.
        for number, ends in enumerate(crowd.relays):
            with suppress(BlockingIOError):
                sent[number].append(ends.broker.send(FLOOD))
        return Use.of(pid).pipe_ends >= 2 * len(crowd.relays)

    eventually(all_hold_a_pipe, what=f"{len(crowd.relays)} relays hold a pipe each", every_s=0.02)
    return sent


def arrives_whole(client: socket.socket, portions: list[int]) -> bool:
    """Read what a client was sent; return True if it is the same."""
    expected, received = hashlib.sha256(), hashlib.sha256()
    for size in portions:
        expected.update(FLOOD[:size])
    received.update(read_exactly(client, sum(portions)))
    return received.digest() == expected.digest()


def portions_of_bulk(crowd: Crowd, cluster: ProxyCluster) -> float:
    """Send 64 MiB to a client at another address; return in how many portions they were relayed."""
    crowd.open(1, client_host="127.0.0.2")
    ends = crowd.relays[-1]
    moved_before, before = totals(cluster)
    sender = Thread(target=ends.broker.sendall, args=(BULK,), daemon=True)
    sender.start()
    assert read_exactly(ends.client, len(BULK)) == BULK
    sender.join()
    eventually(lambda: totals(cluster)[0] >= moved_before + len(BULK), what="all bytes are counted")
    return totals(cluster)[1] - before


def totals(cluster: ProxyCluster) -> tuple[float, float]:
    """Bytes and portions to clients, of all relays."""
    scrape = cluster.metrics()
    kinds = ("bytes", "ops")
    moved, portions = (scrape.total(f"pulsar_proxy_binary_{kind}_total", direction="to_client") for kind in kinds)
    return moved, portions


def unsent_bytes_max(port: int) -> int:
    """Return the most bytes that the kernel keeps for one peer of a listener (the send queues of proc(5), net/tcp)."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return max(int(row[4].partition(":")[0], 16) for row in rows if int(row[1].partition(":")[2], 16) == port)


def test_clients_that_read_nothing_leave_large_pipes_to_another_address() -> None:
    """One address has more relays that read nothing than there are large pipes. Also after a kill of the forwarder, of
    which the successor takes over all those pipes; once they are read, every byte arrives.
    """
    with many_open_files(20_000), scene(forwarders=1) as on, on.crowd() as crowd:
        crowd.open(STUCK)
        sent = stop_reading(crowd, on.cluster)
        assert 0 < unsent_bytes_max(on.cluster.port) < 2 * NOT_SENT_BYTES_MAX
        portions = [portions_of_bulk(crowd, on.cluster)]
        kill_forwarder(on.cluster)
        portions.append(portions_of_bulk(crowd, on.cluster))
        print(f"{max(map(sum, sent))} bytes or less went to each client that reads nothing")
        print(f"64 MiB went in {portions} portions beside {STUCK} relays that read nothing")
        assert max(portions) < len(BULK) / SMALL_PIPE_BYTES / 2
        assert all(arrives_whole(crowd.relays[number].client, sent[number]) for number in range(CHECKED))
