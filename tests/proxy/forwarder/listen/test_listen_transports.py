"""proxy.forwarder.listen.transports: a client's way in at each listener, with TLS or without."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from e2e.lab.certificates import Authority, Pair
from relay_fakes import unblocked_pair

from proxy.common import reloading_file as watched
from proxy.common.errors import ConfigError
from proxy.config.types import Config
from proxy.forwarder.disconnect_cause import DisconnectCause
from proxy.forwarder.listen.tls_opening import Outcome, TlsOpening
from proxy.forwarder.listen.transports import ListenerTransport, listener_transports
from proxy.runtime.loop.deadlines import Deadlines
from proxy.runtime.loop.reactor import Reactor
from proxy.runtime.loop.tcp_stream import TcpStream
from proxy.runtime.network.handshake_turns import HandshakeTurns
from proxy.runtime.network.tls import TlsFailed, TlsStream

TIMEOUT_S = 3

Stream = trio.abc.HalfCloseableStream


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "ours")


@pytest.fixture(scope="module")
def server(authority: Authority) -> Pair:
    return authority.server("server")


def some_transports(*listeners: dict[str, Any]) -> tuple[ListenerTransport, ...]:
    return listener_transports(msgspec.convert({"listener": listeners}, Config))


def tls_transport(pair: Pair, **tls: Any) -> ListenerTransport:
    [listener] = some_transports({"tls": {"certificate": pair.certificate, "key": pair.key, **tls}})
    return listener


async def looked_at(listener: ListenerTransport) -> ListenerTransport:
    """A listener whose files were looked at a moment ago: that is done in a thread, of which the test's clock knows
    nothing.
    """
    assert listener._tls is not None
    await listener.check_files()
    return listener


def client_stream(stream: Stream, authority: Authority, pair: Pair | None = None) -> TlsStream:
    context = ssl.create_default_context(cafile=authority.file)
    if pair is not None:
        context.load_cert_chain(pair.certificate, pair.key)
    return TlsStream(stream, context, server_side=False, host="localhost")  # type: ignore[arg-type]


OPEN: list[TcpStream] = []


def socket_pair() -> tuple[TcpStream, TcpStream]:
    """Two ends of a connection, closed behind the test."""
    one, other = (TcpStream(end) for end in unblocked_pair())
    OPEN.extend((one, other))
    return one, other


@pytest.fixture(autouse=True)
def close_sockets() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().socket.close()


@asynccontextmanager
async def opening(
    listener: ListenerTransport, here: TcpStream
) -> AsyncIterator[tuple[TlsOpening, list[Outcome], trio.Event]]:
    """The opening of a client's connection, and where its outcome will stand."""
    outcomes: list[Outcome] = []
    ended, deadlines, reactor = trio.Event(), Deadlines(), Reactor()

    def on_done(_opening: TlsOpening, outcome: Outcome) -> None:
        outcomes.append(outcome)
        ended.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(reactor.run)
        nursery.start_soon(deadlines.run)
        one = TlsOpening(
            reactor,
            HandshakeTurns(lambda: None),
            deadlines,
            nursery,
            listener,
            here,
            owner="address 192.0.2.1",
            on_done=on_done,
        )
        one.start(TIMEOUT_S)
        yield one, outcomes, ended
        nursery.cancel_scope.cancel()


async def accept_client(listener: ListenerTransport, here: TcpStream) -> tuple[TlsStream, bytes]:
    """Open a client's connection; raise why it is not opened."""
    async with opening(listener, here) as (_, outcomes, ended):
        await ended.wait()
    [outcome] = outcomes
    if isinstance(outcome, TlsStream):
        return outcome, outcome.peer_certificate()
    assert isinstance(outcome, Exception)
    raise outcome


async def enter(listener: ListenerTransport, client: Callable[[Stream], Awaitable[None]]) -> tuple[Stream, bytes]:
    """A client comes; all in memory."""
    here, there = socket_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client, there)
        return await accept_client(listener, here)


async def refused(listener: ListenerTransport, client: Callable[[Stream], Awaitable[None]]) -> str:
    """What the log says of a client that does not come in; its connection is closed."""
    here, there = socket_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client, there)
        with pytest.raises(TlsFailed) as caught:
            await accept_client(listener, here)
    with pytest.raises(trio.ClosedResourceError):
        await here.receive_some()
    return str(caught.value)


@pytest.mark.conforms("pip-1.21")
async def test_with_tls(authority: Authority, server: Pair) -> None:
    async def client(stream: Stream) -> None:
        tls = client_stream(stream, authority)
        await tls.handshake()
        await tls.send_all(b"hello")

    stream, certificate = await enter(tls_transport(server), client)
    assert isinstance(stream, TlsStream)
    assert certificate == b""
    assert await stream.receive_some() == b"hello"


async def test_the_certificate_that_a_client_shows(authority: Authority, server: Pair) -> None:
    alice = authority.client("alice")
    shown = ssl.create_default_context(cafile=alice.certificate)

    async def client(stream: Stream) -> None:
        await client_stream(stream, authority, alice).handshake()

    _stream, certificate = await enter(tls_transport(server, client_ca=authority.file), client)
    assert b"alice" in certificate
    assert certificate[:1] == b"0", "DER"
    assert shown.verify_mode


async def test_a_client_without_the_certificate_that_is_required(authority: Authority, server: Pair) -> None:
    told: list[str] = []

    async def client(stream: Stream) -> None:
        tls = client_stream(stream, authority)
        await tls.handshake()
        await tls.send_all(b"CONNECT")  # with TLS 1.3 it thinks that all is well
        with pytest.raises(trio.BrokenResourceError) as caught:
            await tls.receive_some()
        told.append(str(caught.value))
        await tls.aclose()

    listener = tls_transport(server, client_ca=authority.file, require_client_certificate=True)
    assert await refused(listener, client) == "peer did not return a certificate"
    assert "certificate required" in told[0], "it is told why"


@pytest.mark.conforms("pip-1.23")
async def test_a_plain_client(server: Pair) -> None:
    async def client(stream: Stream) -> None:
        await stream.send_all(b"\x00\x00\x00\x10\x00\x00\x00\x0c\x08\x02\x12\x06hello")
        while await stream.receive_some():
            pass
        await stream.send_all(b"more")  # not refused: that would take the alert away from it before it is read
        await stream.aclose()

    assert await refused(tls_transport(server), client) == "the peer does not speak TLS"


async def test_a_client_that_leaves(server: Pair) -> None:
    async def client(stream: Stream) -> None:
        await stream.aclose()

    assert await refused(tls_transport(server), client)


async def test_a_silent_client(server: Pair, autojump_clock: trio.testing.MockClock) -> None:
    async def client(stream: Stream) -> None:
        assert await stream.receive_some() == b"", "closed"

    listener = await looked_at(tls_transport(server))
    assert await refused(listener, client) == f"the TLS handshake was not finished within {TIMEOUT_S} s"
    assert trio.current_time() == pytest.approx(TIMEOUT_S)


async def test_a_refused_client_that_keeps_sending_is_closed_within_the_timeout(
    server: Pair, autojump_clock: trio.testing.MockClock
) -> None:
    """The client never reads the TLS alert and never leaves: the proxy waits for it a second at most."""

    async def client(stream: Stream) -> None:
        with contextlib.suppress(trio.BrokenResourceError):
            while True:
                await stream.send_all(b"GET / HTTP/1.1\r\n\r\n")
                await trio.sleep(0.3)

    await refused(await looked_at(tls_transport(server)), client)
    assert trio.current_time() <= TIMEOUT_S


@pytest.mark.parametrize("is_looked_at", [True, False])
async def test_an_evicted_handshake_is_closed(server: Pair, is_looked_at: bool) -> None:
    here, there = socket_pair()
    listener = tls_transport(server)
    if is_looked_at:
        await looked_at(listener)
    async with opening(listener, here) as (one, outcomes, _ended):
        one.evict()
        one.evict()
        assert outcomes == [DisconnectCause.GAVE_WAY]
        assert await there.receive_some() == b""


async def test_a_new_certificate_for_the_next_client(
    authority: Authority, autojump_clock: trio.testing.MockClock
) -> None:
    listener = tls_transport(authority.server("renewed"))
    seen: set[bytes] = set()

    async def client(stream: Stream) -> None:
        tls = client_stream(stream, authority)
        await tls.handshake()
        seen.add(tls.peer_certificate())

    for _ in range(2):
        await enter(await looked_at(listener), client)
        authority.server("renewed")
        await trio.sleep(watched.CHECK_INTERVAL_S)
    assert len(seen) == 2


def test_each_listener_has_its_own(server: Pair) -> None:
    plain, tls = some_transports(
        {"congestion_control": "reno"}, {"tls": {"certificate": server.certificate, "key": server.key}}
    )
    assert (plain.congestion_control, tls.congestion_control) == ("reno", "system")
    with pytest.raises(ConfigError, match=r"^listener\[1\]\.tls.*/nowhere"):
        some_transports({}, {"tls": {"certificate": "/nowhere", "key": "/nowhere"}})


# ---- sessions of TLS are not resumed


accepted_streams: list[Stream] = []
"""The server's ends: OpenSSL forgets the session of a connection that goes without a close_notify."""


async def meet(
    listener: ListenerTransport, context: ssl.SSLContext, session: ssl.SSLSession | None
) -> tuple[TlsStream, str]:
    """A client that wants to resume a session; its stream, and why it did not come in."""
    here, there = socket_pair()
    client = TlsStream(there, context, server_side=False, host="localhost")  # type: ignore[arg-type]
    if session is not None:
        client.session._tls.session = session
    failure = ""

    async def come() -> None:
        with contextlib.suppress(TlsFailed):
            await client.handshake()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(come)
        try:
            server, _ = await accept_client(listener, here)
            accepted_streams.append(server)
        except TlsFailed as error:
            failure = str(error)
            nursery.cancel_scope.cancel()
    return client, failure


def resuming_context(authority: Authority, version: ssl.TLSVersion, pair: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.file)
    context.maximum_version = version
    if pair is not None:
        context.load_cert_chain(pair.certificate, pair.key)
    return context


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_no_session_is_resumed(authority: Authority, server: Pair, version: ssl.TLSVersion) -> None:
    """Security: neither by a ticket nor by an id; its certificate would not be checked once more."""
    listener = await looked_at(tls_transport(server, client_ca=authority.file))
    context = resuming_context(authority, version, authority.client("alice"))
    session = None
    for _ in range(3):
        client, failure = await meet(listener, context, session)
        assert failure == ""
        assert not client.session._tls.session_reused
        session = client.session._tls.session
        assert session is None or not session.has_ticket


async def test_a_client_that_resumes_a_session_newer_than_its_connection_is_refused_once(
    authority: Authority, server: Pair
) -> None:
    listener = await looked_at(tls_transport(server))
    assert listener._tls is not None
    front = listener._tls.front_context
    context = resuming_context(authority, ssl.TLSVersion.TLSv1_2)
    client, _ = await meet(listener, context, None)
    newer = listener._tls.front_context
    assert newer is not front, "one for each connection with TLS 1.2"
    listener._tls._front = front
    _, failure = await meet(listener, context, client.session._tls.session)
    assert "resumed a session" in failure
    listener._tls._front = newer
    assert await meet(listener, context, client.session._tls.session) != (client, failure)
    assert (await meet(listener, context, client.session._tls.session))[1] == ""


async def test_tls_1_3_needs_no_context_of_its_own(authority: Authority, server: Pair) -> None:
    listener = await looked_at(tls_transport(server))
    assert listener._tls is not None
    front = listener._tls.front_context
    await meet(listener, resuming_context(authority, ssl.TLSVersion.TLSv1_3), None)
    assert listener._tls.front_context is front


def copy_file(source: str, target: Path) -> None:
    target.write_bytes(Path(source).read_bytes())


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_resumed_session_is_refused_after_the_client_authority_has_changed(
    authority: Authority,
    server: Pair,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    version: ssl.TLSVersion,
) -> None:
    """Security."""
    monkeypatch.setattr(watched, "CHECK_INTERVAL_S", 0)
    directory = tmp_path_factory.mktemp("changing")
    authorities = directory / "ca.pem"
    copy_file(authority.file, authorities)
    listener = tls_transport(server, client_ca=str(authorities), require_client_certificate=True)
    context = resuming_context(authority, version, authority.client("alice"))
    client, failure = await meet(listener, context, None)
    assert failure == ""
    copy_file(Authority(directory, "another").file, authorities)
    _, failure = await meet(listener, context, client.session._tls.session)
    assert "certificate is not accepted" in failure


# ---- hostile clients, and many at once


async def test_a_handshake_in_single_bytes(authority: Authority, server: Pair) -> None:
    async def client(stream: Stream) -> None:
        session = client_stream(stream, authority).session
        data = b""
        while True:
            is_done = session.continue_handshake(data)
            for byte in session.take_outgoing():
                await stream.send_all(bytes([byte]))
                await trio.testing.wait_all_tasks_blocked()
            if is_done:
                return
            data = await stream.receive_some(65536)

    stream, _ = await enter(tls_transport(server), client)
    assert isinstance(stream, TlsStream)


async def test_data_that_comes_with_the_finished_is_kept(authority: Authority, server: Pair) -> None:
    async def client(stream: Stream) -> None:
        session = client_stream(stream, authority).session
        session.continue_handshake()
        await stream.send_all(session.take_outgoing())
        while not session.continue_handshake(await stream.receive_some(65536)):
            pass
        await stream.send_all(session.take_outgoing() + session.encrypt(memoryview(b"CONNECT")))

    stream, _ = await enter(tls_transport(server), client)
    assert isinstance(stream, TlsStream)
    assert stream.take_read_ahead() == b"CONNECT"


async def test_a_hello_that_never_ends(server: Pair, autojump_clock: trio.testing.MockClock) -> None:
    async def client(stream: Stream) -> None:
        await stream.send_all(b"\x16\x03\x01\x40\x00\x01")
        assert await stream.receive_some() == b"", "closed"

    assert "not finished within" in await refused(await looked_at(tls_transport(server)), client)


@pytest.mark.parametrize("is_looked_at", [True, False])
async def test_a_socket_that_cannot_be_watched(
    server: Pair, monkeypatch: pytest.MonkeyPatch, is_looked_at: bool
) -> None:
    """Whoever accepts clients goes on to the others."""

    def refuse(*_: object) -> None:
        raise OSError(28, "max_user_watches")

    monkeypatch.setattr(Reactor, "watch", refuse)
    here, there = socket_pair()
    listener = tls_transport(server)
    if is_looked_at:
        await looked_at(listener)
    async with opening(listener, here) as (_, outcomes, ended):
        await ended.wait()
        assert "max_user_watches" in str(outcomes)
        assert await there.receive_some() == b""


@pytest.mark.parametrize("end", ["evict", "deadline"])
async def test_an_end_while_the_files_are_looked_at(
    server: Pair, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock, end: str
) -> None:
    """The handshake does not start behind it."""
    gate = trio.Event()
    monkeypatch.setattr(ListenerTransport, "must_check_files", property(lambda _: True))
    monkeypatch.setattr(ListenerTransport, "check_files", lambda _: gate.wait())
    here, there = socket_pair()
    async with opening(tls_transport(server), here) as (one, outcomes, ended):
        if end == "evict":
            one.evict()
        await ended.wait()
        assert await there.receive_some() == b""
        gate.set()
        await trio.testing.wait_all_tasks_blocked()
        assert len(outcomes) == 1
        assert (outcomes == [DisconnectCause.GAVE_WAY]) is (end == "evict")


async def test_an_end_while_it_is_closed_behind_the_alert(server: Pair, autojump_clock: trio.testing.MockClock) -> None:
    here, there = socket_pair()
    async with opening(await looked_at(tls_transport(server)), here) as (one, outcomes, ended):
        await there.send_all(b"\x16\x03\x01\x00\x05\x02\x00\x00\x01\x00")
        assert (await there.receive_some())[:1] == b"\x15", "an alert"
        assert not outcomes
        one.evict()
        await ended.wait()
        assert outcomes == [DisconnectCause.GAVE_WAY]
        assert trio.current_time() < 0.5
        one.evict()
        assert len(outcomes) == 1


async def test_a_client_that_does_not_read_is_not_read_either(authority: Authority, server: Pair) -> None:
    """Our part leaves piece by piece; what comes meanwhile waits in the kernel."""
    here, there = socket_pair()
    async with opening(await looked_at(tls_transport(server)), here) as (one, outcomes, ended):
        filled = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                filled += here.socket.send(bytes(4096))
        session = client_stream(there, authority).session
        session.continue_handshake()
        await there.send_all(session.take_outgoing())
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert one._unsent
        await there.send_all(b"\x16\x03\x03\x00\x05")
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert not one._stream.session.unread
        assert not outcomes
        while filled:
            filled -= len(await there.receive_some(filled))
        session.continue_handshake(await there.receive_some(65536))
        await there.aclose()
        await ended.wait()
        assert not one._unsent


ENDS = {"an alert": b"\x15\x03\x03\x00\x02\x02\x28", "half a record": b"\x16\x03\x01\x02"}


@pytest.mark.parametrize("data", ENDS.values(), ids=ENDS)
async def test_an_end_in_the_middle(authority: Authority, server: Pair, data: bytes) -> None:
    async def client(stream: Stream) -> None:
        session = client_stream(stream, authority).session
        session.continue_handshake()
        await stream.send_all(session.take_outgoing())
        await stream.receive_some()
        await stream.send_all(data)
        await stream.send_eof()

    assert await refused(tls_transport(server), client) in {
        "sslv3 alert handshake failure",
        "unexpected eof while reading",
    }
