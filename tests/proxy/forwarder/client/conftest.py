"""Sessions over both kinds of streams."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import trio
import trio.testing
from forwarder_fakes import (
    Play,
)
from relay_fakes import end_all, unblocked_pair

from proxy.runtime.loop.reactor import Reactor
from proxy.runtime.loop.tcp_stream import TcpStream

Start = Callable[..., Play]


@pytest.fixture(params=["memory", "reactor"])
async def play(
    request: pytest.FixtureRequest, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Start]:
    """Start a session; takes the configuration's tables. Its client's stream is read by a task, as TLS is, or plain."""
    # These are no TCP sockets.
    monkeypatch.setattr("proxy.forwarder.relay.manager.tune_for_relay", lambda *_: None)
    streams: list[TcpStream] = []

    def pair() -> tuple[TcpStream, TcpStream]:
        one, other = (TcpStream(end) for end in unblocked_pair())
        streams.extend((one, other))
        return one, other

    def start(*, lockstep: bool = False, relays: bool = False, **tables: Any) -> Play:
        """``relays``: a relay will start, which needs sockets on both sides."""
        if lockstep:  # nothing leaves that the client has not asked for: no socket is like that
            return Play(nursery, lockstep=True, **tables)
        it = Play(nursery, streams=pair() if relays or request.param == "reactor" else None, **tables)
        if relays:
            it.workers.connect_broker(*pair())
            nursery.start_soon(it.relays._engine.run)
        return it

    if request.param == "reactor":
        reactor = Reactor()
        reactor.may_linger = lambda: False
        nursery.start_soon(reactor.run)
        await trio.testing.wait_all_tasks_blocked()
    yield start
    await end_all(nursery)
    for stream in streams:
        stream.close_now()
