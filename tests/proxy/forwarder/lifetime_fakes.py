"""A session with a lifetime, played: its clock, its tokens, and what its client says."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
import trio.testing
from forwarder_fakes import (
    ALICE,
    Play,
    auth_response,
    connect,
    lookup,
)

from proto import commands
from proto.commands import AUTH_REFRESH
from proto.pulsar_pb2 import BaseCommand, ServerError
from proto.rpc_pb2 import AuthenticateResponse, Principal
from proxy.forwarder.lifetime.reauthentication import SESSION_EXPIRED

WALL_CLOCK_S = 1_800_000_000

EXPIRED = (ServerError.AuthenticationError, SESSION_EXPIRED)
FAILED = (ServerError.AuthenticationError, "Failed to authenticate")

NEW_SECRET = b"fr3sh-t0ken"

Answer = Callable[[], Awaitable[AuthenticateResponse]]


def unix_ms() -> float:
    return (WALL_CLOCK_S + trio.current_time()) * 1000


def token(lives_s: float, principal: Principal = ALICE, sealed: bytes = b"sealed") -> Answer:
    """An auth worker's yes to a token that lives so long from then on; 0: for ever."""

    async def answer() -> AuthenticateResponse:
        mine = Principal()
        mine.CopyFrom(principal)
        if lives_s:
            mine.expires_at_unix_ms = round(unix_ms() + lives_s * 1000)
        await trio.lowlevel.checkpoint()
        return AuthenticateResponse(authenticated={"principal": mine, "sealed_principal": sealed})

    return answer


def gated(gate: trio.Event, answer: Any) -> Callable[[], Awaitable[Any]]:
    """The same, once the gate is open."""

    async def wait() -> Any:
        await gate.wait()
        return await answer() if callable(answer) else answer

    return wait


def answer_again(data: bytes = NEW_SECRET, method: str = "token") -> BaseCommand:
    return auth_response(data, method)


class RunningSession(Play):
    """A session whose first token lives so long; ``verdicts``: on the client's answers."""

    def __init__(
        self,
        nursery: trio.Nursery,
        lives_s: float,
        *verdicts: Any,
        fraction: float = 0.0,
        principal: Principal = ALICE,
        **tables: Any,
    ) -> None:
        tables = {"limits": {"keep_alive_interval_ms": 10**9}, **tables}
        tables["authentication"] = {"enabled": True, "failure_delay_ms": 200, **tables.get("authentication", {})}
        super().__init__(nursery, **tables)
        self.began = trio.current_time()
        coordinator = self.relays.reauthentication
        self.relays.now = coordinator.now = trio.current_time
        coordinator.unix_ms, coordinator.fraction = unix_ms, lambda: fraction
        coordinator._metrics = self.metrics.reauthentication
        self.workers.authentication.answers = [token(lives_s, principal), *verdicts]
        nursery.start_soon(coordinator.run)

    async def enter(self, *, refresh: bool = True, **fields: Any) -> RunningSession:
        """Go through CONNECT."""
        await self.client.send(connect(feature_flags={"supports_auth_refresh": refresh}, **fields))
        await self.client.expect_command(BaseCommand.CONNECTED)
        return self

    async def at(self, second: float) -> None:
        """Wait for a second of this session's life."""
        await trio.sleep_until(self.began + second)

    @property
    def second(self) -> float:
        return trio.current_time() - self.began

    async def must_be_asked(self, data: bytes = AUTH_REFRESH, method: str = "token") -> float:
        """Hear a challenge; when."""
        asked = (await self.client.expect_command(BaseCommand.AUTH_CHALLENGE)).auth_challenge
        assert (asked.challenge.auth_method_name, asked.challenge.auth_data) == (method, data)
        return self.second

    async def must_serve(self, request_id: int = 7) -> None:
        """A lookup is answered."""
        await self.client.send(lookup(request_id=request_id))
        answer = await self.client.expect_command(BaseCommand.LOOKUP_RESPONSE)
        assert answer.lookup_topic_response.request_id == request_id

    async def settle(self) -> None:
        """Let everything happen that needs no time to pass."""
        await trio.testing.wait_all_tasks_blocked()

    def counted(self) -> tuple[float, float, float]:
        """Successes, failures, and connections killed."""
        return (
            self.value("pulsar_proxy_reauthentication_success_total", method="token") or 0,
            self.value("pulsar_proxy_reauthentication_failure_total", method="token") or 0,
            self.value("pulsar_proxy_expired_connections_killed_total") or 0,
        )

    async def must_be_over(self, cause: str, error: tuple[int, str]) -> float:
        """It ends, with that error; when it began to."""
        assert await self.client.expect_error() == error
        second = self.second
        assert await self.end() == cause
        return second


Begin = Callable[..., RunningSession]


class Held:
    """A session that expires while its client's answer is verified; a lookup came in the meantime."""

    def __init__(self, begin: Begin, *verdicts: Any, **tables: Any) -> None:
        self.verdict = trio.Event()
        first, *others = verdicts
        self.it = begin(100, gated(self.verdict, first), *others, **tables)

    async def hold(self) -> RunningSession:
        it = await self.it.enter()
        await it.must_be_asked()
        await it.at(99)
        await it.client.send(answer_again())
        await it.at(101)
        await it.client.send(commands.ping(), lookup(request_id=1), lookup(request_id=2), commands.ping())
        await it.client.expect_command(BaseCommand.PONG)
        await it.at(102)
        assert it.workers.forwarded == []
        self.verdict.set()
        return it


@pytest.fixture
def life(nursery: trio.Nursery) -> Begin:
    return lambda *args, **kwargs: RunningSession(nursery, *args, **kwargs)
