"""Relays of sessions that expire, between sockets of our own: forwarders are killed, clients are asked for fresh tokens
all the while, and every frame arrives whole, once and in order.
"""

from __future__ import annotations

import random
import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import trio
from local.tokens import make_token

from .lab.certificates import Authority
from .lab.cluster import HOST
from .lab.framed_streams import FramedStreams
from .test_relays_survive import ADOPTED, Scene, assert_whole, kill_forwarder, scene, wait_until_empty

pytestmark = pytest.mark.timeout(120)

KEY = b"a shared secret of thirty-two by"
LIFETIME_S = 30
"""Of tokens while forwarders are killed: some seconds before its end a client is asked, and somebody must be there who
asks, however slowly this machine starts another forwarder.
"""
LIFETIME_CALM_S = 8
STREAMS = 10
KILLS = 30
SHORTEST_LIFE_S = 1.2
"""Whoever dies within a second of its start is replaced after a pause, in which nobody asks anybody anything."""
CALM_S = 18
"""As long as a token lives then, twice over."""
SUCCESSES = "pulsar_proxy_reauthentication_success_total"
FAILURES = "pulsar_proxy_reauthentication_failure_total"
EXPIRED = "pulsar_proxy_expired_connections_killed_total"


def tokens(lifetime_s: float) -> Callable[[], str]:
    """Fresh ones."""
    return partial(make_token, KEY, "alice", lifetime_s)


def authentication(directory: Path) -> dict[str, dict[str, object]]:
    """The tables that make a cluster take our tokens."""
    key = directory / "key"
    key.write_bytes(KEY)
    return {"authentication": {"enabled": True}, "authentication.token": {"secret_key": str(key)}}


def streams_on(on: Scene, lifetime_s: float, tls: ssl.SSLContext | None = None) -> FramedStreams:
    """Not yet running."""
    return FramedStreams(on.cluster.port, STREAMS, tokens(lifetime_s), on.broker_port, tls)


def assert_renewed(streams: FramedStreams, on: Scene, *, each: int) -> None:
    """Everybody was asked so often, and nobody failed to answer."""
    assert min(streams.challenges) >= each, streams.challenges
    scrape = on.cluster.metrics()
    assert scrape.total(FAILURES) == 0
    assert scrape.total(EXPIRED) == 0


async def kill_in_turn(on: Scene, streams: FramedStreams) -> None:
    """One forwarder after the other, each as soon as its predecessor is replaced; until everybody was asked."""
    pause = random.Random(5)
    kills = 0
    while kills < KILLS or (min(streams.challenges) == 0 and not streams.errors):
        await trio.to_thread.run_sync(kill_forwarder, on.cluster, kills % 2)
        kills += 1
        await trio.sleep(SHORTEST_LIFE_S / 2 + pause.random() * 0.3)


def test_forwarders_are_killed_under_sessions_that_expire(tmp_path: Path) -> None:
    """All streams are whole, both ways; each client was asked for fresh tokens meanwhile."""
    with scene(authentication(tmp_path), forwarders=2) as on:
        wait_until_empty(on.cluster)
        streams = streams_on(on, LIFETIME_S)
        trio.run(streams.run, partial(kill_in_turn, on, streams))
        assert_whole(streams)
        assert on.cluster.metrics().total(ADOPTED) > 0
        assert_renewed(streams, on, each=1)
        wait_until_empty(on.cluster)
        assert "Traceback" not in on.cluster.log_text()
    print(f"{streams.moved_bytes >> 20} MiB, {sum(streams.challenges)} challenges")


def test_sessions_that_expire_behind_tls(tmp_path: Path) -> None:
    """The same rules in user space, where nothing outlives its process."""
    authority = Authority(tmp_path, "authority")
    server = authority.server("server")
    listener = {"listener": {"tls": {"certificate": server.certificate, "key": server.key}}}
    with scene(authentication(tmp_path) | listener) as on:
        streams = streams_on(on, LIFETIME_CALM_S, ssl.create_default_context(cafile=authority.file))
        trio.run(streams.run, partial(trio.sleep, CALM_S))
        assert_whole(streams)
        assert_renewed(streams, on, each=2)
        assert on.cluster.metrics().total(SUCCESSES) == sum(streams.challenges)
    print(f"{streams.moved_bytes >> 20} MiB, {sum(streams.challenges)} challenges on {HOST}")
