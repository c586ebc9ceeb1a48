"""proxy.forwarder.service: what a forwarder says of sessions that end soon, and of kernel TLS."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from test_forwarder_service import Serve, serve  # noqa: F401 -- a fixture
from tls_ends import ALL_CIPHERS, kernel_with

from proto.client_machine import State
from proto.rpc_pb2 import Principal, StoredRelay
from proto.session_clock import SessionClock
from proxy.forwarder.lifetime.closing import CloseReason
from proxy.forwarder.lifetime.session import ExpiringSession
from proxy.forwarder.lifetime.terms import reauthentication_unavailable
from proxy.forwarder.relay.manager import RelayManager


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


@pytest.mark.parametrize("setting", ["off", "auto"])
async def test_kernel_tls(serve: Serve, setting: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    with kernel_with(*ALL_CIPHERS):
        it = await serve(relay={"kernel_tls": setting})
        service, is_on = it.service, setting != "off"

        def told() -> dict[str, object]:
            return {key: value for key, value in service.status().items() if key.startswith("kernel_tls")}

        def metric(name: str) -> float | None:
            return service._context.registry.get_sample_value(f"pulsar_proxy_{name}")

        assert told() == ({"kernel_tls": True, "kernel_tls_relays": 0} if is_on else {})
        assert (metric("kernel_tls_available"), metric("kernel_tls_relays")) == (is_on, 0)
        monkeypatch.setattr(RelayManager, "kernel_tls_relays", 3)
        assert told() == {"kernel_tls": is_on, "kernel_tls_relays": 3}, "also those of before a reload"
        assert metric("kernel_tls_relays") == 3


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
