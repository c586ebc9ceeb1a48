"""proxy.forwarder.client.handshake within a session, as dialogues: CONNECT, the rounds of authentication, hurry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from forwarder_fakes import (
    ALICE,
    AUTHENTICATED,
    CERTIFICATE,
    SECRET,
    Play,
    auth_response,
    authenticated,
    challenge,
    connect,
    denied,
    lookup,
)

from proto import commands
from proto.client_machine import State
from proto.connect_rules import OriginalCredentials
from proto.pulsar_pb2 import BaseCommand, CommandConnected, ServerError
from proto.rpc_pb2 import (
    AuthenticateResponse,
    Principal,
)
from proxy.runtime.rpc.client import RpcConnectionLost, RpcDeadlineExceeded

Start = Callable[..., Play]


# ---- what a CONNECT may say


@pytest.mark.parametrize("version", [0, 9])
async def test_a_protocol_version_too_old(play: Start, version: int) -> None:
    it = play()
    await it.client.send(connect(protocol_version=version))
    code, _ = await it.client.expect_error()
    assert code == ServerError.UnsupportedVersionError
    assert await it.end() == "not_allowed"


@pytest.mark.parametrize(
    "authentication",
    [
        {},
        {"enabled": True},
        {"enabled": False, "proxy_roles": ["proxy-a"]},  # no configuration that is checked has this
    ],
)
async def test_a_client_may_not_say_that_it_is_a_proxy(play: Start, authentication: dict[str, Any]) -> None:
    """Security: a broker decides by this field whether to believe an original principal.

    Where no proxy may come, no client is asked for its role; least of all where no client is ever asked.
    """
    it = play(authentication=authentication)
    await it.client.send(connect("b0:6650", proxy_version="4.0.8", original_principal="admin"))
    assert await it.client.expect_error() == (ServerError.NotAllowedError, "Must not provide proxyVersion")
    assert await it.end() == "not_allowed"
    assert it.workers.opened == []
    assert it.workers.authentication.rounds == []


PROXIES = {**AUTHENTICATED, "proxy_roles": ["proxy-a"]}


BEHIND = Principal(type="User", name="alice", method="token", proxy="proxy-a")


async def test_a_connect_of_a_proxy_is_left_to_the_auth_worker(play: Start) -> None:
    it = play(authentication=PROXIES)
    it.workers.authentication.answers = [authenticated(BEHIND)]
    await it.client.send(connect(proxy_version="a", original_principal="alice"))
    await it.client.expect_command(BaseCommand.CONNECTED)
    [request] = it.workers.authentication.requests
    assert (request.through_proxy, request.original_principal, request.first_round) == (True, "alice", True)
    assert request.client_certificate == CERTIFICATE
    await it.client.send(lookup())
    await it.client.expect_command(BaseCommand.LOOKUP_RESPONSE)
    [(_, identity, _)] = it.workers.forwarded
    assert (identity.role, identity.principal.proxy) == ("alice", "proxy-a")


@pytest.mark.parametrize(
    ("reason", "code", "message"),
    [
        ("invalid_roles", ServerError.AuthorizationError, "Invalid roles."),
        ("not_a_proxy", ServerError.NotAllowedError, "Must not provide proxyVersion"),
    ],
)
async def test_roles_that_do_not_go_together_are_told_as_brokers_do_and_after_the_fixed_delay(
    play: Start, reason: str, code: int, message: str, autojump_clock: trio.testing.MockClock
) -> None:
    it = play(authentication=PROXIES)
    it.workers.authentication.answers = [denied(reason)]
    started = trio.current_time()
    await it.client.send(connect("b0:6650", original_principal="admin"))
    assert await it.client.expect_error() == (code, message)
    assert trio.current_time() - started == pytest.approx(0.2)
    assert await it.end() == "authentication_failed"
    assert it.workers.opened == []


async def test_without_authentication_no_original_principal_is_forwarded(play: Start) -> None:
    it = play(brokers={"forward_authorization_credentials": True})
    await it.client.send(connect(original_principal="admin", original_auth_data="x", original_auth_method="token"))
    await it.client.expect_command(BaseCommand.CONNECTED)
    await it.client.send(lookup())
    await it.client.expect_command(BaseCommand.LOOKUP_RESPONSE)
    [(_, identity, _)] = it.workers.forwarded
    assert (identity.role, identity.sealed, identity.original) == ("", b"", None)


@pytest.mark.parametrize("target", ["", "b0:6650"])
@pytest.mark.parametrize("forwards", [False, True])
async def test_whether_credentials_go_on(play: Start, target: str, forwards: bool) -> None:
    it = play(
        relays=bool(target),
        authentication=AUTHENTICATED,
        brokers={"forward_authorization_credentials": forwards},
    )
    await it.client.send(connect(target))
    await it.client.expect_command(BaseCommand.CONNECTED)
    if target:
        [(_, identity, _)] = it.workers.opened
    else:
        await it.client.send(lookup())
        await it.client.expect_command(BaseCommand.LOOKUP_RESPONSE)
        [(_, identity, _)] = it.workers.forwarded
    assert identity.original == (OriginalCredentials("token", SECRET.decode()) if forwards else None)


async def test_original_principal_fields_of_a_client_that_is_no_proxy_are_ignored(play: Start) -> None:
    it = play(authentication=AUTHENTICATED)
    await it.client.send(connect(original_principal="admin", original_auth_data="x", original_auth_method="token"))
    await it.client.expect_command(BaseCommand.CONNECTED)
    assert it.session.identity.role == "alice"


# ---- authentication


@pytest.mark.conforms("pip-30.2", "pip-30.3", "pip-30.11")
async def test_authenticated_at_once(play: Start) -> None:
    it = play(authentication=AUTHENTICATED)
    await it.client.send(connect())
    await it.client.expect_command(BaseCommand.CONNECTED)
    assert it.workers.authentication.rounds == [("token", SECRET)]
    await it.client.send(lookup())
    await it.client.expect_command(BaseCommand.LOOKUP_RESPONSE)
    [(_, identity, _)] = it.workers.forwarded
    assert (identity.principal, identity.sealed) == (ALICE, b"sealed")


@pytest.mark.conforms("pip-30.10", "pip-30.12", "pip-30.16", "pip-30.25")
async def test_challenge_rounds(play: Start) -> None:
    it = play(authentication=AUTHENTICATED)
    it.workers.authentication.answers = [challenge(b"q1"), challenge(b"q2"), authenticated()]
    await it.client.send(connect(auth_method_name="sasl", auth_data=b"a0"))
    for number in (1, 2):
        asked = (await it.client.expect_command(BaseCommand.AUTH_CHALLENGE)).auth_challenge
        assert (asked.challenge.auth_method_name, asked.challenge.auth_data) == ("sasl", b"q%d" % number)
        assert asked.protocol_version == 21
        await it.client.send(auth_response(b"a%d" % number, "sasl"))
    await it.client.expect_command(BaseCommand.CONNECTED)
    assert it.workers.authentication.rounds == [("sasl", b"a0"), ("sasl", b"a1"), ("sasl", b"a2")]


@pytest.mark.conforms("pip-30.8")
async def test_the_servers_last_word_must_be_answered_before_connected(play: Start) -> None:
    """To the client it is a challenge as any other; only the answer to it leads on."""
    it = play(authentication=AUTHENTICATED)
    it.workers.authentication.answers = [challenge(b"v=signature"), authenticated()]
    await it.client.send(connect(auth_method_name="SCRAM-SHA-256"))
    asked = (await it.client.expect_command(BaseCommand.AUTH_CHALLENGE)).auth_challenge.challenge
    assert (asked.auth_method_name, asked.auth_data) == ("SCRAM-SHA-256", b"v=signature")
    await trio.testing.wait_all_tasks_blocked()
    assert it.session.state is State.AWAITING_AUTH_RESPONSE
    assert it.session.identity.role == ""
    await it.client.send(auth_response(b"", "SCRAM-SHA-256"))
    await it.client.expect_command(BaseCommand.CONNECTED)
    assert it.workers.authentication.rounds[1] == ("SCRAM-SHA-256", b"")


@pytest.mark.conforms("pip-30.50")
async def test_a_round_answered_twice(play: Start) -> None:
    """Security: the second answer is out of turn while the first one is verified, and the connection ends."""
    it = play(authentication=AUTHENTICATED)
    gate = trio.Event()

    async def slow() -> AuthenticateResponse:
        await gate.wait()
        return authenticated()

    it.workers.authentication.answers = [challenge(b"q"), slow]
    await it.client.send(connect())
    await it.client.expect_command(BaseCommand.AUTH_CHALLENGE)
    await it.client.send(auth_response(b"a"), auth_response(b"a"))
    code, _ = await it.client.expect_error()
    assert code == ServerError.NotAllowedError
    gate.set()
    assert await it.end() == "not_allowed"
    assert len(it.workers.authentication.rounds) == 2
    assert it.session.identity.role == ""


@pytest.mark.conforms("pip-30.21", "pip-30.51")
@pytest.mark.parametrize("data", [b"", b"\xff" * 1000])
async def test_the_data_of_an_answer_is_passed_to_the_auth_worker(play: Start, data: bytes) -> None:
    it = play(authentication=AUTHENTICATED)
    it.workers.authentication.answers = [challenge(b"q"), authenticated()]
    await it.client.send(connect(auth_data=data))
    await it.client.expect_command(BaseCommand.AUTH_CHALLENGE)
    await it.client.send(auth_response(data))
    await it.client.expect_command(BaseCommand.CONNECTED)
    assert it.workers.authentication.rounds == [("token", data), ("token", data)]


@pytest.mark.conforms("pip-30.49")
async def test_another_method_in_an_answer_reaches_the_auth_worker_as_it_is(
    play: Start, autojump_clock: trio.testing.MockClock
) -> None:
    it = play(authentication=AUTHENTICATED)
    it.workers.authentication.answers = [challenge(b"q"), denied("other_method")]
    await it.client.send(connect(auth_method_name="sasl"))
    await it.client.expect_command(BaseCommand.AUTH_CHALLENGE)
    await it.client.send(auth_response(b"a", "token"))
    await it.client.expect_error()
    assert it.workers.authentication.rounds[1] == ("token", b"a")


@pytest.mark.parametrize("command", [lookup(), connect(), BaseCommand(type=BaseCommand.FLOW)])
async def test_any_other_command_in_answer_to_a_challenge(play: Start, command: BaseCommand) -> None:
    it = play(authentication=AUTHENTICATED)
    it.workers.authentication.answers = [challenge(b"q"), authenticated()]
    await it.client.send(connect())
    await it.client.expect_command(BaseCommand.AUTH_CHALLENGE)
    await it.client.send(command)
    await it.client.expect_error()
    assert await it.end() == "not_allowed"
    assert it.workers.forwarded == []


@pytest.mark.conforms("pip-30.44", "pip-30.55", "pip-30.56")
@pytest.mark.parametrize("verdict", [denied("expired"), denied(""), AuthenticateResponse()])
async def test_a_denial_is_generic_and_comes_after_the_fixed_delay(
    play: Start, verdict: AuthenticateResponse, autojump_clock: trio.testing.MockClock
) -> None:
    """Security: neither text nor time may help one who guesses. An answer without a verdict is a denial too."""
    it = play(authentication=AUTHENTICATED)
    it.workers.authentication.answers = [verdict]
    started = trio.current_time()
    await it.client.send(connect())
    assert await it.client.expect_error() == (ServerError.AuthenticationError, "Failed to authenticate")
    assert trio.current_time() - started == pytest.approx(0.2)
    assert await it.end() == "authentication_failed"
    assert it.workers.forwarded == []
    assert it.session.identity.role == ""


@pytest.mark.conforms("pip-1.40")
@pytest.mark.parametrize("accepted", [True, False])
async def test_only_a_client_that_was_accepted_reaches_a_broker(
    play: Start, autojump_clock: trio.testing.MockClock, accepted: bool
) -> None:
    it = play(relays=True, authentication=AUTHENTICATED)
    it.workers.authentication.answers = [authenticated() if accepted else denied()]
    await it.client.send(connect("b0:6650"))
    await it.client.expect_command(BaseCommand.CONNECTED if accepted else BaseCommand.ERROR)
    assert len(it.workers.opened) == accepted


@pytest.mark.conforms("pip-30.56")
async def test_a_denial_in_a_later_round_is_the_same(play: Start, autojump_clock: trio.testing.MockClock) -> None:
    it = play(authentication=AUTHENTICATED)
    it.workers.authentication.answers = [challenge(b"q"), denied()]
    await it.client.send(connect())
    await it.client.expect_command(BaseCommand.AUTH_CHALLENGE)
    started = trio.current_time()
    await it.client.send(auth_response(b"a"))
    assert await it.client.expect_error() == (ServerError.AuthenticationError, "Failed to authenticate")
    assert trio.current_time() - started == pytest.approx(0.2)


async def test_nothing_is_answered_while_a_denial_waits(play: Start, autojump_clock: trio.testing.MockClock) -> None:
    it = play(authentication={"enabled": True, "failure_delay_ms": 5000})
    it.workers.authentication.answers = [denied()]
    await it.client.send(connect())
    await trio.sleep(1)
    await it.client.send(lookup(), connect(), commands.ping())
    assert await it.client.expect_error() == (ServerError.AuthenticationError, "Failed to authenticate")
    assert it.workers.forwarded == []
    assert len(it.workers.authentication.rounds) == 1


@pytest.mark.conforms("pip-30.52")
@pytest.mark.parametrize("error", [RpcConnectionLost("gone"), RpcDeadlineExceeded("late")])
async def test_no_verdict_is_no_admission(play: Start, error: Exception) -> None:
    """Security: the auth worker is gone in the middle; deny, and never ask again."""
    it = play(authentication=AUTHENTICATED)
    it.workers.authentication.answers = [challenge(b"q"), error, authenticated()]
    await it.client.send(connect())
    await it.client.expect_command(BaseCommand.AUTH_CHALLENGE)
    await it.client.send(auth_response(b"a"))
    code, _ = await it.client.expect_error()
    assert code == ServerError.ServiceNotReady
    assert await it.end() == "authentication_unavailable"
    assert len(it.workers.authentication.rounds) == 2


async def test_without_authentication_no_auth_worker_is_asked(play: Start) -> None:
    it = await play().in_lookup_mode()
    assert it.workers.authentication.rounds == []


@pytest.mark.conforms("kip-368.52")
async def test_no_secret_in_any_log_or_error(play: Start, autojump_clock: trio.testing.MockClock) -> None:
    """Security: every way in which a session with a credential can end."""
    stories: list[tuple[list[Any], list[BaseCommand | bytes]]] = [
        ([denied()], []),
        ([RpcConnectionLost("gone")], []),
        ([authenticated()], [connect(), b"\x00\x00\x00\x06\x00\x00\x00\x02\xff\xff"]),
        ([challenge(b"q")], [auth_response(SECRET), lookup()]),
        ([challenge(b"q")], [b"\x7f\xff\xff\xff" + SECRET]),
        ([authenticated()], [lookup(), BaseCommand(type=BaseCommand.PRODUCER)]),
    ]
    with structlog.testing.capture_logs() as logs:
        for answers, says in stories:
            it = play(authentication=AUTHENTICATED)
            it.workers.authentication.answers = answers
            await it.client.send(connect())
            for one in says:
                await it.client.send(one)
                await trio.sleep(0.1)
            await trio.sleep(1)
            await it.client.stream.send_eof()
            assert SECRET not in await it.client.read_all()
            await it.end()
    assert logs
    assert SECRET.decode() not in str(logs)
    assert SECRET.hex() not in str(logs)


# ---- a client in a hurry


async def test_frames_wait_while_the_profile_is_asked_for(play: Start) -> None:
    """A client that does not wait for Connected must not be told, depending on a moment, that it is out of turn."""
    it = play()
    it.workers.profile_gate = trio.Event()
    await it.client.send(connect(), lookup("early", 1), commands.ping())
    await trio.testing.wait_all_tasks_blocked()
    await it.client.send(lookup("later", 2))
    await trio.testing.wait_all_tasks_blocked()
    assert (it.session.state, it.handshakes.count, it.workers.sent) == (State.AUTHENTICATING, 1, [])
    it.workers.profile_gate.set()
    await it.client.expect_command(BaseCommand.CONNECTED)
    kinds = {(await it.client.receive()).type for _ in range(3)}  # type: ignore[union-attr]
    assert kinds == {BaseCommand.PONG, BaseCommand.LOOKUP_RESPONSE}
    assert [topic for sent in it.workers.sent for topic in sent.topics] == ["early", "later"]
    assert not it.handshakes.count


@pytest.mark.parametrize("target", ["", "b0:6650"])
async def test_while_frames_wait_nothing_is_read(play: Start, target: str) -> None:
    """Security: no client may make us keep what it likes before it is authenticated."""
    it = play()
    it.workers.profile_gate = it.workers.broker_gate = trio.Event()
    await it.client.send(connect(target), BaseCommand(type=BaseCommand.PRODUCER, producer={"request_id": 5}))
    await trio.testing.wait_all_tasks_blocked()
    it.nursery.start_soon(it.client.send, *[b"\x00" * 60_000] * 20)
    await trio.testing.wait_all_tasks_blocked()
    assert len(it.session._transport._decoder.take_unread_data()) <= 65_536 + 100


async def test_with_a_fresh_profile_nothing_waits(play: Start) -> None:
    it = play()
    it.workers.profile = CommandConnected(server_version="b", protocol_version=20, max_message_size=12345)
    it.workers.is_profile_fresh = True
    await it.client.send(connect(), lookup("at once"))
    connected = (await it.client.expect_command(BaseCommand.CONNECTED)).connected
    assert connected.max_message_size == 12345
    await it.client.expect_command(BaseCommand.LOOKUP_RESPONSE)
    assert it.workers.profile_asked == 0


async def test_a_client_that_left_while_the_profile_was_asked_for(play: Start) -> None:
    it = play()
    it.workers.profile_gate = trio.Event()
    await it.client.send(connect(), lookup("early"))
    await trio.testing.wait_all_tasks_blocked()
    await it.client.stream.aclose()
    await trio.testing.wait_all_tasks_blocked()
    it.workers.profile_gate.set()
    assert await it.end() in {"client_closed", "client_broke_off"}
    assert not it.handshakes.count


async def test_the_handshakes_deadline_covers_the_profile(play: Start, autojump_clock: trio.testing.MockClock) -> None:
    it = play(limits={"handshake_timeout_ms": 3000})
    it.workers.profile_gate = trio.Event()
    await it.client.send(connect(), lookup("early"))
    code, _text = await it.client.expect_error()
    assert (code, trio.current_time()) == (ServerError.ServiceNotReady, pytest.approx(3))
    it.workers.profile_gate.set()
    assert await it.end() == "handshake_timeout"
    assert it.workers.forwarded == []


async def test_after_an_authentication_frames_wait_for_the_profile_too(play: Start) -> None:
    it = play(authentication=AUTHENTICATED)
    it.workers.profile_gate = trio.Event()
    await it.client.send(connect())
    await trio.testing.wait_all_tasks_blocked()
    await it.client.send(lookup("early"))
    await trio.testing.wait_all_tasks_blocked()
    it.workers.profile_gate.set()
    await it.client.expect_command(BaseCommand.CONNECTED)
    await it.client.expect_command(BaseCommand.LOOKUP_RESPONSE)
    [(_, identity, _)] = it.workers.forwarded
    assert identity.role == "alice"


async def test_drain_while_the_profile_is_asked_for(play: Start) -> None:
    it = play()
    it.workers.profile_gate = trio.Event()
    await it.client.send(connect())
    await trio.testing.wait_all_tasks_blocked()
    it.session.drain()
    await trio.testing.wait_all_tasks_blocked()
    assert not it.ended.is_set()
    it.workers.profile_gate.set()
    await it.client.expect_command(BaseCommand.CONNECTED)
    await it.client.expect_end()
    assert await it.end() == "shut_down"
