"""proxy.forwarder.workers.broker_links and broker_opening: a broker's side opened by callback, over real sockets."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, cast

import pytest
import structlog.testing
import trio
import trio.testing
from e2e.lab.certificates import Authority
from forwarder_fakes import ALICE, CLIENT, SECRET, connect, make_config
from relay_fakes import reset, until
from test_workers_clients import FakePool

from proto import commands
from proto.addresses import HostPort
from proto.broker_handshake import Challenged
from proto.connect_rules import OriginalCredentials
from proto.frames import FrameDecoder
from proto.proxy_protocol import encode_header
from proto.pulsar_pb2 import BaseCommand, CommandConnect, CommandConnected, ServerError
from proto.rpc_frames import Reply
from proto.rpc_pb2 import (
    BrokerCredentialsRequest,
    BrokerCredentialsResponse,
    Method,
    OriginalData,
    OtherBroker,
    Principal,
    ResolveTargetResponse,
    Status,
)
from proxy.config.types import ListenerTls
from proxy.forwarder.relay.copy_pump import Stream, transport_of
from proxy.forwarder.workers.authentication import ClientIdentity
from proxy.forwarder.workers.broker_links import (
    KNOWN_MAX,
    BrokerLinks,
    BrokerRequest,
    NamedLink,
    NamedRequest,
    TargetRefused,
)
from proxy.forwarder.workers.broker_opening import (
    BrokerOpening,
    NamedOpening,
    NamedOutcome,
    Outcome,
    start_named_opening,
    start_opening,
)
from proxy.runtime.loop.deadlines import GRAIN_S, Deadlines
from proxy.runtime.loop.reactor import Reactor, current_reactor
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.network.broker_link import NOT_CONNECTED, BrokerLink, BrokerLinkFailed
from proxy.runtime.network.broker_refusals import CREDENTIALS_REFUSED
from proxy.runtime.network.credentials import CREDENTIALS_TIMEOUT_S, CredentialExchange
from proxy.runtime.network.dialing import ATTEMPT_DELAY_S, Dialer
from proxy.runtime.network.handshake_turns import HandshakeTurns
from proxy.runtime.network.tls import TlsFailed, TlsStream, continue_handshake, listener_contexts

IDENTITY = ClientIdentity(ALICE, b"sealed")
NAMED = NamedRequest("b0.example", CLIENT)
BOB = Principal(type="User", name="bob", method="token")


class Setup:
    """One broker that listens, a lookup worker that the test speaks for, and openings."""

    def __init__(
        self,
        nursery: trio.Nursery,
        reactor: Reactor,
        deadlines: Deadlines,
        authority: Authority | None = None,
        **brokers: Any,
    ) -> None:
        """``authority``: of the broker's certificate; None: it is on plain TCP."""
        self.context = server_context(authority) if authority is not None else None
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.port = self.listener.getsockname()[1]
        self.target = f"127.0.0.1:{self.port}"
        self.auth, self.lookup = FakePool(), FakePool()
        tls = {} if authority is None else {"trust": authority.file}
        scheme = "pulsar" if authority is None else "pulsar+ssl"
        config = make_config(brokers={"service_url": f"{scheme}://{self.target}", "tls": tls} | brokers)
        self.links = BrokerLinks(config, self.auth, self.lookup, nursery)  # type: ignore[arg-type]
        self.reactor, self.deadlines, self.tasks = reactor, deadlines, nursery
        self.turns = HandshakeTurns()
        self.outcomes: list[Outcome] = []
        self.accepted: list[TcpStream] = []

    def open(
        self,
        connect: CommandConnect | None = None,
        host: str = "127.0.0.1",
        identity: ClientIdentity = IDENTITY,
        **fields: Any,
    ) -> BrokerOpening:
        opening = BrokerOpening(
            self.links,
            self.reactor,
            self.deadlines,
            self.turns,
            self.tasks,
            asked=self.request(connect, identity),
            target=self.allowed(host=host, **fields),
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

    async def accept(self) -> Stream:
        """The broker's end of the next connection, behind the TLS handshake, if there is one."""
        stream = await self.accept_tcp()
        if self.context is None:
            return stream
        tls = TlsStream(stream, self.context, server_side=True)
        await tls.handshake()
        return tls

    async def accept_tcp(self) -> TcpStream:
        await trio.lowlevel.wait_readable(self.listener)
        sock, _ = self.listener.accept()
        sock.setblocking(False)
        stream = TcpStream(sock)
        self.accepted.append(stream)
        return stream

    def asked(self, number: int = 0) -> BrokerCredentialsRequest:
        """What the auth worker was asked by callback."""
        (client,) = self.auth.clients
        method, body, _, timeout_ms, deadline = client.asked_now[number]
        assert method == Method.BROKER_CREDENTIALS
        assert timeout_ms / 1000 == CREDENTIALS_TIMEOUT_S == pytest.approx(deadline - trio.current_time(), abs=1)
        assert len(client.asked_now) == number + 1
        return BrokerCredentialsRequest.FromString(body)

    def answer_credentials(self, reply: Reply | None = None, **fields: Any) -> None:
        """Have the auth worker answer what it was asked last: with credentials by default."""
        response = BrokerCredentialsResponse(**({"method": "token", "data": SECRET} | fields))
        on_reply = self.auth.clients[-1].asked_now[-1][2]
        on_reply(Reply(1, Status.OK, response.SerializeToString()) if reply is None else reply)

    async def received_connect(self, **credentials: Any) -> Stream:
        """The broker's end of an opening that has sent CONNECT, with the credentials that it was given."""
        self.open()
        self.answer_credentials(**credentials)
        broker = await self.accept()
        await read_command(broker)
        return broker

    async def challenge_proxy(self, broker: Stream, method: str) -> None:
        """Have the broker challenge the proxy, and wait until the auth worker is asked for the answer."""
        await broker.send_all(commands.auth_challenge("v", 19, method, b"q"))
        await until(lambda: len(self.auth.clients[-1].asked_now) == 2)

    async def dialled(self) -> Stream:
        """The broker's end of an opening, once CONNECT is there."""
        self.open()
        stream = await self.accept()
        assert (await read_command(stream)).type == BaseCommand.CONNECT
        return stream

    async def outcome(self) -> Any:
        await until(lambda: self.outcomes)
        (outcome,) = self.outcomes
        return outcome

    def ends_in_s(self) -> float:
        """Time left to the opening."""
        (grain,) = self.deadlines._by_grain
        return grain * GRAIN_S - trio.current_time()

    def is_watched(self) -> bool:
        return bool(self.reactor._watched)


MakeSetup = Callable[..., Setup]


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


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "ours")


def server_context(authority: Authority) -> ssl.SSLContext:
    pair = authority.server("broker")
    config = ListenerTls(certificate=pair.certificate, key=pair.key)
    return listener_contexts("listener[0].tls", config).value.default


@pytest.fixture(params=[False, True], ids=["plain", "TLS"])
def tls(request: pytest.FixtureRequest, authority: Authority) -> Authority | None:
    """Of the broker's certificate; None: it is on plain TCP."""
    return authority if request.param else None


WITHOUT_TLS = pytest.mark.parametrize("tls", [False], indirect=True)
WITH_TLS = pytest.mark.parametrize("tls", [True], indirect=True)


@pytest.fixture
async def make_setup(
    nursery: trio.Nursery, reactor: Reactor, deadlines: Deadlines, tls: Authority | None
) -> AsyncIterator[MakeSetup]:
    """Make one with these keys of ``[brokers]``."""
    made: list[Setup] = []

    def make(**brokers: Any) -> Setup:
        made.append(Setup(nursery, reactor, deadlines, tls, **brokers))
        return made[-1]

    yield make
    for setup in made:
        close(setup)


@pytest.fixture
async def setup(make_setup: MakeSetup) -> Setup:
    return make_setup()


def close(setup: Setup) -> None:
    setup.listener.close()
    for stream in setup.accepted:
        stream.socket.close()
    for outcome in setup.outcomes:
        if isinstance(outcome, BrokerLink):
            transport_of(cast("Stream", outcome.stream)).socket.close()


async def read_command(stream: Stream) -> BaseCommand:
    (command,) = await read_commands(stream, 1)
    return command


async def read_commands(stream: Stream, count: int) -> list[BaseCommand]:
    decoder = FrameDecoder(max_frame_bytes=100_000)
    found: list[BaseCommand] = []
    while len(found) < count:
        while (frame := decoder.next_frame()) is None:
            decoder.receive_data(await stream.receive_some())
        found.append(commands.parse_command(frame.command))
    return found


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


async def test_a_link_to_a_known_target_is_opened_by_callback(setup: Setup) -> None:
    def start() -> BrokerOpening | None:
        return start_opening(
            setup.links, setup.request(), setup.deadlines, setup.turns, setup.tasks, on_done=setup.outcomes.append
        )

    assert start() is None
    await setup.open_in_task(setup.allowed())
    assert start() is not None
    broker = await setup.accept()
    assert (await read_command(broker)).type == BaseCommand.CONNECT
    await broker.send_all(CONNECTED)
    assert isinstance(await setup.outcome(), BrokerLink)


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
        {"others": [OtherBroker(host="127.0.0.1", port=1, addresses=["127.0.0.1"])]},
        {"addresses": ["127.0.0.1", "fe80::1%eth0"]},
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


# ---- the broker that a client's TLS names


def named(setup: Setup, service_url: str, **keys: Any) -> BrokerLinks:
    """Links with these keys of ``[brokers]``."""
    config = make_config(brokers={"service_url": service_url, **keys})
    return BrokerLinks(config, setup.auth, setup.lookup, setup.tasks)  # type: ignore[arg-type]


@WITHOUT_TLS
@pytest.mark.parametrize("scheme", ["pulsar", "pulsar+ssl"])
async def test_the_port_with_tls_is_dialled_and_nothing_is_said_there(setup: Setup, scheme: str) -> None:
    port = setup.port if scheme == "pulsar+ssl" else 7650
    links = named(setup, f"{scheme}://127.0.0.1:{port}", port_pairs=[[7650, setup.port]])
    setup.lookup.answers[Method.RESOLVE_TARGET] = setup.allowed(host="b0.example", port=port)
    link = await links.open_named(NAMED)
    assert link.broker == HostPort("b0.example", setup.port)
    [(_, request, *_)] = setup.lookup.clients[0].calls
    assert (request.target, request.server_name, request.principal_name) == ("b0.example", True, "")
    await link.stream.send_all(b"hello")
    assert await (await setup.accept()).receive_some() == b"hello"
    await link.stream.aclose()
    assert not setup.auth.clients
    known = links.known_target(NAMED)
    assert known is not None
    assert known.port == setup.port, "as it was dialled"


@WITHOUT_TLS
async def test_a_verdict_holds_for_the_name_and_for_no_other_and_for_no_relay_of_a_principal(setup: Setup) -> None:
    """Security: a name needs no principal; what is dialled with the proxy's credentials needs one, with its seal."""
    links = named(setup, f"pulsar+ssl://127.0.0.1:{setup.port}")
    await open_named(setup, links)
    unsealed = setup.request(connect(NAMED.name).connect, ClientIdentity(Principal()))
    assert links.known_target(NamedRequest("b1.example", CLIENT)) is None
    assert links.known_target(unsealed) is None
    assert links.known_target(NamedRequest(NAMED.name, "10.0.0.2:1")) is not None, "whose client it is does not matter"
    links.forget_target(NAMED)
    links._remember_target(unsealed, setup.allowed())
    assert links.known_target(NAMED) is None


@WITHOUT_TLS
async def test_a_named_broker_at_a_port_of_the_proxy_itself_is_left_to_the_task_that_looks(setup: Setup) -> None:
    links = named(setup, "pulsar://127.0.0.1:7650", port_pairs=[[7650, setup.port]])
    links.dialer._own_ports = frozenset({setup.port})
    await open_named(setup, links, port=7650)
    assert links.known_target(NAMED) is None


async def open_named(setup: Setup, links: BrokerLinks, **fields: Any) -> None:
    setup.lookup.answers[Method.RESOLVE_TARGET] = setup.allowed(host=NAMED.name, **fields)
    await (await links.open_named(NAMED)).stream.aclose()


@WITHOUT_TLS
async def test_a_named_broker_without_a_port_with_tls_is_refused(setup: Setup) -> None:
    setup.lookup.answers[Method.RESOLVE_TARGET] = setup.allowed(host="b0.example")
    with pytest.raises(TargetRefused, match=r"brokers\.port_pairs has no port with TLS for it") as refused:
        await setup.links.open_named(NAMED)
    assert refused.value.reason == "port"
    assert setup.links.known_target(NAMED) is None


@pytest.mark.parametrize("fields", [{"port": 22}, {"addresses": ["169.254.169.254"]}])
async def test_a_named_broker_that_the_forwarder_itself_denies(setup: Setup, fields: dict[str, Any]) -> None:
    """Security: a captured lookup worker leads no client's TLS to where no broker can be."""
    links = named(setup, f"pulsar+ssl://127.0.0.1:{setup.port}")
    setup.lookup.answers[Method.RESOLVE_TARGET] = setup.allowed(host="b0.example", **fields)
    with pytest.raises(TargetRefused):
        await links.open_named(NAMED)
    assert links.known_target(NAMED) is None


async def test_a_named_broker_that_does_not_listen(setup: Setup) -> None:
    links = named(setup, f"pulsar+ssl://127.0.0.1:{setup.port}")
    setup.lookup.answers[Method.RESOLVE_TARGET] = setup.allowed()
    setup.listener.close()
    with pytest.raises(BrokerLinkFailed, match="Connection refused") as failed:
        await links.open_named(NAMED)
    assert failed.value.reason == "unreachable"


def dial_named(setup: Setup) -> tuple[NamedOpening, list[NamedOutcome]]:
    outcomes: list[NamedOutcome] = []
    asked, target = NamedRequest("127.0.0.1", CLIENT), setup.allowed()
    links, reactor = setup.links, setup.reactor
    opening = NamedOpening(links, reactor, setup.deadlines, asked=asked, target=target, on_done=outcomes.append)
    opening.start()
    return opening, outcomes


async def test_a_known_named_broker_is_dialled_by_callback_and_nothing_is_said_there(setup: Setup) -> None:
    assert start_named_opening(setup.links, NAMED, setup.deadlines, on_done=lambda _: None) is None
    _, outcomes = dial_named(setup)
    await until(lambda: outcomes)
    [link] = outcomes
    assert isinstance(link, NamedLink)
    assert link.broker == HostPort("127.0.0.1", setup.port)
    await link.stream.send_all(b"hello")
    assert await (await setup.accept_tcp()).receive_some() == b"hello"
    await link.stream.aclose()
    assert (setup.is_watched(), setup.deadlines._by_grain, setup.auth.clients) == (False, {}, [])


@WITHOUT_TLS
@pytest.mark.parametrize(
    ("timeouts_ms", "reason", "detail"),
    [
        ({"connect_timeout_ms": 300}, "unreachable", "cannot connect to {}: 127.0.0.1: no answer within 300 ms"),
        (
            {"handshake_timeout_ms": 300, "connect_timeout_ms": 60_000},
            "timeout",
            "{} did not finish the handshake within 0.3 s",
        ),
    ],
)
async def test_a_named_broker_that_does_not_answer(
    make_setup: MakeSetup, timeouts_ms: dict[str, int], reason: str, detail: str
) -> None:
    setup = make_setup(**timeouts_ms)
    with silent(setup):
        _, outcomes = dial_named(setup)
        assert setup.is_watched()
        await until(lambda: outcomes)
    [failed] = outcomes
    assert isinstance(failed, BrokerLinkFailed)
    assert (failed.reason, str(failed)) == (reason, detail.format(setup.target))
    assert not setup.is_watched()


@WITHOUT_TLS
async def test_a_named_broker_that_answers_later(setup: Setup) -> None:
    with silent(setup):
        _, outcomes = dial_named(setup)
        assert not outcomes
        while not outcomes:  # those that wait before it first; for it the kernel asks once more
            await setup.accept_tcp()
            await trio.testing.wait_all_tasks_blocked()
    [link] = outcomes
    assert isinstance(link, NamedLink)
    link.stream.close_now()
    assert (setup.is_watched(), setup.deadlines._by_grain) == (False, {})


@WITHOUT_TLS
async def test_a_named_broker_that_refuses_later(setup: Setup) -> None:
    with silent(setup):
        _, outcomes = dial_named(setup)
        assert not outcomes
        setup.listener.close()
        await until(lambda: outcomes)
    [failed] = outcomes
    assert isinstance(failed, BrokerLinkFailed)
    assert str(failed) == f"cannot connect to {setup.target}: 127.0.0.1: Connection refused"
    assert not setup.is_watched()


@WITHOUT_TLS
async def test_a_named_broker_whose_client_leaves_is_dialled_no_more(setup: Setup) -> None:
    with silent(setup):
        opening, outcomes = dial_named(setup)
        opening.abandon()
        opening.abandon()
    assert (outcomes, setup.is_watched(), setup.deadlines._by_grain) == ([], False, {})


# ---- a target with several addresses


async def test_the_address_that_has_answered_a_task_is_dialled_first(setup: Setup) -> None:
    """127.0.0.2 refuses: the broker does not listen there."""
    await setup.open_in_task(setup.allowed(addresses=["127.0.0.2", "127.0.0.1"]))
    known = setup.links.known_target(setup.request())
    assert known is not None
    assert list(known.addresses) == ["127.0.0.1", "127.0.0.2"]


async def test_an_address_that_refuses_leaves_the_others_to_a_task(setup: Setup) -> None:
    addresses = ["127.0.0.2", "127.0.0.1"]
    setup.links._remember_target(setup.request(), setup.allowed(addresses=addresses))
    setup.open(addresses=addresses)
    assert await setup.outcome() is None
    assert setup.links.known_target(setup.request()) is None, "the next ones have no attempt in vain"
    assert not setup.is_watched()
    assert not setup.deadlines._by_grain


async def test_a_silent_address_leaves_the_others_to_a_task(
    make_setup: MakeSetup, autojump_clock: trio.testing.MockClock
) -> None:
    """The limit of a connection by itself is much longer."""
    setup = make_setup()
    started_at = trio.current_time()
    with silent(setup):
        setup.open(addresses=["127.0.0.1", "127.0.0.2"])
        assert await setup.outcome() is None
    assert trio.current_time() - started_at == pytest.approx(ATTEMPT_DELAY_S, abs=0.15)


@contextlib.contextmanager
def silent(setup: Setup) -> Iterator[None]:
    """The broker's queue is full, so that the kernel drops what asks for a connection."""
    setup.listener.listen(0)
    queued = [socket.socket() for _ in range(4)]
    for one in queued:
        one.setblocking(False)
        one.connect_ex(("127.0.0.1", setup.port))
    yield
    for one in queued:
        one.close()


@WITH_TLS
async def test_an_address_that_has_answered_gets_the_time_for_tls(
    make_setup: MakeSetup, autojump_clock: trio.testing.MockClock
) -> None:
    """To begin again elsewhere would cost another handshake, when all are slow."""
    setup = make_setup(connect_timeout_ms=2500, handshake_timeout_ms=60_000)
    started_at = trio.current_time()
    setup.open(addresses=["127.0.0.1", "127.0.0.2"])
    assert await setup.outcome() is None
    assert trio.current_time() - started_at == pytest.approx(2.5, abs=0.2)


# ---- brokers that fail


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
    assert not setup.deadlines._by_grain, "nothing more is told"


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
        reset(transport_of(broker))
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


async def test_a_broker_that_says_nothing_is_too_slow(make_setup: MakeSetup) -> None:
    setup = make_setup(handshake_timeout_ms=300)
    broker = await setup.dialled()
    failed = await setup.outcome()
    assert isinstance(failed, BrokerLinkFailed)
    assert failed.reason == "timeout"
    assert str(failed) == f"{setup.target} did not finish the handshake within 0.3 s"
    assert await broker.receive_some() == b""


@pytest.mark.parametrize(
    ("timeouts_ms", "detail"),
    [
        ({"connect_timeout_ms": 300}, "cannot connect to {}: 127.0.0.1: no answer within 300 ms"),
        ({"handshake_timeout_ms": 300, "connect_timeout_ms": 60_000}, "{} did not finish the handshake within 0.3 s"),
    ],
)
async def test_a_broker_that_does_not_answer_is_unreachable_after_the_connect_timeout(
    make_setup: MakeSetup,
    timeouts_ms: dict[str, int],
    detail: str,
) -> None:
    setup = make_setup(**timeouts_ms)
    with silent(setup):
        setup.open()
        assert setup.ends_in_s() < 2
        failed = await setup.outcome()
    assert str(failed) == detail.format(setup.target)


async def test_the_connect_timeout_ends_with_the_connection(make_setup: MakeSetup) -> None:
    setup = make_setup(connect_timeout_ms=30_000, handshake_timeout_ms=600_000)
    await setup.dialled()
    assert setup.ends_in_s() > 500


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


# ---- with the proxy's own credentials

CREDENTIALS: dict[str, Any] = {"credentials": {"method": "token", "file": "x"}}
FORWARDED = ClientIdentity(ALICE, b"sealed", OriginalCredentials("token", "the client's own"))
LATER_MS = 4_000_000_000_000


@pytest.fixture
async def secured(make_setup: MakeSetup) -> Setup:
    return make_setup(**CREDENTIALS)


async def test_the_proxys_credentials_are_asked_for_once_and_go_with_connect(secured: Setup) -> None:
    secured.links._remember_target(secured.request(), secured.allowed())
    assert secured.links.known_target(secured.request()) is not None
    secured.open(host="localhost")
    request = secured.asked()
    assert (request.broker_host, request.HasField("challenge")) == ("localhost", False)
    secured.answer_credentials()
    broker = await secured.accept()
    command = (await read_command(broker)).connect
    assert (command.auth_method_name, command.auth_data) == ("token", SECRET)
    assert command.original_principal == "alice"
    await broker.send_all(CONNECTED)
    assert isinstance(await secured.outcome(), BrokerLink)
    secured.asked()
    assert secured.auth.clients[0].calls == [], "no task has asked, either"
    assert secured.auth.clients[0].cancelled == []


@pytest.mark.parametrize(
    ("reply", "detail"),
    [
        (Reply(1, Status.INVALID_REQUEST, detail="the file is empty"), "the file is empty"),
        (Reply(1, Status.OK, b"\xff" + SECRET), "bytes that are no BrokerCredentialsResponse"),
        (Reply(1, Status.OK, SECRET, has_more=True), "a part, where the whole was expected"),
    ],
)
async def test_without_credentials_no_broker_is_dialled(secured: Setup, reply: Reply, detail: str) -> None:
    """The failure is as in a task (test_network_broker_link)."""
    secured.open()
    secured.answer_credentials(reply)
    failed = await secured.outcome()
    assert isinstance(failed, BrokerLinkFailed)
    assert (failed.reason, failed.message) == ("credentials", NOT_CONNECTED)
    assert str(failed) == f"no credentials for {secured.target}: {detail}"
    with pytest.raises(BlockingIOError):
        secured.listener.accept()
    assert not secured.deadlines._by_grain


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_task_asks_where_the_auth_worker_cannot_be_reached_at_once_or_is_lost(
    secured: Setup, is_lost: bool
) -> None:
    secured.auth.answers[Method.BROKER_CREDENTIALS] = BrokerCredentialsResponse(method="token", data=SECRET)
    secured.auth.reached = is_lost
    secured.open()
    if is_lost:
        secured.auth.clients[0].asked_now[0][2](None)
    command = (await read_command(await secured.accept())).connect
    assert command.auth_data == SECRET
    ((_, request, timeout_s, retry),) = secured.auth.clients[0].calls
    assert retry, "a first round may be repeated"
    assert timeout_s <= CREDENTIALS_TIMEOUT_S
    assert request == secured.asked(), "the same exchange"


async def test_an_opening_abandoned_while_credentials_are_awaited_dials_no_broker(secured: Setup) -> None:
    opening = secured.open()
    opening.abandon()
    assert secured.auth.clients[0].cancelled == [1]
    secured.answer_credentials()  # it crosses with the cancellation
    secured.auth.clients[0].asked_now[0][2](None)
    with pytest.raises(BlockingIOError):
        secured.listener.accept()
    assert not secured.deadlines._by_grain
    assert secured.outcomes == []


@pytest.mark.parametrize("awaited", ["credentials", "broker", "answer"])
async def test_one_deadline_holds_for_all_steps(
    make_setup: MakeSetup,
    autojump_clock: trio.testing.MockClock,
    awaited: str,
) -> None:
    """Each wait before has taken a part of it. Here all is called by the test: what the clock skips is no broker's."""
    setup = make_setup(handshake_timeout_ms=3000, connect_timeout_ms=2500, **CREDENTIALS)
    started_at = trio.current_time()
    opening = setup.open()
    if awaited != "credentials":
        await trio.sleep(1.0)
        setup.answer_credentials()
    if awaited == "answer":
        await trio.sleep(1.0)
        opening._handle_event(Challenged("token", b"q"))
    failed = await setup.outcome()
    assert isinstance(failed, BrokerLinkFailed)
    assert str(failed) == f"{setup.target} did not finish the handshake within 3.0 s"
    assert trio.current_time() - started_at == pytest.approx(3.0, abs=0.2)
    assert setup.auth.clients[0].cancelled == ([] if awaited == "broker" else [1])


@pytest.mark.parametrize("expires_at_unix_ms", [0, LATER_MS])
@pytest.mark.parametrize(
    ("identity", "original_data", "answers"),
    [
        (IDENTITY, OriginalData.ORIGINAL_DATA_UNKNOWN, True),
        (FORWARDED, OriginalData.ORIGINAL_DATA_UNKNOWN, False),
        (FORWARDED, OriginalData.ORIGINAL_DATA_IGNORED, True),
    ],
)
async def test_the_link_says_whether_the_proxy_answers_challenges_in_the_relay(
    secured: Setup, expires_at_unix_ms: int, identity: ClientIdentity, original_data: OriginalData, answers: bool
) -> None:
    """It does where its credentials end, unless the broker challenges the client; CONNECT says the same."""
    secured.open(identity=identity, original_data=original_data)
    secured.answer_credentials(expires_at_unix_ms=expires_at_unix_ms)
    broker = await secured.accept()
    command = (await read_command(broker)).connect
    await broker.send_all(CONNECTED)
    link = await secured.outcome()
    assert link.answers_challenges is (answers and bool(expires_at_unix_ms))
    assert link.original_data == original_data
    task_path = CredentialExchange(secured.auth.clients[0], "b0")  # type: ignore[arg-type]
    task_path.expires_at_unix_ms = expires_at_unix_ms
    request = secured.request(identity=identity)
    target = secured.allowed(original_data=original_data)
    assert command == secured.links.connect_for(request, target, task_path, "token", SECRET)


async def test_a_challenge_is_answered_by_the_same_exchange(secured: Setup) -> None:
    """Of several rounds, too: no CONNECTED counts before the broker's own proof."""
    broker = await secured.received_connect(incomplete=True)
    await secured.challenge_proxy(broker, "sasl")
    first = BrokerCredentialsRequest.FromString(secured.auth.clients[0].asked_now[0][1])
    second = secured.asked(1)
    assert (second.exchange_id, second.challenge) == (first.exchange_id, b"q")
    await broker.send_all(commands.ping())  # while the auth worker is asked
    assert (await read_command(broker)).type == BaseCommand.PONG
    secured.answer_credentials(data=b"answer", expires_at_unix_ms=LATER_MS)
    answer = (await read_command(broker)).auth_response.response
    assert (answer.auth_method_name, answer.auth_data) == ("token", b"answer")
    await broker.send_all(CONNECTED)
    link = await secured.outcome()
    assert link.answers_challenges, "as the last answer says"


@pytest.mark.parametrize("has_answered", [False, True])
async def test_a_broker_that_owes_its_proof_is_no_broker_yet(secured: Setup, has_answered: bool) -> None:
    """Security: it may be an impostor."""
    broker = await secured.received_connect(incomplete=True)
    if has_answered:
        await secured.challenge_proxy(broker, "sasl")
        secured.answer_credentials(incomplete=True)
        await read_command(broker)
    await broker.send_all(CONNECTED)
    failed = await secured.outcome()
    assert isinstance(failed, BrokerLinkFailed)
    assert failed.reason == "handshake"


async def test_an_answer_to_a_challenge_is_never_asked_for_twice(secured: Setup) -> None:
    broker = await secured.received_connect()
    await secured.challenge_proxy(broker, "token")
    secured.auth.clients[0].asked_now[1][2](None)
    failed = await secured.outcome()
    assert str(failed) == f"no credentials for {secured.target}: the worker went away"
    assert secured.auth.clients[0].calls == []
    assert await broker.receive_some() == b""


async def test_a_broker_that_refuses_while_an_answer_is_awaited(secured: Setup) -> None:
    """No credential is shown: neither in what the client is told, nor in what is logged."""
    with structlog.testing.capture_logs() as logs:
        broker = await secured.received_connect()
        await secured.challenge_proxy(broker, "token")
        await broker.send_all(commands.error(0, ServerError.AuthenticationError, "no"))
        failed = await secured.outcome()
    assert secured.auth.clients[0].cancelled == [1]
    secured.answer_credentials()
    assert isinstance(failed, BrokerLinkFailed)
    assert failed.reason == "refused"
    assert failed.message == CREDENTIALS_REFUSED
    assert SECRET.decode() not in f"{failed!r}{failed.message}{logs}"
    assert len(secured.outcomes) == 1


# ---- TLS towards brokers

Behaviour = Callable[[TcpStream], Awaitable[None]]


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "strange")


async def failed_on_both_ways(setup: Setup, behave: Behaviour, host: str = "127.0.0.1") -> BrokerLinkFailed:
    """What becomes of an opening where the broker behaves like this, by callback and in a task: the same."""

    async def serve() -> None:
        await behave(await setup.accept_tcp())

    setup.tasks.start_soon(serve)
    setup.open(host=host)
    failed = await setup.outcome()
    assert isinstance(failed, BrokerLinkFailed)
    assert not setup.is_watched()
    assert not setup.deadlines._by_grain
    setup.lookup.answers[Method.RESOLVE_TARGET] = setup.allowed(host=host)
    setup.tasks.start_soon(serve)
    with pytest.raises(BrokerLinkFailed) as in_task:
        await setup.links.open_link(setup.request())
    assert (failed.reason, failed.code, failed.message) == (
        in_task.value.reason,
        in_task.value.code,
        in_task.value.message,
    )
    assert str(failed) == str(in_task.value)
    return failed


@WITH_TLS
@pytest.mark.parametrize(
    ("breaks", "detail"),
    [
        ("closes", "unexpected eof"),
        ("resets", "the connection broke off during the TLS handshake: [Errno 104]"),
        ("is on plain TCP", "the peer does not speak TLS"),
    ],
)
async def test_a_broker_that_breaks_off_within_the_tls_handshake(setup: Setup, breaks: str, detail: str) -> None:
    async def behave(broker: TcpStream) -> None:
        await broker.receive_some()
        if breaks == "closes":
            await broker.send_eof()
        elif breaks == "resets":
            reset(broker)
        else:
            await broker.send_all(CONNECTED)

    failed = await failed_on_both_ways(setup, behave)
    assert failed.reason == "tls"
    assert detail in str(failed)


@WITH_TLS
@pytest.mark.parametrize("is_strange", [True, False], ids=["of a stranger", "for another name"])
async def test_a_certificate_that_is_not_the_brokers(setup: Setup, stranger: Authority, is_strange: bool) -> None:
    """Security: neither another authority's nor another host's is accepted, and no CONNECT goes there."""
    alerts: list[str] = []
    if is_strange:
        setup.context = server_context(stranger)

    async def behave(broker: TcpStream) -> None:
        assert setup.context is not None
        with pytest.raises(TlsFailed) as refused:
            await TlsStream(broker, setup.context, server_side=True).handshake()
        alerts.append(str(refused.value))

    failed = await failed_on_both_ways(setup, behave, host="127.0.0.1" if is_strange else "b0.example")
    assert failed.reason == "tls"
    assert "the peer's certificate is not accepted" in str(failed)
    await until(lambda: len(alerts) == 2)
    assert {alert.split(" alert ")[1] for alert in alerts} == {"unknown ca" if is_strange else "bad certificate"}


@WITH_TLS
async def test_the_proxys_own_certificate_is_shown(make_setup: MakeSetup, authority: Authority) -> None:
    ours = authority.client("proxy")
    setup = make_setup(tls={"trust": authority.file, "certificate": ours.certificate, "key": ours.key})
    assert setup.context is not None
    setup.context.load_verify_locations(authority.file)
    setup.context.verify_mode = ssl.CERT_REQUIRED
    broker = await setup.dialled()
    assert isinstance(broker, TlsStream)
    assert b"proxy" in broker.peer_certificate()


@WITH_TLS
async def test_the_connect_timeout_includes_the_tls_handshake(
    make_setup: MakeSetup, autojump_clock: trio.testing.MockClock
) -> None:
    """The broker's kernel accepts the connection, and nobody answers the hello."""
    setup = make_setup(connect_timeout_ms=2500, handshake_timeout_ms=60_000)
    started_at = trio.current_time()
    setup.open()
    failed = await setup.outcome()
    assert str(failed) == f"cannot connect to {setup.target}: 127.0.0.1: no answer within 2500 ms"
    assert failed.reason == "unreachable"
    assert trio.current_time() - started_at == pytest.approx(2.5, abs=0.2)


@WITH_TLS
async def test_an_opening_that_is_abandoned_within_the_tls_handshake(setup: Setup) -> None:
    opening = setup.open()
    broker = await setup.accept_tcp()
    assert await broker.receive_some()
    opening.abandon()
    assert await broker.receive_some() == b""
    assert setup.outcomes == []
    assert not setup.is_watched()
    assert not setup.deadlines._by_grain


@WITH_TLS
@pytest.mark.parametrize("in_records", [False, True], ids=["in bytes", "in records of a byte"])
async def test_connected_comes_in_pieces(setup: Setup, in_records: bool) -> None:
    broker = await setup.dialled()
    assert isinstance(broker, TlsStream)
    pieces = [bytes([byte]) for byte in (CONNECTED if in_records else broker.encrypt(memoryview(CONNECTED)))]
    for piece in pieces:
        await (broker if in_records else broker.transport).send_all(piece)
    link = await setup.outcome()
    assert link.connected.frame.encode() == CONNECTED


@WITH_TLS
async def test_what_follows_connected_is_the_relays(setup: Setup) -> None:
    """Whole records are decrypted, and the beginning of one is left in the session."""
    broker = await setup.dialled()
    assert isinstance(broker, TlsStream)
    whole = broker.encrypt(memoryview(CONNECTED + b"more")) + broker.encrypt(memoryview(b" and more"))
    part = broker.encrypt(memoryview(b"the rest"))
    await broker.transport.send_all(whole + part[:7])
    link = await setup.outcome()
    assert link.connected.trailing_data == b"more and more"
    assert isinstance(link.stream, TlsStream)
    assert (link.stream.session.unread, link.stream.take_read_ahead()) == (part[:7], b"")
    await broker.transport.send_all(part[7:])
    assert await link.stream.receive_some() == b"the rest"


@WITH_TLS
async def test_tickets_are_no_end(setup: Setup) -> None:
    """They are records without data."""
    assert setup.context is not None
    setup.context.options &= ~ssl.OP_NO_TICKET
    setup.context.num_tickets = 2
    broker = await setup.dialled()
    await broker.send_all(commands.ping())  # at the latest now all tickets are there
    assert (await read_command(broker)).type == BaseCommand.PONG
    await broker.send_all(CONNECTED)
    assert isinstance(await setup.outcome(), BrokerLink)


@WITH_TLS
async def test_what_comes_with_the_end_of_the_tls_handshake_is_kept(setup: Setup) -> None:
    """In TLS 1.2 the server is the last to speak."""
    assert setup.context is not None
    setup.context.maximum_version = ssl.TLSVersion.TLSv1_2
    setup.open()
    transport = await setup.accept_tcp()
    broker = TlsStream(transport, setup.context, server_side=True)
    while not continue_handshake(broker.session, await transport.receive_some()):
        await transport.send_all(broker.session.take_outgoing())
    await transport.send_all(broker.session.take_outgoing() + broker.encrypt(memoryview(commands.ping())))
    assert [command.type for command in await read_commands(broker, 2)] == [BaseCommand.CONNECT, BaseCommand.PONG]


@WITH_TLS
@pytest.mark.parametrize(
    ("end", "detail"),
    [("damaged record", "bad record mac"), ("close_notify", "the broker closed the connection during the handshake")],
)
@pytest.mark.parametrize("first", [b"", commands.ping()], ids=["alone", "behind a ping"])
async def test_tls_that_ends_before_connected(setup: Setup, end: str, detail: str, first: bytes) -> None:
    """TCP goes on; and what came before needs an answer, for which there is no more TLS."""

    async def behave(transport: TcpStream) -> None:
        assert setup.context is not None
        broker = TlsStream(transport, setup.context, server_side=True)
        await broker.handshake()
        await read_command(broker)
        records = broker.encrypt(memoryview(first)) if first else b""
        last = broker.encrypt(memoryview(b"x"))[:-1] + b"\0" if end == "damaged record" else broker.session.close()
        await transport.send_all(records + last)

    failed = await failed_on_both_ways(setup, behave)
    assert failed.reason == "handshake"
    assert first or detail in str(failed).lower().replace("_", " "), "of the answer the failure tells otherwise"


@WITH_TLS
@pytest.mark.parametrize("is_abandoned", [False, True])
async def test_a_tls_handshake_waits_for_its_turn(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, is_abandoned: bool
) -> None:
    """Security: to verify a broker's certificate takes up to a millisecond, and any client causes it."""
    monkeypatch.setattr(setup.turns, "flush", lambda: None)
    started: list[Stream] = []

    async def accept() -> None:
        with contextlib.suppress(TlsFailed):  # of the opening that is abandoned
            started.append(await setup.accept())

    opening = setup.open()
    setup.tasks.start_soon(accept)
    await until(lambda: setup.turns.are_waiting)
    assert setup.turns._waiting.count_waiting("principal alice") == 1
    assert not setup.is_watched()
    if is_abandoned:
        opening.abandon()
        assert not setup.turns.are_waiting
        return
    assert not started
    setup.turns.remove("principal alice", opening)
    opening.take_turn()
    assert setup.is_watched()
    await until(lambda: started)
    assert (await read_command(started[0])).type == BaseCommand.CONNECT


# ---- the PROXY header


CLIENTS_HEADER = encode_header(HostPort("192.0.2.7", 4000), HostPort("192.0.2.1", 6650), b"\x05\x00\x02id")


async def received(stream: Stream, size: int) -> bytes:
    data = b""
    while len(data) < size and (more := await stream.receive_some(size - len(data))):
        data += more
    return data


@pytest.mark.parametrize("mode", ["within_tls", "before_tls"])
@pytest.mark.parametrize("in_task", [True, False])
async def test_the_client_is_announced(make_setup: MakeSetup, mode: str, *, in_task: bool) -> None:
    """CONNECT follows; and of two clients with one target each has its own header."""
    setup = make_setup(proxy_protocol=mode)
    setup.lookup.answers[Method.RESOLVE_TARGET] = setup.allowed()
    for header in (CLIENTS_HEADER, encode_header(HostPort("::7", 1), HostPort("::1", 2))):
        setup.outcomes.clear()
        asked = dataclasses.replace(setup.request(), announcement=header)
        if in_task:
            setup.tasks.start_soon(open_in_background, setup, asked)
        else:
            opening = BrokerOpening(
                setup.links,
                setup.reactor,
                setup.deadlines,
                setup.turns,
                setup.tasks,
                asked=asked,
                target=setup.allowed(),
                on_done=setup.outcomes.append,
            )
            opening.start()
        stream: Stream = await setup.accept_tcp()
        comes_first = mode == "before_tls" or setup.context is None
        if comes_first:
            assert await received(stream, len(header)) == header
        if setup.context is not None:
            stream = tls = TlsStream(cast("TcpStream", stream), setup.context, server_side=True)
            await tls.handshake()
        if not comes_first:
            assert await received(stream, len(header)) == header
        assert (await read_command(stream)).type == BaseCommand.CONNECT
        await stream.send_all(CONNECTED)
        assert isinstance(await setup.outcome(), BrokerLink)
        close_links(setup)


async def open_in_background(setup: Setup, asked: BrokerRequest) -> None:
    setup.outcomes.append(await setup.links.open_link(asked))


def close_links(setup: Setup) -> None:
    for outcome in setup.outcomes:
        if isinstance(outcome, BrokerLink):
            transport_of(cast("Stream", outcome.stream)).socket.close()


async def test_a_broker_that_breaks_off_may_take_no_header(make_setup: MakeSetup) -> None:
    setup = make_setup(proxy_protocol="within_tls")
    setup.open()
    broker = await setup.accept()
    await broker.receive_some(20)
    await broker.aclose()
    failed = await setup.outcome()
    assert isinstance(failed, BrokerLinkFailed)
    assert "haProxyProtocolEnabled=true" in str(failed)
    assert failed.message == NOT_CONNECTED


@WITH_TLS
async def test_a_broker_that_breaks_off_tls_may_take_no_header_before_it(make_setup: MakeSetup) -> None:
    setup = make_setup(proxy_protocol="before_tls")
    setup.open()
    (await setup.accept_tcp()).close_now()
    failed = await setup.outcome()
    assert isinstance(failed, BrokerLinkFailed)
    assert (failed.reason, "haProxyProtocolEnabled=true" in str(failed)) == ("tls", True)


@WITHOUT_TLS
@pytest.mark.parametrize(("mode", "announced"), [("before_tls", CLIENTS_HEADER), ("within_tls", b""), ("off", b"")])
async def test_the_client_of_a_named_broker_is_announced_before_its_own_tls(
    make_setup: MakeSetup, mode: str, announced: bytes
) -> None:
    """In a task, and by callback; not where brokers take the header within TLS, which is the client's."""
    setup = make_setup(proxy_protocol=mode)
    links = named(setup, f"pulsar+ssl://127.0.0.1:{setup.port}", proxy_protocol=mode)
    setup.lookup.answers[Method.RESOLVE_TARGET] = setup.allowed()
    asked, outcomes = NamedRequest("127.0.0.1", CLIENT, CLIENTS_HEADER), list[NamedOutcome]()
    outcomes.append(await links.open_named(asked))
    opening = start_named_opening(links, asked, setup.deadlines, on_done=outcomes.append)
    assert opening is not None
    await until(lambda: len(outcomes) == 2)
    for link in outcomes:
        assert isinstance(link, NamedLink)
        await link.stream.send_all(b"hello")
        stream = await setup.accept_tcp()
        assert await received(stream, len(announced) + 5) == announced + b"hello"
        link.stream.close_now()


@WITHOUT_TLS
@pytest.mark.parametrize("sent", [OSError(errno.EPIPE, "Broken pipe"), 5])
async def test_a_header_that_cannot_be_sent(
    make_setup: MakeSetup, monkeypatch: pytest.MonkeyPatch, sent: OSError | int
) -> None:
    """Nobody else's bytes follow a part of it."""
    setup = make_setup(proxy_protocol="before_tls")

    class Broken(socket.socket):
        def send(self, *_: object) -> int:
            if isinstance(sent, OSError):
                raise sent
            return sent

    dialed = setup.links.dialer.start_connection

    def start_connection(address: str, port: int) -> socket.socket:
        return Broken(fileno=dialed(address, port).detach())

    monkeypatch.setattr(setup.links.dialer, "start_connection", start_connection)
    _, outcomes = dial_named(setup)
    await until(lambda: outcomes)
    [failed] = outcomes
    assert isinstance(failed, BrokerLinkFailed)
    assert failed.reason == "unreachable"


# ---- outcomes, for outliers


class FakeOutcomes:
    """Notes what is recorded, by owner."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []

    def record_link(self, target: Any, owner: str) -> Callable[[str], None]:
        self.heard.append((owner, f"link to {target.port}"))
        return lambda how: self.heard.append((owner, how))

    def record_failure(self, target: Any, owner: str, failed: BrokerLinkFailed) -> None:
        self.heard.append((owner, f"{failed.reason} at {target.port}"))


@pytest.fixture
def outcomes(setup: Setup) -> FakeOutcomes:
    setup.links.outcomes = FakeOutcomes()  # type: ignore[assignment]
    return setup.links.outcomes  # type: ignore[return-value]


@pytest.mark.parametrize("way", ["by callback", "in a task"])
async def test_a_link_is_recorded_for_its_owner_and_knows_whom_to_tell_of_the_brokers_end(
    setup: Setup, outcomes: FakeOutcomes, way: str
) -> None:
    async def greet() -> None:
        await (await setup.accept()).send_all(CONNECTED)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(greet)
        if way == "by callback":
            setup.open()
            link = await setup.outcome()
        else:
            setup.lookup.answers[Method.RESOLVE_TARGET] = setup.allowed()
            link = await setup.links.open_link(setup.request())
    link.on_broker_end("gone")
    assert outcomes.heard == [("principal alice", f"link to {setup.port}"), ("principal alice", "gone")]
    await link.stream.aclose()


@pytest.mark.parametrize("way", ["by callback", "in a task"])
async def test_a_link_that_fails_is_recorded(setup: Setup, outcomes: FakeOutcomes, way: str) -> None:
    async def hang_up() -> None:
        await (await setup.accept_tcp()).aclose()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(hang_up)
        if way == "by callback":
            setup.open()
            assert isinstance(await setup.outcome(), BrokerLinkFailed)
        else:
            setup.lookup.answers[Method.RESOLVE_TARGET] = setup.allowed()
            with pytest.raises(BrokerLinkFailed):
                await setup.links.open_link(setup.request())
    [(owner, what)] = outcomes.heard
    assert owner == "principal alice"
    assert what in {f"handshake at {setup.port}", f"tls at {setup.port}", f"unreachable at {setup.port}"}


@WITHOUT_TLS
async def test_the_failure_of_one_of_several_brokers_is_recorded_too(make_setup: MakeSetup) -> None:
    setup, outcomes = make_setup(allowed_ports=[1]), FakeOutcomes()
    setup.links.outcomes = outcomes  # type: ignore[assignment]
    anywhere = connect(setup.target).connect
    anywhere.proxy_to_broker_url = ""
    here = OtherBroker(host="127.0.0.1", port=setup.port, addresses=["127.0.0.1"])
    await setup.open_in_task(setup.allowed(port=1, others=[here]), anywhere)
    assert outcomes.heard == [("principal alice", "unreachable at 1"), ("principal alice", f"link to {setup.port}")]


async def test_a_link_that_a_clients_tls_names_is_not_recorded(setup: Setup, outcomes: FakeOutcomes) -> None:
    """What is said on it is the client's own: an end says nothing of the broker."""
    setup.listener.close()
    setup.lookup.answers[Method.RESOLVE_TARGET] = setup.allowed(host="b0.example")
    with pytest.raises((BrokerLinkFailed, TargetRefused)):
        await setup.links.open_named(NAMED)
    assert outcomes.heard == []
