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
from test_workers_clients import FakePool

from proto import commands
from proto.addresses import HostPort
from proto.frames import FrameDecoder
from proto.pulsar_pb2 import BaseCommand, CommandConnect, CommandConnected, ServerError
from proto.rpc_pb2 import Method, OtherBroker, Principal, ResolveTargetResponse
from proxy.forwarder.workers.authentication import ClientIdentity
from proxy.forwarder.workers.broker_links import KNOWN_MAX, BrokerLinks, BrokerRequest, TargetRefused
from proxy.forwarder.workers.broker_opening import BrokerOpening, Outcome
from proxy.runtime.loop.deadlines import Deadlines
from proxy.runtime.loop.reactor import Reactor, current_reactor
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.network.broker_link import BrokerLink, BrokerLinkFailed
from proxy.runtime.network.dialing import Dialer

IDENTITY = ClientIdentity(ALICE, b"sealed")
BOB = Principal(type="User", name="bob", method="token")


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
        self.accepted: list[TcpStream] = []

    def open(self, connect: CommandConnect | None = None, host: str = "127.0.0.1") -> BrokerOpening:
        opening = BrokerOpening(
            self.links,
            self.reactor,
            self.deadlines,
            self.request(connect),
            target=self.allowed(host=host),
            on_done=self.outcomes.append,
        )
        opening.start()
        return opening

    def request(self, command: CommandConnect | None = None, identity: ClientIdentity = IDENTITY) -> BrokerRequest:
        return BrokerRequest(connect(self.target).connect if command is None else command, identity, CLIENT)

    def allowed(self, **fields: Any) -> ResolveTargetResponse:
        """The lookup worker's answer: by default the listening broker."""
        return ResolveTargetResponse(**({"host": "127.0.0.1", "port": self.port, "addresses": ["127.0.0.1"]} | fields))

    async def open_in_task(self, answer: ResolveTargetResponse, connect: CommandConnect | None = None) -> None:
        """Open a link as the first client of a moment does; it is closed again."""
        self.lookup.answers[Method.RESOLVE_TARGET] = answer

        async def greet() -> None:
            await (await self.accept()).send_all(CONNECTED)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(greet)
            link = await self.links.open_link(self.request(connect))
        await link.stream.aclose()

    async def accept(self) -> TcpStream:
        await trio.lowlevel.wait_readable(self.listener)
        sock, _ = self.listener.accept()
        sock.setblocking(False)
        stream = TcpStream(sock)
        self.accepted.append(stream)
        return stream

    async def dialled(self) -> TcpStream:
        """The broker's end of an opening, once CONNECT is there."""
        self.open()
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
            assert isinstance(outcome.stream, TcpStream)
            outcome.stream.socket.close()


async def read_command(stream: TcpStream) -> BaseCommand:
    decoder = FrameDecoder(max_frame_bytes=100_000)
    while (frame := decoder.next_frame()) is None:
        decoder.receive_data(await stream.receive_some())
    return commands.parse_command(frame.command)


CONNECTED = commands.connected(CommandConnected(server_version="the broker"))


async def test_a_link_is_opened_and_what_follows_connected_is_kept(setup: Setup) -> None:
    setup.open()
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


async def test_a_target_is_known_for_a_moment_after_a_task_has_had_it_checked(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert setup.links.known_target(setup.request()) is None
    await setup.open_in_task(setup.allowed())
    assert setup.links.known_target(setup.request()) == setup.allowed()
    monkeypatch.setattr("proxy.forwarder.workers.broker_links.KNOWN_S", -1.0)
    await setup.open_in_task(setup.allowed())
    assert setup.links.known_target(setup.request()) is None, "one that was allowed longer ago is asked for"


async def test_a_verdict_holds_for_the_target_and_the_sealed_principal_that_it_was_asked_for_and_no_other(
    setup: Setup,
) -> None:
    """Security: the lookup worker checks each target, and the seal of each principal in whose name it is dialled."""
    await setup.open_in_task(setup.allowed())
    others = [
        setup.request(connect("another:6650").connect),
        setup.request(identity=ClientIdentity(BOB, b"bob's")),
        setup.request(identity=ClientIdentity(ALICE, b"a later one of hers")),
    ]
    assert [setup.links.known_target(one) for one in others] == [None] * 3
    assert setup.links.known_target(setup.request()) == setup.allowed()


async def test_by_callback_too_the_address_of_the_verdict_is_dialled_and_no_name_is_resolved(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Security: no second answer of a name server can lead elsewhere."""
    dialled: list[tuple[str, int]] = []

    def refuse(address: str, port: int) -> socket.socket:
        dialled.append((address, port))
        raise ConnectionRefusedError

    monkeypatch.setattr(setup.links.dialer, "start_connection", refuse)
    setup.open(host="b0")
    assert dialled == [("127.0.0.1", setup.port)]


async def test_a_target_that_the_forwarder_itself_denies_is_never_known(setup: Setup) -> None:
    """Security: a captured lookup worker names what no relay may be dialled to."""
    answer = setup.allowed(addresses=["169.254.169.254"])
    setup.lookup.answers[Method.RESOLVE_TARGET] = answer
    with pytest.raises(TargetRefused):
        await setup.links.open_link(setup.request())
    assert setup.links.known_target(setup.request()) is None


async def test_the_targets_that_are_known_are_bounded(setup: Setup) -> None:
    for number in range(KNOWN_MAX + 10):
        setup.links._remember_target(setup.request(connect(f"b{number}:1").connect), setup.allowed())
        assert len(setup.links._known) <= KNOWN_MAX
    name, sealed = connect("b" * 700).connect, ClientIdentity(ALICE, b"s" * 700)
    for long in (setup.request(name), setup.request(identity=sealed)):  # they take memory
        setup.links._remember_target(long, setup.allowed())
        assert setup.links.known_target(long) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"addresses": ["127.0.0.1", "127.0.0.2"]},
        {"others": [OtherBroker(host="127.0.0.1", port=1, addresses=["127.0.0.1"])]},
        {"addresses": ["fe80::1%eth0"]},
    ],
)
async def test_a_target_that_needs_a_closer_look_is_a_tasks_to_dial(setup: Setup, fields: dict[str, Any]) -> None:
    setup.links._remember_target(setup.request(), setup.allowed(**fields))
    assert setup.links.known_target(setup.request()) is None
    setup.links._remember_target(setup.request(), setup.allowed())
    assert setup.links.known_target(setup.request()) is not None


async def test_a_client_that_takes_any_broker_gets_one_in_turn(setup: Setup) -> None:
    anywhere = connect(setup.target).connect
    anywhere.proxy_to_broker_url = ""
    await setup.open_in_task(setup.allowed(), anywhere)
    assert setup.links.known_target(setup.request(anywhere)) is None


async def test_a_target_that_may_be_the_proxy_itself_is_left_to_the_task_that_looks(setup: Setup) -> None:
    setup.links.dialer._own_ports = frozenset({setup.port})
    setup.links._remember_target(setup.request(), setup.allowed())
    assert setup.links.known_target(setup.request()) is None


@pytest.mark.parametrize(
    "brokers", [{"credentials": {"method": "token", "file": "x"}}, {"service_url": "pulsar+ssl://127.0.0.1:6651"}]
)
async def test_with_tls_or_credentials_of_the_proxys_all_is_a_tasks(
    nursery: trio.Nursery, reactor: Reactor, deadlines: Deadlines, brokers: dict[str, Any]
) -> None:
    setup = Setup(nursery, reactor, deadlines, **brokers)
    setup.links._remember_target(setup.request(), setup.allowed())
    assert setup.links.known_target(setup.request()) is None
    close(setup)


async def test_a_broker_that_does_not_listen_is_unreachable(setup: Setup) -> None:
    setup.listener.close()
    setup.open()
    failed = await setup.outcome()
    assert isinstance(failed, BrokerLinkFailed)
    assert failed.reason == "unreachable"
    assert str(failed) == f"cannot connect to {setup.target}: 127.0.0.1: Connection refused"
    assert not setup.is_watched()


async def test_without_a_descriptor_the_broker_is_unreachable(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: Any) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Dialer, "start_connection", none_left)
    setup.open()
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
        broker.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
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
    setup.open()
    failed = await setup.outcome()
    assert str(failed) == f"cannot connect to {setup.target}: 127.0.0.1: no answer within 300 ms"
    for one in queued:
        one.close()
    close(setup)


async def test_a_large_connect_is_sent_as_the_broker_takes_it(setup: Setup) -> None:
    setup.open(connect(setup.target, client_version="v" * 8_000_000).connect)
    broker = await setup.accept()
    received = 0
    while received < 8_000_000:
        received += len(await broker.receive_some(1_000_000))
    await broker.send_all(CONNECTED)
    assert isinstance(await setup.outcome(), BrokerLink)


async def test_an_opening_that_is_abandoned_closes_its_connection_and_tells_no_more(setup: Setup) -> None:
    opening = setup.open()
    broker = await setup.accept()
    await read_command(broker)
    opening.abandon()
    assert await broker.receive_some() == b""
    assert setup.outcomes == []
    assert not setup.is_watched()
    assert not setup.deadlines._by_grain
    opening.abandon()
