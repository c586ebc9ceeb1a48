"""proxy.forwarder.workers.authentication.Reauthenticator: a client's rounds after the first ones."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
import trio.testing
from forwarder_fakes import (
    ALICE,
    CERTIFICATE,
    CLIENT,
    SECRET,
    FakeAuthentication,
    auth_response,
    authenticated,
    challenge,
    connect,
    denied,
)

from proto.connect_rules import OriginalCredentials
from proto.pulsar_pb2 import BaseCommand, CommandConnect
from proto.rpc_pb2 import AuthenticateRequest, Principal
from proxy.forwarder.workers.authentication import (
    AuthenticationExchange,
    Challenge,
    ClientEndpoint,
    ClientIdentity,
    Denial,
    ExchangeSettings,
    Reauthenticator,
)
from proxy.runtime.rpc.errors import RpcConnectionLost

FRESH = b"fr3sh"


class Again:
    """A client that was authenticated by this CONNECT, and a worker that decides on what it says next."""

    def __init__(self, answers: list[Any], *, forwards: bool = False, **fields: Any) -> None:
        self.worker = FakeAuthentication(answers)
        self.connect = connect(**fields).connect
        self.begun: list[CommandConnect] = []
        self._forwards = forwards
        self.reauthenticator = Reauthenticator(self.connect, self._begin)

    def _begin(self, fresh: CommandConnect) -> AuthenticationExchange:
        self.begun.append(fresh)
        return AuthenticationExchange(
            self.worker,  # type: ignore[arg-type]
            ClientEndpoint(CLIENT, 0.0, CERTIFICATE),
            fresh,
            ExchangeSettings(10.0, forwards_credentials=self._forwards, one_round_methods=frozenset({"token"})),
        )

    async def says(self, data: bytes = FRESH, method: str = "token") -> Any:
        return await self.reauthenticator.reauthenticate(auth_response(data, method))

    @property
    def requests(self) -> list[AuthenticateRequest]:
        return self.worker.requests


async def test_an_answer_is_verified_as_a_connect_with_it_would_be() -> None:
    """Security: all else is as the client's CONNECT said it: an answer gains nothing that a connection would not."""
    it = Again([authenticated()], original_principal="bob", proxy_version="1", protocol_version=15)
    await it.says()
    [request] = it.requests
    assert request.first_round
    assert (request.method, request.data) == ("token", FRESH)
    assert (request.original_principal, request.through_proxy) == ("bob", True)
    assert (request.client_address, request.client_certificate) == (CLIENT, CERTIFICATE)
    [fresh] = it.begun
    assert fresh.protocol_version == 15
    assert it.connect.auth_data == SECRET, "the CONNECT itself is not changed"


@pytest.mark.parametrize(("said", "method"), [("basic", "basic"), ("token", "token"), ("", "token")])
async def test_the_method_is_the_answers_else_the_sessions(said: str, method: str) -> None:
    it = Again([denied()])
    await it.says(method=said)
    assert it.requests[0].method == method


async def test_an_answer_without_a_body_is_empty() -> None:
    """Security: not what CONNECT said, once more."""
    it = Again([denied()])
    await it.reauthenticator.reauthenticate(BaseCommand(type=BaseCommand.AUTH_RESPONSE))
    assert it.requests[0].data == b""


async def test_rounds_continue_with_one_worker_and_start_again_after_the_verdict() -> None:
    it = Again([challenge(b"q1"), challenge(b"q2"), authenticated(), authenticated()])
    verdicts = [await it.says(data) for data in (b"a0", b"a1", b"a2", b"again")]
    assert [type(verdict) for verdict in verdicts] == [Challenge, Challenge, ClientIdentity, ClientIdentity]
    assert [request.first_round for request in it.requests] == [True, False, False, True]
    first, second, third, fourth = (request.authentication_id for request in it.requests)
    assert first == second == third != fourth
    assert it.worker.given_up == []


@pytest.mark.parametrize("end", [denied(), RpcConnectionLost("gone")])
async def test_after_any_end_of_rounds_a_new_exchange_starts(end: Any) -> None:
    it = Again([challenge(b"q"), end, authenticated()])
    await it.says()
    try:
        assert isinstance(await it.says(), Denial)
    except RpcConnectionLost:
        assert it.worker.given_up == [it.requests[0].authentication_id], "the worker may have more than one connection"
    assert isinstance(await it.says(), ClientIdentity)
    assert [request.first_round for request in it.requests] == [True, False, True]


async def test_only_a_successful_verdict_changes_the_last_identity() -> None:
    bob = Principal(type="User", name="bob", method="token")
    it = Again([authenticated(), denied(), challenge(b"q"), RpcConnectionLost("gone"), authenticated(bob)])
    assert it.reauthenticator.last_identity is None
    await it.says()
    assert it.reauthenticator.last_identity == ClientIdentity(ALICE, b"sealed")
    await it.says()
    await it.says()
    with pytest.raises(RpcConnectionLost):
        await it.says()
    assert it.reauthenticator.last_identity == ClientIdentity(ALICE, b"sealed"), "no verdict changes its identity"
    await it.says()
    assert it.reauthenticator.last_identity == ClientIdentity(bob, b"sealed")


async def test_the_latest_credentials_are_forwarded() -> None:
    it = Again([authenticated()], forwards=True)
    verdict = await it.says()
    assert verdict.original == OriginalCredentials("token", FRESH.decode())


# ---- the client leaves


async def test_an_end_between_two_rounds_is_told() -> None:
    it = Again([challenge(b"q")])
    await it.says()
    it.reauthenticator.abandon_exchange()
    it.reauthenticator.abandon_exchange()
    assert it.worker.given_up == [it.requests[0].authentication_id]


async def test_an_end_without_rounds_sends_nothing() -> None:
    it = Again([authenticated()])
    it.reauthenticator.abandon_exchange()
    assert it.worker.given_up == []


@pytest.mark.parametrize(("verdict", "told"), [(challenge(b"q"), True), (authenticated(), False), (denied(), False)])
async def test_an_end_in_the_middle_of_a_round(nursery: trio.Nursery, verdict: Any, told: bool) -> None:
    """A challenge that comes then will never be answered."""
    gate = trio.Event()

    def later() -> Callable[[], Awaitable[Any]]:
        async def answer() -> Any:
            await gate.wait()
            return verdict

        return answer

    it = Again([later()])
    nursery.start_soon(it.says)
    await trio.testing.wait_all_tasks_blocked()
    it.reauthenticator.abandon_exchange()
    assert it.worker.given_up == []
    gate.set()
    await trio.testing.wait_all_tasks_blocked()
    assert it.worker.given_up == ([it.requests[0].authentication_id] if told else [])


async def test_a_round_that_is_cancelled_is_given_up(autojump_clock: trio.testing.MockClock) -> None:
    it = Again([challenge(b"q"), trio.sleep_forever])
    await it.says()
    with trio.move_on_after(1):
        await it.says()
    assert it.worker.given_up == [it.requests[0].authentication_id]


async def test_credentials_are_not_shown() -> None:
    it = Again([authenticated()], forwards=True)
    verdict = await it.says()
    shown = repr(it.reauthenticator) + repr(verdict)
    assert SECRET.decode() not in shown
    assert FRESH.decode() not in shown
