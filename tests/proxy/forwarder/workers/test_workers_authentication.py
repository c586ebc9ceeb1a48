"""proxy.forwarder.workers.authentication: what an auth worker is told of a client, and what its answers become."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
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

from proto import commands
from proto.connect_rules import BrokerIdentity, OriginalCredentials, Refusal
from proto.frames import FrameDecoder
from proto.pulsar_pb2 import BaseCommand, ServerError
from proto.rpc_frames import Reply
from proto.rpc_pb2 import AuthenticateRequest, AuthenticateResponse, Principal, Status
from proxy.forwarder.workers.authentication import (
    ANONYMOUS,
    AuthenticationExchange,
    Challenge,
    ClientEndpoint,
    ClientIdentity,
    Denial,
    ExchangeSettings,
)
from proxy.runtime.rpc.errors import RpcCallRefused, RpcConnectionLost, RpcDeadlineExceeded, RpcResponseCorrupt

BEHIND = Principal(type="User", name="alice", method="token", proxy="proxy-a")


class ScriptedExchange:
    """One client's rounds with a worker that answers from a list."""

    def __init__(self, answers: list[Any], command: BaseCommand | None = None, *, forwards: bool = False) -> None:
        self.worker = FakeAuthentication(answers)
        self.connect = connect() if command is None else command
        self.authentication = AuthenticationExchange(
            self.worker,  # type: ignore[arg-type]
            ClientEndpoint(CLIENT, 0.0, CERTIFICATE),
            self.connect.connect,
            ExchangeSettings(10.0, forwards_credentials=forwards, one_round_methods=frozenset({"token"})),
        )

    async def first(self) -> Any:
        return await self.authentication.authenticate_round(self.connect)

    async def next(self, data: bytes = b"answer", method: str = "token") -> Any:
        return await self.authentication.authenticate_round(auth_response(data, method))


# ---- what the worker is told


@pytest.mark.conforms("pip-30.2", "pip-30.17")
async def test_the_first_round_tells_all_that_is_known_of_the_client() -> None:
    exchange = ScriptedExchange(
        [], connect(auth_method_name="tls", auth_data=b"", original_principal="bob", proxy_version="1")
    )
    await exchange.first()
    [request] = exchange.worker.requests
    assert request.first_round
    assert (request.method, request.data, request.client_address) == ("tls", b"", CLIENT)
    assert request.client_certificate == CERTIFICATE
    assert (request.original_principal, request.through_proxy) == ("bob", True)


@pytest.mark.parametrize(("version", "through_proxy"), [(None, False), ("", True), ("4.0.8", True)])
async def test_whether_a_client_says_that_it_is_a_proxy(version: str | None, through_proxy: bool) -> None:
    """An empty version is a version: the field's presence counts, as in the broker."""
    fields = {} if version is None else {"proxy_version": version}
    exchange = ScriptedExchange([], connect(**fields))
    await exchange.first()
    assert exchange.worker.requests[0].through_proxy is through_proxy


async def test_a_later_round_tells_nothing_but_its_answer() -> None:
    """Security: what CONNECT said stays as it was said; the worker goes by its own state."""
    exchange = ScriptedExchange([challenge(b"q"), authenticated()])
    await exchange.first()
    await exchange.next(b"answer", "other-method")
    request = exchange.worker.requests[1]
    assert not request.first_round
    assert (request.method, request.data) == ("other-method", b"answer")
    assert request.authentication_id == exchange.worker.requests[0].authentication_id
    assert not request.client_certificate
    assert not request.original_principal
    assert not request.through_proxy


@pytest.mark.parametrize("method", [None, ""])
async def test_a_client_without_a_method(method: str | None) -> None:
    command = connect()
    command.connect.ClearField("auth_method_name")
    if method is not None:
        command.connect.auth_method_name = method
    exchange = ScriptedExchange([], command)
    await exchange.first()
    assert exchange.worker.requests[0].method == "none"


async def test_an_answer_without_a_body(autojump_clock: trio.testing.MockClock) -> None:
    """Empty data, no method: it is the worker's to deny."""
    exchange = ScriptedExchange([challenge(b"q"), denied("method_changed")])
    await exchange.first()
    assert isinstance(
        await exchange.authentication.authenticate_round(BaseCommand(type=BaseCommand.AUTH_RESPONSE)), Denial
    )
    assert exchange.worker.rounds[1] == ("", b"")


# ---- what its answers become


async def test_a_yes() -> None:
    exchange = ScriptedExchange([authenticated()])
    identity = await exchange.first()
    assert identity == ClientIdentity(ALICE, b"sealed")
    assert identity.role == "alice"
    assert identity.original is None


@pytest.mark.conforms("pip-30.12")
async def test_a_question() -> None:
    exchange = ScriptedExchange([challenge(b"q")], connect(auth_method_name="sasl", protocol_version=15))
    question = await exchange.first()
    assert isinstance(question, Challenge)
    decoder = FrameDecoder(max_frame_bytes=1024)
    decoder.receive_data(question.frame)
    frame = decoder.next_frame()
    assert frame is not None
    asked = commands.parse_command(frame.command).auth_challenge
    assert (asked.challenge.auth_method_name, asked.challenge.auth_data) == ("sasl", b"q")
    assert asked.protocol_version == 15
    assert asked.server_version.startswith("pulsar-trio-proxy")


@pytest.mark.parametrize(
    ("answer", "code", "message", "reason"),
    [
        (denied("bad_signature"), ServerError.AuthenticationError, "Failed to authenticate", "bad_signature"),
        (denied("invalid_roles"), ServerError.AuthorizationError, "Invalid roles.", "invalid_roles"),
        (denied("not_a_proxy"), ServerError.NotAllowedError, "Must not provide proxyVersion", "not_a_proxy"),
        (denied(""), ServerError.AuthenticationError, "Failed to authenticate", "no verdict"),
        (AuthenticateResponse(), ServerError.AuthenticationError, "Failed to authenticate", "no verdict"),
    ],
)
async def test_a_no(answer: AuthenticateResponse, code: int, message: str, reason: str) -> None:
    """Security: an answer that says nothing is a no as well."""
    assert await ScriptedExchange([answer]).first() == Denial(Refusal(code, message), reason)


async def test_an_exchange_that_is_lost_says_nothing_about_the_client() -> None:
    """Java clients give up for good on AuthenticationError; this one should come again."""
    exchange = ScriptedExchange([challenge(b"q"), denied("unknown_round")])
    await exchange.first()
    denial = await exchange.next()
    assert isinstance(denial, Denial)
    assert denial.refusal.code == ServerError.ServiceNotReady


async def test_no_answer_is_no_verdict() -> None:
    exchange = ScriptedExchange([RpcConnectionLost("gone")])
    with pytest.raises(RpcConnectionLost):
        await exchange.first()
    assert len(exchange.worker.requests) == 1


# ---- what goes on to brokers


async def test_credentials_are_forwarded_where_they_are_wanted() -> None:
    identity = await ScriptedExchange([authenticated()], forwards=True).first()
    assert identity.original == OriginalCredentials("token", SECRET.decode())
    assert identity.broker_identity("token", b"the proxy's") == BrokerIdentity(
        "token", b"the proxy's", "alice", identity.original
    )


async def test_credentials_stay_here_otherwise() -> None:
    identity = await ScriptedExchange([authenticated()]).first()
    assert identity.original is None
    assert identity.broker_identity("basic", b"p:w") == BrokerIdentity("basic", b"p:w", "alice", None)


@pytest.mark.parametrize("data", [b"", b"\xff\xfe"])
async def test_credentials_that_are_empty_or_no_text_are_not_forwarded(data: bytes) -> None:
    identity = await ScriptedExchange([authenticated()], connect(auth_data=data), forwards=True).first()
    assert identity.original is None


async def test_credentials_exchanged_in_several_rounds_are_not_forwarded() -> None:
    """They prove nothing to other servers (apache/pulsar#19291); a mechanism's last message makes a second round."""
    exchange = ScriptedExchange([challenge(b"q"), authenticated()], forwards=True)
    await exchange.first()
    identity = await exchange.next()
    assert identity.role == "alice"
    assert identity.original is None


FROM_PROXY = {
    "auth_method_name": "basic",
    "auth_data": b"the proxy's",
    "original_principal": "alice",
    "proxy_version": "1",
}


@pytest.mark.parametrize("rounds_before", [0, 2])
async def test_original_credentials_from_a_proxy_are_forwarded_after_any_number_of_rounds(rounds_before: int) -> None:
    command = connect(**FROM_PROXY, original_auth_method="token", original_auth_data="the client's")
    exchange = ScriptedExchange([*[challenge(b"q")] * rounds_before, authenticated(BEHIND)], command, forwards=True)
    verdict = await exchange.first()
    for _ in range(rounds_before):
        verdict = await exchange.next()
    assert verdict.role == "alice"
    assert verdict.original == OriginalCredentials("token", "the client's")


async def test_a_proxys_own_credentials_are_never_taken_for_its_clients() -> None:
    """Security: a broker would take the client for the proxy."""
    identity = await ScriptedExchange([authenticated(BEHIND)], connect(**FROM_PROXY), forwards=True).first()
    assert identity.role == "alice"
    assert identity.original is None


async def test_original_credentials_claimed_by_a_client_are_not_forwarded() -> None:
    command = connect(original_auth_method="token", original_auth_data="another's", auth_data=b"")
    assert (await ScriptedExchange([authenticated()], command, forwards=True).first()).original is None


async def test_without_authentication_no_principal_is_named() -> None:
    assert ANONYMOUS.role == ""
    assert ANONYMOUS.broker_identity("token", b"x") == BrokerIdentity("token", b"x", "", None)


async def test_credentials_are_not_shown() -> None:
    identity = await ScriptedExchange([authenticated()], forwards=True).first()
    assert SECRET.decode() not in repr(identity) + repr(identity.broker_identity("", b""))


# ---- rounds without a task


class CallbackRounds:
    """One client's rounds by callback, with a worker that a test answers; ``spawned``: tasks that were started."""

    def __init__(self, answers: list[Any], method: str = "token") -> None:
        self.reached = True
        self.calls: list[tuple[AuthenticateRequest, Callable[[Reply | None], None]]] = []
        self.cancelled: list[int] = []
        self.outcomes: list[Any] = []
        self.spawned: list[Callable[[], Awaitable[None]]] = []
        self.exchange = ScriptedExchange(answers, connect(auth_method_name=method))
        self.exchange.worker.start_call = self._start_call  # type: ignore[method-assign]
        self.exchange.worker.cancel_call = self.cancelled.append  # type: ignore[method-assign]

    def _start_call(self, _method: int, body: bytes, on_reply: Any, *, timeout_ms: int, deadline: float) -> int | None:
        assert timeout_ms == pytest.approx((deadline - trio.current_time()) * 1000, abs=2)
        if not self.reached:
            return None
        self.calls.append((AuthenticateRequest.FromString(body), on_reply))
        return len(self.calls) - 1

    def start_soon(self, async_fn: Callable[..., Awaitable[None]], *args: Any) -> None:
        self.spawned.append(partial(async_fn, *args))

    def start(self, command: BaseCommand | None = None) -> None:
        command = self.exchange.connect if command is None else command
        self.exchange.authentication.start_round(command, self, self.outcomes.append)

    def answer(self, response: AuthenticateResponse | bytes) -> None:
        body = response if isinstance(response, bytes) else response.SerializeToString()
        self.calls[-1][1](Reply(0, Status.OK, body))


async def test_each_round_by_callback_costs_no_task() -> None:
    rounds = CallbackRounds([])
    rounds.start()
    rounds.answer(challenge(b"q"))
    rounds.start(auth_response(b"answer", "token"))
    rounds.answer(authenticated())
    question, identity = rounds.outcomes
    assert isinstance(question, Challenge)
    assert identity == ClientIdentity(ALICE, b"sealed")
    (first, _), (second, _) = rounds.calls
    assert (first.first_round, first.data, second.first_round, second.data) == (True, SECRET, False, b"answer")
    assert not rounds.spawned


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (Reply(0, Status.TOO_MANY_REQUESTS, detail="full"), RpcCallRefused),
        (Reply(0, Status.OK, b"\xff\xff"), RpcResponseCorrupt),
    ],
)
async def test_a_reply_that_is_no_verdict_is_an_error(reply: Reply, error: type[Exception]) -> None:
    """Security: whatever an auth worker sends, only a verdict lets a client in."""
    rounds = CallbackRounds([])
    rounds.start()
    rounds.calls[0][1](reply)
    [outcome] = rounds.outcomes
    assert isinstance(outcome, error)


async def test_a_worker_that_cannot_be_reached_at_once_is_waited_for_in_a_task() -> None:
    rounds = CallbackRounds([authenticated()])
    rounds.reached = False
    rounds.start()
    await rounds.spawned[0]()
    assert rounds.outcomes == [ClientIdentity(ALICE, b"sealed")]


async def test_a_first_round_of_a_one_round_method_is_repeated_where_its_worker_is_lost() -> None:
    rounds = CallbackRounds([authenticated()])
    rounds.start()
    rounds.calls[0][1](None)
    assert not rounds.outcomes
    await rounds.spawned[0]()
    assert rounds.outcomes == [ClientIdentity(ALICE, b"sealed")]
    assert rounds.exchange.worker.requests == [rounds.calls[0][0]], "as it was sent before"


async def test_no_other_round_is_sent_twice() -> None:
    """Security: what begins an exchange of several rounds, or answers a challenge, may be good for one use."""
    several = CallbackRounds([], method="sasl")
    several.start()
    several.calls[0][1](None)
    answer = CallbackRounds([])
    answer.start()
    answer.answer(challenge(b"q"))
    answer.start(auth_response(b"answer", "token"))
    answer.calls[1][1](None)
    for rounds in (several, answer):
        assert isinstance(rounds.outcomes[-1], RpcConnectionLost)
        assert not rounds.spawned


async def test_no_round_is_repeated_after_the_deadline(autojump_clock: trio.testing.MockClock) -> None:
    rounds = CallbackRounds([])
    rounds.start()
    await trio.sleep(10)
    rounds.calls[0][1](None)
    assert isinstance(rounds.outcomes[0], RpcDeadlineExceeded)
    assert not rounds.spawned


async def test_a_round_under_way_is_cancelled_with_its_exchange() -> None:
    rounds = CallbackRounds([])
    rounds.start()
    rounds.exchange.authentication.abandon_exchange()
    rounds.exchange.authentication.abandon_exchange()
    assert rounds.cancelled == [0]
