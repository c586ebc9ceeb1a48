"""proxy.runtime.network.credentials: one exchange stays with one auth worker."""

from __future__ import annotations

from typing import Any

import trio
import trio.testing

from proto.rpc_pb2 import BrokerCredentialsResponse, Method
from proxy.runtime.network.credentials import CredentialExchange, NoCredentials, credentials_for


class FakeAuth:
    def __init__(self) -> None:
        self.picked = 0
        self.expires_at_unix_ms = 0
        self.calls: list[tuple[int, Any, float]] = []

    def pick_client(self) -> FakeAuth:
        self.picked += 1
        return self

    def new_id(self) -> int:
        return self.picked

    async def call(self, method: int, request: Any, _type: Any, *, timeout_s: float, retry: bool) -> Any:
        await trio.lowlevel.checkpoint()
        assert retry is not request.HasField("challenge"), "a challenge must not be answered twice"
        self.calls.append((method, request, timeout_s))
        return BrokerCredentialsResponse(
            method="token", data=b"x", incomplete=not request.challenge, expires_at_unix_ms=self.expires_at_unix_ms
        )


async def test_an_exchange_stays_with_one_worker_under_one_id() -> None:
    auth = FakeAuth()
    credentials = credentials_for(auth, "broker", configured=True)  # type: ignore[arg-type]
    assert isinstance(credentials, CredentialExchange)
    assert not credentials.complete
    assert await credentials.auth_data_for(None) == ("token", b"x")
    await credentials.auth_data_for(b"")
    assert not credentials.complete
    await credentials.auth_data_for(b"q")
    assert credentials.complete
    assert auth.picked == 1
    requests = [request for _, request, _ in auth.calls]
    assert {method for method, _, _ in auth.calls} == {Method.BROKER_CREDENTIALS}
    assert {request.exchange_id for request in requests} == {1}
    assert {request.broker_host for request in requests} == {"broker"}
    assert [request.HasField("challenge") for request in requests] == [False, True, True], "empty is not absent"
    assert requests[2].challenge == b"q"


async def test_no_credentials_configured() -> None:
    credentials = credentials_for(FakeAuth(), "broker", configured=False)  # type: ignore[arg-type]
    assert isinstance(credentials, NoCredentials)
    assert await credentials.auth_data_for(None) == ("", b"")
    assert await credentials.auth_data_for(b"q") == ("none", b"")
    assert credentials.complete
    assert credentials.expires_at_unix_ms == 0


async def test_when_credentials_end_is_what_the_last_answer_says() -> None:
    auth = FakeAuth()
    credentials = credentials_for(auth, "broker", configured=True)  # type: ignore[arg-type]
    assert credentials.expires_at_unix_ms == 0
    for auth.expires_at_unix_ms in (2**53, 7, 0):
        await credentials.auth_data_for(None)
        assert credentials.expires_at_unix_ms == auth.expires_at_unix_ms
