"""proxy.forwarder.workers.broker_opening: a broker's side opened by callback, over real sockets."""

from __future__ import annotations

import errno
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
from forwarder_fakes import ALICE, CLIENT, connect, make_config
from relay_fakes import until
from test_workers_clients import FakeClient, FakePool

from proto import commands
from proto.addresses import HostPort
from proto.frames import FrameDecoder
from proto.pulsar_pb2 import BaseCommand, CommandConnected, ServerError
from proto.rpc_frames import Reply
from proto.rpc_pb2 import OtherBroker, ResolveTargetRequest, ResolveTargetResponse, Status
from proxy.forwarder.workers.authentication import ClientIdentity
from proxy.forwarder.workers.broker_links import KNOWN_MAX, BrokerLinks, BrokerRequest, TargetRefused
from proxy.forwarder.workers.broker_opening import BrokerOpening, Outcome
from proxy.runtime.loop.deadlines import Deadlines
from proxy.runtime.loop.reactor import Reactor, current_reactor
from proxy.runtime.network.broker_link import BrokerLink, BrokerLinkFailed
from proxy.runtime.network.dialing import Dialer
from proxy.runtime.rpc.errors import RpcCallRefused

IDENTITY = ClientIdentity(ALICE, b"sealed")


class Setup:
    """One broker that listens, a lookup worker that the test speaks for, and openings."""

    def __init__(self, nursery: trio.Nursery, reactor: Reactor, deadlines: Deadlines, **brokers: Any) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.port = self.listener.getsockname()[1]
        self.target = f"127.0.0.1:{self.port}"
        self.lookup = FakePool()
        config = make_config(brokers={"service_url": f"pulsar://{self.target}"} | brokers)
        self.links = BrokerLinks(config, FakePool(), self.lookup, nursery)  # type: ignore[arg-type]
        self.reactor, self.deadlines = reactor, deadlines
        self.outcomes: list[Outcome] = []
        self.accepted: list[trio.SocketStream] = []

    def open(self, target: str | None = None) -> BrokerOpening:
        command = connect(self.target if target is None else target).connect
        opening = BrokerOpening(
            self.links,
            self.reactor,
            self.deadlines,
            BrokerRequest(command, IDENTITY, CLIENT),
            self.outcomes.append,
        )
        opening.start()
        return opening

    async def check_once(self) -> None:
        """Let the target be checked, as the first connection in a task does."""
        await self.links._check_dialled(HostPort("127.0.0.1", self.port), ["127.0.0.1"])

    @property
    def asked(self) -> list[FakeClient]:
        return [client for client in self.lookup.clients if client.asked_now]

    def answer(
        self, response: ResolveTargetResponse | None = None, *, status: int = Status.OK, detail: str = ""
    ) -> None:
        """The lookup worker's answer to the last question; by default the listening broker."""
        response = response or ResolveTargetResponse(host="127.0.0.1", port=self.port, addresses=["127.0.0.1"])
        [(_, _, on_reply, _, _)] = self.asked[-1].asked_now
        on_reply(Reply(1, status, response.SerializeToString(), False, detail))

    async def accept(self) -> trio.SocketStream:
        sock, _ = await trio.socket.from_stdlib_socket(self.listener).accept()
        stream = trio.SocketStream(sock)
        self.accepted.append(stream)
        return stream

    async def dialled(self) -> trio.SocketStream:
        """The broker's end of an opening that has been dialled, once CONNECT is there."""
        await self.check_once()
        self.open()
        self.answer()
        stream = await self.accept()
        assert (await read_command(stream)).type == BaseCommand.CONNECT
        return stream

    async def outcome(self) -> Any:
        await until(lambda: self.outcomes)
        (outcome,) = self.outcomes
        return outcome

    def is_watched(self) -> bool:
        return bool(self.reactor._watched)


@pytest.fixture
async def reactor(nursery: trio.Nursery) -> Reactor:
    reactor = Reactor()
    nursery.start_soon(reactor.run)
    await until(lambda: current_reactor() is reactor)
    return reactor


@pytest.fixture
async def deadlines(nursery: trio.Nursery) -> Deadlines:
    deadlines = Deadlines()
    nursery.start_soon(deadlines.run)
    return deadlines


@pytest.fixture
async def setup(nursery: trio.Nursery, reactor: Reactor, deadlines: Deadlines) -> AsyncIterator[Setup]:
    setup = Setup(nursery, reactor, deadlines)
    yield setup
    close(setup)


def close(setup: Setup) -> None:
    setup.listener.close()
    for stream in setup.accepted:
        stream.socket.close()
    for outcome in setup.outcomes:
        if isinstance(outcome, BrokerLink):
            assert isinstance(outcome.stream, trio.SocketStream)
            outcome.stream.socket.close()


async def read_command(stream: trio.SocketStream) -> BaseCommand:
    decoder = FrameDecoder(max_frame_bytes=100_000)
    while (frame := decoder.next_frame()) is None:
        decoder.receive_data(await stream.receive_some())
    return commands.parse_command(frame.command)


CONNECTED = commands.connected(CommandConnected(server_version="the broker"))


async def test_a_link_is_opened_and_what_follows_connected_is_kept(setup: Setup) -> None:
    await setup.check_once()
    setup.open()
    [(_, body, _, _, _)] = setup.asked[0].asked_now
    assert ResolveTargetRequest.FromString(body) == ResolveTargetRequest(
        target=setup.target, client_address=CLIENT, principal_name="alice", sealed_principal=b"sealed", any_broker=False
    )
    setup.answer()
    broker = await setup.accept()
    command = (await read_command(broker)).connect
    assert (command.original_principal, command.proxy_to_broker_url) == ("alice", "")
    for byte in CONNECTED[:10]:  # in pieces
        await broker.send_all(bytes([byte]))
    await broker.send_all(CONNECTED[10:] + b"more")
    link = await setup.outcome()
    assert isinstance(link, BrokerLink)
    assert (link.broker, link.connected.trailing_data) == (HostPort("127.0.0.1", setup.port), b"more")
    assert link.connected.message.server_version == "the broker"
    assert not setup.is_watched()
    await link.stream.send_all(b"from the client")
    assert await broker.receive_some() == b"from the client"


async def test_a_target_that_was_allowed_a_moment_ago_is_dialled_without_a_question(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    await (await setup.dialled()).send_all(CONNECTED)
    await until(lambda: len(setup.outcomes) == 1)
    setup.open()
    await (await setup.accept()).send_all(CONNECTED)
    await until(lambda: len(setup.outcomes) == 2)
    assert len(setup.asked) == 1
    monkeypatch.setattr("proxy.forwarder.workers.broker_links.KNOWN_S", -1.0)
    setup.links._known.clear()
    for _ in range(2):
        setup.open()
        setup.answer()
        await (await setup.accept()).send_all(CONNECTED)
    await until(lambda: len(setup.outcomes) == 4)
    assert len(setup.asked) == 3, "one that was allowed longer ago is asked for"


async def test_the_targets_that_are_known_are_bounded(setup: Setup) -> None:
    answer = ResolveTargetResponse(host="b", port=1, addresses=["10.0.0.1"])
    for number in range(KNOWN_MAX + 10):
        asked = BrokerRequest(connect(f"b{number}:1").connect, IDENTITY, CLIENT)
        setup.links.remember_target(asked, answer)
        assert len(setup.links._known) <= KNOWN_MAX
    for name in ("", "b" * 400):  # any broker; a name that takes memory
        asked = BrokerRequest(connect().connect, IDENTITY, CLIENT)
        asked.connect.proxy_to_broker_url = name
        setup.links.remember_target(asked, answer)
        assert setup.links.known_target(asked) is None


@pytest.mark.parametrize(
    "answer",
    [
        ResolveTargetResponse(host="127.0.0.1", port=1, addresses=["127.0.0.1"]),  # never checked
        ResolveTargetResponse(host="127.0.0.1", port=1, addresses=["127.0.0.1", "127.0.0.2"]),
        ResolveTargetResponse(host="127.0.0.1", port=1, addresses=["127.0.0.1"], others=[OtherBroker(host="b")]),
        ResolveTargetResponse(host="b", port=1),
        ResolveTargetResponse(host="b", port=1, addresses=["fe80::1%eth0"]),
    ],
)
async def test_what_needs_a_task_is_dialled_by_none(
    setup: Setup, answer: ResolveTargetResponse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Dialer, "start_connection", lambda *_: pytest.fail("dialled"))
    await setup.check_once()
    setup.open()
    setup.answer(answer)
    assert setup.outcomes == [None]


async def test_a_target_that_may_be_the_proxy_itself_is_left_to_the_task_that_looks(setup: Setup) -> None:
    await setup.check_once()
    setup.links.dialer._own_ports = frozenset({setup.port})
    setup.open()
    setup.answer()
    assert setup.outcomes == [None]


async def test_without_a_lookup_worker_or_its_answer_a_task_asks(setup: Setup) -> None:
    setup.lookup.reached = False
    setup.open()
    setup.lookup.reached = True
    setup.open()
    [(_, _, on_reply, _, _)] = setup.asked[-1].asked_now
    on_reply(None)
    setup.open()
    [(_, _, on_reply, _, _)] = setup.asked[-1].asked_now
    on_reply(Reply(1, Status.OK, b"\xff", False, ""))
    assert setup.outcomes == [None, None, None]


async def test_a_lookup_worker_that_does_not_answer_in_time_is_not_asked_again(
    nursery: trio.Nursery, reactor: Reactor, deadlines: Deadlines
) -> None:
    setup = Setup(nursery, reactor, deadlines, handshake_timeout_ms=1)
    setup.open()
    [(_, _, on_reply, timeout_ms, deadline)] = setup.asked[-1].asked_now
    assert timeout_ms == 1
    await trio.sleep_until(deadline)
    on_reply(None)
    assert str(setup.outcomes[0]) == "no answer within 0.001 s"
    close(setup)


async def test_a_denied_target_and_a_refused_call_are_told(setup: Setup) -> None:
    setup.open()
    setup.answer(ResolveTargetResponse(denial="host", detail="why"))
    setup.open()
    setup.answer(status=Status.PRINCIPAL_DESERIALIZATION_FAILURE, detail="expired")
    denied, refused = setup.outcomes
    assert isinstance(denied, TargetRefused)
    assert (denied.reason, str(denied)) == ("host", "why")
    assert isinstance(refused, RpcCallRefused)
    assert refused.status == Status.PRINCIPAL_DESERIALIZATION_FAILURE


async def test_a_broker_that_does_not_listen_is_unreachable(setup: Setup) -> None:
    await setup.check_once()
    setup.listener.close()
    setup.open()
    setup.answer()
    failed = await setup.outcome()
    assert isinstance(failed, BrokerLinkFailed)
    assert failed.reason == "unreachable"
    assert str(failed) == f"cannot connect to {setup.target}: 127.0.0.1: Connection refused"
    assert not setup.is_watched()


async def test_without_a_descriptor_the_broker_is_unreachable(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: Any) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    await setup.check_once()
    monkeypatch.setattr(Dialer, "start_connection", none_left)
    setup.open()
    setup.answer()
    assert "Too many open files" in str(await setup.outcome())


async def test_a_refusal_of_the_broker_is_told_with_its_code(setup: Setup) -> None:
    broker = await setup.dialled()
    await broker.send_all(commands.error(0, ServerError.AuthorizationError, "no"))
    failed = await setup.outcome()
    assert isinstance(failed, BrokerLinkFailed)
    assert (failed.reason, failed.code, failed.message) == ("refused", ServerError.AuthorizationError, "no")
    assert await broker.receive_some() == b"", "the connection is closed"


@pytest.mark.parametrize("breaks", ["closes", "resets", "says nonsense"])
async def test_a_broker_that_breaks_the_handshake_off(setup: Setup, breaks: str) -> None:
    broker = await setup.dialled()
    if breaks == "closes":
        await broker.send_eof()
    elif breaks == "resets":
        broker.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        broker.socket.close()
    else:
        await broker.send_all(b"\xff" * 100)
    failed = await setup.outcome()
    assert isinstance(failed, BrokerLinkFailed)
    assert failed.reason == "handshake"
    assert f"{setup.target} broke off the handshake" in str(failed)
    assert not setup.is_watched()


async def test_pings_and_challenges_are_answered(setup: Setup) -> None:
    broker = await setup.dialled()
    await broker.send_all(commands.ping())
    assert (await read_command(broker)).type == BaseCommand.PONG
    await broker.send_all(commands.auth_challenge("v", 19, "token", b"q"))
    answer = await read_command(broker)
    assert answer.type == BaseCommand.AUTH_RESPONSE
    assert (answer.auth_response.response.auth_method_name, answer.auth_response.response.auth_data) == ("none", b"")
    await broker.send_all(CONNECTED)
    assert isinstance(await setup.outcome(), BrokerLink)


async def test_a_broker_that_says_nothing_is_too_slow(
    nursery: trio.Nursery, reactor: Reactor, deadlines: Deadlines
) -> None:
    setup = Setup(nursery, reactor, deadlines, handshake_timeout_ms=300)
    broker = await setup.dialled()
    failed = await setup.outcome()
    assert isinstance(failed, BrokerLinkFailed)
    assert failed.reason == "timeout"
    assert str(failed) == f"{setup.target} did not finish the handshake within 0.3 s"
    assert await broker.receive_some() == b""
    close(setup)


async def test_a_broker_that_does_not_answer_is_unreachable_after_the_connect_timeout(
    nursery: trio.Nursery, reactor: Reactor, deadlines: Deadlines
) -> None:
    """Its queue is full, so that the kernel drops what asks for a connection."""
    setup = Setup(nursery, reactor, deadlines, connect_timeout_ms=300)
    setup.listener.listen(0)
    queued = [socket.socket() for _ in range(4)]
    for one in queued:
        one.setblocking(False)
        one.connect_ex(("127.0.0.1", setup.port))
    await setup.check_once()
    setup.open()
    setup.answer()
    failed = await setup.outcome()
    assert str(failed) == f"cannot connect to {setup.target}: 127.0.0.1: no answer within 300 ms"
    for one in queued:
        one.close()
    close(setup)


async def test_a_large_connect_is_sent_as_the_broker_takes_it(setup: Setup) -> None:
    await setup.check_once()
    command = connect(setup.target, client_version="v" * 8_000_000).connect
    opening = BrokerOpening(
        setup.links, setup.reactor, setup.deadlines, BrokerRequest(command, IDENTITY, CLIENT), setup.outcomes.append
    )
    opening.start()
    setup.answer()
    broker = await setup.accept()
    received = 0
    while received < 8_000_000:
        received += len(await broker.receive_some(1_000_000))
    await broker.send_all(CONNECTED)
    assert isinstance(await setup.outcome(), BrokerLink)


@pytest.mark.parametrize("when", ["asked", "dialled"])
async def test_an_opening_that_is_abandoned_closes_its_connection_and_tells_no_more(setup: Setup, when: str) -> None:
    await setup.check_once()
    opening = setup.open()
    if when == "dialled":
        setup.answer()
        broker = await setup.accept()
        await read_command(broker)
    opening.abandon()
    if when == "dialled":
        assert await broker.receive_some() == b""
    else:
        setup.answer()
    assert setup.outcomes == []
    assert not setup.is_watched()
    assert not setup.deadlines._by_grain
    opening.abandon()
