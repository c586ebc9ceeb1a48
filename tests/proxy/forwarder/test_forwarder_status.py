"""proxy.forwarder.service: what a forwarder says of sessions that end soon."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from test_forwarder_service import Serve, serve  # noqa: F401 -- a fixture

from proto.client_machine import State
from proto.rpc_pb2 import Principal, StoredRelay
from proto.session_clock import SessionClock
from proxy.forwarder.lifetime.closing import CloseReason
from proxy.forwarder.lifetime.session import ExpiringSession
from proxy.forwarder.lifetime.terms import reauthentication_unavailable


def followed(client: str, lives_s: float | None, *, closing: CloseReason = CloseReason.NOT_CLOSING) -> ExpiringSession:
    """A session that began at second 1000."""
    relay = StoredRelay(client_address=client, principal="alice")
    clock = None
    if lives_s is not None:
        clock = SessionClock(
            Principal(name="alice"),
            lifetime_ms_max=round(lives_s * 1000),
            now_s=1000,
            now_unix_ms=0,
            fraction=0,
        )
    one = ExpiringSession(relay, clock, reauthentication_unavailable(relay))
    one.close_reason = closing
    return one


class InLookupMode:
    """A session, as far as a status needs it."""

    state = State.LOOKUP

    def __init__(self, one: ExpiringSession | None) -> None:
        self.lifetime = SimpleNamespace(expiring_session=one)


async def test_sessions_near_expiry(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    service = (await serve()).service
    assert "deny_list" not in service.status()
    assert service.status()["sessions_near_expiry"] == {"expired_and_idle": 0, "ending_within_60_s": 0, "soonest": []}
    relays = [
        followed("relay:1", 70),
        followed("relay:2", 50),  # expired, and idle
        followed("relay:3", None),  # its messages are counted, no more
        followed("relay:4", 75, closing=CloseReason.FAILED),
        followed("relay:5", 0),  # never
        followed("relay:6", 10_000),
    ]
    monkeypatch.setattr(service._relays, "expiring_sessions", lambda: relays)
    monkeypatch.setattr(service._relays, "now", lambda: 1060.0)
    sessions = None, followed("lookup:1", 65), followed("lookup:2", 1)
    service._client_connections.update(InLookupMode(one) for one in sessions)  # type: ignore[misc]
    assert service._metrics.reauthentication.expired_sessions.collect()[0].samples[0].value == 2
    near = service.status()["sessions_near_expiry"]
    service._client_connections.clear()
    assert near == {
        "expired_and_idle": 2,
        "ending_within_60_s": 2,
        "soonest": [
            {"client": "lookup:1", "principal": "alice", "seconds_left": 5.0},
            {"client": "relay:1", "principal": "alice", "seconds_left": 10.0},
        ],
    }
