"""Relays of sessions that expire, between sockets of our own: forwarders are killed, clients are asked for fresh tokens
all the while, and every frame arrives whole, once and in order.
"""

from __future__ import annotations

import random
import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path

import trio
from local.tokens import make_token

from .lab.certificates import Authority
from .lab.cluster import HOST, merged
from .lab.counts import count_of
from .lab.framed_streams import FramedCopyLoop
from .test_relays_survive import ADOPTED, Scene, assert_whole, kill_forwarder, scene, wait_until_empty

KEY = b"a shared secret of thirty-two by"
LIFETIME_S = 20
"""Of tokens while forwarders are killed; and, shorter, where none is."""
LIFETIME_CALM_S = 16
ABSENCE_S_MAX = 0.4
"""Who is asked at 95 % of his life, and lost a second of it to the token's whole seconds, has half a second left. Where
a machine starts forwarders more slowly than that, sessions may expire meanwhile: gently, and that is all.
"""
STREAMS = 10
KILLS = count_of("KILLS", in_ci=10)
"""By hand PULSAR_PROXY_TEST_KILLS, as 20."""
SHORTEST_LIFE_S = 1.2
"""A worker that dies within a second of its start is replaced after a pause, in which no challenge is sent."""
CALM_S = 20
"""Longer than a token lives then. That renewed sessions are renewed again, test_reauthentication shows."""
SUCCESSES = "pulsar_proxy_reauthentication_success_total"
FAILURES = "pulsar_proxy_reauthentication_failure_total"


def tokens(lifetime_s: float) -> Callable[[], str]:
    """Fresh ones."""
    return partial(make_token, KEY, "alice", lifetime_s)


def authentication(directory: Path) -> dict[str, dict[str, object]]:
    """The tables that make a cluster take our tokens."""
    key = directory / "key"
    key.write_bytes(KEY)
    return {"authentication": {"enabled": True}, "authentication.token": {"secret_key": str(key)}}


def streams_on(on: Scene, lifetime_s: float, tls: ssl.SSLContext | None = None) -> FramedCopyLoop:
    """Not yet running."""
    return FramedCopyLoop(on.cluster.port, STREAMS, tokens(lifetime_s), on.broker_port, tls)


def assert_renewed(streams: FramedCopyLoop, on: Scene) -> None:
    """Each client was asked, and each one answered."""
    asked = [count for number, count in enumerate(streams.challenges) if number not in streams.expired]
    assert min(asked) >= 1, streams.challenges
    assert on.cluster.metrics().total(FAILURES) == 0


async def kill_in_turn(on: Scene, absences_s: list[float]) -> None:
    """One forwarder after the other, each as soon as its predecessor is replaced, for longer than a token lives; how
    long they were away.
    """
    pause, until = random.Random(5), trio.current_time() + LIFETIME_S
    while len(absences_s) < KILLS or trio.current_time() < until:
        began_at = trio.current_time()
        await trio.to_thread.run_sync(kill_forwarder, on.cluster, len(absences_s) % 2)
        absences_s.append(trio.current_time() - began_at)
        await trio.sleep(SHORTEST_LIFE_S / 2 + pause.random() * 0.3)


def test_forwarders_are_killed_under_sessions_that_expire(tmp_path: Path) -> None:
    """All streams are whole, both ways; each client was asked for fresh tokens meanwhile."""
    with scene(authentication(tmp_path), forwarders=2) as on:
        wait_until_empty(on.cluster)
        streams = streams_on(on, LIFETIME_S)
        absences_s: list[float] = []
        trio.run(streams.run, partial(kill_in_turn, on, absences_s))
        assert_whole(streams)
        assert not streams.expired or max(absences_s) > ABSENCE_S_MAX, "expired, although a client was there to ask"
        assert on.cluster.metrics().total(ADOPTED) > 0
        assert_renewed(streams, on)
        wait_until_empty(on.cluster)
        assert "Traceback" not in on.cluster.log_text()
    asked, kills = sum(streams.challenges), len(absences_s)
    print(f"{streams.moved_bytes >> 20} MiB, {asked} challenges, {kills} kills, {len(streams.expired)} expired")


def test_sessions_that_expire_behind_tls(tmp_path: Path) -> None:
    """The same rules in user space, where nothing outlives its process."""
    authority = Authority(tmp_path, "authority")
    server = authority.server("server")
    listener = {"listener": {"tls": {"certificate": server.certificate, "key": server.key}}}
    with scene(merged(authentication(tmp_path), listener)) as on:
        streams = streams_on(on, LIFETIME_CALM_S, ssl.create_default_context(cafile=authority.file))
        trio.run(streams.run, partial(trio.sleep, CALM_S))
        assert_whole(streams)
        assert not streams.expired
        assert_renewed(streams, on)
        assert on.cluster.metrics().total(SUCCESSES) == sum(streams.challenges)
    print(f"{streams.moved_bytes >> 20} MiB, {sum(streams.challenges)} challenges on {HOST}")
