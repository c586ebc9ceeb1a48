"""proxy.forwarder.workers.clients: what a forwarder asks of the other workers, and what it tells a broker."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from forwarder_fakes import ALICE, CERTIFICATE, CLIENT, SECRET, Peer, auth_response, authenticated, connect, make_config

from proto import commands
from proto.connect_rules import OriginalCredentials
from proto.envelope import ENVELOPE_VERSION
from proto.pulsar_pb2 import BaseCommand, CommandConnected, ServerError
from proto.rpc_frames import Reply
from proto.rpc_pb2 import (
    AuthenticateResponse,
    BrokerCredentialsResponse,
    BrokerProfileResponse,
    EnvelopeRequest,
    Method,
    OriginalData,
    ResolveTargetResponse,
)
from proxy.forwarder.workers.authentication import ANONYMOUS, ClientEndpoint, ClientIdentity
from proxy.forwarder.workers.broker_links import BrokerRequest, TargetRefused
from proxy.forwarder.workers.clients import WorkerClients
from proxy.runtime.network.broker_link import BrokerLink, BrokerLinkFactory, BrokerLinkFailed
from proxy.runtime.rpc.errors import RpcConnectionLost, RpcError
from proxy.runtime.rpc.replies import PendingCall


class FakeClient:
    """One worker's RpcClient: answers by method, and remembers what it was asked."""

    def __init__(self, answers: dict[int, Any], *, reached: bool = True) -> None:
        self.answers = answers
        self.reached = reached
        self.asked_now: list[tuple[int, bytes, Any, int, float]] = []
        self.cancelled: list[int] = []
        self.begun: list[tuple[int, bytes, float]] = []
        self.call_begun = PendingCall()
        self.calls: list[tuple[int, Any, float, bool]] = []
        self._ids = iter(range(1, 100))

    def new_id(self) -> int:
        return next(self._ids)

    def start_call(self, method: int, body: bytes, on_reply: Any, *, timeout_ms: int, deadline: float) -> int | None:
        self.asked_now.append((method, body, on_reply, timeout_ms, deadline))
        return 1 if self.reached else None

    def cancel_call(self, number: int) -> None:
        self.cancelled.append(number)

    @asynccontextmanager
    async def open_call(self, method: int, body: bytes, deadline: float) -> AsyncIterator[PendingCall]:
        await trio.lowlevel.checkpoint()
        self.begun.append((method, body, deadline))
        yield self.call_begun

    async def call(self, method: int, request: Any, _type: Any, *, timeout_s: float, retry: bool = False) -> Any:
        await trio.lowlevel.checkpoint()
        self.calls.append((method, request, timeout_s, retry))
        answer = self.answers[method]
        if isinstance(answer, Exception):
            raise answer
        return answer


class FakePool:
    """Gives another worker each time."""

    def __init__(self, **_: Any) -> None:
        self.clients: list[FakeClient] = []
        self.answers: dict[int, Any] = {}
        self.reached = True

    def pick_client(self) -> FakeClient:
        self.clients.append(FakeClient(self.answers, reached=self.reached))
        return self.clients[-1]


class Setup:
    def __init__(self, **tables: dict[str, Any]) -> None:
        self.auth, self.lookup = FakePool(), FakePool()
        brokers = {"service_url": "pulsar://10.9.9.9,10.9.9.9:6651,10.9.9.9:6652"} | tables.get("brokers", {})
        tables = {**tables, "brokers": brokers}
        self.worker_clients = WorkerClients(make_config(**tables), self.auth, self.lookup, None)  # type: ignore[arg-type]


IDENTITY = ClientIdentity(ALICE, b"sealed")
FORWARDED = ClientIdentity(ALICE, b"sealed", OriginalCredentials("token", "the client's own"))


def head(identity: ClientIdentity) -> EnvelopeRequest:
    return EnvelopeRequest.FromString(Setup().worker_clients.envelope_head(identity, CLIENT))


def test_an_envelope_says_whose_requests_they_are() -> None:
    envelope = head(IDENTITY)
    assert list(envelope.requests) == []
    assert (envelope.principal_type, envelope.principal_name) == ("User", "alice")
    assert (envelope.sealed_principal, envelope.client_address) == (b"sealed", CLIENT)
    assert envelope.version == ENVELOPE_VERSION


def test_requests_go_without_credentials_where_none_are_forwarded() -> None:
    envelope = head(IDENTITY)
    assert not envelope.HasField("original_auth_data")
    assert not envelope.HasField("original_auth_method")


def test_forwarded_credentials_go_with_the_requests() -> None:
    envelope = head(FORWARDED)
    assert (envelope.original_auth_method, envelope.original_auth_data) == ("token", "the client's own")


@pytest.mark.parametrize("reached", [True, False])
async def test_an_envelope_that_goes_out_at_once(reached: bool) -> None:
    setup = Setup(limits={"lookup_timeout_ms": 4000})
    setup.lookup.reached = reached
    heard: list[Reply | None] = []
    assert setup.worker_clients.forward_envelope_now(b"envelope", 7.0, heard.append) is reached
    [(method, body, on_reply, timeout_ms, deadline)] = setup.lookup.clients[0].asked_now
    assert (method, body, deadline) == (Method.ENVELOPE, b"envelope", 7.0)
    assert timeout_ms == setup.worker_clients.answer_timeout_s * 1000
    assert setup.worker_clients.answer_timeout_s > 4, "longer than the lookup worker's own: its error says more"
    on_reply(None)
    assert heard == [None]


async def test_an_envelope_that_a_task_waits_for() -> None:
    setup = Setup()
    async with setup.worker_clients.forward_envelope(b"envelope", 7.0) as call:
        assert call is setup.lookup.clients[0].call_begun
    assert setup.lookup.clients[0].begun == [(Method.ENVELOPE, b"envelope", 7.0)]


async def test_each_envelope_goes_to_the_worker_that_is_least_busy_then() -> None:
    setup = Setup()
    setup.worker_clients.forward_envelope_now(b"envelope", 7.0, lambda _reply: None)
    async with setup.worker_clients.forward_envelope(b"envelope", 7.0):
        assert len(setup.lookup.clients) == 2


# ---- rounds of authentication


def client_end() -> ClientEndpoint:
    return ClientEndpoint(CLIENT, trio.current_time(), CERTIFICATE)


@pytest.mark.conforms("pip-30.46")
async def test_rounds_stay_with_one_worker_and_no_answer_is_given_twice(autojump_clock: trio.testing.MockClock) -> None:
    """Security: only what begins an exchange is asked again where the worker dies under it."""
    setup = Setup(limits={"handshake_timeout_ms": 6000}, authentication={"tls": {}})
    setup.auth.answers[Method.AUTHENTICATE] = AuthenticateResponse(challenge=b"q")
    command = connect(auth_method_name="tls")
    authentication = setup.worker_clients.new_authentication_exchange(client_end(), command.connect)
    await authentication.authenticate_round(command)
    await trio.sleep(2)
    await authentication.authenticate_round(auth_response(b"answer", "tls"))
    [client] = setup.auth.clients
    (_, first, first_timeout_s, first_retry), (_, second, second_timeout_s, second_retry) = client.calls
    assert (first.first_round, first.method, first.data, first.client_address) == (True, "tls", SECRET, CLIENT)
    assert (second.first_round, second.method, second.data) == (False, "tls", b"answer")
    assert first.authentication_id == second.authentication_id
    assert (first_timeout_s, second_timeout_s) == (pytest.approx(6), pytest.approx(4)), "one deadline for all rounds"
    assert (first_retry, second_retry) == (True, False)


TOKEN = {"secret_key": "x"}
BASIC = {"file": "x"}
SCRAM = {"file": "x"}
SASL = {"principal": "x", "keytab": "x"}
OIDC = {"allowed_issuers": ["https://issuer.example"], "allowed_audiences": ["x"]}


@pytest.mark.conforms("pip-30.52", "kip-590.30")
@pytest.mark.parametrize(
    ("authentication", "method", "retried"),
    [
        ({"token": TOKEN}, "token", True),
        ({"oidc": OIDC}, "token", True),
        ({"tls": {}}, "tls", True),
        ({"basic": BASIC}, "basic", True),
        ({"anonymous_role": "nobody"}, "none", True),
        ({"anonymous_role": "nobody"}, "", True),
        ({"scram": SCRAM}, "SCRAM-SHA-256", False),
        ({"scram": SCRAM}, "SCRAM-SHA-512", False),
        ({"sasl": SASL}, "sasl", False),
        ({"plugins": {"elsewhere": {}}}, "elsewhere", False),
        ({"plugins": {"elsewhere": {}}}, "token", False),  # it may be that plug-in's
        ({"token": TOKEN}, "basic", False),
        ({"token": TOKEN}, "none", False),
    ],
)
async def test_a_first_round_is_asked_again_for_methods_of_one_round_alone(
    authentication: dict[str, Any], method: str, retried: bool
) -> None:
    """Security: what begins an exchange of several rounds may be good for one use."""
    setup = Setup(authentication=authentication)
    setup.auth.answers[Method.AUTHENTICATE] = AuthenticateResponse(challenge=b"q")
    command = connect(auth_method_name=method)
    rounds = setup.worker_clients.new_authentication_exchange(client_end(), command.connect)
    await rounds.authenticate_round(command)
    [(_, request, _, retry)] = setup.auth.clients[0].calls
    assert (request.first_round, request.method, retry) == (True, method or "none", retried)


async def test_each_client_has_rounds_of_its_own() -> None:
    setup = Setup()
    setup.auth.answers[Method.AUTHENTICATE] = AuthenticateResponse(challenge=b"q")
    client = FakeClient(setup.auth.answers)
    setup.auth.pick_client = lambda: client  # type: ignore[method-assign]
    for _ in range(2):
        await setup.worker_clients.new_authentication_exchange(client_end(), connect().connect).authenticate_round(
            connect()
        )
    ids = {request.authentication_id for _, request, _, _ in client.calls}
    assert len(ids) == 2


async def test_a_lost_connection_in_a_round_passes() -> None:
    setup = Setup()
    setup.auth.answers[Method.AUTHENTICATE] = RpcConnectionLost("gone")
    with pytest.raises(RpcError):
        await setup.worker_clients.new_authentication_exchange(client_end(), connect().connect).authenticate_round(
            connect()
        )


@pytest.mark.parametrize("forwards", [False, True])
async def test_credentials_are_kept_for_forwarding_only_where_the_configuration_says_so(forwards: bool) -> None:
    setup = Setup(brokers={"forward_authorization_credentials": forwards})
    setup.auth.answers[Method.AUTHENTICATE] = authenticated()
    identity = await setup.worker_clients.new_authentication_exchange(
        client_end(), connect().connect
    ).authenticate_round(connect())
    assert isinstance(identity, ClientIdentity)
    assert identity.original == (OriginalCredentials("token", SECRET.decode()) if forwards else None)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (BrokerProfileResponse(), None),
        (RpcConnectionLost("gone"), None),
        (
            BrokerProfileResponse(connected=CommandConnected(server_version="4.0.8").SerializeToString()),
            CommandConnected(server_version="4.0.8"),
        ),
    ],
)
async def test_broker_profile(answer: Any, expected: CommandConnected | None) -> None:
    setup = Setup()
    setup.lookup.answers[Method.BROKER_PROFILE] = answer
    assert await setup.worker_clients.broker_profile() == expected


async def test_the_profile_is_fresh_for_a_second(autojump_clock: trio.testing.MockClock) -> None:
    setup = Setup()
    assert not setup.worker_clients.is_profile_fresh
    for version in ("old", "new"):
        profile = CommandConnected(server_version=version)
        setup.lookup.answers[Method.BROKER_PROFILE] = BrokerProfileResponse(connected=profile.SerializeToString())
        assert await setup.worker_clients.broker_profile() == setup.worker_clients.profile == profile
        assert setup.worker_clients.is_profile_fresh
        await trio.sleep(0.9)
        assert setup.worker_clients.is_profile_fresh
        await trio.sleep(0.2)
        assert not setup.worker_clients.is_profile_fresh


async def test_the_profiles_age_counts_from_when_it_was_asked_for(autojump_clock: trio.testing.MockClock) -> None:
    setup = Setup()
    profile = BrokerProfileResponse(connected=CommandConnected(server_version="b").SerializeToString())

    class Slow(FakeClient):
        async def call(self, *_: Any, **__: Any) -> Any:
            await trio.sleep(0.9)
            return profile

    setup.lookup.pick_client = lambda: Slow({})  # type: ignore[method-assign]
    await setup.worker_clients.broker_profile()
    assert setup.worker_clients.is_profile_fresh
    await trio.sleep(0.2)
    assert not setup.worker_clients.is_profile_fresh


@pytest.mark.parametrize("nothing", [BrokerProfileResponse(), RpcConnectionLost("gone")])
async def test_a_missing_broker_profile_is_not_cached(nothing: Any) -> None:
    setup = Setup()
    for answer in (nothing, BrokerProfileResponse(connected=CommandConnected(server_version="b").SerializeToString())):
        setup.lookup.answers[Method.BROKER_PROFILE] = answer
        profile = await setup.worker_clients.broker_profile()
        assert setup.worker_clients.is_profile_fresh is (profile is not None)
    assert profile == CommandConnected(server_version="b")


# ---- the broker's side of a relay


class Dialled:
    """In place of dialing._connect: one broker, and what it was dialled as."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses: list[tuple[str, int]] = []
        self.refusing: set[str] = set()
        self.silent: set[str] = set()
        self.stream, theirs = trio.testing.memory_stream_pair()
        self.broker = Peer(theirs)
        monkeypatch.setattr("proxy.runtime.network.dialing._connect", self._dial)

    async def _dial(self, address: str, port: int, _congestion_control: str) -> trio.abc.HalfCloseableStream:
        await trio.lowlevel.checkpoint()
        self.addresses.append((address, port))
        if address in self.refusing:
            raise OSError(errno.ECONNREFUSED, "Connection refused")
        if address in self.silent:
            await trio.sleep_forever()
        return self.stream


@pytest.fixture
def dialled(monkeypatch: pytest.MonkeyPatch) -> Dialled:
    return Dialled(monkeypatch)


def allowed(setup: Setup, *, original_data: OriginalData = OriginalData.ORIGINAL_DATA_UNKNOWN) -> None:
    setup.lookup.answers[Method.RESOLVE_TARGET] = ResolveTargetResponse(
        host="b0", port=6650, addresses=["10.0.0.1"], original_data=original_data
    )


async def opened(
    setup: Setup,
    dialled: Dialled,
    command: BaseCommand,
    identity: ClientIdentity = IDENTITY,
    links: list[BrokerLink] | None = None,
) -> Any:
    """Open the broker's side; the CONNECT that the broker saw. ``links``: where to put the link."""
    seen: list[Any] = []

    async def serve() -> None:
        seen.append((await dialled.broker.expect_command(BaseCommand.CONNECT)).connect)
        await dialled.broker.send(BaseCommand(type=BaseCommand.CONNECTED, connected={"server_version": "b"}))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        link = await setup.worker_clients.broker_links.open_link(BrokerRequest(command.connect, identity, CLIENT))
    assert link.connected.message.server_version == "b"
    if links is not None:
        links.append(link)
    return seen[0]


async def test_the_address_that_the_lookup_worker_checked_is_dialled_and_no_other(dialled: Dialled) -> None:
    """Security: no name is resolved here, so no second answer of a name server can lead elsewhere."""
    setup = Setup()
    allowed(setup)
    await opened(setup, dialled, connect("evil:6650"))
    assert dialled.addresses == [("10.0.0.1", 6650)]
    [(method, request, _, retry)] = setup.lookup.clients[0].calls
    assert request.sealed_principal == b"sealed"
    assert (method, request.target, request.client_address, request.principal_name, retry) == (
        Method.RESOLVE_TARGET,
        "evil:6650",
        CLIENT,
        "alice",
        True,
    )


@pytest.mark.conforms("pip-1.8")
async def test_a_denied_target_is_not_dialled(dialled: Dialled) -> None:
    setup = Setup()
    setup.lookup.answers[Method.RESOLVE_TARGET] = ResolveTargetResponse(
        denial="host", detail="why", host="b0", port=6650, addresses=["10.0.0.1"]
    )
    with pytest.raises(TargetRefused, match="why") as caught:
        await setup.worker_clients.broker_links.open_link(BrokerRequest(connect("b0:6650").connect, IDENTITY, CLIENT))
    assert caught.value.reason == "host"
    assert dialled.addresses == []


@pytest.mark.parametrize(
    ("address", "port", "reason"),
    [("169.254.169.254", 6650, "metadata"), ("127.0.0.1", 6650, "loopback"), ("10.0.0.1", 22, "port")],
)
@pytest.mark.parametrize("among_others", [False, True], ids=["the first", "another"])
async def test_a_captured_lookup_worker_leads_no_relay_to_where_no_broker_can_be(
    dialled: Dialled, address: str, port: int, reason: str, among_others: bool
) -> None:
    """Security: the client is told no more than of any other denied target; nothing is dialled."""
    setup = Setup(brokers={"service_url": "pulsar://10.9.9.9:6650"})
    answer = ResolveTargetResponse(host="b0", port=6650, addresses=["10.0.0.1"])
    if among_others:
        dialled.refusing.add("10.0.0.1")
        answer.others.add(host="b1", port=port, addresses=[address])
    else:
        answer.port, answer.addresses[:] = port, [address]
    setup.lookup.answers[Method.RESOLVE_TARGET] = answer
    with structlog.testing.capture_logs() as logged, pytest.raises(TargetRefused) as caught:
        await setup.worker_clients.broker_links.open_link(BrokerRequest(connect("b0:6650").connect, IDENTITY, CLIENT))
    assert caught.value.reason == "bad_lookup_answer"
    assert dialled.addresses == ([("10.0.0.1", 6650)] if among_others else [])
    assert [(one["event"], one["reason"]) for one in logged if one["log_level"] == "error"] == [
        ("a lookup worker named what no relay may be dialled to", reason)
    ]


async def test_no_word_from_the_lookup_worker_is_no_permission(dialled: Dialled) -> None:
    setup = Setup()
    setup.lookup.answers[Method.RESOLVE_TARGET] = RpcConnectionLost("gone")
    with pytest.raises(RpcError):
        await setup.worker_clients.broker_links.open_link(BrokerRequest(connect("b0:6650").connect, IDENTITY, CLIENT))
    assert dialled.addresses == []


async def test_no_addresses_is_unreachable(dialled: Dialled) -> None:
    setup = Setup()
    setup.lookup.answers[Method.RESOLVE_TARGET] = ResolveTargetResponse(host="b0", port=6650)
    with pytest.raises(BrokerLinkFailed):
        await setup.worker_clients.broker_links.open_link(BrokerRequest(connect("b0:6650").connect, IDENTITY, CLIENT))


@pytest.mark.conforms("pip-1.12", "pip-1.27", "pip-1.30")
async def test_the_broker_sees_the_proxys_identity_with_the_clients_role_behind_it(dialled: Dialled) -> None:
    """Security: neither the client's credential nor what it wrote about identities goes on."""
    setup = Setup(brokers={"credentials": {"method": "token", "file": "x"}})
    allowed(setup)
    setup.auth.answers[Method.BROKER_CREDENTIALS] = BrokerCredentialsResponse(method="token", data=b"the proxy's")
    command = connect("b0:6650", original_principal="admin", original_auth_data="x", original_auth_method="token")
    command.connect.feature_flags.supports_auth_refresh = True
    command.connect.MergeFromString(b"\xfa\x3f\x03new")
    seen = await opened(setup, dialled, command)
    assert (seen.auth_method_name, seen.auth_data) == ("token", b"the proxy's")
    assert seen.original_principal == "alice"
    assert SECRET not in seen.SerializeToString()
    for field in ("original_auth_data", "original_auth_method", "proxy_to_broker_url", "auth_method"):
        assert not seen.HasField(field), field
    assert seen.HasField("proxy_version")
    assert (seen.client_version, seen.protocol_version) == ("test", 21)
    assert b"\xfa\x3f\x03new" in seen.SerializeToString()
    assert setup.auth.clients[0].calls[0][1].broker_host == "b0"


ENDS = 1_800_000_000_000


@pytest.mark.parametrize("client_can", [True, False])
@pytest.mark.parametrize(
    ("own", "identity", "claimed", "marked"),
    [
        ({"expires_at_unix_ms": ENDS}, IDENTITY, True, True),
        ({}, IDENTITY, False, False),
        ({"expires_at_unix_ms": ENDS}, FORWARDED, None, False),
        (None, IDENTITY, None, False),
    ],
    ids=["end", "do not end", "forwarded", "none"],
)
async def test_whether_a_relays_broker_may_ask_for_fresh_credentials(  # noqa: PLR0917 -- fixtures
    dialled: Dialled,
    own: dict[str, int] | None,
    identity: ClientIdentity,
    claimed: bool | None,
    marked: bool,
    client_can: bool,
) -> None:
    """Where the proxy would be asked, what the client can does not matter; else it is what the client says."""
    setup = Setup(**({} if own is None else {"brokers": {"credentials": {"method": "token", "file": "x"}}}))
    allowed(setup)
    setup.auth.answers[Method.BROKER_CREDENTIALS] = BrokerCredentialsResponse(
        method="token", data=b"the proxy's", **(own or {})
    )
    command = connect("b0:6650")
    command.connect.feature_flags.supports_auth_refresh = client_can
    links: list[BrokerLink] = []
    seen = await opened(setup, dialled, command, identity, links)
    assert seen.feature_flags.supports_auth_refresh is (client_can if claimed is None else claimed)
    assert seen.proxy_version.startswith("pulsar-trio-proxy-") is marked
    assert [link.answers_challenges for link in links] == [marked]


@pytest.mark.parametrize(
    ("original_data", "marked"),
    [
        (OriginalData.ORIGINAL_DATA_UNKNOWN, False),
        (OriginalData.ORIGINAL_DATA_CHECKED, False),
        (OriginalData.ORIGINAL_DATA_IGNORED, True),
    ],
)
async def test_a_broker_that_ignores_forwarded_credentials_asks_the_proxy(
    dialled: Dialled, original_data: OriginalData, marked: bool
) -> None:
    """They go with CONNECT all the same: the broker's setting may have changed since the last login."""
    setup = Setup(brokers={"credentials": {"method": "token", "file": "x"}})
    allowed(setup, original_data=original_data)
    setup.auth.answers[Method.BROKER_CREDENTIALS] = BrokerCredentialsResponse(
        method="token", data=b"the proxy's", expires_at_unix_ms=ENDS
    )
    links: list[BrokerLink] = []
    seen = await opened(setup, dialled, connect("b0:6650"), FORWARDED, links)
    assert seen.original_auth_data == "the client's own"
    assert seen.proxy_version.startswith("pulsar-trio-proxy-") is marked
    assert [(link.answers_challenges, link.original_data) for link in links] == [(marked, original_data)]


async def test_credentials_for_a_relays_broker_are_asked_for_by_the_settings_in_force() -> None:
    setup = Setup(brokers={"credentials": {"method": "token", "file": "x"}})
    setup.auth.answers[Method.BROKER_CREDENTIALS] = BrokerCredentialsResponse(method="token", data=b"fresh")
    assert await setup.worker_clients.broker_links.credentials_for("b0").auth_data_for(None) == ("token", b"fresh")
    assert setup.auth.clients[0].calls[0][1].broker_host == "b0"
    assert await Setup().worker_clients.broker_links.credentials_for("b0").auth_data_for(None) == ("", b"")


async def test_forwarded_credentials_stand_behind_the_proxys_own(dialled: Dialled) -> None:
    """Security: of a CONNECT's original fields none is the client's own writing."""
    setup = Setup(brokers={"credentials": {"method": "token", "file": "x"}})
    allowed(setup)
    setup.auth.answers[Method.BROKER_CREDENTIALS] = BrokerCredentialsResponse(method="token", data=b"the proxy's")
    command = connect("b0:6650", original_principal="admin", original_auth_data="x", original_auth_method="basic")
    seen = await opened(setup, dialled, command, FORWARDED)
    assert (seen.auth_method_name, seen.auth_data) == ("token", b"the proxy's")
    assert seen.original_principal == "alice"
    assert (seen.original_auth_method, seen.original_auth_data) == ("token", "the client's own")


@pytest.mark.parametrize("through_proxy", [False, True])
async def test_only_another_proxy_is_told_the_target(dialled: Dialled, through_proxy: bool) -> None:
    setup = Setup(brokers={"through_proxy": through_proxy})
    allowed(setup)
    seen = await opened(setup, dialled, connect("b7:6650"))
    assert seen.proxy_to_broker_url == ("b7:6650" if through_proxy else "")
    assert seen.HasField("proxy_to_broker_url") is through_proxy
    assert dialled.addresses == [("10.0.0.1", 6650)], "where the lookup worker says"


async def test_without_authentication_no_original_principal_goes_on(dialled: Dialled) -> None:
    setup = Setup()
    allowed(setup)
    seen = await opened(setup, dialled, connect("b0:6650", original_principal="admin"), ANONYMOUS)
    assert not seen.HasField("original_principal")
    assert not seen.HasField("auth_data")
    assert setup.auth.clients == []


async def test_a_broker_that_refuses(dialled: Dialled) -> None:
    setup = Setup()
    allowed(setup)

    async def serve() -> None:
        await dialled.broker.receive()
        await dialled.broker.send(
            commands.error(commands.NO_REQUEST_ID, ServerError.AuthorizationError, "Invalid roles.")
        )

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        with pytest.raises(BrokerLinkFailed) as caught:
            await setup.worker_clients.broker_links.open_link(
                BrokerRequest(connect("b0:6650").connect, IDENTITY, CLIENT)
            )
    assert (caught.value.code, caught.value.message) == (ServerError.AuthorizationError, "Invalid roles.")


async def test_a_broker_that_refuses_credentials_is_explained(dialled: Dialled) -> None:
    setup = Setup(brokers={"forward_authorization_credentials": False})
    allowed(setup, original_data=OriginalData.ORIGINAL_DATA_CHECKED)

    async def serve() -> None:
        await dialled.broker.receive()
        await dialled.broker.send(
            commands.error(commands.NO_REQUEST_ID, ServerError.AuthenticationError, "Unable to authenticate")
        )

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        with pytest.raises(BrokerLinkFailed, match="Unable to authenticate") as caught:
            await setup.worker_clients.broker_links.open_link(
                BrokerRequest(connect("b0:6650").connect, IDENTITY, CLIENT)
            )
    assert "set brokers.forward_authorization_credentials" in caught.value.message


# ---- any broker


ANY_BROKER = BaseCommand(type=BaseCommand.CONNECT, connect={"client_version": "test", "proxy_to_broker_url": ""})


def allowed_three(setup: Setup) -> None:
    """The lookup worker names three brokers for a client that takes any."""
    response = ResolveTargetResponse(host="b0", port=6650, addresses=["10.0.0.1"])
    response.others.add(host="b1", port=6651, addresses=["10.0.0.2"])
    response.others.add(host="b2", port=6652, addresses=["10.0.0.3"])
    setup.lookup.answers[Method.RESOLVE_TARGET] = response


async def test_an_empty_target_asks_for_any_broker(dialled: Dialled) -> None:
    setup = Setup()
    allowed_three(setup)
    seen = await opened(setup, dialled, ANY_BROKER)
    [(_, request, _, _)] = setup.lookup.clients[0].calls
    assert (request.any_broker, request.target) == (True, "")
    assert not seen.HasField("proxy_to_broker_url")
    assert dialled.addresses == [("10.0.0.1", 6650)], "one that can be reached is enough"


async def test_a_named_target_asks_for_no_other_broker(dialled: Dialled) -> None:
    setup = Setup()
    allowed(setup)
    await opened(setup, dialled, connect("b0:6650"))
    assert not setup.lookup.clients[0].calls[0][1].any_broker


async def test_another_proxy_is_told_that_any_broker_will_do(dialled: Dialled) -> None:
    setup = Setup(brokers={"through_proxy": True})
    allowed(setup)
    seen = await opened(setup, dialled, ANY_BROKER)
    assert seen.HasField("proxy_to_broker_url")
    assert seen.proxy_to_broker_url == ""


async def test_where_any_broker_will_do_the_next_one_takes_the_place_of_one_that_is_down(dialled: Dialled) -> None:
    setup = Setup(brokers={"credentials": {"method": "token", "file": "x"}})
    allowed_three(setup)
    setup.auth.answers[Method.BROKER_CREDENTIALS] = BrokerCredentialsResponse(method="token", data=b"the proxy's")
    dialled.refusing = {"10.0.0.1", "10.0.0.2"}
    with structlog.testing.capture_logs() as logs:
        seen = await opened(setup, dialled, ANY_BROKER)
    assert dialled.addresses == [("10.0.0.1", 6650), ("10.0.0.2", 6651), ("10.0.0.3", 6652)]
    assert seen.original_principal == "alice"
    asked_for = [client.calls[0][1].broker_host for client in setup.auth.clients]
    assert asked_for == ["b0", "b1", "b2"], "credentials are for one broker host (PIP-30)"
    assert [entry["broker"] for entry in logs] == ["b0:6650", "b1:6651"]


async def test_where_any_broker_will_do_a_silent_one_leaves_time_to_the_next(
    dialled: Dialled, autojump_clock: trio.testing.MockClock
) -> None:
    setup = Setup(brokers={"handshake_timeout_ms": 8000, "connect_timeout_ms": 8000})
    allowed_three(setup)
    dialled.silent = {"10.0.0.1", "10.0.0.2"}
    await opened(setup, dialled, ANY_BROKER)
    assert trio.current_time() == pytest.approx(16 / 3), "a third of 8 s each"


async def test_a_broker_for_which_no_time_is_left_is_a_timeout(
    dialled: Dialled, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """The time before it has run out a moment ago: no defect."""
    setup = Setup(brokers={"handshake_timeout_ms": 8000, "connect_timeout_ms": 8000})
    allowed_three(setup)

    async def open_late(*_args: object, **_options: object) -> None:
        await trio.sleep(9)
        raise BrokerLinkFailed("timeout", "late", message="late")

    open_link = BrokerLinkFactory.open_link
    calls = iter([open_late, open_link, open_link])

    async def open_next(*args: Any, **options: Any) -> Any:
        return await next(calls)(*args, **options)

    monkeypatch.setattr(BrokerLinkFactory, "open_link", open_next)
    with pytest.raises(BrokerLinkFailed) as caught:
        await setup.worker_clients.broker_links.open_link(BrokerRequest(ANY_BROKER.connect, IDENTITY, CLIENT))
    assert caught.value.reason == "timeout"


@pytest.mark.parametrize("code", [ServerError.ServiceNotReady, ServerError.TooManyRequests])
async def test_a_broker_that_takes_no_client_now_leaves_it_to_the_next(dialled: Dialled, code: int) -> None:
    setup = Setup()
    allowed_three(setup)

    async def serve() -> None:
        await dialled.broker.receive()
        dialled.refusing = {"10.0.0.2", "10.0.0.3"}
        await dialled.broker.send(commands.error(commands.NO_REQUEST_ID, code, "Not now."))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        with pytest.raises(BrokerLinkFailed):
            await setup.worker_clients.broker_links.open_link(BrokerRequest(ANY_BROKER.connect, IDENTITY, CLIENT))
    assert dialled.addresses == [("10.0.0.1", 6650), ("10.0.0.2", 6651), ("10.0.0.3", 6652)]


async def test_where_no_broker_can_be_reached_the_last_failure_is_told_in_time(
    dialled: Dialled, autojump_clock: trio.testing.MockClock
) -> None:
    setup = Setup(brokers={"handshake_timeout_ms": 8000, "connect_timeout_ms": 8000})
    allowed_three(setup)
    dialled.refusing, dialled.silent = {"10.0.0.1"}, {"10.0.0.2", "10.0.0.3"}
    with pytest.raises(BrokerLinkFailed, match="b2:6652") as caught:
        await setup.worker_clients.broker_links.open_link(BrokerRequest(ANY_BROKER.connect, IDENTITY, CLIENT))
    assert caught.value.reason == "timeout"
    assert trio.current_time() == pytest.approx(8.0)


async def test_a_connect_refused_by_a_broker_is_not_tried_at_another(dialled: Dialled) -> None:
    setup = Setup()
    allowed_three(setup)

    async def serve() -> None:
        await dialled.broker.receive()
        await dialled.broker.send(commands.error(commands.NO_REQUEST_ID, ServerError.AuthorizationError, "No."))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        with pytest.raises(BrokerLinkFailed, match="AuthorizationError"):
            await setup.worker_clients.broker_links.open_link(BrokerRequest(ANY_BROKER.connect, IDENTITY, CLIENT))
    assert dialled.addresses == [("10.0.0.1", 6650)]
