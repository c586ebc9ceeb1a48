"""Sessions over both kinds of streams."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from forwarder_fakes import (
    Play,
)
from relay_fakes import unblocked_pair

from proxy.runtime.loop.reactor import Reactor
from proxy.runtime.loop.tcp_stream import TcpStream

Start = Callable[..., Play]


@pytest.fixture(params=["memory", "reactor"])
async def play(
    request: pytest.FixtureRequest, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Start]:
    """Start a session; takes the configuration's tables. Its client's stream is read by a task, as TLS is, or plain."""
    if request.param == "memory":
        yield partial(Play, nursery)
        return
    # These are no TCP sockets.
    monkeypatch.setattr("proxy.forwarder.relay.manager.tune_for_relay", lambda *_: None)
    reactor = Reactor()
    reactor.may_linger = lambda: False
    nursery.start_soon(reactor.run)
    await trio.testing.wait_all_tasks_blocked()
    streams: list[TcpStream] = []

    def start(*, lockstep: bool = False, **tables: Any) -> Play:
        if lockstep:  # nothing leaves that the client has not asked for: no socket is like that
            return Play(nursery, lockstep=True, **tables)
        pair = [TcpStream(end) for end in unblocked_pair()]
        streams.extend(pair)
        return Play(nursery, streams=(pair[0], pair[1]), **tables)

    yield start
    nursery.cancel_scope.cancel()
    with trio.CancelScope(shield=True):
        await trio.testing.wait_all_tasks_blocked()
    for stream in streams:
        stream.socket.close()
